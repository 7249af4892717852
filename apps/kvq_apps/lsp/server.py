"""`kvq lsp`: inline completions for editors, one request alive per document.

The reading thread applies document notifications in their order and answers what needs no model;
one worker writes completions, and in idle time reads the document that they may be asked of next.
A newer request of a document supersedes its older one, and a cancel reaches the engine before its
next pass. Whatever goes wrong becomes a line in the log and a null answer with a reason, never a
pop-up; only settings that wait for trust are told in one. Protocol: LSP 3.18,
textDocument/inlineCompletion.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO, Protocol, cast

from kvq import __version__
from kvq.json_values import is_array, is_object
from kvq_apps.completion.document import Document, Encoding
from kvq_apps.completion.drafts import Completion
from kvq_apps.flags import told
from kvq_apps.lsp.connection import (
    CANCELLED,
    INVALID_PARAMS,
    INVALID_REQUEST,
    LATER,
    METHOD_NOT_FOUND,
    NOT_INITIALIZED,
    Connection,
    RpcError,
)
from kvq_apps.lsp.documents import (
    Counts,
    OpenDocument,
    Request,
    Selected,
    TypedThrough,
    before_place,
    explained,
    items,
    position_of,
)
from kvq_apps.lsp.progress import Progress
from kvq_apps.lsp.settings import Settings
from kvq_apps.processes import is_alive

# Idle time begins so long after the last answer or change.
IDLE_S = 0.3
# Of a document with so many tokens left to read it is shown how far that is.
SHOWN_TOKENS = 256
PARENT_CHECK_S = 2.0
# The progress that an editor may show.
LOADING, READING = "kvq-loading", "kvq-reading"
# The type of a message that warns.
_WARNING = 2
ENCODINGS = ("utf-8", "utf-16", "utf-32")
# A line that no person has written is not completed.
MOST_LINE = 20_000


class Completer(Protocol):
    """Who completes: `completion.completion_engine.CompletionEngine`, or a stand-in."""

    def complete(
        self, document: Document, place: tuple[int, int], *, cancel: Callable[[], bool]
    ) -> Completion: ...

    def read(
        self,
        document: Document,
        place: tuple[int, int],
        *,
        cancel: Callable[[], bool],
        progress: Callable[[int, int], None],
    ) -> bool: ...

    def close(self) -> None: ...


class _Changed:
    """What tells the worker that another document may be the one to read."""


_CHANGED = _Changed()


class LanguageServer:
    """One client. `load` makes the completer, in the background; `log` takes lines.

    The editor shows `notice` once, as a message that nobody has to answer.
    """

    def __init__(
        self,
        source: BinaryIO,
        sink: BinaryIO,
        load: Callable[[], Completer],
        log: Callable[[str], None],
        notice: str | None = None,
    ) -> None:
        self._notice = notice
        self._client = Connection(source, sink, log)
        self._load = load
        self._log = log
        self._handlers: dict[str, Callable[[dict[str, Any], Any], Any]] = {
            "initialized": self._on_initialized,
            "shutdown": self._on_shutdown,
            "textDocument/didOpen": self._on_open,
            "textDocument/didChange": self._on_change,
            "textDocument/didClose": self._on_close,
            "textDocument/didFocus": self._on_focus,
            "textDocument/inlineCompletion": self._on_completion,
            "textDocument/completion": self._on_list,
            "workspace/didChangeConfiguration": self._on_configuration,
            "$/cancelRequest": self._on_cancel,
            "workspace/executeCommand": self._on_command,
            "textDocument/didPartiallyAcceptCompletion": self._on_part,
        }
        self._documents: dict[str, OpenDocument] = {}
        # Where somebody was last, and whether the editor tells that.
        self._focused: str | None = None
        self._tells_focus = False
        self._waiting: dict[int | str, Request] = {}
        self._encoding: Encoding = "utf-16"
        self._initialized = self._shut_down = False
        self._settings = Settings()
        self._pulls = self._shows_progress = self._as_list = False
        self._completer: Completer | None = None
        self._loading: Progress | None = None
        self._gone = threading.Event()
        self._failure: str | None = None
        self._counts = Counts()
        # A request; that documents have changed; None: the end.
        self._work: SimpleQueue[Request | _Changed | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._worker = threading.Thread(target=self._run_worker, name="kvq-lsp", daemon=True)

    def run(self) -> int:
        """Serves until `exit` or the end of input; the exit code."""
        left = self._client.serve(self._handle)
        self._gone.set()
        with self._lock:
            for request in self._waiting.values():
                request.cancelled = True
        self._work.put(None)
        if self._initialized:
            self._worker.join(10.0)
        self._client.close()
        return 0 if left and self._shut_down else 1

    # What comes in

    def _handle(self, method: str, params: dict[str, Any], number: Any) -> Any:
        if method == "initialize":
            if self._initialized:
                raise RpcError(INVALID_REQUEST, "initialize came twice")
            return self._initialize(params)
        if not self._initialized:
            raise RpcError(NOT_INITIALIZED, "initialize comes first")
        if self._shut_down:
            raise RpcError(INVALID_REQUEST, "the server is shut down; only exit may follow")
        handler = self._handlers.get(method)
        if handler is None:
            if number is not None:
                raise RpcError(METHOD_NOT_FOUND, f"{method} is not known here")
            return None
        return handler(params, number)

    def _initialize(self, params: dict[str, Any]) -> dict[str, Any]:
        capabilities = params.get("capabilities", {})
        offered = capabilities.get("general", {}).get("positionEncodings") or ["utf-16"]
        found = next((one for one in offered if one in ENCODINGS), "utf-16")
        self._encoding = cast(Encoding, found)
        self._pulls = bool(capabilities.get("workspace", {}).get("configuration"))
        self._shows_progress = bool(capabilities.get("window", {}).get("workDoneProgress"))
        options: dict[str, Any] = params.get("initializationOptions") or {}
        self._settings = self._settings.changed(options, self._log)
        self._as_list = bool(options.get("fallbackCompletion"))
        if isinstance(parent := params.get("processId"), int):
            threading.Thread(target=self._watch, args=(parent,), daemon=True).start()
        self._initialized = True
        # What loads a model imports much; the editor has its answer first.
        self._worker.start()
        offers: dict[str, Any] = {
            "positionEncoding": self._encoding,
            "textDocumentSync": {"openClose": True, "change": 2},
            "inlineCompletionProvider": {},
            "executeCommandProvider": {"commands": list(self._commands())},
        }
        # For editors that know no inline completion: beside their own, asked for by a key.
        offers |= {"completionProvider": {}} if self._as_list else {}
        return {"capabilities": offers, "serverInfo": {"name": "kvq", "version": __version__}}

    def _watch(self, parent: int) -> None:
        """Ends the process once its editor has died without a word."""
        while not self._gone.wait(PARENT_CHECK_S):
            if not is_alive(parent):
                self._log("the editor has gone")
                os._exit(1)

    def _on_initialized(self, _: dict[str, Any], __: Any) -> None:
        self._pull()
        if self._notice is not None:
            shown = {"type": _WARNING, "message": f"kvq: {self._notice}"}
            self._client.notify("window/showMessage", shown)
        with self._lock:
            if self._completer is None and self._failure is None:
                self._loading = self._progress(LOADING, "kvq: loading the model")

    def _progress(self, token: str, title: str) -> Progress | None:
        """Work that is shown from now on, where the client shows any."""
        if not self._shows_progress:
            return None
        return Progress(token, title, self._client)

    def _pull(self) -> None:
        """Asks the client for its settings, where it can be asked."""
        if self._pulls:
            items = {"items": [{"section": "kvq"}]}
            self._client.call("workspace/configuration", items, self._configured)

    def _configured(self, result: Any) -> None:
        if is_array(result) and result:
            self._settings = self._settings.changed(result[0], self._log)

    def _on_configuration(self, params: dict[str, Any], _: Any) -> None:
        wanted = params.get("settings")
        if is_object(wanted):
            self._settings = self._settings.changed(wanted.get("kvq", wanted), self._log)
        self._pull()

    def _on_shutdown(self, _: dict[str, Any], __: Any) -> None:
        self._shut_down = True

    def _on_open(self, params: dict[str, Any], _: Any) -> None:
        item = params["textDocument"]
        with self._lock:
            self._supersede(item["uri"])
            text = str(item["text"])
            self._documents[item["uri"]] = OpenDocument.of(text, int(item["version"]))
            # An editor that tells where somebody is opens others only to look into them.
            if not self._tells_focus or self._focused == item["uri"]:
                self._focus(item["uri"])

    def _on_change(self, params: dict[str, Any], _: Any) -> None:
        item = params["textDocument"]
        with self._lock:
            known = self._documents.get(item["uri"])
            if known is None:
                self._log(f"a change of {item['uri']}, which is not open, is left out")
                return
            known.change(params["contentChanges"], item["version"], self._encoding)
            self._focus(item["uri"])

    def _on_close(self, params: dict[str, Any], _: Any) -> None:
        with self._lock:
            self._supersede(params["textDocument"]["uri"])
            self._documents.pop(params["textDocument"]["uri"], None)

    def _on_focus(self, params: dict[str, Any], _: Any) -> None:
        """As GitHub's language server is told it; the cursor's `position` may stand beside it."""
        uri, position = params["textDocument"]["uri"], params.get("position")
        with self._lock:
            self._tells_focus = True
            if position is not None and (known := self._documents.get(uri)) is not None:
                known.place = known.document.place(position_of(position), self._encoding)
            self._focus(uri)

    def _focus(self, uri: str) -> None:
        """Somebody is in this document now: idle time is for it."""
        self._focused = uri
        self._work.put(_CHANGED)

    def _on_list(self, params: dict[str, Any], number: Any) -> Any:
        if not self._as_list:
            raise RpcError(METHOD_NOT_FOUND, "textDocument/completion was not asked for")
        return self._on_completion({**params, "context": None}, number, as_list=True)

    def _on_completion(self, params: dict[str, Any], number: Any, *, as_list: bool = False) -> Any:
        if number is None:
            return None  # nobody can be answered
        uri, position = params["textDocument"]["uri"], position_of(params["position"])
        context: dict[str, Any] = params.get("context") or {}
        selected = Selected.read(context.get("selectedCompletionInfo"))
        with self._lock:
            known = self._documents.get(uri)
            why_not = self._why_not(uri, known)
            if known is None or why_not is not None:
                return self._nothing(known, why_not or "this document is not open")
            place = known.document.place(position, self._encoding)
            if len(known.document.line(place[0])) > MOST_LINE:
                return self._nothing(known, "the line is too long")
            shown = known.known_at(place)
            if shown is not None and selected is None:
                known.last = known.shown[place] = shown
                return self._items(uri, known.document, place, shown, as_list=as_list)
            known.supersede()
            known.place = place
            request = Request(number, uri, known.version, place, selected, as_list)
            known.request = self._waiting[number] = request
        self._work.put(request)
        return LATER

    def _on_cancel(self, params: dict[str, Any], _: Any) -> None:
        with self._lock:
            if (request := self._waiting.get(params["id"])) is not None:
                request.cancelled = True

    def _on_command(self, params: dict[str, Any], _: Any) -> Any:
        command = self._commands().get(params["command"])
        if command is None:
            raise RpcError(INVALID_PARAMS, f"{params['command']} is no command of kvq")
        return command(*(params.get("arguments") or ()))

    def _commands(self) -> dict[str, Callable[..., Any]]:
        return {
            "kvq.toggle": self._toggle,
            "kvq.explain": self._explain,
            "kvq.accepted": self._accepted,
        }

    def _toggle(self, *_: Any) -> bool:
        self._settings = replace(self._settings, enabled=not self._settings.enabled)
        return self._settings.enabled

    def _explain(self, uri: str = "", *_: Any) -> dict[str, Any] | None:
        """What the last completion of a document cost, or why there was none; all that was taken.

        What is counted stays in this process.
        """
        with self._lock:
            known = self._documents.get(uri)
            last = None if known is None else known.last
            return None if last is None else explained(last) | {"counts": asdict(self._counts)}

    def _accepted(self, uri: str, taken: str = "all", *_: Any) -> None:
        """A suggestion of those shown last was put into a document: `all` of it, or a `part`."""
        if taken not in ("all", "part"):
            raise ValueError(f"{taken!r} of a suggestion: it is all or part")
        with self._lock:
            known = self._documents.get(uri)
            if known is not None:
                self._counts.take(known, taken)

    def _on_part(self, params: dict[str, Any], _: Any) -> None:
        """As GitHub's language server is told it: the item is one that was shown."""
        self._accepted(params["item"]["command"]["arguments"][0], "part")

    # What goes out

    def _why_not(self, uri: str, known: OpenDocument | None) -> str | None:
        """Why there is no completion, before anybody is asked for one."""
        if known is None:
            return "this document is not open"
        if not self._settings.enabled:
            return "completion is switched off"
        if (left_alone := self._settings.why_not(uri) or known.why_not()) is not None:
            return left_alone
        if self._completer is None:
            return self._failure or "the model is loading"
        return None

    def _nothing(self, known: OpenDocument | None, why_not: str) -> None:
        if known is not None:
            known.last = Completion(drafts=(), why_not=why_not)

    def _supersede(self, uri: str) -> None:
        known = self._documents.get(uri)
        if known is not None:
            known.supersede()

    def _run_worker(self) -> None:
        try:
            completer = self._load()
        except Exception as error:  # noqa: BLE001  the editor goes on without completions
            self._log(f"no completions: {told(error)}")
            self._failure = f"there is no model: {told(error)}"
            completer = None
        with self._lock:
            self._completer = completer
            if self._loading is not None:
                self._loading.end()
        while (request := self._next(completer)) is not None:
            self._complete(cast(Completer, completer), request)
        if completer is not None:
            completer.close()

    def _next(self, completer: Completer | None) -> Request | None:
        """The next request. In idle time meanwhile a document is read."""
        idle = completer is not None
        while True:
            try:
                work = self._work.get(timeout=IDLE_S if idle else None)
            except Empty:
                idle = self._use_idle_time(cast(Completer, completer))
                continue
            if not isinstance(work, _Changed):
                return work
            idle = completer is not None

    def _use_idle_time(self, completer: Completer) -> bool:
        """Reads where a completion may be asked for next; whether anything is left of that."""
        expected = self._expected()
        if expected is None:
            return False
        shown: Progress | None = None

        def report(done: int, total: int) -> None:
            nonlocal shown
            if shown is None and total - done > SHOWN_TOKENS:
                token = f"{READING}-{self._client.number()}"
                shown = self._progress(token, "kvq: reading the document")
            if shown is not None:
                shown.report(100 * done // total)

        try:
            return not completer.read(*expected, cancel=self._awaited, progress=report)
        except Exception as error:  # noqa: BLE001  told in the log; completions go on
            self._log(f"idle time was not used: {told(error)}")
            return False
        finally:
            if shown is not None:
                shown.end()

    def _expected(self) -> tuple[Document, tuple[int, int]] | None:
        """Where somebody is, if a completion there could be asked for."""
        with self._lock:
            uri = self._focused or ""
            known = self._documents.get(uri)
            if known is None or self._why_not(uri, known) is not None:
                return None
            document, (line, column) = known.document.copy(), known.place
        line = min(line, document.num_lines - 1)
        return None if len(document.line(line)) > MOST_LINE else (document, (line, column))

    def _awaited(self) -> bool:
        """Whether somebody waits for the worker."""
        return not self._work.empty()

    def _complete(self, completer: Completer, request: Request) -> None:
        with self._lock:
            known = self._documents.get(request.uri)
            if known is None or request.ends():
                self._end(request)
                return
            # What the reader changes meanwhile is another document to this request.
            document = known.document.copy()
        place = request.place
        if request.selected is not None:
            place = request.selected.put_into(document, self._encoding)
        try:
            found = completer.complete(document, place, cancel=request.ends)
        except Exception as error:  # noqa: BLE001  told in the log, never in a pop-up
            self._log(f"completion failed: {told(error)}")
            found = Completion(drafts=(), why_not=told(error))
        with self._lock:
            known = self._documents.get(request.uri)
            if known is None or request.ends() or known.version != request.version:
                self._end(request)
                return
            known.request, known.last = None, found
            self._waiting.pop(request.id, None)
            if found.drafts:
                known.taken = "nothing"
                self._counts.shown += 1
            if found.drafts and request.selected is None:
                known.shown[place] = found
                known.typed = TypedThrough(document, place, found)
            shown = self._items(
                request.uri, document, place, found, request.selected, as_list=request.as_list
            )
            self._client.answer(request.id, result=shown)

    def _end(self, request: Request) -> None:
        """Answers a request whose answer nobody wants: each gets exactly one."""
        self._waiting.pop(request.id, None)
        if request.cancelled:
            self._client.answer(request.id, error=RpcError(CANCELLED, "cancelled"))
        else:
            self._client.answer(request.id, result=None)

    def _items(
        self,
        uri: str,
        document: Document,
        place: tuple[int, int],
        found: Completion,
        selected: Selected | None = None,
        *,
        as_list: bool,
    ) -> dict[str, Any] | None:
        """The items that show `found`; each begins with what stands in the range it replaces."""
        if not found.drafts:
            return None
        if selected is None:
            before, replaced = before_place(document, place, self._encoding)
        else:
            before, replaced = selected.text, selected.range
        texts = [before + draft.text for draft in found.drafts[: self._settings.drafts]]
        return items(texts, replaced, uri, as_list=as_list)
