"""Products whose operands and results lie along an axis of their batch, as those of channels that come last."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.programs import Lowered, lowered, r

from terrazzo.front.capture import capture
from terrazzo.ir.dialects import kernel as k
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.targets.cuda.predict import predict


def outgoing(a: Any, b: Any) -> Any:
    return torch.einsum("bikc,bjkc->bijc", a, b)


def incoming(a: Any) -> Any:
    """Both operands are parts of one tensor."""
    one, other = a.chunk(2, -1)
    return torch.einsum("bkic,bkjc->bijc", one, other) / 7


def right(found: Lowered, *args: Any) -> None:
    wanted = found.fn(*(x.double() for x in args)).numpy()
    ours = found.simulated()[0].astype(np.float64)
    assert np.abs(ours - wanted).max() <= 2**-7 * np.abs(wanted).max()


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_channels_last_are_right(target: str) -> None:
    a, b = r(1, 72, 64, 16).bfloat16(), r(1, 40, 64, 16).bfloat16()
    right(lowered(outgoing, (a, b), target), a, b)
    c = r(1, 64, 64, 32).bfloat16()
    right(lowered(incoming, (c,), target), c)


@pytest.mark.parametrize("fn", [outgoing, incoming])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_they_run_on_tensor_cores(fn: Any, dtype: torch.dtype) -> None:
    """Copies and results are turned by kernels that read and write whole sectors."""
    x = torch.empty((1, 256, 256, 128), dtype=dtype, device="meta")
    args = (x, x) if fn is outgoing else (torch.empty((1, 256, 256, 256), dtype=dtype, device="meta"),)
    done = lowering(capture(fn, args, {}).program, Options(target="sm_90a"))
    kernels = [s for s in done.at("kernel").steps if isinstance(s, k.Kernel)]
    assert sum(bool(any(isinstance(s, k.MultiplyAsync) for s in k.walk(x.body))) for x in kernels) == 1
    for kernel in kernels:
        found = [c for (_, kind), c in predict(kernel).costs.accesses.items() if kind.startswith("global")]
        assert sum(c.sectors * 32 for c in found) <= 2.2 * sum(c.bytes for c in found), kernel.name
