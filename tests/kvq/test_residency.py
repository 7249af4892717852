"""Experts of a file that is mapped: what of them is in memory, and that it changes no result."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq import native, residency
from kvq.errors import BackendError
from kvq.native_linear import experts
from kvq.reference_linear import BlockFormat, Bytes, Float, PanelFormat
from kvq.residency import Residency, most_in_memory
from mapped import pages_in_memory
from matrices import matrix

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=native.why_not()),
    pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="no /proc here"),
]
COLUMNS, WIDTH, COUNT, LAYERS = 512, 256, 12, 3
FORM = BlockFormat(bits=4, block=64)
GATE_UP, DOWN = (PanelFormat.of(FORM, shape) for shape in ((2 * WIDTH, COLUMNS), (COLUMNS, WIDTH)))
PARTS = [form.panels * form.panel_bytes for form in (GATE_UP, DOWN)]
ONE = most_in_memory(PARTS)
Layer = tuple[Bytes, Bytes]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The experts of all layers, one layer behind the other, as in a bundle."""
    distinct = [[matrix(form, seed)[1] for seed in range(3)] for form in (GATE_UP, DOWN)]
    path = tmp_path_factory.mktemp("experts") / "weights"
    with path.open("wb") as out:
        for layer in range(LAYERS):
            for kinds in distinct:
                for expert in range(COUNT):
                    out.write(kinds[(layer + expert) % 3].tobytes())
    return path


def mapped(file: Path) -> list[Layer]:
    """Views of every layer's gate_up and down."""
    found, offset = [], 0
    for _ in range(LAYERS):
        layer = []
        for form in (GATE_UP, DOWN):
            shape = (COUNT * form.panels, form.panel_bytes)
            layer.append(np.memmap(file, np.uint8, "r", offset, shape))
            offset += shape[0] * shape[1]
        found.append((layer[0], layer[1]))
    return found


def routes(rows: list[list[int]]) -> Float:
    """Logits [T, E] by which token t goes to the experts of `rows[t]`."""
    logits = np.zeros((len(rows), COUNT), np.float32)
    for row, chosen in zip(logits, rows, strict=True):
        row[chosen] = 9
    return logits


def fed(layer: Layer, rows: list[list[int]], **options: Any) -> Float:
    x = np.random.default_rng(4).standard_normal((len(rows), COLUMNS)).astype(np.float32)
    chosen = len(rows[0])
    stacks = (GATE_UP, layer[0]), (DOWN, layer[1])
    return experts(*stacks, x, routes(rows), chosen=chosen, normalised=True, **options)


def in_memory(layers: list[Layer]) -> int:
    return sum(pages_in_memory(part) for layer in layers for part in layer)


@pytest.mark.parametrize("held", [1, 5, 17])
def test_no_more_is_in_memory_than_the_budget_and_results_are_the_same(
    held: int, file: Path
) -> None:
    random = np.random.default_rng(held)
    layers, others = mapped(file), mapped(file)
    bound = Residency(held * ONE)
    for _ in range(12):
        for layer, other in zip(layers, others, strict=True):
            rows = [list(random.choice(COUNT, 3, replace=False)) for _ in range(2)]
            found = fed(layer, rows, residency=bound.handle)
            np.testing.assert_array_equal(found, fed(other, rows))
            told = bound.stats()
            assert in_memory(layers) <= told.held_bytes <= held * ONE
    assert in_memory(others) > 17 * ONE
    assert bound.stats().held_bytes > (held - 1) * ONE
    bound.close()


def test_a_pass_that_reads_every_expert_keeps_to_the_budget(file: Path) -> None:
    layers, bound = mapped(file), Residency(4 * ONE)
    for layer in layers:
        fed(layer, [[expert] for expert in range(COUNT)], residency=bound.handle)
    assert 0 < in_memory(layers) <= 4 * ONE
    assert bound.stats().chosen == bound.stats().fetched == COUNT * LAYERS


def test_experts_chosen_most_stay(file: Path) -> None:
    """Twice as many others pass through as there is room for."""
    layers, bound = mapped(file), Residency(8 * ONE)
    for turn in range(20):
        for layer in layers:
            fed(layer, [[0, 1 + turn % (COUNT - 1)]], residency=bound.handle)
    told = bound.stats()
    assert told.chosen == 2 * 20 * LAYERS
    # Of every layer the first expert is read once; of the others those of a turn before stay.
    assert told.fetched == LAYERS + 20 * LAYERS
    before = told.fetched
    for layer in layers:
        fed(layer, [[0]], residency=bound.handle)
    assert bound.stats().fetched == before
    assert bound.stats().hit_share == 1 - before / (2 * 20 * LAYERS + LAYERS)


def test_one_expert_may_take_more_than_the_budget(file: Path) -> None:
    layers, bound = mapped(file), Residency(1)
    for expert in (0, 5):
        fed(layers[0], [[expert]], residency=bound.handle)
        assert 0 < in_memory(layers) <= bound.stats().held_bytes <= ONE


def test_weights_that_are_no_view_of_a_file_are_refused_and_kept(file: Path) -> None:
    copied = tuple(np.array(part) for part in mapped(file)[0])
    bound = Residency(ONE)
    with pytest.raises(BackendError, match="no views of a file"):
        fed((copied[0], copied[1]), [[0], [1], [2]], residency=bound.handle)
    np.testing.assert_array_equal(copied[1], mapped(file)[0][1])


def test_what_is_closed_bounds_nothing(file: Path) -> None:
    bound = Residency(ONE)
    bound.close()
    with pytest.raises(BackendError, match="is closed"):
        fed(mapped(file)[0], [[0]], residency=bound.handle)
    with pytest.raises(BackendError, match=r"open it again"):
        bound.stats()


def test_a_system_that_cannot_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        @staticmethod
        def kvq_residency_open(budget_bytes: int, handle: object) -> int:
            return 9

    monkeypatch.setattr(residency.native, "library", Elsewhere)
    with pytest.raises(BackendError, match="weights_budget needs Linux"):
        Residency(1 << 20)


def test_before_anything_is_read_nothing_was_missed() -> None:
    told = Residency(1 << 20).stats()
    assert (told.budget_bytes, told.held_bytes, told.hit_share) == (1 << 20, 0, 1)
