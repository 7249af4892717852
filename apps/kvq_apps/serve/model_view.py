"""The facts about the served model that are needed to read a request."""

from dataclasses import dataclass

from kvq_apps.completion.prompts import GapPrompts
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.config import Sampling
from kvq_runtime.text_embedding import TextEmbedding


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelView:
    """Describes the served model to what reads a request.

    With `strict` a request for a model that is not in `names` is refused. `exact`: what follows a
    change in a prompt is read again, unless the request says otherwise. `owner` is the request's,
    whose sessions it may find again. `embedding` says how it makes vectors of texts, of
    `state_width` numbers.
    """

    name: str
    names: frozenset[str]
    owner: str
    strict: bool
    exact: bool
    tokenizer: Tokenizer
    gaps: GapPrompts
    vocab_size: int
    context_tokens: int
    sampling: Sampling
    embedding: TextEmbedding | None = None
    state_width: int = 0
