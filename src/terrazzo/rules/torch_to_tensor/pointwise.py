"""Arithmetic, comparisons, logic and functions of one element."""

from __future__ import annotations

from typing import Any

from terrazzo.ir.dialects.torch import Aten
from terrazzo.rules.torch_to_tensor.common import aten, pointwise, result


@aten("add.Tensor", "add.Scalar")
def add(node: Aten, x: Any, y: Any, alpha: Any = 1) -> Any:
    """x + alpha * y in the promoted type; bools add as "or"."""
    dtype = result(node).dtype
    if dtype.kind == "bool":
        return pointwise(node, dtype, x, y, fn="or_")
    if alpha == 1:
        return pointwise(node, dtype.compute, x, y, fn="add")
    from terrazzo.ir.dialects import tensor as t

    return pointwise(node, dtype.compute, x, y, alpha, fn=lambda a, b, k: t.apply("add", a, t.apply("mul", b, k)))


RULES = (add,)
