"""Answers under a schema, a grammar, a pattern: whatever the model prefers, they fit."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers

from kvq.errors import UsageError
from kvq_models.control import ControlTokens
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.answer import grammar_trial as trial
from kvq_runtime.answer.constraint import MOST_CHARACTERS, Constraint, Grammars
from kvq_runtime.answer.drafter import Draft
from kvq_runtime.answer.gbnf import to_lark
from kvq_runtime.answer.generation import Generation, GenerationOptions, Step, Vocabulary
from kvq_runtime.config import Sampling
from tiny import byte_level_tokenizer

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

END = 0
GREEDY = Sampling(temperature=0)
HOT = Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0)


def sentence_pieces() -> Tokenizer:
    """Makes a tokenizer of letters, ▁ and a few longer pieces; others are written in bytes."""
    pieces = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *'abcdefg0123{}":,']
    pieces += ["▁a", "ab", '{"', '":', "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("{", '"'), ('"', ":"), ("▁a", "b")]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    library = Library(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return Tokenizer.from_json(library.to_str(), ControlTokens(eos=(END,)))


BYTES = Tokenizer.from_json(byte_level_tokenizer().to_str(), ControlTokens(eos=(END,)))
TOKENIZERS = {"byte level": BYTES, "sentence pieces": sentence_pieces()}
VOCABULARIES = {
    name: Vocabulary.of(tokenizer, frozenset({END})) for name, tokenizer in TOKENIZERS.items()
}


def answer(
    constraint: Constraint,
    *,
    tokenizer: str = "byte level",
    seed: int = 0,
    preferred: Sequence[int] = (),
    drafts: str = "none",
    room: int = 4000,
    **options: Any,
) -> tuple[str, str, list[Step]]:
    """Returns text, finish reason and steps of a model of random logits that likes `preferred`.

    `drafts` certain: three tokens are guessed at a time, some right, some wrong, some against the
    rules; drawn: a poorer model guesses along the rules (`Generation.foresight`).
    """
    vocabulary = VOCABULARIES[tokenizer]
    size = TOKENIZERS[tokenizer].vocab_size + 3  # a model's vocabulary may be padded
    generation = Generation(
        vocabulary,
        GenerationOptions(**{"sampling": HOT} | options, grammar=vocabulary.grammar(constraint)),
        history=[1],
        room=room,
        generator=np.random.default_rng(seed),
    )
    assert generation.exact_rows == 0
    chosen: list[int] = []
    steps: list[Step] = []
    kept = 0

    def logits(place: int) -> np.ndarray:
        row = np.random.default_rng([seed, place]).standard_normal(size).astype(np.float32)
        if place < len(preferred):
            row[preferred[place]] += 50
        return row

    def drafted(place: int) -> Draft:
        if drafts == "none" or generation.room < 5:
            return Draft()
        if drafts == "certain":
            return Draft(ids=tuple(int(np.argmax(logits(place + ahead))) for ahead in range(3)))
        foresight = generation.foresight()
        poorer = [foresight.choose(0.5 * logits(place + ahead)) for ahead in range(2)]
        return Draft(
            ids=tuple(token for token, _ in poorer),
            probabilities=np.stack([row for _, row in poorer if row is not None]),
        )

    while generation.finish_reason is None:
        draft = drafted(len(chosen))
        rows = np.stack([logits(len(chosen) + row) for row in range(len(draft.ids) + 1)])
        accepted = generation.take(rows, draft)
        kept += len(accepted.path)
        chosen += [*(draft.ids[place] for place in accepted.path), accepted.token]
        steps += accepted.steps
    assert kept > 0 or drafts != "drawn"
    return "".join(step.text for step in steps), generation.finish_reason, steps


SCALARS = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "integer", "minimum": -5, "maximum": 120},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 9},
        {"type": "string", "minLength": 2, "maxLength": 3},
        {"enum": ["a", "bé", 3, None, '"\\']},
        {"const": {"a": [1, 2]}},
    ]
)


def _objects(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(st.sampled_from("abcé"), parts, max_size=3).map(
        lambda rows: {
            "type": "object",
            "properties": rows,
            "required": sorted(rows)[:2],
            "additionalProperties": False,
        }
    )


SCHEMAS = st.recursive(
    SCALARS,
    lambda parts: st.one_of(
        _objects(parts),
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 3}, parts),
        st.builds(lambda *rows: {"anyOf": list(rows)}, parts, parts),
    ),
    max_leaves=5,
)


@settings(max_examples=50, deadline=None)
@given(SCHEMAS, st.integers(0, 99), st.sampled_from(sorted(TOKENIZERS)))
def test_every_answer_is_json_that_fits_its_schema(schema: Any, seed: int, tokenizer: str) -> None:
    text, reason, steps = answer(Constraint.json(schema), tokenizer=tokenizer, seed=seed)
    assert reason == "stop"
    jsonschema.validate(json.loads(text), schema)
    assert "\ufffd" not in "".join(step.text for step in steps)  # no half of a character is shown


def test_patterns_and_formats_are_kept() -> None:
    parts = {
        "a": {"type": "string", "pattern": "^[a-cé]{2,4}$"},
        "b": {"type": "string", "format": "date"},
    }
    schema = {"type": "object", "properties": parts, "required": ["a", "b"]}
    schema["additionalProperties"] = False
    for seed in range(5):
        value = json.loads(answer(Constraint.json(schema), seed=seed)[0])
        jsonschema.validate(value, schema)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", value["b"])


@pytest.mark.parametrize("seed", range(5))
def test_the_answer_is_the_same_with_drafts(seed: int) -> None:
    schema = {"type": "array", "items": {"enum": ["one", "two"]}, "minItems": 2, "maxItems": 9}
    for sampling in (GREEDY, HOT):
        alone = answer(Constraint.json(schema), seed=seed, sampling=sampling)
        drafted = answer(Constraint.json(schema), seed=seed, sampling=sampling, drafts="certain")
        assert alone[:2] == drafted[:2]
    jsonschema.validate(json.loads(alone[0]), schema)


def test_drawn_drafts_keep_to_the_grammar_too() -> None:
    schema = {"type": "array", "items": {"enum": ["one", "two", 3]}, "minItems": 3, "maxItems": 9}
    for seed in range(8):
        text, reason, _ = answer(Constraint.json(schema), seed=seed, drafts="drawn")
        assert reason == "stop"
        jsonschema.validate(json.loads(text), schema)


def test_what_is_no_constraint_is_refused_with_how_to_make_one() -> None:
    with pytest.raises(UsageError, match=r"such as Constraint\.regex.*; dict was given"):
        answer({"regex": "[0-9]"})  # type: ignore[arg-type]


def test_what_the_model_wants_is_taken_where_it_fits() -> None:
    schema = {"type": "object", "properties": {"é": {"type": "string"}}, "required": ["é"]}
    expected = '{"é": "any text, \\"quoted\\" or ünlike"}'
    actual = answer(Constraint.json(schema), preferred=[*BYTES.encode(expected), END])
    assert actual[:2] == (expected, "stop")
    # A token that does not fit is not chosen, however likely it is.
    text, _, _ = answer(Constraint.regex("[0-9]{4}"), preferred=BYTES.encode("none"))
    assert re.fullmatch("[0-9]{4}", text)


def test_what_leaves_no_choice_is_written() -> None:
    text = "é" * 300 + "ab" * 50
    assert answer(Constraint.regex(text))[:2] == (text, "stop")
    assert answer(Constraint.grammar('root ::= "' + "é" * 9 + '"'))[0] == "é" * 9


def test_any_object_is_meant_where_no_schema_is_given() -> None:
    # Random tokens seldom close an object, so the text is the beginning of one.
    text, reason, _ = answer(Constraint.json(), preferred=[*BYTES.encode('{"a": [1, {}]}'), END])
    assert (json.loads(text), reason) == ({"a": [1, {}]}, "stop")
    assert answer(Constraint.json(), preferred=BYTES.encode("[1]"), room=30)[0].lstrip()[0] == "{"


def test_an_answer_cut_short_says_so() -> None:
    text, reason, steps = answer(Constraint.regex("[ab]{50}"), max_tokens=7)
    assert (reason, len(steps)) == ("length", 7)
    assert re.fullmatch("[ab]{1,49}", text)


def test_spaces_come_to_an_end() -> None:
    space = BYTES.encode(" ")[0]
    text, reason, _ = answer(
        Constraint.json({"type": "array", "maxItems": 0}), preferred=[space] * 400
    )
    assert (json.loads(text), reason) == ([], "stop")
    assert len(text) <= 34


@pytest.mark.parametrize("seed", range(8))
def test_the_end_of_the_prompt_and_the_grammar_meet(seed: int) -> None:
    """Checks that the bytes an answer begins with are not its text; a token may hold both."""
    text, reason, _ = answer(Constraint.regex("(first|final) [a-f]{3}"), begin_with=b"(", seed=seed)
    assert reason == "stop"
    assert re.fullmatch("(first|final) [a-f]{3}", text)
    joined = BYTES.encode("(first")
    assert BYTES.token_bytes(joined[0]) == b"(" or len(joined) < 6
    actual = answer(Constraint.regex("first.*"), begin_with=b"(", preferred=[*joined, END])
    assert actual[0] == "first"


def test_one_token_may_end_the_beginning_and_begin_the_grammar() -> None:
    piece = next(
        token
        for token in range(BYTES.vocab_size)
        if len(BYTES.token_bytes(token, special=False)) > 3
    )
    content = BYTES.token_bytes(piece)
    rest = re.escape(content[1:].decode())
    actual = answer(Constraint.regex(f"{rest}!"), begin_with=content[:1], preferred=[piece])
    assert (actual[0], actual[2][0].token) == (f"{content[1:].decode()}!", piece)
    # The same token is not allowed where the grammar wants something else.
    actual = answer(Constraint.regex("=!"), begin_with=content[:1], preferred=[piece])
    assert actual[0] == "=!"


def test_biases_and_penalties_choose_among_what_fits() -> None:
    a, b = BYTES.encode("a")[0], BYTES.encode("b")[0]
    likes = Sampling(temperature=0, logit_bias={b: 99.0, BYTES.encode("z")[0]: 999.0})
    assert answer(Constraint.regex("[ab]{5}"), sampling=likes)[0] == "bbbbb"
    forbids = Sampling(temperature=0, logit_bias={a: -np.inf})
    assert answer(Constraint.regex("[ab]{5}"), sampling=forbids)[0] == "bbbbb"
    both = Sampling(logit_bias={a: -np.inf, b: -np.inf})
    with pytest.raises(UsageError, match="forbids every token"):
        answer(Constraint.regex("[ab]"), sampling=both)


# Grammars

JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value){0,2}
  )? "}" ws
array  ::= "[" ws ( value ("," ws value){0,2} )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-f]{4}) ){0,5} "\"" ws # text
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [1-9] [0-9]?)? ws
ws ::= | " " | "\n" [ \t]{0,2}
"""


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= "yes" | "no"', "yes|no"),
        (
            'root ::= (word " "){2} word\nword ::= [a-c]+ | "\\u00e9" # two',
            "([a-c]+|é)( ([a-c]+|é)){2}",
        ),
        ('root ::= "[" ( root | [0-9] )? "]"', r"\[.*\]"),
        ('root ::= [^a-z\\]\\x00-\\x40]{3}"\\""', r'[^a-z\]\x00-\x40]{3}"'),
        ('root ::= a{2,3} "/"\na ::= "x" | "" "y"\n', "[xy]{2,3}/"),
        ('root ::= "\\\\n" . "\\t"', "\\\\n.\t"),
        ("root ::= [a-] [-b] [+--]", "[a-][-b][+,-]"),
    ],
)
def test_a_grammar_is_followed(grammar: str, pattern: str) -> None:
    for seed in range(4):
        text, reason, _ = answer(Constraint.grammar(grammar), seed=seed)
        assert reason == "stop"
        assert re.fullmatch(pattern, text, re.DOTALL), text


def test_a_grammar_of_json_writes_json() -> None:
    for seed in range(6):
        text, reason, _ = answer(Constraint.grammar(JSON_GBNF), seed=seed)
        assert reason == "stop"
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("grammar", "complaint"),
    [
        ("", "no rule named root"),
        ('x ::= "a"', "no rule named root"),
        ("root ::= foo", "names 'foo', which has no rule"),
        ('root ::= "a', "line 1 of the grammar is not GBNF"),
        ('root ::= "a"\n\nb := "c"', "line 3 of the grammar is not GBNF"),
        ('root ::= ("a"', "not understood at 'its end'"),
        ('root ::= "a")', "not understood at ')'"),
        ('root ::= * "a"', "repeats nothing"),
        ('root ::= "a"{3,2}', "no number of repeats"),
        ('root ::= "\\ud800"', "no character of Unicode"),
        ('root ::= "\\x1"', "not complete"),
        ("root ::= [b-a]", "runs backwards"),
        ("root ::= []", "not a set"),
        ('root ::= "a"\nroot ::= "b"', "two rules named 'root'"),
        ('"a" root ::= "b"', "begin it with NAME"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "deeper than 64"),
    ],
)
def test_what_is_no_grammar_is_named(grammar: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        to_lark(grammar)


# Refusals, and how soon they come


def deep(levels: int) -> str:
    return '{"type":"array","items":' * levels + "{}" + "}" * levels


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", "is an object"),
        ({"type": "bogus"}, "cannot be read at /type: 'bogus' is none of"),
        ({"properties": {"a": 3}}, "cannot be read at /properties/a: a schema is an object"),
        ({"items": {"minLength": -1}}, "cannot be read at /items/minLength: it has to be a whole"),
        ({"$ref": "#/$defs/none"}, "'/$defs/none' refers to no part of the schema"),
        ({"$ref": "#"}, "no text of this model fits"),
        (
            {"type": "string", "minLength": 3, "maxLength": 2},
            "no value fits the JSON schema: minLength (3) is greater than maxLength (2)",
        ),
        (
            {"type": "string", "pattern": "^a$", "minLength": 2},
            "a pattern, a format or a length of it exclude each other",
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"minimum": 2, "maximum": 1, "type": "integer"}},
                "required": ["a"],
            },
            "required property 'a' is unsatisfiable",
        ),
        (deep(200), "nested too deeply"),
        (deep(100_000), "at most 262144"),
        (deep(9_000), "nested too deeply"),
        ({"enum": [f"value {number}" for number in range(50_000)]}, f"at most {MOST_CHARACTERS}"),
        (
            {"allOf": [{"pattern": f"a.{{{n}}}b{n}", "type": "string"} for n in range(60)]},
            "too much",
        ),
        ({"type": "string", "x": {1, 2}}, "not JSON"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(schema: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        VOCABULARIES["byte level"].grammar(Constraint.json(schema))


@pytest.mark.parametrize(
    "pattern",
    [
        *("(", "(?=a)b", "(a|aa)+" * 300, "(" * 100_000, "a{1000000000}", r"\d\b", "[z-a]"),
        *("\ud800", "\ud800" * 5000),
    ],
)
def test_a_pattern_ends_in_an_answer_or_a_refusal(pattern: str) -> None:
    try:
        text, reason, _ = answer(Constraint.regex(pattern), max_tokens=20)
    except UsageError as error:
        text, reason = str(error)[:500], "refused"
    assert reason != "stop" or re.fullmatch(pattern, text)
    assert len(text) < 500


# Constraints that would overflow a stack, or take long


def chained(levels: int, opening: str, closing: str) -> str:
    """Makes a schema whose definitions refer to each other in a chain, each in `opening`."""
    parts = [f'"{n}":{opening}{{"$ref":"#/$defs/{n + 1}"}}{closing}' for n in range(levels)]
    return f'{{"$ref":"#/$defs/0","$defs":{{{",".join(parts)},"{levels}":{{}}}}}}'


def in_a_chain(levels: int) -> Constraint:
    return Constraint.json(chained(levels, "", ""))


def objects_in_a_chain(levels: int) -> Constraint:
    return Constraint.json(chained(levels, '{"type":"object","properties":{"a":', "}}"))


def lists_in_a_chain(levels: int) -> Constraint:
    return Constraint.json(chained(levels, '{"items":', "}"))


def lists_of_lists_in_a_chain(levels: int) -> Constraint:
    return Constraint.json(chained(levels, '{"items":{"items":{"items":{"items":', "}}}}"))


def choices_in_a_chain(levels: int) -> Constraint:
    return Constraint.json(chained(levels, '{"anyOf":[', "]}"))


def nested(levels: int) -> Constraint:
    return Constraint.json(deep(levels))


def bracketed(levels: int) -> Constraint:
    return Constraint.regex("(" * levels + "a" + ")" * levels)


def rules_in_a_chain(levels: int, last: str = '"a"') -> Constraint:
    rules = "\n".join(f"r{n} ::= r{n + 1}" for n in range(levels))
    return Constraint.grammar(f"root ::= r0\n{rules}\nr{levels} ::= {last}")


def rules_in_a_ring(levels: int) -> Constraint:
    return rules_in_a_chain(levels, 'r0 | "a"')


def repeats(times: int) -> Constraint:
    return Constraint.grammar("root ::= " + "(" * 6 + '"a"' + f"){{{times}}}" * 6)


def properties(count: int) -> Constraint:
    rows = {f"p{n}": {"type": "string"} for n in range(count)}
    return Constraint.json({"type": "object", "properties": rows})


DEEP = [
    in_a_chain, objects_in_a_chain, lists_in_a_chain, lists_of_lists_in_a_chain,
    choices_in_a_chain, nested, bracketed, rules_in_a_chain, rules_in_a_ring,
]  # fmt: skip

# Reads its input on 2 MiB of stack and prints how many KiB that took.
ON_LITTLE = """
import sys, llguidance
from resource import RUSAGE_SELF, getrusage
from kvq_runtime.answer import grammar_trial as trial
lark, byte = sys.stdin.read(), llguidance.LLTokenizer("byte")
before = getrusage(RUSAGE_SELF).ru_maxrss
trial.on_stack(2 << 20, lambda: trial.new_matcher(byte, lark))
print(getrusage(RUSAGE_SELF).ru_maxrss - before)
"""


def largest_small(shape: Callable[[int], Constraint]) -> Constraint:
    """Returns the largest constraint of a shape that is read without a trial."""

    def too_large(levels: int) -> bool:
        try:
            return not shape(levels).small
        except UsageError:
            return True

    return shape(bisect_left(range(2100), True, key=too_large) - 1)


@pytest.mark.parametrize("shape", [*DEEP, repeats])
def test_what_is_small_takes_little_stack_and_memory(shape: Callable[[int], Constraint]) -> None:
    """Reads it in a process of its own, which an overflow would kill."""
    constraint = largest_small(shape)
    assert constraint.small
    assert shape in (nested, repeats) or len(constraint.lark) > 4000
    process = subprocess.run(
        [sys.executable, "-c", ON_LITTLE], input=constraint.lark, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (process.returncode, process.stderr) == (0, "")
    assert int(process.stdout) < 30 << 10


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: objects_in_a_chain(1000), "refers to 1001 places; at most 500"),
        (lambda: rules_in_a_chain(5000), "5002 rules; give at most 2000"),
        # Within these bounds, and more stack than the trial has.
        (lambda: lists_of_lists_in_a_chain(499), "too much work"),
        (lambda: properties(7000), "too much work"),
        (lambda: Constraint.json({"type": "integer", "multipleOf": 99_999_989}), "too much work"),
        (lambda: Constraint.grammar('root ::= "a"' + "*" * 200_000), "more than 64 times over"),
        (lambda: Constraint.grammar('root ::= "a"' + "*" * 65), "more than 64 times over"),
    ],
)
def test_what_is_too_deep_or_too_much_is_refused(
    make: Callable[[], Constraint], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        VOCABULARIES["byte level"].grammar(make())


def test_what_is_within_the_bounds_is_followed() -> None:
    for constraint in (objects_in_a_chain(499), rules_in_a_ring(1998), properties(300)):
        assert not constraint.small
    for constraint in (rules_in_a_chain(1998), rules_in_a_ring(1998)):
        assert answer(constraint)[:2] == ("a", "stop")
    expected = '{"a":{"a":{"a":5}}}'
    actual = answer(objects_in_a_chain(3), preferred=[*BYTES.encode(expected), END])
    assert actual[:2] == (expected, "stop")
    VOCABULARIES["byte level"].grammar(objects_in_a_chain(499))
    assert answer(Constraint.grammar('root ::= "a"{2}{3} "b"'))[0] == "aaaaaab"


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Returns the processes that are started, in their order."""
    processes: list[subprocess.Popen[bytes]] = []

    class Seen(subprocess.Popen):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Seen)
    return processes


def test_a_small_constraint_starts_no_process_and_a_kept_one_no_second(
    trials: list[subprocess.Popen[bytes]],
) -> None:
    grammars = Grammars(BYTES)
    for constraint in (Constraint.json(), properties(100), rules_in_a_chain(100)):
        assert grammars.read(constraint) is grammars.read(constraint)
    assert trials == []
    large = [properties(200 + count) for count in range(3)]
    first = [grammars.read(constraint) for constraint in large[:2]]
    assert [grammars.read(constraint) for constraint in large[:2]] == first
    assert len(trials) == 2
    # A third one takes the place of the one that was not used for longest.
    grammars.read(large[2])
    assert grammars.read(large[1]) is first[1]
    assert len(trials) == 3
    assert grammars.read(large[0]) is not first[0]
    assert [trial.returncode for trial in trials] == [0] * 4


def test_a_trial_ends_when_nobody_wants_it_any_more(
    trials: list[subprocess.Popen[bytes]],
) -> None:
    with pytest.raises(UsageError):
        Grammars(BYTES).read(properties(300), lambda: len(trials) > 0)
    assert [trial.returncode for trial in trials] == [-signal.SIGKILL]


def test_a_grammar_with_tokens_of_the_model_is_tried_like_any_other() -> None:
    trial.try_out('start: <[300]> %json {"type": "integer"}\n', lambda: False)
    with pytest.raises(UsageError, match="too much work"):
        trial.try_out(
            'start: <[300]> %json {"type": "integer", "multipleOf": 99999989}\n', lambda: False
        )


def test_a_schema_may_not_set_the_library_up() -> None:
    spaces = {"type": "integer", "x-guidance": {"whitespace_pattern": "z+", "lenient": True}}
    assert json.loads(answer(Constraint.json(spaces), seed=3)[0]) is not None


def test_without_a_tokenizer_there_is_no_constraint() -> None:
    with pytest.raises(UsageError, match="no tokenizer"):
        Vocabulary().grammar(Constraint.regex("a"))


def test_a_model_without_the_characters_says_so() -> None:
    library = Library(models.BPE(vocab={"<e>": 0, "a": 1}, merges=[]))
    library.decoder = decoders.ByteLevel()
    grammars = Grammars(Tokenizer.from_json(library.to_str(), ControlTokens(eos=(0,))))
    grammars.read(Constraint.regex("a+"))
    with pytest.raises(UsageError, match="no text of this model fits"):
        grammars.read(Constraint.regex("b"))
