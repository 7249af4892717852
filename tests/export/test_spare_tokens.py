"""Tokens and ids that nothing reads are no damage: models that have them run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny
from command_line import answer, kvq
from environment import environment_in
from kvq.errors import CheckpointError
from kvq_export.config import ExportOptions
from kvq_export.export import export_model
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.engine import Engine

pytest.importorskip("gguf", reason="the gguf package is not installed")

from tiny_gguf import CONTROL, NORMAL, write_gguf

# All tokens of the tiny tokenizer.
ROWS = tiny.byte_level_tokenizer().get_vocab_size()
IMAGE = "<image_soft_token>"
TEXT = f"def add(first, {IMAGE})"
OPTIONS = ExportOptions(quality=False, calibrate=False)


def make_folder(tmp_path: Path, change: Callable[[dict[str, Any]], object], **keys: Any) -> Path:
    """Makes a checkpoint whose tokenizer.json is changed."""
    folder = tiny.make_llama_checkpoint(tmp_path / "source", vocab_size=ROWS, **keys)
    path = folder / "tokenizer.json"
    definition = json.loads(path.read_text(encoding="utf-8"))
    change(definition)
    path.write_text(json.dumps(definition), encoding="utf-8")
    return folder


def added_token(content: str, token: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": content, "special": True, **flags}


def make_file(
    tmp_path: Path, change: Callable[[list[str], list[int]], object], **keys: Any
) -> Path:
    """Makes a GGUF file of the same tokenizer, whose tokens and their kinds are changed."""
    from tiny_gguf import _vocabulary

    vocabulary = _vocabulary()
    tokens, types = vocabulary["tokenizer.ggml.tokens"], vocabulary["tokenizer.ggml.token_type"]
    change(tokens, types)
    keys = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    return write_gguf(tmp_path / "tiny.gguf", keys=keys)


def tokenizer_of(source: Path, tmp_path: Path) -> Tokenizer:
    tokenizer = export_model(source, tmp_path / "bundle", OPTIONS).tokenizer()
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("format", ["folder", "file"])
def test_an_added_token_without_a_row_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, format: str
) -> None:
    """Adds a token like Gemma 3's mark of an image, for which its text model has no row."""
    source = (
        make_folder(tmp_path, lambda file: file["added_tokens"].append(added_token(IMAGE, ROWS)))
        if format == "folder"
        else make_file(
            tmp_path, lambda tokens, types: (tokens.append(IMAGE), types.append(CONTROL))
        )
    )
    tokenizer = tokenizer_of(source, tmp_path)
    rows = ROWS if format == "folder" else tiny.VOCAB_SIZE
    assert f"names 1 tokens beyond the {rows} that the model has, '{IMAGE}'" in caplog.text
    ids = tokenizer.encode(TEXT, special=True)
    assert max(ids) < rows
    assert ids == tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.token_id(IMAGE) is None
    with Engine.open(tmp_path / "bundle", threads=1) as engine, engine.session() as session:
        session.prefill(engine.tokenizer.encode(TEXT, special=True))


def add_unmerged_piece(definition: dict[str, Any]) -> None:
    """Adds a piece that no text becomes, as vocabularies are filled up with."""
    definition["model"]["vocab"]["fill me up"] = ROWS + 3


def add_merge(definition: dict[str, Any]) -> None:
    definition["model"]["merges"].append(["Ġ", "Ġ"])
    definition["model"]["vocab"]["ĠĠ"] = ROWS


def move_character(definition: dict[str, Any]) -> None:
    vocab = definition["model"]["vocab"]
    vocab["Ġ"] = ROWS


def add_whole_word(definition: dict[str, Any]) -> None:
    definition["model"]["ignore_merges"] = True
    add_unmerged_piece(definition)


def test_a_piece_that_no_text_becomes_is_left_out(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(make_folder(tmp_path, add_unmerged_piece), tmp_path)
    assert tokenizer.decode(tokenizer.encode("fill me up")) == "fill me up"


@pytest.mark.parametrize("change", [add_merge, move_character, add_whole_word])
def test_a_piece_that_texts_are_made_of_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    with pytest.raises(CheckpointError, match=rf"has 1 pieces, '.*', beyond the {ROWS} tokens"):
        export_model(make_folder(tmp_path, change), tmp_path / "bundle", OPTIONS)
    assert not (tmp_path / "bundle").exists()


def test_a_start_without_a_row_is_left_out(tmp_path: Path) -> None:
    def begin(definition: dict[str, Any]) -> None:
        definition["added_tokens"].append(added_token("<bos>", ROWS))
        special = {"id": "<bos>", "ids": [ROWS], "tokens": ["<bos>"]}
        definition["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<bos>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"<bos>": special},
        }

    tokenizer = tokenizer_of(make_folder(tmp_path, begin, bos_token_id=ROWS), tmp_path)
    assert (tokenizer.bos_id, tokenizer.control.start) == (None, ())


# Ids


@pytest.mark.parametrize("token", [tiny.VOCAB_SIZE, 0xFFFFFFFF, -1])
@pytest.mark.parametrize("key", ["padding", "unknown", "bos", "eos", "eot", "fim_pre", "fim_pad"])
def test_an_id_in_a_file_that_no_token_has_is_absent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str, token: int
) -> None:
    source = make_file(tmp_path, lambda *_: None, **{f"{key}_token_id": token})
    tokenizer = tokenizer_of(source, tmp_path)
    assert caplog.text.count(f"{key}_token_id is {token}, and the file has 384 tokens") == 1
    control = tokenizer.control
    assert (control.bos, control.start) == (None, ())
    assert sorted(control.eos) == [0, 2]
    assert control.fim is not None


def test_ids_in_a_folder_that_no_token_has_are_absent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_folder(
        tmp_path,
        lambda _: None,
        bos_token_id=-1,
        eos_token_id=[ROWS, None, 7],
        pad_token_id=-1,
    )
    (source / "generation_config.json").write_text(
        '{"eos_token_id": [9, 262144], "pad_token_id": 99999, "bos_token_id": -1}'
    )
    bundle = export_model(source, tmp_path / "bundle", OPTIONS)
    assert bundle.manifest.eos_token_ids[:2] == (7, 9)
    assert max(bundle.manifest.eos_token_ids) < ROWS
    assert bundle.manifest.tokens["bos"] is None
    lines = [record.getMessage() for record in caplog.records]
    for words in ("bos_token_id names token -1", f"eos_token_id names token {ROWS}",
                  "eos_token_id names token 262144"):  # fmt: skip
        assert [line for line in lines if line.startswith(words)], words


# Texts that several tokens have


@pytest.mark.parametrize("kind", [NORMAL, CONTROL])
def test_a_text_that_two_tokens_have_is_the_first_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: int
) -> None:
    """Repeats texts as official files of Gemma 4 do; llama.cpp ends the program for such a file."""

    def repeat(tokens: list[str], types: list[int]) -> None:
        first = tokens.index("Ġthe") if kind == NORMAL else 1
        tokens[-1], tokens[-2] = tokens[first], tokens[first]
        types[-1] = types[-2] = kind

    tokenizer = tokenizer_of(make_file(tmp_path, repeat), tmp_path)
    text = " the" if kind == NORMAL else "<|im_start|>"
    twins = (382, 383)
    assert "has 2 tokens whose text an earlier token has too" in caplog.text
    (token,) = tokenizer.encode(text, special=True)
    assert token < min(twins)
    for twin in twins:
        assert tokenizer.token_bytes(twin) == text.encode()
        assert tokenizer.is_control(twin) == (kind == CONTROL)
        assert tokenizer.decode([twin], special=True) == text
    assert tokenizer.vocab_size == tiny.VOCAB_SIZE


def test_a_token_that_is_no_text_is_damage(tmp_path: Path) -> None:
    source = make_file(tmp_path, lambda *_: None)
    source.write_bytes(source.read_bytes().replace(" Ġthe".encode()[1:], b"\xc4\xa0th\xff", 1))
    with pytest.raises(CheckpointError, match=r"damaged: the token b'.*\\xff' is no UTF-8 text"):
        export_model(source, tmp_path / "bundle", OPTIONS)


def test_merges_of_a_text_that_another_replaced_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def replace(tokens: list[str], types: list[int]) -> None:
        tokens[tokens.index("Ġthe")] = "Ġth"

    tokenizer = tokenizer_of(make_file(tmp_path, replace), tmp_path)
    ids = tokenizer.encode(" the theory")
    assert tokenizer.decode(ids) == " the theory"
    assert tokenizer.token_id("Ġthe") is None
    assert "merges of texts that are none of its tokens: they are left out" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("change", ["row", "twin", "id"])
def test_kvq_run_answers_from_such_a_file(tmp_path: Path, change: str) -> None:
    def change_tokens(tokens: list[str], types: list[int]) -> None:
        if change == "row":
            tokens.append(IMAGE)
            types.append(CONTROL)
        if change == "twin":
            tokens[-1], types[-1] = tokens[-2], types[-2]

    keys = {"bos_token_id": 0xFFFFFFFF, "add_bos_token": True} if change == "id" else {}
    source = make_file(tmp_path, change_tokens, **keys)
    words = ("run", "-m", str(source), "--temp", "0", "-n", "4", "--json", TEXT)
    assert answer(kvq(*words, home=environment_in(tmp_path)))["new_tokens"] == 4
