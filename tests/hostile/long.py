"""The short tests of this folder, at random and for long: `python tests/hostile/long.py [SECONDS]`.

Ends with 1 at the first hang, raw error or growth, naming the seed that shows it again.
`--edits 100000` instead edits documents in `kvq lsp` so often, and prints what it holds (LSP-24).
"""
# ruff: noqa: E402

from __future__ import annotations

import json
import os
import random
import resource
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

from test_chat_templates import HOSTILE, MESSAGES
from test_requests import CHAT, COMPLETIONS, PRIVATE_USE
from test_session_files import IDENTITY, VOCAB_SIZE, empty_cache, header, state, write
from test_typing import series

from kvq.errors import KvqError, ModelError, SnapshotError
from kvq_apps.serve.server import Server
from kvq_models.chat import ChatTemplate
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.session import snapshot
from serving import Rule, connect, read_all, request_bytes, running
from tiny import CHATML, byte_level_tokenizer

HOUR_S = 3600.0
MOST_CHARACTERS = 2_000_000
# What a round may leave behind for good: caches of libraries, a log's buffer.
GROWTH_KIB = 100_000
# A shared machine may stop a process for a minute or two.
HANG_S = 300.0
EARLY_ROUNDS = 300
LOGGED_ROUNDS = 500
PIECES = [
    "{{",
    "}}",
    "{%",
    "%}",
    "for a in range(99999)",
    "endfor",
    "if 1",
    "endif",
    "set x =",
    "x",
]
PIECES += [
    "~",
    "*",
    "|",
    "'a'",
    "9999999",
    "messages",
    "tojson",
    "join",
    "macro f()",
    "endmacro",
    " ",
]
TEXTS = ["a b ", "a", "<|im_end|>", "\ue000", PRIVATE_USE, "家", "\u0301", "\ud800", "\0", " "]
FIELDS = ["n", "stop", "seed", "top_k", "logprobs", "suffix", "max_tokens", "logit_bias", "stream"]
FIELDS += ["tools", "tool_choice", "response_format", "json_schema", "grammar", "regex", "echo"]
FIELDS += ["response_fields", "presence_penalty", "frequency_penalty", "parallel_tool_calls"]
REGEX_PIECES = [*list("ab(|)*+?[]{}^$.\\-,/\n"), "{9999}", "(?=a)", "\\d", "\\p{L}", "(a|aa)+", "é"]
GBNF_PIECES = ["root", "::=", "a", '"a"', "|", "(", ")", "*", "{3,99999}", "[^a]", ".", "#", "\n"]
KEYWORDS = ["type", "items", "properties", "required", "anyOf", "allOf", "oneOf", "not", "enum"]
KEYWORDS += ["$ref", "$defs", "pattern", "maxLength", "minItems", "additionalProperties", "format"]
KEYWORDS += ["patternProperties", "x-guidance", "multipleOf", "minimum", "const", "prefixItems"]
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    1 << 70,
    1e308,
    "x",
    [],
    [[]],
    {},
    {"1": 5},
    ["a", ""],
]


def schema(chance: random.Random, depth: int = 0) -> Any:
    """Makes something like a JSON schema."""
    kind = chance.random()
    if depth > 5 or kind < 0.2:
        leaves = [None, 1, -1e300, "string", "#/$defs/a", "#", "a", 1 << 70, True, "(a|b)*", "date"]
        return chance.choice(leaves)
    if kind < 0.35:
        return [schema(chance, depth + 1) for _ in range(chance.randrange(4))]
    rows = {chance.choice(KEYWORDS): schema(chance, depth + 1) for _ in range(chance.randrange(5))}
    named = ["object", "array", "string", "integer", "bogus"]
    return ({"type": chance.choice(named)} if chance.random() < 0.7 else {}) | rows


def forms(chance: random.Random) -> dict[str, Any]:
    """Makes a form of the answer, hostile or nearly right."""
    tool = {"type": "function", "function": {"name": "f", "parameters": schema(chance)}}
    made = {
        "regex": "".join(chance.choices(REGEX_PIECES, k=chance.randrange(30))),
        "grammar": "root ::= " + " ".join(chance.choices(GBNF_PIECES, k=chance.randrange(40))),
        "json_schema": schema(chance),
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema(chance)}},
        "tools": [tool] * chance.randrange(3),
        "tool_choice": chance.choice(["required", "auto", {"function": {"name": "f"}}, 3]),
    }
    return {name: made[name] for name in chance.choices(list(made), k=chance.choice([0, 1, 1, 2]))}


def templates(chance: random.Random) -> None:
    source = chance.choice([*HOSTILE.values(), "".join(chance.choices(PIECES, k=30))])
    for _ in range(chance.randrange(4)):
        place = chance.randrange(len(source) + 1)
        source = source[:place] + chance.choice(PIECES) + source[place:]
    with suppress(ModelError):
        ChatTemplate(source).render({"messages": MESSAGES})


def session_files(chance: random.Random) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.kvq"
        content = bytearray(json.dumps(header(8, 4, 8)).encode())
        for _ in range(chance.randrange(5)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        write(path, bytes(content), chance.randbytes(20))
        with suppress(SnapshotError):
            contents = snapshot.examine(path)
            snapshot.check_agrees(path, contents.identity, IDENTITY)
            snapshot.check_state(path, contents.state, vocab_size=VOCAB_SIZE)
            snapshot.fill(path, empty_cache(), contents.state)
    snapshot.check_state("one", state(), vocab_size=VOCAB_SIZE)


def requests(chance: random.Random, server: Server) -> None:
    piece, times = chance.choice(TEXTS), chance.choice([1, 10, 10_000, 500_000])
    text = piece * min(times, MOST_CHARACTERS // len(piece))
    path = chance.choice([CHAT, COMPLETIONS, "/infill", "/completion", "/tokenize", "/detokenize"])
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "prompt": text,
        "content": text,
        "max_tokens": 2,
        "n_predict": 2,
    }
    body |= {name: chance.choice(VALUES) for name in chance.choices(FIELDS, k=2)}
    body |= forms(chance)
    raw = request_bytes("POST", path, body)
    with connect(server) as connection:
        whole, status = chance.random() < 0.7, b""
        # A body that is refused is not read to its end.
        with suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(raw if whole else raw[: len(raw) // 2])
            status = read_all(connection)[9:12] if whole else b""
        assert status in (b"", b"200", b"400", b"404", b"408", b"413", b"429", b"499"), status


def usage() -> tuple[int, int, int]:
    kib = resource.getpagesize() // 1024 * int(Path("/proc/self/statm").read_text().split()[1])
    return kib, len(os.listdir("/proc/self/fd")), threading.active_count()


def typing(edits: int) -> None:
    """Edits so often; what the server holds stays within 5 % of what it held after a tenth."""
    with tempfile.TemporaryDirectory() as home:
        rows: list[dict[str, Any]] = []
        for row in series(Path(home), edits, max(1, edits // 100)):
            print(json.dumps(row), flush=True)
            rows.append(row)
    early, later = rows[len(rows) // 10], rows[len(rows) // 10 + 1 :]
    for name, growth in (("kib", 1.05), ("descriptors", 1.0), ("threads", 1.0)):
        most = max(row[name] for row in later)
        if most > growth * early[name]:
            raise SystemExit(f"{name}: {early[name]} after {early['edits']} edits, then {most}")


def main() -> None:
    """Runs until the time is over."""
    if sys.argv[1:2] == ["--edits"]:
        return typing(int(sys.argv[2]))
    end_s = time.monotonic() + float(sys.argv[1] if len(sys.argv) > 1 else HOUR_S)
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp()
    seed, before = 0, (0, 0, 0)
    rule = Rule(context_tokens=1024)
    knows_tools = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}" + CHATML
    rule.tokenizer = Tokenizer.from_json(
        byte_level_tokenizer().to_str(), rule.tokenizer.control, knows_tools
    )
    with running(rule.load, sessions=2) as server:
        while time.monotonic() < end_s:
            began = time.monotonic()
            try:
                chance = random.Random(seed)
                templates(chance)
                session_files(chance)
                requests(chance, server)
            except (Exception, KvqError) as error:
                raise SystemExit(f"seed {seed}: {type(error).__name__}: {error}") from error
            took_s, now = time.monotonic() - began, usage()
            if took_s > HANG_S:
                raise SystemExit(f"seed {seed}: took {took_s:.0f} s")
            before = now if seed == EARLY_ROUNDS else before
            if seed % LOGGED_ROUNDS == 0:
                print(f"round {seed}: KiB, descriptors, threads {now}", flush=True)
            if seed > EARLY_ROUNDS and any(
                amount > first + room
                for amount, first, room in zip(now, before, (GROWTH_KIB, 20, 20), strict=True)
            ):
                raise SystemExit(f"seed {seed}: grew from {before} to {now}")
            seed += 1
    print(f"{seed} rounds, KiB, descriptors and threads now {usage()}, early {before}")


if __name__ == "__main__":
    main()
