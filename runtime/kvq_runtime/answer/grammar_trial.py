"""Tries a grammar in a process that can be ended, before this process reads it.

llguidance follows rules inside rules by recursion. A chain of them can overflow the stack, and a
short text can be much work. A grammar that survives the trial is read here in the same steps, with
twice the stack.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from tempfile import TemporaryFile
from threading import Lock, Thread, stack_size
from time import monotonic
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvq.errors import UsageError
from kvq.limited_process import command, limit_memory, limit_time

T = TypeVar("T")

# Enough for 800 references inside each other, or 2,600 rules.
_TRIAL_STACK_BYTES = 8 << 20
_STACK_BYTES = 2 * _TRIAL_STACK_BYTES
# Python and llguidance alone take 0.2 s and 30 MiB of these.
_TRIAL_CPU_S = 1
_TRIAL_BYTES = 96 << 20
# Where processes have limits, the limits end a trial, however busy the machine is.
_TRIAL_S = 5 if sys.platform == "win32" else 60
_LOOK_S = 0.05
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 10_000,
    "step_max_items": 50_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
# Repeats inside repeats spend all fuel. A long list of texts needs more than this.
_LEAST_LEXER_FUEL = 100_000
# A token of the model by its id. A trial's vocabulary of bytes has only 256 tokens.
_TOKEN = re.compile(r"<\[[0-9]+\]>")
_starting = Lock()


def read(vocabulary: LLTokenizer, lark: str) -> LLMatcher:
    """Reads `lark` with llguidance up to the first choice; a fault of it is the matcher's error."""
    return on_stack(_STACK_BYTES, lambda: new_matcher(vocabulary, lark))


def try_out(lark: str, cancelled: Callable[[], bool]) -> None:
    """Reads `lark` in a process of its own, which ends as soon as `cancelled` returns True.

    Raises `UsageError` where this took more than a second, 96 MiB or 8 MiB of stack. A grammar that
    is wrong passes: `read` says what is wrong with it.
    """
    end = monotonic() + _TRIAL_S
    with TemporaryFile() as stdin:
        stdin.write(lark.encode("utf-8", "surrogatepass"))
        stdin.seek(0)
        with subprocess.Popen(  # noqa: S603  our own interpreter and script
            command(__name__), stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as trial:
            try:
                while trial.returncode is None and monotonic() < end and not cancelled():
                    with suppress(subprocess.TimeoutExpired):
                        trial.wait(_LOOK_S)
            finally:
                trial.kill()
    if trial.returncode != 0:
        raise UsageError(
            "the constraint takes too much work: give fewer or simpler properties, rules or "
            "patterns, and fewer of them inside each other"
        )


def main() -> None:
    """Runs in the process of `try_out`: reads the grammar on stdin within limits."""
    limit_time(_TRIAL_CPU_S)
    limit_memory(_TRIAL_BYTES)
    text = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    lark = _TOKEN.sub("<[0]>", text)
    # The model's own tokens would add little work, as the limits of a step bound it.
    on_stack(_TRIAL_STACK_BYTES, lambda: new_matcher(LLTokenizer("byte"), lark))


def new_matcher(vocabulary: LLTokenizer, lark: str) -> LLMatcher:
    """Reads `lark` up to the first choice, on the current stack."""
    fuel = _LEAST_LEXER_FUEL + 2 * len(lark)
    limits = LLParserLimits(**_LIMITS, initial_lexer_fuel=fuel)
    matcher = LLMatcher(vocabulary, lark, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def on_stack(num_bytes: int, work: Callable[[], T]) -> T:
    """Calls `work` in a thread with a stack of `num_bytes`; returns or raises what it does."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  the caller's to handle
            outcome.set_exception(error)

    thread = Thread(target=run)
    with _starting:
        before = stack_size(num_bytes)
        try:
            thread.start()
        finally:
            stack_size(before)
    thread.join()
    return outcome.result()
