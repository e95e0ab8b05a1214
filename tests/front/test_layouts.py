"""Results lie in memory as in eager mode since kernels store them so: nothing is copied, or stored twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import terrazzo
from terrazzo.errors import UserError
from terrazzo.front import results
from terrazzo.front.capture import capture
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.text import parse, show
from terrazzo.options import Options
from terrazzo.pipelines import lowering

LAST = torch.channels_last


def images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(memory_format=LAST)


def block(x: Any, w: Any) -> Any:
    """What one convolution gives is a result, and what the next one reads."""
    y = F.relu(F.conv2d(x, w, padding=1))
    return y, F.relu(F.conv2d(y, w, padding=1))


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "convolutions": (block, (images(2, 8, 6, 6), images(8, 8, 3, 3) / 8)),
    "to channels last": (lambda x: x.contiguous(memory_format=LAST), (torch.randn(2, 3, 4, 5),)),
    "preserved": (lambda x: x.transpose(0, 1).clone(memory_format=torch.preserve_format), (torch.randn(3, 4),)),
    "both": (lambda x: [y := x.transpose(0, 1).exp(), y.contiguous(), y.sum(0)], (torch.randn(3, 4),)),
    "a product": (lambda x, w: F.relu((x @ w).transpose(1, 2)), (torch.randn(2, 3, 4), torch.randn(4, 5))),
    "one of several": (lambda x: F.max_pool2d(x, 2, return_indices=True), (images(2, 3, 4, 4),)),
    "a scan": (lambda x: x.transpose(0, 1).cumsum(1) * 2, (torch.randn(3, 4),)),
    "a call": (lambda x: torch.fft.fft(x).real + 1, (torch.randn(4, 3).t(),)),
    "rows of one": (lambda x: x.transpose(1, 2).exp(), (torch.randn(2, 1, 3, 4),)),
    "a norm of what is turned": (nn.BatchNorm1d(5), (torch.randn(2, 4, 5).transpose(1, 2),)),
    "a norm of images": (nn.BatchNorm2d(3).eval(), (images(2, 3, 4, 5),)),
    "angles": (torch.angle, (torch.randn(2, 4, 5, dtype=torch.complex64).transpose(1, 2),)),
    "phases": (torch.angle, (torch.randn(4, 5).t(),)),
    "a sum and products": (
        torch.baddbmm,
        (torch.randn(6, 5, 2).transpose(0, 2), torch.randn(2, 5, 3), torch.randn(2, 3, 6)),
    ),
    "rolled": (lambda x: (x.roll(1, 1), x.roll((1, 2), (2, -1)), x.roll(3)), (images(2, 3, 4, 5),)),
    "shuffled": (lambda x: F.channel_shuffle(x, 3), (images(2, 6, 4, 5),)),
    "powers": (lambda x: 2**x, (images(2, 3, 4, 5),)),
    "rather as the first": (
        lambda x, y: (x // y, y // x, x.copysign(y), torch.div(y, x, rounding_mode="trunc"), torch.xlogy(x, y)),
        (images(2, 3, 4, 5).abs() + 1, torch.rand(2, 3, 4, 5) + 1),
    ),
    "nearest": (lambda x: F.interpolate(x, 7), (torch.randn(2, 4, 5).transpose(1, 2),)),
    "nothing": (lambda x: (torch.stack((x, x)), torch.cat((x, x), 1) + 1), (torch.randn(0, 8),)),
    "an input and a number": (lambda x: (x + 1, torch.zeros(3, 4).t().clone()), (torch.randn(4, 3).t(),)),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, args = CASES[name]
    compiled = terrazzo.compile(fn, *args)
    places, laid_out = [], results.laid_out

    def watched(value: Any, shape: Any, stride: Any) -> Any:
        made = laid_out(value, shape, stride)
        places.append((value.data_ptr(), made.data_ptr()))
        return made

    monkeypatch.setattr(results, "laid_out", watched)
    got, wanted = compiled(*args), fn(*args)
    found = [got] if isinstance(got, torch.Tensor) else got
    for ours, eager in zip(found, [wanted] if isinstance(wanted, torch.Tensor) else wanted, strict=True):
        assert ours.stride() == eager.stride()
        torch.testing.assert_close(ours, eager)
    assert all(before == after for before, after in places)  # what lies otherwise only along dimensions of 1


def test_what_is_a_result_and_read_again_is_stored_once() -> None:
    program = capture(*CASES["convolutions"], views=True).program
    assert "@ (288, 1, 48, 8) = aten.relu.default" in show(program)
    assert parse(show(program)) == program
    first, second = (s for s in lowering(program, Options(target="cpu")).loop.steps)
    assert [b.type.strides for b in first.writes] == [b.type.strides for b in second.writes] == [(288, 1, 48, 8)]
    assert first.writes[0] in second.reads


def test_rows_follow_what_they_are_stored_as() -> None:
    """Kernels go along memory, but for what would be reduced more often for that."""

    def axes(fn: Any, *args: Any) -> list[Any]:
        (step,) = lowering(capture(fn, args, views=True).program, Options(target="cpu")).loop.steps
        assert isinstance(step, l.Kernel)
        return [a.extent for a in step.axes]

    x = torch.randn(3, 4, 5)
    assert axes(lambda x: x.permute(2, 0, 1).exp(), x) == [3, 4, 5]
    assert axes(lambda x: (x / x.sum(2, keepdim=True)).permute(1, 2, 0) + 1, x) == [3, 4, 5]
    assert axes(lambda x: x.permute(2, 0, 1) / x.amax(1)[:, None].permute(2, 0, 1), x) == [5, 3, 4]


def test_gradients_lie_as_they_are_computed() -> None:
    x, w = images(2, 8, 6, 6), images(8, 8, 3, 3).requires_grad_()
    torch._dynamo.reset()
    y = torch.compile(lambda x, w: F.conv2d(x, w, padding=1), backend="terrazzo")(x, w)
    y.square().sum().backward()
    assert w.grad is not None and w.grad.stride() == w.stride()


def test_attention_copies_what_would_be_stored_across() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        y = F.scaled_dot_product_attention(q, k, v)
        return y.transpose(2, 3).contiguous().transpose(2, 3) * 2

    inputs = [torch.empty(1, 2, 256, 64, dtype=torch.bfloat16, device="meta")] * 3
    done = lowering(capture(fn, inputs, views=True).program, Options(target="sm_90a"))
    chain, copy = done.loop.steps
    assert isinstance(chain, l.Kernel) and isinstance(copy, l.Kernel)
    assert chain.writes[0].type.strides is None and copy.writes[0].type.strides == (32768, 16384, 1, 256)
    assert copy.reads == chain.writes


@pytest.mark.parametrize("strides", ["(1, 4)", "(1, 1)", "(8, 1)"])
def test_a_result_has_neither_gaps_nor_two_elements_at_one_place(strides: str) -> None:
    text = f"""@torch
def f(x: f32[3, 4]):
    y: f32[3, 4] @ {strides} = aten.exp.default(x)
    return (y,)
"""
    program = parse(text)
    with pytest.raises(UserError, match="y cannot lie as f32") as refused:
        lowering(program, Options(target="cpu"))
    assert program.results[0] in refused.value.about


def test_what_lies_in_rows_can_be_viewed() -> None:
    norm, x = nn.BatchNorm1d(5).eval(), torch.randn(2, 4, 5).transpose(1, 2)
    compiled = terrazzo.compile(lambda x: norm(x).view(2, -1), x, options={"target": "interpreter"})
    torch.testing.assert_close(compiled(x), norm(x).view(2, -1))
