"""Where the n-grams of a person's own files lie, one file for each tokenizer. Knows no flag."""

import hashlib
from pathlib import Path

from kvq.settings import cache_folder
from kvq_models.tokenizer import Tokenizer

# Every so many tokens' bytes tell one vocabulary from another.
_STRIDE = 97


def ngram_file(tokenizer: Tokenizer) -> Path:
    """The file for texts of `tokenizer`'s ids, whether or not it is there."""
    return cache_folder() / "ngrams" / f"{identity(tokenizer)[:16]}.ngrams"


def identity(tokenizer: Tokenizer) -> str:
    """SHA-256 in hex, equal for tokenizers whose ids mean the same."""
    size = tokenizer.vocab_size
    digest = hashlib.sha256(str(size).encode())
    for token in range(0, size, _STRIDE):
        digest.update(tokenizer.token_bytes(token) + b"\n")
    return digest.hexdigest()
