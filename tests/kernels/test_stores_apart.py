"""Kernels that fusion made of several, which store at points of different axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from terrazzo.front.capture import capture
from terrazzo.ir.dialects import kernel as k
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.targets.cuda.predict import predict


def messages(x: Any, index: Any, degree: Any) -> Any:
    """Rows that data picks, weighted by a number for each, which is a result too."""
    weight = torch.rsqrt(degree[index] + 1).to(x.dtype)
    return weight, x[index] * weight[:, None]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_has_a_kernel(dtype: torch.dtype) -> None:
    """Lanes lie along memory in each: no warp writes a sector for each of its elements."""
    args = meta(50000, 16, dtype=dtype), meta(400000, dtype=torch.int64), meta(50000, dtype=torch.float32)
    done = lowering(capture(messages, args, {}).program, Options(target="sm_90a"))
    assert [e for e in done.log.events if e.rule == "merge" and e.fired]  # which is what is undone
    kernels = [s for s in done.at("kernel").steps if isinstance(s, k.Kernel)]
    assert len(kernels) == 2 and len(kernels[0].writes) == len(kernels[1].writes) == 1
    for kernel in kernels:
        found = [c for (_, kind), c in predict(kernel).costs.accesses.items() if kind == "global write"]
        assert sum(c.sectors * 32 for c in found) <= 1.1 * sum(c.bytes for c in found)


def test_rows_that_fill_a_warp_stay_together() -> None:
    """A number for each row is stored beside its row where lanes lie along that: a launch would take longer."""

    def both(x: Any, y: Any) -> Any:
        s = torch.exp(y)
        return s, x * s[:, None]

    args = meta(256, 8192), meta(256)
    steps = lowering(capture(both, args, {}).program, Options(target="sm_90a")).at("kernel").steps
    assert len(steps) == 1


def test_many_axes_and_lanes_along_memory() -> None:
    """The longest axis is not taken where most of what memory holds runs along another."""

    def both(x: Any, y: Any) -> Any:
        s = torch.exp(y)
        return s, x * s[:, None]

    args = meta(3000, 512), meta(3000)
    done = lowering(capture(both, args, {}).program, Options(target="sm_90a"))
    (kernel,) = done.at("kernel").steps
    found = [c for (_, kind), c in predict(kernel).costs.accesses.items() if kind.startswith("global")]
    assert sum(c.sectors for c in found) * 32 <= 1.5 * 2 * 3000 * 512 * 2


def test_a_number_for_each_row_is_apart_from_what_is_read_across() -> None:
    """Lanes lie along what is read and what is written where that is stored alone."""

    def both(x: Any, y: Any, s: Any) -> Any:
        return torch.exp(s), (x - y) * s[:, None, None]

    x = meta(16, 16, 112, 112).to(memory_format=torch.channels_last)
    done = lowering(capture(both, (x, meta(16, 16, 112, 112), meta(16)), {}).program, Options(target="sm_90a"))
    kernels = [s for s in done.at("kernel").steps if isinstance(s, k.Kernel)]
    found = [c for x in kernels for (_, kind), c in predict(x).costs.accesses.items() if kind.startswith("global")]
    assert len(kernels) == 2
    assert sum(c.sectors for c in found) * 32 <= 1.1 * sum(c.bytes for c in found)
