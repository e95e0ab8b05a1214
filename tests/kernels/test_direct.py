"""Results of a tile that leave registers as they are: what is the same for a row or a column of it is computed once,
and what else they are made of is loaded for many of them before the first is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.kernels.programs import Lowered, lowered
from tests.kernels.test_attention import close, lines, tensors

from terrazzo.front.capture import capture
from terrazzo.interp import kernel as simulator
from terrazzo.interp.torch import to_numpy
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node
from terrazzo.ir.plan import Result
from terrazzo.ir.text import parse, show
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.targets.cuda.emit import emit


def normed(x: Any, w: Any, r: Any, mean: Any, var: Any) -> Any:
    """Pixels times filters, stored channel by channel in rows that no TMA takes; a norm by channels, a residual."""
    y = torch.einsum("npk,ck->ncp", x, w)
    y = (y - mean[:, None]) / torch.sqrt(var[:, None].abs() + 0.1)
    return torch.relu(y + r)


def by_columns(x: Any, w: Any, r: Any, mean: Any, var: Any) -> Any:
    return torch.relu((x @ w.t() - mean) / torch.sqrt(var.abs() + 0.1) + r)


IMAGES = tensors((3, 50, 64), (128, 64), (3, 128, 50), (128,), (128,))
ROWS = tensors((70, 64), (90, 64), (70, 90), (90,), (90,), dtype=torch.float32)


FADED = """
@loop
def f(x: bf16[2, 64, 64], w: bf16[2, 128, 64], r: bf16[2, 64, 128]):
    with kernel('y', y=bf16[128, 128]):
        for a0 in free(2):
            v0 = index(a0)
            v1 = f32(v0)
            v2 = pow(f32(2.0), v1)
            v3 = log(v2)
            for a3 in free(64):
                v4 = index(a3)
                v5 = f32(v4)
                v6 = mul(v3, v5)
                v7 = tanh(v6)
                for a4 in free(128):
                    in0 = r[a0, a3, a4]
                    v8 = f32(in0)
                    for r0 in reduce(64):
                        in1 = x[a0, a3, r0]
                        v9 = f32(in1)
                        in2 = w[a0, a4, r0]
                        v10 = f32(in2)
                        v11 = mul(v9, v10)
                        acc0 <- sum(v11)
                    v12 = mul(acc0, v7)
                    v13 = add(v12, v8)
                    v14 = bf16(v13)
                    y[a4, a0 * 64 + a3] = v14
    return (y,)
"""
"""Products by heads, times what a head's rate and a column make."""
IN_COLUMNS = """
with schedule("y", target="sm_90a"):
    a0 = grid(2)
    a4 = grid(1) * block(128)
    a3 = grid(1) * block(64)
    r0 = time(1, ring=2) * block(64)
    roles(load=warp(1), math=warpgroup(2), registers=(40, 232))
    with site("acc0", on="wgmma.m64n64k16.f32.bf16"):
        a4 = warpgroup(2) * inst.m(64)
        a3 = inst.n(64)
        r0 = reg(4) * inst.k(16)
        x = smem(by="tma", swizzle=128)
        w = smem(by="tma", swizzle=128)
"""


def walked(body: Sequence[Node], times: int = 1) -> list[tuple[Node, int]]:
    """Statements, and how often each is written out."""
    found: list[tuple[Node, int]] = []
    for s in body:
        found.append((s, times))
        if isinstance(s, k.For):
            found += walked(s.body, times * (int(s.axis.extent) if s.unrolled else 1))
        elif isinstance(s, k.If | k.Role):
            found += walked(s.body, times)
    return found


def roots(found: Lowered) -> int:
    """How many square roots a thread computes for a tile."""
    (kernel,) = found.kernels
    each = [(s, n) for s, n in walked(kernel.body) if isinstance(s, k.Let) and isinstance(s.term, l.Apply)]
    return sum(n for s, n in each if s.term.fn.name == "sqrt") // max(1, len({r.first for r in roles(kernel)}) - 1)


def roles(kernel: k.Kernel) -> list[k.Role]:
    return [s for s in k.walk(kernel.body) if isinstance(s, k.Role)]


def test_what_goes_along_rows_is_computed_once_for_each() -> None:
    """A thread has two rows of an instruction of 64."""
    found = lowered(normed, IMAGES, "sm_90a")
    assert all(not x.slab for x in lines(found, Result))
    assert roots(found) == 2
    close(found, normed, IMAGES)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_what_goes_along_columns_is_computed_once_for_each(target: str) -> None:
    """On CUDA cores a thread has as many roots to take as columns, whatever rows it has."""
    found = lowered(by_columns, ROWS, target, fp32="exact")
    (kernel,) = found.kernels
    sums = next(s.place for s in k.walk(kernel.body) if isinstance(s, k.Declare) and s.place.name.startswith("acc"))
    assert roots(found) <= math.prod(sums.type.static_shape) // 2
    close(found, by_columns, ROWS)


def test_operands_come_before_results_are_computed() -> None:
    """Two neighbours at a time, as far as the row goes; no load waits for the one before it to be used."""
    args = tuple(x.to(torch.bfloat16) for x in ROWS)
    found = lowered(by_columns, args, "sm_90a")
    (kernel,) = found.kernels
    moves = [(s, n) for s, n in walked(kernel.body) if isinstance(s, k.Move) and s.source.name == "r"]
    assert moves and {s.count for s, _ in moves} == {2}
    assert max(math.prod(s.target.type.static_shape) for s, _ in moves) > 2
    guarded = [s for s in k.walk(kernel.body) if isinstance(s, k.If) and any(isinstance(x, k.Move) for x in s.body)]
    assert all(len(s.body) == 1 for s in guarded if s.body[0] in {m for m, _ in moves})
    close(found, by_columns, args)


def test_what_is_rounded_and_read_back_is_rounded_by_one_instruction() -> None:
    """It stays in f32: nothing stores it, and nothing else reads it. What is stored is converted as before."""
    found = lowered(normed, IMAGES, "sm_90a")
    lines = emit(found.kernels[0])[1].splitlines()
    rounded = {x.split()[2] for x in lines if "= tz_round_bf16(" in x}
    assert rounded and not any(f"tz_cast<f32>({x})" in y for x in rounded for y in lines)
    assert sum("= tz_cast<bf16>(" in x for x in lines) >= 1


def test_what_goes_along_columns_is_not_read_beside_the_last() -> None:
    """Blocks of 128 channels of 576, channels of which a thread has several; every address is checked."""
    shapes = ((32, 96, 14, 14), (576, 96, 1, 1), (576, 1, 1), (576, 1, 1))
    given = tuple(torch.empty(shape, device="meta") for shape in shapes)

    def normed(x: Any, w: Any, mean: Any, var: Any) -> Any:
        y = torch.nn.functional.conv2d(x, w) - mean
        return y, torch.relu(y * torch.rsqrt(var + 0.1))

    found = lowering(capture(normed, given, {}).program, Options(target="sm_90a", libraries="never"))
    kernels = found.at("kernel").steps
    once = [s for x in kernels for s in k.walk(x.body) if isinstance(s, k.Declare) and s.place.name.startswith("once")]
    assert once or len(kernels) > 1, "the norm is neither computed once for a channel nor apart"


def test_one_operand_at_a_time_is_an_array_too() -> None:
    """Where so much is loaded that there is room for one column, the operands of it are arrays of one number."""
    vectors = ((96, 1, 1),) * 9
    shapes = ((32, 96, 56, 56), (96, 96, 1, 1), (32, 96, 56, 56), *vectors)
    given = tuple(torch.empty(shape, device="meta") for shape in shapes)

    def normed(x: Any, w: Any, r: Any, *v: Any) -> Any:
        y = (torch.nn.functional.conv2d(x, w) - v[0]) * torch.rsqrt(v[1] + 0.1) * v[2] + v[3]
        z = (x - v[4]) * torch.rsqrt(v[5] + 0.1) * v[6] + v[7]
        return y, torch.relu(y + z + (r - v[8]))

    program = lowering(capture(normed, given, {}).program, Options(target="sm_90a")).at("kernel")
    moves = [s for kernel in program.steps for s in k.walk(kernel.body) if isinstance(s, k.Move)]
    assert any(s.target.type.shape == (1,) for s in moves)
    assert parse(show(program)) == program


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_what_several_columns_share_is_not_read_where_all_are_off(target: str) -> None:
    """Sixteen columns of results read one value, and the last tile has fewer columns than there are."""

    def fn(x: Any, w: Any, i: Any) -> Any:
        return torch.nn.functional.linear(x, w).view(64, 39, 16) + i[:, :, None]

    args = tensors((64, 400), (624, 400), (64, 39))
    close(lowered(fn, args, target), fn, args)


def test_what_is_the_same_for_a_tile_is_computed_before_its_loops() -> None:
    """Kept for each row it had no value where the columns began."""
    program = parse(FADED)
    made = lowering(program, Options(target="sm_90a", schedules=(IN_COLUMNS,))).at("kernel")
    (kernel,) = made.steps
    each = [n for s, n in walked(kernel.body) if isinstance(s, k.Let) and isinstance(s.term, l.Apply)
            and s.term.fn.name == "log"]  # fmt: skip
    assert each == [1, 1]  # in each team
    given = {b.name: torch.randn(b.type.static_shape).bfloat16() for b in program.inputs}
    x, w, r = (given[n].double() for n in "xwr")
    weight = torch.tanh(torch.tensor([[0.0], [1.0]]).double() * math.log(2) * torch.arange(64.0))
    wanted = torch.einsum("hpk,hck,hp->chp", x, w, weight) + r.permute(2, 0, 1)
    (ours,) = simulator.run(made, {n: to_numpy(v) for n, v in given.items()})
    torch.testing.assert_close(torch.from_numpy(ours.astype("float64")).view(128, 2, 64), wanted, rtol=2e-2, atol=2e-2)
