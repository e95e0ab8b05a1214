"""Boxes of TMA in every mode, there and back: dimensions, swizzles, what lies outside the tensor, reductions.
Simulated, and on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.kernels.test_on_gpu import agree, on_gpu, target

from terrazzo.errors import CompilerBug
from terrazzo.interp import kernel as simulator
from terrazzo.ir.text import parse

SHAPES = {1: (100,), 2: (7, 40), 3: (3, 5, 40), 4: (2, 3, 3, 40), 5: (2, 1, 3, 2, 40)}
BOXES = {1: (64,), 2: (4, 32), 3: (2, 4, 16), 4: (2, 2, 2, 8), 5: (1, 2, 2, 2, 16)}
MODES = [
    *[
        (rank, swizzle, "f32", "")
        for rank in SHAPES
        for swizzle in (0, 32, 64, 128)
        if swizzle in (0, 4 * BOXES[rank][-1])
    ],
    *[
        (2, 0, kind, reduction)
        for kind in ("f32", "i32")
        for reduction in ("add", "min", "max")
        if kind == "i32" or reduction == "add"
    ],
]
mode = pytest.mark.parametrize(("rank", "swizzle", "kind", "reduction"), MODES)


def text(rank: int, swizzle: int, kind: str, reduction: str) -> str:
    """A kernel that brings each box of x to y, by way of shared memory; where there is a reduction, y is 1 before."""
    shape, box = SHAPES[rank], BOXES[rank]
    counts = [-(-n // b) for n, b in zip(shape, box, strict=True)]
    at, below = [], 1
    for count, b in reversed([*zip(counts, box, strict=True)]):
        at.insert(0, f"(block // {below}) % {count} * {b}")
        below *= count
    size, where, zero = int(np.prod(box)), ", ".join(at), ", ".join("0" for _ in box)
    number = str(list(shape)).replace(" ", "")
    one = f"{kind}(1)" if kind == "i32" else f"{kind}(1.0)"
    fill = f"""        for i in serial({int(np.prod(shape)) // 32 + 1}):
            if {int(np.prod(shape)) - 1} - i * 32 - lane >= 0:
                y[(i * 32 + lane) // {shape[-1]}, (i * 32 + lane) % {shape[-1]}] = {one}
        fence('proxy')
""" if reduction else ""  # fmt: skip
    loop = f"        for t in serial({below}):\n" if reduction else "        for t in serial(1):\n"
    if reduction:
        where = where.replace("block", "t")
    last = f", {reduction!r}" if reduction else ""
    return f"""@kernel
def boxes(x: {kind}{number}):
    with launch('boxes', _grid={1 if reduction else below}, _warps=1, _resident=1, _reads=[x], y={kind}{number}):
        s = shared({kind}{str([1, *box]).replace(" ", "")}{f", swizzle={swizzle}" if swizzle else ""})
        full = barriers(1, 1)
        if lane == 0:
            init_barriers(full)
        sync()
{fill}{loop}            if lane == 0:
                expect(full[0], {4 * size})
                tensor_load(s[0, {zero}], x[{where}], {list(box)}, full[0])
            wait_barrier(full[0], t % 2)
            if lane == 0:
                tensor_store(y[{where}], s[0, {zero}], {list(box)}{last})
                commit('bulk')
                wait_groups(0, 'bulk')
    return (y,)
"""


def case(rank: int, swizzle: int, kind: str, reduction: str) -> tuple[Any, dict[str, Any], Any]:
    """The program, its input and its result."""
    x = (np.random.default_rng(rank).standard_normal(SHAPES[rank]) * 9).astype(
        {"f32": np.float32, "i32": np.int32}[kind]
    )
    combine = {
        "": lambda a: a,
        "add": lambda a: a + 1,
        "min": lambda a: np.minimum(a, 1),
        "max": lambda a: np.maximum(a, 1),
    }[reduction]
    return parse(text(rank, swizzle, kind, reduction)), {"x": x}, combine(x).astype(x.dtype)


@mode
def test_boxes_go_there_and_back(rank: int, swizzle: int, kind: str, reduction: str) -> None:
    program, inputs, best = case(rank, swizzle, kind, reduction)
    for seed in (None, 0):
        np.testing.assert_array_equal(simulator.run(program, inputs, seed=seed)[0], best)


@mode
@pytest.mark.gpu
def test_boxes_on_a_gpu(rank: int, swizzle: int, kind: str, reduction: str) -> None:
    if int(target()[3:].rstrip("a")) < 90:
        pytest.skip("TMA came with Hopper")
    program, inputs, best = case(rank, swizzle, kind, reduction)
    agree(on_gpu(program, inputs)[0], best)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("wait_groups(0, 'bulk')", "pass", "while another warp reads it"),
        ("commit('bulk')", "pass", "while another warp reads it"),
        ("            wait_barrier(full[0], t % 2)\n", "", "where a copy is on its way"),
    ],
)
def test_what_boxes_need(before: str, after: str, told: str) -> None:
    plain = text(2, 0, "i32", "add")
    assert before in plain
    with pytest.raises(CompilerBug, match=told):
        simulator.run(parse(plain.replace(before, after)), {"x": np.ones(SHAPES[2], np.int32)})
