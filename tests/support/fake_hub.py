"""A hub on this machine: what a download asks for, and every way in which a hub can lie."""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(kw_only=True)
class FakeHub:
    """One repository.

    After `stall_after` bytes of a weight file nothing more comes, until it is `released`: then the
    connection ends, and the next one goes on. A hub that lies adds `headers` to the answers about
    files, changes the `listing`, and answers some requests itself: `raw` says whether it did.
    """

    repository: str
    files: dict[str, bytes]
    told_sha256: dict[str, str] = field(default_factory=dict)
    stall_after: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    listing: Callable[[dict[str, Any]], object] = lambda listing: listing
    raw: Callable[[BaseHTTPRequestHandler], bool] = lambda _: False
    ranges: list[str] = field(default_factory=list)
    stalled: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    address: str = ""

    def sha256(self, name: str) -> str:
        return self.told_sha256.get(name, hashlib.sha256(self.files[name]).hexdigest())

    def is_large(self, name: str) -> bool:
        return name.endswith((".safetensors", ".gguf"))

    def etag(self, name: str) -> str:
        return self.sha256(name) if self.is_large(name) else self.sha256(name)[:40]

    def info(self) -> dict[str, Any]:
        siblings = []
        for name, content in self.files.items():
            row: dict[str, Any] = {"rfilename": name, "size": len(content)}
            row["blobId"] = hashlib.sha1(content).hexdigest()
            if self.is_large(name):
                row["lfs"] = {"sha256": self.sha256(name), "size": len(content), "pointerSize": 1}
            siblings.append(row)
        return {"id": self.repository, "sha": COMMIT, "siblings": siblings}


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """The hub at `hub.address`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            if hub.raw(self):
                return
            path = self.path.partition("?")[0]
            name = path.partition(f"/{hub.repository}/resolve/")[2].partition("/")[2]
            if path.startswith(f"/api/models/{hub.repository}"):
                listing = json.dumps(hub.listing(hub.info())).encode()
                self._send(listing, {}, with_body=with_body)
            elif name in hub.files:
                self._file(name, with_body=with_body)
            else:
                self.send_response(404)
                missing = "EntryNotFound" if hub.repository in path else "RepoNotFound"
                self.send_header("X-Error-Code", missing)
                self.send_header("Content-Length", "0")
                self.end_headers()

        def _file(self, name: str, *, with_body: bool) -> None:
            content, start = hub.files[name], 0
            byte_range = re.fullmatch(r"bytes=(\d+)-.*", self.headers.get("Range", ""))
            if byte_range:
                start = int(byte_range[1])
                hub.ranges.append(f"{name} from {start}")
            headers = {"ETag": f'"{hub.etag(name)}"', "X-Repo-Commit": COMMIT} | hub.headers
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self._send(
                content[start:], headers, with_body=with_body, partial=start > 0,
                stall=hub.stall_after if hub.is_large(name) else None,
            )  # fmt: skip

        def _send(
            self,
            body: bytes,
            headers: dict[str, str],
            *,
            with_body: bool,
            partial: bool = False,
            stall: int | None = None,
        ) -> None:
            self.send_response(206 if partial else 200)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if not with_body:
                return
            self.wfile.write(body[:stall])
            self.wfile.flush()
            if stall is not None:
                hub.stall_after = None
                hub.stalled.set()
                hub.released.wait(60)
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()


def repository(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint folder as a repository has them."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
