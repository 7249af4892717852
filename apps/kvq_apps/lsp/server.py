"""`kvq lsp`: inline completions for editors, one request alive per document.

The reading thread applies document notifications in their order and answers what needs no model;
one worker writes completions. A newer request of a document supersedes its older one, and a cancel
reaches the engine before its next pass. Whatever goes wrong becomes a line in the log and a null
answer with a reason, never a pop-up. Protocol: LSP 3.18, textDocument/inlineCompletion.
"""

import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO, Protocol, cast

from kvq import __version__
from kvq_apps.completion.document import Document, Encoding, Position
from kvq_apps.completion.engine import Completion
from kvq_apps.lsp.frames import (
    CANCELLED,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    NOT_INITIALIZED,
    FrameWriter,
    RpcError,
    read_frames,
)
from kvq_apps.lsp.settings import Settings
from kvq_apps.lsp.typed import TypedThrough

# Idle time begins so long after the last answer, and is used so many tokens at a time.
IDLE_S, IDLE_TOKENS = 0.3, 64
PARENT_CHECK_S = 2.0
# The progress that an editor may show.
LOADING = "kvq-loading"
ENCODINGS = ("utf-8", "utf-16", "utf-32")
# A line that no person has written is not completed.
MOST_LINE = 20_000


class Completer(Protocol):
    """Who completes: `completion.engine.CompletionEngine`, or a stand-in."""

    def complete(
        self, document: Document, place: tuple[int, int], *, cancel: Callable[[], bool]
    ) -> Completion: ...

    def refresh(self, max_tokens: int, cancel: Callable[[], bool]) -> int: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Open:
    """A document, its version, and the list shown at one place of it until the next edit."""

    document: Document
    version: int
    shown: dict[tuple[int, int], Completion] = field(default_factory=dict)
    typed: TypedThrough | None = None
    request: "_Request | None" = None
    last: Completion | None = None
    binary: bool = False


@dataclass(slots=True)
class _Request:
    """A completion somebody waits for."""

    id: int | str
    uri: str
    version: int
    place: tuple[int, int]
    selected: str
    as_list: bool = False
    cancelled: bool = False
    superseded: bool = False

    def ends(self) -> bool:
        """Whether nobody waits any more."""
        return self.cancelled or self.superseded


class LanguageServer:
    """One client. `load` makes the completer, in the background; `log` takes lines."""

    def __init__(
        self,
        source: BinaryIO,
        sink: BinaryIO,
        load: Callable[[], Completer],
        log: Callable[[str], None],
    ) -> None:
        self._source = source
        self._writer = FrameWriter(sink)
        self._load = load
        self._log = log
        self._documents: dict[str, _Open] = {}
        self._encoding: Encoding = "utf-16"
        self._initialized = self._shut_down = False
        self._settings = Settings()
        self._pulls = self._progress = self._as_list = False
        self._calls: dict[str, Callable[[Any], None]] = {}
        self._completer: Completer | None = None
        self._told_loading = False
        self._gone = threading.Event()
        self._numbers = itertools.count()
        self._failure: str | None = None
        self._work: SimpleQueue[_Request | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._worker = threading.Thread(target=self._run_worker, name="kvq-lsp", daemon=True)

    def run(self) -> int:
        """Serves until `exit` or the end of input; the exit code."""
        self._worker.start()
        code = 1
        for message in read_frames(self._source, self._log):
            if isinstance(message, RpcError):
                self._answer(None, error=message)
            elif message.get("method") == "exit":
                code = 0 if self._shut_down else 1
                break
            else:
                self._take(message)
        self._gone.set()
        with self._lock:
            for one in self._documents.values():
                if one.request is not None:
                    one.request.cancelled = True
        self._work.put(None)
        self._worker.join(10.0)
        self._writer.close()
        return code

    # What comes in

    def _take(self, message: dict[str, Any]) -> None:
        method, params, number = message.get("method"), message.get("params"), message.get("id")
        if not isinstance(method, str):
            if "result" not in message and "error" not in message:
                self._answer(None, error=RpcError(INVALID_REQUEST, "the message has no method"))
            elif (answered := self._calls.pop(str(number), None)) is not None:
                answered(message.get("result"))
            return
        try:
            result = self._handle(method, params if isinstance(params, dict) else {}, number)
        except RpcError as error:
            if number is not None:
                self._answer(number, error=error)
            else:
                self._log(f"{method}: {error}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._log(f"{method}: {type(error).__name__}: {error}")
            if number is not None:
                self._answer(number, error=RpcError(INVALID_PARAMS, f"{method}: {error!r}"))
        else:
            if number is not None and result is not _LATER:
                self._answer(number, result=result)

    def _handle(self, method: str, params: dict[str, Any], number: Any) -> Any:
        if method == "initialize":
            if self._initialized:
                raise RpcError(INVALID_REQUEST, "initialize came twice")
            return self._initialize(params)
        if not self._initialized:
            raise RpcError(NOT_INITIALIZED, "initialize comes first")
        if self._shut_down:
            raise RpcError(INVALID_REQUEST, "the server is shut down; only exit may follow")
        handler = self._handlers().get(method)
        if handler is None:
            if number is not None:
                raise RpcError(METHOD_NOT_FOUND, f"{method} is not known here")
            return None
        return handler(params, number)

    def _handlers(self) -> dict[str, Callable[[dict[str, Any], Any], Any]]:
        return {
            "initialized": self._on_initialized,
            "shutdown": self._on_shutdown,
            "textDocument/didOpen": self._on_open,
            "textDocument/didChange": self._on_change,
            "textDocument/didClose": self._on_close,
            "textDocument/inlineCompletion": self._on_completion,
            "textDocument/completion": self._on_list,
            "workspace/didChangeConfiguration": self._on_configuration,
            "$/cancelRequest": self._on_cancel,
            "workspace/executeCommand": self._on_command,
        }

    def _initialize(self, params: dict[str, Any]) -> dict[str, Any]:
        capabilities = params.get("capabilities", {})
        offered = capabilities.get("general", {}).get("positionEncodings") or ["utf-16"]
        found = next((one for one in offered if one in ENCODINGS), "utf-16")
        self._encoding = cast(Encoding, found)
        self._pulls = bool(capabilities.get("workspace", {}).get("configuration"))
        self._progress = bool(capabilities.get("window", {}).get("workDoneProgress"))
        options = params.get("initializationOptions") or {}
        self._settings = self._settings.changed(options, self._log)
        self._as_list = bool(options.get("fallbackCompletion"))
        if isinstance(parent := params.get("processId"), int):
            threading.Thread(target=self._watch, args=(parent,), daemon=True).start()
        self._initialized = True
        offers: dict[str, Any] = {
            "positionEncoding": self._encoding,
            "textDocumentSync": {"openClose": True, "change": 2},
            "inlineCompletionProvider": {},
            "executeCommandProvider": {"commands": ["kvq.toggle", "kvq.explain"]},
        }
        # For editors that know no inline completion: beside their own, asked for by a key.
        offers |= {"completionProvider": {}} if self._as_list else {}
        return {"capabilities": offers, "serverInfo": {"name": "kvq", "version": __version__}}

    def _watch(self, parent: int) -> None:
        """Ends the process once its editor has died without a word."""
        while not self._gone.wait(PARENT_CHECK_S):
            try:
                os.kill(parent, 0)
            except ProcessLookupError:
                self._log("the editor has gone")
                self._leave()
            except PermissionError:
                pass

    def _on_initialized(self, _: dict[str, Any], __: Any) -> None:
        self._pull()
        if self._progress and self._completer is None:
            self._call("window/workDoneProgress/create", {"token": LOADING}, self._tell_loading)

    def _tell_loading(self, _: Any) -> None:
        with self._lock:
            self._told_loading = self._completer is None
            if self._told_loading:
                self._tell({"kind": "begin", "title": "kvq: loading the model"})

    def _tell(self, value: dict[str, Any]) -> None:
        self._writer.send({"method": "$/progress", "params": {"token": LOADING, "value": value}})

    def _pull(self) -> None:
        """Asks the client for its settings, where it can be asked."""
        if self._pulls:
            items = {"items": [{"section": "kvq"}]}
            self._call("workspace/configuration", items, self._configured)

    def _configured(self, result: Any) -> None:
        if isinstance(result, list) and result:
            self._settings = self._settings.changed(result[0], self._log)

    def _on_configuration(self, params: dict[str, Any], _: Any) -> None:
        wanted = params.get("settings")
        if isinstance(wanted, dict):
            self._settings = self._settings.changed(wanted.get("kvq", wanted), self._log)
        self._pull()

    def _call(self, method: str, params: dict[str, Any], then: Callable[[Any], None]) -> None:
        """A request of ours; `then` gets its result."""
        number = f"kvq-{next(self._numbers)}"
        self._calls[number] = then
        self._writer.send({"id": number, "method": method, "params": params})

    def _on_shutdown(self, _: dict[str, Any], __: Any) -> None:
        self._shut_down = True

    def _on_open(self, params: dict[str, Any], _: Any) -> None:
        item = params["textDocument"]
        with self._lock:
            self._supersede(item["uri"])
            text = str(item["text"])
            self._documents[item["uri"]] = _Open(
                Document(text), int(item["version"]), binary="\0" in text
            )

    def _on_change(self, params: dict[str, Any], _: Any) -> None:
        item = params["textDocument"]
        with self._lock:
            known = self._documents.get(item["uri"])
            if known is None:
                self._log(f"a change of {item['uri']}, which is not open, is left out")
                return
            self._supersede(item["uri"])
            known.shown.clear()
            for change in params["contentChanges"]:
                text = str(change["text"])
                known.binary |= "\0" in text
                if "range" in change:
                    start, end = (_position(change["range"][side]) for side in ("start", "end"))
                    if known.typed and not known.typed.survives(start.line, end.line, text):
                        known.typed = None
                    known.document.replace(start, end, text, self._encoding)
                else:
                    known.document, known.typed = Document(text), None
            known.version = int(item["version"])

    def _on_close(self, params: dict[str, Any], _: Any) -> None:
        with self._lock:
            self._supersede(params["textDocument"]["uri"])
            self._documents.pop(params["textDocument"]["uri"], None)

    def _on_list(self, params: dict[str, Any], number: Any) -> Any:
        if not self._as_list:
            raise RpcError(METHOD_NOT_FOUND, "textDocument/completion was not asked for")
        return self._on_completion({**params, "context": None}, number, as_list=True)

    def _on_completion(self, params: dict[str, Any], number: Any, *, as_list: bool = False) -> Any:
        uri, position = params["textDocument"]["uri"], _position(params["position"])
        context = params.get("context") or {}
        selected = context.get("selectedCompletionInfo") or {}
        with self._lock:
            known = self._documents.get(uri)
            why_not = self._why_not(uri, known)
            if known is None or why_not is not None:
                return self._nothing(known, why_not or "this document is not open")
            place = known.document.place(position, self._encoding)
            if len(known.document.line(place[0])) > MOST_LINE:
                return self._nothing(known, "the line is too long")
            shown = known.shown.get(place)
            if shown is None and known.typed is not None:
                shown = known.typed.rest(known.document, place)
            if shown is not None and not selected:
                known.last = known.shown[place] = shown
                return self._items(known.document, place, shown, "", as_list=as_list)
            self._supersede(uri)
            chosen = str(selected.get("text", ""))
            request = _Request(number, uri, known.version, place, chosen, as_list)
            known.request = request
        self._work.put(request)
        return _LATER

    def _on_cancel(self, params: dict[str, Any], _: Any) -> None:
        with self._lock:
            for known in self._documents.values():
                if known.request is not None and known.request.id == params.get("id"):
                    known.request.cancelled = True

    def _on_command(self, params: dict[str, Any], _: Any) -> Any:
        command = params.get("command")
        if command == "kvq.toggle":
            self._settings = replace(self._settings, enabled=not self._settings.enabled)
            return self._settings.enabled
        if command == "kvq.explain":
            uri = (params.get("arguments") or [""])[0]
            known = self._documents.get(uri)
            last = None if known is None else known.last
            return None if last is None else _explained(last)
        raise RpcError(INVALID_PARAMS, f"{command} is no command of kvq")

    # What goes out

    def _why_not(self, uri: str, known: _Open | None) -> str | None:
        """Why there is no completion, before anybody is asked for one."""
        if known is None:
            return "this document is not open"
        if not self._settings.enabled:
            return "completion is switched off"
        if (ignored := self._settings.why_not(uri)) is not None:
            return ignored
        if known.binary:
            return "the document is no text"
        if self._completer is None:
            return self._failure or "the model is loading"
        return None

    def _nothing(self, known: _Open | None, why_not: str) -> None:
        if known is not None:
            known.last = Completion(drafts=(), why_not=why_not)

    def _supersede(self, uri: str) -> None:
        known = self._documents.get(uri)
        if known is not None and known.request is not None:
            known.request.superseded = True

    def _run_worker(self) -> None:
        try:
            completer = self._load()
        except Exception as error:  # noqa: BLE001  the editor goes on without completions
            self._log(f"no completions: {error}")
            self._failure = f"there is no model: {error}"
            completer = None
        with self._lock:
            self._completer = completer
            if self._told_loading:
                self._tell({"kind": "end"})
        while (request := self._next(completer)) is not None:
            self._complete(cast(Completer, completer), request)
        if completer is not None:
            completer.close()

    def _next(self, completer: Completer | None) -> _Request | None:
        """The next request; meanwhile what edits left stale is encoded again, a piece at a time."""
        left = completer is not None
        while left:
            try:
                return self._work.get(timeout=IDLE_S)
            except Empty:
                pass
            try:
                left = bool(cast(Completer, completer).refresh(IDLE_TOKENS, self._awaited))
            except Exception as error:  # noqa: BLE001  told in the log; completions go on
                self._log(f"idle time was not used: {error}")
                left = False
        return self._work.get()

    def _awaited(self) -> bool:
        """Whether somebody waits for the worker."""
        return not self._work.empty()

    def _complete(self, completer: Completer, request: _Request) -> None:
        with self._lock:
            known = self._documents.get(request.uri)
            if known is None or request.ends():
                self._end(request)
                return
            # What the reader changes meanwhile is another document to this request.
            document = known.document.copy()
        try:
            found = completer.complete(document, request.place, cancel=request.ends)
        except Exception as error:  # noqa: BLE001  told in the log, never in a pop-up
            self._log(f"completion failed: {error}")
            found = Completion(drafts=(), why_not=str(error))
        with self._lock:
            known = self._documents.get(request.uri)
            if known is None or request.ends() or known.version != request.version:
                self._end(request)
                return
            known.request, known.last = None, found
            if found.drafts:
                known.shown[request.place] = found
                known.typed = TypedThrough(document, request.place, found)
            items = self._items(
                document, request.place, found, request.selected, as_list=request.as_list
            )
            self._answer(request.id, result=items)

    def _end(self, request: _Request) -> None:
        """Answers a request whose answer nobody wants: each gets exactly one."""
        if request.cancelled:
            self._answer(request.id, error=RpcError(CANCELLED, "cancelled"))
        else:
            self._answer(request.id, result=None)

    def _items(
        self,
        document: Document,
        place: tuple[int, int],
        found: Completion,
        selected: str,
        *,
        as_list: bool,
    ) -> dict[str, Any] | None:
        line, column = place
        start = _word_start(document.line(line), column)
        typed = document.line(line)[start:column]
        rows = [
            {"line": line, "character": document.units(line, at, self._encoding)}
            for at in (start, column)
        ]
        texts = [typed + draft.text for draft in found.drafts]
        texts = [text for text in texts if text.startswith(selected)][: self._settings.drafts]
        replaced = {"start": rows[0], "end": rows[1]}
        if not texts:
            return None
        if as_list:
            return {"isIncomplete": True, "items": [_list_item(one, replaced) for one in texts]}
        return {"items": [{"insertText": text, "range": replaced} for text in texts]}

    def _leave(self) -> None:
        os._exit(1)

    def _answer(self, number: Any, *, result: Any = None, error: RpcError | None = None) -> None:
        if error is None:
            self._writer.send({"id": number, "result": result})
        else:
            self._writer.send({"id": number, "error": {"code": error.code, "message": str(error)}})


_LATER = object()


def _list_item(text: str, replaced: dict[str, Any]) -> dict[str, Any]:
    """An item of `textDocument/completion`."""
    edit = {"range": replaced, "newText": text}
    return {"label": text.strip(), "filterText": text, "detail": "kvq", "textEdit": edit}


def _position(value: dict[str, Any]) -> Position:
    return Position(int(value["line"]), int(value["character"]))


def _word_start(line: str, column: int) -> int:
    """Where the word that ends at `column` begins; the line's own beginning on a blank one."""
    if not line[:column].strip():
        return 0
    start = column
    while start > 0 and (line[start - 1].isalnum() or line[start - 1] == "_"):
        start -= 1
    return start


def _explained(last: Completion) -> dict[str, Any]:
    """What the last completion cost, or why there was none."""
    return {
        "reusedTokens": last.reused_tokens,
        "encodedTokens": last.encoded_tokens,
        "ms": last.ms,
        "drafts": [{"text": one.text, "logprob": one.logprob} for one in last.drafts],
        "whyNot": last.why_not,
    }
