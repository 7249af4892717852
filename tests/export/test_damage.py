"""Damages of matrices at 4 bits, and how bits are spent on them."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from kvq.errors import UsageError
from kvq.reference.linear import WIDTHS, dequantize
from kvq_apps.cli import main
from kvq_export.config import LOSS_NATS, MEAN_BITS, ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_export.fit import damage, quality
from kvq_export.fit.damage import FEEDBACK, allocate, damages
from kvq_export.phases import no_progress
from kvq_export.write.layout import plan_layout
from kvq_export.write.weights import quantize
from kvq_models.reference import PlainAttention, forward
from kvq_runtime.bundle.bundle import Bundle
from originals import original_of
from shelf import PLAIN, Shelf
from tiny import checkpoint_weights, make_llama_checkpoint

QUIET = ExportOptions(quality=False, threads=1)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_a_damage_is_the_divergence_that_one_rounded_matrix_makes(
    case: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares with one matrix after the other, in passes of four lanes and a clean one."""
    source = shelf.family(case)
    original = original_of(source)
    exact, config = checkpoint_weights(source), original.config
    texts = np.random.default_rng(0).integers(0, config.vocab_size, (2, 12))
    monkeypatch.setattr(damage, "_PASS_TOKENS", 5 * texts.size)
    actual = damages(original, texts, WeightFormat(), 1, no_progress)
    assert list(actual) == [name for name in original.sources if exact(name).ndim == 2]
    assert ("head" in actual) == (not config.tied_head)

    def answers(changed: str) -> np.ndarray:
        def weight(name: str) -> np.ndarray:
            rows = exact(name)
            if name != changed:
                return rows
            form = WeightFormat().at(4, rows.shape[1])
            return dequantize(quantize(rows, form), 4)[:, : rows.shape[1]]

        parts = [
            forward(config, weight, ids, np.arange(len(ids)), PlainAttention()) for ids in texts
        ]
        return quality.log_softmax(np.concatenate(parts))

    clean = answers("")
    for name in actual:
        by_hand = quality.compare(clean, answers(name))["mean_kld"]
        assert actual[name] == pytest.approx(by_hand, rel=2e-2, abs=1e-7), name


def test_bits_are_spent_where_they_take_most_damage_away(tmp_path: Path) -> None:
    """Compares with brute force over all widths of four matrices, for the bytes that were spent."""
    original = original_of(make_llama_checkpoint(tmp_path / "source"))
    random = np.random.default_rng(3)
    names = ["embed", "layers.0.qkv", "layers.1.gate_up", "head"]
    lost = dict(zip(names, random.lognormal(0, 2, 4), strict=True))
    for mean in (4.0, 4.7, 5.5, 6.6, 8.0):
        weights = WeightFormat(mean_bits=mean)
        chosen = allocate(original, lost, weights)
        counts = np.array([np.prod(original.sources[name].shape) for name in names])
        bits = np.array([chosen[name].bits for name in names])
        assert (bits * counts).sum() <= mean * counts.sum() + 1e-6
        for name, form in chosen.items():
            assert form == weights.at(form.bits, original.sources[name].shape[1])
        share = np.array([1, FEEDBACK, FEEDBACK, 1]) * [*lost.values()]

        def total(widths: tuple[int, ...], share: np.ndarray = share) -> float:
            return float((share * [(15 / ((1 << width) - 1)) ** 2 for width in widths]).sum())

        # No other choice of as many bytes, less a step of the smallest kind, does better.
        spent = (bits * counts).sum() - counts.max() * 2
        best = min(
            total(widths)
            for widths in product(WIDTHS, repeat=4)
            if (np.array(widths) * counts).sum() <= spent or widths == tuple(bits)
        )
        assert total(tuple(bits.tolist())) <= best * 1.0001


def test_three_bits_are_of_super_blocks_and_of_fewer_bytes_than_four_take(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", intermediate_size=512)
    original = original_of(source)
    columns = {name: original.sources[name].shape[1] for name in ("layers.0.qkv", "layers.1.down")}
    assert columns["layers.1.down"] % 256 == 0
    assert columns["layers.0.qkv"] % 256
    lost = dict.fromkeys(columns, 1.0)

    def bits_of(weights: WeightFormat) -> list[int]:
        return [form.bits for form in allocate(original, lost, weights).values()]

    assert bits_of(WeightFormat(mean_bits=3.0)) == [4, 3]
    assert bits_of(WeightFormat(mean_bits=4.0)) == [4, 4]
    # Where nobody asks for a size, a loss is not made larger by an estimate of so few bits.
    lost = dict.fromkeys(columns, 1e-9)
    assert bits_of(WeightFormat.recommended()) == [4, 4]


def test_three_bits_everywhere_need_a_matrix_that_can_have_them(tmp_path: Path) -> None:
    options = replace(PLAIN, weights=WeightFormat(bits=3))
    source = make_llama_checkpoint(tmp_path / "source", head_dim=32)
    with pytest.raises(UsageError, match="256 divides the columns of no matrix") as raised:
        export_model(source, tmp_path / "bundle", options)
    assert "(128, 192)" in str(raised.value)
    source = make_llama_checkpoint(tmp_path / "wide", intermediate_size=512)
    bundle = export_model(source, tmp_path / "bundle", options)
    formats = bundle.manifest.weights.formats
    assert str(formats["layers.0.down"]) == "3/32/super_minimum"
    assert formats["layers.0.qkv"].bits == 4


def test_bits_go_below_the_mean_as_long_as_little_is_lost(tmp_path: Path) -> None:
    original = original_of(make_llama_checkpoint(tmp_path / "source"))
    names = ["embed", "layers.0.qkv", "layers.1.gate_up", "head"]
    counts = np.array([np.prod(original.sources[name].shape) for name in names])
    share = np.array([1, FEEDBACK, FEEDBACK, 1])

    def spent(of_all: float, weights: WeightFormat) -> tuple[float, float]:
        """Returns the mean width and its loss, where damages at 4 bits add up to `of_all`."""
        lost = of_all * np.array([0.4, 0.3, 0.2, 0.1])
        chosen = allocate(original, dict(zip(names, (lost / share).tolist(), strict=True)), weights)
        bits = np.array([chosen[name].bits for name in names])
        mean = (bits * counts).sum() / counts.sum()
        return float(mean), float((lost * (15 / (2.0**bits - 1)) ** 2).sum())

    default, capped = WeightFormat.recommended(), WeightFormat(mean_bits=MEAN_BITS)
    assert spent(0.9 * LOSS_NATS, default)[0] == 4.0
    assert spent(100 * LOSS_NATS, default) == spent(100 * LOSS_NATS, capped)
    means = []
    for of_all in (1.1 * LOSS_NATS, 2 * LOSS_NATS, 4 * LOSS_NATS):
        mean, loses = spent(of_all, default)
        assert loses <= LOSS_NATS
        assert mean < spent(of_all, capped)[0]
        # One matrix more at one width less would lose too much.
        assert spent(of_all, replace(default, loss_nats=4 * LOSS_NATS))[1] > LOSS_NATS
        means.append(mean)
    assert 4.0 < means[0] <= means[1] <= means[2] < MEAN_BITS


@pytest.mark.slow
def test_the_file_is_as_large_as_asked_and_no_larger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_llama_checkpoint(tmp_path / "source", dtype="bfloat16")
    original = original_of(source)
    narrow = WeightFormat(bits=3, embedding_bits=3)
    least = plan_layout(original.config, original.sources, narrow).num_bytes
    most = plan_layout(original.config, original.sources, WeightFormat(bits=8)).num_bytes
    for size in (least, (least + most) // 2, most):
        options = replace(PLAIN, weights=WeightFormat(size_bytes=size), force=True)
        bundle = export_model(source, tmp_path / "bundle", options)
        written = (bundle.path / "model.onnx.data").stat().st_size
        assert size - 8192 <= written <= size
    formats = bundle.manifest.weights.by_format
    assert [*formats] == ["8/64/symmetric"]
    short = ExportOptions(weights=WeightFormat(size_bytes=least - 100), force=True)
    # What takes minutes is not begun.
    monkeypatch.setattr("kvq_export.fit.damage.damages", None)
    with pytest.raises(UsageError, match=r"with the fewest bits everywhere it is 100 bytes more"):
        export_model(source, tmp_path / "bundle", short)
    # What was there is still there.
    assert Bundle.open(bundle.path).manifest.weights.by_format == formats


@pytest.mark.slow
def test_a_mean_width_is_the_default_and_a_whole_one_is_every_matrix(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", dtype="bfloat16")
    bundle = export_model(source, tmp_path / "mixed", QUIET)
    assert bundle.manifest.weights is not None
    formats = bundle.manifest.weights.formats
    counts = {name: np.prod(original_of(source).sources[name].shape) for name in formats}
    mean = sum(formats[name].bits * counts[name] for name in formats) / sum(counts.values())
    assert mean <= MEAN_BITS
    assert len({form.bits for form in formats.values()}) > 1
    quickly = ("--no-quality", "--no-calibrate", "--force", "--wbits")
    for bits in ("4", "4.6"):
        assert main(["export", str(source), "-o", str(tmp_path / "said"), *quickly, bits]) == 0
    said = Bundle.open(tmp_path / "said").manifest.weights.formats
    mean = sum(said[name].bits * counts[name] for name in said) / sum(counts.values())
    assert 4.1 < mean <= 4.6
    manifest = export_model(source, tmp_path / "plain", PLAIN).manifest
    formats = sorted(manifest.weights.by_format)
    assert formats == ["4/32/super_minimum", "4/64/zero_point", "8/64/symmetric"]
    bare = ExportOptions(tokenizer=False, weights=WeightFormat(mean_bits=4.6))
    with pytest.raises(UsageError, match="is measured on a text"):
        export_model(source, tmp_path / "bare", bare)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--wbits", "2.5"), "--wbits 2.5 is not possible: choose 3 to 8"),
        (("--wbits", "3.5", "--group", "64"), "--wbits 3.5 is not possible: choose 4 to 8"),
        (("--wbits", "3", "--group", "64"), "3 bits are of super-blocks; leave --group out"),
        (("--wbits", "5", "--size", "1MB"), "--size finds the widths itself; leave --wbits out"),
        (("--size", "much"), "--size 'much' is not possible: give bytes"),
        (("--size", "1MB", "--embedding-bits", "4"), "get what they are worth"),
    ],
)
def test_widths_that_cannot_be(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_llama_checkpoint(tmp_path / "source")
    assert main(["export", str(source), "-o", str(tmp_path / "bundle"), *words]) == 2
    assert said in capsys.readouterr().err
