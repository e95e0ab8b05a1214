"""Running combinations along a dimension."""

from __future__ import annotations

from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.types import bool_, i64
from terrazzo.rewrite.rule import Rule, need
from terrazzo.rules.torch_to_tensor.common import aten, normalize, result
from terrazzo.rules.torch_to_tensor.pointwise import c
from terrazzo.rules.torch_to_tensor.reduction import accumulated


def _cumulative(name: str, m: str) -> Rule:
    def lower(node: Aten, x: Any, dim: int, *, dtype: Any = None) -> Any:
        out = result(node)
        need(out.dtype is not bool_, "PyTorch has none for bools")
        wide = accumulated(x, out)
        return t.cast(t.scan(m, wide, normalize(dim, x.type.rank)) if x.type.rank else wide, out.dtype)

    rule = aten(f"{name}.default")(lower)
    return Rule(name, rule.keys, rule.rewrite, f"The running {m}.")


def _best_so_far(name: str, m: str) -> Rule:
    def lower(node: Aten, x: Any, dim: int) -> Any:
        if not x.type.rank:
            return x, t.literal(0, i64, ())
        axis = normalize(dim, x.type.rank)
        wide = t.cast(x, i64 if x.type.dtype is bool_ else x.type.dtype.compute)
        value, index = t.scan(m, (wide, t.iota(x.type.shape, t.coordinates(x.type.shape)[axis])), axis)
        return t.cast(value, x.type.dtype), index

    rule = aten(f"{name}.default")(lower)
    return Rule(name, rule.keys, rule.rewrite, "The best value so far and its last index.")


@aten("logcumsumexp.default")
def logcumsumexp(node: Aten, x: Any, dim: int) -> Any:
    """The running log-sum-exp, with a running maximum."""
    if not x.type.rank:
        return x
    wide = t.cast(x, x.type.dtype.compute)
    top, total = t.scan("logsumexp", (wide, c(1.0, wide)), normalize(dim, x.type.rank))
    return t.cast(t.apply("add", top, t.apply("log", total)), x.type.dtype)


@aten("terrazzo.linear_recurrence.default")
def linear_recurrence(node: Aten, a: Any, b: Any, dim: int) -> Any:
    """Every element is what is before it, times a factor, and a summand: the running composition of such steps. Before
    the first there is nothing, whatever its factor is, be it infinite.
    """
    shape, wide = b.type.shape, b.type.dtype.compute
    if shape[axis := normalize(dim, len(shape))] == 1:
        return b
    first = t.apply("eq", t.iota(shape, t.coordinates(shape)[axis]), t.literal(0, i64, shape))
    factors = t.apply("where", first, t.literal(0, wide, shape), t.cast(a, wide))
    _, found = t.scan("recurrence", (factors, t.cast(b, wide)), axis)
    return t.cast(found, b.type.dtype)


RULES: tuple[Rule, ...] = (
    _cumulative("cumsum", "sum"), _cumulative("cumprod", "prod"),
    _best_so_far("cummax", "argmax_last"), _best_so_far("cummin", "argmin_last"), logcumsumexp,
    linear_recurrence,
)  # fmt: skip
