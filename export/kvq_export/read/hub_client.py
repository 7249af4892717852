"""Requests to the Hugging Face hub, or to the mirror that HF_ENDPOINT names.

Neither is trusted: time, bytes and redirects are bounded, and no header becomes a path. Knows
nothing of repositories, nor of files on this machine.
"""

import json
import logging
import re
import ssl
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from email.message import Message
from functools import cache
from hashlib import sha256
from http.client import HTTPException, HTTPResponse
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import Any, BinaryIO, NamedTuple, TypeVar
from urllib.error import HTTPError
from urllib.parse import urljoin, urlsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
)

from kvq.errors import ModelError

logger = logging.getLogger(__name__)

COMMIT = re.compile(r"[0-9a-f]{40}")
# How long the hub may take to begin an answer, and to send the next bytes of one.
ANSWER_SECONDS = 5.0
READ_SECONDS = 10.0
# A file is given up after so many tries in a row that each bring less than this many bytes.
TRIES, PROGRESS_BYTES = 3, 1 << 20
_PAUSE_SECONDS = 1.0
# A connection that brings less than this for so long counts as broken.
_WINDOW_SECONDS, _WINDOW_BYTES = 15.0, 16 << 10
# A wait this long is logged.
_NOTE_SECONDS = 4.0
_LOOK_SECONDS = 0.2
_MOST_JSON_BYTES = 8 << 20
_PIECE_BYTES = 1 << 20
_MOST_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_REFUSALS = (401, 403, 404)
# Other programs name files by it: what could leave their folder is no ETag of an honest hub.
_ETAG = re.compile(r'(?:W/)?"?[0-9A-Za-z_+=-][0-9A-Za-z._+=-]{0,127}"?')

_Answer = TypeVar("_Answer")


class HubUnreachedError(Exception):
    """Says that no usable answer came: what lies on this machine must do."""


class HubRefusedError(Exception):
    """Says that the hub refuses a request; `code` is its word for why, or empty."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class _Origin(NamedTuple):
    scheme: str
    host: str | None
    port: int | None


@dataclass(kw_only=True)
class DownloadMeter:
    """Counts the bytes of a download, and knows since when the next ones are waited for."""

    num_bytes: int = 0
    _since: float | None = None

    def add(self, num_bytes: int) -> None:
        """Counts bytes that came now; a negative number takes back what comes once more."""
        self.num_bytes += num_bytes
        self._since = monotonic()

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Expects bytes while inside."""
        self._since = monotonic()
        try:
            yield
        finally:
            self._since = None

    def is_stalled(self) -> bool:
        """Returns True once for each time that nothing comes for `_NOTE_SECONDS`."""
        if self._since is None or monotonic() - self._since < _NOTE_SECONDS:
            return False
        self._since = None
        return True


class Sink:
    """Writes a file from its start to its end, and hashes what it has."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.restart()

    def restart(self) -> None:
        """Forgets what was written."""
        self._stream.seek(0)
        self._stream.truncate()
        self.num_bytes, self._digest = 0, sha256()

    def write(self, piece: bytes) -> None:
        """Appends. Raises `OSError`."""
        self._stream.write(piece)
        self._digest.update(piece)
        self.num_bytes += len(piece)

    def sha256(self) -> str:
        """Returns the hash of what was written."""
        return self._digest.hexdigest()


def read_json(url: str) -> object:
    """Returns the JSON at `url`. Raises `HubUnreachedError`, `HubRefusedError` and `ModelError`."""
    credentials = _credentials()

    def read() -> bytes:
        with _request(url, {}, credentials) as response:
            return response.read(_MOST_JSON_BYTES + 1)

    content = _answered(read)
    if len(content) > _MOST_JSON_BYTES:
        raise ModelError(f"{_host(url)} sends a list of files of more than 8 MiB; nothing is read")
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise HubUnreachedError(f"{_host(url)} answers with something that is no JSON") from None


def receive(url: str, sink: Sink, num_bytes: int, meter: DownloadMeter) -> None:
    """Writes the `num_bytes` bytes at `url` to `sink`; a connection that breaks goes on.

    Raises `HubUnreachedError`, `HubRefusedError`, `ModelError` for another number of bytes, and
    `OSError` where they cannot be written.
    """
    tries = 0
    while True:
        start = sink.num_bytes
        try:
            with meter.waiting():
                return _resume(url, sink, num_bytes, meter)
        except HubUnreachedError as error:
            tries = 1 if sink.num_bytes - start >= PROGRESS_BYTES else tries + 1
            if tries >= TRIES:
                raise HubUnreachedError(f"{error}; it was tried {TRIES} times") from error
            logger.warning("%s; trying again (%d of %d)", error, tries + 1, TRIES)
            sleep(_PAUSE_SECONDS)


@contextmanager
def reporting(meter: DownloadMeter, show: Callable[[int], None]) -> Generator[None]:
    """Tells `show` the bytes that came, while inside, and logs it when none come."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_LOOK_SECONDS):
            show(meter.num_bytes)
            if meter.is_stalled():
                logger.warning("nothing has come for %.0f seconds; waiting", _NOTE_SECONDS)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _resume(url: str, sink: Sink, num_bytes: int, meter: DownloadMeter) -> None:
    """Writes what the sink lacks of the file, or all where the hub knows no ranges."""
    start = sink.num_bytes
    if start == num_bytes > 0:
        return
    ranges = {"Range": f"bytes={start}-"} if start else {}
    credentials = _credentials()
    with _answered(lambda: _request(url, ranges, credentials)) as response:
        content_range = response.headers.get("Content-Range", "")
        continues = response.status == 206 and content_range.startswith(f"bytes {start}-")
        if start and not continues:
            meter.add(-start)
            sink.restart()
            start = 0
        length = response.headers.get("Content-Length", "")
        if length.isdecimal() and int(length) != num_bytes - start:
            raise ModelError(
                f"{_host(url)} sends {int(length) + start} bytes of a file that it says has "
                f"{num_bytes}; nothing is kept of it"
            )
        for piece in _body(response, num_bytes - start, _host(url)):
            sink.write(piece)
            meter.add(len(piece))


def _body(response: HTTPResponse, num_bytes: int, host: str) -> Generator[bytes]:
    """Yields the `num_bytes` bytes of a body. Raises `HubUnreachedError` and `ModelError`."""
    received, window, counted = 0, monotonic(), 0
    while piece := _piece(response, host):
        received += len(piece)
        if received > num_bytes:
            raise ModelError(f"{host} sends more bytes of a file than it says that it has")
        yield piece
        if monotonic() - window > _WINDOW_SECONDS:
            if received - counted < _WINDOW_BYTES:
                raise HubUnreachedError(f"{host} sends less than 1 KiB a second")
            window, counted = monotonic(), received
    if received < num_bytes:
        raise HubUnreachedError(f"the connection to {host} broke")


def _piece(response: HTTPResponse, host: str) -> bytes:
    try:
        return response.read1(_PIECE_BYTES)
    except TimeoutError:
        raise HubUnreachedError(f"{host} sent nothing for {READ_SECONDS:.0f} seconds") from None
    except (OSError, HTTPException, ValueError):
        raise HubUnreachedError(f"the connection to {host} broke") from None


def _answered(ask: Callable[[], _Answer]) -> _Answer:
    """Returns what `ask` gives, within `ANSWER_SECONDS`. Raises as `read_json` does."""
    _opener()  # reading certificates is not the hub's time
    try:
        return _within(ANSWER_SECONDS, ask)
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise HubUnreachedError(text.splitlines()[0]) from error


def _within(seconds: float, ask: Callable[[], _Answer]) -> _Answer:
    """Returns what `ask` gives, or raises its error; `TimeoutError` when it takes longer.

    A system without a network can look a name up for half a minute, and a hub can send a byte of
    a header now and then: no timeout of a connection ends these.
    """
    answers: list[_Answer] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:  # noqa: BLE001  raised again where it was asked
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers and thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:.0f} seconds")
    if not answers:
        raise MemoryError("a thread ended before it could say why")
    return answers[0]


def _credentials() -> dict[str, str]:
    """Returns the headers by which the hub knows the user; the library is imported for them."""
    import huggingface_hub.utils

    utils: Any = huggingface_hub.utils  # not all that its functions take has a type
    return utils.build_hf_headers()


def _request(url: str, headers: Mapping[str, str], credentials: Mapping[str, str]) -> HTTPResponse:
    """Sends a GET request, and follows redirects.

    `credentials` go to the hub alone, and nothing that was encrypted goes on unencrypted.
    """
    hub = _origin(url)
    for _ in range(_MOST_REDIRECTS):
        at_hub = _origin(url) == hub
        sent = {**headers, **credentials} if at_hub else headers
        try:
            request = Request(url, headers={**sent})  # noqa: S310  `_origin` looked
            response = _opener().open(request, timeout=READ_SECONDS)
        except HTTPError as error:
            with error:
                if at_hub:
                    _check_names(error.headers)
                url = _redirect(url, error, at_hub=at_hub)
        else:
            with ExitStack() as refused:
                refused.enter_context(response)
                if at_hub:
                    _check_names(response.headers)
                refused.pop_all()
            return response
    raise HubUnreachedError(f"{_host(url)} sends from one address to the next without an end")


def _redirect(url: str, error: HTTPError, *, at_hub: bool) -> str:
    """Returns where an answer other than 200 leads.

    Raises `HubRefusedError`, `HubUnreachedError`, and `ModelError` for what is no hub's address.
    """
    if at_hub and error.code in _REFUSALS:
        raise HubRefusedError(error.headers.get("X-Error-Code", ""))
    if error.code not in _REDIRECTS:
        raise HubUnreachedError(f"{_host(url)} answers with status {error.code}")
    target = urljoin(url, error.headers.get("Location", ""))
    if _origin(target).scheme not in {"https", _origin(url).scheme}:
        raise ModelError(f"{_host(url)} leads to {target[:60]!r}, which is not asked")
    return target


def _check_names(headers: Message) -> None:
    """Raises `ModelError` for names that would lead other programs out of their cache."""
    commit = headers.get("X-Repo-Commit")
    if commit is not None and not COMMIT.fullmatch(commit):
        raise ModelError(f"the hub names a commit {commit[:60]!r}, which is none; nothing is kept")
    for name in ("X-Linked-Etag", "ETag"):
        value = headers.get(name)
        if value is not None and not _ETAG.fullmatch(value):
            raise ModelError(f"the hub's {name} {value[:60]!r} is no plain name; nothing is kept")


def _origin(url: str) -> _Origin:
    """Returns whom an http or https address asks. Raises `ModelError` for any other."""
    try:
        parts = urlsplit(url)
        origin = _Origin(parts.scheme, parts.hostname, parts.port)
    except ValueError:
        origin = _Origin("", None, None)
    if origin.scheme not in ("http", "https") or not origin.host:
        raise ModelError(f"{url[:60]!r} is no address of a hub: give one with http:// or https://")
    return origin


def _host(url: str) -> str:
    return _origin(url).host or ""


@cache
def _opener() -> OpenerDirector:
    """Returns what opens http and https, through the user's proxies, and follows no redirect."""
    opener = OpenerDirector()
    handlers = (HTTPHandler(), HTTPSHandler(context=_trusted()))
    for handler in (ProxyHandler(), *handlers, HTTPDefaultErrorHandler(), HTTPErrorProcessor()):
        opener.add_handler(handler)
    return opener


def _trusted() -> ssl.SSLContext:
    """Returns the system's certificates; some Pythons have none, and certifi's stand in."""
    context, paths = ssl.create_default_context(), ssl.get_default_verify_paths()
    lacking = not paths.cafile and not (paths.capath and any(Path(paths.capath).iterdir()))
    if lacking and find_spec("certifi"):
        import certifi

        context.load_verify_locations(certifi.where())
    return context
