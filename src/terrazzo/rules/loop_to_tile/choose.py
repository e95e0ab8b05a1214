"""A schedule for every kernel of a program, by a first analytic model. What a user pinned comes first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.errors import Limitation, UserError, about
from terrazzo.hw.gpu import Gpu
from terrazzo.ir import nest as n
from terrazzo.ir.canonical import canonical, remember, words
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.node import topological
from terrazzo.ir.schedule import Schedule
from terrazzo.ir.sites import Product, product
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop_to_tile import boxes, chains, reductions, threads, tiles, warpgroups, windows
from terrazzo.rules.loop_to_tile.apart import products_apart
from terrazzo.rules.loop_to_tile.collapse import collapse, digits_apart, flat_reductions, merge_product_axes
from terrazzo.rules.loop_to_tile.estimate import GATHERED, gathered
from terrazzo.rules.loop_to_tile.few_rows import pinned_frames, share_rows
from terrazzo.rules.loop_to_tile.packed import packed
from terrazzo.rules.loop_to_tile.split import moments, pinned_split, reduced_first, split, split_moments
from terrazzo.rules.loop_to_tile.stored import on_warpgroups, stored
from terrazzo.rules.tile.complete import Refused, complete
from terrazzo.rules.tile_to_kernel.lower import lower

PASS = "schedule"


Show = Callable[[Any], str] | None
Lost = Callable[[k.Kernel], str]
"""Why a kernel could not be built when that was tried; nothing where it could, or was not tried."""


def never(kernel: k.Kernel) -> str:
    """Where nothing was tried, nothing lost."""
    return ""


def schedule(
    program: l.Program,
    gpu: Gpu,
    log: Log,
    pinned: Mapping[str, Schedule] | None = None,
    show: Show = None,
    lost: Lost = never,
) -> tile.Program:
    """Every kernel with a schedule: the user's, or the first of its candidates that can be built as far as is known.
    Kernels may be collapsed to one axis or split over the grid first; both mean the same.
    """
    steps: list[l.Kernel | l.Call] = []
    schedules: list[tuple[int, Schedule]] = []
    known: dict[l.Kernel, tuple[Candidate, tuple[Event, ...], frozenset[str]]] = {}
    for step in program.steps:
        if not isinstance(step, l.Kernel):
            steps.append(step)
            continue
        with about(step):
            found, events = _as_its_form(step, gpu, pinned or {}, lost, known)
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


Chosen = tuple[l.Kernel, Schedule, str, str]
"""A kernel with its schedule, the rule that made it, and why."""
Rewrite = tuple[str, l.Kernel, tuple[l.Kernel, ...]]
"""A rule, the kernel it was applied to, and what took that one's place."""


@dataclass(frozen=True)
class Candidate:
    """What may take the place of a kernel (two kernels after a split), and the rewrites that led there."""

    kernels: tuple[Chosen, ...]
    rewrites: tuple[Rewrite, ...] = ()

    def after(self, *rewrites: Rewrite) -> Candidate:
        """The same where other rewrites came first; those that changed nothing are left out."""
        return Candidate(self.kernels, (*(r for r in rewrites if r[2] != (r[1],)), *self.rewrites))


def _as_its_form(
    kernel: l.Kernel,
    gpu: Gpu,
    pinned: Mapping[str, Schedule],
    lost: Lost,
    known: dict[l.Kernel, tuple[Candidate, tuple[Event, ...], frozenset[str]]],
) -> tuple[Candidate, tuple[Event, ...]]:
    """What is chosen for the canonical form of a kernel, once for all that have it, and for this one by name. A kernel
    is judged by itself where the user pinned a schedule, where names meet, and where there is none, which is told.
    """
    form = canonical(kernel)
    if not any(name.startswith(kernel.name) for name in pinned):
        with suppress(UserError, Limitation):
            if form.kernel not in known:
                found, events = _judged(form.kernel, gpu, {}, lost)
                made = [(x, s, complete(x, s, gpu)[0], lower(x, s, gpu)) for x, s, *_ in found.kernels]
                known[form.kernel] = found, events, words(*made)
            found, events, met = known[form.kernel]
            if not form.clashes(met):
                named = form.named(found)
                for (x, chosen, *_), (old, was, *_) in zip(named.kernels, found.kernels, strict=True):
                    remember(x, replace(form, kernel=old, schedule=was), chosen)
                return named, form.named(events)
    return _judged(kernel, gpu, pinned, lost)


def _judged(
    kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule], lost: Lost
) -> tuple[Candidate, tuple[Event, ...]]:
    """What is chosen, and what there is to say of it and of others."""
    log = Log()
    found = _choose(kernel, gpu, pinned, log, lost)
    for what, why in tiles.unused(kernel, (s for _, s, *_ in found.kernels), gpu):
        log.add(Event(PASS, what, found.kernels[0][0].name, False, why))
    return found, tuple(log.events)


def _choose(kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule], log: Log, lost: Lost) -> Candidate:
    """What the user pinned, unjudged; else the first candidate that is not lost. Where all are, the last that can be
    derived: slow is better than nothing. Limitation where none can.
    """
    if kernel.name in pinned:
        done = _pinned(_forms(kernel), pinned, gpu)
        return _apart(done, gpu).after(("pin", kernel, (done[0],)))
    last: Candidate | None = None
    why = ""
    for candidate in candidates(kernel, gpu, pinned):
        if any(x.name in pinned for x, *_ in candidate.kernels):
            return candidate
        try:
            derived = [lower(x, chosen, gpu) for x, chosen, *_ in candidate.kernels]
        except (UserError, Limitation) as refused:
            why = str(refused)
        else:
            last = candidate
            why = next(filter(None, map(lost, derived)), "")
        if not why:
            return candidate
        *_, rule, reason = candidate.kernels[0]
        log.add(Event(PASS, rule, kernel.name, False, f"{reason}; it lost: {why}"))
    if last is None:
        raise Limitation(f"{kernel.name}: no schedule of it fits {gpu.arch}; the plainest does not, for {why}")
    (kernel, chosen, rule, reason), *rest = last.kernels
    reason = f"{reason}; it runs all the same, for nothing else can be built"
    return Candidate(((kernel, chosen, rule, reason), *rest), last.rewrites)


def candidates(kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule]) -> Iterator[Candidate]:
    """Ways to run a kernel, the best by the model first. The last is the plainest there is: it asks for next to
    nothing, so it can be built whatever the kernel computes.
    """
    yield from (_chained(kernel, way, gpu) for way in chains.ways(kernel, gpu) if isinstance(way, chains.Way))
    apart = digits_apart(kernel)
    if product(kernel) is None and product(apart) is not None:  # an axis of which both factors know a part, as of heads
        yield from (x.after(("digits_apart", kernel, (apart,))) for x in candidates(apart, gpu, pinned))
    if (p := product(kernel)) is not None:
        yield from _boxes(kernel, p, gpu, pinned)
        yield from _padded(kernel, p, gpu, pinned)
        yield from _each(kernel, gpu, pinned)
        yield from _tiles(kernel, p, gpu, pinned)
    if (found := windows.window(kernel, gpu)) is not None:
        first, _ = _copied(found.copies, "a thread reads the filters of points that lie side by side", gpu, pinned)
        done = Candidate((*first, (found.kernel, found.schedule, "window", str(found))))
        rewrite = "copied_along" if found.copies else "collapse"
        yield done.after((rewrite, kernel, (*found.copies, found.kernel)))
    flat = flat_reductions(kernel)
    flattened: Rewrite = ("flat_reductions", kernel, (flat,))
    reduces = [r for r in n.accumulators(flat).values() if isinstance(r, l.Reduce)]
    if not reduces or not any(isinstance(a.extent, int) and a.extent > 1 for r in reduces for a in r.axes):
        points = collapse(flat)
        chosen = threads.pointwise(points, gpu), "points", "every thread computes points of its own"
        yield Candidate(((points, *chosen),)).after(flattened, ("collapse", flat, (points,)))
    else:
        even = reductions.flattened(flat)
        merged: Rewrite = ("merge_axes", flat, (even,))
        for cut in _cut(even, gpu, pinned):
            yield cut.after(flattened, merged)
        for chosen in _shared(even, gpu):
            yield Candidate(((even, *chosen),)).after(flattened, merged)
    plain = threads.plain(flat, gpu), "plain", "a thread computes a point at a time"
    yield Candidate(((flat, *plain),)).after(flattened)


def _boxes(kernel: l.Kernel, p: Product, gpu: Gpu, pinned: Mapping[str, Schedule]) -> Iterator[Candidate]:
    """A product of what is read at moved places, in boxes, where the model says that it is faster than other tiles.
    Operands are copied first, where memory runs otherwise than boxes do.
    """
    *copies, form = packed(kernel) if gpu.warpgroups else (kernel,)
    found, _ = boxes.moved(form)
    if found is None or not (plans := boxes.plans(found, gpu)):
        return
    why = "boxes are brought in along what is summed over, and memory runs otherwise"
    first, before = _copied(copies, why, gpu, pinned)
    others = _best(merge_product_axes(kernel, p.sites), gpu)
    for plan in plans:
        if plan.time + before < others:
            chosen = form, boxes.schedule(found, plan, gpu), "boxes", str(plan)
            yield Candidate((*first, chosen)).after(("packed", kernel, (*copies, form)))


def _copied(
    copies: Sequence[l.Kernel], why: str, gpu: Gpu, pinned: Mapping[str, Schedule]
) -> tuple[list[Chosen], float]:
    """Kernels that copy operands, with their schedules, and the nanoseconds they take."""
    found = [
        _pinned([x], pinned, gpu) if x.name in pinned else (x, threads.pointwise(x, gpu), "points", why) for x in copies
    ]
    return found, sum(boxes.copying(x, gpu) for x in copies)


def _padded(kernel: l.Kernel, p: Product, gpu: Gpu, pinned: Mapping[str, Schedule]) -> Iterator[Candidate]:
    """A product after kernels that store its operands as TMA takes them, where the model says that it is faster than
    other tiles.
    """
    merged = merge_product_axes(kernel, p.sites)
    if not (ways := list(stored(merged, gpu))):
        return
    apart = digits_apart(merged)
    others = min(_gathering(merged, gpu), _best(apart, gpu) if on_warpgroups(apart, gpu) else math.inf)
    found: list[tuple[int, list[Chosen], list[Rewrite], Product, warpgroups.Plan]] = []
    for way in ways:
        why = "TMA brings what lies in memory, in rows that begin at multiples of 16 bytes"
        copies, before = _copied([*way.made, *way.copies], why, gpu, pinned)
        rewrites: list[Rewrite] = [
            ("merge_product_axes", kernel, (merged,)),
            (way.rewrite, merged, (way.base,)),
            ("stored_first", way.base, (*way.made, way.whole)),
            ("padded", way.whole, (*way.copies, way.form)),
        ]
        plans = [x for x in tiles.on_warpgroups(way.product, gpu) if x.time + before < others]
        found += [(warpgroups.alike(x.time + before), copies, rewrites, way.product, x) for x in plans]
    for _, first, rewrites, again, plan in sorted(found, key=lambda x: x[0]):
        for done in _in_pieces(again, plan, gpu, pinned):
            yield Candidate((*first, *done.kernels), done.rewrites).after(*rewrites)


def _each(kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule]) -> Iterator[Candidate]:
    """Several products as kernels of their own, where wider tiles gain more than storing what the first ones sum, and
    reading it again, takes: accumulators of all must fit in registers otherwise.
    """
    apart = products_apart(kernel)
    kinds = [x.stores[0].buffer.type for x in apart[:-1]]
    reading = sum(math.prod(t.static_shape) * t.dtype.size for t in kinds) / gpu.memory  # who writes it, pays for that
    if len(apart) > 1 and sum(_best(_merged(x), gpu) for x in apart) + reading < _best(_merged(kernel), gpu):
        found = [next(candidates(x, gpu, pinned)) for x in apart]
        whole = Candidate(tuple(x for c in found for x in c.kernels), tuple(x for c in found for x in c.rewrites))
        yield whole.after(("products_apart", kernel, apart))


def _merged(kernel: l.Kernel) -> l.Kernel:
    p = product(kernel)
    return merge_product_axes(kernel, p.sites) if p else kernel


def _tiles(kernel: l.Kernel, p: Product, gpu: Gpu, pinned: Mapping[str, Schedule]) -> Iterator[Candidate]:
    """A product in tiles: on the instructions of warpgroups or of warps, by what the model says, then on CUDA cores.

    Axes are merged first, which makes fewer tiles; where that is no tensor TMA knows, digits are axes again.
    """
    merged = merge_product_axes(kernel, p.sites)
    apart = digits_apart(merged)
    merge: Rewrite = ("merge_product_axes", kernel, (merged,))
    part: Rewrite = ("digits_apart", merged, (apart,))
    forms: list[tuple[l.Kernel, tuple[Rewrite, ...]]] = [(merged, (merge,))]
    forms += [(kernel, ())] if merged is not kernel else []
    if not on_warpgroups(merged, gpu) and on_warpgroups(apart, gpu):
        first = 0 if _best(apart, gpu) < _gathering(merged, gpu) else len(forms)
        forms.insert(first, (apart, (merge, part)))
    for form, rewrites in forms:
        again = product(form)
        assert again is not None
        for cores in (False, True) if form is merged else (False,):
            for plan in tiles.plans(again, gpu, cores):
                for found in _in_pieces(again, plan, gpu, pinned):
                    yield found.after(*rewrites)


def _in_pieces(p: Product, plan: tiles.Plan, gpu: Gpu, pinned: Mapping[str, Schedule]) -> Iterator[Candidate]:
    """A product in the tiles of a plan: as one kernel, or as two where blocks share its steps."""
    if plan.pieces == 1:
        yield Candidate((_tiled(p, plan, gpu),))
    else:
        yield from _split(p.kernel, [c.reduce for c in p.sites], plan.pieces, gpu, pinned, plan.unit)


def _best(kernel: l.Kernel, gpu: Gpu) -> float:
    """By the model, the nanoseconds of the best tile of a product that can be derived."""
    if (p := product(kernel)) is None:
        return math.inf
    for plan in tiles.plans(p, gpu):
        if plan.pieces > 1 or not isinstance(complete(kernel, tiles.schedule(p, plan, gpu), gpu)[0], Refused):
            return plan.time
    return math.inf


def _gathering(kernel: l.Kernel, gpu: Gpu) -> float:
    """What the best tile takes, by the model, where each thread of a matrix instruction may divide to know what it
    reads.
    """
    if (p := product(kernel)) is None:
        return math.inf
    divides = GATHERED if gathered(p) else 1.0
    return min((x.time * (divides if x.instruction else 1.0) for x in tiles.plans(p, gpu)), default=math.inf)


def _chained(kernel: l.Kernel, way: chains.Way, gpu: Gpu) -> Candidate:
    """Two products in one loop of steps, as one kernel or as that of states and that which combines them."""
    what = "two products in one loop of steps, with what lies between them in registers"
    rewrites: list[Rewrite] = [("share_rows", kernel, (way.whole,))]
    done: tuple[Chosen, ...] = ((way.kernel, way.schedule, "chain", what),)
    if way.rest is not None:
        rewrites.append(("split_frames", way.whole, (way.kernel, way.rest)))
        done = (
            (way.kernel, way.schedule, "chain", f"{way.pieces} pieces of them over the grid; {what}"),
            (way.rest, reductions.finish(way.rest, gpu), "finish", "states meet in the highest frame, in order"),
        )
    return Candidate(done).after(*rewrites)


def _tiled(p: Product, plan: tiles.Plan, gpu: Gpu) -> Chosen:
    return p.kernel, tiles.schedule(p, plan, gpu), "tile", str(plan)


def _shared(kernel: l.Kernel, gpu: Gpu) -> Iterator[tuple[Schedule, str, str]]:
    """Reductions by threads together; with fewer registers in use, or more for each thread; then by each for itself."""
    together = reductions.reduction(kernel, gpu)
    what = "threads share the reductions of a row, or take columns where memory runs so"
    yield together, "share", what
    fewer = [(replace(together, operands=()), f"{what}, and read again what they need twice")]
    fewer += [
        (replace(reductions.reduction(kernel, gpu, warps), operands=()), f"{what}; {warps} warps at most")
        for warps in (16, 8)
    ]
    tried = [together]
    for other, why in fewer:
        if other not in tried:
            yield other, "share", why
            tried.append(other)
    yield threads.pointwise(kernel, gpu), "alone", "every thread reduces by itself"


def _forms(kernel: l.Kernel) -> list[l.Kernel]:
    """A kernel as it is, and as it is when a schedule is chosen for it."""
    p = product(kernel)
    merged = [merge_product_axes(kernel, p.sites)] if p else []
    return [kernel, *merged, share_rows(kernel), flat_reductions(kernel), collapse(kernel)]


def _pinned(forms: Sequence[l.Kernel], pinned: Mapping[str, Schedule], gpu: Gpu) -> Chosen:
    """The first form of a kernel that its pinned schedule fits; UserError where there is none."""
    chosen = pinned[forms[0].name]
    if chosen.target != gpu.arch:
        with about(*chosen.part()):
            raise UserError(f"the schedule of {chosen.kernel} is one for {chosen.target}, and the target is {gpu.arch}")
    why = []
    for kernel in forms:
        try:
            tile.fit(chosen, kernel)
        except UserError as e:
            why.append(e)
            continue
        return kernel, chosen, "pin", "by the user"
    with about(*why[0].about, *chosen.part()):
        raise UserError(f"the schedule of {chosen.kernel} does not fit it: {why[0]}")


def _apart(done: Chosen, gpu: Gpu) -> Candidate:
    """A kernel as it was pinned: as two, where the schedule binds an axis that is reduced to the grid."""
    kernel, chosen, rule, reason = done
    framed = pinned_frames(kernel, chosen)
    found = framed or pinned_split(kernel, chosen)
    if found is None:
        return Candidate((done,))
    first, bound, second = found
    rest = (second, reductions.finish(second, gpu), "finish", "partial states meet, in order")
    rewrite = "split_frames" if framed else "split"
    return Candidate(((first, bound, rule, reason), rest), ((rewrite, kernel, (first, second)),))


def _split(
    kernel: l.Kernel,
    reduces: list[l.Reduce],
    pieces: int,
    gpu: Gpu,
    pinned: Mapping[str, Schedule],
    unit: int = 1,
) -> Iterator[Candidate]:
    """A kernel of partial states, in each way it can be run, and one that combines them and does the rest."""
    first, second = split(kernel, reduces, pieces, unit)
    rewrites: list[Rewrite] = [("split", kernel, (first, second))]
    rest = _met(second, gpu)
    if product(first) is not None:
        flat = collapse(second) if all(s.free >= frozenset(second.axes) for s in second.stores) else second
        rest = flat, reductions.finish(flat, gpu), "finish", "partial states meet, in order"
        rewrites.append(("collapse", second, (flat,)))
    for part in _parts(first, pieces, gpu, pinned):
        yield Candidate((part, rest)).after(*rewrites)


def _parts(kernel: l.Kernel, pieces: int, gpu: Gpu, pinned: Mapping[str, Schedule]) -> Iterator[Chosen]:
    """The ways to run a kernel of partial states."""
    why = f"{pieces} pieces of a reduction over the grid, since there are few blocks otherwise"
    if kernel.name in pinned:
        part, chosen, _, reason = _pinned([kernel], pinned, gpu)
        yield part, chosen, "split", f"{why}; {reason}"
    elif (p := product(kernel)) is not None:
        for plan in (x for x in tiles.plans(p, gpu) if x.pieces == 1):
            part, chosen, _, reason = _tiled(p, plan, gpu)
            yield part, chosen, "split", f"{why}; {reason}"
    else:
        yield from ((kernel, chosen, "split", f"{why}; {reason}") for chosen, _, reason in _shared(kernel, gpu))


def _cut(kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule]) -> Iterator[Candidate]:
    """Rows divided among blocks, where these are few for what there is to read: reductions in pieces; a sum of squares
    together with the mean it is around; else those that others need in kernels before these. What is computed at the
    points of a row is a kernel of its own then, and where threads cannot divide these points alike, or where it has
    nothing to do with what is reduced.
    """
    _, inner, top = reductions.parts(kernel)
    first = [r for r in top if not any(x in top for x in topological(r.args))]
    both = moments(kernel) is not None
    pieces = reductions.pieces(kernel, gpu, both)
    if len(inner) > 1 or (inner and pieces > 1) or reductions.strangers(kernel):
        yield from _apart_from(kernel, top, gpu, pinned)
    elif pieces > 1 and len(first) == len(top):
        yield from _split(kernel, top, pieces, gpu, pinned, reductions.unit(top))
    elif pieces > 1 and both and (found := split_moments(kernel, pieces)) is not None:
        part, second = found
        for chosen in _parts(part, pieces, gpu, pinned):
            yield Candidate((chosen, _met(second, gpu)), (("split_moments", kernel, (part, second)),))
    elif pieces > 1:
        yield from _apart_from(kernel, first, gpu, pinned)


def _apart_from(
    kernel: l.Kernel, reduces: Sequence[l.Reduce], gpu: Gpu, pinned: Mapping[str, Schedule]
) -> Iterator[Candidate]:
    """Some reductions of a kernel in one before it."""
    *before, after = reduced_first(kernel, reduces)
    if before:
        each = [next(candidates(x, gpu, pinned)) for x in (*before, after)]
        done = Candidate(tuple(x for c in each for x in c.kernels), tuple(x for c in each for x in c.rewrites))
        yield done.after(("reduced_first", kernel, (*before, after)))


def _met(kernel: l.Kernel, gpu: Gpu) -> Chosen:
    """What brings partial states together."""
    return kernel, reductions.reduction(kernel, gpu), "finish", "partial states meet, in order"
