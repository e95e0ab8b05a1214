"""Checking a compilation: every rule application of every pass is replayed on inputs, and the first wrong one is named.

Before a rule fires something is worth a value, and after it the same thing must be worth the same, up to rounding;
`judge` says what rounding explains. Each application is given the right operands, so errors do not add up, and the
first wrong one is the culprit.

Products that are written out only until a later rewrite removes them (every matrix product is, before it is fused) can
be too large to compute. Such applications are replayed only where the rewrite that removes the product turns out wrong,
or where none does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from terrazzo.check.blocks import sample, simulate
from terrazzo.check.judge import difference
from terrazzo.check.native import Bound, Native, native
from terrazzo.check.values import Values, size
from terrazzo.errors import CompilerBug, TerrazzoError
from terrazzo.interp import kernel as simulator
from terrazzo.interp.torch import call_numpy, to_numpy
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.node import topological
from terrazzo.ir.program import Input
from terrazzo.options import Options
from terrazzo.pipelines import PASSES, Pass, stages
from terrazzo.rewrite.rule import Application, Log
from terrazzo.rules.torch_to_tensor.lower import opaque

EMIT = "emit"
"""What stands for the step from the last IR to machine code, which is no pass."""
LARGE = 1 << 24
"""Elements above which a temporary is not computed while a later rewrite may remove it."""


_LAST = [p for p in PASSES if p.dst == "loop"][-1]


@dataclass(frozen=True)
class Wrong:
    """The first rule application whose result moves beyond rounding: which value of it, and how."""

    application: Application
    value: str
    problem: str
    error: CompilerBug | None = None
    """What was raised, where it was something of a text."""

    @property
    def rule(self) -> str:
        """Pass and rule."""
        return f"{self.application.pass_name}:{self.application.rule}"

    def __str__(self) -> str:
        return f"{self.application}: {self.value} {self.problem}"


@dataclass
class Report:
    """What was checked: applications and seconds by pass, simulated blocks, and what is wrong."""

    applications: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    blocks: list[tuple[str, int, int]] = field(default_factory=list)
    wrong: Wrong | None = None


def check(program: Any, inputs: Mapping[str, Any], options: Options) -> Report:
    """Lower `program` and check every step. `inputs` are torch tensors, by name.

    The loops of a program of Tile IR are the truth about its kernels. Of a program of Kernel IR nothing else is known:
    the simulator looks for what is never right.
    """
    report = Report()
    if isinstance(program, k.Program):
        arrays = {name: to_numpy(value) for name, value in inputs.items()}
        try:
            simulator.run(program, arrays, call=call_numpy)
        except CompilerBug as why:
            report.wrong = Wrong(
                Application("kernel", "simulation", program.name, (), ()), program.name, f"cannot run: {why}", why
            )
        return report
    replay = Replay(program, inputs, report)
    for p in PASSES:
        log, bug, start = Log(applications=[]), None, time.perf_counter()
        try:
            done = stages(program, options, log, (p.name,))
        except CompilerBug as error:
            done, bug = [], error
        if not done and not bug:
            continue
        report.wrong = replay.applications(log.applications or [])
        if bug and not report.wrong:
            report.wrong = Wrong(
                Application(p.name, p.name, program.name, (), ()), program.name, f"cannot be made: {bug}"
            )
        if done and not report.wrong:
            program = done[0][1]
            report.wrong = replay.program(p, program)
        report.applications[p.name] = len(log.applications or [])
        report.seconds[p.name] = time.perf_counter() - start
        if report.wrong:
            return report
    if (run := native(options)) is not None:
        start = time.perf_counter()
        kernels = replay.kernels(program)
        report.wrong = next((wrong for x in kernels if (wrong := replay.emitted(x, run))), None)
        report.applications[EMIT] = len(kernels)
        report.seconds[EMIT] = time.perf_counter() - start
    return report


class Replay:
    """The values of a program before it was lowered, and the passes beside them."""

    def __init__(self, program: Any, inputs: Mapping[str, Any], report: Report) -> None:
        source = program.loop if isinstance(program, tile.Program) else program
        self.own, self.exact = (Values(source, inputs, precise) for precise in (False, True))
        self.both = (self.own, self.exact)
        self.report = report
        self.inputs = {b.name for b in source.inputs}
        self.results: tuple[Any, ...] = source.results
        self.steps = steps_of(source)
        self.checked: set[Any] = set(self.steps)
        self.schedules = schedules_of(program)
        self.late: list[Application] = []
        self.largest: float = LARGE

    def applications(self, found: Iterable[Application]) -> Wrong | None:
        """Check applications, in order."""
        return next((wrong for a in found if (wrong := self.application(a))), None)

    def program(self, p: Pass, program: Any) -> Wrong | None:
        """Check what a pass made: kernels whose making it did not record, what was put off, and that the results are
        the same.
        """
        self.schedules |= schedules_of(program)
        steps = steps_of(program)
        if wrong := self.applications(silent(p.name, self.steps, steps, self.checked)):
            return wrong
        self.steps = steps
        if p is _LAST:  # what is still there stays
            self.largest = math.inf
            final = {b for s in steps for b in s.writes}
            for a in self.late:
                if any(b in final for x in a.after for b in x.writes) and (wrong := self.replay(a)):
                    return wrong
        return self.outcome(p.name, (program.loop if isinstance(program, tile.Program) else program).results)

    def application(self, a: Application) -> Wrong | None:
        """Check an application, or put it off; a wrong one may be so for one that was put off."""
        self.checked.update(a.after)
        if all(isinstance(x, l.Call) for x in a.after):  # the same call, by definition
            self.define(a)
            return None
        if any(isinstance(x, l.Kernel) and self.large(x) for x in a.after):
            self.define(a)
            self.late.append(a)
            return None
        wrong = self.replay(a)
        history = led_to(a, self.late)
        self.late = [x for x in self.late if x not in history]
        earlier = next((found for x in history if (found := self.replay(x))), None) if wrong else None
        return earlier or wrong

    def large(self, kernel: l.Kernel) -> bool:
        """Whether a kernel needs a temporary that may vanish later, and is large."""
        return any(size(b) > self.largest and b.name not in self.inputs for b in (*kernel.reads, *kernel.writes))

    def define(self, a: Application) -> None:
        """What buffers that are new hold: the value they stand for, or what their kernel writes."""
        for x in a.after:
            same = isinstance(x, l.Call) and not isinstance(a.before[0], l.Kernel)  # else it only names memory
            pairs = zip(x.results, a.before, strict=True) if same else ((b, x) for b in x.writes)
            for b, source in pairs if isinstance(x, l.Call | l.Kernel) else ():
                for values in self.both:
                    if b is not None and b not in values.known:
                        lifted = isinstance(x, l.Kernel) and a.pass_name == "tensor_to_loop"
                        values.source.setdefault(b, a.before[0] if lifted else source)

    def believe(self, applications: Iterable[Application]) -> None:
        """Take what stood before every application for what stands after it, without a look at the latter."""
        for a in applications:
            if a.pass_name == "torch_to_tensor":
                self.settle(a)
            else:
                self.define(a)

    def settle(self, a: Application) -> list[tuple[Any, Any, Any]]:
        """What the results of an ATen op's rule must be: (node, value, value in float64)."""
        before = a.before[0]
        if (
            "empty" in before.name
        ):  # memory that nobody wrote holds anything: it may as well hold what the rule puts there
            for values in self.both:
                values.known[before] = values.of(a.after[0])
        truths = [x if isinstance(before.type, tuple) else (x,) for x in (values.of(before) for values in self.both)]
        found = [(new, old, exact) for new, old, exact in zip(a.after, *truths, strict=True) if new is not None]
        for new, old, exact in found:
            self.own.known[new], self.exact.known[new] = old, exact
        return found

    def replay(self, a: Application) -> Wrong | None:
        """Compare an application's two sides."""
        if a.pass_name == "torch_to_tensor":
            return self.lowered(a)
        return self.derived(a) if isinstance(a.after[0], k.Kernel) else self.rewritten(a)

    def lowered(self, a: Application) -> Wrong | None:
        """An ATen op and what its rule made of it. What the op gives is right, by definition."""
        found = _attempt(lambda: [self.made(values, a) for values in self.both]) if a.rule != opaque.name else None
        for number, (new, old, exact) in enumerate(self.settle(a)):
            why = (
                difference(new.type.dtype, old, found[0][new], exact, found[1][new])
                if isinstance(found, list)
                else found
            )
            if why:
                return Wrong(a, f"{a.subject}.{number}" if number else a.subject, why)
        return None

    def made(self, values: Values, a: Application) -> dict[Any, Any]:
        """What the results of an ATen op's rule are, computed from its operands whatever is known of them."""
        again = [n for n in a.after if n in values.known and not isinstance(n, Input) and n not in a.before[0].children]
        before = {n: values.known.pop(n) for n in again}
        found = {n: values.of(n) for n in a.after if n is not None}
        values.known.update(before)
        return found

    def rewritten(self, a: Application) -> Wrong | None:
        """Kernels of Loop IR and what they were before. Buffers that are new are seen through those who read them."""
        self.define(a)
        old = [b for x in a.after for b in x.writes if self.own.source.get(b) is not x]
        truth = {b: self.own.of(b) for b in old}
        found = _attempt(lambda: self.own.run(a.after))
        if isinstance(found, str):
            return Wrong(a, a.subject, found)
        moved = [b for b in old if difference(b.type.dtype, truth[b], found[b])]
        again = _attempt(lambda: self.exact.run(a.after)) if moved else {}
        if isinstance(again, str):
            return Wrong(a, a.subject, again)
        return self.first(a, [(b, truth[b], found[b], self.exact.of(b), again[b]) for b in moved])

    def derived(self, a: Application) -> Wrong | None:
        """A kernel for a GPU and its loops."""
        kernel: k.Kernel = a.after[0]
        blocks = sample(kernel)
        self.report.blocks.append((kernel.name, len(blocks), kernel.grid))
        truth = {b: self.own.of(b) for b in kernel.params}
        found = _attempt(lambda: simulate(kernel, blocks, truth))
        if isinstance(found, str):
            return Wrong(a, a.subject, found)
        return self.first(a, [(b, truth[b], found[b], self.exact.of(b)) for b in kernel.writes])

    def emitted(self, kernel: l.Kernel, run: Native) -> Wrong | None:
        """A kernel as machine code and its loops."""
        a = Application(EMIT, EMIT, kernel.name, (kernel,), ())
        truth = {b: self.own.of(b) for b in (*kernel.reads, *kernel.writes)}
        found = _attempt(lambda: run(kernel, self.schedules.get(kernel), truth))
        if isinstance(found, str):
            return Wrong(a, a.subject, found)
        return self.first(a, [(b, truth[b], found[b], self.exact.of(b)) for b in found])

    def kernels(self, program: Any) -> list[l.Kernel]:
        """The loops of what a program is compiled to."""
        if isinstance(program, k.Program):
            return list(self.schedules)
        loops = program.loop if isinstance(program, tile.Program) else program
        return [s for s in loops.steps if isinstance(s, l.Kernel)]

    def first(self, a: Application, values: list[tuple[Any, ...]]) -> Wrong | None:
        """The first buffer whose values (before, after, exact, and after in float64) are beyond rounding."""
        found = ((b, difference(b.type.dtype, *rest)) for b, *rest in values)
        return next((Wrong(a, f"{b.name} ({b.type})", why) for b, why in found if why), None)

    def outcome(self, name: str, results: tuple[Any, ...]) -> Wrong | None:
        """The results of a pass's program are those of the program before it, in order."""
        random = any(getattr(n, "order", 0) for n in topological(self.results))
        for number, (old, new) in enumerate(zip(self.results, results, strict=True)):
            a, b = self.own.of(old), self.own.of(new)
            if (
                not random
                and a is not b
                and (why := difference(new.type.dtype, a, b, self.exact.of(old), self.exact.of(new)))
            ):
                return Wrong(Application(name, "results", str(number), (old,), (new,)), f"result {number}", why)
        self.results = results
        return None


def led_to(a: Application, earlier: Iterable[Application]) -> list[Application]:
    """Those of the applications `earlier` that led to what `a` changes, in order."""
    needed, found = set(a.before), []
    for x in reversed(list(earlier)):
        if needed & set(x.after):
            needed |= set(x.before)
            found.append(x)
    return found[::-1]


def silent(name: str, before: Iterable[Any], after: Iterable[Any], known: Container[Any]) -> list[Application]:
    """What a pass did without recording it: a kernel that is not `known` takes the place of those that wrote the same
    buffers.
    """
    new = [s for s in after if not isinstance(s, l.Call) and s not in known]
    return [Application(name, name, s.name, tuple(x for x in before if {*x.writes} & {*s.writes}), (s,)) for s in new]


def steps_of(program: Any) -> tuple[Any, ...]:
    """The kernels and calls of a program; none above Loop IR."""
    return getattr(program.loop if isinstance(program, tile.Program) else program, "steps", ())


def schedules_of(program: Any) -> dict[Any, Bound]:
    """The schedules and plans of a program, by kernel."""
    if not isinstance(program, tile.Program):
        return {}
    plans = dict(program.plans)
    return {program.loop.steps[n]: (s, plans.get(n)) for n, s in program.schedules}


def _attempt(run: Callable[[], Any]) -> Any:
    """What `run` gives, or why it gives nothing: a wrong rule can make anything fail."""
    try:
        return run()
    except Exception as error:
        return f"cannot be computed: {error if isinstance(error, TerrazzoError) else repr(error)}"
