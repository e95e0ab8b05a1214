"""Schedules completed into plans, rule by rule, until nothing is open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from terrazzo.collector import remembered
from terrazzo.errors import CompilerBug, Limitation, TerrazzoError, UserError, about, again
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.canonical import Form, form_of
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.plan import Agent, Order, Plan, Product, Ring, Stream
from terrazzo.ir.schedule import Schedule
from terrazzo.rewrite.engine import rewrite
from terrazzo.rewrite.rule import Declined, Event, Log
from terrazzo.rules.tile import (
    agents,
    frames,
    layouts,
    order,
    overlap,
    products,
    reach,
    rescue,
    results,
    rings,
    slabs,
    stages,
    vectors,
)
from terrazzo.rules.tile.draft import Draft, axis_name
from terrazzo.rules.tile.loops import walk
from terrazzo.rules.tile.verify import Problem, problems, verify

PASS = "plan"

RULES = (
    *order.RULES,
    *agents.RULES,
    *products.RULES,
    *frames.RULES,
    *reach.RULES,
    *rescue.RULES,
    *rings.RULES,
    *slabs.RULES,
    *stages.RULES,
    *overlap.RULES,
    *vectors.RULES,
    *results.RULES,
    *layouts.RULES,
)

FOLLOWS = (frames.move_frames.name, rescue.rescue_sums.name, stages.stage_factors.name, layouts.convert_layouts.name)
"""The rules whose lines follow from the term and from others, and cannot be left out."""


@dataclass(frozen=True)
class Refused:
    """Why there is no plan. `error` is raised where somebody insists on it."""

    error: TerrazzoError

    @property
    def reason(self) -> str:
        """In one line."""
        return str(self.error).splitlines()[0]


def complete(
    kernel: l.Kernel, schedule: Schedule, gpu: Gpu, show: bool = False
) -> tuple[Plan | Refused, tuple[Event, ...]]:
    """The plan of a kernel under a schedule, or why there is none; with what every rule did, and texts if these are to
    be shown.
    """
    return _completed(kernel, schedule, gpu, show)


@remembered
def _completed(kernel: l.Kernel, schedule: Schedule, gpu: Gpu, show: bool) -> tuple[Plan | Refused, tuple[Event, ...]]:
    """Kept, because whoever chooses a schedule asks for its plan, and equal layers have equal kernels."""
    log = Log()
    draft = Draft(kernel, schedule, gpu)
    first = Plan(kernel.name, gpu.arch, (), schedule.words)
    texts = str if show else None
    try:
        tile.fit(schedule, kernel)
        (plan,) = rewrite([first], RULES, draft, log=log, pass_name=PASS, names={first: kernel.name}, show=texts)
    except (UserError, Limitation) as why:
        return Refused(why.with_traceback(None)), tuple(log.events)
    return _judged(plan, draft, log), tuple(log.events)


def program(
    scheduled: tile.Program, gpu: Gpu, log: Log, pinned: Mapping[str, Plan] | None = None, show: bool = False
) -> tile.Program:
    """Every schedule with a plan: the one that stands below it or was pinned, as it is, or else the one that rules
    complete. UserError where the former is not in order.
    """
    plans = dict(scheduled.plans)
    for number, schedule in scheduled.schedules:
        kernel = scheduled.loop.steps[number]
        assert isinstance(kernel, l.Kernel)
        if (given := plans.get(number, (pinned or {}).get(kernel.name))) is not None:
            with about(*schedule.part(), kernel):
                verify(kernel, schedule, given, gpu)
            plans[number] = given
            log.add(Event(PASS, "pin", kernel.name, True, "by the user"))
            continue
        form = form_of(kernel, schedule) or Form(kernel, {}, kernel.source, schedule)
        found, events = complete(form.kernel, form.schedule, gpu, show)
        for e in form.named(events):
            log.add(e)
        if isinstance(found, Refused):
            with about(*schedule.part(), kernel):
                raise again(found.error)
        for line, why in _faults(form.kernel, form.schedule, gpu):
            raise CompilerBug(f"rules made a plan that is not in order, line {line}: {why}\n{found}")
        plans[number] = form.named(found)
    return tile.Program(scheduled.loop, scheduled.schedules, tuple(sorted(plans.items())))


@remembered
def _faults(kernel: l.Kernel, schedule: Schedule, gpu: Gpu) -> tuple[Problem, ...]:
    """What is wrong with the plan that rules make of a schedule, if there is one."""
    plan, _ = complete(kernel, schedule, gpu)
    return () if isinstance(plan, Refused) else tuple(problems(plan, Draft(kernel, schedule, gpu)))


def _judged(plan: Plan, draft: Draft, log: Log) -> Plan | Refused:
    """The plan, where nothing is missing and every word of the schedule was read."""
    needed = (Order, Agent, *((Product, Ring, Stream) if draft.tiled else ()))
    missing = [kind for kind in needed if not plan.all(kind)]
    declined = [e.reason for e in log.events if not e.fired]
    if missing:
        unwalked = [e.reason for e in log.events if not e.fired and e.rule == order.walk_tiles.name]
        told = unwalked if Order in missing and unwalked else declined
        why = told[-1] if told else f"a block's part of {axis_name(draft.tiled[0])} is divided by no product"
        return Refused(Limitation(f"{plan.kernel}: {why}"))
    if stuck := [e.reason for e in log.events if e.rule in FOLLOWS and not e.fired]:
        return Refused(Limitation(f"{plan.kernel}: {stuck[-1]}"))
    if plan.open:
        word = plan.open[0]
        where = draft.schedule.locate(word)
        hint = f"; {declined[-1]}" if declined else ""
        error = UserError(f"the schedule of {plan.kernel}: nothing reads `{word}`{hint}: {where}")
        error.brief = f"the schedule of {plan.kernel}: nothing reads `{word}`{hint}"
        error.about = draft.schedule.part(word.site, word.line, word.word)
        return Refused(error)
    try:
        walk(plan, draft)
    except Declined as why:
        return Refused(Limitation(f"{plan.kernel}: {why}"))
    except (UserError, Limitation) as why:
        return Refused(why.with_traceback(None))
    return plan
