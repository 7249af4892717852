"""Log-probabilities of an answer's tokens in the form of each API."""

import codecs
from collections.abc import Sequence
from typing import Any

from kvq_models.tokenizer import Tokenizer
from kvq_runtime.serving.outbox import TokenLog

Json = dict[str, Any]


def chat_rows(tokenizer: Tokenizer, logs: Sequence[TokenLog], *, ids: bool = False) -> list[Json]:
    """Returns the form of OpenAI's chat: a row for each token, with its alternatives.

    With `ids` it is that of llama-server, whose rows also have the token's id.
    """

    def row(token: int, logprob: float | None) -> Json:
        content = tokenizer.token_bytes(token)
        return ({"id": token} if ids else {}) | {
            "token": content.decode("utf-8", errors="replace"),
            "logprob": logprob,
            "bytes": list(content),
        }

    return [
        row(log.token, log.logprob) | {"top_logprobs": [row(*pair) for pair in log.top]}
        for log in logs
    ]


def start_length(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """Returns how many control tokens begin a prompt before its text."""
    start = tokenizer.control.start
    return len(start) if tuple(ids[: len(start)]) == tuple(start) else 0


class LogprobColumns:
    """Builds the form of OpenAI's completions for one choice: four lists, as its tokens arrive.

    `prompt` are the tokens of a prompt that comes first, with log-probabilities of its own. An
    offset says where the token's text begins in the text of the choice.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._start = start_length(tokenizer, prompt) if prompt else 0
        self._prompt_tokens = len(prompt)
        self._tokens = self._place = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def columns(self, logs: Sequence[TokenLog]) -> Json:
        """Returns the columns of the next tokens."""
        return {
            "tokens": [self._text(log.token) for log in logs],
            "token_logprobs": [log.logprob for log in logs],
            "top_logprobs": [None if log.logprob is None else self._top(log) for log in logs],
            "text_offset": [self._offset(log.token) for log in logs],
        }

    def _top(self, log: TokenLog) -> Json:
        """Returns the alternatives by their texts; of equal texts the likeliest."""
        return {self._text(token): logprob for token, logprob in reversed(log.top)}

    def _offset(self, token: int) -> int:
        """Returns where the next token begins, and moves on to its end."""
        before, place = self._place, self._tokens
        self._tokens += 1
        if place >= self._start:
            shown = place < self._prompt_tokens
            piece = self._tokenizer.token_bytes(token, special=shown)
            self._place += len(self._decoder.decode(piece))
        return before

    def _text(self, token: int) -> str:
        """Returns a token's text; parts of characters are bytes in hexadecimal, as in OpenAI's."""
        content = self._tokenizer.token_bytes(token)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
