"""Which kernel of a wrong program is wrong, and which rule application made it so.

From behind: the kernels are run as they are deployed (as machine code, else simulated) on the right operands, in order.
Then only the applications that led to the first wrong one are replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from terrazzo.check.native import native
from terrazzo.check.replay import EMIT, Replay, Report, Wrong, led_to, schedules_of, silent, steps_of
from terrazzo.errors import UserError
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.node import Node, topological
from terrazzo.options import Options
from terrazzo.pipelines import Lowering, lowering
from terrazzo.rewrite.rule import Application, Log


@dataclass(frozen=True)
class Culprit:
    """The first wrong kernel, by its number and name, how it is wrong, and the first application that is: `EMIT` if all
    are right.
    """

    number: int
    kernel: str
    problem: str
    wrong: Wrong


def bisect(program: Any, inputs: Mapping[str, Any], options: Options) -> Culprit | None:
    """The first wrong kernel of a program in any IR above Kernel IR, or None where all are right."""
    if isinstance(program, k.Program):
        raise UserError("a program of Kernel IR says nothing else about what its kernels should compute")
    log = Log(applications=[])
    done = lowering(program, options, log)
    applications = _recorded(done, log.applications or [])
    replay = Replay(program, inputs, Report())
    replay.believe(applications)
    replay.schedules |= schedules_of(done.at("tile"))
    derived = {a.before[0]: a for a in applications if a.after and isinstance(a.after[0], k.Kernel)}
    run = native(options)
    for number, kernel in enumerate(done.loop.steps):
        if not isinstance(kernel, l.Kernel):
            continue
        alone = Application(EMIT, EMIT, kernel.name, (kernel,), ())
        last = derived.get(kernel, Application(EMIT, EMIT, kernel.name, (), (kernel,)))
        if wrong := replay.emitted(kernel, run) if run else replay.replay(last):
            history = [*_history(alone, applications), *([derived[kernel]] if kernel in derived else [])]
            first = next((found for a in history if (found := replay.replay(a))), wrong)
            return Culprit(number, kernel.name, wrong.problem, first)
    return None


def _recorded(done: Lowering, found: list[Application]) -> list[Application]:
    """The applications of all passes, in order, with what passes did not record."""
    known = {x for a in found for x in a.after} | {*steps_of(done.source)}
    before, out = steps_of(done.source), list[Application]()
    for p, program, _ in done.stages:
        out += [a for a in found if a.pass_name == p.name]
        out += silent(p.name, before, steps_of(program), known)
        known |= {x for a in out for x in a.after}
        before = steps_of(program)
    return out


def _history(a: Application, applications: list[Application]) -> list[Application]:
    """All that led to a kernel, in order: loops by what they replace, tensors by the op whose rule made them."""
    made: dict[Node, Application] = {}
    for x in applications:
        if x.pass_name == "torch_to_tensor":
            values = topological([n for n in x.after if n is not None], stop=made.__contains__)
            made.update({n: x for n in values if isinstance(n, t.Value) and n not in made})
    loops = led_to(a, [x for x in applications if x.pass_name != "torch_to_tensor"])
    wanted = {id(made[n]) for x in loops for n in x.before if n in made}
    return [*(x for x in applications if id(x) in wanted), *loops]
