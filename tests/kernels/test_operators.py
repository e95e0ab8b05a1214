"""Single operators at large shapes: what was slower than eager on an H200, and the rule that changed that."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import terrazzo
from terrazzo.front.capture import capture
from terrazzo.interp import kernel as simulator
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.options import Options
from terrazzo.pipelines import stages
from terrazzo.rewrite.rule import Log
from terrazzo.targets.cuda.emit import emit
from terrazzo.targets.cuda.predict import predict

LAST = torch.channels_last


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def kernels(call: Callable[..., Any], *args: Any) -> list[k.Kernel]:
    """Of a call on an H200; none is PyTorch's."""
    program = capture(call, args, {}).program
    steps = stages(program, Options(target="sm_90a", libraries="never"), Log())[-1][1].steps
    assert all(isinstance(s, k.Kernel) for s in steps)
    return list(steps)


def simulated(call: Callable[..., Any], *args: torch.Tensor) -> list[np.ndarray[Any, Any]]:
    """The results of a call on an H200, simulated."""
    captured = capture(call, args, {})
    program = stages(captured.program, Options(target="sm_90a", libraries="never"), Log())[-1][1]
    inputs = {b.name: a.numpy() for b, a in zip(program.inputs, args, strict=True)}
    return [np.asarray(x) for x in simulator.run(program, inputs)]


def interpreted(call: Callable[..., Any], *args: torch.Tensor) -> Any:
    return terrazzo.compile(call, *args, options={"target": "interpreter"})(*args)


def read(kernel: k.Kernel) -> float:
    """The sectors that a kernel reads, by the bytes of what it reads."""
    size = sum(b.type.dtype.size * np.prod(b.type.static_shape) for b in kernel.reads)
    return float(predict(kernel).costs.total("global read").sectors * 32 / size)


def walked(body: Any, loops: int = 0) -> Iterator[tuple[Any, int]]:
    """Statements, and how many loops are around each."""
    for s in body:
        yield s, loops
        yield from walked(getattr(s, "body", ()), loops + isinstance(s, k.For))


# -- images that are resampled -------------------------------------------------------------------------------------


def resampled(mode: str) -> Callable[[Any], Any]:
    return lambda x: F.interpolate(x, size=(112, 112), mode=mode, antialias=True)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_read_once_is_not_looked_up_before(mode: str, dtype: torch.dtype) -> None:
    *weights, image = kernels(resampled(mode), meta(16, 32, 56, 56, dtype=dtype))
    assert [b.name for b in image.reads if b.type.rank == 4] == ["x"]
    assert all(b.type.rank == 2 for s in weights for b in s.writes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lanes_lie_where_memory_runs_when_places_are_computed(dtype: torch.dtype) -> None:
    x = meta(16, 64, 112, 112, dtype=dtype)
    source = emit(kernels(lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), x)[-1])[1]
    assert re.search(r"\+ lane \+ warp \* 32\)\] = |\+ lane\)\] = ", source), source[-600:]


def test_places_that_are_limited_are_not_tested() -> None:
    image = emit(kernels(resampled("bicubic"), meta(16, 32, 56, 56))[-1])[1]
    assert "tz_at(" not in image
    looked_up = emit(kernels(F.embedding, torch.empty(64, 128, dtype=torch.int64, device="meta"), meta(99, 256))[-1])
    assert "tz_at(" in looked_up[1]


def test_points_that_end_together_are_tested_once() -> None:
    x = meta(4, 32, 16, 56, 56)
    source = emit(kernels(lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), x)[-1])[1]
    assert not re.search(r"< 112 \? t_p", source)


# -- group norms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [64, 256])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_group_norm_stores_no_values_in_between(dtype: torch.dtype, last: bool, channels: int) -> None:
    x, w = meta(32, channels, 56, 56, dtype=dtype), meta(channels, dtype=dtype)
    x = x.to(memory_format=LAST) if last else x
    *statistics, points = kernels(lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)), x, w, w)
    assert [b.name for b in points.reads if b.type.rank == 4] == ["x"]
    assert all(np.prod(b.type.static_shape) <= 32 * 32 * 512 for s in statistics for b in s.writes)


def test_statistics_of_channels_that_come_last_are_read_as_memory_runs() -> None:
    x, w = meta(32, 256, 56, 56, dtype=torch.float32).to(memory_format=LAST), meta(256, dtype=torch.float32)
    first, *_ = kernels(lambda x, w, b: F.group_norm(x, 32, w, b), x, w, w)
    assert read(first) < 1.1


@pytest.mark.parametrize("last", [False, True])
def test_a_group_norm_is_right(last: bool) -> None:
    x = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(0))
    x = x.to(memory_format=LAST) if last else x
    w, b = torch.linspace(-1, 2, 8), torch.linspace(3, 1, 8)
    (found,) = simulated(lambda x, w, b: F.group_norm(x, 4, w, b), x, w, b)
    np.testing.assert_allclose(found, F.group_norm(x, 4, w, b).numpy(), rtol=1e-5, atol=1e-5)


# -- reductions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(512, 50257), (32768, 513)])
@pytest.mark.parametrize("call", [lambda x: x.sum(0), lambda x: x.var(0), lambda x: x.max(0), lambda x: x.argmax(0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loads_of_a_column_are_in_no_branches_of_their_own(
    dtype: torch.dtype, call: Callable[[Any], Any], shape: tuple[int, int]
) -> None:
    first = kernels(call, meta(*shape, dtype=dtype))[0]
    found = list(walked(first.body))
    reads = [(s.term, n) for s, n in found if isinstance(s, k.Let) and isinstance(s.term, l.Load)]
    loops = [n for load, n in reads if load.buffer in first.reads]
    held = any(isinstance(s, k.Declare) and s.place.name.startswith("x_") for s, _ in found)
    assert all(loops)
    if held:  # all of a thread's part at once, and nothing twice
        assert len(loops) == 1
    else:
        assert any(isinstance(s, k.For) and not s.unrolled for s, _ in found)
    assert not any(isinstance(s, k.If) and n for s, n in found)


@pytest.mark.parametrize("length, steps", [(4096, 0), (8192, 3)])
def test_many_warps_that_share_a_row_meet_in_lanes(length: int, steps: int) -> None:
    (kernel,) = kernels(lambda x: x.sum(-1), meta(4096, length))
    (meeting,) = kernel.shared
    assert meeting.type.shape == (kernel.warps,)
    shuffled = [s for s in k.walk(kernel.body) if isinstance(s, k.Let) and isinstance(s.term, k.Shuffle)]
    assert len(shuffled) == 5 + steps


@pytest.mark.parametrize("call", [lambda x: x.sum(-1), lambda x: x.max(-1), lambda x: x.min(-1), lambda x: x.var(-1)])
def test_rows_that_warps_share_are_right(call: Callable[[Any], Any]) -> None:
    x = torch.randn(3, 4096, generator=torch.Generator().manual_seed(1))
    x[1, 77], x[1, 4000], x[2, 5] = 9.0, 9.0, float("nan")
    expected = call(x)
    for found, right in zip(simulated(call, x), expected if isinstance(expected, tuple) else (expected,), strict=True):
        np.testing.assert_allclose(found, right.numpy(), rtol=2e-6, atol=1e-4)


def test_the_largest_element_comes_with_its_place() -> None:
    (kernel,) = kernels(lambda x: x.max(-1), meta(1024, 16384, dtype=torch.float32))
    meetings = sorted(str(s.type.dtype) for s in kernel.shared)
    assert meetings == ["f32", "i32"]  # one state of two values


# -- what is fused, and what is stored -----------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [F.huber_loss, F.smooth_l1_loss])
def test_a_loss_stores_no_differences(loss: Any) -> None:
    first, *rest = kernels(loss, meta(4096, 4096), meta(4096, 4096))
    assert all(np.prod(b.type.static_shape) <= 4096 for s in (first, *rest) for b in s.writes)


def test_lanes_that_store_numbers_of_8_bytes_store_two_of_them() -> None:
    (kernel,) = kernels(torch.bucketize, meta(1 << 24), meta(256))
    assert "move<2>" in emit(kernel)[1] and "move<4>" not in emit(kernel)[1]


# -- searches and functions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 9, 31, 32, 33])
@pytest.mark.parametrize("right", [False, True])
def test_searches_take_eagers_steps(count: int, right: bool) -> None:
    generator = torch.Generator().manual_seed(count)
    rows = torch.randint(-5, 6, (3, count), generator=generator).float().sort(-1).values
    rows[1, -1] = rows[2, count // 2 :] = float("nan")
    values = torch.cat(
        [torch.arange(-7.0, 8.0).expand(3, -1), torch.tensor([[float("nan"), 0.5, 9.0]]).expand(3, -1)], 1
    )
    found = interpreted(lambda r, v: torch.searchsorted(r, v, right=right), rows, values)
    assert torch.equal(found, torch.searchsorted(rows, values, right=right))


def test_erfinv_branches_nowhere() -> None:
    (kernel,) = kernels(torch.erfinv, meta(4096, 8192))
    source = emit(kernel)[1]
    assert "tz_approx_log2" in source and "tz_approx_sqrt" in source and "logf(" not in source


def test_erfinv_is_right() -> None:
    near = torch.cat([torch.linspace(-0.99, 0.99, 4001), 1 - torch.logspace(-7, -2, 400), torch.logspace(-9, -1, 99)])
    found = interpreted(torch.erfinv, near)
    torch.testing.assert_close(found.double(), torch.erfinv(near.double()), rtol=5e-7, atol=0)
    ends = interpreted(torch.erfinv, torch.tensor([-1.0, 0.0, 1.0, 1.5]))
    assert ends.tolist()[:3] == [float("-inf"), 0.0, float("inf")] and ends[3].isnan()


# -- rows that begin anywhere --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_thread_is_in_one_row_of_those_that_have_numbers(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4099, generator=torch.Generator().manual_seed(2)).to(dtype)
    w = torch.tensor([2.0, -1.0, 0.5]).to(dtype)
    (found,) = simulated(lambda x, w: x * w[:, None] + 1, x, w)
    np.testing.assert_array_equal(found, (x * w[:, None] + 1).numpy())


def test_the_gradient_of_a_loss_divides_for_no_point() -> None:
    def gradient(x: torch.Tensor, y: torch.Tensor, g: torch.Tensor) -> Any:
        return torch.ops.aten.nll_loss_backward(g, x, y, None, 0, -100, torch.zeros((), device="meta"))

    x, y = meta(4096, 50257, dtype=torch.float32), torch.empty(4096, dtype=torch.int64, device="meta")
    source = emit(kernels(gradient, x, y, meta(4096, dtype=torch.float32))[-1])[1]
    assert "/ 50257" not in source and "move<4>" in source
