"""Products of which the digits of TF32 will do: those of convolutions in float32, where PyTorch's switch says so and
its library has no more. Small ones are computed in float32, as cuDNN does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from terrazzo.ir.contraction import PRODUCTS
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.node import substitute, topological
from terrazzo.ir.types import f32
from terrazzo.rules.torch_to_tensor.library import BACKWARD, FORWARD, is_in_tf32

EXACT, ROUGH = PRODUCTS


def is_rough(op: Any) -> bool:
    """Whether eager computes an op in TF32 unless `torch.backends.cudnn.allow_tf32` forbids it."""
    return op.name in (FORWARD, BACKWARD) and is_in_tf32(op)


def in_tf32(value: Any, given: Collection[Any]) -> Any:
    """What an op became, or its results, with `tf32_mul` for the products that it sums; what it was `given` stays."""
    if isinstance(value, tuple):
        return tuple(v and in_tf32(v, given) for v in value)
    below = set(given)
    new: dict[Any, Any] = {}
    for x in topological([value], stop=below.__contains__):
        if isinstance(x, t.Reduce) and x not in below and x.monoid.name == "sum" and _multiplies(x.args[0]):
            new[x] = x.with_children([t.apply(ROUGH, *x.args[0].children), *x.children[1:]])
    return substitute(value, new)


def _multiplies(x: Any) -> bool:
    return isinstance(x, t.Elementwise) and x.fn.name == EXACT and x.type.dtype is f32
