"""A schedule for every kernel of a program, by a first analytic model. What a user pinned comes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from terrazzo.errors import Limitation, UserError, about
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.canonical import canonical, remember, words
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.schedule import Schedule
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop_to_tile import tiles
from terrazzo.rules.loop_to_tile.candidate import Candidate
from terrazzo.rules.loop_to_tile.candidates import candidates
from terrazzo.rules.loop_to_tile.experience import NONE, Experience
from terrazzo.rules.loop_to_tile.pinned import as_pinned, forms, in_two
from terrazzo.rules.tile.complete import Refused, complete
from terrazzo.rules.tile_to_kernel.lower import derived

PASS = "schedule"

Show = Callable[[Any], str] | None
Known = tuple[Candidate | Refused, tuple[Event, ...], frozenset[str]]
"""What is chosen for a kernel, what there is to say of it, and every word of that."""


def schedule(
    program: l.Program,
    gpu: Gpu,
    log: Log,
    pinned: Mapping[str, Schedule] | None = None,
    show: Show = None,
    tried: Experience = NONE,
) -> tile.Program:
    """Every kernel with a schedule: the user's, or the first of its candidates that can be built as far as is known.
    Kernels may be collapsed to one axis or split over the grid first; both mean the same.
    """
    steps: list[l.Kernel | l.Call] = []
    schedules: list[tuple[int, Schedule]] = []
    known: dict[l.Kernel, Known] = {}
    for step in program.steps:
        if not isinstance(step, l.Kernel):
            steps.append(step)
            continue
        with about(step):
            found, events = _as_its_form(step, gpu, pinned or {}, tried, known)
        for event in events:
            log.add(event)
        for rewrite, old, new in found.rewrites:
            log.applied(PASS, rewrite, old.name, [old], new)
        for kernel, chosen, rule, reason in found.kernels:
            texts = ("\n".join(map(show, [step])), f"{show(kernel)}\n{chosen}") if show else ("", "")
            log.add(Event(PASS, rule, kernel.name, True, reason, *texts))
            schedules.append((len(steps), chosen))
            steps.append(kernel)
    if strange := set(pinned or {}) - {x.name for x in steps if isinstance(x, l.Kernel)}:
        names = ", ".join(x.name for x in steps if isinstance(x, l.Kernel))
        with about(*(pinned or {})[min(strange)].part()):
            raise UserError(f"there is no kernel {min(strange)} to pin a schedule to; there are {names}")
    return tile.Program(l.Program(program.name, program.inputs, tuple(steps), program.results), tuple(schedules))


def _as_its_form(
    kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule], tried: Experience, known: dict[l.Kernel, Known]
) -> tuple[Candidate, tuple[Event, ...]]:
    """What is chosen for the canonical form of a kernel, once for all that have it, and for this one by name. A kernel
    is judged by itself where the user pinned a schedule, where names meet, and where there is none, which is told.
    """
    form = canonical(kernel)
    if not any(name.startswith(kernel.name) for name in pinned):
        if form.kernel not in known:
            find = partial(_known, form.kernel, gpu)
            known[form.kernel] = tried.once(("schedule", form.kernel), find)
        found, events, met = known[form.kernel]
        if isinstance(found, Candidate) and not form.clashes(met):
            named = form.named(found)
            for (x, chosen, *_), (old, was, *_) in zip(named.kernels, found.kernels, strict=True):
                remember(x, replace(form, kernel=old, schedule=was), chosen)
            return named, form.named(events)
    found, events = _judged(kernel, gpu, pinned, tried)
    if isinstance(found, Refused):
        raise found.error
    return found, events


def _known(kernel: l.Kernel, gpu: Gpu, tried: Experience) -> Known:
    """What is chosen for a canonical form, and every word of it and of what is made of it."""
    found, events = _judged(kernel, gpu, {}, tried)
    if isinstance(found, Refused):
        return found, events, frozenset()
    made = [(x, s, complete(x, s, gpu)[0], derived(x, s, gpu)) for x, s, *_ in found.kernels]
    return found, events, words(*made)


def _judged(
    kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule], tried: Experience
) -> tuple[Candidate | Refused, tuple[Event, ...]]:
    """What is chosen, and what there is to say of it and of others."""
    log = Log()
    found = _choose(kernel, gpu, pinned, log, tried)
    if isinstance(found, Candidate):
        for what, why in tiles.unused(kernel, (s for _, s, *_ in found.kernels), gpu):
            log.add(Event(PASS, what, found.kernels[0][0].name, False, why))
    return found, tuple(log.events)


def _choose(
    kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule], log: Log, tried: Experience
) -> Candidate | Refused:
    """What the user pinned, unjudged; else the first candidate, by price, that can be derived and is not lost. Where
    all are lost, the last that can be derived: slow is better than nothing.
    """
    if kernel.name in pinned:
        done = as_pinned(forms(kernel), pinned, gpu)
        return in_two(done, gpu).after(("pin", kernel, (done[0],)))
    last: Candidate | None = None
    why = ""
    for candidate in _ordered(kernel, gpu, pinned, tried):
        if any(x.name in pinned for x, *_ in candidate.kernels):
            return candidate
        made = [derived(x, chosen, gpu) for x, chosen, *_ in candidate.kernels]
        refused = [x.reason for x in made if isinstance(x, Refused)]
        last = last if refused else candidate
        why = next(chain(refused, filter(None, (tried(x) for x in made if isinstance(x, k.Kernel)))), "")
        if not why:
            return candidate
        *_, rule, reason = candidate.kernels[0]
        log.add(Event(PASS, rule, kernel.name, False, f"{reason}; it lost: {why}"))
    if last is None:
        what = f"{kernel.name}: no schedule of it fits {gpu.arch}; the plainest does not, for {why}"
        return Refused(Limitation(what))
    (kernel, chosen, rule, reason), *rest = last.kernels
    reason = f"{reason}; it runs all the same, for nothing else can be built"
    return Candidate(((kernel, chosen, rule, reason), *rest), last.rewrites)


def _ordered(kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule], tried: Experience) -> Iterator[Candidate]:
    """The candidates: the one that was measured to be the fastest, if there is one, and then as the model has them."""
    if fastest := tried.fastest(kernel):
        for candidate in candidates(kernel, gpu, pinned):
            if candidate.text == fastest:
                (first, chosen, rule, reason), *rest = candidate.kernels
                reason += "; of those measured on such a GPU it is the fastest"
                yield replace(candidate, kernels=((first, chosen, rule, reason), *rest))
                break
    yield from candidates(kernel, gpu, pinned)
