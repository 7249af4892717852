"""A client whose engine lives in this process: one session, kept from turn to turn."""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.config import DEFAULT_DRAFT_TOKENS
from kvq.errors import BudgetError, UsageError
from kvq.formats import whole_units
from kvq_apps.chat.client import ContextFullError, Facts, NoChatError, Stream, Turn
from kvq_apps.chat.messages import Message, ReplyStats
from kvq_apps.chat.thoughts import Thoughts
from kvq_apps.chat.visible import storable
from kvq_apps.thinking import AUTO, variables
from kvq_models.thinking import Thinking, ThinkingWriter, said, split

if TYPE_CHECKING:
    from kvq_runtime.branch_answers import BranchAnswers
    from kvq_runtime.engine import Engine
    from kvq_runtime.metrics import Rounds
    from kvq_runtime.session import Session


# So many tokens of drafts are written side by side; longer ones one after the other.
DRAFT_TOKENS = 64


class LocalClient:
    """Opens `model` when asked to; the options are those of `Engine.open` and `Engine.session`."""

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
        self._opens = ""
        self._branched: BranchAnswers[Any] | None = None
        self._open_drafts = ExitStack()
        self._before: Rounds | None = None
        self._engine: Engine | None = None
        self._thinking: Thinking | None = None
        self._think = AUTO
        self._asked_tokens = 0
        self._session: Session[Any] | None = None

    def open(self) -> Facts:
        """Loads the model and opens a session."""
        from kvq_apps.model_path import lasting_name
        from kvq_apps.opening import open_engine

        engine = open_engine(self._model, **self._engine_options)
        if engine.tokenizer.chat_template is None:
            engine.close()
            name = self._model or engine.model.name
            raise NoChatError(name, f"`kvq run -m {name}`")
        self._engine, self._opens = engine, lasting_name(self._model)
        self._thinking = Thinking.of(engine.tokenizer)
        self._session = self._new_session(self._session_options)
        return self._facts()

    def reply(self, turn: Turn, stream: Stream) -> str:
        """Keeps the tokens the session and the prompt share, encodes the rest, generates."""
        prompt = self._prompt(turn)
        if turn.seed is not None:
            self._opened()[1].reseed(turn.seed)
        return self._answer(turn, prompt, stream)

    def drafts(self, turn: Turn, count: int, stream: Stream) -> list[str]:
        """Side by side where they are short enough for that, else one after the other."""
        prompt, (_, session) = self._prompt(turn), self._opened()
        seed = secrets.randbits(32) if turn.seed is None else turn.seed
        seeds = range(seed, seed + count)
        if session.branches_fit(count, turn.max_tokens):
            return self._answer_branched(turn, prompt, seeds, stream)
        reasons: list[str] = []
        for draft, each in enumerate(seeds):
            session.reseed(each)
            reasons.append(self._answer(turn, prompt, stream, draft))
        return reasons

    def keep(self, draft: int) -> None:
        """What was written side by side is in the cache; of others what the last one shares."""
        if self._branched is not None:
            self._branched.kept = draft
        self._settle()

    def _prompt(self, turn: Turn) -> list[int]:
        """The tokens of `turn`, which fit the context."""
        self._settle()
        engine, session = self._opened()
        last = turn.messages[-1]
        asked = turn.messages[:-1] if last.role == "assistant" else turn.messages
        prompt = prompt_tokens(engine, asked, turn.think)
        self._asked_tokens = len(prompt)
        if last.role == "assistant":
            prompt = self._begun(prompt, last.text)
        limit = session.config.context_tokens
        if len(prompt) >= limit:
            raise ContextFullError(len(prompt), limit)
        return prompt

    def _begun(self, asked: list[int], text: str) -> list[int]:
        """The tokens `asked` and those of the reply begun as `text`: the model's own where held."""
        engine, session = self._opened()
        held = list(session.tokens)
        own = self._kept(asked, held[len(asked) :])
        if held[: len(asked)] == asked and storable(own) == storable(text):
            return held
        if self._thinking is None:
            return asked + engine.tokenizer.encode(text)
        return asked + self._thinking.ids(*split(text), begun=self._thinking.begun(asked))

    def _kept(self, asked: Sequence[int], ids: Sequence[int]) -> str:
        """What a message keeps of the reply to `asked` that has these tokens."""
        if self._thinking is None:
            return self._opened()[0].tokenizer.decode(ids)
        reader, writer = self._thinking.reader(asked), ThinkingWriter()
        return writer.text(reader.feed(self._thinking.text(ids)))

    def _encode(self, turn: Turn, prompt: list[int], stream: Stream) -> int | None:
        """Has the session hold `prompt`; how much of it it held, None if that was stopped."""
        _, session = self._opened()
        self._before = session.rounds
        self._think = turn.think
        cached = session.align(prompt, edits=self._goes_back(turn.edited))
        stream.measured(self._stats(prompt, cached, 0))
        whole = cached == len(prompt) or session.prefill(
            progress=stream.prefilled, cancel=stream.cancelled
        )
        return cached if whole else None

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
        reason, thoughts = "cancelled", self._thoughts(prompt, stream, draft)
        for count, step in enumerate(steps, 1):
            thoughts.token(step.text)
            stream.measured(thoughts.measured(self._stats(prompt, cached, count)))
            reason = step.finish_reason or reason
        thoughts.end(reason)
        return reason

    @property
    def _shown_tokens(self) -> frozenset[int]:
        """The control tokens that thoughts are known by."""
        return frozenset() if self._thinking is None else self._thinking.shown

    def _thoughts(self, prompt: Sequence[int], stream: Stream, draft: int = 0) -> Thoughts:
        """What writes the reply to `prompt`, whose end may be what the reply began with."""
        if self._thinking is None:
            return Thoughts(stream, None, draft)
        asked, begun = prompt[: self._asked_tokens], prompt[self._asked_tokens :]
        thoughts = Thoughts(stream, self._thinking.reader(asked), draft)
        thoughts.begin(self._thinking.text(begun))
        return thoughts

    def _answer_branched(
        self, turn: Turn, prompt: list[int], seeds: Sequence[int], stream: Stream
    ) -> list[str]:
        """A token of each answer in every pass; they stay until one is kept."""
        from kvq_runtime.generation import GenerationOptions
        from kvq_runtime.passes import run

        reasons = ["cancelled"] * len(seeds)
        cached, (_, session) = self._encode(turn, prompt, stream), self._opened()
        if cached is None:
            return reasons
        options = GenerationOptions(
            max_tokens=turn.max_tokens, sampling=turn.sampling, shown=self._shown_tokens
        )
        thoughts = [self._thoughts(prompt, stream, draft) for draft in range(len(seeds))]
        self._branched = self._open_drafts.enter_context(session.branch_answers(seeds, options))
        count, spent_s = 0, 0.0
        while self._branched.going and not stream.cancelled():
            steps, seconds = run(self._branched.stepping(stream.cancelled))
            count, spent_s = count + len(steps), spent_s + seconds
            for draft, step in steps:
                thoughts[draft].token(step.text)
                reasons[draft] = step.finish_reason or reasons[draft]
            rate = count / spent_s if spent_s else 0.0
            stream.measured(replace(self._stats(prompt, cached, count), decode_tok_s=rate))
        for one, reason in zip(thoughts, reasons, strict=True):
            one.end(reason)
        return reasons

    def _settle(self) -> None:
        """Ends what drafts left open."""
        self._branched = None
        self._open_drafts.close()

    def begin(self) -> None:
        """Opens a fresh session in place of the old one."""
        self._settle()
        self._opened()[1].close()
        self._session = self._new_session(self._session_options)
        self._before = None

    def change_kv(
        self, k_bits: int | None, v_bits: int | None, budget: str | None, stream: Stream
    ) -> Facts:
        """Opens a session of the new plan and encodes the tokens again.

        The old session stays when the new one is refused or stopped.
        """
        self._settle()
        _, old = self._opened()
        asked = {"k_bits": k_bits, "v_bits": v_bits, "kv_budget": budget}
        options = self._session_options | {
            name: value for name, value in asked.items() if value is not None
        }
        session = self._new_session(options)
        try:
            tokens = old.tokens
            done = not tokens or session.prefill(
                tokens, progress=stream.prefilled, cancel=stream.cancelled
            )
        except BaseException:
            session.close()
            raise
        if not done:
            session.close()
            raise UsageError("the KV settings stay as they were: encoding again was stopped")
        old.close()
        self._session, self._session_options = session, options
        self._before = None
        stream.measured(self._stats(list(tokens), 0, 0))
        return self._facts()

    def reread(self, stream: Stream) -> int:
        """Encodes from the first stale token on."""
        from kvq_runtime.prediction import OFF

        self._settle()
        _, session = self._opened()
        stale = session.sequence.drop_stale()
        if stale:
            session.prefill(progress=stream.prefilled, cancel=stream.cancelled, predict=OFF)
        return stale

    def refine(self, stream: Stream) -> int:
        """Piece by piece from the left; the numbers after each."""
        _, session = self._opened()
        left = session.sequence.encoding.staleness.stale
        while left and not stream.cancelled():
            left = session.refresh(session.sequence.chunk_tokens, cancel=stream.cancelled)
            stream.measured(self._stats(session.tokens, len(session.tokens), 0))
        return left

    def save(self, path: Path) -> str | None:
        """Writes the session to `path`."""
        self._settle()
        _, session = self._opened()
        if not session.tokens:
            return None
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        session.save(path)
        return token_hash(session.tokens)

    def restore(self, path: Path) -> ReplyStats:
        """Becomes the session saved at `path`."""
        self._settle()
        _, session = self._opened()
        session.load(path)
        return replace(self._stats((), 0, 0), ttft_ms=0.0, decode_tok_s=0.0)

    def close(self) -> None:
        """Frees the session and the weights."""
        self._settle()
        if self._session is not None:
            self._session.close()
        if self._engine is not None:
            self._engine.close()
        self._session = self._engine = None

    def _goes_back(self, edited: Sequence[Message]) -> bool:
        """Whether there was an edit; the session then ends where its message did."""
        from kvq_runtime.hunks import common_prefix

        engine, session = self._opened()
        if edited:
            shared = common_prefix(session.tokens, prompt_tokens(engine, edited, self._think))
            session.rollback(len(session.tokens) - shared)
        return bool(edited)

    def _opened(self) -> "tuple[Engine, Session[Any]]":
        assert self._engine is not None
        assert self._session is not None
        return self._engine, self._session

    def _new_session(self, options: Mapping[str, Any]) -> "Session[Any]":
        """With room for drafts side by side, where the budget has that.

        Elsewhere they come one after the other: the smallest budget is the model's, as everywhere.
        """
        assert self._engine is not None
        # A drafter of guesses would make them as long as there is room for.
        if "draft" not in options:
            with suppress(BudgetError):
                return self._engine.session(draft_tokens=DRAFT_TOKENS, **options)
        return self._engine.session(**options)

    def _smaller_kv(self) -> str:
        """Widths and the smallest budget, where the cache is ours to make smaller."""
        arena = self._opened()[1].config.arena
        if arena is None:
            return ""
        plan = replace(arena.spec.plan, k_bits=4, v_bits=2)
        spec = arena.spec.changed(plan=plan, draft_tokens=DEFAULT_DRAFT_TOKENS)
        return f"4:2 {whole_units(spec.minimum_bytes)}"

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
            fingerprint=engine.model.fingerprint,
            keeps_kv=True,
            sampling=engine.model.sampling,
            opens=self._opens,
            smaller_kv=self._smaller_kv(),
        )

    def _stats(self, prompt: Sequence[int], cached: int, new_tokens: int) -> ReplyStats:
        _, session = self._opened()
        stats = session.stats()
        rounds = stats.rounds if self._before is None else stats.rounds - self._before
        return ReplyStats(
            prompt_tokens=len(prompt),
            cached_tokens=cached,
            new_tokens=new_tokens,
            ttft_ms=stats.ttft_ms,
            decode_tok_s=stats.decode_tok_s,
            context_tokens=len(session.tokens),
            kv_bytes=stats.kv_bytes,
            auxiliary_bytes=stats.auxiliary_bytes,
            mean_k_bits=stats.held.mean_k_bits,
            mean_v_bits=stats.held.mean_v_bits,
            evicted_share=stats.held.evicted_share,
            drafted_tokens=rounds.drafted_tokens,
            accepted_tokens=rounds.accepted_tokens,
            predicted_tokens=stats.edits.predicted_tokens,
        )


def prompt_tokens(engine: "Engine", messages: Sequence[Message], think: str = AUTO) -> list[int]:
    """Token ids of the conversation in the model's chat template, ready for a reply."""
    rows = [
        {
            "role": row.role,
            **(said(*split(row.text)) if row.role == "assistant" else {"content": row.text}),
        }
        for row in messages
    ]
    given = variables(Thinking.of(engine.tokenizer), think)
    return engine.tokenizer.chat(rows, add_generation_prompt=True, variables=given)


def token_hash(tokens: Sequence[int]) -> str:
    """Identifies a sequence of tokens."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()
