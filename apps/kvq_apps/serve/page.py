"""The page that the server shows in a browser, with a small chat.

It loads nothing else. Its only script is part of the page, and its headers allow this script alone,
by its hash. All foreign text in it is escaped.
"""

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from kvq import __version__
from kvq.formats import format_bytes

_SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
_SCRIPT_HASH = b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'none'; "
    f"connect-src 'self'; script-src 'sha256-{_SCRIPT_HASH}'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_STYLE = (
    "body{max-width:46rem;margin:3rem auto;padding:0 1rem;font:1rem/1.5 system-ui,sans-serif}"
    "pre{padding:.8rem;overflow-x:auto;background:#8882}td{padding-right:1.5rem}"
    ":root{color-scheme:light dark}textarea{width:100%;box-sizing:border-box;font:inherit}"
    "#log p{white-space:pre-wrap;overflow-wrap:anywhere}.user{font-weight:600}.error{color:#c33}"
)


def page(
    url: str,
    model: Mapping[str, Any] | None,
    *,
    keyed: bool,
    waiting: str = "The model is still being loaded; come back in a moment.",
) -> str:
    """Returns the page of a server at `url`; `model` is its row of /v1/models.

    Before one is loaded it is None, and the page says `waiting`.
    """
    if model is None:
        body = f"<p>{escape(waiting)}</p>"
    else:
        chat = _chat(keyed=keyed) if model["meta"]["chat"] else ""
        body = f"{_facts(model)}{chat}{_connecting(url, model['id'], keyed=keyed)}"
    return _html(body)


def docs_page(description: Mapping[str, Any]) -> str:
    """Returns the page of all routes and their fields; `description` is that of OpenAPI."""
    sections: list[str] = []
    for path, methods in description["paths"].items():
        for method, row in methods.items():
            sections.append(f"<h2>{method.upper()} {escape(path)}</h2>")
            if "requestBody" in row:
                body = row["requestBody"]["content"]["application/json"]
                sections.append(f"<pre>{escape(json.dumps(body['example']))}</pre><table>")
                sections += _field_rows(body["schema"])
                sections.append("</table>")
    link = '<p>The same for programs: <a href="/openapi.json">openapi.json</a></p>'
    return _html(link + "".join(sections))


def _field_rows(schema: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields a row for each field, also of objects and lists in it, with its place."""
    for name, row in schema["properties"].items():
        limits = {key: row[key] for key in ("minimum", "maximum", "enum", "default") if key in row}
        shown = (f"{key} {json.dumps(value)}" for key, value in limits.items())
        cells = (f"{prefix}{name}", row.get("type", "any"), ", ".join(shown))
        yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        inner = row.get("items", row)
        if "properties" in inner:
            yield from _field_rows(inner, f"{prefix}{name}{'[]' if 'items' in row else ''}.")


def _html(body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>kvq</title><style>{_STYLE}</style></head><body>"
        f"<h1>kvq {escape(__version__)}</h1>{body}</body></html>\n"
    )


def _facts(model: Mapping[str, Any]) -> str:
    meta = model["meta"]
    answers = [name for name, can in (("chat", meta["chat"]), ("infill", meta["infill"])) if can]
    rows = {
        "model": model["id"],
        "context": f"{meta['n_ctx']} tokens",
        "cache": f"{meta['kbits']} bits of keys, {meta['vbits']} of values, "
        f"{format_bytes(meta['kv_budget'])} for each session",
        "answers": ", ".join(["completions", *answers]),
    }
    cells = (f"<tr><td>{escape(name)}</td><td>{escape(str(row))}</td></tr>"
             for name, row in rows.items())  # fmt: skip
    return f"<table>{''.join(cells)}</table>"


def _chat(*, keyed: bool) -> str:
    """Returns a box to chat in; only the browser keeps the conversation."""
    key = '<p><label>API key <input id="key" type="password"></label></p>' if keyed else ""
    return (
        f'<h2>Chat</h2>{key}<div id="log" aria-live="polite"></div><form id="ask">'
        '<textarea id="text" rows="3" placeholder="Write a message; Enter sends" '
        'aria-label="Message"></textarea>'
        '<button>Send</button> <button id="stop" type="button" disabled>Stop</button></form>'
        f"<script>{_SCRIPT}</script>"
    )


def _connecting(url: str, name: str, *, keyed: bool) -> str:
    key = "the key that the server was started with" if keyed else "any text, it is not read"
    curl = (
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'"
        + (" -H 'Authorization: Bearer KEY'" if keyed else "")
        + ' -d \'{"messages": [{"role": "user", "content": "Hello"}]}\''
    )
    python = (
        "from openai import OpenAI\n\n"
        f'client = OpenAI(base_url="{url}/v1", api_key="{"KEY" if keyed else "none"}")\n'
        f"print(client.models.list().data[0].id)"
    )
    return (
        f"<h2>How to connect</h2><p>OpenAI's clients: base URL <code>{escape(url)}/v1</code>, "
        f"model <code>{escape(name)}</code>, API key: {key}.</p>"
        f"<pre>{escape(curl)}</pre><pre>{escape(python)}</pre>"
        f"<p>llama.vim and llama.vscode: <code>{escape(url)}/infill</code>. In a terminal: "
        f"<code>kvq chat --server {escape(url)}</code>.</p>"
        '<p><a href="/health">health</a> · <a href="/v1/models">models</a> · '
        '<a href="/props">properties</a> · <a href="/slots">sessions</a> · '
        '<a href="/metrics">metrics</a> · <a href="/docs">routes</a></p>'
    )
