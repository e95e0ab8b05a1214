"""A scan whose steps threads share.

A thread takes the steps of its register digit, one after the other, twice: once for what they combine to, and once more
from what comes before them. In between threads tell each other what theirs combine to: lanes by shuffles, warps through
shared memory, and the tiles of a time digit by what is carried from one to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from terrazzo.ir import nest as n
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import topological
from terrazzo.rules.access import together
from terrazzo.rules.tile.digits import Digit
from terrazzo.rules.tile_to_kernel.accumulate import Places
from terrazzo.rules.tile_to_kernel.scope import Scope

if TYPE_CHECKING:
    from terrazzo.rules.tile_to_kernel.walk import Walker


class SharedScan:
    """Writes the loop `s` of a scan whose axis has these digits."""

    def __init__(self, walker: Walker, s: n.Loop, digits: Sequence[Digit], name: str) -> None:
        self.walker, self.builder, self.accumulators = walker, walker.builder, walker.accumulators
        self.loop, self.digits = s, digits
        self.times = [d for d in digits if d.level == "time"]
        self.lanes = [d for d in digits if d.level == "lane"]
        self.warps = [d for d in digits if d.level == "warp"]
        one = Digit("reg", 1, walker.bindings.loop_variable("i", 1), 1)
        self.each = next((d for d in digits if d.level == "reg"), one)

    def write(self, scope: Scope) -> None:
        """All steps of the scan."""
        inner = scope.inner()
        inner.threads |= {bit for d in self.digits for bit in d.bits}
        # What is beyond the end combines into nothing that is stored, so only memory has to be spared.
        inner.pending = (*self.walker.enter(self.loop.axes, [self.digits], inner), *scope.pending)
        carry = [self.accumulators.declare(r) for r in self.loop.carried] if self.times else []
        self.builder.loops([(d.variable, False) for d in self.times], lambda: self.tile(inner.inner(), carry))

    def tile(self, scope: Scope, carry: Sequence[Places]) -> None:
        """The steps that the threads take together."""
        scans = self.loop.carried
        totals = [self.accumulators.declare(r) for r in scans]
        scope.env.update(zip(scans, totals, strict=True))
        first, kept, rest = self.halves()
        self.steps(first, kept, scope)
        before = [self.accumulators.declare(r) for r in scans]
        for r, total, own in zip(scans, totals, before, strict=True):
            self.over_lanes(r, total, own)
            self.over_warps(r, total, own)
        for r, total, own, carried in zip(scans, totals, before, carry, strict=False):
            self.accumulators.combine(own, self.values(carried), r, earlier=True)
            self.accumulators.combine(carried, self.values(total), r)
        scope.env.update(zip(scans, before, strict=True))
        self.steps(rest, (), scope)

    def halves(self) -> tuple[list[n.Statement], list[Any], list[n.Statement]]:
        """What there is to do for what the steps combine to; what registers keep of that; and what there is to do then,
        with what is kept.
        """
        body = self.loop.body
        combined = [x for x in body if isinstance(x, n.Accumulate)]
        needed = set(topological([a for x in combined for a in x.args]))
        first = list[n.Statement](x for x in body if x in combined or (isinstance(x, n.Let) and x.term in needed))
        computed = {x.term for x in first if isinstance(x, n.Let)}
        given = dict.fromkeys(a for x in combined for a in x.args if a in computed)
        kept = [a for a in given if any(isinstance(x, l.Load) for x in topological([a]))]
        roots = [x for x in body if isinstance(x, l.Store)] + [a for x in combined for a in x.args]
        used = set(topological(roots, stop=lambda x: x in kept))
        rest = [x for x in body if not isinstance(x, n.Let) or x.term in used]
        return first, kept, rest

    def steps(self, body: Sequence[n.Statement], keep: Sequence[Any], scope: Scope) -> None:
        """Statements for the steps of a thread, those that lie side by side in memory loaded and stored at once."""
        j, size = self.each.variable, self.each.size
        whole = size > 1 and size & size - 1 == 0 and all(together(e, j, size) for e in scope.pending)
        loads, stores = self.walker.wide(body, j, size, scope) if whole else ([], {})
        self.walker.at_once(body, j, size, scope, loads, stores, [x for x in keep if x not in loads])

    def values(self, places: Places) -> list[l.Load]:
        return [self.accumulators.load(p) for p in places]

    def over_lanes(self, r: Any, total: Places, before: Places) -> None:
        """Groups of lanes, each twice as large as the last, tell their total to the group beside them."""
        for d in self.lanes:
            for bit in range(d.size.bit_length() - 1):
                others = [self.builder.let(k.Shuffle(x, d.inner << bit), "other") for x in self.values(total)]
                later = d.value // (1 << bit) % 2 - 1
                combine = partial(self.accumulators.combine, args=others, r=r)
                self.builder.where([later], partial(combine, before, earlier=True))
                if r.monoid.commutes:
                    combine(total)
                else:
                    self.builder.where([later], partial(combine, total, earlier=True))
                    self.builder.where([-later - 1], partial(combine, total))

    def over_warps(self, r: Any, total: Places, before: Places) -> None:
        """Every warp combines what those before it have, and what all have. What comes before its lanes is earlier than
        what came before each of them.
        """
        bindings = self.walker.bindings
        for d in self.warps:
            meeting = self.accumulators.meeting(total)
            self.builder.add(bindings.sync)
            self.accumulators.reset(r, total)
            ahead = before if r.monoid.commutes else self.accumulators.declare(r)
            w = bindings.loop_variable("w", d.size)
            at = bindings.warp + (w - d.value) * d.inner

            def one(d: Digit = d, w: Any = w, at: Any = at, meeting: Any = meeting, ahead: Any = ahead) -> None:
                others = [self.builder.let(l.Load(m, (at, k.LANE)), "other") for m in meeting]
                self.builder.where([d.value - 1 - w], lambda: self.accumulators.combine(ahead, others, r))
                self.accumulators.combine(total, others, r)

            self.builder.loops([(w, True)], one)
            if ahead is not before:
                self.accumulators.combine(before, self.values(ahead), r, earlier=True)
            if self.builder.depth:
                self.builder.add(bindings.sync)  # before the next tile writes there again
