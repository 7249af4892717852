"""What every answer of a server says about itself, and what a client makes of it.

A client needs no server, so nothing of one is imported here. `PROTOCOL` rises whenever a client
of before would misread an answer of now, or the other way round.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvq import __version__
from kvq.errors import BackendError, UsageError
from kvq_runtime.config import Sampling

PROTOCOL = 1
VERSION_HEADER = "X-Kvq-Version"
PROTOCOL_HEADER = "X-Kvq-Protocol"
# The share of its text that a session had given up when it sent a whole answer, 0 to 1.
EVICTED_HEADER = "X-Kvq-Evicted"
# What requests, and a server of itself, call fields of `Sampling`: llama-server's names.
SAMPLING_NAMES = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")},
    "repeat_window_tokens": "repeat_last_n",
}


def sampling_fields(sampling: Sampling) -> dict[str, float]:
    """`sampling` as a request asks for it."""
    return {name: getattr(sampling, field) for field, name in SAMPLING_NAMES.items()}


def sampling_of(fields: Mapping[str, Any]) -> Sampling:
    """The other way round; what is not said keeps its default. Raises `BackendError`."""
    said = {field: fields[name] for field, name in SAMPLING_NAMES.items() if name in fields}
    try:
        return Sampling(**said)
    except (TypeError, UsageError) as error:
        raise BackendError(f"what the server says of its sampling cannot be: {error}") from error


def own_headers() -> list[tuple[str, str]]:
    """The headers of every answer."""
    return [(VERSION_HEADER, __version__), (PROTOCOL_HEADER, str(PROTOCOL))]


def check_answer(url: str, header: Callable[[str], str | None]) -> None:
    """Raises `BackendError` when the kvq at `url` speaks another protocol than this one.

    `header` looks up a header of one of its answers. A server that says nothing is somebody
    else's, and taken as OpenAI's clients take it.
    """
    spoken = header(PROTOCOL_HEADER)
    if spoken is None or spoken == str(PROTOCOL):
        return
    older = "the server" if spoken.isdecimal() and int(spoken) < PROTOCOL else "this kvq"
    advice = {
        "the server": "restart it with this version: `kvq serve --stop`, then `kvq serve`",
        "this kvq": "upgrade kvq-runtime here, or restart the server with this version",
    }[older]
    raise BackendError(
        f"{url} is kvq {header(VERSION_HEADER) or 'of an unknown version'} with protocol "
        f"{spoken[:20]}, this is kvq {__version__} with protocol {PROTOCOL}; {older} is older: "
        f"{advice}"
    )
