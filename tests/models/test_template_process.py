"""The process that renders a template: how it starts, ends, and is bounded."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import MappingProxyType

import pytest

from kvq.errors import DataError, ModelError
from kvq_models.chat import ChatTemplate
from kvq_models.template_process import TemplateProcess


def pid_of(template: TemplateProcess) -> int:
    process = template._process  # pyright: ignore[reportPrivateUsage]
    assert process is not None
    return process.pid


def ends(pid: int) -> bool:
    """Returns whether the process is gone soon."""
    for _ in range(1000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_one_process_answers_until_it_is_no_longer_needed() -> None:
    template = TemplateProcess("{% set x = 1 %}{{ a }}{{ x }}")
    template.begin()
    pid = pid_of(template)
    assert template.variables() == {"a"}
    assert [template.render({"a": text}) for text in ("é", "\ud800", "")] == ["é1", "\ud8001", "1"]
    assert pid_of(template) == pid
    del template
    gc.collect()
    assert ends(pid)


@pytest.mark.slow
def test_a_process_that_has_ended_is_replaced() -> None:
    template = TemplateProcess("{{ a }}{% for b in c %}{{ range(99999)|sum }}{% endfor %}")
    assert template.render({"a": 1}) == "1"
    first = pid_of(template)
    with pytest.raises(ModelError, match="refuses these messages: it takes more than 3 s"):
        template.render({"c": list(range(99999))})
    assert ends(first)
    assert template.render({"a": 2}) == "2"
    os.kill(pid_of(template), signal.SIGKILL)
    os.waitid(os.P_PID, pid_of(template), os.WEXITED | os.WNOWAIT)
    assert template.render({"a": 3}) == "3"


def test_an_interrupt_is_not_for_it_and_nothing_is_handed_on() -> None:
    with Path(__file__).open() as open_file:
        template = TemplateProcess("{{ a }}")
        os.set_inheritable(open_file.fileno(), True)
        assert template.render({"a": 1}) == "1"
        pid = pid_of(template)
        assert {path.name for path in Path(f"/proc/{pid}/fd").iterdir()} == {"0", "1", "2"}
    os.kill(pid, signal.SIGINT)
    assert template.render({"a": 2}) == "2"
    assert pid_of(template) == pid


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_it_ends_with_its_parent_however_that_ends(busy: bool) -> None:
    script = (
        "import sys, threading, time\n"
        "from kvq_models.template_process import TemplateProcess\n"
        "process = TemplateProcess('{% for a in b %}{{ range(99999)|sum }}{% endfor %}')\n"
        "process.render({})\n"
        f"rows = list(range(99999 * {int(busy)}))\n"
        "print(process._process.pid, flush=True)\n"
        "process.render({'b': rows})\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    assert ends(pid)


def test_what_a_template_makes_has_bounds() -> None:
    with pytest.raises(ModelError, match="has 1048577 characters; at most 1 MiB is possible"):
        TemplateProcess("a" * ((1 << 20) + 1)).variables()
    assert TemplateProcess("a" * (1 << 20)).render({}) == "a" * (1 << 20)
    template = TemplateProcess("{{ a * n }}")
    assert len(template.render({"a": "a", "n": 60_000_000})) == 60_000_000
    for a in ("a", "é"):
        with pytest.raises(ModelError, match=r"it makes .* than 67108864"):
            template.render({"a": a, "n": 67_108_865 // len(a.encode())})
    with pytest.raises(ModelError, match="it needs more than 512 MiB"):
        template.render({"a": "a", "n": 600_000_000})


def test_what_is_no_json_is_refused_before_it_is_sent() -> None:
    template = TemplateProcess("{{ a }}")
    for value in (MappingProxyType({"a": 1}), object(), 1j):
        with pytest.raises(DataError, match="messages and variables are values of JSON"):
            template.render({"a": value})
    nested: list[object] = []
    nested.append(nested)
    with pytest.raises(DataError, match="Circular reference"):
        template.render({"a": nested})
    assert template.render({"a": (1, 2)}) == "[1, 2]"


def test_a_machine_without_processes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refused)
    with pytest.raises(ModelError, match="cannot be started"):
        ChatTemplate("a").prompt({})
