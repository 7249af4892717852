"""The control tokens of a model: what begins and ends a text, and fill-in-the-middle.

It has the record that a bundle keeps of them, and finds them in a checkpoint's files. It encodes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import tokenizers

from kvq.errors import ModelError, reason_of
from kvq_models.config import ModelConfig

if TYPE_CHECKING:
    from kvq_models.family import Family, FimNames

# A key of tokenizer_config.json, and its value for a model whose prompts begin with the suffix.
FIM_ORDER, SUFFIX_FIRST = "fim_order", "suffix-first"


@dataclass(frozen=True, kw_only=True, slots=True)
class FimTokens:
    """Holds the ids of one fill-in-the-middle convention; not every tokenizer has the last three.

    `suffix_first` tells that the suffix stands before the prefix in the model's prompts.
    """

    prefix: int
    suffix: int
    middle: int
    pad: int | None = None
    repo: int | None = None
    file: int | None = None
    suffix_first: bool = False

    def ids(self) -> tuple[int, ...]:
        """Returns all ids."""
        return tuple(self.named().values())

    def named(self) -> dict[str, int]:
        """Returns all ids by their names."""
        return {
            name: token
            for name, token in asdict(self).items()
            if name != "suffix_first" and token is not None
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlTokens:
    """Holds what a bundle records: tokens that begin or end a text, and fill-in-the-middle.

    `eos` ends what a model writes. `start` stands before a text that it reads, `end` behind one
    that it reads as a whole, to make a vector of it.
    """

    bos: int | None = None
    eos: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    fim: FimTokens | None = None
    end: tuple[int, ...] = ()

    def ids(self) -> frozenset[int]:
        """Returns all ids in the record."""
        fim = () if self.fim is None else self.fim.ids()
        tokens = (self.bos, *self.eos, *self.start, *self.end, *fim)
        return frozenset(token for token in tokens if token is not None)

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dict for a manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ControlTokens:
        """Returns the tokens of a dict that `to_json` made. Raises ModelError for anything else."""
        try:
            fim = data.get("fim")
            control = cls(
                bos=data.get("bos"),
                eos=tuple(data.get("eos", ())),
                start=tuple(data.get("start", ())),
                fim=None if fim is None else FimTokens(**fim),
                end=tuple(data.get("end", ())),
            )
            if any(type(token) is not int for token in control.ids()):
                raise TypeError("ids are whole numbers")
            return control
        except (AttributeError, TypeError) as error:
            raise ModelError(f"these are not control tokens: {reason_of(error)}") from error


def find_control(
    library: tokenizers.Tokenizer,
    settings: Mapping[str, Any],
    family: Family,
    config: ModelConfig,
) -> ControlTokens:
    """Returns the control tokens that a checkpoint's files and its family name."""
    bos = _named(library, settings.get("bos_token"))
    bos = config.bos_token_id if bos is None else bos
    text_end = _named(library, settings.get("eos_token"))
    ends = [text_end, *(_named(library, name) for name in family.turn_ends)]
    eos = [*config.eos_token_ids, *(token for token in ends if token is not None)]
    start, end = _tokens_around(library)
    if (add_bos := settings.get("add_bos_token")) is not None and bos is not None:
        start = (*[bos][: bool(add_bos)], *(token for token in start if token != bos))
    if settings.get("add_eos_token") and text_end is not None and text_end not in end:
        end = (*end, text_end)
    return ControlTokens(
        bos=bos,
        eos=tuple(dict.fromkeys(eos)),
        # A tokenizer may begin texts with a token that its model has no row for.
        start=tuple(token for token in start if token < config.vocab_size),
        end=tuple(token for token in end if token < config.vocab_size),
        fim=_find_fim(library, family.fim_tokens, settings.get(FIM_ORDER) == SUFFIX_FIRST),
    )


def _named(library: tokenizers.Tokenizer, token: object) -> int | None:
    """Returns the id of a token that tokenizer_config.json gives as its content, or in a dict."""
    content = cast(dict[str, Any], token).get("content") if isinstance(token, dict) else token
    return library.token_to_id(content) if isinstance(content, str) else None


def _tokens_around(library: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the tokens that a tokenizer.json puts before and behind every text."""
    plain: list[int] = library.encode("a", add_special_tokens=False).ids
    whole: list[int] = library.encode("a", add_special_tokens=True).ids
    places = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    first = next(places, None)
    return ((), ()) if first is None else (tuple(whole[:first]), tuple(whole[first + len(plain) :]))


def _find_fim(
    library: tokenizers.Tokenizer, conventions: Iterable[FimNames], suffix_first: bool
) -> FimTokens | None:
    for names in conventions:
        ids = {
            role: library.token_to_id(name)
            for role, name in asdict(names).items()
            if name is not None
        }
        if None not in (ids["prefix"], ids["suffix"], ids["middle"]):
            return FimTokens(**ids, suffix_first=suffix_first)  # type: ignore[arg-type]
    return None
