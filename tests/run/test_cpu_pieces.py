"""Axes in pieces, and tables of what outer loops would compute again."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.run.cpu import COMPILER

import terrazzo
from terrazzo.options import Options

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
F = torch.nn.functional


def kernels(fn: Any, tmp_path: Path, *inputs: Any) -> str:
    """The kernels of a function, as C++ without the prelude; its results are eager's, or as near float64's."""
    call = terrazzo.compile(fn, *inputs, options=Options(target="cpu", cache_dir=tmp_path))
    found, eager = call(*inputs), fn(*inputs)
    exact = fn(*(x.double() if x.is_floating_point() else x for x in inputs))
    off, theirs = ((y.double() - exact).abs().max() for y in (found, eager))
    assert found.dtype is eager.dtype and found.stride() == eager.stride()
    assert off <= max(2 * theirs, 1e-7 * exact.abs().max())
    return "\n".join(source[source.index('extern "C" int k_') :] for _, source in call.compiled.sources)


COPIES: dict[str, Callable[..., Any]] = {
    "roll": lambda x: x.roll((3, 5), (1, 2)),
    "roll of all": lambda x: x.roll(1),
    "reflected": lambda x: F.pad(x, (3, 3, 2, 2), mode="reflect"),
    "the nearest": lambda x: F.pad(x, (3, 2, 2, 5), mode="replicate"),
    "around": lambda x: F.pad(x, (3, 3, 2, 2), mode="circular"),
    "zeros": lambda x: F.pad(x, (3, 3, 2, 2)),
    "cropped and zeros": lambda x: F.pad(x, (-3, 3, 2, -2)),
    "repeated": lambda x: x.repeat(1, 1, 1, 4),
    "swapped": lambda x: torch.cat([x[..., 9:], x[..., :9]], -1),
    "channels beside each other": lambda x: torch.cat([x, x.sin(), x.neg()], 1),
    "images beside each other": lambda x: torch.cat([x, x.roll(2, 0)], 0),
    "a triangle": lambda x: x.tril(),
    "turned": lambda x: torch.rot90(x, 1, (2, 3)),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_right(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    for kind in (torch.float32, torch.int64):
        kernels(COPIES[name], tmp_path, (10 * torch.randn(2, 6, 17, 24)).to(kind))


@pytest.mark.parametrize("name", ["reflected", "the nearest", "repeated", "swapped"])
def test_nothing_is_asked_or_divided_in_the_innermost_loops(name: str, tmp_path: Path) -> None:
    text = kernels(COPIES[name], tmp_path, torch.randn(2, 6, 17, 24))
    loops = re.findall(r"#pragma omp simd\n.*?\n((?:.*\n)*?) *\}", text)
    assert len(loops) > 1, text
    assert not any(re.search(r"[?%/]|tz_", line.split("//")[0]) for loop in loops for line in loop.splitlines())


def test_tensors_beside_each_other_are_nests_beside_each_other(tmp_path: Path) -> None:
    """A run of memory each, without a question which one it is."""
    text = kernels(lambda x, y: torch.cat([x, y], 1), tmp_path, torch.randn(4, 8, 9, 9), torch.randn(4, 3, 9, 9))
    assert text.count("// free") == 4 and "?" not in text
    assert "< 648;" in text and "< 243;" in text


def test_an_axis_whose_parts_are_many_is_one_loop(tmp_path: Path) -> None:
    text = kernels(lambda x: x.repeat(40), tmp_path, torch.randn(7))
    assert text.count("// free") == 1 and "% 7" in text


def test_what_data_says_is_checked_in_each_piece(tmp_path: Path) -> None:
    x, rows = torch.randn(30, 24), torch.randint(30, (40,))
    call = terrazzo.compile(
        lambda x, rows: x[rows.roll(3)].roll(2, 1), x, rows, options=Options(target="cpu", cache_dir=tmp_path)
    )
    assert torch.equal(call(x, rows), x[rows.roll(3)].roll(2, 1))
    with pytest.raises(terrazzo.errors.IndexOutOfRange):
        call(x, rows + 30)


def test_guards_of_places_from_data_are_left_alone(tmp_path: Path) -> None:
    """What they say depends on one axis, and on what is read there."""

    def nearest(x: Any, at: Any) -> Any:
        return F.grid_sample(x, at, "nearest", align_corners=False)

    kernels(nearest, tmp_path, torch.randn(1, 2, 5, 5), 2.5 * torch.rand(1, 1, 8, 2) - 1.25)


def test_what_an_outer_loop_would_compute_again_is_a_table(tmp_path: Path) -> None:
    """Such as where a row's points are read, which is the same for all rows."""
    text = kernels(lambda x: F.interpolate(x, scale_factor=3, mode="linear"), tmp_path, torch.randn(6, 8, 50))
    table, rows = text.split("table", 1)[1].rsplit("for (int64_t", 1)
    assert "tz_rounded_mul" in table and "tz_rounded_mul" not in rows


def test_tables_that_read_what_is_written_are_none(tmp_path: Path) -> None:
    """A value that is written in place is read before, where it is written."""
    torch.manual_seed(0)

    def step(w: Any, x: Any) -> Any:
        w.sub_(x.exp().mul(w.exp()))
        return w + 1

    w, x = torch.randn(32, 50), torch.randn(50)
    mine, other = w.clone(), w.clone()
    call = terrazzo.compile(step, mine, x, options=Options(target="cpu", cache_dir=tmp_path))
    torch.testing.assert_close(call(mine, x), step(other, x))
    torch.testing.assert_close(mine, other)


def test_both_parts_of_numbers_in_one_row_are_stores_of_their_own(tmp_path: Path) -> None:
    """A condition on the last digit of an axis chooses between them: no loop asks at each point which one it is."""
    torch.manual_seed(0)
    turn = torch.randn(16, 5, 2)

    def turned(x: Any, turn: Any) -> Any:
        x, turn = x.reshape(8, 16, 5, 2), turn.to(x.dtype)
        real = x[..., 0] * turn[..., 0] - x[..., 1] * turn[..., 1]
        return torch.stack([real, x[..., 0] * turn[..., 1] + x[..., 1] * turn[..., 0]], -1).flatten(2)

    text = kernels(turned, tmp_path, torch.randn(8, 16, 10), turn)
    assert "?" not in text and "% 2" not in text
    uneven = kernels(lambda x: torch.stack([x, x.sin(), x.cos()], -1).flatten(1)[:, :-1], tmp_path, torch.randn(9, 31))
    assert "% 3" in uneven


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_images_shrink_along_one_dimension_after_the_other(mode: str, tmp_path: Path) -> None:
    """Whose taps are fewer then, and are read for many points of a row at a time, from within the image."""

    def shrunk(x: Any) -> Any:
        return F.interpolate(x, size=(10, 21), mode=mode, antialias=True)

    torch.manual_seed(0)
    text = kernels(shrunk, tmp_path, torch.randn(2, 3, 33, 50))
    assert text.count('extern "C" int k_') >= 3 and "tz_at(" not in text
    assert text.count("free, side by side") >= 2


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [False, True])
def test_images_of_whole_numbers_are_interpolated_by_pytorch(mode: str, antialias: bool, tmp_path: Path) -> None:
    """Its weights are whole numbers then; ours would divide what has no fractions."""
    torch.manual_seed(0)
    x = torch.randint(0, 255, (1, 3, 40, 40), dtype=torch.uint8)

    def fn(x: Any) -> Any:
        return torch.nn.functional.interpolate(x, size=(24, 30), mode=mode, antialias=antialias).float() / 255

    compiled = terrazzo.compile(fn, x, options={"target": "cpu", "cache_dir": tmp_path, "compiler": COMPILER})
    torch.testing.assert_close(compiled(x), fn(x), rtol=0, atol=1e-6)
    assert any("upsample" in f.op for f in compiled.compiled.fallbacks)
