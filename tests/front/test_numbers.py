"""Numbers in programs that are no tensors: those of vmap, and complex ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import terrazzo
from terrazzo.front.capture import capture
from terrazzo.ir.text import parse, show
from terrazzo.options import Options
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
