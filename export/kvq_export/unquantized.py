"""A checkpoint as a model's files: what was never quantised, for the backend that computes exactly.

Nothing is exported. The weights are read from the checkpoint when the backend first asks for each.
"""

import hashlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np

from kvq.config import KvPlan
from kvq.errors import BackendError, argument
from kvq.reference_linear import View
from kvq_export.config import ExportOptions
from kvq_export.export import OpenModel, control_tokens, open_model
from kvq_export.source import open_source
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.bundle import Bundle
from kvq_runtime.manifest import Manifest

FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Unquantized(Bundle):
    """Has a bundle's members, and float32 weights [out, in] of the checkpoint's own values."""

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
        )
        return cls(path=folder, manifest=manifest, model=model)

    @property
    def has_checkpoint(self) -> bool:
        """It is one."""
        return True

    @property
    def fingerprint(self) -> str:
        """Changes with a file of weights: its name, size or time."""
        digest = hashlib.sha256()
        for file in sorted(
            {entry.file for entry in self.model.original.checkpoint.tensors.values()}
        ):
            status = file.stat()
            digest.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        return digest.hexdigest()

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of all weights in float32."""
        return FLOAT_BYTES * sum(prod(row.shape) for row in self.model.original.sources.values())

    def read_ahead(self) -> None:
        """See `ModelFiles`: nothing is."""

    def weights_json(self) -> dict[str, Any]:
        """Bytes and width of the weights as they are computed with."""
        return {"bytes": self.weight_bytes_per_step, "bits": 8 * FLOAT_BYTES}

    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's."""
        return self.model.tokenizer

    def read_weight(
        self, name: str, rows: slice | np.ndarray | None = None, *, view: View = "full"
    ) -> np.ndarray:
        """A canonical weight, float32. Raises `BackendError` for half of its bits."""
        if view != "full":
            raise BackendError(
                "weights that were not quantised have no upper nibbles to guess with; leave out "
                f"{argument('draft', 'quantspec')}"
            )
        original = self.model.original
        weight = original.checkpoint.read(original.sources[name])
        return weight if rows is None else weight[rows]
