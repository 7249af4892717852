"""Trains the constants of a bundle's weights until it answers more like its checkpoint.

The checkpoint reads the texts that ship without their ends, and its likeliest answers are
remembered. Then the bundle's weights read them: scales, zero points, norms and biases follow the
gradient of the divergence from those answers; codes stay. The engine runs both versions over the
ends of the texts, which no gradient saw, and the trained weights are kept only if their divergence
is smaller by `LEAST_GAIN`.

Owns the course of the training and that decision; `trainable` owns the arithmetic. Needs torch:
`export` imports it where tuning is asked for.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvq.config import FLOAT_WIDTH, KvPlan
from kvq.errors import UnsupportedModelError, argument
from kvq_export.config import ExportOptions
from kvq_export.fit import quality
from kvq_export.fit.calibrated import report_texts, tuning_texts
from kvq_export.fit.quality import Original
from kvq_export.fit.trainable import Decoder, Matrix, Trainable, tensor_of
from kvq_export.phases import Progress, no_progress
from kvq_export.write.layout import Layout
from kvq_export.write.staging import require_space
from kvq_export.write.writer import write_manifest, write_model
from kvq_models.config import Attention, Dense, ModelConfig
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.manifest import DATA_FILE, MODEL_FILE, Manifest

# Least decrease of the divergence on text that was not trained on, as a share of it.
LEAST_GAIN = 0.1
# Answers of the checkpoint that are remembered for each token; the rest count together.
LIKELY = 256
# How often the texts are read, one text a step; and Adam's first step sizes: of scales as shares of
# them, of zero points in codes, of norms and biases as they are. Three times these diverge.
PASSES = 4
GAIN_STEP, ZERO_STEP, VECTOR_STEP = 3e-4, 3e-3, 3e-4
BETAS = (0.9, 0.99)
# Share of all steps in which their size grows.
WARM = 0.05
# Texts that the checkpoint reads together: its weights are read from the disk for each group.
_TOGETHER = 8
_SMALLEST = 1e-6


def check_tunable(config: ModelConfig) -> None:
    """Raises `UnsupportedModelError` for parts of a model that `Decoder` does not know."""
    unknown = "embeddings of their own in each layer" if config.per_layer is not None else ""
    for layer in config.layers:
        mixer = layer.mixer
        if not isinstance(mixer, Attention):
            unknown = "layers that do not attend"
        elif mixer.kv_from is not None:
            unknown = "layers that read another's keys"
        elif mixer.output_gate or mixer.head_gate or mixer.value_norm or mixer.growth:
            unknown = "gated attention, normalised values or queries that grow"
        elif mixer.sinks:
            unknown = "sinks of attention"
        if not isinstance(layer.feed, Dense):
            unknown = "experts"
    if unknown:
        raise UnsupportedModelError(
            f"{argument('tune')} does not know {unknown}, which a {config.model_type} model has; "
            f"leave it out, or give the weights more bits with {argument('bits')}"
        )


def tune(
    folder: Path,
    manifest: Manifest,
    layout: Layout,
    original: Original,
    tokenizer: Tokenizer,
    options: ExportOptions,
    progress: Progress,
) -> tuple[Manifest, dict[str, Any]]:
    """Trains the bundle in `folder`; returns its manifest, with new weights if they gain enough.

    And a report: `kept` tells whether they do; `before` and `after` are divergences in nats per
    token; `error` is the standard error of their difference over the texts; then `trained_tokens`
    and `judged_tokens`.
    """
    # For a while the data is there twice.
    require_space(folder, layout.num_bytes)
    outer_threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        checkpoint = checkpoint_decoder(original)
        texts = tuning_texts(tokenizer, original.config, options.calibration_text)
        weights = _load(folder, layout)
        _train(weights, checkpoint, original, texts, progress)
        held_out = report_texts(tokenizer, original.config)
        progress(1, 1, "")
        with torch.no_grad():
            states = [checkpoint.hidden(tensor_of(ids[None])) for ids in held_out]
        with TemporaryDirectory(dir=folder) as temporary:
            trained_folder = Path(temporary)
            files = write_model(trained_folder, original.config, layout, weights, no_progress)
            files = {name: files[name] for name in (MODEL_FILE, DATA_FILE)}
            write_manifest(trained_folder, replace(manifest, files=files))
            progress(1, 1, "")
            before, after = (
                _divergences(version, held_out, states, checkpoint, options.threads)
                for version in (folder, trained_folder)
            )
            gained = bool(after.mean() <= (1 - LEAST_GAIN) * before.mean())
            if gained:
                os.replace(trained_folder / DATA_FILE, folder / DATA_FILE)
                manifest = replace(manifest, files={**manifest.files, DATA_FILE: files[DATA_FILE]})
                write_manifest(folder, manifest)
    finally:
        torch.set_num_threads(outer_threads)
    error = (after - before).std(ddof=1) / len(before) ** 0.5 if len(before) > 1 else 0.0
    return manifest, {
        "kept": gained,
        "before": float(before.mean()),
        "after": float(after.mean()),
        "error": float(error),
        "trained_tokens": texts.size,
        "judged_tokens": held_out.size,
    }


def checkpoint_decoder(original: Original) -> Decoder:
    """Returns the unquantised model; a few rows of a matrix are in memory."""
    checkpoint, sources = original.checkpoint, original.sources

    def product(name: str, x: Tensor) -> Tensor:
        return tensor_of(original.product(name, x.numpy()))

    def vector(name: str) -> Tensor:
        return tensor_of(checkpoint.read(sources[name]))

    def embed(ids: Tensor) -> Tensor:
        return tensor_of(checkpoint.read_rows(sources["embed"], ids.numpy()))

    return Decoder(original.config, product, vector, embed)


def _load(folder: Path, layout: Layout) -> Trainable:
    """Loads the weights of a bundle into memory: nothing of its files stays open."""
    bundle = Bundle.open(folder, verify="size")
    matrices = {
        name: Matrix(form, bundle.read_codes(name)) for name, form in layout.matrices.items()
    }
    vectors = {
        name: tensor_of(bundle.read_weight(name)).requires_grad_()
        for name in layout.names
        if name not in matrices
    }
    return Trainable(matrices, vectors)


def _train(
    weights: Trainable,
    checkpoint: Decoder,
    original: Original,
    texts: NDArray[np.int64],
    progress: Progress,
) -> None:
    """Changes `weights`, the same from run to run; `texts` int64 [S, T] are read `PASSES` times."""
    answers = _answers(checkpoint, texts, progress)
    matrices, vectors = weights.matrices, weights.vectors
    decoder = Decoder(
        original.config,
        lambda name, x: matrices[name].product(x),
        lambda name: vectors[name],
        matrices["embed"].rows,
    )
    zeros = (matrix.zeros for matrix in matrices.values())
    groups = [
        {"params": [matrix.gain for matrix in matrices.values()], "lr": GAIN_STEP},
        {"params": [points for points in zeros if points is not None], "lr": ZERO_STEP},
        {"params": list(vectors.values()), "lr": VECTOR_STEP},
    ]
    optimizer = torch.optim.Adam([group for group in groups if group["params"]], betas=BETAS)
    steps = PASSES * len(texts)
    shares = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_step_share, steps=steps))
    random = np.random.default_rng(0)
    order = np.concatenate([random.permutation(len(texts)) for _ in range(PASSES)])
    for step, place in enumerate(order):
        progress(step, steps, f"tuning the weights, step {step + 1} of {steps}")
        logits = decoder.logits(decoder.hidden(tensor_of(texts[place][None])))
        optimizer.zero_grad()
        cast(Any, _loss(logits, answers[int(place)])).backward()
        cast(Any, optimizer).step()
        shares.step()


def _step_share(step: int, *, steps: int) -> float:
    """Returns the share of the first step's size: up in a line, then down along a cosine."""
    return min(1.0, (step + 1) / (WARM * steps)) * (1 + np.cos(np.pi * step / steps)) / 2


def _answers(
    checkpoint: Decoder, texts: NDArray[np.int64], progress: Progress
) -> Sequence[tuple[Tensor, Tensor]]:
    """Returns what the checkpoint answers to each of `texts` int64 [S, T].

    These are the likeliest tokens int64 and their log-probabilities float32, both [T, n].
    """
    answers: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for start in range(0, len(texts), _TOGETHER):
            progress(0, 1, "")
            group = tensor_of(texts[start : start + _TOGETHER])
            states = checkpoint.hidden(group).view(*group.shape, -1)
            for hidden in states:
                logs = checkpoint.logits(hidden).log_softmax(dim=-1)
                best = logs.topk(min(LIKELY, logs.shape[1]), dim=-1)
                answers.append((best.indices, best.values))
    return answers


def _loss(logits: Tensor, answers: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the divergence of `logits` [T, vocab] from `answers`, in nats per token."""
    tokens, answer_logs = answers
    logs = logits.log_softmax(dim=-1).gather(1, tokens)
    known = answer_logs.exp()
    rest, actual_rest = (
        (1 - shares.sum(dim=1)).clamp(min=_SMALLEST) for shares in (known, logs.exp())
    )
    likely = (known * (answer_logs - logs)).sum(dim=1)
    return (likely + rest * (rest.log() - actual_rest.log())).mean()


def _divergences(
    folder: Path,
    texts: NDArray[np.int64],
    states: Sequence[Tensor],
    checkpoint: Decoder,
    threads: int,
) -> NDArray[np.float64]:
    """Measures nats per token of each of `texts`, as the engine runs the bundle, cache unquantised.

    `states` is what enters the checkpoint's head, float32 [T, hidden] each.
    """
    float_plan = KvPlan(k_bits=FLOAT_WIDTH, v_bits=FLOAT_WIDTH)
    nats: list[float] = []
    with quality.engine_run(Bundle.open(folder, verify="size"), threads) as run:
        for ids, hidden in zip(texts, states, strict=True):
            with torch.no_grad():
                expected = quality.log_softmax(checkpoint.logits(hidden).numpy())
            actual = quality.log_softmax(run(float_plan, ids))
            nats.append(float(quality.divergences(expected, actual).mean()))
    return np.array(nats)
