"""The last points of phases that have not equally many: phases go on beyond them, or they are pieces of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Var
from terrazzo.ir.node import substitute, topological
from terrazzo.ir.regions import ALIGNED, WHOLE
from terrazzo.ir.types import Type, ordered_strides
from terrazzo.rules.loop.definitions import unused
from terrazzo.rules.loop.precision.number_parts import order_of

if TYPE_CHECKING:
    from terrazzo.rules.loop.layout.phases import Phase

Steps = tuple[l.Kernel | l.Call, ...]


def all_points(
    kernel: l.Kernel,
    taken: Mapping[Any, Any],
    points: Mapping[Any, Any],
    sizes: Mapping[Any, int],
    axes: Sequence[Any],
    names: Set[str],
) -> tuple[l.Kernel, ...]:
    """A kernel of phases that go on beyond the last point, so that all have equally many, and one that stores what
    there is of its results. Points have `sizes` there, and nothing else is read beyond theirs.
    """
    (reduce,) = taken
    new = dict(taken)
    for x in topological([s.value for s in kernel.stores], lambda x: x is reduce):
        if isinstance(x, l.Load):
            ends = tuple(a.extent - 1 - points[a] for a in sizes if a in x.free)
            y = substitute(x, points)
            new[x] = l.Load.make(y.buffer, y.index, (*y.inside, *ends))
    wide = {s.buffer: _widened(s, sizes, names) for s in kernel.stores}
    stores = [substitute(substitute(l.Store(wide[s.buffer], s.index, s.value), new), points) for s in kernel.stores]
    whole = with_plain_axes(unused(f"{kernel.name}_whole", {*names}), axes, stores, kernel)
    there = tuple(l.Store(s.buffer, s.index, l.Load.make(wide[s.buffer], s.index)) for s in kernel.stores)
    return whole, l.Kernel(kernel.name, kernel.axes, there, kernel.source)


@dataclass(frozen=True)
class _Part:
    """Points of a dimension that a kernel stores: so many, what the axes are there, and where they are among these."""

    size: int
    axes: Mapping[Any, IntExpr]
    at: IntExpr


class Pieces:
    """Kernels of phases that have equally many points, and of those that are left of each dimension, which store pieces
    of what one kernel stored.
    """

    def __init__(
        self,
        kernel: l.Kernel,
        taken: Mapping[Any, Any],
        points: Mapping[Any, Any],
        axes: Sequence[Any],
        names: set[str],
    ) -> None:
        self.kernel, self.points, self.axes, self.names = kernel, points, axes, names
        self.values = [substitute(substitute(s.value, taken), points) for s in kernel.stores]
        self.made: list[l.Kernel | l.Call] = []

    def steps(self, uneven: Sequence[Phase]) -> Steps:
        """All of it; nothing where pieces would not begin where regions do, or there are none."""
        for s in self.kernel.stores:
            for y in uneven:
                pitch: Any = s.buffer.type.element_strides[s.index.index(y.rests.point)]
                if y.whole == 0 or y.whole * pitch * s.buffer.type.dtype.size % ALIGNED:
                    return ()
        self.pieces(uneven, {})
        return tuple(self.made)

    def pieces(self, left: Sequence[Phase], cut: Mapping[Any, _Part]) -> list[l.Buffer]:
        """What is stored of points that are `cut`, those of the phases that are `left` whole."""
        if not left:
            return self.stored(cut)
        y, *others = left
        point, each = y.rests.point, y.whole // y.rests.stride
        among, rest = Var(l.fresh_name(), each), point.extent - y.whole
        end = Var(l.fresh_name(), rest) if rest > 1 else 0
        first = _Part(y.whole, {y.among: among}, among * y.rests.stride + y.phase)
        both = [
            self.pieces(others, {**cut, point: x}) for x in (first, _Part(rest, {y.among: each, y.phase: end}, end))
        ]
        found = [self.buffer(s, cut) for s in self.kernel.stores]
        for s, whole, *parts in zip(self.kernel.stores, found, *both, strict=True):
            self.made.append(l.Call(WHOLE, (tuple(parts), s.index.index(point)), (), (whole,), 0, self.kernel.source))
        return found

    def stored(self, cut: Mapping[Any, _Part]) -> list[l.Buffer]:
        """What one kernel stores."""
        new = {a: e for x in cut.values() for a, e in x.axes.items()}
        axes = [e for a in self.axes if isinstance(e := new.get(a, a), Var)]
        places = [self.buffer(s, cut) for s in self.kernel.stores]
        at = {**self.points, **{a: x.at for a, x in cut.items()}}
        stores = [
            l.Store(b, tuple(substitute(e, at) if isinstance(e, Expr) else e for e in s.index), substitute(x, new))
            for s, b, x in zip(self.kernel.stores, places, self.values, strict=True)
        ]
        self.made.append(with_plain_axes(places[0].name, axes, stores, self.kernel))
        return places

    def buffer(self, s: l.Store, cut: Mapping[Any, _Part]) -> l.Buffer:
        """Where a store goes, or the piece of it: it lies as it will in the whole."""
        if not cut:
            return s.buffer
        kind = s.buffer.type
        shape = tuple(cut[e].size if e in cut else n for e, n in zip(s.index, kind.static_shape, strict=True))
        name = unused(f"{s.buffer.name}_piece", self.names)
        self.names.add(name)
        return l.Buffer(name, Type(kind.dtype, shape, kind.element_strides))


def _widened(s: l.Store, sizes: Mapping[Any, int], names: Set[str]) -> l.Buffer:
    """What a store writes to, with room for so many points of axes."""
    kind = s.buffer.type
    shape = tuple(sizes.get(e, n) for e, n in zip(s.index, kind.static_shape, strict=True))
    strides = None if kind.strides is None else ordered_strides(shape, order_of(kind))
    return l.Buffer(unused(f"{s.buffer.name}_whole", {*names}), Type(kind.dtype, shape, strides))


def with_plain_axes(name: str, axes: Sequence[Any], stores: Sequence[l.Store], source: l.Kernel) -> l.Kernel:
    """A kernel whose axes have the names that they have elsewhere."""
    plain: dict[Any, Any] = {a: Var(f"a{n}", a.extent) for n, a in enumerate(axes)}
    return l.Kernel(name, tuple(plain.values()), tuple(substitute(s, plain) for s in stores), source.source)
