"""Tensors from nothing, and conversions."""

from __future__ import annotations

from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.types import i64
from terrazzo.rewrite.rule import Rule, need
from terrazzo.rules.torch_to_tensor.common import aten, operand, result


@aten("full.default", "full_like.default", "new_full.default", "scalar_tensor.default")
def full(node: Aten, *args: Any, **kwargs: Any) -> Any:
    """One value everywhere."""
    return t.literal(args[-1] if len(args) > 1 else args[0], result(node).dtype, result(node).shape)


@aten(
    "zeros.default", "zeros_like.default", "new_zeros.default", "empty.memory_format", "empty_like.default", "new_empty.default",
    "empty_strided.default", "new_empty_strided.default", "empty_permuted.default",
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
    value = t.apply("add", t.literal(start, compute, out.shape), t.apply("mul", index, t.literal(step, compute, out.shape)))
    return t.cast(value, out.dtype)


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


@aten("_to_copy.default", "to.dtype", "prims.convert_element_type.default")
def to_copy(node: Aten, x: Any, *args: Any, **kwargs: Any) -> Any:
    """x in another type, rounded once."""
    need(kwargs.get("device") is None or "cpu" in str(kwargs["device"]), "it moves the tensor to another device")
    need("complex" not in (x.type.dtype.kind, result(node).dtype.kind), "complex numbers are not compiled")
    return t.cast(x, result(node).dtype)


@aten(
    "clone.default", "alias.default", "detach.default", "lift_fresh_copy.default", "contiguous.default", "lift_fresh.default",
    "_conj.default", "conj_physical.default", "resolve_conj.default", "resolve_neg.default", "positive.default", "real.default",
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


RULES: tuple[Rule, ...] = (full, zeros, ones, arange, eye, *TRIANGLES, to_copy, clone, copy, fill, one_hot)
