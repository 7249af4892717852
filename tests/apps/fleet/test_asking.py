"""What the flags of a fleet may say, without Ray; and what is said where Ray is not there."""

import os
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest

from kvq.errors import UsageError
from kvq_apps.cli import main
from kvq_apps.fleet.cluster import connected
from kvq_apps.fleet.replicas import Replicas

RAY_SETTINGS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH")


@pytest.mark.parametrize(
    ("replicas", "autoscale", "expected"),
    [(None, None, (1, 1)), (3, None, (3, 3)), (None, "1:8", (1, 8)), (None, "2:2", (2, 2))],
)
def test_how_many(replicas: int | None, autoscale: str | None, expected: tuple[int, int]) -> None:
    fleet = Replicas.from_arguments(Namespace(replicas=replicas, autoscale=autoscale))
    assert (fleet.least, fleet.most) == expected
    options = fleet.options(4)
    if fleet.least == fleet.most:
        assert options == {"num_replicas": fleet.most}
    else:
        assert options["autoscaling_config"]["target_ongoing_requests"] == 4


@pytest.mark.parametrize("autoscale", ["8", "8:1", "0:2", "a:b", ":", "1:-2"])
def test_what_cannot_be(autoscale: str) -> None:
    with pytest.raises(UsageError, match="give the least and the most replicas, as 1:8"):
        Replicas.from_arguments(Namespace(replicas=None, autoscale=autoscale))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("serve nano --replicas 2", "--replicas is for --ray"),
        ("serve nano --ray --replicas 0", "give 1 or more"),
        ("serve nano --ray --replicas 2 --autoscale 1:2", "exclude each other"),
        ("serve nano --ray --socket s", "--ray listens on an address alone"),
        ("run -m nano --ray Hello", "--ray is not known to `kvq run`"),
    ],
)
def test_what_is_refused_before_ray_is_asked(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    ["serve nano --ray --port 0", "batch nano {file} --out {file}.out --ray"],
)
def test_without_ray_its_extra_is_named(
    words: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path_factory.mktemp("batch") / "prompts"
    file.write_text('{"prompt": "a"}\n')
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(words.format(file=file).split()) == 2
    said = capsys.readouterr().err
    assert 'this needs ray; install it with `pip install "kvq-runtime[ray]"`' in said


@pytest.mark.parametrize("address", [None, "", "local", "auto", "10.0.0.1:6379"])
def test_a_ray_that_was_not_named_is_not_joined(
    address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[str] = []
    fake = SimpleNamespace(
        init=lambda address, **_: joined.append(address), shutdown=lambda: joined.append("left")
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    for name in ("RAY_ADDRESS", *RAY_SETTINGS):
        # What is set meanwhile goes again, too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with connected():
        environment = {name: os.environ.get(name) for name in RAY_SETTINGS}
    is_local = not address or address == "local"
    assert joined == ["local" if is_local else address, "left"]
    assert environment["RAY_AUTH_MODE"] == ("token" if is_local else None)
    assert len(environment["RAY_AUTH_TOKEN"] or "") == (64 if is_local else 0)
    assert (environment["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] is not None) == is_local
