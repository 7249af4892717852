"""Writes to the terminal: data on stdout, everything else on stderr.

All output goes through `_write`, so that no foreign name or text moves the terminal's cursor or
reorders a line. Escape codes of kvq are written to a terminal only, and not under `NO_COLOR` or
`TERM=dumb`.
"""

import json
import logging
import re
import shlex
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Self, TextIO

from kvq.config import parse_kv
from kvq.errors import KvqError
from kvq.formats import format_bytes
from kvq.json_values import is_object
from kvq.settings import terminal_is_plain

if TYPE_CHECKING:
    from kvq_runtime.config import SessionConfig
    from kvq_runtime.engine import Engine

logger = logging.getLogger(__name__)

_DIM, _NORMAL = "\x1b[2m", "\x1b[22m"
# 8-bit weights are advised where those of a bundle keep a smaller share of first choices.
LEAST_AGREEMENT = 0.92


# Ranges of characters that must not reach a terminal: control characters other than newline and
# tab, characters that reorder text, break lines or are invisible, and halves of characters.
_RANGES = (
    "\0-\x08", "\x0b-\x1f", "\x7f-\x9f", "\xad-\xad", "\u061c-\u061c", "\u180e-\u180e",
    "\u200b-\u200b", "\u200e-\u200f", "\u2028-\u202e", "\u2060-\u206f", "\ufeff-\ufeff",
    "\ud800-\udfff", "\U000e0000-\U000e007f",
)  # fmt: skip
_UNSAFE = frozenset[int]().union(*(range(ord(first), ord(last) + 1) for first, _, last in _RANGES))
# Persian, Indic scripts and emoji need these joiners; names do not.
_JOINERS = "\u200c-\u200d"
_REPLACED_IN_DATA = dict.fromkeys(_UNSAFE, "\ufffd")
_REPLACED_IN_NOTES = _REPLACED_IN_DATA | dict.fromkeys(map(ord, _JOINERS[::2]), "\ufffd")
_ESCAPED = re.compile(f"[{_JOINERS}{''.join(_RANGES)}]")
_PICTURES = {code: 0x2400 + code for code in range(32) if code in _UNSAFE}
_VISIBLE = dict.fromkeys(_UNSAFE, 0xFFFD) | _PICTURES | {0x7F: 0x2421}


def _write(text: str, stream: TextIO, unsafe: Mapping[int, str] = _REPLACED_IN_NOTES) -> None:
    stream.write(_printable(text, stream, unsafe))
    stream.flush()


def _printable(text: str, stream: TextIO, unsafe: Mapping[int, str]) -> str:
    """Returns `text` with U+FFFD for `unsafe` characters if `stream` is a terminal."""
    return text.translate(unsafe) if stream.isatty() else text


def print_json(value: Any) -> None:
    """Prints one JSON object on stdout."""
    _write(f"{_json(value, indent=2)}\n", sys.stdout)


def print_json_line(value: Any) -> None:
    """Prints one object of a stream of objects on one line."""
    _write(f"{_json(value)}\n", sys.stdout)


def _json(value: Any, indent: int | None = None) -> str:
    """Returns `value` as JSON, with escapes for characters that must not reach a terminal."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    # Outside of strings there are only the newlines of `indent`, which are not unsafe.
    return _ESCAPED.sub(lambda match: json.dumps(match[0])[1:-1], text)


def print_data(text: str, end: str = "\n") -> None:
    """Prints data for the user or the next program on stdout at once."""
    _write(text + end, sys.stdout, _REPLACED_IN_DATA)


def print_note(text: str, end: str = "\n") -> None:
    """Prints a remark for the person at the terminal on stderr, in place of a progress bar."""
    ProgressBar.make_way()
    _write(text + end, sys.stderr)


def print_aside(text: str) -> None:
    """Prints streamed text that is not the answer on stderr at once, dim on a terminal."""
    shown = _printable(text, sys.stderr, _REPLACED_IN_DATA)
    sys.stderr.write(f"{_DIM}{shown}{_NORMAL}" if _is_terminal(sys.stderr) else shown)
    sys.stderr.flush()


def print_note_below(text: str) -> None:
    """Prints a remark below the output on stdout, whose last line a pipe may not have shown yet."""
    apart = sys.stderr.isatty() and not sys.stdout.isatty()
    print_note(f"\n{text}" if apart else text)


def print_table(rows: Iterable[Sequence[Any]], header: Sequence[str] = ()) -> None:
    """Prints left-aligned columns on stdout, each as wide as its longest cell."""
    cells = [[line(cell) for cell in row] for row in ([header] if header else []) + list(rows)]
    widths = [max(map(_columns, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = (
            cell + " " * (width - _columns(cell)) for cell, width in zip(row, widths, strict=True)
        )
        _write("  ".join(padded).rstrip() + "\n", sys.stdout)
    sys.stdout.flush()  # a measurement that is cut short has said what it knew


def line(value: Any) -> str:
    """Returns foreign text as one line in which nothing moves the terminal's cursor."""
    words = " ".join(str(value).split())
    return "".join(character if character.isprintable() else "\ufffd" for character in words)


def visible(text: str) -> str:
    """Replaces each character that must not reach a terminal by a picture (U+241B) or U+FFFD."""
    return text if text.isascii() and text.isprintable() else text.translate(_VISIBLE)


def storable(text: str) -> str:
    """Returns valid UTF-8 text: CRLF and CR become newlines, lone surrogates U+FFFD."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _columns(text: str) -> int:
    """Returns how many columns `text` takes: two for a wide letter, none for a combining mark."""
    if text.isascii():
        return len(text)
    return sum(
        2
        if unicodedata.east_asian_width(character) in "WF"
        else unicodedata.combining(character) == 0
        for character in text
    )


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields rows of a nested mapping: `{"a": {"b": 1}}` -> `("a.b", 1)`; sizes become readable.

    Values that are None or empty have no row. True and False become yes and no.
    """
    for key, value in values.items():
        if value is None or value == "":
            continue
        if is_object(value):
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, bool):
            yield prefix + key, "yes" if value else "no"
        elif key.endswith("_bytes") and isinstance(value, int):
            yield prefix + key.removesuffix("_bytes"), format_bytes(value)
        elif isinstance(value, float):
            yield prefix + key, f"{value:.6g}"
        else:
            yield prefix + key, value


def kv_text(k_bits: int, v_bits: int) -> str:
    """Returns widths as `--kv` writes them: `4:2`, or `fp`."""
    return "fp" if k_bits == v_bits == 16 else f"{k_bits}:{v_bits}"


def bits_text(kv: str) -> str:
    """Returns widths in words: `4 bits`, or `4 bits for keys and 2 for values`."""
    k_bits, v_bits = parse_kv(kv)
    return (
        f"{k_bits} bits" if k_bits == v_bits else f"{k_bits} bits for keys and {v_bits} for values"
    )


def cache_facts(config: "SessionConfig") -> dict[str, Any]:
    """Returns what the cache of a session holds, as fields of every report.

    `kv` and `full_kv` are widths as `--kv` writes them. Tokens begin at `kv`, and old ones go down
    to `full_kv` when the budget is full. `budget_tokens` and `full_tokens` are how many tokens of
    the `context` fit at each.
    """
    return {
        "kv": kv_text(config.plan.k_bits, config.plan.v_bits),
        "context": config.context_tokens,
        "budget_tokens": config.budget_tokens,
        "full_kv": kv_text(*config.full_bits),
        "full_tokens": config.full_tokens,
    }


def cache_sentence(report: Mapping[str, Any]) -> str:
    """Says how many tokens fit at which bits, now and with a full budget; follows "holds"."""
    context, kv, full_kv = report["context"], report["kv"], report["full_kv"]
    if report["budget_tokens"] >= context:
        return f"all {context:,} tokens of its context at {bits_text(kv)}"
    holds = f"{report['budget_tokens']:,} of {context:,} tokens at {bits_text(kv)}"
    fit = report["full_tokens"]
    if full_kv == kv or fit <= report["budget_tokens"]:
        return f"{holds}; when it is full, older ones are given up"
    last = "all fit" if fit >= context else f"{fit:,} fit; of longer texts some are given up"
    return f"{holds}; when it is full, older ones go down to {bits_text(full_kv)}, at which {last}"


def share_text(share: float) -> str:
    """Returns a share above 0 as a text: `72 %`, or `less than 1 %`."""
    return f"{share * 100:.0f} %" if share >= 0.005 else "less than 1 %"


def verdict_rows(report: Mapping[str, Any], source: str | None = None) -> list[tuple[str, str]]:
    """Returns the quality report in words: how many first choices weights and cache each keep.

    The loss of 8-bit activations counts with the weights. If narrower weights keep few, another row
    advises an export of `source` at 8 bits, or of the source that the bundle names, which for a
    folder is only its last part.
    """
    quality: Mapping[str, Any] = report["quality"] or {}
    together = quality.get("weights_and_kv")
    if together is None:
        return []
    weights, cache = quality["weights"]["top1_agreement"], quality["kv"]["top1_agreement"]
    rows = [
        (
            "verdict",
            f"weights and 8-bit activations keep {weights:.0%} of the checkpoint's first choices, "
            f"a cache at {together['kv']} {cache:.0%} of theirs",
        )
    ]
    if "tuning" in quality:
        rows.append(("tuning", _tuning_text(quality["tuning"])))
    is_narrow = any(not spelled.startswith("8/") for spelled in report["weights"]["formats"])
    if is_narrow and weights < LEAST_AGREEMENT:
        named = source or str(report["source"].get("model", "CHECKPOINT"))
        words = ("kvq", "export", named, "-o", report["path"], "--wbits", "8", "--force")
        rows.append(
            (
                "advice",
                "these weights lose much, as small models do at few bits; 8 bits keep more of the "
                f"first choices: {shlex.join(words)}",
            )
        )
    return rows


def quality_text(report: Mapping[str, Any]) -> str:
    """Says how good a bundle is: how often its first choice is the original model's."""
    quality: Mapping[str, Any] = report["quality"] or {}
    if "weights_and_kv" not in quality:
        return "what it loses was not measured"
    together = quality["weights_and_kv"]["top1_agreement"]
    weights = quality["weights"]["top1_agreement"]
    return (
        f"in {together:.0%} of places it says next what the original model would "
        f"({weights:.0%} before the cache's part)"
    )


def experts_json(engine: "Engine") -> dict[str, Any] | None:
    """Returns what is in memory of a model's experts and how often it was hit; None: no bound."""
    experts = engine.resident()
    if experts is None:
        return None
    return {
        "budget_bytes": experts.budget_bytes,
        "held_bytes": experts.held_bytes,
        "hit_share": experts.hit_share,
    }


def experts_text(report: Mapping[str, Any] | None) -> str:
    """Returns the object of `experts_json` in words."""
    if report is None:
        return ""
    return (
        f"{format_bytes(report['held_bytes'])} of "
        f"{format_bytes(report['budget_bytes'])} in memory, {report['hit_share']:.0%} of those "
        "chosen were there"
    )


def _tuning_text(tuning: Mapping[str, Any]) -> str:
    """Says what training the constants of the weights changed."""
    change = tuning["after"] / tuning["before"] - 1
    became = "kept" if tuning["kept"] else "too little, so the weights stay as they were rounded"
    return (
        f"from {tuning['before']:.4f} to {tuning['after']:.4f} nats a token ({change:+.0%}) on "
        f"{tuning['judged_tokens']} tokens that were not trained on: {became}"
    )


def weight_rows(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns table rows for the weights in a manifest's JSON: of the graph, of the GGUF file."""
    rows: list[tuple[str, str]] = []
    weights, gguf = manifest["weights"], manifest["gguf"]
    if weights is not None:
        kinds = ", ".join(
            f"{len(names)} matrices {spelled}" for spelled, names in weights["formats"].items()
        )
        rows.append(("weights", f"{format_bytes(weights['bytes'])}: {kinds}"))
    if gguf is not None:
        num_bytes = manifest["files"]["model.gguf"]["bytes"]
        text = f"{format_bytes(num_bytes)}: {gguf['type']}, architecture {gguf['architecture']}"
        rows.append(("GGUF", f"{text}, {gguf['context_length']} tokens of context"))
    return rows


def duration(seconds: float) -> str:
    """Returns a time in words: `12 ms`, `0.3 s`, `45 s`, `4 min 10 s`, `2 h 5 min`."""
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest_s} s" if minutes else f"{rest_s} s"


def rough_duration(seconds: float) -> str:
    """Returns an estimated time in words: `5 s`, `40 s`, `2 min`, `3 h`."""
    if seconds < 55:
        return f"{max(5, round(seconds / 5) * 5)} s"
    if seconds < 5400:
        return f"{max(1, round(seconds / 60))} min"
    return f"{round(seconds / 3600)} h"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a question with the word of `known` that `word` begins or is near to, or nothing."""
    from difflib import get_close_matches

    words = list(known)
    prefixed = [candidate for candidate in words if word and candidate.startswith(word)]
    matches = prefixed or get_close_matches(word, words, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def error_code(error: BaseException) -> str:
    """Returns the short name of an error's class: `BudgetError` -> `budget`."""
    return type(error).__name__.removesuffix("Error").lower()


def print_error(error: BaseException, text: str, *, as_json: bool) -> None:
    """Prints `error: TEXT` in one line on stderr, and for `--json` as an object on stdout."""
    message = " ".join(text.split()) or type(error).__name__
    if not isinstance(error, KvqError):
        message = f"internal error: {type(error).__name__}: {message} (--debug shows where)"
    print_note(f"error: {message}")
    if as_json:
        code = error_code(error) if isinstance(error, KvqError) else "internal"
        print_json({"error": {"code": code, "message": message}})


# The remaining time is shown after so many seconds and so large a share of the task.
_ESTIMATE_AFTER_S, _ESTIMATE_AFTER_SHARE = 2.0, 0.02

# Shows how far a long task is, from (done, total, label).
ShowProgress = Callable[[float, float, str], None]


class ProgressBar:
    """Shows how far a long task is and estimates the remaining time.

    It is a bar on a terminal, else a line every tenth. The bar disappears when its `with` block
    ends. Call it with (done, total, label). The amounts may be anything that grows; a smaller share
    than before begins another task.
    """

    _on_terminal: "ClassVar[ProgressBar | None]" = None

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._drawn = not quiet and _is_terminal(self._stream)
        self._quiet = quiet
        self._label = ""
        self._tenth: int = -1
        self._last = 0.0
        self._began: tuple[float, float] | None = None
        self._share = 0.0

    def __call__(self, done: float, total: float, label: str = "") -> None:
        share = min(1.0, done / total) if total > 0 else 1.0
        label += self._time_left(share)
        if self._drawn:
            self._draw(share, label)
        elif not self._quiet:
            self._log(share, label)

    def _time_left(self, share: float) -> str:
        """Returns `, about 2 min left`, once enough is done to estimate."""
        now = monotonic()
        if self._began is None or share < self._share:
            self._began = now, share
        self._share, (began, first) = share, self._began
        passed, done = now - began, share - first
        if passed < _ESTIMATE_AFTER_S or done < _ESTIMATE_AFTER_SHARE or share >= 1:
            return ""
        return f", about {rough_duration(passed * (1 - share) / done)} left"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Removes the bar from the terminal."""
        if self._drawn and self._label:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._label = ""
            ProgressBar._on_terminal = None

    @staticmethod
    def make_way() -> None:
        """Removes the bar that is drawn, if any, before something else is written on its line."""
        if ProgressBar._on_terminal is not None:
            ProgressBar._on_terminal.clear()

    def _draw(self, share: float, label: str) -> None:
        now = monotonic()
        if share < 1 and label == self._label and now - self._last < 0.05:
            return
        self._last = now
        self._label = label or " "
        ProgressBar._on_terminal = self
        filled = round(share * 24)
        bar = "#" * filled + "-" * (24 - filled)
        self._stream.write(f"\r\x1b[K[{bar}] {share:4.0%} {line(label)}")
        self._stream.flush()

    def _log(self, share: float, label: str) -> None:
        tenth = int(share * 10)
        # A smaller tenth is another task. A task without amounts has one line.
        if tenth != self._tenth or (share >= 1 and label != self._label):
            self._tenth, self._label = tenth, label
            _write(f"{tenth * 10:3d} % {line(label)}".rstrip() + "\n", self._stream)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reporter:
    """Reports what a long task does; `asks` says that a person may answer questions."""

    note: Callable[[str], None]
    progress: Callable[[], ProgressBar]
    asks: bool


# For a command.
TERMINAL = Reporter(note=print_note, progress=ProgressBar, asks=True)
# For a program that imports kvq: nothing is printed.
LOG = Reporter(note=logger.info, progress=partial(ProgressBar, quiet=True), asks=False)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and not terminal_is_plain()
