"""What every answer of a server says about itself, and what a client makes of it.

Standard library only: a client needs no server. `PROTOCOL` rises whenever a client of before
would misread an answer of now, or the other way round.
"""

from collections.abc import Callable

from kvq import __version__
from kvq.errors import BackendError

PROTOCOL = 1
VERSION_HEADER = "X-Kvq-Version"
PROTOCOL_HEADER = "X-Kvq-Protocol"


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
