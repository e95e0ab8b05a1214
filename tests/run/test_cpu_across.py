"""Rows that lie across memory are turned in blocks on a processor before they are reduced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import terrazzo
from terrazzo.ir.dialects import loop as l
from terrazzo.options import Options
from terrazzo.targets.cpu.emit import emit


def norm(x: Any) -> Any:
    return F.layer_norm(x.mT, x.shape[-2:-1])


def two(x: Any) -> Any:
    """Two tensors across, one along."""
    y = x.mT * x.mT.flip(0) if x.ndim > 2 else x.mT
    return ((y - y.amax(-1, keepdim=True)) * torch.arange(y.shape[-1], dtype=x.dtype)).contiguous()


def middle(x: Any) -> Any:
    """Channels are reduced that lie first, and stored last."""
    return F.normalize(x.movedim(-2, -1), dim=-1).contiguous()


def kernels(compiled: Any) -> list[str]:
    return [emit(s)[1] for s in compiled.compiled.program.steps if isinstance(s, l.Kernel)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(300, 512), (33, 50), (3, 40, 67)])
@pytest.mark.parametrize("fn", [norm, two, middle])
def test_what_is_read_across_is_turned(
    fn: Callable[[Any], Any], shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    compiled = terrazzo.compile(fn, x, options=Options(cache_dir=tmp_path, threads=2))
    assert any("// free, in blocks" in text and "tz_across<" in text for text in kernels(compiled))
    exact = fn(x.double())
    ours, eager = ((y.double() - exact).abs().max() for y in (compiled(x), fn(x)))
    assert ours <= 2 * eager + 1e-14


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (lambda x: x.softmax(0), (300, 512)),  # stored across, too: columns side by side
        (lambda x: F.layer_norm(x, (512,)), (300, 512)),  # along memory
        (norm, (4000, 512)),  # a block has no room
    ],
)
def test_other_rows_are_read_where_they_lie(fn: Callable[[Any], Any], shape: tuple[int, ...], tmp_path: Path) -> None:
    x = torch.randn(shape)
    compiled = terrazzo.compile(fn, x, options=Options(cache_dir=tmp_path))
    assert not any("// free, in blocks" in text for text in kernels(compiled))
    torch.testing.assert_close(compiled(x), fn(x))
