"""Rows that are reduced as a whole, and short sums at each of their points."""

from __future__ import annotations

import numpy as np

from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.text import parse
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop_to_tile.choose import schedule
from terrazzo.rules.loop_to_tile.experience import Experience
from terrazzo.rules.loop_to_tile.reductions.pieces import together
from terrazzo.rules.tile_to_kernel.lower import derived, lower

H200 = gpu("sm_90a")


def windowed(rows: int, length: int, window: int) -> l.Program:
    """A row's points as parts of its total, and the sum of a window of another tensor at each."""
    program = parse(f"""@loop
def f(x: f32[{rows}, {length}], y: f32[{rows}, {length * window}]):
    with kernel('z', z=f32[{rows}, {length}]):
        for a0 in free({rows}):
            for r0 in reduce({length}):
                in0 = x[a0, r0]
                acc0 <- sum(in0)
            for a1 in free({length}):
                in1 = x[a0, a1]
                v0 = div(in1, acc0)
                for r0 in reduce({window}):
                    in2 = y[a0, a1 * {window} + r0]
                    acc1 <- sum(in2)
                v1 = add(v0, acc1)
                z[a0, a1] = v1
    return (z,)
""")
    assert isinstance(program, l.Program)
    return program


def error(done: tile.Program, rows: int, length: int, window: int) -> float:
    """Of what a program of windows gives in the simulator, next to the largest number; it is judged by float64."""
    found = dict(done.schedules)
    steps = tuple(lower(x, found[i], H200) for i, x in enumerate(done.loop.steps) if isinstance(x, l.Kernel))
    program = k.Program("f", done.loop.inputs, steps, done.loop.results)
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((rows, length)) + 2).astype(np.float32)
    y = rng.standard_normal((rows, length * window)).astype(np.float32)
    (z,) = simulator.run(program, {"x": x, "y": y})
    windows = y.astype(np.float64).reshape(rows, length, window)
    exact = x / x.astype(np.float64).sum(1, keepdims=True) + windows.sum(-1)
    return float(np.abs(np.asarray(z) - exact).max() / np.abs(exact).max())


def test_axes_of_one_name_have_lengths_of_their_own() -> None:
    """Threads that share a row of 6000 an element at a time, beside sums of 4."""
    (kernel,) = windowed(3, 6000, 4).steps
    assert isinstance(kernel, l.Kernel)
    (own,) = (x for x, _, what in together(kernel, H200) if what.endswith("an element at a time"))
    assert isinstance(derived(kernel, own, H200), k.Kernel), str(own)


class WithoutRegisters(Experience):
    """A kernel is lost that does all of it: reads both tensors, and stores what is wanted."""

    def __call__(self, kernel: k.Kernel) -> str:
        return "it spills" if len(kernel.params) == 3 else ""


def test_a_thread_reduces_no_row_for_each_of_its_points() -> None:
    """Where threads cannot share it, whole rows are reduced in a kernel before."""
    log, program = Log(applications=[]), windowed(300, 200, 3)
    done = schedule(program, H200, log, tried=WithoutRegisters())
    assert "reduced_first" in [x.rule for x in log.applications or []]
    assert error(done, 300, 200, 3) < 1e-6


def test_few_blocks_do_not_read_much_besides_their_rows() -> None:
    """Two rows of 2048 are read by two blocks anyhow; what lies at their points, 128 times as much, is not."""
    log, program = Log(applications=[]), windowed(2, 2048, 128)
    done = schedule(program, H200, log)
    assert "reduced_first" in [x.rule for x in log.applications or []]
    assert error(done, 2, 2048, 128) < 1e-6
