"""Pinned schedules: many ways to run one product or one norm, each right; what does not fit is refused, with the
reason.
"""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import Lowered, lowered

from terrazzo.errors import Limitation, UserError
from terrazzo.interp import loop
from terrazzo.ir.dialects import kernel as k


def matmul(x: Any, w: Any) -> Any:
    return x @ w


def norm(x: Any) -> Any:
    return F.rms_norm(x, (x.shape[-1],))


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return tuple(torch.randn(s).to(dtype) for s in shapes)


def pinned(fn: Any, args: tuple[torch.Tensor, ...], text: str, target: str = "sm_90a") -> Lowered:
    """A function with schedules, after a look at whether they were used and what they give."""
    found = lowered(fn, args, target, schedules=(text,))
    scheduled = "\n".join(str(s) for _, s in found.lowering.at("tile").schedules)
    assert dedent(text).strip() in scheduled
    for a, b in zip(found.simulated(), loop.run(found.lowering.at("loop"), found.inputs), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= (2.0**-7 if found.args[0].dtype == torch.bfloat16 else 1e-5) * np.abs(b).max()
    return found


def statements(found: Lowered, kind: type) -> list[Any]:
    return [s for kernel in found.kernels for s in k.walk(kernel.body) if isinstance(s, kind)]


TENSOR_CORES = """\
with schedule("mm", target="sm_90a"):
    a0 = grid(2) * block(64)
    a1 = grid(3) * block(32)
    r0 = time(10, ring=4) * block(32)
    with site("acc0", on="mma.m16n8k16.f32.bf16"):
        a0 = warp(2) * reg(2) * inst.m(16)
        a1 = warp(2) * reg(2) * inst.n(8)
        r0 = reg(2) * inst.k(16)
        x = smem(by="cp.async", swizzle=64)
        w = smem(by="cp.async", swizzle=64)
    with site("mm"):
        a0 = like("acc0")
        a1 = like("acc0")
"""
HALVES = ((128, 320), (320, 96))


def test_tensor_cores_with_a_ring_of_four() -> None:
    found = pinned(matmul, tensors(*HALVES, dtype=torch.bfloat16), TENSOR_CORES)
    (kernel,) = found.kernels
    assert (kernel.grid, kernel.warps) == (6, 4)
    assert [s.type.shape for s in kernel.shared] == [(4, 64, 32), (4, 32, 32)] and {
        s.swizzle for s in kernel.shared
    } == {64}
    assert {s.open for s in statements(found, k.WaitGroups)} == {0, 2}
    assert {s.instruction for s in statements(found, k.Multiply)} == {"mma.m16n8k16.f32.bf16"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ring=4", "ring=2"),
        ("ring=4", "ring=7"),
        ("time(10, ring=4) * block(32)", "time(5, ring=3) * block(64)"),
        (', swizzle=64', ""),
        ('smem(by="cp.async", swizzle=64)', 'smem(by="ld", swizzle=64)'),
        ("a0 = warp(2) * reg(2) * inst.m(16)", "a0 = warp(4) * inst.m(16)"),
        ("a0 = warp(2) * reg(2) * inst.m(16)", "a0 = reg(2) * warp(2) * inst.m(16)"),
        ("a1 = warp(2) * reg(2) * inst.n(8)", "a1 = reg(4) * inst.n(8)"),
        ("a0 = grid(2) * block(64)", "a0 = grid(2, order=grouped(2)) * block(64)"),
    ],
)  # fmt: skip
def test_variants_on_tensor_cores(before: str, after: str) -> None:
    assert before in TENSOR_CORES
    text = TENSOR_CORES.replace(before, after)
    if "block(64)\n    with" in text:
        text = text.replace("r0 = reg(2) * inst.k(16)", "r0 = reg(4) * inst.k(16)").replace("swizzle=64", "swizzle=128")
    found = pinned(matmul, tensors(*HALVES, dtype=torch.bfloat16), text)
    assert statements(found, k.Multiply)
    assert bool(statements(found, k.AsyncCopy)) == ('"ld"' not in text)


CUDA_CORES = """\
with schedule("mm", target="{target}"):
    a0 = grid(2) * block(32)
    a1 = grid(3) * block(32)
    r0 = time(7, ring=2) * block(8)
    with site("acc0", on="fma.f32"):
        a0 = warp(2) * reg(2) * lane(4) * reg(2)
        a1 = lane(8) * reg(4)
        r0 = reg(8)
        x = smem(by="ld", along="a0", pad=4)
        w = smem(by="ld", pad=4)
    with site("mm"):
        a0 = like("acc0")
        a1 = like("acc0")
"""


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_120"])
def test_cuda_cores_with_two_slabs_through_registers(target: str) -> None:
    found = pinned(matmul, tensors((50, 53), (53, 90)), CUDA_CORES.format(target=target), target)
    assert not statements(found, k.AsyncCopy) and not statements(found, k.Multiply)
    assert [s.type.shape for s in found.kernels[0].shared] == [(2, 8, 32), (2, 8, 32)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ring=2", "ring=1"),
        ("time(7, ring=2)", "time(7)"),
        ("r0 = reg(8)", "r0 = reg(2) * reg(4)"),
        (', along="a0"', ""),
        (", pad=4", ""),
        ("a1 = lane(8) * reg(4)", "a1 = reg(4) * lane(8)"),
        ("a1 = lane(8) * reg(4)", "a1 = lane(4) * lane(2) * reg(4)"),
        ('by="ld", along="a0"', 'by="cp.async", along="a0"'),
    ],
)
def test_variants_on_cuda_cores(before: str, after: str) -> None:
    assert before in CUDA_CORES
    pinned(matmul, tensors((50, 53), (53, 90)), CUDA_CORES.replace(before, after).format(target="sm_80"), "sm_80")


def test_a_split_of_k_over_the_grid() -> None:
    """The model splits a long product; the kernel of the pieces can be pinned by its own name."""
    args = tensors((16, 4096), (4096, 24))
    chosen = lowered(matmul, args, "sm_90a")
    assert [x.name for x in chosen.kernels] == ["mm_part", "mm"]
    pieces = chosen.kernels[0].writes[0].type.static_shape[0]
    step = 4096 // pieces // 8
    text = f"""\
with schedule("mm_part", target="sm_90a"):
    s = grid({pieces})
    a0 = grid(1) * block(16)
    a1 = grid(1) * block(32)
    r0 = time({step}, ring=3) * block(8)
    with site("acc0", on="fma.f32"):
        a0 = lane(4) * reg(4)
        a1 = warp(2) * lane(8) * reg(2)
        r0 = reg(8)
        x = smem(by="cp.async", pad=4)
        w = smem(by="cp.async", pad=4)
    with site("mm_part"):
        a0 = like("acc0")
        a1 = like("acc0")
"""
    found = pinned(matmul, args, text)
    assert [x.name for x in found.kernels] == ["mm_part", "mm"] and found.kernels[0].warps == 2


@pytest.mark.parametrize("warps", [1, 2, 8, 32])
def test_rows_shared_by_other_numbers_of_warps(warps: int) -> None:
    each = 1024 // (warps * 32)
    shared = "warp" if warps > 1 else None
    warp = f"warp({warps}) * " if shared else ""
    text = f"""\
with schedule("mul", target="sm_90a"):
    a0 = grid(5)
    with site("acc0"):
        r0 = reg({each}) * {warp}lane(32)
    with site("mul"):
        a1 = like("acc0.r0")
"""
    found = pinned(norm, tensors((5, 1024)), text)
    (kernel,) = found.kernels
    assert kernel.warps == warps and bool(kernel.shared) == (warps > 1)


ROWS = """\
with schedule("mul", target="sm_90a"):
    a0 = grid(5)
    with site("acc0"):
        r0 = time(4) * warp(4) * lane(32) * reg(2)
    with site("mul"):
        a1 = reg(4) * warp(4) * lane(32) * reg(2)
"""


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("a0 = grid(5)", "a0 = grid(4)", "a0 = grid(4): grid must be 5 to cover 5"),
        ("r0 = time(4)", "r0 = time(3)", "time must be 4 to cover 1024"),
        ("time(4) * warp(4) * lane(32)", "time(4) * warp(4) * lane(16)", "time must be 8 to cover 1024"),
        ("time(4) * warp(4) * lane(32)", "time(8) * warp(4) * lane(16)", "acc0: 16 lanes; a warp has 32"),
        ("reg(4) * warp(4)", "reg(2) * warp(8)", "the sites disagree on the number of warps: 4, 8"),
        ("warp(4) * lane(32) * reg(2)\n    with", "warp(3) * lane(32) * reg(2)\n    with",
         "warp(3) must be a power of two"),
        ('schedule("mul"', 'schedule("nul"', "there is no kernel nul to pin a schedule to; there are mul"),
        ('site("acc0")', 'site("acc1")', "the kernel has no site acc1; it has mul, acc0"),
        ("        r0 = ", "        r7 = ", "there is no axis r7 here; there are a0, a1, r0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(before: str, after: str, reason: str) -> None:
    pinned(norm, tensors((5, 1024)), ROWS)
    assert before in ROWS
    with pytest.raises(UserError, match=re.escape(reason)):
        lowered(norm, tensors((5, 1024)), "sm_90a", schedules=(ROWS.replace(before, after),))


def test_a_schedule_for_another_machine_is_refused() -> None:
    with pytest.raises(UserError, match="sm_80"):
        lowered(norm, tensors((5, 1024)), "sm_90a", schedules=(ROWS.replace("sm_90a", "sm_80"),))


@pytest.mark.parametrize(
    ("target", "changes", "reason"),
    [
        ("sm_75", [], "mm: mma.m16n8k16.f32.bf16 needs sm_80, and the target is sm_75"),
        ("sm_80", [("m16n8k16.f32.bf16", "m16n8k32.f32.bf16")],
         "unknown instruction mma.m16n8k32.f32.bf16; known: fma.f32,"),
        ("sm_80", [("reg(2) * inst.m(16)", "reg(4) * inst.m(8)")],
         "acc0: mma.m16n8k16.f32.bf16 has m = 16, and inst.m is bound to 8"),
        ("sm_80", [("r0 = reg(2) * inst.k(16)", "r0 = reg(4) * inst.k(8)")],
         "acc0: mma.m16n8k16.f32.bf16 has k = 16, and inst.k is bound to 8"),
        ("sm_80", [("warp(2) * reg(2) * inst.m(16)", "inst.m(16) * warp(2) * reg(2)")],
         "acc0: mma.m16n8k16.f32.bf16 has its part of a0 side by side: what is bound to the instruction stands last in "
         "the binding"),
        ("sm_80", [("reg(2) * inst.n(8)", "inst.n(8) * reg(2)")],
         "acc0: mma.m16n8k16.f32.bf16 has its part of a1 side by side"),
        ("sm_80", [("reg(2) * inst.k(16)", "inst.k(16) * reg(2)")],
         "acc0: mma.m16n8k16.f32.bf16 has its part of r0 side by side"),
        ("sm_80", [("mma.m16n8k16.f32.bf16", "fma.f32")],
         "acc0 binds axes of an instruction, and fma.f32 has none"),
        ("sm_80", [("mma.m16n8k16.f32.bf16", "mmma.m16n8k16.f32.bf16")],
         "unknown instruction mmma.m16n8k16.f32.bf16; known: fma.f32,"),
        ("sm_86", [("ring=4", "ring=17")],
         "mm: the schedule needs 104448 bytes of shared memory, and sm_86 has 101376"),
        ("sm_90a", [("ring=4", "ring=40")],
         "mm: the schedule needs 245760 bytes of shared memory, and sm_90a has 232448"),
    ],
)  # fmt: skip
def test_a_machine_has_not_everything(target: str, changes: list[tuple[str, str]], reason: str) -> None:
    text = TENSOR_CORES.replace("sm_90a", target)
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    with pytest.raises(UserError, match=re.escape(reason)):
        lowered(matmul, tensors(*HALVES, dtype=torch.bfloat16), target, schedules=(text,))


def test_turing_has_no_asynchronous_copies() -> None:
    text = CUDA_CORES.format(target="sm_75").replace('by="ld", pad', 'by="cp.async", pad')
    with pytest.raises(
        UserError, match=re.escape("mm: w is brought in by cp.async, which needs sm_80, and the target is sm_75")
    ):
        lowered(matmul, tensors((50, 53), (53, 90)), "sm_75", schedules=(text,))


def test_more_threads_than_a_block_has() -> None:
    text = (
        ROWS.replace("time(4) * warp(4)", "warp(64)")
        .replace("lane(32) * reg(2)", "lane(32)")
        .replace("reg(4) * warp(4)", "warp(64)")
    )
    text = text.replace("warp(64)", "reg(1) * warp(64)")
    with pytest.raises(
        UserError, match=re.escape("mul: the schedule needs 2048 threads in a block, and sm_90a has 1024")
    ):
        lowered(norm, tensors((5, 1024)), "sm_90a", schedules=(text,))


@pytest.mark.parametrize("level", ["warpgroup(1) * grid(5)"])
def test_levels_nothing_derives_yet_say_so(level: str) -> None:
    with pytest.raises((UserError, Limitation), match=r"cluster|come first"):
        lowered(norm, tensors((5, 1024)), "sm_90a", schedules=(ROWS.replace("grid(5)", level),))


def test_several_schedules_in_one_text_and_in_several() -> None:
    def two(x: Any, y: Any) -> Any:
        return norm(x), torch.softmax(y, -1)

    args = tensors((5, 1024), (3, 64))
    chosen = lowered(two, args, "sm_90a")
    schedules = {s.kernel: str(s) for _, s in chosen.lowering.at("tile").schedules}
    assert len(schedules) == 2
    for texts in (("\n".join(schedules.values()),), tuple(schedules.values())):
        again = lowered(two, args, "sm_90a", schedules=texts)
        assert again.program == chosen.program
        fired = [e.subject for e in again.lowering.log.events if e.rule == "pin" and e.fired]
        assert sorted(fired) == sorted(schedules)
