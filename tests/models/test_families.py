"""Parity: every family, exported and run by the engine, against transformers.

The peer is the transformers model with the bundle's own restored weights, so rounding weights
counts for neither side. It is compared with two backends: numpy's products, which keep their
activations in float32 and leave nothing but the cache's float16 keys and values, and the graph as
it ships. `--log-cli-level=info` shows the divergences measured.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.masking_utils import eager_mask

import tiny
from kvq.cache import Cache, CacheSpec
from kvq.config import Budget, KvPlan
from kvq_export.config import ExportOptions, WeightFormat
from kvq_lab.engine_transformers import cache_argument
from kvq_models.reference import forward
from kvq_models.registry import read_checkpoint
from kvq_runtime.backends import SequencePass, missing
from kvq_runtime.backends.paged import class_fields
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from logits import divergence, log_softmax
from numpy_cache import storage_named
from shelf import Shelf

logger = logging.getLogger(__name__)

# A prompt beyond every window and the 64 tokens (linear: 128) that scaled ropes were "trained" on;
# with the steps it stays within the shortest context, 256.
PROMPT_TOKENS, STEPS = 180, 64
# Greedy tokens are decided only where the best leads by more than the tolerance, so of this many
# random prompts the one is taken whose smallest lead is the largest.
PROMPTS = 16
CHUNKS = {"1": 1, "7": 7, "64": 64, "all": 256}
FLOAT_PLAN = KvPlan(k_bits=16, v_bits=16)
FLOAT_KV = {"k_bits": 16, "v_bits": 16}
GREEDY = Sampling(temperature=0)

# The (largest, root mean square) difference of a logit, whose standard deviation is near 3, when
# the peer rounds keys and values to float16 as the cache does. What is left is float32 noise that
# rounds some to the next float16: 1 in 1000 in the first layer, up to 1 in 20 in the second.
ROUNDED_TOLERANCE = 0.01, 6e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Holds what one case may differ by.

    `logit`: the largest difference from a peer with float32 keys and values, float activations;
    `shipped` and `four_bit`: mean KL divergence in nats of the shipped graph with an unquantised
    cache, at 8 bits from its own weights, at 4 bits from the checkpoint. `coarse` is `shipped` at 4
    bits, where super-blocks round activations over 256 columns; None: as at 8 bits.
    """

    logit: float = 0.03
    shipped: float = 0.007
    four_bit: float = 1.1
    coarse: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Describes a case of `tiny.CASES`: keys that replace its config, arguments for the peer."""

    row: str
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    peer_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    bounds: Bounds = Bounds()


# Rows of which little is lost (a strong residual), or much (three layers, narrow rope).
BOUNDS = {
    "llama-yarn": Bounds(logit=0.04, shipped=0.009, four_bit=1.3),
    "qwen2-window": Bounds(shipped=0.01, four_bit=1.6),
    "qwen3": Bounds(logit=0.015, shipped=0.0035, four_bit=0.55),
    "phi3-longrope": Bounds(logit=0.04, shipped=0.009, four_bit=1.4),
    "gemma2": Bounds(logit=0.04),
    "gemma": Bounds(logit=0.09, shipped=0.013, coarse=0.0135, four_bit=1.7),
    "smollm3": Bounds(shipped=0.015, four_bit=1.7),
    "exaone4": Bounds(logit=0.015, shipped=0.004, four_bit=0.6),
    "exaone4-whole": Bounds(logit=0.015, shipped=0.004, four_bit=0.6),
    "gemma3": Bounds(logit=0.006, shipped=1e-6, four_bit=1e-4),
    # What rounded activations did to a state stays in it.
    "qwen3-5": Bounds(shipped=0.04, four_bit=2.2),
    # Rounded activations send a token near the edge between two experts to the other one.
    "olmoe": Bounds(shipped=0.08),
    "qwen3-moe": Bounds(shipped=0.03),
    "gemma4-experts": Bounds(shipped=0.05),
    "mixtral": Bounds(shipped=0.07, four_bit=1.3),
    "gpt-oss": Bounds(shipped=0.1, four_bit=1.6),
    "qwen3-5-moe": Bounds(shipped=0.1, four_bit=2.2),
    "qwen3-next": Bounds(shipped=0.1, four_bit=2.2),
    "lfm3": Bounds(shipped=0.02, four_bit=1.6),
    "lfm2-moe": Bounds(shipped=0.05, four_bit=1.6),
}
CASES = {name: Case(row=name, bounds=BOUNDS.get(name, Bounds())) for name in tiny.CASES}
# The row's tied head on scaled embeddings always repeats the last token; this one does not.
CASES["gemma3-soft-cap"] = Case(
    row="gemma3",
    keys={"tie_word_embeddings": False, "attn_logit_softcapping": 1.5},
    peer_arguments={"softcap": 1.5},
    bounds=Bounds(logit=0.006, shipped=6e-4, four_bit=0.08),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """Holds a prompt and its greedy continuation by the peer, int64 [T] and [STEPS].

    `logits` float32 [T + STEPS, V] are the peer's; `rounded` those with float16 keys and values;
    `lead` is the smallest of a greedy token over the next best.
    """

    prompt: np.ndarray
    steps: np.ndarray
    logits: np.ndarray
    rounded: np.ndarray
    lead: float

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([self.prompt, self.steps])


class Peer:
    """Wraps a transformers model in float32; `rounded` picks float16 keys and values."""

    def __init__(self, checkpoint: Path, arguments: Mapping[str, Any]) -> None:
        transformers.AttentionInterface.register("rounded", rounded_attention)
        transformers.AttentionMaskInterface.register("rounded", eager_mask)
        self.arguments = arguments
        self.model = tiny.transformers_model(checkpoint)

    @classmethod
    def restored(
        cls, checkpoint: Path, bundle: Bundle, folder: Path, arguments: Mapping[str, Any]
    ) -> Peer:
        """Returns the model with every weight as the bundle restores it, by its name in a file."""
        family, config, _ = read_checkpoint(checkpoint)
        read = tiny.read_safetensors(checkpoint / "model.safetensors")
        tensors = {name: tensor.copy() for name, tensor in read.items()}
        known = tiny.parts_of(family, config, tensors)
        for name, source in family.weights(config).items():
            restored = bundle.read_weight(name) / np.float32(source.scale) - np.float32(
                source.offset
            )
            rows = [len(known[part]) for part in source.parts]
            assert sum(rows) == len(restored)
            parts = np.split(restored, np.cumsum(rows)[:-1])
            if source.factors is not None:
                factors = tensors[source.factors].astype(np.float32)
                parts = [part / factor for part, factor in zip(parts, factors, strict=True)]
            for part, values in zip(source.parts, parts, strict=True):
                known[part][...] = values
        shutil.copy(checkpoint / "config.json", folder)
        tiny.write_safetensors(folder / "model.safetensors", tensors)
        return cls(folder, arguments)

    @torch.no_grad()
    def embeddings(self, ids: np.ndarray) -> torch.Tensor:
        return self.model.get_input_embeddings()(torch.from_numpy(ids))

    @torch.no_grad()
    def mixed_logits(self, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Logits float32 [T, V] of tokens that are each a sum of embeddings, ids int64 [T, K]."""
        shares = torch.from_numpy(weights)
        inputs = {"inputs_embeds": (self.embeddings(ids) * shares[..., None]).sum(1)}
        if getattr(self.model.config, "hidden_size_per_layer_input", 0):
            per_layer = self.model.model.get_per_layer_inputs(torch.from_numpy(ids))
            inputs["per_layer_inputs"] = (per_layer * shares[..., None, None]).sum(1)
        return self._logits({name: value[None] for name, value in inputs.items()}, rounded=True)

    @torch.no_grad()
    def logits(self, ids: np.ndarray, *, rounded: bool = False) -> np.ndarray:
        """Logits float32 [T, V] of ids int64 [T]."""
        return self._logits({"input_ids": torch.from_numpy(ids)[None]}, rounded=rounded)

    def _logits(self, tokens: Mapping[str, torch.Tensor], *, rounded: bool) -> np.ndarray:
        self.model.set_attn_implementation("rounded" if rounded else "eager")
        return self.model(**tokens, **self.arguments).logits[0].numpy()

    @torch.no_grad()
    def continuation(self) -> Continuation:
        """Returns the greedy continuation of the most decided of some random prompts."""
        draw = np.random.default_rng(1)
        prompts = draw.integers(0, tiny.VOCAB_SIZE, (PROMPTS, PROMPT_TOKENS))
        tokens, logits, past = [torch.from_numpy(prompts)], [], None
        cache = cache_argument(self.model)
        for _ in range(STEPS + 1):
            out = self.model(tokens[-1], **{cache: past}, use_cache=True, **self.arguments)
            past = out[cache]
            logits.append(out.logits)
            tokens.append(out.logits[:, -1:].argmax(-1))
        every = torch.cat(logits, 1)
        first, second = every[:, PROMPT_TOKENS - 1 :].topk(2).values.unbind(-1)
        leads = (first - second).amin(1)
        row = int(leads.argmax())
        ids = torch.cat(tokens[:-1], 1)[row].numpy()
        return Continuation(
            prompt=ids[:PROMPT_TOKENS],
            steps=ids[PROMPT_TOKENS:],
            logits=every[row].numpy(),
            rounded=self.logits(ids, rounded=True),
            lead=float(leads[row]),
        )


def rounded_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes the model's attention over rotated keys and values as a float16 cache has them."""
    attend: Callable[..., Any] = inspect.getmodule(type(module)).eager_attention_forward
    return attend(module, query, key.half().float(), value.half().float(), *args, **kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Holds one case exported at 8 bits, its float graph in an engine, and its peer."""

    checkpoint: Path
    case: Case
    bundle: Bundle
    exact: Engine
    peer: Peer
    expected: Continuation


def export(shelf: Shelf, checkpoint: Path, bits: int) -> Bundle:
    weights = WeightFormat(bits=bits)
    # Of random weights no text tells which inputs matter.
    options = ExportOptions(weights=weights, quality=False, calibrate=False)
    return Bundle.open(shelf.exported(checkpoint, options))


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Uses one thread, since torch's spinning threads make tiny steps many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=list(CASES))
def family(
    request: pytest.FixtureRequest, shelf: Shelf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    reason = missing("onnx")
    if reason:
        pytest.skip(reason)
    case = CASES[request.param]
    checkpoint = shelf.family(case.row, **case.keys)
    bundle = export(shelf, checkpoint, 8)
    folder = tmp_path_factory.mktemp(request.param)
    peer = Peer.restored(checkpoint, bundle, folder, case.peer_arguments)
    with Engine(bundle, threads=1, backend="float") as exact:
        yield Family(
            checkpoint=checkpoint,
            case=case,
            bundle=bundle,
            exact=exact,
            peer=peer,
            expected=peer.continuation(),
        )


def session_logits(engine: Engine, ids: np.ndarray, **options: int) -> np.ndarray:
    with engine.session(**options) as session:
        return np.concatenate(list(session.logits(ids.tolist())))


def assert_close_to_rounded(actual: np.ndarray, rounded: np.ndarray) -> None:
    wider = max(1.0, rounded.std() / 3)
    largest, root_mean_square = (wider * bound for bound in ROUNDED_TOLERANCE)
    np.testing.assert_allclose(actual, rounded, rtol=0, atol=largest)
    assert np.sqrt(np.square(actual - rounded).mean()) < root_mean_square


# With float activations: what is left is the float16 of keys and values


@pytest.mark.sampled
@pytest.mark.parametrize(
    # The steps are passes of one token as well.
    "chunk",
    ["7", "all", *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in ("1", "64"))],
)
def test_chunks_and_greedy_steps_equal_transformers(family: Family, chunk: str) -> None:
    expected = family.expected
    with family.exact.session(chunk_tokens=CHUNKS[chunk], **FLOAT_KV) as session:
        actual = np.concatenate(list(session.logits(expected.prompt.tolist())))
        steps = list(session.generate(STEPS, sampling=GREEDY, stop_ids=[], logprobs=True))
    exact, rounded = (each[:PROMPT_TOKENS] for each in (expected.logits, expected.rounded))
    assert exact.std() > 2.5
    logger.info(
        "largest difference of a logit: %.3g, with rounded keys and values %.3g",
        np.abs(actual - exact).max(),
        np.abs(actual - rounded).max(),
    )
    assert_close_to_rounded(actual, rounded)
    np.testing.assert_allclose(actual, exact, rtol=0, atol=family.case.bounds.logit)
    tokens = [step.token for step in steps]
    assert tokens == expected.steps.tolist(), f"the smallest lead is {expected.lead}"
    rows = log_softmax(expected.rounded[PROMPT_TOKENS - 1 : -1])
    np.testing.assert_allclose(
        [step.logprob for step in steps],
        rows[np.arange(STEPS), tokens],
        rtol=0,
        atol=ROUNDED_TOLERANCE[0],
    )


@pytest.mark.sampled
def test_mixed_embeddings_equal_the_reference_and_transformers(family: Family) -> None:
    """Reads plain tokens, then tokens that are a weighted sum of two each, on one cache."""
    config, plain, mixed = family.bundle.config, 60, 40
    tokens = plain + mixed
    draw = np.random.default_rng(2)
    ids = draw.integers(0, tiny.VOCAB_SIZE, (tokens, 2))
    first = draw.uniform(0, 1, (tokens, 1)).astype(np.float32)
    first[:plain] = 1
    weights = np.concatenate([first, 1 - first], axis=1)

    with closing(open_cache(family, FLOAT_PLAN, tokens)) as cache:
        parts = [
            run(family, cache, ids[:plain, :1], weights[:plain, :1]),
            run(family, cache, ids[plain:], weights[plain:]),
        ]
    actual = np.concatenate(parts)

    with closing(open_cache(family, FLOAT_PLAN, tokens, native=False)) as cache:
        cache.begin(tokens)
        reference = forward(
            config,
            family.bundle.read_weight,
            ids[:, 0],
            np.arange(tokens),
            cache,
            mixed=(ids, weights),
            long_rope=config.needs_long_rope(tokens),
        )
    assert_close_to_rounded(actual, reference)
    assert_close_to_rounded(actual, family.peer.mixed_logits(ids, weights))


def open_cache(family: Family, plan: KvPlan, tokens: int, *, native: bool = True) -> Cache:
    """An empty cache with room for `tokens` tokens, at once or in any chunks."""
    spec = CacheSpec.of(
        *class_fields(family.bundle.config),
        plan=plan,
        context_tokens=tokens,
        budget=Budget(tokens=tokens),
        chunk_tokens=tokens,
        threads=1,
        policy="oldest",
    )
    return Cache(spec.resolved(), storage=storage_named("native" if native else "numpy"))


def run(family: Family, cache: Cache, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Logits [T, V] of one pass over the next tokens, ids int64 and weights float32 [T, K]."""
    rows = SequencePass(
        cache=cache,
        ids=ids,
        weights=weights,
        positions=np.arange(cache.tokens, cache.tokens + len(ids)),
        logit_rows=np.arange(len(ids)),
    )
    rope_long = family.bundle.config.needs_long_rope(cache.context_tokens)
    cache.begin(len(ids))
    logits = family.exact.backend.forward((rows,), rope_long=rope_long)[0]
    cache.commit(range(len(ids)))
    return logits


# One table of rotary frequencies per session, chosen by its context


@pytest.mark.parametrize("family", ["phi3-longrope"], indirect=True)
@pytest.mark.parametrize("context_tokens", [64, 65])
def test_the_context_limit_picks_the_long_table(family: Family, context_tokens: int) -> None:
    """Compares with a peer that picks by the tokens so far: short for up to 64, long beyond."""
    ids, few = family.expected.prompt[:context_tokens], 48
    whole = family.peer.logits(ids, rounded=True)
    options = {**FLOAT_KV, "context_tokens": context_tokens}
    assert_close_to_rounded(session_logits(family.exact, ids, **options), whole)
    # A session's first tokens already have the table of its context.
    actual = session_logits(family.exact, ids[:few], **options)
    assert_close_to_rounded(actual, whole[:few])
    short = family.peer.logits(ids[:few], rounded=True)
    difference = np.abs(actual - short).max()
    assert difference > 1 if context_tokens > 64 else difference < ROUNDED_TOLERANCE[0]


# The graph as it ships


@pytest.mark.sampled
def test_the_shipped_graph_is_near_its_own_weights(
    family: Family, record_property: Callable[[str, object], None]
) -> None:
    expected = family.expected
    with Engine(family.bundle, threads=2, backend="onnx") as shipped:
        actual = session_logits(shipped, expected.tokens, **FLOAT_KV)
    nats = divergence(expected.logits, actual)
    record_property("mean_kl_divergence_nats", nats)
    logger.info("8-bit weights, 8-bit activations: %.3g nats", nats)
    assert nats < family.case.bounds.shipped


@pytest.mark.sampled
def test_four_bit_weights_stay_near_the_checkpoint(
    family: Family,
    shelf: Shelf,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Checks that the graph is as near to its own weights as at 8 bits."""
    tokens, bounds = family.expected.tokens, family.case.bounds
    arguments = family.case.peer_arguments
    original = Peer(family.checkpoint, arguments).logits(tokens)
    bundle = export(shelf, family.checkpoint, 4)
    peer = Peer.restored(family.checkpoint, bundle, tmp_path, arguments)
    with Engine(bundle, threads=1, backend="onnx") as engine:
        actual = session_logits(engine, tokens, **FLOAT_KV)
    to_peer, checkpoint = divergence(peer.logits(tokens), actual), divergence(original, actual)
    record_property("mean_kl_divergence_from_own_weights_nats", to_peer)
    record_property("mean_kl_divergence_from_checkpoint_nats", checkpoint)
    logger.info(
        "4-bit weights: %.3g nats from its own, %.3g from the checkpoint", to_peer, checkpoint
    )
    assert to_peer < (bounds.coarse or bounds.shipped)
    assert checkpoint < bounds.four_bit


# A quantised cache

KV_TOKENS, KV_CHUNK = 400, 64
# Closed by then; the rest and the sinks stay in floating point.
KV_PAGES = 5
# Mean KL divergence in nats from the unquantised cache that each plan stays below.
KV_BOUNDS = {
    "llama": {(8, 8): 5e-4, (4, 4): 0.09, (4, 2): 0.45},
    "qwen3": {(8, 8): 1.2e-4, (4, 4): 0.025, (4, 2): 0.2},
}


@pytest.mark.parametrize("family", KV_BOUNDS, indirect=True)
def test_divergence_grows_as_the_cache_gets_narrower(
    family: Family, record_property: Callable[[str, object], None]
) -> None:
    bounds = KV_BOUNDS[family.case.row]
    expected = cached_logits(family, FLOAT_PLAN)
    actual = {
        bits: divergence(expected, cached_logits(family, KvPlan(k_bits=bits[0], v_bits=bits[1])))
        for bits in bounds
    }
    for (k_bits, v_bits), nats in actual.items():
        record_property(f"mean_kl_divergence_k{k_bits}v{v_bits}_nats", nats)
        logger.info("K%dV%d: %.3g nats", k_bits, v_bits, nats)
    assert list(actual.values()) == sorted(actual.values())
    assert actual[8, 8] > 0
    for bits, nats in actual.items():
        assert nats < bounds[bits], bits


def cached_logits(family: Family, plan: KvPlan) -> np.ndarray:
    """Logits of a long prompt over a cache of `plan`, whose pages are closed at its widths."""
    ids = np.random.default_rng(3).integers(0, tiny.VOCAB_SIZE, (KV_TOKENS, 1))
    with closing(open_cache(family, plan, KV_TOKENS)) as cache:
        logits = [
            run(family, cache, chunk, np.ones(chunk.shape, np.float32))
            for chunk in np.split(ids, range(KV_CHUNK, KV_TOKENS, KV_CHUNK))
        ]
        (part,) = cache.parts
        _, widths = part.columns()
    if plan.quantized:
        config = family.bundle.config
        layers, heads = config.num_layers, config.first_attention.kv_heads
        assert widths.shape == (layers, heads, KV_PAGES, 2)
        assert (widths == (plan.k_bits, plan.v_bits)).all()
    return np.concatenate(logits)
