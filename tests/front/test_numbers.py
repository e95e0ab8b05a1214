"""Numbers in programs that are no tensors: those of vmap, and complex ones; and gradients within calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import terrazzo
from terrazzo.front.capture import capture
from terrazzo.ir.text import parse, show
from terrazzo.options import Options
from terrazzo.pipelines import stages
from terrazzo.rewrite.rule import Log
from terrazzo.run.plan import decode, encode


def energies(x: Any) -> Any:
    """vmap converts the numbers it meets, as `_to_copy(0.5)`."""
    return torch.func.vmap(torch.func.grad(lambda w: 0.5 * (w * w).sum() + 3 * w.sum()))(x)


def turned(x: Any) -> Any:
    """Complex numbers are PyTorch's, before what is ours."""
    z = torch.complex(x, x) * (2 + 1j)
    return torch.view_as_real(z * complex(-0.0, 1.5)).sum(-1) + x


def test_numbers_that_vmap_converts(tmp_path: Path) -> None:
    x = torch.randn(4, 5)
    ours = terrazzo.compile(energies, x, options=Options(target="interpreter", cache_dir=tmp_path))
    assert not ours.compiled.fallbacks
    torch.testing.assert_close(ours(x), energies(x))


def test_what_has_its_type_already_is_not_stored_twice() -> None:
    """Axes of one number are no reason to read it elsewhere."""

    def twice(x: Any) -> Any:
        y = x.exp()
        return y, torch.ops.aten._to_copy.default(y, dtype=y.dtype)

    options = Options(target="interpreter")
    found = stages(capture(twice, (torch.randn(1, 1, 5),)).program, options, Log(), ("torch_to_tensor",))
    first, second = found[-1][1].results
    assert second is first


def test_complex_numbers_are_arguments_of_what_pytorch_runs(tmp_path: Path) -> None:
    x = torch.randn(4, 5)
    ours = terrazzo.compile(turned, x, options=Options(target="interpreter", cache_dir=tmp_path))
    torch.testing.assert_close(ours(x), turned(x))
    program = capture(turned, (x,)).program
    assert "complex(-0.0, 1.5)" in show(program)
    assert parse(show(program)).results == program.results


def test_complex_numbers_are_kept_in_plans() -> None:
    for value in (2 + 1j, complex(-0.0, float("inf"))):
        found = decode(encode(value, {}), {})
        assert repr(found) == repr(value)


class Rounded(torch.autograd.Function):
    """Rounds; its gradient is that of what it rounds, where this is small."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 1)


def inner_gradient(x: Any) -> Any:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad((Rounded.apply(x * 1.5) * x).sum(), [x])[0]


@pytest.mark.parametrize("target", ["interpreter", "cpu"])
def test_gradients_within_a_call_are_not_traced(target: str, tmp_path: Path) -> None:
    """The graph breaks at autograd.grad, and what compiles and runs it is ours: dynamo leaves that alone."""
    torch._dynamo.reset()
    given = {"target": target, "strict": True, "cache_dir": str(tmp_path)}
    ours = torch.compile(inner_gradient, backend="terrazzo", options=given)
    x = torch.randn(4, 5)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        torch.testing.assert_close(ours(x), inner_gradient(x))
