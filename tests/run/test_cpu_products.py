"""Which factors of products are written first on a processor, and along what tiles lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import terrazzo
from terrazzo.ir.dialects import loop as l
from terrazzo.options import Options
from terrazzo.targets.cpu.emit import emit


def text_of(fn: Callable[..., Any], folder: Path, *shapes: tuple[int, ...]) -> str:
    """The source of the one kernel of a program, whose results are no further off than twice eager's."""
    torch.manual_seed(0)
    given = [torch.randn(s) for s in shapes]
    compiled = terrazzo.compile(fn, *given, options=Options(cache_dir=folder, threads=2))
    exact = fn(*(x.double() for x in given))
    ours, eager = ((y - exact).abs().max() for y in (compiled(*given), fn(*given)))
    assert ours <= 2 * eager + 1e-6
    (kernel,) = (s for s in compiled.compiled.program.steps if isinstance(s, l.Kernel))
    return emit(kernel)[1].partition('extern "C" int k_')[2]


@pytest.mark.parametrize(
    ("fn", "a", "b", "written"),
    [
        (lambda a, b: a.mT @ b, (200, 150), (200, 170), True),
        (lambda a, b: a.mT @ b, (3, 200, 131), (3, 200, 300), True),
        (lambda a, b: a.mT @ b, (200, 40), (200, 40), False),  # steps are near each other
        (lambda a, b: a @ b, (150, 200), (200, 170), False),  # steps are neighbours
    ],
)
def test_rows_that_lie_across_are_written_first(
    fn: Callable[..., Any], a: tuple[int, ...], b: tuple[int, ...], written: bool, tmp_path: Path
) -> None:
    """Steps that are a page apart meet in one set of the cache."""
    assert ("rows[M * K]" in text_of(fn, tmp_path, a, b)) == written


def test_panels_of_many_blocks_are_written_once(tmp_path: Path) -> None:
    assert "right0" in text_of(lambda a, b: a.mT @ b, tmp_path, (128, 384), (128, 320))


def test_tiles_lie_along_what_is_stored(tmp_path: Path) -> None:
    """Weights whose columns lie beside each other are copied into panels, which costs little: they are no rows, whose
    results would be stored across.
    """
    text = text_of(lambda x, w: torch.exp(x @ w), tmp_path, (256, 128), (128, 1024))
    assert "tz_pack_rows<" in text and "column" not in text
