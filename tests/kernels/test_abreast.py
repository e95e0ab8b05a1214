"""Sums that share an instruction: the factor that they have in common is read once, the others lie one behind the
other.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.hw.sass import sass
from tests.kernels.test_joined import lowered, r
from tests.kernels.test_quantised import as_exact_as_eager, numbers

import terrazzo
from terrazzo.errors import UserError
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.parse_plan import parse_plan
from terrazzo.ir.parse_schedule import parse_schedule
from terrazzo.ir.plan import Plan, Stream
from terrazzo.ir.schedule import Schedule
from terrazzo.ir.sites import product
from terrazzo.options import Options
from terrazzo.rules.loop_to_tile.products import warpgroups
from terrazzo.rules.tile.complete import Refused, complete
from terrazzo.rules.tile.verify import verify
from terrazzo.rules.tile_to_kernel.lower import lower
from terrazzo.targets.cuda.check import check

H = gpu("sm_90a")


def gated(x: Any, w: Any, v: Any) -> Any:
    return F.silu(F.linear(x, w)) * F.linear(x, v)


def across(x: Any, w: Any, v: Any) -> Any:
    return torch.tanh(x @ w) * (x @ v)


def three(x: Any, w: Any, v: Any, u: Any) -> Any:
    return F.linear(x, w) * F.linear(x, v) + F.linear(x, u).sigmoid()


def in_float(x: Any, w: Any, v: Any) -> Any:
    """Its results leave registers as they are."""
    return F.linear(x, w).float() * F.linear(x, v).float()


CASES: dict[str, tuple[Any, tuple[torch.Tensor, ...]]] = {
    "gated": (gated, (r(72, 136), r(272, 136), r(272, 136))),
    "memory across": (across, (r(136, 128), r(128, 256), r(128, 256))),
    "in float": (in_float, (r(72, 128), r(272, 128), r(272, 128))),
    "three": (three, (r(72, 64), r(80, 64), r(80, 64), r(80, 64))),
}


def kernel_of(name: str) -> l.Kernel:
    """The sums of a case as one kernel."""
    fn, given = CASES[name]
    steps = lowered(fn, given).at("loop").steps
    (found,) = [s for s in steps if len(s.carried) > 1]
    return found  # type: ignore[no-any-return]


def plans(kernel: l.Kernel) -> list[warpgroups.Plan]:
    """Those of tiles whose sums share an instruction."""
    p = product(kernel)
    assert p is not None
    return [x for x in warpgroups.plans(p, H) if x.tile.abreast > 1]


def scheduled(kernel: l.Kernel, plan: warpgroups.Plan) -> Schedule:
    p = product(kernel)
    assert p is not None
    return warpgroups.schedule(p, plan, H)


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("split", [False, True], ids=["alone", "cluster"])
@pytest.mark.parametrize("name", CASES)
def test_they_are_as_exact_as_eager(name: str, split: bool, groups: int, seed: int | None) -> None:
    """In the fair order and in others, where tiles end within the tensors, and where blocks share what they fetch."""
    fn, given = CASES[name]
    kernel = kernel_of(name)
    every = [x for x in plans(kernel) if (x.tile.split is not None) == split and x.tile.groups == groups]
    assert every
    last = lower(kernel, scheduled(kernel, max(every, key=lambda x: x.tile.n)), H)
    program = k.Program("f", kernel.reads, (last,), kernel.writes)
    check(program, H)
    assert len({s.instruction for s in k.walk(last.body) if isinstance(s, k.MultiplyAsync)}) == 1
    names = [x for x in "xwvu" if x in {b.name for b in kernel.reads}]
    inputs = dict(zip(names, map(numbers, given), strict=True))
    (y,) = simulator.run(program, {b.name: inputs[b.name] for b in kernel.reads}, seed=seed)
    as_exact_as_eager(y, fn, given)


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("each", [1, 2])
def test_warpgroups_that_take_turns_have_them_too(each: int, seed: int | None) -> None:
    fn, given = CASES["gated"]
    kernel = kernel_of("gated")
    plan = next(x for x in plans(kernel) if x.tile.groups == x.tile.each == 1 and x.tile.n == 64 and not x.tile.split)
    turns = scheduled(kernel, plan._replace(tile=replace(plan.tile, each=each, turns=True)))
    assert "math=warpgroup(2), registers=(40, 232), turns=True" in str(turns)
    last = lower(kernel, turns, H)
    program = k.Program("f", kernel.reads, (last,), kernel.writes)
    check(program, H)
    inputs = dict(zip("xwv", map(numbers, given), strict=True))
    (y,) = simulator.run(program, {b.name: inputs[b.name] for b in kernel.reads}, seed=seed)
    as_exact_as_eager(y, fn, given)


def test_their_slabs_lie_one_behind_the_other_and_the_plan_says_so() -> None:
    kernel = kernel_of("gated")
    chosen = scheduled(kernel, plans(kernel)[0])
    plan, _ = complete(kernel, chosen, H)
    assert isinstance(plan, Plan)
    _, first, second = plan.all(Stream)
    assert (first.behind, second.behind) == ("", first.name)
    assert parse_plan(str(plan)) is plan
    verify(kernel, chosen, plan, H)
    apart = Stream(**{**{f: getattr(second, f) for f in second._fields}, "behind": ""})
    lines = tuple(apart if x is second else x for x in plan.lines)
    with pytest.raises(UserError, match="it lies behind"):
        verify(kernel, chosen, Plan(plan.kernel, plan.target, lines), H)


@pytest.mark.parametrize(
    ("name", "old", "new", "why"),
    [
        ("gated", "block(128)", "block(128)", ""),
        ("gated", 'w = smem(by="tma", swizzle=128)', 'w = smem(by="tma", swizzle=64)', "it would lie otherwise than"),
        ("gated", "ring=", "promote=True, ring=", "are not promoted"),
        ("gated", 'x = smem(by="tma"', 'x = reg(by="tma"', "have a first factor in shared memory"),
    ],
)
def test_what_cannot_share_is_refused(name: str, old: str, new: str, why: str) -> None:
    kernel = kernel_of(name)
    plan = next(x for x in plans(kernel) if x.tile.rows is kernel.axes[0] and x.tile.split is None and x.tile.n == 128)
    text = str(scheduled(kernel, plan))
    assert old in text
    found, _ = complete(kernel, parse_schedule(text.replace(old, new)), H)
    assert why in found.reason if isinstance(found, Refused) else not why


@pytest.mark.parametrize(
    ("m", "k", "n", "wide"), [(4096, 4096, 4096, 256), (512, 3584, 18944, 192), (2048, 4096, 14336, 160)]
)
def test_a_gated_layer_is_one_kernel(m: int, k: int, n: int, wide: int, tmp_path: Path) -> None:
    """On the widest instruction, or in turns on one whose tiles fill waves, with no spills."""
    given = tuple(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((m, k), (n, k), (n, k)))
    (kernel,) = lowered(gated, given).at("kernel").steps
    found = "\n".join(sass(kernel, "sm_90a", tmp_path))
    assert f"HGMMA.64x{wide}x16" in found and "STL" not in found


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_is_as_exact_as_eager(name: str) -> None:
    fn, given = CASES[name]
    kernel = kernel_of(name)
    there = tuple(x.cuda() for x in given)
    for plan in plans(kernel)[:8]:
        pinned = str(scheduled(kernel, plan))
        ours = terrazzo.compile(fn, *there, options=Options(libraries="never", schedules=(pinned,)))
        as_exact_as_eager(ours(*there).float().cpu().numpy(), fn, given)
