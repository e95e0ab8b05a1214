"""Windows added up again: a gather of few taps, and no scatter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered

from terrazzo.front.capture import capture
from terrazzo.interp import loop
from terrazzo.ir.dialects import loop as l
from terrazzo.options import Options
from terrazzo.pipelines import lowering


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(shape).to(dtype)


def folded(size: Any, kernel: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda x: F.fold(x, size, kernel, **kwargs)


def unfolded(shape: tuple[int, ...], size: int, step: int, dim: int = -1) -> Callable[[Any], Any]:
    """The gradient of windows along a dimension."""
    return lambda g: torch.ops.aten.unfold_backward(g, shape, dim, size, step)


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "3x3": (folded(8, 3, padding=1), (x(2, 27, 64),)),
    "one image": (folded(8, 3, padding=1), (x(27, 64),)),
    "tiles": (folded((8, 12), (2, 3), stride=(2, 3)), (x(2, 30, 16),)),
    "every second": (folded(9, 3, stride=2, padding=1), (x(2, 18, 25),)),
    "with gaps": (folded(11, 3, stride=3), (x(2, 9, 9),)),
    "wider steps than windows": (folded(11, 2, stride=4), (x(1, 8, 9),)),
    "dilated": (folded((9, 10), (3, 2), dilation=(2, 3), padding=(1, 2)), (x(2, 12, 77),)),
    "dilated, every second": (folded((9, 11), 3, dilation=2, padding=2, stride=(2, 3)), (x(2, 9, 20),)),
    "16 bits": (folded(8, 3, padding=1), (x(2, 27, 64, dtype=torch.bfloat16),)),
    "frames": (unfolded((3, 40), 7, 3), (x(3, 12, 7),)),
    "frames apart": (unfolded((3, 40), 2, 3), (x(3, 13, 2),)),
    "frames of rows": (unfolded((9, 5), 4, 1, 0), (x(6, 5, 4),)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_place_adds_up_its_windows(name: str) -> None:
    fn, args = CASES[name]
    found = lowered(fn, args, "sm_90a")
    assert not any(isinstance(s, l.Call) for s in found.lowering.loop.steps)
    (ours,) = loop.run(found.lowering.loop, found.inputs)
    exact = fn(*(a.double() for a in args)).numpy()
    rough = args[0].dtype == torch.bfloat16
    np.testing.assert_allclose(np.asarray(ours, np.float64), exact, rtol=1e-2 if rough else 1e-5, atol=1e-5)
    simulated = np.asarray(found.simulated()[0], np.float64)
    np.testing.assert_allclose(simulated, np.asarray(ours, np.float64), rtol=1e-5, atol=1e-6)


def test_it_is_one_kernel_that_reads_each_window_once() -> None:
    x = torch.empty(32, 576, 3136, device="meta", dtype=torch.bfloat16)
    done = lowering(capture(folded(56, 3, padding=1), (x,)).program, Options(target="sm_90a"))
    (step,) = done.loop.steps
    assert isinstance(step, l.Kernel)


@pytest.mark.parametrize(("fn", "pool", "shape"), [
    (F.max_unpool2d, F.max_pool2d, (2, 3, 8, 8)), (F.max_unpool3d, F.max_pool3d, (1, 2, 4, 4, 4)),
])  # fmt: skip
def test_few_elements_go_back_to_their_places_and_many_by_one_op(fn: Any, pool: Any, shape: tuple[int, ...]) -> None:
    values, index = pool(x(*shape), 2, return_indices=True)
    found = lowered(lambda v, i: fn(v, i, 2), (values, index), "sm_90a")
    assert not any(isinstance(s, l.Call) for s in found.lowering.loop.steps)
    np.testing.assert_array_equal(found.simulated()[0], fn(values, index, 2).numpy())
    size = (64, *values.shape[1:-2], 64, 64)
    many = (torch.empty(size, device="meta", dtype=k) for k in (torch.float32, torch.int64))
    done = lowering(capture(lambda v, i: fn(v, i, 2), tuple(many)).program, Options(target="sm_90a"))
    assert [s.name for s in done.loop.steps if isinstance(s, l.Call)] == [f"aten.{fn.__name__}.default"]
