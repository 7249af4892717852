"""Writes a GGUF file: keys through the gguf package, then the tensors, chunk by chunk.

Owns the order of the bytes. What the model is comes from `gguf_model`, the vocabulary from
`gguf_vocabulary`, the bytes of a tensor from whoever calls: a few row chunks are in memory.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from kvq.config import KvPlan
from kvq.errors import BackendError, argument
from kvq_export.gguf_blocks import StoredKind
from kvq_export.gguf_model import GgufModel, GgufTensor, Key
from kvq_export.gguf_ropes import GgufRope
from kvq_export.gguf_vocabulary import Vocabulary
from kvq_export.writer import Progress
from kvq_models.config import Attention, DeltaNet, Dense, Experts, ModelConfig, ShortConv

ALIGNMENT = 32
_PHI3_TOKENS = {"<unk>", "<s>", "</s>", "<|endoftext|>"}

Encode = Callable[[GgufTensor], Iterator[np.ndarray]]
"""A tensor's rows in order, as arrays whose bytes are the file's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufHeader:
    """What a file says of itself beside the shape of its model.

    `file_type` is llama.cpp's name of the mixture of types, such as MOSTLY_Q8_0. Without a
    vocabulary the file takes token ids only.
    """

    name: str
    file_type: str
    license: str | None = None
    vocabulary: Vocabulary | None = None
    kv: KvPlan | None = None


def gguf_package() -> ModuleType:
    """The gguf package. Raises `BackendError` saying how to install it."""
    try:
        import gguf
    except ImportError as error:
        raise BackendError(
            'writing a GGUF file needs the gguf package: pip install "kvq-runtime[export]"; '
            f"{argument('format', 'onnx')} needs nothing more"
        ) from error
    return gguf


def tensor_bytes(model: GgufModel, kinds: Mapping[str, StoredKind]) -> int:
    """Bytes of all tensors together, the padding after each included."""
    sizes = [_num_bytes(tensor, kinds[tensor.name]) for tensor in model.tensors]
    sizes += [values.nbytes for values in model.rope.tensors.values()]
    return sum(map(_padded, sizes))


def write_gguf(
    path: Path,
    model: GgufModel,
    kinds: Mapping[str, StoredKind],
    encode: Encode,
    header: GgufHeader,
    progress: Progress,
) -> None:
    """Writes `path`; `kinds` has a row for each tensor of the model. Raises OSError."""
    gguf = gguf_package()
    writer = gguf.GGUFWriter(path, model.architecture)
    _add_header(gguf, writer, header, model.config.vocab_size)
    _add_model(gguf, writer, model)
    for tensor in model.tensors:
        kind = kinds[tensor.name]
        writer.add_tensor_info(
            tensor.name,
            tensor.stored_shape,
            np.dtype(np.float32),
            _num_bytes(tensor, kind),
            raw_dtype=gguf.GGMLQuantizationType[kind.kind.upper()],
        )
    for name, values in model.rope.tensors.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    total, done = tensor_bytes(model, kinds), 0
    with path.open("ab") as stream:
        _pad(stream)
        first = stream.tell()
        for tensor in model.tensors:
            start = stream.tell()
            for chunk in encode(tensor):
                stream.write(np.ascontiguousarray(chunk).view(np.uint8).data)
                done = stream.tell() - first
                progress(done, total, tensor.name)
            expected = _num_bytes(tensor, kinds[tensor.name])
            assert stream.tell() - start == expected, f"{tensor.name} has a wrong size"
            _pad(stream)
        for values in model.rope.tensors.values():
            stream.write(values.data)
            _pad(stream)
        assert stream.tell() - first == total


def _num_bytes(tensor: GgufTensor, kind: StoredKind) -> int:
    if len(tensor.shape) == 1:
        return kind.row_bytes(tensor.shape[0])
    return math.prod(tensor.shape[:-1]) * kind.row_bytes(tensor.shape[-1])


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _pad(stream: BinaryIO) -> None:
    stream.write(b"\0" * (_padded(stream.tell()) - stream.tell()))


# Keys


def _add_header(gguf: ModuleType, writer: Any, header: GgufHeader, vocab_size: int) -> None:
    writer.add_name(_name(header))
    if header.license is not None:
        writer.add_license(header.license)
    writer.add_file_type(gguf.LlamaFileType[header.file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(vocab_size)
    if header.kv is not None:
        writer.add_uint32("kvq.kv.k_bits", header.kv.k_bits)
        writer.add_uint32("kvq.kv.v_bits", header.kv.v_bits)
        writer.add_uint32("kvq.kv.sink_tokens", header.kv.sink_tokens)
    if header.vocabulary is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        _add_vocabulary(writer, header.vocabulary)


def _name(header: GgufHeader) -> str:
    """The name, spelled apart where llama.cpp would take it for Phi-3's and miss its tokens.

    It sets traits of these tokens for any model called so, and does not load one without them.
    """
    tokens = () if header.vocabulary is None else header.vocabulary.tokens
    if set(tokens) >= _PHI3_TOKENS:
        return header.name
    return re.sub(r"(phi)-?(3)", r"\1 \2", header.name, flags=re.IGNORECASE)


def _add_model(gguf: ModuleType, writer: Any, model: GgufModel) -> None:
    config = model.config
    writer.add_context_length(model.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    feeds = [layer.feed for layer in config.layers]
    dense = [feed if isinstance(feed, Dense) else feed.beside for feed in feeds]
    widths = [feed.width for feed in dense if feed is not None]
    writer.add_feed_forward_length(_one_or_all(widths or [config.widest_feed]))
    experts = next((feed for feed in feeds if isinstance(feed, Experts)), None)
    if experts is not None and experts.shared is not None:
        writer.add_expert_shared_feed_forward_length(experts.shared.width)
    if experts is not None:
        writer.add_expert_count(experts.count)
        writer.add_expert_used_count(experts.chosen)
        writer.add_expert_feed_forward_length(experts.width)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(_one_or_all(_kv_heads(config)))
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    if config.norm == "layer":
        writer.add_layer_norm_eps(config.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.norm_eps)
    for key, value in model.keys.items():
        _add_key(writer, f"{model.architecture}.{key}", value)
    if model.window_tokens:
        writer.add_sliding_window(model.window_tokens)
    if model.windowed:
        writer.add_sliding_window_pattern(list(model.windowed))
    _add_rope(gguf, writer, model.rope)


def _kv_heads(config: ModelConfig) -> list[int]:
    """KV heads of every layer: llama.cpp tells a convolution by 0, and a delta net by a list."""
    heads = {ShortConv: 0, DeltaNet: config.num_kv_heads}
    mixers = [layer.mixer for layer in config.layers]
    return [
        mixer.kv_heads if isinstance(mixer, Attention) else heads[type(mixer)] for mixer in mixers
    ]


def _one_or_all(numbers: list[int]) -> int | list[int]:
    """The number that all layers have, or that of each."""
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _add_key(writer: Any, name: str, value: Key) -> None:
    match value:
        case float():
            writer.add_float32(name, value)
        case int():
            writer.add_uint32(name, value)
        case _:
            writer.add_array(name, value)


def _add_rope(gguf: ModuleType, writer: Any, rope: GgufRope) -> None:
    writer.add_rope_dimension_count(rope.dimensions)
    writer.add_rope_freq_base(rope.base)
    if rope.base_windowed is not None:
        writer.add_rope_freq_base_swa(rope.base_windowed)
    if rope.scaling != "none":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope.scaling))
    if rope.factor != 1:
        writer.add_rope_scaling_factor(rope.factor)
    if rope.original_context is not None:
        writer.add_rope_scaling_orig_ctx_len(rope.original_context)
    if rope.attention_factor != 1:
        writer.add_rope_scaling_attn_factors(rope.attention_factor)


def _add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.kind)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_scores(vocabulary.scores)
    writer.add_add_bos_token(vocabulary.add_bos)
    writer.add_add_eos_token(False)
    if vocabulary.kind == "gpt2":
        # A key without a merge is left out, and a file without the key is refused.
        writer.add_token_merges(vocabulary.merges or [""])
    else:
        writer.add_add_space_prefix(vocabulary.space_prefix)
        writer.add_remove_extra_whitespaces(vocabulary.merge_spaces)
        writer.add_precompiled_charsmap(vocabulary.charsmap)
    for key, token in vocabulary.ids.items():
        writer.add_uint32(f"tokenizer.ggml.{_ID_KEYS.get(key, key)}_token_id", token)
    if vocabulary.suffix_first:
        writer.add_bool("kvq.fim.suffix_first", True)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)


_ID_KEYS = {"pad": "padding", "unk": "unknown"}
