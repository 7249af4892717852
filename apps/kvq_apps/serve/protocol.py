"""What client and server agree on: headers of answers and names of sampling fields.

Clients use this module, so it imports nothing of a server. `PROTOCOL` rises when an older client
would misread a newer server's answers, or the other way round.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvq import __version__
from kvq.errors import BackendError, UsageError, reason_of
from kvq_runtime.config import Sampling

PROTOCOL = 1
VERSION_HEADER = "X-Kvq-Version"
PROTOCOL_HEADER = "X-Kvq-Protocol"
# The share of its text that the session has given up after the answer, 0 to 1.
EVICTED_HEADER = "X-Kvq-Evicted"
# Names of `Sampling`'s fields in requests and answers: those of llama-server.
SAMPLING_NAMES = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")},
    "repeat_window_tokens": "repeat_last_n",
}


def sampling_fields(sampling: Sampling) -> dict[str, float]:
    """Returns `sampling` as fields of a request."""
    return {name: getattr(sampling, field) for field, name in SAMPLING_NAMES.items()}


def sampling_of(fields: Mapping[str, Any]) -> Sampling:
    """Returns the `Sampling` of such fields; others keep their defaults. Raises `BackendError`."""
    values = {field: fields[name] for field, name in SAMPLING_NAMES.items() if name in fields}
    try:
        return Sampling(**values)
    except (TypeError, UsageError) as error:
        raise BackendError(
            f"what the server says of its sampling cannot be: {reason_of(error)}"
        ) from error


def own_headers() -> list[tuple[str, str]]:
    """Returns the headers of every answer."""
    return [(VERSION_HEADER, __version__), (PROTOCOL_HEADER, str(PROTOCOL))]


def check_answer(url: str, header: Callable[[str], str | None]) -> None:
    """Raises `BackendError` when the kvq at `url` speaks another protocol than this one.

    `header` looks up a header of one of its answers. Another program's server sends none, and is
    used as OpenAI's clients use it.
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
