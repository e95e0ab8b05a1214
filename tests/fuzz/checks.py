"""What must hold of a random program, schedule or text. Each check says how it went in a word or two, or raises
`Found`.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from terrazzo.errors import Limitation, UserError
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.interp.torch import call_numpy
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.parse_plan import parse_plan
from terrazzo.ir.parse_schedule import parse_schedules
from terrazzo.ir.program import Program
from terrazzo.ir.schedule import Schedule
from terrazzo.ir.text import parse, show
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.tile.complete import complete
from terrazzo.rules.tile_to_kernel.lower import program as of_plans
from terrazzo.targets.cuda.emit import emit
from tests.fuzz.hostile import Crashed, victim
from tests.fuzz.judge import Judge
from tests.fuzz.schedules import Term
from tests.harness import random_inputs
from tests.mutants.kernels import subject, tiled
from tests.mutants.run import killed

SECONDS = 60
"""How long one example may take; whatever takes longer hangs."""
STEPS = 50_000
"""How many statements the simulator may be asked to run for a schedule, all threads of some blocks at once."""
STAGES = ("tensor", "loop", "tile", "kernel")


class Found(AssertionError):
    """A bug, with the text that shows it."""


class Hang(Exception):
    """Something took longer than `SECONDS`."""


def program(p: Program, target: str, fuse: bool) -> str:
    """Kernels of a program mean what it means; every stage of it prints and reads back; CUDA can be written."""

    def check() -> str:
        try:
            found = lowering(p, Options(target=target, fuse=fuse))
        except Limitation as why:
            return f"limitation: {_kind(why)}"
        kernels = found.at("kernel")
        inputs = random_inputs(p.inputs)
        _right(Judge(p, inputs).problem(simulator.run(kernels, inputs, call=call_numpy)))
        for ir in STAGES:
            _reads_back(found.at(ir))
        for step in kernels.steps:
            if not isinstance(step, l.Call):
                emit(step)
        return "right"

    return _finding(check, lambda: f"# {target}, {'fused' if fuse else 'not fused'}\n{show(p)}")


def schedule(term: Term, s: Schedule) -> str:
    """A schedule reads back, and is refused with a reason, or gives the right results."""

    def check() -> str:
        if parse_schedules(str(s)) != [s]:
            raise Found("the schedule does not read back")
        try:
            kernels = lowering(term.program, Options(target=s.target, schedules=(str(s),))).at("kernel")
        except (UserError, Limitation) as why:
            return f"refused: {_kind(why)}"
        if sum(map(_steps, kernels.steps)) > STEPS:
            return "too long to simulate"
        _right(_judge(term).problem(simulator.run(kernels, term.inputs, call=call_numpy)))
        return "right"

    return _finding(check, lambda: f"{show(term.program)}{show(term.kernel)}\n{s}\n")


def plan(term: Term, s: Schedule, source: str) -> str:
    """An edited plan is refused with the line that is wrong, or gives the right results. Where there is nothing wrong
    with it, but with its schedule, that is told, with what is wrong there.
    """

    def check() -> str:
        try:
            if complete(term.kernel, s, gpu(s.target))[0] == parse_plan(source):
                return "nothing changed"
        except UserError as why:
            return f"refused: {_kind(why)}"
        try:
            kernels = lowering(term.program, Options(target=s.target, schedules=(f"{s}\n{source}",))).at("kernel")
        except (UserError, Limitation) as why:
            fits = not str(why).startswith(f"the schedule of {s.kernel} does not fit")
            if fits and not re.search(r"line \d+", str(why)):
                raise Found(f"it is refused, and no line named: {why}") from why
            return f"refused: {_kind(why)}"
        if sum(map(_steps, kernels.steps)) > STEPS:
            return "too long to simulate"
        _right(_judge(term).problem(simulator.run(kernels, term.inputs, call=call_numpy)))
        return "right"

    return _finding(check, lambda: f"{show(term.program)}{show(term.kernel)}\n{s}\n{source}")


def arrangement(name: str, source: str) -> str:
    """The edited plan of a pinned kernel is refused with the line that is wrong, or gives the same results in every
    order.
    """
    program, of = tiled(name), subject(name)
    ((number, given),) = program.plans

    def check() -> str:
        try:
            edited = parse_plan(source)
            kernels = of_plans(replace(program, plans=((number, edited),)), of.gpu)
        except (UserError, Limitation) as why:
            if not re.search(r"line \d+", str(why)):
                raise Found(f"it is refused, and no line named: {why}") from why
            return f"refused: {_kind(why)}"
        if edited == given:
            return "nothing changed"
        by, told = killed(of, kernels)
        _right(f"{by}: {told}" if by else "")
        return "right"

    return _finding(check, lambda: f"{show(replace(program, plans=()))}\n{source}")


def text(source: str) -> str:
    """A text is refused by a UserError, or means a program, whose text reads back as the same."""

    def check() -> str:
        schedules = source.startswith("with schedule")
        try:
            found: Any = parse_schedules(source) if schedules else parse(source)
        except UserError:
            return "refused"
        try:
            if schedules:
                same = parse_schedules("\n".join(map(str, found))) == found
            else:
                same = show(parse(show(found))) == show(found)
        except UserError as why:
            raise Found(f"what was read does not read back: {why}") from why
        if not same:
            raise Found("what was read reads back as something else")
        return "read"

    return _finding(check, lambda: source)


COMMANDS = {
    "torch": (["run", "--allow-fallback"], ["check"]),
    "tensor": (["run", "--allow-fallback"], ["check"]),
    "loop": (["run", "--allow-fallback"], ["check"]),
    "tile": (["run", "--allow-fallback"], ["check"], ["compile", "--ir", "kernel", "--target", "sm_90a"]),
    "kernel": (["run", "--interpret", "--target", "sm_90a"], ["check", "--target", "sm_90a"]),
}
"""What is tried on a text of an IR, besides `opt` and `sim`."""
NOWHERE = ("not enough memory",)
"""What a text may be refused for, and in which no line is at fault: the text is right, and this machine has too little
memory for all of it together.
"""
PLACE = r"line [1-9]\d*, column [1-9]\d*: "


def hostile(source: str) -> str:
    """Every command refuses a text, saying where, or runs it: in a process that dies where memory or files of others
    are touched.
    """
    ir = next((ir for ir in COMMANDS if f"@{ir}" in source), "loop")
    commands = [[*words, "--from", ir, "FILE"] for words in COMMANDS[ir]] + [["opt", "FILE"]]
    commands += [["sim", "FILE"]] if ir == "kernel" else []
    try:
        answers = victim().run(source, commands)
    except Crashed as why:
        raise Found(f"{why}\n\n{source}") from why
    for (code, said), words in zip(answers, commands, strict=False):
        if code not in (0, 1, 2, 3, 124):
            raise Found(f"{words[0]} ended with {code}: {said}\n\n{source}")
        if code == 1 and words[0] not in (("sim", "check") if ir == "kernel" else ()):  # where the simulator refuses it
            raise Found(f"{words[0]} says it is wrong: {said}\n\n{source}")
        if code in (1, 2, 3) and not re.search(PLACE, said) and not re.search("|".join(NOWHERE), said):
            raise Found(f"{words[0]} does not say where: {said}\n\n{source}")
    codes = [code for code, _ in answers]
    return f"{ir}: " + ("too long" if 124 in codes else "refused" if any(c in (2, 3) for c in codes) else "ran")


def _finding(check: Callable[[], str], shown: Callable[[], str]) -> str:
    try:
        with _limit():
            return check()
    except Exception as why:
        raise Found(f"{type(why).__name__}: {why}\n\n{shown()}") from why


@contextmanager
def _limit() -> Iterator[None]:
    """Raise Hang where the body does not end in time (where a signal can say so)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise Hang(f"not done after {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _steps(step: Any) -> int:
    """About how many statements of a kernel are simulated, one after the other."""

    def count(body: Any) -> int:
        return sum(
            (x.most if isinstance(x, k.For) else 1) * count(x.body) if isinstance(x, k.For | k.If) else 1 for x in body
        )

    return count(step.body) * (step.grid * step.threads // (1 << 14) + 1) if isinstance(step, k.Kernel) else 1


def _right(problem: str) -> None:
    if problem:
        raise Found(problem)


def _reads_back(p: Any) -> None:
    text = show(p)
    again = parse(text)
    same = again.results == p.results and again.inputs == p.inputs if isinstance(p, Program) else again == p
    if not same or show(again) != text:
        raise Found(f"a stage does not read back:\n{text}")


@cache
def _judge(term: Term) -> Judge:
    return Judge(term.program, term.inputs)


def _kind(why: Exception) -> str:
    """A message without its names and numbers, so that the like can be counted."""
    return re.sub(r"\w*\d\w*", "#", str(why))[:90]
