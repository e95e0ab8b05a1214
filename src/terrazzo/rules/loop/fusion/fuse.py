"""Fusion: into as few kernels as pay.

Views always disappear into their readers. Beyond that, every fusion is a choice between two programs that mean the
same, priced by the cost model: *inline* a buffer into all its readers (its term is recomputed there and the buffer
vanishes), or *merge* two kernels over the same axes into one that stores both results. Each choice is recorded with
both prices, and `materialize` pins a buffer as one that must exist.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import reduce
from typing import Any
from weakref import WeakKeyDictionary

from terrazzo.ir.contraction import contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.instances import Asked, Instance, instances
from terrazzo.ir.node import topological
from terrazzo.ir.sites import no_product, product
from terrazzo.rewrite.rule import Choice, Event, Log, cheapest
from terrazzo.rules.loop.cost import Rates, on_matrix
from terrazzo.rules.loop.definitions import in_order
from terrazzo.rules.loop.fusion.across import rows_first
from terrazzo.rules.loop.fusion.alike import alike, along, crossed, multiplied_under_windows
from terrazzo.rules.loop.fusion.edges import beyond_edges
from terrazzo.rules.loop.fusion.fused import (
    LARGEST,
    is_view,
    merged,
    only_reduced,
    problem,
    reduces_in_order,
    scanned_last,
    scans_again,
    viewed,
)
from terrazzo.rules.loop.fusion.inline import inline
from terrazzo.rules.loop.fusion.order import Order
from terrazzo.rules.loop.fusion.repeated import repeated
from terrazzo.rules.loop.fusion.scale import is_scaled, scale_after, uncast
from terrazzo.rules.loop.layout.lookups import with_lookups_stored

PASS = "fuse"
NEAR = 64
"""How many steps may lie between two kernels that share an operand and nothing else, if they are to merge: beyond, the
pairs of an unrolled loop grow with its square, and what they share is long out of the cache.
"""
AGAIN = 128
"""Nodes of a term beyond which several kernels do not compute it again, however little that takes: what is added to in
every layer of a net would be the sum of all layers before, again in each of them.
"""


def fuse(
    program: l.Program,
    log: Log,
    rates: Rates,
    materialize: Iterable[str] = (),
    show: Callable[[Any], str] | None = None,
    decide: Callable[[Choice], str] = cheapest,
    renews: Callable[[l.Kernel], Collection[Any]] = lambda _: (),
) -> l.Program:
    """`program` with the fusions that pay. `materialize` names buffers to keep; `show` adds texts to the events. What a
    kernel `renews`, the merged ones renew, too.
    """
    work = _Fusion(program, log, rates, frozenset(materialize), show, decide, renews)
    work.views()
    work.inlines(work.summed)  # products go into their sums first, so that what they read meets a contraction
    work.operands()
    work.inlines(work.scales)  # and constants leave it, before what they scale is tied to them
    work.inlines()
    work.inlines(work.fewer)  # what several kernels read that have become one
    work.merges()
    return work.program()


def seen_through(program: l.Program, log: Log, rates: Rates, materialize: Iterable[str] = ()) -> l.Program:
    """`program` without views: their readers read what they are views of."""
    work = _Fusion(program, log, rates, frozenset(materialize), None, cheapest)
    work.views()
    return work.program()


class _Fusion:
    def __init__(
        self,
        program: l.Program,
        log: Log,
        rates: Rates,
        pinned: frozenset[str],
        show: Any,
        decide: Any,
        renews: Callable[[l.Kernel], Collection[Any]] = lambda _: (),
    ) -> None:
        self.source, self.log, self.rates, self.pinned = program, log, rates, pinned
        self.show, self.decide, self.renews = show, decide, renews
        self.instance = instances((s for s in program.steps if isinstance(s, l.Kernel)), anywhere=True)
        self.kernels = {i: self.instance(s) for i, s in enumerate(program.steps) if isinstance(s, l.Kernel)}
        self.calls: dict[int, l.Call] = {i: s for i, s in enumerate(program.steps) if isinstance(s, l.Call)}
        self.viewed, self.into, self.along, self.merged, self.multiply_apart, self.only_reduced = (
            Asked(ask, self.instance) for ask in (viewed, self._into, along, merged, self._multiply_apart, only_reduced)
        )
        self.prices: WeakKeyDictionary[l.Kernel, float] = WeakKeyDictionary()
        self.products: WeakKeyDictionary[l.Kernel, tuple[int, int]] = WeakKeyDictionary()
        self.apart: set[tuple[Instance, Instance]] = set()
        self.stored: dict[l.Buffer, int] = {}  # what is not inlined, and how many kernels read it when that was found
        self.readers: dict[l.Buffer, set[int]] = {}
        self.callers: dict[l.Buffer, list[int]] = {}
        for i, call in self.calls.items():
            for b in call.reads:
                self.callers.setdefault(b, []).append(i)
        for i, k in self.kernels.items():
            self._enter(i, k)
        self.order = Order(len(program.steps), self._readers)
        self.needed = set(program.results) | {b for c in self.calls.values() for b in c.reads}

    # -- the three kinds of fusion ----------------------------------------------------------------------------------

    def views(self) -> None:
        """A buffer that only moves, converts or names values is read through, but for one of a type that matrix
        instructions take: their operands lie in memory, so that conversion is priced with the other fusions.

        @loop
        def f(x: f32[3, 3]):
            with kernel('t', t=f32[3, 3]):
                for a0 in free(3):
                    for a1 in free(3):
                        in0 = x[a1, a0]
                        t[a0, a1] = in0
            with kernel('z', z=f32[3, 3]):
                for a0 in free(3):
                    for a1 in free(3):
                        in0 = t[a0, a1]
                        v0 = exp(in0)
                        z[a0, a1] = v0
            return (z,)
        =>
        @loop
        def f(x: f32[3, 3]):
            with kernel('z', z=f32[3, 3]):
                for a0 in free(3):
                    for a1 in free(3):
                        in0 = x[a1, a0]
                        v0 = exp(in0)
                        z[a0, a1] = v0
            return (z,)
        """
        for i in list(self.kernels):
            kernel = self.kernels[i]
            value, buffer = kernel.form.stores[0].value, kernel.writes[0]
            alone = len(kernel.writes) == 1  # who stores other things besides goes on doing so
            if not alone or not is_view(value) or self._rounds(value) or buffer.name in self.pinned:
                continue
            for j in sorted(self.readers.get(buffer, ())):
                new = self.viewed(kernel, self.kernels[j])
                subject = f"{kernel.name} into {new.name}"
                if why := problem([new]):
                    self._skip("view", subject, why)
                    continue
                self._applied("view", subject, [kernel, self.kernels[j]], [new])
                self._enter(j, new)
            if buffer not in self.needed and not self.readers.get(buffer):
                self._drop(i)

    def inlines(self, which: Callable[[Instance, list[int]], bool] = lambda *_: True) -> None:
        """Inline each buffer (of the kernels with these readers) into all its readers where that is cheaper, producers
        first.

        @loop
        def f(x: f32[3, 3]):
            with kernel('e', e=f32[3, 3]):
                for a0 in free(3):
                    for a1 in free(3):
                        in0 = x[a0, a1]
                        v0 = exp(in0)
                        e[a0, a1] = v0
            with kernel('z', z=f32[3]):
                for a0 in free(3):
                    for r0 in reduce(3):
                        in0 = e[r0, a0]
                        acc0 <- max(in0)
                    z[a0] = acc0
            return (z,)
        =>
        @loop
        def f(x: f32[3, 3]):
            with kernel('z', z=f32[3]):
                for a0 in free(3):
                    for r0 in reduce(3):
                        in0 = x[r0, a0]
                        v0 = exp(in0)
                        acc0 <- max(v0)
                    z[a0] = acc0
            return (z,)
        """
        for i in list(self.kernels):
            kernel = self.kernels[i]
            readers = self._all_readers(kernel)
            if any(b in self.needed for b in kernel.writes) or not which(kernel, readers):
                continue
            if not readers:
                self._drop(i)
                continue
            self._inline([i], readers)

    def operands(self) -> None:
        """Inline all that only scales the operands of the same products at once, where that is cheaper: matrix
        instructions take what is scaled by none of them, so that each by itself would only have more to multiply.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, kernel in self.kernels.items():
            readers = self._all_readers(kernel)
            if self.scales(kernel, readers) and not any(b in self.needed for b in kernel.writes):
                groups.setdefault(tuple(readers), []).append(i)
        for together, group in groups.items():
            if len(group) > 1:
                self._inline(group, list(together))

    def _inline(self, group: list[int], readers: list[int]) -> None:
        """Inline what some kernels store into all their readers, if that is cheaper."""
        kernels, read = [self.kernels[i] for i in group], [self.kernels[j] for j in readers]
        name = ", ".join(kernel.name for kernel in kernels)
        if reason := next(filter(None, map(self._pinned, kernels)), "") or beyond_edges(kernels, read, self.rates):
            self._skip("inline", name, reason)
            return
        forms = [k.form for k in kernels], [k.form for k in read]
        found = repeated(*forms, self.rates) or self._inlined(kernels, readers)
        if isinstance(found, str):
            self._keep(kernels, readers)
            self._skip("inline", name, found)
            return
        before = [*kernels, *read]
        choice = self.choice(name, inlined=found, apart=before)
        if self.decide(choice) == "inlined" and len(group) == 1 and (stored := self._beside(group[0], readers)):
            choice = self.choice(name, inlined=found, apart=before, **stored)
        prices = choice.prices() + self._leaves(before, found)
        if self.decide(choice) != "inlined":
            self._keep(kernels, readers)
            self._skip("inline", name, prices)
            return
        if why := problem(found):
            self._skip("inline", name, why)
            return
        into = ", ".join(self.kernels[j].name for j in readers)
        self._fired("inline", f"{name} into {into}", prices, before, found)
        for j, new in zip(readers, found, strict=True):
            self._enter(j, new)
        for i in group:
            self._drop(i)

    def _keep(self, kernels: Sequence[Instance], readers: Sequence[int]) -> None:
        """Remember how many kernels read what is not inlined."""
        self.stored |= dict.fromkeys((b for kernel in kernels for b in kernel.writes), len(readers))

    def merges(self) -> None:
        """Let one kernel store what two stored, where they run over the same axes.

        @loop
        def f(x: f32[3, 3]):
            with kernel('m', m=f32[3]):
                for a0 in free(3):
                    for r0 in reduce(3):
                        in0 = x[a0, r0]
                        acc0 <- max(in0)
                    m[a0] = acc0
            with kernel('z', z=f32[3, 3]):
                for a0 in free(3):
                    in0 = m[a0]
                    for a1 in free(3):
                        in1 = x[a0, a1]
                        v0 = sub(in1, in0)
                        z[a0, a1] = v0
            return (z,)
        =>
        @loop
        def f(x: f32[3, 3]):
            with kernel('z', z=f32[3, 3]):
                for a0 in free(3):
                    for r0 in reduce(3):
                        in0 = x[a0, r0]
                        acc0 <- max(in0)
                    for a1 in free(3):
                        in1 = x[a0, a1]
                        v0 = sub(in1, acc0)
                        z[a0, a1] = v0
            return (z,)
        """
        self.order.close_up()
        again = True
        while again:
            again = False
            for i in list(self.kernels):
                for j in self._neighbours(i):
                    if self._merge(i, j):
                        again = True
                        break

    def _merge(self, i: int, j: int) -> bool:
        """Merge kernel i into kernel j, which may read what i stores."""
        first, second = self.kernels[i], self.kernels[j]
        if (first, second) in self.apart:
            return False
        self.apart.add((first, second))
        begun = first if alike(first.form, second.form) else self.along(second, first)
        if begun is None:
            return False
        if not {*first.reads, *second.reads} & {*first.writes, *second.writes}:
            self.apart.add((second, first))  # who merely share an operand make the same kernel either way
        if self._pinned(first) or self._pinned(second) or not self.order.apart(i, j):
            return False
        read_only_here = {b for b in first.writes if b not in self.needed and self.readers.get(b, set()) <= {j}}
        merged = self.merged(begun, second, given=read_only_here)
        if merged is None:
            return False
        reads_it = {*first.reads} & {*second.writes} | {*second.reads} & {*first.writes}
        if not reads_it and self.multiply_apart(merged, first):
            self._skip("merge", f"{first.name} with {second.name}", "what one multiplies, the other does not")
            return False
        if self.rates.matrix and multiplied_under_windows(merged.form) > 1:
            self._skip("merge", f"{first.name} with {second.name}", "both multiply under windows")
            return False
        if not reads_it and self.rates.matrix and self._multiplied_no_more(merged, first, second):
            why = f"a product would be none: {no_product(merged.form)}"
            self._skip("merge", f"{first.name} with {second.name}", why)
            return False
        if not {*self.renews(first.kernel), *self.renews(second.kernel)} <= {*self.renews(merged.kernel)}:
            why = "one stores the new value of an input where that lies, and both could not"
            self._skip("merge", f"{first.name} with {second.name}", why)
            return False
        if crossed(begun.form, second.form):
            why = "memory runs along the rows of one, and across those of the other"
            self._skip("merge", f"{first.name} with {second.name}", why)
            return False
        choice = self.choice(f"{first.name} with {second.name}", apart=[first, second], together=[merged])
        prices = choice.prices() + self._leaves([first, second], [merged])
        if self.decide(choice) == "apart":
            self._skip("merge", choice.subject, prices)
            return False
        if why := problem([merged]):
            self._skip("merge", choice.subject, why)
            return False
        self._fired("merge", choice.subject, prices, [first, second], [merged])
        self.order.join(i, j)
        self._drop(i)
        self._enter(j, merged)
        return True

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def choice(self, subject: str, **options: list[Instance]) -> Choice:
        """Alternative sets of kernels, with their prices."""
        return Choice(subject, options, {name: sum(map(self.price, kernels)) for name, kernels in options.items()})

    def price(self, kernel: Instance) -> float:
        if kernel.form not in self.prices:
            self.prices[kernel.form] = with_lookups_stored(kernel.form, self.rates)
        return self.prices[kernel.form]

    def _rounds(self, value: Any) -> bool:
        """Whether a term converts to a type of matrix instructions' operands what is not of such a type."""
        return value.dtype.name in self.rates.matrix and uncast(value).dtype.name not in self.rates.matrix

    def _leaves(self, before: list[Instance], after: list[Instance]) -> str:
        """What to say of a fusion that takes products off the matrix instructions."""
        lost = self._products(before)[1] - self._products(after)[1]
        return f"; fused, {lost} product{'s leave' if lost > 1 else ' leaves'} the tensor cores" if lost > 0 else ""

    def _products(self, kernels: list[Instance]) -> tuple[int, int]:
        """How many contractions kernels compute, and how many of them matrix instructions can."""
        forms = [k.form for k in kernels]
        for k in forms:
            if k not in self.products:
                found = [r for r in k.carried if isinstance(r, l.Reduce) and contraction(r) is not None]
                self.products[k] = len(found), sum(on_matrix(r, self.rates) for r in found)
        return sum(self.products[k][0] for k in forms), sum(self.products[k][1] for k in forms)

    def _multiply_apart(self, merged: l.Kernel, first: l.Kernel) -> bool:
        """Whether matrix instructions compute products of both, of which no operand of one is an operand of the other:
        a tile would have twice the sums, so be half as large, and read no less.
        """
        sides: tuple[set[Any], set[Any]] = set(), set()
        for s in merged.stores:
            found = [x for x in topological([s]) if isinstance(x, l.Reduce) and on_matrix(x, self.rates)]
            factors = (x for r in found for x in contraction(r).operands)  # type: ignore[union-attr]
            sides[s.buffer in first.writes].update(factors)
        return all(sides) and not sides[0] & sides[1]

    def _multiplied_no_more(self, merged: Instance, *kernels: Instance) -> bool:
        """Whether one of some kernels is a product and the merged one is none."""
        return product(merged.form) is None and any(product(x.form) is not None for x in kernels)

    def _inlined(self, kernels: list[Instance], readers: list[int]) -> list[Instance] | str:
        found = []
        name = ", ".join(kernel.name for kernel in kernels)
        for j in readers:
            new = self.into(*kernels, self.kernels[j])
            if not new.form.scans_in_order:
                return f"the scan of {name} must run along the last axis of its kernel"
            if reduces_in_order(new.form):
                return f"with {name}, a scan would have a reduction in every one of its steps"
            if scans_again(new.form):
                return f"with {name}, a scan would be taken again along axes that it does not know"
            if len(new.form.terms) > LARGEST:
                return f"{new.name} would have more than {LARGEST} nodes"
            found.append(new)
        if len(readers) > 1 and any(len(k.form.terms) > AGAIN for k in kernels):
            return f"{len(readers)} kernels would compute {name} again, which has more than {AGAIN} nodes"
        before = self._products([*kernels, *(self.kernels[j] for j in readers)])[0]
        if self._products(kernels)[0] and self._products(found)[0] > before:
            return f"{name} is a product, which would be computed more than once"
        if self.rates.matrix and any(multiplied_under_windows(k.form) > 1 for k in found):
            return f"{name} is a product under a window, as is what is computed with it"
        return found

    def _into(self, *kernels: l.Kernel) -> l.Kernel:
        """The last of some kernels with what the others store in it, or the same with its rows first, whichever costs
        less.
        """
        *stored, reader = kernels
        whole = scanned_last(scale_after(reduce(inline, stored, reader)))
        turned = rows_first(whole)
        return whole if turned is None else min((whole, turned), key=lambda k: self.price(self.instance(k)))

    def _beside(self, i: int, readers: list[int]) -> dict[str, list[Instance]]:
        """A kernel of which several read, merged with one of them, which comes later: the state of a recurrent net is
        stored by who reads it first, and not computed again by all that follow.
        """
        kernel = self.kernels[i]
        for j in readers if len(readers) > 1 else ():
            if kernel.form.axes == self.kernels[j].form.axes and self.order.apart(i, j):
                merged = self.merged(kernel, self.kernels[j])
                others = [self.kernels[k] for k in readers if k != j]
                return {} if merged is None else {"stored by a reader": [merged, *others]}
        return {}

    def summed(self, kernel: Instance, readers: list[int]) -> bool:
        """Whether reductions are all that reads what a kernel stores."""
        return bool(readers) and all(self.only_reduced(kernel, self.kernels[j]) for j in readers)

    def fewer(self, kernel: Instance, readers: list[int]) -> bool:
        """Whether fewer kernels read what one stores than when that was found to pay."""
        return 0 < len(readers) < max((self.stored.get(b, 0) for b in kernel.writes), default=0)

    def scales(self, kernel: Instance, readers: list[int]) -> bool:
        """Whether a kernel multiplies what it reads by a constant, and nothing else."""
        return bool(readers) and is_scaled(kernel.form.stores[0].value)

    def _all_readers(self, kernel: Instance) -> list[int]:
        """The kernels that read what a kernel stores."""
        return sorted({j for b in kernel.writes for j in self.readers.get(b, ())})

    def _enter(self, i: int, kernel: Instance) -> None:
        old = self.kernels.get(i)
        for b in old.reads if old else ():
            self.readers.get(b, set()).discard(i)
        self.kernels[i] = kernel
        for b in kernel.reads:
            self.readers.setdefault(b, set()).add(i)

    def _drop(self, i: int) -> None:
        for b in self.kernels.pop(i).reads:
            self.readers[b].discard(i)
        if i in self.order.place:
            self.order.drop(i)

    def _pinned(self, kernel: Instance) -> str:
        return "pinned by materialize" if self.pinned and any(b.name in self.pinned for b in kernel.writes) else ""

    def _neighbours(self, i: int) -> list[int]:
        """Kernels that read what kernel i writes, or share an operand with it and are not far."""
        if i not in self.kernels:
            return []
        kernel = self.kernels[i]
        near = {j for b in kernel.writes for j in self.readers.get(b, ())}
        beside = set(self.order.beside(i, NEAR))
        near.update(*(self.readers[b] & beside for b in kernel.reads))
        return sorted(j for j in near if j != i)

    def _readers(self, i: int) -> list[int]:
        """The steps that read what step i writes."""
        step = self.kernels.get(i) or self.calls[i]
        return [j for b in step.writes for j in (*self.readers.get(b, ()), *self.callers.get(b, ()))]

    def _skip(self, rule: str, subject: str, reason: str) -> None:
        self.log.add(Event(PASS, rule, subject, False, reason))

    def _fired(self, rule: str, subject: str, reason: str, before: list[Instance], after: list[Instance]) -> None:
        texts = ["\n".join(self.show(k.kernel) for k in ks) for ks in (before, after)] if self.show else ["", ""]
        self.log.add(Event(PASS, rule, subject, True, reason, *texts))
        self._applied(rule, subject, before, after)

    def _applied(self, rule: str, subject: str, before: list[Instance], after: list[Instance]) -> None:
        if self.log.applications is not None:
            self.log.applied(PASS, rule, subject, [k.kernel for k in before], [k.kernel for k in after])

    def program(self) -> l.Program:
        """The steps in an order in which each comes after what it reads; calls that must keep their order do."""
        steps: dict[int, Any] = {**{i: k.kernel for i, k in self.kernels.items()}, **self.calls}
        return in_order(self.source, [steps[i] for i in sorted(steps)])
