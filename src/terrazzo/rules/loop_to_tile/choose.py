"""A schedule for every kernel of a program, by a first analytic model. What a user pinned comes first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

from terrazzo.errors import Limitation, UserError, about
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.canonical import canonical, remember, words
from terrazzo.ir.contraction import contraction
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.schedule import Schedule
from terrazzo.ir.sites import product
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop_to_tile.candidate import Candidate
from terrazzo.rules.loop_to_tile.candidates import Pick, candidates
from terrazzo.rules.loop_to_tile.experience import NONE, Experience
from terrazzo.rules.loop_to_tile.pinned import as_pinned, forms, in_two
from terrazzo.rules.loop_to_tile.products import tiles
from terrazzo.rules.tile.complete import Refused, complete
from terrazzo.rules.tile_to_kernel.lower import derived

PASS = "schedule"
RESORTS = ("plain", "share", "alone")
"""The rules of schedules that are last resorts for products: they read both factors from memory for every point. With
one such product a training step took 51 ms, and 2.1 without (H200), where a tile that spills a few bytes is hardly
slower than one that does not. The plainest is one whatever a kernel computes.
"""

NEXT = 2
"""Candidates after the one that is taken that may be built at once where another was lost: each by itself takes up to a
second to compile, and what is like one that spills may spill, too.
"""

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
    judged: dict[l.Kernel, tuple[Candidate, tuple[Event, ...]]] = {}
    for kernel in sorted((s for s in program.steps if isinstance(s, l.Kernel)), key=_compiles_for, reverse=True):
        with about(kernel):
            judged[kernel] = _as_its_form(kernel, gpu, pinned or {}, tried, known)
    for step in program.steps:
        if not isinstance(step, l.Kernel):
            steps.append(step)
            continue
        found, events = judged[step]
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


def _compiles_for(kernel: l.Kernel) -> tuple[int, int]:
    """A number that grows with the time that NVRTC takes for a kernel: products take up to 2 s, and all else a tenth of
    that. What is chosen first is compiled beside the choice of the rest, and who waits at the end waits for the last.
    """
    products = sum(isinstance(r, l.Reduce) and contraction(r) is not None for r in kernel.carried)
    return min(products, 1), len(kernel.terms)


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
    """What the user pinned, unjudged; else the first candidate, by price, that can be derived and is not lost."""
    if kernel.name in pinned:
        done = as_pinned(forms(kernel), pinned, gpu)
        return in_two(done, gpu).after(("pin", kernel, (done[0],)))

    def lost(candidate: Candidate, why: str) -> None:
        *_, rule, reason = candidate.kernels[0]
        log.add(Event(PASS, rule, kernel.name, False, f"{reason}; it lost: {why}"))

    def part(found: Iterator[Candidate]) -> Candidate:
        return _first(found, gpu, pinned, tried.lost, tried)[0]

    taken, why = _first(_ordered(kernel, gpu, pinned, tried, part), gpu, pinned, tried, tried, lost)
    if why:
        what = f"{kernel.name}: no schedule of it fits {gpu.arch}; the plainest does not, for {why}"
        return Refused(Limitation(what))
    return taken


def _first(
    found: Iterator[Candidate],
    gpu: Gpu,
    pinned: Mapping[str, Schedule],
    ask: Callable[[k.Kernel], str],
    tried: Experience,
    lost: Callable[[Candidate, str], None] = lambda candidate, why: None,
) -> tuple[Candidate, str]:
    """The first candidate that can be derived, is not lost, and is no last resort. Else, of those that lost and run all
    the same, one that spills least. Else a last resort, or the last that can be derived: slow is better than nothing.
    Where none can, the last, and why. Where one was lost, those next to the first are heard of: they may be lost, too.
    """
    slow: list[tuple[float, Candidate]] = []
    resorts: list[Candidate] = []
    last: list[Candidate] = []
    for candidate in found:
        if any(x.name in pinned for x, *_ in candidate.kernels):
            return candidate, ""
        made = [derived(x, chosen, gpu) for x, chosen, *_ in candidate.kernels]
        refused = [x.reason for x in made if isinstance(x, Refused)]
        told = {x: why for x in made if isinstance(x, k.Kernel) and (why := ask(x))}
        resort = any(rule in RESORTS and (rule == "plain" or product(x)) for x, _, rule, _ in candidate.kernels)
        why = next(chain(refused, told.values()), "")
        if not why and not resort:
            if slow:
                for kernel in _derived(islice(found, NEXT), gpu):
                    tried.perhaps(kernel)
            return candidate, ""
        if why:
            lost(candidate, why)
        if not refused:
            last = [candidate]
            resorts += [candidate] if not why else []
            slow += [(sum(map(tried.spilled, told)), candidate)] if not resort else []
    bytes_spilled, least = min(slow, key=lambda x: x[0], default=(math.inf, None))
    if least is not None and bytes_spilled < math.inf:
        return _all_the_same(least, "what is left reads memory for every point"), ""
    if resorts:
        return resorts[0], ""
    return (_all_the_same(last[0], "nothing else can be built"), "") if last else (candidate, why)


def _derived(found: Iterable[Candidate], gpu: Gpu) -> Iterator[k.Kernel]:
    """The kernels that can be derived of candidates."""
    made = (derived(x, chosen, gpu) for candidate in found for x, chosen, *_ in candidate.kernels)
    yield from (x for x in made if isinstance(x, k.Kernel))


def _all_the_same(candidate: Candidate, why: str) -> Candidate:
    """A candidate that lost and is taken."""
    (kernel, chosen, rule, reason), *rest = candidate.kernels
    return replace(candidate, kernels=((kernel, chosen, rule, f"{reason}; it runs all the same, for {why}"), *rest))


def _ordered(
    kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule], tried: Experience, part: Pick
) -> Iterator[Candidate]:
    """The candidates: the one that was measured to be the fastest, if there is one, and then as the model has them."""
    if fastest := tried.fastest(kernel):
        for candidate in candidates(kernel, gpu, pinned, part):
            if candidate.text == fastest:
                (first, chosen, rule, reason), *rest = candidate.kernels
                reason += "; of those measured on such a GPU it is the fastest"
                yield replace(candidate, kernels=((first, chosen, rule, reason), *rest))
                break
    yield from candidates(kernel, gpu, pinned, part)
