"""The draft head that comes with a model: what it computes, and drafts with it in sessions."""

import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from answers import LIMITS, chi_square
from draft_heads import HEAD, WALK, drafting_weights, make_drafting, make_walker, stacked
from kvq import native_library
from kvq.errors import BackendError, BudgetError, BundleError, KvqError, UsageError
from kvq_export.export import export_model
from kvq_models.config import ModelConfig
from kvq_models.products import products
from kvq_models.reference import PlainAttention, Weights, forward
from kvq_runtime.answer.drafter import Round
from kvq_runtime.answer.sampling import distribution
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.file_hashes import file_sha256
from kvq_runtime.bundle.manifest import DRAFT_FILE, checksum
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from kvq_runtime.sequence.passes import PassResult, forward_all, run
from kvq_runtime.session.session import Session
from kvq_specdraft import drafter_named
from kvq_specdraft.mtp import Mtp
from kvq_specdraft.relay import Relay
from logits import prompt
from shelf import EIGHT, Shelf
from tiny import make_checkpoint, read_safetensors, write_safetensors
from traces import AnsweredText, traced

needs_native = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())
GREEDY = Sampling(temperature=0)
TEXT = prompt(150)
ALWAYS = "mtp:least=1e-9,most=5"


# Heads of one dense layer, and of experts as checkpoints have them: Qwen3-Next's are one tensor
# each, Qwen 3.5's in two where they are the model's, Qwen 3.6's in two everywhere.
SOURCES: dict[str, Callable[[Path], Path]] = {
    "dense": make_drafting,
    "next": lambda path: make_drafting(path, "qwen3-next"),
    "mixed": lambda path: make_drafting(path, "qwen3-5-moe", "model."),
    "stacked": lambda path: make_drafting(path, "qwen3-5-moe", ""),
}


def source_of(shelf: Shelf, kind: str) -> Path:
    return shelf.once("source", f"mtp {kind}", SOURCES[kind])


@pytest.fixture(scope="module")
def source(shelf: Shelf) -> Path:
    return source_of(shelf, "dense")


@pytest.fixture(scope="module")
def bundle(shelf: Shelf, source: Path) -> Path:
    return shelf.exported(source, EIGHT)


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Engine]:
    with Engine.open(bundle, threads=1) as opened:
        yield opened


def opened(engine: Engine, draft: str | None = ALWAYS, **options: Any) -> Session[Any]:
    settings = {"context_tokens": 500, "kv": "8:8", "chunk_tokens": 64} | options
    return engine.session(draft=lambda: drafter_named(draft) if draft else None, **settings)


def goes_on(session: Session[Any], tokens: int, **options: Any) -> list[int]:
    settings = {"sampling": GREEDY, "stop_ids": []} | options
    return [step.token for step in session.generate(tokens, **settings)]


# What it computes


def torch_head(folder: Path, ids: np.ndarray, rounds: int) -> list[np.ndarray]:
    """Returns logits [T - 1, V] of the head's first guesses after each token, and of further.

    Round r reads the states of round r - 1 instead of the model's, one token further. Written from
    the formula over transformers' own layer: fc[norm(embedding) | norm(state)], layer, norm, head.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    config, parts = model.config, sys.modules[type(model).__module__]

    def part(name: str) -> Any:
        (class_name,) = (
            candidate
            for candidate in vars(parts)
            if candidate.endswith(name) and candidate.startswith("Qwen")
        )
        return getattr(parts, class_name)

    tensors = {
        name.removeprefix(HEAD): torch.from_numpy(np.array(tensor))
        for name, tensor in stacked(read_safetensors(folder / "model.safetensors")).items()
        if name.startswith(HEAD)
    }
    attends = config.layer_types.index("full_attention")
    layer = part("DecoderLayer")(config, attends)
    layer.load_state_dict(
        {
            name.removeprefix("layers.0."): tensor
            for name, tensor in tensors.items()
            if "layers." in name
        }
    )

    def norm(name: str, x: "torch.Tensor") -> "torch.Tensor":
        final_norm = part("RMSNorm")(config.hidden_size, eps=config.rms_norm_eps)
        final_norm.load_state_dict({"weight": tensors[f"{name}.weight"]})
        return final_norm(x)

    outputs: list[np.ndarray] = []
    with torch.no_grad():
        tokens = torch.from_numpy(ids)[None]
        states = model.model(tokens).last_hidden_state
        embedded = model.get_input_embeddings()(tokens)
        for _ in range(rounds):
            embedded, states = embedded[:, 1:], states[:, :-1]
            both = [norm("pre_fc_norm_embedding", embedded), norm("pre_fc_norm_hidden", states)]
            x = torch.cat(both, dim=-1) @ tensors["fc.weight"].T
            count = x.shape[1]
            positions = torch.arange(count)[None]
            mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
            rotary = model.model.rotary_emb(x, positions)
            states = norm("norm", layer(x, position_embeddings=rotary, attention_mask=mask))
            outputs.append(model.lm_head(states)[0].numpy())
    return outputs


def head_logits(
    config: ModelConfig, weight: Weights, of_head: Weights, ids: np.ndarray, rounds: int
) -> list[np.ndarray]:
    """Returns the same as `torch_head`, by the reference."""
    states, head = np.empty((len(ids), config.hidden_size), np.float32), config.drafting
    assert head is not None
    forward(config, weight, ids, np.arange(len(ids)), PlainAttention(), states=states)
    outputs: list[np.ndarray] = []
    for _ in range(rounds):
        ids, joined = ids[1:], states[:-1]
        states, at = np.empty_like(joined), np.arange(len(ids))
        attend = PlainAttention()
        outputs.append(forward(head, of_head, ids, at, attend, joined=joined, states=states))
    return outputs


def reference_head(bundle: Bundle, ids: np.ndarray, rounds: int = 1) -> list[np.ndarray]:
    head = bundle.draft_head
    assert head is not None
    return head_logits(bundle.config, bundle.read_weight, head.read_weight, ids, rounds)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", SOURCES)
def test_a_head_computes_what_its_formula_says(shelf: Shelf, kind: str) -> None:
    """Compares three rounds, each of which reads what the one before made."""
    source = source_of(shelf, kind)
    bundle, ids = shelf.exported(source, EIGHT), np.array(TEXT[:80])
    expected = torch_head(source, ids, 3)
    actual = head_logits(*drafting_weights(source), ids, 3)
    rounded = reference_head(Bundle.open(bundle), ids, 3)
    for actual_logits, other, of_8_bits in zip(actual, expected, rounded, strict=True):
        assert other.std() > 1
        np.testing.assert_allclose(actual_logits, other, atol=2e-3)
        assert np.abs(of_8_bits - other).mean() < 0.15 * other.std()


@needs_native
@pytest.mark.parametrize("kind", ["dense", "mixed"])
@pytest.mark.parametrize("name", ["onnx", "float"])
def test_backends_compute_what_the_reference_does(shelf: Shelf, name: str, kind: str) -> None:
    """HiddenStates of a text that comes in pieces, and the head over them in pieces."""
    bundle, ids = shelf.exported(source_of(shelf, kind), EIGHT), np.array(TEXT[:80])
    (expected,) = reference_head(Bundle.open(bundle), ids, 1)
    with Engine.open(bundle, threads=1, backend=name) as engine, opened(engine, kv="fp") as session:
        head = engine.backend.paged.draft_head
        drafter = session.drafter
        assert isinstance(drafter, Mtp)
        assert session.sequence.hidden_states is not None
        state_rows: list[np.ndarray] = []
        for start, stop in ((0, 50), (50, 51), (51, 80)):
            session.sequence.append(ids[start:stop].tolist())
            with session.sequence.branch() as branch:
                due = session.sequence.due()
                passed = run(branch.extend(due, rows=[-1 + len(due)]))
                state_rows.append(passed.hidden_states)
                branch.commit(range(len(due)))
        states = np.concatenate(state_rows)
        assert states.shape == (80, engine.backend.bundle.config.hidden_size)
        sequence = drafter._opened
        outputs: list[np.ndarray] = []
        for start, stop in ((0, 30), (30, 79)):
            with sequence.branch() as branch:
                tokens = ids[start + 1 : stop + 1].tolist()
                passed = run(branch.extend(tokens, joined=states[start:stop]))
                branch.commit(range(len(tokens)))
                outputs.append(passed.logits)
        assert head.model.vocab_size == expected.shape[1]
        assert np.abs(np.concatenate(outputs) - expected).mean() < 0.1 * expected.std()


# What sessions make of it


@pytest.mark.sampled
@needs_native
@pytest.mark.parametrize(
    ("case", "reads", "backend"),
    [
        ("qwen3-5", "token", "onnx"),
        ("qwen3-5", "token", "float"),
        ("qwen3-5", "state", "onnx"),
        ("qwen3-5", "state", "float"),
        ("qwen3-5-moe", "state", "onnx"),
    ],
)
def test_a_head_that_knows_is_right(shelf: Shelf, case: str, reads: str, backend: str) -> None:
    """Checks every guess, in all rounds, after prompts in pieces, rollbacks and other prompts."""
    made = f"walker {case} {reads}"
    source = shelf.once("source", made, lambda path: make_walker(path, reads, case))
    with Engine.open(shelf.exported(source, EIGHT), threads=1, backend=backend) as engine:
        with opened(engine, "mtp:least=1e-9,most=4") as session:
            walk = list(WALK)
            session.prefill((walk * 4)[:150])
            expected = (walk * 9)[150:]
            assert goes_on(session, 40) == expected[:40]
            session.rollback(17)
            assert goes_on(session, 30) == expected[23:53]
            session.align([*walk[:30], 7, *walk[:13]])
            assert goes_on(session, 30) == (walk * 2)[13:43]
            stats = session.stats()
        assert stats.rounds.drafted_tokens > 70
        # The text after a rollback goes on from a state that is computed again.
        assert stats.rounds.accepted_tokens == stats.rounds.drafted_tokens


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="weights leave memory on Linux alone")
def test_experts_of_a_head_are_within_the_models_budget(shelf: Shelf) -> None:
    path = shelf.exported(source_of(shelf, "stacked"), EIGHT)
    with Engine.open(path, threads=1) as engine, opened(engine, None) as session:
        session.prefill(TEXT[:40])
        expected = goes_on(session, 20)
    experts, head = Bundle.open(path).experts, Bundle.open(path).draft_head
    assert experts is not None
    assert head is not None
    assert head.experts is not None
    assert head.experts.stored == experts.stored // 3
    read = [
        head.form(product.weight)
        for product in products(head.config)
        if not product.exact and product.count == 1
    ]
    dense = sum(form.panels * form.panel_bytes for form in read)
    assert head.weight_bytes_per_step == dense + head.experts.chosen
    budget = 3 * experts.largest
    with Engine.open(path, threads=1, weights_budget=budget) as engine, opened(engine) as session:
        session.prefill(TEXT[:40])
        assert goes_on(session, 20) == expected
        before, drafter = engine.resident(), session.drafter
        assert isinstance(drafter, Mtp)
        with drafter._opened.branch() as branch:
            run(branch.extend([5], joined=np.ones((1, 128), np.float32)))
        after = engine.resident()
        assert before is not None
        assert after is not None
        assert after.chosen - before.chosen == 3
        assert after.held_bytes <= budget


@needs_native
@pytest.mark.parametrize("part", range(6))
def test_random_traces_answer_as_plain_decoding_does(
    engine: Engine, part: int, tmp_path: Path
) -> None:
    """Drafts, rejects, rolls back, takes another text, saves and loads at random."""
    draw = np.random.default_rng(part)
    bits = ("fp", "8:8", "4:2")[part % 3]
    free = "auto+mtp:least=1e-9" if part % 2 else ALWAYS
    texts = [TEXT, [*TEXT[:60], *prompt(50)[::-1]], prompt(90)[::-1]]
    with opened(engine, free, kv=bits) as drafted, opened(engine, None, kv=bits) as plain:
        for session in (drafted, plain):
            session.prefill(TEXT)
        for turn in range(7):
            kind = int(draw.integers(4))
            count = int(draw.integers(1, 20))
            place = tmp_path / f"{turn}"
            for number, session in enumerate((drafted, plain)):
                if kind == 0:
                    session.rollback(min(count, len(session.tokens) - 1))
                elif kind == 1:
                    session.align(texts[count % len(texts)])
                elif kind == 2:
                    session.save(place / f"{number}.kvq") if place.exists() else None
                    place.mkdir(exist_ok=True)
                    session.save(place / f"{number}.kvq")
                    goes_on(session, 3)
                    session.load(place / f"{number}.kvq")
            assert goes_on(drafted, count) == goes_on(plain, count)
            for session in (drafted, plain):
                cache = session.sequence.cache
                assert cache.peak_bytes <= cache.budget_bytes
            drafter = drafted.drafter
            drafter = drafter.second if isinstance(drafter, Relay) else drafter
            assert isinstance(drafter, Mtp)
            draft_cache = drafter._opened.cache
            assert draft_cache.peak_bytes <= draft_cache.budget_bytes
        assert drafted.stats().rounds.drafted_tokens > 0


# Of so few tokens a random head guesses some right.
FEW = Sampling(temperature=0, logit_bias=dict.fromkeys((20, 21, 22), 100.0))
STEPS = 24


@dataclass
class Watched:
    """Sessions that draft always, and their rounds: the text, where the head's begins, outcomes."""

    engine: Engine
    rounds: list[tuple[list[int], int, Round]] = field(default_factory=list)

    def opened(self) -> Session[Any]:
        session = opened(self.engine, "mtp:least=1e-9,most=3", kv="fp")
        drafter = session.drafter
        assert isinstance(drafter, Mtp)
        observe = drafter.observe

        def watch(outcome: Round) -> None:
            if outcome.drafted:
                self.rounds.append(([*drafter._text], drafter._base, outcome))
            observe(outcome)

        drafter.observe = watch
        return session


def answers(session: Session[Any], right: Sequence[int], draw: np.random.Generator) -> None:
    count = int(draw.integers(1, min(9, len(right))))
    assert goes_on(session, count, sampling=FEW) == [*right[:count]]
    assert isinstance(session.drafter, Mtp)
    cache = session.drafter._opened.cache
    assert cache.peak_bytes <= cache.budget_bytes


def guesses(engine: Engine, text: Sequence[int], base: int) -> np.ndarray:
    """Returns what a head that reads the text from `base` on at once guesses after each token."""
    with opened(engine, kv="fp", chunk_tokens=256) as session:
        drafter = session.drafter
        assert isinstance(drafter, Mtp)
        session.sequence.append(text)
        with session.sequence.branch() as branch:
            states = run(branch.extend(text, rows=[len(text) - 1])).hidden_states
        assert states is not None
        sequence = drafter._opened
        with sequence.branch() as branch:
            joined = states[base - 1 : -1]
            logits = run(branch.extend(text[base:], joined=joined)).logits
    chosen = [*FEW.logit_bias]
    return np.array(chosen)[logits[:, chosen].argmax(axis=1)]


@pytest.fixture(scope="module")
def chats(engine: Engine) -> list[AnsweredText]:
    """Returns a chat up to three of its answers, the same with another message, and a text."""
    end, results = min(engine.backend.model.stop_ids), list[AnsweredText]()
    for messages in ((30, 20, 25), (30, 21, 25), (90,)):
        text = list[int]()
        for message in messages:
            text += [*prompt(message, seed=message), end, 11, 12]
            with opened(engine, None, kv="fp") as session:
                session.prefill(text)
                results.append(AnsweredText([*text], goes_on(session, STEPS, sampling=FEW)))
            text += [*results[-1].answer[:12], end]
    return results


@needs_native
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))]
)
def test_random_traces_are_guessed_from_all_that_was_read(
    engine: Engine, chats: list[AnsweredText], tmp_path: Path, part: int
) -> None:
    """Tokens are plain decoding's, and guesses those of a head that reads the text at once."""
    watched = Watched(engine)
    for seed in range(20 * part, 20 * part + 20):
        traced(watched.opened, chats, answers, seed, tmp_path / "one")
    ends, known = [[*text, *answer] for text, answer in chats], dict[tuple[int, int], np.ndarray]()
    for text, base, outcome in watched.rounds:
        which = next(at for at, end in enumerate(ends) if end[: len(text)] == text)
        if (which, base) not in known:
            known[which, base] = guesses(engine, ends[which], base)
        assert known[which, base][len(text) - 1 - base] == outcome.draft.ids[0]
    drafted, accepted = (
        sum(getattr(outcome, name) for _, _, outcome in watched.rounds)
        for name in ("drafted", "accepted")
    )
    assert drafted > 500
    assert 0.1 < accepted / drafted < 0.9
    # Where a session was loaded a head begins anew.
    assert len({base for _, base in known}) > 10


@needs_native
def test_sampled_answers_keep_their_distribution(engine: Engine) -> None:
    """Draws four tokens that are one of two each, by chi-square; the head's chances differ."""
    either = {5: 100.0, 6: 100.0}
    sampling = Sampling(temperature=6, top_k=0, top_p=1, min_p=0, logit_bias=either)
    paths = list(itertools.product(either, repeat=4))
    counts = dict.fromkeys(paths, 0)
    with opened(engine, "mtp:least=1e-9,most=2", seed=3) as session:
        session.prefill(TEXT[:40])
        for _ in range(400):
            session.rollback(len(session.tokens) - 40)
            counts[tuple(goes_on(session, 4, sampling=sampling))] += 1
        stats = session.stats()
    assert stats.rounds.drafted_tokens > 350
    assert 0.2 < stats.rounds.accepted_tokens / stats.rounds.drafted_tokens < 0.95
    expected = np.ones(len(paths))
    with opened(engine, None) as plain:
        for place, path in enumerate(paths):
            for count, token in enumerate(path):
                plain.align([*TEXT[:40], *path[:count]])
                plain.prefill()
                logits = plain.sequence.encoding.logits
                assert logits is not None
                expected[place] *= distribution(logits, sampling, plain.tokens)[token]
    assert expected.max() < 0.6
    assert chi_square(np.array([*counts.values()]), expected) < LIMITS[15]


# What it costs, and where it is refused


@needs_native
def test_its_cache_is_part_of_the_budget(engine: Engine) -> None:
    for budget in ("800KiB", "200tok", "90%"):
        with (
            opened(engine, kv_budget=budget) as session,
            opened(engine, None, kv_budget=budget) as p,
        ):
            draft_bytes, whole = session.draft_bytes, p.config.budget_bytes
            assert draft_bytes > 0
            together = session.config.budget_bytes + draft_bytes
            assert together == whole if budget == "800KiB" else together > whole
            session.prefill(TEXT)
            goes_on(session, 4)
            assert session.stats().draft_bytes == draft_bytes
    with pytest.raises(BudgetError) as refused:
        opened(engine, kv_budget="1KiB")
    with pytest.raises(BudgetError) as alone:
        opened(engine, None, kv_budget="1KiB")
    assert str(refused.value) != str(alone.value)


def test_an_answer_has_no_head_of_its_own(engine: Engine) -> None:
    """Refuses a head for an answer, since it reads the states of a whole text."""
    with opened(engine, None) as session, pytest.raises(UsageError, match="give it to the session"):
        session.helpers(drafter_named("mtp"))


def test_a_bundle_names_its_graph_and_counts_its_weights(bundle: Path, shelf: Shelf) -> None:
    opened = Bundle.open(bundle)
    assert DRAFT_FILE in opened.manifest.files
    assert opened.manifest.weights is not None
    draft_names = {name for name in opened.manifest.weights.formats if name.startswith("draft.")}
    assert draft_names == {f"draft.{name}" for name in ("join", "layers.0.qkv", "layers.0.o")} | {
        f"draft.layers.0.{name}" for name in ("gate_up", "down")
    }
    head = opened.draft_head
    assert head is not None
    drafts = sum(
        head.form(name).panels * head.form(name).panel_bytes
        for name in ("join", "layers.0.qkv", "layers.0.o", "layers.0.gate_up", "layers.0.down")
    )
    without = Bundle.open(shelf.exported(shelf.family("qwen3-5"), EIGHT))
    assert without.draft_head is None
    more = opened.weight_bytes_per_step - without.weight_bytes_per_step
    stored = opened.manifest.weights.num_bytes - without.manifest.weights.num_bytes
    assert stored > drafts > 0
    assert more == stored - drafts


def test_a_graph_of_another_head_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    shutil.copy(copy / "model.onnx", copy / DRAFT_FILE)
    data = json.loads((copy / "kvq.json").read_text())
    size, digest = (copy / DRAFT_FILE).stat().st_size, file_sha256(copy / DRAFT_FILE)
    data["files"][DRAFT_FILE] = {"bytes": size, "sha256": digest}
    data["checksum"] = checksum(data)
    (copy / "kvq.json").write_text(json.dumps(data))
    with pytest.raises(BundleError, match=r"draft\.onnx does not compute the model"):
        Bundle.open(copy)
    del data["files"][DRAFT_FILE]
    data["checksum"] = checksum(data)
    (copy / "kvq.json").write_text(json.dumps(data))
    with pytest.raises(BundleError, match=r"lists no draft\.onnx"):
        Bundle.open(copy)


@needs_native
def test_models_without_a_head_are_refused(shelf: Shelf) -> None:
    with Engine.open(shelf.bundle(), threads=1) as engine:
        with pytest.raises(BackendError, match=r"has no draft head; Qwen 3\.5 models and Qwen3"):
            opened(engine)
        with opened(engine, None) as session, pytest.raises(KvqError, match="no draft head"):
            session.drafter = drafter_named("mtp")


def test_heads_that_are_not_computed_are_left_out(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Leaves out a head of two layers with a message, and names what an incomplete one lacks."""
    tensors = read_safetensors(source / "model.safetensors")
    two = Path(shutil.copytree(source, tmp_path / "two"))
    more = {
        name.replace("s.0.", "s.1."): tensor for name, tensor in tensors.items() if HEAD in name
    }
    write_safetensors(two / "model.safetensors", tensors | more)
    assert export_model(two, tmp_path / "of-two", EIGHT).config.draft_head is None
    assert "the draft head of two (mtp) is left out: it has several layers" in caplog.text
    caplog.clear()
    plain = make_checkpoint("qwen3", tmp_path / "plain")
    weights = read_safetensors(plain / "model.safetensors")
    whole = {f"{HEAD}fc.weight": tensors[f"{HEAD}fc.weight"]}
    write_safetensors(plain / "model.safetensors", weights | whole)
    assert export_model(plain, tmp_path / "of-another", EIGHT).config.draft_head is None
    assert "(mtp) is left out: heads of qwen3 models are none" in caplog.text
    caplog.clear()
    assert export_model(source, tmp_path / "of-one", EIGHT).config.draft_head is not None
    assert "left out" not in caplog.text
    del tensors["mtp.norm.weight"]
    write_safetensors(two / "model.safetensors", tensors)
    with pytest.raises(KvqError, match=r"mtp\.norm\.weight"):
        export_model(two, tmp_path / "of-none", EIGHT)


@needs_native
def test_sequences_with_and_without_states_share_a_pass(engine: Engine) -> None:
    """Checks that each gets its own rows' states and logits, as in a pass of its own."""
    texts = (TEXT[:30], TEXT[40:47], TEXT[60:80])
    alone, together = list[PassResult](), list[PassResult]()
    for results, joint in ((alone, False), (together, True)):
        sessions = [opened(engine, None if at == 1 else ALWAYS, kv="fp") for at in range(3)]
        works = [session.sequence.branch() for session in sessions]
        branches = [work.__enter__() for work in works]
        passes = [
            branch.extend(text, rows=[2, 5]) for branch, text in zip(branches, texts, strict=True)
        ]
        requests = [next(work) for work in passes]
        results.extend(
            forward_all(requests) if joint else [forward_all([request])[0] for request in requests]
        )
        for work, session in zip(works, sessions, strict=True):
            work.__exit__(None, None, None)
            session.close()
    for separate, shared in zip(alone, together, strict=True):
        np.testing.assert_array_equal(separate.logits, shared.logits)
    assert alone[1].hidden_states is together[1].hidden_states is None
    for place in (0, 2):
        first, second = alone[place].hidden_states, together[place].hidden_states
        assert first is not None
        assert second is not None
        np.testing.assert_array_equal(first, second)
        assert np.abs(np.diff(first, axis=0)).min(axis=1).max() > 0
