"""What schedules store first, such as patches of images, is there in windows where much memory is in use; and what
makes something for several kernels of one that schedules took apart is several, too.

A product whose operands are stored first has them in memory beside all else, and patches that overlap are many times
what their image is. Products of one kernel may run one after the other, so that only one needs its factors at a time.
Kernels of Loop IR do not tell that before they have schedules. So it is asked for afterwards, with the rules that have
parts of numbers in windows (`rules/loop/memory/in_windows.py`) and divide kernels (`rules/loop/memory/divided.py`), and
who is another kernel then is scheduled again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.schedule import Schedule
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.cost import Rates
from terrazzo.rules.loop.memory.divided import divide
from terrazzo.rules.loop.memory.in_windows import WORTH, Price, in_windows
from terrazzo.rules.loop.memory.lifetimes import in_use, kernels_in_order
from terrazzo.rules.loop_to_tile.estimate import work
from terrazzo.rules.loop_to_tile.walked.collapse import collapse, digits_apart

PASS = "schedule"
ROUNDS = 8
"""How often kernels are divided, and steps put in order, at most."""
Scheduled = Callable[[l.Program, Log], tile.Program]


def copies_in_windows(
    given: l.Program,
    done: tile.Program,
    log: Log,
    price: Price,
    schedule: Scheduled,
    worth: int = WORTH,
) -> tile.Program:
    """`done`, the schedules of a program, with what stores more than that did, and those that read it, in windows where
    this lowers what is in use for as little time as it does elsewhere. A copy whose points were made one axis has an
    axis for each of their digits first: windows are of one of these, such as images. Images that are turned are copies
    in eager mode, too, and stay whole.
    """
    before = {*given.steps}
    p = done.loop
    copies = [s for s in p.steps if isinstance(s, l.Kernel) and s not in before and not s.carried]
    apart: dict[Any, l.Kernel] = {s: x for s in copies if (x := digits_apart(s)) is not s and collapse(x) is s}
    whole = l.Program(p.name, p.inputs, tuple(apart.get(s, s) for s in p.steps), p.results)
    told = Log(applications=None if log.applications is None else [])
    lean = in_windows(whole, told, price, lambda maker: maker not in before and not _turned(maker), worth, PASS)
    if lean is whole:
        return done
    for s, x in apart.items():
        if x not in lean.steps:
            told.applied(PASS, "digits_apart", s.name, [s], [x])
    return _again(done, lean, log, told, schedule)


def makers_divided(done: tile.Program, log: Log, rates: Rates, schedule: Scheduled) -> tile.Program:
    """`done`, the schedules of a program, with kernels divided that make something for several, as often as steps in
    another order then let it be done again.
    """
    for _ in range(ROUNDS):
        told = Log(applications=None if log.applications is None else [])
        divided = _again(done, divide(done.loop, told, rates, pass_name=PASS), log, told, schedule)
        if divided is done:
            break
        done = kernels_in_order(divided, log, PASS)
    return done


def _turned(maker: l.Kernel) -> bool:
    """Whether a kernel stores no more than it reads, as one does that stores it in another order."""
    touched = work(maker)[1]
    return sum(touched[b] for b in {*maker.writes}) <= sum(touched[b] for b in {*maker.reads})


def _again(done: tile.Program, lean: l.Program, log: Log, told: Log, schedule: Scheduled) -> tile.Program:
    """The schedules of a leaner program, which are those of `done` where kernels are the same; `done` if nothing is
    gained.
    """
    if lean is done.loop:
        return done
    known = {done.loop.steps[n]: s for n, s in done.schedules}
    steps: list[l.Kernel | l.Call] = []
    schedules: list[tuple[int, Schedule]] = []
    for s in lean.steps:
        if isinstance(s, l.Kernel) and s not in known and not s.carried and (flat := collapse(s)) is not s:
            if flat not in known:
                told.applied(PASS, "collapse", s.name, [s], [flat])
            s = flat  # as a copy was, when its schedule was chosen
        if s not in known and isinstance(s, l.Kernel):
            part = schedule(l.Program(lean.name, lean.inputs, (s,), lean.results), told)
            schedules += [(len(steps) + n, x) for n, x in part.schedules]
            steps += part.loop.steps
        else:
            schedules += [(len(steps), known[s])] if s in known else []
            steps.append(s)
    made = l.Program(lean.name, lean.inputs, tuple(steps), lean.results)
    if _most(made) >= _most(done.loop):  # who was scheduled again stores something else now
        return done
    for event in told.events:
        log.add(event)
    if log.applications is not None:
        log.applications += told.applications or ()
    return tile.Program(made, tuple(schedules))


def _most(program: l.Program) -> int:
    return max(in_use(program.steps, program.results, inputs=program.inputs), default=0)
