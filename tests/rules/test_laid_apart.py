"""Results of a kernel that lie along different axes: which of them are turned by a kernel of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.ir.dialects import loop
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile.estimate import estimate


def waves(x: Any, w: Any, v: Any) -> Any:
    """A filter bank as a codec begins with one: what gradients want lies in rows, what comes next reads channels."""
    y = torch.nn.functional.conv1d(torch.nn.functional.pad(x, (6, 0)), w)
    s = torch.sin(y)
    return y, s, torch.nn.functional.conv1d(y + s * s, v)


def times(fn: Any, *shapes: tuple[int, ...]) -> tuple[Any, float, float]:
    """The events of the rule, and what kernels take and have to, in us."""
    args = tuple(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes)
    done = lowering(capture(fn, args, {}).program, Options(target="sm_90a"))
    found = [estimate(k, gpu("sm_90a")) for k in done.loop.steps if isinstance(k, loop.Kernel)]
    events = [e for e in done.log.events if e.rule == "laid_apart"]
    return events, sum(e.time for e in found) / 1e3, sum(e.least for e in found) / 1e3


def test_a_window_writes_along_one_axis() -> None:
    events, time, least = times(waves, (8, 1, 16384), (64, 1, 7), (64, 64, 3))
    assert [e.fired for e in events] == [True]
    assert least < time < 60  # 110 as they lay


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (waves, ((2, 1, 64), (64, 1, 7), (64, 64, 3))),  # too few to be worth a kernel
        (lambda x: (x.exp(), x.sin().transpose(1, 2).contiguous()), ((8, 64, 16384),)),  # nothing is reduced
        (lambda x, w: torch.nn.functional.conv1d(x, w).transpose(1, 2).contiguous(), ((8, 1, 16384), (64, 1, 7))),
    ],
)
def test_others_stay(fn: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    assert not times(fn, *shapes)[0]
