"""`kvq run --batch`: a file of prompts, one JSON object a line, becomes a file of answers.

A line is the body of a request as `kvq serve` takes it, `prompt` for `/v1/completions` or
`messages` for `/v1/chat/completions`, and its answer is the body that the route gives. Answers
are kept in `OUT.partial` as they come, and OUT is written in the order of the prompts once all
are there: what is finished is never asked again, whenever the process ends.
"""

import asyncio
import hashlib
import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from kvq.errors import DataError, UsageError
from kvq.files import replace_file
from kvq.json_values import is_array, is_object
from kvq_apps import flags, options, output, text_input
from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.errors import RequestError, error_body
from kvq_apps.serve.fields import parse_object
from kvq_apps.serve.formats import NAMES as FORMS
from kvq_apps.serve.hosted import Hosted, ask
from kvq_apps.serve.protocol import SAMPLING_NAMES
from kvq_apps.thinking import AUTO, request_fields

if TYPE_CHECKING:
    from kvq_apps.serve.loading import ServedModel

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# The name a line may give its answer, as in the files of OpenAI's batches.
NAME = "custom_id"
# Requests that are made at once, for each session: the next is ready when one ends.
ASKED_PER_SESSION = 2
# A line's own word for a flag takes its place, under any of its names.
_LENGTHS = ("max_tokens", "max_completion_tokens", "n_predict")
_SYNONYMS = {name: names for names in (_LENGTHS, FORMS) for name in names}
# Flags that change what an answer says.
_TELLING = (
    "model", *flags.KV_FLAGS, *flags.PREDICT_FLAGS, *flags.SAMPLING_FLAGS, "ctx-size", "predict",
    "system", "chat", "think", "stop", "no-heal", "json-schema", "grammar", "regex",
)  # fmt: skip

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A line of the file, counted from 1; `digest` is of the line and all that its answer is by."""

    line: int
    text: str
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the flags ask of every line: `fields` where it does not say, and a chat's `system`."""

    fields: Mapping[str, Any]
    chat: bool
    system: str | None
    think: str = AUTO

    def request(self, text: str) -> tuple[str, Row, Any]:
        """The route, the body and the name that a line asks for. Raises `RequestError`."""
        given = parse_object(text.encode("utf-8", errors="surrogatepass"))
        fields = {name: given.get(name) for name in given.names() if given.get(name) is not None}
        name = fields.pop(NAME, None)
        if ("prompt" in fields) == ("messages" in fields):
            found = "both prompt and messages" if "prompt" in fields else "no prompt or messages"
            raise RequestError(f"the line has {found}; give one of them")
        if "prompt" in fields and (self.chat or self.system is not None):
            fields["messages"] = [{"role": "user", "content": fields.pop("prompt")}]
        if "messages" in fields and self.system is not None:
            fields["messages"] = _with_system(self.system, fields["messages"])
        for field, value in self.fields.items():
            if not any(one in fields for one in _SYNONYMS.get(field, (field,))):
                fields[field] = value
        if "messages" in fields:
            fields = request_fields(self.think) | fields
        fields["stream"] = False
        return CHAT if "messages" in fields else COMPLETIONS, fields, name


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRequest:
    """A batch as the flags ask for it: the model, how it is served, what every line wants."""

    model: str | None
    engine_options: Mapping[str, Any]
    session_options: Mapping[str, Any]
    config: ServeConfig
    wanted: Wanted

    def load(self) -> "ServedModel":
        """Loads the model and opens every arena. Raises `KvqError`."""
        from kvq_apps.serve.loading import load

        return load(self.model, self.engine_options, self.session_options, self.config)

    def with_threads(self, threads: int) -> "BatchRequest":
        """The same with so many threads."""
        return replace(self, engine_options={**self.engine_options, "threads": threads})


def _with_system(system: str, messages: Any) -> Any:
    """`messages` behind the system's, unless they have one or are no messages."""
    if not is_array(messages) or any(
        is_object(one) and one.get("role") in ("system", "developer") for one in messages
    ):
        return messages
    return [{"role": "system", "content": system}, *messages]


def wanted(arguments: Namespace) -> Wanted:
    """What the flags of `kvq run` say of every line. Raises `KvqError`."""
    from kvq_runtime.config import DEFAULT_MAX_TOKENS

    limit = options.max_tokens(arguments.predict, DEFAULT_MAX_TOKENS)
    fields: Row = {"max_tokens": options.UNTIL_FULL if limit is None else limit}
    fields |= {
        SAMPLING_NAMES[name]: value for name, value in options.sampling_fields(arguments).items()
    }
    fields |= options.given(arguments, seed="seed", stop="stop", regex="regex")
    forms = options.given(arguments, json_schema="json-schema", grammar="grammar")
    for name, file in forms.items():
        text = text_input.read_text(file)
        fields[name] = text if name == "grammar" else _json(text, file)
    if len([name for name in FORMS if name in fields]) > 1:
        raise UsageError("--json-schema, --grammar and --regex exclude each other; give one")
    if arguments.no_heal:
        fields["x_kvq"] = {"heal": False}
    return Wanted(
        fields=fields,
        chat=arguments.chat,
        system=arguments.system,
        **options.given(arguments, think="think"),
    )


def _json(text: str, file: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"--json-schema {file} is not JSON: {error}") from None


def read_prompts(path: Path, settings: str) -> Iterator[Prompt]:
    """The lines of a file that are not empty. Raises `DataError`."""
    try:
        with path.open("rb") as stream:
            for line, content in enumerate(stream, 1):
                text = text_input.decode(content, f"line {line} of {path}").strip()
                if text:
                    digest = hashlib.sha256(f"{settings}\n{text}".encode()).hexdigest()[:16]
                    yield Prompt(line=line, text=text, digest=digest)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


class Answers:
    """The answers there are, in `path` and in `path.partial`; the rest is added there.

    `digests` are those of the prompts by their lines. Raises `UsageError` when a file answers
    others, `DataError` for a file that is none of a batch. Used by one thread.
    """

    def __init__(self, path: Path, digests: Mapping[int, str]) -> None:
        self._path = path
        self._digests = digests
        self._journal = path.with_name(path.name + ".partial")
        self._places: dict[int, tuple[Path, int]] = {}
        self.failed = 0
        self._added: BinaryIO | None = None
        for file in (path, self._journal):
            if file.exists():
                self._find(file)

    def __contains__(self, line: int) -> bool:
        return line in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, prompt: Prompt, answer: Row) -> None:
        """Keeps an answer; it is in the file, whole, when this returns."""
        row = {"line": prompt.line, "digest": prompt.digest, **answer}
        try:
            if self._added is None:
                self._added = self._journal.open("ab")
            place = self._added.tell()
            self._added.write(json.dumps(row).encode() + b"\n")
            self._added.flush()
        except OSError as error:
            raise UsageError(f"{self._journal} cannot be written: {error.strerror}") from error
        self._places[prompt.line] = self._journal, place
        self.failed += "error" in answer

    def close(self) -> None:
        """What was added can be found again."""
        if self._added is not None:
            self._added.close()
            self._added = None

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
        """Notes the answers in `file`; what a process that ended early left of a line is cut."""
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
            raise DataError(f"{file} cannot be read: {error.strerror}") from error

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


async def answer(hosted: Hosted, wanted: Wanted, text: str) -> Row | None:
    """The answer to a line, or its error; None when the model is leaving and there is none."""
    try:
        path, body, name = wanted.request(text)
    except RequestError as error:
        return error_body(error)
    status, content = await ask(hosted.app, path, json.dumps(body).encode())
    named = {} if name is None else {NAME: name}
    return None if status == 503 else named | json.loads(content)


async def answer_all(
    asked: BatchRequest, prompts: Iterator[Prompt], keep: Callable[[Prompt, Row], None]
) -> None:
    """Answers `prompts` in this process and gives each to `keep` when it is there."""
    hosted = Hosted(asked.load, asked.config)

    async def work() -> None:
        for prompt in prompts:
            found = await answer(hosted, asked.wanted, prompt.text)
            if found is None:
                return
            keep(prompt, found)

    hosted.start()
    try:
        await hosted.ready()
        await asyncio.gather(*(work() for _ in range(ASKED_PER_SESSION * asked.config.sessions)))
        if hosted.pool.error is not None:
            raise hosted.pool.error
    finally:
        await hosted.stop()


def run(arguments: Namespace) -> int:
    """`kvq run --batch FILE --out FILE`; the exit code is 2 where a line has an error."""
    asked = _batch_request(arguments)
    prompts, out = Path(arguments.batch_file), Path(arguments.out)
    settings = json.dumps(
        [asked.model, options.given(arguments, **{name: name for name in _TELLING}),
         asked.wanted.fields],
        sort_keys=True, default=str,
    )  # fmt: skip
    digests = {one.line: one.digest for one in read_prompts(prompts, settings)}
    if not digests:
        raise DataError(f"{prompts} has no lines; write one JSON object a line")
    answers = Answers(out, digests)
    total, before = len(digests), len(answers)
    with output.Progress() as progress:

        def keep(prompt: Prompt, row: Row) -> None:
            answers.add(prompt, row)
            progress(len(answers), total, f"{len(answers)} of {total} lines")

        waiting = (one for one in read_prompts(prompts, settings) if one.line not in answers)
        try:
            if before < total:
                _answer(arguments, asked, waiting, keep)
        finally:
            answers.close()
    answers.finish()
    report = {"lines": total, "answered": total - before, "failed": answers.failed, "out": str(out)}
    if arguments.json:
        output.print_json(report)
    if answers.failed:
        output.print_note(f"{answers.failed} of {total} lines have an error in {out}")
    return 2 if answers.failed else 0


def _answer(
    arguments: Namespace,
    asked: BatchRequest,
    prompts: Iterator[Prompt],
    keep: Callable[[Prompt, Row], None],
) -> None:
    """Answers `prompts`, here or on Ray."""
    from kvq_apps.model_path import pull_missing

    pull_missing(asked.model)
    if not arguments.ray:
        asyncio.run(answer_all(asked, prompts, keep))
        return
    from kvq_apps.fleet.cluster import connected

    with connected():
        from kvq_apps.fleet import answering

        answering.answer_all(asked, prompts, arguments, keep)


def _batch_request(arguments: Namespace) -> BatchRequest:
    """What the flags ask for. Raises `UsageError` for what a batch cannot do."""
    file, out = arguments.batch_file, arguments.out
    if out is None:
        raise UsageError("--batch needs --out FILE.jsonl, the file it writes and goes on with")
    if not Path(out).absolute().parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {Path(out).parent}")
    if Path(out).absolute() == Path(file).absolute():
        raise UsageError("--out is the file of the prompts; give another name")
    for name in ("stream", "no-stream", "extract", "usage"):
        if options.written(arguments, name):
            raise UsageError(f"--batch writes whole answers to a file; leave out --{name}")
    words = list(arguments.words)
    if len(words) > 1 or (words and options.written(arguments, "model")):
        raise UsageError("--batch takes its prompts from the file; leave out the prompt")
    sessions = options.given(arguments, sessions="sessions")
    return BatchRequest(
        model=words[0] if words else arguments.model,
        engine_options=options.engine_options(arguments),
        session_options=options.session_options(arguments),
        # It keeps no session on disk, and nobody waits for its answers at the end.
        config=ServeConfig(port=0, saved_bytes=0, grace_s=0.0, **sessions),
        wanted=wanted(arguments),
    )
