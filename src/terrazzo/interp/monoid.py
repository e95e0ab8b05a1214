"""Reductions and scans over any monoid, on numpy arrays."""

from __future__ import annotations

import math
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
    first = [np.broadcast_to(i, f.shape[:-1]).copy() for i, f in zip(_identity(m, args, dtypes), flat, strict=True)]
    if size == 0:
        return tuple(first)
    while size > 1:  # neighbours first, so that the order of elements is kept
        even, odd = [f[..., 0 : size - 1 : 2] for f in flat], [f[..., 1:size:2] for f in flat]
        merged = m.combine(numpy_builder, even, odd)
        rest = [f[..., size - 1 :] for f in flat] if size % 2 else [f[..., :0] for f in flat]
        flat = [np.concatenate([a, b], axis=-1) for a, b in zip(merged, rest, strict=True)]
        size = flat[0].shape[-1]
    return m.combine(
        numpy_builder, first, [f[..., 0] for f in flat]
    )  # as accumulators begin: of one element that is NaN, NaN


def sum_of_products(a: Any, b: Any, axes: tuple[int, ...]) -> Any:
    """The sum of a * b along `axes`, both of one shape and type. What a factor only repeats (a stride of 0) is not
    written out, unless that would show: an infinity times a sum is not the sum of its products.
    """
    shape = a.shape
    alone = any(_varies(a, d) != _varies(b, d) for d in axes)
    if 0 in shape or (alone and not (_finite(a) and _finite(b))):
        with np.errstate(all="ignore"):
            return (a * b).sum(axis=axes, dtype=a.dtype)
    both, only_a, only_b, summed = _dims(a, b, axes)
    left = _matrix(a, axes, (both, only_a, summed))
    right = _matrix(b, axes, (both, summed, only_b))
    with np.errstate(all="ignore"):
        out = left @ right
    order = (*both, *only_a, *only_b)
    kept = [d for d in range(len(shape)) if d not in axes]
    out = out.reshape([shape[d] for d in order]).transpose(sorted(range(len(order)), key=order.__getitem__))
    repeated = math.prod(shape[d] for d in axes if not _varies(a, d) and not _varies(b, d))
    out = np.expand_dims(out * out.dtype.type(repeated), tuple(k for k, d in enumerate(kept) if d not in order))
    return np.broadcast_to(out, [shape[d] for d in kept])


def _dims(a: Any, b: Any, axes: tuple[int, ...]) -> tuple[list[int], ...]:
    """The dimensions that are kept and in both factors, in `a` only, in `b` only, and those summed that are in both."""
    kinds: dict[Any, list[int]] = {}
    for d in range(a.ndim):
        kinds.setdefault((_varies(a, d), _varies(b, d), d in axes), []).append(d)
    return tuple(
        kinds.get(key, [])
        for key in ((True, True, False), (True, False, False), (False, True, False), (True, True, True))
    )


def _varies(x: Any, d: int) -> bool:
    return bool(x.shape[d] != 1 and x.strides[d] != 0)


def _once(x: Any) -> Any:
    """`x` without its repetitions, which become extents of 1."""
    return x[tuple(slice(None) if _varies(x, d) else slice(0, 1) for d in range(x.ndim))]


def _finite(x: Any) -> bool:
    return bool(np.isfinite(_once(x)).all())


def _matrix(x: Any, axes: tuple[int, ...], groups: Sequence[list[int]]) -> Any:
    """`x` as a stack of matrices, each group of its dimensions as one; a dimension summed in this factor alone is
    summed at once.
    """
    alone = tuple(d for d in axes if _varies(x, d) and not any(d in g for g in groups))
    x = _once(x).sum(axis=alone, keepdims=True, dtype=x.dtype)
    order = [d for g in groups for d in g]
    rest = [d for d in range(x.ndim) if d not in order]
    return x.transpose([*order, *rest]).reshape([math.prod(x.shape[d] for d in g) for g in groups])


def scan(m: Monoid, args: Sequence[Any], axis: int, dtypes: Sequence[DType]) -> Arrays:
    """The running combination along `axis`."""
    if m.ufunc is not None:
        with np.errstate(all="ignore"):
            return (m.ufunc.accumulate(args[0], axis=axis, dtype=args[0].dtype),)
    moved = [np.moveaxis(a, axis, 0) for a in args]
    outs = [np.empty_like(a) for a in moved]
    running: Sequence[Any] = _identity(m, args, dtypes)
    for i in range(len(moved[0])):
        running = m.combine(numpy_builder, running, [a[i] for a in moved])
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
