"""`models/training`: a run goes on exactly where it ended; holes weigh more; weights average."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "models/training"
TOKENIZER = ROOT / "models/kvq_embedded/nano"
SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "rope_theta": 1e5, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
STEPS = {
    "steps": 4, "long_steps": 1, "tokens_per_step": 64, "length": 16, "long_length": 32, "seed": 7,
}  # fmt: skip


@pytest.fixture(scope="module")
def train() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPES))
        # Compiling would take longer than all that is asked here, and changes no meaning.
        patch.setattr(torch, "compile", lambda function: function)
        patch.delitem(sys.modules, "train", raising=False)
        import train as module

        for name in ("train", "vocabulary"):
            sys.modules.pop(name, None)
    return module


def test_a_run_that_was_interrupted_ends_with_the_same_weights(
    train: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    numbers = np.random.default_rng(0)
    for name, length in (("train.bin", 16), ("long.bin", 32)):
        tokens = numbers.integers(0, 16_000, 20 * length).astype(np.uint16)
        tokens.tofile(tmp_path / name)
    recipe = tmp_path / "tiny.json"
    recipe.write_text(json.dumps({"name": "tiny", "model": SHAPE, "train": STEPS}))
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(train, "SAVE_SECONDS", 0)

    def run(out: str, *more: str) -> dict[str, torch.Tensor]:
        words = ["train", str(recipe), str(tmp_path), str(TOKENIZER), "--out", str(tmp_path / out)]
        monkeypatch.setattr(sys, "argv", [*words, "--threads", "1", *more])
        train.main()
        return load_file(tmp_path / out / "model/model.safetensors")

    whole, step = run("whole"), train.Trainer.train_step

    def ends_at_the_third(trainer, *batch):
        if trainer.step == 2:
            raise KeyboardInterrupt
        return step(trainer, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "train_step", ends_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            run("resumed")
    resumed = run("resumed")
    assert all(torch.equal(resumed[name], part) for name, part in whole.items())
    rows = map(json.loads, (tmp_path / "resumed/log.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    # A run that starts from a model counts that model's tokens; a teacher gives other weights.
    taught = run("taught", "--start", str(tmp_path / "whole/model"), "--teacher", str(TOKENIZER))
    assert not all(torch.equal(taught[name], part) for name, part in whole.items())
    about = json.loads((tmp_path / "taught/model/training.json").read_text())
    assert (about["tokens"], about["earlier"]["tokens"]) == (512, 256)


def test_what_fills_a_hole_weighs_more_where_the_hole_is_known(train: ModuleType) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    prefix, suffix, middle, end = (
        tokenizer.token_to_id(f"<|{name}|>")
        for name in ("fim_prefix", "fim_suffix", "fim_middle", "endoftext")
    )
    batch = torch.tensor([
        [prefix, 1, suffix, 2, middle, 3, 4, end, 5, 6],
        [prefix, suffix, 2, middle, 1, 3, 4, end, 5, 6],
    ])  # fmt: skip
    first, second = train.target_weights(batch, tokenizer, 3.0).tolist()
    assert first == [1, 1, 1, 1, 3, 3, 3, 1, 1]
    assert second == [1] * 9


def test_an_average_lies_between_its_checkpoints(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    names = ("first", "second")
    for number, name in enumerate(names):
        (tmp_path / name).mkdir()
        weights = {"model.norm.weight": torch.full((4,), 3.0 * number, dtype=torch.bfloat16)}
        save_file(weights, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(name)
    words = [str(tmp_path / name) for name in names]
    command = [sys.executable, str(RECIPES / "average.py"), *words, "--share", "0.5", "--out"]
    subprocess.run([*command, str(tmp_path / "mean")], check=True)
    mean = load_file(tmp_path / "mean/model.safetensors")["model.norm.weight"]
    assert mean.tolist() == [1.5] * 4
    assert (tmp_path / "mean/config.json").read_text() == "second"
