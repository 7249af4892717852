"""Evidence made by hand, for the tests of policies; and what their actions come to."""

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.formats import page_bytes
from kvq.policies import Constants, Evidence, ObservedAttention, policy_named

DIM = 64
PAGE = 64

Widths = NDArray[np.uint8]


def all_at(
    k_bits: int, v_bits: int, *, layers: int = 2, heads: int = 2, columns: int = 3
) -> Widths:
    """Widths [L, Hk, C, 2] of as many pages."""
    return np.full((layers, heads, columns, 2), (k_bits, v_bits), np.uint8)


def evidence(
    widths: Widths,
    *,
    windows: tuple[int, ...] = (),
    tokens: int | None = None,
    weight_norms: NDArray[np.float64] | None = None,
    retrieval: NDArray[np.float32] | None = None,
    **arrays: Any,
) -> Evidence:
    """Columns one page apart from position 4 on; other arrays by field name, 0 unless given.

    An array is broadcast to the shape its field has, so a page's channels may be one number.
    """
    layers, heads, columns = widths.shape[:3]
    facts = np.zeros((columns, 4), np.int64)
    facts[:, 0] = facts[:, 2] = 4 + PAGE * np.arange(columns)
    facts[:, 3] = -1

    def filled(name: str) -> NDArray[np.float32]:
        sizes = {"query": (DIM,), "outpu": (DIM,), "key_m": (columns, DIM), "key_r": (columns, DIM)}
        sizes |= {"value_min": (columns, PAGE), "value_range": (columns, PAGE)}
        last = sizes.get(name, sizes.get(name[:5], (columns,)))
        values = np.asarray(arrays.get(name, 0), np.float32)
        return np.broadcast_to(values, (layers, heads, *last)).copy()

    names = {field.name for kind in (ObservedAttention, Constants) for field in fields(kind)}
    assert set(arrays) <= names | {"key_squares"}, "no such evidence"
    constants = {field.name: filled(field.name) for field in fields(Constants)}
    squares = np.broadcast_to(
        np.asarray(arrays.get("key_squares", 0), np.float32), (layers, heads, columns, PAGE)
    )
    return Evidence(
        facts=facts,
        widths=widths,
        windows=np.array(windows or [0] * layers, np.int64),
        tokens=4 + PAGE * columns + PAGE if tokens is None else tokens,
        head_dim=DIM,
        attention=ObservedAttention(
            **{field.name: filled(field.name) for field in fields(ObservedAttention)}
        ),
        constants=lambda layer: Constants(**{name: x[layer] for name, x in constants.items()}),
        key_squares=lambda layer: squares[layer],
        weight_norms=None if weight_norms is None else lambda: weight_norms,
        retrieval=retrieval,
    )


def random_evidence(
    rng: np.random.Generator, widths: Widths, *, windows: tuple[int, ...] = ()
) -> Evidence:
    """Any numbers that could occur, zeros and ties among them; 0 where a page is evicted."""
    layers, heads, columns = widths.shape[:3]
    present = widths[..., 0] > 0

    def some(*shape: int) -> NDArray[np.float32]:
        numbers = rng.lognormal(0, 2, shape) * (rng.random(shape) > 0.2)
        return np.where(rng.random(shape) < 0.3, np.rint(numbers), numbers).astype(np.float32)

    arrays: dict[str, NDArray[np.float32]] = {}
    for field in fields(ObservedAttention):
        of_head = field.name.startswith(("query", "output"))
        arrays[field.name] = some(layers, heads, DIM) if of_head else some(*present.shape) * present
    arrays["query_square"] = arrays["query_square"] + arrays["query_mean"] ** 2
    for field in fields(Constants):
        last = DIM if field.name.startswith("key") else PAGE
        arrays[field.name] = some(*present.shape, last) * present[..., None]
    arrays["key_squares"] = some(*present.shape, PAGE) * present[..., None]
    return evidence(
        widths,
        windows=windows,
        tokens=4 + PAGE * 2 * columns,
        weight_norms=rng.random((layers, 2)),
        retrieval=rng.random((layers, heads), np.float32),
        **arrays,
    )


def after(widths: Widths, actions: list[list[int]]) -> Widths:
    """Widths after the actions, which may only lower them and name a page once."""
    left = widths.copy()
    named = [tuple(action[:3]) for action in actions]
    assert len(set(named)) == len(named), "a page was named twice"
    for layer, head, column, k_bits, v_bits in actions:
        page_widths = left[layer, head, column]
        assert page_widths.any(), "an evicted page was named"
        assert (k_bits, v_bits) != tuple(page_widths), "an action does nothing"
        assert k_bits <= page_widths[0]
        assert v_bits <= page_widths[1]
        assert (k_bits, v_bits) == (0, 0) or {k_bits, v_bits} <= {8, 6, 4, 2}
        left[layer, head, column] = k_bits, v_bits
    return left


def bytes_of(widths: Widths) -> int:
    """Bytes of all pages with these widths."""
    pairs = widths.reshape(-1, 2).tolist()
    return sum(page_bytes(DIM, k_bits, v_bits) for k_bits, v_bits in pairs if k_bits)


def free_space(
    policy: str, facts: Evidence, bytes_short: int, columns_short: int = 0
) -> list[list[int]]:
    """What the policy of that name and options does, as lists."""
    return policy_named(policy).free_space(facts, bytes_short, columns_short).actions.tolist()


def one_head(*pages: float) -> NDArray[np.float64]:
    """Evidence [1, 1, C, 1]: one number per page for all its channels or tokens."""
    return np.array(pages)[None, None, :, None]
