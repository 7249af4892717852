"""Turns the corpus into token files: documents, infilling, chats, recall and copying, mixed.

    python models/training/pack.py corpus.jsonl.xz TOKENIZER --out PACKED --tokens 20000000
        --length 1024 --long-tokens 2000000 --long-length 4096

PACKED gets train.bin and long.bin (uint16, runs of the length the model reads, each of whole
documents closed by <|endoftext|>) and one held-out text file per kind, as it is.
Python source appears half of the time with a hole in it (fill-in-the-middle, arXiv 2207.14255:
prefix-suffix-middle and suffix-prefix-middle, split at characters), the rest as whole files.
Synthetic recall teaches what a KV cache is judged by: retrieval over the whole length. Whole short
functions, edits that repeat their input and JSON (`lessons.py`) teach what people try first.
A hole, a look-up or a copy teaches by its few last tokens, which need all that stands before them.
So documents are not cut (best-fit packing, arXiv 2404.10830; ours begins each run with the document
that has waited longest, and fills what then is left with the head of the shortest), and these texts
are of all sizes up to the length, half of them short: of full ones a small run would meet too few.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import lessons
import numpy as np
from tokenizers import Tokenizer
from vocabulary import END, FILE, MIDDLE, PREFIX, REPOSITORY, SUFFIX, TURN_END, TURN_START

from kvq_models import recall

# Share of the tokens by kind; the long file leans on what is long.
SHORT_MIX = {
    "python": 0.66, "english": 0.07, "chat": 0.04, "recall": 0.07, "copy": 0.03,
    "function": 0.06, "primer": 0.02, "edit": 0.03, "json": 0.02,
}  # fmt: skip
LONG_MIX = {
    "python": 0.63, "english": 0.06, "chat": 0.02, "recall": 0.16, "copy": 0.04,
    "function": 0.04, "primer": 0.01, "edit": 0.03, "json": 0.01,
}  # fmt: skip
# Of the pieces of source, which are two thirds of its tokens, since these are the shorter ones.
INFILL = 0.88
# The rest of the holes: suffix, prefix, middle, which is how this family is asked (a small model
# goes on with a prefix long before it has learnt to find where one ended).
PREFIX_FIRST = 0.15
# Of the holes: most are one line or a few, as an editor leaves them.
LINE_HOLES = 0.8
SHORTEST = 48
# Of the length, for a text with its question and what else belongs to it.
LONGEST = 0.95
QUESTIONS = 8
# What stands around the text that hides a pass key.
QUESTION_TOKENS = 80
CHARACTERS_PER_TOKEN = 3.3
WAITING = 256  # documents from which the next one to fill a run is chosen
HELD_OUT_BYTES = 400_000


class Corpus:
    """The documents by kind, held-out ones apart."""

    def __init__(self, path: Path) -> None:
        self.train: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self.held_out: dict[str, list[str]] = defaultdict(list)
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                document = json.loads(line)
                kind, text = document["kind"], document["text"]
                if document["held_out"]:
                    self.held_out[kind].append(text)
                else:
                    self.train[kind].append((document["source"], text))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of `text`; control tokens in it stay text."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def hole(rng: random.Random, text: str) -> tuple[str, str, str]:
    """`text` as prefix, middle, suffix."""
    if rng.random() < LINE_HOLES:
        starts = [0, *(at + 1 for at, letter in enumerate(text) if letter == "\n")]
        first = rng.randrange(len(starts))
        last = min(len(starts) - 1, first + rng.choice((1, 1, 1, 2, 3, 5)))
        line_end = starts[last] if last > first else len(text)
        indent = len(text[starts[first] : line_end]) - len(
            text[starts[first] : line_end].lstrip(" ")
        )
        start = starts[first] + rng.choice((0, indent, rng.randint(0, line_end - starts[first])))
        # An editor's cursor stands before the line end, which then stays in the suffix; a benchmark
        # takes whole lines.
        keeps_end = line_end < len(text) and rng.random() < 0.6
        stop = max(start, line_end - keeps_end)
    else:
        start, stop = sorted(rng.randint(0, len(text)) for _ in range(2))
    return text[:start], text[start:stop], text[stop:]


class Packer:
    """Endless documents of each kind as token ids, in an order that a seed fixes."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, seed: int, length: int) -> None:
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._rng = rng = random.Random(seed)
        self._length = length
        self._ids = {
            name: tokenizer.token_to_id(name)
            for name in (END, TURN_START, TURN_END, PREFIX, SUFFIX, MIDDLE, REPOSITORY, FILE)
        }
        self._kinds: dict[str, Callable[[], Iterator[list[int]]]] = {
            "python": self._python,
            "english": lambda: self._texts("books", "peps", "tldr", "peps", "tldr"),
            "chat": self._chats,
            "recall": self._recalls,
            "copy": self._copies,
            "function": lambda: map(self._encode, lessons.functions(rng, self._shuffled("python"))),
            "primer": lambda: map(self._encode, lessons.primer(rng)),
            "edit": lambda: self._edits(lessons.edits(rng, self._shuffled("python"))),
            "json": lambda: self._edits(lessons.json_edits(rng)),
        }

    def stream(self, mix: dict[str, float]) -> Iterator[list[int]]:
        """Documents with their end token, the kind furthest behind its share of tokens next."""
        sources = {kind: self._kinds[kind]() for kind in mix}
        counts = dict.fromkeys(mix, 0)
        while True:
            kind = min(mix, key=lambda name: counts[name] / mix[name])
            ids = [*next(sources[kind]), self._ids[END]]
            counts[kind] += len(ids)
            yield ids

    def _shuffled(self, kind: str) -> Iterator[tuple[str, str]]:
        while True:
            order = list(self._corpus.train[kind])
            self._rng.shuffle(order)
            yield from order

    def _encode(self, text: str) -> list[int]:
        return encode(self._tokenizer, text)

    def _size(self) -> float:
        """Tokens of a text: half of the texts of any size alike, half of them mostly short."""
        longest = LONGEST * self._length
        if self._rng.random() < 0.5:
            return self._rng.uniform(SHORTEST, longest)
        return SHORTEST * (longest / SHORTEST) ** (self._rng.random() ** 1.7)

    def _cut(self, text: str, tokens: float) -> str:
        """The beginning of `text`, of at most so many tokens."""
        ends = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return text if len(ends) <= tokens else text[: ends[int(tokens)][0]]

    def _pieces(self, text: str, tokens: Callable[[], float]) -> Iterator[str]:
        """`text` in runs of whole lines, each of about as many tokens as `tokens` then says."""
        while text:
            limit = int(tokens() * CHARACTERS_PER_TOKEN)
            cut = len(text) if len(text) <= limit * 1.2 else text.rfind("\n", 1, limit) + 1 or limit
            yield text[:cut]
            text = text[cut:]

    def _python(self) -> Iterator[list[int]]:
        for source, text in self._shuffled("python"):
            package, _, path = source.partition("/")
            name = [self._ids[REPOSITORY], *self._encode(package)]
            file = [self._ids[FILE], *self._encode(path + "\n")]
            if self._rng.random() < 0.3:
                file = name + file
            elif self._rng.random() < 0.5:
                file = []
            infill = False

            def size() -> float:
                nonlocal infill
                infill = self._rng.random() < INFILL
                return self._size() if infill else LONGEST * self._length

            head = file
            for piece in self._pieces(text, size):
                yield head + (self._infill(piece) if infill else self._encode(piece))
                head = []

    def _infill(self, text: str) -> list[int]:
        prefix, middle, suffix = map(self._encode, hole(self._rng, text))
        ids = self._ids
        if self._rng.random() < PREFIX_FIRST:
            return [ids[PREFIX], *prefix, ids[SUFFIX], *suffix, ids[MIDDLE], *middle]
        return [ids[PREFIX], ids[SUFFIX], *suffix, ids[MIDDLE], *prefix, *middle]

    def _texts(self, *kinds: str) -> Iterator[list[int]]:
        sources = [self._shuffled(kind) for kind in kinds]
        while True:
            for source in sources:
                pieces = list(self._pieces(next(source)[1], lambda: LONGEST * self._length))
                for piece in self._rng.sample(pieces, min(len(pieces), 8)):
                    yield self._encode(piece)

    def _chats(self) -> Iterator[list[int]]:
        for _, text in self._shuffled("dialogues"):
            yield self._turns(json.loads(text))

    def _turns(self, turns: list[dict[str, str]]) -> list[int]:
        start, end = self._ids[TURN_START], self._ids[TURN_END]
        ids: list[int] = []
        for turn in turns:
            text = self._encode(f"{turn['role']}\n{turn['content']}")
            ids += [start, *text, end, *self._encode("\n")]
        return ids

    def _edits(self, examples: Iterator[tuple[str, str, str]]) -> Iterator[list[int]]:
        """As a request of a user that an assistant fulfils, or as a comment in a file."""
        for request, text, edited in examples:
            if self._rng.random() < 0.5:
                turns = [{"role": "user", "content": f"{request}\n\n{text}"}]
                yield self._turns([*turns, {"role": "assistant", "content": edited}])
            else:
                yield self._encode(f"{text}\n# {request}\n{edited}")

    def _recalls(self) -> Iterator[list[int]]:
        books = self._shuffled("books")
        sources = self._shuffled("python")
        while True:
            length = self._size()
            depth = self._rng.random()
            kind = self._rng.randrange(4)
            if kind == 0:
                depths = [self._rng.random() for _ in range(QUESTIONS)]
                example = recall.key_values(self._rng, max(1, int(length / 17)), depths)[-1]
            else:
                room = max(0, length - QUESTION_TOKENS)
                size = int(6 * length)
                if kind == 1:
                    around = recall.filler_text(self._rng, size)
                else:
                    text = next(books if kind == 2 else sources)[1]
                    at = self._rng.randrange(max(1, len(text) - size))
                    around = text[at : at + size]
                example = recall.passkey(self._rng, self._cut(around, room), depth)
            yield self._encode(example.text)

    def _copies(self) -> Iterator[list[int]]:
        """A text, something else, and the text again."""
        sources = self._shuffled("python")
        while True:
            total = int(self._size() * CHARACTERS_PER_TOKEN)
            size = int(total * self._rng.uniform(0.1, 0.4))
            text, other = next(sources)[1], next(sources)[1]
            at = self._rng.randrange(max(1, len(text) - size))
            part = text[at : at + size]
            between = other[: self._rng.randrange(max(1, total - 2 * len(part)))]
            yield self._encode(f"{part}\n{between}\n# again\n{part}\n")


def runs(documents: Iterator[list[int]], length: int) -> Iterator[list[int]]:
    """Endless `documents` as runs of exactly `length` tokens; what is longer than one is cut."""
    waiting = [ids[:length] for ids in itertools.islice(documents, WAITING)]
    while True:
        run: list[int] = []
        at = 0  # the one that has waited longest
        while len(run) + len(waiting[at]) <= length:
            run += waiting.pop(at)
            waiting.append(next(documents)[:length])
            left = length - len(run)
            sizes = [len(ids) for ids in waiting]
            fitting = [size for size in sizes if size <= left]
            at = sizes.index(max(fitting) if fitting else min(sizes))
        yield run + waiting[at][: length - len(run)]


def write_tokens(path: Path, documents: Iterator[list[int]], count: int, length: int) -> None:
    """Runs of `documents`, in all `count` tokens or a little less, as uint16."""
    whole = itertools.islice(runs(documents, length), count // length)
    tokens = np.array(list(whole), np.uint16)
    partial = path.with_suffix(".partial")
    tokens.tofile(partial)
    partial.replace(path)


def main() -> None:
    """Packs the training files and the held-out texts."""
    parser = argparse.ArgumentParser(description="Packs the corpus for training.")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--long-tokens", type=int, required=True)
    parser.add_argument("--long-length", type=int, default=4096)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    # In a text these are letters like any others.
    tokenizer.encode_special_tokens = True
    corpus = Corpus(arguments.corpus)
    rng = random.Random(0)
    for kind, texts in corpus.held_out.items():
        rng.shuffle(texts)
        text = "\n\n".join(texts).encode()[:HELD_OUT_BYTES].decode(errors="ignore")
        (arguments.out / f"held_out.{kind}.txt").write_text(text, encoding="utf-8")
    short = Packer(corpus, tokenizer, 0, arguments.length)
    long = Packer(corpus, tokenizer, 1, arguments.long_length)
    # The long file first: it is the short one that may be cut when time is short.
    for name, packer, mix, tokens, length in (
        ("long.bin", long, LONG_MIX, arguments.long_tokens, arguments.long_length),
        ("train.bin", short, SHORT_MIX, arguments.tokens, arguments.length),
    ):
        write_tokens(arguments.out / name, packer.stream(mix), tokens, length)


if __name__ == "__main__":
    main()
