"""OpenAI's own client for Node against a real server (SRV-1).

Runs where `node` is and a folder named by KVQ_NODE_MODULES or NODE_PATH holds the npm package
`openai`: `npm install openai` in an empty folder makes one, called `node_modules`.
"""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from environment import node_modules
from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.loading import ServedModel, serve_engine
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.engine import Engine
from serving import running, wait_until
from tiny import CHATML, byte_level_tokenizer


@pytest.fixture
def modules() -> str:
    """The folder of Node packages."""
    if shutil.which("node") is None:
        pytest.skip("there is no node on the PATH")
    return str(node_modules("openai"))


def test_the_official_node_client(
    modules: str, bundle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def load(config: ServeConfig) -> ServedModel:
        served = serve_engine(Engine.open(bundle, threads=1), {"context_tokens": 512}, config)
        control = served.tokenizer.control
        knows_tools = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}" + CHATML
        with_tools = Tokenizer.from_json(byte_level_tokenizer().to_str(), control, knows_tools)
        return replace(served, tokenizer=with_tools)

    script = Path(__file__).with_name("openai_client.mjs")
    with running(load, saved_bytes=0, api_key="right", strict_model=True) as server:
        finished = subprocess.run(
            ["node", str(script), modules, f"{server.address}/v1"],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        wait_until(lambda: server.pool.queue == (0, 0))
    assert finished.returncode == 0, finished.stderr
    outcome = json.loads(finished.stdout)

    whole, streamed = outcome["whole"], outcome["streamed"]
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert outcome["model"] == whole["model"] == "bundle"
    assert len(set(texts)) == 3
    assert whole["usage"]["completion_tokens"] == 18
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + 18
    assert streamed["texts"] == texts
    assert streamed["roles"] == ["assistant"] * 3
    assert streamed["reasons"] == [choice["finish_reason"] for choice in whole["choices"]]
    assert [usage["completion_tokens"] for usage in streamed["usages"]] == [18]
    assert streamed["ids"] == 1

    rows = outcome["ranked"]["logprobs"]["content"]
    assert [len(row["top_logprobs"]) for row in rows] == [2] * 6
    assert all(row["logprob"] == row["top_logprobs"][0]["logprob"] < 0 for row in rows)
    text = b"".join(bytes(row["bytes"]) for row in rows).decode(errors="replace")
    assert text == outcome["ranked"]["message"]["content"]
    (choice,) = outcome["completed"]["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) == 5
    assert all(len(top) >= 3 for top in choice["logprobs"]["top_logprobs"])

    cities, days = {"Paris", "Zürich"}, {1, 2, 3}
    for choice in outcome["held"]:
        trip = json.loads(choice["message"]["content"])
        assert (choice["finish_reason"], trip.keys()) == ("stop", {"city", "days"})
        assert trip["city"] in cities
        assert trip["days"] in days
    for choice in (outcome["calls"], outcome["finalCalls"]):
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert (call["type"], call["function"]["name"]) == ("function", "weather")
        trip = json.loads(call["function"]["arguments"])
        assert trip["city"] in cities
        assert trip["days"] in days

    assert outcome["errors"] == {
        "NotFoundError": "not_found_error",
        "BadRequestError": "invalid_request_error",
        "AuthenticationError": "authentication_error",
    }
