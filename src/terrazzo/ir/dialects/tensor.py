"""Tensor IR: what a program computes, in four primitives and one escape.

elementwise  one scalar function, on tensors of one shape
index map    out[i...] = x[f(i...)], or 0 outside: every view, pad, flip, broadcast, and, with loaded indices, gather
reduce       over a monoid, of one value or several
scan         the running combination of a monoid along an axis
opaque       an op we do not compile: PyTorch runs it, and says so

`iota` and `literal` are the leaves; `laid_out` says how an argument of such an op lies in memory. Softmax, norms,
attention, convolution, losses are compositions of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from terrazzo.errors import UserError
from terrazzo.ir.address import evaluate, quotient, unflatten
from terrazzo.ir.dialects import scalar as sc
from terrazzo.ir.dialects.scalar import Scalar
from terrazzo.ir.expr import Bound, Expr, IntExpr, Loaded, Size, Var, at_least, bounds
from terrazzo.ir.monoid import Monoid, monoid
from terrazzo.ir.node import Node, derived, free_in, substitute, topological
from terrazzo.ir.types import DType, Type, i64


class Value(Node):
    """A tensor, or a tuple of tensors, with its type."""

    @derived
    def type(self) -> Any:
        """A Type, or a tuple of them where there are several results (None for one that is absent)."""
        return self.infer()

    @derived
    def free(self) -> frozenset[Any]:
        """Nothing: the coordinates that a tensor is made with are its own."""
        return frozenset()

    def check(self) -> None:
        _ = self.type

    def infer(self) -> Type | tuple[Type | None, ...]:
        """The type of the result; UserError where the fields do not fit."""
        raise NotImplementedError


def coordinates(shape: Sequence[IntExpr]) -> tuple[Var, ...]:
    """The coordinates i0, i1, … of an element of a tensor of this shape."""
    return _coordinates(tuple(shape))


@lru_cache(maxsize=1024)
def _coordinates(shape: tuple[IntExpr, ...]) -> tuple[Var, ...]:
    return tuple(Var(f"i{d}", extent) for d, extent in enumerate(shape))


class Literal(Value, dialect="tensor", op="literal"):
    """A tensor that holds one value everywhere."""

    value: bool | int | float
    dtype: DType
    shape: tuple[IntExpr, ...] = ()

    @classmethod
    def make(cls, value: Any, dtype: DType, shape: tuple[IntExpr, ...]) -> Literal:
        return literal(value, dtype, shape)

    def infer(self) -> Type:
        return Type(self.dtype, self.shape)


class Iota(Value, dialect="tensor", op="iota"):
    """out[i...] = index(i...): an integer that follows from the coordinates."""

    index: IntExpr
    shape: tuple[IntExpr, ...]

    def infer(self) -> Type:
        _check_scope("iota", (self.index,), self.shape)
        return Type(i64, self.shape)


class Elementwise(Value, dialect="tensor", op="elementwise"):
    """out[i...] = fn(args[i...]...), all of one shape; broadcasting is an index map and is written out."""

    fn: Scalar
    args: tuple[Node, ...]

    def infer(self) -> Type:
        types = [_type(self.fn.name, a) for a in self.args]
        if any(t.shape != types[0].shape for t in types):
            raise UserError(f"{self.fn.name}: shapes differ: {', '.join(map(repr, types))}")
        return Type(self.fn.infer([t.dtype for t in types]), types[0].shape)


class IndexMap(Value, dialect="tensor", op="index_map"):
    """out[i...] = x[index(i...)] where every expression of `inside` is >= 0, and 0 elsewhere."""

    x: Node
    shape: tuple[IntExpr, ...]
    index: tuple[IntExpr, ...]
    inside: tuple[IntExpr, ...] = ()

    @property
    def index_nodes(self) -> tuple[Expr, ...]:
        """The index expressions that are no plain integers."""
        return tuple(e for e in (*self.index, *self.inside) if isinstance(e, Expr))

    def infer(self) -> Type:
        source = _type("index_map", self.x)
        if len(self.index) != source.rank:
            raise UserError(f"index_map: {len(self.index)} indices for {source}")
        _check_scope("index_map", self.index + self.inside, self.shape)
        if not self.inside and all(bounds(e)[1] != 0 for e in self.shape):
            for d, (e, extent) in enumerate(zip(self.index, source.shape, strict=True)):
                if isinstance(e, int) and isinstance(extent, int) and not 0 <= e < extent:
                    raise UserError(f"index_map: index {e} is outside dimension {d} of {source}")
        return Type(source.dtype, self.shape)


class Read(Value, dialect="tensor", op="read"):
    """The value of the integer tensor `x` at one place, used inside an index as `Loaded(Read(x, index), extent)`."""

    x: Node
    index: tuple[IntExpr, ...]

    @derived
    def free(self) -> frozenset[Any]:
        return free_in(e for e in self.index if isinstance(e, Expr))

    def infer(self) -> Type:
        source = _type("read", self.x)
        if not source.dtype.is_integer or len(self.index) != source.rank:
            raise UserError(f"read: {len(self.index)} indices into {source}; an index must be an integer")
        return Type(source.dtype, ())


class Reduce(Value, dialect="tensor", op="reduce"):
    """The combination of all elements along `axes`, which disappear. One result, or one per value of the monoid."""

    monoid: Monoid
    args: tuple[Node, ...]
    axes: tuple[int, ...]

    def infer(self) -> Type | tuple[Type, ...]:
        types = _check_monoid("reduce", self.monoid, self.args)
        rank = types[0].rank
        if list(self.axes) != sorted(set(self.axes)) or any(not 0 <= a < rank for a in self.axes):
            raise UserError(f"reduce: axes {self.axes} are no increasing axes of {types[0]}")
        if not self.monoid.commutes and any(types[0].shape[a] not in (0, 1) for a in self.axes):
            raise UserError(f"reduce: {self.monoid.name} does not commute; scan it")
        kept = tuple(e for d, e in enumerate(types[0].shape) if d not in self.axes)
        out = tuple(Type(t.dtype, kept) for t in types)
        return out if self.monoid.width > 1 else out[0]


class Scan(Value, dialect="tensor", op="scan"):
    """out[..., i, ...] = the combination of elements 0..i along `axis`, in order."""

    monoid: Monoid
    args: tuple[Node, ...]
    axis: int

    def infer(self) -> Type | tuple[Type, ...]:
        types = _check_monoid("scan", self.monoid, self.args)
        if not 0 <= self.axis < types[0].rank:
            raise UserError(f"scan: {types[0]} has no axis {self.axis}")
        out = tuple(Type(t.dtype, t.shape) for t in types)
        return out if self.monoid.width > 1 else out[0]


class Get(Value, dialect="tensor", op="get"):
    """One result of a value that has several."""

    x: Node
    index: int

    def infer(self) -> Type:
        results = getattr(self.x, "type", None)
        if not isinstance(results, tuple) or not 0 <= self.index < len(results) or results[self.index] is None:
            raise UserError(f"get: no result {self.index} of {type(self.x).__name__}")
        found: Type = results[self.index]
        return found


class Opaque(Value, dialect="tensor", op="opaque"):
    """A call PyTorch runs for us. The fields are those of Torch IR's `aten`."""

    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    result: Type | tuple[Type | None, ...]
    order: int = 0

    def infer(self) -> Type | tuple[Type | None, ...]:
        return self.result


class LaidOut(Value, dialect="tensor", op="laid_out"):
    """The same tensor, in memory with these strides (in elements): a call of PyTorch is given it as eager would."""

    x: Node
    strides: tuple[int, ...]

    def infer(self) -> Type:
        source = _type("laid_out", self.x)
        if len(self.strides) != source.rank:
            raise UserError(f"laid_out: {len(self.strides)} strides for {source}")
        return Type(source.dtype, source.shape, self.strides)


def _type(op: str, x: Node) -> Type:
    found = getattr(x, "type", None)
    if not isinstance(found, Type):
        raise UserError(f"{op}: an operand is no single tensor: {type(x).__name__}")
    return found


def _check_monoid(op: str, m: Monoid, args: tuple[Node, ...]) -> list[Type]:
    types = [_type(op, a) for a in args]
    if len(types) != m.width or any(t.shape != types[0].shape for t in types):
        raise UserError(f"{op}: {m.name} combines {m.width} tensors of one shape, got {', '.join(map(repr, types))}")
    if m.width == 1:  # the combination must be defined on the type (no sums of bf16: they compute in f32)
        m.combine(lambda name, *given: sc.scalar(name).infer(given), [types[0].dtype], [types[0].dtype])
    return types


def _check_scope(op: str, exprs: Sequence[IntExpr], shape: Sequence[IntExpr]) -> None:
    known = frozenset(coordinates(shape))
    for e in exprs:
        if isinstance(e, Expr) and not e.free <= known:
            for n in sorted((x for x in e.free - known if isinstance(x, Var)), key=lambda x: x.name):
                raise UserError(f"{op}: {n.name} in [0, {n.extent}) is no coordinate of shape {list(shape)}")


def tensors_read(e: Any) -> dict[Node, Node]:
    """The tensors an index reads from, each mapped to itself: what a transformation of indices must not look into."""
    inside = (
        topological([e], stop=lambda n: isinstance(n, Value) and not isinstance(n, Read)) if isinstance(e, Node) else []
    )
    return {n.x: n.x for n in inside if isinstance(n, Read)}


def moved(e: IntExpr, where: Mapping[Any, Any]) -> Any:
    """An index expression at other coordinates."""
    return substitute(e, where)  # what it reads from has none of them free


# Builders: the everyday ways to make Tensor IR. They fold what costs nothing to fold.


def literal(value: Any, dtype: DType, shape: Sequence[IntExpr] = ()) -> Literal:
    """A tensor of `shape` holding `value`, converted to `dtype` the way PyTorch does."""
    kind = dtype.kind
    exact: bool | int | float = bool(value) if kind == "bool" else float(value) if kind == "float" else int(value)
    if kind in ("int", "uint"):
        bits = 8 * dtype.size
        wrapped = int(exact) % (1 << bits)
        exact = wrapped - (1 << bits) if kind == "int" and wrapped >> (bits - 1) else wrapped
    elif kind == "float":
        exact = float(sc.CASTS[dtype].numpy(exact))
    return Literal(exact, dtype, tuple(shape))


def apply(fn: str, *args: Node) -> Elementwise:
    """The scalar function called `fn`, element by element."""
    return Elementwise(sc.scalar(fn), args)


def cast(x: Node, dtype: DType) -> Any:
    """`x` converted to `dtype`; `x` itself where it has that type."""
    if _type("cast", x).dtype is dtype:
        return x
    if isinstance(x, Literal):
        return literal(x.value, dtype, x.shape)
    return Elementwise(sc.CASTS[dtype], (x,))


def index_map(x: Any, shape: Sequence[IntExpr], index: Sequence[IntExpr], inside: Sequence[IntExpr] = ()) -> Any:
    """out[i...] = x[index] where all of `inside` are >= 0, else 0. Maps of maps, literals and iotas fold into one."""
    shape, index = tuple(shape), tuple(index)
    if 0 in shape:
        return literal(0, x.type.dtype, shape)
    inside = tuple(dict.fromkeys(e for e in inside if not at_least(e, 0)))
    if not inside:
        if shape == x.type.shape and index == coordinates(shape):
            return x
        if isinstance(x, Literal):
            return Literal(x.value, x.dtype, shape)
    gathers = isinstance(x, IndexMap) and any(
        isinstance(n, Loaded) for n in topological(x.index_nodes, stop=lambda n: isinstance(n, Loaded))
    )
    if isinstance(x, (IndexMap, Iota)) and not (
        inside and (gathers or isinstance(x, Iota))
    ):  # no read outside the operand
        move = dict(zip(coordinates(x.shape), index, strict=True))
        if isinstance(x, Iota):
            return Iota(moved(x.index, move), shape)
        deeper = tuple(moved(e, move) for e in x.index)
        return index_map(x.x, shape, deeper, inside + tuple(moved(e, move) for e in x.inside))
    return IndexMap(x, shape, index, inside)


def broadcast(x: Any, shape: Sequence[IntExpr]) -> Any:
    """`x` stretched to `shape` by PyTorch's rules: aligned at the right, extents of 1 repeat."""
    source, shape = x.type.shape, tuple(shape)
    lead = len(shape) - len(source)
    here = coordinates(shape)
    if lead < 0 or any(e not in (1, shape[lead + d]) for d, e in enumerate(source)):
        raise UserError(f"cannot broadcast {list(source)} to {list(shape)}")
    return index_map(x, shape, [0 if e == 1 else here[lead + d] for d, e in enumerate(source)])


def reshape(x: Any, shape: Sequence[IntExpr]) -> Any:
    """The same elements in row-major order under another shape."""
    from terrazzo.ir.address import flatten
    from terrazzo.ir.types import contiguous_strides

    shape = tuple(shape)
    if 0 in shape:
        return literal(0, x.type.dtype, shape)
    offset = flatten(coordinates(shape), contiguous_strides(shape))
    return index_map(x, shape, unflatten(offset, x.type.shape))


def permute(x: Any, perm: Sequence[int]) -> Any:
    """Axis d of the result is axis perm[d] of x."""
    shape = [x.type.shape[p] for p in perm]
    here = coordinates(shape)
    index: list[IntExpr] = [0] * len(perm)
    for d, p in enumerate(perm):
        index[p] = here[d]
    return index_map(x, shape, index)


def reduce(m: str, args: Node | Sequence[Node], axes: Sequence[int], keepdim: bool = False) -> Any:
    """Reduce over `axes` (negative ones count from the end). A tuple of values where the monoid has several."""
    given = (args,) if isinstance(args, Node) else tuple(args)
    shape = _type("reduce", given[0]).shape
    axes = tuple(sorted(a % len(shape) for a in axes)) if shape else ()
    node = Reduce(monoid(m), given, axes)
    results: list[Any] = [node] if node.monoid.width == 1 else [Get(node, k) for k in range(node.monoid.width)]
    if any(shape[a] == 0 for a in axes):
        dtypes = [r.type.dtype for r in results]
        results = [
            literal(v, r.type.dtype, r.type.shape) for v, r in zip(node.monoid.identity(dtypes), results, strict=True)
        ]
    if keepdim:
        kept = [1 if d in axes else e for d, e in enumerate(shape)]
        results = [reshape(r, kept) for r in results]
    return results[0] if len(results) == 1 else tuple(results)


def scan(m: str, args: Node | Sequence[Node], axis: int) -> Any:
    """The running combination along `axis`. A tuple of values where the monoid has several."""
    given = (args,) if isinstance(args, Node) else tuple(args)
    node = Scan(monoid(m), given, axis)
    return node if node.monoid.width == 1 else tuple(Get(node, k) for k in range(node.monoid.width))


def iota(shape: Sequence[IntExpr], index: IntExpr) -> Iota:
    """An i64 tensor whose element at (i0, i1, …) is `index`; use `coordinates(shape)` to write it."""
    return Iota(index, tuple(shape))


def where(condition: Node, a: Node, b: Node) -> Elementwise:
    """a where condition, else b."""
    return apply("where", condition, a, b)


def loaded(x: Node, index: Sequence[IntExpr], extent: IntExpr) -> IntExpr:
    """The value of integer tensor `x` at `index`, as an index in [0, extent). It is read where it does not follow from
    the coordinates.
    """
    known = follows(x, index)
    if known is not None and at_least(known, 0) and at_least(extent - 1 - known, 0):
        return known
    return Loaded(Read(x, tuple(index)), extent)


def follows(x: Any, index: Sequence[IntExpr]) -> IntExpr | None:
    """The value of a tensor of i64 at `index` where coordinates and constants are all that it is made of, else None."""
    if not isinstance(x, Literal | Iota | IndexMap | Elementwise) or x.type.dtype is not i64:
        return None
    if isinstance(x, Literal):
        return int(x.value)
    here: dict[Any, IntExpr] = dict(zip(coordinates(x.type.shape), index, strict=True))
    if isinstance(x, Iota):
        return substitute(x.index, here)  # type: ignore[no-any-return]
    if isinstance(x, IndexMap):
        return None if x.inside else follows(x.x, tuple(substitute(e, here) for e in x.index))
    if x.fn.name in ("add", "sub", "mul"):
        a, b = (follows(y, index) for y in x.args)
        if a is not None and b is not None:
            return a + b if x.fn.name == "add" else a - b if x.fn.name == "sub" else a * b
    return _quotient(x, index)


MOST_VALUES = 1 << 14
"""How many values of a coordinate are tried, at most."""


def _quotient(x: Elementwise, index: Sequence[IntExpr]) -> IntExpr | None:
    """(a * i + b) // c where that is the value for each value of the only coordinate i of `index`, whatever arithmetic
    on floats leads there: places in an image that is resized to its nearest pixels are computed so, and products can
    only be brought in as boxes where they are known.
    """
    variables = free_in(e for e in index if isinstance(e, Expr))
    i = next(iter(variables), None)
    if len(variables) != 1 or not isinstance(i, Var | Bound) or not isinstance(i.extent, int):
        return None
    if not 1 < i.extent <= MOST_VALUES or (found := _values(x, tuple(index), i)) is None:
        return None
    return quotient(found.tolist(), i)


def _values(x: Any, index: tuple[IntExpr, ...], i: Any) -> Any:
    """The values of a tensor at `index` for each value of i; None where it is not made of coordinates alone."""
    known: dict[Any, Any] = {}
    todo = [(x, index)]
    while todo:
        read = _read_there(*todo[-1])
        if missing := [y for y in read if y not in known]:
            todo += missing
            continue
        made = [known[y] for y in read]
        known[todo[-1]] = None if any(y is None for y in made) else _value_of(*todo[-1], i, made)
        todo.pop()
    return known[x, index]


def _read_there(x: Any, index: tuple[IntExpr, ...]) -> list[tuple[Any, tuple[IntExpr, ...]]]:
    """What an element is made of: tensors, and where they are read."""
    if isinstance(x, Elementwise):
        return [(y, index) for y in x.args]
    if isinstance(x, IndexMap) and not x.inside and not _open((*x.index, *index)):
        here = dict(zip(coordinates(x.type.shape), index, strict=True))
        return [(x.x, tuple(substitute(e, here) for e in x.index))]
    return []


def _value_of(x: Any, index: tuple[IntExpr, ...], i: Any, made: Sequence[Any]) -> Any:
    """The values of an element for each value of i, by those of what it is made of; None where they are not known."""
    if isinstance(x, Literal):
        return np.full(i.extent, x.value, x.dtype.numpy)
    if isinstance(x, Elementwise):
        return np.asarray(x.fn.numpy(*made))
    if isinstance(x, Iota) and not _open((x.index, *index)):
        here = dict(zip(coordinates(x.type.shape), index, strict=True))
        value = evaluate(substitute(x.index, here), {i: np.arange(i.extent)})
        return np.broadcast_to(np.asarray(value, np.int64), (i.extent,))
    return made[0] if made else None


def _open(index: Sequence[IntExpr]) -> bool:
    """Whether an index depends on data or on sizes that are not known."""
    return any(isinstance(n, Loaded | Size) for n in topological([e for e in index if isinstance(e, Expr)]))
