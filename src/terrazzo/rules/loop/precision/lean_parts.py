"""Parts of numbers are stored where that is faster, unless it is hardly so and takes much memory.

Parts of a float32 take 6 bytes beside its own 4, and those of a large weight, of all experts, or of a vocabulary may be
most of what is in use at a time. A factor may be made into parts on its way to the product instead (ADR 016).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from terrazzo.ir.canonical import canonical
from terrazzo.ir.dialects import loop as l
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.memory.lifetimes import in_order, in_use
from terrazzo.rules.loop.memory.remake import RATE

PASS = "parts"
RULE = "lean"
LOSS = 0.03
"""The part of the time of a program that is given for memory at most: no product that was fast is to become slow."""
WORTH = 64 << 20
"""Bytes in use from which on it is asked: below, what is faster is taken."""
SAVED = 0.05
"""The part of what is in use from which on parts are worth it."""

Make = Callable[[Collection[l.Kernel], Log], l.Program]
"""The program in parts, with some of its kernels lean."""
Price = Callable[[Sequence[l.Kernel | l.Call]], float]


def lean_parts(program: l.Program, log: Log, make: Make, price: Price, worth: int = WORTH) -> l.Program:
    """What `make` makes of `program`, with those kernels lean of which the parts are in memory where most is in use, as
    long as the part of memory that this saves is several times the part of the time that it takes.
    """
    kept = _like(log)
    done = make(frozenset(), kept)
    most, alive = _peak(done)
    lean = frozenset[l.Kernel]()
    some = most >= worth and any(_groups(program, done, alive, lean, SAVED * most))
    whole = price(done.steps) if some else 0.0
    left = LOSS * whole
    while some and most >= worth:
        for group in _groups(program, done, alive, lean, SAVED * most):
            told = _like(log)
            tried = make(lean | group, told)
            less, there = _peak(tried)
            more = price(_but(tried, done)) - price(_but(done, tried))
            if more <= left and (most - less) / most > RATE * max(more, 0.0) / whole:
                why = f"{(most - less) / 1e6:.1f} MB less of {most / 1e6:.1f} are in use, {more / 1000:.1f} us more"
                for s in (s for s in program.steps if s in group):
                    log.add(Event(PASS, RULE, s.name, True, f"parts are made on their way: {why}"))
                lean, kept, done, most, alive, left = lean | group, told, tried, less, there, left - more
                break
        else:
            break
    for event in kept.events:
        log.add(event)
    if log.applications is not None:
        log.applications += kept.applications or ()
    return done


def _like(log: Log) -> Log:
    """An empty one, which keeps what a log keeps."""
    return Log(applications=None if log.applications is None else [])


def _peak(program: l.Program) -> tuple[int, set[l.Buffer]]:
    """The most bytes that are in use at a time, and which buffers these are."""
    steps = in_order(program, Log(), PASS).steps
    used = in_use(steps, program.results, inputs=program.inputs)
    most = max(used, default=0)
    at = used.index(most) if used else 0
    before = {b for s in steps[: at + 1] for b in s.writes}
    after = {b for s in steps[at:] for b in (*s.reads, *s.writes)}
    return most, before & after


def _groups(
    program: l.Program, done: l.Program, alive: Collection[l.Buffer], lean: Collection[l.Kernel], least: float
) -> Iterator[frozenset[l.Kernel]]:
    """Kernels that multiply more than the `least` of what is in memory where most is in use and was not there before,
    with all that are like them: those of other layers. First those that read most of it.
    """
    given = {s.name: s for s in program.steps if isinstance(s, l.Kernel) and s not in lean}
    there = {b for s in program.steps for b in s.writes}
    parts = {s: sum(b.type.span for b in s.reads if b in alive and b not in there) for s in done.steps}
    forms = {s: canonical(s).kernel.stores for s in given.values()}
    seen: set[tuple[l.Store, ...]] = set()
    for s in sorted((s for s, size in parts.items() if size > least and s.name in given), key=lambda s: -parts[s]):
        form = forms[given[s.name]]
        if form not in seen:
            seen.add(form)
            yield frozenset(x for x in given.values() if forms[x] == form)


def _but(one: l.Program, other: l.Program) -> list[l.Kernel | l.Call]:
    """The steps of a program that another has not."""
    theirs = set(other.steps)
    return [s for s in one.steps if s not in theirs]
