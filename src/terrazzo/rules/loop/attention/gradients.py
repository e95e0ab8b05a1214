"""What a softmax between two products leaves for its gradient: no sums over its rows, no weights kept in 32 bits.

Training computes, of weights w = softmax(s) and results o = w v, with g the gradient of o,

    dv = w^T g        dw = g v^T        ds = w * (dw - rows)        rows[i] = sum over k of w[i, k] * dw[i, k]

Three rewrites, each found in the terms:

- `row_sums`: sums change places. sum_k w[i, k] * (sum_d g[i, d] * v[k, d]) = sum_d g[i, d] * o[i, d], a sum over d of
  what is stored anyway. So ds is computed where dw is, point by point. In float32 only where that makes a chain: what
  tensor cores cut off of dw and of o is not the same part of either, so rows of ds no longer add up to 0.
- `weights_again`: w = exp(s - t), where t = max(s) + log(sum(exp(s - max(s)))) is a number for each row, or two, where
  s is not only products. The gradient computes s again, so that the first product alone reads the weights, and what is
  kept of them is t. In float32 that is max(s) and 1 / sum(exp(s - max(s))): the rounding of a logarithm would be an
  error of all weights of a row.
- `rounded_factors`: weights, and what is a multiple of them, are rounded to the 16 bits of what they are multiplied
  with, where the product is rounded to 16 bits too. PyTorch's own kernels do so, forward and backward.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise, permutations
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Expr, Var
from terrazzo.ir.monoid import monoid
from terrazzo.ir.node import substitute, topological, transform
from terrazzo.ir.types import DType, Type
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.attention.rounding import Rounding, converted
from terrazzo.rules.loop.attention.softmax import Exponential, Softmax, exponentials, of_products, softmaxes
from terrazzo.rules.loop.cost import Rates
from terrazzo.rules.loop.edited import FAR, kernels_of
from terrazzo.rules.loop.precision.rounded import aligned

PASS = "gradients"
LOG2E = math.log2(math.e)
HEAD = 128
"""Numbers of a head in float32 whose gradients are chains of products, at most. Of wider ones weights and their
gradients are stored, and rows are summed from those: sums over all rows (the gradient of a bias of queries, where keys
have a mean) were 34 times as far off as eager's on an H200 when they were not, and are so with tensor cores emulated.
"""
PASSES = 4
"""Of 32 bits over a number for every weight, at least, that it takes where they are kept: weights and their gradients
are written, and read.
"""


def gradients(
    program: l.Program,
    log: Log,
    rates: Rates,
    views: Callable[[l.Program, Log], l.Program],
    materialize: Iterable[str] = (),
    wide: bool = False,
) -> l.Program:
    """`program` with the gradients of its softmaxes rewritten, where there are matrix instructions for 16 bits, or for
    products of 32 bits (`wide`) where nothing is in 16. `views` has a program's views seen through, which is done only
    where there is such a gradient. Weights that `materialize` names stay as they are.
    """
    terms = (x for s in kernels_of(program) for x in s.terms) if rates.matrix else ()
    if not any(isinstance(x, l.Apply) and x.fn.name == "exp" for x in terms):
        return program
    seen = views(program, log)
    narrow = any(b.type.dtype.name in rates.matrix for s in kernels_of(seen) for b in (*s.reads, *s.writes))
    work = _Gradients(seen, rates, wide and not narrow)
    for w in work.softmaxes:
        if w.buffer.name not in frozenset(materialize):
            work.rewrite(w)
    for e in exponentials(work.program, work.known):
        if e.buffer.name not in frozenset(materialize):
            work.round_weights(e) if e.row.buffer in program.inputs else work.rows_beside(e)
    if fired := any(e.fired for e in work.events):
        work.round_factors()
    for event in work.events:
        log.add(event)
    if not fired:
        return seen
    made = work.done(seen)
    old, new = ([s for s in a.steps if s not in b.steps] for a, b in ((seen, made), (made, seen)))
    log.applied(PASS, "gradients", ", ".join(s.name for s in old), old, new)
    return made


# -- what is done ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """A kernel that sums, over one axis, products of several factors."""

    kernel: l.Kernel
    axis: Var
    factors: list[Any]


class _Gradients(Rounding):
    """A program with softmaxes and their gradients."""

    def __init__(self, program: l.Program, rates: Rates, wide: bool) -> None:
        super().__init__(program, PASS)
        self.rates = rates
        self.kinds = {*rates.matrix, *(("f32",) if wide else ())}
        self.softmaxes = softmaxes(program, self.known)
        self.weights = {w.buffer for w in self.softmaxes}

    def rewrite(self, w: Softmax) -> None:
        """Both rewrites of a softmax, the second where the first found what its weights are multiplied to."""
        results = []
        for kernel in self.readers(w.buffer, FAR):
            product = self.product(kernel)
            found = self.row_sums(w, product) if product and isinstance(kernel.stores[0].value, l.Reduce) else None
            results += [found] if found else []
        if results:
            self.weights_again(w, results[0])

    # -- sums change places

    def product(self, kernel: l.Kernel) -> Product | None:
        """A kernel as a sum of products, or None."""
        value = self.known.core(kernel.stores[0].value) if len(kernel.stores) == 1 else None
        if not isinstance(value, l.Reduce) or value.monoid.name != "sum" or len(value.axes) != 1:
            return None
        (axis,), (term,) = l.open_binder(value)
        return Product(kernel, axis, self.known.factors(term))

    def row_sums(self, w: Softmax, p: Product) -> l.Store | None:
        """Have a sum over the weights' rows run over what they are multiplied to instead; the store of that."""
        for inner in p.factors:
            found = self.known.unfold(inner)
            if not isinstance(found, l.Reduce) or found.monoid.name != "sum" or len(found.axes) != 1:
                continue
            (depth,), (term,) = l.open_binder(found)
            factors = self.known.factors(term)
            moving = [x for x in factors if p.axis in x.free]
            fixed = [x for x in factors if p.axis not in x.free]
            rest = [x for x in p.factors if x is not inner]
            if any(depth not in x.free for x in factors) or not fixed or not any(_in_rows(x, w, p) for x in rest):
                continue
            if "f32" in self.kinds and isinstance(depth.extent, int) and depth.extent > HEAD:
                why = f"heads of {depth.extent} in float32 make no chain: rows of what is stored cancel more exactly"
                self.say("row_sums", p.kernel.name, why, fired=False)
                continue
            wanted = Product(p.kernel, p.axis, [*rest, *moving])
            place = self.stored(w, wanted, depth) or self.computed(w, wanted, depth)
            if place is None:
                continue
            result = l.Load.make(place.buffer, place.index)
            value = _times([*fixed, converted(result, found.dtype)])
            (old,) = p.kernel.stores
            rows = l.Reduce.make(found.monoid, (depth,), (value,))
            new = l.Kernel(p.kernel.name, p.kernel.axes, (l.Store(old.buffer, old.index, rows),), p.kernel.source)
            self.replace({p.kernel: [new], **self.factored(old.buffer)})
            what = f"a sum over {w.buffer.name} is one over {place.buffer.name}, which it is multiplied to"
            self.say("row_sums", p.kernel.name, what)
            return place
        return None

    def factored(self, rows: l.Buffer) -> dict[l.Kernel, list[l.Kernel]]:
        """Differences of products of which one has the row sums as a factor, with what both have in common once."""
        found: dict[l.Kernel, list[l.Kernel]] = {}
        for kernel in self.readers(rows, 2):
            (store, *more) = kernel.stores
            if more or not isinstance(store.value, l.Apply) or store.value.fn.name != "sub":
                continue
            one, other = map(self.known.factors, store.value.args)
            common = [x for x in one if x in other]
            if common and any(_loads(x, rows) for x in other):
                difference = l.apply("sub", *(_times([x for x in side if x not in common]) for side in (one, other)))
                new = l.Store(store.buffer, store.index, _times([*common, difference]))
                found[kernel] = [l.Kernel(kernel.name, kernel.axes, (new,), kernel.source)]
        return found

    def stored(self, w: Softmax, wanted: Product, depth: Var) -> l.Store | None:
        """Where the sum of some products is stored, for every value of `depth`: the store, at the place it is at. What
        is rounded to 16 bits comes first: it is what others read.
        """
        found = []
        for kernel in self.readers(w.buffer, FAR):
            p = self.product(kernel)
            if p is not None and len(p.factors) == len(wanted.factors) and kernel is not wanted.kernel:
                for places in _matches(p, wanted, depth):
                    store = kernel.stores[0]
                    index = tuple(substitute(e, places) if isinstance(e, Expr) else e for e in store.index)
                    found.append(l.Store(store.buffer, index, store.value))
        return min(found, key=lambda s: s.buffer.type.dtype.size, default=None)

    def computed(self, w: Softmax, wanted: Product, depth: Var) -> l.Store | None:
        """The same where nobody stored it, as in a graph that computes weights again from what another graph kept: a
        product that becomes one kernel with the softmax, where that costs less than to write and read the other factor.
        """
        others = [x for x in wanted.factors if not _loads(x, w.buffer)]
        kinds = [k for x in others if (k := self.narrow(x)) is not None]
        kinds = kinds or [x.dtype for x in others if x.dtype.name in self.kinds]
        if len(wanted.factors) != 2 or not kinds or not isinstance(depth.extent, int):
            return None
        both = 2 * depth.extent * self.rates.tensor  # scores again, and the results
        if both > PASSES * 4 * self.rates.byte:
            return None
        axes = (*wanted.kernel.axes, depth)
        shape = tuple(a.extent for a in axes)
        places = {a: Var(f"a{d}", a.extent) for d, a in enumerate(axes)}
        buffer = l.Buffer(self.fresh(f"{w.buffer.name}_results"), Type(kinds[0], shape))
        value = l.apply(kinds[0].name, l.Reduce.make(monoid("sum"), (wanted.axis,), (_times(wanted.factors),)))
        store = l.Store(buffer, tuple(places.values()), substitute(value, places))
        made = l.Kernel(buffer.name, tuple(places.values()), (store,), wanted.kernel.source)
        self.replace({wanted.kernel: [made, wanted.kernel]})
        self.say(
            "row_sums", buffer.name, f"{both:.2g} ns a weight to compute it, more to write and read a factor of it"
        )
        return l.Store(buffer, axes, value)

    # -- weights from their rows' sums

    def weights_again(self, w: Softmax, result: l.Store) -> None:
        """Have all but the first product read weights that are computed again, in the type of what that stores."""
        kind = result.buffer.type.dtype
        readers, behind = self.known.readers.get(w.buffer, []), self.behind(result.buffer)
        others = [s for s in readers if s not in behind]
        if kind.name not in self.kinds or len(readers) != len(others) + 1 or w.buffer in self.known.kept:
            return
        made: dict[l.Buffer, l.Kernel] = {}
        score = self.again(w, w.score, made)
        rows, (store,) = tuple(w.rows), w.kernel.stores
        kept = Type(w.top.dtype, tuple(a.extent for a in rows))
        top, inverse = w.top, kind.size > 2
        together = not inverse and of_products(self.known, w.score)
        last = l.apply("div", l.Literal(1.0, top.dtype), w.total) if inverse else l.apply("log", w.total)
        if together:
            last = l.apply("add", top, last)
        if w.empty is not None:  # 0 * exp(-inf), or exp(-inf - inf), is 0
            top = l.apply("where", w.empty, l.Literal(0.0, top.dtype), top)
            last = l.apply("where", w.empty, l.Literal(0.0 if inverse else math.inf, top.dtype), last)
        numbers = {"sums": last} if together else {"top": top, "sums": last}
        sums = [l.Buffer(self.fresh(f"{w.buffer.name}_{name}"), kept) for name in numbers]
        columns = (*rows, w.column)
        stores = (*(l.Store(b, rows, x) for b, x in zip(sums, numbers.values(), strict=True)), store)
        stored = l.Kernel(w.kernel.name, columns, stores, w.kernel.source)
        *less, row = (l.Load(b, rows) for b in sums)
        above = reduce(partial(l.apply, "sub"), less, score)
        again = l.apply("mul", l.apply("exp", above), row) if inverse else _power(l.apply("sub", above, row))
        weights, changed = self.rounded(w, columns, again, kind, others)
        self.replace({w.kernel: [stored, *made.values(), weights], **changed})
        named = " and ".join(b.name for b in sums)
        what = f"{result.buffer.name} alone reads it; the others read {weights.name}, made of {named}"
        self.say("weights_again", w.buffer.name, what)

    def rounded(
        self, w: Softmax | Exponential, columns: tuple[Var, ...], value: Any, kind: DType, readers: Sequence[l.Kernel]
    ) -> tuple[l.Kernel, dict[l.Kernel, list[l.Kernel]]]:
        """A kernel that stores weights in `kind`, made anew, and some of their readers with those in their place."""
        again = l.Buffer(self.fresh(f"{w.buffer.name}_again"), aligned(kind, w.buffer.type))
        last = l.Store(again, w.kernel.stores[0].index, converted(value, kind))
        self.weights.add(again)

        def visit(x: Any) -> Any:
            match x:
                case l.Load(buffer=b) if b is w.buffer:
                    return converted(l.Load(again, x.index, x.inside), x.dtype)
                case l.Apply(args=(l.Apply(fn=wide, args=(l.Load(buffer=b) as load,)),)):
                    return load if b is again and is_cast(wide) and x.fn.name == kind.name else x
            return x

        kernel = l.Kernel(again.name, columns, (last,), w.kernel.source)
        return kernel, {s: [transform(s, visit)] for s in readers}

    def round_weights(self, w: Exponential) -> None:
        """Have all who read weights that another program kept a number of each row for read them in the type of what
        they are multiplied with, where that is one type.
        """
        readers = self.known.readers.get(w.buffer, [])
        products = [p for s in self.readers(w.buffer, FAR) if (p := self.product(s)) is not None]
        others = [x for p in products for x in p.factors if not self.multiple_of(x, w.buffer)]
        kinds = {k.name: k for x in others if (k := self.narrow(x)) is not None}
        if w.buffer in self.known.kept or len(kinds) != 1:
            return
        (kind,) = kinds.values()
        if kind.name == "f16" and not any(_rounds(s, w.buffer, kind) for s in readers):
            return  # of an exponential of any difference nobody knows that it has so small a range
        score = w.score if w.top is None else l.apply("sub", w.score, w.top)
        weights, changed = self.rounded(w, w.kernel.axes, _power(l.apply("sub", score, w.row)), kind, readers)
        self.replace({w.kernel: [weights], **changed})
        self.say("weights_again", w.buffer.name, f"{weights.name} has them in {kind.name}, made of {w.row.buffer.name}")

    def rows_beside(self, w: Exponential) -> None:
        """Have the kernel of weights store what the program keeps of their rows too, as who makes a product of weights
        and values one kernel with the scores wants it.
        """

        def visit(x: Any) -> Any:
            inner = isinstance(x, l.Load) and x is not w.score and x.buffer is not getattr(w.score, "buffer", None)
            term = self.known.of(x) if inner else None
            return x if term is None else transform(term, visit)

        numbers = [x for x in (w.top, w.row) if x is not None]
        makers = [m for x in numbers if (m := self.known.makers.get(x.buffer)) is not None]
        if len(makers) < len(numbers) or not all(x.free <= {*w.kernel.axes} for x in numbers):
            return
        rows = [transform(self.known.of(x), visit) for x in numbers]
        if not all(any(isinstance(x, l.Reduce) for x in topological([row])) for row in rows):
            return
        (store,) = w.kernel.stores
        weight = l.apply("exp", reduce(partial(l.apply, "sub"), rows, w.score))
        stores = (*(l.Store(x.buffer, x.index, row) for x, row in zip(numbers, rows, strict=True)),
                  l.Store(store.buffer, store.index, weight))  # fmt: skip
        both = l.Kernel(w.kernel.name, w.kernel.axes, stores, w.kernel.source)
        self.replace({w.kernel: [both], **{m: [] for m in makers}})
        self.say("weights_again", w.buffer.name, f"its kernel stores {w.row.buffer.name} too")

    def multiple_of(self, x: Any, buffer: l.Buffer) -> bool:
        """Whether a factor is made of some weights."""
        loads = [y for y in topological([self.known.unfold(x)]) if isinstance(y, l.Load)]
        return any(y.buffer is buffer for y in loads)

    def again(self, w: Softmax, term: Any, made: dict[l.Buffer, l.Kernel]) -> Any:
        """A term whose temporaries of a number for every weight are computed anew, by what is `made` for them: up to
        the products of the scores, and not what these multiply, which may be the whole net before them.
        """
        size = math.prod(w.buffer.type.static_shape)

        def visit(x: Any) -> Any:
            maker = self.known.makers.get(x.buffer) if isinstance(x, l.Load) else None
            if maker is None or x.dtype is not w.score.dtype or math.prod(x.buffer.type.static_shape) < size:
                return x
            if x.buffer not in made:
                (store,) = maker.stores
                copy = l.Buffer(self.fresh(f"{x.buffer.name}_again"), x.buffer.type)
                summed = any(isinstance(y, l.Reduce) for y in topological([store.value]))
                value = store.value if summed else self.again(w, store.value, made)
                made[x.buffer] = l.Kernel(copy.name, maker.axes, (l.Store(copy, store.index, value),), maker.source)
            return l.Load(made[x.buffer].stores[0].buffer, x.index, x.inside)

        return transform(term, visit)


def _matches(p: Product, wanted: Product, depth: Var) -> Iterator[dict[Any, Any]]:
    """What the axes of a product's kernel must be for it to be the wanted one."""
    for mine in p.factors:
        for other in wanted.factors:
            if not isinstance(mine, l.Load) or not isinstance(other, l.Load) or mine.buffer is not other.buffer:
                continue
            places = {**_places(mine, other), p.axis: wanted.axis}
            open_axes = [a for a in p.kernel.axes if a not in places]
            known = {a for e in places.values() if isinstance(e, Expr) for a in e.free}
            left = [a for a in (*wanted.kernel.axes, depth) if a not in known]
            for chosen in permutations(left, len(open_axes)):
                full = {**places, **dict(zip(open_axes, chosen, strict=True))}
                if all(a.extent == b.extent for a, b in zip(open_axes, chosen, strict=True)) and Counter(
                    substitute(x, full) for x in p.factors
                ) == Counter(wanted.factors):
                    yield full


def _places(mine: l.Load, other: l.Load) -> dict[Any, Any]:
    """What axes of a load must be for it to be another one: those that are indices, or of which two indices are a
    quotient and the rest, as where a kernel has one axis of batches and heads.
    """
    places: dict[Any, Any] = {e: x for e, x in zip(mine.index, other.index, strict=True) if isinstance(e, Var)}
    for (high, low), (one, two) in zip(pairwise(mine.index), pairwise(other.index), strict=True):
        for a in high.free if isinstance(high, Expr) else ():
            rest: Any = mine.buffer.type.shape[mine.index.index(low)]
            if isinstance(a, Var) and (high, low) == (a // rest, a % rest):
                places[a] = one * rest + two
    return places


def _power(x: Any) -> Any:
    """exp(x), as what is rounded to 16 bits has it."""
    return l.apply("approx_exp2", l.apply("mul", x, l.Literal(LOG2E, x.dtype)))


def _times(factors: list[Any]) -> Any:
    return reduce(partial(l.apply, "mul"), factors)


def _loads(x: Any, buffer: l.Buffer) -> bool:
    return isinstance(x, l.Load) and x.buffer is buffer


def _in_rows(x: Any, w: Softmax, p: Product) -> bool:
    """Whether a factor is weights, and a product sums over each of their rows alone: it has no axes but theirs. Values
    that are products, and gradients of these, it multiplies for every column.
    """
    if not _loads(x, w.buffer) or not {a for a in p.kernel.axes if a.extent != 1} <= x.free:
        return False
    (store,) = w.kernel.stores
    places = [x.index[d] for d, e in enumerate(store.index) if isinstance(e, Expr) and w.column in e.free]
    return all(isinstance(e, Expr) and p.axis in e.free for e in places)


def _rounds(kernel: l.Kernel, buffer: l.Buffer, kind: DType) -> bool:
    """Whether what a kernel stores is what it loads of a buffer, in another type."""
    value = kernel.stores[0].value
    return isinstance(value, l.Apply) and value.fn.name == kind.name and _loads(value.args[0], buffer)
