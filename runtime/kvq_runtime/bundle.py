"""A bundle folder: its manifest, the check of every byte, and its weights as numpy arrays.

Owns `kvq.json` and the layout of quantised weights; `kvq_export` writes both by what is defined
here. Knows no checkpoint and runs no model.

A manifest of this version may carry keys unknown here; they are kept in the file and not read.
"""

import contextlib
import hashlib
import json
import zipfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvq.config import DEFAULT_POLICY, KvPlan, PageForm
from kvq.errors import BundleError, KvqError, argument
from kvq.files import replace_file
from kvq.json_values import is_object
from kvq.reference_linear import (
    PANEL_ROWS,
    BlockFormat,
    Blocks,
    PanelFormat,
    View,
    dequantize,
    in_weights,
    restore,
    unpack,
)
from kvq.settings import cache_folder
from kvq_models.config import Experts, ModelConfig
from kvq_models.products import products
from kvq_models.tokenizer import ControlTokens, Tokenizer
from kvq_runtime.config import Sampling
from kvq_runtime.gguf_file import GgufFile
from kvq_runtime.graph_check import check_graph

if TYPE_CHECKING:
    import onnx_ir

FORMAT = "kvq-bundle"
VERSION = 9
# Also read: these describe their layers otherwise, and the first is for a GGUF file alone.
GGUF_VERSION = 2
READ_VERSIONS = (GGUF_VERSION, 6, 7, 8, VERSION)
# Those whose calibration was for older formats of pages, or whose weights lie otherwise.
OLD_VERSIONS = (3, 4, 5)
MANIFEST_FILE = "kvq.json"
MODEL_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
GGUF_FILE = "model.gguf"
MAPS_FILE = "predict.npz"
# Maps from an auxiliary model's keys and values.
AUXILIARY_FILE = "auxiliary.npz"
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"

# Codes of this width are stored two to a byte.
NIBBLE_BITS = 4

# Hashes of files this large are remembered between runs; smaller ones are read every time.
REMEMBERED_BYTES = 16 << 20
# More than any vocabulary; tokenizers hold an id in 32 bits.
_TOKENS = 1 << 31


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightInfo:
    """How each matrix is stored, by canonical name, their bytes together, and the op for them.

    With `linear` "kvq" a matrix lies in panels, see `kvq.reference_linear`; with "ort" as ONNX
    Runtime's MatMulNBits wants it, codes two
    to a byte and float32 scales.
    """

    formats: Mapping[str, BlockFormat]
    num_bytes: int
    linear: str = "kvq"

    def format_of(self, name: str) -> BlockFormat:
        """How the canonical matrix `name` is stored; a tied head is the embedding."""
        return self.formats["embed" if name == "head" and name not in self.formats else name]

    @property
    def by_format(self) -> dict[str, list[str]]:
        """Names of the matrices that are stored alike."""
        found: dict[str, list[str]] = {}
        for name, form in self.formats.items():
            found.setdefault(str(form), []).append(name)
        return found

    def to_json(self) -> dict[str, Any]:
        """The manifest's object."""
        return {"formats": self.by_format, "bytes": self.num_bytes, "linear": self.linear}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "WeightInfo":
        """Raises KeyError, TypeError or ValueError for another object."""
        named = {spelled: BlockFormat.parse(spelled) for spelled in data["formats"]}
        formats = {
            str(name): form for spelled, form in named.items() for name in data["formats"][spelled]
        }
        info = cls(formats=formats, num_bytes=int(data["bytes"]), linear=str(data["linear"]))
        if info.num_bytes < 0:
            raise ValueError(f"weights take no {info.num_bytes} bytes")
        return info


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufInfo:
    """What the GGUF file is: its type (`q4_k_m`), llama.cpp's architecture, its context.

    The context is shorter than the model's where llama.cpp does not compute a window of the model.
    """

    type: str
    architecture: str
    context_length: int

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "GgufInfo":
        """Raises KeyError, TypeError or ValueError for another object."""
        return cls(
            type=str(data["type"]),
            architecture=str(data["architecture"]),
            context_length=int(data["context_length"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FileInfo:
    """Size and SHA-256 (hex) of one file of the bundle."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """`kvq.json`. `tokens` is what `ControlTokens.to_json` gives.

    `sampling`: the fields of `Sampling` that the model asks for, by its generation_config.json.

    `weights` are those of the graph, None in a bundle without one; `gguf` is None without a GGUF
    file. `prediction`: `layers`, the first layers after which the maps of `MAPS_FILE` predict the
    others, and what that costs. `auxiliary`: the `name`, the `fingerprint` and the layers
    (`served_by`) of the model that those of `AUXILIARY_FILE` start from, and what that costs.
    """

    name: str
    config: ModelConfig
    weights: WeightInfo | None
    kv: KvPlan
    files: Mapping[str, FileInfo]
    eos_token_ids: tuple[int, ...] = ()
    tokens: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    source: Mapping[str, Any] = field(default_factory=dict[str, Any])
    quality: Mapping[str, Any] | None = None
    gguf: GgufInfo | None = None
    policy: str = DEFAULT_POLICY
    forms: tuple[PageForm, ...] = ()
    prediction: Mapping[str, Any] | None = None
    auxiliary: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The object written to `kvq.json`, its own checksum included."""
        data: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "model_type": self.config.model_type,
            "config": self.config.to_json(),
            "context_length": self.config.context_length,
            "head_size": self.config.head_dim,
            "num_key_value_heads": self.config.num_kv_heads,
            "eos_token_id": list(self.eos_token_ids),
            "weights": None if self.weights is None else self.weights.to_json(),
            "gguf": None if self.gguf is None else asdict(self.gguf),
            "kv": {
                "k_bits": self.kv.k_bits,
                "v_bits": self.kv.v_bits,
                "sink_tokens": self.kv.sink_tokens,
                "policy": self.policy,
            },
            "page_forms": [int(form) for form in self.forms],
            "prediction": None if self.prediction is None else dict(self.prediction),
            "auxiliary": None if self.auxiliary is None else dict(self.auxiliary),
            "tokens": dict(self.tokens),
            "sampling": dict(self.sampling),
            "source": dict(self.source),
            "quality": None if self.quality is None else dict(self.quality),
            "files": {
                name: {"bytes": info.num_bytes, "sha256": info.sha256}
                for name, info in self.files.items()
            },
        }
        return data | {"checksum": checksum(data)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Manifest":
        """Raises KeyError, TypeError, ValueError or `KvqError` for a manifest that is not one."""
        kv, gguf = data["kv"], data.get("gguf")
        config = ModelConfig.from_json(data["config"])
        weights = None if data["weights"] is None else WeightInfo.from_json(data["weights"])
        if weights is not None and set(weights.formats) != _matrices(config):
            raise ValueError("weights are not those of this model")
        return cls(
            name=str(data["name"]),
            config=config,
            weights=weights,
            gguf=None if gguf is None else GgufInfo.from_json(gguf),
            kv=KvPlan(
                k_bits=int(kv["k_bits"]),
                v_bits=int(kv["v_bits"]),
                sink_tokens=int(kv["sink_tokens"]),
            ),
            policy=str(kv.get("policy", DEFAULT_POLICY)),
            forms=_page_forms(data["page_forms"], config),
            prediction=_prediction(data.get("prediction"), config),
            auxiliary=_auxiliary(data.get("auxiliary"), config),
            files={
                str(name): FileInfo(num_bytes=int(row["bytes"]), sha256=str(row["sha256"]))
                for name, row in data["files"].items()
            },
            eos_token_ids=tuple(int(token) for token in data["eos_token_id"]),
            tokens=_tokens(data["tokens"]),
            sampling=_sampling(data.get("sampling", {})),
            source=dict(data["source"]),
            quality=None if data["quality"] is None else dict(data["quality"]),
        )


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An opened, checked bundle."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | Path, *, verify: Literal["full", "size"] = "full") -> "Bundle":
        """Checks the manifest and every file; `verify="size"` leaves the hashes out.

        The hash of a large file is remembered, with its size and time of change, in the cache
        folder: it is computed again when one of them differs. Raises `BundleError`.
        """
        folder = Path(path)
        manifest = _read_manifest(folder)
        memory = HashMemory.load()
        for name, info in manifest.files.items():
            _check_file(folder, name, info, memory if verify == "full" else None)
        memory.save()
        stored = manifest.weights
        if stored is not None:
            check_graph(
                folder / MODEL_FILE,
                manifest.config,
                linear=stored.linear,
                format_of=stored.format_of,
            )
        return cls(path=folder, manifest=manifest)

    @property
    def config(self) -> ModelConfig:
        """What the model is."""
        return self.manifest.config

    @property
    def name(self) -> str:
        """What the model is called."""
        return self.manifest.name

    @property
    def context_length(self) -> int:
        """Tokens the model was made for."""
        return self.config.context_length

    @property
    def kv(self) -> KvPlan:
        """The default plan."""
        return self.manifest.kv

    def weights_json(self) -> dict[str, Any]:
        """Bytes and widths of the weights: the graph's, or the GGUF file's where it is alone."""
        stored = self.manifest.weights
        return self.gguf().weights_json() if stored is None else stored.to_json()

    @property
    def has_onnx(self) -> bool:
        """Whether the bundle holds a graph with its weights."""
        return MODEL_FILE in self.manifest.files

    @property
    def has_gguf(self) -> bool:
        """Whether the bundle holds a GGUF file."""
        return GGUF_FILE in self.manifest.files

    @property
    def has_checkpoint(self) -> bool:
        """Whether the weights are a checkpoint's own, which only numpy computes with."""
        return False

    @property
    def fingerprint(self) -> str:
        """Identifies graph and weights by the hashes in the manifest."""
        hashes = (self.manifest.files[name].sha256 for name in (MODEL_FILE, DATA_FILE))
        return hashlib.sha256("".join(hashes).encode()).hexdigest()

    @property
    def model_path(self) -> Path:
        """The ONNX graph."""
        return self.path / MODEL_FILE

    @property
    def chat_template(self) -> str | None:
        """The chat template, or None for a model without one."""
        if TEMPLATE_FILE not in self.manifest.files:
            return None
        return (self.path / TEMPLATE_FILE).read_text(encoding="utf-8")

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of weights one decode step reads: all, but one row of an untied embedding.

        And but the experts that its token does not choose.
        """
        stored = self._graph_weights
        read_bytes = stored.num_bytes - self._unchosen_bytes
        if self.config.per_layer is not None:
            table = self.form("per_layer_embed")
            read_bytes -= (table.panels - 1) * table.panel_bytes
        if self.config.tied_head:
            return read_bytes
        form = self.form("embed")
        if stored.linear == "kvq":
            return read_bytes - (form.panels - 1) * form.panel_bytes
        row_bytes = form.blocks * (form.block * form.bits // 8 + 4)
        return read_bytes - (form.rows - 1) * row_bytes

    @property
    def _unchosen_bytes(self) -> int:
        """Of the matrices of experts, without those of the experts of one token."""
        left_out = 0
        for product in products(self.config):
            feed = None if product.layer is None else self.config.layers[product.layer].feed
            if product.count > 1 and isinstance(feed, Experts):
                form = self.form(product.weight)
                one = form.panels // product.count * form.panel_bytes
                left_out += (feed.count - feed.chosen) * one
        return left_out

    def gguf(self) -> GgufFile:
        """The GGUF file, known by the bundle's name, plan and tokenizer. Raises `ModelError`."""
        file = GgufFile.open(self.path / GGUF_FILE)
        manifest = self.manifest
        return file.in_bundle(manifest.name, manifest.kv, self.tokenizer(), manifest.sampling)

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer with its control tokens, or None for a bundle that takes ids only."""
        if TOKENIZER_FILE not in self.manifest.files:
            return None
        return Tokenizer.from_bundle(self.path, ControlTokens.from_json(self.manifest.tokens))

    def read_weight(
        self, name: str, rows: slice | np.ndarray | None = None, *, view: View = "full"
    ) -> np.ndarray:
        """A canonical weight (`layers.0.qkv`, `final_norm`) as float32, quantised ones restored.

        `rows` picks rows (a slice or indices) without restoring the others; the head of a model
        that ties it reads as the embedding. `view` "hi" restores 8-bit weights from their upper
        nibbles. Raises `BundleError` for an unknown name.
        """
        if name == "head" and self.config.tied_head:
            name = "embed"
        if name in self._stored:
            return np.array(self._stored[name][slice(None) if rows is None else rows], np.float32)
        blocks, form = self.read_codes(name, rows), self.form(name)
        return dequantize(blocks, form.bits, view)[:, : form.columns]

    def weight_norms(self, layers: Sequence[int]) -> np.ndarray:
        """Frobenius norms float64 [L, 2] of the weights that make these layers' keys and values."""
        return self._weight_norms[list(layers)]

    @cached_property
    def _weight_norms(self) -> np.ndarray:
        norms: list[list[np.floating]] = []
        for layer, own in enumerate(self.config.layers):
            if not own.owns_keys:
                norms.append([np.float64(0), np.float64(0)])
                continue
            width, rows = own.attention.kv_width, slice(own.attention.width, None)
            both = self.read_weight(f"layers.{layer}.qkv", rows).astype(np.float64)
            norms.append([np.linalg.norm(both[:width]), np.linalg.norm(both[width:])])
        return np.array(norms)

    def read_codes(self, name: str, rows: slice | np.ndarray | None = None) -> Blocks:
        """Rows of a quantised weight as stored, constants in units of the weights.

        Raises `BundleError` for a name that is no quantised weight.
        """
        if name == "head" and self.config.tied_head:
            name = "embed"
        if f"{name}.panels" in self._stored:
            return self._panel_codes(name, rows)
        if f"{name}.codes" not in self._stored:
            raise BundleError(f"{self.path} has no weight {name!r}")
        picked: Any = slice(None) if rows is None else rows
        codes = np.asarray(self._stored[f"{name}.codes"][picked])
        if self.form(name).bits == NIBBLE_BITS:
            codes = np.stack((codes & np.uint8(15), codes >> np.uint8(4)), axis=-1)
        scales = np.array(self._stored[f"{name}.scales"][picked])
        return Blocks(codes.reshape(len(codes), -1), scales)

    def _panel_codes(self, name: str, rows: slice | np.ndarray | None) -> Blocks:
        form, stored = self.form(name), self._stored[f"{name}.panels"]
        index = np.arange(form.rows)[slice(None) if rows is None else rows]
        panels, places = np.unique(index // PANEL_ROWS, return_inverse=True)
        blocks = unpack(form, np.asarray(stored[panels]))
        return in_weights(blocks.picked(places * PANEL_ROWS + index % PANEL_ROWS))

    def form(self, name: str) -> PanelFormat:
        """Shape and format of a canonical matrix."""
        shape = self._matrix_shapes[name]
        return PanelFormat.of(self._graph_weights.format_of(name), shape)

    @property
    def fitted_layers(self) -> int | None:
        """The first layers from which those after them can be predicted by fitted matrices."""
        told = self.manifest.prediction
        return None if told is None else int(told["layers"])

    def map_form(self) -> PanelFormat:
        """Shape and widths of every map: a layer's keys and values from the stream."""
        config, block = self.config, self._graph_weights.format_of("layers.0.qkv").block
        rows = 2 * config.num_kv_heads * config.head_dim
        return PanelFormat(rows=rows, columns=config.hidden_size, bits=8, block=block)

    def maps(self) -> dict[str, np.ndarray]:
        """`layers.N.map` uint8 [panels, bytes] and `layers.N.map_bias` float32 of fitted layers.

        Empty where there are none. Raises `BundleError` for a file that does not hold them.
        """
        if self.fitted_layers is None:
            return {}
        form, path = self.map_form(), self.path / MAPS_FILE
        shapes = {"map": (form.panels, form.panel_bytes), "map_bias": (form.rows,)}
        found: dict[str, np.ndarray] = {}
        with _reading_maps(path), np.load(path, allow_pickle=False) as file:
            for layer in range(self.fitted_layers, self.config.num_layers):
                for kind, shape in shapes.items():
                    name = f"layers.{layer}.{kind}"
                    found[name] = np.ascontiguousarray(file[name])
                    dtype = np.uint8 if kind == "map" else np.float32
                    if found[name].shape != shape or found[name].dtype != dtype:
                        raise ValueError(f"{name} is of shape {found[name].shape}")
        return found

    def restored_maps(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """The same as float32 [rows, columns] and [rows] by layer."""
        stored, form = self.maps(), self.map_form() if self.fitted_layers else None
        layers = range(self.fitted_layers or 0, self.config.num_layers) if stored else ()
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for layer in layers:
            assert form is not None
            weights = restore(form, stored[f"layers.{layer}.map"])[: form.rows]
            found[layer] = weights, stored[f"layers.{layer}.map_bias"]
        return found

    def auxiliary_maps(self) -> tuple[np.ndarray, ...]:
        """Of each layer W float32 [n, 2 Hk D], from an auxiliary model's keys and values.

        Empty where there are none. Raises `BundleError` for a file that does not hold them.
        """
        if self.manifest.auxiliary is None:
            return ()
        config, path = self.config, self.path / AUXILIARY_FILE
        columns = 2 * config.num_kv_heads * config.head_dim
        with _reading_maps(path), np.load(path, allow_pickle=False) as file:
            found = tuple(file[f"layers.{layer}.map"] for layer in range(config.num_layers))
            wrong = [w.shape for w in found if w.ndim != 2 or w.shape[1] != columns]
            if wrong or len({w.shape for w in found}) > 1:
                raise ValueError(f"a map is of shape {(wrong or [found[0].shape])[0]}")
            return tuple(w.astype(np.float32) for w in found)

    @cached_property
    def _matrix_shapes(self) -> Mapping[str, tuple[int, int]]:
        """[rows, columns] of every matrix, by canonical name."""
        config = self.config
        layers = {
            product.weight: (product.count * product.rows, product.columns)
            for product in products(config)
        }
        own = config.per_layer
        table = (
            {} if own is None else {"per_layer_embed": (own.rows, len(config.layers) * own.width)}
        )
        return layers | {"embed": (config.vocab_size, config.hidden_size)} | table

    @property
    def _graph_weights(self) -> WeightInfo:
        if self.manifest.weights is None:
            raise BundleError(
                f"{self.path} holds a GGUF file only, and this needs the ONNX graph; "
                f"export the model with {argument('format', 'both')}"
            )
        return self.manifest.weights

    def read_graph(self) -> "onnx_ir.Model":
        """The ONNX graph, anew each time. Raises `BundleError`."""
        import onnx_ir

        try:
            # Its `path` is a PathLike of nothing said.
            return onnx_ir.load(self.model_path)  # pyright: ignore[reportUnknownMemberType]
        except (OSError, ValueError) as error:
            raise BundleError(f"{self.model_path} cannot be read: {error}") from error

    @cached_property
    def _stored(self) -> Mapping[str, np.ndarray]:
        """Initializers of the graph by name, as read-only views of the data file."""
        import onnx_ir

        _ = self._graph_weights
        model = self.read_graph()
        views: dict[str, np.ndarray] = {}
        for name, value in model.graph.initializers.items():
            tensor = value.const_value
            if isinstance(tensor, onnx_ir.ExternalTensor):
                views[name] = np.memmap(
                    self.path / DATA_FILE,
                    tensor.dtype.numpy(),
                    "r",
                    tensor.offset or 0,
                    tensor.shape.numpy(),
                )
        return views


@dataclass(kw_only=True, slots=True)
class HashMemory:
    """SHA-256 of large files already read, by path, size and time of change."""

    path: Path
    rows: dict[str, Any]
    changed: bool = False

    @classmethod
    def load(cls) -> "HashMemory":
        """What earlier runs remembered; nothing, when the file is missing or damaged."""
        path = cache_folder() / "hashes.json"
        rows: Any = None
        with contextlib.suppress(OSError, ValueError):
            rows = json.loads(path.read_text(encoding="utf-8"))
        return cls(path=path, rows=rows if is_object(rows) else {})

    def sha256(self, file: Path) -> str:
        """The file's hash, read from the file unless it is large and unchanged."""
        status = file.stat()
        key = str(file.resolve())
        stamp = {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
        known: Any = self.rows.get(key)
        if is_object(known) and stamp.items() <= known.items():
            return str(known.get("sha256"))
        digest = file_sha256(file)
        if status.st_size >= REMEMBERED_BYTES:
            self.rows[key] = stamp | {"sha256": digest}
            self.changed = True
        return digest

    def save(self) -> None:
        """Writes back what changed. A folder that cannot be written costs time, nothing else."""
        if not self.changed:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(self.path) as stream:
                stream.write(json.dumps(self.rows).encode())


def checksum(manifest: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of a manifest without its `checksum`, whatever its layout in the file."""
    bare = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()


def file_sha256(file: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST_FILE
    if not folder.is_dir():
        raise BundleError(f"there is no bundle at {folder}; `kvq export MODEL -o DIR` makes one")
    if not path.exists():
        hint = "run `kvq export` on it" if (folder / "config.json").exists() else "check the path"
        raise BundleError(f"{folder} is not a bundle: it has no {MANIFEST_FILE}; {hint}")
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is damaged ({error}); export the model again") from error
    data = content if is_object(content) else {}
    if data.get("format") != FORMAT:
        raise BundleError(f"{folder} is not a bundle: {MANIFEST_FILE} does not say {FORMAT!r}")
    _check_version(folder, data)
    if data.get("checksum") != checksum(data):
        raise BundleError(f"{path} was altered after the export; export the model again")
    try:
        manifest = Manifest.from_json(data)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, KvqError) as error:
        raise BundleError(f"{path} is damaged ({error!r}); export the model again") from error
    missing = _promised(manifest) - set(manifest.files)
    if missing:
        raise BundleError(f"{path} lists no {min(missing)}; export the model again")
    return manifest


def _matrices(config: ModelConfig) -> set[str]:
    """Canonical names of what is quantised."""
    tied = {"head"} if config.tied_head else set[str]()
    matrices = {product.weight for product in products(config) if not product.exact}
    tables = {"embed"} if config.per_layer is None else {"embed", "per_layer_embed"}
    return tables | matrices - tied


def _page_forms(data: Sequence[int], config: ModelConfig) -> tuple[PageForm, ...]:
    """Raises ValueError unless there is one of every KV head, or none at all."""
    forms = tuple(PageForm(int(form)) for form in data)
    known = all(0 <= form <= PageForm.ROTATED_KEYS | PageForm.CHANNEL_VALUES for form in forms)
    shapes = [one.shape for one in config.cache_classes]
    streams = sum(shape.num_layers * shape.num_kv_heads for shape in shapes)
    if not known or len(forms) not in (0, streams):
        raise ValueError(f"page_forms {list(data)} are none of this model")
    return forms


def _tokens(data: Any) -> Mapping[str, Any]:
    """Raises ModelError or ValueError, which names it, for what no tokenizer has as an id."""
    control = ControlTokens.from_json(data)
    named = {"bos": () if control.bos is None else (control.bos,)}
    named |= {"eos": control.eos, "start": control.start}
    if control.fim is not None:
        named |= {f"fim.{name}": (token,) for name, token in control.fim.named().items()}
    for name, ids in named.items():
        for token in ids:
            if not 0 <= token < _TOKENS:
                raise ValueError(f"tokens.{name} is {token}; ids are 0 to {_TOKENS - 1}")
    return dict(data)


def _sampling(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields that are known here. Raises what `Sampling` does, TypeError or ValueError."""
    known = {row.name for row in fields(Sampling)} - {"logit_bias"}
    found = {str(name): value for name, value in data.items() if name in known}
    _ = Sampling(**found)
    return found


def _prediction(data: Any, config: ModelConfig) -> Mapping[str, Any] | None:
    """Raises KeyError, TypeError or ValueError for what is none of this model."""
    if data is not None and not 1 <= int(data["layers"]) < config.num_layers:
        raise ValueError(f"{data['layers']} layers predict nothing of this model")
    return None if data is None else dict(data)


def _auxiliary(data: Any, config: ModelConfig) -> Mapping[str, Any] | None:
    """Raises KeyError, TypeError or ValueError for what is none of this model."""
    if data is None:
        return None
    served_by = [int(layer) for layer in data["served_by"]]
    if len(served_by) != config.num_layers or min(served_by) < 0:
        raise ValueError(f"layers {served_by} serve none of this model's")
    return dict(data) | {"served_by": served_by, "fingerprint": str(data["fingerprint"])}


@contextlib.contextmanager
def _reading_maps(path: Path) -> Generator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise BundleError(f"{path} holds no maps ({error}); export the model again") from error


def _check_version(folder: Path, data: Mapping[str, Any]) -> None:
    version = data.get("version")
    if isinstance(version, int) and version > VERSION:
        raise BundleError(
            f"{folder} is a bundle of version {version}, newer than the {VERSION} this kvq reads; "
            "upgrade kvq-runtime, or export or pull the model again"
        )
    if version == 1 or (version == GGUF_VERSION and data.get("weights") is not None):
        raise BundleError(
            f"{folder} is a bundle of version {version}, whose graph this kvq no longer runs; "
            "export or pull the model again"
        )
    if version in OLD_VERSIONS:
        raise BundleError(
            f"{folder} is a bundle of version {version}, whose weights or pages this kvq no longer "
            "reads; export or pull the model again"
        )
    if version not in READ_VERSIONS:
        raise BundleError(
            f"{folder / MANIFEST_FILE} was altered after the export; export the model again"
        )


def _promised(manifest: Manifest) -> set[str]:
    """The files that what the manifest says of the weights needs."""
    gguf = {GGUF_FILE} if manifest.gguf is not None else set[str]()
    graph = {MODEL_FILE, DATA_FILE} if manifest.weights is not None or not gguf else set[str]()
    maps = {MAPS_FILE} if manifest.prediction is not None else set[str]()
    auxiliary = {AUXILIARY_FILE} if manifest.auxiliary is not None else set[str]()
    return gguf | graph | maps | auxiliary


def _check_file(folder: Path, name: str, info: FileInfo, memory: HashMemory | None) -> None:
    file = folder / name
    if Path(name).name != name or name in (".", "..") or "\0" in name:
        raise BundleError(f"{folder / MANIFEST_FILE} names a file outside the bundle: {name!r}")
    try:
        found_bytes = file.stat().st_size
        if found_bytes < info.num_bytes:
            raise BundleError(
                f"{file} is truncated: {found_bytes} of {info.num_bytes} bytes; "
                "copy it again or export the model again"
            )
        if found_bytes > info.num_bytes or (memory and memory.sha256(file) != info.sha256):
            raise BundleError(
                f"{file} was altered after the export; copy it again or export the model again"
            )
    except FileNotFoundError:
        raise BundleError(
            f"{file} is missing; copy the whole folder or export the model again"
        ) from None
    except OSError as error:
        raise BundleError(f"{file} cannot be read: {error.strerror}") from error
