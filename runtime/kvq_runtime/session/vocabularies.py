"""Checks that two models' token ids stand for the same texts."""

from typing import Any

from kvq.errors import BackendError
from kvq_runtime.backends import Backend


def check_vocabularies(option: str, backend: Backend[Any], other: Backend[Any]) -> None:
    """Raises `BackendError` unless `backend` has the token ids of `other`.

    `option` is the argument that names `backend`.
    """
    names = backend.model.name, other.model.name
    pieces = _pieces(backend), _pieces(other)
    if not pieces[0] or not pieces[1]:
        nameless = names[0] if not pieces[0] else names[1]
        raise BackendError(
            f"{option}: {nameless} has no tokenizer, so nothing says that its tokens are those of "
            "the other model"
        )
    if pieces[0] != pieces[1]:
        token = next(
            (i for i, pair in enumerate(zip(*pieces, strict=False)) if pair[0] != pair[1]),
            min(map(len, pieces)),
        )
        raise BackendError(
            f"{option}: {names[0]} has another vocabulary than {names[1]} (they differ at token "
            f"{token}); name a model of the same family"
        )


def _pieces(backend: Backend[Any]) -> tuple[bytes, ...]:
    """Returns the bytes of each token id; nothing for a model without a tokenizer."""
    tokenizer = backend.tokenizer()
    if tokenizer is None:
        return ()
    return tuple(tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size))
