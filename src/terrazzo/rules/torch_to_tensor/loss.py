"""Losses that arrive whole."""

from __future__ import annotations

import math
from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.types import i64
from terrazzo.rewrite.rule import Rule, need
from terrazzo.rules.torch_to_tensor.common import aten, result
from terrazzo.rules.torch_to_tensor.pointwise import c
from terrazzo.rules.torch_to_tensor.view import reshaped


@aten("binary_cross_entropy_with_logits.default")
def bce_with_logits(
    node: Aten, x: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = 1
) -> Any:
    """(1 - target) * x + w * log(1 + exp(-x)), w = 1 + (pos_weight - 1) * target; then the mean (1) or the sum (2)."""
    shape, dtype = x.type.shape, x.type.dtype
    wide = dtype.compute
    a, y = t.cast(x, wide), t.broadcast(t.cast(target, wide), shape)
    zero, one = c(0.0, a), c(1.0, a)
    soft = t.apply(
        "add",
        t.apply("max", t.apply("neg", a), zero),
        t.apply("log1p", t.apply("exp", t.apply("neg", t.apply("abs", a)))),
    )
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


@aten("nll_loss_forward.default", "nll_loss2d_forward.default")
def nll_loss(node: Aten, x: Any, target: Any, weight: Any, reduction: int, ignored: int) -> tuple[Any, Any]:
    """-weight[target] * x[n, target, ...], 0 where the target is ignored; the mean by weight (1) or the sum (2); the
    sum of the weights.

    The sums are rounded once, at the end.
    """
    need(weight is None or weight.type.dtype is x.type.dtype, "PyTorch refuses weights of another type")
    wide, shape = x.type.dtype.compute, target.type.shape
    target = t.cast(target, i64)
    kept = t.apply("ne", target, c(ignored, target))
    here = t.coordinates(shape)
    axis = min(x.type.rank - 1, 1)
    at = [*here[:axis], t.loaded(t.where(kept, target, c(0, target)), here, x.type.shape[axis]), *here[axis:]]
    picked = t.apply("neg", t.cast(t.index_map(x, shape, at), wide))
    share = t.literal(1, wide, shape) if weight is None else t.cast(t.index_map(weight, shape, [at[axis]]), wide)
    share = t.where(kept, share, c(0, share))
    loss = t.where(kept, t.apply("mul", picked, share), c(0, share))
    if reduction == 0:
        return t.cast(loss, result(node, 0).dtype), t.literal(0, result(node, 1).dtype, ())
    total, among = (t.reduce("sum", v, range(len(shape))) for v in (loss, share))
    total = t.apply("div", total, among) if reduction == 1 else total
    return t.cast(total, result(node, 0).dtype), t.cast(among, result(node, 1).dtype)


RULES: tuple[Rule, ...] = (bce_with_logits, nll_loss)
