"""Lowering for the commands that show it: the stages, the events, and every op that no rule covers, at once."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import unified_diff
from typing import Any

from terrazzo.cli.output import code, say, unknown
from terrazzo.cli.request import Request
from terrazzo.cli.subject import Subject
from terrazzo.errors import Limitation, UserError
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.regions import regions
from terrazzo.pipelines import Lowering, dialect, lowering
from terrazzo.progress import working
from terrazzo.rewrite.rule import Event
from terrazzo.rules.torch_to_tensor.library import is_called
from terrazzo.run.cuda import tried


def at(done: Lowering, ir: str) -> Any:
    """The last program that is in this IR; UserError where the input is further down already, or the target never gets
    there.
    """
    if (found := done.at(ir)) is not None:
        return found
    if ir in ("tile", "kernel") and dialect(done.source) in ("torch", "tensor", "loop"):
        raise UserError(f"--ir {ir}: only kernels for a GPU have schedules; name one, such as --target sm_90a")
    raise UserError(f"--ir {ir}: the input is {dialect(done.source)} IR, which is further down")


def lower(subject: Subject, request: Request) -> Lowering:
    """All stages, dumped where that was asked for. Every op that is not supported is named in one Limitation."""
    with working("lowering"):
        done = lowering(subject.program, request.options, tried=tried(request.options))
    if request.options.dump is not None:
        from terrazzo.run import dump

        dump.write(request.options.dump, done, request.options)
    unknown_buffers(done, request.options.materialize)
    for name in (*request.options.frozen, *request.options.updated):
        if name not in (known := [b.name for b in done.loop.inputs]):
            raise UserError(unknown("input", name, known))
    last = done.at("kernel") or done.loop
    named = regions(last.steps, last.results).calls
    calls = [s for s in last.steps if isinstance(s, l.Call) and s not in named]
    refuse([(s.name, s.source) for s in calls if not is_called(s)], request)
    return done


def refuse(calls: Sequence[tuple[str, str]], request: Request) -> None:
    """Raise a Limitation that names every (op, source line) that PyTorch would have to run, unless that is allowed."""
    if not calls or request.allow_fallback:
        return
    places: dict[str, list[str]] = {}
    for name, source in calls:
        places.setdefault(name, []).append(source or "an unknown line")
    lines = [f"    {name} at {', '.join(dict.fromkeys(at))}" for name, at in places.items()]
    count = f"{len(places)} operation{'s have' if len(places) > 1 else ' has'} no kernel here:"
    raise Limitation("\n".join([count, *lines, "With --allow-fallback PyTorch runs what is listed."]))


def unknown_buffers(done: Lowering, materialize: Sequence[str]) -> None:
    """Raise a UserError for a name that no buffer has, since a slip would quietly change nothing."""
    lifted = done.lifted() or done.source
    known = [b.name for step in getattr(lifted, "steps", ()) for b in step.writes]
    for name in materialize:
        if name not in known:
            raise UserError(unknown("buffer", name, known))


def show_events(events: Sequence[Event], verbose: int) -> None:
    """-v: a line per event. -vv: also what changed, between the line and a closing one, so that awk can cut it out."""
    for event in events if verbose else ():
        say(event.line(), "green" if event.fired else "dim")
        if verbose > 1 and event.fired:
            before, after = event.before.splitlines(), event.after.splitlines()
            lines = list(unified_diff(before, after, lineterm=""))[2:]  # without the names of files, as there are none
            if lines:
                code("\n".join(lines), "diff")
            say(f"<<< {event.pass_name}:{event.rule}", "green")


def heading(number: int, step: l.Kernel | l.Call | k.Kernel) -> str:
    """The line above a kernel in the listing."""
    reads = ", ".join(b.name for b in step.reads if b not in step.writes)
    return f"=== {number}: {reads + ' ' if reads else ''}-> {', '.join(dict.fromkeys(b.name for b in step.writes))} ==="


def listing(program: l.Program) -> list[tuple[str, str]]:
    """Every kernel and call as its heading and its text."""
    from textwrap import dedent

    from terrazzo.ir.text import show

    found = []
    for number, step in enumerate(program.steps):
        if isinstance(step, l.Kernel):
            # The buffers' types are in the whole program's text; here the nest is what one looks at.
            text = dedent("\n".join(show(step).splitlines()[1:]))
        else:
            text = call_text(program, step)
        found.append((heading(number, step), text))
    return found


def call_text(program: l.Program, step: l.Call) -> str:
    """An opaque call, as the program's text has it."""
    from terrazzo.ir.text import show

    alone = l.Program(program.name, step.reads, (step,), step.writes)
    return show(alone).splitlines()[2].strip()
