"""A bundle folder: the check of every byte, and its weights as numpy arrays.

Owns the layout of quantised weights, which `kvq_export` writes by what is defined here; `manifest`
has what stands in `kvq.json`. Knows no checkpoint and runs no model.
"""

import contextlib
import hashlib
import zipfile
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvq.config import KvPlan, PageForm
from kvq.errors import BundleError, argument
from kvq.reference_linear import (
    PANEL_ROWS,
    Blocks,
    PanelFormat,
    View,
    dequantize,
    in_weights,
    restore,
    unpack,
)
from kvq.residency import ExpertBytes, most_in_memory
from kvq_models.config import Experts, ModelConfig
from kvq_models.products import draft_name, draft_products, products
from kvq_models.tokenizer import ControlTokens, Tokenizer
from kvq_runtime.file_hashes import HashMemory
from kvq_runtime.gguf_file import GgufFile
from kvq_runtime.graph_check import check_graph
from kvq_runtime.manifest import (
    AUXILIARY_FILE,
    DATA_FILE,
    DRAFT_FILE,
    FEEDBACK_FILE,
    GGUF_FILE,
    MANIFEST_FILE,
    MAPS_FILE,
    MODEL_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    FileInfo,
    Manifest,
    WeightInfo,
    read_manifest,
)

if TYPE_CHECKING:
    import onnx_ir

# Codes of this width are stored two to a byte.
NIBBLE_BITS = 4


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
        manifest = read_manifest(folder)
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
            if manifest.config.drafting is not None:
                check_graph(
                    folder / DRAFT_FILE,
                    manifest.config.drafting,
                    linear=stored.linear,
                    format_of=lambda name: stored.format_of(draft_name(name)),
                )
        return cls(path=folder, manifest=manifest)

    @cached_property
    def draft_head(self) -> "DraftHead | None":
        """The model's draft head, as a model of its own; None where there is none."""
        if self.manifest.config.draft_head is None or not self.has_onnx:
            return None
        return DraftHead(path=self.path, manifest=self.manifest)

    @property
    def config(self) -> ModelConfig:
        """What the model is."""
        return self.manifest.config

    @property
    def name(self) -> str:
        """What the model is called."""
        return self.manifest.name

    @property
    def forms(self) -> tuple[PageForm, ...]:
        """How the pages of every KV head are encoded; empty: all as usual."""
        return self.manifest.forms

    @cached_property
    def retrieval(self) -> tuple[np.ndarray, ...]:
        """`kvq.policies.Evidence.retrieval` of every class of layers, or empty."""
        if not self.manifest.retrieval:
            return ()
        classes = self.config.cache_classes
        return tuple(
            np.array(own, np.float32).reshape(one.shape.num_layers, one.shape.num_kv_heads)
            for one, own in zip(classes, self.config.by_class(self.manifest.retrieval), strict=True)
        )

    @cached_property
    def key_feedback(self) -> tuple[np.ndarray, ...]:
        """By which keys are rounded, float32 [L, Hk, D, D] of every class of layers, or empty.

        See `kvq.reference.carried`. Raises `BundleError` for a file that does not hold them.
        """
        if FEEDBACK_FILE not in self.manifest.files:
            return ()
        found: list[np.ndarray] = []
        path = self.path / FEEDBACK_FILE
        with _reading_fitted(path), np.load(path, allow_pickle=False) as file:
            for index, one in enumerate(self.config.cache_classes):
                own, shape = file[str(index)].astype(np.float32), one.shape
                wanted = (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.head_dim)
                if own.shape != wanted or not np.isfinite(own).all() or np.tril(own).any():
                    raise ValueError(f"the feedback of class {index} is none of {wanted}")
                found.append(own)
        return tuple(found)

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
        experts = self.experts
        read_bytes = stored.num_bytes - (experts.stored - experts.chosen if experts else 0)
        read_bytes -= sum(
            form.panels * form.panel_bytes for form in map(self.form, self._of_draft_head)
        )
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
    def _of_draft_head(self) -> Sequence[str]:
        """The matrices that a step of the model does not read."""
        return [product.weight for product in draft_products(self.config) if not product.exact]

    @property
    def experts(self) -> ExpertBytes | None:
        """See `ModelFiles`."""
        if self.manifest.weights is None:
            return None
        parts: dict[int, list[int]] = {}  # of one expert, by layer
        stored = chosen = 0
        for product in products(self.config):
            feed = None if product.layer is None else self.config.layers[product.layer].feed
            if product.count > 1 and isinstance(feed, Experts):
                form = self.form(product.weight)
                one = form.panels // product.count * form.panel_bytes
                parts.setdefault(product.layer or 0, []).append(one)
                stored += feed.count * one
                chosen += feed.chosen * one
        if not parts:
            return None
        return ExpertBytes(stored, chosen, max(map(most_in_memory, parts.values())))

    def gguf(self) -> GgufFile:
        """The GGUF file, known by the bundle's name, plan and tokenizer. Raises `ModelError`."""
        file = GgufFile.open(self.path / GGUF_FILE)
        manifest = self.manifest
        return file.in_bundle(manifest.name, manifest.kv, self.tokenizer(), manifest.sampling)

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer with its control tokens, or None for a bundle that takes ids only."""
        return self._tokenizer.result()

    def read_ahead(self) -> None:
        """See `ModelFiles`: a large vocabulary takes as long as ONNX Runtime and its graph."""
        _ = self._tokenizer

    @cached_property
    def _tokenizer(self) -> "Future[Tokenizer | None]":
        beside = ThreadPoolExecutor(max_workers=1)
        try:
            return beside.submit(self._read_tokenizer)
        finally:
            beside.shutdown(wait=False)

    def _read_tokenizer(self) -> Tokenizer | None:
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
        stored = self.stored_name(name)
        if stored in self._stored:
            return np.array(self._stored[stored][slice(None) if rows is None else rows], np.float32)
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
        stored = self.stored_name(name)
        if f"{stored}.panels" in self._stored:
            return self._panel_codes(name, rows)
        if f"{stored}.codes" not in self._stored:
            raise BundleError(f"{self.path} has no weight {name!r}")
        picked: Any = slice(None) if rows is None else rows
        codes = np.asarray(self._stored[f"{stored}.codes"][picked])
        if self.form(name).bits == NIBBLE_BITS:
            codes = np.stack((codes & np.uint8(15), codes >> np.uint8(4)), axis=-1)
        scales = np.array(self._stored[f"{stored}.scales"][picked])
        return Blocks(codes.reshape(len(codes), -1), scales)

    def _panel_codes(self, name: str, rows: slice | np.ndarray | None) -> Blocks:
        form, stored = self.form(name), self._stored[f"{self.stored_name(name)}.panels"]
        index = np.arange(form.rows)[slice(None) if rows is None else rows]
        panels, places = np.unique(index // PANEL_ROWS, return_inverse=True)
        blocks = unpack(form, np.asarray(stored[panels]))
        return in_weights(blocks.picked(places * PANEL_ROWS + index % PANEL_ROWS))

    def form(self, name: str) -> PanelFormat:
        """Shape and format of a canonical matrix."""
        shape = self._matrix_shapes[name]
        return PanelFormat.of(self._graph_weights.format_of(self.stored_name(name)), shape)

    def stored_name(self, name: str) -> str:
        """What the files call a canonical weight; a tied head is the embedding."""
        return "embed" if name == "head" and self.config.tied_head else name

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
        with _reading_fitted(path), np.load(path, allow_pickle=False) as file:
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
        with _reading_fitted(path), np.load(path, allow_pickle=False) as file:
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
            for product in (*products(config), *draft_products(config))
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


class DraftHead(Bundle):
    """The draft head of a bundle as a model: its graph, and its weights by their own names."""

    @property
    def config(self) -> ModelConfig:
        """The head as a model of one layer."""
        found = self.manifest.config.drafting
        assert found is not None
        return found

    @property
    def forms(self) -> tuple[PageForm, ...]:
        """As usual: what suits its pages was not measured."""
        return ()

    @cached_property
    def retrieval(self) -> tuple[np.ndarray, ...]:
        """None, for the same reason."""
        return ()

    @cached_property
    def key_feedback(self) -> tuple[np.ndarray, ...]:
        """None, for the same reason."""
        return ()

    @property
    def model_path(self) -> Path:
        """Its graph."""
        return self.path / DRAFT_FILE

    @property
    def weight_bytes_per_step(self) -> int:
        """Its own matrices and the output head, but for experts that its token does not choose."""
        names = {product.weight for product in products(self.config) if not product.exact}
        read_bytes = sum(form.panels * form.panel_bytes for form in map(self.form, names))
        experts = self.experts
        return read_bytes - (experts.stored - experts.chosen if experts else 0)

    def stored_name(self, name: str) -> str:
        """See `Bundle.stored_name`."""
        return draft_name(super().stored_name(name))


@contextlib.contextmanager
def _reading_fitted(path: Path) -> Generator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise BundleError(
            f"{path} does not hold what was fitted ({error}); export the model again"
        ) from error


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
