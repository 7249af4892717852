"""Where the n-grams of a person's own files lie, one file for each tokenizer. Knows no flag."""

import hashlib
from pathlib import Path

from kvq.settings import cache_folder
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.alternatives import Writer
from kvq_specdraft import writer_named

# Every so many tokens' bytes tell one vocabulary from another.
_STRIDE = 97


def ngram_file(tokenizer: Tokenizer) -> Path:
    """The file for texts of `tokenizer`'s ids, whether or not it is there."""
    return cache_folder() / "ngrams" / f"{identity(tokenizer)[:16]}.ngrams"


def writer_for(name: str, tokenizer: Tokenizer) -> Writer:
    """The method `NAME` or `NAME:option=value,...` of several drafts. Raises `UsageError`.

    Superposed Decoding chooses by the n-grams of `kvq ngrams build` where they are there.
    """
    kind, _, given = name.partition(":")
    file = ngram_file(tokenizer)
    if kind in ("superposed", "spliced") and "ngrams=" not in given and file.exists():
        return writer_named(f"{kind}:{','.join(filter(None, (given, f'ngrams={file}')))}")
    return writer_named(name)


def identity(tokenizer: Tokenizer) -> str:
    """SHA-256 in hex, equal for tokenizers whose ids mean the same."""
    size = tokenizer.vocab_size
    digest = hashlib.sha256(str(size).encode())
    for token in range(0, size, _STRIDE):
        digest.update(tokenizer.token_bytes(token) + b"\n")
    return digest.hexdigest()
