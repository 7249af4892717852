"""Opening a bundle: every byte is checked, every refusal names the file and what to do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq.errors import BundleError, CheckpointError
from kvq.reference.linear import PanelFormat
from kvq_runtime.bundle import file_hashes
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.manifest import (
    DATA_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    TOKENIZER_FILE,
    checksum,
)
from shelf import cut


@pytest.fixture
def folder(bundle: str, tmp_path: Path) -> Path:
    """Copies a bundle, to damage it."""
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None], *, seal: bool = True) -> None:
    """Changes the manifest; `seal` makes its checksum right again, as another exporter would."""
    data = json.loads((folder / MANIFEST_FILE).read_text())
    change(data)
    if seal:
        data["checksum"] = checksum(data)
    (folder / MANIFEST_FILE).write_text(json.dumps(data))


def flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "there is no bundle at .*kvq export"),
    "no manifest": (lambda f: (f / MANIFEST_FILE).unlink(), "is not a bundle: it has no kvq.json"),
    "truncated manifest": (lambda f: cut(f / MANIFEST_FILE, 2), "kvq.json is damaged"),
    "binary manifest": (
        lambda f: (f / MANIFEST_FILE).write_bytes(b"\xff\xfe\x00"),
        "kvq.json is damaged",
    ),
    "deep manifest": (
        lambda f: (f / MANIFEST_FILE).write_text("[" * 100_000),
        "kvq.json is damaged",
    ),
    "other JSON": (
        lambda f: (f / MANIFEST_FILE).write_text('{"name": "x"}'),
        "is not a bundle: kvq.json does not say",
    ),
    "newer version": (
        lambda f: rewrite(f, lambda d: d.update(version=13)),
        "version 13, newer than the 12 this kvq reads; upgrade kvq-runtime",
    ),
    "last version that is not read": (
        lambda f: rewrite(f, lambda d: d.update(version=6)),
        "of version 6, which this kvq no longer reads; export or pull the model again",
    ),
    "older version": (
        lambda f: rewrite(f, lambda d: d.update(version=1)),
        "of version 1, which this kvq no longer reads; export or pull the model again",
    ),
    "a version that is no number": (
        lambda f: rewrite(f, lambda d: d.update(version="7")),
        "of version 7, which this kvq no longer reads; export or pull the model again",
    ),
    "altered manifest": (
        lambda f: rewrite(f, lambda d: d["kv"].update(k_bits=8), seal=False),
        "kvq.json was altered after the export; export the model again",
    ),
    "missing key": (
        lambda f: rewrite(f, lambda d: d.pop("weights")),
        "kvq.json is damaged .*weights",
    ),
    "impossible plan": (
        lambda f: rewrite(f, lambda d: d["kv"].update(k_bits=-4)),
        "kvq.json is damaged .*-4",
    ),
    "unlisted data": (
        lambda f: rewrite(f, lambda d: d["files"].pop(DATA_FILE)),
        "lists no model.onnx.data",
    ),
    "file outside": (
        lambda f: rewrite(f, lambda d: d["files"].update({"../x": d["files"][MODEL_FILE]})),
        "names a file outside the bundle: '../x'",
    ),
    "missing data": (
        lambda f: (f / DATA_FILE).unlink(),
        "model.onnx.data is missing; copy the whole folder",
    ),
    "truncated data": (
        lambda f: cut(f / DATA_FILE),
        r"model.onnx.data is truncated: \d+ of \d+ .*; copy it again or export the model again",
    ),
    "longer data": (
        lambda f: (f / DATA_FILE).write_bytes((f / DATA_FILE).read_bytes() + b"x"),
        "model.onnx.data was altered",
    ),
    "altered data": (
        lambda f: flip(f / DATA_FILE),
        "model.onnx.data was altered after the export; copy it again",
    ),
    "altered graph": (lambda f: flip(f / MODEL_FILE), "model.onnx was altered"),
    "altered tokenizer": (lambda f: flip(f / "tokenizer.json"), "tokenizer.json was altered"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_bad_bundle_is_refused_by_name(case: str, folder: Path) -> None:
    damage, message = REFUSALS[case]
    damage(folder)
    with pytest.raises(BundleError, match=message) as caught:
        Bundle.open(folder)
    assert caught.value.exit_code == 2


def test_a_checkpoint_is_not_a_bundle(checkpoint: Path) -> None:
    with pytest.raises(BundleError, match=r"has no kvq\.json; run `kvq export` on it"):
        Bundle.open(checkpoint)


def test_unknown_keys_of_this_version_are_kept_and_ignored(folder: Path) -> None:
    before = Bundle.open(folder).manifest
    rewrite(folder, lambda data: data.update(later_idea={"a": 1}))
    assert Bundle.open(folder).manifest == before


def test_size_check_leaves_hashes_out(folder: Path) -> None:
    flip(folder / DATA_FILE)
    assert Bundle.open(folder, verify="size").path == folder
    cut(folder / DATA_FILE)
    with pytest.raises(BundleError, match="truncated"):
        Bundle.open(folder, verify="size")


def test_hashes_of_large_files_are_remembered(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(file_hashes, "REMEMBERED_BYTES", (folder / DATA_FILE).stat().st_size)
    hashed: list[str] = []
    real = file_hashes.file_sha256
    monkeypatch.setattr(
        file_hashes, "file_sha256", lambda file: hashed.append(file.name) or real(file)
    )
    Bundle.open(folder)
    assert DATA_FILE in hashed
    hashed.clear()
    Bundle.open(folder)
    assert DATA_FILE not in hashed
    assert MODEL_FILE in hashed
    flip(folder / DATA_FILE)
    with pytest.raises(BundleError, match=r"model\.onnx\.data was altered"):
        Bundle.open(folder)


@pytest.mark.parametrize("memory", ["not JSON", "[]", '{"x": 3}'])
def test_a_damaged_memory_of_hashes_is_ignored(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(file_hashes, "REMEMBERED_BYTES", 1)
    (tmp_path / "kvq").mkdir()
    (tmp_path / "kvq" / "hashes.json").write_text(memory)
    Bundle.open(folder)
    rows = json.loads((tmp_path / "kvq" / "hashes.json").read_text())
    assert str((folder / DATA_FILE).resolve()) in rows


def test_a_cache_folder_that_cannot_be_written_does_no_harm(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(file_hashes, "REMEMBERED_BYTES", 1)
    assert Bundle.open(folder).manifest.name == "bundle"


def test_weights_are_read_by_canonical_name(bundle: str) -> None:
    opened = Bundle.open(bundle)
    whole = opened.read_weight("layers.0.o")
    assert whole.shape == (128, 256)
    assert whole.dtype == np.float32
    np.testing.assert_array_equal(opened.read_weight("layers.0.o", slice(4, 6)), whole[4:6])
    assert opened.read_weight("layers.0.attn_norm").shape == (128,)
    with pytest.raises(BundleError, match=r"has no weight 'layers\.9\.o'"):
        opened.read_weight("layers.9.o")


def test_a_step_reads_all_weights_but_the_embedding(bundle: str) -> None:
    opened = Bundle.open(bundle)
    stored = opened.manifest.weights
    panel = PanelFormat.of(stored.formats["embed"], (384, 128)).panel_bytes
    assert opened.weight_bytes_per_step == stored.num_bytes - (384 // 16 - 1) * panel


def test_what_is_read_ahead_is_read_once_and_its_faults_are_the_callers(folder: Path) -> None:
    bundle = Bundle.open(folder)
    bundle.read_ahead()
    tokenizer = bundle.tokenizer()
    assert tokenizer is not None
    assert tokenizer is bundle.tokenizer()
    cut(folder / TOKENIZER_FILE, 2)
    damaged = Bundle(path=folder, manifest=bundle.manifest)
    damaged.read_ahead()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="not JSON"):
            damaged.tokenizer()
