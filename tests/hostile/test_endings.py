"""Ctrl-C, full disks and killed exports: an exit code, one line at most, nothing left behind."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from environment import environment_in
from fake_hub import FakeHub, repository, serving
from kvq.errors import BundleError
from kvq_apps import cli
from kvq_apps.names import pull_records
from kvq_export.export import export_model
from kvq_export.write.staging import staged
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.manifest import MANIFEST_FILE
from shelf import PLAIN
from tiny import make_llama_checkpoint

# What the installed script `kvq` does; it says when it has taken Ctrl-C over.
SCRIPT = """
import signal, sys
from kvq_apps.entry import main
set_handler = signal.signal
def set_first_handler(*arguments):
    signal.signal = set_handler
    before = set_handler(*arguments)
    print("begun", flush=True)
    return before
signal.signal = set_first_handler
sys.exit(main())
"""
KVQ = (sys.executable, "-c", SCRIPT)


@pytest.mark.sampled
@pytest.mark.parametrize("delay_ms", range(0, 700, 50))
def test_an_early_interrupt_is_130_and_one_line(delay_ms: int, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*KVQ, "run", str(tmp_path / "none"), "hello", "-n", "5"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    time.sleep(delay_ms / 1000)
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=300)
    # 2: it had ended already, because there is no such model.
    assert process.returncode in (130, 2)
    assert complaint.count("\n") <= 1
    assert "Traceback" not in complaint
    # Ctrl-C may also come after the complaint and before the end.
    assert "error" in complaint or process.returncode == 130


FINALIZER = """
import signal, sys, time, weakref
from kvq_apps.terminal.interrupt import noted_interrupts
class Thing:
    pass
with noted_interrupts() as interrupted:
    thing = Thing()
    weakref.finalize(thing, signal.raise_signal, signal.SIGINT)
    try:
        del thing
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(130 if interrupted() else 1)
"""


def test_an_interrupt_in_a_finalizer_is_not_lost() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FINALIZER], capture_output=True, text=True, check=False, timeout=50
    )
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.sampled
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--json"], ["--completion", "bash"]])
def test_a_full_disk_is_named(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvq_apps.cli", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: cannot write: No space left on device"


_CRASH = "Fatal Python error: Segmentation fault"


def check_memory_is_named(code: int, complaint: str) -> None:
    """Fails unless a command that had too little memory says so."""
    if _CRASH in complaint:
        # OpenBLAS crashes where two threads have no memory at once; kvq's library must not.
        assert code in (1, -signal.SIGSEGV)
        assert not re.search(r'first\):\n  File "[^"]*/kvq/kvq/', complaint), complaint
        return
    said = complaint.splitlines()[-1]
    if said == "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.":
        # It ends the process itself, or crashes where two threads do so at once.
        assert code in (1, -signal.SIGSEGV)
        return
    if re.search(r"^memory allocation of \d+ bytes failed$", complaint, re.MULTILINE):
        assert code == -signal.SIGABRT  # nor of what Rust's libraries cannot have
        return
    assert code == 2, complaint
    assert said.startswith("error: there is not enough memory for this (")
    assert "raise the limit" in said


@pytest.mark.skipif(sys.platform != "linux", reason="the limit counts what a process maps")
@pytest.mark.parametrize("limit_mib", [150, 200])
def test_too_little_memory_is_named(limit_mib: int, tmp_path: Path) -> None:
    limit_bytes = limit_mib << 20
    done = subprocess.run(
        [sys.executable, "-m", "kvq_apps.cli", "run", "-n", "1", "hi"],
        env=environment_in(tmp_path),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes)),
        capture_output=True,
        text=True,
        check=False,
    )
    check_memory_is_named(done.returncode, done.stderr)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("x.so: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
        SystemError("error return without exception set"),
        SystemError("<function _find_and_load> returned NULL without setting an exception"),
    ],
    ids=repr,
)
def test_whoever_is_refused_memory_is_understood(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(_: object) -> int:
        raise error

    monkeypatch.setattr("kvq_apps.commands.doctor.run", refused)
    assert cli.main(["doctor"]) == 2
    assert "there is not enough memory for this (" in capsys.readouterr().err


def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source")
    options = replace(PLAIN, force=True)
    export_model(source, tmp_path / "one", options)
    dead = tmp_path / ".one.0123abcd.partial"
    other = tmp_path / ".two.0123abcd.partial"
    for folder in (dead, other):
        folder.mkdir()
        (folder / "model.onnx.data").write_bytes(b"half")
    # Killed between two renames: the old bundle is all there is.
    (tmp_path / "one").rename(tmp_path / ".one.89abcdef.old")
    with pytest.raises(BundleError, match="already holds a bundle"):
        export_model(source, tmp_path / "one", PLAIN)
    assert Bundle.open(tmp_path / "one").has_onnx
    export_model(source, tmp_path / "one", options)
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "one", "source"]


def test_an_export_that_lives_keeps_its_folder(tmp_path: Path) -> None:
    def write(folder: Path, text: str) -> None:
        (folder / MANIFEST_FILE).write_text(text)

    with staged(tmp_path / "one", force=True) as first:
        write(first, "first")
        with staged(tmp_path / "one", force=True) as second:
            write(second, "second")
        assert (tmp_path / "one" / MANIFEST_FILE).read_text() == "second"
        handle = os.open(first, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)
    assert (tmp_path / "one" / MANIFEST_FILE).read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


# A pull and an export that are killed, interrupted, made twice at once, or lack memory


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[FakeHub]:
    with serving(FakeHub(repository="org/small", files=repository(checkpoint))) as hub:
        yield hub


@pytest.fixture
def home(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    """Returns a user's environment, who pulls from the hub on this machine."""
    return environment_in(tmp_path) | {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.address}


def work(kind: str, tmp_path: Path) -> tuple[list[str], Path]:
    """Returns the words of a pull or an export that replaces a bundle, and where that lies."""
    if kind == "pull":
        return ["pull", "org/small", "--force"], tmp_path / "data/kvq/models/org--small"
    out = tmp_path / "out"
    return ["export", "org/small", "-o", str(out), "--force", "--no-quality"], out


def start(words: Sequence[str], home: dict[str, str]) -> subprocess.Popen[str]:
    """Starts a command as the installed script does, and returns it at work."""
    process = subprocess.Popen(
        [*KVQ, *words], env=home, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def run_to_end(words: Sequence[str], home: dict[str, str]) -> tuple[int, str]:
    """Runs a command; returns its exit code and its complaint."""
    process = start(words, home)
    _, complaint = process.communicate(timeout=300)
    return process.returncode, complaint


def no_halves(bundle: Path) -> bool:
    """Tells whether nothing but the bundle lies beside it."""
    return [path.name for path in bundle.parent.iterdir() if path.name[0] == "."] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pull", "export"])
def test_what_was_there_outlives_a_kill_at_any_moment(
    kind: str, home: dict[str, str], tmp_path: Path
) -> None:
    words, bundle = work(kind, tmp_path)
    since = time.monotonic()
    assert run_to_end(words, home)[0] == 0
    whole_s = time.monotonic() - since
    for part in range(10):
        process = start(words, home)
        time.sleep(whole_s * part / 10)
        process.kill()
        process.communicate(timeout=300)
        assert Bundle.open(bundle).has_onnx, part
        assert kind == "export" or pull_records.record_of(bundle) is not None, part
    assert run_to_end(words, home)[0] == 0
    assert no_halves(bundle)
    assert Bundle.open(bundle).has_onnx


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pull", "export"])
def test_a_kill_at_any_moment_is_no_obstacle(
    kind: str, home: dict[str, str], tmp_path: Path
) -> None:
    words, bundle = work(kind, tmp_path)
    for delay_s in range(1, 8):
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
        shutil.rmtree(bundle, ignore_errors=True)
        process = start(words, home)
        time.sleep(delay_s)
        process.kill()
        process.communicate(timeout=300)
        assert not bundle.exists() or Bundle.open(bundle).has_onnx
    assert run_to_end(words, home)[0] == 0
    assert no_halves(bundle)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pull", "export"])
def test_an_interrupt_in_any_phase_is_130_and_leaves_no_half(
    kind: str, home: dict[str, str], tmp_path: Path
) -> None:
    words, bundle = work(kind, tmp_path)
    lines = run_to_end(words, home)[1].count("\n")
    assert lines > 6
    for phase in range(1, lines, 2):
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
        shutil.rmtree(bundle, ignore_errors=True)
        process = start(words, home)
        assert process.stderr is not None
        said = [process.stderr.readline() for _ in range(phase)]
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=300)
        # 0: it was at its end already.
        assert process.returncode in (130, 0), (said, complaint)
        assert "Traceback" not in complaint
        assert "error" not in complaint
        assert no_halves(bundle) if bundle.parent.exists() else True, said
        assert not bundle.exists() or Bundle.open(bundle).has_onnx


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pull", "export"])
def test_two_at_once_both_end_well(kind: str, home: dict[str, str], tmp_path: Path) -> None:
    words, bundle = work(kind, tmp_path)
    for delay_s in (0, 1):
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
        shutil.rmtree(bundle, ignore_errors=True)
        first = start(words, home)
        time.sleep(delay_s)
        second = start(words, home)
        for process in (first, second):
            _, complaint = process.communicate(timeout=300)
            assert process.returncode == 0, complaint
        assert Bundle.open(bundle).has_onnx
        assert no_halves(bundle)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit counts what a process maps")
@pytest.mark.parametrize("limit_mib", [150, 350, 450])
@pytest.mark.parametrize("kind", ["pull", "export"])
def test_too_little_memory_for_a_bundle_is_named(
    kind: str, limit_mib: int, home: dict[str, str], tmp_path: Path
) -> None:
    words, bundle = work(kind, tmp_path)
    limit_bytes = limit_mib << 20
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "kvq_apps.cli", *words],
        env=home,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes)),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode:
        check_memory_is_named(done.returncode, done.stderr)
        assert not bundle.exists()
    assert "Traceback" not in done.stderr
