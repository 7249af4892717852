"""What `/openapi.json` and `/docs` say is what the routes read, and what the reference says."""

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.http_app import make_app
from kvq_apps.serve.sampling import UNSUPPORTED
from kvq_apps.serve.server import Server
from serving import CHAT, COMPLETIONS, Rule, ask, running

pytestmark = pytest.mark.usefixtures("own_state")

REFERENCE = Path(__file__).parents[3] / "apps/docs/docs/reference"
# The routes whose fields a section of the reference tells; the first tells of all that write.
SECTIONS = {
    "On every route that writes": (CHAT, COMPLETIONS, "/completion", "/infill"),
    "`/v1/chat/completions`": (CHAT,),
    "`/api/chat` and `/api/generate`": ("/api/chat", "/api/generate"),
    "`/v1/completions`": (COMPLETIONS,),
    "`/completion` and `/infill`": ("/completion", "/infill"),
}


@pytest.fixture(scope="module")
def infilling() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", "/nowhere")
        with running(Rule(infills=True).load, sessions=1) as server:
            yield server


def paths(server: Server) -> Any:
    return ask(server, "/openapi.json").json["paths"]


def names(schema: Any) -> Iterator[str]:
    """Yields the names of all fields, also inside objects and rows of lists."""
    for name, row in schema.get("properties", {}).items():
        yield name
        yield from names(row.get("items", row))


def body_schema(path: Any) -> Any:
    return path["post"]["requestBody"]["content"]["application/json"]["schema"]


def test_every_route_is_described(infilling: Server) -> None:
    routes = {
        (route.path, method.lower())
        for route in make_app(None, ServeConfig()).routes  # type: ignore[arg-type]
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    embeds = ("/v1/embeddings", "/api/embed", "/api/embeddings")
    reranks = ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking")
    refused = {(path, "post") for path in (*embeds, *reranks)}
    described = paths(infilling)
    assert {(path, method) for path in described for method in described[path]} == routes - refused


def test_a_route_that_the_model_cannot_answer_is_left_out(served: Server) -> None:
    assert "/infill" not in paths(served)
    assert "/completion" in paths(served)


def test_a_field_has_its_kind_its_limits_and_its_default(infilling: Server) -> None:
    described = {path: body_schema(row) for path, row in paths(infilling).items() if "post" in row}
    chat = described[CHAT]["properties"]
    limits = {"type": "integer", "minimum": 1, "maximum": 16, "default": 1}
    assert chat["n"] == limits
    assert chat["stream"] == {"type": "boolean", "default": False}
    priority = chat["x_kvq"]["properties"]["priority"]
    assert (priority["default"], priority["enum"]) == ("chat", ["completion", "chat", "batch"])
    assert chat["messages"]["items"]["properties"]["role"] == {"type": "string"}
    # A copied field is of the kind that it has in a chat.
    for path in ("/v1/responses", "/v1/messages"):
        assert described[path]["properties"]["temperature"] == chat["temperature"]
    options = described["/api/chat"]["properties"]["options"]["properties"]
    assert options["temperature"] == chat["temperature"] == {
        "type": "number", "minimum": 0, "maximum": 100, "default": 0.8,
    }  # fmt: skip


@pytest.mark.parametrize(
    "path",
    [
        *(CHAT, "/v1/responses", "/v1/responses/input_tokens"),
        *("/infill", "/api/generate", "/tokenize"),
    ],
)
def test_an_example_is_answered(path: str, infilling: Server) -> None:
    body = paths(infilling)[path]["post"]["requestBody"]["content"]["application/json"]
    limits = {"options": {"num_predict": 1}} if "/api/" in path else {"max_tokens": 1}
    limits |= {"n_predict": 1, "max_output_tokens": 1}
    assert body["example"]
    assert ask(infilling, path, body["example"] | limits).status == 200


def test_the_reference_says_what_the_routes_read(infilling: Server) -> None:
    text = "".join(page.read_text() for page in REFERENCE.glob("http*.md"))
    text += (REFERENCE.parent / "howto/tools.md").read_text()
    text += (REFERENCE.parent / "howto/thinking.md").read_text()
    posts = {path: row for path, row in paths(infilling).items() if "post" in row}
    described = {path: {*names(body_schema(row))} for path, row in posts.items()}
    assert {"cache_salt", "n_indent", "budget_tokens", "num_predict"} <= set().union(
        *described.values()
    )
    for path, fields in described.items():
        assert [name for name in fields if not re.search(rf"\b{name}\b", text)] == [], path


@pytest.mark.parametrize("title", SECTIONS)
def test_the_routes_read_what_the_reference_says(title: str, infilling: Server) -> None:
    page = (REFERENCE / "http-fields.md").read_text()
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| ([^|]*`[^|]*) \|", section, re.MULTILINE)
    stated = {
        name.rpartition(".")[2]
        for cell in cells
        # What stands in brackets is a default.
        for name in re.findall(r"`([\w.]+)`", re.sub(r"\(.*?\)", "", cell))
    }
    described = paths(infilling)
    known = {name for path in SECTIONS[title] for name in names(body_schema(described[path]))}
    assert len(stated) > 5
    assert stated - known - {*UNSUPPORTED, "keep_alive"} == set()


def test_the_page_shows_every_field_with_its_place(infilling: Server) -> None:
    reply = ask(infilling, "/docs")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    page = unescape(reply.body.decode())
    assert "<h2>POST /api/chat</h2>" in page
    assert "<h2>GET /health</h2>" in page
    row = "<td>options.top_p</td><td>number</td><td>minimum 0, maximum 1, default 0.95</td>"
    assert row in page
    assert "<td>messages[].role</td><td>string</td>" in page


def test_describing_leaves_the_sessions_as_they_are(served: Server) -> None:
    before = [slot.tokens for slot in served.pool.served.slots.all]  # type: ignore[union-attr]
    assert ask(served, "/openapi.json").status == 200
    assert [slot.tokens for slot in served.pool.served.slots.all] == before  # type: ignore[union-attr]
