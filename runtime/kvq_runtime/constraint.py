"""What an answer has to look like: a JSON schema, a grammar, a pattern.

A `Constraint` says it in words, a `Grammar` is the same read for one vocabulary, a `Guide` stands
at one place of one answer and knows which tokens may come next. llguidance does the work.
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from threading import Lock
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kvq.errors import BackendError, UsageError
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.gbnf import escaped_character, to_lark
from kvq_runtime.healing import Beginning

Ids = NDArray[np.int64]

MOST_CHARACTERS = 1 << 18
# Left alone a model may write spaces for ever.
_SPACES = {"whitespace_pattern": r"[ \t\r\n]{1,32}"}
# What may take long to read: whether some text fits several patterns at once.
_SLOW = re.compile(r'"(pattern|format|allOf)')
_TRIAL_S = 1
_TRIAL_BYTES = 1 << 30
_TOLD = 300
_MOST_FORCED_BYTES = 1 << 9
_TRIAL = "import sys; sys.path[:0] = {path!r}; from {module} import main; main()"
_LIMITS = {
    "max_items_in_row": 10_000,
    "step_max_items": 50_000,
    "step_lexer_fuel": 200_000,
    "initial_lexer_fuel": 1_000_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the whole of an answer has to match: made by `json`, `grammar` or `regex`.

    `lark` is llguidance's own notation. Each raises `UsageError` for more than `MOST_CHARACTERS`;
    what is wrong with a constraint otherwise is said by `Grammars.read`.
    """

    lark: str

    def __post_init__(self) -> None:
        _bounded(self.lark)

    @classmethod
    def json(cls, schema: Mapping[str, Any] | str | None = None) -> "Constraint":
        """JSON that fits `schema` (JSON Schema 2020-12), given as an object or its text.

        None: any JSON object. Between its parts stand at most 32 spaces at once.
        """
        return cls(f"start: {json_part(schema)}\n")

    @classmethod
    def grammar(cls, grammar: str) -> "Constraint":
        """A text that `grammar` derives from its rule root, in llama.cpp's notation GBNF."""
        return cls(to_lark(_bounded(grammar)))

    @classmethod
    def regex(cls, pattern: str) -> "Constraint":
        """A text that `pattern` matches as a whole, as Rust's regex crate reads it."""
        bare = re.sub(r"(\\.)|([/\n])", _in_slashes, _bounded(pattern), flags=re.DOTALL)
        return cls(f"start: /{bare}/\n" if bare else 'start: ""\n')


def json_part(schema: Mapping[str, Any] | str | None) -> str:
    """`schema` as a part of a Lark grammar. Raises `UsageError` for what is no schema."""
    found: Any = schema
    try:
        if isinstance(schema, str):
            found = json.loads(_bounded(schema))
        if found is None or found is True:
            found = {} if found else {"type": "object"}
        if not isinstance(found, Mapping):
            raise UsageError(f"a JSON schema is an object; {type(found).__name__} was given")
        return f"%json {json.dumps({**cast(Mapping[str, Any], found), 'x-guidance': _SPACES})}"
    except RecursionError:
        raise UsageError("the JSON schema is nested too deeply; nest it less") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"the JSON schema is not JSON: {error}") from None


def escaped(text: str) -> str:
    """`text` itself as a part of a Lark grammar."""
    return f"/{''.join(map(escaped_character, text))}/" if text else '""'


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


class Grammars:
    """Reads constraints for one tokenizer. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = _Pieces(tokenizer)
        self._lock = Lock()
        self._vocabulary: Any = None

    def read(self, constraint: Constraint) -> "Grammar":
        """`constraint`, read for this vocabulary.

        Raises `UsageError` for one that is wrong, that no text fits or that is too much work,
        `BackendError` where llguidance is not installed. The first call takes about a second for
        150,000 tokens.
        """
        library = _library()
        _check_in_time(constraint.lark)
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = library.LLTokenizer(self._pieces)
        limits = library.LLParserLimits(**_LIMITS)
        matcher: Matcher = library.LLMatcher(
            self._vocabulary, constraint.lark, log_level=0, limits=limits
        )
        _check(matcher)
        matcher.compute_bitmask()
        _check(matcher)
        return Grammar(matcher, self._pieces)


class _Pieces:
    """A tokenizer as llguidance asks for it; a token more than it has stands for the end."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.vocab_size

    @property
    def tokens(self) -> list[bytes]:
        """The bytes of every token."""
        ids = range(self._tokenizer.vocab_size)
        return [*map(self._tokenizer.token_bytes, ids), b"<end>"]

    @property
    def special_token_ids(self) -> list[int]:
        """Those that are not text."""
        ids = range(self._tokenizer.vocab_size)
        return [*filter(self._tokenizer.is_control, ids), self.eos_token_id]

    def bytes_of(self, token: int) -> bytes:
        """A token's text."""
        return self._tokenizer.token_bytes(token, special=False)

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens that together are `text`, as the model would write it where that is possible.

        Only the first ones of a long text, which a grammar leaves no choice about: one is needed.
        """
        whole = (text.encode() if isinstance(text, str) else text)[:_MOST_FORCED_BYTES]
        try:
            ids = self._tokenizer.encode(whole.decode())
            if b"".join(map(self.bytes_of, ids)) == whole:
                return ids
        except UnicodeDecodeError:
            pass
        return self._tokenizer.pieces.spelling(whole)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint read for one vocabulary."""

    matcher: Matcher
    pieces: "_Pieces"

    def guide(self, beginning: Beginning, stop_ids: frozenset[int]) -> "Guide":
        """The start of an answer after `beginning`, that a token of `stop_ids` may end."""
        return Guide(self.matcher.deep_copy(), self.pieces, copy(beginning), stop_ids)


class Guide:
    """What may come next in one answer: the bytes it is to begin with, then what its grammar says.

    Stands where a `Beginning` stands when no grammar is asked for.
    """

    def __init__(
        self, matcher: Matcher, pieces: "_Pieces", beginning: Beginning, stop_ids: frozenset[int]
    ) -> None:
        self._matcher = matcher
        self._pieces = pieces
        self._beginning = beginning
        self._stop_ids = stop_ids
        self._allowed: Ids | None = None

    @property
    def allowed(self) -> Ids:
        """Tokens that may come next, in their order. Raises `UsageError` where there is none."""
        if self._allowed is None:
            opening, found = self._beginning.allowed, self._by_grammar()
            self._allowed = found if opening is None else self._both(opening, found)
            if len(self._allowed) == 0:
                raise UsageError(
                    "no token of this model fits the constraint here; allow other characters, or "
                    "give a token that may end the answer"
                )
        return self._allowed

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped()

    def take(self, token: int) -> bool:
        """Notes that `token`, an allowed one, comes next; whether it lies within the beginning."""
        self._allowed = None
        left = self._beginning.left_bytes
        if self._beginning.take(token):
            return True
        if token not in self._stop_ids:
            tail = self._pieces.bytes_of(token)[left:] if left else b""
            for part in self._pieces(tail) if left else [token]:
                self._matcher.consume_token(part)
            _check(self._matcher)
        return False

    def __copy__(self) -> "Guide":
        beginning = copy(self._beginning)
        return Guide(self._matcher.deep_copy(), self._pieces, beginning, self._stop_ids)

    def _by_grammar(self) -> Ids:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        _check(self._matcher)
        allowed = np.unpackbits(bits, count=self._pieces.eos_token_id, bitorder="little")
        ends = [token for token in self._stop_ids if token < len(allowed)]
        allowed[ends] = self._matcher.is_accepting()
        return np.flatnonzero(allowed)

    def _both(self, opening: Ids, found: Ids) -> Ids:
        """Tokens of `opening` that lie within the beginning, or whose rest the grammar takes."""
        alone = {self._pieces.bytes_of(token) for token in found.tolist()}
        firsts = {piece[:1] for piece in alone}
        left = self._beginning.left_bytes

        def fits(token: int) -> bool:
            tail = self._pieces.bytes_of(token)[left:]
            if not tail or tail in alone or tail[:1] not in firsts:
                return not tail or tail in alone
            parts = self._pieces(tail)
            return bool(parts) and self._matcher.validate_tokens(parts) == len(parts)

        within = self._beginning.within
        return np.array([one for one in opening.tolist() if one in within or fits(one)], np.int64)


def _library() -> Any:
    try:
        return import_module("llguidance")
    except ImportError:
        raise BackendError(
            "answers under a constraint need llguidance, which is not installed; install it with "
            "`pip install llguidance`"
        ) from None


def _check(matcher: Matcher) -> None:
    if matcher.is_error():
        told = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
        told = "no text of this model fits it" if told == "NoExtensionBias" else told[:_TOLD]
        raise UsageError(f"the constraint cannot be followed: {told}")


def _check_in_time(lark: str) -> None:
    if _SLOW.search(lark) and (told := _tried(lark)):
        raise UsageError(told)


@lru_cache(maxsize=32)
def _tried(lark: str) -> str:
    """Reads `lark` once in a process that can be ended; what is wrong, or nothing."""
    script = _TRIAL.format(path=sys.path, module=__name__)
    try:
        trial = subprocess.run(  # noqa: S603  our own interpreter and script
            [sys.executable, "-c", script], input=lark.encode(), capture_output=True,
            timeout=5 * _TRIAL_S, check=False,
        )  # fmt: skip
        failed = trial.returncode != 0
    except subprocess.TimeoutExpired:
        failed = True
    return "the constraint takes too much work: give fewer or simpler patterns" if failed else ""


def main() -> None:
    """The process of `_tried`: reads the grammar on stdin within bounds of time and memory."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (_TRIAL_S, _TRIAL_S))
        resource.setrlimit(resource.RLIMIT_AS, (_TRIAL_BYTES, _TRIAL_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    library = _library()
    library.LLMatcher.validate_grammar(
        sys.stdin.buffer.read().decode(), limits=library.LLParserLimits(**_LIMITS)
    )


def _bounded(text: str) -> str:
    if len(text) > MOST_CHARACTERS:
        raise UsageError(
            f"the constraint has {len(text)} characters; give at most {MOST_CHARACTERS}"
        )
    return text


def _in_slashes(found: re.Match[str]) -> str:
    """A part of a pattern as it stands between slashes."""
    return found[1] or {"/": r"\/", "\n": r"\n"}[found[2]]
