"""Shapes an answer as a list of blocks: thoughts, texts and calls, as newer APIs have them.

It keeps the order of a stream: a block opens, grows and closes before the next opens. Each API says
it in its own words.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Literal

from kvq_apps.serve.answer_reader import AnswerReader
from kvq_apps.serve.loading import ServedModel
from kvq_apps.serve.requests import AnswerRequest
from kvq_apps.serve.wire import Choice, Json, Shape
from kvq_runtime.serving.outbox import Delta, Finished, Report, TokenLog

Kind = Literal["thought", "text", "call"]


@dataclass(kw_only=True, slots=True)
class AnswerBlock:
    """Holds one block of an answer: its index and its text so far.

    The `text` of a call is its arguments as JSON. The result of a call names it by `call_id`.
    """

    kind: Kind
    index: int
    text: str = ""
    name: str = ""
    call_id: str = ""
    identity: str = ""


class BlockShape(Shape):
    """Turns the events of one answer into blocks, whole or streamed."""

    def __init__(self, served: ServedModel, request: AnswerRequest) -> None:
        super().__init__(served, request)
        self.identity = token_hex(12)
        self.blocks: list[AnswerBlock] = []
        # Of tokens whose log-probabilities are not sent yet.
        self.logs: list[TokenLog] = []
        self.reason = "stop"
        self.stop_string: str | None = None
        self._reader = AnswerReader(request.thoughts, request.tools)
        self._is_open = False

    # The order of a stream

    def delta(self, delta: Delta) -> list[Json]:
        """Says what some more text adds to the blocks, or nothing while that is not known yet."""
        self.logs += delta.logs
        return list(self._grow(self._reader.feed(delta.text)))

    def finish(self, finished: Finished) -> list[Json]:
        """Says what was held back, and closes the last block."""
        rest = self._reader.flush(cut=finished.reason == "length")
        events = [*self._grow(rest), *self._close()]
        self.reason = self._reader.reason(finished.reason)
        self.stop_string = finished.stop_string
        return events

    def whole(self, choices: Sequence[Choice], report: Report) -> Json:
        (choice,) = choices
        message = self._reader.whole(choice.text, cut=choice.reason == "length")
        # The events are for streams; here only the blocks that they build are needed.
        for _ in (*self._grow(message), *self._close()):
            pass
        self.reason = self._reader.reason(choice.reason)
        self.stop_string, self.logs = choice.stop_string, choice.logs
        return self.answer(report)

    def _grow(self, message: Json) -> Iterator[Json]:
        if thought := message.get("reasoning_content"):
            yield from self._add("thought", thought)
        if text := message.get("content"):
            yield from self._add("text", text)
        for call in message.get("tool_calls") or ():
            function = call["function"]
            yield from self._close()
            yield from self._open("call", name=function["name"], call_id=f"call_{call['id']}")
            yield from self._add("call", function["arguments"])

    def _add(self, kind: Kind, text: str) -> Iterator[Json]:
        if not (self._is_open and self.blocks[-1].kind == kind):
            yield from self._close()
            yield from self._open(kind)
        self.blocks[-1].text += text
        yield from self.growth_events(self.blocks[-1], text)

    def _open(self, kind: Kind, **fields: str) -> Iterator[Json]:
        block = AnswerBlock(kind=kind, index=len(self.blocks), identity=token_hex(12), **fields)
        self.blocks.append(block)
        self._is_open = True
        yield from self.open_events(block)

    def _close(self) -> Iterator[Json]:
        if self._is_open:
            self._is_open = False
            yield from self.close_events(self.blocks[-1])

    # The words of a wire form

    def open_events(self, block: AnswerBlock) -> Iterator[Json]:
        """Yields the events that open a block."""
        return iter(())

    @abstractmethod
    def growth_events(self, block: AnswerBlock, text: str) -> Iterator[Json]:
        """Yields the events that append `text` to a block."""

    @abstractmethod
    def close_events(self, block: AnswerBlock) -> Iterator[Json]:
        """Yields the events that close a block."""

    @abstractmethod
    def answer(self, report: Report) -> Json:
        """Returns the whole answer, once it has ended."""

    def frame(self, row: Json) -> str:
        """Returns an event, with its type as its name."""
        return f"event: {row['type']}\n{super().frame(row)}"
