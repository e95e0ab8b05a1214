"""Kernels that read along one dimension of memory and write along another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.programs import Lowered, lowered

from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.interp.costs import Count
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.schedule import Like
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile.reductions.pieces import together
from terrazzo.rules.loop_to_tile.walked.touched import touched
from terrazzo.targets.cuda.emit import emit
from terrazzo.targets.cuda.predict import predict


def images(x: Any) -> Any:
    return x.permute(0, 2, 3, 1).contiguous()


def added(x: Any, y: Any) -> Any:
    """One is read along what is written, the other across."""
    return (x.transpose(1, 2) + y).relu()


def scaled(x: Any, w: Any) -> Any:
    return x.t().contiguous() * w


def sectors(found: Lowered) -> tuple[float, float]:
    """Of global memory that warps ask for, as a multiple of those that hold what is read, and what is written."""
    (kernel,) = found.kernels
    total = {"read": Count(), "write": Count()}
    for (_, kind), count in predict(kernel).costs.accesses.items():
        total[kind.removeprefix("global ")].add(count)
    return tuple(c.sectors * 32 / max(1, c.bytes) for c in total.values())  # type: ignore[return-value]


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("fn", "shapes", "dtype"),
    [
        (images, [(2, 32, 48, 48)], torch.bfloat16),
        (images, [(4, 64, 40, 50)], torch.float32),
        (added, [(4, 64, 1000), (4, 1000, 64)], torch.bfloat16),
        (scaled, [(300, 520), (300,)], torch.float32),
        (images, [(1, 24, 7, 600)], torch.float16),
    ],
)
def test_lanes_lie_along_what_is_read(fn: Any, shapes: list[tuple[int, ...]], dtype: torch.dtype, target: str) -> None:
    """Sectors are read whole, and a thread writes half of one at least; nobody reads a sector for each element."""
    torch.manual_seed(1)
    args = tuple(torch.randn(s).to(dtype) for s in shapes)
    found = lowered(fn, args, target)
    assert "lanes lie along what is read" in " ".join(e.reason for e in found.lowering.log.events)
    read, written = sectors(found)
    assert read <= 2.2 and written <= 2.2
    (ours,) = found.simulated()
    np.testing.assert_array_equal(np.asarray(ours, np.float64), fn(*args).double().numpy())


@pytest.mark.parametrize(("fn", "both"), [(images, False), (scaled, True)])
def test_columns_that_are_no_vectors_are_stored_by_neighbouring_lanes(fn: Any, both: bool) -> None:
    """Where rows of what is written have an odd length, lanes lie along them; and along what is read, too, where rows
    are not so short that those that lie behind each other are written as one.
    """
    args = (torch.randn(2, 33, 20, 20).bfloat16(),) if fn is images else (torch.randn(301, 20), torch.randn(301))
    found = lowered(fn, args, "sm_90a")
    assert ("lanes lie along what is read and" in " ".join(e.reason for e in found.lowering.log.events)) == both
    assert sectors(found)[1] <= 2.2
    (ours,) = found.simulated()
    np.testing.assert_array_equal(np.asarray(ours, np.float64), fn(*args).double().numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((4, 24, 28, 36, 40), (0, 3, 1, 4, 2)),
        ((31, 65, 70), (2, 1, 0)),
        ((60, 20, 20), (0, 2, 1)),
        ((8, 128, 72), (2, 0, 1)),
    ],
)
def test_a_warp_has_a_rectangle(shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of vectors, or of elements that lie side by side: what is written is nearly whole sectors."""
    torch.manual_seed(1)
    x = torch.randn(shape).to(dtype)
    found = lowered(lambda x: x.permute(order).contiguous(), (x,), "sm_90a")
    ((_, schedule),) = found.lowering.at("tile").schedules
    assert sum(any(f.level == "lane" for f in b) for _, b in schedule.axes if not isinstance(b, Like)) >= 2
    assert sectors(found)[1] <= 2.8
    (ours,) = found.simulated()
    np.testing.assert_array_equal(np.asarray(ours, np.float64), x.permute(order).double().numpy())


def test_windows_that_overlap_are_not_crossed() -> None:
    """Of these, what is read runs along what is written, too."""
    x = torch.randn(2, 8, 28, 28)
    found = lowered(lambda x: torch.nn.functional.unfold(x, 3, padding=1), (x,), "sm_90a")
    assert "lanes lie along what is read" not in " ".join(e.reason for e in found.lowering.log.events)
    (ours,) = found.simulated()
    np.testing.assert_array_equal(np.asarray(ours), torch.nn.functional.unfold(x, 3, padding=1).numpy())


def test_rows_that_begin_anywhere_are_stored_by_neighbouring_lanes() -> None:
    """A thread that stored its neighbours one by one would touch every sector as often as it has elements."""
    x = torch.randn(64, 2051).bfloat16()
    found = lowered(lambda x: torch.nn.functional.pad(x, (0, 6))[:, :2051] * 2, (x,), "sm_90a")
    _, written = sectors(found)
    assert written <= 1.6


def test_points_are_fewer_where_registers_run_out() -> None:
    """States of sixteen chunks, each made of the one before and stored: eight of them at a time are too many."""

    def states(x: Any, decay: Any) -> Any:
        state, found = torch.zeros_like(x[:, 0]), []
        for k in range(x.shape[1]):
            found.append((state.bfloat16(), (state * 0.5).bfloat16(), torch.tanh(state).bfloat16()))
            state = state * decay[:, k, :, None] + x[:, k]
        return tuple(y for three in found for y in three)

    x, decay = torch.empty(16, 24, 256, 256, device="meta"), torch.empty(16, 24, 256, device="meta")
    found = lowering(capture(states, (x, decay), {}).program, Options(target="sm_90a"))
    reasons = [e.reason for e in found.log.events if e.pass_name == "schedule" and e.fired]
    assert any("of its own at a time" in r for r in reasons)
    assert not any("a point at a time" in r for r in reasons)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda x, w: torch.softmax(x * w, -1), ((7, 1000), (1000,))),
        (lambda x: (x * x).sum(-1), ((70, 333),)),
        (lambda x: x.sum(0), ((300, 70),)),
    ],
    ids=["softmax", "rows", "columns"],
)
def test_threads_that_share_rows_may_take_an_element_at_a_time(fn: Any, shapes: Any) -> None:
    """Where a row's terms are too long for the registers of several at a time, a row a thread would be far slower."""
    args = tuple(torch.randn(s) for s in shapes)
    done = lowered(fn, args, "sm_90a")
    kernel = next(s for s in done.lowering.at("tile").loop.steps if isinstance(s, l.Kernel))
    found = {what: own for own, _, what in together(kernel, gpu("sm_90a"))}
    (own,) = (x for what, x in found.items() if what.endswith("an element at a time"))
    assert "reg(" not in str(own).replace("a0 =", "").split("site", 1)[1] and "time(" in str(own)
    (ours,) = lowered(fn, args, "sm_90a", schedules=(str(own),)).simulated()
    np.testing.assert_allclose(np.asarray(ours), fn(*(x.double() for x in args)).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "by"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.bfloat16, 4)])
def test_pixels_that_become_channels_are_loaded_as_vectors(dtype: torch.dtype, by: int) -> None:
    """Sectors are read and written whole."""
    torch.manual_seed(1)
    args = (torch.randn(2, 3, 16 * by, 64 * by).to(dtype),)
    found = lowered(lambda x: torch.nn.functional.pixel_unshuffle(x, by), args, "sm_90a")
    assert "far apart" in " ".join(e.reason for e in found.lowering.log.events)
    assert sectors(found) == (1.0, 1.0)
    (ours,) = found.simulated()
    np.testing.assert_array_equal(np.asarray(ours, np.float32), found.fn(*args).float().numpy())


@pytest.mark.parametrize(
    ("channels", "dtype"), [(3, torch.float32), (8, torch.float32), (7, torch.bfloat16), (12, torch.bfloat16)]
)
def test_a_few_channels_that_become_planes_are_read_by_one_thread(channels: int, dtype: torch.dtype) -> None:
    """However many they are: lanes lie along the planes, so sectors of these are written whole."""
    torch.manual_seed(1)
    args = (torch.randn(2, 23, 32, channels).to(dtype),)
    found = lowered(lambda x: x.permute(0, 3, 1, 2).contiguous(), args, "sm_90a")
    assert "far apart" in " ".join(e.reason for e in found.lowering.log.events)
    assert sectors(found)[1] <= 1.1
    (ours,) = found.simulated()
    np.testing.assert_array_equal(np.asarray(ours, np.float32), found.fn(*args).float().numpy())


@pytest.mark.parametrize("channels", [3, 5, 9, 12, 15, 17, 31, 64, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_channels_become_planes_as_fast_as_memory(channels: int, dtype: torch.dtype) -> None:
    """By the model, which says what blocks touch."""
    x, machine = torch.empty(16, 154449, channels, dtype=dtype, device="meta"), gpu("sm_90a")
    found = lowering(capture(lambda x: x.transpose(1, 2).contiguous(), (x,), {}).program, Options(target="sm_90a"))
    ((_, schedule),) = found.at("tile").schedules
    (kernel,) = found.at("tile").loop.steps
    assert isinstance(kernel, l.Kernel)
    once = 2 * x.numel() * dtype.itemsize / machine.memory
    assert touched(kernel, schedule, machine) - machine.launch <= 1.4 * once


def test_many_blocks_of_a_warp_are_one() -> None:
    """Their warps have a point of another axis each."""
    found = lowered(lambda x: x.permute(0, 2, 1).contiguous(), (torch.randn(8000, 32, 4),), "sm_90a")
    (kernel,) = found.kernels
    assert kernel.threads == 256 and kernel.grid == 1000


def test_parts_of_rows_with_room_behind_them_are_stored_as_vectors() -> None:
    args = torch.randn(128, 200, 300), torch.randn(128, 300, 100)
    found = lowered(torch.bmm, args, "sm_90a", fp32="split")
    first = found.kernels[0]
    assert len(first.writes) == 3 and "move<4>(" in emit(first)[1] and "% 100)] =" not in emit(first)[1]
