"""SentencePiece vocabularies in GGUF files: kvq's ids are llama.cpp's, and sentencepiece's own."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.errors import CheckpointError
from kvq_export.gguf.gguf_config import Metadata
from kvq_export.gguf.gguf_tokenizer import read_tokenizer, read_tokens
from kvq_models.control import ControlTokens
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.bundle.gguf_file import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from kvq_runtime.bundle.gguf_format import read_gguf

ROOT = Path(__file__).parents[2]
SOURCES = ("CONTRIBUTING.md", "export/kvq_export/gguf/gguf_config.py", "kvq/kvq/errors.py")
RUNS = ["▁" * count for count in range(2, 17)]
# What a converter writes for a piece that was added to a trained vocabulary.
ADDED = -1e9


def files() -> list[str]:
    return [(ROOT / name).read_text(encoding="utf-8") for name in SOURCES]


def texts() -> list[str]:
    draw = random.Random(0)
    lines = [line for text in files() for line in text.splitlines() if line]
    samples = [
        *(" " * count for count in range(1, 41)),
        *(f"{' ' * count}return {count}" for count in range(1, 41)),
        *(f"x{' ' * count}= 1{' ' * (count // 3)}" for count in range(1, 41)),
        *("\t" * count + "x" for count in range(1, 12)),
        "def f(x):\n    if x:\n        return {\n            'a': [x],\n        }\n",
        " \t \t mixed\t  \ttabs   and \r\n   lines  \n\n\n    ",
        "家族 日本語の  テキスト   한국어 ไทย",
        "👩‍👩‍👧 🇫🇷   👍🏽\u0300 \U0010ffff \ufffd",
        "</s><s> <unk>  <0x0A> [PAD9] ▁▁ ▁x<|im_end|>",
        "Größe café naïve e\u0301   \u00a0\u3000\u200b",
        "a", " a", "a ", "  a  ", "",
    ]  # fmt: skip
    mixed = (
        "".join(draw.choice(("    ", " ", "\t", "a", "self", "家", "é", "=")) for _ in range(20))
        for _ in range(100)
    )
    return [*samples, *lines[::3], *mixed, "\n".join(lines[:60])]


@dataclass(frozen=True)
class Trained:
    """Holds a model that sentencepiece trained on this repository, and its keys in a file."""

    proto: Any
    prefix: bool

    @cached_property
    def processor(self) -> Any:
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_proto=self.proto.SerializeToString())

    @property
    def keys(self) -> dict[str, Any]:
        kinds = {1: NORMAL, 2: UNKNOWN, 3: CONTROL, 4: USER_DEFINED, 6: BYTE}
        pieces = self.proto.pieces
        spelled = [
            piece.piece.replace("▁", " ") if piece.type == 4 else piece.piece for piece in pieces
        ]
        return {
            "general.architecture": "llama",
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": spelled,
            "tokenizer.ggml.scores": [-1000.0 if p.type == 4 else p.score for p in pieces],
            "tokenizer.ggml.token_type": [kinds[piece.type] for piece in pieces],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.add_space_prefix": self.prefix,
        }

    def tokenizer(self) -> Tokenizer:
        return tokenizer_of_keys(self.keys)


def tokenizer_of_keys(keys: Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer of a file with these keys."""
    arrays: dict[str, type] = {"scores": np.float32, "token_type": np.int32}
    values = dict(keys)
    values["tokenizer.ggml.tokens"] = [piece.encode() for piece in values["tokenizer.ggml.tokens"]]
    for name, dtype in arrays.items():
        values[f"tokenizer.ggml.{name}"] = np.array(values[f"tokenizer.ggml.{name}"], dtype)
    metadata = Metadata(Path("a.gguf"), values)
    return Tokenizer.from_json(
        read_tokenizer(metadata, *read_tokens(metadata)).definition, ControlTokens()
    )


@pytest.fixture(scope="module")
def train() -> Callable[..., Trained]:
    """Trains once; `frozen` runs of spaces are user-defined symbols, others have scores."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    from sentencepiece import sentencepiece_model_pb2

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(files()).splitlines()),
        model_writer=model,
        vocab_size=1500,
        model_type="bpe",
        byte_fallback=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=RUNS,
        split_digits=True,
        minloglevel=2,
    )

    def make(*, frozen: bool, prefix: bool) -> Trained:
        proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
        proto.normalizer_spec.add_dummy_prefix = prefix
        for piece in proto.pieces:
            if piece.piece in RUNS and not frozen:
                piece.type, piece.score = 1, ADDED
        return Trained(proto, prefix)

    return make


@pytest.mark.parametrize(("frozen", "prefix"), [(False, True), (False, False), (True, False)])
def test_ids_are_those_of_sentencepiece(
    train: Callable[..., Trained], frozen: bool, prefix: bool
) -> None:
    """Compares ids, also where symbols are found before all merges (`frozen`).

    llama.cpp finds these in the raw text: a text begins anew after one, and a mark in the text is
    no space. sentencepiece looks for them after it has marked spaces.
    """
    trained = train(frozen=frozen, prefix=prefix)
    tokenizer, processor = trained.tokenizer(), trained.processor
    for text in texts():
        if frozen and "▁" in text:
            continue
        ids = tokenizer.encode(text)
        assert ids == processor.encode(text), repr(text)
        assert tokenizer.decode(ids) == text.replace("▁", " ")


def test_an_indentation_is_one_token(train: Callable[..., Trained]) -> None:
    trained = train(frozen=False, prefix=True)
    ids = {piece.piece: token for token, piece in enumerate(trained.proto.pieces)}
    tokenizer = trained.tokenizer()
    assert tokenizer.encode("    the") == [ids["▁▁▁▁"], ids["▁the"]]
    assert tokenizer.encode(" " * 40) == [ids["▁" * 16], ids["▁" * 16], ids["▁" * 9]]


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_ids_are_those_of_llama_cpp(
    train: Callable[..., Trained], tmp_path: Path, frozen: bool, prefix: bool
) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    trained = train(frozen=frozen, prefix=prefix)
    path = write_vocabulary(tmp_path / "vocabulary.gguf", trained.keys)
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    metadata = Metadata(path, read_gguf(path).metadata)
    files = read_tokenizer(metadata, *read_tokens(metadata))
    tokenizer = Tokenizer.from_json(files.definition, ControlTokens())
    for text in texts():
        expected = model.tokenize(text.encode(), add_bos=False, special=False) if text else []
        assert tokenizer.encode(text) == expected, repr(text)
    model.close()


def write_vocabulary(path: Path, keys: Mapping[str, Any]) -> Path:
    """Writes a file that has a vocabulary and nothing else."""
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    writer = gguf.GGUFWriter(path, keys["general.architecture"])
    writer.add_tokenizer_model(keys["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(keys["tokenizer.ggml.pre"])
    writer.add_token_list(keys["tokenizer.ggml.tokens"])
    writer.add_token_scores(keys["tokenizer.ggml.scores"])
    writer.add_token_types(keys["tokenizer.ggml.token_type"])
    for key, value in keys.items():
        if key.endswith("_token_id"):
            writer.add_uint32(key, value)
    writer.add_add_space_prefix(keys["tokenizer.ggml.add_space_prefix"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Vocabularies that nobody trained


def keys_of(scores: Mapping[str, float], types: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Returns the keys of a file whose texts have no space before the first word."""
    special = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    special |= {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    kinds = special | dict.fromkeys(scores, NORMAL) | (types or {})
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(kinds),
        "tokenizer.ggml.scores": [scores.get(piece, 0.0) for piece in kinds],
        "tokenizer.ggml.token_type": list(kinds.values()),
        "tokenizer.ggml.add_space_prefix": False,
    }


def join_as_llama_cpp(text: str, scores: Mapping[str, float]) -> list[str]:
    """Joins pieces as llama.cpp does: the best score first, of equal ones the leftmost."""
    parts = list(text.replace(" ", "▁"))
    while pairs := [
        (-scores[left + right], place)
        for place, (left, right) in enumerate(pairwise(parts))
        if left + right in scores
    ]:
        _, place = min(pairs)
        parts[place : place + 2] = ["".join(parts[place : place + 2])]
    return parts


def pieces_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return [
        tokenizer.token_bytes(token).decode().replace(" ", "▁") for token in tokenizer.encode(text)
    ]


@st.composite
def vocabularies(draw: st.DrawFn) -> dict[str, float]:
    """Draws letters, pieces of other pieces with a score each, and runs of the least score.

    Runs are of one letter: merges have an order, so of two runs with one score that lie next to
    each other kvq cannot join the left one first, as llama.cpp does.
    """
    pieces = ["a", "b", "▁"]
    for _ in range(draw(st.integers(1, 12))):
        pieces.append(draw(st.sampled_from(pieces)) + draw(st.sampled_from(pieces)))
    order = draw(
        st.permutations(
            sorted(piece for piece in {*pieces} if len(piece) == 1 or len({*piece}) > 1)
        )
    )
    letter, runs = draw(st.sampled_from("▁b")), draw(st.sets(st.integers(2, 20), max_size=12))
    added = {letter * count: ADDED for count in runs}
    return added | {piece: -float(rank) for rank, piece in enumerate(order)}


RUN_TEXTS = st.lists(
    st.builds(str.__mul__, st.sampled_from("ab "), st.integers(1, 24)), max_size=6
).map("".join)


@given(vocabularies(), st.lists(st.text("ab ", max_size=40) | RUN_TEXTS, min_size=1, max_size=8))
def test_any_vocabulary_joins_as_llama_cpp_does(
    scores: dict[str, float], samples: list[str]
) -> None:
    tokenizer = tokenizer_of_keys(keys_of(scores))
    for text in samples:
        assert pieces_of(tokenizer, text) == join_as_llama_cpp(text, scores)


@pytest.mark.parametrize("trained", [(), (2,), (2, 4, 8), (2, 4, 8, 16), (2, 3, 4, 8)])
def test_runs_that_were_trained_join_before_those_that_were_added(trained: tuple[int, ...]) -> None:
    runs = {"▁" * count: ADDED for count in range(2, 25)}
    scores = runs | {"▁" * count: -float(rank) for rank, count in enumerate(trained)}
    tokenizer = tokenizer_of_keys(keys_of(scores | {"▁": -1000.0, "x": -1001.0}))
    for count in range(1, 80):
        text = " " * count + "x"
        assert pieces_of(tokenizer, text) == join_as_llama_cpp(text, scores)


def test_tokens_of_other_kinds_join_as_well() -> None:
    """Joins with all tokens, as llama.cpp does; but kvq never makes a control token so."""
    scores = {"a": 0.0, "b": 0.0, "▁": 0.0, "▁▁": -1000.0, "ab": -2.0, "aab": -1e9, "<s": 0.0}
    types = {"▁▁": USER_DEFINED, "aab": 5}
    tokenizer = tokenizer_of_keys(keys_of(scores | {"<": 0.0, "s": 0.0, ">": 0.0, "c": 0.0}, types))
    assert pieces_of(tokenizer, "a  b") == ["a", "▁▁", "b"]
    assert pieces_of(tokenizer, "aab") == ["aab"]
    assert pieces_of(tokenizer, "<s>") == ["<s", ">"]


def test_an_end_that_a_file_calls_text_is_never_made_of_it() -> None:
    """Reads such a file as those of Phi-3; llama.cpp makes it a control token as well."""
    scores = dict.fromkeys("</s>", 0.0)
    tokenizer = tokenizer_of_keys(keys_of(scores, {"</s>": USER_DEFINED}))
    assert pieces_of(tokenizer, "</s>") == ["<", "/", "s", ">"]
    assert tokenizer.encode("</s>", special=True) == [2]


@pytest.mark.parametrize("scores", [[0.0], [float("nan")] * 262])
def test_scores_of_other_tokens_are_damage(scores: list[float]) -> None:
    keys = keys_of({"a": 0.0, "b": 0.0, "ab": 0.0}) | {"tokenizer.ggml.scores": scores}
    with pytest.raises(CheckpointError, match=r"a\.gguf is damaged: its tokens have no scores"):
        tokenizer_of_keys(keys)
