"""Hubs and mirrors that lie: refused within seconds, and nothing changes outside their folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.error import HTTPError

import pytest

from fake_hub import COMMIT, FakeHub, repository, serving
from kvq.errors import ModelError
from kvq_export.phases import no_progress
from kvq_export.read import hub_client
from kvq_export.read.hub_files import fetch_checkpoint

Lie = Callable[[FakeHub], None]
REPOSITORY = "models--org--small"
WEIGHTS = "model.safetensors"
# What a header or a name may hold to lead elsewhere. %s: the folder of the user.
PLACES = {
    "absolute": "%s/victim",
    "dots": "../../../../victim",
    "dots alone": "..",
    "empty": "",
    "long": "a" * 5000,
    "NUL": "a\0b",
    "backslash": "..\\..\\victim",
    "encoded": "%%2e%%2e%%2fvictim",
    "drive": "C:\\victim",
    "control": "a\x1b[2Jb",
    "bidi": "a\u202eb",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a user with a file to lose, who waits a second where others wait five or ten."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home/hub"))
    for name in ("ANSWER_SECONDS", "READ_SECONDS", "_WINDOW_SECONDS"):
        monkeypatch.setattr(hub_client, name, 1.0)
    monkeypatch.setattr(hub_client, "_PAUSE_SECONDS", 0.0)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "victim").write_text("mine")
    return tmp_path / "home"


@pytest.fixture
def hub(checkpoint: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving(FakeHub(repository="org/small", files=repository(checkpoint))) as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
        yield hub


def outside(home: Path) -> dict[str, str]:
    """Returns every name outside the repository's folder, with what is there."""
    contents: dict[str, str] = {}
    for folder, folders, files in os.walk(home):
        if REPOSITORY in folders:
            folders.remove(REPOSITORY)
        for name in (*folders, *files):
            path = Path(folder) / name
            contents[str(path)] = path.read_text() if path.is_file() else ""
    return contents


def refusal(home: Path) -> str:
    """Returns what a download is refused with, soon and without leaving anything elsewhere."""
    (home / "hub").mkdir(exist_ok=True)
    before, since = outside(home), monotonic()
    with pytest.raises(ModelError) as error:
        fetch_checkpoint("org/small", no_progress)
    assert monotonic() - since < 15
    assert outside(home) == before
    # No half of a file has its name.
    assert not list((home / "hub").rglob("*incomplete*"))
    message = str(error.value)
    assert message.isprintable()
    return message


# Names in headers


@pytest.mark.parametrize("name", ["ETag", "X-Linked-Etag", "X-Repo-Commit"])
@pytest.mark.parametrize("place", [kind for kind in PLACES if kind != "bidi"])
@pytest.mark.sampled
def test_a_header_is_no_path(name: str, place: str, hub: FakeHub, home: Path) -> None:
    value = PLACES[place].replace("%s", str(home)).replace("%%", "%")
    hub.headers[name] = value if name == "X-Repo-Commit" else f'"{value}"'
    expected = "names a commit" if name == "X-Repo-Commit" else "is no plain name"
    assert expected in refusal(home)


@pytest.mark.parametrize("etag", ['W/"0123abcd-1f"', "0123abcd", None])
def test_the_etags_of_other_servers_are_taken(etag: str | None, hub: FakeHub, home: Path) -> None:
    if etag is not None:
        hub.headers["ETag"] = etag
    folder = fetch_checkpoint("org/small", no_progress)
    assert folder == home / "hub" / REPOSITORY / "snapshots" / COMMIT
    blobs = {path.name for path in (folder.parent.parent / "blobs").iterdir()}
    assert hub.sha256(WEIGHTS) in blobs
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert (folder / WEIGHTS).resolve().name == hub.sha256(WEIGHTS)


# Lists of files


def listed(change: Callable[[dict[str, Any]], object]) -> Lie:
    """Makes a hub whose list of files is changed in place."""

    def lie(hub: FakeHub) -> None:
        def listing(info: dict[str, Any]) -> object:
            change(info)
            return info

        hub.listing = listing

    return lie


def row(info: dict[str, Any], name: str = WEIGHTS) -> dict[str, Any]:
    return next(entry for entry in info["siblings"] if entry["rfilename"] == name)


def answer(listing: object) -> Lie:
    return lambda hub: setattr(hub, "listing", lambda _: listing)


LISTS: dict[str, tuple[Lie, str]] = {
    "a commit that is a number": (listed(lambda info: info.update(sha=7)), "names a commit"),
    "no commit": (listed(lambda info: info.pop("sha")), "names a commit"),
    "a commit in capitals": (listed(lambda info: info.update(sha="A" * 40)), "names a commit"),
    "no list": (listed(lambda info: info.pop("siblings")), "with no list of files"),
    "a list that is a number": (listed(lambda info: info.update(siblings=7)), "with no list of"),
    "an array": (answer([1, 2]), "answers with no list of files"),
    "rows that are numbers": (listed(lambda info: info.update(siblings=[7])), "without a name"),
    "a name that is a list": (listed(lambda info: row(info).update(rfilename=[])), "a row without"),
    "no files": (answer({"sha": COMMIT, "siblings": []}), "has no config.json"),
    "a size that is text": (listed(lambda info: row(info).update(size="9")), "how large"),
    "no size": (listed(lambda info: row(info).pop("size")), "does not say how large"),
    "a size below zero": (listed(lambda info: row(info).update(size=-5)), "how large"),
    "a size that is true": (listed(lambda info: row(info).update(size=True)), "how large"),
    "a size of no disk": (listed(lambda info: row(info).update(size=1 << 60)), "make room"),
    "a size that is shorter": (listed(lambda info: row(info).update(size=9)), "that it says has 9"),
    "a size that is longer": (listed(lambda info: row(info).update(size=1 << 20)), "that it says"),
    "another SHA-256": (
        listed(lambda info: row(info)["lfs"].update(sha256="0" * 64)),
        "was damaged on its way",
    ),
    "a SHA-256 that is a number": (listed(lambda info: row(info)["lfs"].update(sha256=7)), "hash"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LISTS)
def test_a_list_that_lies_is_refused(lie: str, hub: FakeHub, home: Path) -> None:
    change, expected = LISTS[lie]
    change(hub)
    assert expected in refusal(home)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("field", ["sha", "blobId", "sha256"])
@pytest.mark.sampled
def test_a_hash_of_a_list_is_no_path(place: str, field: str, hub: FakeHub, home: Path) -> None:
    value = PLACES[place].replace("%s", str(home))
    listed(
        lambda info: {
            "sha": lambda: info.update(sha=value),
            "blobId": lambda: row(info).update(blobId=value),
            "sha256": lambda: row(info)["lfs"].update(sha256=value),
        }[field]()
    )(hub)
    assert "which is none" in refusal(home)


@pytest.mark.parametrize(
    "name",
    [
        "model-../../../../victim.safetensors",
        "model/../../../../../victim.safetensors",
        "model\\..\\victim.safetensors",
        "model//a.safetensors",
        "model/./a.safetensors",
        "model\0.safetensors",
        "model\n.safetensors",
        "model\x1b[2J.safetensors",
        "model\u202e.safetensors",
        "model\ud800.safetensors",
        "modelC:.safetensors",
        f"model{'a' * 300}.safetensors",
        f"model/{'a/' * 3000}.safetensors",
    ],
)
def test_a_name_of_a_list_stays_in_its_folder(name: str, hub: FakeHub, home: Path) -> None:
    listed(lambda info: row(info).update(rfilename=name))(hub)
    assert "a name that none here can have" in refusal(home)


def test_a_name_that_nothing_asks_for_is_no_damage(hub: FakeHub, home: Path) -> None:
    hub.files["../../victim"] = b"theirs"
    before = outside(home)
    assert fetch_checkpoint("org/small", no_progress).is_dir()
    assert outside(home) | {str(home / "hub"): ""} == before | {str(home / "hub"): ""}


# Answers


def bytes_of(content: bytes, *, to: str, stall_s: float = 0, repeat: int = 1) -> Lie:
    """Makes a hub that answers what has `to` in its path with these bytes, then nothing."""

    def raw(request: BaseHTTPRequestHandler) -> bool:
        if to not in request.path:
            return False
        request.close_connection = True
        try:
            for _ in range(repeat):
                request.wfile.write(content)
                sleep(stall_s)
        except OSError:
            pass
        return True

    return lambda hub: setattr(hub, "raw", raw)


def head(length: str, *more: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", length, *more, "", ""]).encode()


def moved(target: str, body: bytes = b"") -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {target}\r\n\r\n".encode() + body


LISTING, FILE = "/api/models/", f"/{WEIGHTS}"
ENDLESS = 1 << 40
CHUNK = b"10000\r\n" + bytes(0x10000) + b"\r\n"
ANSWERS: dict[str, tuple[Lie, str]] = {
    "a list that never comes": (bytes_of(b"", to=LISTING, stall_s=4), "cannot be downloaded ("),
    "a list byte by byte": (
        bytes_of(b"HTTP/1.1 200 OK\r\nX: " + b"a", to=LISTING, stall_s=0.2, repeat=20),
        "no answer within 1 s",
    ),
    "a list without an end": (
        bytes_of(head("X: y") + bytes(9 << 20), to=LISTING),
        "a list of files of more than 8 MiB",
    ),
    "a list nested deeply": (
        bytes_of(head("X: y") + b"[" * (4 << 20), to=LISTING),
        "something that is no JSON",
    ),
    "a list that is a page": (bytes_of(head("X: y") + b"<html>", to=LISTING), "that is no JSON"),
    "a list of a long number": (bytes_of(head("X: y") + b"1" * 9999, to=LISTING), "no JSON"),
    "half a list": (
        bytes_of(head("Content-Length: 999") + b'{"sha', to=LISTING),
        "cannot be downloaded (",
    ),
    "no HTTP": (bytes_of(b"SSH-2.0-OpenSSH\r\n" * 9, to=LISTING), "cannot be downloaded ("),
    "to be continued without an end": (
        bytes_of(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, to=LISTING, repeat=30, stall_s=0.1),
        "cannot be downloaded (",
    ),
    "headers without an end": (
        bytes_of(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000, to=LISTING),
        "got more than 100 headers",
    ),
    "a status 500": (bytes_of(b"HTTP/1.1 500 Oh\r\n\r\n", to=LISTING), "answers with status 500"),
    "a file that never comes": (bytes_of(b"", to=FILE, stall_s=4), "it was tried 3 times"),
    "half a file": (bytes_of(head("X: y") + b"half", to=FILE), "broke; it was tried 3 times"),
    "half a file, and silence": (
        bytes_of(head("X: y") + b"half", to=FILE, stall_s=3),
        "127.0.0.1 sent nothing for 1 seconds; it was tried 3 times",
    ),
    "a file byte by byte": (
        bytes_of(head("X: y") + b"a", to=FILE, stall_s=0.2, repeat=20),
        "sends less than 1 KiB a second; it was tried 3 times",
    ),
    "a file without an end": (
        bytes_of(head("X: y") + bytes(1 << 20), to=FILE, repeat=ENDLESS),
        "more bytes of a file than it says",
    ),
    "pieces without an end": (
        bytes_of(head("Transfer-Encoding: chunked") + CHUNK * 999, to=FILE),
        "more bytes of a file than it says",
    ),
    "pieces of no number": (
        bytes_of(head("Transfer-Encoding: chunked") + b"zz\r\n", to=FILE),
        "broke; it was tried 3 times",
    ),
    "a length below zero": (bytes_of(head("Content-Length: -5") + b"a", to=FILE), "3 times"),
    "a file that is refused": (
        bytes_of(b"HTTP/1.1 404 No\r\n\r\n", to=FILE),
        "lists files of org/small that it does not give",
    ),
    "a range that is none": (bytes_of(b"HTTP/1.1 416 No\r\n\r\n", to=FILE), "with status 416"),
    "to a file here": (bytes_of(moved("file:///etc/passwd"), to=FILE), "is no address of a hub"),
    "to no host": (bytes_of(moved("http://"), to=FILE), "without an end"),
    "to no address": (bytes_of(moved("http://[::"), to=FILE), "cannot be downloaded ("),
    "to data": (bytes_of(moved("data:,x"), to=FILE), "is no address of a hub"),
    "to itself": (bytes_of(moved(""), to=FILE), "to the next without an end"),
    "to where nobody is": (bytes_of(moved("http://127.0.0.1:9/"), to=FILE), "tried 3 times"),
    "from a body without an end": (
        bytes_of(moved("ftp://127.0.0.1/", bytes(9 << 20)), to=FILE),
        "is no address of a hub",
    ),
}


@pytest.mark.parametrize("lie", ANSWERS)
@pytest.mark.sampled
def test_an_answer_that_lies_is_refused(lie: str, hub: FakeHub, home: Path) -> None:
    change, expected = ANSWERS[lie]
    change(hub)
    assert expected in refusal(home)


def test_another_host_gets_no_token_and_its_content_is_checked(hub: FakeHub, home: Path) -> None:
    tokens: dict[str, str | None] = {}

    def noted(name: str, then: Callable[[BaseHTTPRequestHandler], bool]) -> Any:
        def raw(request: BaseHTTPRequestHandler) -> bool:
            tokens[name] = request.headers.get("Authorization")
            return then(request)

        return raw

    def elsewhere(request: BaseHTTPRequestHandler) -> bool:
        if not request.path.endswith(FILE):
            return False
        request.close_connection = True
        request.wfile.write(moved(f"{other.address}/org/small/resolve/main{FILE}"))
        return True

    files = dict(hub.files)
    with serving(FakeHub(repository="org/small", files=files)) as other:
        hub.raw = noted("hub", elsewhere)
        other.raw = noted("other", lambda _: False)
        other.headers["ETag"] = "../victim"  # of those who hold content only it is the content
        files[WEIGHTS] = bytes(len(files[WEIGHTS]))
        assert "was damaged on its way" in refusal(home)
        files[WEIGHTS] = hub.files[WEIGHTS]
        folder = fetch_checkpoint("org/small", no_progress)
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert tokens == {"hub": "Bearer secret", "other": None}


def test_what_was_encrypted_goes_on_encrypted() -> None:
    headers = Message()
    headers["Location"] = "http://hub/file"
    with HTTPError("https://hub/file", 302, "Found", headers, None) as error:
        with pytest.raises(ModelError, match="hub leads to 'http://hub/file', which is not asked"):
            hub_client._redirect("https://hub/file", error, at_hub=True)
        assert hub_client._redirect("http://hub/file", error, at_hub=True) == "http://hub/file"


def test_a_hub_that_answers_otherwise_each_time_is_refused(hub: FakeHub, home: Path) -> None:
    paths: list[str] = []

    def raw(request: BaseHTTPRequestHandler) -> bool:
        paths.append(request.path)
        hub.headers["ETag"] = f"{home}/victim" if len(paths) > 3 else "good"
        return False

    hub.raw = raw
    assert "is no plain name" in refusal(home)


@pytest.mark.slow
def test_a_silence_is_told_and_three_tries_are_made(
    hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub_client, "_NOTE_SECONDS", 0.3)
    bytes_of(head("X: y") + b"half", to=FILE, stall_s=3)(hub)
    with caplog.at_level(logging.WARNING, "kvq_export.read.hub_client"):
        refusal(home)
    silence, broken = "nothing has come for 0 seconds; waiting", "127.0.0.1 sent nothing for 1"
    assert caplog.messages == [
        silence,
        f"{broken} seconds; trying again (2 of 3)",
        silence,
        f"{broken} seconds; trying again (3 of 3)",
        silence,
    ]


# Links that lie in the cache


def linked(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)


@pytest.mark.parametrize(
    "place", ["blobs", "snapshots", f"snapshots/{COMMIT}", "refs", "", "snapshots loop"]
)
def test_a_folder_that_is_a_link_is_not_written(place: str, hub: FakeHub, home: Path) -> None:
    stranger = home / "stranger"
    stranger.mkdir()
    folder = home / "hub" / REPOSITORY
    link = folder / place.removesuffix(" loop") if place else folder
    linked(link, link if place.endswith("loop") else stranger)
    if place == "refs":
        # The files came; only what is taken offline could not be remembered.
        assert "leads out of" in refusal(home)
    else:
        assert "link" in refusal(home)
    assert list(stranger.iterdir()) == []


@pytest.mark.parametrize("loop", [False, True])
def test_a_link_to_another_file_is_replaced_and_not_followed(
    loop: bool, hub: FakeHub, home: Path
) -> None:
    folder = home / "hub" / REPOSITORY
    file = folder / "snapshots" / COMMIT / WEIGHTS
    blob = folder / "blobs" / hub.sha256(WEIGHTS)
    for link in (file, blob):
        linked(link, link if loop else home / "victim")
    before = outside(home)
    assert fetch_checkpoint("org/small", no_progress) == file.parent
    assert file.read_bytes() == hub.files[WEIGHTS]
    assert not blob.is_symlink()
    assert outside(home) == before


@pytest.mark.parametrize("commit", ["../../../..", "/etc", "", "0" * 41, "\xff" * 40])
def test_what_is_taken_offline_lies_in_the_cache(
    commit: str, hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch_checkpoint("org/small", no_progress)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch_checkpoint("org/small", no_progress) == folder
    (folder.parent.parent / "refs" / "main").write_bytes(commit.encode("latin-1"))
    assert "org/small is not on this machine" in refusal(home)
