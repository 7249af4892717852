"""`kvq.json`, the manifest of a bundle: what stands in it, read and checked, and the files' names.

`kvq_export` writes what is defined here. A manifest of this version may carry keys unknown here;
they are kept in the file and not read.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from kvq.config import DEFAULT_POLICY, KvPlan, PageForm
from kvq.errors import BundleError, KvqError
from kvq.json_values import is_object
from kvq.reference_linear import BlockFormat
from kvq_models.config import ModelConfig
from kvq_models.products import draft_products, products
from kvq_models.tokenizer import ControlTokens
from kvq_runtime.config import Sampling

FORMAT = "kvq-bundle"
VERSION = 11
# Also read: these describe their layers otherwise, or have no draft head, and the first is for a
# GGUF file alone.
GGUF_VERSION = 2
READ_VERSIONS = (GGUF_VERSION, 6, 7, 8, 9, 10, VERSION)
# Those whose calibration was for older formats of pages, or whose weights lie otherwise.
OLD_VERSIONS = (3, 4, 5)
MANIFEST_FILE = "kvq.json"
MODEL_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
# The graph of a draft head, over weights of the same file.
DRAFT_FILE = "draft.onnx"
GGUF_FILE = "model.gguf"
MAPS_FILE = "predict.npz"
# How rounding errors of keys are fed back.
FEEDBACK_FILE = "feedback.npz"
# Maps from an auxiliary model's keys and values.
AUXILIARY_FILE = "auxiliary.npz"
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
# All that a bundle may be made of; the manifest first, so that half of one is none.
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
    file. `forms` and `retrieval`: of every KV head, class by class, how its pages are encoded, and
    `kvq.policies.Evidence.retrieval`; empty: not measured. `prediction`: `layers`, the first layers
    after which the maps of `MAPS_FILE` predict the others, and what that costs. `auxiliary`: the
    `name`, the `fingerprint` and the layers (`served_by`) of the model that those of
    `AUXILIARY_FILE` start from, and what that costs.
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
            "retrieval": list(self.retrieval),
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
            retrieval=_retrieval(data.get("retrieval", ()), config),
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


def checksum(manifest: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of a manifest without its `checksum`, whatever its layout in the file."""
    bare = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle, of which no other file is looked at. Raises `BundleError`."""
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
    multiplied = (*products(config), *draft_products(config))
    matrices = {product.weight for product in multiplied if not product.exact}
    tables = {"embed"} if config.per_layer is None else {"embed", "per_layer_embed"}
    return tables | matrices - tied


def _page_forms(data: Sequence[int], config: ModelConfig) -> tuple[PageForm, ...]:
    """Raises ValueError unless there is one of every KV head, or none at all."""
    forms = tuple(PageForm(int(form)) for form in data)
    known = all(0 <= form <= PageForm.ROTATED_KEYS | PageForm.CHANNEL_VALUES for form in forms)
    if not known or len(forms) not in (0, config.streams):
        raise ValueError(f"page_forms {list(data)} are none of this model")
    return forms


def _retrieval(data: Sequence[float], config: ModelConfig) -> tuple[float, ...]:
    """Raises ValueError unless there is a share of every KV head, or none at all."""
    shares = tuple(float(share) for share in data)
    if not all(0 <= share <= 1 for share in shares) or len(shares) not in (0, config.streams):
        raise ValueError(f"retrieval {list(data)} is none of this model's")
    return shares


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
    graph |= {DRAFT_FILE} if graph and manifest.config.draft_head is not None else set[str]()
    maps = {MAPS_FILE} if manifest.prediction is not None else set[str]()
    auxiliary = {AUXILIARY_FILE} if manifest.auxiliary is not None else set[str]()
    return gguf | graph | maps | auxiliary
