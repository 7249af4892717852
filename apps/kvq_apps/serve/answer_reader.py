"""Splits an answer's text into thought, content and calls, as clients of chat get them."""

from collections.abc import Sequence
from secrets import token_hex
from typing import Any

from kvq_apps.serve.tools import Tools
from kvq_apps.thinking import AnswerThoughts
from kvq_models.thinking import Piece as ThinkingPiece
from kvq_models.thinking import Thought
from kvq_models.tools import CallPiece, Piece

Json = dict[str, Any]


class AnswerReader:
    """Reads one choice while its text arrives."""

    def __init__(self, thoughts: AnswerThoughts | None, tools: Tools | None) -> None:
        self._thought_parts: list[str] = []
        self._thinking = None if thoughts is None else thoughts.reader()
        self._shows_thoughts = thoughts is not None and thoughts.visible
        self._calling = None if tools is None else tools.reader()

    @property
    def thought(self) -> str:
        return "".join(self._thought_parts)

    def feed(self, text: str) -> Json:
        """Returns the delta of a chunk, empty while it is not known what `text` will be."""
        return _delta(*self._parts(self._split(text)))

    def flush(self, *, cut: bool) -> Json:
        """Returns the delta of what was held back; a call that was `cut` off is left out."""
        return _delta(*self._parts(self._flush_thoughts(), cut=cut, last=True))

    def whole(self, text: str, *, cut: bool) -> Json:
        """Returns the content, the thought and the calls of a whole message."""
        pieces = [*self._split(text), *self._flush_thoughts()]
        thought, said, calls = self._parts(pieces, cut=cut, last=True)
        bare = [{name: call[name] for name in call if name != "index"} for call in calls]
        message: Json = {"content": said or None if bare else said}
        message |= {"reasoning_content": thought} if thought else {}
        return message | ({"tool_calls": bare} if bare else {})

    def reason(self, reason: str) -> str:
        """Returns the reason of the end, which is `tool_calls` after a call."""
        called = self._calling is not None and self._calling.calls > 0
        return "tool_calls" if called and reason == "stop" else reason

    def _split(self, text: str) -> list[ThinkingPiece]:
        if self._thinking is None:
            return [text] if text else []
        return self._thinking.feed(text)

    def _flush_thoughts(self) -> list[ThinkingPiece]:
        return [] if self._thinking is None else self._thinking.flush()

    def _parts(
        self, pieces: Sequence[ThinkingPiece], *, cut: bool = False, last: bool = False
    ) -> tuple[str, str, list[Json]]:
        """Splits pieces into thought, text and calls for the client."""
        thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
        self._thought_parts.append(thought)
        parts: list[Piece] = [piece for piece in pieces if isinstance(piece, str)]
        if self._calling is not None:
            parts = [part for text in parts for part in self._calling.feed(str(text))]
            parts += self._calling.flush(cut=cut) if last else []
        said = "".join(piece for piece in parts if isinstance(piece, str))
        calls = [_call(piece) for piece in parts if isinstance(piece, CallPiece)]
        return thought if self._shows_thoughts else "", said, calls


def _delta(thought: str, said: str, calls: list[Json]) -> Json:
    return (
        ({"reasoning_content": thought} if thought else {})
        | ({"content": said} if said else {})
        | ({"tool_calls": calls} if calls else {})
    )


def _call(piece: CallPiece) -> Json:
    """Returns a call with an id of letters and digits only, as Mistral's templates require."""
    function = {"name": piece.name, "arguments": piece.arguments}
    identity = token_hex(5)[:9]
    return {"index": piece.index, "id": identity, "type": "function", "function": function}
