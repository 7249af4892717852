"""`--weights-budget`: the memory of a model's experts; answers stay the same."""

import json
import re
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest

from kvq import native_library
from kvq.errors import BackendError, UsageError
from kvq_apps.cli import main
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.write.random_bundle import random_bundle
from kvq_models.registry import family_for
from kvq_runtime.backends import bounded_experts
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.manifest import DATA_FILE
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from logits import prompt
from mapped import bytes_in_memory
from shelf import Shelf

pytestmark = [
    pytest.mark.skipif(not native_library.available(), reason=native_library.why_not()),
    pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="no /proc here"),
]
SHAPE = {
    "model_type": "qwen3_moe",
    "vocab_size": 384,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "norm_topk_prob": True,
    "bos_token_id": None,
    "eos_token_id": 0,
}
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def path(shelf: Shelf) -> Path:
    def make(path: Path) -> None:
        config = family_for(SHAPE).config(SHAPE)
        options = ExportOptions(quality=False, weights=WeightFormat())
        random_bundle(config, path, options=options)

    return shelf.once("experts", SHAPE, make)


def answered(engine: Engine, text: list[int]) -> list[int]:
    with engine.session(context_tokens=256) as session:
        session.prefill(text)
        return [s.token for s in session.generate(24, sampling=GREEDY, stop_ids=[])]


def experts_in_memory(bundle: Bundle) -> int:
    """Returns the bytes in memory of pages with nothing but experts, wherever they are mapped."""
    places = [
        (
            -(-tensor.offset // PAGESIZE) * PAGESIZE,
            (tensor.offset + tensor.length) // PAGESIZE * PAGESIZE,
        )
        for value in bundle.read_graph().graph.initializers.values()
        if re.search(r"experts_(gate_up|down)\.panels", value.name or "")
        for tensor in [value.const_value]
    ]
    assert len(places) == 4
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if not line.endswith(f"{bundle.path.name}/{DATA_FILE}"):
            continue
        bounds, _, offset = line.split()[:3]
        begin, end = (int(bound, 16) for bound in bounds.split("-"))
        shift = begin - int(offset, 16)
        for first, last in places:
            inside = max(begin, first + shift), min(end, last + shift)
            if inside[0] < inside[1]:
                total += bytes_in_memory(*inside)
    return total


@pytest.mark.parametrize("count", [1, 7])
def test_memory_keeps_to_the_budget_and_answers_are_the_same(path: Path, count: int) -> None:
    text = prompt(40)
    with Engine.open(path, threads=2) as engine:
        expected = answered(engine, text)
        assert engine.resident() is None
        bundle = engine.files
        assert isinstance(bundle, Bundle)
        assert bundle.experts is not None
        assert experts_in_memory(bundle) > 20 * bundle.experts.largest
    budget = count * bundle.experts.largest
    with Engine.open(path, threads=2, weights_budget=budget) as engine:
        assert answered(engine, text) == expected
        resident = engine.resident()
        assert resident is not None
        assert resident.budget_bytes == budget
        assert budget - bundle.experts.largest < resident.held_bytes <= budget
        assert 0 < experts_in_memory(bundle) <= resident.held_bytes
        assert 0 <= resident.hit_share < 1
        assert resident.chosen >= 24 * 2 * 2


def test_two_models_have_a_budget_each(path: Path) -> None:
    experts = Bundle.open(path).experts
    assert experts is not None
    with (
        Engine.open(path, weights_budget=2 * experts.largest) as small,
        Engine.open(path, weights_budget=experts.stored * 2) as large,
    ):
        assert answered(small, prompt(20)) == answered(large, prompt(20))
        resident = small.resident(), large.resident()
        assert resident[0] is not None and resident[1] is not None  # noqa: PT018
        assert resident[0].held_bytes <= 2 * experts.largest < resident[1].held_bytes
        assert resident[0].fetched > resident[1].fetched


def test_bytes_of_experts_are_those_of_their_matrices(path: Path) -> None:
    bundle = Bundle.open(path)
    forms = [bundle.form(f"layers.0.{name}") for name in ("experts_gate_up", "experts_down")]
    layer = sum(form.panels * form.panel_bytes for form in forms)
    experts = bundle.experts
    assert experts is not None
    assert (experts.stored, experts.chosen) == (2 * layer, 2 * layer // 8)
    assert layer / 16 < experts.largest < layer / 16 + 4 * 65536


def test_what_cannot_be_is_refused_by_name(path: Path, shelf: Shelf) -> None:
    bundle = Bundle.open(path)
    with pytest.raises(BackendError, match=r"weights_budget.* cannot hold one expert of .* can, "):
        bounded_experts(bundle, 1000)
    with pytest.raises(BackendError, match="cannot hold one expert"):
        Engine.open(path, weights_budget="1000")
    with pytest.raises(BackendError, match="has none that are mapped: every token reads all"):
        Engine.open(shelf.bundle(), weights_budget="1GiB")
    with pytest.raises(BackendError, match="is for bundles on the onnx backend"):
        Engine.open(path, backend="float", weights_budget="1GiB")
    with pytest.raises(UsageError, match="weights_budget '12tok' is not possible: give bytes"):
        Engine.open(path, weights_budget="12tok")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_commands_tell_what_experts_take(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experts = Bundle.open(path).experts
    assert experts is not None
    whole = shown(capsys, "inspect", str(path), "--estimate")
    assert whole["experts"] == experts.to_json()
    part = shown(capsys, "inspect", str(path), "--estimate", "--weights-budget", "1MiB")
    less = whole["estimate"]["weight_bytes"] - part["estimate"]["weight_bytes"]
    assert less == experts.stored - (1 << 20)
    assert main(["inspect", str(path), "-v"]) == 0
    assert "--weights-budget from" in capsys.readouterr().out
    assert shown(capsys, "doctor", "-m", str(path))["model"]["experts"] == experts.to_json()


@pytest.mark.parametrize("command", ["run", "chat", "serve", "complete", "lsp", "bench"])
def test_commands_take_the_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help-all"])
    assert "--weights-budget SIZE" in capsys.readouterr().out


def test_a_wrong_size_is_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(path), "--estimate", "--weights-budget", "much"]) == 2
    assert "--weights-budget 'much' is not possible: give bytes" in capsys.readouterr().err
