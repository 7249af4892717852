"""A client of a running OpenAI-compatible server such as `kvq serve`. Standard library only."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from itertools import starmap
from socket import SHUT_RDWR, socket
from typing import Any
from urllib.parse import urlsplit

from kvq.errors import BackendError, ModelError, UsageError, argument, reason_of
from kvq.json_values import is_object
from kvq_apps.chat.client import (
    ChatClient,
    ContextFullError,
    EngineLostError,
    Facts,
    NoChatError,
    ReplyWriter,
    Stream,
    Turn,
)
from kvq_apps.chat.messages import Message, ReplyStats, ToolCall, with_results
from kvq_apps.serve.protocol import check_answer, sampling_fields, sampling_of
from kvq_apps.thinking import request_fields
from kvq_models.thinking import KEPT, Piece, ThinkingReader, Thought, split

CONNECT_TIMEOUT_S = 10.0
UNAVAILABLE = 503


class RemoteClient(ChatClient):
    """Talks to the server at `url`, such as http://127.0.0.1:8012.

    The server keeps the KV cache itself, and tells conversations apart by their text.
    """

    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            self._port = parts.port
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                f"{argument('--server')} {url!r} is not possible: give http://HOST:PORT"
            )
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._url = url
        self._model = model
        self._is_kvq = False
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def open(self) -> Facts:
        """Asks which models are served. Raises `ModelError` when the requested one is not."""
        connection = self._connect()
        try:
            listed = self._json(connection, "GET", "/v1/models")["data"]
            served = {row["id"]: row for row in listed}
            named = {name: row for row in listed for name in row.get("aliases") or ()} | served
        except (ValueError, KeyError, TypeError) as error:
            raise BackendError(
                f"{self._url} does not list its models; is it an OpenAI-style server?"
            ) from error
        finally:
            connection.close()
        name = self._model or next(iter(served), "")
        if name not in named:
            raise ModelError(
                f"{self._url} does not serve {name or 'any model'}; it serves "
                f"{', '.join(served) or 'nothing'}"
            )
        meta: dict[str, Any] = named[name].get("meta") or {}
        if meta.get("chat") is False:
            raise NoChatError(name, "its /v1/completions")
        self._model = name
        self._is_kvq = "kbits" in meta
        return Facts(
            model=name,
            context_tokens=int(meta.get("n_ctx") or 0),
            k_bits=int(meta.get("kbits") or 0),
            v_bits=int(meta.get("vbits") or 0),
            kv_budget=int(meta.get("kv_budget") or 0),
            budget_tokens=int(meta.get("budget_tokens") or 0),
            full_kv=str(meta.get("full_kv") or ""),
            full_tokens=int(meta.get("full_tokens") or 0),
            sampling=sampling_of(meta.get("sampling") or {}),
            calls_tools=meta.get("tools") is not False,
        )

    def reply(self, turn: Turn, stream: Stream) -> str:
        """Streams a chat completion, or the rest of a reply that was cut.

        Only `kvq serve` can continue a reply; other servers raise `BackendError`.
        """
        last = turn.messages[-1]
        if last.role != "assistant":
            return self._ask(turn, stream, {})[0]
        if not self._is_kvq:
            raise BackendError(
                f"{self._url} does not go on with a reply that was cut; ask it to go on"
            )
        return self._ask(turn, stream, {"continue_final_message": True}, reply_start=last.text)[0]

    def drafts(self, turn: Turn, count: int, stream: Stream) -> list[str]:
        """Streams several choices of one completion. Raises `BackendError` if fewer come."""
        reasons = self._ask(turn, stream, {"n": count})
        if not stream.cancelled() and not all(reasons.get(draft) for draft in range(count)):
            raise BackendError(
                f"{self._url} wrote {len(reasons)} of {count} drafts, it does not stream several; "
                "/retry asks for one more reply"
            )
        return [reasons.get(draft) or "cancelled" for draft in range(count)]

    def _ask(
        self, turn: Turn, stream: Stream, extra_fields: Mapping[str, Any], *, reply_start: str = ""
    ) -> dict[int, str]:
        """Returns why each choice ended, by its number. The first begins with `reply_start`."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [*starmap(_message_fields, with_results(turn.messages))],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": turn.sampling.temperature,
            "top_p": turn.sampling.top_p,
            **request_fields(turn.think),
            **extra_fields,
        }
        if turn.tools:
            body["tools"] = [{"type": "function", "function": tool} for tool in turn.tools]
        if self._is_kvq:
            body |= sampling_fields(turn.sampling)
        if turn.max_tokens is not None:
            body["max_tokens"] = turn.max_tokens
        if turn.seed is not None:
            body["seed"] = turn.seed
        connection = self._connect()
        try:
            return self._stream(connection, body, stream, reply_start)
        except (OSError, HTTPException) as error:
            if stream.cancelled():
                return {0: "cancelled"}
            raise EngineLostError(
                f"{self._url} went away ({error or type(error).__name__}); start it again"
            ) from error
        finally:
            connection.close()

    def change_kv(
        self, k_bits: int | None, v_bits: int | None, budget: str | None, stream: Stream
    ) -> Facts:
        """Raises `BackendError`: the server's settings serve all its users."""
        raise BackendError(
            f"{self._url} decides its KV settings for everybody; restart it with "
            "`kvq serve --kv K:V --kv-budget SIZE`"
        )

    def _connect(self) -> HTTPConnection:
        kind = HTTPSConnection if self._secure else HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
        except OSError as error:
            raise EngineLostError(
                f"{self._url} does not answer ({reason_of(error)}); start it with `kvq serve`"
            ) from error
        return connection

    def _json(self, connection: HTTPConnection, method: str, path: str) -> dict[str, Any]:
        try:
            connection.request(method, self._base + path, headers=self._headers)
            response = connection.getresponse()
            body = response.read()
        except (OSError, HTTPException) as error:
            raise EngineLostError(f"{self._url} went away ({reason_of(error)})") from error
        check_answer(self._url, response.getheader)
        if response.status != 200:
            raise _refusal(self._url, response.status, body)
        return json.loads(body)

    def _stream(
        self, connection: HTTPConnection, body: Mapping[str, Any], stream: Stream, reply_start: str
    ) -> dict[int, str]:
        connection.request(
            "POST", f"{self._base}/v1/chat/completions", json.dumps(body), self._headers
        )
        assert connection.sock is not None
        # Silence is not an error: only a cancel ends the wait.
        sock = connection.sock
        sock.settimeout(None)
        stream.when_cancelled(lambda: _hang_up(sock))
        reasons: dict[int, str] = {}
        writers = {0: ReplyWriter(stream, ThinkingReader(KEPT))}
        writers[0].begin(reply_start)
        calls: dict[int, list[str]] = {}
        # A response outlives its connection where the server closes that, so it is closed too.
        with connection.getresponse() as response:
            check_answer(self._url, response.getheader)
            if response.status != 200:
                raise _refusal(self._url, response.status, response.read())
            for event in _events(response, stream):
                if "error" in event:
                    raise _error_of(event["error"], self._url)
                stats = _stats(event)
                if stats is not None:
                    stream.report_stats(replace(stats, thought_ms=writers[0].ms))
                for choice in event.get("choices") or ():
                    draft = choice.get("index") or 0
                    delta: dict[str, Any] = choice.get("delta") or {}
                    writer = writers.setdefault(draft, ReplyWriter(stream, None, draft))
                    writer.write(_pieces(delta))
                    _add_calls(calls, delta)
                    if choice.get("finish_reason"):
                        reasons[draft] = choice["finish_reason"]
        for place in sorted(calls):
            stream.report_call(*calls[place])
        if stream.cancelled():
            return reasons | {0: reasons.get(0, "cancelled")}
        if not reasons:
            raise EngineLostError(f"{self._url} ended the reply too early; is it still running?")
        return reasons


def _message_fields(message: Message, call: ToolCall | None) -> dict[str, Any]:
    """Returns a message as servers take it: a reply's thought and calls apart from its answer."""
    fields: dict[str, Any] = {"role": message.role, "content": message.text}
    if call is not None:
        fields["tool_call_id"] = call.id
    if message.role == "assistant":
        thought, fields["content"] = split(message.text)
        fields |= {"reasoning_content": thought} if thought else {}
    if message.calls:
        # A server refuses arguments that are no object, and the result says what was wrong.
        fields["tool_calls"] = [
            made.row("{}" if made.values is None else made.arguments) for made in message.calls
        ]
    return fields


def _add_calls(calls: dict[int, list[str]], delta: Mapping[str, Any]) -> None:
    """Adds a delta's pieces of calls to the name, the arguments and the id of each call."""
    for piece in delta.get("tool_calls") or ():
        call = calls.setdefault(piece.get("index") or 0, ["", "", ""])
        function: dict[str, Any] = piece.get("function") or {}
        for place, text in enumerate(
            (function.get("name"), function.get("arguments"), piece.get("id"))
        ):
            call[place] += text or ""


def _pieces(delta: Mapping[str, Any]) -> list[Piece]:
    """Returns the thought, under either of its usual names, and the text of a delta."""
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    text = delta.get("content") or ""
    return [*([Thought(thought)] if thought else []), *([text] if text else [])]


def _hang_up(sock: socket) -> None:
    with suppress(OSError):
        sock.shutdown(SHUT_RDWR)


def _events(response: HTTPResponse, stream: Stream) -> Iterator[dict[str, Any]]:
    """Yields the JSON of each server-sent event, until the last one or a cancel."""
    data: list[bytes] = []
    while not stream.cancelled():
        line = response.readline()
        if not line:
            return
        line = line.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            data.append(line[5:].lstrip())
        elif not line and data:
            content, data = b"\n".join(data), []
            if content == b"[DONE]":
                return
            try:
                yield json.loads(content)
            except ValueError as error:
                raise BackendError(
                    f"the server sent no JSON ({reason_of(error)}); ask again"
                ) from error


# Numbers that `kvq serve` reports under the names that a reply's numbers have here.
_KVQ_STATS = (
    *("kv_bytes", "auxiliary_bytes", "mean_k_bits", "mean_v_bits", "evicted_share"),
    "predicted_tokens",
)


def _stats(event: Mapping[str, Any]) -> ReplyStats | None:
    usage = event.get("usage")
    if not usage:
        return None
    details: dict[str, Any] = usage.get("prompt_tokens_details") or {}
    completion_details: dict[str, Any] = usage.get("completion_tokens_details") or {}
    timings: dict[str, Any] = event.get("timings") or {}
    kvq: dict[str, Any] = event.get("x_kvq") or {}
    prompt, new = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    return ReplyStats(
        prompt_tokens=prompt,
        cached_tokens=details.get("cached_tokens") or 0,
        new_tokens=new,
        ttft_ms=kvq.get("ttft_ms") or timings.get("prompt_ms") or 0.0,
        decode_tok_s=timings.get("predicted_per_second") or 0.0,
        context_tokens=kvq.get("context_tokens") or prompt + new,
        drafted_tokens=timings.get("draft_n") or 0,
        accepted_tokens=timings.get("draft_n_accepted") or 0,
        **{name: kvq[name] for name in _KVQ_STATS if kvq.get(name)},
        thought_tokens=completion_details.get("reasoning_tokens") or 0,
    )


def _refusal(url: str, status: int, body: bytes) -> Exception:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        error = None
    if status == UNAVAILABLE:
        return EngineLostError(f"{url} is not ready: {_error_text(error)}")
    if error is None:
        return BackendError(f"{url} answers with status {status}; is it an OpenAI-style server?")
    return _error_of(error, url)


def _error_of(error: Any, url: str) -> Exception:
    details: Mapping[str, Any] = error if is_object(error) else {}
    if details.get("type") == "unavailable_error":
        return EngineLostError(f"{url} is not ready: {_error_text(error)}")
    if details.get("code") == "context_length_exceeded":
        numbers = (int(details.get("n_prompt_tokens") or 0), int(details.get("n_ctx") or 0))
        return ContextFullError(*numbers)
    return BackendError(f"{url}: {_error_text(error)}")


def _error_text(error: Any) -> str:
    message = error.get("message") if is_object(error) else error
    return " ".join(str(message or "no reason given").split())
