"""What the maker of something has reduced on its way is read beside it: norms of groups, and where that is not so."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import terrazzo
from terrazzo.front.capture import capture
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.text import parse
from terrazzo.ir.verify import problem
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.cost import Rates
from terrazzo.rules.loop.fusion.reduced_already import reduced_already


def test_channels_do_not_add_up_their_group_again() -> None:
    program = capture(torch.nn.GroupNorm(4, 64), (torch.randn(2, 64, 28, 28),)).program
    first, second = (s for s in lowering(program, Options(target="cpu")).loop.steps if isinstance(s, l.Kernel))
    assert len(first.stores) == 2, "a mean beside what a variance becomes"
    assert not second.carried


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_groups_are_as_eager_has_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    norm, x = torch.nn.GroupNorm(4, 64), torch.randn(2, 64, 28, 28) + 3.0
    with torch.no_grad():
        ours = terrazzo.compile(norm, x, options=Options(target="cpu", cache_dir=tmp_path))(x)
        exact = torch.nn.functional.group_norm(x.double(), 4)
        assert (ours - exact).abs().max() <= 2 * max((norm(x) - exact).abs().max(), 1e-7 * exact.abs().max())


def test_a_row_is_one_kernel_as_before() -> None:
    program = capture(torch.nn.LayerNorm(64), (torch.randn(32, 64),)).program
    (kernel,) = lowering(program, Options(target="cpu")).loop.steps
    assert len(kernel.writes) == 1


def test_what_is_loaded_for_other_steps_says_nothing_of_a_reduction_outside_of_them() -> None:
    """A sum over all is in no step of the product that reads what it was divided by."""
    program = parse(
        "@loop\n"
        "def f(x: f32[64, 64], w: f32[64, 64]):\n"
        "    with kernel('h', h=f32[64]):\n"
        "        for a0 in free(64):\n"
        "            for r0 in reduce(4096):\n"
        "                in0 = x[r0 // 64, r0 % 64]\n"
        "                acc0 <- sum(in0)\n"
        "            for r2 in reduce(64):\n"
        "                in1 = x[a0, r2]\n"
        "                v0 = div(in1, acc0)\n"
        "                acc1 <- max(v0)\n"
        "            h[a0] = acc1\n"
        "    with kernel('y', y=f32[64]):\n"
        "        for a0 in free(64):\n"
        "            for r0 in reduce(4096):\n"
        "                in0 = x[r0 // 64, r0 % 64]\n"
        "                acc0 <- sum(in0)\n"
        "            for r2 in reduce(64):\n"
        "                in1 = h[r2]\n"
        "                in2 = w[a0, r2]\n"
        "                v0 = mul(in1, in2)\n"
        "                acc1 <- sum(v0)\n"
        "            v1 = add(acc0, acc1)\n"
        "            y[a0] = v1\n"
        "    return (y,)\n"
    )
    assert not problem(reduced_already(program, Log(), replace(Rates(), launch=0.0)))
