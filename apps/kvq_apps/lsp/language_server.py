"""`kvq lsp`: inline completions and next edits for editors, one live request of each per document.

The reading thread applies document notifications in their order and answers what needs no model.
One worker writes completions, and in idle time reads the document that is likely to be asked about.
A newer request of a document supersedes its older one, and a cancel reaches the engine before its
next pass. Any error becomes a line in the log and a null answer with a reason, never a pop-up.
Protocol: LSP 3.18, textDocument/inlineCompletion.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import chain
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

from kvq import __version__
from kvq.json_values import is_array, is_object
from kvq_apps.completion.document import Encoding, LineChange, NamedText, TextDocument
from kvq_apps.completion.edit_history import EditHistory, NextEdit
from kvq_apps.completion.other_files import related
from kvq_apps.completion.suggestions import Completion
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
    CompletionRequest,
    OpenDocument,
    SelectedCompletion,
    TypedSuggestions,
    edit_items,
    explanation,
    items,
    position_of,
    word_before,
)
from kvq_apps.lsp.lsp_settings import LspSettings
from kvq_apps.lsp.progress import WorkDoneProgress
from kvq_apps.processes import is_alive
from kvq_apps.settings.flags import format_error

if TYPE_CHECKING:
    from kvq_apps.completion.completion_engine import CompletionEngine
    from kvq_apps.completion.remote_completer import RemoteCompleter

    Completer: TypeAlias = CompletionEngine | RemoteCompleter

# Idle time begins this long after the last answer or change.
IDLE_S = 0.3
# Progress is shown for a document with more unread tokens than this.
SHOWN_TOKENS = 256
PARENT_CHECK_S = 2.0
# The kinds of progress that an editor may show.
LOADING, READING = "kvq-loading", "kvq-reading"
ENCODINGS = ("utf-8", "utf-16", "utf-32")
# The kind of request that an editor makes by itself, in LSP 3.18.
AUTOMATIC = 2
# A cursor that moves so many lines still needs the same parts of other files.
SAME_LINES = 10
# A longer line was not written by a person; it is not completed.
MOST_LINE = 20_000
_STILL_LOADING = "the model is loading"


class _DocumentsChanged:
    """Tells the worker that another document may be the one to read."""


_DOCUMENTS_CHANGED = _DocumentsChanged()


class LanguageServer:
    """Serves one client. `load` makes the completer in the background; `log` takes lines.

    `configure` gets the editor's `initializationOptions` before `load` is called.
    """

    def __init__(
        self,
        source: BinaryIO,
        sink: BinaryIO,
        load: "Callable[[], Completer]",
        log: Callable[[str], None],
        configure: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._client = Connection(source, sink, log)
        self._load = load
        self._configure = configure
        self._log = log
        self._handlers: dict[str, Callable[[dict[str, Any], Any], Any]] = {
            "initialized": self._on_initialized,
            "shutdown": self._on_shutdown,
            "textDocument/didOpen": self._on_open,
            "textDocument/didChange": self._on_change,
            "textDocument/didClose": self._on_close,
            "textDocument/didFocus": self._on_focus,
            "textDocument/inlineCompletion": self._on_completion,
            "textDocument/copilotInlineEdit": self._on_next_edit,
            "textDocument/completion": self._on_list,
            "workspace/didChangeConfiguration": self._on_configuration,
            "$/cancelRequest": self._on_cancel,
            "workspace/executeCommand": self._on_command,
        }
        self._documents: dict[str, OpenDocument] = {}
        self._history = EditHistory()
        # What was chosen of other files: for which versions of them, and near which line.
        self._related: tuple[tuple[object, ...], int, tuple[NamedText, ...]] = (), 0, ()
        # Why there can be no next edits, once it was said.
        self._said: str | None = None
        # The document with the cursor, and whether the editor reports it.
        self._focused: str | None = None
        self._tells_focus = False
        self._waiting: dict[int | str, CompletionRequest] = {}
        self._encoding: Encoding = "utf-16"
        self._initialized = self._shut_down = False
        self._settings = LspSettings()
        self._can_ask_settings = self._shows_progress = self._as_list = False
        self._completer: Completer | None = None
        self._loading: WorkDoneProgress | None = None
        self._gone = threading.Event()
        self._failure: str | None = None
        # A request; that documents have changed; None: the end.
        self._work: SimpleQueue[CompletionRequest | _DocumentsChanged | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._worker = threading.Thread(target=self._run_worker, name="kvq-lsp", daemon=True)

    def run(self) -> int:
        """Serves until `exit` or the end of input; returns the exit code."""
        exited = self._client.serve(self._handle)
        self._gone.set()
        with self._lock:
            for request in self._waiting.values():
                request.cancelled = True
        self._work.put(None)
        if self._initialized:
            self._worker.join(10.0)
        self._client.close()
        return 0 if exited and self._shut_down else 1

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
        encoding = next((name for name in offered if name in ENCODINGS), "utf-16")
        self._encoding = cast(Encoding, encoding)
        self._can_ask_settings = bool(capabilities.get("workspace", {}).get("configuration"))
        self._shows_progress = bool(capabilities.get("window", {}).get("workDoneProgress"))
        options: dict[str, Any] = params.get("initializationOptions") or {}
        self._settings = self._settings.updated(options, self._log)
        self._as_list = bool(options.get("fallbackCompletion"))
        if self._configure is not None:
            self._configure(options)
        if isinstance(parent := params.get("processId"), int):
            threading.Thread(target=self._watch_editor, args=(parent,), daemon=True).start()
        self._initialized = True
        # Loading a model imports much; the editor gets its answer first.
        self._worker.start()
        offers: dict[str, Any] = {
            "positionEncoding": self._encoding,
            "textDocumentSync": {"openClose": True, "change": 2},
            "inlineCompletionProvider": {},
            "executeCommandProvider": {"commands": list(self._commands())},
        }
        # For editors without inline completion: items beside their own, asked for by a key.
        offers |= {"completionProvider": {}} if self._as_list else {}
        return {"capabilities": offers, "serverInfo": {"name": "kvq", "version": __version__}}

    def _watch_editor(self, parent: int) -> None:
        """Ends the process once its editor has died without a word."""
        while not self._gone.wait(PARENT_CHECK_S):
            if not is_alive(parent):
                self._log("the editor has gone")
                os._exit(1)

    def _on_initialized(self, _: dict[str, Any], __: Any) -> None:
        self._ask_settings()
        with self._lock:
            if self._completer is None and self._failure is None:
                self._loading = self._progress(LOADING, "kvq: loading the model")

    def _progress(self, token: str, title: str) -> WorkDoneProgress | None:
        """Starts a progress, where the client shows any."""
        if not self._shows_progress:
            return None
        return WorkDoneProgress(token, title, self._client)

    def _ask_settings(self) -> None:
        """Asks the client for its settings, where it can be asked."""
        if self._can_ask_settings:
            items = {"items": [{"section": "kvq"}]}
            self._client.call("workspace/configuration", items, self._configured)

    def _configured(self, result: Any) -> None:
        if is_array(result) and result:
            self._settings = self._settings.updated(result[0], self._log)

    def _on_configuration(self, params: dict[str, Any], _: Any) -> None:
        settings = params.get("settings")
        if is_object(settings):
            self._settings = self._settings.updated(settings.get("kvq", settings), self._log)
        self._ask_settings()

    def _on_shutdown(self, _: dict[str, Any], __: Any) -> None:
        self._shut_down = True

    def _on_open(self, params: dict[str, Any], _: Any) -> None:
        item = params["textDocument"]
        with self._lock:
            self._supersede(item["uri"])
            text = str(item["text"])
            self._documents[item["uri"]] = OpenDocument.of(text, int(item["version"]))
            # Its version may be that of an earlier text.
            self._related = (), 0, ()
            # An editor that reports the focus opens other documents only to look into them.
            if not self._tells_focus or self._focused == item["uri"]:
                self._focus(item["uri"])

    def _on_change(self, params: dict[str, Any], _: Any) -> None:
        item = params["textDocument"]
        with self._lock:
            open_document = self._documents.get(item["uri"])
            if open_document is None:
                self._log(f"a change of {item['uri']}, which is not open, is left out")
                return
            open_document.change(
                params["contentChanges"],
                item["version"],
                self._encoding,
                self._recorder(item["uri"]),
            )
            self._focus(item["uri"])

    def _recorder(self, uri: str) -> Callable[[LineChange], None]:
        """Returns what remembers changes of a document; those of an ignored one are not."""
        if self._settings.why_not(uri) is not None:
            return lambda change: None
        return lambda change: self._history.add(uri, change, time.monotonic())

    def _on_close(self, params: dict[str, Any], _: Any) -> None:
        with self._lock:
            self._supersede(params["textDocument"]["uri"])
            self._documents.pop(params["textDocument"]["uri"], None)

    def _on_focus(self, params: dict[str, Any], _: Any) -> None:
        """Handles the focus message of GitHub's language server, perhaps with the cursor."""
        uri, position = params["textDocument"]["uri"], params.get("position")
        with self._lock:
            self._tells_focus = True
            if position is not None and (open_document := self._documents.get(uri)) is not None:
                open_document.place = open_document.document.place(
                    position_of(position), self._encoding
                )
            self._focus(uri)

    def _focus(self, uri: str) -> None:
        """Makes this document the one to read in idle time."""
        self._focused = uri
        self._work.put(_DOCUMENTS_CHANGED)

    def _on_list(self, params: dict[str, Any], number: Any) -> Any:
        if not self._as_list:
            raise RpcError(METHOD_NOT_FOUND, "textDocument/completion was not asked for")
        return self._on_completion({**params, "context": None}, number, as_list=True)

    def _on_completion(self, params: dict[str, Any], number: Any, *, as_list: bool = False) -> Any:
        if number is None:
            return None  # nobody can be answered
        uri, position = params["textDocument"]["uri"], position_of(params["position"])
        context: dict[str, Any] = params.get("context") or {}
        selected = SelectedCompletion.read(context.get("selectedCompletionInfo"))
        automatic = context.get("triggerKind") == AUTOMATIC
        with self._lock:
            open_document = self._documents.get(uri)
            why_not = self._why_not(uri, open_document)
            if automatic and self._settings.completion == "off":
                why_not = why_not or "completions are shown on request only"
            if open_document is None or why_not is not None:
                return self._no_completion(open_document, why_not or "this document is not open")
            place = open_document.document.place(position, self._encoding)
            if len(open_document.document.line(place[0])) > MOST_LINE:
                return self._no_completion(open_document, "the line is too long")
            completion = open_document.known_completion(place)
            if completion is not None and selected is None:
                open_document.shown[place] = completion
                open_document.last = visible = self._visible(completion, automatic)
                return self._items(open_document.document, place, visible, as_list=as_list)
            open_document.supersede()
            open_document.place = place
            request = CompletionRequest(
                number, uri, open_document.version, place, selected, as_list, automatic
            )
            open_document.request = self._waiting[number] = request
        self._work.put(request)
        return LATER

    def _on_next_edit(self, params: dict[str, Any], number: Any) -> Any:
        """Handles GitHub's request for the next edit; answered once typing rests and a model is."""
        item, position = params["textDocument"], position_of(params["position"])
        uri = item["uri"]
        with self._lock:
            open_document = self._documents.get(uri)
            why_not = self._why_not(uri, open_document)
            if number is None or open_document is None or why_not not in (None, _STILL_LOADING):
                return {"edits": []}
            version = item.get("version") or open_document.version
            if self._settings.next_edit == "off" or version != open_document.version:
                return {"edits": []}
            place = open_document.document.place(position, self._encoding)
            open_document.supersede_edit()
            request = CompletionRequest(number, uri, open_document.version, place, next_edit=True)
            open_document.edit_request = self._waiting[number] = request
            wait_s = open_document.edit_wait_s(place, self._settings.next_edit_delay / 1e3)
        timer = threading.Timer(wait_s, self._work.put, (request,))
        timer.daemon = True
        timer.start()
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
        return {"kvq.toggle": self._toggle, "kvq.explain": self._explain}

    def _toggle(self, *_: Any) -> bool:
        self._settings = replace(self._settings, enabled=not self._settings.enabled)
        return self._settings.enabled

    def _explain(self, uri: str = "", *_: Any) -> dict[str, Any] | None:
        """Describes a document's last completion, or why there was none."""
        with self._lock:
            open_document = self._documents.get(uri)
            if open_document is None:
                return None
            report = {} if open_document.last is None else explanation(open_document.last)
            if open_document.next_edit is not None:
                report["nextEdit"] = asdict(open_document.next_edit)
            return report or None

    # What goes out

    def _why_not(self, uri: str, open_document: OpenDocument | None) -> str | None:
        """Says why there is no completion, before anybody is asked for one."""
        if open_document is None:
            return "this document is not open"
        if not self._settings.enabled:
            return "completion is switched off"
        if (left_alone := self._settings.why_not(uri) or open_document.why_not()) is not None:
            return left_alone
        if self._completer is None:
            return self._failure or _STILL_LOADING
        return None

    def _no_completion(self, open_document: OpenDocument | None, why_not: str) -> None:
        if open_document is not None:
            open_document.last = Completion(drafts=(), why_not=why_not)

    def _supersede(self, uri: str) -> None:
        open_document = self._documents.get(uri)
        if open_document is not None:
            open_document.supersede()
            open_document.supersede_edit()

    def _run_worker(self) -> None:
        try:
            completer = self._load()
        except Exception as error:  # noqa: BLE001  the editor goes on without completions
            self._log(f"no completions: {format_error(error)}")
            self._failure = f"there is no model: {format_error(error)}"
            completer = None
        with self._lock:
            self._completer = completer
            if self._loading is not None:
                self._loading.end()
        while (request := self._next(completer)) is not None:
            if completer is None:
                self._end(request)  # it came while the model was loading
            elif request.next_edit:
                self._find_edit(completer, request)
            else:
                self._complete(completer, request)
        if completer is not None:
            completer.close()

    def _next(self, completer: "Completer | None") -> CompletionRequest | None:
        """Returns the next request. In idle time meanwhile a document is read."""
        idle = completer is not None
        while True:
            try:
                work = self._work.get(timeout=IDLE_S if idle else None)
            except Empty:
                idle = self._use_idle_time(cast("Completer", completer))
                continue
            if not isinstance(work, _DocumentsChanged):
                return work
            idle = completer is not None

    def _use_idle_time(self, completer: "Completer") -> bool:
        """Reads where a completion may be asked for next; returns whether some text remains."""
        chosen = self._next_place()
        if chosen is None:
            return False
        document, place, other_parts = chosen
        progress: WorkDoneProgress | None = None

        def report(done: int, total: int) -> None:
            nonlocal progress
            if progress is None and total - done > SHOWN_TOKENS:
                token = f"{READING}-{self._client.next_number()}"
                progress = self._progress(token, "kvq: reading the document")
            if progress is not None:
                progress.report(100 * done // total)

        try:
            return not completer.read(
                document, place, other_parts=other_parts, cancel=self._has_work, progress=report
            )
        except Exception as error:  # noqa: BLE001  told in the log; completions go on
            self._log(f"idle time was not used: {format_error(error)}")
            return False
        finally:
            if progress is not None:
                progress.end()

    def _next_place(
        self,
    ) -> tuple[TextDocument, tuple[int, int], tuple[NamedText, ...]] | None:
        """Returns where the cursor is, if a completion there could be asked for, and what else.

        That is what it should know of other files.
        """
        with self._lock:
            uri = self._focused or ""
            open_document = self._documents.get(uri)
            if open_document is None or self._why_not(uri, open_document) is not None:
                return None
            document, (line, column) = open_document.document.copy(), open_document.place
            place = min(line, document.num_lines - 1), column
            other_parts = self._other_parts(uri, document, place)
        return None if len(document.line(place[0])) > MOST_LINE else (document, place, other_parts)

    def _other_parts(
        self, uri: str, document: TextDocument, place: tuple[int, int]
    ) -> tuple[NamedText, ...]:
        """Returns parts of other open files for a completion; the lock is held.

        They stay the same while somebody types near one place: each change of them would move what
        stands behind.
        """
        if not self._settings.other_files:
            return ()
        files = {
            other: open_document
            for other, open_document in self._documents.items()
            if other != uri and self._why_not(other, open_document) is None
        }
        state = uri, tuple((other, file.version) for other, file in files.items())
        before, line, other_parts = self._related
        if before != state or abs(line - place[0]) > SAME_LINES:
            blocks = chain.from_iterable(file.blocks(other) for other, file in files.items())
            kept = other_parts if before[:1] == state[:1] else ()
            other_parts = related(blocks, document, place, kept)
            self._related = state, place[0], other_parts
        return other_parts

    def _has_work(self) -> bool:
        return not self._work.empty()

    def _complete(self, completer: "Completer", request: CompletionRequest) -> None:
        with self._lock:
            open_document = self._documents.get(request.uri)
            if open_document is None or request.is_over():
                self._end(request)
                return
            # Changes that the reading thread makes meanwhile do not concern this request.
            document = open_document.document.copy()
            other_parts = self._other_parts(request.uri, document, request.place)
        place = request.place
        if request.selected is not None:
            place = request.selected.insert_into(document, self._encoding)
        try:
            completion = completer.complete(
                document, place, other_parts=other_parts, cancel=request.is_over
            )
        except Exception as error:  # noqa: BLE001  told in the log, never in a pop-up
            self._log(f"completion failed: {format_error(error)}")
            completion = Completion(drafts=(), why_not=format_error(error))
        with self._lock:
            open_document = self._documents.get(request.uri)
            if (
                open_document is None
                or request.is_over()
                or open_document.version != request.version
            ):
                self._end(request)
                return
            visible = self._visible(completion, request.automatic)
            open_document.request, open_document.last = None, visible
            self._waiting.pop(request.id, None)
            if completion.drafts and request.selected is None:
                open_document.shown[place] = completion
                open_document.typed = TypedSuggestions(document, place, completion)
            items = self._items(document, place, visible, request.selected, as_list=request.as_list)
            self._client.answer(request.id, result=items)

    def _find_edit(self, completer: "Completer", request: CompletionRequest) -> None:
        with self._lock:
            open_document = self._documents.get(request.uri)
            if open_document is None or request.is_over():
                self._end(request)
                return
            document, edits = open_document.document.copy(), tuple(self._history)
            settings = self._settings
        try:
            next_edit = completer.next_edit(
                document, request.place, uri=request.uri, edits=edits,
                form=settings.next_edit_form,
                cancel=lambda: request.is_over() or self._has_work(),
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001  told in the log, never in a pop-up
            self._log(f"no next edit: {format_error(error)}")
            next_edit = NextEdit(why_not=format_error(error))
        if next_edit.impossible and self._said != next_edit.why_not:
            self._said = next_edit.why_not
            self._log(f"no next edits: {next_edit.why_not}")
        if next_edit.why_not == "cancelled" and not request.is_over():
            self._work.put(request)  # behind what it made room for
            return
        with self._lock:
            open_document.next_edit = next_edit
            if request.is_over() or open_document.version != request.version:
                self._end(request)
                return
            open_document.edit_request = None
            self._waiting.pop(request.id, None)
            shown = settings.next_edit == "always" or next_edit.likely
            changes = next_edit.changes if shown else ()
            result = edit_items(changes, document, request.uri, request.version, self._encoding)
            self._client.answer(request.id, result=result)

    def _end(self, request: CompletionRequest) -> None:
        """Answers a request whose answer nobody wants: each gets exactly one answer."""
        self._waiting.pop(request.id, None)
        if request.cancelled:
            self._client.answer(request.id, error=RpcError(CANCELLED, "cancelled"))
        else:
            self._client.answer(request.id, result={"edits": []} if request.next_edit else None)

    def _visible(self, completion: Completion, automatic: bool) -> Completion:
        """Returns what is shown: to somebody who did not ask, what is likely."""
        likely = automatic and self._settings.completion == "likely"
        return completion.likely_part() if likely else completion

    def _items(
        self,
        document: TextDocument,
        place: tuple[int, int],
        completion: Completion,
        selected: SelectedCompletion | None = None,
        *,
        as_list: bool,
    ) -> dict[str, Any] | None:
        """Makes the items of `completion`; each begins with the text in the range it replaces."""
        if not completion.drafts:
            return None
        if selected is None:
            before, replaced = word_before(document, place, self._encoding)
        else:
            before, replaced = selected.text, selected.range
        texts = [before + draft.text for draft in completion.drafts[: self._settings.drafts]]
        return items(texts, replaced, as_list=as_list)
