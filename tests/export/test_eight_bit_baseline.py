"""The comparison with 8 bits: told without exporting them, beside the bundle's own widths."""

from functools import partialmethod
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kvq.reference.linear import PanelFormat, linear, pack, restore
from kvq_apps.cli import main
from kvq_apps.terminal import output
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_export.fit import calibrated, eight_bit_baseline
from kvq_export.fit.substitutes import Rows, Stack
from kvq_export.read.checkpoint import Checkpoint
from kvq_export.write.weights import half_scales, quantize
from kvq_models.family import is_stack
from kvq_models.reference import PlainAttention, Weights, forward
from originals import original_of
from shelf import Shelf
from tiny import checkpoint_weights, make_llama_checkpoint

TOKENS = 24


@pytest.mark.sampled
@pytest.mark.parametrize("case", ["llama", "gemma3", "phi", "olmoe", "gemma4", "lfm2"])
def test_the_likeliest_tokens_are_those_of_products_of_8_bits(
    case: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares with one text after the other, by the definition of products over packed panels."""
    few = partialmethod(Checkpoint.chunks, max_weights=1 << 12)
    monkeypatch.setattr(Checkpoint, "chunks", few)
    source = shelf.family(case)
    original, exact = original_of(source), checkpoint_weights(source)
    texts = np.random.default_rng(0).integers(0, original.config.vocab_size, (8, TOKENS))
    actual = eight_bit_baseline.likeliest_tokens(original, texts)
    assert actual.shape == texts.shape

    def likeliest(weight: Weights) -> np.ndarray:
        places = np.arange(TOKENS)
        parts = (forward(original.config, weight, ids, places, PlainAttention()) for ids in texts)
        return np.stack([part.argmax(axis=1) for part in parts])

    by_hand = likeliest(lambda name: rounded(name, exact(name)))
    # A router's choice turns on the last digit.
    assert (actual == by_hand).mean() >= (0.95 if case == "olmoe" else 0.985)
    assert (actual == likeliest(exact)).mean() < (actual == by_hand).mean() or case == "gemma3"


def test_a_report_tells_what_8_bits_would_keep(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source")

    def report(bits: int) -> dict[str, Any]:
        options = ExportOptions(weights=WeightFormat(bits=bits), calibrate=False)
        quality = export_model(source, tmp_path / str(bits), options).manifest.quality
        assert quality is not None
        return dict(quality)

    narrow, wide = report(4), report(8)
    assert "at_8_bits" not in wide
    at_8_bits = narrow["at_8_bits"]
    assert at_8_bits["tokens"] == narrow["tokens"] // 2 > 1000
    # Half of the texts, and native products in place of numpy's.
    assert at_8_bits["top1_agreement"] == pytest.approx(wide["weights"]["top1_agreement"], abs=0.02)
    assert narrow["weights"]["top1_agreement"] < at_8_bits["top1_agreement"] - 0.1


@pytest.mark.parametrize(("agreement", "advised"), [(0.91, True), (0.93, False)])
def test_a_verdict_compares_with_8_bits_and_advises_them(
    agreement: float, *, advised: bool
) -> None:
    quality = {
        "weights": {"top1_agreement": agreement},
        "kv": {"top1_agreement": 0.99},
        "weights_and_kv": {"kv": "4:4", "top1_agreement": 0.9},
    }
    report = {"quality": quality, "path": "small", "source": {"model": "org/small"}}
    ((_, before),) = output.verdict_rows(report)
    assert "8 bits" not in before
    quality["at_8_bits"] = {"top1_agreement": 0.97}
    rows = dict(output.verdict_rows(report))
    assert rows["verdict"] == (
        f"weights and 8-bit activations keep {agreement:.0%} (at 8 bits 97%) of the checkpoint's "
        "first choices, a cache at 4:4 99% of theirs"
    )
    assert ("advice" in rows) is advised
    if advised:
        assert "at 8 bits this model keeps 97% of first choices" in rows["advice"]
        assert rows["advice"].endswith("kvq export org/small -o small --wbits 8 --force")


@pytest.mark.slow
def test_the_advice_can_be_followed_and_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names the path given to an export; a bundle knows only its folder's name."""
    monkeypatch.setattr(calibrated, "REPORT_TEXTS", 3)
    source, made = make_llama_checkpoint(tmp_path / "a source"), tmp_path / "made"
    words = ["export", str(source), "-o", str(made), "--wbits", "4", "--no-calibrate"]
    for command, named in ((words, str(source)), (["inspect", str(made), "-v"], "a source")):
        assert main(command) == 0
        advice = f"of first choices: kvq export '{named}' -o {made} --wbits 8 --force\n"
        assert advice in capsys.readouterr().out


def rounded(name: str, matrix: np.ndarray) -> np.ndarray:
    """Returns a substitute for a weight whose products are those of 8-bit panels."""
    if matrix.ndim != 2 or name.endswith("conv"):
        return matrix
    form = PanelFormat.of(WeightFormat(bits=8).at(8, matrix.shape[1]), matrix.shape)
    blocks = quantize(matrix, form.format)
    panels = pack(form, blocks._replace(scales=half_scales(blocks.scales)))

    def multiply(x: np.ndarray) -> np.ndarray:
        return linear(form, panels, x)

    def grouped(x: np.ndarray, counts: np.ndarray) -> np.ndarray:
        every = linear(form, panels, x).reshape(len(x), len(counts), -1)
        return every[np.arange(len(x)), np.repeat(np.arange(len(counts)), counts)]

    if is_stack(name):
        return cast(np.ndarray, Stack(grouped))
    rows = restore(form, panels)
    return cast(np.ndarray, Rows(lambda ids: rows[ids], multiply))
