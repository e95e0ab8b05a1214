"""Element types and tensor types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from terrazzo.errors import UserError
from terrazzo.ir.node import distinct

if TYPE_CHECKING:
    from terrazzo.ir.expr import IntExpr


@distinct
@dataclass(frozen=True, eq=False)
class DType:
    """One element type. `kind` is one of bool, int, uint, float, complex; `size` is in bytes."""

    name: str
    kind: str
    size: int
    numpy: Any

    def __repr__(self) -> str:
        return self.name

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        """True for signed and unsigned integers, not for bool."""
        return self.kind in ("int", "uint")

    @property
    def compute(self) -> DType:
        """The type arithmetic on this one happens in: 16-bit floats are for storage and compute in f32, as in
        PyTorch.
        """
        return f32 if self in (f16, bf16) else self

    @property
    def lowest(self) -> float | int | bool:
        """The identity of max: -inf for floats, the smallest value otherwise."""
        if self.kind == "float":
            return float("-inf")
        return False if self.kind == "bool" else int(np.iinfo(self.numpy).min)

    @property
    def highest(self) -> float | int | bool:
        """The identity of min: +inf for floats, the largest value otherwise."""
        if self.kind == "float":
            return float("inf")
        return True if self.kind == "bool" else int(np.iinfo(self.numpy).max)


bool_ = DType("bool", "bool", 1, np.dtype(np.bool_))
u8 = DType("u8", "uint", 1, np.dtype(np.uint8))
u16 = DType("u16", "uint", 2, np.dtype(np.uint16))
u32 = DType("u32", "uint", 4, np.dtype(np.uint32))
u64 = DType("u64", "uint", 8, np.dtype(np.uint64))
i8 = DType("i8", "int", 1, np.dtype(np.int8))
i16 = DType("i16", "int", 2, np.dtype(np.int16))
i32 = DType("i32", "int", 4, np.dtype(np.int32))
i64 = DType("i64", "int", 8, np.dtype(np.int64))
f16 = DType("f16", "float", 2, np.dtype(np.float16))
bf16 = DType("bf16", "float", 2, np.dtype(ml_dtypes.bfloat16))
f32 = DType("f32", "float", 4, np.dtype(np.float32))
f64 = DType("f64", "float", 8, np.dtype(np.float64))
c64 = DType("c64", "complex", 8, np.dtype(np.complex64))  # complex types exist for opaque ops only
c128 = DType("c128", "complex", 16, np.dtype(np.complex128))

DTYPES = {t.name: t for t in (bool_, u8, u16, u32, u64, i8, i16, i32, i64, f16, bf16, f32, f64, c64, c128)}


def dtype(name: str) -> DType:
    """The element type called `name`; UserError names the known ones."""
    if name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


@distinct
@dataclass(frozen=True)
class Type:
    """A tensor's element type, shape, and strides in elements (None: row-major contiguous)."""

    dtype: DType
    shape: tuple[IntExpr, ...] = ()
    strides: tuple[IntExpr, ...] | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)

    @cached_property
    def element_strides(self) -> tuple[IntExpr, ...]:
        """Strides in elements, spelled out."""
        return contiguous_strides(self.shape) if self.strides is None else self.strides

    @cached_property
    def numel(self) -> IntExpr:
        n: IntExpr = 1
        for extent in self.shape:
            n = n * extent
        return n

    @cached_property
    def span(self) -> int:
        """Bytes from the first element to the end of the last: more than they fill, where there are gaps."""
        if 0 in self.shape:
            return 0
        steps = zip(self.static_shape, self.element_strides, strict=True)
        return (1 + sum((e - 1) * s for e, s in steps if isinstance(s, int))) * self.dtype.size

    @cached_property
    def static_shape(self) -> tuple[int, ...]:
        """The shape as plain ints; UserError where a dimension is symbolic."""
        for extent in self.shape:
            if not isinstance(extent, int):
                raise UserError(f"dimension {extent} of {self} is symbolic; this needs a concrete size")
        return tuple(e for e in self.shape if isinstance(e, int))

    def __repr__(self) -> str:
        shape = f"[{', '.join(map(str, self.shape))}]" if self.shape else ""
        steps = None if self.strides is None else ", ".join(map(str, self.strides)) + "," * (self.rank == 1)
        return self.dtype.name + shape + ("" if steps is None else f" @ ({steps})")


def contiguous_strides(shape: tuple[IntExpr, ...]) -> tuple[IntExpr, ...]:
    """Row-major strides of `shape`, in elements."""
    strides: list[IntExpr] = []
    step: IntExpr = 1
    for extent in reversed(shape):
        strides.append(step)
        step = step * extent
    return tuple(reversed(strides))


def dense(ty: Type) -> Type:
    """A type whose strides are kept where every place is that of one element, as row by row otherwise."""
    plain = Type(ty.dtype, ty.shape)
    wide = [(s, e) for s, e in zip(ty.element_strides, ty.static_shape, strict=True) if e != 1]
    places: list[tuple[Any, int]] = sorted(wide, key=lambda x: int(x[0]))
    whole = all(s == math.prod(e for _, e in places[:k]) for k, (s, _) in enumerate(places))
    same = all(e == 1 or a == b for e, a, b in zip(ty.shape, ty.element_strides, plain.element_strides, strict=True))
    return plain if same or not whole or 0 in ty.shape else ty


def ordered_strides(shape: Sequence[int], order: Sequence[int], room: int = 1) -> tuple[int, ...]:
    """Strides, in elements, of dimensions that lie in memory in this order, outermost first, in rows of a multiple of
    `room` elements.
    """
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= shape[d] if d != order[-1] else -(-shape[d] // room) * room
    return tuple(strides)
