"""How a model makes a vector of a text: from which tokens, of what length, after which prompt."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from kvq.errors import BackendError, UsageError, argument
from kvq_models.tokenizer import Tokenizer

Floats = NDArray[np.float32]
Pooling = Literal["last", "mean"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextEmbedding:
    """Holds what a bundle records of how its model makes vectors of texts.

    Attributes:
        pooling: `last` takes the hidden state of the last token, `mean` the mean over all tokens.
        normalized: Vectors have length 1.
        prompts: Texts that stand before a text of some kind, such as a `query`, by that kind.
        default_prompt: The kind of a text of which nothing is said. None: it has no prompt.
    """

    pooling: Pooling = "last"
    normalized: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default_prompt: str | None = None

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            raise UsageError(
                about="embed",
                value=str(self.pooling),
                possible=f"choose {' or '.join(get_args(Pooling))}",
            )

    def prompt(self, kind: str | None) -> str:
        """Returns what stands before a text of `kind`; None: of the default one.

        Raises `UsageError` for a kind that the model has no prompt for.
        """
        if kind is None:
            return "" if self.default_prompt is None else self.prompts.get(self.default_prompt, "")
        if kind not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise UsageError(
                about="prompt_name", value=kind, possible=f"this model's prompts are: {known}"
            )
        return self.prompts[kind]

    def vector(self, pooled: Floats, dimensions: int | None = None) -> Floats:
        """Returns the vector of a text from its pooled states, cut to its first `dimensions`.

        Raises `UsageError` for more dimensions than there are.
        """
        if dimensions is not None and not 1 <= dimensions <= len(pooled):
            raise UsageError(
                about="dimensions", value=dimensions, possible=f"give 1 to {len(pooled)}"
            )
        cut = pooled[:dimensions].astype(np.float64)
        length = np.linalg.norm(cut) if self.normalized else 1.0
        return (cut / (length or 1.0)).astype(np.float32)

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest's object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "TextEmbedding":
        """Reads the manifest's object; raises KeyError, TypeError or UsageError for another one."""
        default = data["default_prompt"]
        return cls(
            pooling=data["pooling"],
            normalized=bool(data["normalized"]),
            prompts={str(kind): str(text) for kind, text in dict(data["prompts"]).items()},
            default_prompt=None if default is None else str(default),
        )


def embedding_of(model: str, embedding: TextEmbedding | None) -> TextEmbedding:
    """Returns `embedding`; raises `BackendError` where `model` can make no vectors of texts."""
    if embedding is None:
        raise BackendError(
            f"{model} gives no vectors of texts: its files have no output for them; export the "
            f"checkpoint again with {argument('embed', 'mean')}, or a model that was made for "
            "embeddings, such as Qwen/Qwen3-Embedding-0.6B"
        )
    return embedding


def embedded_ids(tokenizer: Tokenizer, text: str, most: int) -> list[int]:
    """Returns the tokens of a whole text, with those that the model expects around it.

    Of a text of more than `most` tokens it returns more than `most`, perhaps not all. Raises
    `UsageError` for a text without any.
    """
    around = len(tokenizer.control.start) + len(tokenizer.control.end)
    ids = [*tokenizer.encode(text, start=True, most=most), *tokenizer.control.end]
    if len(ids) == around:
        raise UsageError("there is no text to make a vector of; give at least one character")
    return ids
