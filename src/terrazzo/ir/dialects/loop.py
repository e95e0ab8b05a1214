"""Loop IR: kernels as algebra.

A kernel stores terms into buffers, for every point of its axes. A term is a scalar: a load, a scalar function of terms,
or a reduction of a term over axes of its own. Loops are not written down: a term lives in the outermost loop that binds
its free variables (see `nest.py`), and the printed form shows that nest. So fusion is substitution, and common
sub-expressions, hoisting and sibling reductions that share a loop need no pass at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.errors import UserError
from terrazzo.ir.dialects import scalar as sc
from terrazzo.ir.dialects.scalar import Scalar
from terrazzo.ir.expr import Bound, Expr, IntExpr, Var, at_least
from terrazzo.ir.monoid import Monoid
from terrazzo.ir.node import Node, derived, free_in, substituted, topological
from terrazzo.ir.types import DType, Type, i64


class Buffer(Node, dialect="loop", op="buffer"):
    """A tensor in memory. Buffers of one program are told apart by name."""

    name: str
    type: Type


class Term(Node):
    """A scalar at every point of the loops around it. `dtype` is its type, or a tuple of types for several values."""

    @derived
    def dtype(self) -> Any:
        return self.infer()

    def check(self) -> None:
        _ = self.dtype, self.free  # children first: no deep recursion later

    def infer(self) -> Any:
        """The element type, or one per value; UserError where the fields do not fit."""
        raise NotImplementedError


class Literal(Term, dialect="loop", op="literal"):
    """A constant."""

    value: bool | int | float
    type: DType

    def infer(self) -> DType:
        return self.type


class Index(Term, dialect="loop", op="index"):
    """The value of an index expression."""

    value: IntExpr

    def infer(self) -> DType:
        return i64


class Load(Term, dialect="loop", op="load"):
    """buffer[index] where every expression of `inside` is >= 0, else 0; nothing is read then."""

    buffer: Buffer
    index: tuple[IntExpr, ...]
    inside: tuple[IntExpr, ...] = ()

    @classmethod
    def make(cls, buffer: Buffer, index: tuple[IntExpr, ...], inside: tuple[IntExpr, ...] = ()) -> Load:
        return cls(buffer, index, tuple(dict.fromkeys(e for e in inside if not at_least(e, 0))))

    def infer(self) -> DType:
        if len(self.index) != self.buffer.type.rank:
            raise UserError(f"load: {len(self.index)} indices into {self.buffer.name}: {self.buffer.type}")
        return self.buffer.type.dtype


class Apply(Term, dialect="loop", op="apply"):
    """A scalar function of terms."""

    fn: Scalar
    args: tuple[Node, ...]

    def infer(self) -> DType:
        return self.fn.infer([_dtype(a) for a in self.args])


class Reduce(Term, dialect="loop", op="reduce"):
    """The combination of `args` over all points of `axes`. Construct with any variables: they become `Bound`."""

    monoid: Monoid
    axes: tuple[Any, ...]
    args: tuple[Node, ...]

    @classmethod
    def make(cls, monoid: Monoid, axes: tuple[Any, ...], args: tuple[Node, ...]) -> Reduce:
        axes, args = close(axes, args)
        return cls(monoid, axes, args)

    @derived
    def free(self) -> frozenset[Any]:
        return free_in(self.args) - frozenset(self.axes)

    def infer(self) -> Any:
        if not self.monoid.commutes and any(a.extent not in (0, 1) for a in self.axes):
            raise UserError(f"reduce: {self.monoid.name} does not commute; scan it")
        return _monoid_type(self.monoid, self.args)


class Scan(Term, dialect="loop", op="scan"):
    """The combination of `args` over axis = 0..at, in order. `at` is an axis of the kernel, its last one."""

    monoid: Monoid
    axis: Any
    args: tuple[Node, ...]
    at: IntExpr

    @classmethod
    def make(cls, monoid: Monoid, axis: Any, args: tuple[Node, ...], at: IntExpr) -> Scan:
        (axis,), args = close((axis,), args)
        return cls(monoid, axis, args, at)

    @derived
    def free(self) -> frozenset[Any]:
        own = free_in(self.args) - {self.axis}
        return own | (self.at.free if isinstance(self.at, Node) else frozenset())

    @derived
    def step(self) -> tuple[Node, ...]:
        """What is combined in at the point `at`."""
        return substituted(self.args, {self.axis: self.at})

    def infer(self) -> Any:
        return _monoid_type(self.monoid, self.args)


class Get(Term, dialect="loop", op="get"):
    """One value of a reduction or scan that has several."""

    x: Node
    index: int

    def infer(self) -> DType:
        types = _dtype(self.x)
        if not isinstance(types, tuple) or not 0 <= self.index < len(types):
            raise UserError(f"get: no value {self.index}")
        found: DType = types[self.index]
        return found


class Store(Node, dialect="loop", op="store"):
    """buffer[index] = value, at every point of the axes that occur in `index`. Where it lies `over` another buffer, an
    input of the program, all other elements are what they are there: `index` may be a part of the buffer, and data may
    say which.
    """

    buffer: Buffer
    index: tuple[IntExpr, ...]
    value: Node
    over: Buffer | None = None

    def check(self) -> None:
        if len(self.index) != self.buffer.type.rank or _dtype(self.value) is not self.buffer.type.dtype:
            raise UserError(
                f"store: a {_dtype(self.value)} at {len(self.index)} indices into "
                f"{self.buffer.name}: {self.buffer.type}"
            )
        if self.over is not None and self.over.type != self.buffer.type:
            raise UserError(f"store: {self.buffer.name}: {self.buffer.type} over {self.over.name}: {self.over.type}")

    @property
    def roots(self) -> tuple[Node, ...]:
        """The terms it is made of: the value, and where data says where that goes, the index."""
        return (self.value, *(e for e in self.index if isinstance(e, Expr) and self.over is not None))


class Kernel(Node, dialect="loop", op="kernel"):
    """One launch: `stores`, over `axes`, outermost first."""

    name: str
    axes: tuple[Var, ...]
    stores: tuple[Store, ...]
    source: str = ""

    @derived
    def terms(self) -> tuple[Node, ...]:
        """What the stored values are made of, children first; and places that data says."""
        return tuple(topological([x for s in self.stores for x in s.roots]))

    @derived
    def carried(self) -> tuple[Reduce | Scan, ...]:
        """The reductions and scans among its terms, children first."""
        return tuple(x for x in self.terms if isinstance(x, Reduce | Scan))

    @derived
    def scans(self) -> tuple[Scan, ...]:
        """The scans among its terms, children first."""
        return tuple(x for x in self.carried if isinstance(x, Scan))

    @derived
    def reads(self) -> tuple[Buffer, ...]:
        """The buffers loaded from, each once, in order of first use; and those that others lie over."""
        loaded = (n.buffer for n in self.terms if isinstance(n, Load))
        return tuple(dict.fromkeys((*loaded, *self.over.values())))

    @derived
    def writes(self) -> tuple[Buffer, ...]:
        return tuple(s.buffer for s in self.stores)

    @derived
    def over(self) -> dict[Buffer, Buffer]:
        """The buffers of which only a part is stored, with those that they lie over."""
        return {s.buffer: s.over for s in self.stores if s.over is not None}

    @derived
    def scans_in_order(self) -> bool:
        """True if every scan runs along the whole of the last axis, outside reductions, so that the innermost loop
        carries it.
        """
        last = self.axes[-1] if self.axes else None
        axes = frozenset(self.axes)
        return all(
            n.at is last and n.free <= axes and n.axis.extent == n.at.extent and not any(n.at in a.free for a in n.args)
            for n in self.scans
        )


class View(Node, dialect="loop", op="view"):
    """A window on the memory of a buffer, `offset` elements after its first: an argument of a call."""

    buffer: Buffer
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def type(self) -> Type:
        return Type(self.buffer.type.dtype, self.shape, self.strides)

    def check(self) -> None:
        sizes = (*self.shape, *self.strides, self.offset)
        if len(self.shape) != len(self.strides) or any(type(s) is not int or s < 0 for s in sizes):
            raise UserError(f"view: {self.shape}, {self.strides} and {self.offset} are no shape, strides and offset")
        if self.offset * self.type.dtype.size + self.type.span > self.buffer.type.span:
            raise UserError(f"view: it leaves the memory of {self.buffer.name}: {self.buffer.type}")


class Call(Node, dialect="loop", op="call"):
    """An opaque op: PyTorch runs it. Arguments are as in Torch IR with buffers, or views of them, for tensors; an
    absent result has no buffer.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[Buffer | None, ...]
    order: int = 0
    source: str = ""

    @derived
    def reads(self) -> tuple[Buffer, ...]:
        inside = itertools.chain(_buffers(self.args), *(_buffers((v,)) for _, v in self.kwargs))
        return tuple(dict.fromkeys(inside))

    @derived
    def writes(self) -> tuple[Buffer, ...]:
        return tuple(b for b in self.results if b is not None)


@dataclass(frozen=True)
class Program:
    """Kernels and calls in the order they run. `inputs` and `results` are buffers; everything else is temporary."""

    name: str
    inputs: tuple[Buffer, ...]
    steps: tuple[Kernel | Call, ...]
    results: tuple[Buffer, ...]


ASIDE = 1 << 20
"""Labels from here on are of reductions rewritten within others that are still closed: see `close`."""


def close(axes: Sequence[Any], args: Sequence[Node]) -> tuple[tuple[Bound, ...], tuple[Node, ...]]:
    """Turn variables into bound ones with the canonical labels. See `expr.Bound`.

    Whoever rewrites terms children first builds a reduction while those around it are closed. With an axis more than it
    had, its labels would be theirs, and what they bind would be bound by it. It steps aside then, until they are built
    anew, which they are after it, and with them all that mentions their variables.
    """
    own: Sequence[Any] = axes
    first = _first_label(args)
    if first > ASIDE and any(isinstance(a, Bound) for a in axes):
        own, args = _opened(axes, args)
        first = _first_label(args)
    around = [v.label for v in free_in(args) if isinstance(v, Bound) and v not in own]
    if any(first <= label < first + len(axes) for label in around):
        first = 1 + max(ASIDE, *around)
    bound = tuple(Bound(first + k, a.extent) for k, a in enumerate(axes))
    if bound == tuple(own):
        return bound, tuple(args)
    if any(isinstance(a, Bound) for a in own):  # two steps: labels may be permuted
        own, args = _opened(own, args)
    return bound, substituted(args, dict(zip(own, bound, strict=True)))


def _first_label(args: Sequence[Node]) -> int:
    """One more than the largest label that is bound anywhere in these."""
    return 1 + max((a.label for n in topological(args) if isinstance(n, (Reduce, Scan)) for a in _axes(n)), default=-1)


def _opened(axes: Sequence[Any], args: Sequence[Node]) -> tuple[tuple[Var, ...], tuple[Node, ...]]:
    """Axes as fresh free variables, and arguments in terms of them."""
    new = tuple(Var(fresh_name(), a.extent) for a in axes)
    return new, substituted(args, dict(zip(axes, new, strict=True)))


def open_binder(node: Reduce | Scan) -> tuple[tuple[Var, ...], tuple[Node, ...]]:
    """The axes as fresh free variables, and the arguments in terms of them. Close again by constructing."""
    return _opened(_axes(node), node.args)


def apply(fn: str, *args: Node) -> Apply:
    """The scalar function called `fn`; also the builder with which monoids combine terms."""
    return Apply(sc.scalar(fn), args)


def may_divide_by_zero(x: Node) -> bool:
    """Whether this divides whole numbers by what is not known to be another number than zero."""
    return (
        isinstance(x, Apply)
        and x.fn.name in sc.DIVISIONS
        and x.dtype.is_integer
        and not (isinstance(x.args[1], Literal) and x.args[1].value)
    )


def children_in_scope(node: Node) -> tuple[Node, ...]:
    """The children of a term, with a scan seen at the point where it is."""
    if type(node) is not Scan:
        return node.children
    return (*node.step, node.at) if isinstance(node.at, Expr) else node.step


_fresh = itertools.count()


def fresh_name() -> str:
    """A name no other variable has, for a variable that will be bound at once."""
    return f"${next(_fresh)}"


def _axes(node: Reduce | Scan) -> tuple[Any, ...]:
    return node.axes if isinstance(node, Reduce) else (node.axis,)


def _dtype(x: Node) -> Any:
    found = getattr(x, "dtype", None)
    if found is None:
        raise UserError(f"{type(x).__name__} is no term")
    return found


def _monoid_type(m: Monoid, args: tuple[Node, ...]) -> Any:
    types = tuple(_dtype(a) for a in args)
    if len(types) != m.width:
        raise UserError(f"{m.name} combines {m.width} values, got {len(types)}")
    return types if m.width > 1 else types[0]


def _buffers(value: Any) -> Iterable[Buffer]:
    if isinstance(value, Buffer):
        yield value
    elif isinstance(value, View):
        yield value.buffer
    elif isinstance(value, tuple):
        for v in value:
            yield from _buffers(v)
