"""Products in float32, as exact as float32: with weights split at each call and once, with few rows, and of numbers
that are hard to multiply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from terrazzo.bench import gpu_suites
from terrazzo.bench.gpu_suites import Case
from terrazzo.bench.products import MODELS, case, layers, linear

SIDES = (1024, 1536, 2048, 3072, 4096, 6144, 8192)
SMALL = (256, 512, 768)
ROWS, FEW = (128, 512, 2048, 8192), (1, 16, 32, 64)
HARD = (1024, 1024, 1024)
"""Rows, sums and columns of products of hard numbers."""


def large(frozen: tuple[str, ...] = ()) -> tuple[Case, ...]:
    """Squares, and projections of three decoder models, of 128 rows and more."""
    squares = [linear(f"{n} cubed", n, n, n, "f32", frozen=frozen) for n in SIDES]
    return (*squares, *_projections(ROWS, frozen))


def once() -> tuple[Case, ...]:
    """The same with frozen weights: they are split when they are met first, before anything is timed."""
    return large(("w",))


def small() -> tuple[Case, ...]:
    """Squares and projections of fewer rows."""
    return (*(linear(f"{n} cubed", n, n, n, "f32") for n in SMALL), *_projections(FEW))


def _projections(rows: tuple[int, ...], frozen: tuple[str, ...] = ()) -> list[Case]:
    return [
        linear(f"{model} {name}, {m} rows", m, k, n, "f32", frozen=frozen)
        for model in MODELS
        for name, (k, n) in layers(model).items()
        for m in rows
    ]


def hard() -> tuple[Case, ...]:
    """One product of ten distributions that are hard to multiply exactly. What counts is the error."""
    import torch

    m, k, n = HARD

    def product(x: Any, w: Any) -> Any:
        return torch.nn.functional.linear(x, w)

    def made(draw: Callable[[Any, Any, Any, Any], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
        def given() -> tuple[Any, Any]:
            x, y = (gpu_suites.normal((m, k), "f32") for _ in range(2))
            w, v = (gpu_suites.normal((n, k), "f32") for _ in range(2))
            return draw(x, w, y, v)

        return given

    moved, operations = 4 * (m * k + n * k + m * n), 2.0 * m * n * k
    return tuple(case(name, "f32", product, made(draw), moved, operations) for name, draw in _distributions().items())


def _distributions() -> dict[str, Callable[[Any, Any, Any, Any], tuple[Any, Any]]]:
    """How two factors are made of normal numbers: two for each of them."""
    import torch

    even = torch.special.ndtr  # of normal numbers: evenly spread from 0 to 1

    def column(x: Any) -> Any:
        """1 in one column, 0 in the others."""
        return (torch.arange(x.shape[1], device=x.device) == 7).to(x.dtype)

    def steps(x: Any) -> Any:
        """Powers of two from 2^-60 to 2^60, one for each column."""
        return torch.exp2(torch.round(120 * even(x[:1]) - 60))

    def sizes(x: Any) -> Any:
        """Powers of ten from 1e-15 to 1e15, one for each row."""
        return 10.0 ** (30 * even(x[:, :1]) - 15)

    def cancelling(x: Any) -> Any:
        """Pairs of neighbours that differ in sign only."""
        odd = (torch.arange(x.shape[1], device=x.device) % 2).to(x.dtype)
        return odd * x - (1 - odd) * torch.roll(x, -1, 1)

    return {
        "from 0 to 1": lambda x, w, y, v: (even(x), even(w)),
        "around 100": lambda x, w, y, v: (100 + x, 100 + w),
        "log-normal": lambda x, w, y, v: (torch.exp(3 * x), torch.exp(3 * w)),
        "log-normal, of both signs": lambda x, w, y, v: (torch.exp(3 * x) * torch.sign(y), torch.exp(3 * w)),
        "Cauchy": lambda x, w, y, v: (x / y, w / v),
        "whole numbers": lambda x, w, y, v: (torch.round(2000 * x), torch.round(2000 * w)),
        "rows of all sizes": lambda x, w, y, v: (x * sizes(y), w * sizes(v)),
        "columns of all sizes": lambda x, w, y, v: (x * steps(y), w / steps(y)),
        "cancelling": lambda x, w, y, v: (cancelling(x), w + torch.roll(w, 1, 1)),
        "one large column": lambda x, w, y, v: (x * (1 + 1e6 * column(x)), w),
    }
