"""Which factors of products are written first on a processor, and along what tiles lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.run.cpu import MARCHES

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


def test_many_products_of_a_kernel_are_compiled_once(tmp_path: Path) -> None:
    """Compiling takes as long as the machine code is, and all steps of a loop over time may be one kernel."""

    def size(steps: int) -> int:
        w, *xs = (torch.randn(96, 32), *(torch.randn(40, 32) for _ in range(steps)))
        options = Options(cache_dir=tmp_path / str(steps))
        compiled = terrazzo.compile(lambda w, *xs: [x @ w.T for x in xs], w, *xs, options=options)
        assert len([s for s in compiled.compiled.program.steps if isinstance(s, l.Kernel)]) == 1
        return max(p.stat().st_size for p in options.cache_dir.rglob("*.so"))

    assert size(16) < 2 * size(2)


def test_panels_of_many_blocks_are_written_once(tmp_path: Path) -> None:
    assert "right0" in text_of(lambda a, b: a.mT @ b, tmp_path, (128, 384), (128, 320))


def test_tiles_lie_along_what_is_stored(tmp_path: Path) -> None:
    """Weights whose columns lie beside each other are copied into panels, which costs little: they are no rows, whose
    results would be stored across.
    """
    text = text_of(lambda x, w: torch.exp(x @ w), tmp_path, (256, 128), (128, 1024))
    assert "tz_pack_rows<" in text and "column" not in text


def test_pixels_of_an_image_are_one_axis_of_columns(tmp_path: Path) -> None:
    """A row of 28 would leave lanes of a panel empty; and what is known of a channel is computed once for a tile."""

    def fn(x: Any, w: Any, scale: Any) -> Any:
        return torch.nn.functional.conv2d(x, w) / (scale.abs() + 1).sqrt()[:, None, None]

    text = text_of(fn, tmp_path, (2, 40, 28, 28), (160, 40, 1, 1), (160,))
    assert "g0 < 784" in text and "784 - (n0 + j0)" in text
    assert text.index("sqrt") < text.index("for (int64_t j = j0")


def test_what_is_multiplied_for_all_pixels_is_computed_once(tmp_path: Path) -> None:
    """The scales of channels that are a product themselves: blocks of these would be computed at each pixel."""

    def fn(x: Any, a: Any, w: Any) -> Any:
        return x * torch.sigmoid(a @ w.t())[:, :, None, None]

    assert "tz_rows<" not in text_of(fn, tmp_path, (2, 160, 28, 28), (2, 10), (160, 10))


@pytest.mark.parametrize("compiler", MARCHES)
def test_narrow_products_take_one_vector_of_a_panel(compiler: str, tmp_path: Path) -> None:
    """And rows that are turned into a part of a panel are turned in registers, too."""
    torch.manual_seed(0)
    pairs = [(torch.randn(3, 40, 33), torch.randn(3, n, 33)) for n in (3, 4, 7, 8, 15, 16, 17, 28)]

    def fn(*given: Any) -> Any:
        return [x @ y.mT for x, y in zip(given[::2], given[1::2], strict=True)] + [
            x @ y.mT.contiguous() for x, y in zip(given[::2], given[1::2], strict=True)
        ]

    given = [x for pair in pairs for x in pair]
    compiled = terrazzo.compile(fn, *given, options=Options(cache_dir=tmp_path, compiler=compiler, target="cpu"))
    exact = fn(*(x.double() for x in given))
    for ours, theirs, true in zip(compiled(*given), fn(*given), exact, strict=True):
        assert (ours - true).abs().max() <= 2 * (theirs - true).abs().max() + 1e-6
    texts = [source.partition('extern "C" int k_')[2] for _, source in compiled.compiled.sources]
    assert all(any(f"tz_rows<f32, {n}>" in text for text in texts) for n in (15, 16))
