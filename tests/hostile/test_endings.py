"""Ctrl-C, full disks and killed exports: an exit code, one line at most, nothing left behind."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from environment import environment_in
from kvq.errors import BundleError
from kvq_apps import cli
from kvq_export.export import export_model
from kvq_export.staging import staged
from kvq_runtime.bundle import Bundle
from kvq_runtime.manifest import MANIFEST_FILE
from shelf import PLAIN
from tiny import make_llama_checkpoint

# What the installed script `kvq` does; it says when it has taken Ctrl-C over.
SCRIPT = """
import signal, sys
from kvq_apps.entry import main
take = signal.signal
def taken(*arguments):
    signal.signal = take
    before = take(*arguments)
    print("begun", flush=True)
    return before
signal.signal = taken
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
    assert ("error" in complaint) == (process.returncode == 2)


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
    said = done.stderr.splitlines()[-1]
    if said == "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.":
        assert done.returncode == 1  # it ends the process itself: no Python hears of it
        return
    if re.search(r"^memory allocation of \d+ bytes failed$", done.stderr, re.MULTILINE):
        assert done.returncode == -signal.SIGABRT  # nor of what Rust's libraries cannot have
        return
    assert done.returncode == 2, done.stderr
    assert said.startswith("error: there is not enough memory for this (")
    assert "raise the limit" in said


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
