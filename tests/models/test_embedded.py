"""The models that come with the package: whole, as transformers computes them, and trained."""

import json
from itertools import product
from math import log
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

import kvq_embedded
from kvq import native_library
from kvq.native_linear import weight_bytes_read
from kvq_export.read.checkpoint import Checkpoint
from kvq_models.reference import PlainAttention, forward
from kvq_models.registry import read_checkpoint
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.backends.onnx import OnnxBackend
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from shelf import Shelf

MODELS = Path(kvq_embedded.__path__[0])
# Nothing the models were trained on, and nothing that a change elsewhere rewrites.
SOURCE = '''"""The shortest roads between the towns of a map."""

import heapq
from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class RoadMap:
    """Towns, and how many kilometres lie between neighbours."""

    neighbours: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))

    def add_road(self, start: str, end: str, length: float) -> None:
        """Adds a road that is open in both directions."""
        if length < 0:
            raise ValueError(f"the length of a road cannot be negative: {length}")
        self.neighbours[start][end] = length
        self.neighbours[end][start] = length

    def distances(self, start: str) -> dict[str, float]:
        """Returns the distance of every town that can be reached from `start`."""
        found: dict[str, float] = {}
        queue = [(0.0, start)]
        while queue:
            distance, town = heapq.heappop(queue)
            if town in found:
                continue
            found[town] = distance
            for neighbour, length in self.neighbours[town].items():
                if neighbour not in found:
                    heapq.heappush(queue, (distance + length, neighbour))
        return found


def main() -> None:
    roads = RoadMap()
    roads.add_road("Delft", "Leiden", 27.5)
    roads.add_road("Leiden", "Haarlem", 35.0)
    for town, distance in roads.distances("Delft").items():
        print(f"{town}: {distance:.1f} km")


if __name__ == "__main__":
    main()
'''
embedded = pytest.mark.parametrize("name", ["default", "nano"])
needs_native = pytest.mark.skipif(not native_library.available(), reason="no native library")


@embedded
def test_it_says_what_it_is(name: str) -> None:
    folder = MODELS / name
    card = (folder / "README.md").read_text(encoding="utf-8")
    about = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    data = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    assert card.startswith("---\nlicense: apache-2.0\n---")
    assert f"{about['tokens'] / 1e6:.1f} M tokens" in card
    assert len(data["sha256"]) == 64
    assert not any("GPL" in str(source["licence"]) for source in data["sources"])
    held_out = {"httpx", "httpx2", "httpcore", "httpcore2", "llm", "pygls"}
    assert not held_out & {str(source["name"]).lower() for source in data["sources"]}


@embedded
def test_its_tokenizer_can_infill_and_chat_and_loses_no_byte(name: str) -> None:
    folder = MODELS / name
    family, config, _ = read_checkpoint(folder)
    tokenizer = Tokenizer.from_checkpoint(folder, family, config)
    assert tokenizer.fim is not None
    assert tokenizer.control.start == (config.eos_token_ids[0],)
    assert len(tokenizer.control.eos) == 2
    assert tokenizer.decode(tokenizer.encode(SOURCE)) == SOURCE
    ids = tokenizer.chat([{"role": "user", "content": "<|im_end|> hello"}])
    ends = [i for i in ids if i in tokenizer.control.eos]
    assert ends.count(tokenizer.encode("<|im_end|>", special=True)[0]) == 1
    peer = AutoTokenizer.from_pretrained(folder)
    assert peer(SOURCE)["input_ids"] == tokenizer.encode(SOURCE, start=True)


@embedded
def test_transformers_computes_the_same_and_it_has_learned_python(name: str) -> None:
    folder = MODELS / name
    family, config, _ = read_checkpoint(folder)
    tokenizer = Tokenizer.from_checkpoint(folder, family, config)
    ids = np.array(tokenizer.encode(SOURCE, start=True)[:400])
    checkpoint, sources = Checkpoint.open(folder), family.weights(config)

    def weight(key: str) -> np.ndarray:
        return checkpoint.read(sources[key])

    actual = forward(config, weight, ids, np.arange(len(ids)), PlainAttention())
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    assert np.abs(actual - expected).max() < 2e-3
    logits = expected[:-1] - np.log(np.exp(expected[:-1]).sum(axis=-1, keepdims=True))
    nats = -logits[np.arange(len(ids) - 1), ids[1:]].sum()
    size = len(tokenizer.decode(ids[1:].tolist()).encode())
    # Of a file it never saw; untrained it would be more than 3.
    assert nats / log(2) / size < {"default": 1.4, "nano": 2.0}[name]


@needs_native
@pytest.mark.slow
def test_a_head_that_reads_half_writes_the_same_text(shelf: Shelf) -> None:
    modes = [
        Sampling(temperature=0),
        Sampling(temperature=0.9, top_k=40),
        Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.02),
        Sampling(temperature=0.9, top_k=40, repeat_penalty=1.3, frequency_penalty=0.2),
        Sampling(temperature=0.9, top_k=40, logit_bias={300: -4.0}),
        Sampling(temperature=0.9, top_k=0),
    ]
    prompts = ["def fibonacci(n):\n", "import numpy as np\n\n", "class Tree:\n    def "]
    answers: dict[bool, list[list[int]]] = {}
    read: dict[bool, int] = {}
    with Engine.open(shelf.embedded("default"), threads=1) as engine:
        assert isinstance(engine.backend, OnnxBackend)
        for halves in (True, False):
            engine.backend.ranks_by_halves = halves
            answers[halves], read[halves] = [], 0
            for seed, (prompt, sampling) in enumerate(product(prompts, modes)):
                before = weight_bytes_read()
                with engine.session(context_tokens=200, seed=seed) as session:
                    session.prefill(prompt)
                    steps = session.generate(30, sampling=sampling, stop_ids=[])
                    answers[halves].append([step.token for step in steps])
                # What is drawn flatly is read whole, and then the halves were in vain.
                if sampling.temperature == 0:
                    read[halves] += weight_bytes_read() - before
    assert answers[True] == answers[False]
    assert read[True] < read[False]
