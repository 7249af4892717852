"""What the flags of a fleet may say, without Ray; and what is said where Ray is not there."""

import sys
from argparse import Namespace

import pytest

from kvq.errors import UsageError
from kvq_apps.cli import main
from kvq_apps.fleet.placing import Replicas


@pytest.mark.parametrize(
    ("replicas", "autoscale", "found"),
    [(None, None, (1, 1)), (3, None, (3, 3)), (None, "1:8", (1, 8)), (None, "2:2", (2, 2))],
)
def test_how_many(replicas: int | None, autoscale: str | None, found: tuple[int, int]) -> None:
    asked = Replicas.asked(Namespace(replicas=replicas, autoscale=autoscale))
    assert (asked.least, asked.most) == found
    options = asked.options(4)
    if asked.least == asked.most:
        assert options == {"num_replicas": asked.most}
    else:
        assert options["autoscaling_config"]["target_ongoing_requests"] == 4


@pytest.mark.parametrize("autoscale", ["8", "8:1", "0:2", "a:b", ":", "1:-2"])
def test_what_cannot_be(autoscale: str) -> None:
    with pytest.raises(UsageError, match="give the least and the most replicas, as 1:8"):
        Replicas.asked(Namespace(replicas=None, autoscale=autoscale))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("serve nano --replicas 2", "--replicas is for --ray"),
        ("serve nano --ray --replicas 0", "give 1 or more"),
        ("serve nano --ray --replicas 2 --autoscale 1:2", "exclude each other"),
        ("serve nano --ray --socket s", "--ray listens on an address alone"),
        ("eval nano --task passkey --ray", "--ray is for sweep only"),
        ("run -m nano --ray Hello", "--ray is for --batch"),
        ("bench nano --suite fleet --repeat 0", "give 1 or more"),
        ("bench nano --suite fleet --shape qwen3-0.6b", "knows no --shape"),
    ],
)
def test_what_is_refused_before_ray_is_asked(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    ["serve nano --ray --port 0", "run -m nano --batch {file} --out {file}.out --ray"],
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
