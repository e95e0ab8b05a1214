"""Scans whose steps threads share: lanes, warps and tiles find what comes before theirs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.programs import lowered
from tests.kernels.streams import faults
from tests.kernels.test_schedules import pinned

from terrazzo.errors import Limitation, UserError
from terrazzo.front.capture import capture
from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import topological
from terrazzo.ir.parse import parse
from terrazzo.options import Options
from terrazzo.pipelines import LOWER, lowering, stages
from terrazzo.rewrite.rule import Log


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape).to(dtype)


def few(*shape: int) -> torch.Tensor:
    """Whole numbers of which many are alike, and a NaN."""
    torch.manual_seed(2)
    found = torch.randint(-9, 9, shape).float()
    found.view(-1)[found.numel() * 2 // 3] = torch.nan
    return found


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "a row in a tile": (lambda x: x.cumsum(-1), (x(5, 300),)),
    "rows with a rest": (lambda x: x.cumsum(-1), (x(3, 2051),)),
    "a long row": (lambda x: x.cumsum(-1), (x(50001),)),
    "pieces of long rows": (lambda x: x.exp().cumsum(-1) * 2, (x(2, 12288),)),
    "pieces of columns": (lambda x: x.cumsum(0), (x(10240, 3),)),
    "pieces of rows of 16 bits": (lambda x: x.cumsum(-1), (x(8192, dtype=torch.bfloat16),)),
    "pieces of several": (lambda x, y: x.cumsum(-1) / (1 + y.cumsum(-1)), (x(3, 8192), x(3, 8192).exp())),
    "pieces of positions": (lambda x: (x > 0).cumsum(-1), (x(2, 8192),)),
    "odd pieces of columns": (lambda x: x.cumsum(0).exp(), (x(4099, 3) / 64,)),
    "odd pieces of rows of 16 bits": (lambda x: x.cumsum(-1), (x(2, 4099, dtype=torch.bfloat16),)),
    "odd pieces of several": (lambda x, y: x.cumsum(-1) / (1 + y.cumprod(-1)), (x(3, 4099), x(3, 4099).sigmoid())),
    "odd pieces of log-sum-exp": (lambda x: x.logcumsumexp(0), (x(4099, 3),)),
    "odd pieces of the best and where": (lambda x: x.cummax(-1), (few(2, 4099),)),
    "odd pieces in a batch": (lambda x: x.cumsum(1), (x(2, 4099, 2),)),
    "short rows": (lambda x: x.cumsum(-1), (x(701, 3),)),
    "many short rows": (lambda x: x.cumsum(-1), (x(40, 6, 20),)),
    "columns": (lambda x: x.cumsum(0), (x(600, 70),)),
    "columns in the middle": (lambda x: x.cumsum(1), (x(2, 100, 40),)),
    "two columns": (lambda x: x.cumsum(0), (x(3000, 2),)),
    "16 bits": (lambda x: x.cumsum(-1), (x(6, 4096, dtype=torch.bfloat16),)),
    "columns of 16 bits": (lambda x: x.cumsum(0), (x(600, 70, dtype=torch.bfloat16),)),
    "the best and where": (lambda x: x.cummax(-1), (few(5, 1000),)),
    "the best of columns": (lambda x: x.cummin(0), (few(1000, 5),)),
    "log-sum-exp": (lambda x: x.logcumsumexp(-1), (x(4, 777),)),
    "products": (lambda x: x.cumprod(-1), (x(4, 300).sigmoid() + 0.5,)),
    "what is computed on the way": (lambda x, m: torch.where(m > 0, x, 0).cumsum(-1) * m, (x(4, 640), x(4, 640))),
    "from the end": (lambda x: x.flip(-1).cumsum(-1).flip(-1), (x(4, 640),)),
    "from the end, with a rest": (lambda x, y: x.flip(-1).cumsum(-1).flip(-1) * y, (x(3, 2051), x(3, 2051))),
    "from the end of columns": (lambda x: x.flip(0).cumsum(0).flip(0).exp2(), (x(600, 70) / 64,)),
    "from the end in the middle": (lambda x: x.flip(1).cumsum(1).flip(1), (x(2, 100, 40),)),
    "from the end in pieces": (lambda x: x.flip(-1).cumsum(-1).flip(-1), (x(2, 12288),)),
    "from the end in odd pieces": (lambda x: x.flip(0).logcumsumexp(0).flip(0), (x(4099, 3),)),
    "several from the end": (
        lambda x, y: x.flip(-1).cumsum(-1).flip(-1) / (1 + y.flip(-1).cumprod(-1).flip(-1)),
        (x(3, 512), x(3, 512).sigmoid()),
    ),
    "from the end in 16 bits": (lambda x: x.flip(-1).cumsum(-1).flip(-1), (x(6, 4096, dtype=torch.bfloat16),)),
    "from the end and from the beginning": (lambda x: x.cumsum(-1) + x.flip(-1).cumsum(-1).flip(-1), (x(4, 640),)),
    "after a softmax": (lambda x: x.softmax(-1).cumsum(-1), (x(5, 300),)),
    "positions": (lambda x: (x.cumsum(1) * x).long(), ((x(4, 200) > 0).long(),)),
}


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", CASES)
def test_it_means_what_its_steps_mean(name: str, seed: int | None) -> None:
    fn, args = CASES[name]
    found = lowered(fn, args, "sm_90a")
    assert any(e.rule == "scan" and e.fired for e in found.lowering.log.events)
    out = simulator.run(found.program, found.inputs, seed=seed)
    for a, b in zip(out, loop.run(found.lowering.at("loop"), found.inputs), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        rough = args[0].dtype == torch.bfloat16
        np.testing.assert_allclose(a, b, rtol=1e-2 if rough else 1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "dim"), [((1 << 22,), 0), ((19, 131072), 1), ((131072, 19), 0), ((100003, 3), 0), ((3, 100003), 1)]
)
def test_few_rows_that_are_long_fill_a_gpu(shape: tuple[int, ...], dim: int) -> None:
    options = Options(target="sm_90a", libraries="never")
    done = lowering(capture(lambda x: x.cumsum(dim), (torch.empty(shape, device="meta"),)).program, options)
    *before, last = done.at("kernel").steps
    assert last.grid >= 132 and not faults(last, "sm_90a")
    assert len(before) >= 2 and all(b.name.startswith("cumsum_") for s in before for b in s.writes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_the_end_it_is_one_kernel_with_wide_accesses(dtype: torch.dtype) -> None:
    """As gradients of scans are, and suffix sums: who reads them from the end takes the steps."""
    given = torch.empty(16384, 512, device="meta", dtype=dtype)
    fn = lambda x, y: x.flip(-1).cumsum(-1).flip(-1) * y  # noqa: E731
    done = lowering(capture(fn, (given, given)).program, Options(target="sm_90a", libraries="never"))
    (kernel,) = done.at("kernel").steps
    moves = [s for s in k.walk(kernel.body) if isinstance(s, k.Move)]
    assert [s.count for s in moves] == [4, 4, 4]
    assert not any(isinstance(s, l.Store) and s.buffer in kernel.writes for s in k.walk(kernel.body))


SHARED = """\
with schedule("cumsum", target="sm_90a"):
    a0 = grid(3) * lane(2)
    a1 = {steps}
"""


@pytest.mark.parametrize(
    "steps", ["time(3) * warp(4) * lane(16) * reg(4)", "time(10) * lane(16) * reg(4)", "warp(8) * lane(16) * reg(5)"]
)
def test_a_scan_is_bound_to_threads(steps: str) -> None:
    found = pinned(lambda x: x.cumsum(-1), (x(6, 640),), SHARED.format(steps=steps))
    lanes, warps = (int(m[1]) if (m := re.search(rf"{w}\((\d+)\)", steps)) else 1 for w in ("lane", "warp"))
    (plan,) = (p for _, p in found.lowering.at("tile").plans)
    assert f'combine(site="acc0", lanes={lanes}' in str(plan)
    (kernel,) = found.kernels
    assert kernel.warps == warps
    assert sum(isinstance(s, k.Let) and isinstance(s.term, k.Shuffle) for s in k.walk(kernel.body)) == 4


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ("grid(2) * lane(16) * reg(20)", "a1 is bound to blocks, and a scan along it goes from one to the next"),
        ("lane(16) * warp(4) * reg(10)", "bound as time, warp, lane, reg, each once and in this order"),
    ],
)
def test_what_a_scan_cannot_be_bound_to(steps: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        lowered(lambda x: x.cumsum(-1), (x(6, 640),), "sm_90a", schedules=(SHARED.format(steps=steps),))


def test_sums_inside_the_steps_of_a_scan_leave_it_in_order() -> None:
    program = parse("""
@loop
def f(x: f32[3, 64, 40]):
    with kernel('z', z=f32[3, 64]):
        for a0 in free(3):
            for a1 in scan(64):
                for r0 in reduce(40):
                    in0 = x[a0, a1, r0]
                    acc0 <- max(in0)
                acc1 <- sum(acc0)
                z[a0, a1] = acc1
    return (z,)
""")
    given = {"x": x(3, 64, 40).numpy()}
    done = lowering(program, Options(target="sm_90a"))
    assert not any(e.rule == "scan" and e.fired for e in done.log.events)
    np.testing.assert_allclose(simulator.run(done.at("kernel"), given)[0], loop.run(program, given)[0], rtol=1e-5)
    shared = 'with schedule("z", target="sm_90a"):\n    a0 = grid(3)\n    a1 = lane(32) * reg(2)\n'
    with pytest.raises(Limitation, match="a1 is bound to threads, and loops stand inside the steps of its scan"):
        lowering(program, Options(target="sm_90a", schedules=(shared,)))


LARGE = {
    "rows": (lambda x: x.cumsum(-1), (4096, 4096)),
    "long rows": (lambda x: x.cumprod(-1), (256, 65536)),
    "columns": (lambda x: x.cumsum(0), (4096, 4096)),
    "columns in the middle": (lambda x: x.cumsum(1), (64, 512, 512)),
}


@pytest.mark.parametrize("name", LARGE)
def test_memory_bounds_it(name: str) -> None:
    fn, shape = LARGE[name]
    options = Options(target="sm_90a", libraries="never")
    done = lowering(capture(fn, (torch.empty(shape, device="meta"),)).program, options)
    (kernel,) = done.at("kernel").steps
    assert not faults(kernel, "sm_90a")
    assert kernel.grid * kernel.warps >= 16 * 132


def test_a_reduction_is_not_taken_in_every_step() -> None:
    done = lowering(capture(lambda x: x.sum(-1).cumsum(0), (torch.empty(4096, 4096, device="meta"),)).program,
                    Options(target="sm_90a"))  # fmt: skip
    assert [s.name for s in done.loop.steps] == ["sum_1", "cumsum"]
    assert any("in every one of its steps" in e.reason for e in done.log.events)


def test_columns_of_16_bits_are_one_kernel() -> None:
    given = torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16)
    done = lowering(capture(lambda x: x.cumsum(0), (given,)).program, Options(target="sm_90a", libraries="never"))
    assert len(done.loop.steps) == 1


def test_what_is_made_of_a_scan_does_not_take_it_again() -> None:
    """Nor does a reduction stand in its steps: positions are counted once, and looked up by who reads them."""

    def embedded(ids: Any, places: Any) -> Any:
        x = torch.nn.functional.embedding(ids.ne(1).cumsum(1), places)
        return x - x.mean(-1, keepdim=True)

    ids, places = torch.zeros(4, 256, dtype=torch.int64), torch.zeros(300, 64)
    program = capture(embedded, (ids, places), {}).program
    upper = LOWER[: LOWER.index("store_as_read")]
    steps = stages(program, Options(target="sm_90a", libraries="never"), Log(), upper)[-1][1].steps
    scanned = [s for s in steps if any(isinstance(x, l.Scan) for x in topological(s.stores))]
    assert [[a.extent for a in s.axes] for s in scanned] == [[4, 256]]
    assert not any(isinstance(x, l.Reduce) for s in scanned for x in topological(s.stores))
