"""A client with the engine in this process: one session for all turns of a chat."""

import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.errors import BudgetError, UsageError
from kvq_apps.chat.client import ContextFullError, Facts, NoChatError, ReplyWriter, Stream, Turn
from kvq_apps.chat.messages import Message, ReplyStats, with_results
from kvq_apps.chat.visible import storable
from kvq_apps.terminal.output import kv_text
from kvq_apps.thinking import AUTO, variables
from kvq_models.thinking import Thinking, ThinkingWriter, assistant_message, split
from kvq_models.tools import tool_form

if TYPE_CHECKING:
    from kvq_apps.serve.tools import Tools
    from kvq_runtime.engine import Engine
    from kvq_runtime.session.branch_answers import BranchAnswers
    from kvq_runtime.session.metrics import Rounds
    from kvq_runtime.session.session import Session


# Up to so many tokens of drafts are written side by side; longer ones one after the other.
DRAFT_TOKENS = 64
# Numbers of a session that a reply's numbers have under the same names.
_REPORTED = (
    *("ttft_ms", "decode_tok_s", "kv_bytes", "auxiliary_bytes", "edits.predicted_tokens"),
    *("held.mean_k_bits", "held.mean_v_bits", "held.evicted_share"),
)


class LocalClient:
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
        self._branch_answers: BranchAnswers[Any] | None = None
        self._open_drafts = ExitStack()
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
        self._session = self._new_session(self._session_options)
        return self._facts()

    def reply(self, turn: Turn, stream: Stream) -> str:
        """Keeps the tokens that session and prompt share, encodes the rest, and generates."""
        prompt = self._prompt(turn)
        if turn.seed is not None:
            self._opened()[1].reseed(turn.seed)
        return self._answer(turn, prompt, stream)

    def drafts(self, turn: Turn, count: int, stream: Stream) -> list[str]:
        """Writes drafts side by side where they are short enough, else one after the other."""
        prompt, (_, session) = self._prompt(turn), self._opened()
        seed = secrets.randbits(32) if turn.seed is None else turn.seed
        seeds = range(seed, seed + count)
        if session.branches_fit(count, turn.max_tokens):
            return self._answer_in_branches(turn, prompt, seeds, stream)
        reasons: list[str] = []
        for draft, draft_seed in enumerate(seeds):
            session.reseed(draft_seed)
            reasons.append(self._answer(turn, prompt, stream, draft))
        return reasons

    def keep(self, draft: int) -> None:
        """Keeps a draft of a branch; of drafts in turn the cache keeps what the last one shares."""
        if self._branch_answers is not None:
            self._branch_answers.kept = draft
        self._settle()

    def _prompt(self, turn: Turn) -> list[int]:
        """Returns the tokens of `turn`. Raises `ContextFullError` where they do not fit."""
        self._settle()
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

    def _answer_in_branches(
        self, turn: Turn, prompt: list[int], seeds: Sequence[int], stream: Stream
    ) -> list[str]:
        """Writes a token of each answer per pass; the answers stay until one is kept."""
        from kvq_runtime.answer.generation import GenerationOptions
        from kvq_runtime.sequence.passes import run

        reasons = ["cancelled"] * len(seeds)
        cached, (_, session) = self._encode(turn, prompt, stream), self._opened()
        if cached is None:
            return reasons
        options = GenerationOptions(
            max_tokens=turn.max_tokens, sampling=turn.sampling, shown=self._shown_tokens
        )
        writers = [self._reply_writer(prompt, stream, draft) for draft in range(len(seeds))]
        self._branch_answers = self._open_drafts.enter_context(
            session.branch_answers(seeds, options)
        )
        count, elapsed_s = 0, 0.0
        while self._branch_answers.running and not stream.cancelled():
            steps, seconds = run(self._branch_answers.stepping(stream.cancelled))
            count, elapsed_s = count + len(steps), elapsed_s + seconds
            for draft, step in steps:
                writers[draft].token(step.text)
                reasons[draft] = step.finish_reason or reasons[draft]
            rate = count / elapsed_s if elapsed_s else 0.0
            stream.report_stats(replace(self._stats(prompt, cached, count), decode_tok_s=rate))
        for writer, reason in zip(writers, reasons, strict=True):
            writer.end(reason)
        return reasons

    def _settle(self) -> None:
        """Closes the drafts that are still open."""
        self._branch_answers = None
        self._open_drafts.close()

    def begin(self) -> None:
        """Opens a new session in place of the old one."""
        self._settle()
        self._opened()[1].close()
        self._session = self._new_session(self._session_options)
        self._rounds_before = None

    def change_kv(
        self, k_bits: int | None, v_bits: int | None, budget: str | None, stream: Stream
    ) -> Facts:
        """Opens a session with the new plan and encodes the tokens again.

        The old session stays when the new one is refused or stopped.
        """
        self._settle()
        _, old = self._opened()
        changes = {"k_bits": k_bits, "v_bits": v_bits, "kv_budget": budget}
        options = self._session_options | {
            name: value for name, value in changes.items() if value is not None
        }
        session = self._new_session(options)
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

        self._settle()
        _, session = self._opened()
        stale = session.sequence.drop_stale()
        if stale:
            session.prefill(progress=stream.report_prefill, cancel=stream.cancelled, predict=OFF)
        return stale

    def refine(self, stream: Stream) -> int:
        """Computes piece by piece from the left, and reports the numbers after each."""
        _, session = self._opened()
        remaining = session.sequence.encoding.staleness.stale
        while remaining and not stream.cancelled():
            remaining = session.refresh(session.sequence.chunk_tokens, cancel=stream.cancelled)
            stream.report_stats(self._stats(session.tokens, len(session.tokens), 0))
        return remaining

    def save(self, path: Path) -> bool:
        self._settle()
        _, session = self._opened()
        if not session.tokens:
            return False
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        session.save(path)
        return True

    def restore(self, path: Path) -> ReplyStats:
        self._settle()
        _, session = self._opened()
        session.load(path)
        return replace(self._stats((), 0, 0), ttft_ms=0.0, decode_tok_s=0.0)

    def close(self) -> None:
        self._settle()
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

    def _new_session(self, options: Mapping[str, Any]) -> "Session[Any]":
        """Opens a session with room for drafts side by side, if the budget allows.

        Otherwise drafts are written one after the other.
        """
        assert self._engine is not None
        # A drafter would make its guesses as long as that room.
        if "draft" not in options:
            with suppress(BudgetError):
                return self._engine.session(draft_tokens=DRAFT_TOKENS, **options)
        return self._engine.session(**options)

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
