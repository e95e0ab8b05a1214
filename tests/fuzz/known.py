"""What is known of a value while a random program is drawn.

It is *exact* if it is the same at every precision and in every order of additions: what jumps (comparisons, floor,
argmax, conversions to integers) is only applied to such values, so that a wrong result is a bug and not a rounding that
went the other way. And it may be *whole*: integers of at most some magnitude, whose sums are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from terrazzo.ir.types import DType, Type

DIGITS = {"f16": 11, "bf16": 8, "f32": 24, "f64": 53}
"""Integers up to 2 ** this are exact in a float type."""


@dataclass(frozen=True)
class Known:
    """A value and what is known of it."""

    node: Any
    exact: bool = True
    whole: int | None = None

    @property
    def type(self) -> Type:
        found: Type = self.node.type
        return found

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.static_shape


def known(node: Any, exact: bool = True, whole: int | None = None) -> Known:
    dtype = node.type.dtype
    if dtype.is_float:
        whole = whole if exact and whole is not None and whole <= 1 << DIGITS[dtype.name] else None
        return Known(node, exact, whole)
    limit = int(dtype.highest) + 1 if dtype.size < 4 else None
    small = whole if whole is not None and whole <= dtype.highest else limit
    return Known(node, True, small)
