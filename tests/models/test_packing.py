"""`models/training/pack.py`: a text that teaches by its end is there as a whole."""

import itertools
import json
import lzma
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
LENGTH = 512


@pytest.fixture(scope="module")
def pack() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "models/training"))
        import pack as module

        for name in ("pack", "lessons", "vocabulary"):
            sys.modules.pop(name, None)
    return module


def test_runs_are_full_and_cut_only_what_stands_last(pack: ModuleType) -> None:
    rng = random.Random(1)
    # Document n is the number n, closed by a 0; some are longer than a run.
    sizes = [rng.choice((8, 40, 300, 511, 700)) for _ in range(5000)]
    documents = ([number] * (size - 1) + [0] for number, size in enumerate(sizes, 1))
    whole: list[int] = []
    for run in itertools.islice(pack.runs(documents, LENGTH), 200):
        assert len(run) == LENGTH
        numbers = [number for number, _ in itertools.groupby(run)]
        assert not any(numbers[1:-1:2])
        whole += numbers[:-1:2]
    assert len(whole) == len(set(whole))
    oldest_waiting = min(set(range(1, 5000)) - set(whole) - {
        number for number, size in enumerate(sizes, 1) if size > LENGTH
    })  # fmt: skip
    assert max(whole) > 300
    assert oldest_waiting > max(whole) - 2 * pack.WAITING


def test_pass_keys_are_hidden_in_texts_of_up_to_the_whole_length(
    pack: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "corpus.jsonl.xz"
    prose = "A page holds thirty-two tokens, and a plane holds half of their bits. " * 100
    source = "def read(path):\n    return path.read_text()\n\n\n" * 100
    with lzma.open(path, "wt", encoding="utf-8") as lines:
        for kind, text in (("books", prose), ("python", source)):
            line = {"kind": kind, "text": text, "source": kind, "held_out": False}
            lines.write(json.dumps(line) + "\n")
    tokenizer = Tokenizer.from_file(str(ROOT / "models/kvq_embedded/default/tokenizer.json"))
    packer = pack.Packer(pack.Corpus(path), tokenizer, seed=1, length=LENGTH)
    rows = list(itertools.islice(packer.stream({"recall": 1.0}), 200))
    keys = [ids for ids in rows if "The pass key is" in tokenizer.decode(ids)]
    assert len(keys) > 100
    assert max(map(len, keys)) <= LENGTH
    assert sum(len(ids) > 0.8 * LENGTH for ids in keys) > 0.05 * len(keys)
