"""What a person sees who opens the server's address in a browser: one page, no script.

It loads nothing, from here or elsewhere, and everything in it that is not its own is escaped.
"""

from collections.abc import Mapping
from html import escape
from typing import Any

from kvq import __version__
from kvq.formats import format_bytes

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_STYLE = (
    "body{max-width:46rem;margin:3rem auto;padding:0 1rem;font:1rem/1.5 system-ui,sans-serif}"
    "pre{padding:.8rem;overflow-x:auto;background:#8882}td{padding-right:1.5rem}"
    ":root{color-scheme:light dark}"
)


def page(url: str, model: Mapping[str, Any] | None, *, keyed: bool) -> str:
    """The page of a server at `url` that serves `model`, a row of /v1/models; None: not yet."""
    if model is None:
        body = "<p>The model is still being loaded; come back in a moment.</p>"
    else:
        body = f"{_facts(model)}{_connecting(url, model['id'], keyed=keyed)}"
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
        '<a href="/metrics">metrics</a></p>'
    )
