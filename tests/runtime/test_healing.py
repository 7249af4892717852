"""Healed prompts: which tokens may come and which are text, against brute force and by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from kvq.config import KvPlan
from kvq.errors import UsageError
from kvq_apps.cli import main
from kvq_apps.serve.server import Server
from kvq_models.control import ControlTokens, FimTokens
from kvq_models.infilling import infill_prompt
from kvq_models.pieces import PieceIndex
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.answer.generation import GenerationOptions, Step, Vocabulary
from kvq_runtime.answer.healing import heal
from kvq_runtime.answer.sampling import distribution
from kvq_runtime.config import Sampling, SessionConfig
from kvq_runtime.engine import Engine
from kvq_runtime.sequence.passes import run
from kvq_runtime.session.session import Session
from rule_backend import RuleBackend, RuleCache
from serving import Rule, ask, running
from shelf import Shelf
from tiny import CORPUS, byte_level_tokenizer

GREEDY = Sampling(temperature=0)
HOT = Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0)
END = "<|end|>"
# "Ċ" and "Ġ" are how the byte alphabet writes a line break and a space; "Ł" is the byte 0x9f.
MERGES = (
    (")", ":"), (":", "Ċ"), ("):", "Ċ"), (":Ċ", "Ġ"), (")", ":Ċ"),
    ("r", "e"), ("re", "t"), ("ret", "u"), ("retu", "r"), ("retur", "n"), ("return", "s"),
    ("Ł", "e"), ("Łe", "Ã"),
)  # fmt: skip


def small_tokenizer() -> Tokenizer:
    """Makes all bytes, the results of MERGES and a control token; a merge is of two tokens."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += dict.fromkeys(left + right for left, right in MERGES)
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    library = Library(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(END, special=True)])
    end = library.token_to_id(END)
    return Tokenizer.from_json(library.to_str(), ControlTokens(bos=end, eos=(end,), start=(end,)))


SMALL = small_tokenizer()
TINY = Tokenizer.from_json(byte_level_tokenizer().to_str(), ControlTokens(eos=(0,)))


def script_rule(size: int, script: Sequence[int], begins: int) -> Any:
    """Makes a model that wants the tokens of a script, wherever it begins; then nothing special.

    Without a script its logits are random numbers made of the position and the last token.
    """

    def rule(tokens: Sequence[int]) -> np.ndarray:
        if not script:
            seed = [len(tokens), tokens[-1]]
            return np.random.default_rng(seed).standard_normal(size).astype(np.float32)
        logits = np.zeros(size, np.float32)
        if 0 <= len(tokens) - begins < len(script):
            logits[script[len(tokens) - begins]] = 9.0
        return logits

    return rule


def open_session(
    tokenizer: Tokenizer,
    *,
    script: Sequence[int] = (),
    begins: int = 0,
    context_tokens: int = 500,
    **vocabulary: Any,
) -> Session[RuleCache]:
    size = tokenizer.vocab_size
    return Session(
        backend=RuleBackend(script_rule(size, script, begins), vocab_size=size),
        vocabulary=replace(Vocabulary.of(tokenizer, frozenset(tokenizer.eos_ids)), **vocabulary),
        config=SessionConfig(
            plan=KvPlan(), context_tokens=context_tokens, budget_bytes=1000, seed=1
        ),
    )


def small(*pieces: bytes) -> list[int]:
    """Returns the ids of the tokens that stand for these bytes."""
    by_bytes = {SMALL.token_bytes(token): token for token in range(SMALL.vocab_size)}
    return [by_bytes[piece] for piece in pieces]


def healed(prompt: str, *pieces: bytes, **options: Any) -> tuple[Session, list[Step]]:
    """Continues `prompt` greedily by a model that wants these tokens after the cut."""
    ids, begin_with = heal(SMALL, SMALL.encode(prompt, start=True))
    session = open_session(
        SMALL,
        script=small(*pieces),
        begins=len(ids),
        context_tokens=options.pop("context_tokens", 500),
    )
    session.prefill(ids)
    count = options.pop("count", len(pieces))
    options = {"sampling": GREEDY, "begin_with": begin_with} | options
    return session, list(session.generate(count, **options))


def text_of(steps: Sequence[Step]) -> str:
    return "".join(step.text for step in steps)


def spelled(pieces: Sequence[bytes], text: bytes) -> bool:
    """Decides whether `text` is a beginning of some row of pieces, by trying all."""
    return not text or any(
        piece and (piece.startswith(text) or (text.startswith(piece) and
        spelled(pieces, text[len(piece) :])))
        for piece in pieces
    )  # fmt: skip


ALPHABET = st.sampled_from([0x00, 0x61, 0x62, 0xFF])
PIECE = st.lists(ALPHABET, max_size=4).map(bytes)


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECE, max_size=12), PIECE)
def test_openings_are_what_trying_every_token_finds(pieces: list[bytes], text: bytes) -> None:
    index = PieceIndex(dict(enumerate(pieces)))
    openings = index.openings(text)
    assert len(openings) == len(text)
    for place, opening in enumerate(openings):
        rest = text[place:]
        inside = {
            token: place + len(piece)
            for token, piece in enumerate(pieces)
            if piece and rest.startswith(piece) and spelled(pieces, rest[len(piece) :])
        }
        beyond = {
            token for token, piece in enumerate(pieces) if piece.startswith(rest) and piece != rest
        }
        assert opening.ends == inside
        assert opening.ids.tolist() == sorted({*inside, *beyond})
    longer = any(piece.startswith(text) and len(piece) > len(text) for piece in pieces)
    assert index.extends(text) == longer


def test_only_a_last_token_of_text_that_has_longer_ones_is_dropped() -> None:
    end = SMALL.token_id(END)
    assert heal(SMALL, SMALL.encode("f():", start=True)) == ([end, *small(b"f", b"(")], b"):")
    assert heal(SMALL, SMALL.encode("r", start=True)) == ([end], b"r")
    for whole in (
        SMALL.encode("r"),  # its only token
        [*small(b"r"), end],  # a control token
        SMALL.encode("x", start=True),  # nothing is longer
        SMALL.encode("returns", start=True),
        [],
    ):
        assert heal(SMALL, whole) == (whole, b"")


def test_of_a_text_with_a_gap_the_token_before_the_gap_is_dropped() -> None:
    end = SMALL.token_id(END)
    before, after = small(b"f", b"("), small(b"x")
    for suffix_first, cut, whole in (
        (False, [end, 0, *before, 1, *after, 2], "f():"),
        (True, [end, 0, 1, *after, 2, *before], "f():"),
        (False, [end, 0, 1, *after, 2], ""),
        (True, [end, 0, 1, *after, 2], ""),
    ):
        tokenizer = small_tokenizer()
        fim = FimTokens(prefix=0, suffix=1, middle=2, suffix_first=suffix_first)
        tokenizer.control = replace(tokenizer.control, fim=fim)
        ids = infill_prompt(tokenizer, whole, "x", 50)
        assert heal(tokenizer, ids) == (cut, b"):" if whole else b"")


def test_an_index_holds_no_control_tokens_and_is_made_once() -> None:
    (opening,) = TINY.pieces.openings(b"<")
    assert opening.ids.tolist() == [TINY.token_id("<")]
    assert TINY.pieces is TINY.pieces


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(st.sampled_from(CORPUS), st.text(min_size=1, max_size=30)),
    st.integers(1, 80),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([SMALL, TINY]),
)
def test_prompt_and_answer_are_one_text_however_it_is_cut(
    text: str, cut: int, count: int, hot: bool, tokenizer: Tokenizer
) -> None:
    prompt = text[:cut]
    whole = tokenizer.encode(prompt, start=True)
    ids, begin_with = heal(tokenizer, whole)
    session = open_session(tokenizer)
    session.prefill(ids)
    sampling = HOT if hot else GREEDY
    steps = list(session.generate(count, sampling=sampling, stop_ids=(), begin_with=begin_with))
    written = b"".join(tokenizer.token_bytes(token, special=False) for token in session.tokens)
    assert written.startswith(prompt.encode())
    assert prompt + text_of(steps) == written.decode("utf-8", errors="replace")
    assert len(steps) == count
    assert session.tokens[-count:] == tuple(step.token for step in steps)
    stats = session.stats()
    assert stats.new_tokens == count
    assert stats.prompt_tokens + stats.new_tokens == len(session.tokens)
    if not begin_with:
        assert session.tokens[: len(whole)] == tuple(whole)


@pytest.fixture(scope="module")
def engine(bundle: str) -> Iterator[Engine]:
    with Engine.open(bundle, threads=1, backend="float") as engine:
        yield engine


def logits_after(engine: Engine, ids: Sequence[int]) -> np.ndarray:
    with engine.session(k_bits=16, v_bits=16) as session:
        return [*session.logits(ids)][-1][-1]


@pytest.mark.parametrize("cut", [5, 10, 19, 26, 47])
def test_greedy_takes_the_best_token_of_the_whole_vocabulary_that_fits(
    engine: Engine, cut: int
) -> None:
    tokenizer, prompt = engine.tokenizer, CORPUS[1][:cut]
    ids, begin_with = heal(tokenizer, tokenizer.encode(prompt, start=True))
    assert begin_with
    expected, rest, new = list(ids), begin_with, 0
    while new < 3:
        scores = logits_after(engine, expected)
        pieces = [tokenizer.token_bytes(token, special=False) for token in range(len(scores))]
        fits = [
            token
            for token, piece in enumerate(pieces)
            if not rest or (piece and (piece.startswith(rest) or rest.startswith(piece)))
        ]
        token = max(fits, key=lambda token: (scores[token], -token))
        expected.append(token)
        new += not rest or len(pieces[token]) > len(rest)
        rest = rest[len(pieces[token]) :]
    with engine.session(k_bits=16, v_bits=16) as session:
        session.prefill(ids)
        steps = list(session.generate(3, sampling=GREEDY, stop_ids=(), begin_with=begin_with))
        assert session.tokens == tuple(expected)
    assert prompt + text_of(steps) == tokenizer.decode(expected)


def test_a_model_that_writes_the_same_token_again_gives_the_same_steps() -> None:
    whole = SMALL.encode("f():", start=True)
    again, steps = healed("f():", b"):", b"a", b"b", count=2)
    plain = open_session(SMALL, script=small(b"a", b"b"), begins=len(whole))
    plain.prefill(whole)
    assert steps == list(plain.generate(2, sampling=GREEDY))
    assert again.tokens == plain.tokens
    counts = [
        (session.stats().prompt_tokens, session.stats().new_tokens) for session in (again, plain)
    ]
    assert counts == [(len(whole), 2)] * 2


def test_the_token_that_reaches_beyond_gives_only_what_is_beyond() -> None:
    session, steps = healed("f():", b"):\n", b"x")
    assert [step.text for step in steps] == ["\n", "x"]
    assert [step.finish_reason for step in steps] == [None, "length"]
    assert session.tokens[-2:] == tuple(small(b"):\n", b"x"))
    assert (session.stats().prompt_tokens, session.stats().new_tokens) == (3, 2)


def test_tokens_within_the_cut_are_not_counted() -> None:
    session, steps = healed("f():", b")", b":\n ", b"x", count=2)
    assert [step.text for step in steps] == ["\n ", "x"]
    assert (session.stats().prompt_tokens, session.stats().new_tokens) == (4, 2)
    # The model's favourite does not fit; of equal tokens the first id is chosen.
    session, steps = healed("f():", b"x", b"y", count=1)
    assert session.tokens[3] == min(small(b")", b"):", b"):\n"))


def test_a_cut_within_a_character() -> None:
    whole = SMALL.encode("aß", start=True)
    assert [SMALL.token_bytes(token) for token in whole[1:]] == [b"a", b"\xc3", b"\x9f"]
    _, steps = healed("aß", b"\x9fe\xc3", b"\xb6", b"!")
    assert [step.text for step in steps] == ["e", "ö", "!"]
    # Cut short, the half character is shown as one.
    _, steps = healed("aß", b"\x9fe\xc3")
    assert [step.text for step in steps] == ["e\ufffd"]


def test_stop_strings_see_what_is_new_and_nothing_of_the_prompt() -> None:
    _, steps = healed("f():", b"):\n", b"x", stop_strings=[":\n", "):"])
    assert text_of(steps) == "\nx"
    _, steps = healed("f():", b"):\n", b"x", stop_strings=["\n"])
    assert [(step.text, step.finish_reason) for step in steps] == [("", "stop")]
    _, steps = healed("f():", b"):\n", b"x", b"y", stop_strings=["\nx"])
    assert [(step.text, step.finish_reason) for step in steps] == [("", None), ("", "stop")]


def test_an_end_token_may_not_come_before_the_cut_is_covered() -> None:
    _, steps = healed("f():", END.encode(), END.encode(), END.encode(), count=5)
    assert text_of(steps) == ""
    assert steps[-1].finish_reason == "stop"
    assert len(steps) == 1


def test_a_cancelled_beginning_leaves_the_session_as_it_was() -> None:
    ids, begin_with = heal(SMALL, SMALL.encode("f():", start=True))
    session = open_session(SMALL, script=small(b")", b":", b"x"), begins=len(ids))
    session.prefill(ids)
    options = {"sampling": GREEDY, "begin_with": begin_with}
    answers = iter([True])
    assert list(session.generate(3, cancel=lambda: next(answers), **options)) == []
    assert session.tokens == tuple(ids)
    steps = list(session.generate(1, cancel=lambda: False, **options))
    assert session.tokens[len(ids) :] == tuple(small(b")", b":", b"x"))
    assert text_of(steps) == "x"


def test_a_context_that_ends_within_the_cut_ends_the_answer() -> None:
    session, steps = healed("f():", b")", b":", context_tokens=5)
    assert [(step.text, step.finish_reason) for step in steps] == [("", "length")]
    assert len(session.tokens) == 5
    session, steps = healed("f():", b")", b":\n ", b"x", count=None, context_tokens=6)
    assert [(step.text, step.finish_reason) for step in steps] == [("\n ", None), ("x", "length")]


def test_a_session_saved_after_its_first_step_goes_on(tmp_path: Path) -> None:
    whole, _ = healed("f():", b"):\n", b"x", b"y")
    ids, begin_with = heal(SMALL, SMALL.encode("f():", start=True))
    session = open_session(SMALL, script=small(b"):\n", b"x", b"y"), begins=len(ids))
    session.prefill(ids)
    steps = session.generate(3, sampling=GREEDY, begin_with=begin_with)
    assert next(steps).text == "\n"
    session.save(tmp_path / "one.kvq")
    steps.close()
    other = open_session(SMALL, script=small(b"):\n", b"x", b"y"), begins=len(ids))
    other.load(tmp_path / "one.kvq")
    assert text_of(list(other.generate(2, sampling=GREEDY))) == "xy"
    assert other.tokens == whole.tokens
    other.rollback(3)
    assert text_of(list(other.generate(1, sampling=GREEDY, begin_with=begin_with))) == "\n"


def test_answers_written_side_by_side_have_room_for_the_cut() -> None:
    """Checks that the tokens of the cut take rows too, which are not the answers'."""
    fitting: list[int] = []
    for max_tokens in range(1, 6):
        session = open_session(SMALL, script=small(b")", b":", *[b"x"] * 9), begins=1)
        session.prefill(small(b"f"))
        if session.branches_fit(2, max_tokens, b"):"):
            fitting.append(max_tokens)
            options = GenerationOptions(max_tokens=max_tokens, sampling=GREEDY, begin_with=b"):")
            with session.branch_answers([1, 2], options) as branched:
                while branched.running:
                    run(branched.stepping())
                branched.kept = 1
            assert list(session.tokens) == small(b"f", b")", b":", *[b"x"] * max_tokens)
    assert fitting == list(range(1, session.config.draft_tokens // 2))


def test_bytes_that_no_token_spells_are_refused() -> None:
    index = PieceIndex({1: b"ab", 2: b"cd"})
    session = open_session(SMALL, pieces=lambda: index)
    session.prefill(small(b"a"))
    with pytest.raises(UsageError, match=r"no tokens of this model spell b'ax'"):
        next(session.generate(1, begin_with=b"ax"))
    assert session.tokens == tuple(small(b"a"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0, 0.4 / 0.7, 0.1 / 0.7, 0.2 / 0.7]),
        ({"top_k": 2}, [0, 4 / 6, 0, 2 / 6]),
        ({"top_p": 0.5}, [0, 1, 0, 0]),
        ({"min_p": 0.3}, [0, 4 / 6, 0, 2 / 6]),
        ({"temperature": 0}, [0, 1, 0, 0]),
        ({"logit_bias": {2: np.log(8.0), 0: 50.0}}, [0, 4 / 14, 8 / 14, 2 / 14]),
        ({"repeat_penalty": 1e9}, [0, 0, 1 / 3, 2 / 3]),
    ],
)
def test_filters_see_the_allowed_tokens_only(
    changes: dict[str, Any], expected: list[float]
) -> None:
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    logits = np.log([0.3, 0.4, 0.1, 0.2]).astype(np.float32)
    actual = distribution(logits, Sampling(**(plain | changes)), [1], np.array([1, 2, 3]))
    np.testing.assert_allclose(actual, expected, atol=1e-6)


# The server


def holed_rule() -> Rule:
    """Makes a rule whose prompts are healed; those of its holes end in the prefix."""
    rule = Rule(heals=True, infills=True)
    fim = FimTokens(prefix=3, suffix=4, middle=5, suffix_first=True)
    rule.tokenizer.control = replace(rule.tokenizer.control, fim=fim)
    return rule


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves one session of such a rule."""
    rule = holed_rule()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        with running(rule.load, sessions=1) as server:
            yield server


PROMPT = "def add(first, seco"


def continued(count: int, *, heals: bool) -> str:
    """Returns what the rule makes of PROMPT, without a server."""
    rule = Rule(heals=heals)
    ids, begin_with = heal(rule.tokenizer, rule.tokenizer.encode(PROMPT))
    assert bool(begin_with) == heals
    session = rule.session()
    session.prefill(ids)
    return text_of([*session.generate(count, sampling=GREEDY, begin_with=begin_with)])


def infilled(count: int, *, heals: bool) -> str:
    """Returns what the rule puts between PROMPT and a bracket, without a server."""
    rule = holed_rule()
    whole = infill_prompt(rule.tokenizer, PROMPT, ")", 500)
    ids, begin_with = heal(rule.tokenizer, whole) if heals else (whole, b"")
    assert bool(begin_with) == heals
    session = rule.session()
    session.prefill(ids)
    return text_of([*session.generate(count, sampling=GREEDY, begin_with=begin_with)])


def completed(server: Server, path: str = "/v1/completions", **body: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 6, "n_predict": 6, "temperature": 0} | body
    reply = ask(server, path, body)
    assert reply.status == 200, reply.body
    answer = reply.json
    return answer["content"] if path == "/completion" else answer["choices"][0]["text"]


def test_text_prompts_are_healed_by_the_server_and_nothing_else(server: Server) -> None:
    healed, plain = continued(6, heals=True), continued(6, heals=False)
    assert healed != plain
    ids = Rule().tokenizer.encode(PROMPT)
    off = {"x_kvq": {"heal": False}}
    for path in ("/v1/completions", "/completion"):
        assert completed(server, path) == healed
        assert completed(server, path, prompt=[PROMPT]) == healed
        assert completed(server, path, x_kvq={"heal": True}) == healed
        assert completed(server, path, **off) == plain
        assert completed(server, path, prompt=ids) == plain
    assert completed(server, logprobs=0) == completed(server, logprobs=2) == plain
    for path, body in (
        ("/v1/completions", {"prompt": PROMPT, "suffix": ")", "max_tokens": 4, "temperature": 0}),
        (
            "/infill",
            {"input_prefix": PROMPT, "input_suffix": ")", "n_predict": 4, "temperature": 0},
        ),
    ):
        texts = [ask(server, path, body | more).json for more in ({}, off)]
        shown = [reply.get("content") or reply["choices"][0]["text"] for reply in texts]
        assert shown == [infilled(4, heals=True), infilled(4, heals=False)]
        assert shown[0] != shown[1]


def test_what_is_healed_is_counted_as_the_prompt_that_was_sent(server: Server) -> None:
    ids = Rule().tokenizer.encode(PROMPT)
    body = {"prompt": PROMPT, "temperature": 0, "n": 2}
    for count in (1, 6):
        answer = ask(server, "/v1/completions", body | {"max_tokens": count}).json
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 2 * count)
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [continued(count, heals=True)] * 2
        assert texts[0]
    read = ask(server, "/completion", {"prompt": PROMPT, "n_predict": 0}).json
    assert (read["tokens_evaluated"], read["content"]) == (len(ids), "")


def test_a_healed_prompt_is_found_again(server: Server) -> None:
    cut, _ = heal(Rule(heals=True).tokenizer, Rule().tokenizer.encode(PROMPT))
    body = {"n_predict": 6, "temperature": 0}
    first = ask(server, "/completion", body | {"prompt": PROMPT, "cache_prompt": False}).json
    again = ask(server, "/completion", body | {"prompt": PROMPT}).json
    # All that was cut is cached; its last token goes through the model for its logits.
    assert (first["tokens_cached"], again["tokens_cached"]) == (0, len(cut) - 1)
    assert again["content"] == first["content"]


def test_a_wrong_wish_is_refused_by_its_name(server: Server) -> None:
    for prompt in (PROMPT, [5, 6]):
        reply = ask(server, "/completion", {"prompt": prompt, "x_kvq": {"heal": "no"}})
        assert (reply.status, reply.json["error"]["param"]) == (400, "x_kvq.heal")


# The command line


@pytest.fixture(scope="module")
def nano(shelf: Shelf) -> str:
    """Opens the small embedded model."""
    return str(shelf.embedded("nano"))


@pytest.mark.slow
def test_a_line_that_ends_goes_on_below(
    nano: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO()))

    def run(*words: str) -> dict[str, Any]:
        common = ("-n", "8", "--temp", "0", "--threads", "1", "--json")
        assert main(["run", "-m", nano, "def add(a, b):", *words, *common]) == 0
        return json.loads(capsys.readouterr().out)

    healed, plain = run(), run("--no-heal")
    assert healed["text"].startswith("\n    ")
    assert plain["text"] != healed["text"]
    assert healed["new_tokens"] == plain["new_tokens"] == 8
    assert healed["prompt_tokens"] == plain["prompt_tokens"]
    monkeypatch.setenv("KVQ_NO_HEAL", "1")
    assert run()["text"] == plain["text"]
