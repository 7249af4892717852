"""Runs code that strangers wrote in Python processes with limits, which the parent can end.

The parent starts a process and kills it when it takes too long; the process limits itself. Both
exchange JSON values over pipes. Windows has no such limits, so there only the parent ends a
process.
"""

import json
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_SCRIPT = "import sys; sys.path[:0] = {path!r}; from {module} import main; main(*{arguments!r})"
_HEADER_BYTES = 8
# The exit status of a process that says so when it may not have more memory.
OUT_OF_MEMORY = 3


def command(module: str, *arguments: str, bare: bool = False) -> Sequence[str]:
    """Returns the command line of a process that calls `main(*arguments)` of `module`.

    With `bare` it starts faster, reads no environment variables and runs no hooks of packages.
    """
    path = [*_roots(module), *sys.path]
    script = _SCRIPT.format(path=path, module=module, arguments=arguments)
    return [sys.executable, *(("-I", "-S") if bare else ()), "-c", script]


def _roots(module: str) -> Iterator[str]:
    """Yields the folders that this program imports the module and this package from."""
    for name in (module.partition(".")[0], "kvq"):
        file = sys.modules[name].__file__
        if file is not None:
            yield str(Path(file).parents[1])


def limit_memory(num_bytes: int) -> None:
    """Limits the data of this process to `num_bytes`, and forbids core dumps."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_time(seconds: int) -> None:
    """Limits the processor time of this process to `seconds` in all."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


@contextmanager
def limited_time(seconds: float) -> Generator[None]:
    """Ends this process if the block takes more than `seconds` of processor time."""
    if sys.platform == "win32":
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def ran_out_of_time(status: int | None) -> bool:
    """Returns whether `limited_time` ended the process with this exit status."""
    return sys.platform != "win32" and status == -signal.SIGPROF


def forbid_files_and_processes() -> None:
    """Forbids this process to open files or sockets and to start processes or threads."""
    if sys.platform != "win32":
        import resource

        for name in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
            resource.setrlimit(name, (0, 0))


def write_value(stream: IO[bytes], value: Any) -> None:
    """Writes a JSON value, its length first. Raises TypeError or ValueError for any other value."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    content = text.encode("utf-8", "surrogatepass")
    stream.write(len(content).to_bytes(_HEADER_BYTES, "little"))
    stream.write(content)
    stream.flush()


def read_value(stream: IO[bytes], most_bytes: int | None = None) -> Any:
    """Returns the next value, None at the stream's end. Raises ValueError above `most_bytes`."""
    header = stream.read(_HEADER_BYTES)
    length = int.from_bytes(header, "little")
    if most_bytes is not None and length > most_bytes:
        raise ValueError(f"{length} bytes are more than {most_bytes}")
    content = stream.read(length)
    if len(header) < _HEADER_BYTES or len(content) < length:
        return None
    return json.loads(content)
