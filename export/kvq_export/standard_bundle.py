"""A bundle's twin for ONNX Runtime's own operators, scales as float32.

The same codes where that op can hold them: a grid with offsets, and 5 and 6 bits, are rounded anew.

Both engines then multiply by the same weights, and only the op between them differs.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvq.reference_linear import PANEL_ROWS, BlockFormat, Blocks, PanelFormat
from kvq_export.config import STANDARD_WIDTHS, WeightFormat
from kvq_export.export import unseen
from kvq_export.layout import plan_layout
from kvq_export.staging import require_space, staged
from kvq_export.weights import quantize
from kvq_export.writer import Progress, weight_info, write_manifest, write_model
from kvq_models.registry import family_for
from kvq_runtime.bundle import Bundle


class BundleWeights:
    """Gives a bundle's weights as they are stored."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    def vector(self, name: str) -> np.ndarray:
        """See `WeightReader.vector`."""
        return self._bundle.read_weight(name)

    def matrix(self, name: str, form: PanelFormat) -> Iterator[Blocks]:
        """See `WeightReader.matrix`. What that op cannot hold is rounded anew."""
        as_stored = self._bundle.form(name).format == form.format
        step = PANEL_ROWS * max(1, (1 << 20) // form.columns // PANEL_ROWS)
        for start in range(0, form.rows, step):
            rows = slice(start, min(start + step, form.rows))
            if as_stored:
                yield self._bundle.read_codes(name, rows)
            else:
                yield quantize(self._bundle.read_weight(name, rows), form.format)


def _standard(form: BlockFormat) -> BlockFormat:
    """The narrowest that op has, and no narrower than `form`."""
    bits = next(bits for bits in STANDARD_WIDTHS if bits >= form.bits)
    return BlockFormat(bits=bits, block=form.block)


def standard_bundle(bundle: Bundle, destination: str | Path, progress: Progress = unseen) -> Bundle:
    """Writes the twin of `bundle`, without its tokenizer. Raises `BundleError`."""
    stored, config = bundle.manifest.weights, bundle.config
    assert stored is not None
    form = WeightFormat(
        linear="ort", others={name: _standard(one) for name, one in stored.formats.items()}
    )
    layout = plan_layout(
        config, family_for({"model_type": config.model_type}).weights(config), form
    )
    with staged(Path(destination), force=True) as partial:
        require_space(partial, layout.num_bytes)
        files = write_model(partial, config, layout, BundleWeights(bundle), progress)
        manifest = replace(
            bundle.manifest, weights=weight_info(layout), files=files, gguf=None, quality=None
        )
        write_manifest(partial, manifest)
    return Bundle.open(destination)
