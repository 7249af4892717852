"""GGUF export: llama.cpp computes the model, and cuts texts as its tokenizer does.

llama.cpp itself is the peer: it loads every family's file and its logits are compared with the
numpy forward pass over the checkpoint's own weights.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

import tiny
from kvq.errors import BackendError, CheckpointError, KvqError, UnsupportedModelError, UsageError
from kvq_apps.cli import main
from kvq_export import gguf_llama, gguf_pre
from kvq_export.checkpoint import Checkpoint
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.export import export_model
from kvq_export.gguf_blocks import pack_blocks
from kvq_export.gguf_model import gguf_model
from kvq_models.config import LayerConfig, ModelConfig, RopeConfig
from kvq_models.reference import forward, plain_attention
from kvq_models.registry import read_checkpoint
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.bundle import (
    GGUF_FILE,
    GGUF_VERSION,
    MANIFEST_FILE,
    VERSION,
    Bundle,
    GgufInfo,
)
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from logits import divergence

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
needs_llama = pytest.mark.skipif(
    gguf_llama.llama_missing() is not None, reason=str(gguf_llama.llama_missing())
)

TOKENS = 120
# What one file may differ by: a logit (their standard deviation is near 3), and mean KL divergence
# in nats. llama.cpp rounds activations to the type of the weights and keeps keys and values in
# float16; random weights are the worst case of either.
F16_LOGIT, F16_NATS = 0.12, 6e-5
NATS = {"q8_0": 0.02, "bf16": 0.01, "q4_0": 1.5, "q4_k_m": 0.8}
PROMPTS, PROMPT_TOKENS, STEPS = 12, 8, 12

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A row of `tiny.CASES` with some keys replaced, and what llama.cpp is told it is."""

    row: str
    architecture: str
    context: int = 512
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"


CASES = {
    "llama": Case(row="llama", architecture="llama"),
    "llama-bias": Case(row="llama-bias", architecture="llama"),
    "llama-linear": Case(row="llama-linear", architecture="llama"),
    "llama-llama3": Case(row="llama-llama3", architecture="llama"),
    "llama-yarn": Case(row="llama-yarn", architecture="llama", context=256),
    "mistral-window": Case(row="mistral-window", architecture="llama", context=24),
    "qwen2": Case(row="qwen2", architecture="llama"),
    "qwen2-square": Case(
        row="qwen2",
        architecture="qwen2",
        keys={"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    ),
    "qwen2-yarn": Case(
        row="qwen2",
        architecture="llama",
        keys={"rope_parameters": _YARN | {"attention_factor": 1.3}},
    ),
    "qwen2-window": Case(row="qwen2-window", architecture="llama", context=20),
    "qwen3": Case(row="qwen3", architecture="qwen3"),
    "qwen3-yarn": Case(
        row="qwen3",
        architecture="qwen3",
        keys={"rope_parameters": _YARN, "max_position_embeddings": 256},
        context=256,
    ),
    "phi3": Case(row="phi3", architecture="llama", context=40),
    "phi3-square": Case(
        row="phi3",
        architecture="phi3",
        keys={"hidden_size": 128, "head_dim": 32, "sliding_window": None},
    ),
    "phi3-longrope": Case(row="phi3-longrope", architecture="phi3"),
    "gemma3": Case(row="gemma3", architecture="gemma3"),
    # A head that does not repeat the last token; a local base that is not llama.cpp's default.
    "gemma3-untied": Case(
        row="gemma3",
        architecture="gemma3",
        keys={
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        dtype="bfloat16",
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("gguf")

    def make(name: str) -> Path:
        if not (folder / name).exists():
            case = CASES[name]
            tiny.make_checkpoint(case.row, folder / name, dtype=case.dtype, **case.keys)
        return folder / name

    return make


def export(source: Path, kind: str, **options: Any) -> Bundle:
    wanted = {"format": "gguf", "gguf_type": kind, "quality": False, "threads": 1, "force": True}
    destination = source.with_name(f"{source.name}-{kind}")
    return export_model(source, destination, ExportOptions(**(wanted | options)))


def expected_logits(source: Path, ids: np.ndarray) -> np.ndarray:
    _, config, _ = read_checkpoint(source)
    context = gguf_llama.context_tokens(len(ids))
    return forward(
        config,
        tiny.checkpoint_weights(source),
        ids,
        np.arange(len(ids)),
        plain_attention(),
        long_rope=config.needs_long_rope(context),
    )


def found_logits(bundle: Bundle, ids: np.ndarray) -> np.ndarray:
    return gguf_llama.file_logits(bundle.path / GGUF_FILE, ids, bundle.config.vocab_size, 1)


# What llama.cpp computes


@needs_llama
@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_computes_the_model(checkpoint: Callable[[str], Path], name: str) -> None:
    case, source = CASES[name], checkpoint(name)
    bundle = export(source, "f16")
    assert bundle.manifest.gguf == GgufInfo(
        type="f16", architecture=case.architecture, context_length=case.context
    )
    ids = np.random.default_rng(0).integers(0, tiny.VOCAB_SIZE, min(TOKENS, case.context))
    expected, found = expected_logits(source, ids), found_logits(bundle, ids)
    assert expected.std() > 2.5
    np.testing.assert_allclose(found, expected, rtol=0, atol=F16_LOGIT)
    assert divergence(expected, found) < F16_NATS
    nats = divergence(expected, found_logits(export(source, "q8_0"), ids))
    assert F16_NATS / 100 < nats < NATS["q8_0"]


@needs_llama
@pytest.mark.parametrize("kind", ["bf16", "q4_0", "q4_k_m"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_other_types_stay_near(checkpoint: Callable[[str], Path], name: str, kind: str) -> None:
    source = checkpoint(name)
    ids = np.random.default_rng(1).integers(0, tiny.VOCAB_SIZE, TOKENS)
    bundle = export(source, kind)
    assert divergence(expected_logits(source, ids), found_logits(bundle, ids)) < NATS[kind]
    assert [file.name for file in bundle.path.glob("*.gguf")] == [GGUF_FILE]


@needs_llama
@pytest.mark.parametrize("name", ["llama-llama3", "mistral-window", "qwen2", "qwen3", "gemma3"])
def test_both_engines_choose_the_same_tokens(checkpoint: Callable[[str], Path], name: str) -> None:
    """Weights at 8 bits; activations are rounded by both, so a prompt is taken that is decided."""
    source = checkpoint(name)
    weights = WeightFormat(bits=8, block=32, embedding_bits=8)
    bundle = export(source, "q8_0", format="both", weights=weights)
    assert (bundle.has_onnx, bundle.has_gguf) == (True, True)
    prompt, tokens = decided_prompt(source)
    with (
        Engine(bundle, threads=1, backend="onnx") as engine,
        engine.session(k_bits=16, v_bits=16, context_tokens=256) as session,
    ):
        session.prefill(prompt)
        steps = session.generate(STEPS, sampling=Sampling(temperature=0), stop_ids=[])
        assert [step.token for step in steps] == tokens
    # Given its own choices so far, llama.cpp's next choice is the greedy one.
    rows = found_logits(bundle, np.array([*prompt, *tokens]))[len(prompt) - 1 : -1]
    assert rows.argmax(1).tolist() == tokens


def decided_prompt(source: Path) -> tuple[list[int], list[int]]:
    """Of some random prompts the one whose greedy tokens lead the most, and these."""
    draw = np.random.default_rng(2)
    found = [
        greedy(source, draw.integers(0, tiny.VOCAB_SIZE, PROMPT_TOKENS)) for _ in range(PROMPTS)
    ]
    _, prompt, tokens = max(found)
    return prompt, tokens


def greedy(source: Path, prompt: np.ndarray) -> tuple[float, list[int], list[int]]:
    """The smallest lead over the next best, the prompt and its greedy continuation."""
    _, config, _ = read_checkpoint(source)
    weight, attend = tiny.checkpoint_weights(source), plain_attention()
    tokens, lead, ids, first = list[int](), math.inf, prompt, 0
    for _ in range(STEPS):
        positions = np.arange(first, first + len(ids))
        logits = forward(config, weight, ids, positions, attend)[-1]
        second, best = np.sort(logits)[-2:]
        lead = min(lead, float(best - second))
        tokens.append(int(logits.argmax()))
        first, ids = first + len(ids), np.array(tokens[-1:])
    return lead, prompt.tolist(), tokens


@needs_llama
def test_rows_that_are_no_whole_blocks_fall_back(tmp_path: Path) -> None:
    source = tiny.make_llama_checkpoint(
        tmp_path / "source", hidden_size=80, intermediate_size=120, num_hidden_layers=1
    )
    ids = np.arange(60)
    for kind in ("q8_0", "q4_0", "q4_k_m"):
        bundle = export(source, kind)
        types = {tensor.name: tensor.tensor_type.name for tensor in tensors(bundle)}
        assert types["blk.0.ffn_down.weight"] == types["blk.0.attn_q.weight"] == "F16"
        # Its rows are the heads together: 256, whole blocks of any type.
        assert types["blk.0.attn_output.weight"] == {"q4_k_m": "Q4_K"}.get(kind, kind.upper())
        assert divergence(expected_logits(source, ids), found_logits(bundle, ids)) < NATS[kind]


def tensors(bundle: Bundle) -> Sequence[Any]:
    return gguf.GGUFReader(bundle.path / GGUF_FILE).tensors


@pytest.mark.slow
def test_peak_memory_is_a_few_chunks_not_the_model(tmp_path: Path) -> None:
    source = tiny.make_llama_checkpoint(
        tmp_path / "source", dtype="bfloat16", shards=2, vocab_size=1 << 17, hidden_size=256
    )
    tracemalloc.start()
    try:
        bundle = export(source, "bf16", tokenizer=False)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert bundle.manifest.files[GGUF_FILE].num_bytes > 128 << 20
    assert peak_bytes < 40 << 20


def test_a_float_file_holds_the_checkpoint(tmp_path: Path) -> None:
    """Names and values, the order of heads as llama.cpp's llama rotates them."""
    source = tiny.make_llama_checkpoint(
        tmp_path / "source", attention_bias=True, mlp_bias=True, dtype="bfloat16", shards=2
    )
    weight = tiny.checkpoint_weights(source)
    bundle = export(source, "bf16")
    found = {tensor.name: tensor for tensor in tensors(bundle)}
    rows = {"attn_q": slice(0, 256), "attn_k": slice(256, 384), "attn_v": slice(384, 512)}
    rows |= {"ffn_gate": slice(0, 192), "ffn_up": slice(192, 384)}
    sources = dict.fromkeys(("attn_q", "attn_k", "attn_v"), "qkv")
    sources |= {"ffn_gate": "gate_up", "ffn_up": "gate_up"}
    sources |= {"attn_output": "o", "ffn_down": "down"}
    for layer in range(bundle.config.num_layers):
        for name, canonical in sources.items():
            for ending, suffix in (("weight", ""), ("bias", "_bias")):
                tensor = found[f"blk.{layer}.{name}.{ending}"]
                values = weight(f"layers.{layer}.{canonical}{suffix}")[rows.get(name, slice(None))]
                if name in ("attn_q", "attn_k"):
                    heads = values.reshape(-1, 2, 32, *values.shape[1:])
                    values = heads.swapaxes(1, 2).reshape(values.shape)
                assert tensor.tensor_type.name == ("BF16" if ending == "weight" else "F32")
                np.testing.assert_array_equal(floats(tensor), values)
    np.testing.assert_array_equal(floats(found["token_embd.weight"]), weight("embed"))
    np.testing.assert_array_equal(floats(found["output.weight"]), weight("head"))
    assert len(found) == 3 + bundle.config.num_layers * (2 + 2 * len(sources))


def floats(tensor: Any) -> np.ndarray:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


@pytest.mark.parametrize("rows", [range(0, 256), range(256, 384), range(64, 448)])
def test_chunks_of_some_rows_are_whole_heads(tmp_path: Path, rows: range) -> None:
    """The canonical weight has three parts; a head of 64 rows is never cut."""
    folder = tiny.make_llama_checkpoint(tmp_path)
    family, config, _ = read_checkpoint(folder)
    source = family.weights(config)["layers.1.qkv"]
    chunks = list(Checkpoint.open(folder).chunks(source, 100 * 128, rows, multiple=64))
    assert {len(chunk) for chunk in chunks} == {64}
    expected = tiny.checkpoint_weights(folder)("layers.1.qkv")[rows.start : rows.stop]
    np.testing.assert_array_equal(np.concatenate(chunks), expected)


# What llama.cpp cannot compute


def config_of(checkpoint: Callable[[str], Path], name: str, **changes: Any) -> ModelConfig:
    _, config, _ = read_checkpoint(checkpoint(name))
    return dataclasses.replace(config, **changes)


def test_what_llama_cpp_does_not_compute_is_refused_by_name(
    checkpoint: Callable[[str], Path],
) -> None:
    refusals: dict[str, ModelConfig] = {
        "as gemma3, which does not compute a soft cap on attention": config_of(
            checkpoint, "gemma3", attention_softcap=30.0
        ),
        "as qwen3, which does not compute a bias on the attention's output": config_of(
            checkpoint, "qwen3", output_bias=True
        ),
        "as qwen3, which does not compute a rotary table": config_of(
            checkpoint, "qwen3", ropes=(RopeConfig(inv_freq=tuple(np.linspace(1, 0.1, 64))),)
        ),
        "as llama, which does not compute its scale of attention": config_of(
            checkpoint, "llama", attention_scale=0.5
        ),
        "as phi3, .* not as wide as its hidden states; not as llama, .* rotate in part": config_of(
            checkpoint, "phi3-longrope", hidden_size=96
        ),
        "mamba model: it has no such architecture": config_of(
            checkpoint, "llama", model_type="mamba"
        ),
    }
    for message, config in refusals.items():
        with pytest.raises(UnsupportedModelError, match=f"{message}.*--format onnx"):
            gguf_model(config)


def test_scales_llama_cpp_has_no_key_for_go_into_weights(
    checkpoint: Callable[[str], Path],
) -> None:
    """A gemma3's embedding scale is rounded to its trained type; llama.cpp takes the square root.

    An attention scale of its own goes into the norm of the queries, except for the 27B model,
    which llama.cpp knows by its depth.
    """
    config = config_of(checkpoint, "gemma3", hidden_size=640, embedding_scale=25.25)
    factors = {tensor.name: tensor.factor for tensor in gguf_model(config).tensors}
    assert factors["token_embd.weight"] * math.sqrt(640) == pytest.approx(25.25, rel=1e-12)
    assert factors["output_norm.weight"] * factors["token_embd.weight"] == pytest.approx(1)
    assert factors["blk.0.attn_q_norm.weight"] == pytest.approx(math.sqrt(64 / 48))
    untied = {
        tensor.name: tensor.factor
        for tensor in gguf_model(dataclasses.replace(config, tied_head=False)).tensors
    }
    assert untied["token_embd.weight"] == factors["token_embd.weight"]
    assert untied["output.weight"] == untied["output_norm.weight"] == 1
    changed = [name for name, factor in factors.items() if factor != 1]
    assert len(changed) == 2 + config.num_layers
    deep = dataclasses.replace(
        config, num_layers=62, layers=config.layers[:1] * 62, attention_scale=(640 // 4) ** -0.5
    )
    factors = {tensor.name: tensor.factor for tensor in gguf_model(deep).tensors}
    assert factors["blk.61.attn_q_norm.weight"] == 1


def test_a_yarn_table_of_other_speeds_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """llama.cpp's qwen3 reads no beta_fast: its table would be another one."""
    source = checkpoint("qwen3-yarn")
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"]["beta_fast"] = 8.0
    for file in source.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="does not compute a rotary table"):
        export(tmp_path, "q8_0")


def test_a_window_ends_the_context(
    checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    bundle = export(checkpoint("mistral-window"), "q8_0")
    assert "no window of 24 tokens for this family: the GGUF file says 24" in caplog.text
    assert field(bundle, "llama.context_length") == 24
    assert field(bundle, "llama.attention.sliding_window") == 24
    wide = config_of(checkpoint, "mistral-window", layers=(LayerConfig(window_tokens=4096),) * 2)
    assert gguf_model(wide).context_length == wide.context_length
    windows = field(export(checkpoint("gemma3"), "q8_0"), "gemma3.attention.sliding_window_pattern")
    assert windows == [True, True, False, True]


def field(bundle: Bundle, name: str) -> Any:
    return gguf.GGUFReader(bundle.path / GGUF_FILE).fields[name].contents()


# Tokenizers

HOSTILE = (
    "plain words, then   runs     of\t\ttabs \t and spaces   \n\n\n   \r\n end   ",
    "I'll they'RE don't 'S 'tis rock'n'roll",
    "Größe café naïve ﬁ ǅ İstanbul e\u0301 \u200b\u00a0\u3000 \ufeff",
    "家族 日本語のテキスト 한국어 ไทย हिन्दी العربية",
    "👩‍👩‍👧 🇫🇷 👍🏽 🤷🏻‍♂️ ☕️",
    "1234567890 3.14159 ١٢٣ ²³ Ⅳ 12ab34",
    "def f(x):\n\treturn {'a': [x**2, -x//3]}  # !== ?? ::\n\n\n\n",
    "<|im_start|>system\nobey<|im_end|><|endoftext|> <|fim_prefix|><|im_<|im_end|>end|>",
    "</s><s><unk><0x0A>[PAD9] ▁ ▁<PRE> Ġword ĊĊ \x00\x01\x7f",
    "\ufffd𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff",
    " ",
    "\n",
    "",
)
# What an approximate cut of llama.cpp may cut elsewhere.
CASELESS = HOSTILE[2:4]
ROWS = {row.name: row for row in gguf_pre.ROWS}


def cut(name: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer that llama.cpp calls `name`, from our own table of stages."""
    stages = []
    for stage in ROWS[name].stages:
        if stage == gguf_pre.DIGITS:
            stages.append(pre_tokenizers.Digits(individual_digits=True))
        elif stage in (gguf_pre.WORDS, gguf_pre.BYTES):
            words = stage == gguf_pre.WORDS
            stages.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words))
        else:
            stages.append(pre_tokenizers.Split(Regex(stage), "isolated"))
    return pre_tokenizers.Sequence(stages)


def byte_level(name: str) -> Library:
    """A BPE trained on the hostile texts themselves, so that every cut shows in its merges."""
    library = Library(models.BPE(ignore_merges=ROWS[name].whole_words))
    library.pre_tokenizer = cut(name)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True) for token in tiny.CONTROL_TOKENS],
        show_progress=False,
    )
    library.train_from_iterator([text for text in HOSTILE for _ in range(4)], trainer)
    library.add_tokens([AddedToken("<think>", normalized=False)])
    return library


@pytest.fixture
def with_tokenizer(tmp_path: Path) -> Callable[..., Path]:
    def make(library: Library, **settings: Any) -> Path:
        source = tiny.make_llama_checkpoint(
            tmp_path / "source", vocab_size=1024, num_hidden_layers=1, **settings
        )
        library.save(str(source / "tokenizer.json"))
        return source

    return make


class LlamaVocabulary:
    """The vocabulary of a GGUF file as llama.cpp uses it."""

    def __init__(self, bundle: Bundle) -> None:
        self.model = gguf_llama.LlamaModel(bundle.path / GGUF_FILE)
        self._functions = self.model.library.functions

    def close(self) -> None:
        self.model.close()

    def encode(self, text: str, *, special: bool = False, start: bool = False) -> list[int]:
        raw = text.encode()
        room = (self._functions.llama_token * (len(raw) + 8))()
        vocabulary = self.model.vocabulary
        found = self._functions.llama_tokenize(
            vocabulary, raw, len(raw), room, len(room), start, special
        )
        assert found >= 0
        return list(room[:found])

    def token_bytes(self, token: int) -> bytes:
        import ctypes

        room = ctypes.create_string_buffer(256)
        size = self._functions.llama_token_to_piece(
            self.model.vocabulary, token, room, len(room), 0, True
        )
        return room.raw[:size]


@pytest.fixture
def both(with_tokenizer: Callable[..., Path]) -> Iterator[Callable[..., Any]]:
    """Our tokenizer and llama.cpp's, of one library tokenizer in one bundle."""
    opened: list[LlamaVocabulary] = []

    def make(library: Library, **settings: Any) -> tuple[Tokenizer, LlamaVocabulary]:
        bundle = export(with_tokenizer(library, **settings), "q8_0")
        tokenizer = bundle.tokenizer()
        assert tokenizer is not None
        opened.append(LlamaVocabulary(bundle))
        return tokenizer, opened[-1]

    yield make
    for vocabulary in opened:
        vocabulary.close()


@needs_llama
@pytest.mark.parametrize("name", ROWS)
def test_byte_level_tokenizers_agree(
    both: Callable[..., Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = both(byte_level(name))
    assert field_of(theirs, "tokenizer.ggml.pre") == name
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    for text in (*HOSTILE, "a <think> b"):
        if text in CASELESS and ROWS[name].approximate:
            continue
        assert theirs.encode(text) == ours.encode(text), repr(text)
        assert theirs.encode(text, special=True) == ours.encode(text, special=True), repr(text)
        assert theirs.encode(text, start=True) == ours.encode(text, start=True)
    control = [token for token in range(1024) if ours.is_control(token)]
    assert set(control).isdisjoint(theirs.encode(" ".join(tiny.CONTROL_TOKENS)))
    for token in range(ours.vocab_size):
        assert theirs.token_bytes(token) == ours.token_bytes(token)


def field_of(vocabulary: LlamaVocabulary, name: str) -> str:
    import ctypes

    room = ctypes.create_string_buffer(256)
    functions = vocabulary.model.library.functions
    functions.llama_model_meta_val_str(vocabulary.model.pointer, name.encode(), room, len(room))
    return room.value.decode()


def test_an_unknown_cut_is_named_by_the_nearest(
    with_tokenizer: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    library = byte_level("qwen2")
    pairs_of_digits = ROWS["qwen2"].stages[0].replace(r"|\p{N}|", r"|\p{N}{1,2}|")
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pairs_of_digits), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bundle = export(with_tokenizer(library), "q8_0")
    assert field(bundle, "tokenizer.ggml.pre") in ("qwen2", "smaug-bpe", "llama-bpe")
    assert "no name for how this tokenizer cuts a text" in caplog.text


def word_marked(model: Any, *, prefix: bool = True) -> Library:
    library = Library(model)
    before = [normalizers.Prepend("▁")] if prefix else []
    library.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    library.add_special_tokens(
        [AddedToken(piece, normalized=False) for piece in ("<unk>", "<s>", "</s>")]
    )
    return library


def byte_fallback(*, prefix: bool = True) -> Library:
    """BPE learnt from the texts with marked spaces; its merges are ranked by piece."""
    texts = [text.replace(" ", "▁") for text in (*tiny.CORPUS, *HOSTILE[:6])]
    teacher = Library(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    teacher.train_from_iterator(texts, trainer)
    learnt = json.loads(teacher.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [piece for piece in learnt["vocab"] if piece not in pieces]
    model = models.BPE(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[tuple(merge) for merge in learnt["merges"]],
        byte_fallback=True,
        unk_token="<unk>",
    )
    return word_marked(model, prefix=prefix)


@needs_llama
@pytest.mark.parametrize("prefix", [True, False])
def test_byte_fallback_tokenizers_agree(both: Callable[..., Any], prefix: bool) -> None:
    library = byte_fallback(prefix=prefix)
    ours, theirs = both(library, bos_token_id=1, eos_token_id=2)
    assert field_of(theirs, "tokenizer.ggml.model") == "llama"
    for text in HOSTILE:
        assert theirs.encode(text) == ours.encode(text), repr(text)
        assert {1, 2}.isdisjoint(theirs.encode(text))
    assert theirs.encode("a</s>", special=True)[-1] == 2


@needs_llama
def test_unigram_tokenizers_agree(both: Callable[..., Any]) -> None:
    texts = [text.replace(" ", "▁") for text in (*tiny.CORPUS, *HOSTILE[:6])]
    characters = sorted({*"".join(texts), "▁"} - {"\x00"})
    words = sorted(
        {word for text in tiny.CORPUS for word in ("▁" + text.replace(" ", " ▁")).split()}
    )
    draw = np.random.default_rng(0)
    vocab: list[tuple[str, float]] = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    vocab += [(piece, float(-12 - draw.uniform(0, 2))) for piece in characters]
    vocab += [(piece, float(-8 - draw.uniform(0, 4))) for piece in words if len(piece) > 1]
    library = Library(models.Unigram(vocab, 0, False))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    library.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    library.add_special_tokens([AddedToken(piece) for piece in ("<unk>", "<s>", "</s>")])
    ours, theirs = both(library, bos_token_id=1, eos_token_id=2)
    assert field_of(theirs, "tokenizer.ggml.model") == "t5"
    for text in (*tiny.CORPUS, *HOSTILE[:4]):
        # Ours spells a character the vocabulary lacks as one unknown, as llama.cpp does.
        assert theirs.encode(text) == library.encode(text, add_special_tokens=False).ids, text
    del ours


def test_a_unigram_with_bytes_merges_by_score(
    with_tokenizer: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    vocab = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)), ("▁a", -1.5)]
    source = with_tokenizer(word_marked(models.Unigram(vocab, 0, True)))
    bundle = export(source, "q8_0")
    assert "no unigrams with a byte fallback" in caplog.text
    assert field(bundle, "tokenizer.ggml.model") == "llama"
    assert field(bundle, "tokenizer.ggml.scores")[257] == -1.5
    assert field(bundle, "tokenizer.ggml.token_type")[:3] == [2, 6, 6]


def test_vocabularies_without_a_form_are_refused(with_tokenizer: Callable[..., Path]) -> None:
    pieces = {"<unk>": 0, "a": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(255)}}
    library = word_marked(models.BPE(pieces, [], byte_fallback=True))
    source = with_tokenizer(library)
    with pytest.raises(UnsupportedModelError, match=r"no piece <0xFF>, which llama.cpp needs"):
        export(source, "q8_0")
    words = Library(models.WordLevel({"a": 0}))
    words.decoder = decoders.Metaspace()
    words.save(str(source / "tokenizer.json"))
    with pytest.raises(UnsupportedModelError, match="no form of this WordLevel tokenizer"):
        export(source, "q8_0")


def test_every_token_has_a_text_of_its_own(with_tokenizer: Callable[..., Path]) -> None:
    """llama.cpp aborts on two tokens of one text, and reads a text up to a NUL."""
    library = byte_level("gpt-2")
    library.add_tokens(["[PAD1023]", "two\x00", "a b", "a▁b"])
    bundle = export(with_tokenizer(library), "q8_0")
    tokens = field(bundle, "tokenizer.ggml.tokens")
    types = field(bundle, "tokenizer.ggml.token_type")
    assert len(tokens) == len(set(tokens)) == len(types) == 1024
    assert all(tokens)
    assert not any("\0" in token for token in tokens)
    assert tokens[1023] == "[[PAD1023]]"
    assert tokens.index("[PAD1023]") == library.token_to_id("[PAD1023]")
    unused = [1023, library.token_to_id("two\x00"), library.token_to_id("a▁b")]
    assert [types[token] for token in unused] == [5, 5, 5]
    assert tokens[library.token_to_id("a b")] == "a b"
    assert [types[0], types[library.token_to_id("<think>")]] == [3, 4]


def test_the_header_names_the_tokens_that_steer(tmp_path: Path) -> None:
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>")
    names += ("<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
    source = tiny.make_llama_checkpoint(tmp_path / "source", bos_token_id=1)
    library = Library.from_file(str(source / "tokenizer.json"))
    library.add_special_tokens(list(names))
    library.save(str(source / "tokenizer.json"))
    settings = {"pad_token": "<|endoftext|>", "bos_token": "<|im_start|>", "add_bos_token": True}
    settings["fim_order"] = "suffix-first"
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    bundle = export(source, "q8_0")
    ids = {name: library.token_to_id(name) for name in names}
    expected = {
        "bos": "<|im_start|>",
        "eos": "<|endoftext|>",
        "eot": "<|im_end|>",
        "padding": "<|endoftext|>",
        "fim_pre": "<|fim_prefix|>",
        "fim_suf": "<|fim_suffix|>",
        "fim_mid": "<|fim_middle|>",
        "fim_pad": "<|fim_pad|>",
        "fim_rep": "<|repo_name|>",
        "fim_sep": "<|file_sep|>",
    }
    for key, name in expected.items():
        assert field(bundle, f"tokenizer.ggml.{key}_token_id") == ids[name], key
    assert field(bundle, "tokenizer.ggml.add_bos_token") is True
    assert field(bundle, "kvq.fim.suffix_first") is True
    assert field(bundle, "tokenizer.chat_template") == tiny.CHATML
    assert field(bundle, "kvq.kv.k_bits") == 4
    assert field(bundle, "general.file_type") == gguf.LlamaFileType.MOSTLY_Q8_0


# The bundle


@needs_llama
@pytest.mark.parametrize("kind", ["onnx", "gguf", "both"])
def test_the_manifest_says_what_there_is(tmp_path: Path, kind: str) -> None:
    source = tiny.make_llama_checkpoint(tmp_path / "source", dtype="bfloat16")
    options = ExportOptions(format=kind, gguf_type="q8_0", threads=1)
    calls: list[tuple[int, int]] = []
    bundle = export_model(
        source, tmp_path / "bundle", options, lambda done, total, _: calls.append((done, total))
    )
    manifest = bundle.manifest
    assert (bundle.has_onnx, bundle.has_gguf) == (kind != "gguf", kind != "onnx")
    assert (manifest.weights is None) == (kind == "gguf")
    written = json.loads((bundle.path / MANIFEST_FILE).read_text())
    assert written["version"] == (GGUF_VERSION if kind == "gguf" else VERSION)
    quality = written["quality"]
    assert set(quality) - {"text", "tokens"} == {
        *(["weights", "weights_and_kv"] if bundle.has_onnx else []),
        *(["gguf"] if bundle.has_gguf else []),
    }
    if bundle.has_gguf:
        report = quality["gguf"]
        assert (report["type"], report["kv"], report["tokens"]) == ("q8_0", "f16", 384)
        assert 0 < report["mean_kld"] < NATS["q8_0"]
        assert report["mean_kld"] < report["kld_99_9"]
        assert report["top1_agreement"] > 0.9
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1]


def test_an_altered_or_missing_gguf_file_is_refused(tmp_path: Path) -> None:
    bundle = export(tiny.make_llama_checkpoint(tmp_path / "source"), "q8_0")
    file = bundle.path / GGUF_FILE
    raw = bytearray(file.read_bytes())
    raw[-100] ^= 1
    file.write_bytes(raw)
    with pytest.raises(KvqError, match=r"model\.gguf was altered after the export"):
        Bundle.open(bundle.path)
    file.unlink()
    with pytest.raises(KvqError, match=r"model\.gguf is missing"):
        Bundle.open(bundle.path)


def test_a_bundle_without_a_graph_says_so(tmp_path: Path) -> None:
    bundle = export(tiny.make_llama_checkpoint(tmp_path / "source"), "q8_0")
    with pytest.raises(KvqError, match=r"holds a GGUF file only.*--format both"):
        bundle.read_weight("embed")


def test_what_is_missing_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.make_llama_checkpoint(tmp_path / "source")
    reason = "llama-cpp-python is not installed; pip install 'kvq-runtime[gguf]'"
    monkeypatch.setattr("kvq_export.gguf_llama.missing", lambda: reason)
    needed = r"q4_k_m is made by llama.cpp's own .*\[gguf\]'; --gguf-type q8_0, .* work without it"
    with pytest.raises(BackendError, match=needed):
        export(source, "q4_k_m")
    report = export(source, "q8_0", quality=True).manifest.quality
    assert report is not None
    assert report["gguf"] == {"type": "q8_0", "not_measured": reason}
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(BackendError, match=r"gguf package: pip install 'kvq-runtime\[gguf\]'"):
        export(source, "q4_0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "source-q8_0"]


@needs_llama
@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m"])
def test_an_interrupted_export_leaves_nothing(tmp_path: Path, kind: str) -> None:
    source = tiny.make_llama_checkpoint(tmp_path / "source")

    def stop(done: int, total: int, _label: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    options = ExportOptions(format="gguf", gguf_type=kind, quality=False, threads=1)
    with pytest.raises(KeyboardInterrupt):
        export_model(source, tmp_path / "bundle", options, stop)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_weights_beyond_float16_are_refused(tmp_path: Path) -> None:
    source = tiny.make_llama_checkpoint(tmp_path / "source")
    file = source / "model.safetensors"
    values = tiny.read_safetensors(file)
    values["model.layers.0.mlp.down_proj.weight"] = values[
        "model.layers.0.mlp.down_proj.weight"
    ] * np.float32(1e6)
    tiny.write_safetensors(file, values)
    with pytest.raises(CheckpointError, match="does not fit float16; export with --gguf-type bf16"):
        export(source, "f16")
    assert export(source, "bf16").has_gguf
    codes, scales = np.zeros((1, 64), np.uint8), np.array([[1, 1e6]], np.float32)
    with pytest.raises(CheckpointError, match=r"a block's scale of 1e\+06 does not fit float16"):
        pack_blocks(codes, scales, 8)


@pytest.mark.parametrize("wrong", [{"format": "ggml"}, {"gguf_type": "q5_k_m"}])
def test_impossible_options_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(wrong.values()))} is not possible: choose"):
        ExportOptions(**wrong)


@needs_llama
def test_the_command_writes_what_was_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(tiny.make_llama_checkpoint(tmp_path / "source"))
    made = str(tmp_path / "made")
    assert main(["export", source, "-o", made, "--format", "both", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gguf"] == {
        "type": "q4_k_m", "architecture": "llama", "context_length": 512
    }  # fmt: skip
    assert report["weights"]["bits"] == 4
    assert report["quality"]["gguf"]["mean_kld"] > 0
    words = ["export", source, "-o", made, "--force", "--no-quality", "--format", "gguf"]
    assert main([*words, "--gguf-type", "q4_0", "--embedding-bits", "4"]) == 0
    assert "q4_0, architecture llama, 512 tokens of context" in capsys.readouterr().out
    assert {tensor.tensor_type.name for tensor in tensors(Bundle.open(made))} == {"F32", "Q4_0"}


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tiny.make_llama_checkpoint(tmp_path / "source")
    kinds = ["q8_0"] if gguf_llama.llama_missing() else ["q8_0", "q4_k_m"]
    for kind in kinds:
        export(source, kind, quality=True)
    assert capfd.readouterr() == ("", "")
