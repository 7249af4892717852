"""Answers a file of prompts, one JSON object a line, with a file of answers.

A line is the body of a request to `kvq serve`: with `prompt` for `/v1/completions`, with
`messages` for `/v1/chat/completions`. Its answer is the body that the route returns. Answers are
written to `OUT.partial` as they come. Once all are there, OUT is written in the order of the
prompts. A batch that was interrupted goes on where it ended.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvq.errors import DataError, UsageError, reason_of
from kvq.files import replace_file
from kvq.json_values import is_array, is_object
from kvq_apps.serve.errors import RequestError, error_body
from kvq_apps.serve.fields import parse_object
from kvq_apps.serve.formats import NAMES as FORMS
from kvq_apps.serve.hosted_app import HostedApp, ask
from kvq_apps.serve.loading import ServeRequest
from kvq_apps.terminal import text_input
from kvq_apps.thinking import AUTO, request_fields

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# The field with which a line names its answer, as in the files of OpenAI's batches.
NAME = "custom_id"
# So the next request of a session is ready when one ends.
REQUESTS_PER_SESSION = 2
# A line replaces the value of a flag under any name of the field.
_LENGTHS = ("max_tokens", "max_completion_tokens", "n_predict")
_SYNONYMS = {name: names for names in (_LENGTHS, FORMS) for name in names}
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPrompt:
    """Holds a line of the file; lines count from 1.

    `digest` is of the line and of all flags that its answer depends on.
    """

    line: int
    text: str
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LineDefaults:
    """Holds what the flags say for every line: default `fields`, and a chat's `system` message."""

    fields: Mapping[str, Any]
    chat: bool
    system: str | None
    think: str = AUTO

    def request(self, text: str) -> tuple[str, Row, Any]:
        """Returns the route, the body and the name that a line asks for. Raises `RequestError`."""
        body = parse_object(text.encode("utf-8", errors="surrogatepass"))
        fields = {name: value for name, value in body.values.items() if value is not None}
        name = fields.pop(NAME, None)
        if ("prompt" in fields) == ("messages" in fields):
            problem = "both prompt and messages" if "prompt" in fields else "no prompt or messages"
            raise RequestError(f"the line has {problem}; give one of them")
        if "prompt" in fields and (self.chat or self.system is not None):
            fields["messages"] = [{"role": "user", "content": fields.pop("prompt")}]
        if "messages" in fields and self.system is not None:
            fields["messages"] = _with_system(self.system, fields["messages"])
        for field, value in self.fields.items():
            if not any(synonym in fields for synonym in _SYNONYMS.get(field, (field,))):
                fields[field] = value
        if "messages" in fields:
            fields = request_fields(self.think) | fields
        fields["stream"] = False
        return CHAT if "messages" in fields else COMPLETIONS, fields, name


def _with_system(system: str, messages: Any) -> Any:
    """Returns `messages` after the system message, unless they have one or are not messages."""
    if not is_array(messages) or any(
        is_object(message) and message.get("role") in ("system", "developer")
        for message in messages
    ):
        return messages
    return [{"role": "system", "content": system}, *messages]


def read_prompts(path: Path, settings: str) -> Iterator[BatchPrompt]:
    """Yields the lines of a file that are not empty. Raises `DataError`."""
    try:
        with path.open("rb") as stream:
            for line, content in enumerate(stream, 1):
                text = text_input.decode(content, f"line {line} of {path}").strip()
                if text:
                    digest = hashlib.sha256(f"{settings}\n{text}".encode()).hexdigest()[:16]
                    yield BatchPrompt(line=line, text=text, digest=digest)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason_of(error)}") from error


class Answers:
    """Keeps the answers of a batch in `path` and `path.partial`; new ones go to `path.partial`.

    `digests` are the digests of the prompts by their lines. Raises `UsageError` when a file
    answers other prompts, `DataError` for a file that no batch wrote. One thread uses it.
    """

    def __init__(self, path: Path, digests: Mapping[int, str]) -> None:
        self._path = path
        self._digests = digests
        self._journal = path.with_name(path.name + ".partial")
        self._places: dict[int, tuple[Path, int]] = {}
        self.failed = 0
        self._stream: BinaryIO | None = None
        for file in (path, self._journal):
            if file.exists():
                self._find(file)

    def __contains__(self, line: int) -> bool:
        return line in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, prompt: BatchPrompt, answer: Row) -> None:
        """Writes an answer; the whole answer is in the file when this returns."""
        row = {"line": prompt.line, "digest": prompt.digest, **answer}
        try:
            if self._stream is None:
                self._stream = self._journal.open("ab")
            place = self._stream.tell()
            self._stream.write(json.dumps(row).encode() + b"\n")
            self._stream.flush()
        except OSError as error:
            raise UsageError(f"{self._journal} cannot be written: {error.strerror}") from error
        self._places[prompt.line] = self._journal, place
        self.failed += "error" in answer

    def close(self) -> None:
        """Closes the file that new answers go to."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def finish(self) -> None:
        """Writes all answers to `path` in the order of their prompts."""
        self.close()
        if not self._journal.exists() and self._path.exists():
            return
        try:
            with replace_file(self._path, private=False) as stream:
                for line in sorted(self._places):
                    file, place = self._places[line]
                    with file.open("rb") as source:
                        source.seek(place)
                        stream.write(source.readline())
        except OSError as error:
            raise UsageError(f"--out {self._path} cannot be written: {error.strerror}") from error
        self._journal.unlink(missing_ok=True)

    def _find(self, file: Path) -> None:
        """Finds the answers in `file` and cuts off a line that an interrupted process left."""
        try:
            with file.open("r+b" if file == self._journal else "rb") as stream:
                place = 0
                for content in stream:
                    if file == self._journal and not content.endswith(b"\n"):
                        stream.truncate(place)
                        break
                    self._note(file, place, content)
                    place += len(content)
        except OSError as error:
            raise DataError(f"{file} cannot be read: {reason_of(error)}") from error

    def _note(self, file: Path, place: int, content: bytes) -> None:
        try:
            row = json.loads(content)
            line, digest, failed = row["line"], row["digest"], "error" in row
        except (ValueError, KeyError, TypeError):
            raise DataError(
                f"{file} holds no answers of a batch; give another --out, or delete it"
            ) from None
        if self._digests.get(line) != digest:
            raise UsageError(
                f"{file} has an answer to another line {line}, or one by another model or with "
                "other flags; give another --out, or delete it to begin again"
            )
        if line not in self._places:
            self.failed += failed
        self._places[line] = file, place


async def answer(hosted: HostedApp, defaults: LineDefaults, text: str) -> Row | None:
    """Returns the answer to a line, or its error; None when the pool ends before there is one."""
    try:
        path, body, name = defaults.request(text)
    except RequestError as error:
        return error_body(error)
    status, content = await ask(hosted.app, path, json.dumps(body).encode())
    row_name = {} if name is None else {NAME: name}
    return None if status == 503 else row_name | json.loads(content)


async def answer_all(
    request: ServeRequest,
    defaults: LineDefaults,
    prompts: Iterator[BatchPrompt],
    keep: Callable[[BatchPrompt, Row], None],
) -> None:
    """Answers `prompts` in this process and passes each answer to `keep` when it is there."""
    hosted = HostedApp(request.load, request.config)

    async def work() -> None:
        for prompt in prompts:
            row = await answer(hosted, defaults, prompt.text)
            if row is None:
                return
            keep(prompt, row)

    hosted.start()
    try:
        await hosted.ready()
        await asyncio.gather(
            *(work() for _ in range(REQUESTS_PER_SESSION * request.config.sessions))
        )
        if hosted.pool.error is not None:
            raise hosted.pool.error
    finally:
        await hosted.stop()
