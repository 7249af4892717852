"""Experts of a file that is mapped: what of them is in memory, and that it changes no result."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq import native_library, residency
from kvq.errors import BackendError
from kvq.reference.linear import BlockFormat, Bytes, Float, PanelFormat
from kvq.residency import Residency, most_in_memory
from mapped import pages_in_memory
from matrices import matrix
from native_calls import experts

pytestmark = [
    pytest.mark.skipif(not native_library.available(), reason=native_library.why_not()),
    pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="no /proc here"),
]
COLUMNS, WIDTH, COUNT, LAYERS = 512, 256, 12, 3
FORM = BlockFormat(bits=4, block=64)
GATE_UP, DOWN = (PanelFormat.of(FORM, shape) for shape in ((2 * WIDTH, COLUMNS), (COLUMNS, WIDTH)))
PARTS = [form.panels * form.panel_bytes for form in (GATE_UP, DOWN)]
LEAST_BYTES = most_in_memory(PARTS)
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
    experts_of_layers, offset = [], 0
    for _ in range(LAYERS):
        layer = []
        for form in (GATE_UP, DOWN):
            shape = (COUNT * form.panels, form.panel_bytes)
            layer.append(np.memmap(file, np.uint8, "r", offset, shape))
            offset += shape[0] * shape[1]
        experts_of_layers.append((layer[0], layer[1]))
    return experts_of_layers


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


@pytest.mark.parametrize("count", [1, 5, 17])
def test_no_more_is_in_memory_than_the_budget_and_results_are_the_same(
    count: int, file: Path
) -> None:
    random = np.random.default_rng(count)
    layers, unbounded = mapped(file), mapped(file)
    bound = Residency(count * LEAST_BYTES)
    for _ in range(12):
        for layer, other in zip(layers, unbounded, strict=True):
            rows = [list(random.choice(COUNT, 3, replace=False)) for _ in range(2)]
            actual = fed(layer, rows, residency=bound.handle)
            np.testing.assert_array_equal(actual, fed(other, rows))
            stats = bound.stats()
            assert in_memory(layers) <= stats.held_bytes <= count * LEAST_BYTES
    assert in_memory(unbounded) > 17 * LEAST_BYTES
    assert bound.stats().held_bytes > (count - 1) * LEAST_BYTES
    bound.close()


def test_a_pass_that_reads_every_expert_keeps_to_the_budget(file: Path) -> None:
    layers, bound = mapped(file), Residency(4 * LEAST_BYTES)
    for layer in layers:
        fed(layer, [[expert] for expert in range(COUNT)], residency=bound.handle)
    assert 0 < in_memory(layers) <= 4 * LEAST_BYTES
    assert bound.stats().chosen == bound.stats().fetched == COUNT * LAYERS


def test_experts_chosen_most_stay(file: Path) -> None:
    """Twice as many others pass through as there is room for."""
    layers, bound = mapped(file), Residency(8 * LEAST_BYTES)
    for turn in range(20):
        for layer in layers:
            fed(layer, [[0, 1 + turn % (COUNT - 1)]], residency=bound.handle)
    stats = bound.stats()
    assert stats.chosen == 2 * 20 * LAYERS
    # Of every layer the first expert is read once; of the others those of a turn before stay.
    assert stats.fetched == LAYERS + 20 * LAYERS
    before = stats.fetched
    for layer in layers:
        fed(layer, [[0]], residency=bound.handle)
    assert bound.stats().fetched == before
    assert bound.stats().hit_share == 1 - before / (2 * 20 * LAYERS + LAYERS)


def test_one_expert_may_take_more_than_the_budget(file: Path) -> None:
    layers, bound = mapped(file), Residency(1)
    for expert in (0, 5):
        fed(layers[0], [[expert]], residency=bound.handle)
        assert 0 < in_memory(layers) <= bound.stats().held_bytes <= LEAST_BYTES


def test_weights_that_are_no_view_of_a_file_are_refused_and_kept(file: Path) -> None:
    copied = tuple(np.array(part) for part in mapped(file)[0])
    bound = Residency(LEAST_BYTES)
    with pytest.raises(BackendError, match="no views of a file"):
        fed((copied[0], copied[1]), [[0], [1], [2]], residency=bound.handle)
    np.testing.assert_array_equal(copied[1], mapped(file)[0][1])


@pytest.mark.parametrize("first", [2, COUNT])
def test_a_layer_comes_with_all_its_experts(first: int, file: Path) -> None:
    """What lies where another number of experts lay is refused before anything is counted."""
    layer, bound = mapped(file)[0], Residency(4 * LEAST_BYTES)
    x = np.ones((1, COLUMNS), np.float32)

    def choose(count: int) -> None:
        logits = np.arange(count, dtype=np.float32)[None]
        stacks = (GATE_UP, layer[0]), (DOWN, layer[1])
        experts(*stacks, x, logits, chosen=2, normalised=True, residency=bound.handle)

    choose(first)
    with pytest.raises(BackendError, match="do not fit"):
        choose(COUNT + 2 - first)
    choose(first)
    assert bound.stats().chosen == 4


def test_what_is_closed_bounds_nothing(file: Path) -> None:
    bound = Residency(LEAST_BYTES)
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

    monkeypatch.setattr(residency.native_library, "library", Elsewhere)
    with pytest.raises(BackendError, match="weights_budget needs Linux"):
        Residency(1 << 20)


def test_before_anything_is_read_nothing_was_missed() -> None:
    stats = Residency(1 << 20).stats()
    assert (stats.budget_bytes, stats.held_bytes, stats.hit_share) == (1 << 20, 0, 1)
