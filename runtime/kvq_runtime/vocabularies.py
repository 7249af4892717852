"""Whether two models' token ids stand for the same texts. Knows tokenizers, no weights."""

from typing import Any

from kvq.errors import BackendError
from kvq_runtime.backends import Backend


def check_vocabularies(asked: str, own: Backend[Any], other: Backend[Any]) -> None:
    """Raises `BackendError` unless what `asked` names, `own`, has the token ids of `other`."""
    names = own.model.name, other.model.name
    pieces = _pieces(own), _pieces(other)
    if not pieces[0] or not pieces[1]:
        nameless = names[0] if not pieces[0] else names[1]
        raise BackendError(
            f"{asked}: {nameless} has no tokenizer, so nothing says that its tokens are those of "
            "the other model"
        )
    if pieces[0] != pieces[1]:
        token = next(
            (i for i, pair in enumerate(zip(*pieces, strict=False)) if pair[0] != pair[1]),
            min(map(len, pieces)),
        )
        raise BackendError(
            f"{asked}: {names[0]} has another vocabulary than {names[1]} (they differ at token "
            f"{token}); name a model of the same family"
        )


def _pieces(backend: Backend[Any]) -> tuple[bytes, ...]:
    """What each token id stands for; nothing for a model without a tokenizer."""
    tokenizer = backend.tokenizer()
    if tokenizer is None:
        return ()
    return tuple(tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size))
