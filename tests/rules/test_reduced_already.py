"""What the maker of something has reduced on its way is read beside it: norms of groups, and where that is not so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import terrazzo
from terrazzo.front.capture import capture
from terrazzo.ir.dialects import loop as l
from terrazzo.options import Options
from terrazzo.pipelines import lowering


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
