"""A grammar is tried in a process that can be ended before this one reads it.

llguidance follows rules inside rules by recursion, so that a chain of them can overflow the stack
of whoever reads it, and a short text can be much work. What the trial survives is read here in the
same steps on twice the stack.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from tempfile import TemporaryFile
from threading import Lock, Thread, stack_size
from time import monotonic
from typing import Any, Protocol, TypeVar

from kvq.errors import UsageError

T = TypeVar("T")

# Room for 800 references inside each other, or 2,600 rules.
_TRIAL_STACK_BYTES = 8 << 20
_STACK_BYTES = 2 * _TRIAL_STACK_BYTES
# Python and llguidance take 0.2 s and 30 MiB of these.
_TRIAL_CPU_S = 1
_TRIAL_BYTES = 96 << 20
# Where processes have limits these end a trial, on however busy a machine.
_TRIAL_S = 5 if sys.platform == "win32" else 60
_LOOK_S = 0.05
_TRIAL = "import sys; sys.path[:0] = {path!r}; from {module} import main; main()"
_LIMITS = {
    "max_items_in_row": 10_000,
    "step_max_items": 50_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
# Repeats inside repeats spend all they are given; a long list of texts needs more than these.
_LEAST_LEXER_FUEL = 100_000
# A token of the model by its id, of which a trial's vocabulary of bytes has the first 256.
_TOKEN = re.compile(r"<\[[0-9]+\]>")
_starting = Lock()


class Matcher(Protocol):
    """What we use of llguidance's LLMatcher."""

    def compute_bitmask(self) -> bytes:
        """A bit for every token that may come next."""
        ...

    def consume_token(self, sampled_token: int) -> bool:
        """Goes on by a token."""
        ...

    def validate_tokens(self, tokens: list[int]) -> int:
        """How many of `tokens` may come next."""
        ...

    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        ...

    def is_stopped(self) -> bool:
        """Whether it must."""
        ...

    def is_error(self) -> bool:
        """Whether it cannot go on."""
        ...

    def get_error(self) -> str:
        """Why."""
        ...

    def deep_copy(self) -> "Matcher":
        """Another at the same place."""
        ...


def read(library: Any, vocabulary: Any, lark: str) -> Matcher:
    """`lark`, read by llguidance up to the first choice; what is wrong with it is its error."""
    return on_stack(_STACK_BYTES, lambda: matcher(library, vocabulary, lark))


def try_out(lark: str, cancelled: Callable[[], bool]) -> None:
    """Reads `lark` in a process of its own, which ends as soon as `cancelled` says so.

    Raises `UsageError` where it took more than a second, 96 MiB or 8 MiB of stack. A grammar that
    is wrong passes: reading it says what is wrong.
    """
    script = _TRIAL.format(path=sys.path, module=__name__)
    end = monotonic() + _TRIAL_S
    with TemporaryFile() as given:
        given.write(lark.encode("utf-8", "surrogatepass"))
        given.seek(0)
        with subprocess.Popen(  # noqa: S603  our own interpreter and script
            [sys.executable, "-c", script], stdin=given,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ) as trial:  # fmt: skip
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
    """The process of `try_out`: reads the grammar on stdin within bounds of time and memory."""
    library: Any = import_module("llguidance")
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (_TRIAL_CPU_S, _TRIAL_CPU_S))
        resource.setrlimit(resource.RLIMIT_DATA, (_TRIAL_BYTES, _TRIAL_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    given = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    lark = _TOKEN.sub("<[0]>", given)
    # The tokens of a model add little: the limits of a step bound what they are looked up in.
    on_stack(_TRIAL_STACK_BYTES, lambda: matcher(library, library.LLTokenizer("byte"), lark))


def matcher(library: Any, vocabulary: Any, lark: str) -> Matcher:
    """`lark` read up to the first choice, on the stack that there is."""
    fuel = _LEAST_LEXER_FUEL + 2 * len(lark)
    limits = library.LLParserLimits(**_LIMITS, initial_lexer_fuel=fuel)
    found: Matcher = library.LLMatcher(vocabulary, lark, log_level=0, limits=limits)
    if not found.is_error():
        found.compute_bitmask()
    return found


def on_stack(num_bytes: int, work: Callable[[], T]) -> T:
    """What `work` gives or raises, called in a thread with a stack of `num_bytes`."""
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
