"""What an answer has to look like: a JSON schema, a grammar, a pattern.

A `Constraint` says it in words, a `Grammar` is the same read for one vocabulary, a `Guide` stands
at one place of one answer and knows which tokens may come next. llguidance does the work.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from threading import Lock
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvq.errors import BackendError, UsageError
from kvq.json_values import is_object
from kvq_models.tokenizer import Tokenizer
from kvq_runtime import trial
from kvq_runtime.gbnf import escaped_character, to_lark
from kvq_runtime.healing import Beginning
from kvq_runtime.trial import Matcher

Ids = NDArray[np.int64]

MOST_CHARACTERS = 1 << 18
# Left alone a model may write spaces for ever.
_SPACES = {"whitespace_pattern": r"[ \t\r\n]{1,32}"}
# So little text holds no chain of rules that overflows 2 MiB of stack.
_MOST_SMALL = 1 << 12
# What is much work in little text: whether some text fits several patterns, division.
_SLOW = re.compile(r'"(pattern|format|allOf|multipleOf)|& /')
_MOST_NESTED = 120
_MOST_REFERENCES = 500
# What is kept read, of which a small constraint takes at most 16 MiB and another 64.
_MOST_KEPT = 8
_KEPT_LARGE = 4
_TOLD = 300
_MOST_FORCED_BYTES = 1 << 9


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the whole of an answer has to match: made by `json`, `grammar` or `regex`.

    `lark` is llguidance's own notation. Each raises `UsageError` for more than `MOST_CHARACTERS`;
    what is wrong with a constraint otherwise is said by `Grammars.read`.
    """

    lark: str

    def __post_init__(self) -> None:
        _bounded(self.lark)

    @property
    def small(self) -> bool:
        """Whether it is little work and needs little stack, whatever it says."""
        return len(self.lark) <= _MOST_SMALL and not _SLOW.search(self.lark)

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
        return cls(f"start: {slashed(_bounded(pattern))}\n")


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
        schema = {**cast(Mapping[str, Any], found), "x-guidance": _SPACES}
        text = _bounded(json.dumps(schema))
    except RecursionError:
        raise UsageError("the JSON schema is nested too deeply; nest it less") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"the JSON schema is not JSON: {error}") from None
    _check_depth(schema)
    return f"%json {text}"


def escaped(text: str) -> str:
    """`text` itself as a part of a Lark grammar."""
    return f"/{''.join(map(escaped_character, text))}/" if text else '""'


def slashed(pattern: str) -> str:
    """What `pattern` matches as a part of a Lark grammar."""
    bare = re.sub(r"(\\.)|([/\n])", _in_slashes, pattern, flags=re.DOTALL)
    return f"/{bare}/" if bare else '""'


class Grammars:
    """Reads constraints for one tokenizer, and keeps the last ones. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = _Pieces(tokenizer)
        self._lock = Lock()
        self._vocabulary: Any = None
        self._kept: dict[bytes, tuple[Grammar, int]] = {}

    def read(
        self, constraint: Constraint, cancelled: Callable[[], bool] = lambda: False
    ) -> "Grammar":
        """`constraint`, read for this vocabulary.

        One that is not `small` is tried first in a process of its own, which takes some 0.2 s more
        and ends early where `cancelled` says so. Raises `UsageError` for one that is wrong, that no
        text fits, that is too much work or was cancelled, `BackendError` where llguidance is not
        installed. The first call takes about a second for 150,000 tokens.
        """
        _check_kind(constraint)
        library = _library()
        digest = sha256(constraint.lark.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if digest in self._kept:
                return self._keep(digest, *self._kept.pop(digest))
        if not constraint.small:
            trial.try_out(constraint.lark, cancelled)
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = library.LLTokenizer(self._pieces)
        matcher = trial.read(library, self._vocabulary, constraint.lark)
        _check(matcher)
        found = Grammar(matcher, self._pieces)
        with self._lock:
            return self._keep(digest, found, 1 if constraint.small else _KEPT_LARGE)

    def _keep(self, digest: bytes, grammar: "Grammar", size: int) -> "Grammar":
        """Keeps `grammar` as the newest; the oldest ones go."""
        self._kept[digest] = grammar, size
        while sum(one for _, one in self._kept.values()) > _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return grammar


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


def _check_kind(given: object) -> None:
    if not isinstance(given, Constraint):
        raise UsageError(
            "constraint is a Constraint, such as Constraint.regex(pattern), .json(schema) or "
            f".grammar(text); {type(given).__name__} was given"
        )


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


def _check_depth(schema: Mapping[str, Any]) -> None:
    """Refuses a schema whose parts lie, or refer to each other, too deep inside each other."""
    left: list[tuple[Any, int]] = [(schema, 0)]
    references: set[str] = set()
    while left:
        part, depth = left.pop()
        if depth > _MOST_NESTED:
            raise UsageError(
                f"the JSON schema is nested too deeply; nest it at most {_MOST_NESTED} deep"
            )
        if is_object(part):
            references |= {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
            left += [(row, depth + 1) for row in part.values()]
        elif isinstance(part, list | tuple):
            left += [(row, depth + 1) for row in cast(Sequence[Any], part)]
    if len(references) > _MOST_REFERENCES:
        raise UsageError(
            f"the JSON schema refers to {len(references)} places; at most {_MOST_REFERENCES} are "
            "possible"
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
