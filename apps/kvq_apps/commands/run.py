"""`kvq run`: continue a prompt and stream the answer to stdout."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvq.config import FLOAT_WIDTH
from kvq.errors import UsageError, argument
from kvq.formats import format_bytes
from kvq_apps import flags, options, output, text_input
from kvq_apps.interrupt import INTERRUPTED, interruptible
from kvq_runtime.config import DEFAULT_MAX_TOKENS

if TYPE_CHECKING:
    from kvq_apps.thinking import Thinks
    from kvq_models.thinking import Piece
    from kvq_runtime.constraint import Constraint
    from kvq_runtime.engine import Engine
    from kvq_runtime.session import Session

# More than any text has on average; a prompt of fewer is counted as a whole.
CHARACTERS_PER_TOKEN = 16
# Of a session's figures those that `--json` tells under their own names.
_REPORTED = (
    *("prompt_tokens", "new_tokens", "ttft_ms", "prefill_tok_s", "decode_tok_s"),
    *("rounds.drafted_tokens", "rounds.accepted_tokens", "tokens_per_round"),
    *("rounds.draft_ms", "rounds.pass_ms", "rounds.choose_ms", "draft_bytes", "auxiliary_bytes"),
    *("kv_bytes", "kv_bytes_peak", "kv_budget", "bytes_per_token", "bandwidth_gb_s"),
    *("held.mean_k_bits", "held.mean_v_bits", "held.evicted_share", "edits.predicted_tokens"),
)
CONSTRAINT_FLAGS = ("json-schema", "grammar", "regex")


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `kvq run`."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[MODEL] PROMPT",
        help="one word or quoted text is the prompt, after -m all words; `-` reads it from stdin, "
        "and piped text goes before it",
    )
    flags.add_flags(parser, *flags.ENGINE_FLAGS)
    flags.add_flags(parser, "ctx-size", "predict", "system", "chat", "think", "stop", "no-heal")
    flags.add_flags(parser, "draft", "draft-model")
    flags.add_flags(parser, *CONSTRAINT_FLAGS, "extract", "stream", "no-stream", "usage")
    flags.add_flags(parser.add_argument_group("cache"), *flags.KV_FLAGS, *flags.PREDICT_FLAGS)
    flags.add_flags(parser.add_argument_group("sampling"), *flags.SAMPLING_FLAGS)
    batch = parser.add_argument_group("many prompts")
    batch.add_argument(
        "--batch",
        dest="batch_file",
        metavar="FILE.jsonl",
        help="answer every line, an object with `prompt` or `messages` and any field of the HTTP "
        "reference; goes on with --out",
    )
    flags.add_flags(
        batch,
        "out",
        "sessions",
        "ray",
        "replicas",
        "autoscale",
        out="batch: the answers, one a line, in the prompts' order",
    )


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    if arguments.batch_file is not None:
        from kvq_apps import batch

        return batch.run(arguments)
    _check_flags(arguments)
    model, prompt = model_and_prompt(arguments)
    most = options.max_tokens(arguments.predict, DEFAULT_MAX_TOKENS)
    pieces = _pieces(arguments)
    sampling, constraint = options.sampling(arguments), _constraint(arguments)
    session_options = options.session_options(arguments) | options.given(arguments, seed="seed")

    from kvq_apps.opening import open_engine
    from kvq_runtime.energy import Meter

    engine_options = options.engine_options(arguments)
    with (
        open_engine(model, **engine_options) as engine,
        engine.session(**session_options) as session,
        interruptible() as cancel,
    ):
        _refuse_endless(prompt, engine, session)
        ids, begin_with, thinks = _prompt_ids(engine, arguments, prompt)
        if thinks is not None:
            constraint = thinks.constraint(thinks.said(constraint))
        meter = Meter() if arguments.usage or arguments.json else None
        answer = _answer(
            session, ids, begin_with, arguments, most, sampling, constraint, cancel, pieces, thinks
        )
        report = _report(engine, session, answer)
        report["joules"] = None if meter is None else meter.joules()
        report["prompt_tokens"] = len(ids) + bool(begin_with)
    code = _first_fence(answer.text) if arguments.extract else None
    if arguments.json:
        report |= {"code": code} if arguments.extract else {}
        print_object = output.print_json_line if arguments.stream else output.print_json
        print_object(report)
    elif pieces is None:
        if arguments.extract and code is None:
            output.print_note("the answer has no block of code; this is the whole of it")
        _print_whole(answer.text if code is None else code)
    if arguments.usage:
        _print_usage(report)
    elif report["evicted_share"]:
        output.print_note(
            f"kvq: {output.share_text(report['evicted_share'])} of the text was given up to fit "
            f"{format_bytes(report['kv_budget'])}; give more with --kv-budget, and see --usage"
        )
    return INTERRUPTED if answer.finish_reason == "cancelled" else 0


def _check_flags(arguments: Namespace) -> None:
    """Raises `UsageError` for flags that ask for nothing here."""
    for name in ("out", "ray", "replicas", "autoscale"):
        if options.written(arguments, name):
            raise UsageError(
                f"{argument(f'--{name}')} is for {argument('--batch')} FILE, which answers many "
                "prompts"
            )
    if options.written(arguments, "think") and not _is_chat(arguments):
        raise UsageError(
            f"{argument('--think')} is for answers in the model's chat template; give "
            f"{argument('--chat')} too"
        )


def _constraint(arguments: Namespace) -> "Constraint | None":
    """What the answer has to look like, if one of the flags says so."""
    asked = options.given(arguments, **{flag: flag for flag in CONSTRAINT_FLAGS})
    if len(asked) > 1:
        names = " and ".join(argument(f"--{flag}") for flag in asked)
        raise UsageError(f"{names} exclude each other; give one")
    from kvq_runtime.constraint import Constraint

    for flag, value in asked.items():
        if flag == "regex":
            return Constraint.regex(text_input.check_argument(value))
        text = text_input.read_text(value)
        return Constraint.grammar(text) if flag == "grammar" else Constraint.json(text)
    return None


def _is_chat(arguments: Namespace) -> bool:
    """Whether the prompt goes through the model's chat template."""
    return arguments.system is not None or arguments.chat


def _pieces(arguments: Namespace) -> Callable[[str], None] | None:
    """Prints a piece of the answer as it comes; None: the answer is printed whole."""
    if arguments.stream and arguments.no_stream:
        raise UsageError(
            f"{argument('--stream')} and {argument('--no-stream')} exclude each other; give one"
        )
    if arguments.json:
        return (lambda text: output.print_json_line({"text": text})) if arguments.stream else None
    whole = arguments.no_stream or arguments.extract
    return None if whole else lambda text: output.print_data(text, end="")


def _print_whole(text: str) -> None:
    output.print_data(text, end="" if text.endswith("\n") else "\n")


def _first_fence(text: str) -> str | None:
    """The first fenced block of code of a markdown text, or None."""
    from kvq_apps.chat.blocks import code_fences

    return next(iter(code_fences(text)), None)


@dataclass(kw_only=True, slots=True)
class _Answer:
    text: str = ""
    thought: str = ""
    thought_tokens: int = 0
    finish_reason: str = "cancelled"


def model_and_prompt(arguments: Namespace) -> tuple[str | None, str]:
    """Which of the words is the model, and the prompt with piped text before it."""
    *models, prompt = arguments.words or [""]
    if options.written(arguments, "model"):
        models, prompt = [], " ".join(arguments.words)
    if len(models) > 1:
        raise UsageError(
            "give [MODEL] PROMPT: at most two words; quote the prompt, or name the model with -m"
        )
    model = models[0] if models else arguments.model
    if prompt == "-":
        return model, text_input.read_standard_input()
    piped = text_input.piped_input()
    prompt = text_input.check_argument(prompt)
    text = f"{piped.rstrip()}\n\n{prompt}" if piped.strip() and prompt else piped + prompt
    from kvq_apps.model_path import EMBEDDED

    if prompt in EMBEDDED and not models and not piped:
        output.print_note(f"{prompt} is taken for the prompt; to run it: kvq run {prompt} PROMPT")
    if not text:
        raise UsageError("the prompt is empty; write `kvq run [MODEL] PROMPT` or pipe text in")
    return model, text


def _refuse_endless(prompt: str, engine: "Engine", session: "Session[Any]") -> None:
    """Raises `UsageError` for a prompt whose beginning alone is twice too long.

    Making tokens of megabytes would take many seconds, only to say the same.
    """
    limit = session.config.context_tokens
    head = prompt[: limit * CHARACTERS_PER_TOKEN]
    if len(head) < len(prompt) and len(engine.tokenizer.encode(head)) > 2 * limit:
        raise UsageError(
            f"the prompt has more than {2 * limit} tokens and the context holds {limit}; shorten "
            f"the prompt or raise {session.config.what_limits}"
        )


def _prompt_ids(
    engine: "Engine", arguments: Namespace, prompt: str
) -> "tuple[list[int], bytes, Thinks | None]":
    """Token ids of the prompt, in the chat template when one was asked for.

    A plain prompt is healed: what was cut off its end is the bytes that the answer begins with.
    Last comes how an answer to it thinks, None: not at all.
    """
    if not _is_chat(arguments):
        from kvq_runtime.healing import heal

        ids = engine.tokenizer.encode(prompt, start=True)
        ids, begin_with = (ids, b"") if arguments.no_heal else heal(engine.tokenizer, ids)
        return ids, begin_with, None
    from kvq_apps.thinking import AUTO, HIDE, Thinks, variables
    from kvq_models.thinking import Thinking

    messages = [{"role": "user", "content": prompt}]
    if arguments.system is not None:
        system = text_input.check_argument(arguments.system)
        messages.insert(0, {"role": "system", "content": system})
    thinking, think = Thinking.of(engine.tokenizer), arguments.think or AUTO
    ids = engine.tokenizer.chat(
        messages, add_generation_prompt=True, variables=variables(thinking, think)
    )
    if thinking is None:
        return ids, b"", None
    return ids, b"", Thinks(thinking=thinking, begun=thinking.begun(ids), told=think != HIDE)


def _answer(
    session: "Session[Any]",
    ids: list[int],
    begin_with: bytes,
    arguments: Namespace,
    most: int | None,
    sampling: Any,
    constraint: "Constraint | None",
    cancel: Callable[[], bool],
    pieces: Callable[[str], None] | None,
    thinks: "Thinks | None",
) -> _Answer:
    """Generates to the end; `pieces` gets the text as it comes."""
    answer = _Answer()
    with output.Progress(quiet=not sys.stderr.isatty() or len(ids) < 2048) as progress:
        complete = session.prefill(ids, progress=progress, cancel=cancel)
    if not complete:
        output.print_note("")
        return answer
    steps = session.generate(
        most,
        sampling=sampling,
        stop_strings=arguments.stop or (),
        begin_with=begin_with,
        constraint=constraint,
        shown=frozenset() if thinks is None else thinks.thinking.shown,
        cancel=cancel,
    )
    told = _Telling(arguments, pieces, aside=thinks is not None and thinks.told)
    reader = None if thinks is None else thinks.reader()
    for step in steps:
        found: list[Piece] = [step.text] if step.text else []
        if reader is not None:
            answer.thought_tokens += reader.thinking
            found = reader.feed(step.text)
            found += reader.flush() if step.finish_reason else []
        for piece in found:
            if isinstance(piece, str):
                told.say(piece)
                answer.text += piece
            else:
                told.think(piece.text)
                answer.thought += piece.text
        answer.finish_reason = step.finish_reason or answer.finish_reason
    told.end(answer)
    return answer


class _Telling:
    """Prints an answer as it comes, by `pieces` where that is not None.

    `aside`: what is thought goes to stderr, or is a line of its own in a stream of JSON.
    """

    def __init__(
        self, arguments: Namespace, pieces: Callable[[str], None] | None, *, aside: bool
    ) -> None:
        self._json = arguments.json
        self._streams = arguments.stream
        self._pieces = pieces
        self._aside = aside
        self._thinking = False

    def think(self, text: str) -> None:
        """A piece of what is thought."""
        if self._aside and not self._json:
            self._thinking = True
            output.print_aside(text)
        elif self._aside and self._streams:
            output.print_json_line({"thought": text})

    def say(self, text: str) -> None:
        """A piece of the answer."""
        self._end_thought()
        if self._pieces is not None:
            self._pieces(text)

    def end(self, answer: _Answer) -> None:
        """The answer is whole."""
        self._end_thought()
        if self._pieces is not None and not self._json and not answer.text.endswith("\n"):
            output.print_data("")

    def _end_thought(self) -> None:
        """An empty line parts what was thought from the answer."""
        thinking, self._thinking = self._thinking, False
        if thinking:
            output.print_aside("\n\n")


def _report(engine: "Engine", session: "Session[Any]", answer: _Answer) -> dict[str, Any]:
    from kvq_runtime.metrics import figures

    stats = session.stats()
    plan = session.config.plan
    return {
        "text": answer.text,
        "thought": answer.thought,
        "thought_tokens": answer.thought_tokens,
        "finish_reason": answer.finish_reason,
        "model": engine.model.name,
        "backend": engine.backend.name,
        "threads": engine.threads,
        "kv": output.kv_text(plan.k_bits, plan.v_bits),
        "kv_policy": session.config.policy,
        "context": session.config.context_tokens,
        "budget_tokens": session.config.budget_tokens,
        **figures(stats, _REPORTED),
        "kv_read_share": stats.held.read_share,
        "kv_offloaded_bytes": stats.held.offloaded_bytes,
        "kv_streamed_bytes": stats.held.streamed_bytes,
        "experts": output.experts_json(engine),
    }


def _print_usage(report: dict[str, Any]) -> None:
    share = report["kv_read_share"]
    read = f", {share:.0%} of what could be read" if share < 1 else ""
    predicted = report["predicted_tokens"]
    read += f", {predicted} tokens predicted" if predicted else ""
    drafts = (
        f"; drafts: {report['accepted_tokens']} of {report['drafted_tokens']} tokens right, "
        f"{report['tokens_per_round']:.2f} tokens per pass, {report['draft_ms']:.1f} ms for it"
        if report["drafted_tokens"]
        else ""
    )
    output.print_note_below(
        f"{report['prompt_tokens']} prompt tokens, first token after {report['ttft_ms']:.0f} ms "
        f"({report['prefill_tok_s']:.0f} tok/s); {report['new_tokens']} new tokens at "
        f"{report['decode_tok_s']:.1f} tok/s, {report['bandwidth_gb_s']:.1f} GB/s; KV "
        f"{report['kv']}: {format_bytes(report['kv_bytes'])} of "
        f"{format_bytes(report['kv_budget'])}, which holds "
        f"{output.holding_text(report['budget_tokens'], report['context'], report['kv'])}; "
        f"{report['bytes_per_token']:.0f} bytes per token, "
        f"{_bits(report)}, {report['evicted_share']:.0%} evicted{read}{drafts}"
        f"{output.experts_text(report['experts'])}{_energy(report)}"
    )


def _energy(report: dict[str, Any]) -> str:
    """What the whole machine took meanwhile, where its processor counts it."""
    joules = report["joules"]
    return "" if joules is None else f"; {joules:.1f} J, other programs' work included"


def _bits(report: dict[str, Any]) -> str:
    """How many bits what is held has on average."""
    bits = report["mean_k_bits"], report["mean_v_bits"]
    if report["kv"] != "fp" and bits == (FLOAT_WIDTH, FLOAT_WIDTH):
        return "not quantised yet: it all fits in fp16"
    return f"mean bits {bits[0]:.1f}:{bits[1]:.1f}"
