"""Whether the loops of a kernel can be walked as they are bound: asked of every plan, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from terrazzo.ir import nest as n
from terrazzo.ir.address import mentions
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.expr import IntExpr, Var, at_least
from terrazzo.ir.plan import Agent, Align, Frame, Jam, Plan, Rescue, Result
from terrazzo.rewrite.rule import need
from terrazzo.rules.access import together
from terrazzo.rules.tile import bodies
from terrazzo.rules.tile.digits import LOOPED, Bindings, Digit, begins_anywhere, extent, value
from terrazzo.rules.tile.draft import Draft, axis_name
from terrazzo.rules.tile.rings import axis_called

SCANNED = ("time", "warp", "lane", "reg")
"""How the digits of an axis stand that threads scan: who comes later has later steps."""


def walk(plan: Plan, draft: Draft) -> None:
    """Declines, with the reason, where what the schedule binds cannot be walked by this plan's agents."""
    _Walk(plan, draft).kernel()


def columns(s: n.Loop, body: Sequence[n.Statement], digits: Sequence[Digit]) -> Digit | None:
    """The registers' digit of a free axis around reductions, where a thread can compute all of its values side by side,
    so that it loads and stores them at once. The other way is a loop over them around whole reductions. `body` is that
    of the loop, without the steps of products.
    """
    j = digits[-1].value if digits and digits[-1].level == "reg" else None
    if s.kind != "free" or not isinstance(j, Var) or not bodies.abreast(body, s.axes[0]):
        return None
    size = digits[-1].size
    beyond = extent(s.axes[0]) - 1 - value(digits)
    return digits[-1] if size & size - 1 == 0 and (at_least(beyond, 0) or together(beyond, j, size)) else None


@dataclass(frozen=True)
class _Around:
    """What is known inside loops: the digits of their axes, the bits of threads that these bind, conditions of threads
    that meet inside, and whether columns are computed side by side.
    """

    digits: dict[Any, list[Digit]] = field(default_factory=dict)
    threads: frozenset[tuple[str, int]] = frozenset()
    pending: tuple[IntExpr, ...] = ()
    columns: bool = False


class _Walk:
    def __init__(self, plan: Plan, draft: Draft) -> None:
        self.plan, self.draft, self.name = plan, draft, draft.kernel.name
        self.bindings = Bindings(draft.schedule, plan, plan.all(Agent)[-1])
        self.names = {site: name for name, site in draft.names.items()}
        framed = {x for f in plan.all(Frame) for x in (f.top, f.total)}
        framed |= {x.site for x in plan.all(Rescue)}
        self.done = {r for name, r in draft.names.items() if name in draft.products or name in framed}
        self.gathered = {r.store for r in plan.all(Result) if r.slab}
        self.aligned = {w.name: w.args[0] for x in plan.all(Align) for w in x.vectors}
        self.sums = [self.parts(name) for name in draft.products]

    def parts(self, name: str) -> dict[Any, list[Any]]:
        """How threads divide the axes of a product's sums."""
        site = self.draft.site(name)
        line = next(p for p in self.plan.lines if name in getattr(p, "sites", ()))
        mine = [axis_called(self.draft, x) for x in (line.m, line.n)]  # type: ignore[attr-defined]
        axes = [a for a in self.draft.tiled if a in self.draft.products[name].reduce.free]
        every = [*axes, *(a for a in mine if a not in axes)]
        return {a: _roles(self.bindings.digits(axis_name(a), site, a.extent), "time") for a in every}

    def kernel(self) -> None:
        """All of it."""
        for a in self.draft.kernel.axes if self.draft.tiled else ():
            self.outside(a)
        if self.plan.all(Jam):
            return self.jam()
        self.statements(n.nest(self.draft.kernel), _Around())

    def outside(self, axis: Any) -> None:
        """Blocks walk the tiles of a contraction, and every axis that no tile has a part of."""
        if axis in self.draft.tiled:
            times = [f for f in self.draft.schedule.binding(None, axis.name) if f.level == "time" and f.size > 1]
            need(not times, f"{axis.name}: only the grid walks the tiles of a contraction yet")
            return
        names = ", ".join(sorted(map(axis_name, self.draft.tiled)))
        digits = self.bindings.digits(axis.name, None, extent(axis))
        need(
            all(d.level in ("grid", "cluster") for d in digits),
            f"{axis.name} lies inside a tile of {names}, so only the grid can walk it, or a cluster divide it",
        )

    def jam(self) -> None:
        """Points take steps together where each thread has all of these."""
        found = bodies.flat(self.draft.kernel)
        if isinstance(found, str):
            return need(False, found)
        for s in (x for x in found[1] if isinstance(x, n.Loop)):
            site = self.bindings.site([self.names[r] for r in s.carried])
            for a in s.axes:
                digits = self.bindings.digits(axis_name(a), site, extent(a))
                whole = all(d.level in LOOPED for d in digits) and at_least(extent(a) - 1 - value(digits), 0)
                need(whole, f"each thread takes all steps of {axis_name(a)}, and no others")

    def left(self, body: Sequence[n.Statement]) -> list[n.Loop]:
        """The loops that are no product's steps."""
        return [s for s in body if isinstance(s, n.Loop) and not (s.carried and self.done >= {*s.carried})]

    def statements(self, body: Sequence[n.Statement], around: _Around) -> None:
        for s in self.left(body):
            self.loop(s, around)

    def loop(self, s: n.Loop, around: _Around) -> None:
        tiled = any(s.axes[0] in sums for sums in self.sums)
        stores = bodies.stores(s.body) if self.gathered and tiled else []
        gathered = [x for x in stores if x.buffer.name in self.gathered]
        if gathered:
            if others := [x for x in stores if x not in gathered]:
                self.loop(bodies.only(s, others), around)
            return self.leaf(bodies.only(s, gathered) if others else s)
        digits = self.digits(s)
        if s.kind == "scan" and any(d.level not in LOOPED for d in digits[0]):
            return self.scan(s, digits[0])
        self.divided(s, digits, around)

    def site(self, s: n.Loop) -> Any:
        """What the schedule says of the accumulators that a loop carries, else of what it stores."""
        if s.carried:
            return self.bindings.site([self.names[r] for r in s.carried])
        return self.bindings.site([x.buffer.name for x in bodies.stores(s.body)])

    def digits(self, s: n.Loop) -> list[list[Digit]]:
        site = self.site(s)
        return [self.bindings.digits(axis_name(a), site, extent(a)) for a in s.axes]

    def divided(self, s: n.Loop, digits: Sequence[list[Digit]], around: _Around) -> None:
        """A loop cut into digits, whose threads meet after it where they share a reduction."""
        mine = {bit for ds in digits for d in ds for bit in d.bits}
        names = ", ".join(map(axis_name, s.axes))
        if mine & around.threads:
            raise self.draft.fail(f"{names} is bound to threads that an axis around it is bound to already")
        inside = [extent(a) - 1 - value(ds) for a, ds in zip(s.axes, digits, strict=True)]
        every = (*(e for e in inside if not at_least(e, 0)), *around.pending)
        known = around.digits | dict(zip(s.axes, digits, strict=True))
        side = around.columns or (not self.sums and columns(s, s.body, digits[0]) is not None)
        here = _Around(known, around.threads | mine, every, side)
        self.alike(here)
        if self.parted(every, s.body):
            need(
                s.kind != "reduce",
                f"threads not all inside {axis_name(s.axes[0])} meet in a reduction of its steps",
            )
        else:
            here = replace(here, pending=())
        whole = begins_anywhere(digits[-1], self.aligned.get(axis_name(s.axes[-1])))
        if whole and (self.left(s.body) or s.kind == "scan" or side):
            raise self.draft.fail(f"{axis_name(s.axes[-1])}: aligned=True is said of an axis that has no loops inside")
        self.statements(s.body, here)

    def alike(self, here: _Around) -> None:
        """Where all axes of a product's sums are known, they are divided as these are."""
        for sums in self.sums:
            for a, roles in sums.items() if all(a in here.digits for a in sums) else ():
                need(
                    _roles(here.digits[a]) == roles,
                    f"{axis_name(a)} is divided otherwise than its accumulators are: like(...) divides both alike",
                )

    def parted(self, inside: Sequence[IntExpr], body: Sequence[n.Statement]) -> bool:
        """Whether conditions keep some threads from where they have to meet others."""
        lanes, warps = (any(mentions(e, v) for e in inside) for v in (k.LANE, self.bindings.everyone))
        return (lanes or warps) and self.meets({"warp", "lane"} if lanes else {"warp"}, body)

    def meets(self, levels: set[str], body: Sequence[n.Statement]) -> bool:
        """Whether threads meet somewhere inside."""
        return any(
            self.meets(levels, s.body)
            or (s.kind != "free" and any(d.level in levels for ds in self.digits(s) for d in ds))
            for s in self.left(body)
        )

    def scan(self, s: n.Loop, digits: Sequence[Digit]) -> None:
        """Threads that share the steps of a scan have them in order."""
        axis, levels = axis_name(s.axes[0]), [d.level for d in digits]
        need(not bodies.loops(s.body), f"{axis} is bound to threads, and loops stand inside the steps of its scan")
        if any(x not in SCANNED for x in levels):
            raise self.draft.fail(f"{axis} is bound to blocks, and a scan along it goes from one to the next")
        inner = [x for x in levels if x != "time"]
        if levels != sorted(levels, key=SCANNED.index) or len(set(inner)) < len(inner):
            raise self.draft.fail(f"a scan along {axis} is bound as time, warp, lane, reg, each once and in this order")

    def leaf(self, s: n.Loop) -> None:
        """Results gather where they are stored at every point of a tile."""
        body: Sequence[n.Statement] = s.body
        while loops := self.left(body):
            plain = all(isinstance(x, n.Let) or x is loops[0] for x in body if not self.written(x))
            need(
                len(loops) == 1 and loops[0].kind == "free" and plain,
                "results gather in shared memory where they are stored at every point of a tile",
            )
            body = loops[0].body

    def written(self, s: n.Statement) -> bool:
        """Whether a statement is the loop of a product's steps."""
        return isinstance(s, n.Loop) and s not in self.left([s])


def _roles(digits: Sequence[Digit], *without: str) -> list[Any]:
    return [d.role for d in digits if d.level not in ("grid", "cluster", *without)]
