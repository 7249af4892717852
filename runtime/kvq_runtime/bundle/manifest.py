"""`kvq.json`, the manifest of a bundle: its fields, read and checked, and the files' names.

`kvq_export` writes what is defined here. A manifest of this version may have keys that are unknown
here; they are kept in the file and not read.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from kvq.config import DEFAULT_POLICY, KvPlan, PageForm
from kvq.errors import BundleError, KvqError, reason_of
from kvq.json_values import is_object
from kvq.reference.linear import BlockFormat
from kvq_models.config import ModelConfig
from kvq_models.products import draft_products, products
from kvq_models.tokenizer import ControlTokens
from kvq_runtime.config import Sampling
from kvq_runtime.text_embedding import TextEmbedding

FORMAT = "kvq-bundle"
VERSION = 12
# Of the older versions these are read too. Others have graphs, pages, layers or weights of forms
# that are no longer known.
READ_VERSIONS = (7, 8, 9, 10, 11, VERSION)
MANIFEST_FILE = "kvq.json"
MODEL_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
# The graph of a draft head, over weights of the same file.
DRAFT_FILE = "draft.onnx"
GGUF_FILE = "model.gguf"
MAPS_FILE = "predict.npz"
# Matrices that feed rounding errors of keys back.
FEEDBACK_FILE = "feedback.npz"
# Maps from an auxiliary model's keys and values.
AUXILIARY_FILE = "auxiliary.npz"
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
# The files that a bundle may have. The manifest comes first, so that a partial copy is noticed.
BUNDLE_FILES = (
    MANIFEST_FILE,
    MODEL_FILE,
    DATA_FILE,
    DRAFT_FILE,
    GGUF_FILE,
    MAPS_FILE,
    FEEDBACK_FILE,
    AUXILIARY_FILE,
    TOKENIZER_FILE,
    TEMPLATE_FILE,
)

# Larger than any vocabulary; tokenizers hold an id in 32 bits.
_TOKENS = 1 << 31


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightInfo:
    """Says how each matrix is stored, by canonical name, in panels, and their bytes together.

    See `kvq.reference.linear`.
    """

    formats: Mapping[str, BlockFormat]
    num_bytes: int

    def format_of(self, name: str) -> BlockFormat:
        """Returns how the canonical matrix `name` is stored; a tied head is the embedding."""
        return self.formats["embed" if name == "head" and name not in self.formats else name]

    @property
    def by_format(self) -> dict[str, list[str]]:
        """Returns the names of the matrices that are stored alike, by format."""
        names: dict[str, list[str]] = {}
        for name, form in self.formats.items():
            names.setdefault(str(form), []).append(name)
        return names

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest's object."""
        # Earlier versions of kvq read the name of the op that multiplies.
        return {"formats": self.by_format, "bytes": self.num_bytes, "linear": "kvq"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "WeightInfo":
        """Reads the manifest's object; raises KeyError, TypeError or ValueError for another one."""
        named = {spelled: BlockFormat.parse(spelled) for spelled in data["formats"]}
        formats = {
            str(name): form for spelled, form in named.items() for name in data["formats"][spelled]
        }
        info = cls(formats=formats, num_bytes=int(data["bytes"]))
        if info.num_bytes < 0:
            raise ValueError(f"weights take no {info.num_bytes} bytes")
        return info


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufInfo:
    """Describes the GGUF file: its type (`q4_k_m`), llama.cpp's architecture, its context.

    The context is shorter than the model's where llama.cpp does not compute a window of the model.
    """

    type: str
    architecture: str
    context_length: int

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "GgufInfo":
        """Reads the manifest's object; raises KeyError, TypeError or ValueError for another one."""
        return cls(
            type=str(data["type"]),
            architecture=str(data["architecture"]),
            context_length=int(data["context_length"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FileInfo:
    """Holds size and SHA-256 (hex) of one file of the bundle."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Holds the contents of `kvq.json`.

    Attributes:
        name: Name of the model.
        config: Configuration of the model.
        weights: How the graph's weights are stored. None: the bundle has no graph.
        kv: Default plan of the cache.
        files: Size and hash of every other file.
        eos_token_ids: Tokens that end an answer.
        tokens: Control tokens, as `ControlTokens.to_json` gives them.
        sampling: Fields of `Sampling` that the model asks for, by its generation_config.json.
        source: Where the model came from.
        quality: What was measured after the export. None: not measured.
        gguf: The GGUF file. None: the bundle has none.
        policy: Default policy of the cache.
        forms: How the pages of every KV head are encoded, class by class. Empty: not measured.
        retrieval: `kvq.policies.Evidence.retrieval` of every KV head, class by class. Empty: not
            measured.
        prediction: `layers`, the first layers after which the maps of `predict.npz` predict the
            others, and what that costs.
        auxiliary: `name` and `fingerprint` of the model that the maps of `auxiliary.npz` start
            from, its layer for each layer (`served_by`), and what that costs.
        embedding: How the model makes vectors of texts. None: the graph has no output for them.
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
    retrieval: tuple[float, ...] = ()
    prediction: Mapping[str, Any] | None = None
    auxiliary: Mapping[str, Any] | None = None
    embedding: TextEmbedding | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the object that is written to `kvq.json`, its own checksum included."""
        data: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "model_type": self.config.model_type,
            "config": self.config.to_json(),
            "context_length": self.config.context_length,
            "head_size": self.config.first_attention.head_dim,
            "num_key_value_heads": self.config.first_attention.kv_heads,
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
            "retrieval": list(self.retrieval),
            "prediction": None if self.prediction is None else dict(self.prediction),
            "auxiliary": None if self.auxiliary is None else dict(self.auxiliary),
            "embedding": None if self.embedding is None else self.embedding.to_json(),
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
        """Reads the object that `to_json` returns.

        Raises KeyError, TypeError, ValueError or `KvqError` for another one.
        """
        kv, gguf, embedding = data["kv"], data.get("gguf"), data.get("embedding")
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
            retrieval=_retrieval(data.get("retrieval", ()), config),
            prediction=_prediction(data.get("prediction"), config),
            auxiliary=_auxiliary(data.get("auxiliary"), config),
            embedding=None if embedding is None else TextEmbedding.from_json(embedding),
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


def checksum(manifest: Mapping[str, Any]) -> str:
    """Returns the SHA-256 (hex) of a manifest without its `checksum`, in whatever layout."""
    bare = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a bundle, and no other file. Raises `BundleError`."""
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
        raise BundleError(
            f"{path} is damaged ({reason_of(error)}); export the model again"
        ) from error
    data = content if is_object(content) else {}
    if data.get("format") != FORMAT:
        raise BundleError(f"{folder} is not a bundle: {MANIFEST_FILE} does not say {FORMAT!r}")
    _check_version(folder, data)
    if data.get("checksum") != checksum(data):
        raise BundleError(f"{path} was altered after the export; export the model again")
    try:
        manifest = Manifest.from_json(data)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, KvqError) as error:
        raise BundleError(
            f"{path} is damaged ({reason_of(error)}); export the model again"
        ) from error
    missing = _required_files(manifest) - set(manifest.files)
    if missing:
        raise BundleError(f"{path} lists no {min(missing)}; export the model again")
    return manifest


def _matrices(config: ModelConfig) -> set[str]:
    """Returns the canonical names of the quantised matrices."""
    tied = {"head"} if config.tied_head else set[str]()
    multiplied = (*products(config), *draft_products(config))
    matrices = {product.weight for product in multiplied if not product.exact}
    tables = {"embed"} if config.per_layer is None else {"embed", "per_layer_embed"}
    return tables | matrices - tied


def _page_forms(data: Sequence[int], config: ModelConfig) -> tuple[PageForm, ...]:
    """Reads the forms; raises ValueError unless every KV head has one, or none has."""
    forms = tuple(PageForm(int(form)) for form in data)
    known = all(0 <= form <= PageForm.ROTATED_KEYS | PageForm.CHANNEL_VALUES for form in forms)
    if not known or len(forms) not in (0, config.streams):
        raise ValueError(f"page_forms {list(data)} are none of this model")
    return forms


def _retrieval(data: Sequence[float], config: ModelConfig) -> tuple[float, ...]:
    """Reads the shares; raises ValueError unless every KV head has one, or none has."""
    shares = tuple(float(share) for share in data)
    if not all(0 <= share <= 1 for share in shares) or len(shares) not in (0, config.streams):
        raise ValueError(f"retrieval {list(data)} is none of this model's")
    return shares


def _tokens(data: Any) -> Mapping[str, Any]:
    """Reads control tokens; raises ModelError or ValueError for what cannot be an id."""
    control = ControlTokens.from_json(data)
    named = {"bos": () if control.bos is None else (control.bos,)}
    named |= {"eos": control.eos, "start": control.start, "end": control.end}
    if control.fim is not None:
        named |= {f"fim.{name}": (token,) for name, token in control.fim.named().items()}
    for name, ids in named.items():
        for token in ids:
            if not 0 <= token < _TOKENS:
                raise ValueError(f"tokens.{name} is {token}; ids are 0 to {_TOKENS - 1}")
    return dict(data)


def _sampling(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the known fields. Raises what `Sampling` does, TypeError or ValueError."""
    known = {row.name for row in fields(Sampling)} - {"logit_bias"}
    sampling = {str(name): value for name, value in data.items() if name in known}
    _ = Sampling(**sampling)
    return sampling


def _prediction(data: Any, config: ModelConfig) -> Mapping[str, Any] | None:
    """Reads the prediction; raises KeyError, TypeError or ValueError for another model's."""
    if data is not None and not 1 <= int(data["layers"]) < config.num_layers:
        raise ValueError(f"{data['layers']} layers predict nothing of this model")
    return None if data is None else dict(data)


def _auxiliary(data: Any, config: ModelConfig) -> Mapping[str, Any] | None:
    """Reads the auxiliary model; raises KeyError, TypeError or ValueError for another one."""
    if data is None:
        return None
    served_by = [int(layer) for layer in data["served_by"]]
    if len(served_by) != config.num_layers or min(served_by) < 0:
        raise ValueError(f"layers {served_by} serve none of this model's")
    return dict(data) | {"served_by": served_by, "fingerprint": str(data["fingerprint"])}


def _check_version(folder: Path, data: Mapping[str, Any]) -> None:
    version = data.get("version")
    if isinstance(version, int) and version > VERSION:
        raise BundleError(
            f"{folder} is a bundle of version {version}, newer than the {VERSION} this kvq reads; "
            "upgrade kvq-runtime, or export or pull the model again"
        )
    if version not in READ_VERSIONS:
        raise BundleError(
            f"{folder} is a bundle of version {version}, which this kvq no longer reads; export or "
            "pull the model again"
        )


def _required_files(manifest: Manifest) -> set[str]:
    """Returns the files that the manifest's contents need."""
    gguf = {GGUF_FILE} if manifest.gguf is not None else set[str]()
    graph = {MODEL_FILE, DATA_FILE} if manifest.weights is not None or not gguf else set[str]()
    graph |= {DRAFT_FILE} if graph and manifest.config.draft_head is not None else set[str]()
    maps = {MAPS_FILE} if manifest.prediction is not None else set[str]()
    auxiliary = {AUXILIARY_FILE} if manifest.auxiliary is not None else set[str]()
    return gguf | graph | maps | auxiliary
