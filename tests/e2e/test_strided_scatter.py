"""as_strided_scatter writes by distances in memory: `fill_diagonal_` is made of it, for matrices of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import terrazzo  # noqa: E402


def compiled(f: Callable[..., Any], *args: Any) -> Any:
    return terrazzo.compile(f, *args, options={"target": "cpu"})


@pytest.mark.parametrize("shape", [(400, 300), (300, 400), (20, 20, 20)])
@pytest.mark.parametrize("wrap", [False, True])
def test_large_diagonals_are_filled(shape: tuple[int, ...], wrap: bool) -> None:
    def f(x: Any) -> Any:
        y = x * 2
        z = y.clone()
        z.fill_diagonal_(7.0, wrap=wrap)
        return z, y.sum(0)

    x = torch.randn(shape)
    ours = compiled(f, x)
    assert torch.equal(ours(x)[0], f(x)[0])
    assert not ours.compiled.fallbacks


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [
        ((3, 4), (1, 100), 5),
        ((4, 3), (100, 2), None),
        ((1, 5, 1), (0, 3, 9), 0),
        ((2, 2, 2), (7, 1, 30), 1),
        ((0, 3), (1, 1), 2),
    ],
)
def test_places_that_are_written_once_are_not_looked_for(size: Any, stride: Any, offset: Any) -> None:
    def f(x: Any, source: Any) -> Any:
        return torch.as_strided_scatter(x + 1, source, size, stride, offset), (x + 1).sum()

    x, source = torch.randn(200, 200), torch.randn(size)
    ours = compiled(f, x, source)
    assert torch.equal(ours(x, source)[0], f(x, source)[0])
    assert not ours.compiled.fallbacks


def test_what_pytorch_writes_lies_in_the_operand_wherever_that_begins() -> None:
    """Its own op counts from where memory begins, and ours is an arena."""

    def f(x: Any, source: Any) -> Any:
        a, b = x.sin(), x.cos()
        return torch.as_strided_scatter(a @ b, source, (100, 300), (200, 1), 0), torch.as_strided_scatter(
            b @ a, source, (100, 300), (200, 1), 3
        )

    x = torch.randn(300, 300)
    twice = torch.randn(40000)  # where two are written, they are the same
    source = twice.as_strided((100, 300), (200, 1)).contiguous()
    ours = compiled(f, x, source)
    assert ours.compiled.fallbacks
    for mine, eager in zip(ours(x, source), f(x, source), strict=True):
        assert (mine - eager).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("size", "stride", "offset"), [([64], [65], 0), ([4, 5, 6], [1, 7, 64], 130), ([20, 20], [2, 3], 7)]
)
def test_elements_at_strides_of_a_value_are_written(size: list[int], stride: list[int], offset: int) -> None:
    """A call that counts places from the start of a memory does so in one that holds this value alone."""

    def write(x: Any, source: Any) -> Any:
        away = x.sum(0)  # lies before the other in memory
        return torch.as_strided_scatter(x * away, source, size, stride, offset)

    given = torch.randn(64, 64), torch.ones(size)
    ours = compiled(write, *given)
    torch.testing.assert_close(ours(*given), write(*given))
