"""Bundles of GGUF exports, the command, and refusals before anything is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import tiny
from kvq.errors import BackendError, CheckpointError, KvqError, UsageError
from kvq.reference.linear import Blocks
from kvq_apps.cli import main
from kvq_export.config import ExportOptions
from kvq_export.export import export_model
from kvq_export.gguf.gguf_writer import llama_missing, pack_blocks
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.manifest import GGUF_FILE, MANIFEST_FILE, VERSION

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

from exported_gguf import NATS, export, needs_llama, tensors  # noqa: E402


@needs_llama
@pytest.mark.parametrize("kind", ["onnx", "gguf", "both"])
def test_the_manifest_says_what_there_is(tmp_path: Path, kind: str) -> None:
    source = tiny.make_llama_checkpoint(tmp_path / "source", dtype="bfloat16")
    options = ExportOptions(format=kind, gguf_type="q8_0", threads=1)
    calls: list[tuple[int, int]] = []
    bundle = export_model(
        source, tmp_path / "bundle", options, lambda done, total, _: calls.append((done, total))
    )
    manifest = bundle.manifest
    assert (bundle.has_onnx, bundle.has_gguf) == (kind != "gguf", kind != "onnx")
    assert (manifest.weights is None) == (kind == "gguf")
    written = json.loads((bundle.path / MANIFEST_FILE).read_text())
    assert written["version"] == VERSION
    quality = written["quality"]
    assert set(quality) - {"text", "tokens"} == {
        *(["weights", "kv", "weights_and_kv"] if bundle.has_onnx else []),
        *(["gguf"] if bundle.has_gguf else []),
    }
    if bundle.has_gguf:
        report = quality["gguf"]
        assert (report["type"], report["kv"], report["tokens"]) == ("q8_0", "f16", 384)
        assert 0 < report["mean_kld"] < NATS["q8_0"]
        assert report["mean_kld"] < report["kld_99_9"]
        assert report["top1_agreement"] > 0.9
    total = calls[0][1]
    writing = [call for call in calls if call[1] == total]
    assert writing == sorted(writing)
    assert calls[-1][0] == calls[-1][1]


def test_a_bundle_without_a_graph_says_so(tmp_path: Path) -> None:
    bundle = export(tiny.make_llama_checkpoint(tmp_path / "source"), "q8_0")
    with pytest.raises(KvqError, match=r"holds a GGUF file only.*format=\"both\""):
        bundle.read_weight("embed")


def test_what_is_missing_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.make_llama_checkpoint(tmp_path / "source")
    reason = 'llama-cpp-python is not installed; pip install "kvq-runtime[gguf]"'
    monkeypatch.setattr("kvq_export.gguf.gguf_writer.missing", lambda: reason)
    needed = r"q4_k_m is made by llama.cpp's own .*\[gguf\].; gguf_type q8_0, .* work without it"
    with pytest.raises(BackendError, match=needed):
        export(source, "q4_k_m")
    report = export(source, "q8_0", quality=True).manifest.quality
    assert report is not None
    assert report["gguf"] == {"type": "q8_0", "not_measured": reason}
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(BackendError, match=r'gguf package: pip install "kvq-runtime\[export\]"'):
        export(source, "q4_0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "source-q8_0"]


@needs_llama
@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m"])
def test_an_interrupted_export_leaves_nothing(tmp_path: Path, kind: str) -> None:
    source = tiny.make_llama_checkpoint(tmp_path / "source")

    def stop(done: int, total: int, _label: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    options = ExportOptions(format="gguf", gguf_type=kind, quality=False, threads=1)
    with pytest.raises(KeyboardInterrupt):
        export_model(source, tmp_path / "bundle", options, stop)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_weights_beyond_float16_are_refused(tmp_path: Path) -> None:
    source = tiny.make_llama_checkpoint(tmp_path / "source")
    file = source / "model.safetensors"
    values = tiny.read_safetensors(file)
    values["model.layers.0.mlp.down_proj.weight"] = values[
        "model.layers.0.mlp.down_proj.weight"
    ] * np.float32(1e6)
    tiny.write_safetensors(file, values)
    with pytest.raises(CheckpointError, match='does not fit float16; export with gguf_type="bf16"'):
        export(source, "f16")
    assert export(source, "bf16").has_gguf
    blocks = Blocks(np.zeros((1, 64), np.uint8), np.array([[1, 1e6]], np.float32))
    with pytest.raises(CheckpointError, match=r"a block's scale of 1e\+06 does not fit float16"):
        pack_blocks(blocks, 8)


@pytest.mark.parametrize("wrong", [{"format": "ggml"}, {"gguf_type": "q5_k_m"}])
def test_impossible_options_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(wrong.values()))} is not possible: choose"):
        ExportOptions(**wrong)


def test_the_type_nobody_asks_for_needs_no_llama_cpp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = 'llama-cpp-python is not installed; pip install "kvq-runtime[gguf]"'
    monkeypatch.setattr("kvq_export.gguf.gguf_writer.missing", lambda: reason)
    words = ["export", str(tiny.make_llama_checkpoint(tmp_path / "source")), "--format", "gguf"]
    assert main([*words, "-o", str(tmp_path / "made"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gguf"]["type"] == "q8_0"
    assert report["quality"]["gguf"]["not_measured"] == reason
    assert main([*words, "-o", str(tmp_path / "plain"), "--no-quality"]) == 0
    assert f"try: kvq run -m {tmp_path / 'plain' / GGUF_FILE} " in capsys.readouterr().err
    assert main([*words, "-o", str(tmp_path / "mixed"), "--gguf-type", "q4_k_m"]) == 2
    message = capsys.readouterr().err
    assert f"--gguf-type q4_k_m is made by llama.cpp's own quantiser, and {reason}" in message
    assert "--gguf-type q8_0, q4_0, f16 and bf16 work without it" in message


@needs_llama
def test_the_command_writes_what_was_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(tiny.make_llama_checkpoint(tmp_path / "source"))
    made = str(tmp_path / "made")
    assert main(["export", source, "-o", made, "--format", "both", "--wbits", "4", "--json",
                 "--gguf-type", "q4_k_m"]) == 0  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert report["gguf"] == {
        "type": "q4_k_m", "architecture": "llama", "context_length": 512
    }  # fmt: skip
    assert "4/64/zero_point" in report["weights"]["formats"]
    assert report["quality"]["gguf"]["mean_kld"] > 0
    words = ["export", source, "-o", made, "--force", "--no-quality", "--format", "gguf"]
    assert main([*words, "--gguf-type", "q4_0", "--embedding-bits", "4", "-v"]) == 0
    assert "q4_0, architecture llama, 512 tokens of context" in capsys.readouterr().out
    assert {tensor.tensor_type.name for tensor in tensors(Bundle.open(made))} == {"F32", "Q4_0"}


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tiny.make_llama_checkpoint(tmp_path / "source")
    kinds = ["q8_0"] if llama_missing() else ["q8_0", "q4_k_m"]
    for kind in kinds:
        export(source, kind, quality=True)
    assert capfd.readouterr() == ("", "")
