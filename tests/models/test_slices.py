"""Long texts are encoded in slices: the same tokens, with other threads running meanwhile."""

from __future__ import annotations

import random
import re
import string
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from kvq_models import slices, tokenizer
from kvq_models.control import ControlTokens
from kvq_models.slices import Slices
from kvq_models.tokenizer import JsonVocabulary, Tokenizer

CODE = Path(tokenizer.__file__).read_text()
PROSE = (Path(__file__).parents[1] / "README.md").read_text()
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(library: Library, trainer: trainers.Trainer) -> Library:
    library.train_from_iterator([CODE, PROSE], trainer)
    return library


def byte_level(pattern: str | None = None, normalizer: object = None) -> Library:
    library = Library(models.BPE())
    if normalizer is not None:
        library.normalizer = normalizer
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    )
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(
        library,
        trainers.BpeTrainer(
            vocab_size=900,
            initial_alphabet=alphabet,
            special_tokens=["<|end|>"],
            show_progress=False,
        ),
    )


def sentencepiece_like() -> Library:
    """Returns a tokenizer like Llama 2's: a space before every text, and no pre-tokeniser."""
    library = Library(models.BPE(byte_fallback=True, unk_token="<unk>"))
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    controls = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained(
        library,
        trainers.BpeTrainer(vocab_size=900, special_tokens=controls, show_progress=False),
    )
    library.pre_tokenizer = None  # type: ignore[assignment]
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return library


def metaspace(scheme: str) -> Library:
    library = Library(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    library.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return trained(
        library,
        trainers.UnigramTrainer(
            vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        ),
    )


def spaced_pieces() -> Library:
    """Merges go over spaces: `e a` is a piece. No cut after those letters is safe."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(
        library,
        trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False),
    )


def with_added_tokens() -> Library:
    library = byte_level()
    library.add_tokens(
        [AddedToken("of the"), AddedToken("tokenX", rstrip=True), AddedToken("text", lstrip=True)]
    )
    return library


LIBRARIES: dict[str, Callable[[], Library]] = {
    "byte level": byte_level,
    "llama 3": lambda: byte_level(LLAMA_3),
    "nfc": lambda: byte_level(LLAMA_3, normalizers.NFC()),
    "added tokens": with_added_tokens,
    "sentencepiece-like": sentencepiece_like,
    "metaspace always": lambda: metaspace("always"),
    "metaspace never": lambda: metaspace("never"),
    "pieces with spaces": spaced_pieces,
    "seven characters a word": lambda: byte_level(r".{1,7}"),
}


def texts() -> list[str]:
    chance = random.Random(0)
    unicode = "".join(
        chr(chance.choice([32, chance.randrange(32, 127), chance.randrange(160, 0xD800)]))
        for _ in range(4000)
    )
    letters = "".join(chance.choices(string.ascii_letters + "   \n\u0301'é", k=4000))
    added = "of the tokenX b of the a tokenX text tokenX  text a" * 40
    return [
        CODE,
        PROSE,
        unicode,
        letters,
        added,
        "a b " * 1000,
        " " * 999,
        "a" * 999,
        "<|end|> a b",
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("name", LIBRARIES)
def test_slices_have_the_tokens_of_the_whole(name: str) -> None:
    vocabulary = JsonVocabulary(LIBRARIES[name]().to_str())

    def encode(text: str) -> list[int]:
        return vocabulary.encode(text, special=False)

    pieces = vocabulary.slices
    for text in texts():
        whole = encode(text)
        for characters in (1, 7, 100):
            parts = list(pieces.of(text, characters))
            assert [token for part in parts for token in encode(part)] == whole
    is_cut = len(list(pieces.of(CODE, 100))) > 30
    assert is_cut == (name not in ("seven characters a word", "pieces with spaces"))


def test_a_long_text_is_sliced_and_a_much_too_long_one_not_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slices, "SLICE_CHARACTERS", 500)
    monkeypatch.setattr(tokenizer, "SLICE_CHARACTERS", 500)
    monkeypatch.setattr(Slices.cut, "__defaults__", (500,))
    library = LIBRARIES["llama 3"]()
    encoder = Tokenizer.from_json(library.to_str(), ControlTokens())
    for text in (CODE, PROSE, "a" * 4000):
        whole = library.encode(text, add_special_tokens=False).ids
        assert encoder.encode(text) == whole
        assert encoder.encode(text, most=len(whole)) == whole
        short = encoder.encode(text, most=100)
        assert 100 < len(short) < len(whole)
        assert short[:100] == whole[:100]


UNSAFE = {
    "letters": "a" * 140_000,
    "base64": "".join(
        random.Random(1).choices(string.ascii_letters + string.digits + "+/", k=140_000)
    ),
    "minified": "function f(a,b){return a+b*c[1];}var x='y';" * 3300,
    "han": "".join(map(chr, random.Random(2).choices(range(0x4E00, 0x9FA5), k=140_000))),
    "spaces": " " * 140_000,
    "lines": "\n" * 140_000,
    "accents": "e\u0301" * 70_000,
    "spaced": "a  b " * 28_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("text", UNSAFE)
@pytest.mark.parametrize("name", LIBRARIES)
def test_no_slice_of_any_text_is_longer_than_the_bound(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = JsonVocabulary(LIBRARIES[name]().to_str())
    tokens = Tokenizer(vocabulary, ControlTokens())
    whole = UNSAFE[text]
    if "metaspace" in name:
        # A vocabulary without bytes knows only what it was trained on.
        whole = re.sub(r"[^a-z ]", "a", whole)
    lengths: list[int] = []
    encode = vocabulary._encode

    def counted(part: str, special: bool) -> list[int]:
        lengths.append(len(part))
        return encode(part, special)

    monkeypatch.setattr(vocabulary, "_encode", counted)
    ids = vocabulary.encode(whole, special=False)
    assert max(lengths) <= slices.MOST_CHARACTERS
    assert tokens.decode(ids, special=True) == tokens.decode(encode(whole, False), special=True)
    # Of a text that is too long, the beginning is enough.
    lengths.clear()
    assert len(tokens.encode(whole, most=100)) > 100
    assert sum(lengths) <= 2 * slices.MOST_CHARACTERS


def test_a_text_is_cut_where_its_characters_change_and_within_no_control_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = LIBRARIES["llama 3"]()
    vocabulary = JsonVocabulary(library.to_str())
    cut = vocabulary.slices.cut
    monkeypatch.setattr(slices, "MOST_CHARACTERS", 40)
    for text, place in {
        "a" * 25 + "\n" + "b" * 40: 25,
        "a" * 22 + "." + "b" * 50: 23,
        "a" * 23 + "7" + "b" * 50: 23,
        "a" * 80: 20,
        "a" * 18 + "<|end|>" * 9: 18,
        "e\u0301" * 40: 20,
        "a" * 19 + "e\u0301" + "a" * 40: 21,
    }.items():
        parts = list(cut(text, 20))
        assert len(parts[0][0]) == place
        assert "".join(part for part, _ in parts) == text
        assert [forced for _, forced in parts] == [False] + [True] * (len(parts) - 1)
        assert max(len(part) for part, _ in parts) <= 40
    text = "a" * 18 + "<|end|>" * 20_000
    monkeypatch.setattr(Slices.cut, "__defaults__", (20,))
    whole = library.encode(text, add_special_tokens=False).ids
    assert Tokenizer(vocabulary, ControlTokens()).encode(text, special=True) == whole


def test_of_all_long_texts_one_at_a_time_asks_for_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vocabulary = JsonVocabulary(LIBRARIES["llama 3"]().to_str())
    assert vocabulary.slices
    inside: list[str] = []
    seen: list[int] = []
    short_began = Event()

    def encode(part: str, special: bool) -> list[int]:
        inside.append(part)
        seen.append(len(inside))
        if part == "short":
            short_began.set()
        else:
            # Held for as long as a short text needs to get in: it waits for no long one.
            assert short_began.wait(10)
        inside.remove(part)
        return [0]

    monkeypatch.setattr(vocabulary, "_encode", encode)
    texts = [letter * 200_000 for letter in "abcd"]
    with ThreadPoolExecutor(5) as threads:
        long = [threads.submit(vocabulary.encode, text, special=False) for text in texts]
        while not inside:
            time.sleep(0.001)
        assert threads.submit(vocabulary.encode, "short", special=False).result(10) == [0]
        assert [len(future.result()) for future in long] == [6] * 4
    assert max(seen) <= 2
