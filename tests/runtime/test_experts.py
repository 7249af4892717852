"""Models that feed each token to a few experts: their export, and sessions of them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulated import emulated_library
from kvq import native_library
from kvq.errors import BundleError, UnsupportedModelError
from kvq.reference.linear import Blocks, dequantize
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_export.fit.calibrated import TABLES, CalibratedWeights, calibration_segments
from kvq_export.fit.damping import DAMPINGS
from kvq_export.fit.gptq import factor, quantize_with
from kvq_export.fit.native_products import KernelMatrix
from kvq_export.fit.quality import Original
from kvq_export.fit.substitutes import SegmentedAttention, SubstituteMatrix
from kvq_export.write.layout import plan_layout
from kvq_export.write.weights import join_rows
from kvq_models.config import Experts, ModelConfig
from kvq_models.family import is_stack
from kvq_models.reference import forward, grouped
from kvq_models.registry import read_checkpoint
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.bundle.graph_check import check_graph
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from kvq_specdraft import drafter_named
from logits import divergence, prompt
from originals import original_of
from shelf import EIGHT, Shelf
from tiny import make_checkpoint

needs_native = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())
CASES = ("qwen3-moe", "mixtral", "olmoe")
GREEDY = Sampling(temperature=0)
TEXT = prompt(120)


@pytest.fixture(scope="module")
def source(shelf: Shelf) -> Path:
    return shelf.family("qwen3-moe")


@pytest.fixture(scope="module")
def engine(source: Path, shelf: Shelf) -> Iterator[Engine]:
    with Engine.open(shelf.exported(source, EIGHT), threads=2) as opened:
        yield opened


def original_and_tokenizer(source: Path) -> tuple[Original, Tokenizer]:
    family, config, _ = read_checkpoint(source)
    return original_of(source), Tokenizer.from_checkpoint(source, family, config)


# Export


def test_experts_are_rounded_for_what_enters_all_of_them(source: Path) -> None:
    """Looks at the second layer, after a rounded one."""
    original, tokenizer = original_and_tokenizer(source)
    segments = calibration_segments(tokenizer, original.config)[:3, :100]
    layout = plan_layout(original.config, original.sources, WeightFormat(block=32))
    reader = CalibratedWeights(original, layout.matrices, segments, threads=1)
    stored: dict[str, Any] = {}
    blocks: dict[str, Blocks] = {}
    for name in layout.names:
        if name in layout.matrices:
            form = layout.matrices[name]
            blocks[name] = Blocks(*join_rows(reader.matrix(name, form)))
            stored[name] = dequantize(blocks[name], form.bits)[:, : form.columns]
        else:
            stored[name] = reader.vector(name)
    reader.close()
    entered: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    class Seen:
        """Notes what a stack is given."""

        def __init__(self, name: str) -> None:
            self.name = name

        def grouped(self, x: np.ndarray, counts: np.ndarray) -> np.ndarray:
            entered[self.name] = x, counts
            return grouped(stored[self.name], x, counts)

    def weight(name: str) -> Any:
        if "layers.1.experts" in name:
            return Seen(name)
        if name in TABLES:
            return original.checkpoint.read(original.sources[name])
        if name not in blocks or is_stack(name):
            return stored[name]
        return SubstituteMatrix(KernelMatrix(blocks[name], layout.matrices[name]).multiply)

    positions = np.tile(np.arange(100), len(segments))
    attend = SegmentedAttention(len(segments))
    forward(original.config, weight, segments.ravel(), positions, attend)
    for name, (x, counts) in entered.items():
        assert (counts > 0).all()
        form = layout.matrices[name]
        matrix = original.checkpoint.read(original.sources[name])
        shared, alone = list[float](), list[float]()
        for inputs, shares in ((x, shared), (x[: counts[0]], alone)):
            for damping in DAMPINGS:
                lower = factor(inputs.T @ inputs, form.block, damping)
                codes = quantize_with(matrix, lower, form.format).codes
                shares.append(float((codes == blocks[name].codes).mean()))
        # Sums run in another order, so a code on the edge may fall either way.
        assert max(shared) > 0.95
        assert max(alone) < 0.9
    assert len(entered) == 2


@pytest.mark.slow
def test_experts_that_no_token_chose_are_rounded_too(source: Path, tmp_path: Path) -> None:
    options = ExportOptions(quality=False, calibration_text="one")
    bundle = export_model(source, tmp_path / "bundle", options)
    original = original_of(source)
    weights = original.checkpoint.read(original.sources["layers.2.experts_down"])
    rounded = bundle.read_weight("layers.2.experts_down")
    apart = np.abs(rounded - weights).reshape(12, -1).mean(axis=1) / np.abs(weights).mean()
    assert 0 < apart.min() < apart.max() < 0.2


@pytest.mark.slow
def test_where_widths_are_mixed_experts_keep_the_narrowest(source: Path, tmp_path: Path) -> None:
    weights = WeightFormat(mean_bits=4.5)
    bundle = export_model(source, tmp_path / "mixed", ExportOptions(weights=weights, quality=False))
    assert bundle.manifest.weights is not None
    formats = bundle.manifest.weights.formats
    stacks = {name: form for name, form in formats.items() if ".experts_" in name}
    assert len(stacks) == 4
    assert {form.bits for form in stacks.values()} == {4}
    counts = {name: bundle.form(name).rows * bundle.form(name).columns for name in formats}
    bits = sum(counts[name] * form.bits for name, form in formats.items())
    assert 4.3 * sum(counts.values()) < bits <= 4.5 * sum(counts.values())
    assert "layers.1.router" not in formats
    expected = original_of(source)
    router = expected.checkpoint.read(expected.sources["layers.1.router"])
    np.testing.assert_array_equal(bundle.read_weight("layers.1.router"), router)


def test_a_step_reads_the_experts_of_one_token(engine: Engine) -> None:
    bundle = engine.backend.bundle
    whole = bundle.manifest.weights.num_bytes
    embedding = bundle.form("embed")
    left_out = (embedding.panels - 1) * embedding.panel_bytes
    for layer in (1, 2):
        for part in ("experts_gate_up", "experts_down"):
            form = bundle.form(f"layers.{layer}.{part}")
            left_out += form.panels * form.panel_bytes * (12 - 3) // 12
    assert bundle.weight_bytes_per_step == whole - left_out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"moe_intermediate_size": 100}, "experts of 100 columns over 128 are not supported"),
        ({"use_sliding_window": True, "sliding_window": 32}, "use_sliding_window = True"),
    ],
)
def test_what_is_not_computed_is_refused(
    change: Mapping[str, Any], says: str, tmp_path: Path
) -> None:
    source = make_checkpoint("qwen3-moe", tmp_path / "source", **change)
    with pytest.raises(UnsupportedModelError, match=says):
        export_model(source, tmp_path / "made", ExportOptions(quality=False))
    assert not (tmp_path / "made").exists()


def test_a_gguf_file_of_these_experts_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="qwen3_moe"):
        export_model(source, tmp_path / "made", ExportOptions(quality=False, format="gguf"))


@pytest.mark.parametrize(
    "feed",
    [{"chosen": 2}, {"normalised": False}, {"count": 13}, {"activation": "gelu_tanh"}],
    ids=str,
)
def test_a_graph_of_other_experts_is_refused(feed: dict[str, Any], engine: Engine) -> None:
    bundle = engine.backend.bundle
    assert bundle.manifest.weights is not None
    info = bundle.manifest.weights

    def check(config: ModelConfig) -> None:
        check_graph(bundle.model_path, config, format_of=info.format_of)

    check(bundle.config)
    layers = tuple(
        replace(layer, feed=replace(layer.feed, **feed))
        if isinstance(layer.feed, Experts)
        else layer
        for layer in bundle.config.layers
    )
    with pytest.raises(BundleError, match=r"layers.1/mlp/Experts differs"):
        check(replace(bundle.config, layers=layers))


# Sessions


@needs_native
@pytest.mark.parametrize("kind", ["quantspec", "quantspec:head=200"])
def test_drafts_change_no_token(engine: Engine, kind: str) -> None:
    first = "," if ":" in kind else ":"
    answers: list[list[int]] = []
    for draft in (None, drafter_named(f"{kind}{first}least=1e-9,most=4")):
        with engine.session(
            kv="8:8", kv_budget="256tok", draft=lambda drafter=draft: drafter
        ) as session:
            session.prefill(TEXT)
            steps = session.generate(40, sampling=GREEDY, stop_ids=[])
            answers.append([step.token for step in steps])
            assert draft is None or session.stats().rounds.drafted_tokens > 40
    assert answers[0] == answers[1]


@needs_native
def test_the_graph_agrees_with_the_definition_but_where_a_token_is_between_experts(
    engine: Engine,
) -> None:
    ids = prompt(200)
    with engine.session(kv="fp", context_tokens=256) as session:
        actual = np.concatenate(list(session.logits(ids)))
    with (
        Engine.open(engine.backend.bundle.path, backend="float") as exact,
        exact.session(kv="fp", context_tokens=256) as session,
    ):
        expected = np.concatenate(list(session.logits(ids)))
    nats = np.array([divergence(expected[i : i + 1], actual[i : i + 1]) for i in range(len(ids))])
    assert np.median(nats) < 0.005
    assert nats.mean() < 0.05
    assert divergence(np.roll(expected, 1, axis=0), actual) > 1


@needs_native
def test_on_a_device_experts_run_on_the_processor(engine: Engine, shelf: Shelf) -> None:
    emulated_library(shelf)
    logits: list[np.ndarray] = []
    for device in ("cpu", "emulated"):
        with (
            Engine.open(engine.backend.bundle.path, threads=1, device=device) as opened,
            opened.session(kv="8:8", context_tokens=256) as session,
        ):
            logits.append(np.concatenate(list(session.logits(TEXT))))
    nats = [divergence(*(part[i : i + 1] for part in logits)) for i in range(len(TEXT))]
    assert np.median(nats) < 0.005
