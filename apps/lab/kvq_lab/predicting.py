"""What predicted prompts cost against the time they save, for each number of computed layers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvq.errors import DataError, UsageError, argument
from kvq_apps.evaluation.measurement import Progress
from kvq_export.continuations import Passage, measure
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.engine import Engine
from kvq_runtime.prediction import WithAuxiliary, predictor_named

FOLLOWING_TOKENS = 64


def passages(
    tokenizer: Tokenizer, texts: Sequence[str], *, count: int, context: int
) -> list[Passage]:
    """Up to `count` prompts of `context` tokens, taken in turn from `texts`, spread over each.

    Raises `DataError` where no text is long enough.
    """
    length = context + FOLLOWING_TOKENS
    encoded = [tokenizer.encode(text) for text in texts]
    windows = [
        [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
        for ids in encoded
    ]
    windows = [own for own in windows if own]
    if not windows:
        raise DataError(
            f"no text has {length} tokens: a prompt and what follows; give longer files or a "
            f"shorter {argument('--context')}"
        )
    share = -(-count // len(windows))
    chosen = [ids for own in windows for ids in own[:: -(-len(own) // share)]][:count]
    return [Passage(prompt=ids[:context], following=ids[context:]) for ids in chosen]


def predicting(
    engine: Engine, asked: Sequence[Passage], progress: Progress, **options: Any
) -> dict[str, Any]:
    """A row for each number of computed layers, by the layers' own matrices or the bundle's maps.

    `predict` of the `options` says how many tokens are computed, and which auxiliary model is
    another row, with none of the layers computed.
    `share` is how far the nats of what follows are on the way from the computed prompt to none,
    `time_saved` the part of the prefill's time that is not needed.
    """
    layers = engine.model.num_layers
    asked_of = predictor_named(options.pop("predict", "prefix"))
    if asked_of is None:
        raise UsageError(
            f"{argument('--kv-predict')} off predicts nothing; leave it out, or say prefix:tail=32"
        )
    tokens = f"sink={asked_of.sink},tail={asked_of.tail},least={asked_of.least}"
    ways = {
        (computed, maps): f"prefix:layers={computed},maps={maps},{tokens}"
        for computed in range(1, layers)
        for maps in ("own", "auto")
        if maps == "own" or computed == engine.model.fitted_layers
    }
    if isinstance(asked_of, WithAuxiliary):
        ways[0, "auxiliary"] = f"auxiliary:path={asked_of.path},{tokens}"
    names = {f"{computed} {maps}": way for (computed, maps), way in ways.items()}
    found = measure(engine, asked, names, progress=progress, **options)
    rows = [
        {
            "layers": computed,
            "maps": "fitted" if maps == "auto" else maps,
            "nll": cost.nll,
            "kld": cost.kld,
            "share": cost.share,
            "time_saved": 1 - cost.prefill_s / found.exact_s,
        }
        for (computed, maps), cost in zip(ways, found.ways.values(), strict=True)
    ]
    return {
        "n": len(asked),
        "following_tokens": FOLLOWING_TOKENS,
        "exact_nll": found.exact_nll,
        "no_prompt_nll": found.no_prompt_nll,
        "rows": rows,
    }


def draw(path: Path, report: dict[str, Any]) -> None:
    """Quality over time saved, a line for each kind of matrices. Raises `UsageError`."""
    from kvq_apps.bench.plot import new_figure, write_figure

    figure = new_figure(6.0, 4.2)
    panel = figure.subplots()
    for kind, marker in (("own", "o"), ("fitted", "D"), ("auxiliary", "s")):
        rows = [row for row in report["rows"] if row["maps"] == kind]
        if not rows:
            continue
        saved = [100 * row["time_saved"] for row in rows]
        lost = [100 * row["share"] for row in rows]
        panel.plot(saved, lost, marker=marker, label=f"{kind} matrices")
        for row, x, y in zip(rows, saved, lost, strict=True):
            panel.annotate(f" {row['layers']} layers", (x, y))
    panel.set_xlabel("prefill time saved, %")
    panel.set_ylabel("lost of what the prompt is worth, %")
    panel.set_title(f"{report['model']}, {report['context']} tokens")
    panel.legend()
    write_figure(figure, path)
