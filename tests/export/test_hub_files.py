"""Downloads from a hub on this machine: whole, broken off, damaged, or without any answer."""

import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from time import monotonic

import pytest

from command_line import kvq, started
from environment import environment_in
from fake_hub import FakeHub, repository, serving
from kvq_runtime.bundle.bundle import Bundle

Pull = Callable[..., CompletedProcess[bytes]]


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[FakeHub]:
    files = repository(checkpoint) | {
        "small-Q4_0.gguf": b"GGUF four",
        "small-Q8_0.gguf": b"GGUF eight",
        "other-Q8_0.gguf": b"GGUF other",
        "consolidated.safetensors": b"twice the weights",
        "pickle.bin": b"code",
    }
    with serving(FakeHub(repository="org/small", files=files)) as hub:
        yield hub


@pytest.fixture
def home(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    cache = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.address}
    return environment_in(tmp_path) | cache


@pytest.fixture
def pull(home: dict[str, str]) -> Pull:
    return lambda name, *words: kvq("pull", name, *words, home=home)


def blobs(tmp_path: Path) -> list[int]:
    """Returns the sizes of the files of the hub's cache."""
    folder = tmp_path / "hf" / "hub" / "models--org--small" / "blobs"
    return sorted(file.stat().st_size for file in folder.iterdir())


@pytest.mark.slow
def test_a_checkpoint_is_downloaded_shown_and_exported(
    hub: FakeHub, pull: Pull, tmp_path: Path
) -> None:
    finished = pull("org/small")
    shown = finished.stderr.decode()
    assert finished.returncode == 0, shown
    assert re.search(r"^ *\d+ % downloading org/small(, about .* left)?$", shown, re.MULTILINE)
    assert "100 % making the bundle\n" in shown
    bundle = Bundle.open(tmp_path / "data" / "kvq" / "models" / "org--small")
    assert bundle.manifest.source["model"] == "org/small"
    assert bundle.manifest.source["revision"] == "0123456789abcdef0123456789abcdef01234567"
    names = {file.name for file in (tmp_path / "hf").rglob("snapshots/*/*")}
    assert {"config.json", "model.safetensors"} <= names
    assert names.isdisjoint({"pickle.bin", "consolidated.safetensors", "small-Q4_0.gguf"})
    # What is here needs no hub.
    hub.files.clear()
    again = kvq("export", "org/small", "-o", str(tmp_path / "out"), "--no-quality",
                "--no-calibrate", "--offline",
                home=environment_in(tmp_path) | {"HF_HOME": str(tmp_path / "hf")})  # fmt: skip
    assert again.returncode == 0, again.stderr.decode()


@pytest.mark.slow
def test_a_file_that_is_damaged_on_its_way_is_not_kept(
    hub: FakeHub, pull: Pull, tmp_path: Path
) -> None:
    hub.told_sha256["model.safetensors"] = "0" * 64
    finished = pull("org/small")
    assert finished.returncode == 2
    assert (
        "model.safetensors of org/small was damaged on its way: its SHA-256 is"
        in finished.stderr.decode()
    )
    assert not (tmp_path / "data" / "kvq" / "models").exists()
    assert len(hub.files["model.safetensors"]) not in blobs(tmp_path)
    assert not list((tmp_path / "hf").rglob("model.safetensors"))
    hub.told_sha256.clear()
    assert pull("org/small").returncode == 0


@pytest.mark.slow
def test_a_broken_connection_goes_on_where_it_was(hub: FakeHub, pull: Pull, tmp_path: Path) -> None:
    hub.files["large-Q2_K.gguf"] = b"GGUF" + bytes(12 << 20)
    hub.stall_after = 11 << 20
    hub.released.set()
    shown = pull("hf.co/org/small:Q2_K").stderr.decode()
    assert "kvq: the connection to 127.0.0.1 broke; trying again (2 of 3)\n" in shown
    assert hub.ranges == [f"large-Q2_K.gguf from {11 << 20}"]
    (file,) = (tmp_path / "hf").rglob("*.gguf")
    assert file.read_bytes() == hub.files["large-Q2_K.gguf"]


@pytest.mark.slow
def test_an_interrupted_download_leaves_whole_files_only(
    hub: FakeHub, home: dict[str, str], pull: Pull, tmp_path: Path
) -> None:
    hub.stall_after = 1000
    process = started("pull", "org/small", home=home)
    assert hub.stalled.wait(60)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not (tmp_path / "data" / "kvq" / "models").exists()
    whole = {len(content) for content in hub.files.values()}
    assert set(blobs(tmp_path)) <= whole - {len(hub.files["model.safetensors"])}
    assert pull("org/small").returncode == 0


@pytest.mark.slow
def test_one_gguf_file_is_chosen_by_its_type(hub: FakeHub, pull: Pull, tmp_path: Path) -> None:
    finished = pull("hf.co/org/small:Q8_0")
    assert finished.returncode == 2
    assert (
        "org/small on the hub has 2 models of type Q8_0; of its GGUF files ask for one"
        in finished.stderr.decode()
    )
    finished = pull("hf.co/org/small:Q2_K")
    assert (
        "org/small on the hub has no GGUF file of type Q2_K; of its GGUF files ask for one as "
        "hf.co/org/small:TYPE, with Q4_0, Q8_0" in finished.stderr.decode()
    )
    del hub.files["config.json"]
    assert (
        "org/small on the hub has no config.json, so it is no checkpoint; of its GGUF"
        in pull("org/small").stderr.decode()
    )
    pull("hf.co/org/small:q4_0")
    (file,) = (tmp_path / "hf").rglob("*.gguf")
    assert file.read_bytes() == b"GGUF four"


@pytest.mark.slow
def test_what_the_hub_does_not_have_is_said(pull: Pull) -> None:
    finished = pull("org/unknown")
    assert finished.returncode == 2
    assert "no public model org/unknown on the hub" in finished.stderr.decode()


@pytest.mark.slow
def test_a_hub_that_never_answers_is_given_up_within_seconds(
    home: dict[str, str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        since = monotonic()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        finished = kvq("pull", "org/small", home=home, HF_ENDPOINT=address)
    assert finished.returncode == 2
    assert monotonic() - since < 20
    assert "org/small cannot be downloaded (" in finished.stderr.decode()
    assert not (tmp_path / "data").exists()
