"""The tokens of a model that steer it: what begins and ends a text, fill-in-the-middle.

Owns the record a bundle keeps of them and the search for them in a checkpoint's files. Knows no
encoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import tokenizers

from kvq.errors import ModelError
from kvq_models.config import ModelConfig
from kvq_models.family import Family, FimNames

# A row of tokenizer_config.json, and what it says of a model that is asked suffix first.
FIM_ORDER, SUFFIX_FIRST = "fim_order", "suffix-first"


@dataclass(frozen=True, kw_only=True, slots=True)
class FimTokens:
    """Ids of one fill-in-the-middle convention; the last three are not in every tokenizer.

    `suffix_first`: the model is asked with the suffix before the prefix, as its checkpoint says.
    """

    prefix: int
    suffix: int
    middle: int
    pad: int | None = None
    repo: int | None = None
    file: int | None = None
    suffix_first: bool = False

    def ids(self) -> tuple[int, ...]:
        """Every id there is."""
        return tuple(self.named().values())

    def named(self) -> dict[str, int]:
        """Every id there is, by its name."""
        return {
            name: token
            for name, token in asdict(self).items()
            if name != "suffix_first" and token is not None
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlTokens:
    """What a bundle records: what begins a text, what ends one, fill-in-the-middle."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    fim: FimTokens | None = None

    def ids(self) -> frozenset[int]:
        """Every id recorded here."""
        fim = () if self.fim is None else self.fim.ids()
        found = (self.bos, *self.eos, *self.start, *fim)
        return frozenset(token for token in found if token is not None)

    def to_json(self) -> dict[str, Any]:
        """A plain dict for a manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ControlTokens:
        """Rebuild from `to_json`'s dict. Raises ModelError when it is something else."""
        try:
            fim = data.get("fim")
            found = cls(
                bos=data.get("bos"),
                eos=tuple(data.get("eos", ())),
                start=tuple(data.get("start", ())),
                fim=None if fim is None else FimTokens(**fim),
            )
            if any(type(token) is not int for token in found.ids()):
                raise TypeError("ids are whole numbers")
            return found
        except (AttributeError, TypeError) as error:
            raise ModelError(f"these are not control tokens: {error}") from error


def find_control(
    library: tokenizers.Tokenizer,
    settings: Mapping[str, Any],
    family: Family,
    config: ModelConfig,
) -> ControlTokens:
    """The control tokens a checkpoint's files and its family name, if the tokenizer has them."""
    bos = _named(library, settings.get("bos_token"))
    bos = config.bos_token_id if bos is None else bos
    ends = [_named(library, settings.get("eos_token"))]
    ends += [_named(library, name) for name in family.turn_ends]
    eos = [*config.eos_token_ids, *(token for token in ends if token is not None)]
    return ControlTokens(
        bos=bos,
        eos=tuple(dict.fromkeys(eos)),
        start=_start_tokens(library, settings, bos),
        fim=_find_fim(library, family.fim_tokens, settings.get(FIM_ORDER) == SUFFIX_FIRST),
    )


def _named(library: tokenizers.Tokenizer, token: object) -> int | None:
    """The id of a token as tokenizer_config.json names it: its content, or a dict holding it."""
    content = cast(dict[str, Any], token).get("content") if isinstance(token, dict) else token
    return library.token_to_id(content) if isinstance(content, str) else None


def _start_tokens(
    library: tokenizers.Tokenizer, settings: Mapping[str, Any], bos: int | None
) -> tuple[int, ...]:
    """What the tokenizer puts before every text; add_bos_token, where set, decides about bos."""
    plain: list[int] = library.encode("a", add_special_tokens=False).ids
    whole: list[int] = library.encode("a", add_special_tokens=True).ids
    places = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    before = whole[: next(places, 0)]
    wanted = settings.get("add_bos_token")
    if wanted is None or bos is None:
        return tuple(before)
    without = [token for token in before if token != bos]
    return (bos, *without) if wanted else tuple(without)


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
