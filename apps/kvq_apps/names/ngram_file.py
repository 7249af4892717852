"""Finds the n-grams of a user's own files, one file for each tokenizer."""

import hashlib
from pathlib import Path

from kvq.settings import cache_folder
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.answer.alternatives import Writer
from kvq_specdraft import writer_named

# The bytes of every so-many-th token tell vocabularies apart.
_STRIDE = 97


def ngram_file(tokenizer: Tokenizer) -> Path:
    """Returns the path of the n-grams for `tokenizer`, which need not exist."""
    return cache_folder() / "ngrams" / f"{identity(tokenizer)[:16]}.ngrams"


def writer_for(name: str, tokenizer: Tokenizer) -> Writer:
    """Returns the method of several drafts called `NAME` or `NAME:option=value,...`.

    Superposed Decoding uses the n-grams of `kvq ngrams build` if they exist. Raises `UsageError`.
    """
    kind, _, options = name.partition(":")
    file = ngram_file(tokenizer)
    if kind == "superposed" and "ngrams=" not in options and file.exists():
        return writer_named(f"{kind}:{','.join(filter(None, (options, f'ngrams={file}')))}")
    return writer_named(name)


def identity(tokenizer: Tokenizer) -> str:
    """Returns a SHA-256 in hex that is equal for tokenizers whose ids mean the same."""
    size = tokenizer.vocab_size
    digest = hashlib.sha256(str(size).encode())
    for token in range(0, size, _STRIDE):
        digest.update(tokenizer.token_bytes(token) + b"\n")
    return digest.hexdigest()
