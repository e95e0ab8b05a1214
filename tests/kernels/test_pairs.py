"""Reductions over pairs that are no products, as distances are: a thread takes several points along both of the axes
that operands do not share, and long sums are added up in parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels import programs
from tests.kernels.programs import b, r

from terrazzo.errors import UserError
from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile.estimate import estimate
from terrazzo.rules.loop_to_tile.walked import windows
from terrazzo.rules.loop_to_tile.walked.window_forms import afresh, form_of

PAIRS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "distances": (lambda x, y: torch.cdist(x, y, p=1.0), (r(40, 64), r(36, 64))),
    "of a batch": (lambda x, y: torch.cdist(x, y, p=1.0), (r(2, 24, 32), r(2, 20, 32))),
    "the largest difference": (lambda x, y: torch.cdist(x, y, p=torch.inf), (r(40, 24), r(36, 24))),
    "of half the digits": (lambda x, y: (x[:, None] - y[None]).abs().mean(-1), (b(40, 32), b(36, 32))),
    "squares": (lambda x, y: ((x[:, None] - y[None]) ** 2).sum(-1).rsqrt(), (r(40, 24), r(36, 24))),
    "sums of which the largest": (lambda x, y: (x[:, :, None] + y[None]).amax(1), (r(17, 50), r(50, 33))),
    "an odd number": (lambda x, y: (x[:, None] - y[None]).abs().sum(-1), (r(40, 37), r(36, 37))),
}


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small problems are scheduled as large ones."""
    monkeypatch.setattr(windows, "BUSY", 0.0)
    windows.window.cache_clear()
    yield
    windows.window.cache_clear()


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("target", programs.TARGETS)
def test_pairs_are_right(name: str, target: str, many: None) -> None:
    fn, args = PAIRS[name]
    found = programs.lowered(fn, args, target)
    wanted = fn(*(x.double() for x in args)).numpy()
    error = 2.0**-20 if args[0].dtype is torch.float32 else 2.0**-7
    assert np.abs(found.simulated()[0].astype(np.float64) - wanted).max() <= error * np.abs(wanted).max()


def of(fn: Any, *shapes: tuple[int, ...]) -> Any:
    args = tuple(torch.empty(s, device="meta") for s in shapes)
    return lowering(capture(fn, args, {}).program, Options(target="sm_90a", libraries="never"))


def test_a_thread_takes_pairs() -> None:
    """Each operand is loaded for all points of a thread, an eighth of the time of threads that share rows."""
    found = of(lambda x, y: torch.cdist(x, y, p=1.0), (2048, 64), (2048, 64))
    copy, kernel = found.at("tile").loop.steps
    assert copy.stores[0].buffer.type.element_strides == (1, 2048)
    text = str(dict(found.at("tile").schedules)[1])
    assert text.count("jam=True") == 2 and "r0 = time(4) * time(16)" in text
    assert estimate(kernel, gpu("sm_90a")).time < 40e3


@pytest.mark.parametrize(
    ("steps", "parts"),
    [
        (16, (16,)),
        (24, (2, 12)),
        (64, (4, 16)),
        (256, (16, 16)),
        (300, (2, 10, 15)),
        (512, (16, 32)),
        (768, (3, 16, 16)),
        (1000, (10, 10, 10)),
        (1024, (4, 16, 16)),
        (37, ()),
        (2 * 997, ()),
    ],
)
def test_long_sums_are_added_up_in_parts(steps: int, parts: tuple[int, ...]) -> None:
    assert afresh(steps) == parts


def test_sums_that_do_not_divide_are_shared() -> None:
    """A thread by itself would round more than those that have a part each."""
    loop = of(lambda x, y: (x[:, None] - y[None]).abs().sum(-1), (512, 101), (512, 101)).at("tile").loop
    assert form_of(loop.steps[-1]) is None
    loop = of(lambda x, y: (x[:, None] - y[None]).abs().amax(-1), (512, 101), (512, 101)).at("tile").loop
    assert form_of(loop.steps[-1]) is not None


def test_sums_in_parts_round_as_little_as_shared_ones(many: None) -> None:
    """The error of 256 terms is that of a tree, not of a chain."""
    torch.manual_seed(0)
    x, y = torch.rand(64, 256), torch.rand(32, 256) + 1
    found = programs.lowered(lambda x, y: (x[:, None] - y[None]).abs().sum(-1), (x, y), "sm_90a")
    assert "r0 = time(16) * time(16)" in "".join(str(s) for _, s in found.lowering.at("tile").schedules)
    terms = (x[:, None] - y[None]).abs()
    exact = (x[:, None].double() - y[None].double()).abs().sum(-1)
    chain = torch.zeros(64, 32)
    for k in range(256):
        chain += terms[..., k]
    ours = torch.tensor(found.simulated()[0])
    mine, its = (float((z.double() - exact).square().mean().sqrt()) for z in (ours, chain))
    assert mine < its / 2.5


def test_parts_of_parts_round_as_little_as_shared_ones(many: None) -> None:
    """Sums of thousands of terms are added up in parts of parts."""
    torch.manual_seed(0)
    x, y = torch.rand(40, 1536), torch.rand(40, 1536) + 1

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x[:, None] - y[None]).abs().sum(-1)

    found = programs.lowered(fn, (x, y), "sm_90a")
    assert "r0 = time(6) * time(16) * time(16)" in "".join(str(s) for _, s in found.lowering.at("tile").schedules)
    exact = fn(x.double(), y.double())
    ours, its = ((z.double() - exact).square().mean().sqrt() for z in (torch.tensor(found.simulated()[0]), fn(x, y)))
    assert ours < 2 * its


def test_long_rows_of_pairs_are_no_windows_of_threads_that_share_them() -> None:
    """A block for each pair read both rows anew: 4.9 ms by the model."""
    for fn in (lambda x, y: torch.cdist(x, y, p=1.0), lambda x, y: torch.cdist(x, y, p=torch.inf)):
        *_, kernel = of(fn, (2048, 1536), (2048, 1536)).at("tile").loop.steps
        assert estimate(kernel, gpu("sm_90a")).time < 1e6


def test_loops_of_steps_need_points_that_go_together() -> None:
    """Elsewhere an axis has one loop of steps."""
    loop = """
@loop
def f(x: f32[64, 64], y: f32[64, 64]):
    with kernel('z', z=f32[64, 64]):
        for a0 in free(64):
            for a1 in free(64):
                for r0 in reduce(64):
                    in0 = x[a0, r0]
                    in1 = y[a1, r0]
                    v0 = sub(in0, in1)
                    acc0 <- max(v0)
                z[a0, a1] = acc0
    return (z,)
"""
    schedule = """
with schedule("z", target="sm_90a"):
    a0 = grid(64)
    a1 = grid(2) * lane(32)
    with site("acc0"):
        r0 = time(4) * time(16)
"""
    with pytest.raises(UserError, match="come first, in this order, each once"):
        lowering(parse(loop), Options(target="sm_90a", schedules=(schedule,)))
    together = schedule.replace("grid(2) * lane(32)", "grid(1) * lane(32) * reg(2, jam=True)")
    assert lowering(parse(loop), Options(target="sm_90a", schedules=(together,))).at("kernel").steps
