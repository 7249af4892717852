"""llama.cpp's importance matrices: both forms of the file, and blocks that are fitted to them."""

import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq.errors import DataError, KvqError, UnsupportedModelError, UsageError
from kvq.reference.linear import BlockFormat, Grid, dequantize
from kvq_apps.cli import main
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_export.gguf.gguf_importance import LEAST_SHARE, is_importance, read_importance
from kvq_export.write.weights import quantize
from kvq_models.registry import read_checkpoint
from kvq_runtime.bundle.bundle import Bundle
from shelf import PLAIN, Shelf
from tiny import checkpoint_weights

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

# Of 256 columns or a multiple, which super-blocks need.
WIDE = {"hidden_size": 256, "intermediate_size": 512}
# What llama.cpp has of each matrix of a llama: the first part of a joint one.
FIRST_PARTS = {"qkv": "attn_q", "o": "attn_output", "gate_up": "ffn_gate", "down": "ffn_down"}
OTHER_PARTS = {"attn_k": "qkv", "attn_v": "qkv", "ffn_up": "gate_up"}
TOKENS = 64

Sums = Mapping[str, np.ndarray]


def sums_of(checkpoint: Path) -> dict[str, np.ndarray]:
    """Sums float32 [columns] of squares of random inputs, by llama.cpp's names of the matrices.

    Some columns are a hundred times as large as others.
    """
    _, config, _ = read_checkpoint(checkpoint)
    random, weights = np.random.default_rng(5), checkpoint_weights(checkpoint)
    sums: dict[str, np.ndarray] = {}
    for layer in range(config.num_layers):
        for source, name in FIRST_PARTS.items():
            columns = weights(f"layers.{layer}.{source}").shape[1]
            x = random.standard_normal((TOKENS, columns)) * 10 ** random.uniform(-1, 1, columns)
            sums[f"blk.{layer}.{name}.weight"] = np.square(x).sum(axis=0, dtype=np.float32)
        for name, source in OTHER_PARTS.items():
            same = sums[f"blk.{layer}.{FIRST_PARTS[source]}.weight"]
            sums[f"blk.{layer}.{name}.weight"] = same * np.float32(1 + 1e-6)
    return sums


def write_old(path: Path, sums: Sums) -> Path:
    """The older form, as llama.cpp ends it now: means times the calls, here one for each token."""
    raw = struct.pack("<i", len(sums))
    for name, values in sums.items():
        raw += struct.pack("<i", len(name)) + name.encode()
        raw += struct.pack("<ii", TOKENS, values.size) + values.astype("<f4").tobytes()
    path.write_bytes(raw + struct.pack("<ii", 4, 8) + b"text.txt")
    return path


def write_gguf(path: Path, sums: Sums, kind: str = "imatrix") -> Path:
    """The newer form; sums [columns], or [experts, columns]."""
    writer = gguf.GGUFWriter(path, "")
    writer.add_type(kind)
    writer.add_array("imatrix.datasets", ["text.txt"])
    writer.add_uint32("imatrix.chunk_count", 4)
    for name, values in sums.items():
        rows = np.atleast_2d(values)
        writer.add_tensor(f"{name}.in_sum2", rows)
        writer.add_tensor(f"{name}.counts", np.full((len(rows), 1), TOKENS, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def weighed_error(bundle: Bundle, checkpoint: Path, name: str, importance: np.ndarray) -> float:
    change = bundle.read_weight(name) - checkpoint_weights(checkpoint)(name)
    return float((importance * np.square(change)).sum())


@pytest.mark.parametrize(
    ("weights", "shape", "form"),
    [
        (WeightFormat(block=64), {}, "4/64/zero_point"),
        (WeightFormat(bits=5, block=32), {}, "5/32/zero_point"),
        (WeightFormat(), WIDE, "4/32/super_minimum"),
        (WeightFormat(bits=8), {}, "8/64/symmetric"),
    ],
)
def test_columns_that_matter_err_less_in_every_matrix(
    shelf: Shelf, tmp_path: Path, weights: WeightFormat, shape: dict[str, int], form: str
) -> None:
    checkpoint = shelf.checkpoint(**shape)
    sums = sums_of(checkpoint)
    plain = export_model(checkpoint, tmp_path / "plain", replace(PLAIN, weights=weights))
    made: list[Bundle] = []
    for file in (write_old(tmp_path / "a", sums), write_gguf(tmp_path / "b", sums)):
        options = ExportOptions(quality=False, fit_cache=False, weights=weights, importance=file)
        made.append(export_model(checkpoint, tmp_path / f"of-{file.name}", options))
    assert made[0].manifest.files == made[1].manifest.files
    for layer in range(2):
        for source, part in FIRST_PARTS.items():
            name = f"layers.{layer}.{source}"
            assert str(made[0].form(name).format) == form
            shares = sums[f"blk.{layer}.{part}.weight"] / TOKENS
            actual, before = (
                weighed_error(bundle, checkpoint, name, shares) for bundle in (made[0], plain)
            )
            # At 8 bits there is little to choose.
            assert actual < (1 if form.startswith("8") else 0.9) * before
    np.testing.assert_array_equal(made[0].read_weight("embed"), plain.read_weight("embed"))


@pytest.mark.parametrize(
    "form",
    [
        BlockFormat(bits=4, block=64, grid=Grid.ZERO_POINT),
        BlockFormat(bits=4, block=32),
        BlockFormat(bits=4, block=32, grid=Grid.SUPER_MINIMUM),
    ],
)
def test_columns_that_matter_alike_are_rounded_as_without_importance(form: BlockFormat) -> None:
    rows = np.random.default_rng(3).standard_normal((40, 300), np.float32)
    plain = dequantize(quantize(rows, form), 4)[:, :256]
    alike = dequantize(quantize(rows, form, np.full(300, 7, np.float32)), 4)[:, :256]
    np.testing.assert_array_equal(alike, plain)
    nothing = quantize(rows, form, np.zeros(300, np.float32))
    np.testing.assert_array_equal(dequantize(nothing, 4)[:, :256], plain)


def test_each_expert_is_fitted_to_what_enters_it(shelf: Shelf, tmp_path: Path) -> None:
    checkpoint = shelf.family("qwen3-moe")
    _, config, _ = read_checkpoint(checkpoint)
    random = np.random.default_rng(6)
    hidden, width = config.hidden_size, 96
    sums = {
        f"blk.1.ffn_{name}_exps.weight": (10 ** random.uniform(-2, 2, (12, columns))).astype("<f4")
        for name, columns in (("gate", hidden), ("down", width))
    }
    # The text did not use the last expert.
    sums["blk.1.ffn_gate_exps.weight"][11] = 0
    options = replace(PLAIN, weights=WeightFormat(block=32))
    plain = export_model(checkpoint, tmp_path / "plain", options)
    made: list[Bundle] = []
    for file in (write_old(tmp_path / "a", sums), write_gguf(tmp_path / "b", sums)):
        options = replace(options, importance=file)
        made.append(export_model(checkpoint, tmp_path / f"of-{file.name}", options))
    assert made[0].manifest.files == made[1].manifest.files
    for source, part in (("experts_gate_up", "gate"), ("experts_down", "down")):
        name = f"layers.1.{source}"
        exact = checkpoint_weights(checkpoint)(name)
        errors = [
            np.square(bundle.read_weight(name) - exact).reshape(12, -1, exact.shape[1])
            for bundle in (made[0], plain)
        ]
        shares = sums[f"blk.1.ffn_{part}_exps.weight"][:, None]
        actual, before = ((shares * error).sum(axis=(1, 2)) for error in errors)
        used = shares.any(axis=(1, 2))
        assert used.sum() == (11 if part == "gate" else 12)
        assert (actual[used] < 0.9 * before[used]).all()
        np.testing.assert_array_equal(errors[0][~used], errors[1][~used])


def test_columns_of_dealt_heads_go_back(shelf: Shelf, tmp_path: Path) -> None:
    """Two value heads share each of two key heads; llama.cpp has the first of each before."""
    _, config, _ = read_checkpoint(shelf.family("qwen3-5"))
    sums = np.arange(1, 4 * 32 + 1, dtype=np.float32)
    file = write_old(tmp_path / "a", {"blk.0.ssm_out.weight": sums})
    (columns,) = read_importance(file, config).columns["layers.0.out_proj"]
    of_value_head = [sums[32 * head : 32 * head + 32] for head in (0, 2, 1, 3)]
    np.testing.assert_allclose(columns, np.concatenate(of_value_head) / sums.mean(), rtol=1e-6)


def test_what_is_read_are_shares_of_the_mean(shelf: Shelf, tmp_path: Path) -> None:
    _, config, _ = read_checkpoint(shelf.checkpoint())
    sums = np.full(128, 3e38, np.float32)
    sums[5] = 0
    file = write_gguf(tmp_path / "a", {"blk.1.ffn_up.weight": sums})
    importance = read_importance(file, config)
    assert [*importance.columns] == ["layers.1.gate_up"]
    expected = np.full((1, 128), 128 / 127, np.float32)
    expected[0, 5] = LEAST_SHARE
    np.testing.assert_allclose(importance.columns["layers.1.gate_up"], expected, rtol=1e-6)


def test_what_file_and_model_lack_is_counted(
    shelf: Shelf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = shelf.checkpoint()
    sums = sums_of(checkpoint)
    options = replace(PLAIN, importance=write_old(tmp_path / "a", sums))
    export_model(checkpoint, tmp_path / "whole", options)
    assert not caplog.text
    del sums["blk.0.attn_output.weight"], sums["blk.1.ffn_down.weight"]
    sums["blk.7.ffn_down.weight"] = sums["blk.0.ffn_gate_inp.weight"] = np.ones(8, np.float32)
    sums["v.blk.0.attn_q.weight"] = np.ones(8, np.float32)
    options = replace(options, importance=write_old(tmp_path / "b", sums))
    bundle = export_model(checkpoint, tmp_path / "part", options)
    assert (
        f"{tmp_path / 'b'} says nothing of 2 matrices, whose columns count alike, and has 3 names "
        "that are of no matrix of this model"
    ) in caplog.text
    plain = shelf.bundle(replace(PLAIN, weights=WeightFormat()))
    for name in ("layers.0.o", "layers.1.down"):
        np.testing.assert_array_equal(
            bundle.read_weight(name), Bundle.open(plain).read_weight(name)
        )


def test_a_file_of_another_model_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    checkpoint = shelf.checkpoint()
    _, config, _ = read_checkpoint(checkpoint)
    sums = sums_of(checkpoint)
    # Of a joint matrix, the second part.
    sums["blk.1.attn_v.weight"] = np.ones(64, np.float32)
    for file in (write_old(tmp_path / "a", sums), write_gguf(tmp_path / "b", sums)):
        with pytest.raises(
            DataError,
            match=r"64 numbers for the columns of blk\.1\.attn_v\.weight, and this model has 128",
        ):
            export_model(checkpoint, tmp_path / "made", replace(PLAIN, importance=file))
    assert not (tmp_path / "made").exists()
    nothing = write_old(tmp_path / "c", {"blk.9.attn_v.weight": sums["blk.0.attn_v.weight"]})
    with pytest.raises(DataError, match="has nothing for this model"):
        read_importance(nothing, config)
    with pytest.raises(UnsupportedModelError, match="of this cohere model is not known"):
        read_importance(nothing, replace(config, model_type="cohere"))
    for number in (np.nan, np.inf, -1):
        bad = {"blk.0.attn_v.weight": np.full(128, number, np.float32)}
        with pytest.raises(DataError, match=r"blk\.0\.attn_v\.weight are not all positive numbers"):
            read_importance(write_gguf(tmp_path / "d", bad), config)


SMALL = {f"blk.{layer}.attn_v.weight": np.ones(128, np.float32) for layer in range(2)}


def test_a_file_that_was_cut_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    _, config, _ = read_checkpoint(shelf.checkpoint())
    file = tmp_path / "cut"
    whole = write_old(tmp_path / "a", SMALL).read_bytes()
    # Before the number of chunks, and before the name of the text, older files end.
    possible = (len(whole) - 16, len(whole) - 12)
    for end in range(len(whole)):
        file.write_bytes(whole[:end])
        if end in possible:
            assert len(read_importance(file, config).columns) == 2
            continue
        with pytest.raises(DataError, match="neither a text nor a whole importance matrix"):
            read_importance(file, config)
    file.write_bytes(whole + b"\0")
    with pytest.raises(DataError, match="17 bytes follow its matrices"):
        read_importance(file, config)
    whole = write_gguf(tmp_path / "b", SMALL).read_bytes()
    # The last tensor, a count of 4 bytes, is padded to 32.
    for end in range(len(whole) - 28):
        file.write_bytes(whole[:end])
        with pytest.raises(KvqError):
            read_importance(file, config)


@pytest.mark.parametrize("form", [write_old, write_gguf])
@pytest.mark.parametrize("number", [0x7FFFFFFF, 0xFFFFFFFF, 0])
def test_wrong_numbers_are_refused_or_harmless(
    shelf: Shelf, tmp_path: Path, form: Any, number: int
) -> None:
    _, config, _ = read_checkpoint(shelf.checkpoint())
    whole, file = form(tmp_path / "a", SMALL).read_bytes(), tmp_path / "wrong"
    for start in range(len(whole) - 4):
        file.write_bytes(whole[:start] + struct.pack("<I", number) + whole[start + 4 :])
        try:
            importance = read_importance(file, config)
        except KvqError:
            continue
        assert all(rows.shape == (1, 128) for rows in importance.columns.values())


def test_other_files_are_named_for_what_they_are(shelf: Shelf, tmp_path: Path) -> None:
    _, config, _ = read_checkpoint(shelf.checkpoint())
    text = tmp_path / "text.dat"
    text.write_text("GGUF and other forms of files")
    assert not is_importance(text)
    assert not is_importance(tmp_path / "missing")
    assert not is_importance(tmp_path)
    for file in (write_old(tmp_path / "a.txt", SMALL), write_gguf(tmp_path / "b.txt", SMALL)):
        assert is_importance(file)
    model = write_gguf(tmp_path / "c", SMALL, "model")
    with pytest.raises(DataError, match="is a GGUF file of type model, and no importance matrix"):
        read_importance(model, config)
    halves = {name: values.astype(np.float16) for name, values in SMALL.items()}
    with pytest.raises(DataError, match=r"attn_v.weight.in_sum2 is of type F16 and not F32"):
        read_importance(write_gguf(tmp_path / "d", halves), config)
    with pytest.raises(DataError, match="missing cannot be read: No such file"):
        read_importance(tmp_path / "missing", config)


def test_the_command_tells_it_from_a_text(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = shelf.checkpoint()
    file = write_gguf(tmp_path / "importance.txt", sums_of(checkpoint))
    words = ["export", str(checkpoint), "--calibrate", str(file), "--no-quality"]
    assert main([*words, "-o", str(tmp_path / "made")]) == 0
    # Widths are not mixed, as no text is read to measure what each is worth.
    options = ExportOptions(quality=False, weights=WeightFormat(), importance=file)
    expected = export_model(checkpoint, tmp_path / "expected", options)
    assert Bundle.open(tmp_path / "made").manifest.files == expected.manifest.files
    capsys.readouterr()
    assert main([*words, "-o", str(tmp_path / "b"), "--no-calibrate"]) == 2
    assert "--calibrate FILE and --no-calibrate contradict" in capsys.readouterr().err
    assert main([*words, "-o", str(tmp_path / "b"), "--format", "gguf"]) == 2
    assert "--calibrate is of the ONNX graph; leave it out, or --format" in capsys.readouterr().err
    file.write_bytes(file.read_bytes()[:200])
    assert main([*words, "-o", str(tmp_path / "b")]) == 2
    assert f"{file} is truncated or damaged" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_a_file_that_no_graph_uses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="importance is of the ONNX graph"):
        ExportOptions(format="gguf", importance=tmp_path / "a")
