"""How byte-level tokenizers cut a text before they merge, and what llama.cpp calls that.

llama.cpp knows ways of cutting by name only, so each row pairs a name with the stages that a
tokenizer.json of this kind has. Knows no vocabulary.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq.errors import UnsupportedModelError, argument

Stages = tuple[str, ...]

# Stages without a pattern of their own.
WORDS = "byte level, words"
BYTES = "byte level"
DIGITS = "single digits"

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str, start: str = rf"{_START}\p{{L}}+", marks: str = "") -> str:
    other = rf" ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*"
    return f"{_CONTRACTION}|{start}|{digits}|{other}{_SPACES}"


def _cased(after: str, digits: str) -> str:
    return (
        f"{_START}{_UPPER}*{_LOWER}+{after}|{_START}{_UPPER}+{_LOWER}*{after}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"
    )


@dataclass(frozen=True, slots=True)
class Row:
    """Pairs llama.cpp's name of a cut with its stages.

    `whole_words`: a word that is a token is taken without merging. `approximate`: llama.cpp takes a
    letter beyond ASCII for one of either case, and a mark for none, so some words with such letters
    are cut elsewhere. `composed`: tokenizers with this cut compose a text first (NFC), which
    llama.cpp does not. `starts`: a file that does not say whether a text begins with a token means
    that it does.
    """

    name: str
    stages: Stages
    whole_words: bool = False
    approximate: bool = False
    composed: bool = False
    starts: bool = False


ROWS = (
    Row("gpt-2", (WORDS,)),
    Row("smollm", (DIGITS, WORDS)),
    Row("qwen2", (_words(r"\p{N}"), BYTES), composed=True),
    Row("qwen35", (_words(r"\p{N}", rf"{_START}[\p{{L}}\p{{M}}]+", r"\p{M}"), BYTES)),
    Row("llama-bpe", (_words(r"\p{N}{1,3}"), BYTES), whole_words=True, starts=True),
    Row("smaug-bpe", (_words(r"\p{N}{1,3}"), BYTES)),
    Row("gpt-4o", (_cased(f"{_CONTRACTION}?", r"\p{N}{1,3}"), BYTES), approximate=True),
    Row("tekken", (_cased("", r"\p{N}"), BYTES), whole_words=True, approximate=True, starts=True),
    Row(
        "deepseek-coder",
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGITS, BYTES),
    ),
    Row(
        "deepseek-v3",
        (
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
            r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES,
            BYTES,
        ),
    ),
)
# Other names that llama.cpp has for the same cut.
_SAME_AS: Mapping[str, str] = {
    "codeshell": "smollm", "command-r": "smollm", "dbrx": "smaug-bpe", "deepseek-r1-qwen": "qwen2",
    "falcon3": "llama-bpe", "lfm2": "llama-bpe", "llama-v3": "llama-bpe", "llama3": "llama-bpe",
    "llama4": "gpt-4o",
    "megrez": "qwen2", "mellum": "gpt-2", "olmo": "gpt-2", "phi-2": "gpt-2", "pixtral": "llama-bpe",
    "refact": "smollm", "stablelm2": "qwen2", "starcoder": "smollm",
}  # fmt: skip


def row_called(name: str, path: Path) -> Row:
    """Returns the cut that a file names. Raises `UnsupportedModelError` listing the known ones."""
    rows = {row.name: row for row in ROWS}
    row = rows.get(_SAME_AS.get(name, name))
    if row is None:
        raise UnsupportedModelError(
            f"{path}: how its tokenizer cuts a text, {name!r}, is not known; known: "
            f"{', '.join(sorted({*rows, *_SAME_AS}))}"
        )
    return row


def pre_tokenizer(row: Row) -> dict[str, Any]:
    """Returns the cut as tokenizer.json writes it."""
    return {"type": "Sequence", "pretokenizers": [_written(stage) for stage in row.stages]}


def byte_level(*, use_regex: bool) -> dict[str, Any]:
    """Returns the stage that turns bytes into characters, or those back into bytes."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _written(stage: str) -> dict[str, Any]:
    if stage == DIGITS:
        return {"type": "Digits", "individual_digits": True}
    if stage in (WORDS, BYTES):
        return byte_level(use_regex=stage == WORDS)
    pattern = {"Regex": stage}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def pre_tokenizer_name(definition: Mapping[str, Any]) -> str:
    """Returns llama.cpp's name for a tokenizer.json's cut. Raises `UnsupportedModelError`."""
    stages = tuple(_stages(definition.get("pre_tokenizer")))
    whole_words = bool(definition["model"].get("ignore_merges"))
    for row in ROWS:
        if (row.stages, row.whole_words) == (stages, whole_words):
            return row.name
    raise UnsupportedModelError(
        "llama.cpp has no name for how this tokenizer cuts a text; export it with "
        f"{argument('format', 'onnx')}"
    )


def _stages(stage: Mapping[str, Any] | None) -> Iterator[str]:
    if stage is None:
        return
    match stage["type"]:
        case "Sequence":
            for part in stage["pretokenizers"]:
                yield from _stages(part)
        case "Split":
            pattern = stage["pattern"]
            yield pattern.get("Regex") or pattern.get("String") or ""
        case "Digits" if stage.get("individual_digits"):
            yield DIGITS
        case "ByteLevel" if not stage.get("add_prefix_space"):
            yield WORDS if stage.get("use_regex", True) else BYTES
        case other:
            yield f"another {other}"
