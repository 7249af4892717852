"""The checkpoint that a bundle was made of, as what a bundle's answers are compared with."""

from collections.abc import Iterator, Sequence

import numpy as np

from kvq.errors import UsageError
from kvq_apps.evaluation.measurement import Floats
from kvq_apps.evaluation.text import SCORE_CHUNK_TOKENS
from kvq_export.config import ExportOptions
from kvq_export.export import open_model
from kvq_export.fit.quality import Original
from kvq_export.read.source import open_source


def open_original(checkpoint: str, vocab_size: int) -> Original:
    """Opens a checkpoint whose answers can be compared with those of a model.

    Args:
        checkpoint: A folder, a GGUF file or a hub id.
        vocab_size: Tokens of the other model's vocabulary.

    Raises:
        ModelError: The checkpoint cannot be read.
        UsageError: Its vocabulary has another size.
    """
    original = open_model(open_source(checkpoint), ExportOptions(tokenizer=False)).original
    if original.config.vocab_size != vocab_size:
        raise UsageError(
            about="checkpoint",
            value=checkpoint,
            possible=f"it has {original.config.vocab_size} tokens and the bundle {vocab_size}; "
            "give the checkpoint that the bundle was made of",
        )
    return original


class CheckpointSession:
    """Answers as a session does that only reads, in float32, with weights streamed from disk."""

    def __init__(self, original: Original) -> None:
        self._original = original
        self._ids: list[int] = []

    def __enter__(self) -> "CheckpointSession":
        return self

    def __exit__(self, *_: object) -> None:
        """Frees nothing: the next window has another session."""

    def prefill(self, ids: Sequence[int]) -> None:
        """Takes `ids`, whose logits nobody asks for."""
        self._ids += ids

    def logits(self, ids: Sequence[int]) -> Iterator[Floats]:
        """Yields the logits of `ids`, as many rows at a time as a session that is scored."""
        first = len(self._ids)
        self._ids += ids
        rows = self._original.logits(np.array(self._ids), rows=slice(first, None))
        for start in range(0, len(rows), SCORE_CHUNK_TOKENS):
            yield rows[start : start + SCORE_CHUNK_TOKENS]
