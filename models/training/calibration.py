"""Measures what errors in the cache cost a model, and keeps it beside the checkpoint.

    python models/training/calibration.py models/kvq_models/default models/kvq_models/nano

An embedded model is exported the first time it is asked for. Measuring takes minutes, so what was
found ships with it; an export of other weights, at other widths or for other pages measures again.
"""

import sys
import tempfile
from pathlib import Path

from kvq_export import calibration
from kvq_export.config import ExportOptions
from kvq_export.export import export_model


def main() -> None:
    """Each folder that is named."""
    options = ExportOptions(quality=False)
    for folder in map(Path, sys.argv[1:]):
        (folder / calibration.KEPT_FILE).unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as room:
            manifest = export_model(folder, Path(room) / "bundle", options).manifest
        calibration.keep(folder, options.weights, (manifest.forms, manifest.sensitivity))


if __name__ == "__main__":
    main()
