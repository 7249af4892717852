"""Mixtures of experts: where tokens go, and native products against the definition."""

import numpy as np
import pytest

from kvq import native_library
from kvq.errors import BackendError
from kvq.native_linear import weight_bytes_read
from kvq.reference.experts import added, by_expert, clamped_swiglu, routed
from kvq.reference.experts import experts as expected_experts
from kvq.reference.linear import BlockFormat, Bytes, Float, Grid, PanelFormat
from matrices import activations, matrix
from native_calls import experts, select_isa
from tolerances import PRODUCT

pytestmark = pytest.mark.usefixtures("kernels_restored")
needs_native = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())
KERNELS = native_library.isas() if native_library.available() else []
COLUMNS, WIDTH, COUNT = 96, 40, 5
# Inputs times this reach the middle of an activation's curve.
SMALL = np.float32(0.02)
Stack = tuple[PanelFormat, Bytes]


def stack(shape: tuple[int, int], form: BlockFormat, seed: int) -> Stack:
    panel_format = PanelFormat.of(form, shape)
    parts = [matrix(panel_format, seed=seed + expert)[1] for expert in range(COUNT)]
    return panel_format, np.concatenate(parts)


def stacks(bits: int = 4, grid: Grid = Grid.ZERO_POINT) -> tuple[Stack, Stack]:
    form = BlockFormat(bits=bits, block=32, grid=grid)
    return stack((2 * WIDTH, COLUMNS), form, 10), stack((COLUMNS, WIDTH), form, 50)


def logits(rows: int, seed: int = 3) -> Float:
    return np.random.default_rng(seed).standard_normal((rows, COUNT)).astype(np.float32)


def test_shares_are_a_softmax_of_those_with_the_largest() -> None:
    logits = np.log(np.array([[1, 4, 2, 3], [2, 2, 1, 2]], np.float32))
    chosen, shares = routed(logits, 2, normalised=False)
    np.testing.assert_array_equal(chosen, [[1, 3], [0, 1]])
    np.testing.assert_allclose(shares, [[0.4, 0.3], [2 / 7, 2 / 7]], rtol=1e-6)
    _, shares = routed(logits, 2, normalised=True)
    np.testing.assert_allclose(shares, [[4 / 7, 3 / 7], [0.5, 0.5]], rtol=1e-6)


def test_every_token_is_the_sum_of_what_its_experts_found() -> None:
    chosen = np.array([[2, 0], [1, 2], [2, 1]])
    order, counts = by_expert(chosen, 4)
    np.testing.assert_array_equal(counts, [1, 2, 3, 0])
    np.testing.assert_array_equal(order // 2, [0, 1, 2, 0, 1, 2])
    outputs = np.arange(6, dtype=np.float32)[:, None]
    shares = np.array([[1, 10], [100, 1000], [1e4, 1e5]], np.float32)
    np.testing.assert_array_equal(added(outputs, order, shares)[:, 0], [3, 4100, 250000])


@needs_native
@pytest.mark.parametrize("isa", KERNELS)
@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("bits", "grid"), [(4, Grid.ZERO_POINT), (8, Grid.SYMMETRIC)])
def test_native_is_the_definition(
    isa: str, tokens: int, normalised: bool, bits: int, grid: Grid
) -> None:
    select_isa(isa)
    gate_up, down = stacks(bits, grid)
    x, routes = SMALL * activations(tokens, COLUMNS), logits(tokens)
    for view in ("full", "hi"):
        actual = experts(gate_up, down, x, routes, chosen=2, normalised=normalised, view=view)
        expected = expected_experts(
            gate_up, down, x, routes, chosen=2, normalised=normalised, view=view
        )
        # What the activation gives is rounded again: a value on the edge may fall either way.
        size = np.abs(expected).max()
        assert np.abs(actual - expected).max() <= 2e-2 * size
        assert np.quantile(np.abs(actual - expected), 0.9) <= PRODUCT.top * size


def test_a_bias_of_choice_is_no_part_of_a_share() -> None:
    logits = np.log(np.array([[1, 3, 1 / 3]], np.float32))  # sigmoids 0.5, 0.75, 0.25
    bias = np.array([0.1, -0.4, 0.3], np.float32)
    options = {"scoring": "sigmoid", "choice_bias": bias}
    chosen, shares = routed(logits, 2, normalised=False, **options)
    np.testing.assert_array_equal(chosen, [[0, 2]])
    np.testing.assert_allclose(shares, [[0.5, 0.25]], rtol=1e-6)
    _, shares = routed(logits, 2, normalised=True, **options)
    np.testing.assert_allclose(shares, [[2 / 3, 1 / 3]], rtol=1e-5)
    chosen, _ = routed(logits, 2, normalised=True, scoring="sigmoid")
    np.testing.assert_array_equal(chosen, [[1, 0]])


def test_a_clamped_gate_ends_at_its_limits() -> None:
    gate = np.array([0, 1, 7, 90, -90, 1, 1], np.float32)
    up = np.array([5, 0.5, 1, 1, 1, 9, -9], np.float32)
    steep = 1 / (1 + np.exp(-1.702 * np.array([1.0, 7.0])))
    expected = [0, 1.5 * steep[0], 14 * steep[1], 14 * steep[1], 0, 8 * steep[0], -6 * steep[0]]
    np.testing.assert_allclose(clamped_swiglu(gate, up), expected, rtol=1e-5, atol=1e-6)
    assert np.isnan(clamped_swiglu(np.array([np.nan, 1]), np.array([1, np.nan]))).all()


@needs_native
@pytest.mark.parametrize("isa", KERNELS)
@pytest.mark.parametrize("tokens", [1, 33])
def test_biases_clamps_and_sigmoids_are_the_definitions(isa: str, tokens: int) -> None:
    select_isa(isa)
    gate_up, down = stacks(8, Grid.SYMMETRIC)
    random = np.random.default_rng(tokens)
    x, routes = SMALL * activations(tokens, COLUMNS), logits(tokens)
    options = {
        "chosen": 2,
        "normalised": True,
        "activation": "clamped_swiglu",
        "scoring": "sigmoid",
        "gate_up_bias": 4 * random.standard_normal((COUNT, 2 * WIDTH)).astype(np.float32),
        "down_bias": 40 * random.standard_normal((COUNT, COLUMNS)).astype(np.float32),
        "choice_bias": random.standard_normal(COUNT).astype(np.float32),
    }
    actual = experts(gate_up, down, x, routes, **options)
    expected = expected_experts(gate_up, down, x, routes, **options)
    size = np.abs(expected).max()
    assert np.abs(actual - expected).max() <= 2e-2 * size
    assert np.quantile(np.abs(actual - expected), 0.9) <= PRODUCT.top * size
    for name in ("gate_up_bias", "down_bias", "choice_bias", "activation", "scoring"):
        left_out = {key: value for key, value in options.items() if key != name}
        left_out |= {"choice_bias": None} if name == "scoring" else {}
        without = expected_experts(gate_up, down, x, routes, **left_out)
        assert np.abs(actual - without).max() > 0.1 * size, name


@needs_native
def test_a_clamp_hides_nothing_that_is_not_a_number() -> None:
    gate_up, down = stacks(8, Grid.SYMMETRIC)
    x, routes = activations(3, COLUMNS), logits(3)
    bias = np.zeros((COUNT, 2 * WIDTH), np.float32)
    chosen, _ = routed(routes, 1, normalised=True)
    bias[chosen[1, 0], 3] = np.nan
    options = {"chosen": 1, "normalised": True, "activation": "clamped_swiglu"}
    actual = experts(gate_up, down, x, routes, gate_up_bias=bias, **options)
    lost = chosen[:, 0] == chosen[1, 0]
    np.testing.assert_array_equal(np.isnan(actual).any(axis=1), lost)


@needs_native
def test_a_token_is_answered_alike_whoever_is_beside_it() -> None:
    gate_up, down = stacks()
    x, routes = activations(20, COLUMNS), logits(20)
    residual = activations(20, COLUMNS, seed=9)
    options = {"chosen": 3, "normalised": True, "activation": "gelu_tanh"}
    whole = experts(gate_up, down, x, routes, residual=residual, **options)
    for t in range(20):
        alone = experts(
            gate_up, down, x[t : t + 1], routes[t : t + 1], residual=residual[t : t + 1], **options
        )
        np.testing.assert_array_equal(alone, whole[t : t + 1])
    without = experts(gate_up, down, x, routes, **options)
    np.testing.assert_array_equal(without + residual, whole)


@needs_native
def test_only_experts_that_were_chosen_are_read() -> None:
    gate_up, down = stacks()
    expert_bytes = sum(form.panels * form.panel_bytes for form, _ in (gate_up, down))
    routes = np.zeros((4, COUNT), np.float32)
    routes[:2, [1, 4]] = 5
    routes[2:, [4, 2]] = 5
    before = weight_bytes_read()
    experts(gate_up, down, activations(4, COLUMNS), routes, chosen=2, normalised=True)
    assert weight_bytes_read() - before == 3 * expert_bytes


@needs_native
def test_what_is_not_finite_stays_with_its_token() -> None:
    gate_up, down = stacks()
    x, routes = activations(3, COLUMNS), logits(3)
    expected = experts(gate_up, down, x, routes, chosen=2, normalised=True)
    routes[1, 2] = np.nan
    actual = experts(gate_up, down, x, routes, chosen=2, normalised=True)
    assert np.isnan(actual[1]).all()
    np.testing.assert_array_equal(actual[[0, 2]], expected[[0, 2]])


@needs_native
def test_experts_that_cannot_be_are_refused() -> None:
    gate_up, down = stacks()
    x, routes = activations(2, COLUMNS), logits(2)
    odd = PanelFormat.of(gate_up[0].format, (2 * WIDTH - 8, COLUMNS))
    narrow = PanelFormat.of(down[0].format, (COLUMNS, WIDTH - 8))
    for first, second, chosen in (
        ((odd, gate_up[1]), down, 2),
        (gate_up, (narrow, down[1]), 2),
        (gate_up, down, 0),
        (gate_up, down, COUNT + 1),
    ):
        with pytest.raises(BackendError):
            experts(first, second, x, routes, chosen=chosen, normalised=True)
    for wrong in ({"activation": ""}, {"choice_bias": np.zeros(COUNT, np.float32)}):
        with pytest.raises(BackendError):
            experts(gate_up, down, x, routes, chosen=2, normalised=True, **wrong)
