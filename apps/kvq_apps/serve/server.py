"""The server process: its sockets, its event loop, and its shutdown.

After SIGTERM or Ctrl-C new requests are answered with 503, and running ones get `grace_s` to end.
Then the rest ends with an error event, and sessions are saved. A second signal ends the wait.
"""

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.connections import bounded
from kvq_apps.serve.listening import listen, listen_on_file, remove_file
from kvq_apps.serve.protocol import own_headers

if TYPE_CHECKING:
    from kvq_apps.serve.hosted_app import HostedApp
    from kvq_apps.serve.hosted_models import HostedModels

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Connections get this long to take what was sent to them.
_LAST_WORDS_S = 1


class Server:
    """Listens as soon as it is made; `run` answers requests until a signal or `stop`."""

    def __init__(
        self,
        hosted: "HostedApp | HostedModels",
        config: ServeConfig,
        on_open: Callable[[str], None],
    ) -> None:
        """Raises `UsageError` when the address cannot be listened on."""
        self._config = config
        self._socket = None if config.port is None else listen(config.host, config.port)
        self._file = self._listen_on_file(config)
        self._path = config.socket_path
        self._on_open = on_open
        self._stops = 0
        self._hosted = hosted

    @property
    def url(self) -> str | None:
        """Returns where it listens, None if only at its socket file."""
        if self._socket is None:
            return None
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self) -> None:
        """Serves until a signal or `stop`. Raises what ended the app, such as a failed load."""
        in_main = threading.current_thread() is threading.main_thread()
        with closing(self), on_signals(self.stop) if in_main else nullcontext():
            asyncio.run(self._run())
        if self._hosted.error is not None:
            raise self._hosted.error

    def stop(self) -> None:
        """Asks `run` to end, from any thread; after a second call it does not wait for answers."""
        self._stops += 1
        self._hosted.notify()

    def close(self) -> None:
        self._remove_socket_file()
        for listener in (self._socket, self._file):
            if listener is not None:
                listener.close()

    def _remove_socket_file(self) -> None:
        """Removes the socket's file once, while it listens; later it may be another server's."""
        path, self._path = self._path, None
        if path is not None:
            remove_file(path)

    def _listen_on_file(self, config: ServeConfig) -> socket.socket | None:
        if config.socket_path is None:
            return None
        try:
            return listen_on_file(config.socket_path)
        except BaseException:
            if self._socket is not None:
                self._socket.close()
            raise

    async def _run(self) -> None:
        hosted = self._hosted
        server = _Uvicorn(
            uvicorn.Config(
                hosted.app,
                http=bounded(self._config),
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                headers=own_headers(),
                timeout_graceful_shutdown=_LAST_WORDS_S,
            )
        )
        sockets = [listener for listener in (self._socket, self._file) if listener is not None]
        url = self.url or f"unix:{self._config.socket_path}"
        serving = asyncio.create_task(server.serve(sockets=sockets))
        hosted.start()
        try:
            await hosted.until(lambda: hosted.open or self._ending)
            if hosted.open and not self._ending:
                self._on_open(url)
            await hosted.until(lambda: self._ending)
            await hosted.leave(lambda: self._stops > 1)
        finally:
            await hosted.stop()
            self._remove_socket_file()
            server.should_exit = True
            await serving

    @property
    def _ending(self) -> bool:
        return self._stops > 0 or self._hosted.ended


class _Uvicorn(uvicorn.Server):
    """Runs uvicorn without its handlers of signals."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:  # type: ignore[override]
        yield


@contextmanager
def on_signals(stop: Callable[[], None]) -> Generator[None]:
    """Makes SIGINT and SIGTERM call `stop` while inside."""

    def handle(_signal: int, _frame: FrameType | None) -> None:
        stop()

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
