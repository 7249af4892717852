"""Writes the mean of two checkpoints' weights (model soups, arXiv 2203.05482).

    python models/training/average.py FIRST SECOND --share 0.5 --out AVERAGE

Both must be of one shape; of the mean the second has `--share`. Whatever else a folder holds is the
second's.
"""

import argparse
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def average(first: Path, second: Path, share: float, out: Path) -> None:
    """Writes folder `out`. Raises FileExistsError where there is one, KeyError for other names."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    if out.exists():
        raise FileExistsError(out)
    shutil.copytree(second, partial)
    begin, end = (load_file(folder / WEIGHTS) for folder in (first, second))
    mean = {
        name: begin[name].float().lerp(weight.float(), share).to(weight.dtype)
        for name, weight in end.items()
    }
    save_file(mean, partial / WEIGHTS, metadata={"format": "pt"})
    partial.rename(out)


def main() -> None:
    """Averages the checkpoints that are named."""
    parser = argparse.ArgumentParser(description="Averages two checkpoints.")
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--share", type=float, default=0.5, help="of the second (default: 0.5)")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    average(arguments.first, arguments.second, arguments.share, arguments.out)


if __name__ == "__main__":
    main()
