"""Coding agents as they are published, pointed at a server by its address: read, edit, end.

The model follows a script, so these are tests of the protocol. An npm agent runs where a folder of
KVQ_NODE_MODULES holds its package, and a Python one where this Python, or one of KVQ_AGENT_PYTHONS,
has it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from environment import node_modules
from kvq_apps.serve.server import Server
from scripted_agent import call, scripted_agent
from serving import ask

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_state")]

TASK = "Change red to blue in notes.txt"
BEFORE, AFTER = "colour: red\n", "colour: blue\n"
ENDING = "The colour is blue now."
TIMEOUT_S = 240


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with the file that an agent changes."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "notes.txt").write_text(BEFORE)
    return folder


def npm_command(package: str, command: str) -> str:
    """The command that an npm package brings, or a skip."""
    return str(node_modules(package) / ".bin" / command)


def python_with(module: str) -> str:
    """A Python that has `module`, or a skip."""
    named = os.environ.get("KVQ_AGENT_PYTHONS", "").split(os.pathsep)
    search = f"import importlib.util as u; raise SystemExit(u.find_spec({module!r}) is None)"
    for python in filter(None, [sys.executable, *named]):
        if subprocess.run([python, "-c", search], check=False).returncode == 0:
            return python
    pytest.skip(f"neither this Python nor one of KVQ_AGENT_PYTHONS has {module}")


def run(
    words: Sequence[str], work: Path, settings: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs an agent in `work` with a home of its own and nothing on stdin."""
    home = work.parent / "home"
    home.mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    finished = subprocess.run(
        words,
        cwd=work,
        env={**kept, "HOME": str(home), **(settings or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished


def check(server: Server, finished: subprocess.CompletedProcess[str], work: Path) -> None:
    """The file is changed, the agent has said the last words, and no request was refused."""
    metrics = ask(server, "/metrics").body.decode()
    refused = [
        row
        for row in metrics.splitlines()
        if row.startswith("kvq_requests_total") and 'status="200"' not in row
    ]
    assert refused == []
    assert (work / "notes.txt").read_text() == AFTER, finished.stdout + finished.stderr
    assert ENDING in finished.stdout


def open_ai(server: Server) -> dict[str, str]:
    return {"OPENAI_BASE_URL": f"{server.address}/v1", "OPENAI_API_KEY": "none"}


def test_codex(work: Path) -> None:
    codex = npm_command("@openai/codex", "codex")
    steps = [
        call("exec_command", cmd="cat notes.txt"),
        call("exec_command", cmd="sed -i s/red/blue/ notes.txt"),
        ENDING,
    ]
    with scripted_agent(steps) as server:
        provider = {
            "model_provider": "kvq",
            "model_providers.kvq.name": "kvq",
            "model_providers.kvq.base_url": f"{server.address}/v1",
            "model_providers.kvq.wire_api": "responses",
        }
        flags = [word for key, value in provider.items() for word in ("-c", f"{key}={value}")]
        words = [codex, "exec", "--skip-git-repo-check", *flags, "-m", "kvq"]
        finished = run([*words, "--sandbox", "danger-full-access", TASK], work)
        check(server, finished, work)


def test_claude_code(work: Path) -> None:
    claude = npm_command("@anthropic-ai/claude-code", "claude")
    path = str(work / "notes.txt")
    steps = [
        call("Read", file_path=path),
        call("Edit", file_path=path, old_string="red", new_string="blue"),
        ENDING,
    ]
    with scripted_agent(steps) as server:
        settings = {
            "ANTHROPIC_BASE_URL": server.address,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        words = [claude, "-p", TASK, "--model", "kvq", "--allowedTools", "Read", "Edit"]
        check(server, run(words, work, settings), work)


def test_opencode(work: Path) -> None:
    opencode = npm_command("opencode-ai", "opencode")
    path = str(work / "notes.txt")
    steps = [
        call("read", filePath=path),
        call("edit", filePath=path, oldString="red", newString="blue"),
        ENDING,
    ]
    with scripted_agent(steps) as server:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{server.address}/v1", "apiKey": "none"},
            "models": {"kvq": {}},
        }
        config = {"provider": {"kvq": provider}, "model": "kvq/kvq"}
        (work / "opencode.json").write_text(json.dumps(config))
        check(server, run([opencode, "run", TASK], work), work)


def test_qwen_code(work: Path) -> None:
    qwen = npm_command("@qwen-code/qwen-code", "qwen")
    path = str(work / "notes.txt")
    steps = [
        call("read_file", file_path=path),
        call("edit", file_path=path, old_string="red", new_string="blue"),
        ENDING,
    ]
    with scripted_agent(steps) as server:
        words = [qwen, "--auth-type", "openai", "--approval-mode", "auto-edit", "-p", TASK]
        settings = open_ai(server) | {"OPENAI_MODEL": "kvq"}
        check(server, run(words, work, settings), work)


# Tools of the clients that bring none.
TOOLS = '''
from pathlib import Path


def read_file(path: str) -> str:
    """Reads a file.

    Args:
        path: Where it is.
    """
    return Path(path).read_text()


def write_file(path: str, text: str) -> str:
    """Writes a file.

    Args:
        path: Where it is.
        text: What it holds then.
    """
    Path(path).write_text(text)
    return "written"
'''
TOOL_STEPS = [
    call("read_file", path="notes.txt"),
    call("write_file", path="notes.txt", text=AFTER),
    ENDING,
]
PROGRAMS = {
    "agents": """
from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)
agent = Agent("kvq", model="kvq", tools=[function_tool(read_file), function_tool(write_file)])
print(Runner.run_sync(agent, TASK).final_output)
""",
    "pydantic_ai": """
from pydantic_ai import Agent

agent = Agent("openai-chat:kvq", tools=[read_file, write_file])
print(agent.run_sync(TASK).output)
""",
    "smolagents": """
import os

from smolagents import OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel("kvq", api_base=os.environ["OPENAI_BASE_URL"], api_key="none")
agent = ToolCallingAgent([tool(read_file), tool(write_file)], model)
print(agent.run(TASK))
""",
}


@pytest.mark.parametrize("module", PROGRAMS)
def test_a_python_agent(module: str, work: Path) -> None:
    python = python_with(module)
    # smolagents ends by a tool.
    last = call("final_answer", answer=ENDING) if module == "smolagents" else ENDING
    (work / "program.py").write_text(f"TASK = {TASK!r}\n{TOOLS}\n{PROGRAMS[module]}")
    with scripted_agent([*TOOL_STEPS[:-1], last]) as server:
        check(server, run([python, "program.py"], work, open_ai(server)), work)


def test_llm(work: Path) -> None:
    python = python_with("llm")
    (work / "tools.py").write_text(TOOLS)
    with scripted_agent(TOOL_STEPS) as server:
        model = {"model_id": "kvq", "model_name": "kvq", "api_base": f"{server.address}/v1"}
        (work / "extra-openai-models.yaml").write_text(
            json.dumps([model | {"supports_tools": True}])
        )
        words = [python, "-m", "llm", "-m", "kvq", "--functions", "tools.py", TASK]
        finished = run(words, work, {"LLM_USER_PATH": str(work), "OPENAI_API_KEY": "none"})
        check(server, finished, work)


def test_aider(work: Path) -> None:
    python = python_with("aider")
    edit = (
        f"notes.txt\n```\n<<<<<<< SEARCH\n{BEFORE}=======\n{AFTER}>>>>>>> REPLACE\n```\n\n{ENDING}"
    )
    with scripted_agent([], plain=edit) as server:
        words = [python, "-m", "aider", "--model", "openai/kvq", "--edit-format", "diff"]
        words += ["--no-git", "--yes-always", "--no-check-update", "--analytics-disable"]
        words += ["--no-show-model-warnings", "--map-tokens", "0"]
        settings = {"OPENAI_API_BASE": f"{server.address}/v1", "OPENAI_API_KEY": "none"}
        check(server, run([*words, "--message", TASK, "notes.txt"], work, settings), work)
