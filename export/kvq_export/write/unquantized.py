"""A checkpoint as a model's files, unquantised, for the backend that computes exactly.

Nothing is exported. A weight is read from the checkpoint when the backend first asks for it.
"""

import hashlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np

from kvq.config import KvPlan
from kvq.errors import BackendError, argument
from kvq.reference.linear import View
from kvq_export.config import ExportOptions
from kvq_export.export import OpenModel, control_tokens, open_model
from kvq_export.read.source import open_source
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.manifest import Manifest

FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Unquantized(Bundle):
    """Offers a bundle's members; weights are float32 [out, in] with the checkpoint's own values."""

    model: OpenModel

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Checks the checkpoint in `folder`. Raises `ModelError`."""
        model = open_model(open_source(folder), ExportOptions())
        control = control_tokens(model)
        manifest = Manifest(
            name=model.source.name,
            config=model.original.config,
            weights=None,
            kv=KvPlan(),
            files={},
            eos_token_ids=control.eos,
            tokens=control.to_json(),
            embedding=model.embedding,
        )
        return cls(path=folder, manifest=manifest, model=model)

    @property
    def has_checkpoint(self) -> bool:
        return True

    @property
    def fingerprint(self) -> str:
        """Returns a hash of the name, size and time of every file of weights."""
        digest = hashlib.sha256()
        for file in sorted(
            {entry.file for entry in self.model.original.checkpoint.tensors.values()}
        ):
            status = file.stat()
            digest.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        return digest.hexdigest()

    @property
    def weight_bytes_per_step(self) -> int:
        """Returns the bytes of all weights in float32."""
        return FLOAT_BYTES * sum(prod(row.shape) for row in self.model.original.sources.values())

    def read_ahead(self) -> None:
        """Reads nothing ahead."""

    def weights_json(self) -> dict[str, Any]:
        """Returns bytes and width of the weights as they are computed with."""
        return {"bytes": self.weight_bytes_per_step, "bits": 8 * FLOAT_BYTES}

    def tokenizer(self) -> Tokenizer | None:
        return self.model.tokenizer

    def read_weight(
        self, name: str, rows: slice | np.ndarray | None = None, *, view: View = "full"
    ) -> np.ndarray:
        """Returns a canonical weight, float32. Raises `BackendError` for half of its bits."""
        if view != "full":
            raise BackendError(
                "weights that were not quantised have no upper nibbles to guess with; leave out "
                f"{argument('draft', 'quantspec')}"
            )
        original = self.model.original
        weight = original.checkpoint.read(original.sources[name])
        return weight if rows is None else weight[rows]
