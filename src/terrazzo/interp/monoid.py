"""Reductions and scans over any monoid, on numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from terrazzo.ir.monoid import Monoid, numpy_builder
from terrazzo.ir.types import DType

Arrays = tuple[Any, ...]


def reduce(m: Monoid, args: Sequence[Any], axes: tuple[int, ...], dtypes: Sequence[DType]) -> Arrays:
    """Combine along `axes`, in row-major order. The accumulator has the type of the elements."""
    if m.ufunc is not None:
        x = args[0]
        with np.errstate(all="ignore"):
            return (np.asarray(m.ufunc.reduce(x, axis=axes, dtype=x.dtype, initial=_identity(m, args, dtypes)[0])),)
    flat = [_rows(a, axes) for a in args]
    size = flat[0].shape[-1]
    if size == 0:
        return tuple(np.broadcast_to(i, f.shape[:-1]).copy() for i, f in zip(_identity(m, args, dtypes), flat, strict=True))
    while size > 1:  # neighbours first, so that the order of elements is kept
        even, odd = [f[..., 0 : size - 1 : 2] for f in flat], [f[..., 1:size:2] for f in flat]
        merged = m.combine(numpy_builder, even, odd)
        rest = [f[..., size - 1 :] for f in flat] if size % 2 else [f[..., :0] for f in flat]
        flat = [np.concatenate([a, b], axis=-1) for a, b in zip(merged, rest, strict=True)]
        size = flat[0].shape[-1]
    return tuple(f[..., 0] for f in flat)


def scan(m: Monoid, args: Sequence[Any], axis: int) -> Arrays:
    """The running combination along `axis`."""
    if m.ufunc is not None:
        with np.errstate(all="ignore"):
            return (m.ufunc.accumulate(args[0], axis=axis, dtype=args[0].dtype),)
    moved = [np.moveaxis(a, axis, 0) for a in args]
    outs = [np.empty_like(a) for a in moved]
    running: Sequence[Any] = [a[0] for a in moved] if len(moved[0]) else []
    for i in range(len(moved[0])):
        running = m.combine(numpy_builder, running, [a[i] for a in moved]) if i else running
        for out, value in zip(outs, running, strict=True):
            out[i] = value
    return tuple(np.moveaxis(o, 0, axis) for o in outs)


def _identity(m: Monoid, args: Sequence[Any], dtypes: Sequence[DType]) -> list[Any]:
    return [np.asarray(a).dtype.type(i) for a, i in zip(args, m.identity(dtypes), strict=True)]


def _rows(x: Any, axes: tuple[int, ...]) -> Any:
    x = np.moveaxis(x, axes, range(x.ndim - len(axes), x.ndim))
    return (
        x.reshape(*x.shape[: x.ndim - len(axes)], -1)
        if x.size
        else x.reshape(*x.shape[: x.ndim - len(axes)], int(np.prod(x.shape[x.ndim - len(axes) :])))
    )
