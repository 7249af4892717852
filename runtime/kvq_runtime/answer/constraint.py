"""What an answer has to match: a JSON schema, a grammar or a pattern.

A `Constraint` is the text of it, a `Grammar` is the same read for one vocabulary, and a `Guide`
stands at one place of one answer and knows which tokens may come next. llguidance does the work.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from hashlib import sha256
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError, reason_of
from kvq.json_values import is_object
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.answer.healing import Beginning

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Ids = NDArray[np.int64]

MOST_CHARACTERS = 1 << 18
# Without a limit a model may write spaces for ever. Branches of `oneOf` that nothing tells apart
# are read as `anyOf`.
_READING = {"whitespace_pattern": r"[ \t\r\n]{1,32}", "coerce_one_of": True}
# A text this short cannot hold a chain of rules that overflows 2 MiB of stack.
_MOST_SMALL = 1 << 12
# Much work in little text: patterns that must fit at once, and division.
_SLOW = re.compile(r'"(pattern|format|allOf|multipleOf)|& /')
_MOST_NESTED = 120
_MOST_REFERENCES = 500
# How many grammars are kept. A small one takes at most 16 MiB, another one 64 MiB and counts more.
_MOST_KEPT = 8
_KEPT_LARGE = 4
_MESSAGE_CHARACTERS = 300
# How llguidance's errors begin, the longest first, and the text that replaces the beginning (if
# it ends in ": ") or the whole message.
_ERRORS = {
    "NoExtensionBias": "no text of this model fits it",
    "failed to compile JSON schema: Unsatisfiable schema: Regex is empty": "no text fits the JSON "
    "schema: a pattern, a format or a length of it exclude each other",
    "failed to compile JSON schema: Unsatisfiable schema: ": "no value fits the JSON schema: ",
    "failed to compile JSON schema: ": "the JSON schema: ",
}
_MOST_FORCED_BYTES = 1 << 9


@dataclass(frozen=True, slots=True)
class Constraint:
    """Describes what the whole of an answer has to match; `json`, `grammar` and `regex` make it.

    Each of them raises `UsageError` for more than 262,144 characters. Other faults of a constraint
    are found when it is read for a vocabulary, by `Grammars.read`.

    Attributes:
        lark: The constraint in llguidance's own notation.
        unheld: Places of a schema that are not enforced, as JSON pointers, each with a reason.
    """

    lark: str
    unheld: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _bounded(self.lark)

    @property
    def small(self) -> bool:
        """Returns whether it takes little work and little stack, whatever it says."""
        return len(self.lark) <= _MOST_SMALL and not _SLOW.search(self.lark)

    @classmethod
    def json(
        cls, schema: Mapping[str, Any] | str | None = None, *, strict: bool = False
    ) -> "Constraint":
        """Makes an answer JSON that fits `schema` (JSON Schema 2020-12).

        At most 32 spaces at once stand between the parts of the JSON.

        Args:
            schema: The schema as an object or as JSON text. None: any JSON object.
            strict: Refuse a schema of which some part cannot be enforced. Otherwise such parts are
                left out and listed in `unheld`.

        Returns:
            The constraint.

        Raises:
            UsageError: For what is no schema, is nested too deeply or is too long; and, if
                `strict`, for parts that cannot be enforced.
        """
        from kvq_runtime.answer.schemas import held_schema

        result = held_schema(json_schema(schema), strict=strict)
        return cls(f"start: {json_part(result.schema)}\n", result.unheld)

    @classmethod
    def grammar(cls, grammar: str) -> "Constraint":
        """Makes an answer a text that the rule `root` of a grammar derives.

        Args:
            grammar: The grammar in llama.cpp's notation, GBNF.

        Returns:
            The constraint.

        Raises:
            UsageError: For what is not GBNF or is too long. The message names the line or the rule.
        """
        from kvq_runtime.answer.gbnf import to_lark

        return cls(to_lark(_bounded(grammar)))

    @classmethod
    def regex(cls, pattern: str) -> "Constraint":
        """Makes an answer a text that a regular expression matches as a whole.

        Args:
            pattern: The expression in the syntax of Rust's regex crate.

        Returns:
            The constraint.

        Raises:
            UsageError: For a pattern that is too long.
        """
        return cls(f"start: {slashed(_bounded(pattern))}\n")


def json_schema(schema: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    """Returns `schema` as an object within the limits of all schemas.

    None: the schema of any JSON object. Raises `UsageError` for what is no schema.
    """
    value: Any = schema
    try:
        if isinstance(schema, str):
            value = json.loads(_bounded(schema))
        if value is None or value is True:
            value = {} if value else {"type": "object"}
        if not isinstance(value, Mapping):
            raise UsageError(f"a JSON schema is an object; {type(value).__name__} was given")
        _bounded(json.dumps(dict(cast(Mapping[str, Any], value))))
    except RecursionError:
        raise UsageError("the JSON schema is nested too deeply; nest it less") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"the JSON schema is not JSON: {reason_of(error)}") from None
    _check_depth(cast(Mapping[str, Any], value))
    return cast(Mapping[str, Any], value)


def json_part(schema: Mapping[str, Any]) -> str:
    """Returns `schema` as a part of a Lark grammar. Raises `UsageError` for what is no schema."""
    text = json.dumps({**json_schema(schema), "x-guidance": _READING})
    return f"%json {_bounded(text)}"


def escaped(text: str) -> str:
    """Returns a part of a Lark grammar that matches `text` itself."""
    from kvq_runtime.answer.gbnf import escaped_character

    return f"/{''.join(map(escaped_character, text))}/" if text else '""'


def spelled(text: str, ids: Mapping[str, int]) -> str:
    """Returns a part of a Lark grammar that matches `text`, with tokens for the texts in `ids`."""
    parts = re.split(f"({'|'.join(map(re.escape, ids))})", text) if ids else [text]
    rows = (f"<[{ids[part]}]>" if part in ids else escaped(part) for part in parts if part)
    return " ".join(rows) or '""'


def slashed(pattern: str) -> str:
    """Returns a part of a Lark grammar that matches what `pattern` matches."""
    bare = re.sub(r"(\\.)|([/\n])", _in_slashes, pattern, flags=re.DOTALL)
    return f"/{bare}/" if bare else '""'


class Grammars:
    """Reads constraints for one tokenizer and keeps the last ones; any thread may use it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = _Pieces(tokenizer)
        self._lock = Lock()
        self._vocabulary: LLTokenizer | None = None
        self._kept: dict[bytes, tuple[Grammar, int]] = {}

    def read(
        self, constraint: Constraint, cancelled: Callable[[], bool] = lambda: False
    ) -> "Grammar":
        """Reads `constraint` for this vocabulary.

        A constraint that is not `small` is tried first in a process of its own. This takes about
        0.2 s more, and ends early when `cancelled` returns True. The first call takes about a
        second for 150,000 tokens. Raises `UsageError` for a constraint that is wrong, that no text
        fits, that is too much work, or that was cancelled.
        """
        from llguidance import LLTokenizer

        from kvq_runtime.answer import grammar_trial as trial

        _check_kind(constraint)
        digest = sha256(constraint.lark.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if digest in self._kept:
                return self._keep(digest, *self._kept.pop(digest))
        if not constraint.small:
            trial.try_out(constraint.lark, cancelled)
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = LLTokenizer(cast(Any, self._pieces))
        matcher = trial.read(self._vocabulary, constraint.lark)
        _check(matcher)
        grammar = Grammar(matcher, self._pieces)
        with self._lock:
            return self._keep(digest, grammar, 1 if constraint.small else _KEPT_LARGE)

    def _keep(self, digest: bytes, grammar: "Grammar", size: int) -> "Grammar":
        """Keeps `grammar` as the newest one; the oldest ones go."""
        self._kept[digest] = grammar, size
        while sum(size for _, size in self._kept.values()) > _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return grammar


class _Pieces:
    """Shows a tokenizer to llguidance. One token more than it has stands for the end."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.vocab_size

    @property
    def tokens(self) -> list[bytes]:
        """Returns the bytes of every token."""
        ids = range(self._tokenizer.vocab_size)
        return [*map(self._tokenizer.token_bytes, ids), b"<end>"]

    @property
    def special_token_ids(self) -> list[int]:
        """Returns the tokens that are not text."""
        ids = range(self._tokenizer.vocab_size)
        return [*filter(self._tokenizer.is_control, ids), self.eos_token_id]

    def bytes_of(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token, special=False)

    def __call__(self, text: bytes | str) -> list[int]:
        """Returns tokens that together are `text`, as the model would write it where possible.

        Only the first tokens of a long text are returned. llguidance asks for texts that a grammar
        leaves no choice about, and needs one token of them.
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
    """Holds a constraint that was read for one vocabulary."""

    matcher: "LLMatcher"
    pieces: "_Pieces"

    def guide(self, beginning: Beginning, stop_ids: frozenset[int]) -> "Guide":
        """Returns a guide for an answer after `beginning`, which a token of `stop_ids` may end."""
        return Guide(self.matcher.deep_copy(), self.pieces, copy(beginning), stop_ids)


class Guide:
    """Knows what may come next in one answer: the forced beginning, then what its grammar allows.

    It is used like a `Beginning`, which takes its place where there is no grammar.
    """

    def __init__(
        self,
        matcher: "LLMatcher",
        pieces: "_Pieces",
        beginning: Beginning,
        stop_ids: frozenset[int],
    ) -> None:
        self._matcher = matcher
        self._pieces = pieces
        self._beginning = beginning
        self._stop_ids = stop_ids
        self._allowed: Ids | None = None

    @property
    def allowed(self) -> Ids:
        """Returns the tokens that may come next, in order; raises `UsageError` if there is none."""
        if self._allowed is None:
            opening, tokens = self._beginning.allowed, self._by_grammar()
            self._allowed = tokens if opening is None else self._fitting(opening, tokens)
            if len(self._allowed) == 0:
                raise UsageError(
                    "no token of this model fits the constraint here; allow other characters, or "
                    "give a token that may end the answer"
                )
        return self._allowed

    @property
    def ended(self) -> bool:
        """Returns whether nothing may follow."""
        return self._matcher.is_stopped()

    def take(self, token: int) -> bool:
        """Notes that the allowed `token` comes next; says whether it lies within the beginning."""
        self._allowed = None
        remaining = self._beginning.remaining_bytes
        if self._beginning.take(token):
            return True
        if token not in self._stop_ids:
            tail = self._pieces.bytes_of(token)[remaining:] if remaining else b""
            for part in self._pieces(tail) if remaining else [token]:
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

    def _fitting(self, opening: Ids, tokens: Ids) -> Ids:
        """Returns those of `opening` within the beginning, or whose rest fits the grammar."""
        pieces = {self._pieces.bytes_of(token) for token in tokens.tolist()}
        first_bytes = {piece[:1] for piece in pieces}
        remaining = self._beginning.remaining_bytes

        def fits(token: int) -> bool:
            tail = self._pieces.bytes_of(token)[remaining:]
            if not tail or tail in pieces or tail[:1] not in first_bytes:
                return not tail or tail in pieces
            parts = self._pieces(tail)
            return bool(parts) and self._matcher.validate_tokens(parts) == len(parts)

        within = self._beginning.within
        return np.array(
            [token for token in opening.tolist() if token in within or fits(token)], np.int64
        )


def _check_kind(value: object) -> None:
    if not isinstance(value, Constraint):
        raise UsageError(
            "constraint is a Constraint, such as Constraint.regex(pattern), .json(schema) or "
            f".grammar(text); {type(value).__name__} was given"
        )


def _check(matcher: "LLMatcher") -> None:
    if matcher.is_error():
        raise UsageError(f"the constraint cannot be followed: {_in_words(matcher.get_error())}")


def _in_words(error: str) -> str:
    """Returns llguidance's message without its places in a grammar that the user did not write."""
    bare = error.replace("<non-verbose/>", "").strip()
    bare = re.split(r"\n +[0-9]+ \| ", re.sub(r"^at [0-9]+\([0-9]+\): ", "", bare))[0]
    text = " ".join(bare.split())
    for begins, words in _ERRORS.items():
        if text.startswith(begins):
            return (
                f"{words}{text.removeprefix(begins)}"[:_MESSAGE_CHARACTERS]
                if words.endswith(": ")
                else words
            )
    return text[:_MESSAGE_CHARACTERS]


def _check_depth(schema: Mapping[str, Any]) -> None:
    """Raises `UsageError` for a schema whose parts lie, or refer to each other, too deeply."""
    stack: list[tuple[Any, int]] = [(schema, 0)]
    references: set[str] = set()
    while stack:
        part, depth = stack.pop()
        if depth > _MOST_NESTED:
            raise UsageError(
                f"the JSON schema is nested too deeply; nest it at most {_MOST_NESTED} deep"
            )
        if is_object(part):
            references |= {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
            stack += [(row, depth + 1) for row in part.values()]
        elif isinstance(part, list | tuple):
            stack += [(row, depth + 1) for row in cast(Sequence[Any], part)]
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


def _in_slashes(match: re.Match[str]) -> str:
    """Returns a part of a pattern as it is written between slashes."""
    return match[1] or {"/": r"\/", "\n": r"\n"}[match[2]]
