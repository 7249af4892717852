"""A server as a daemon: found, reached, understood, stopped; its socket file and its log."""

import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import uvicorn

from environment import ROOTS, folders_in
from kvq import __version__
from kvq.errors import BackendError, UsageError
from kvq_apps.chat.client import Stream, Turn
from kvq_apps.chat.messages import Message
from kvq_apps.chat.remote import RemoteClient
from kvq_apps.cli import main
from kvq_apps.serve import instances, log
from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.instances import Instance, announce
from kvq_apps.serve.listening import listen, listen_on_file
from kvq_apps.serve.protocol import PROTOCOL, check_answer
from kvq_apps.serve.server import Server
from kvq_apps.serve.server_connection import UnixConnection, get_json
from serving import (
    COMPLETIONS,
    PATIENCE_S,
    Rule,
    ask,
    process,
    request_bytes,
    running,
    send,
    wait_until,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    folders = folders_in(tmp_path)
    for name, folder in folders.items():
        monkeypatch.setenv(name, folder)
    return folders | ROOTS


# The handshake (SRV-21)


def headers(version: str | None, protocol: str | None) -> dict[str, str | None]:
    return {"X-Kvq-Version": version, "X-Kvq-Protocol": protocol}


@pytest.mark.parametrize("answer_headers", [headers(None, None), headers("7.0", str(PROTOCOL))])
def test_what_agrees_or_says_nothing_is_taken(answer_headers: dict[str, str | None]) -> None:
    check_answer("http://here", answer_headers.get)


@pytest.mark.parametrize(
    ("protocol", "advice"),
    [
        (
            str(PROTOCOL - 1),
            "the server is older: restart it with this version: `kvq serve --stop`",
        ),
        (str(PROTOCOL + 1), "this kvq is older: upgrade kvq-runtime here, or restart the server"),
        ("new", "this kvq is older"),
    ],
)
def test_another_protocol_is_told_with_what_to_do(protocol: str, advice: str) -> None:
    with pytest.raises(BackendError) as raised:
        check_answer("http://here", headers("9.8", protocol).get)
    message = str(raised.value)
    assert message.startswith(f"http://here is kvq 9.8 with protocol {protocol}, ")
    assert f"this is kvq {__version__} with protocol {PROTOCOL}; {advice}" in message


def test_a_server_says_who_it_is(rule: Rule) -> None:
    with running(rule.load, api_key="key") as server:
        for path in ("/health", "/v1/models", "/props", "/nowhere"):
            reply = ask(server, path)  # also where a key is missing
            assert reply.headers["x-kvq-version"] == __version__
            assert reply.headers["x-kvq-protocol"] == str(PROTOCOL)
        props = ask(server, "/props", headers={"Authorization": "Bearer key"}).json["x_kvq"]
    assert (props["version"], props["protocol"]) == (__version__, PROTOCOL)


def test_a_chat_leaves_a_server_of_another_protocol(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(rule.load) as server:
        client = RemoteClient(server.address)
        assert client.open().model == "rule"
    spoken = [("X-Kvq-Version", "9.8"), ("X-Kvq-Protocol", str(PROTOCOL + 1))]
    monkeypatch.setattr("kvq_apps.serve.server.own_headers", lambda: spoken)
    port = int(server.address.rpartition(":")[2])
    with running(rule.load, port=port):
        # a newer server took the place of the one this chat began with
        with pytest.raises(BackendError, match=r"is kvq 9\.8 with protocol 2.*upgrade"):
            client.reply(turn("hi"), Stream())
        with pytest.raises(BackendError, match=r"is kvq 9\.8 with protocol 2.*upgrade"):
            RemoteClient(server.address).open()


# Found and stopped


def instance(**values: object) -> Instance:
    return Instance(**{"pid": os.getpid(), "url": "http://127.0.0.1:1", **values})  # type: ignore[arg-type]


def test_a_server_is_found_while_it_lives(tmp_path: Path) -> None:
    assert instances.running() == []
    announced = instance(started_at=2.0)
    with announce(announced):
        assert instances.running() == instances.running() == [announced]
        (path,) = tmp_path.rglob("servers/*")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert instances.running() == []
    # killed: its file is there, its lock is not, and its process id is somebody else's
    path.write_text(json.dumps({"pid": os.getpid(), "url": "http://127.0.0.1:1"}))
    assert instances.running() == []
    assert not path.exists()


def test_a_file_of_another_version_still_names_its_process(tmp_path: Path) -> None:
    with announce(instance(started_at=2.0)):
        (path,) = tmp_path.rglob("servers/*")
        path.write_text('{"pid": 7, "mood": "good"}')
        assert instances.running() == [Instance(pid=7)]
        path.write_text("[]")
        assert instances.running() == []


def test_one_of_several_is_named_by_where_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (
        Instance(pid=number, url=f"http://127.0.0.1:801{number}", started_at=number)
        for number in (1, 2)
    )
    third = Instance(pid=3, socket=str(tmp_path / "s"), started_at=3)
    monkeypatch.setattr(instances, "running", lambda: [first, second, third])
    assert instances.find_instance(8012, None) is second
    assert instances.find_instance(None, str(tmp_path / "s")) is third
    with pytest.raises(UsageError, match=r"3 servers run; name one by --port or --socket: http"):
        instances.find_instance(None, None)
    with pytest.raises(UsageError, match="no `kvq serve` listens there; these do: http"):
        instances.find_instance(8019, None)


def test_a_server_that_stays_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    monkeypatch.setattr(instances.os, "kill", lambda *arguments: sent.append(arguments))
    monkeypatch.setattr(instances, "_LAST_WRITES_S", 0.03)
    with announce(instance()), pytest.raises(BackendError, match="kill -9"):
        instances.stop(instance())
    assert sent == [(os.getpid(), signal.SIGTERM)]


def test_status_and_stop_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--status"]) == 0
    assert "no `kvq serve` of yours is running" in capsys.readouterr().err
    assert main(["serve", "--status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"servers": []}
    assert main(["serve", "--stop"]) == 2
    assert "no `kvq serve` of this user is running" in capsys.readouterr().err
    assert main(["serve", "--stop", "--status"]) == 2


def test_a_state_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").write_text("a file")
    assert main(["serve", "/nowhere", "--port", "0"]) == 2
    complaint = capsys.readouterr().err
    # it would serve all the same, were there a model
    assert "warning: there is no log" in complaint
    assert "will not find this server" in complaint
    assert "there is no model at /nowhere" in complaint


@pytest.mark.slow
def test_a_daemon_is_asked_and_ended_from_elsewhere(
    bundle: str, home: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "kvq.sock"

    def kvq(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvq_apps.cli", "serve", *words]
        return subprocess.run(
            command, env=os.environ | home, capture_output=True, text=True, check=False, timeout=300
        )

    with process(bundle, home, "--socket", str(path)) as server:
        assert server.address.startswith("http://127.0.0.1:")
        body = {"prompt": "a secret nobody logs", "max_tokens": 3, "temperature": 0}
        plain = ask(server, COMPLETIONS, body).json["choices"]
        assert over(path, COMPLETIONS, body)["choices"] == plain
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        (row,) = json.loads(kvq("--status", "--json").stdout)["servers"]
        assert (row["pid"], row["state"]) == (server.process.pid, "ready")
        assert (row["url"], row["socket"]) == (server.address, str(path))
        table = kvq("--status").stdout
        assert f"{row['pid']}" in table
        assert "ready" in table
        refused = kvq(bundle, "--port", "0", "--socket", str(path))
        assert refused.returncode == 2
        assert "a server listens there already" in refused.stderr
        stopped = kvq("--stop", "--socket", str(path))
        assert (stopped.returncode, server.process.wait(PATIENCE_S)) == (0, 0)
        assert f"stopped {server.address}" in stopped.stderr
    assert not path.exists()
    assert list(tmp_path.rglob("servers/*")) == []
    text = Path(row["log"]).read_text()
    assert "a request ended" in text
    assert text.rstrip().endswith("ended")
    assert "secret" not in text


# The socket file


def over(path: Path, route: str, body: object) -> dict[str, object]:
    connection = UnixConnection(str(path), timeout=PATIENCE_S)
    connection.request("POST", route, json.dumps(body), {"Content-Type": "application/json"})
    try:
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def test_a_server_on_a_socket_alone(rule: Rule, tmp_path: Path) -> None:
    path = tmp_path / "s"
    config = {"port": None, "socket_path": path}
    with running(rule.load, **config) as server:
        assert server.url is None
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        body = {"prompt": "abc", "max_tokens": 4}
        assert over(path, COMPLETIONS, body)["choices"][0]["text"] == rule.text("abc", 4)
        assert get_json(None, str(path), "/health") == {"status": "ok"}
        # a web page's name is refused here as on a port
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(request_bytes("GET", "/health", None, {"Host": "evil.example"}))
            assert connection.recv(1 << 12).startswith(b"HTTP/1.1 403")
        # one that hangs up ends its answer
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            rule.backend.shut = True
            connection.sendall(request_bytes("POST", COMPLETIONS, {"prompt": "x"}))
            wait_until(lambda: rule.backend.arrivals == len(rule.backend.passes) + 1)
            (job,) = server.pool.running
        wait_until(lambda: job.cancelled)
        rule.backend.open()
        wait_until(lambda: server.pool.queue == (0, 0))
        assert server.pool.counts.cancelled == 1
    assert not path.exists()


def test_a_body_does_not_wait_behind_its_head() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_server_that_leaves_lets_the_next_ones_socket_be(
    rule: Rule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    listens_no_more = uvicorn.Server.shutdown

    async def then_another_listens(self: uvicorn.Server, sockets: list[socket.socket]) -> None:
        await listens_no_more(self, sockets)
        listeners.append(listen_on_file(path))

    listeners: list[socket.socket] = []
    monkeypatch.setattr(uvicorn.Server, "shutdown", then_another_listens)
    with running(rule.load, port=None, socket_path=path):
        pass
    with listeners[0]:
        assert path.is_socket()


def test_a_socket_left_by_a_killed_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    refusal = pytest.raises(UsageError, match="a server listens there already")
    with listen_on_file(path), refusal:
        listen_on_file(path)


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    config = ServeConfig(port=0, socket_path=path)
    with pytest.raises(UsageError, match="something else is there"):
        Server(None, config, lambda _: None)  # type: ignore[arg-type]
    assert path.read_text() == "mine"
    for bad in (tmp_path / ("x" * 120), tmp_path / "missing" / "s"):
        with pytest.raises(UsageError, match="give a short --socket path"):
            listen_on_file(bad)


# The log (SRV-22)


def test_logs_rotate_and_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "FILE_BYTES", 2000)
    path = log.log_path("8012")
    root, level = logging.getLogger(), logging.getLogger().level
    with log.logged(path):
        for number in range(200):
            logging.getLogger("kvq_apps.serve").info("line %d", number)
            logging.getLogger("others").warning("not ours")
            logging.getLogger("kvq_apps.serve").debug("too much")
    assert root.level == level
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == [
        "serve-8012.log",
        *(f"serve-8012.log.{n}" for n in (1, 2, 3)),
    ]
    assert all(file.stat().st_size <= 2000 for file in files)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    lines = [
        line
        for file in (files[3], files[2], files[1], files[0])
        for line in file.read_text().splitlines()
    ]
    numbers = [int(line.rpartition(" ")[2]) for line in lines]
    assert numbers == list(range(numbers[0], 200))
    assert numbers[0] > 0


def test_the_terminal_hears_no_more_than_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.basicConfig(level=logging.WARNING, format="kvq: %(message)s", force=True)
    with log.logged(tmp_path / "log"):
        logging.getLogger("kvq_apps").info("quiet")
        logging.getLogger("kvq_apps").warning("loud")
    assert capsys.readouterr().err == "kvq: loud\n"
    assert "quiet" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("debug", [False, True])
def test_an_errors_text_is_logged_only_on_demand(debug: bool, rule: Rule, tmp_path: Path) -> None:
    path = tmp_path / "log"
    with log.logged(path, debug=debug), running(rule.load) as server:
        rule.backend.fails_on[70] = ValueError("cannot read 'my secret'")
        assert ask(server, COMPLETIONS, {"prompt": [70]}).status == 500
        send(server, COMPLETIONS, b'{"prompt": "my secret", ').close()
    text = path.read_text()
    assert "a request failed" in text
    assert "ValueError" in text
    assert "forward" in text  # where it happened
    assert ("my secret" in text) == debug


def test_a_log_on_a_full_disk_is_one_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    with log.logged(path):
        for _ in range(5):
            logging.getLogger("kvq_apps").info("lost")
    assert capsys.readouterr().err.count("cannot be written") == 1


def turn(text: str) -> Turn:
    return Turn(messages=(Message(role="user", text=text),))
