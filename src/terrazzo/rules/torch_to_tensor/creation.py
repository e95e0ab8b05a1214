"""Tensors from nothing, and conversions."""

from __future__ import annotations

from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.node import Node
from terrazzo.ir.types import f64, i64
from terrazzo.rewrite.rule import Rule, need
from terrazzo.rules.torch_to_tensor.common import aten, operand, result
from terrazzo.rules.torch_to_tensor.special import searched


@aten("full.default", "full_like.default", "new_full.default", "scalar_tensor.default", "prims.scalar_tensor.default")
def full(node: Aten, *args: Any, **kwargs: Any) -> Any:
    """One value everywhere."""
    return t.literal(args[-1] if len(args) > 1 else args[0], result(node).dtype, result(node).shape)


@aten(
    "zeros.default", "zeros_like.default", "new_zeros.default", "empty.memory_format", "empty_like.default",
    "new_empty.default", "empty_strided.default", "new_empty_strided.default", "empty_permuted.default",
)  # fmt: skip
def zeros(node: Aten, *args: Any, **kwargs: Any) -> Any:
    """0 everywhere; what is in an empty tensor is ours to choose."""
    return t.literal(0, result(node).dtype, result(node).shape)


@aten("ones.default", "ones_like.default", "new_ones.default")
def ones(node: Aten, *args: Any, **kwargs: Any) -> Any:
    """1 everywhere."""
    return t.literal(1, result(node).dtype, result(node).shape)


@aten("arange.default", "arange.start", "arange.start_step")
def arange(node: Aten, *args: Any, **kwargs: Any) -> Any:
    """start + step * i."""
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else kwargs.get("step", 1))
    out = result(node)
    here = t.coordinates(out.shape)[0]
    if isinstance(start, int) and isinstance(step, int) and not out.dtype.is_float:
        return t.cast(t.iota(out.shape, here * step + start), out.dtype)
    compute = out.dtype.compute
    index = t.cast(t.iota(out.shape, here), compute)
    value = t.apply(
        "add", t.literal(start, compute, out.shape), t.apply("mul", index, t.literal(step, compute, out.shape))
    )
    return t.cast(value, out.dtype)


@aten("linspace.default", "linspace.Tensor_Tensor", "linspace.Tensor_Scalar", "linspace.Scalar_Tensor")
def linspace(node: Aten, start: Any, end: Any, steps: int, **kwargs: Any) -> Any:
    """start + step * i in the first half, end - step * (steps - 1 - i) in the second; for integers in f64, cut off."""
    out = result(node)
    stored = out.dtype if out.dtype.is_float else f64
    wide = stored.compute
    low, high = (t.cast(operand(operand(x, out.dtype, ()), wide, ()), wide) for x in (start, end))
    if steps == 1:  # which is the start, however far the end is
        return t.cast(t.broadcast(low, out.shape), out.dtype)
    step = t.cast(t.apply("sub", high, low), stored)
    step = t.cast(t.apply("div", t.cast(step, wide), t.literal(max(steps - 1, 1), wide, ())), stored)
    low, high, step = (t.broadcast(t.cast(x, wide), out.shape) for x in (low, high, step))
    here = t.coordinates(out.shape)[0]
    rising = t.apply("add", low, t.apply("mul", step, t.cast(t.iota(out.shape, here), wide)))
    falling = t.apply("sub", high, t.apply("mul", step, t.cast(t.iota(out.shape, steps - 1 - here), wide)))
    first = t.apply("lt", t.iota(out.shape, here), t.literal(steps // 2, i64, out.shape))
    return t.cast(t.where(first, rising, falling), out.dtype)


@aten("eye.default", "eye.m")
def eye(node: Aten, *args: Any, **kwargs: Any) -> Any:
    """1 on the diagonal."""
    out = result(node)
    row, column = t.coordinates(out.shape)
    return t.cast(t.apply("eq", t.iota(out.shape, row), t.iota(out.shape, column)), out.dtype)


def _triangle(name: str, test: str) -> Rule:
    def lower(node: Aten, x: Any, diagonal: int = 0) -> Any:
        shape = x.type.shape
        row, column = t.coordinates(shape)[-2:]
        inside = t.apply(test, t.iota(shape, column - row), t.literal(diagonal, i64, shape))
        return t.where(inside, x, t.literal(0, x.type.dtype, shape))

    rule = aten(f"{name}.default")(lower)
    return Rule(name, rule.keys, rule.rewrite, f"x where column - row {test} diagonal, else 0.")


TRIANGLES = (_triangle("tril", "le"), _triangle("triu", "ge"))


def _triangle_indices(name: str, lower: bool) -> Rule:
    def places(node: Aten, rows: int, columns: int, offset: int = 0, **kwargs: Any) -> Any:
        out = result(node)
        if not out.shape[1]:
            return t.literal(0, out.dtype, out.shape)
        numbers = t.iota((rows,), t.coordinates((rows,))[0])
        bound = t.apply(
            "add", numbers, t.literal(offset + lower, i64, (rows,))
        )  # where row r leaves, or enters, the triangle
        bound = t.apply("min", t.apply("max", bound, t.literal(0, i64, (rows,))), t.literal(columns, i64, (rows,)))
        count = bound if lower else t.apply("sub", t.literal(columns, i64, (rows,)), bound)
        end = t.scan("sum", count, 0)
        first = t.apply("sub", t.literal(0, i64, (rows,)) if lower else bound, t.apply("sub", end, count))
        here = t.coordinates(out.shape[1:])
        number = t.iota(out.shape[1:], here[0])
        row = t.cast(searched(number, end, (), right=True), i64)
        column = t.apply("add", number, t.index_map(first, number.type.shape, [t.loaded(row, here, rows)]))
        i, j = t.coordinates(out.shape)
        both = [t.index_map(v, out.shape, [j]) for v in (row, column)]
        return t.cast(t.where(t.apply("eq", t.iota(out.shape, i), t.literal(0, i64, out.shape)), *both), out.dtype)

    rule = aten(f"{name}_indices.default")(places)
    return Rule(
        f"{name}_indices",
        rule.keys,
        rule.rewrite,
        "Place k lies in the row before whose end k is, counted along the rows, which a binary search finds.",
    )


TRIANGLE_INDICES = (_triangle_indices("tril", True), _triangle_indices("triu", False))


@aten("_to_copy.default", "to.dtype", "prims.convert_element_type.default")
def to_copy(node: Aten, x: Any, *args: Any, **kwargs: Any) -> Any:
    """x in another type, rounded once, and x itself where that is its type. vmap writes numbers so."""
    need(kwargs.get("device") is None or "cpu" in str(kwargs["device"]), "it moves the tensor to another device")
    kind = type(x).__name__ if isinstance(x, bool | int | float | complex) else x.type.dtype.kind
    need("complex" not in (kind, result(node).dtype.kind), "complex numbers are not compiled")
    return t.cast(x, result(node).dtype) if isinstance(x, Node) else operand(x, result(node).dtype, result(node).shape)


@aten(
    "clone.default", "alias.default", "detach.default", "lift_fresh_copy.default", "contiguous.default",
    "lift_fresh.default", "_conj.default", "conj_physical.default", "resolve_conj.default", "resolve_neg.default",
    "positive.default", "real.default",
)  # fmt: skip
def clone(node: Aten, x: Any, *args: Any, **kwargs: Any) -> Any:
    """x."""
    need(x.type.dtype.kind != "complex", "complex numbers are not compiled")
    return x


@aten("copy.default")
def copy(node: Aten, x: Any, source: Any, *args: Any) -> Any:
    """The source, in the shape and type of x."""
    return operand(source, result(node).dtype, result(node).shape)


@aten("fill.Scalar", "fill.Tensor")
def fill(node: Aten, x: Any, value: Any) -> Any:
    """The value, in the shape and type of x."""
    return operand(value, result(node).dtype, result(node).shape)


@aten("one_hot.default")
def one_hot(node: Aten, x: Any, classes: int = -1) -> Any:
    """1 at the class, 0 elsewhere."""
    need(classes > 0, "the number of classes depends on the data")
    out = result(node)
    klass = t.iota(out.shape, t.coordinates(out.shape)[-1])
    wide = t.index_map(x, out.shape, t.coordinates(out.shape)[:-1])
    return t.cast(t.apply("eq", t.cast(wide, i64), klass), out.dtype)


RULES: tuple[Rule, ...] = (
    full,
    zeros,
    ones,
    arange,
    linspace,
    eye,
    *TRIANGLES,
    *TRIANGLE_INDICES,
    to_copy,
    clone,
    copy,
    fill,
    one_hot,
)
