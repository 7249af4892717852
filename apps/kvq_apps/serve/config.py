"""The configuration of a server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvq.errors import UsageError, argument
from kvq_runtime.config import Sampling
from kvq_runtime.serving.pool import PoolConfig

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig(PoolConfig):
    """Says where a server listens, how much it holds and how long it waits.

    With `port` None it listens on `socket_path` only, a socket file that only its owner may open.
    A request may name any model; with `strict_model` only the served model's names and `aliases`.
    `reuse` "moved" lets a prompt that an earlier one was changed into keep what follows the change,
    as PIE does; "exact" reads that again. Spans go to the OTLP collector at `traces`.
    `sampling` holds fields of `Sampling` that replace the model's. Sessions on disk take at most
    `saved_bytes`, 0 for none, in `saved_folder`, or else in the cache folder. The engine writes at
    most `buffer_bytes` ahead of a reader. A request's head must arrive within `head_s`, its body
    within `upload_s`. `spare_connections` more connections may be open than requests can run and
    wait. At shutdown running requests get `grace_s` to end.
    """

    host: str = LOOPBACK_HOSTS[0]
    port: int | None = 8012
    socket_path: Path | None = None
    api_key: str | None = None
    origins: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ("default",)
    strict_model: bool = False
    reuse: str = "exact"
    traces: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    saved_bytes: int = 2 << 30
    saved_folder: Path | None = None
    grace_s: float = 8.0
    ping_s: float = 15.0
    head_s: float = 15.0
    upload_s: float = 60.0
    spare_connections: int = 256
    buffer_bytes: int = 128 << 10
    body_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        if self.port is not None:
            _require("port", self.port, 0 <= self.port <= 65535, "0 (any free one) to 65535")
        assert self.port is not None or self.socket_path is not None
        _require("sessions", self.sessions, self.sessions >= 1, "1 or more")
        _require("queue", self.queue, self.queue >= 1, "1 or more")
        _require("sessions-disk", self.saved_bytes, self.saved_bytes >= 0, "0 (off) or more")
        _require("grace", self.grace_s, 0 <= self.grace_s <= 600, "0 to 600 seconds")
        if self.chunk_tokens is not None:
            _require("chunk-tokens", self.chunk_tokens, self.chunk_tokens >= 1, "1 or more")
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError(f"{argument('--api-key')} is empty; give a key or leave the flag out")
        _ = Sampling(**self.sampling)
        for origin in self.origins:
            _require_origin(origin)

    @property
    def connections(self) -> int:
        return self.sessions + self.queue + self.spare_connections

    @property
    def loopback(self) -> bool:
        return self.host in LOOPBACK_HOSTS


def _require(flag: str, value: float, holds: bool, possible: str) -> None:
    if not holds:
        raise UsageError(about=f"--{flag}", value=value, possible=f"give {possible}")


def _require_origin(origin: str) -> None:
    """Raises `UsageError` unless this is a browser's origin: scheme and host in lower case."""
    parts = origin.split("/")
    whole = len(parts) == 3 and parts[0].endswith(":") and parts[1] == "" and parts[2] != ""
    if origin not in ("*", "null") and not (whole and origin == origin.lower()):
        raise UsageError(
            f"{argument('--origin')} {origin} is not possible: give what a browser calls the "
            "page's origin, "
            "without a path or a slash at the end, as https://example.org:8080, or *"
        )
