"""Checkpoints that are damaged, incomplete or not what they seem, and disks that fail.

Each is refused with the tensor or file named and what to do, and nothing is left behind.
"""

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq.errors import KvqError
from kvq_export import export
from kvq_export.export import export_model
from kvq_export.read.checkpoint import Checkpoint
from kvq_runtime.bundle.manifest import DATA_FILE
from shelf import PLAIN, cut
from tiny import make_llama_checkpoint, read_safetensors, write_safetensors

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    make_llama_checkpoint(folder / "single")
    make_llama_checkpoint(folder / "sharded", shards=3)
    return folder


def change_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrites the header of the single file, leaving the data bytes as they are."""
    raw = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    write_header(folder, json.dumps(header).encode(), raw[8 + length :])


def write_header(folder: Path, header: bytes, data: bytes = b"") -> None:
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + data)


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = {name: value.copy() for name, value in read_safetensors(folder / WEIGHTS).items()}
    change(tensors)
    write_safetensors(folder / WEIGHTS, tensors)


def poison(value: float, name: str = Q_PROJ) -> Callable[[Path], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[name].reshape(-1)[-1] = value

    return lambda folder: change_tensors(folder, change)


def only_pickles(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def change_json(folder: Path, name: str, **values: Any) -> None:
    data = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(data | values))


def grow(tensors: dict[str, np.ndarray]) -> None:
    tensors[Q_PROJ] = np.concatenate([tensors[Q_PROJ], tensors[Q_PROJ][:1]])


SINGLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated file": (
        lambda f: cut(f / WEIGHTS, 100),
        "model.safetensors is truncated: tensor .* ends at byte .*download it again",
    ),
    "cut inside the header": (
        lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:50]),
        "model.safetensors is truncated or not safetensors: its header claims",
    ),
    "empty file": (lambda f: (f / WEIGHTS).write_bytes(b""), "truncated or not safetensors"),
    "an HTML page": (
        lambda f: (f / WEIGHTS).write_bytes(b"<!DOCTYPE html><html>not found</html>"),
        "truncated or not safetensors",
    ),
    "header is not JSON": (lambda f: write_header(f, b"{nonsense}"), "has a damaged header"),
    "header is not text": (lambda f: write_header(f, b"\xff\xfe\xfd"), "has a damaged header"),
    "header is a list": (lambda f: write_header(f, b"[1, 2]"), "damaged header .not an object"),
    "deep header": (lambda f: write_header(f, b'{"a":' * 100_000), "has a damaged header"),
    "name twice": (
        lambda f: write_header(f, b'{"a": 1, "a": 2}'),
        "damaged header .a name appears twice",
    ),
    "negative offset": (
        lambda f: change_header(f, lambda h: h[Q_PROJ].update(data_offsets=[-8, 8])),
        f"damaged header entry for tensor '{Q_PROJ}'",
    ),
    "size does not fit the shape": (
        lambda f: change_header(f, lambda h: h[Q_PROJ].update(shape=[256, 64])),
        f"damaged header entry for tensor '{Q_PROJ}'",
    ),
    "more dimensions than any model has": (
        lambda f: change_header(f, lambda h: h[Q_PROJ].update(shape=[1 << 62] * 20_000)),
        f"damaged header entry for tensor '{Q_PROJ}'.{{,200}}$",
    ),
    "a side beyond 64 bits": (
        lambda f: change_header(f, lambda h: h[Q_PROJ].update(shape=[0, 1 << 64], dtype="F4")),
        f"damaged header entry for tensor '{Q_PROJ}'",
    ),
    "a type of many letters": (
        lambda f: change_header(f, lambda h: h[Q_PROJ].update(dtype="F" * 5000)),
        f"damaged header entry for tensor '{Q_PROJ}'.{{,200}}$",
    ),
    "entry without offsets": (
        lambda f: change_header(f, lambda h: h[Q_PROJ].pop("data_offsets")),
        f"damaged header entry for tensor '{Q_PROJ}'",
    ),
    "missing tensor": (
        lambda f: change_header(f, lambda h: h.pop(Q_PROJ)),
        f"tensor '{Q_PROJ}' is missing from .*weights are incomplete",
    ),
    "tensor of no family": (
        lambda f: change_tensors(f, lambda t: t.update({Q_PROJ[:-6] + "bias": t[Q_PROJ][0]})),
        "q_proj.bias' of model.safetensors is not part of this architecture",
    ),
    "wrong dtype": (
        lambda f: change_header(f, lambda h: h[Q_PROJ].update(dtype="I32")),
        f"tensor '{Q_PROJ}' of model.safetensors has dtype I32; F32, F16 and BF16 are possible",
    ),
    "unheard-of dtype": (
        lambda f: change_header(f, lambda h: h[Q_PROJ].update(dtype="F4_NEW")),
        "has dtype F4_NEW; F32, F16 and BF16 are possible",
    ),
    "wrong shape": (
        lambda f: change_tensors(f, grow),
        rf"wrong shape: tensor '{Q_PROJ}' of model.safetensors \[257, 128\].*asks for \[512, 128\]",
    ),
    "turned matrix": (
        lambda f: change_header(f, lambda h: h[Q_PROJ].update(shape=[128, 256])),
        rf"wrong shape: tensor '{Q_PROJ}' of model.safetensors \[128, 256\]",
    ),
    "NaN": (
        poison(np.nan),
        rf"tensor '{Q_PROJ}' of model.safetensors holds NaN or infinite weights .first in row 255.",
    ),
    "infinity in a norm": (
        poison(np.inf, "model.norm.weight"),
        "tensor 'model.norm.weight' of model.safetensors holds NaN or infinite",
    ),
    "only pickles": (only_pickles, "pytorch_model.bin, a pickle .* never loaded: save the model"),
    "no weights": (
        lambda f: (f / WEIGHTS).unlink(),
        "has no safetensors weights; model.safetensors or .* is needed",
    ),
    "more layers than weights": (
        lambda f: change_json(f, "config.json", num_hidden_layers=3),
        r"tensor 'model.layers.2.input_layernorm.weight' is missing .*\(and 8 more\)",
    ),
    "head size the cache cannot hold": (
        lambda f: change_json(f, "config.json", head_dim=1040),
        "head_dim 1040 is not possible",
    ),
    "no tokenizer": (
        lambda f: (f / "tokenizer.json").unlink(),
        "holds no tokenizer.json; save the tokenizer in the fast format",
    ),
    "another model's tokenizer": (
        lambda f: change_json(f, "config.json", vocab_size=64),
        "tokenizer.json names|wrong shape",
    ),
}

SHARDED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (
        lambda f: (f / "model-00002-of-00003.safetensors").unlink(),
        "shard model-00002-of-00003.safetensors is missing from .*download it again",
    ),
    "swapped shards": (
        lambda f: shutil.copy(
            f / "model-00001-of-00003.safetensors", f / "model-00002-of-00003.safetensors"
        ),
        "is missing from model-00002-of-00003.safetensors, where the index puts it",
    ),
    "index outside the folder": (
        lambda f: change_json(f, INDEX, weight_map={Q_PROJ: "../../etc/passwd"}),
        f"puts tensor '{Q_PROJ}' outside the folder",
    ),
    "index without a map": (
        lambda f: change_json(f, INDEX, weight_map=None),
        "has no weight_map; download it again",
    ),
    "index is not JSON": (lambda f: cut(f / INDEX, 1), "cannot be read as JSON"),
}


def refuse(source: Path, tmp_path: Path, message: str) -> None:
    """Expects that exporting `source` raises `message` with exit code 2 and leaves nothing."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(KvqError, match=message) as caught:
        export_model(source, tmp_path / "bundle", PLAIN)
    assert caught.value.exit_code == 2
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("case", SINGLE)
def test_a_damaged_checkpoint_is_refused(case: str, sources: Path, tmp_path: Path) -> None:
    damage, message = SINGLE[case]
    source = Path(shutil.copytree(sources / "single", tmp_path / "source"))
    damage(source)
    refuse(source, tmp_path, message)


@pytest.mark.parametrize("case", SHARDED)
def test_a_damaged_sharded_checkpoint_is_refused(case: str, sources: Path, tmp_path: Path) -> None:
    damage, message = SHARDED[case]
    source = Path(shutil.copytree(sources / "sharded", tmp_path / "source"))
    damage(source)
    refuse(source, tmp_path, message)


def test_of_two_tensors_of_one_name_the_index_decides(sources: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sources / "sharded", tmp_path / "source"))
    shards: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    (name, first), *_, (_, last) = shards.items()
    stale = read_safetensors(folder / last) | {name: read_safetensors(folder / first)[name]}
    write_safetensors(folder / last, stale)
    assert Checkpoint.open(folder).tensors[name].file.name == first != last


def test_a_destination_that_cannot_be_made_is_refused(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    options = PLAIN
    with pytest.raises(KvqError, match=r"cannot be written: .*choose another folder: `kvq exp"):
        export_model(sources / "single", tmp_path / "file" / "bundle", options)
    assert (tmp_path / "file").read_text() == "kept"


def test_a_disk_too_small_is_refused_before_writing(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 30, 1 << 30, 3 << 20))
    refuse(
        sources / "single", tmp_path, r"bundle takes \d+ MiB, the disk of .* has 3 MiB free; make"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_disk_that_fills_up_midway_is_reported(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def redirect(folder: Path, _num_bytes: int) -> None:
        (folder / DATA_FILE).symlink_to("/dev/full")

    monkeypatch.setattr(export, "require_space", redirect)
    refuse(sources / "single", tmp_path, "cannot be written: No space left on device")
