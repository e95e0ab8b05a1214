"""Derivatives of our own, of ops for which what PyTorch traces is longer than what it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from terrazzo.ir.recurrence import from_the_end

Kernels = Mapping[Any, Mapping[Any, Callable[..., Any] | None]]
"""What ops do at some of PyTorch's dispatch keys, in Python; None where that is nothing else than in C++."""


@contextmanager
def traced_with(kernels: Kernels) -> Iterator[None]:
    """Within this, traces take these kernels."""
    before = {op: {key: op.py_kernels.get(key) for key in changed} for op, changed in kernels.items()}
    try:
        _take(kernels)
        yield
    finally:
        _take(before)


def _take(kernels: Kernels) -> None:
    for op, changed in kernels.items():
        for key, kernel in changed.items():
            op.py_kernels.pop(key, None)
            if kernel is not None:
                op.py_kernels[key] = kernel
        op._dispatch_cache.clear()


@contextmanager
def derivatives() -> Iterator[None]:
    """Within this, traces have the derivatives of this page."""
    import torch

    aten = torch.ops.aten
    with traced_with({**_recorded(aten.cumprod.default, _cumprod), **_recorded(aten.cumprod_.default, _cumprod_)}):
        yield


def _recorded(op: Any, kernel: Callable[..., Any] | None) -> Kernels:
    """An op that autograd records as the kernel says; None as PyTorch does."""
    import torch

    return {op: {torch._C.DispatchKey.Autograd: kernel}}


def _cumprod(x: Any, dim: int, *, dtype: Any = None) -> Any:
    """The running product. PyTorch's derivative looks whether anything is 0; in a trace, which has no data, it takes as
    many steps as the dimension has elements, or finds where the zeros are, which are most of its work.
    """
    import torch
    from torch.autograd import forward_ad

    op, x = torch.ops.aten.cumprod.default, x if dtype is None else x.to(dtype)
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if transformed or not x.requires_grad or x.is_complex() or not x.dim() or not x.numel():
        with traced_with(_recorded(op, None)):
            return op(x, dim)
    return _product().apply(x, dim)


def _cumprod_(x: Any, dim: int, *, dtype: Any = None) -> Any:
    return x.copy_(_cumprod(x.clone(), dim, dtype=dtype))


@lru_cache(maxsize=1)
def _product() -> Any:
    import torch

    class Product(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, dim: int) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                y = torch.ops.aten.cumprod.default(x, dim)
            ctx.save_for_backward(x, y)
            ctx.dim = dim
            return y

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, y = ctx.saved_tensors
            return of_factors(x, y, grad, ctx.dim), None

    return Product


def of_factors(x: Any, y: Any, grad: Any, dim: int) -> Any:
    """The gradient of x, of which y[k] = x[0] ... x[k] along `dim` has the gradient `grad`; all of one shape. What is
    not 0 has a part in y[k] and what is later, as eager mode divides it out where nothing is 0:

        dx[k] = (y[k] dy[k] + y[k + 1] dy[k + 1] + ...) / x[k]

    Nothing can be divided by the first 0 of a row:

        dx[k] = y[k - 1] s[k]    with    s[k] = dy[k] + x[k + 1] s[k + 1]

    Nothing behind a 0 has a part in anything. (But where x is not finite there either, which makes y NaN, the whole row
    is NaN here. In eager mode a part of it is.)
    """
    import torch

    if (count := x.shape[dim]) == 1:
        return grad
    parts = torch.where(y == 0, 0, y * grad)  # whose gradient may be infinite behind a 0
    divided = parts.flip(dim).cumsum(dim).flip(dim) / x
    before = torch.cat([torch.ones_like(y.narrow(dim, 0, 1)), y.narrow(dim, 0, count - 1)], dim)
    of_first = torch.where(before == 0, 0, before * from_the_end(x, grad, dim))
    return torch.where(x == 0, of_first, divided)
