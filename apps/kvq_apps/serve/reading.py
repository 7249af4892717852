"""An answer's text as a client of chat is told it: what is thought, said and called."""

from collections.abc import Sequence
from secrets import token_hex
from typing import Any

from kvq_apps.serve.tools import Tools
from kvq_apps.thinking import Thinks
from kvq_models.thinking import Piece as ThinkingPiece
from kvq_models.thinking import Thought
from kvq_models.tools import CallPiece, Piece

Json = dict[str, Any]


class AnswerReader:
    """Reads one choice as its text comes; `thought` is all that was thought so far."""

    def __init__(self, thinks: Thinks | None, tools: Tools | None) -> None:
        self.thought = ""
        self._thinking = None if thinks is None else thinks.reader()
        self._told = thinks is not None and thinks.told
        self._calling = None if tools is None else tools.reader()

    def feed(self, text: str) -> Json:
        """The delta of a chunk, empty while it is not known what `text` will be."""
        return _delta(*self._parts(self._fed(text)))

    def flush(self, *, cut: bool) -> Json:
        """The delta of what was held back; a call that was `cut` off is left out."""
        return _delta(*self._parts(self._flushed(), cut=cut, last=True))

    def whole(self, text: str, *, cut: bool) -> Json:
        """Content, thought and calls of a whole message."""
        pieces = [*self._fed(text), *self._flushed()]
        thought, said, calls = self._parts(pieces, cut=cut, last=True)
        bare = [{name: call[name] for name in call if name != "index"} for call in calls]
        message: Json = {"content": said or None if bare else said}
        message |= {"reasoning_content": thought} if thought else {}
        return message | ({"tool_calls": bare} if bare else {})

    def reason(self, reason: str) -> str:
        """Why the choice ended, to a client that offered tools."""
        called = self._calling is not None and self._calling.calls > 0
        return "tool_calls" if called and reason == "stop" else reason

    def _fed(self, text: str) -> list[ThinkingPiece]:
        if self._thinking is None:
            return [text] if text else []
        return self._thinking.feed(text)

    def _flushed(self) -> list[ThinkingPiece]:
        return [] if self._thinking is None else self._thinking.flush()

    def _parts(
        self, pieces: Sequence[ThinkingPiece], *, cut: bool = False, last: bool = False
    ) -> tuple[str, str, list[Json]]:
        """What is told of these pieces as thought, as text and as calls."""
        thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
        self.thought += thought
        told: list[Piece] = [piece for piece in pieces if isinstance(piece, str)]
        if self._calling is not None:
            told = [part for text in told for part in self._calling.feed(str(text))]
            told += self._calling.flush(cut=cut) if last else []
        said = "".join(piece for piece in told if isinstance(piece, str))
        calls = [_call(piece) for piece in told if isinstance(piece, CallPiece)]
        return thought if self._told else "", said, calls


def _delta(thought: str, said: str, calls: list[Json]) -> Json:
    return (
        ({"reasoning_content": thought} if thought else {})
        | ({"content": said} if said else {})
        | ({"tool_calls": calls} if calls else {})
    )


def _call(piece: CallPiece) -> Json:
    """A call; its id is of letters and digits only, as Mistral's templates want it."""
    function = {"name": piece.name, "arguments": piece.arguments}
    identity = token_hex(5)[:9]
    return {"index": piece.index, "id": identity, "type": "function", "function": function}
