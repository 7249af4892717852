"""`kvq run`: continues a prompt and streams the answer to stdout."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvq.config import FLOAT_WIDTH
from kvq.errors import UsageError, argument
from kvq.formats import format_bytes
from kvq_apps.settings import flags, options
from kvq_apps.terminal import output, text_input
from kvq_apps.terminal.interrupt import INTERRUPTED, interruptible
from kvq_runtime.config import DEFAULT_MAX_TOKENS

if TYPE_CHECKING:
    from kvq_apps.thinking import AnswerThoughts
    from kvq_models.thinking import Piece
    from kvq_runtime.answer.constraint import Constraint
    from kvq_runtime.config import SessionConfig
    from kvq_runtime.engine import Engine
    from kvq_runtime.session.session import Session

# More characters than a token has on average; shorter prompts are always encoded.
CHARACTERS_PER_TOKEN = 16
# Figures of a session that `--json` has under the same names.
_REPORTED = (
    *("prompt_tokens", "new_tokens", "ttft_ms", "prefill_tok_s", "decode_tok_s"),
    *("rounds.drafted_tokens", "rounds.accepted_tokens", "tokens_per_round"),
    *("rounds.draft_ms", "rounds.pass_ms", "rounds.choose_ms", "draft_bytes", "auxiliary_bytes"),
    *("kv_bytes", "kv_bytes_peak", "kv_budget", "bytes_per_token", "bandwidth_gb_s"),
    *("held.mean_k_bits", "held.mean_v_bits", "held.evicted_share", "edits.predicted_tokens"),
)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvq run`."""
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
    flags.add_flags(parser, *flags.CONSTRAINT_FLAGS, "extract", "stream", "no-stream")
    flags.add_flags(
        parser, "usage", "verbose", verbose="with more: guesses, bytes, energy; implies --usage"
    )
    flags.add_flags(parser.add_argument_group("cache"), *flags.KV_FLAGS, *flags.PREDICT_FLAGS)
    flags.add_flags(parser.add_argument_group("sampling"), *flags.SAMPLING_FLAGS)


def run(arguments: Namespace) -> int:
    """Runs the command and returns its exit code."""
    if options.on_command_line(arguments, "think") and not _is_chat(arguments):
        raise UsageError(
            f"{argument('--think')} is for answers in the model's chat template; give "
            f"{argument('--chat')} too"
        )
    model, prompt = model_and_prompt(arguments)
    most = options.max_tokens(arguments.predict, DEFAULT_MAX_TOKENS)
    pieces = _pieces(arguments)
    sampling, constraint = options.sampling(arguments), _constraint(arguments)
    session_options = options.session_options(arguments) | options.keywords(arguments, seed="seed")

    from kvq_apps.names.engine import open_engine

    engine_options = options.engine_options(arguments)
    with (
        open_engine(model, **engine_options) as engine,
        _with_template(engine, arguments).session(**session_options) as session,
        interruptible() as cancel,
    ):
        _refuse_endless(prompt, engine, session)
        ids, begin_with, thoughts = _prompt_ids(engine, arguments, prompt)
        _note_what_fits(len(ids) + bool(begin_with), session.config)
        if thoughts is not None:
            constraint = thoughts.constraint(thoughts.said(constraint))
        meter = None
        if arguments.usage or arguments.verbose or arguments.json:
            from kvq_runtime.machine.energy import EnergyMeter

            meter = EnergyMeter()
        answer = _answer(
            session,
            ids,
            begin_with,
            arguments,
            most,
            sampling,
            constraint,
            cancel,
            pieces,
            thoughts,
        )
        report = _report(engine, session, answer)
        report["joules"] = None if meter is None else meter.joules()
        report["prompt_tokens"] = len(ids) + bool(begin_with)
    code = None
    if arguments.extract:
        from kvq_apps.chat.markdown_blocks import code_fences

        code = next(iter(code_fences(answer.text)), None)
    if arguments.json:
        report |= {"code": code} if arguments.extract else {}
        print_object = output.print_json_line if arguments.stream else output.print_json
        print_object(report)
    elif pieces is None:
        if arguments.extract and code is None:
            output.print_note("the answer has no block of code; this is the whole of it")
        whole = answer.text if code is None else code
        output.print_data(whole, end="" if whole.endswith("\n") else "\n")
    if arguments.usage or arguments.verbose:
        _print_usage(report, verbose=arguments.verbose)
    elif report["evicted_share"]:
        output.print_note(
            f"kvq: {output.share_text(report['evicted_share'])} of the text was given up to fit "
            f"{format_bytes(report['kv_budget'])}; give more with --kv-budget, and see --usage"
        )
    return INTERRUPTED if answer.finish_reason == "cancelled" else 0


def _constraint(arguments: Namespace) -> "Constraint | None":
    """Returns the constraint on the answer, if a flag asks for one."""
    constraints = options.keywords(arguments, **{flag: flag for flag in flags.CONSTRAINT_FLAGS})
    if len(constraints) > 1:
        names = " and ".join(argument(f"--{flag}") for flag in constraints)
        raise UsageError(f"{names} exclude each other; give one")
    from kvq_runtime.answer.constraint import Constraint

    for flag, value in constraints.items():
        if flag == "regex":
            return Constraint.regex(text_input.check_argument(value))
        text = text_input.read_text(value)
        constraint = Constraint.grammar(text) if flag == "grammar" else Constraint.json(text)
        for place in constraint.unheld:
            output.print_note(f"the answer is not held to a part of {value}: {place}")
        return constraint
    return None


def _is_chat(arguments: Namespace) -> bool:
    """Says whether the prompt goes through the model's chat template."""
    return arguments.system is not None or arguments.chat


def _with_template(engine: "Engine", arguments: Namespace) -> "Engine":
    """Returns the engine and, for a chat, begins to load its template in the background."""
    if _is_chat(arguments):
        engine.tokenizer.begin_chat()
    return engine


def _pieces(arguments: Namespace) -> Callable[[str], None] | None:
    """Returns a function that prints a piece of the answer; None to print it whole at the end."""
    if arguments.stream and arguments.no_stream:
        raise UsageError(
            f"{argument('--stream')} and {argument('--no-stream')} exclude each other; give one"
        )
    if arguments.json:
        return (lambda text: output.print_json_line({"text": text})) if arguments.stream else None
    whole = arguments.no_stream or arguments.extract
    return None if whole else partial(output.print_data, end="")


@dataclass(kw_only=True, slots=True)
class _GeneratedAnswer:
    text: str = ""
    thought: str = ""
    thought_tokens: int = 0
    finish_reason: str = "cancelled"


def model_and_prompt(arguments: Namespace) -> tuple[str | None, str]:
    """Returns the model that the words name, and the prompt with piped text before it."""
    *models, prompt = arguments.words or [""]
    if options.on_command_line(arguments, "model"):
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
    from kvq_apps.names.model_path import EMBEDDED

    if prompt in EMBEDDED and not models and not piped:
        output.print_note(f"{prompt} is taken for the prompt; to run it: kvq run {prompt} PROMPT")
    if not text:
        raise UsageError("the prompt is empty; write `kvq run [MODEL] PROMPT` or pipe text in")
    return model, text


def _refuse_endless(prompt: str, engine: "Engine", session: "Session[Any]") -> None:
    """Raises `UsageError` for a prompt whose beginning alone is twice too long.

    Encoding megabytes of text would take many seconds and lead to the same error.
    """
    limit = session.config.context_tokens
    head = prompt[: limit * CHARACTERS_PER_TOKEN]
    if len(head) < len(prompt) and len(engine.tokenizer.encode(head)) > 2 * limit:
        raise UsageError(
            f"the prompt has more than {2 * limit} tokens and the context holds {limit}; shorten "
            f"the prompt or raise {session.config.limiting_arguments}"
        )


def _note_what_fits(prompt_tokens: int, config: "SessionConfig") -> None:
    """Notes before the work begins that the cache cannot hold the whole prompt at first widths."""
    if prompt_tokens > config.budget_tokens:
        output.print_note(
            f"kvq: the prompt has {prompt_tokens:,} tokens; the cache of "
            f"{format_bytes(config.budget_bytes)} holds "
            f"{output.cache_sentence(output.cache_facts(config))}"
        )


def _prompt_ids(
    engine: "Engine", arguments: Namespace, prompt: str
) -> "tuple[list[int], bytes, AnswerThoughts | None]":
    """Returns the token ids of the prompt, the bytes the answer begins with, and its thoughts.

    A chat's prompt goes through the template. A plain prompt is healed: a part of its end is cut
    off, and the answer begins with it.
    """
    if not _is_chat(arguments):
        from kvq_runtime.answer.healing import heal

        ids = engine.tokenizer.encode(prompt, start=True)
        ids, begin_with = (ids, b"") if arguments.no_heal else heal(engine.tokenizer, ids)
        return ids, begin_with, None
    from kvq_apps.thinking import AUTO, HIDE, AnswerThoughts, variables
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
    return (
        ids,
        b"",
        AnswerThoughts(thinking=thinking, begun=thinking.begun(ids), visible=think != HIDE),
    )


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
    thoughts: "AnswerThoughts | None",
) -> _GeneratedAnswer:
    """Generates the whole answer; `pieces` gets its text piece by piece."""
    answer = _GeneratedAnswer()
    with output.ProgressBar(quiet=not sys.stderr.isatty() or len(ids) < 2048) as progress:
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
        shown=frozenset() if thoughts is None else thoughts.thinking.shown,
        cancel=cancel,
    )
    printer = _AnswerPrinter(arguments, pieces, aside=thoughts is not None and thoughts.visible)
    reader = None if thoughts is None else thoughts.reader()
    for step in steps:
        parts: list[Piece] = [step.text] if step.text else []
        if reader is not None:
            answer.thought_tokens += reader.thinking
            parts = reader.feed(step.text)
            parts += reader.flush() if step.finish_reason else []
        for piece in parts:
            if isinstance(piece, str):
                printer.say(piece)
                answer.text += piece
            else:
                printer.think(piece.text)
                answer.thought += piece.text
        answer.finish_reason = step.finish_reason or answer.finish_reason
    printer.end(answer)
    return answer


class _AnswerPrinter:
    """Prints an answer piece by piece with the function `pieces`, if there is one.

    With `aside` the thought goes to stderr, or is a line of its own in a stream of JSON.
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
        """Prints a piece of the thought."""
        if self._aside and not self._json:
            self._thinking = True
            output.print_aside(text)
        elif self._aside and self._streams:
            output.print_json_line({"thought": text})

    def say(self, text: str) -> None:
        """Prints a piece of the answer."""
        self._end_thought()
        if self._pieces is not None:
            self._pieces(text)

    def end(self, answer: _GeneratedAnswer) -> None:
        """Ends the output after the whole answer."""
        self._end_thought()
        if self._pieces is not None and not self._json and not answer.text.endswith("\n"):
            output.print_data("")

    def _end_thought(self) -> None:
        """Prints an empty line between the thought and the answer."""
        thinking, self._thinking = self._thinking, False
        if thinking:
            output.print_aside("\n\n")


def _report(engine: "Engine", session: "Session[Any]", answer: _GeneratedAnswer) -> dict[str, Any]:
    from kvq_runtime.session.metrics import figures

    stats = session.stats()
    return {
        "text": answer.text,
        "thought": answer.thought,
        "thought_tokens": answer.thought_tokens,
        "finish_reason": answer.finish_reason,
        "model": engine.model.name,
        "backend": engine.backend.name,
        "threads": engine.threads,
        **output.cache_facts(session.config),
        "kv_policy": session.config.policy,
        **figures(stats, _REPORTED),
        "kv_read_share": stats.held.read_share,
        "kv_offloaded_bytes": stats.held.offloaded_bytes,
        "kv_streamed_bytes": stats.held.streamed_bytes,
        "experts": output.experts_json(engine),
    }


def _print_usage(report: dict[str, Any], *, verbose: bool) -> None:
    """Prints how fast the answer was and what the cache holds, then every other number."""
    output.print_note_below(f"{_speed_text(report)}\n{_cache_text(report)}")
    for name, text in _usage_rows(report) if verbose else ():
        if text:
            output.print_note(f"{name}: {text}")


def _speed_text(report: dict[str, Any]) -> str:
    """Says `42 tokens in 1.2 s (35 a second), the first after 0.3 s; the prompt's 9 ...`."""
    count, rate = report["new_tokens"], report["decode_tok_s"]
    first_s = report["ttft_ms"] / 1000
    total_s = first_s + (max(0, count - 1) / rate if rate else 0)
    speed = f" ({rate:.0f} a second)" if rate else ""
    prompt = f"the prompt's {report['prompt_tokens']:,}"
    if report["prefill_tok_s"]:
        prompt += f" read at {report['prefill_tok_s']:,.0f} a second"
    return (
        f"{count:,} tokens in {output.duration(total_s)}{speed}, the first after "
        f"{output.duration(first_s)}; {prompt}."
    )


def _cache_text(report: dict[str, Any]) -> str:
    """Says what the cache uses of its budget, what that holds, and what was kept of the text."""
    outside = report["kv_offloaded_bytes"]
    tier = f" ({format_bytes(outside)} of it in the second tier)" if outside else ""
    return (
        f"Cache: {format_bytes(report['kv_bytes'])}{tier} of {format_bytes(report['kv_budget'])}, "
        f"which holds {output.cache_sentence(report)}. {_bits_now(report)}"
    )


def _bits_now(report: dict[str, Any]) -> str:
    """Says at how many bits the text is held now, and how much of it was given up."""
    bits = report["mean_k_bits"], report["mean_v_bits"]
    share = report["evicted_share"]
    lost = f"{output.share_text(share)} of the text given up" if share else "none given up"
    if bits == (FLOAT_WIDTH, FLOAT_WIDTH):
        return f"This text: still at 16 bits, {lost}."
    if not any(bits):
        return f"This text: {lost}."
    return f"This text: {_mean_bits(*bits)} on average, {lost}."


def _mean_bits(k_bits: float, v_bits: float) -> str:
    keys, values = f"{k_bits:.1f}", f"{v_bits:.1f}"
    return f"{keys} bits" if keys == values else f"{keys} bits for keys and {values} for values"


def _usage_rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "cache per token", f"{report['bytes_per_token']:.0f} bytes"
    yield "memory read", f"{report['bandwidth_gb_s']:.1f} GB a second while writing"
    if report["drafted_tokens"]:
        yield (
            "guesses",
            f"{report['accepted_tokens']} of {report['drafted_tokens']} tokens guessed ahead were "
            f"right: {report['tokens_per_round']:.2f} tokens each time the model ran; guessing "
            f"took {report['draft_ms']:.1f} ms",
        )
    if report["kv_read_share"] < 1:
        yield "cache read", f"{report['kv_read_share']:.0%} of what could be"
    if report["predicted_tokens"]:
        yield "predicted", f"{report['predicted_tokens']} tokens of the prompt were not computed"
    if report["kv_offloaded_bytes"]:
        yield "cache in the second tier", format_bytes(report["kv_offloaded_bytes"])
    yield "experts", output.experts_text(report["experts"])
    if report["joules"] is not None:
        yield "energy", f"{report['joules']:.1f} J, other programs' work included"
