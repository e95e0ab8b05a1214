"""A kernel of Loop IR and its plan as a kernel of Kernel IR, written once for each agent and team. Nothing is decided
here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from terrazzo.collector import remembered
from terrazzo.errors import CompilerBug, Limitation, UserError, about, again
from terrazzo.hw.gpu import Gpu
from terrazzo.ir import nest as n
from terrazzo.ir.canonical import form_of, remember
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.places import TextLine
from terrazzo.ir.plan import Agent, Combine, Frame, Jam, Limit, Order, Plan, Product, Reach, Rescue, Result, Ring
from terrazzo.ir.rescues import settled
from terrazzo.ir.schedule import Schedule
from terrazzo.rewrite.rule import Declined, Event, Log
from terrazzo.rules.tile.agents import LOAD
from terrazzo.rules.tile.complete import Refused, complete
from terrazzo.rules.tile.digits import Bindings, extent
from terrazzo.rules.tile.draft import Draft
from terrazzo.rules.tile.rings import rounds as ring_rounds
from terrazzo.rules.tile.verify import HEAD, verify, wrong
from terrazzo.rules.tile_to_kernel.budget import over_budget
from terrazzo.rules.tile_to_kernel.builder import Builder
from terrazzo.rules.tile_to_kernel.cluster import Given, give, take
from terrazzo.rules.tile_to_kernel.everyone import Everyone
from terrazzo.rules.tile_to_kernel.gather import result_place
from terrazzo.rules.tile_to_kernel.jam import Jam as Jammed
from terrazzo.rules.tile_to_kernel.memory import Memory, room, share
from terrazzo.rules.tile_to_kernel.multiply import Fragment
from terrazzo.rules.tile_to_kernel.pipeline import Pipeline
from terrazzo.rules.tile_to_kernel.rescue import Rescued
from terrazzo.rules.tile_to_kernel.scope import Scope
from terrazzo.rules.tile_to_kernel.sums import ShortSums
from terrazzo.rules.tile_to_kernel.walk import Walker


def program(
    scheduled: tile.Program, gpu: Gpu, log: Log | None = None, show: Callable[[Any], str] | None = None
) -> k.Program:
    """Every kernel by its plan, or by the one that completes its schedule. UserError where one asks for more than the
    machine has.
    """
    schedules, plans = dict(scheduled.schedules), dict(scheduled.plans)
    p = scheduled.loop
    steps: list[k.Kernel | l.Call] = []
    for i, s in enumerate(p.steps):
        if not isinstance(s, l.Kernel):
            steps.append(s)
            continue
        with about(*schedules[i].part(), s):
            done = _as_its_form(s, schedules[i], gpu, plans.get(i))
        steps.append(done)
        if log is not None:
            texts = (f"{show(s)}\n{plans.get(i)}", show(done)) if show else ("", "")
            what = f"{done.grid} blocks of {done.threads} threads, {done.shared_bytes} bytes of shared memory"
            log.add(Event("derive", "derive", s.name, True, what, *texts))
            log.applied("derive", "derive", s.name, [s], [done])
    return k.Program(p.name, p.inputs, tuple(steps), p.results)


def _as_its_form(kernel: l.Kernel, schedule: Schedule, gpu: Gpu, plan: Plan | None) -> k.Kernel:
    """What is written for the canonical form of a kernel, under this one's names; or for itself, by its own plan."""
    form = form_of(kernel, schedule)
    if form is not None:
        found, _ = complete(form.kernel, form.schedule, gpu)
        if plan is None or plan is form.named(found):
            written = lower(form.kernel, form.schedule, gpu)
            done: k.Kernel = form.named(written)
            remember(done, replace(form, kernel=written, schedule=None))
            return done
    if plan is not None and plan is not complete(kernel, schedule, gpu)[0]:
        verify(kernel, schedule, plan, gpu)
        if isinstance(refused := derived(kernel, schedule, gpu, plan), Refused):
            with about(TextLine(plan, 0)):
                raise wrong(plan, HEAD, refused.reason.removeprefix(f"{kernel.name}: "))
    return lower(kernel, schedule, gpu, plan)


def lower(kernel: l.Kernel, schedule: Schedule, gpu: Gpu, plan: Plan | None = None) -> k.Kernel:
    """What the schedule means for this kernel, by the plan or by the one that completes it. UserError or Limitation,
    with the reason, where it cannot be.

    @tile
    def f(x: f32[3, 40]):
        with kernel('z', z=f32[3]):
            for a0 in free(3):
                for r0 in reduce(40):
                    in0 = x[a0, r0]
                    acc0 <- max(in0)
                z[a0] = acc0
        with schedule("z", target="sm_80"):
            a0 = grid(3)
            with site("acc0"):
                r0 = reg(2) * lane(32)
        return (z,)
    =>
    @kernel
    def f(x: f32[3, 40]):
        with launch('z', _grid=3, _warps=1, _resident=1, _reads=[x], z=f32[3]):
            acc0 = registers(f32, f32(-inf))
            for i0 in unrolled(1):
                in0 = x[block, i0 * 32 + lane]
                acc0[()] = max(acc0[()], in0)
            if lane < 8:
                in0 = x[block, lane + 32]
                acc0[()] = max(acc0[()], in0)
            other0 = shuffle(acc0[()], 1)
            acc0[()] = max(acc0[()], other0)
            other1 = shuffle(acc0[()], 2)
            acc0[()] = max(acc0[()], other1)
            other2 = shuffle(acc0[()], 4)
            acc0[()] = max(acc0[()], other2)
            other3 = shuffle(acc0[()], 8)
            acc0[()] = max(acc0[()], other3)
            other4 = shuffle(acc0[()], 16)
            acc0[()] = max(acc0[()], other4)
            if lane == 0:
                z[block] = acc0[()]
        return (z,)
    """
    found = derived(kernel, schedule, gpu, plan)
    if isinstance(found, Refused):
        raise again(found.error)
    return found


def derived(kernel: l.Kernel, schedule: Schedule, gpu: Gpu, plan: Plan | None = None) -> k.Kernel | Refused:
    """The same, with the reason as data where it cannot be."""
    found = plan or complete(kernel, schedule, gpu)[0]
    return found if isinstance(found, Refused) else _written(kernel, schedule, gpu, found)


@remembered
def _written(kernel: l.Kernel, schedule: Schedule, gpu: Gpu, plan: Plan) -> k.Kernel | Refused:
    """Kept, because whoever chooses a schedule asks for what it becomes, and equal layers have equal kernels."""
    try:
        done = write(Draft(kernel, schedule, gpu), plan)
    except (UserError, Limitation, Declined) as why:
        told = f"its plan was found to be in order, and no kernel is written from it: {why}"
        return Refused(CompilerBug(f"{kernel.name}: {told}"))
    over = over_budget(done, gpu)
    return Refused(UserError(f"{kernel.name}: {over}")) if over else done


def write(draft: Draft, plan: Plan) -> k.Kernel:
    """The kernel that a plan means."""
    kernel = draft.kernel
    builder = Builder({b.name for b in (*kernel.reads, *kernel.writes)})
    agents, order, numbers = plan.all(Agent), plan.one(Order), itertools.count()
    everyone = Bindings(draft.schedule, plan, agents[-1], 0, numbers)
    memory = share(draft, plan, builder, everyone) if draft.tiled else Memory({}, {}, {})
    places: dict[str, k.Shared] = {}
    teams = []
    for agent in agents:
        for team in range(agent.teams):
            bindings = Bindings(draft.schedule, plan, agent, team, numbers)
            teams.append(_Team(draft, plan, builder, bindings, memory, places))
            if len(agents) == agent.teams == 1:
                teams[-1].write()
            else:
                builder.add(teams[-1].role(teams[-1].write))
    if any(team.given for team in teams):
        builder.add(k.ClusterSync())
        builder.add(*(team.role(team.finish) for team in teams if team.given))
    if order.cluster_size > 1 and memory.empty:
        builder.add(k.ClusterSync())  # nobody leaves while others still free its slots, or take its sums
    reads = tuple(b for b in kernel.reads if b not in kernel.writes)
    limit = max([1, *(x.resident for x in plan.all(Limit))])
    done = tuple(builder.out)
    if not plan.all(Frame):  # beside weights in registers there is no room for further sums
        done = ShortSums(builder, everyone).body(done)
    return k.Kernel(
        kernel.name, (*reads, *kernel.writes), kernel.writes, order.blocks, sum(a.warps for a in agents),
        tuple(builder.shared), done, limit, kernel.source, order.cluster_size, tuple(kernel.over.items()),
    )  # fmt: skip


class _Team:
    """What one team of an agent does."""

    def __init__(
        self,
        draft: Draft,
        plan: Plan,
        builder: Builder,
        bindings: Bindings,
        memory: Memory,
        places: dict[str, k.Shared],
    ) -> None:
        self.draft, self.plan, self.builder, self.bindings = draft, plan, builder, bindings
        self.memory, self.places = memory, places
        self.given: dict[l.Reduce, Given] = {}

    def role(self, write: Callable[[], None]) -> k.Role:
        """What `write` writes, for the warps of this team."""
        agent, bindings = self.bindings.agent, self.bindings
        first = agent.first + bindings.team * agent.each
        return k.Role(first, agent.each, self.builder.inside(write), agent.registers)

    def write(self) -> None:
        """All tiles of the team, one after the other."""
        loads = self.bindings.agent.name == LOAD
        if loads:
            one = [-self.bindings.warp, -k.LANE]
            return self.builder.where(one, lambda: self.tiles(self.load))
        self.tiles(self.compute)
        if not self.given:
            self.leave()

    def finish(self) -> None:
        """The results of the only tile, once the blocks of the cluster have their shares of its sums."""
        p, (parts,) = self.plan.one(Product), {c.parts for c in self.plan.all(Combine)}
        whole = partial(take, self.builder, self.bindings, columns=p.n, site=self.draft.site(p.sites[0]), parts=parts)

        def store() -> None:
            fragments = {r: whole(x) for r, x in self.given.items()}
            self.rescue(fragments, {})
            self.results(fragments)
            self.leave()

        self.builder.where([parts - 1 - self.bindings.rank], store)

    def leave(self) -> None:
        """Until boxes of results were read."""
        if any(r.by == "tma" for r in self.plan.all(Result)):
            self.builder.where(self.bindings.leader, lambda: self.builder.add(k.WaitGroups(0, "bulk")))

    def tiles(self, write: Callable[[], None]) -> None:
        """`write` for every tile."""
        order, wave = self.bindings.order, self.bindings.wave
        rounds = bool(self.draft.products and ring_rounds(self.draft))
        if wave is None and not rounds:
            return write()
        inside = [order.count - 1 - self.bindings.tile]
        if self.plan.all(Reach) or rounds:
            return self.counted(inside, write, rounds)
        assert wave is not None
        self.builder.loops([(wave, False)], lambda: self.builder.where(inside, write))

    def counted(self, inside: Sequence[IntExpr], write: Callable[[], None], rounds: bool) -> None:
        """`write` for tiles of so many steps each, which are counted: slots go on from tile to tile, and from one of
        several `rounds` to the next, which counts them itself.
        """
        wave, bindings = self.bindings.wave, self.bindings
        again = 2 * math.lcm(*(r.slots for r in self.plan.all(Ring) if r.over))
        bindings.steps = k.Integer(self.builder.fresh("n"), again)
        self.builder.add(k.DeclareInteger(bindings.steps, 0))
        if wave is None:
            return write()

        def tile() -> None:
            write()
            if rounds:
                return
            steps, _ = self.pipeline()
            assert steps is not None and bindings.steps is not None
            self.builder.add(k.SetInteger(bindings.steps, (bindings.steps + steps.visited) % again))

        self.builder.loops([(wave, False)], lambda: self.builder.where(inside, tile))

    def pipeline(self) -> tuple[Pipeline | None, Scope]:
        """The steps of a tile, and what is known around it."""
        if not self.draft.tiled:
            return None, Scope()
        scope = self.around()
        kind = Everyone if len(self.plan.all(Agent)) == 1 else Pipeline
        return kind(self.draft, self.plan, self.builder, self.bindings, scope, self.memory), scope

    def around(self) -> Scope:
        """Where a tile is along the axes that it has no part of."""
        scope = Scope()
        for a in (a for a in self.draft.kernel.axes if a not in self.draft.tiled):
            digits = self.bindings.digits(a.name, None, extent(a))
            scope.env[a] = sum((d.value * d.stride for d in digits), start=0)
        return scope

    def load(self) -> None:
        """A tile, for who only loads."""
        steps, _ = self.pipeline()
        assert steps is not None
        steps.load()

    def compute(self) -> None:
        """A tile, for who computes."""
        if self.plan.all(Jam):
            return Jammed(self.draft.kernel, self.plan, self.builder, self.bindings).write()
        steps, _ = self.pipeline()
        begun = len(self.builder.out) if self.fetches_early() else None
        if steps is not None:
            steps.compute()
        fragments = steps.fragments if steps is not None else {}
        if fragments and any(c.blocks > 1 for c in self.plan.all(Combine)):
            free = room(self.draft, self.plan, self.memory) if len(fragments) == 1 else 0
            self.given = {r: give(self.builder, self.bindings, x, free) for r, x in fragments.items()}
        else:
            self.rescue(fragments, steps.promotion.held if steps is not None else {})
            self.results(fragments, begun)

    def fetches_early(self) -> bool:
        """Whether what results are made of is fetched before a tile is multiplied, where registers have room for it:
        they hold sums then, and no factors nor sums of a step.
        """
        products = self.plan.all(Product)
        alone = len(products) == 1 and products[0].a == "shared" and not products[0].promote
        return alone and self.bindings.agent.registers is not None

    def rescue(self, fragments: dict[l.Reduce, Fragment], spare: Mapping[k.Registers, k.Registers]) -> None:
        """Have sums become what they are to be, those among them that will not do; with registers that are `spare`."""
        for x in (self.draft.rescued[line.site] for line in self.plan.all(Rescue)):
            sums = fragments[x.of]
            Rescued(self.builder, self.bindings, x, sums, self.around(), spare.get(sums.place)).write()

    def results(self, fragments: dict[l.Reduce, Fragment], begun: int | None = None) -> None:
        """What follows from sums; what is fetched first is where the tile is `begun`."""
        for line in self.plan.all(Result) if fragments else ():
            if line.slab and line.store not in self.places:
                last = self.draft.products[list(self.draft.products)[-1]].reduce
                store = next(s for s in self.draft.kernel.stores if s.buffer.name == line.store)
                self.places[line.store] = result_place(self.builder, line, store, self.bindings.places, fragments[last])
        kernel = settled(self.draft.kernel) if self.plan.all(Rescue) else self.draft.kernel
        walker = Walker(kernel, self.plan, self.builder, self.bindings, fragments, self.places, begun)
        walker.statements(n.nest(kernel), Scope())
