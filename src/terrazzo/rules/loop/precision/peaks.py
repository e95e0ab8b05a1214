"""Factors with one number in each row beside which the others are small.

Tensor cores bring what they add to the exponent of the largest, with two bits more than float32 has, and cut off what
is below. Beside one large number, of which there is one in a row, small ones lose more than they do on CUDA cores, and
all on one side. A single sum hardly shows it. But (softmax - identity) @ w, the gradient of scores that compare all
with all, is added up over rows, where the large numbers and the sums of small ones cancel: on an H200 gradients of
biases were off by five times as much as eager's for 4096 rows, and an emulation of the tensor cores finds the same
number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.node import topological


def peaked(x: Any, steps: Sequence[Any]) -> bool:
    """Whether a factor, or what stores it, adds numbers on a diagonal to others."""
    if not isinstance(x, l.Load):
        return _added(x)
    stores = [s for step in steps if isinstance(step, l.Kernel) for s in step.stores if s.buffer is x.buffer]
    return any(_added(s.value) for s in stores)


def _added(x: Any) -> bool:
    """Whether a term is a sum of which one summand is 0 but on a diagonal, however the sum is scaled or masked."""
    if not isinstance(x, l.Apply):
        return False
    if x.fn.name in ("add", "sub"):
        first, second = map(_diagonal, x.args)
        return first != second or any(map(_added, x.args))
    return (x.fn.name in ("mul", "div", "neg", "where") or is_cast(x.fn)) and any(map(_added, x.args))


def _diagonal(x: Any) -> bool:
    """Whether a term is 0 but where two places are told to be the same: no data is asked."""
    if not isinstance(x, l.Apply):
        return False
    if x.fn.name != "where":
        return (x.fn.name in ("mul", "div", "neg") or is_cast(x.fn)) and any(map(_diagonal, x.args))
    test, one, other = x.args
    zeros = [y for y in (one, other) if isinstance(y, l.Literal) and y.value == 0]
    asked = topological([test])
    places = {a for y in asked if isinstance(y, l.Index) for a in y.free}
    return len(zeros) == 1 and len(places) == 2 and not any(isinstance(y, l.Load | l.Reduce) for y in asked)
