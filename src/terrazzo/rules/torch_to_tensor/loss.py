"""Losses that arrive whole."""

from __future__ import annotations

import math
from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.rewrite.rule import Rule
from terrazzo.rules.torch_to_tensor.common import aten, result
from terrazzo.rules.torch_to_tensor.pointwise import c
from terrazzo.rules.torch_to_tensor.view import reshaped


@aten("binary_cross_entropy_with_logits.default")
def bce_with_logits(node: Aten, x: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = 1) -> Any:
    """(1 - target) * x + w * log(1 + exp(-x)), w = 1 + (pos_weight - 1) * target; then the mean (1) or the sum (2)."""
    shape, dtype = x.type.shape, x.type.dtype
    wide = dtype.compute
    a, y = t.cast(x, wide), t.broadcast(t.cast(target, wide), shape)
    zero, one = c(0.0, a), c(1.0, a)
    soft = t.apply("add", t.apply("max", t.apply("neg", a), zero), t.apply("log1p", t.apply("exp", t.apply("neg", t.apply("abs", a)))))
    if pos_weight is not None:
        extra = t.apply("mul", t.apply("sub", t.broadcast(t.cast(pos_weight, wide), shape), one), y)
        soft = t.apply("mul", t.apply("add", extra, one), soft)
    loss = t.apply("add", t.apply("mul", t.apply("sub", one, y), a), soft)
    if weight is not None:
        loss = t.apply("mul", loss, t.broadcast(t.cast(weight, wide), shape))
    if reduction == 0:
        return t.cast(loss, result(node).dtype)
    total = t.reduce("sum", loss, range(len(shape)))
    total = t.apply("div", total, c(math.prod(shape), total)) if reduction == 1 else total
    return t.cast(reshaped(total, result(node).shape), result(node).dtype)


RULES: tuple[Rule, ...] = (bce_with_logits,)
