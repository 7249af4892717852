"""Long texts are encoded in slices: the same tokens, with other threads running meanwhile."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from pathlib import Path

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
    """Llama 2's: a space before every text, no pre-tokeniser, merges over the whole text."""
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
    monkeypatch.setattr(Slices.of, "__defaults__", (500,))
    library = LIBRARIES["llama 3"]()
    found = Tokenizer.from_json(library.to_str(), ControlTokens())
    for text in (CODE, PROSE, "a" * 4000):
        whole = library.encode(text, add_special_tokens=False).ids
        assert found.encode(text) == whole
        assert found.encode(text, most=len(whole)) == whole
        short = found.encode(text, most=100)
        assert 100 < len(short) < len(whole)
        assert short[:100] == whole[:100]
