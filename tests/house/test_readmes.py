"""What READMEs and guides show is run as it stands there: Python blocks and `kvq` commands.

Each runs in a folder of its own where the names they use (`qwen3`, `book.txt`) are tiny models and
short texts. What asks a server finds a real `kvq serve`, at another port. What cannot run is listed
with the reason.
"""

import os
import re
import shlex
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import getsource
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from environment import ROOTS, folders_in
from kvq.policies import POLICIES
from kvq_apps.cli import main
from kvq_apps.serve import wire as shapes
from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.fields import Fields
from kvq_apps.serve.http_app import make_app
from serving import Rule, ask, process, running
from shelf import Shelf
from shown_commands import shown_commands

ROOT = Path(__file__).parents[2]
READMES = [
    ROOT / folder / "README.md"
    for folder in (
        ".",
        "kvq",
        "models",
        "runtime",
        "specdraft",
        "export",
        "apps",
        "apps/bench",
        "apps/lab",
        "kvq/csrc/cuda",
    )
] + [ROOT / "tests/README.md"]
SITE = ROOT / "apps/docs/docs"
# Pages of the site that need nothing but the models named below.
GUIDES = [
    SITE / f"{name}.md"
    for name in (
        "howto/batch",
        "howto/chat",
        "howto/drafter",
        "howto/evaluate",
        "howto/gpu",
        "howto/long-context",
        "howto/many-machines",
        "howto/measure-speed",
        "howto/models",
        "howto/python",
        "howto/serve",
        "howto/settings",
        "howto/several-drafts",
        "explanation/replicas",
        "explanation/serving",
    )
]
PAGES = [*READMES, *GUIDES]
ADDRESS = "127.0.0.1:8012"
BUNDLES = ("qwen", "qwen3", "smollm2-135m", "Qwen3-0.6B-kvq")
CHECKPOINTS = ("Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-0.6B", "SmolLM2-135M")
# What `x_kvq` tells of an answer.
_FIELDS = getsource(shapes).partition('"x_kvq": {')[2].partition("**")[0]
MEASURES = (
    *re.findall(r'"(\w+)":', _FIELDS),
    *(name.rpartition(".")[2] for name in shapes.REPORTED),
)
LICENSE = (ROOT / "LICENSE").read_bytes()
# What is left of a pipe, as bytes; a question asked in the terminal comes through a pipe here.
PIPED = {
    "": b"Hello\n",
    'echo "Hello"': b"Hello\n",
    'echo "What is a list?"': b"What is a list?\n",
    "git diff": b"-old\n+new\n",
    "cat LICENSE": LICENSE[:2000],
}
# A file that a reader is told to make.
MADE = re.compile(r'^    echo "([^"]*)" > (\S+)$', re.MULTILINE)
CANNOT_RUN = {
    "kvq pull smollm2-135m": "needs a network",
    "kvq bench --device cuda": "needs a GPU",
    "kvq run -m qwen3 --device cuda": "needs a GPU",
    "kvq bench --shape qwen2.5-0.5b": "takes half an hour and needs llama.cpp",
    "kvq bench --shape qwen3.5-0.8b": "takes minutes and needs llama.cpp",
    **dict.fromkeys(
        ("kvq serve qwen3 --ray", "kvq batch qwen3 prompts.jsonl --out answers.jsonl --ray"),
        "needs Ray; tests/apps/fleet runs them",
    ),
    "kvq eval --sweep": "takes minutes on a tiny model too; test_sweep.py runs a smaller one",
}


@dataclass(frozen=True)
class Example:
    """A block or a command, and where it stands."""

    place: str
    text: str

    @property
    def reason(self) -> str | None:
        return next((why for start, why in CANNOT_RUN.items() if self.text.startswith(start)), None)


def place(path: Path, text: str, start: int) -> str:
    return f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, start) + 1}"


def blocks() -> Iterator[Example]:
    """Each block, after the one before it where the text says that it goes on from there."""
    for path in PAGES:
        text, before = path.read_text(), ""
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            goes_on = text[: match.start()].rstrip().endswith("from the block above:")
            before = f"{before}\n{match[1]}" if goes_on else match[1]
            yield Example(place(path, text, match.start()), before)


def commands() -> Iterator[Example]:
    for path in PAGES:
        text = path.read_text()
        for start, line in shown_commands(text):
            yield Example(place(path, text, start), line)


def as_parameters(examples: Iterator[Example]) -> list[object]:
    """Those that run, each once: a model may be named with `-m` or without."""
    runnable = {
        example.text.replace(" -m ", " "): example for example in examples if example.reason is None
    }
    return [pytest.param(example, id=example.place) for example in runnable.values()]


def test_what_cannot_run_is_still_there() -> None:
    shown = [*blocks(), *commands()]
    assert len(shown) > 25
    for start in CANNOT_RUN:
        assert any(example.text.startswith(start) for example in shown), start


def test_the_table_of_policies_has_every_one() -> None:
    text = (SITE / "explanation/policies.md").read_text()
    assert sorted(re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE)) == sorted(POLICIES)


# One request of each kind with all that has fields of its own.
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"name": "a", "schema": {"type": "object"}}
REQUESTS = [
    ("/v1/chat/completions", {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "a", "content": "a"},
        ],
        "stream_options": {"include_usage": True}, "stream": True,
    }),
    ("/v1/chat/completions", {
        "messages": [{"role": "user", "content": "a"}],
        "response_format": {"type": "json_schema", "json_schema": SCHEMA},
    }),
    # Read, then refused, as this model calls no tools.
    ("/v1/chat/completions", {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    }),
    ("/v1/completions", {"prompt": "a"}),
    ("/completion", {"prompt": "a", "n_predict": 1}),
    ("/infill", {
        "input_prefix": "a", "input_suffix": "b",
        "input_extra": [{"filename": "a", "text": "b"}],
    }),
    ("/tokenize", {"content": "a"}),
    ("/detokenize", {"tokens": [7]}),
    ("/apply-template", {"messages": [{"role": "user", "content": "a"}]}),
]  # fmt: skip


def test_the_http_reference_has_every_route_field_and_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def noted(fields: Fields, name: str, **kind: object) -> object:
        known.add(name)
        return get(fields, name, **kind)

    get, known = Fields.get, set(MEASURES)
    monkeypatch.setattr(Fields, "get", noted)
    with running(Rule(infills=True).load) as server:
        for path, body in REQUESTS:
            ask(server, path, body)
    source = "".join(file.read_text() for file in (ROOT / "apps/kvq_apps/serve").glob("*.py"))
    known |= {*re.findall(r'code="(\w+)"', source)}
    pages = [*(SITE / "reference").glob("http*.md"), SITE / "howto/tools.md"]
    text = "".join(page.read_text() for page in [*pages, SITE / "howto/thinking.md"])
    routes = {route.path.partition("{")[0] for route in make_app(None, ServeConfig()).routes}
    # The innermost field of each request was asked for.
    assert {"include_usage", "schema", "arguments", "filename", "parameters"} <= known
    assert [path for path in sorted(routes) if path not in text] == []
    assert [name for name in sorted(known) if not re.search(rf"\b{name}\b", text)] == []


def test_links_lead_somewhere() -> None:
    for path in READMES:
        text = path.read_text()
        for link in re.findall(r"(?:\]\(|^\[\w+\]: )([^)#\s]+)", text, re.MULTILINE):
            assert ":" in link or (path.parent / link).exists(), (path, link)


@pytest.fixture
def home(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder the reader stands in, with all that the pages name; no model named is tiny."""
    for names, made in (
        (BUNDLES, shelf.bundle(max_position_embeddings=4096)),
        (CHECKPOINTS, shelf.checkpoint(max_position_embeddings=4096)),
    ):
        for name in names:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).symlink_to(made)
    (tmp_path / "book.txt").write_text((ROOT / "README.md").read_text()[:6000])
    (tmp_path / "LICENSE").write_bytes(LICENSE[:6000])
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi", "max_tokens": 2}\n')
    (tmp_path / "held_out").mkdir()
    shutil.copy(__file__, tmp_path / "held_out/program.py")
    for page in PAGES:
        for text, name in MADE.findall(page.read_text()):
            (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.chdir(tmp_path)
    shelf.used_before(tmp_path / "cache")
    settings = {"HOME": tmp_path, "KVQ_MODEL": tmp_path / "qwen3", "KVQ_THREADS": 1}
    for name, value in (settings | folders_in(tmp_path) | ROOTS).items():
        monkeypatch.setenv(name, str(value))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("example", as_parameters(blocks()))
def test_a_python_block_runs(
    example: Example, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if ADDRESS not in example.text:
        exec(compile(example.text, example.place, "exec"), {})
    else:
        with process("qwen3", {}) as server:
            text = example.text.replace(f"http://{ADDRESS}", server.address)
            exec(compile(text, example.place, "exec"), {})
    assert capsys.readouterr().out or "print" not in example.text


@pytest.mark.slow
@pytest.mark.parametrize("example", as_parameters(commands()))
def test_a_command_runs(example: Example, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    piped, _, command = example.text.rpartition(" | ")
    words = [os.path.expanduser(word) for word in shlex.split(command)[1:]]
    words = [path for word in words for path in glob(home, word)]
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(PIPED[piped])))
    if words[0] == "serve" and not {"--status", "--stop"} & {*words}:
        settings = [word for word in words[1:] if word != "-m" and word not in BUNDLES]
        more = [word for word in words if word in BUNDLES][1:]
        with process("qwen3", {}, *settings, *(f"-m={name}" for name in more)) as server:
            assert server.end(signal.SIGTERM)[0] == 0
    elif words[0] == "serve" or ADDRESS in command:
        monkeypatch.delenv("KVQ_MODEL")
        with process("qwen3", {}) as server:
            there = [word.replace(f"http://{ADDRESS}", server.address) for word in words]
            assert main(there) == 0
    else:
        if "-o" in words:
            Path(words[words.index("-o") + 1]).unlink()
        if "-c" in words:
            assert main(["chat"]) == 0
            monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(PIPED[piped])))
        # An editor that goes without a word is no success of a language server.
        assert main(words) == (words[0] == "lsp")


def glob(folder: Path, word: str) -> list[str]:
    """The files a shell makes of a pattern; any other word as it is."""
    return [str(path) for path in folder.glob(word)] if "*" in word else [word]
