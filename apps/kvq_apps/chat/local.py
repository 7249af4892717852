"""A client with the engine in this process: one session for all turns of a chat."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.errors import UsageError
from kvq_apps.chat.client import (
    ChatClient,
    ContextFullError,
    Facts,
    NoChatError,
    ReplyWriter,
    Stream,
    Turn,
)
from kvq_apps.chat.messages import Message, ReplyStats, with_results
from kvq_apps.terminal.output import kv_text, storable
from kvq_apps.thinking import AUTO, variables
from kvq_models.thinking import Thinking, ThinkingWriter, assistant_message, split
from kvq_models.tools import tool_form

if TYPE_CHECKING:
    from kvq_apps.serve.tools import Tools
    from kvq_runtime.engine import Engine
    from kvq_runtime.session.metrics import Rounds
    from kvq_runtime.session.session import Session


# Numbers of a session that a reply's numbers have under the same names.
_REPORTED = (
    *("ttft_ms", "decode_tok_s", "kv_bytes", "auxiliary_bytes", "edits.predicted_tokens"),
    *("held.mean_k_bits", "held.mean_v_bits", "held.evicted_share"),
)


class LocalClient(ChatClient):
    """Opens `model` with the options of `Engine.open` and `Engine.session`."""

    def __init__(
        self,
        model: str | None,
        *,
        engine_options: Mapping[str, Any],
        session_options: Mapping[str, Any],
    ) -> None:
        self._model = model
        self._engine_options = engine_options
        self._session_options: dict[str, Any] = {**session_options}
        self._lasting_name = ""
        self._rounds_before: Rounds | None = None
        self._engine: Engine | None = None
        self._thinking: Thinking | None = None
        self._think = AUTO
        self._tools: Tools | None = None
        self._request_tokens = 0
        self._session: Session[Any] | None = None

    def open(self) -> Facts:
        from kvq_apps.names.engine import open_engine
        from kvq_apps.names.model_path import lasting_name

        engine = open_engine(self._model, **self._engine_options)
        if engine.tokenizer.chat_template is None:
            engine.close()
            name = self._model or engine.model.name
            raise NoChatError(name, f"`kvq run -m {name}`")
        engine.tokenizer.begin_chat()
        self._engine, self._lasting_name = engine, lasting_name(self._model)
        self._thinking = Thinking.of(engine.tokenizer)
        self._session = engine.session(**self._session_options)
        return self._facts()

    def reply(self, turn: Turn, stream: Stream) -> str:
        """Keeps the tokens that session and prompt share, encodes the rest, and generates."""
        prompt = self._prompt(turn)
        if turn.seed is not None:
            self._opened()[1].reseed(turn.seed)
        return self._answer(turn, prompt, stream)

    def drafts(self, turn: Turn, count: int, stream: Stream) -> list[str]:
        """Writes one draft after the other; the cache keeps what the next turn shares."""
        prompt, (_, session) = self._prompt(turn), self._opened()
        seed = secrets.randbits(32) if turn.seed is None else turn.seed
        reasons: list[str] = []
        for draft in range(count):
            session.reseed(seed + draft)
            reasons.append(self._answer(turn, prompt, stream, draft))
        return reasons

    def _prompt(self, turn: Turn) -> list[int]:
        """Returns the tokens of `turn`. Raises `ContextFullError` where they do not fit."""
        engine, session = self._opened()
        last = turn.messages[-1]
        messages = turn.messages[:-1] if last.role == "assistant" else turn.messages
        prompt = prompt_tokens(engine, messages, turn.think, self._tools_of(turn))
        self._request_tokens = len(prompt)
        if last.role == "assistant":
            prompt = self._with_reply_start(prompt, last.text)
        limit = session.config.context_tokens
        if len(prompt) >= limit:
            raise ContextFullError(len(prompt), limit)
        return prompt

    def _tools_of(self, turn: Turn) -> "Tools | None":
        """Returns the tools of `turn` in the form of this model's calls, if it has one."""
        form = tool_form(self._opened()[0].tokenizer.chat_template)
        if form is None or not turn.tools:
            return None
        from kvq_apps.serve.tools import Tools

        return Tools(form=form, functions={tool["name"]: tool for tool in turn.tools})

    def _with_reply_start(self, prompt: list[int], text: str) -> list[int]:
        """Returns `prompt` and the reply begun as `text`, as cached tokens if they match."""
        engine, session = self._opened()
        cached = list(session.tokens)
        stored = self._stored_text(prompt, cached[len(prompt) :])
        if cached[: len(prompt)] == prompt and storable(stored) == storable(text):
            return cached
        if self._thinking is None:
            return prompt + engine.tokenizer.encode(text)
        return prompt + self._thinking.ids(*split(text), begun=self._thinking.begun(prompt))

    def _stored_text(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """Returns the text that a message keeps of a reply to `prompt` with these tokens."""
        if self._thinking is None:
            return self._opened()[0].tokenizer.decode(ids)
        reader, writer = self._thinking.reader(prompt), ThinkingWriter()
        return writer.text(reader.feed(self._thinking.text(ids)))

    def _encode(self, turn: Turn, prompt: list[int], stream: Stream) -> int | None:
        """Encodes `prompt`; returns how many of its tokens were cached, None if it was stopped."""
        _, session = self._opened()
        self._rounds_before = session.rounds
        self._think, self._tools = turn.think, self._tools_of(turn)
        cached = session.align(prompt, edits=self._roll_back_edit(turn.edited))
        stream.report_stats(self._stats(prompt, cached, 0))
        complete = cached == len(prompt) or session.prefill(
            progress=stream.report_prefill, cancel=stream.cancelled
        )
        return cached if complete else None

    def _answer(self, turn: Turn, prompt: list[int], stream: Stream, draft: int = 0) -> str:
        cached, (_, session) = self._encode(turn, prompt, stream), self._opened()
        if cached is None:
            return "cancelled"
        steps = session.generate(
            turn.max_tokens,
            sampling=turn.sampling,
            shown=self._shown_tokens,
            cancel=stream.cancelled,
        )
        reason, writer = "cancelled", self._reply_writer(prompt, stream, draft)
        for count, step in enumerate(steps, 1):
            writer.token(step.text)
            stream.report_stats(writer.with_thought(self._stats(prompt, cached, count)))
            reason = step.finish_reason or reason
        writer.end(reason)
        return reason

    @property
    def _shown_tokens(self) -> frozenset[int]:
        """Returns the control tokens that mark thoughts and calls."""
        thoughts = frozenset[int]() if self._thinking is None else self._thinking.shown
        if self._tools is None:
            return thoughts
        return thoughts | self._tools.shown(self._opened()[0].tokenizer)

    def _reply_writer(self, prompt: Sequence[int], stream: Stream, draft: int = 0) -> ReplyWriter:
        """Returns the writer of the reply to `prompt`, which may end with the reply's beginning."""
        calls = None if self._tools is None else self._tools.reader()
        if self._thinking is None:
            return ReplyWriter(stream, None, draft, calls)
        request, reply_start = prompt[: self._request_tokens], prompt[self._request_tokens :]
        writer = ReplyWriter(stream, self._thinking.reader(request), draft, calls)
        writer.begin(self._thinking.text(reply_start))
        return writer

    def begin(self) -> None:
        """Opens a new session in place of the old one."""
        engine, session = self._opened()
        session.close()
        self._session = engine.session(**self._session_options)
        self._rounds_before = None

    def change_kv(
        self, k_bits: int | None, v_bits: int | None, budget: str | None, stream: Stream
    ) -> Facts:
        """Encodes the tokens in a new session; the old one stays if that is refused or stopped."""
        engine, old = self._opened()
        changes = {"k_bits": k_bits, "v_bits": v_bits, "kv_budget": budget}
        options: dict[str, Any] = self._session_options | {
            name: value for name, value in changes.items() if value is not None
        }
        session = engine.session(**options)
        try:
            tokens = old.tokens
            done = not tokens or session.prefill(
                tokens, progress=stream.report_prefill, cancel=stream.cancelled
            )
        except BaseException:
            session.close()
            raise
        if not done:
            session.close()
            raise UsageError("the KV settings stay as they were: encoding again was stopped")
        old.close()
        self._session, self._session_options = session, options
        self._rounds_before = None
        stream.report_stats(self._stats(list(tokens), 0, 0))
        return self._facts()

    def reread(self, stream: Stream) -> int:
        """Encodes again from the first stale token on."""
        from kvq_runtime.sequence.prediction import OFF

        _, session = self._opened()
        stale = session.sequence.drop_stale()
        if stale:
            session.prefill(progress=stream.report_prefill, cancel=stream.cancelled, predict=OFF)
        return stale

    def save(self, path: Path) -> bool:
        _, session = self._opened()
        if not session.tokens:
            return False
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        session.save(path)
        return True

    def restore(self, path: Path) -> ReplyStats:
        _, session = self._opened()
        session.load(path)
        return replace(self._stats((), 0, 0), ttft_ms=0.0, decode_tok_s=0.0)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        if self._engine is not None:
            self._engine.close()
        self._session = self._engine = None

    def _roll_back_edit(self, edited: Sequence[Message]) -> bool:
        """Rolls the session back to the edited message; returns whether there was an edit."""
        from kvq_runtime.sequence.hunks import common_prefix

        engine, session = self._opened()
        if edited:
            before = prompt_tokens(engine, edited, self._think, self._tools)
            shared = common_prefix(session.tokens, before)
            session.rollback(len(session.tokens) - shared)
        return bool(edited)

    def _opened(self) -> "tuple[Engine, Session[Any]]":
        assert self._engine is not None
        assert self._session is not None
        return self._engine, self._session

    def _facts(self) -> Facts:
        engine, session = self._opened()
        config = session.config
        return Facts(
            model=engine.model.name,
            context_tokens=config.context_tokens,
            k_bits=config.plan.k_bits,
            v_bits=config.plan.v_bits,
            kv_budget=config.budget_bytes,
            budget_tokens=config.budget_tokens,
            full_kv=kv_text(*config.full_bits),
            full_tokens=config.full_tokens,
            fingerprint=engine.model.fingerprint,
            keeps_kv=True,
            sampling=engine.model.sampling,
            lasting_name=self._lasting_name,
            calls_tools=tool_form(engine.tokenizer.chat_template) is not None,
        )

    def _stats(self, prompt: Sequence[int], cached: int, new_tokens: int) -> ReplyStats:
        from kvq_runtime.session.metrics import figures

        _, session = self._opened()
        stats = session.stats()
        rounds = stats.rounds if self._rounds_before is None else stats.rounds - self._rounds_before
        return ReplyStats(
            prompt_tokens=len(prompt),
            cached_tokens=cached,
            new_tokens=new_tokens,
            context_tokens=len(session.tokens),
            **figures(rounds, ("drafted_tokens", "accepted_tokens")),
            **figures(stats, _REPORTED),
        )


def prompt_tokens(
    engine: "Engine", messages: Sequence[Message], think: str = AUTO, tools: "Tools | None" = None
) -> list[int]:
    """Returns the tokens of the conversation in the model's chat template, ready for a reply."""
    tokenizer = engine.tokenizer
    template_variables = variables(Thinking.of(tokenizer), think)
    template_variables |= {} if tools is None else {"tools": tools.rows}
    rows = _template_rows(messages, tokenizer.chat_template)
    return tokenizer.chat(rows, add_generation_prompt=True, variables=template_variables)


def _template_rows(messages: Sequence[Message], template: str | None) -> list[dict[str, Any]]:
    """Returns messages as chat templates take them."""
    rows: list[dict[str, Any]] = []
    for message, call in with_results(messages):
        row: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.role == "assistant":
            row |= assistant_message(*split(message.text))
        if message.calls:
            row["tool_calls"] = [made.row(made.values or {}) for made in message.calls]
        if call is not None:
            row |= {"tool_call_id": call.id, "name": call.name}
        rows.append(row)
    if not any(message.role == "tool" for message in messages):
        return rows
    from kvq_apps.serve.tools import attach_results

    return attach_results(rows, template)
