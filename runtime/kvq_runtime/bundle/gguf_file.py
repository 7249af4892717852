"""A GGUF file as a model: its facts, the bytes of its cache, and the bytes a step reads.

It needs no llama.cpp, so `kvq inspect` shows any file.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kvq.config import KvPlan
from kvq.errors import ModelError, UnsupportedModelError
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.bundle.gguf_format import GgufContents, TensorInfo, read_gguf

# Plan of a file without one: nearly the quality of 16 bits at half the bytes. llama.cpp's cache
# keeps no tokens in floating point.
DEFAULT_PLAN = KvPlan(k_bits=8, v_bits=8, sink_tokens=0)

TOKENIZER = "tokenizer.ggml."
# What a token is.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# What `TOKENIZER` and `_token_id` are around in the keys of the fields of `FimTokens`.
FIM_KEYS: Mapping[str, str] = {
    "prefix": "fim_pre", "suffix": "fim_suf", "middle": "fim_mid", "pad": "fim_pad",
    "repo": "fim_rep", "file": "fim_sep",
}  # fmt: skip

# A fingerprint reads this much of every tensor. That is enough, as two models differ everywhere.
SAMPLE_BYTES = 4096
# Larger numbers in a header are damage, and would ask for too much memory.
MAX_LAYERS, MAX_HEADS, MAX_WIDTH = 4096, 65536, 1 << 24


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """Holds an opened, checked file.

    A bundle that holds one passes on its own `name`, `kv` plan, `bundled_tokenizer` and `sampling`
    (fields of `Sampling`), and vouches for it. Only a file from elsewhere is `untried`, see
    `llama_library.check`.
    """

    path: Path
    contents: GgufContents
    name: str
    kv: KvPlan = DEFAULT_PLAN
    bundled_tokenizer: Tokenizer | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    untried: bool = True
    has_onnx = False
    has_gguf = True
    experts = None  # only a graph's experts count here

    @classmethod
    def open(cls, path: Path | str) -> "GgufFile":
        """Reads and checks the header. Raises `ModelError` for a damaged or unknown file."""
        path = Path(path)
        contents = read_gguf(path)
        name = contents.metadata.get("general.name")
        file = cls(
            path=path,
            contents=contents,
            name=name if isinstance(name, str) and name else path.stem,
        )
        file._check()
        return file

    def gguf(self) -> "GgufFile":
        """Returns itself; a bundle returns the file inside it."""
        return self

    @property
    def architecture(self) -> str:
        """Returns llama.cpp's name of the family."""
        return str(self.contents.metadata.get("general.architecture", ""))

    @property
    def context_length(self) -> int:
        """Returns the number of tokens that the model was made for."""
        return self._count("context_length", 1 << 32)

    @property
    def vocab_size(self) -> int:
        """Returns the rows of the embedding."""
        return self._tensors["token_embd.weight"].shape[0]

    @property
    def chat_template(self) -> str | None:
        """Returns the chat template, or None."""
        template = self.contents.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.contents.tensors)

    @property
    def weight_bytes_per_step(self) -> int:
        """Returns the bytes a decode step reads: all, but unused experts and embedding rows."""
        used = self._optional("expert_used_count", 0) / max(1, self._optional("expert_count", 0))
        total = 0.0
        for tensor in self.contents.tensors:
            total += tensor.num_bytes * (used if "_exps." in tensor.name else 1)
        if "output.weight" in self._tensors:
            embedding = self._tensors["token_embd.weight"]
            total -= embedding.num_bytes * (1 - 1 / embedding.shape[0])
        return int(total)

    @property
    def head_dims(self) -> tuple[int, int]:
        """Returns the channels of a key head and of a value head."""
        width = self._count("embedding_length", MAX_WIDTH) // max(self.heads)
        return self._optional("attention.key_length", width), self._optional(
            "attention.value_length", width
        )

    @property
    def heads(self) -> tuple[int, ...]:
        """Returns the query heads of every layer."""
        return self._per_layer("attention.head_count")

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """Returns the KV heads of every layer; 0 for a layer without attention."""
        key = "attention.head_count_kv"
        return self._per_layer(key) if self._has(key) else self.heads

    @property
    def windowed_head_dims(self) -> tuple[int, int]:
        """Returns the channels of a key head and of a value head in layers with a window."""
        k_dim, v_dim = self.head_dims
        return self._optional("attention.key_length_swa", k_dim), self._optional(
            "attention.value_length_swa", v_dim
        )

    @property
    def kv_widths(self) -> tuple[tuple[int, int], ...]:
        """Returns the channels of all keys and of all values of a token, for every layer.

        They are 0 for a layer that reads another layer's keys, or has none.
        """
        windowed = self._flags("attention.sliding_window_pattern")
        owners = self.num_layers - self._optional("attention.shared_kv_layers", 0)
        widths: list[tuple[int, int]] = []
        for layer, heads in enumerate(self._attending_heads):
            k_dim, v_dim = self.windowed_head_dims if windowed[layer] else self.head_dims
            kv_heads = heads if layer < owners else 0
            widths.append((k_dim * kv_heads, v_dim * kv_heads))
        return tuple(widths)

    @property
    def state_bytes(self) -> int:
        """Returns the bytes of a sequence's recurrent states, float32, in layers without attention.

        These are rows of a short convolution, or the rows and matrices of a delta net or a Mamba
        layer.
        """
        layers = self._attending_heads.count(0)
        if taps := self._optional("shortconv.l_cache", 0):
            return 4 * layers * (taps - 1) * self._count("embedding_length", MAX_WIDTH)
        taps, inner, state, groups = (
            self._optional(f"ssm.{key}", 0)
            for key in ("conv_kernel", "inner_size", "state_size", "group_count")
        )
        rows = (taps - 1) * (inner + 2 * groups * state) if taps else 0
        return 4 * layers * (rows + inner * state)

    @property
    def _attending_heads(self) -> tuple[int, ...]:
        """Returns the KV heads of every layer; 0 for one that the file says is recurrent."""
        recurrent, period = self._flags("attention.recurrent_layers"), "full_attention_interval"
        if not any(recurrent) and (interval := self._optional(period, 0)) > 0:
            recurrent = tuple((layer + 1) % interval != 0 for layer in range(self.num_layers))
        pairs = zip(self.kv_heads, recurrent, strict=True)
        return tuple(0 if recurs else heads for heads, recurs in pairs)

    @property
    def num_layers(self) -> int:
        return self._count("block_count", MAX_LAYERS)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the weights: SHA-256 (hex) of the header, the size and every tensor's start.

        Reading all of a large file would take longer than loading it.
        """
        digest = hashlib.sha256(str(self.contents.num_bytes).encode())
        alignment = self.contents.alignment
        begin = -(-self.contents.header_bytes // alignment) * alignment
        with self.path.open("rb") as file:
            digest.update(file.read(self.contents.header_bytes))
            for tensor in self.contents.tensors:
                file.seek(begin + tensor.offset)
                digest.update(file.read(min(tensor.num_bytes, SAMPLE_BYTES)))
        return digest.hexdigest()

    def strings(self, key: str) -> Sequence[bytes]:
        """Returns a metadata array of strings; empty where there is none."""
        values = self.contents.metadata.get(key)
        return values if isinstance(values, list) else []

    def numbers(self, key: str) -> np.ndarray:
        """Returns a metadata array of numbers; empty where there is none."""
        values = self.contents.metadata.get(key)
        return values if isinstance(values, np.ndarray) else np.zeros(0, np.int32)

    def read_ahead(self) -> None:
        """Does nothing: llama.cpp reads the vocabulary with the weights."""

    def weights_json(self) -> dict[str, Any]:
        """Returns the bytes of all tensors, and number and bytes of each type."""
        types: dict[str, dict[str, int]] = {}
        for tensor in self.contents.tensors:
            row = types.setdefault(tensor.kind.name, {"tensors": 0, "bytes": 0})
            row["tensors"] += 1
            row["bytes"] += tensor.num_bytes
        return {"bytes": self.num_bytes, "types": types}

    def in_bundle(
        self, name: str, kv: KvPlan, tokenizer: Tokenizer | None, sampling: Mapping[str, Any]
    ) -> "GgufFile":
        """Returns the same file with what a bundle says of it."""
        return replace(
            self, name=name, kv=kv, bundled_tokenizer=tokenizer, sampling=sampling, untried=False
        )

    def trusted(self) -> "GgufFile":
        """Returns the same file, to be loaded without a trial."""
        return replace(self, untried=False)

    @cached_property
    def _tensors(self) -> dict[str, TensorInfo]:
        return {tensor.name: tensor for tensor in self.contents.tensors}

    def _check(self) -> None:
        """Refuses what is no decoder model with attention before anything trusts its numbers."""
        if not self.architecture:
            self._refuse("it has no general.architecture")
        if self._whole("split.count", 1) > 1:
            raise UnsupportedModelError(
                f"{self.path} is one part of a split model; join the parts into one file first "
                "(llama-gguf-split --merge)"
            )
        if "token_embd.weight" not in self._tensors:
            self._refuse(
                f"a file of architecture {self.architecture!r} without a token embedding is an "
                "adapter or a part of a model"
            )
        embedding = self._tensors["token_embd.weight"].shape
        if len(embedding) != 2 or embedding[1] != self._count("embedding_length", MAX_WIDTH):
            self._refuse(f"its embedding has shape {embedding}")
        if self.context_length < 2:
            self._refuse(f"its context is {self.context_length} tokens")
        self._check_heads()
        self._check_tokens()

    def _check_heads(self) -> None:
        if max(self.heads) < 1:
            self._refuse("it has no attention heads")
        if not all(1 <= head_dim <= MAX_WIDTH for head_dim in self.head_dims):
            self._refuse(f"its heads have {self.head_dims} channels")
        for heads, kv_heads in zip(self.heads, self.kv_heads, strict=True):
            if kv_heads and heads % kv_heads:
                self._refuse(f"{heads} query heads cannot share {kv_heads} KV heads")

    def _check_tokens(self) -> None:
        """Refuses equal tokens, for which llama.cpp ends the program.

        llama.cpp reads a token up to a zero byte.
        """
        pieces = [piece.split(b"\0")[0] for piece in self.strings("tokenizer.ggml.tokens")]
        if len(set(pieces) - {b""}) < sum(map(bool, pieces)):
            self._refuse("two of its tokens are the same")

    def _refuse(self, why: str) -> None:
        raise UnsupportedModelError(
            f"{self.path} is not a model kvq can run: {why}; give a GGUF file of a decoder-only "
            "language model"
        )

    def _has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.contents.metadata

    def _count(self, key: str, most: int) -> int:
        """Returns a positive whole number that the file must have."""
        name = f"{self.architecture}.{key}"
        value = self.contents.metadata.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise UnsupportedModelError(
                f"{self.path} is not a model kvq can run: {name} is {value}; give a GGUF file of "
                "a decoder-only language model"
            )
        return value

    def _optional(self, key: str, default: int) -> int:
        return self._whole(f"{self.architecture}.{key}", default)

    def _whole(self, key: str, default: int) -> int:
        value = self.contents.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{self.path} is damaged: {key} is {value}, not a whole number")
        return value

    def _flags(self, key: str) -> tuple[bool, ...]:
        """Returns a truth value for every layer; False where the file has no such list."""
        value = self.contents.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(value, np.ndarray) or len(value) < self.num_layers:
            return (False,) * self.num_layers
        return tuple(map(bool, value[: self.num_layers]))

    def _per_layer(self, key: str) -> tuple[int, ...]:
        """Returns a number for every layer; the file may have one that all share."""
        value = self.contents.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(value, np.ndarray):
            return (self._count(key, MAX_HEADS),) * self.num_layers
        if value.dtype.kind not in "iu" or len(value) < self.num_layers:
            raise ModelError(f"{self.path} is damaged: {key} has {len(value)} values")
        heads = tuple(value[: self.num_layers].tolist())
        if min(heads) < 0 or max(heads) > MAX_HEADS:
            raise ModelError(f"{self.path} is damaged: {key} has values up to {max(heads)}")
        return heads
