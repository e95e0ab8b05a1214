"""The order of copies, products and waits along the path of one thread: what it copied is waited for before it is read
or overwritten, and so are the registers of a product of its warpgroup before it uses them.

Followed are the first lanes of some warps of block 0 (the first, the last, the first of every role), through the slots
of the rings, which are all that matters of an address here. Long loops are shortened by whole rounds of their rings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from operator import itemgetter
from typing import Any

from terrazzo.errors import CompilerBug
from terrazzo.ir.address import flatten
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.expr import Expr, FloorDiv, IntExpr, Loaded, Mod, Sum, Var
from terrazzo.ir.node import Node, topological
from terrazzo.ir.show_kernel import statement
from terrazzo.targets.cuda.accesses import Access, Around, accesses, slabs

COPIES = (k.AsyncCopy, k.TensorLoad)
FOLLOWED = 256
"""Iterations that are followed at least of a loop that changes integers."""
EVENTS = (*COPIES, k.TensorStore, k.MultiplyAsync, k.Commit, k.WaitGroups, k.Expect, k.WaitBarrier)


def problems(kernel: k.Kernel) -> list[str]:
    """What is wrong, a line for each finding; one is enough for a thread."""
    if not any(isinstance(s, EVENTS) for s in k.walk(kernel.body)):
        return []
    waited = {s.barriers for s in k.walk(kernel.body) if isinstance(s, k.WaitBarrier)}
    found = [
        f"`{statement(s)[0]}` sends a box to {s.barriers.name}, where nobody waits"
        for s in k.walk(kernel.body)
        if isinstance(s, k.TensorLoad) and s.barriers not in waited
    ]
    uses = _Uses(kernel)
    for warp in sorted({0, kernel.warps - 1, *(s.first for s in k.walk(kernel.body) if isinstance(s, k.Role))}):
        try:
            _Thread(kernel, warp, uses).run()
        except _Wrong as why:
            found.append(str(why))
    return list(dict.fromkeys(found))


class _Wrong(Exception):
    """What a thread does and may not."""


Slot = tuple[k.Shared, int]
Held = tuple[k.Registers, int, int]
"""Registers that a product uses: of which place, from which element to before which."""


class _Uses:
    """What the statements of a kernel use, whoever executes them: found once for all threads that are followed."""

    def __init__(self, kernel: k.Kernel) -> None:
        self.plainly = cache(lambda s: [*accesses(s, Around())])
        self.slabs = cache(lambda s: [*slabs(s, Around())])
        self.rings = self._rings(kernel)
        """The places that copies write whose first index is the same for all threads wherever they are used: a slot."""
        self.of_rings = cache(lambda s: [a for a in self._touched(s) if a.place in self.rings])

    def _rings(self, kernel: k.Kernel) -> set[Any]:
        every = list(k.walk(kernel.body))
        written = {s.target for s in every if isinstance(s, COPIES)}
        used = [(a.place, a.index) for s in every for a in (*self.plainly(s), *self.slabs(s)) if a.place in written]
        varying = k.varying(kernel.body, ("warp", "lane"))
        apart = {place for place, index in used if len(index) < 2 or k.depends(index[0], k.THREADS, varying)}
        return written - apart

    def _touched(self, s: Node) -> list[Access]:
        """The accesses of a statement by this thread; where a box goes to is looked at apart."""
        return [*self.plainly(s), *(self.slabs(s) if not isinstance(s, k.TensorLoad) else [])]


class _Thread:
    """The first lane of a warp of block 0.

    Of each kind of asynchronous work it has what it began and its groups, with the slots that copies write and the
    registers that products use; by barrier, the boxes it sent and the bytes it announced since it last waited there, or
    in all if it never does.
    """

    def __init__(self, kernel: k.Kernel, warp: int, uses: _Uses) -> None:
        self.kernel, self.warp = kernel, warp
        self.env: dict[str, int | None] = {k.BLOCK: 0, "warp": warp, "lane": 0}
        self.begun: dict[str, list[Any]] = {kind: [] for kind in k.KINDS}
        self.groups: dict[str, list[list[Any]]] = {kind: [] for kind in k.KINDS}
        self.boxes: dict[Slot, list[tuple[Slot | None, Any, int]]] = {}
        self.announced: dict[Slot, int] = {}
        self.phases: dict[Slot, int | None] = {}
        self.filled: set[Slot] = set()
        every = list(self.reachable(kernel.body))
        self.waits = {s.barriers for s in every if isinstance(s, k.WaitBarrier)}
        self.elsewhere = {s.barriers for s in every if isinstance(s, k.TensorLoad) and s.ranks}
        roles = [
            {w.barriers for w in k.walk(s.body) if isinstance(w, k.WaitBarrier)}
            for s in k.walk(kernel.body)
            if isinstance(s, k.Role)
        ]
        self.turns = {b for b in self.waits if sum(b in waited for waited in roles) > 1}
        """Where roles may take turns, so that one of them does not wait for every phase."""
        self.sent: set[k.Shared] = set()
        self.multiplied = {
            p for s in every if isinstance(s, k.MultiplyAsync) for p in (s.d, s.a) if isinstance(p, k.Registers)
        }
        self.full = {s.barriers for s in k.walk(kernel.body) if isinstance(s, k.TensorLoad)}
        self.rings, self.uses = uses.rings, uses.of_rings
        extents = [s.type.static_shape[0] for s in kernel.shared if s in self.rings or isinstance(s, k.Barriers)]
        self.round = 2 * math.lcm(1, *extents)
        self.holds_registers = cache(lambda s: [a for a in uses.plainly(s) if a.place in self.multiplied])
        self.relevant = cache(lambda body: tuple(s for s in body if self.matters(s)))
        self.alone = cache(self.registers_alone)
        self.steps = cache(self.iterations)
        self.changes = cache(lambda loop: bool(k.changed(loop.body)))
        self.flat = cache(flatten)

    def run(self) -> None:
        """Follow the thread; _Wrong where it does what it may not."""
        self.body(self.kernel.body)
        for kind in k.KINDS:
            if self.begun[kind] or any(self.groups[kind]):
                raise _Wrong(f"ends while work of {kind} is on its way that no wait_groups waits for")
        for key in {*self.announced, *self.boxes}:
            self.balance(key)

    def reachable(self, body: tuple[Node, ...]) -> Iterator[Node]:
        for s in body:
            yield s
            if isinstance(s, k.For | k.If) or (isinstance(s, k.Role) and self.plays(s)):
                yield from self.reachable(s.body)

    def plays(self, role: k.Role) -> bool:
        return role.first <= self.warp < role.first + role.count

    def body(self, body: tuple[Node, ...]) -> None:
        for s in self.relevant(body):
            if (places := self.alone(s)) is not None and places.isdisjoint(self.multiplying()):
                continue
            kind = type(s)
            if kind is k.If:
                if self.holds(s.inside):
                    self.body(s.body)
            elif kind is k.Role:
                if self.plays(s):
                    self.body(s.body)
            elif kind is k.For:
                for i in self.carrying(s) if self.changes(s) else self.steps(s, self.count(s)):
                    self.env[s.axis.name] = i
                    self.body(s.body)
            elif kind is k.DeclareInteger or kind is k.SetInteger:
                self.env[s.variable.name] = self.number(s.value)
            else:
                self.statement(s)

    def count(self, loop: k.For) -> int:
        """How many steps a loop has; as many as there may be where that depends on data."""
        found = self.number(loop.axis.extent)
        return loop.most if found is None else found

    def carrying(self, loop: k.For) -> Iterator[int]:
        """The iterations of a loop that changes integers: whole rounds are left out once these come around again, or
        after so many that one of them is like those that are left.
        """
        count, i, before = self.count(loop), 0, None
        integers = sorted(v.name for v in k.changed(loop.body))
        while i < count:
            yield i
            i += 1
            if i % self.round == 0:
                now = [self.env.get(name) for name in integers]
                again = now == before or i >= FOLLOWED
                i += max((count - i) // self.round - 1, 0) * self.round if again else 0
                before = now

    def matters(self, s: Node) -> bool:
        if isinstance(s, k.For | k.If | k.Role):
            return bool(self.relevant(s.body))
        return isinstance(s, (*EVENTS, k.DeclareInteger, k.SetInteger)) or bool(self.uses(s) or self.holds_registers(s))

    def registers_alone(self, s: Node) -> frozenset[Any] | None:
        """The places whose registers a statement uses, where that is all that matters of it, as of most loops over a
        thread's sums: it can do no wrong while no product on its way uses them.
        """
        inside = list(k.walk((s,)))
        if any(isinstance(x, (*EVENTS, k.DeclareInteger, k.SetInteger)) or self.uses(x) for x in inside):
            return None
        return frozenset(a.place for x in inside for a in self.holds_registers(x))

    def multiplying(self) -> set[Any]:
        """The places whose registers products use that are on their way."""
        return {place for product in self.late() for place, *_ in product}

    def late(self) -> list[Any]:
        """What products use that were not waited for."""
        return [product for group in (self.begun["wgmma"], *self.groups["wgmma"]) for product in group]

    def iterations(self, loop: k.For, count: int) -> Sequence[int]:
        """The iterations to follow: one where all are alike, else the first and the last rounds of the rings."""
        inner = list(k.walk(self.relevant(loop.body)))
        state = any(isinstance(s, EVENTS) and not isinstance(s, k.AsyncCopy | k.MultiplyAsync) for s in inner)
        slots = [e for s in inner for e in (s.inside if isinstance(s, k.If) else [a.index[0] for a in self.uses(s)])]
        slots += [e for s in inner for a in self.holds_registers(s) for e in a.index]
        if not state and loop.axis not in _variables(slots):
            return range(min(count, 1))
        skipped = max(count // self.round - 2, 0) * self.round
        return [*range(self.round), *range(self.round + skipped, count)] if skipped else range(count)

    def statement(self, s: Node) -> None:
        for a in self.uses(s):
            if self.holds(a.inside) and not (isinstance(s, k.AsyncCopy) and a.write):
                self.free(s, slot := self.slot(a.place, a.index), "writes" if a.write else "reads")
                if a.place in self.sent and slot is not None and slot not in self.filled:
                    raise _Wrong(self.told(s, f"reads {slot[0].name}[{slot[1]}], which no box has filled"))
        held = [x for a in self.holds_registers(s) if (x := self.held(a)) is not None]
        if not isinstance(s, k.MultiplyAsync):
            self.settled(s, held)
        match s:
            case k.AsyncCopy():
                if (to := self.slot(s.target, s.to)) is not None and any(
                    to in group for group in self.groups["cp.async"]
                ):
                    raise _Wrong(self.told(s, f"writes {to[0].name}[{to[1]}], where a copy is on its way"))
                self.begun["cp.async"].append(to)
            case k.TensorStore():
                self.begun["bulk"].append(None)
            case k.MultiplyAsync():
                self.begun["wgmma"].append(held)
            case k.Commit():
                self.groups[s.kind].append(self.begun[s.kind])
                self.begun[s.kind] = []
            case k.WaitGroups():
                self.groups[s.kind] = self.groups[s.kind][max(len(self.groups[s.kind]) - s.open, 0) :]
            case k.Expect():
                key = self.barrier(s)
                self.announced[key] = self.announced.get(key, 0) + s.bytes
            case k.TensorLoad():
                to = self.slot(s.target, s.to) if s.barriers in self.waits else None
                at = tuple(map(self.number, s.to))
                self.free(s, to, "writes", at)
                self.sent |= {s.target} if to is not None else set()
                size = math.prod(s.box) * s.target.type.dtype.size
                self.boxes.setdefault(self.barrier(s), []).append((to, at, size))
            case k.WaitBarrier():
                self.wait(s)

    def held(self, a: Access) -> Held | None:
        """The registers of an access; None where they depend on data."""
        first = self.number(self.flat(a.index, a.place.type.element_strides))
        return None if first is None else (a.place, first, first + a.count)  # type: ignore[return-value]

    def settled(self, s: Node, held: Sequence[Held]) -> None:
        """_Wrong where a product that was not waited for uses registers that a statement uses."""
        late = [x for product in self.late() for x in product]
        for place, first, end in held:
            if any(place is other and first < last and start < end for other, start, last in late):
                raise _Wrong(
                    self.told(s, f"uses registers of {place.name} that wgmma is using, before it was waited for")
                )

    def wait(self, s: k.WaitBarrier) -> None:
        """Phases alternate, and the first one that boxes complete is 0."""
        key, phase = self.barrier(s), self.number(s.phase)
        last = self.phases.get(key, 1 if s.barriers in self.full else None)
        if phase is not None and phase == last and s.barriers not in self.turns:
            before = "after another" if key in self.phases else "first"
            raise _Wrong(
                self.told(
                    s, f"waits for phase {phase} of {key[0].name}[{key[1]}] {before}, which has ended or never does"
                )
            )
        self.phases[key] = phase
        self.balance(key, s)
        self.announced.pop(key, None)
        self.filled |= {to for to, *_ in self.boxes.pop(key, []) if to is not None}

    def balance(self, key: Slot, s: Node | None = None) -> None:
        """At a statement, or at the end, the bytes of the boxes sent are those announced, where no other block sends
        some.
        """
        announced, come = self.announced.get(key, 0), sum(size for *_, size in self.boxes.get(key, []))
        if come != announced and key[0] not in self.elsewhere:
            where = f"`{statement(s)[0]}`" if s is not None else "the end of the kernel"
            raise _Wrong(f"announces {announced} bytes at {key[0].name}[{key[1]}], and {come} come, at {where}")

    def free(self, s: Node, slot: Slot | None, what: str, at: Any = None) -> None:
        """_Wrong where a copy of this thread's is on its way to a slot; to another part, where a box comes `at`."""
        copies, sent = [self.begun["cp.async"], *self.groups["cp.async"]], self.boxes.values()
        if slot is not None and (
            any(slot in group for group in copies)
            or any(slot == to and at in (None, place) for boxes in sent for to, place, _ in boxes)
        ):
            raise _Wrong(
                self.told(
                    s, f"{what} {slot[0].name}[{slot[1]}], where a copy is on its way that this thread did not wait for"
                )
            )

    def told(self, s: Node, what: str) -> str:
        steps = ", ".join(f"{name} {value}" for name, value in self.env.items() if name not in (k.BLOCK, "lane"))
        return f"`{statement(s)[0]}` {what} ({steps})"

    def slot(self, place: Any, index: tuple[IntExpr, ...]) -> Slot | None:
        n = self.number(index[0]) if place in self.rings else None
        return None if n is None else (place, n)

    def barrier(self, s: Any) -> Slot:
        n = self.number(s.slot)
        if n is None:
            raise CompilerBug(f"{self.kernel.name}: `{statement(s)[0]}` has a slot that depends on data")
        return s.barriers, n

    def holds(self, inside: Sequence[IntExpr]) -> bool:
        return all((n := self.number(e)) is None or n >= 0 for e in inside)

    def number(self, e: IntExpr) -> int | None:
        """The value of an expression for this thread; None where it depends on data."""
        return e if isinstance(e, int) else _reader(e)(self.env)


Env = Mapping[str, int | None]
Reader = Callable[[Env], int | None]
"""The value of an expression where variables have values, by name; None where one has none, or data decides."""


@lru_cache(maxsize=4096)
def _reader(e: IntExpr) -> Reader:
    """What evaluates an expression, which is done for every step that is followed."""
    match e:
        case int() | Loaded():
            value = e if isinstance(e, int) else None
            return lambda env: value
        case Var():
            return itemgetter(e.name)
        case Sum():
            products = [(c, [_reader(f) for f in factors]) for c, factors in e.terms]
            return partial(_total, e.constant, products)
        case FloorDiv() | Mod():
            return partial(_divided, _reader(e.a), _reader(e.b), isinstance(e, Mod))
    raise CompilerBug(f"{e} has no value here")


def _total(constant: int, products: Sequence[tuple[int, Sequence[Reader]]], env: Env) -> int | None:
    total = constant
    for product, factors in products:
        for factor in factors:
            if (x := factor(env)) is None:
                return None
            product *= x
        total += product
    return total


def _divided(a: Reader, b: Reader, rest: bool, env: Env) -> int | None:
    x, y = a(env), b(env)
    return None if x is None or y is None else x % y if rest else x // y


def _variables(exprs: Sequence[IntExpr]) -> list[Var]:
    found = topological([e for e in exprs if isinstance(e, Expr)], stop=lambda x: isinstance(x, Var))
    return [x for x in found if isinstance(x, Var)]
