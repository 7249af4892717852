"""Products, embeddings and experts at random, of every format, and what is set for all of them.

Calls that make sense are compared with numpy's reference. Of those that do not, one number is
wrong; buffers stay as large as the library may read before it has looked at that number.
"""

import ctypes
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abi_calls import BAD_ARGUMENT, CLOSED, NOT_MAPPED, NUMBERS, OK, Draw, Library
from kvq import abi, native, native_linear
from kvq.formats import grid_bytes
from kvq.reference import linear as reference_linear
from kvq.reference.experts import SCORINGS
from kvq.reference.experts import experts as expected_experts
from kvq.reference.linear import Float, PanelFormat
from matrices import FORMATS, matrix
from native_calls import NativeEmbed, NativeExperts
from pairs import some_feedback
from tolerances import PRODUCT

LEAST, MOST = -(2**31), 2**31 - 1
NO_COUNT = (-1, LEAST)
NO_SIDE = (0, -1, LEAST, MOST, MOST - 15, 1 << 30, 1 << 29)
WILD_FORMATS = {
    "bits": (0, 1, 7, 9, 16, MOST), "block": (0, 8, 33, LEAST), "grid": (-1, 6, MOST),
}  # fmt: skip
SIDES = dict.fromkeys(("rows", "columns"), NO_SIDE)
MATRIX = WILD_FORMATS | SIDES
# By the structure: numbers that make no sense, whatever its other fields say.
SPOILS: dict[str, dict[str, Sequence[int]]] = {
    "linear": {
        **{f"matrix.{name}": values for name, values in MATRIX.items()},
        "tokens": NO_COUNT, "activation": (-1, 4, MOST), "view": (-1, 2, LEAST),
        "exact_rows": NO_COUNT, "first_row": (-1, LEAST, MOST),
    },
    "embed": {
        **{f"matrix.{name}": values for name, values in MATRIX.items()},
        "tokens": NO_COUNT, "mixed": NO_COUNT,
    },
    "experts": {
        **{f"gate_up.{name}": values for name, values in MATRIX.items()},
        **{f"down.{name}": values for name, values in MATRIX.items()},
        "tokens": NO_COUNT, "count": (0, *NO_COUNT), "chosen": (0, *NO_COUNT, MOST),
        "activation": (0, -1, 4), "view": (-1, 2), "scoring": (-1, 2, MOST),
    },
}  # fmt: skip


@dataclass
class Stack:
    """Matrices of as many experts, one behind the other, twice."""

    forms: tuple[PanelFormat, PanelFormat]
    panels: tuple[NDArray[np.uint8], NDArray[np.uint8]]
    count: int
    mapped: bool
    counts: dict[int, int] = field(default_factory=dict)  # by budget, as it came first

    def status(self, budget: int, count: int) -> int:
        """What a call gives that feeds so many of them within a budget that is open."""
        if not self.mapped:
            return NOT_MAPPED
        return OK if self.counts.get(budget, count) == count else BAD_ARGUMENT


class Products(Draw):
    """Random products, and experts within random budgets; `selects`: kernels, too."""

    def __init__(self, library: Library, seed: int, *, selects: bool) -> None:
        super().__init__(seed)
        self.selects = selects
        self.call: Any = library
        self.stacks: list[Stack] = []
        self.budgets: list[int] = []  # handles, of which some are closed
        self.calls: list[Callable[[], object]] = [
            *[self.linear] * 4, *[self.embed] * 2, *[self.experts] * 4, *[self.pack] * 4,
            self.budget, self.stats, self.close, self.settings, self.devices,
        ]  # fmt: skip

    def step(self) -> None:
        self.choice(self.calls)()

    def close_all(self) -> None:
        for handle in self.budgets:
            self.call.kvq_residency_close(handle)

    def form(self, rows: int, columns: int) -> PanelFormat:
        return PanelFormat.of(self.choice(FORMATS), (rows, columns))

    def panels(self, form: PanelFormat) -> tuple[NDArray[np.uint8], bool]:
        """Stored bytes, and whether they are of weights: else of damaged ones."""
        if self.one_in(8):
            return self.numbers.integers(0, 256, (form.panels, form.panel_bytes), np.uint8), False
        return matrix(form, self.chance.randrange(99))[1], True

    def run(self, name: str, call: ctypes.Structure, status: int = OK) -> bool:
        """Makes the call, maybe with a number that makes no sense; whether it succeeded."""
        function = getattr(self.call, f"kvq_{name}_run")
        if not self.goes_wild():
            assert function(ctypes.byref(call)) == status, name
            return status == OK
        path = self.choice(list(SPOILS[name]))
        holder, _, field = path.rpartition(".")
        part, value = getattr(call, holder) if holder else call, self.choice(SPOILS[name][path])
        setattr(part, field, value)
        assert function(ctypes.byref(call)) == BAD_ARGUMENT, (name, path, value)
        return False

    def linear(self) -> None:
        """Of one to three panels, whole or with rows to spare, or of enough for two passes."""
        rows = 16 * 140 + 3 if self.one_in(20) else self.choice((1, 16, 17, 48))
        form, tokens = self.form(rows, self.choice((1, 31, 64, 200))), self.number(20) % 70
        panels, of_weights = self.panels(form)
        gate = self.choice((0, 0, 0, 1, 2, 3))
        x = self.floats(max(1, tokens), form.columns * (2 if gate else 1))
        norm = None if gate or self.one_in(2) else self.floats(form.columns)
        exact = self.choice((0, 0, 1, 40, MOST))
        bias = None if exact or self.one_in(2) else self.floats(rows)
        residual = None if exact or self.one_in(2) else self.floats(max(1, tokens), rows)
        first = 0 if exact or self.one_in(2) else self.chance.randint(0, rows)
        view = 0 if exact else self.chance.randint(0, 1)
        out = np.zeros((max(1, tokens), rows), np.float32)
        call = native_linear.NativeLinear(
            native_linear.matrix(form), *map(address, (panels, x, norm, bias, residual, out)),
            tokens, gate, view, exact, first, 1e-6,
        )  # fmt: skip
        if not self.run("linear", call) or not of_weights or gate or norm is not None or not tokens:
            return
        expected = reference_linear.linear(form, panels, x, native_linear.VIEWS[view])
        if exact:
            count = min(exact, rows)
            expected = reference_linear.linear_in_two_passes(form, panels, x, count)
        expected[:, :first] = 0
        expected[:, first:] += 0 if bias is None else bias[first:]
        check(out, expected if residual is None else expected + residual, PRODUCT.top)

    def embed(self) -> None:
        form = self.form(self.choice((1, 16, 40)), self.choice((1, 33, 128)))
        panels, of_weights = self.panels(form)
        tokens, mixed = self.chance.randint(0, 9), self.chance.randint(0, 3)
        shape = max(1, tokens), max(1, mixed)
        ids, weights = self.numbers.integers(0, form.rows, shape), self.floats(*shape)
        out = np.zeros((shape[0], form.columns), np.float32)
        status = OK
        if tokens and mixed and self.goes_wild():
            ids[self.chance.randrange(tokens), 0] = self.choice((-1, form.rows, 2**62, -(2**63)))
            status = BAD_ARGUMENT
        call = NativeEmbed(
            native_linear.matrix(form), *map(address, (panels, ids, weights, out)), tokens, mixed
        )
        if self.run("embed", call, status) and of_weights and np.isfinite(weights).all() and mixed:
            rows = reference_linear.restore(form, panels)
            check(out[:tokens], np.einsum("tk,tkc->tc", weights, rows[ids])[:tokens], 1e-4)

    def stack(self) -> Stack:
        """Some experts, in memory or as views of a file, which stay for good."""
        if len(self.stacks) == 8:
            return self.choice(self.stacks)
        count, columns, width = self.choice((1, 3, 9)), self.choice((32, 96)), self.choice((16, 64))
        forms = self.form(2 * width, columns), self.form(columns, width)
        panels = [
            np.concatenate([matrix(form, seed)[1] for seed in range(count)]) for form in forms
        ]
        mapped = self.one_in(2)
        if mapped:
            with tempfile.TemporaryFile() as file:
                file.write(b"".join(part.tobytes() for part in panels))
                file.flush()
                whole = np.memmap(file, np.uint8, "r")
            ends = panels[0].nbytes
            panels = [whole[:ends].reshape(panels[0].shape), whole[ends:].reshape(panels[1].shape)]
        self.stacks.append(Stack(forms, (panels[0], panels[1]), count, mapped))
        return self.stacks[-1]

    def experts(self) -> None:
        """The first so many of a stack, within a budget or without; the same comes of both."""
        stack = self.stack()
        (up, down), count = stack.forms, stack.count
        count = self.chance.randint(1, count) if self.one_in(4) else count
        tokens, chosen = self.chance.randint(0, 9), self.chance.randint(1, count)
        rows, gate = max(1, tokens), self.chance.randint(1, 3)
        x, logits = self.floats(rows, up.columns) * np.float32(0.02), self.floats(rows, count)
        residual = self.floats(rows, up.columns) if self.one_in(2) else None
        biases = [self.floats(count, form.rows) if self.one_in(3) else None for form in stack.forms]
        scoring, view = self.chance.randint(0, 1), self.chance.randint(0, 1)
        bias = self.floats(count) if scoring and self.one_in(2) else None
        out = np.zeros((rows, up.columns), np.float32)
        handle = self.choice([0, *self.budgets, 2**40])
        status = OK
        if handle:
            status = self.call.kvq_residency_stats_of(
                handle, ctypes.byref(abi.NativeResidencyStats())
            )
            status = status or stack.status(handle, count)
        numbers = tokens, count, chosen, self.chance.randint(0, 1), gate, view, scoring
        pointers = [*stack.panels, x, logits, residual, *biases, bias]
        call = NativeExperts(
            native_linear.matrix(up), native_linear.matrix(down),
            *map(address, [*pointers, out]), *numbers, handle,
        )  # fmt: skip
        finite = all(np.isfinite(part).all() for part in pointers[2:] if part is not None)
        if not self.run("experts", call, status):
            return
        if handle:
            stack.counts.setdefault(handle, count)
        if not finite or not tokens or gate == 2:
            return
        expected = expected_experts(
            (up, stack.panels[0]), (down, stack.panels[1]), x, logits,
            chosen=chosen, normalised=bool(numbers[3]),
            activation="clamped_swiglu" if gate == 3 else "silu", scoring=SCORINGS[scoring],
            gate_up_bias=biases[0], down_bias=biases[1], choice_bias=bias,
            view=native_linear.VIEWS[view],
        )  # fmt: skip
        # What the activation gives is rounded again: a value on the edge may fall either way.
        check(out, expected if residual is None else expected + residual, 2e-2)

    def pack(self) -> None:
        dim = self.choice((16, 32, 80, 256, 7))
        x = self.floats(64, dim)
        planes, grid = np.zeros(64 * dim, np.uint8), np.zeros(grid_bytes(max(64, dim)), np.uint8)
        feedback = self.optional(some_feedback(self.numbers, dim), 0.2)
        self.call.kvq_pack(
            self.chance.randint(0, 1), self.chance.randint(0, 1), native.pointer(x), dim,
            self.number(8), feedback, native.pointer(planes), native.pointer(grid),
        )  # fmt: skip

    def budget(self) -> None:
        """Of one page, of some experts or of all; now and then of nothing."""
        handle, budget = ctypes.c_int64(), self.choice((1, 20_000, 200_000, 2**62, 0, -1, -(2**63)))
        status = self.call.kvq_residency_open(budget, ctypes.byref(handle))
        assert status == (OK if budget > 0 else BAD_ARGUMENT)
        if status == OK:
            self.budgets = [*self.budgets[-5:], handle.value]

    def stats(self) -> None:
        stats = abi.NativeResidencyStats()
        for handle in self.budgets:
            if self.call.kvq_residency_stats_of(handle, ctypes.byref(stats)) == OK:
                assert 0 <= stats.fetched <= stats.chosen
                assert stats.held_bytes >= 0

    def close(self) -> None:
        """Some handles stay in use, of nothing."""
        if self.budgets:
            handle = self.choice(self.budgets)
            self.call.kvq_residency_close(handle)
            assert self.call.kvq_residency_close(handle) == CLOSED

    def settings(self) -> None:
        """Of the whole process: kernels, and how weights are fetched."""
        names = self.call.kvq_isa_available().split(b",")
        if self.selects:
            self.call.kvq_isa_select(self.choice([*names, b"", b"no kernels", b"x" * 9999]))
        assert self.call.kvq_isa() in names
        self.call.kvq_isa_refused()
        self.call.kvq_tune(self.number(1), self.choice((0, 1, 4096, 1 << 20, -1, 2**63 - 1)))
        here, out = abi.NativeProcessor(), abi.NativeBuiltIn()
        self.call.kvq_processor_of(ctypes.byref(here))
        here.maker = self.choice((here.maker, b"", b"AuthenticAMD", b"m" * 16))
        here.level2_bytes = self.choice((here.level2_bytes, 0, -1, 1, 2**63 - 1, -(2**63)))
        self.call.kvq_built_in_of(ctypes.byref(here), ctypes.byref(out))
        assert 0 <= out.row_bytes <= 512 << 10
        assert self.call.kvq_status_text(self.choice(NUMBERS))
        assert self.call.kvq_weight_bytes_read() >= 0

    def devices(self) -> None:
        """None is here: neither by a path, nor by a number."""
        number, facts = ctypes.c_int32(), abi.NativeDevice()
        path = self.choice((b"/nowhere/none.so", __file__.encode(), b"libc.so.6", b"p" * 9999))
        assert self.call.kvq_device_open(path, ctypes.byref(number), ctypes.byref(facts))
        places, values = (ctypes.c_int32 * 256)(), (ctypes.c_float * 256)()
        counts = (self.number(1), None, self.number(1), self.number(8), self.number(256))
        assert self.call.kvq_device_best(*counts, places, values) == BAD_ARGUMENT


def address(array: NDArray[Any] | None) -> Any:
    return None if array is None else native.pointer(array)


def check(output: Float, expected: Float, share: float) -> None:
    """Not further apart than a share of the largest; what is not finite is the same in both."""
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(output[~finite], expected[~finite])
    apart = np.abs(output - expected)[finite]
    assert apart.max(initial=0) <= share * np.abs(expected[finite]).max(initial=0)
