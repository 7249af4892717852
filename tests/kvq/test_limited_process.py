"""Processes with limits: what they may not do, and how values reach them."""

import io
import signal
import subprocess
import sys

import pytest

from kvq.limited_process import command, ran_out_of_time, read_value, write_value

HEAD = "from kvq.limited_process import *\n"


def ended(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HEAD + script], capture_output=True, text=True, check=False
    )


def test_a_value_comes_as_it_went() -> None:
    stream = io.BytesIO()
    values = [{"a": [1, 2.5, None, True, "é\ud800\u2028"]}, "", 0]
    for value in values:
        write_value(stream, value)
    length = stream.tell()
    stream.seek(0)
    assert [read_value(stream) for _ in values] == values
    assert read_value(stream) is None
    stream.truncate(length - 1)
    stream.seek(0)
    assert [read_value(stream) for _ in values] == [*values[:2], None]
    stream.seek(0)
    with pytest.raises(ValueError, match="are more than 3"):
        read_value(stream, 3)
    with pytest.raises(TypeError):
        write_value(stream, object())


def test_a_command_calls_main_with_its_arguments() -> None:
    for bare in (False, True):
        process = subprocess.run(
            command("json.tool", "'\"", bare=bare), capture_output=True, text=True, check=False
        )
        assert "main() takes 0 positional arguments but 1 was given" in process.stderr


def test_memory_ends_where_the_limit_is() -> None:
    script = "limit_memory(64 << 20)\ntry: bytearray(128 << 20)\nexcept MemoryError: print('full')"
    assert ended(script).stdout == "full\n"
    assert ended(script.replace("64", "256")).stdout == ""


def test_time_is_counted_where_it_is_limited() -> None:
    script = "with limited_time(0.2):\n    {}\nfor _ in range(10**7): pass\nprint('done')"
    assert ended(script.format("pass")).stdout == "done\n"
    process = ended(script.format("9 ** 9 ** 9"))
    assert (process.stdout, process.returncode) == ("", -signal.SIGPROF)
    assert ran_out_of_time(process.returncode)
    assert not ran_out_of_time(0)


def test_no_file_is_opened_and_no_process_started() -> None:
    tries = "\n".join(
        f"try: {attempt}; print('done')\nexcept OSError as error: print(type(error).__name__)"
        for attempt in ("open('/etc/passwd')", "socket.socket()", "os.pipe()")
    )
    process = ended(f"import os, socket\nforbid_files_and_processes()\n{tries}")
    assert process.stdout == "OSError\nOSError\nOSError\n"
