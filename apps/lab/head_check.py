"""Whether the head in two passes chooses as all of it does: head_check.py MODEL TOKENS FILE...

Where only the largest logits decide, the head ranks all rows by its upper nibbles and computes the
best of them exactly. Here every place of held-out texts is passed through both, and each mode of
sampling must be left with the same tokens and the same probabilities, bit for bit.
"""

import sys
from pathlib import Path

import numpy as np

from kvq import Engine
from kvq_runtime.config import Sampling
from kvq_runtime.passes import run
from kvq_runtime.sampling import candidates

MODES = {
    "greedy": Sampling(temperature=0),
    "default": Sampling(),
    "top-k 100": Sampling(top_k=100),
    "penalised": Sampling(repeat_penalty=1.2, presence_penalty=0.5),
}
ROWS, WINDOW_TOKENS = 16, 2048


def main(model: str, tokens: int, files: list[str]) -> int:
    """Prints, for each mode, at how many places the choice differs; 1 if at any."""
    with Engine.open(model) as engine:
        text = engine.tokenizer.encode("\n".join(Path(file).read_text("utf-8") for file in files))
        ids, differing = text[:tokens], dict.fromkeys(MODES, 0)
        for start in range(0, len(ids) - ROWS + 1, WINDOW_TOKENS):
            window = ids[start : start + WINDOW_TOKENS]
            options = {"context_tokens": WINDOW_TOKENS + ROWS, "draft_tokens": ROWS}
            with engine.session(**options) as session:
                for first in range(0, len(window) - ROWS + 1, ROWS):
                    _compare(session.sequence, window, first, differing)
        places = len(ids) // ROWS * ROWS
    for name, count in differing.items():
        print(f"{name}: {count} of {places} places differ")
    return int(any(differing.values()))


def _compare(sequence, window, first, differing) -> None:
    """Adds to `differing` where a choice after one of the next rows is another one."""
    piece, found = window[first : first + ROWS], {}
    with sequence.branch() as branch:
        for count in (*{sampling.exact_rows for sampling in MODES.values()}, 0):
            branch.rewind(0)
            run(branch.extend(piece, exact_rows=count))
            found[count] = branch.logits.copy()
        sequence.append(piece)
        branch.commit(range(len(piece)))
    for name, sampling in MODES.items():
        for row, (some, every) in enumerate(zip(found[sampling.exact_rows], found[0], strict=True)):
            history = window[: first + row + 1]
            both = [candidates(logits, sampling, history) for logits in (some, every)]
            differing[name] += not all(map(np.array_equal, *both))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
