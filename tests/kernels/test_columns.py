"""Reductions along memory's outer axes: neighbouring columns side by side in a thread's registers, loaded at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered
from tests.kernels.streams import faults
from tests.kernels.test_schedules import pinned, statements

from terrazzo.front.capture import capture
from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.types import DTYPES, Type
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop_to_tile.reductions.reductions import _read_again


def x(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape).to(dtype)


def wide(found: Any) -> set[tuple[str, int]]:
    """The vectors that move, by the place they are read or written at first."""
    return {
        (b.name, s.count) for s in statements(found, k.Move) for b in (s.target, s.source) if b.name in ("x", "var")
    }


VAR = """\
with schedule("var", target="sm_90a"):
    a0 = grid({blocks}) * lane({lanes}) * reg({width})
    with site("acc0"):
        r0 = time({steps}) * reg(4) * warp(8) * lane({rest})
    with site("acc1"):
        r1 = time({steps}) * reg(4) * warp(8) * lane({rest})
"""


@pytest.mark.parametrize("rows, columns, lanes, steps", [(128, 256, 16, 2), (100, 256, 16, 2), (33, 520, 32, 2)])
def test_columns_stand_side_by_side_in_registers(rows: int, columns: int, lanes: int, steps: int) -> None:
    text = VAR.format(blocks=-(-columns // (8 * lanes)), lanes=lanes, width=8, steps=steps, rest=32 // lanes)
    found = pinned(lambda x: x.var(0), (x(rows, columns),), text)
    assert wide(found) == {("x", 8), ("var", 8)}


def test_only_the_last_steps_test_where_rows_end() -> None:
    text = VAR.format(blocks=2, lanes=16, width=8, steps=2, rest=2)
    found = pinned(lambda x: x.var(0), (x(100, 256),), text)
    (kernel,) = found.kernels
    first = next(s for s in k.walk(kernel.body) if isinstance(s, k.For) and not s.unrolled)
    assert not any(isinstance(s, k.If) for s in k.walk(first.body))


def test_columns_in_float32_are_four_at_once() -> None:
    text = VAR.format(blocks=2, lanes=16, width=4, steps=2, rest=2)
    found = pinned(lambda x: x.var(0), (x(100, 128, dtype=torch.float32),), text)
    assert wide(found) == {("x", 4), ("var", 4)}


def test_what_is_stored_of_a_column_is_loaded_side_by_side() -> None:
    """Normalised columns, stored as rows: what is loaded is wide, and every column goes on with its own sum."""
    text = """\
with schedule("div", target="sm_90a"):
    a0 = grid(2) * lane(16) * reg(4)
    with site("acc0"):
        r0 = time(3) * warp(8) * lane(2)
    with site("div"):
        a1 = time(3) * warp(8) * lane(2)
"""
    found = pinned(lambda x: x.t() / x.sum(0)[:, None], (x(40, 128, dtype=torch.float32),), text)
    assert wide(found) == {("x", 4)}


def lowered_of(fn: Any, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, arch: str) -> list[k.Kernel]:
    """The kernels of a function of tensors that need not be there."""
    args = tuple(torch.empty(s, dtype=dtype, device="meta") for s in shapes)
    done = lowering(capture(fn, args, {}).program, Options(target=arch, libraries="never")).at("kernel")
    return [s for s in done.steps if isinstance(s, k.Kernel)]


def gradients(dy: Any, x: Any, mean: Any, scale: Any) -> tuple[Any, Any]:
    """Of a batch norm's weight and bias."""
    far = (x.float() - mean[:, None, None]) * scale[:, None, None]
    return (dy.float() * far).sum((0, 2, 3)), dy.float().sum((0, 2, 3))


def factored(w: Any, g: Any, r: Any, c: Any) -> Any:
    """A step of Adafactor: a short mean in a long one, and both at every point."""
    update = g * torch.rsqrt(torch.outer(r, c) / r.mean())
    return w - update / update.square().mean().sqrt()


def two_losses(x: Any, y: Any) -> Any:
    """One loss over images, one over pixels."""
    return x.sigmoid().square().mean() + (1 - y).mean()


STREAMS = {
    "columns": (lambda x: x.mean(0), ((65536, 1024),)),
    "columns of no multiple of eight": (lambda x: x.sum(0), ((65537, 1023),)),
    "few columns": (lambda x: x.sum(0), ((1 << 20, 24),)),
    "a bias' gradient": (lambda x: x.sum((0, 1)), ((8, 1024, 3072),)),
    "columns in the middle": (lambda x: x.var(1), ((64, 4096, 256),)),
    "largest of columns": (lambda x: x.amax(0), ((30000, 520),)),
    "batch norm's statistics": (lambda x: torch.var_mean(x, (0, 2, 3)), ((64, 64, 112, 112),)),
    "batch norm's statistics, channels last": (lambda x: torch.var_mean(x, (0, 1, 2)), ((64, 112, 112, 64),)),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), ((32, 256, 56, 56),)),
    "batch norm's gradients": (gradients, ((32, 256, 56, 56), (32, 256, 56, 56), (256,), (256,))),
    "batch norm's gradients of few channels": (gradients, ((32, 16, 112, 112), (32, 16, 112, 112), (16,), (16,))),
    "layer norm's gradients": (lambda dy, x: ((dy * x).sum((0, 1)), dy.sum((0, 1))), ((32, 1024, 768),) * 2),
    "group norm": (lambda x: F.group_norm(x, 1), ((16, 64, 56, 56),)),
    "instance norm": (lambda x: F.instance_norm(x), ((16, 64, 256, 256),)),
    "layer norm of what lies transposed": (lambda x: F.layer_norm(x.transpose(1, 2), (512,)), ((32, 512, 196),)),
    "layer norm of channels first": (lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (96,)), ((32, 96, 56, 56),)),
    "softmax of few long rows": (lambda x: x.softmax(-1), ((4, 1 << 20),)),
    "one sum": (lambda x: x.sum(), ((8192, 8192),)),
    "one deviation": (lambda x: x.std(), ((8192, 4096),)),
    "two axes apart": (lambda x: x.sum((0, 2)), ((64, 32, 64, 96),)),
    "sums of unlike lengths": (two_losses, ((64, 256, 512), (64,))),
    "rows of unlike lengths": (lambda x, y: x.amax(-1) + y.amax(-1), ((8, 1 << 20), (8, 64))),
    "a short mean in a long one": (factored, ((2048, 2048), (2048, 2048), (2048,), (2048,))),
    "a short mean at many points": (lambda w, g, r: w - g / r.mean(), ((2048, 1024), (2048, 1024), (2048,))),
    "a filter as large as its image": (lambda x, w: F.conv2d(x, w), ((128, 256, 16, 16), (1, 256, 16, 16))),
    "channels weighted and summed": (lambda x, w: (x * w).sum((1, 2, 3)), ((128, 256, 16, 16), (256, 1, 1))),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", STREAMS)
def test_reductions_are_bound_by_memory(name: str, dtype: torch.dtype, arch: str) -> None:
    fn, shapes = STREAMS[name]
    for kernel in lowered_of(fn, shapes, dtype, arch):
        where = f"{kernel.name}, {kernel.grid} blocks of {kernel.threads} threads"
        assert not faults(kernel, arch), where


SMALL = {
    "columns": (lambda x: x.mean(0), (4096, 72), {"split"}),
    "odd columns": (lambda x: x.sum(0), (16411, 33), {"split"}),
    "variance of columns": (lambda x: x.var(1), (3, 4000, 40), {"split_moments"}),
    "variance of columns in uneven pieces": (lambda x: x.var(1), (3, 4001, 40), {"split_moments"}),
    "variance of rows in uneven pieces": (lambda x: x.var(-1) + x.mean(-1), (5, 99991), {"split_moments"}),
    "variance of columns in registers": (lambda x: x.var(1), (5, 1003, 1100), set()),
    "group norm": (lambda x: F.group_norm(x, 1), (2, 8, 128, 128), {"reduced_first", "split_moments"}),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), (16, 12, 96, 96), {"split_moments"}),
    "largest of channels": (lambda x: x.amax((0, 2, 3)), (8, 6, 90, 91), {"split"}),
    "a sum that what is missing would add to": (lambda x: (x - 1).square().sum((0, 2, 3)), (8, 6, 83, 89), {"split"}),
    "where the largest is": (lambda x: x.argmax(0), (16411, 24), {"split"}),
    "softmax of long rows": (lambda x: x.softmax(-1), (2, 300000), {"reduced_first", "split"}),
    "transposed layer norm": (lambda x: F.layer_norm(x.transpose(1, 2), (96,)), (2, 96, 50), {"merge_axes"}),
    "rows of two axes": (lambda x: x.sum(1), (3, 37, 41, 24), {"merge_axes"}),
    "sums of unlike lengths": (lambda x: two_losses(x, x[0, :8]), (37, 4099), {"reduced_first", "split"}),
    "a short mean in a long one": (
        lambda x: factored(x, x + 1, x[:, 0].square(), x[0].square()),
        (256, 1024),
        {"reduced_first", "split"},
    ),
    "a short mean at many points": (lambda x: x / x[:, 0].mean(), (256, 1024), {"reduced_first"}),
    "a filter as large as its image": (lambda x: F.conv2d(x, x[:1] - 1), (3, 40, 8, 9), {"flat_reductions"}),
}


@pytest.mark.parametrize("name", SMALL)
def test_cut_reductions_are_as_exact_as_whole_ones(name: str) -> None:
    """In the simulator; by float64, no further off than twice what PyTorch is."""
    fn, shape, rules = SMALL[name]
    torch.manual_seed(3)
    given = torch.randn(shape) + 2
    log = Log(applications=[])
    done = lowering(capture(fn, (given,), {}).program, Options(target="sm_90a", libraries="never"), log)
    assert rules <= {a.rule for a in log.applications or []}
    inputs = {i.name: np.asarray(given) for i in done.loop.inputs}
    (found,) = simulator.run(done.at("kernel"), inputs)
    exact, eager = (np.asarray(fn(x), np.float64) for x in (given.double(), given))
    error, own = (np.abs(np.asarray(x, np.float64) - exact).max() for x in (found, eager))
    assert error <= max(2 * own, 1e-6 * np.abs(exact).max())


def schedules_of(fn: Any, *shape: int) -> list[str]:
    captured = capture(fn, (torch.empty(shape, device="meta"),), {})
    done = lowering(captured.program, Options(target="sm_90a", libraries="never"))
    return [str(schedule) for _, schedule in done.at("tile").schedules]


def test_columns_of_a_thousand_are_read_once() -> None:
    """More warps share longer ones, while registers hold what each has of it."""
    (held,) = schedules_of(lambda x: x.var(1), 63, 513, 1025)
    assert "x = reg()" in held and "r0 = reg(33) * warp(16)" in held
    (more,) = schedules_of(lambda x: x.std(1), 63, 1000, 1025)
    assert "x = reg()" in more and "r0 = reg(63) * warp(16)" in more


def test_what_registers_do_not_hold_is_cut() -> None:
    """Those of a processor hold no 65,536 numbers of a row, beside what finds them; they do hold 50,257 in a row."""
    for shape in ((64, 512, 1024), (64, 512, 28, 28)):
        part, _ = schedules_of(lambda x: x.transpose(0, 1).flatten(1).var(1), *shape)
        assert "s = grid(" in part and "x = reg()" in part
    (whole,) = schedules_of(lambda x: x.softmax(-1), 512, 50257)
    assert "x = reg()" in whole and "s = grid(" not in whole


def test_two_long_rows_are_read_again_by_blocks_that_leave_room_for_others() -> None:
    """Gradients of softmax, of rows that registers hold one of."""
    captured = capture(gradient, tuple(torch.empty(512, 50257, device="meta") for _ in range(2)), {})
    done = lowering(captured.program, Options(target="sm_90a", libraries="never"))
    ((_, schedule),) = done.at("tile").schedules
    assert "= reg()" not in str(schedule) and "warp(16)" in str(schedule)


def gradient(g: Any, y: Any) -> Any:
    return y * (g - (g * y).sum(-1, keepdim=True))


@pytest.mark.parametrize("arch", ["sm_75", "sm_120"])
def test_cut_reductions_are_right_on_other_machines(arch: str) -> None:
    for fn, shape in ((lambda x: x.sum(0), (16411, 33)), (lambda x: F.group_norm(x, 1), (2, 8, 192, 256))):
        found = lowered(fn, (x(*shape, dtype=torch.float16),), arch)
        (ours,), (right,) = found.simulated(), loop.run(found.lowering.at("loop"), found.inputs)
        assert len(found.kernels) > 1
        assert np.abs(ours.astype(np.float64) - right.astype(np.float64)).max() <= 2e-3 * np.abs(right).max()


def test_who_has_only_the_extents_of_axes_in_common_stays_apart() -> None:
    """As many images as channels: what is stored of images, and reduced of channels, is no one kernel's."""

    def both(x: Any) -> tuple[Any, Any]:
        return x.sum((0, 1)), torch.relu(x.transpose(1, 2))

    shapes = ((64, 12544, 64),)
    kernels = lowered_of(both, shapes, torch.bfloat16, "sm_90a")
    assert len(kernels) > 1 and not any(faults(kernel, "sm_90a") for kernel in kernels if "sum" in kernel.name)
    given = x(6, 48, 6, dtype=torch.float32)
    found = lowered(both, (given,), "sm_90a")
    for ours, right in zip(found.simulated(), both(given), strict=True):
        assert np.allclose(ours, right, atol=1e-4)


def test_what_is_read_once_for_a_row_is_no_column() -> None:
    """A sum of what is computed of places and of one number a row: what its rows are multiplied with was computed in
    two blocks, whose lanes had a row each.
    """

    def fn(mean: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x * (mean[:, None] - torch.cos(torch.arange(16384.0))).sum(1)[:, None]

    args = x(32, dtype=torch.float32), x(32, 65536, dtype=torch.float32)
    found = lowering(capture(fn, args).program, Options(target="sm_90a"), Log()).at("kernel")
    assert found.steps[-1].grid >= 132


@pytest.mark.parametrize(("columns", "apart"), [(4095, True), (4096, False)])
def test_columns_of_rows_that_begin_anywhere_lie_side_by_side_in_a_block(columns: int, apart: bool) -> None:
    """What one warp reads ends amid sectors, which the next one finds in the cache."""
    given = (torch.empty(80, 512, columns, device="meta"),)
    ((_, schedule),) = lowering(
        capture(lambda x: x.sum(1), given, {}).program, Options(target="sm_90a", libraries="never")
    ).at("tile").schedules  # fmt: skip
    assert any(f.level == "warp" and f.size == 8 for _, line in schedule.axes for f in line) == apart


def test_sums_of_columns_side_by_side_are_right() -> None:
    given = x(32, 33, 259, dtype=torch.float32)
    text = """\
with schedule("sum_1", target="sm_90a"):
    a0 = grid(33) * warp(8) * lane(32)
    with site("acc0"):
        r0 = time(1) * reg(9) * warp(4)
"""
    pinned(lambda x: x.sum(1), (given,), text)


def test_what_is_read_again_is_told_in_the_order_in_which_it_is_read() -> None:
    """Two of them are kept: sets of nodes come in another order in every process."""
    column, first, second = Var("a0", 64), Var("r0", 8), Var("r1", 8)
    buffers = [l.Buffer(f"x{n}", Type(DTYPES["f32"], (8, 64))) for n in range(12)]
    along = [(a, [l.Load(b, (a, column), ()) for b in buffers]) for a in (first, second)]
    assert _read_again(along, column) == [b.name for b in buffers]
