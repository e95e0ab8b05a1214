"""Products of which the digits of TF32 will do: those of convolutions in float32, where PyTorch's switch says so and
its library has no more. Which these are the library says itself, where it can be asked; where there is none, large ones
of enough channels count as such.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from terrazzo.ir.contraction import PRODUCTS
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.program import Input
from terrazzo.ir.types import f32
from terrazzo.rules.torch_to_tensor.families import BACKWARD, arithmetic, convolved, is_convolution
from terrazzo.rules.torch_to_tensor.library import eager_type

EXACT, ROUGH = PRODUCTS
CHANNELS, WORK = 32, {False: 3e8, True: 1e9}
"""Channels of an image and of a result, and operations, more of them for gradients, from which on cuDNN counts as
computing convolutions in float32 in TF32 where nobody asks it: it does so with all in benchmarks/fits/h200-tf32.json,
and with 94 % of larger ones drawn later; with about half of smaller ones and of those in groups (ADR 009).
"""
LEAST = 1e7
"""Operations from which on a library is asked: with fewer, full digits cost nothing."""


@dataclass
class Rough:
    """Says of an op of Torch IR which of its results eager computes in TF32, if PyTorch's switch `allows` it: as the
    library said that was `asked`, and where none was, as large convolutions are.
    """

    allows: bool
    asked: Callable[[Aten], tuple[bool, ...]]
    layouts: dict[Node, Any] = field(default_factory=dict)

    def __call__(self, op: Any) -> tuple[bool, ...]:
        """For each of its results, and for the one that it has."""
        count = len(op.result) if isinstance(op.result, tuple) else 1
        if not self.allows or not is_convolution(op) or convolved(op)[1].type.dtype is not f32:
            return (False,) * count
        given = {x: Input(f"x{k}", eager_type(x, self.layouts)) for k, x in enumerate(dict.fromkeys(op.children))}
        told = self.asked(op.with_children([given[x] for x in op.children])) if arithmetic(op) >= LEAST else ()
        return told or (is_large(op),) * count


def is_large(op: Any) -> bool:
    """Whether a convolution, or one whose gradients an op computes, is of those that cuDNN mostly computes in TF32: of
    one group, of enough channels and work, and, where it is transposed, without large strides.
    """
    args = convolved(op)
    weights, stride, transposed, groups = args[1].type, args[3], args[6], args[8]
    wide = min(weights.static_shape[:2]) >= CHANNELS
    large = arithmetic(op) >= WORK[op.name == BACKWARD]
    return weights.dtype is f32 and large and wide and groups == 1 and not (transposed and max(stride) > 2)


def in_tf32(value: Any, rough: Sequence[bool], given: Collection[Any]) -> Any:
    """What an op became, or its results, with `tf32_mul` for the products that those sum that are `rough`; what it was
    `given` stays.
    """
    if isinstance(value, tuple):
        return tuple(v and in_tf32(v, (r,), given) for v, r in zip(value, rough, strict=True))
    if not rough[0]:
        return value
    below = set(given)
    new: dict[Any, Any] = {}
    for x in topological([value], stop=below.__contains__):
        if isinstance(x, t.Reduce) and x not in below and x.monoid.name == "sum" and _multiplies(x.args[0]):
            new[x] = x.with_children([t.apply(ROUGH, *x.args[0].children), *x.children[1:]])
    return substitute(value, new)


def _multiplies(x: Any) -> bool:
    return isinstance(x, t.Elementwise) and x.fn.name == EXACT and x.type.dtype is f32
