"""What llama.cpp computes under the name of each of its architectures, and what a model asks of it.

Facts about llama.cpp are of commit 0c1e57098, those about gemma4, gpt-oss, lfm2, qwen35 and
qwen3next of the one inside llama-cpp-python 0.3.36.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from kvq.reference_delta import SQUARES_EPS
from kvq_models.config import Attention, DeltaNet, Dense, Experts, ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What llama.cpp computes under a name, of the traits `_traits` finds.

    It computes those of `_USUAL` too, but for what it `lacks`.
    `interleaved`: it rotates neighbouring channels, checkpoints rotate halves. `rope_tensors`: it
    reads tensors of rotary factors. `fused`: it wants one tensor for q, k and v, and one for gate
    and up. `windows`: layers may have one. `keyed_scales`: its embedding and its attention are
    multiplied by what keys say. `windowed_base`: a key says by which base layers with a window
    rotate; else it is that of all others, whose scaling they leave out. `always_factors`: the
    table of layers that see everything is always such tensors. `whole_ramp`: a YaRN table that
    slows pairs down between two that are not whole is computed with the whole ones around them.
    `unscaled`: it does not divide queries by the root of their size. `fused_experts`: gate and up
    of experts are one tensor. `delta`: how the heads of a delta net lie; their values are dealt
    out, or their gates lie key head by key head. `called`: tensors that have other names than in
    most.
    """

    name: str
    computes: frozenset[str]
    lacks: frozenset[str] = frozenset()
    interleaved: bool = False
    rope_tensors: bool = False
    fused: bool = False
    windows: bool = False
    keyed_scales: bool = False
    windowed_base: bool = False
    always_factors: bool = False
    whole_ramp: bool = False
    unscaled: bool = False
    fused_experts: bool = False
    delta: Literal["dealt", "by key head"] = "dealt"
    called: Mapping[str, str] = field(default_factory=dict[str, str])


_QK_NORM = "norms on queries and keys"
_SANDWICH = "norms after attention and MLP"
_GELU = "a GELU"
_FINAL_CAP = "a soft cap on its logits"
_ATTENTION_CAP = "a soft cap on attention"
_QKV_BIAS = "biases on queries, keys and values"
_OUTPUT_BIAS = "a bias on the attention's output"
_NO_OUTPUT_BIAS = "no bias on the attention's output"
_MLP_BIAS = "biases in its MLP"
_WIDTH = "heads that together are not as wide as its hidden states"
_PARTIAL = "heads that rotate in part"
_LONG_ROPE = "a second rotary table for long contexts"
SCALED = "scaled embeddings"
_TWO_ROPES = "two kinds of rotary layers"
_ROW_NORM = "norms of all heads together"
_ONLY_AFTER = "no norm before a layer"
_LAYER_NORM = "norms with a mean and biases"
_RMS_NORM = "norms without a mean"
_UNGATED = "an MLP without a gate"
_GATED = "an MLP with a gate"
_PARALLEL = "layers whose halves are parallel"
_HEAD_BIAS = "a bias on its logits"
_ATTENTION_SCALE = "its scale of attention"
_STILL = "layers that do not rotate"
_OTHER_STILL = "layers that do not rotate other than every fourth"
_WINDOWS_OTHERWISE = "windows in other layers than every second, from the first on"
_UNTIED = "an output head of its own"
_TIED = "an output head that is its embedding"
_UNCAPPED = "attention and logits without soft caps"
_GROWTH = "queries that grow with their position"
_GROUPED = "fewer heads of keys than of queries"
_DENSE = "layers without experts"
_EXPERTS = "experts"
_NORMALISED = "shares of experts that are divided by their sum"
_UNNORMALISED = "shares of experts that are not divided by their sum"
_PLAIN_EXPERTS = "experts chosen by their shares alone"
_BIASED_CHOICE = "experts chosen by sigmoids and biases"
_CLAMPED_EXPERTS = "experts with biases and clamped gates"
_SHARED_EXPERTS = "experts that share an MLP"
_BESIDE_EXPERTS = "experts beside an MLP"
_LATER_EXPERTS = "experts in some layers alone"
_SINKS = "sinks of attention"
_WINDOWLESS = "layers that all see everything"
# What an architecture need not name to compute it, because most do.
_USUAL = frozenset(
    {
        *(_RMS_NORM, _GATED, _TIED, _UNTIED, _UNCAPPED, _WINDOWS_OTHERWISE, _OTHER_STILL),
        *(_GROUPED, _DENSE, _PLAIN_EXPERTS, _WINDOWLESS, _NO_OUTPUT_BIAS),
    }
)

COMPUTED = {
    row.name: row
    for row in (
        Architecture(
            name="llama",
            computes=frozenset(
                {
                    *(_QKV_BIAS, _OUTPUT_BIAS, _MLP_BIAS, _WIDTH, _LONG_ROPE),
                    *(_EXPERTS, _NORMALISED),
                }
            ),
            interleaved=True,
            rope_tensors=True,
        ),
        Architecture(
            name="mistral3",
            computes=frozenset({_QKV_BIAS, _OUTPUT_BIAS, _MLP_BIAS, _WIDTH, _GROWTH}),
            interleaved=True,
            rope_tensors=True,
        ),
        Architecture(name="qwen2", computes=frozenset({_QKV_BIAS})),
        Architecture(name="qwen3", computes=frozenset({_QKV_BIAS, _QK_NORM, _WIDTH})),
        Architecture(
            name="qwen3moe",
            computes=frozenset({_QKV_BIAS, _QK_NORM, _WIDTH, _EXPERTS, _NORMALISED}),
            lacks=frozenset({_DENSE}),
        ),
        Architecture(
            name="olmoe",
            computes=frozenset({_ROW_NORM, _EXPERTS, _UNNORMALISED}),
            lacks=frozenset({_TIED, _GROUPED, _DENSE}),
        ),
        Architecture(
            name="phi3",
            computes=frozenset({_PARTIAL, _LONG_ROPE}),
            rope_tensors=True,
            fused=True,
        ),
        Architecture(
            name="gemma3",
            computes=frozenset(
                {_QKV_BIAS, _QK_NORM, _SANDWICH, _GELU, _FINAL_CAP, _WIDTH, SCALED, _TWO_ROPES}
            ),
            windows=True,
            windowed_base=True,
        ),
        Architecture(
            name="gemma",
            computes=frozenset({_GELU, _WIDTH, SCALED, _ATTENTION_SCALE}),
            lacks=frozenset({_UNTIED}),
        ),
        Architecture(
            name="gemma2",
            computes=frozenset(
                {_SANDWICH, _GELU, _FINAL_CAP, _ATTENTION_CAP, _WIDTH, SCALED, _ATTENTION_SCALE}
            ),
            lacks=frozenset({_UNTIED, _UNCAPPED, _WINDOWS_OTHERWISE}),
            windows=True,
        ),
        Architecture(
            name="smollm3",
            computes=frozenset({_QKV_BIAS, _OUTPUT_BIAS, _MLP_BIAS, _WIDTH, _STILL}),
            lacks=frozenset({_OTHER_STILL}),
            interleaved=True,
        ),
        Architecture(
            name="granite",
            computes=frozenset(
                {_QKV_BIAS, _OUTPUT_BIAS, _MLP_BIAS, _WIDTH, SCALED, _ATTENTION_SCALE}
            ),
            interleaved=True,
            rope_tensors=True,
            keyed_scales=True,
        ),
        Architecture(
            name="olmo2",
            computes=frozenset({_ROW_NORM, _ONLY_AFTER, _TWO_ROPES}),
            lacks=frozenset({_TIED}),
            windows=True,
        ),
        Architecture(
            name="starcoder2",
            computes=frozenset({_LAYER_NORM, _UNGATED, _GELU, _QKV_BIAS, _OUTPUT_BIAS, _MLP_BIAS}),
            lacks=frozenset({_RMS_NORM, _GATED}),
        ),
        Architecture(
            name="phi2",
            computes=frozenset(
                {
                    *(_LAYER_NORM, _UNGATED, _GELU, _QKV_BIAS, _OUTPUT_BIAS, _MLP_BIAS),
                    *(_PARTIAL, _PARALLEL, _HEAD_BIAS),
                }
            ),
            lacks=frozenset({_RMS_NORM, _GATED}),
        ),
        Architecture(
            name="lfm2",
            computes=frozenset({_QK_NORM}),
            called={"output_norm": "token_embd_norm"},
        ),
        Architecture(
            name="lfm2moe",
            computes=frozenset({_QK_NORM, _EXPERTS, _NORMALISED, _BIASED_CHOICE, _LATER_EXPERTS}),
            lacks=frozenset({_PLAIN_EXPERTS}),
            called={"output_norm": "token_embd_norm"},
        ),
        Architecture(
            name="gemma4",
            computes=frozenset(
                {
                    *(_QK_NORM, _SANDWICH, _GELU, _FINAL_CAP, _WIDTH, SCALED, _TWO_ROPES),
                    *(_EXPERTS, _NORMALISED, _BESIDE_EXPERTS),
                }
            ),
            lacks=frozenset({_WINDOWLESS, _PLAIN_EXPERTS}),
            rope_tensors=True,
            windows=True,
            windowed_base=True,
            always_factors=True,
            unscaled=True,
            fused_experts=True,
        ),
        Architecture(
            name="qwen35",
            computes=frozenset({_QK_NORM, _WIDTH, _PARTIAL}),
            called={"ffn_norm": "post_attention_norm"},
        ),
        Architecture(
            name="qwen35moe",
            computes=frozenset(
                {_QK_NORM, _WIDTH, _PARTIAL, _EXPERTS, _NORMALISED, _SHARED_EXPERTS}
            ),
            lacks=frozenset({_DENSE, _PLAIN_EXPERTS}),
            called={"ffn_norm": "post_attention_norm"},
        ),
        Architecture(
            name="qwen3next",
            computes=frozenset(
                {_QK_NORM, _WIDTH, _PARTIAL, _EXPERTS, _NORMALISED, _SHARED_EXPERTS}
            ),
            lacks=frozenset({_DENSE, _PLAIN_EXPERTS}),
            delta="by key head",
            called={"ffn_norm": "post_attention_norm"},
        ),
        Architecture(
            name="gpt-oss",
            computes=frozenset(
                {
                    *(_QKV_BIAS, _OUTPUT_BIAS, _WIDTH, _SINKS),
                    *(_EXPERTS, _NORMALISED, _CLAMPED_EXPERTS),
                }
            ),
            lacks=frozenset({_TIED, _NO_OUTPUT_BIAS, _DENSE, _PLAIN_EXPERTS, _WINDOWLESS}),
            windows=True,
            whole_ramp=True,
            called={"ffn_norm": "post_attention_norm"},
        ),
    )
}
# The first that computes the model is taken: the family's own name, then the plainest one.
CANDIDATES: Mapping[str, tuple[str, ...]] = {
    "llama": ("llama",),
    "mistral": ("llama",),
    "mixtral": ("llama",),
    "ministral3": ("mistral3",),
    "qwen2": ("qwen2", "llama"),
    "qwen3": ("qwen3",),
    "qwen3_moe": ("qwen3moe",),
    "phi3": ("phi3", "llama"),
    "gemma3_text": ("gemma3",),
    "gemma": ("gemma",),
    "gemma2": ("gemma2",),
    "smollm3": ("smollm3", "llama"),
    "granite": ("granite",),
    "olmo2": ("olmo2",),
    "olmo3": ("olmo2",),
    "olmoe": ("olmoe",),
    "starcoder2": ("starcoder2",),
    "phi": ("phi2",),
    "lfm2": ("lfm2",),
    "lfm2_moe": ("lfm2moe",),
    "gemma4_text": ("gemma4",),
    "gemma4_unified_text": ("gemma4",),
    "qwen3_5_text": ("qwen35",),
    "qwen3_5_moe_text": ("qwen35moe",),
    "qwen3_next": ("qwen3next",),
    "gpt_oss": ("gpt-oss",),
}


def not_computed(config: ModelConfig, architecture: Architecture) -> list[str]:
    """What of a model llama.cpp does not compute under this name."""
    computed = (architecture.computes | _USUAL) - architecture.lacks
    return [trait for trait, has in _traits(config).items() if has and trait not in computed]


def attending(config: ModelConfig) -> list[Attention]:
    """Of the layers that attend, how."""
    return [layer.mixer for layer in config.layers if isinstance(layer.mixer, Attention)]


def _traits(config: ModelConfig) -> dict[str, bool]:
    """What some architecture there does not compute, and whether any layer has it."""
    mixers = attending(config)
    nets = [layer.mixer for layer in config.layers if isinstance(layer.mixer, DeltaNet)]
    feeds = [layer.feed for layer in config.layers]
    experts = [feed for feed in feeds if isinstance(feed, Experts)]
    kinds = [_kind_of_experts(feed) for feed in experts]
    sizes = {(mixer.window_tokens > 0, mixer.head_dim) for mixer in mixers}
    turning = [rope for rope in config.ropes if any(rope.inv_freq)]
    still = [not any(config.ropes[mixer.rope].inv_freq) for mixer in mixers]
    return {
        _QK_NORM: any(mixer.qk_norm == "heads" for mixer in mixers),
        _ROW_NORM: any(mixer.qk_norm == "rows" for mixer in mixers),
        _SANDWICH: any(layer.norms == "both" for layer in config.layers),
        _ONLY_AFTER: any(layer.norms == "after" for layer in config.layers),
        _LAYER_NORM: config.norm != "rms",
        _RMS_NORM: config.norm == "rms",
        _UNGATED: any(not feed.gated for feed in feeds),
        _GATED: any(feed.gated for feed in feeds),
        _GELU: any(feed.activation == "gelu_tanh" for feed in feeds),
        _FINAL_CAP: config.final_softcap > 0,
        _ATTENTION_CAP: any(mixer.softcap > 0 for mixer in mixers),
        _QKV_BIAS: any(mixer.qkv_bias for mixer in mixers),
        _OUTPUT_BIAS: any(mixer.output_bias for mixer in mixers),
        _NO_OUTPUT_BIAS: any(not mixer.output_bias for mixer in mixers),
        _SINKS: any(mixer.sinks for mixer in mixers),
        _MLP_BIAS: any(isinstance(feed, Dense) and feed.bias for feed in feeds),
        _WIDTH: config.num_heads * config.head_dim != config.hidden_size,
        _PARTIAL: any(
            2 * len(config.ropes[mixer.rope].inv_freq) != mixer.head_dim
            for mixer in mixers
            if config.ropes[mixer.rope] in turning
        ),
        _LONG_ROPE: config.has_long_rope,
        SCALED: config.embedding_scale != 1,
        _GROWTH: any(mixer.growth for mixer in mixers),
        _GROUPED: any(mixer.kv_heads != mixer.heads for mixer in mixers),
        _DENSE: len(experts) < len(feeds),
        _EXPERTS: bool(experts),
        _NORMALISED: any(feed.normalised for feed in experts),
        _UNNORMALISED: any(not feed.normalised for feed in experts),
        _LATER_EXPERTS: 0 < len(experts) < len(feeds),
        "experts before layers without them": feeds[len(feeds) - len(experts) :] != experts,
        _PLAIN_EXPERTS: _PLAIN_EXPERTS in kinds,
        **{
            kind: kind in kinds
            for kind in (_BIASED_CHOICE, _CLAMPED_EXPERTS, _SHARED_EXPERTS, _BESIDE_EXPERTS)
        },
        "experts of another kind": None in kinds,
        _PARALLEL: any(layer.parallel for layer in config.layers),
        _HEAD_BIAS: config.head_bias,
        _TWO_ROPES: len(turning) > 1,
        _STILL: any(still),
        _OTHER_STILL: still != [(layer + 1) % 4 == 0 for layer in range(len(still))],
        _WINDOWS_OTHERWISE: any(bool(w) != (i % 2 == 0) for i, w in enumerate(config.windows)),
        _WINDOWLESS: not any(config.windows),
        "heads whose sizes differ otherwise than by windows": (
            len(sizes) > len({windowed for windowed, _ in sizes})
        ),
        # It takes these, whatever they are, for the two kinds of keys there are.
        "layers that read the keys of others than the last two that have any": any(
            mixer.kv_from != config.first_reader - (2 if mixer.window_tokens else 1)
            for mixer in mixers
            if mixer.kv_from is not None
        ),
        "a table of per-layer embeddings of other tokens": (
            config.per_layer is not None and config.per_layer.rows != config.vocab_size
        ),
        "delta nets whose keys are not as wide as their values": any(
            net.key_dim != net.value_dim for net in nets
        ),
        # It takes one number for both.
        f"norms beside delta nets with another epsilon than {SQUARES_EPS}": (
            bool(nets) and config.norm_eps != SQUARES_EPS
        ),
        _TIED: config.tied_head,
        _UNTIED: not config.tied_head,
        _UNCAPPED: not config.final_softcap or any(not mixer.softcap for mixer in mixers),
        _ATTENTION_SCALE: any(
            mixer.qk_norm == "none"
            and not math.isclose(mixer.scale, mixer.head_dim**-0.5, rel_tol=1e-6)
            for mixer in mixers
        ),
    }


def _kind_of_experts(feed: Experts) -> str | None:
    """Which of the kinds that some architecture computes, or None; weights have the scale."""
    plain = Experts(
        count=feed.count,
        chosen=feed.chosen,
        width=feed.width,
        normalised=feed.normalised,
        scale=feed.scale,
    )
    kinds = {
        plain: _PLAIN_EXPERTS,
        replace(plain, scoring="sigmoid", choice_bias=True): _BIASED_CHOICE,
        replace(plain, activation="clamped_swiglu", router_bias=True, bias=True): _CLAMPED_EXPERTS,
    }
    if feed.shared is not None:
        kinds[replace(plain, shared=Dense(width=feed.shared.width))] = _SHARED_EXPERTS
    if feed.beside is not None:
        gelu, beside = "gelu_tanh", feed.beside.width
        kinds[replace(plain, activation=gelu, beside=Dense(width=beside, activation=gelu))] = (
            _BESIDE_EXPERTS
        )
    return kinds.get(feed)
