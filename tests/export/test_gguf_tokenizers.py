"""Tokenizers in GGUF files: llama.cpp cuts texts as the checkpoint's does; so does an import."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

import tiny
from kvq.errors import UnsupportedModelError
from kvq_export.gguf import gguf_pre
from kvq_export.gguf.gguf_config import Metadata
from kvq_export.gguf.gguf_tokenizer import read_tokenizer
from kvq_export.read.source import open_source
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.backends.llama_library import LlamaModel
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.gguf_file import BYTE, CONTROL, NORMAL, UNKNOWN
from kvq_runtime.bundle.manifest import GGUF_FILE

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

from exported_gguf import export, field, needs_llama  # noqa: E402

HOSTILE = (
    "plain words, then   runs     of\t\ttabs \t and spaces   \n\n\n   \r\n end   ",
    "I'll they'RE don't 'S 'tis rock'n'roll",
    "Größe café naïve ﬁ ǅ İstanbul e\u0301 \u200b\u00a0\u3000 \ufeff",
    "家族 日本語のテキスト 한국어 ไทย हिन्दी العربية",
    "👩‍👩‍👧 🇫🇷 👍🏽 🤷🏻‍♂️ ☕️",
    "1234567890 3.14159 ١٢٣ ²³ Ⅳ 12ab34",
    "def f(x):\n\treturn {'a': [x**2, -x//3]}  # !== ?? ::\n\n\n\n",
    "<|im_start|>system\nobey<|im_end|><|endoftext|> <|fim_prefix|><|im_<|im_end|>end|>",
    "</s><s><unk><0x0A>[PAD9] ▁ ▁<PRE> Ġword ĊĊ \x00\x01\x7f",
    "\ufffd𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff",
    " ",
    "\n",
    "",
)
# What an approximate cut of llama.cpp may cut elsewhere.
CASELESS = HOSTILE[2:4]
ROWS = {row.name: row for row in gguf_pre.ROWS}


def cut(name: str) -> pre_tokenizers.PreTokenizer:
    """Returns the pre-tokenizer that llama.cpp calls `name`, from our own table of stages."""
    stages = []
    for stage in ROWS[name].stages:
        if stage == gguf_pre.DIGITS:
            stages.append(pre_tokenizers.Digits(individual_digits=True))
        elif stage in (gguf_pre.WORDS, gguf_pre.BYTES):
            words = stage == gguf_pre.WORDS
            stages.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words))
        else:
            stages.append(pre_tokenizers.Split(Regex(stage), "isolated"))
    return pre_tokenizers.Sequence(stages)


def byte_level(name: str) -> Library:
    """Trains a BPE on the hostile texts themselves, so that every cut shows in its merges."""
    library = Library(models.BPE(ignore_merges=ROWS[name].whole_words))
    library.pre_tokenizer = cut(name)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True) for token in tiny.CONTROL_TOKENS],
        show_progress=False,
    )
    library.train_from_iterator([text for text in HOSTILE for _ in range(4)], trainer)
    library.add_tokens([AddedToken("<think>", normalized=False)])
    return library


@pytest.fixture
def with_tokenizer(tmp_path: Path) -> Callable[..., Path]:
    def make(library: Library, **settings: Any) -> Path:
        source = tiny.make_llama_checkpoint(
            tmp_path / "source", vocab_size=1024, num_hidden_layers=1, **settings
        )
        library.save(str(source / "tokenizer.json"))
        return source

    return make


class LlamaVocabulary:
    """Uses the vocabulary of a GGUF file as llama.cpp does."""

    def __init__(self, bundle: Bundle) -> None:
        self.model = LlamaModel(bundle.path / GGUF_FILE)
        self._functions = self.model.library.functions

    def close(self) -> None:
        self.model.close()

    def encode(self, text: str, *, special: bool = False, start: bool = False) -> list[int]:
        raw = text.encode()
        room = (self._functions.llama_token * (len(raw) + 8))()
        vocabulary = self.model.vocabulary
        count = self._functions.llama_tokenize(
            vocabulary, raw, len(raw), room, len(room), start, special
        )
        assert count >= 0
        return list(room[:count])

    def token_bytes(self, token: int) -> bytes:
        import ctypes

        room = ctypes.create_string_buffer(256)
        size = self._functions.llama_token_to_piece(
            self.model.vocabulary, token, room, len(room), 0, True
        )
        return room.raw[:size]


@pytest.fixture
def both(with_tokenizer: Callable[..., Path]) -> Iterator[Callable[..., Any]]:
    """Gives our tokenizer and llama.cpp's, of one library tokenizer in one bundle."""
    opened: list[LlamaVocabulary] = []

    def make(library: Library, **settings: Any) -> tuple[Tokenizer, LlamaVocabulary]:
        bundle = export(with_tokenizer(library, **settings), "q8_0")
        tokenizer = bundle.tokenizer()
        assert tokenizer is not None
        opened.append(LlamaVocabulary(bundle))
        return tokenizer, opened[-1]

    yield make
    for vocabulary in opened:
        vocabulary.close()


@needs_llama
@pytest.mark.parametrize("name", ROWS)
def test_byte_level_tokenizers_agree(
    both: Callable[..., Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = both(byte_level(name))
    assert field_of(theirs, "tokenizer.ggml.pre") == name
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    for text in (*HOSTILE, "a <think> b"):
        if text in CASELESS and ROWS[name].approximate:
            continue
        assert theirs.encode(text) == ours.encode(text), repr(text)
        assert theirs.encode(text, special=True) == ours.encode(text, special=True), repr(text)
        assert theirs.encode(text, start=True) == ours.encode(text, start=True)
    control = [token for token in range(1024) if ours.is_control(token)]
    assert set(control).isdisjoint(theirs.encode(" ".join(tiny.CONTROL_TOKENS)))
    for token in range(ours.vocab_size):
        assert theirs.token_bytes(token) == ours.token_bytes(token)


def field_of(vocabulary: LlamaVocabulary, name: str) -> str:
    import ctypes

    room = ctypes.create_string_buffer(256)
    functions = vocabulary.model.library.functions
    functions.llama_model_meta_val_str(vocabulary.model.pointer, name.encode(), room, len(room))
    return room.value.decode()


def test_an_unknown_cut_is_refused(with_tokenizer: Callable[..., Path]) -> None:
    library = byte_level("qwen2")
    pairs_of_digits = ROWS["qwen2"].stages[0].replace(r"|\p{N}|", r"|\p{N}{1,2}|")
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pairs_of_digits), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    with pytest.raises(UnsupportedModelError, match="no name for how this tokenizer cuts a text"):
        export(with_tokenizer(library), "q8_0")


def word_marked(model: Any, *, prefix: bool = True) -> Library:
    library = Library(model)
    before = [normalizers.Prepend("▁")] if prefix else []
    library.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    library.add_special_tokens(
        [AddedToken(piece, normalized=False) for piece in ("<unk>", "<s>", "</s>")]
    )
    return library


def byte_fallback(*, prefix: bool = True) -> Library:
    """Learns a BPE from the texts with marked spaces; its merges are ranked by piece."""
    texts = [text.replace(" ", "▁") for text in (*tiny.CORPUS, *HOSTILE[:6])]
    teacher = Library(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    teacher.train_from_iterator(texts, trainer)
    learnt = json.loads(teacher.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [piece for piece in learnt["vocab"] if piece not in pieces]
    model = models.BPE(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[tuple(merge) for merge in learnt["merges"]],
        byte_fallback=True,
        unk_token="<unk>",
    )
    return word_marked(model, prefix=prefix)


@needs_llama
@pytest.mark.parametrize("prefix", [True, False])
def test_byte_fallback_tokenizers_agree(both: Callable[..., Any], prefix: bool) -> None:
    library = byte_fallback(prefix=prefix)
    ours, theirs = both(library, bos_token_id=1, eos_token_id=2)
    assert field_of(theirs, "tokenizer.ggml.model") == "llama"
    for text in HOSTILE:
        assert theirs.encode(text) == ours.encode(text), repr(text)
        assert {1, 2}.isdisjoint(theirs.encode(text))
    assert theirs.encode("a</s>", special=True)[-1] == 2


def test_vocabularies_without_a_form_are_refused(with_tokenizer: Callable[..., Path]) -> None:
    pieces = {"<unk>": 0, "a": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(255)}}
    library = word_marked(models.BPE(pieces, [], byte_fallback=True))
    source = with_tokenizer(library)
    with pytest.raises(UnsupportedModelError, match=r"no piece <0xFF>, which llama.cpp needs"):
        export(source, "q8_0")
    vocab = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)), ("▁a", -1.5)]
    for kind, model in (
        ("WordLevel", models.WordLevel({"<unk>": 0}, "<unk>")),
        ("Unigram", models.Unigram(vocab, 0, True)),
    ):
        word_marked(model).save(str(source / "tokenizer.json"))
        with pytest.raises(UnsupportedModelError, match=f"no GGUF file with this {kind} tokenizer"):
            export(source, "q8_0")


def test_every_token_has_a_text_of_its_own(with_tokenizer: Callable[..., Path]) -> None:
    """Gives each token another text: llama.cpp aborts on two equal ones, and stops at a NUL."""
    library = byte_level("gpt-2")
    library.add_tokens(["[PAD1023]", "two\x00", "a b", "a▁b"])
    bundle = export(with_tokenizer(library), "q8_0")
    tokens = field(bundle, "tokenizer.ggml.tokens")
    types = field(bundle, "tokenizer.ggml.token_type")
    assert len(tokens) == len(set(tokens)) == len(types) == 1024
    assert all(tokens)
    assert not any("\0" in token for token in tokens)
    assert tokens[1023] == "[[PAD1023]]"
    assert tokens.index("[PAD1023]") == library.token_to_id("[PAD1023]")
    unused = [1023, library.token_to_id("two\x00"), library.token_to_id("a▁b")]
    assert [types[token] for token in unused] == [5, 5, 5]
    assert tokens[library.token_to_id("a b")] == "a b"
    assert [types[0], types[library.token_to_id("<think>")]] == [3, 4]


def test_the_header_names_the_tokens_that_steer(tmp_path: Path) -> None:
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>")
    names += ("<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
    source = tiny.make_llama_checkpoint(tmp_path / "source", bos_token_id=1)
    library = Library.from_file(str(source / "tokenizer.json"))
    library.add_special_tokens(list(names))
    library.save(str(source / "tokenizer.json"))
    settings = {"pad_token": "<|endoftext|>", "bos_token": "<|im_start|>", "add_bos_token": True}
    settings["fim_order"] = "suffix-first"
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    bundle = export(source, "q8_0")
    ids = {name: library.token_to_id(name) for name in names}
    expected = {
        "bos": "<|im_start|>",
        "eos": "<|endoftext|>",
        "eot": "<|im_end|>",
        "padding": "<|endoftext|>",
        "fim_pre": "<|fim_prefix|>",
        "fim_suf": "<|fim_suffix|>",
        "fim_mid": "<|fim_middle|>",
        "fim_pad": "<|fim_pad|>",
        "fim_rep": "<|repo_name|>",
        "fim_sep": "<|file_sep|>",
    }
    for key, name in expected.items():
        assert field(bundle, f"tokenizer.ggml.{key}_token_id") == ids[name], key
    assert field(bundle, "tokenizer.ggml.add_bos_token") is True
    assert field(bundle, "kvq.fim.suffix_first") is True
    assert field(bundle, "tokenizer.chat_template") == tiny.CHATML
    assert field(bundle, "kvq.kv.k_bits") == 4
    assert field(bundle, "general.file_type") == gguf.LlamaFileType.MOSTLY_Q8_0


# The way back


def read_back(bundle: Bundle) -> Tokenizer:
    """Returns the tokenizer that an import of a bundle's file has."""
    source = open_source(bundle.path / GGUF_FILE)
    family, config, _ = source.config()
    return Tokenizer.from_files(source.tokenizer_files(), family, config)


def assert_same(actual: Tokenizer, expected: Tokenizer, texts: Iterable[str]) -> None:
    for text in texts:
        ids = expected.encode(text, special=True, start=True)
        assert actual.encode(text, special=True, start=True) == ids, repr(text)
        assert actual.encode(text) == expected.encode(text), repr(text)
        assert actual.decode(ids, special=True) == expected.decode(ids, special=True), repr(text)
    tokens = range(1024)
    assert [actual.token_bytes(token) for token in tokens] == [
        expected.token_bytes(token) for token in tokens
    ]
    assert [actual.is_control(token) for token in tokens] == [
        expected.is_control(token) for token in tokens
    ]


@pytest.mark.parametrize("name", ROWS)
def test_byte_level_tokenizers_come_back(with_tokenizer: Callable[..., Path], name: str) -> None:
    library = byte_level(name)
    if ROWS[name].composed:
        library.normalizer = normalizers.NFC()
    bundle = export(with_tokenizer(library), "q8_0")
    expected = bundle.tokenizer()
    assert expected is not None
    assert_same(read_back(bundle), expected, (*HOSTILE, "a <think> b"))


def test_pieces_that_merge_as_a_list_says_come_back() -> None:
    """Reads a list as llama.cpp writes those of Gemma 4."""
    library = byte_fallback(prefix=False)
    definition = json.loads(library.to_str())["model"]
    tokens = list(definition["vocab"])
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL}
    types = [kinds.get(token, BYTE if token.startswith("<0x") else NORMAL) for token in tokens]
    values = {
        "general.architecture": "gemma4",
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": [" ".join(merge).encode() for merge in definition["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
    }
    files = read_tokenizer(Metadata(Path("a.gguf"), values), tokens, np.array(types))
    actual = Library.from_str(files.definition)
    for text in HOSTILE:
        expected = library.encode(text.replace("</s>", ""), add_special_tokens=False).ids
        assert actual.encode(text.replace("</s>", ""), add_special_tokens=False).ids == expected
        assert actual.decode(expected) == library.decode(expected)
    assert files.settings["add_bos_token"] is True


@pytest.mark.parametrize("prefix", [True, False])
def test_byte_fallback_tokenizers_come_back(
    with_tokenizer: Callable[..., Path], prefix: bool
) -> None:
    source = with_tokenizer(byte_fallback(prefix=prefix), bos_token_id=1, eos_token_id=2)
    bundle = export(source, "q8_0")
    expected = bundle.tokenizer()
    assert expected is not None
    actual = read_back(bundle)
    assert_same(actual, expected, HOSTILE)
    assert (actual.bos_id, actual.eos_ids) == (1, (2,))
    assert actual.encode("a</s>", special=True)[-1] == 2


def test_a_piece_that_no_merge_makes_is_joined_in_the_file(
    with_tokenizer: Callable[..., Path],
) -> None:
    """Joins any two neighbours whose text is a token, as llama.cpp does."""
    definition = json.loads(byte_fallback().to_str())
    definition["model"]["vocab"]["dg"] = token = len(definition["model"]["vocab"])
    bundle = export(with_tokenizer(Library.from_str(json.dumps(definition))), "q8_0")
    tokenizer = bundle.tokenizer()
    assert tokenizer is not None
    assert token not in tokenizer.encode("dg")
    assert read_back(bundle).encode("dg")[-1] == token
