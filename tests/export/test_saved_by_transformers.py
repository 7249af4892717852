"""What `save_pretrained` of transformers writes, tied and not, in one file or several."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvq.errors import CheckpointError
from kvq_export.checkpoint import Checkpoint
from kvq_export.config import ExportOptions
from kvq_export.export import export_model
from kvq_models.registry import read_checkpoint
from kvq_runtime.engine import Engine
from tiny import CASES, make_checkpoint, make_llama_checkpoint, read_safetensors, write_safetensors

FAMILIES = ("llama", "mistral-window", "qwen2", "qwen3", "phi3", "gemma3")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("shard_size", ["1GB", "200KB"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("case", FAMILIES)
def test_every_family_is_complete(case: str, tied: bool, shard_size: str, tmp_path: Path) -> None:
    assert case in CASES
    folder = make_checkpoint(case, tmp_path, shard_size=shard_size, tie_word_embeddings=tied)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard_size != "1GB")
    family, config, _ = read_checkpoint(folder)
    assert config.tied_head == tied
    checkpoint, sources = Checkpoint.open(folder), family.weights(config)
    checkpoint.check(sources)
    stored = {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in read_safetensors(file).items()
    }
    assert (HEAD in stored) == (not tied)
    np.testing.assert_array_equal(checkpoint.read(sources["embed"]), stored[EMBEDDING])


def keep_only_the_head(folder: Path, tied: bool) -> None:
    file = folder / "model.safetensors"
    tensors = read_safetensors(file)
    tensors[HEAD] = tensors.pop(EMBEDDING)
    write_safetensors(file, tensors)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": tied}))


def test_a_tied_matrix_may_have_either_name(tmp_path: Path) -> None:
    ids, logits = [5, 6, 7, 8], []
    for name in ("both", "head"):
        source = make_llama_checkpoint(tmp_path / name, tie_word_embeddings=True)
        if name == "head":
            keep_only_the_head(source, tied=True)
        bundle = export_model(source, tmp_path / f"{name}-bundle", ExportOptions(quality=False))
        with Engine.open(bundle.path, threads=1) as engine, engine.session() as session:
            logits.append(np.concatenate([*session.logits(ids)]))
    np.testing.assert_array_equal(*logits)


def test_a_head_is_no_embedding_where_they_are_not_tied(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", tie_word_embeddings=True)
    keep_only_the_head(source, tied=False)
    with pytest.raises(CheckpointError, match=r"'model\.embed_tokens\.weight' is missing.*not"):
        export_model(source, tmp_path / "bundle", ExportOptions(quality=False))
