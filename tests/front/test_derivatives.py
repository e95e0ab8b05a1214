"""Derivatives of our own in training graphs: what eager mode has, in few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.front.test_associative import close, graphs  # noqa: F401
from tests.kernels.programs import lowered

from terrazzo.front.derivatives import derivatives, of_factors
from terrazzo.interp import kernel as simulator

INF, NAN = float("inf"), float("nan")
ROWS = torch.tensor(
    [
        [1, 2, 3, 4, 0.5],
        [1, 0, 3, 4, 0.5],
        [0, 0, 3, 0, 2],
        [0, 1, 2, 3, 4],
        [-1, 2, 3, 4, -0.0],
        [2, 0, 3, 0, 0],
        [1, 2, NAN, 3, 4],
        [1, 2, INF, 3, 4],
        [-INF, 2, 3, 4, 5],
    ]
)
"""No zero, one, several, and one behind the other; and what is no number or no finite one."""


def gradient(fn: Callable[..., Any], x: torch.Tensor, of: torch.Tensor | None = None) -> torch.Tensor:
    x = x.detach().clone().requires_grad_()
    y = fn(x)
    y.backward(torch.ones_like(y) if of is None else of.to(y.dtype).expand_as(y))
    assert x.grad is not None
    return x.grad


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, backend="terrazzo", dynamic=False, options={"target": "interpreter", "strict": True})


@pytest.mark.parametrize("of", [[1, -2, 3, 0.5, 7], [1, 1, 1, 1, 1]])
def test_running_products_of_zeros_and_of_what_is_not_finite(of: list[float]) -> None:
    for rows, dim in ((ROWS, 1), (ROWS.T.contiguous(), 0)):
        fn = lambda x, dim=dim: x.cumprod(dim)  # noqa: E731
        weights = torch.tensor(of) if dim else torch.tensor(of)[:, None]
        found, eager = gradient(compiled(fn), rows, weights), gradient(fn, rows, weights)
        np.testing.assert_allclose(found, eager, rtol=1e-6)


def test_gradients_that_are_not_finite_where_a_product_is_zero() -> None:
    """As those of a logarithm: what is before the first 0 does not hear of them."""
    fn = lambda x: x.cumprod(1).log()  # noqa: E731
    rows = ROWS[[0, 1, 3]]
    np.testing.assert_allclose(gradient(compiled(fn), rows), gradient(fn, rows), rtol=1e-6)


CASES: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "rows": (lambda x: torch.cumprod(x, -1), torch.rand(5, 600) * 2 - 1),
    "columns": (lambda x: x.cumprod(0), torch.rand(70, 3) + 0.5),
    "in the middle": (lambda x: x.cumprod(1), torch.rand(3, 70, 5) + 0.5),
    "in another type": (lambda x: x.cumprod(1, dtype=torch.float64), torch.rand(3, 70) + 0.5),
    "in place": (lambda x: (x * 2).cumprod_(1), torch.rand(3, 70)),
    "of products": (lambda x: x.cumprod(1).cumprod(0), torch.rand(4, 6) + 0.5),
    "one element": (lambda x: x.cumprod(1), torch.rand(4, 1)),
    "a number": (lambda x: x.cumprod(0), torch.tensor(3.0)),
    "mapped": (lambda x: torch.vmap(lambda row: row.cumprod(0))(x), torch.rand(4, 6) + 0.5),
    "complex": (lambda x: torch.view_as_real(torch.complex(x, 1 - x).cumprod(0)), torch.rand(6)),
    "a gradient of a gradient": (
        lambda x: torch.func.grad(lambda y: (y * y).cumprod(0).sum())(x) * x,
        torch.rand(6) + 0.5,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_running_products(name: str) -> None:
    fn, x = CASES[name]
    torch._dynamo.reset()
    close(gradient(compiled(fn), x), gradient(fn, x), gradient(fn, x.double()))


def test_tangents_are_those_of_pytorch() -> None:
    fn = lambda x: torch.func.jvp(lambda y: y.cumprod(0), (x,), (x * 2,))[1]  # noqa: E731
    x = torch.rand(6)
    close(compiled(fn)(x), fn(x), fn(x.double()))


def test_nothing_is_left_behind() -> None:
    op = torch.ops.aten.cumprod.default
    before = dict(op.py_kernels)
    with derivatives():
        assert op.py_kernels != before
    assert op.py_kernels == before


def test_two_scans_from_the_end_are_all_there_is(graphs: list[list[str]]) -> None:  # noqa: F811
    """And no more for longer rows."""
    for count in (8, 64):
        graphs.clear()
        torch._dynamo.reset()
        gradient(compiled(lambda x: x.cumprod(1)), torch.rand(3, count))
        names = [x.split(".")[1] for x in graphs[1]]
        assert [names.count(n) for n in ("cumsum", "linear_recurrence", "cumprod", "gather")] == [1, 1, 0, 0]
        assert len(names) < 30


@pytest.mark.parametrize(("shape", "dim"), [((5, 512), 1), ((300, 40), 0)])
def test_they_are_one_kernel(shape: tuple[int, ...], dim: int) -> None:
    """It finds both scans, and what is made of them."""
    torch.manual_seed(1)
    x, of = torch.rand(shape) + 0.5, torch.randn(shape)
    x[torch.rand(shape) < 0.01] = 0

    found = lowered(lambda x, y, of: of_factors(x, y, of, dim), (x, x.cumprod(dim), of), "sm_90a")
    assert len(found.kernels) == 1
    (ours,) = simulator.run(found.program, found.inputs)
    fn = lambda x: x.cumprod(dim)  # noqa: E731
    close(torch.from_numpy(np.array(ours)), gradient(fn, x, of), gradient(fn, x.double(), of))
