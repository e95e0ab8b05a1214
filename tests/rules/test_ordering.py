"""Elements by their order: by counting, where rows are short, and as PyTorch orders them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from terrazzo.errors import UserError
from terrazzo.front.capture import capture
from terrazzo.interp import kernel as simulator
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.text import parse, show
from terrazzo.ir.verify import verify
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rewrite.rule import Log
from terrazzo.rules import torch_to_tensor
from terrazzo.rules.torch_to_tensor.library import price
from terrazzo.rules.torch_to_tensor.lower import lower

NAN, INF = float("nan"), float("inf")
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool)


def numbers(dtype: torch.dtype) -> Any:
    """Numbers many of which are equal, with all that floats have which no number is."""
    x = (torch.randn(4, 7, 3, generator=torch.Generator().manual_seed(5)) * 3).round()
    if not dtype.is_floating_point:
        return (x > 0) if dtype is torch.bool else x.abs().to(dtype)
    x[0, 1, 0] = x[0, 4, 0] = NAN
    x[2, :, 1] = NAN
    x[1, 1:4, 0] = torch.tensor((INF, -INF, -0.0))
    x[1, 4:, 2] = torch.tensor((1e-40, -1e-40, 0.0))  # no larger than float16 has, but for float32 and bfloat16
    return x.to(dtype)


def compiled(f: Callable[[Any], Any], x: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(f, backend="terrazzo", dynamic=False, options={"strict": True})(x)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_elements_are_ordered_as_pytorch_orders_them(dtype: torch.dtype) -> None:
    x = numbers(dtype)
    for dim in (0, 1, -1):
        found = [f(x) for f in _orders(dim, dtype)]
        ours = compiled(lambda x, dim=dim: [f(x) for f in _orders(dim, dtype)], x)
        for one, other in zip(ours, found, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def _orders(dim: int, dtype: torch.dtype) -> list[Callable[[Any], Any]]:
    """Values in order, and places where PyTorch says which of equal ones come first."""
    found: list[Callable[[Any], Any]] = [
        lambda x: torch.sort(x, dim=dim, stable=True)[0],
        lambda x: torch.sort(x, dim=dim, stable=True)[1],
        lambda x: torch.sort(x, dim=dim, descending=True, stable=True)[1],
    ]
    if dtype is not torch.bool:
        found += [
            lambda x: torch.topk(x, 2, dim=dim)[0],
            lambda x: torch.topk(x, 3, dim=dim, largest=False)[0],
            lambda x: torch.kthvalue(x, 2, dim=dim, keepdim=True)[0],
            lambda x: torch.median(x, dim=dim)[0],
            lambda x: torch.nanmedian(x, dim=dim, keepdim=True)[0],
        ]
    return found


def test_places_are_of_the_values() -> None:
    x = numbers(torch.float32)
    for values, places in compiled(lambda x: (x.topk(3, 1), x.kthvalue(4, 1, True), x.median(1, True)), x):
        torch.testing.assert_close(x.gather(1, places), values, rtol=0, atol=0, equal_nan=True)


def test_a_number_and_a_row_of_one() -> None:
    for x in (torch.tensor(3.0), torch.tensor([3.0])):
        values, places = compiled(lambda x: x.sort(), x)
        assert (values, places) == (x, torch.zeros_like(x, dtype=torch.int64))


def test_gradients_go_to_what_was_taken() -> None:
    x = torch.randn(6, 9, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    (x.topk(3)[0] * torch.arange(3)).sum().backward()
    compiled(lambda y: (y.topk(3)[0] * torch.arange(3)).sum(), y).backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_on_a_gpu_threads_count_what_comes_before() -> None:
    x = torch.randn(5, 40)
    x[1, 3], x[2, 4:9] = NAN, 1.0
    program = capture(lambda x: torch.topk(torch.softmax(x, -1), 4), (x,)).program
    done = lowering(program, Options(target="sm_90a", libraries="never"))
    assert all(isinstance(s, l.Kernel) for s in done.loop.steps)
    values, places = simulator.run(done.at("kernel"), {"x": x.numpy()})
    truth = torch.topk(torch.softmax(x, -1), 4)
    torch.testing.assert_close(torch.from_numpy(values), truth[0], equal_nan=True)
    rest = [0, 2, 3, 4]  # in the row of a NaN all are NaN
    assert torch.equal(torch.softmax(x, -1)[rest].gather(1, torch.from_numpy(places)[rest]), truth[0][rest])


def test_lanes_have_elements_that_are_compared_with_the_same_ones() -> None:
    program = capture(lambda x: torch.sort(x), (torch.randn(4096, 64),)).program
    done = lowering(program, Options(target="sm_90a", libraries="never"))
    text = show(done.at("tile"))
    assert "a1 = grid(1) * warp(2) * lane(32)" in text and "lane(16) * reg(4)" not in text


def test_what_is_computed_is_ordered_where_it_is_stored() -> None:
    """Computed twice, its last digit may differ, and two elements would have the same number before them, or none."""
    program = capture(lambda x: torch.sort(x * 2 + 1), (torch.randn(40, 8),)).program
    for target in ("cpu", "sm_90a"):
        done = lowering(program, Options(target=target, libraries="never"))
        texts = [show(s) for s in done.loop.steps if isinstance(s, l.Kernel)]
        assert any("order(" in x for x in texts) and any(" or_(" in x for x in texts)
        assert not any("order(" in x and " or_(" in x for x in texts)


TWICE = """@loop
def f(x: f32[3]):
    with kernel('y', y=bool[3, 3]):
        for a0 in free(3):
            for a1 in free(3):
                in0 = x[a0]
                in1 = x[a1]
                v0 = order({0})
                v1 = order({1})
                v2 = lt(v0, v1)
                y[a0, a1] = v2
    return (y,)
"""


def test_a_text_must_not_compare_by_order_what_it_computes_twice() -> None:
    verify(parse(TWICE.format("in0", "in1")), "text")
    with pytest.raises(UserError, match="compares by its order"):
        parse(TWICE.format("exp(in0)", "exp(in1)"))


@pytest.mark.parametrize("length", (1024, 1025))
def test_long_rows_are_sorted_by_pytorch(length: int) -> None:
    log = Log()
    program = capture(lambda x: torch.sort(x), (torch.randn(2, length),)).program
    found = lower(program, torch_to_tensor.RULES, log)
    assert ("opaque('aten.sort.default'" in show(found)) == (length > 1024)


def test_a_library_sorts_where_counting_takes_longer() -> None:
    for shape, called in (((4096, 16), False), ((65536, 4), False), ((65536, 512), True)):
        with torch.device("meta"):
            program = capture(lambda x: torch.sort(x, stable=True), (torch.empty(shape),)).program
        steps = lowering(program, Options(target="sm_90a")).loop.steps
        assert any(isinstance(s, l.Call) for s in steps) == called, shape


def test_what_a_library_takes_follows_rows_and_their_length() -> None:
    """As measured on an H200, in microseconds, to a third."""
    from terrazzo.hw.gpu import gpu

    known: dict[Callable[[Any], Any], dict[tuple[int, int], float]] = {
        lambda x: x.sort(): {(65536, 64): 409, (4096, 64): 30.5, (65536, 1024): 2136},
        lambda x: x.topk(4): {(65536, 64): 253, (4096, 256): 56.6, (65536, 512): 1829},
        lambda x: x.kthvalue(2): {(65536, 64): 179, (4096, 256): 42.8},
        lambda x: x.median(1): {(65536, 64): 164, (4096, 256): 38},
    }
    for f, times in known.items():
        for shape, time in times.items():
            with torch.device("meta"):
                program = capture(f, (torch.empty(shape),)).program
            (op,) = {x.x for x in program.results}
            assert 0.67 < price(op, gpu("sm_90a")) / 1e3 / time < 1.5, (op.name, shape)
