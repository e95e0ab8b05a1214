"""Two products with what lies between them, over blocks of rows: attention, whatever it came from.

    out[m, n] = sum over k of weight(m, k) * value[k, n]
    weight(m, k) is made of score(m, j) = sum over d of query[m, d] * key[j, d], of one j or of all of them

Such a kernel computes its scores wherever it needs them, in a maximum, in a sum, in the weights. Here a block of
rows has all of its scores in memory that is its thread's own, in the second-level cache: a blocked product writes them,
what the kernel says of a row turns them into weights in place, and a second blocked product reads these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.ir import nest as n
from terrazzo.ir.contraction import contraction, nested_contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.node import Node, substitute, topological, transform
from terrazzo.ir.types import DType, Type
from terrazzo.targets.cpu.blocked import DEPTH, PANELS, Blocked
from terrazzo.targets.cpu.tiles import Site, Tiled, depth, extent
from terrazzo.targets.terms import Scope

ROOM = 3 << 18
"""Bytes that the scores of a block may have: three quarters of a small second-level cache."""
LONGEST = 1 << 16
"""Scores of a row, at most: the fewest rows of a block have as much as a whole second-level cache then, or more."""
MOST, LEAST = 192, 12
"""Rows of a block."""
LINE = 16
"""Elements of a line of a cache."""
BLOCKS = 64
"""Blocks that many threads can share."""


@dataclass(frozen=True)
class Chained:
    """A kernel as two products: `scores` of axis `m` and `key`, of which every `row` has `kept` in memory, the
    `weights` that a row becomes, and the product of these with a value, for columns `n`.
    """

    kernel: l.Kernel
    scores: l.Reduce
    kept: Any
    weights: l.Kernel
    row: l.Buffer
    total: l.Reduce
    factors: tuple[Node, Node]
    batch: tuple[Var, ...]
    m: Var
    n: Var
    key: Var

    @property
    def width(self) -> int:
        """Keys of a row."""
        return extent(self.key)

    @property
    def rows(self) -> int:
        """Rows of a block: as many as have room, and fewer where there would be few blocks."""
        around = 1
        for a in self.batch:
            around *= extent(a)
        fitting = min(MOST, ROOM // (self.scores.dtype.size * self.width), -(-around * extent(self.m) // BLOCKS))
        return int(min(max(fitting // LEAST, 1) * LEAST, extent(self.m)))


def chained(kernel: l.Kernel) -> Chained | None:
    """The kernel in this form, or None: one sum of weights times values, whose weights are made of one product."""
    totals = {x for s in kernel.stores for x in _outermost(s.value)}
    known = all(isinstance(a.extent, int) and a.extent for a in kernel.axes)
    if len(totals) != 1 or kernel.scans or not known or not all(s.free >= {*kernel.axes} for s in kernel.stores):
        return None
    (total,) = totals
    found = nested_contraction(total)
    if found is None or len(found.terms) > 1 or len(total.axes) > 1 or not _plain(total.dtype):
        return None
    (key,), (product,) = l.open_binder(total)
    assert isinstance(product, l.Apply)  # a contraction's
    one, other = product.args
    weight: Any
    value: Any
    for weight, value in ((one, other), (other, one)):
        if _holds(value) or not _holds(weight):
            continue
        columns = [a for a in kernel.axes if a in value.free - weight.free]
        rows = [a for a in kernel.axes if a in weight.free - value.free]
        made = _weights(weight, key)
        if len(columns) != 1 or not rows or made is None:
            continue
        scores, kept, buffer, term = made
        pair = contraction(scores)
        m = max(rows, key=extent)
        if pair is None or len(pair.terms) > 1 or scores.dtype is not total.dtype or weight.dtype is not total.dtype:
            continue
        if not any(m in a.free - b.free and key in b.free - a.free for a, b in (pair.factors, pair.factors[::-1])):
            continue
        if not all(isinstance(a.extent, int) and a.extent for a in (*scores.axes, key)):
            continue
        batch = tuple(a for a in kernel.axes if a is not m and a not in columns)
        store = l.Store(buffer, (key,), term)
        lines = l.Kernel(kernel.name, (*batch, m, key), (store,), kernel.source)
        factors = found.factors[::-1] if _holds(found.factors[1]) else found.factors
        return Chained(kernel, scores, kept, lines, buffer, total, factors, batch, m, columns[0], key)
    return None


def refusal(kernel: l.Kernel) -> str:
    """Why a kernel is not written as two products, or nothing."""
    found = chained(kernel)
    if found is None:
        return "it is not two products with what is made of rows between them"
    return f"a row of {found.width} scores is too long" if found.width > LONGEST else ""


def _plain(kind: Any) -> bool:
    return isinstance(kind, DType) and kind.name in ("f32", "f64")


def _outermost(x: Any) -> Iterator[l.Reduce]:
    """The reductions of a term that are in no others."""
    return (y for y in topological([x], stop=_reduces) if isinstance(y, l.Reduce))


def _reduces(x: Any) -> bool:
    return isinstance(x, l.Reduce | l.Scan)


def _holds(x: Any) -> bool:
    return any(isinstance(y, l.Reduce) for y in topological([x]))


def _weights(weight: Any, key: Var) -> tuple[l.Reduce, Any, l.Buffer, Any] | None:
    """The product that a weight is made of, at `key`; what is kept of it, as where a mask hides it; the row in which
    that is, and the weight with loads from there. None where there are several products, or sums for each key.
    """
    found: dict[Any, None] = {}

    def score(y: Any, axes: Sequence[Any]) -> Any:
        mine = [a for a in axes if a in y.free]
        if isinstance(y, l.Reduce) and contraction(y) and len(mine) < 2 and all(a.extent == key.extent for a in mine):
            found[substitute(y, dict.fromkeys(mine, key))] = None
            return l.Load.make(bare, tuple(mine)) if mine else y
        return None

    bare = l.Buffer(l.fresh_name(), Type(weight.dtype, (key.extent,)))
    made = everywhere(weight, (key,), score)
    if len(found) != 1:
        return None
    (scores,) = found
    if key not in scores.free:
        return None
    kept = _common(made, key, bare)
    row = l.Buffer(l.fresh_name(), bare.type)

    def known(y: Any, axes: Sequence[Any]) -> Any:
        mine = next((a for a in axes if substitute(kept, {key: a}) is y), None)
        return l.Load.make(row, (mine,)) if mine is not None else None

    at_key, term = l.Load.make(bare, (key,)), everywhere(made, (key,), known)
    if any(isinstance(y, l.Reduce) and key in y.free for y in topological([term], stop=_reduces)):
        return None  # a weight takes the place of its score, which others would need, and a sum for each is a product
    return scores, substitute(kept, {at_key: scores}), row, term


def everywhere(x: Any, axes: Sequence[Any], change: Callable[[Any, Sequence[Any]], Any]) -> Any:
    """A term with what `change` makes of its parts, from the outside, also within reductions, where more axes are
    bound; where that is nothing they stay.
    """
    memo: dict[Node, Any] = {}
    for y in topological([x], stop=lambda y: isinstance(y, l.Reduce) or change(y, axes) is not None):
        new = change(y, axes)
        if new is None and isinstance(y, l.Reduce):
            inner, args = l.open_binder(y)
            new = l.Reduce.make(y.monoid, inner, tuple(everywhere(z, (*axes, *inner), change) for z in args))
        if new is not None:
            memo[y] = new
    return transform(x, lambda y: y, memo)


def _common(x: Any, key: Var, bare: l.Buffer) -> Any:
    """The largest term of a score, at `key`, of which all of `x` is made that is made of scores."""
    places: list[dict[Any, None]] = []

    def seen(x: Any, axes: Sequence[Any]) -> None:
        terms: list[Any] = topological([x], stop=_reduces)
        for axis in axes:
            load = l.Load.make(bare, (axis,))
            if load not in terms:
                continue
            alone: list[Any] = [load]
            for y in terms:
                parts = [] if _reduces(y) else [z for z in y.children if z in alone]
                if parts and not any(isinstance(z, l.Reduce) for z in topological([y])) and y.dtype is bare.type.dtype:
                    alone.append(y)
            places.append({substitute(y, {axis: key}): None for y in alone})
        for y in terms:
            if _reduces(y):
                inner, args = l.open_binder(y)
                for z in args:
                    seen(z, (*axes, *inner))

    seen(x, (key,))
    shared = [y for y in places[0] if all(y in other for other in places)]

    def covers(kept: Any) -> bool:
        """Whether nothing of `x` knows a score but as this."""
        left: list[Any] = []

        def change(y: Any, axes: Sequence[Any]) -> Any:
            if any(substitute(kept, {key: a}) is y for a in axes):
                return y
            if isinstance(y, l.Load) and y.buffer is bare:
                left.append(y)
            return None

        everywhere(x, (key,), change)
        return not left

    return next(y for y in reversed(shared) if covers(y))


OfARow = Callable[[l.Kernel, Sequence[n.Statement], Scope], list[str]]
"""Writes statements of a kernel within a loop that threads share already."""


def emit(kernel: l.Kernel, scope: Scope, of_a_row: OfARow) -> list[str] | None:
    """The body of the kernel's function, or None where the kernel is not of this form."""
    found = chained(kernel)
    return _Rows(found, scope, of_a_row).lines() if found is not None else None


class _Rows:
    def __init__(self, c: Chained, scope: Scope, of_a_row: OfARow) -> None:
        self.c, self.scope, self.of_a_row = c, scope, of_a_row
        one, other = contraction(c.scores).factors  # type: ignore[union-attr]
        left, right = (one, other) if c.m in one.free else (other, one)
        begin = Var(l.fresh_name(), c.m.extent)
        scope.names[begin] = "m0"
        block = l.Buffer(l.fresh_name(), Type(c.scores.dtype, (c.rows, c.width), (self.along, 1)))
        scope.buffers[block] = "scores"
        rows = [l.Store(block, (c.m - begin, c.key), c.kept)]
        first = Tiled((Site(c.scores, left, right, c.scores.axes),), (c.m,), (c.key,))
        self.first = Blocked(c.weights, scope, first, _lets(rows, c.scores), rows, alone=False)
        second, stores = Tiled((Site(c.total, *c.factors, c.total.axes),), (c.m,), (c.n,)), [*c.kernel.stores]
        self.second = Blocked(c.kernel, scope, second, _lets(stores, c.total), stores, alone=False)
        self.type = self.first.type

    @property
    def along(self) -> int:
        """Elements from one row of scores to the next: whole cache lines."""
        return -(-self.c.width // LINE) * LINE

    def lines(self) -> list[str]:
        c, kind = self.c, self.type
        out = [f"constexpr int64_t N = tz_cols<{kind}>(), M = {c.rows}, K = {DEPTH}, T = {self.along}, G = 1;"]
        lefts, made = self.first.lefts()
        heads = [f"for (int64_t {self.first.name(a)} = 0; {self.first.name(a)} < {a.extent}; {self.first.name(a)}++)"
                 for a in c.batch]  # fmt: skip
        heads.append(f"for (int64_t m0 = 0; m0 < {c.m.extent}; m0 += M)")
        out += [*made, f"#pragma omp parallel for collapse({len(heads)}) num_threads(threads) schedule(dynamic, 1)"]
        out += [*heads[:-1], heads[-1] + " {"]
        out += [
            f"  const int64_t mc = std::min<int64_t>(M, {c.m.extent} - m0);",
            f"  alignas(64) static thread_local {kind} panel[K * N], tile[1][M * N], scores[M * T];",
        ]
        if depth(self.first.sites[0]) > DEPTH * PANELS or c.width > DEPTH * PANELS:
            out.append(f"  alignas(64) static thread_local {kind} part[M * N];")
        (site,) = self.first.sites
        product = self.first.product(0, site, self.first.start(site, lefts))
        out += ["  " + x for x in self.columns(c.width, product, self.first)]
        out += [
            "  for (int64_t m = m0; m < m0 + mc; m++) {",
            f"    {kind}* const row = scores + (m - m0) * T;",
            *("    " + x for x in self.row()),
            "  }",
        ]
        (site,) = self.second.sites
        product = self.second.product(0, site, "scores + k0, T, 1")
        out += ["  " + x for x in self.columns(extent(c.n), product, self.second)]
        return [*out, "}", *(f"free({name});" for name in lefts.values())]

    def columns(self, count: int, product: Sequence[str], of: Blocked) -> list[str]:
        """A loop over blocks of so many columns: a product, and what is made of it."""
        head = f"for (int64_t g0 = 0; g0 < {count}; g0 += N) {{"
        made = [*of.each_panel(count), *("  " + x for x in of.epilogue()), "}"]
        until = f"const int64_t g1 = std::min<int64_t>(g0 + N, {count});"
        return [head, *("  " + x for x in (until, *product, *made)), "}"]

    def row(self) -> list[str]:
        """What turns the scores of a row into weights."""
        inner = self.scope.inner()
        inner.names[self.c.m], inner.buffers[self.c.row] = "m", "row"
        return self.of_a_row(self.c.weights, self.inside(n.nest(self.c.weights)), inner)

    def inside(self, body: Sequence[n.Statement]) -> list[n.Statement]:
        """The statements of a row: the loops around rows are there already."""
        out: list[n.Statement] = []
        for s in body:
            around = isinstance(s, n.Loop) and s.kind == "free" and s.axes[0] is not self.c.key
            out += self.inside(s.body) if around else [s]  # type: ignore[union-attr]
        return out


def _lets(stores: Sequence[l.Store], site: l.Reduce) -> list[l.Term]:
    """The terms that stores compute of a product."""
    terms = topological([s.value for s in stores], stop=lambda x: x is site)
    return [x for x in terms if isinstance(x, l.Term) and not isinstance(x, l.Literal) and x is not site]
