"""KV Prediction: what is predicted, how good it is, and that it never counts as computed."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq import native_library
from kvq.errors import UsageError
from kvq_models.reference import PlainAttention, forward
from kvq_runtime.backends import WHOLE, Mode, SequencePass
from kvq_runtime.engine import Engine
from kvq_runtime.sequence.prediction import prediction_named
from kvq_runtime.session.session import Session
from logits import divergence, generated, prompt
from shelf import EIGHT, Shelf

LAYERS = 4
TEXT = prompt(400)
BOTH = pytest.mark.parametrize("backend", ["onnx", "float"])


@pytest.fixture(scope="module", autouse=True)
def _native() -> None:
    if not native_library.available():
        pytest.skip(native_library.why_not())


@pytest.fixture(scope="module")
def bundle(shelf: Shelf) -> Path:
    return shelf.bundle(EIGHT, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Engine]:
    with Engine.open(bundle, backend="onnx", threads=1) as opened:
        yield opened


def opened(engine: Engine, predict: str | None, **options: Any) -> Session[Any]:
    options = {"kv": "fp", "context_tokens": 1024, "kv_budget": "1024tok"} | options
    return engine.session(predict=predict, **options)


def test_what_is_asked_for_is_read_with_its_limits() -> None:
    class Model:
        num_layers, fitted_layers, name = 6, 4, "six"

    def layers(text: str) -> tuple[int, ...]:
        prediction = prediction_named(text, Model())  # type: ignore[arg-type]
        assert prediction is not None
        return prediction.mode.predicted

    assert layers("50%") == layers("prefix") == layers("prefix:layers=3") == (3, 4, 5)
    assert layers("0%") == layers("prefix:layers=6") == ()
    assert layers("99%") == (1, 2, 3, 4, 5)
    prediction = prediction_named("50%:tail=9,sink=1,least=5", Model())  # type: ignore[arg-type]
    assert prediction is not None
    assert prediction.piece(0, 100, continues=False) == (1, WHOLE)
    assert prediction.piece(1, 100, continues=False) == (91, prediction.mode)
    assert prediction.piece(91, 100, continues=True) == (100, WHOLE)
    assert prediction.piece(89, 100, continues=True) == (91, prediction.mode)
    assert prediction.piece(89, 100, continues=False) == (100, WHOLE)
    assert prediction_named("off", Model()) is None  # type: ignore[arg-type]
    for wrong, message in (
        ("100%", "share=1 is not possible"),
        ("half", "give off, auto, a share of the layers such as 50%"),
        ("prefix:layers=7", "1 to 6 of this model's layers"),
        ("50%:tail=0", "tail=1"),
        ("50%:tails=3", "possible: sink=..., tail=..., least=..., share=..., layers=..., maps=..."),
    ):
        with pytest.raises(UsageError, match=message):
            prediction_named(wrong, Model())  # type: ignore[arg-type]


@pytest.mark.sampled
@BOTH
@pytest.mark.parametrize("exact", ["50%:tail=400", "prefix:layers=4", "50%:least=365"])
def test_nothing_predicted_equals_plain_prefill_bit_for_bit(
    bundle: Path, backend: str, exact: str
) -> None:
    """Checks KVP-5, on pages of four and two bits."""
    with Engine.open(bundle, backend=backend, threads=1) as engine:
        states = []
        for predict in (None, exact):
            with engine.session(predict=predict, kv="4:2", context_tokens=512, seed=1) as session:
                session.prefill(TEXT)
                assert session.exact
                states.append((session.capture().state.cache, generated(session, 3)))
        assert states[0] == states[1]


def test_a_pass_predicts_what_the_reference_does(bundle: Path) -> None:
    caches: dict[str, list[np.ndarray]] = {}
    logits: dict[str, np.ndarray] = {}
    for name in ("onnx", "float"):
        with Engine.open(bundle, backend=name, threads=1) as engine:
            session = opened(engine, "50%:tail=5,sink=2", chunk_tokens=64)
            session.prefill(TEXT[:200])
            cache = session.sequence.cache.parts[0]
            caches[name] = [
                cache.tail(layer, 0)[side] for layer in range(LAYERS) for side in (0, 1)
            ]
            logits[name] = _last(session)
            assert session.stats().edits.predicted_tokens == 193
            session.close()
    for mine, theirs in zip(caches["onnx"], caches["float"], strict=True):
        wide = theirs.astype(np.float32)
        assert np.sqrt(np.square(mine - wide).mean() / np.square(wide).mean()) < 0.05
    assert divergence(logits["float"][None], logits["onnx"][None]) < 0.01


def test_later_layers_get_keys_and_values_of_the_stream_that_enters_the_first(
    bundle: Path,
) -> None:
    """Checks KVP-1 for one layer: layer 3 with the matrices of layer 2 gets what that computes."""
    with Engine.open(bundle, backend="float", threads=1) as engine:
        files: Any = engine.files
        config = files.config

        def weight(name: str) -> np.ndarray:
            return files.read_weight(name.replace("layers.3.", "layers.2."))

        def inputs(**mode: Any) -> list[np.ndarray]:
            seen: list[np.ndarray] = []

            class Watched(PlainAttention):
                def attend(self, params: Any, qkv: Any, *rest: Any, **named: Any) -> Any:
                    seen.append(qkv.copy())
                    return super().attend(params, qkv, *rest, **named)

            ids = np.array(TEXT[:20])
            forward(config, weight, ids, np.arange(20), Watched(), **mode)
            return seen

        whole, predicted = inputs(), inputs(predicted=(2, 3))
    width = config.first_attention.width
    for layer in (0, 1):
        np.testing.assert_array_equal(predicted[layer], whole[layer])
    for layer in (2, 3):
        np.testing.assert_array_equal(predicted[layer][:, width:], whole[2][:, width:])
        assert not predicted[layer][:, :width].any()
    assert np.abs(whole[3] - whole[2]).max() > 0.1


def test_a_prompt_is_read_in_any_pieces_alike(engine: Engine) -> None:
    states = []
    for chunk in (32, 100):
        with opened(engine, "50%", chunk_tokens=chunk) as session:
            seen = 0
            while not session.prefill(TEXT if not seen else (), cancel=_after(2)):
                seen = session.sequence.cache.tokens
            assert session.stats().edits.predicted_tokens == len(TEXT) - 36
            states.append((_last(session), session.sequence.state().ages))
    np.testing.assert_allclose(states[0][0], states[1][0], atol=1e-3)
    np.testing.assert_array_equal(states[0][1], states[1][1])


def _after(count: int) -> Any:
    calls = iter(range(count + 1))
    return lambda: next(calls) == count


def test_predicted_tokens_are_counted_and_never_taken_for_computed_ones(
    engine: Engine, tmp_path: Path
) -> None:
    with opened(engine, "50%") as session, opened(engine, None) as exact:
        session.prefill(TEXT)
        first = generated(session, 4)
        stats = session.stats()
        assert stats.edits.predicted_tokens == len(TEXT) - 36
        assert stats.edits.stale_tokens == len(TEXT) - 4 + 3  # with the tokens computed from them
        assert not session.exact
        session.save(tmp_path / "saved")
        exact.load(tmp_path / "saved")
        assert exact.stats().edits.predicted_tokens == stats.edits.predicted_tokens
        assert not exact.exact
        assert exact.align(TEXT) == 4
        exact.prefill()
        assert exact.exact
        assert exact.stats().edits.predicted_tokens == 0
        with opened(engine, None) as plain:
            plain.prefill(TEXT)
            np.testing.assert_array_equal(_last(plain), _last(exact))
            assert divergence(_last(plain)[None], _last_of(engine, "50%")[None]) > 0.01
        assert session.align([*TEXT, *first]) == len(TEXT) + 3
        session.rollback(len(session.tokens) - 20)
        assert session.stats().edits.predicted_tokens == 16
        session.predict = "off"
        session.align(TEXT[:30])
        assert session.stats().edits.predicted_tokens == 0


def _last(session: Session[Any]) -> np.ndarray:
    logits = session.sequence.state().logits
    assert logits is not None
    return logits


def _last_of(engine: Engine, predict: str) -> np.ndarray:
    with opened(engine, predict) as session:
        session.prefill(TEXT)
        return _last(session)


@pytest.mark.parametrize(("backend", "kv"), [("float", "fp"), ("float", "8:8")])
def test_idle_time_makes_a_predicted_text_exact(bundle: Path, backend: str, kv: str) -> None:
    """Refreshes left to right, in interrupted pieces, with answers between them."""
    with (
        Engine.open(bundle, backend=backend, threads=1) as engine,
        opened(engine, "50%", kv=kv) as session,
    ):
        session.prefill(TEXT)
        generated(session, 5)
        left = [session.refresh(51)]  # the last token first, which no pass has seen
        assert left[0] == len(session.tokens) - 4 - 50
        assert session.sequence.encoding.staleness.computed == 54
        assert session.refresh(50, cancel=lambda: True) == left[0]
        session.prefill(prompt(90, 7))  # predicted again, behind what is left
        assert session.stats().edits.predicted_tokens > 58
        while left[-1]:
            left.append(session.refresh(100))
        assert session.exact
        assert session.stats().edits.predicted_tokens == 0
        generated(session, 1)
        with opened(engine, None, kv=kv) as plain:
            plain.prefill(session.tokens[:-1])
            expected, actual = _last(plain), _last(session)
        assert divergence(expected[None], actual[None]) < (1e-7 if kv == "fp" else 0.005)


def test_a_budget_too_small_for_the_prompt_is_kept(engine: Engine) -> None:
    with opened(engine, "50%", kv="8:8", kv_budget="260tok") as session:
        session.prefill(TEXT)
        stats = session.stats()
        assert stats.kv_bytes_peak <= stats.kv_budget
        assert stats.edits.predicted_tokens == len(TEXT) - 36


def test_prompts_are_predicted_and_answers_never(engine: Engine) -> None:
    """Checks KVP-3: the cache has as many tokens as the prompt, and one more for each written."""
    with opened(engine, "50%") as session:
        modes: list[Mode] = []
        forward = engine.backend.forward

        def watched(rows: Sequence[SequencePass[Any]], *, rope_long: bool) -> Any:
            modes.append(rows[0].mode)
            return forward(rows, rope_long=rope_long)

        engine.backend.forward = watched  # type: ignore[method-assign]
        try:
            session.prefill(TEXT)
            read, modes[:] = list(modes), []
            assert session.sequence.cache.tokens == len(TEXT)
            for count, _ in enumerate(session.generate(4, stop_ids=())):
                assert session.sequence.cache.tokens == len(TEXT) + count
        finally:
            del engine.backend.forward
    assert [mode.predicted for mode in read] == [(), (2, 3), (2, 3), ()]
    assert set(modes) == {WHOLE}
