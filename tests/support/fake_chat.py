"""A client without a model: the same words at the same pace every time, and faults on request.

`python -m fake_chat chat --engine fake:tok_ms=5,tokens=80,fail_at=20` is `kvq chat` on it. Tests
and pictures use it.
"""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import sleep

from kvq.config import parse_budget, parse_kv
from kvq.errors import BudgetError, ModelError, SnapshotError, UsageError
from kvq_apps.chat.client import (
    ChatClient,
    ContextFullError,
    EngineLostError,
    Facts,
    Stream,
    Turn,
)
from kvq_apps.chat.messages import ReplyStats, ToolCall
from kvq_runtime.sequence.hunks import common_prefix

BYTES_PER_TOKEN = 768


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeOptions:
    """How the fake behaves. Times in milliseconds; `fail_at`, `lose_at` and `hold_at` count tokens.

    `fail_times` replies fail or get lost, then all is well; before its token number `hold_at` a
    reply waits until it is stopped.
    """

    tok_ms: float = 0.0
    load_ms: float = 0.0
    prefill_ms: float = 0.0
    tokens: int = 24
    context: int = 4096
    fail_at: int = 0
    lose_at: int = 0
    hold_at: int = 0
    fail_times: int = 1_000_000
    broken: bool = False


def scripted(text: str) -> "FakeClient":
    """The engine that `fake:tok_ms=5` describes. Raises `UsageError` for an unknown option."""
    return FakeClient(fake_options(text.removeprefix("fake:")))


def fake_options(text: str) -> FakeOptions:
    """`"tok_ms=5,fail_at=20"` as options. Raises `UsageError` for an unknown one."""
    values: dict[str, float | int | bool] = {}
    defaults: dict[str, float | int | bool] = asdict(FakeOptions())
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in defaults:
            known = ", ".join(defaults)
            raise UsageError(f"the fake engine has no {name!r}; it knows {known}")
        kind = type(defaults[name])
        values[name] = kind(float(value)) if value else True
    return FakeOptions(**values)  # type: ignore[arg-type]


def echo(turn: Turn, tokens: int) -> list[str]:
    """A reply of `tokens` pieces that names the question, as markdown."""
    question = turn.messages[-1].text.strip().splitlines() or [""]
    words = f"You asked: **{question[0][:60]}**\n\n".split(" ")
    pieces = [word + " " for word in words[:-1]] + words[-1:]
    pieces += [f"word{number} " for number in range(len(pieces), tokens)]
    return pieces[:tokens]


class FakeClient(ChatClient):
    """Answers with `script(turn)`, pieces of text, each a token, and calls of tools."""

    def __init__(
        self,
        options: FakeOptions | None = None,
        script: Callable[[Turn], Iterable[str | ToolCall]] | None = None,
    ) -> None:
        self.options = FakeOptions() if options is None else options
        self._script = script or self._echo
        self.facts = Facts(
            model="fake",
            context_tokens=self.options.context,
            k_bits=4,
            v_bits=2,
            kv_budget=64 << 20,
            fingerprint="fake",
            keeps_kv=True,
        )
        self.tokens: list[int] = []
        self.stale = self.predicted = 0
        self._faults = self.options.fail_times
        self.turns: list[Turn] = []

    def _echo(self, turn: Turn) -> list[str]:
        return echo(turn, self.options.tokens)

    def open(self) -> Facts:
        """Ready after `load_ms`."""
        sleep(self.options.load_ms / 1e3)
        if self.options.broken:
            raise ModelError("there is no model here; give one with -m")
        return self.facts

    def reply(self, turn: Turn, stream: Stream) -> str:
        """The script's pieces, one per step."""
        self.turns.append(replace(turn, messages=[replace(row) for row in turn.messages]))
        rows = [f"{row.role}: {row.text}" for row in turn.messages]
        prompt = _tokens_of(" ".join([*rows, "assistant:"]))
        if len(prompt) >= self.facts.context_tokens:
            raise ContextFullError(len(prompt), self.facts.context_tokens)
        cached = common_prefix(self.tokens, prompt)
        stats = ReplyStats(prompt_tokens=len(prompt), cached_tokens=cached)
        self.stale = len(prompt) - cached if turn.edited else 0
        self.tokens = self.tokens[:cached]
        if not self._prefill(prompt, stream):
            return "cancelled"
        for count, piece in enumerate(self._script(turn), 1):
            while count == self.options.hold_at and not stream.cancelled():
                sleep(0.002)
            if stream.cancelled():
                return "cancelled"
            self._fault(count)
            sleep(self.options.tok_ms / 1e3)
            if isinstance(piece, ToolCall):
                stream.report_call(piece.name, piece.arguments)
                continue
            stream.write(piece)
            self.tokens += _tokens_of(piece)
            stream.report_stats(self._measured(stats, count))
            if len(self.tokens) >= self.facts.context_tokens:
                return "length"
            if turn.max_tokens is not None and count >= turn.max_tokens:
                return "length"
        return "stop"

    def drafts(self, turn: Turn, count: int, stream: Stream) -> list[str]:
        """The script's answers, a piece of each in turn."""
        self.turns.append(replace(turn, messages=[replace(row) for row in turn.messages]))
        scripts = [iter(self._script(turn)) for _ in range(count)]
        reasons = ["cancelled"] * count
        while "cancelled" in reasons and not stream.cancelled():
            sleep(self.options.tok_ms / 1e3)
            for draft, script in enumerate(scripts):
                piece = next(script, None)
                if not isinstance(piece, str):
                    reasons[draft] = "stop"
                else:
                    stream.write(piece, draft)
        return reasons

    def begin(self) -> None:
        """Forgets the tokens."""
        self.tokens = []

    def change_kv(
        self, k_bits: int | None, v_bits: int | None, budget: str | None, stream: Stream
    ) -> Facts:
        """Takes any possible widths; a budget of 1MiB or less is refused."""
        k_bits = self.facts.k_bits if k_bits is None else k_bits
        v_bits = self.facts.v_bits if v_bits is None else v_bits
        parse_kv(f"{k_bits}:{v_bits}")
        size = parse_budget(budget).num_bytes if budget else None
        size = self.facts.kv_budget if size is None else size
        if size <= 1 << 20:
            raise BudgetError("1 MiB cannot hold the least that this model keeps; 2 MiB can")
        tokens, self.tokens = self.tokens, []
        self._prefill(tokens, stream)
        self.facts = replace(self.facts, k_bits=k_bits, v_bits=v_bits, kv_budget=size)
        return self.facts

    def reread(self, stream: Stream) -> int:
        """What an edit has left behind it."""
        stale, self.stale = self.stale, 0
        return stale

    def save(self, path: Path) -> bool:
        """Writes the tokens and the plan."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        plan = [self.facts.k_bits, self.facts.v_bits]
        path.write_text(json.dumps({"tokens": self.tokens, "plan": plan}))
        return bool(self.tokens)

    def restore(self, path: Path) -> ReplyStats:
        """Reads the tokens; another plan is refused."""
        try:
            saved = json.loads(path.read_text())
        except OSError as error:
            raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error
        plan = [self.facts.k_bits, self.facts.v_bits]
        if saved["plan"] != plan:
            raise SnapshotError(
                f"{path.name} was saved with another plan: {saved['plan']}, this is {plan}"
            )
        self.tokens = saved["tokens"]
        return self._measured(ReplyStats(), 0)

    def _prefill(self, prompt: list[int], stream: Stream) -> bool:
        total = len(prompt) - len(self.tokens)
        for done in range(0, total, 64):
            if stream.cancelled():
                return False
            sleep(self.options.prefill_ms / 1e3)
            stream.report_prefill(min(done + 64, total), total)
        self.tokens = list(prompt)
        return True

    def _fault(self, count: int) -> None:
        if count in (self.options.fail_at, self.options.lose_at) and self._faults > 0:
            self._faults -= 1
            if count == self.options.lose_at:
                raise EngineLostError("the engine is gone")
            raise ModelError("the fake model failed as it was told to")

    def _measured(self, stats: ReplyStats, count: int) -> ReplyStats:
        """What was asked for, not what a clock says: the same numbers every time."""
        return replace(
            stats,
            new_tokens=count,
            ttft_ms=self.options.prefill_ms + self.options.tok_ms,
            decode_tok_s=1e3 / self.options.tok_ms if self.options.tok_ms else 0.0,
            context_tokens=len(self.tokens),
            predicted_tokens=self.predicted,
            kv_bytes=len(self.tokens) * BYTES_PER_TOKEN,
        )


def _tokens_of(text: str) -> list[int]:
    """About one token per word: a number made of its bytes."""
    return [sum(word.encode()) % 997 for word in text.split()]


def main() -> int:
    """Runs `kvq` with the words of this command line, a chat on the engine of `--engine`."""
    from kvq_apps import cli
    from kvq_apps.commands import chat

    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--engine")
    ours, words = parser.parse_known_args()
    if ours.engine is not None:
        chat._client = lambda *_: scripted(ours.engine)
        # There is a model, so none has to be fetched.
        chat.installed_names = lambda: ("fake",)
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main())
