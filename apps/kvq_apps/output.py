"""What reaches the terminal: data on stdout, everything else on stderr. Knows no model.

Escape codes appear on a terminal only, and not under `NO_COLOR` or `TERM=dumb`.
"""

import json
import logging
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from time import monotonic
from typing import TYPE_CHECKING, Any, Self, TextIO

from kvq.errors import KvqError
from kvq.formats import format_bytes
from kvq.json_values import is_object
from kvq.settings import terminal_is_plain

if TYPE_CHECKING:
    from kvq_runtime.engine import Engine

logger = logging.getLogger(__name__)

_DIM, _NORMAL = "\x1b[2m", "\x1b[22m"
BARS = "▁▂▃▄▅▆▇█"
# Of first choices: what weights of 8 bits must keep beyond a bundle's own to be advised.
MUCH = 0.05


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    print(json.dumps(value, ensure_ascii=False, indent=2), flush=True)


def print_json_line(value: Any) -> None:
    """One object of a stream of them, on one line."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


# A model's text may hold any control character; on a terminal all but these could move the cursor,
# change colours or worse, so they are shown as U+FFFD. Pipes and files get the text as it is.
_HARMLESS_CONTROLS = "\n\t"
_CONTROLS = {
    code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in _HARMLESS_CONTROLS
}


def print_data(text: str, end: str = "\n") -> None:
    """Data for the user or the next program, on stdout at once."""
    sys.stdout.write(_shown(text, sys.stdout) + end)
    sys.stdout.flush()


def _shown(text: str, stream: TextIO) -> str:
    return text.translate(_CONTROLS) if stream.isatty() else text


def print_note(text: str) -> None:
    """A remark for the person at the terminal, on stderr."""
    print(_shown(text, sys.stderr), file=sys.stderr, flush=True)


def print_aside(text: str) -> None:
    """What is beside the answer and streams as it does, on stderr at once; dim on a terminal."""
    dim = sys.stderr.isatty() and not terminal_is_plain()
    shown = _shown(text, sys.stderr)
    sys.stderr.write(f"{_DIM}{shown}{_NORMAL}" if dim else shown)
    sys.stderr.flush()


def print_note_below(text: str) -> None:
    """A remark below what went to stdout: a pipe may not have shown the end of that line yet."""
    apart = sys.stderr.isatty() and not sys.stdout.isatty()
    print_note(f"\n{text}" if apart else text)


def print_table(rows: Iterable[Sequence[Any]], header: Sequence[str] = ()) -> None:
    """Left-aligned columns on stdout, as wide as their longest cell."""
    cells = [[str(cell) for cell in row] for row in ([header] if header else []) + list(rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(padded).rstrip())
    sys.stdout.flush()


def line(value: Any) -> str:
    """One line of a stranger's text: nothing in it moves a terminal's cursor."""
    words = " ".join(str(value).split())
    return "".join(one if one.isprintable() else "\ufffd" for one in words)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Rows of a nested mapping: `{"a": {"b": 1}}` -> `("a.b", 1)`; sizes in bytes made readable."""
    for key, value in values.items():
        if is_object(value):
            yield from flat(value, f"{prefix}{key}.")
        elif key.endswith("_bytes") and isinstance(value, int):
            yield prefix + key.removesuffix("_bytes"), format_bytes(value)
        elif isinstance(value, float):
            yield prefix + key, f"{value:.6g}"
        else:
            yield prefix + key, value


def kv_text(k_bits: int, v_bits: int) -> str:
    """Widths as `--kv` writes them: `4:2`, or `fp`."""
    return "fp" if k_bits == v_bits == 16 else f"{k_bits}:{v_bits}"


def share_text(share: float) -> str:
    """A share that is there: `72 %`, and `less than 1 %` rather than 0."""
    return f"{share * 100:.0f} %" if share >= 0.005 else "less than 1 %"


def holding_text(budget_tokens: int, context_tokens: int, kv: str) -> str:
    """What of a context a budget holds: `2100 of 8192 tokens at 4:2 before it gives up ...`."""
    if budget_tokens >= context_tokens:
        return f"{context_tokens} tokens at {kv}"
    return f"{budget_tokens} of {context_tokens} tokens at {kv} before it gives up bits or tokens"


def verdict_rows(report: Mapping[str, Any], source: str | None = None) -> list[tuple[str, str]]:
    """The quality report in words: what weights and cache each keep of the likeliest tokens.

    What the products lose by activations of 8 bits counts with the weights. Where weights of 8 bits
    would keep much more, a second row says so and how to have them: by an export of `source`, or of
    what a bundle says that it came from, which of a folder is its last name only.
    """
    quality: Mapping[str, Any] = report["quality"] or {}
    found = quality.get("weights_and_kv")
    if found is None:
        return []
    weights, cache = quality["weights"]["top1_agreement"], quality["kv"]["top1_agreement"]
    wide = quality.get("at_8_bits", {}).get("top1_agreement")
    beside = "" if wide is None else f" (at 8 bits {wide:.0%})"
    rows = [
        (
            "verdict",
            f"weights and 8-bit activations keep {weights:.0%}{beside} of the checkpoint's first "
            f"choices, a cache at {found['kv']} {cache:.0%} of theirs",
        )
    ]
    if "tuning" in quality:
        rows.append(("tuning", _tuning_text(quality["tuning"])))
    if wide is not None and wide - weights >= MUCH:
        named = source or str(report["source"].get("model", "CHECKPOINT"))
        words = ("kvq", "export", named, "-o", report["path"], "--wbits", "8", "--force")
        rows.append(
            (
                "advice",
                "these weights lose much, as small models do at few bits; at 8 bits this model "
                f"keeps {wide:.0%} of first choices: {shlex.join(words)}",
            )
        )
    return rows


def experts_json(engine: "Engine") -> dict[str, Any] | None:
    """What of a model's experts is in memory, and how often that was enough; None: not bounded."""
    found = engine.resident()
    if found is None:
        return None
    return {
        "budget_bytes": found.budget_bytes,
        "held_bytes": found.held_bytes,
        "hit_share": found.hit_share,
    }


def experts_text(found: Mapping[str, Any] | None) -> str:
    """The same, to stand behind other numbers."""
    if found is None:
        return ""
    return (
        f"; experts: {format_bytes(found['held_bytes'])} of "
        f"{format_bytes(found['budget_bytes'])} in memory, {found['hit_share']:.0%} of those "
        "chosen were there"
    )


def _tuning_text(found: Mapping[str, Any]) -> str:
    """What came of training the constants of the weights."""
    change = found["after"] / found["before"] - 1
    became = "kept" if found["kept"] else "too little, so the weights stay as they were rounded"
    return (
        f"from {found['before']:.4f} to {found['after']:.4f} nats a token ({change:+.0%}) on "
        f"{found['judged_tokens']} tokens that were not trained on: {became}"
    )


def weight_rows(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Table rows for the weights a manifest's JSON names: of the graph, of the GGUF file."""
    rows: list[tuple[str, str]] = []
    weights, gguf = manifest["weights"], manifest["gguf"]
    if weights is not None:
        kinds = ", ".join(
            f"{len(names)} matrices {spelled}" for spelled, names in weights["formats"].items()
        )
        rows.append(("weights", f"{format_bytes(weights['bytes'])}: {kinds}"))
        rows += _bits_by_layer(weights["formats"])
    if gguf is not None:
        num_bytes = manifest["files"]["model.gguf"]["bytes"]
        text = f"{format_bytes(num_bytes)}: {gguf['type']}, architecture {gguf['architecture']}"
        rows.append(("GGUF", f"{text}, {gguf['context_length']} tokens of context"))
    return rows


def _bits_by_layer(formats: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    """A bar for the mean bits of each layer's matrices, where they are not all the same."""
    from kvq.reference_linear import WIDTHS, BlockFormat

    layers: dict[int, list[int]] = {}
    ends: dict[str, int] = {}
    for spelled, names in formats.items():
        bits = BlockFormat.parse(spelled).bits
        for name in names:
            first, _, rest = name.partition(".")
            if first == "layers":
                layers.setdefault(int(rest.partition(".")[0]), []).append(bits)
            else:
                ends[name] = bits
    if len({bits for found in layers.values() for bits in found}) < 2:
        return []
    low, high = min(WIDTHS), max(WIDTHS)
    bars = "".join(
        BARS[round((fmean(layers[layer]) - low) / (high - low) * (len(BARS) - 1))]
        for layer in sorted(layers)
    )
    others = ", ".join(f"{name} {bits}" for name, bits in ends.items())
    return [("bits by layer", f"{bars}  from {BARS[0]} {low} to {BARS[-1]} {high}; {others}")]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The word of `known` that `word` begins or is near to, as a question, or nothing."""
    from difflib import get_close_matches

    words = list(known)
    begun = [one for one in words if word and one.startswith(word)]
    found = begun or get_close_matches(word, words, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def error_code(error: BaseException) -> str:
    """Short lasting name of an error's class: `BudgetError` -> `budget`."""
    return type(error).__name__.removesuffix("Error").lower()


def print_error(error: BaseException, text: str, *, as_json: bool) -> None:
    """`error: TEXT` in one line on stderr, and the same as an object on stdout for `--json`."""
    message = " ".join(text.split()) or type(error).__name__
    if not isinstance(error, KvqError):
        message = f"internal error: {type(error).__name__}: {message} (--debug shows where)"
    print_note(f"error: {message}")
    if as_json:
        code = error_code(error) if isinstance(error, KvqError) else "internal"
        print_json({"error": {"code": code, "message": message}})


# What a long task tells how far it is: done, total, a label.
Shown = Callable[[float, float, str], None]


class Progress:
    """Shows how far a long task is: a bar on a terminal, otherwise a line every tenth.

    The bar is gone when the block it is opened for ends.

    Call it with (done, total, label); the amounts may be anything that grows.
    """

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._drawn = not quiet and _is_terminal(self._stream)
        self._quiet = quiet
        self._label = ""
        self._tenth: int = -1
        self._last = 0.0

    def __call__(self, done: float, total: float, label: str = "") -> None:
        share = min(1.0, done / total) if total > 0 else 1.0
        if self._drawn:
            self._draw(share, label)
        elif not self._quiet:
            self._log(share, label)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Takes the bar off the terminal."""
        if self._drawn and self._label:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._label = ""

    def _draw(self, share: float, label: str) -> None:
        now = monotonic()
        if share < 1 and label == self._label and now - self._last < 0.05:
            return
        self._last = now
        self._label = label or " "
        filled = round(share * 24)
        bar = "#" * filled + "-" * (24 - filled)
        self._stream.write(f"\r\x1b[K[{bar}] {share:4.0%} {label}")
        self._stream.flush()

    def _log(self, share: float, label: str) -> None:
        tenth = int(share * 10)
        # Less than before: another task has begun. Of one without amounts there is a line.
        if tenth != self._tenth or (share >= 1 and label != self._label):
            self._tenth, self._label = tenth, label
            print(f"{tenth * 10:3d} % {label}".rstrip(), file=self._stream, flush=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Teller:
    """Whom a task that takes long tells what it does; `asks`: a person may be there to answer."""

    note: Callable[[str], None]
    progress: Callable[[], Progress]
    asks: bool


# A command's.
TERMINAL = Teller(note=print_note, progress=Progress, asks=True)
# That of a program which imports kvq: nothing is printed.
LOG = Teller(note=logger.info, progress=partial(Progress, quiet=True), asks=False)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and not terminal_is_plain()
