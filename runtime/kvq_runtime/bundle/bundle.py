"""A bundle folder: checks every byte and reads its weights as numpy arrays.

The layout of quantised weights is defined here; `kvq_export` writes by it. `manifest` defines what
stands in `kvq.json`.
"""

import contextlib
import hashlib
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvq.array_files import Form, read_arrays
from kvq.config import KvPlan, PageForm
from kvq.errors import BundleError, argument, reason_of
from kvq.reference.linear import (
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
from kvq_runtime.bundle.file_hashes import HashMemory
from kvq_runtime.bundle.graph_check import check_graph
from kvq_runtime.bundle.manifest import (
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

    from kvq_runtime.bundle.gguf_file import GgufFile


# Of maps beside weights in super-blocks; linear_ops.cpp has it too.
MAP_BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Holds an opened, checked bundle."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | Path, *, verify: Literal["full", "size"] = "full") -> "Bundle":
        """Checks the manifest and every file; `verify="size"` leaves the hashes out.

        The hash of a large file is remembered in the cache folder with the file's size and time of
        change, and computed again when one of them differs. Raises `BundleError`.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        memory = HashMemory.load()
        for name, info in manifest.files.items():
            _check_file(folder, name, info, memory if verify == "full" else None)
        memory.save()
        stored = manifest.weights
        if stored is not None:
            check_graph(folder / MODEL_FILE, manifest.config, format_of=stored.format_of)
            if manifest.config.drafting is not None:
                check_graph(
                    folder / DRAFT_FILE,
                    manifest.config.drafting,
                    format_of=lambda name: stored.format_of(draft_name(name)),
                )
        return cls(path=folder, manifest=manifest)

    @cached_property
    def draft_head(self) -> "DraftHead | None":
        """Returns the model's draft head as a model of its own; None where there is none."""
        if self.manifest.config.draft_head is None or not self.has_onnx:
            return None
        return DraftHead(path=self.path, manifest=self.manifest)

    @property
    def config(self) -> ModelConfig:
        return self.manifest.config

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def forms(self) -> tuple[PageForm, ...]:
        """Returns how the pages of every KV head are encoded; empty: all as usual."""
        return self.manifest.forms

    @cached_property
    def retrieval(self) -> tuple[np.ndarray, ...]:
        """Returns `kvq.policies.Evidence.retrieval` for every class of layers, or nothing."""
        if not self.manifest.retrieval:
            return ()
        classes = self.config.cache_classes
        return tuple(
            np.array(shares, np.float32).reshape(group.shape.num_layers, group.shape.num_kv_heads)
            for group, shares in zip(
                classes, self.config.by_class(self.manifest.retrieval), strict=True
            )
        )

    @cached_property
    def key_feedback(self) -> tuple[np.ndarray, ...]:
        """Returns how rounding errors of keys are fed back: float32 [L, Hk, D, D] for each class.

        It is empty where there is none, see `kvq.reference.stored.carried`. Raises `BundleError`
        for a file that does not hold it.
        """
        if FEEDBACK_FILE not in self.manifest.files:
            return ()
        shapes = [group.shape for group in self.config.cache_classes]
        forms = {
            str(index): Form(
                (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.head_dim), np.float16
            )
            for index, shape in enumerate(shapes)
        }
        path = self.path / FEEDBACK_FILE
        with _reading_fitted(path, forms) as arrays:
            for name, feedback in arrays.items():
                if np.tril(feedback).any():
                    raise ValueError(f"the feedback of class {name} reaches back")
        return tuple(feedback.astype(np.float32) for feedback in arrays.values())

    @property
    def context_length(self) -> int:
        return self.config.context_length

    @property
    def kv(self) -> KvPlan:
        return self.manifest.kv

    def weights_json(self) -> dict[str, Any]:
        """Returns bytes and widths of the weights: the graph's, or those of a lone GGUF file."""
        stored = self.manifest.weights
        return self.gguf().weights_json() if stored is None else stored.to_json()

    @property
    def has_onnx(self) -> bool:
        return MODEL_FILE in self.manifest.files

    @property
    def has_gguf(self) -> bool:
        return GGUF_FILE in self.manifest.files

    @property
    def fingerprint(self) -> str:
        """Identifies graph and weights by the hashes in the manifest."""
        hashes = (self.manifest.files[name].sha256 for name in (MODEL_FILE, DATA_FILE))
        return hashlib.sha256("".join(hashes).encode()).hexdigest()

    @property
    def model_path(self) -> Path:
        return self.path / MODEL_FILE

    @property
    def chat_template(self) -> str | None:
        """Returns the chat template, or None for a model without one."""
        if TEMPLATE_FILE not in self.manifest.files:
            return None
        return (self.path / TEMPLATE_FILE).read_text(encoding="utf-8")

    @property
    def weight_bytes_per_step(self) -> int:
        """Returns the bytes of weights that one decode step reads.

        These are all but the rows of an untied embedding that it does not need, and the experts
        that its token does not choose.
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
        return read_bytes - (form.panels - 1) * form.panel_bytes

    @property
    def _of_draft_head(self) -> Sequence[str]:
        """Returns the matrices that a step of the model does not read."""
        return [product.weight for product in draft_products(self.config) if not product.exact]

    @property
    def experts(self) -> ExpertBytes | None:
        if self.manifest.weights is None:
            return None
        parts: dict[int, list[int]] = {}  # bytes of one expert's matrices, by layer
        stored = chosen = 0
        for product in products(self.config):
            feed = None if product.layer is None else self.config.layers[product.layer].feed
            if product.count > 1 and isinstance(feed, Experts):
                form = self.form(product.weight)
                expert_bytes = form.panels // product.count * form.panel_bytes
                parts.setdefault(product.layer or 0, []).append(expert_bytes)
                stored += feed.count * expert_bytes
                chosen += feed.chosen * expert_bytes
        if not parts:
            return None
        return ExpertBytes(stored, chosen, max(map(most_in_memory, parts.values())))

    def gguf(self) -> "GgufFile":
        """Returns the GGUF file with the bundle's name, plan and tokenizer. Raises `ModelError`."""
        from kvq_runtime.bundle.gguf_file import GgufFile

        file = GgufFile.open(self.path / GGUF_FILE)
        manifest = self.manifest
        return file.in_bundle(manifest.name, manifest.kv, self.tokenizer(), manifest.sampling)

    def tokenizer(self) -> Tokenizer | None:
        """Returns the tokenizer with its control tokens, None for a bundle that takes ids only."""
        return self._tokenizer.result()

    def read_ahead(self) -> None:
        """Reads the tokenizer in the background: a large one takes as long as the graph."""
        _ = self._tokenizer

    @cached_property
    def _tokenizer(self) -> "Future[Tokenizer | None]":
        executor = ThreadPoolExecutor(max_workers=1)
        try:
            return executor.submit(self._read_tokenizer)
        finally:
            executor.shutdown(wait=False)

    def _read_tokenizer(self) -> Tokenizer | None:
        if TOKENIZER_FILE not in self.manifest.files:
            return None
        return Tokenizer.from_bundle(self.path, ControlTokens.from_json(self.manifest.tokens))

    def read_weight(
        self, name: str, rows: slice | np.ndarray | None = None, *, view: View = "full"
    ) -> np.ndarray:
        """Reads a canonical weight (`layers.0.qkv`, `final_norm`) as float32.

        Quantised weights are restored. `rows` (a slice or indices) picks rows without restoring the
        others. The head of a model that ties it reads as the embedding. `view` "hi" restores 8-bit
        weights from their upper nibbles. Raises `BundleError` for an unknown name.
        """
        stored = self.stored_name(name)
        if stored in self._stored:
            return np.array(self._stored[stored][slice(None) if rows is None else rows], np.float32)
        blocks, form = self.read_codes(name, rows), self.form(name)
        return dequantize(blocks, form.bits, view)[:, : form.columns]

    def weight_norms(self, layers: Sequence[int]) -> np.ndarray:
        """Returns Frobenius norms float64 [L, 2] of the weights that make these layers' K and V."""
        return self._weight_norms[list(layers)]

    @cached_property
    def _weight_norms(self) -> np.ndarray:
        norms: list[list[np.floating]] = []
        for index, layer in enumerate(self.config.layers):
            if not layer.owns_keys:
                norms.append([np.float64(0), np.float64(0)])
                continue
            width, rows = layer.attention.kv_width, slice(layer.attention.width, None)
            both = self.read_weight(f"layers.{index}.qkv", rows).astype(np.float64)
            norms.append([np.linalg.norm(both[:width]), np.linalg.norm(both[width:])])
        return np.array(norms)

    def read_codes(self, name: str, rows: slice | np.ndarray | None = None) -> Blocks:
        """Reads rows of a quantised weight as stored, with constants in units of the weights.

        Raises `BundleError` for a name that is no quantised weight.
        """
        panels_of = self._stored.get(f"{self.stored_name(name)}.panels")
        if panels_of is None:
            raise BundleError(f"{self.path} has no weight {name!r}")
        form = self.form(name)
        index = np.arange(form.rows)[slice(None) if rows is None else rows]
        panels, places = np.unique(index // PANEL_ROWS, return_inverse=True)
        blocks = unpack(form, np.asarray(panels_of[panels]))
        return in_weights(blocks.picked(places * PANEL_ROWS + index % PANEL_ROWS))

    def form(self, name: str) -> PanelFormat:
        """Returns shape and format of a canonical matrix."""
        shape = self._matrix_shapes[name]
        return PanelFormat.of(self._graph_weights.format_of(self.stored_name(name)), shape)

    def stored_name(self, name: str) -> str:
        """Returns the name of a canonical weight in the files; a tied head is the embedding."""
        return "embed" if name == "head" and self.config.tied_head else name

    @property
    def fitted_layers(self) -> int | None:
        """Returns the first layers after which fitted matrices can predict the others, or None."""
        prediction = self.manifest.prediction
        return None if prediction is None else int(prediction["layers"])

    def map_form(self) -> PanelFormat:
        """Returns shape and widths of every map, which makes a layer's keys and values."""
        config, form = self.config, self._graph_weights.format_of("layers.0.qkv")
        block = MAP_BLOCK if form.grid.has_supers else form.block
        rows = 2 * config.first_attention.kv_width
        return PanelFormat(rows=rows, columns=config.hidden_size, bits=8, block=block)

    def maps(self) -> dict[str, np.ndarray]:
        """Returns `layers.N.map` uint8 [panels, bytes] and `layers.N.map_bias` float32 by name.

        They are those of the fitted layers; empty where there are none. Raises `BundleError` for a
        file that does not hold them.
        """
        if self.fitted_layers is None:
            return {}
        form, path = self.map_form(), self.path / MAPS_FILE
        forms = {
            "map": Form((form.panels, form.panel_bytes), np.uint8),
            "map_bias": Form((form.rows,), np.float32),
        }
        layers = range(self.fitted_layers, self.config.num_layers)
        names = {f"layers.{layer}.{kind}": forms[kind] for layer in layers for kind in forms}
        with _reading_fitted(path, names) as arrays:
            return arrays

    def restored_maps(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Returns the maps as float32 [rows, columns] with biases [rows], by layer."""
        stored, form = self.maps(), self.map_form() if self.fitted_layers else None
        layers = range(self.fitted_layers or 0, self.config.num_layers) if stored else ()
        maps: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for layer in layers:
            assert form is not None
            weights = restore(form, stored[f"layers.{layer}.map"])[: form.rows]
            maps[layer] = weights, stored[f"layers.{layer}.map_bias"]
        return maps

    def auxiliary_maps(self) -> tuple[np.ndarray, ...]:
        """Returns for each layer W float32 [n, 2 Hk D], from an auxiliary model's keys and values.

        Empty where there are none. Raises `BundleError` for a file that does not hold them.
        """
        if self.manifest.auxiliary is None:
            return ()
        config, path = self.config, self.path / AUXILIARY_FILE
        columns = 2 * config.first_attention.kv_width
        form = Form((None, columns), np.float16)
        forms = {f"layers.{layer}.map": form for layer in range(config.num_layers)}
        with _reading_fitted(path, forms) as arrays:
            if len({len(weights) for weights in arrays.values()}) > 1:
                raise ValueError("its maps are of several models")
            return tuple(weights.astype(np.float32) for weights in arrays.values())

    @cached_property
    def _matrix_shapes(self) -> Mapping[str, tuple[int, int]]:
        """Returns [rows, columns] of every matrix, by canonical name."""
        config = self.config
        layers = {
            product.weight: (product.count * product.rows, product.columns)
            for product in (*products(config), *draft_products(config))
        }
        per_layer = config.per_layer
        table = (
            {}
            if per_layer is None
            else {"per_layer_embed": (per_layer.rows, len(config.layers) * per_layer.width)}
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
        """Reads the ONNX graph, anew each time. Raises `BundleError`."""
        import onnx_ir

        try:
            # Its parameter `path` has an incomplete type.
            return onnx_ir.load(self.model_path)  # pyright: ignore[reportUnknownMemberType]
        except (OSError, ValueError) as error:
            raise BundleError(f"{self.model_path} cannot be read: {reason_of(error)}") from error

    @cached_property
    def _stored(self) -> Mapping[str, np.ndarray]:
        """Returns the initializers of the graph by name, as read-only views of the data file."""
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
    """Shows a bundle's draft head as a model: its graph, and its weights by their own names."""

    @property
    def config(self) -> ModelConfig:
        """Returns the head as a model of one layer."""
        drafting = self.manifest.config.drafting
        assert drafting is not None
        return drafting

    @property
    def forms(self) -> tuple[PageForm, ...]:
        """Returns no forms: what suits the head's pages was not measured."""
        return ()

    @cached_property
    def retrieval(self) -> tuple[np.ndarray, ...]:
        """Returns nothing, for the same reason."""
        return ()

    @cached_property
    def key_feedback(self) -> tuple[np.ndarray, ...]:
        """Returns nothing, for the same reason."""
        return ()

    @property
    def model_path(self) -> Path:
        return self.path / DRAFT_FILE

    @property
    def weight_bytes_per_step(self) -> int:
        """Returns the bytes of its matrices and of the output head, without experts not chosen."""
        names = {product.weight for product in products(self.config) if not product.exact}
        read_bytes = sum(form.panels * form.panel_bytes for form in map(self.form, names))
        experts = self.experts
        return read_bytes - (experts.stored - experts.chosen if experts else 0)

    def stored_name(self, name: str) -> str:
        return draft_name(super().stored_name(name))


@contextlib.contextmanager
def _reading_fitted(path: Path, forms: Mapping[str, Form]) -> Generator[dict[str, NDArray[Any]]]:
    """Yields the finite arrays of a file of fitted values.

    Raises `BundleError` for any other file, and where the block raises ValueError.
    """
    try:
        with path.open("rb") as stream:
            arrays = read_arrays(stream, forms)
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise ValueError(f"{name} holds what is no number")
        yield arrays
    except (OSError, ValueError) as error:
        raise BundleError(
            f"{path} does not hold what was fitted ({reason_of(error)}); export the model again"
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
