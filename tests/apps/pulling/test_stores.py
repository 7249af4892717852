"""What other programs left: found by its own name, and whatever is odd left out."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from kvq.errors import ModelError
from kvq_apps.cli import main
from kvq_apps.names import pull_request
from kvq_apps.names.fetching import fetch
from kvq_apps.names.pull_request import parse_pull_request
from kvq_apps.names.stores import StoredModel, stored_models
from kvq_export.phases import no_progress

WEIGHTS = b"GGUF" + bytes(1000)
DIGEST = sha256(WEIGHTS).hexdigest()
LAYER = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{DIGEST}"}


def ollama(folder: Path, place: str, manifest: Any = None) -> Path:
    """A model as Ollama keeps it; its manifest."""
    blob = folder / "blobs" / f"sha256-{DIGEST}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(WEIGHTS)
    file = folder / "manifests" / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"layers": [LAYER]} if manifest is None else manifest))
    return file


def names(program: str) -> list[str]:
    return [model.name for model in stored_models() if model.program == program]


@pytest.mark.parametrize("moved", [False, True])
def test_ollamas_models_have_the_names_it_lists_them_by(
    moved: bool, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "elsewhere" if moved else home / ".ollama" / "models"
    if moved:
        monkeypatch.setenv("OLLAMA_MODELS", str(folder))
    ollama(folder, "registry.ollama.ai/library/llama3.2/1b")
    ollama(folder, "registry.ollama.ai/someone/model/latest")
    ollama(folder, "hf.co/Qwen/Qwen3-0.6B-GGUF/Q8_0")
    assert names("Ollama") == [
        "hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0", "llama3.2:1b", "someone/model:latest",
    ]  # fmt: skip
    pull_request = parse_pull_request("llama3.2:1b")
    assert pull_request.name == "llama3.2:1b"
    file = fetch(pull_request.sources[0], no_progress)
    assert isinstance(file, Path)
    assert file.read_bytes() == WEIGHTS
    assert pull_request.sources[0].num_bytes == len(WEIGHTS)
    # What is here goes before what is on the hub.
    here = parse_pull_request("hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0")
    assert (here.name, here.sources[0].kind) == ("Qwen/Qwen3-0.6B-GGUF:Q8_0", "path")
    file.write_bytes(WEIGHTS[:-1])
    with pytest.raises(ModelError, match="is not what it should be: its SHA-256 is"):
        fetch(pull_request.sources[0], no_progress)


@pytest.mark.parametrize(
    "manifest",
    [
        {"layers": [LAYER | {"digest": "sha256:../../../../etc/passwd"}]},
        {"layers": [LAYER | {"digest": f"sha256:{'0' * 64}"}]},
        {"layers": [LAYER | {"digest": 7}]},
        {"layers": [LAYER, LAYER]},
        {"layers": [{}]},
        {"layers": 3},
        [],
        {"layers": [LAYER], "padding": "x" * (1 << 20)},
    ],
)
def test_odd_manifests_are_left_out(manifest: Any, home: Path) -> None:
    folder = home / ".ollama" / "models"
    ollama(folder, "registry.ollama.ai/library/good/1b")
    ollama(folder, "registry.ollama.ai/library/odd/1b", manifest)
    assert names("Ollama") == ["good:1b"]


def test_manifests_that_are_no_files_of_text_are_left_out(home: Path) -> None:
    folder = home / ".ollama" / "models"
    good = ollama(folder, "registry.ollama.ai/library/good/1b")
    (good.parent / "bytes").write_bytes(b"\xff\xfe\x00")
    (good.parent / "folder").mkdir()
    (good.parent / "nowhere").symlink_to(home / "nothing")
    (good.parent / "loop").symlink_to(good.parent / "loop")
    assert names("Ollama") == ["good:1b"]


def test_lm_studios_models_have_the_names_of_their_files(home: Path) -> None:
    folder = home / ".lmstudio" / "models" / "owner" / "repo"
    folder.mkdir(parents=True)
    for name in (
        "Small-Q4_K_M.gguf", "mmproj-Small.gguf", "big-00001-of-00002.gguf",
        "big-00002-of-00002.gguf", "notes.txt",
    ):  # fmt: skip
        (folder / name).write_bytes(WEIGHTS)
    old = home / ".cache" / "lm-studio" / "models" / "owner" / "repo"
    old.mkdir(parents=True)
    (old / "Old-Q8_0.gguf").write_bytes(WEIGHTS)
    assert names("LM Studio") == ["Small-Q4_K_M", "big-00001-of-00002", "Old-Q8_0"]
    pull_request = parse_pull_request("Small-Q4_K_M")
    assert (pull_request.name, pull_request.sources[0].place) == (
        "Small-Q4_K_M",
        str(folder / "Small-Q4_K_M.gguf"),
    )


def test_checkpoints_of_the_hubs_cache_have_their_ids(home: Path) -> None:
    for owner, files in {
        "org--small": ("config.json", "model.safetensors"),
        "org--half": ("config.json",),
        "org--files": ("small-Q4_0.gguf",),
    }.items():
        folder = home / "hub" / f"models--{owner}" / "snapshots" / "0123"
        folder.mkdir(parents=True)
        for name in files:
            (folder / name).write_bytes(b"x" * 10)
    assert [model for model in stored_models() if model.program == "the hub's cache"] == [
        StoredModel(
            program="the hub's cache", name="org/small",
            source=parse_pull_request("org/small").sources[0], num_bytes=10,
        )
    ]  # fmt: skip


def test_the_list_and_the_names_have_them(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "--list"]) == 0
    assert "left by" not in capsys.readouterr().out
    ollama(home / ".ollama" / "models", "registry.ollama.ai/library/llama3.2/1b")
    assert main(["pull", "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == [
        "llama3.2:1b",
        "1004",
        "bytes",
        "Ollama",
    ]
    assert "llama3.2:1b" in pull_request.names()
