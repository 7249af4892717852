"""`models/training/train.py`: what it computes faster than torch is what torch computes."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
RECIPES = Path(__file__).parents[2] / "models/training"


@pytest.fixture(scope="module")
def train() -> ModuleType:
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(RECIPES))
    # Compiling would take longer than all that is asked here, and changes no meaning.
    patch.setattr(torch, "compile", lambda found=None, **_: found or (lambda function: function))
    patch.delitem(sys.modules, "train", raising=False)
    import train as module

    patch.undo()
    sys.modules.pop("train", None)
    return module


@pytest.mark.parametrize("length", [40, 300])
def test_attention_and_its_gradients_are_torchs(train: ModuleType, length: int) -> None:
    torch.manual_seed(1)
    shapes = [(2, heads, length, 16) for heads in (4, 2, 2, 4)]
    *inputs, grad = (torch.randn(shape).to(torch.bfloat16) for shape in shapes)

    def found(attend) -> list[torch.Tensor]:  # the answer, then what flows back to each input
        leaves = [part.clone().requires_grad_() for part in inputs]
        answer = attend(*leaves)
        answer.backward(grad)
        return [answer.detach(), *(leaf.grad for leaf in leaves)]

    def torchs(query, key, value):
        exact = (query.float(), key.float(), value.float())
        return torch.nn.functional.scaled_dot_product_attention(
            *exact, is_causal=True, enable_gqa=True
        )

    def ours(query, key, value):
        answer, _ = train.blockwise_attention(None, query, key, value, scaling=16**-0.5)
        return answer.transpose(1, 2)

    for own, exact in zip(found(ours), found(torchs), strict=True):
        error = (own.float() - exact.float()).norm() / exact.float().norm()
        assert error < 0.01  # bfloat16 keeps eight bits


def test_an_average_lies_between_its_checkpoints(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for number, name in enumerate(("one", "other")):
        (tmp_path / name).mkdir()
        weights = {"model.norm.weight": torch.full((4,), 3.0 * number, dtype=torch.bfloat16)}
        save_file(weights, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(name)
    words = [str(tmp_path / name) for name in ("one", "other")]
    command = [sys.executable, str(RECIPES / "average.py"), *words, "--share", "0.5", "--out"]
    subprocess.run([*command, str(tmp_path / "mean")], check=True)
    mean = load_file(tmp_path / "mean/model.safetensors")["model.norm.weight"]
    assert mean.tolist() == [1.5] * 4
    assert (tmp_path / "mean/config.json").read_text() == "other"
