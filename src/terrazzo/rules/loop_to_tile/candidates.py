"""Ways to run a kernel, the best by the model first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from terrazzo.hw.gpu import Gpu
from terrazzo.ir import nest as n
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import topological
from terrazzo.ir.schedule import Like, Schedule
from terrazzo.ir.sites import Product, product
from terrazzo.rules.loop.attention.frames import in_frames
from terrazzo.rules.loop_to_tile.candidate import Candidate, Chosen, Rewrite, joined
from terrazzo.rules.loop_to_tile.chains import chains
from terrazzo.rules.loop_to_tile.estimate import estimate, expected, in_one_piece, least
from terrazzo.rules.loop_to_tile.products import taps
from terrazzo.rules.loop_to_tile.products.apart import factor_apart, products_apart, results_apart, stores_apart
from terrazzo.rules.loop_to_tile.products.forms import Form, for_warpgroups, merged
from terrazzo.rules.loop_to_tile.products.product_candidates import (
    after,
    after_stores,
    best,
    boxed,
    by_taps,
    copied,
    in_boxes,
    in_shares,
    in_tiles,
    shared,
)
from terrazzo.rules.loop_to_tile.products.results import results
from terrazzo.rules.loop_to_tile.products.unpacked import digits_summed
from terrazzo.rules.loop_to_tile.products.written_out import written_out
from terrazzo.rules.loop_to_tile.reductions import (
    cuts,
    mixed,
    reduced,
    reductions,
    rows,
    scans,
    scans_in_pieces,
    under_taps,
)
from terrazzo.rules.loop_to_tile.reductions.pieces import added_up, alone, in_pieces, meeting, partial_states, together
from terrazzo.rules.loop_to_tile.reductions.split import moments, reduced_first, split_moments
from terrazzo.rules.loop_to_tile.walked import threads, windows
from terrazzo.rules.loop_to_tile.walked.collapse import collapse, digits_apart, flat_reductions
from terrazzo.rules.loop_to_tile.walked.crossed import copying, crossed, points
from terrazzo.rules.loop_to_tile.walked.threads import SECTOR, size_of, step
from terrazzo.rules.loop_to_tile.walked.window_forms import multiplied_by_threads
from terrazzo.rules.loop_to_tile.walked.windows_of_windows import windows_of_windows

FILLED = 0.7
"""How much of the time of its tiles a product may take whose results are written out instead: by what is moved and
computed alone, while tiles are priced with all they wait for.
"""
Pick = Callable[[Iterator[Candidate]], Candidate]
"""Which of its candidates a kernel runs as that is one of several in the place of another."""


def candidates(kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule], pick: Pick = next) -> Iterator[Candidate]:
    """Ways to run a kernel, the best by the model first. The last is the plainest there is: it asks for next to
    nothing, so it can be built whatever the kernel computes.
    """
    yield from _chains(kernel, gpu, pinned, pick)
    yield from (_reduced(kernel, way, gpu) for way in reduced.ways(kernel, gpu))
    yield from _under_taps(kernel, gpu, pinned)
    apart = digits_apart(kernel)
    if product(kernel) is None and (product(apart) is not None or _columns_are_digits(kernel, apart)):
        # an axis of which both factors know a part, as of heads; or which memory runs along in part
        yield from (x.after(("digits_apart", kernel, (apart,))) for x in candidates(apart, gpu, pinned, pick))
    if (p := product(kernel)) is not None:
        sums = [c.reduce for c in p.sites]
        if not frozenset(a for a in kernel.axes if size_of(a) > 1) <= frozenset().union(*(r.free for r in sums)):
            # tiles would compute them again at points of other axes
            yield from _apart_from(kernel, sums, gpu, pinned, pick)
        if multiplied_by_threads(kernel):
            found = windows.window(kernel, gpu)
            if found is not None and found.time < _anyhow(kernel, gpu):
                yield from _windows(kernel, gpu, pinned)
        yield from _written_out(kernel, p, gpu, pinned, pick)
        yield from _across(kernel, p, gpu, pinned, pick)
        yield from _results(kernel, gpu, pinned, pick)
        yield from _each(kernel, gpu, pinned, pick)
        yield from by_taps(kernel, p, gpu, pinned)
        yield from in_boxes(kernel, p, gpu, pinned)
        yield from in_shares(kernel, p, gpu)
        yield from after_stores(kernel, p, gpu, pinned)
        yield from by_taps(kernel, p, gpu, pinned, later=True)
        yield from in_tiles(kernel, p, gpu, pinned)
    flat = flat_reductions(kernel)
    yield from _alike(flat, kernel, gpu, pinned, pick)
    if reductions.held(rows.flattened(flat), gpu) is None:
        yield from _windows_of_windows(kernel, gpu, pinned, pick)
        yield from _sums_of_windows(kernel, gpu, pinned, pick)
        yield from _windows(kernel, gpu, pinned)
    if again := cuts.again(kernel, gpu):
        yield from _apart_from(kernel, again, gpu, pinned, pick)
    flattened: Rewrite = ("flat_reductions", kernel, (flat,))
    reduces = [r for r in n.accumulators(flat).values() if isinstance(r, l.Reduce)]
    if not reduces or not any(isinstance(a.extent, int) and a.extent > 1 for r in reduces for a in r.axes):
        if (sharing := scans.shared(flat, gpu)) is not None:
            whole, bound, what = sharing
            yield from (x.after(flattened) for x in _scans_in_pieces(flat, gpu, pinned, pick))
            yield Candidate(((whole, bound, "scan", what),)).after(flattened, ("merge_axes", flat, (whole,)))
        yield from (x.after(flattened) for x in _stores_apart(flat, gpu, pinned, pick))
        form, own, why, rewrite = points(flat, gpu)
        yield Candidate(((form, own, "points", why),)).after(flattened, (rewrite, flat, (form,)))
        yield from (x.after(flattened) for x in _narrower(flat, own, gpu))
    else:
        if product(kernel) is None:
            yield from _unpacked(kernel, gpu, pinned, pick)
        if before := scans.reduced_before(flat):
            yield from (x.after(flattened) for x in _apart_from(flat, before, gpu, pinned, pick))
        even = rows.flattened(flat)
        evened: Rewrite = ("merge_axes", flat, (even,))
        if (framed := in_frames(even)) is not even and _walked(even, gpu):
            once: Rewrite = ("in_frames", even, (framed,))
            yield from (x.after(flattened, evened, once) for x in candidates(framed, gpu, pinned, pick))
        for cut in _cut(even, gpu, pinned, pick):
            yield cut.after(flattened, evened)
        for chosen in together(even, gpu):
            yield Candidate(((even, *chosen),)).after(flattened, evened)
        _, inner, top = rows.parts(even)
        for apart_from in _apart_from(even, top, gpu, pinned, pick) if inner else ():
            yield apart_from.after(flattened, evened)  # alone, each point inside a row would reduce all of it
        yield Candidate((alone(even, gpu),)).after(flattened, evened)
    plain = threads.plain(flat, gpu), "plain", "a thread computes a point at a time"
    yield Candidate(((flat, *plain),)).after(flattened)


def _scans_in_pieces(flat: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule], pick: Pick) -> Iterator[Candidate]:
    """Scans of rows that are few and long, in pieces over the grid, where that is faster by the model."""
    known = [(expected(parts, gpu), name, parts) for name, parts in scans_in_pieces.ways(flat, gpu).items()]
    time, name, parts = min(known, key=lambda x: x[0], default=(math.inf, "", ()))
    if time < in_one_piece(flat, gpu):
        done = joined(pick(candidates(x, gpu, pinned, pick)) for x in parts)
        yield done.after((name, flat, parts))


def _alike(
    flat: l.Kernel, kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule], pick: Pick
) -> Iterator[Candidate]:
    """Reductions after copies of images that lie in another order than most of what they read."""
    *copies, rest = mixed.lie_alike(flat)
    if copies and mixed.worth(flat, copies, gpu):
        first, _ = copied(copies, "what is reduced with others lies as they do", gpu, pinned)
        done = joined((first, pick(candidates(rest, gpu, pinned, pick))))
        yield done.after(("flat_reductions", kernel, (flat,)), ("lie_alike", flat, (*copies, rest)))


def _windows(kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule]) -> Iterator[Candidate]:
    """Windows, of which a thread computes several points together."""
    if (found := windows.window(kernel, gpu)) is not None:
        yield _windowed(kernel, found, gpu, pinned)


def _windowed(kernel: l.Kernel, found: windows.Window, gpu: Gpu, pinned: Mapping[str, Schedule]) -> Candidate:
    """A kernel whose windows were found, after copies of what lies otherwise."""
    first, _ = copied(found.copies, "what points side by side read lies side by side", gpu, pinned)
    done = joined((first, Candidate(((found.kernel, found.schedule, "window", str(found)),))))
    return done.after(("copied_along" if found.copies else "collapse", kernel, (*found.copies, found.kernel)))


def _under_taps(kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule]) -> Iterator[Candidate]:
    """A sum over images under taps in pieces, of which a thread takes several taps, where the model says that this is
    faster than a product for each tap, or than threads that share the sum of each.
    """
    if math.isinf(busy := under_taps.least(kernel, gpu)):
        return
    if (p := product(kernel)) is not None:
        others = min(_anyhow(kernel, gpu), after(kernel, p, gpu, divided=True), _beside_each_other(kernel, p, gpu))
    else:
        others = estimate(kernel, gpu).time
    for way in under_taps.ways(kernel, gpu) if busy < others else ():
        if way.time < others:
            part, rest = way.kernels
            done = joined((_windowed(part, way.window, gpu, pinned), added_up(rest, gpu)))
            yield done.after(("in_pieces_of_images", kernel, way.kernels))


def _windows_of_windows(kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule], pick: Pick) -> Iterator[Candidate]:
    """Windows along one axis first and then along another, where that is faster by the model."""
    parts = windows_of_windows(kernel)
    if len(parts) > 1 and expected(parts, gpu) < expected([kernel], gpu):
        done = joined(pick(candidates(x, gpu, pinned, pick)) for x in parts)
        yield done.after(("windows_of_windows", kernel, parts))


def _sums_of_windows(kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule], pick: Pick) -> Iterator[Candidate]:
    """Short sums that many points share, in a kernel before these: beside them lanes may lie along memory, of which
    each would go through a row of its own otherwise.
    """
    some = [r for r in kernel.carried if isinstance(r, l.Reduce) and r.free < {*kernel.axes}]
    if not some or len(some) < len(kernel.carried) or (found := windows.window(kernel, gpu)) is None:
        return
    *before, rest = reduced_first(kernel, some)
    if before and not rest.carried and expected(before, gpu) + threads.walked(collapse(rest), gpu) < found.time:
        yield from _apart_from(kernel, some, gpu, pinned, pick)


def _soonest(kernel: l.Kernel, p: Product, gpu: Gpu) -> float:
    """Nanoseconds of the best tiles of a product, whose operands may be stored first, by the model."""
    return min(_best(kernel, gpu), after(kernel, p, gpu))


def _columns_are_digits(kernel: l.Kernel, apart: l.Kernel) -> bool:
    """Whether memory runs along a digit of an axis of rows, as along channels among which pixels were shuffled."""
    return apart is not kernel and rows.column(kernel) is None and rows.column(apart) is not None


def _stores_apart(kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule], pick: Pick) -> Iterator[Candidate]:
    """What is stored at points of different axes in kernels of their own, where lanes lie along memory in each then,
    and that gains more than launches take and what is read again.
    """
    apart = stores_apart(kernel)
    static = all(isinstance(a.extent, int) for a in kernel.axes)
    if len(apart) > 1 and static and _gain_apart(kernel, apart, gpu):
        whole = joined(pick(candidates(x, gpu, pinned, pick)) for x in apart)
        yield whole.after(("stores_apart", kernel, apart))


def _gain_apart(kernel: l.Kernel, apart: Sequence[l.Kernel], gpu: Gpu) -> bool:
    """Whether stores in kernels of their own take less than together, where threads walk all points, or where one of
    these reads along another axis than it writes.
    """
    if sum(threads.walked(collapse(x), gpu) for x in apart) < threads.walked(kernel, gpu):
        return True
    return any(crossed(x, gpu) for x in apart) and sum(copying(x, gpu) for x in apart) < copying(kernel, gpu)


def _narrower(kernel: l.Kernel, widest: Schedule, gpu: Gpu) -> Iterator[Candidate]:
    """Points in shorter vectors: those of a long term with many results may not fit into a thread's registers."""
    form = collapse(kernel)
    tried = [widest]
    for most in (4, 2, 1):
        own = threads.pointwise(form, gpu, most)
        if own not in tried:
            tried.append(own)
            done = Candidate(((form, own, "points", f"every thread computes {most} of its own at a time"),))
            yield done.after(("collapse", kernel, (form,)))


def _chains(kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule], pick: Pick) -> Iterator[Candidate]:
    """Two products in one loop of steps; where no way to do that can be built, one after the other."""
    found = False
    for way in chains.ways(kernel, gpu):
        if isinstance(way, chains.Way):
            found = True
            yield _chained(kernel, way, gpu)
    if found and len(apart := factor_apart(kernel)) > 1:
        whole = joined(pick(candidates(x, gpu, pinned, pick)) for x in apart)
        yield whole.after(("factor_apart", kernel, apart))


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


def _reduced(kernel: l.Kernel, way: reduced.Way, gpu: Gpu) -> Candidate:
    """A product whose results are reduced along its columns: the states of tiles, and what brings them together."""
    part = way.part, way.schedule, "reduced", f"each tile's columns are reduced where they are summed; {way.plan}"
    apart: Rewrite = ("digits_apart", kernel, (way.whole,))
    if way.rest is None:
        return Candidate((part,)).after(apart)
    rest = way.rest, reductions.finish(way.rest, gpu), "finish", "states of tiles meet, in order"
    return Candidate((part, rest)).after(apart, ("split", way.whole, (way.part, way.rest)))


def _each(kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule], pick: Pick) -> Iterator[Candidate]:
    """Several products as kernels of their own, where wider tiles, or boxes of images of which one has only those of a
    single one, gain more than storing what the first ones sum, and reading it again, takes: accumulators of all must
    fit in registers otherwise.
    """
    apart = products_apart(kernel)
    kinds = [b.type for x in apart for b in x.writes if b not in kernel.writes]
    reading = sum(math.prod(t.static_shape) * t.dtype.size for t in kinds) / gpu.memory  # who writes it, pays for that
    if len(apart) == 1:
        return
    if sum(_expected(x, gpu) for x in apart) + reading < _anyhow(kernel, gpu):
        whole = joined(pick(candidates(x, gpu, pinned, pick)) for x in apart)
        yield whole.after(("products_apart", kernel, apart))


DEAR = 16.0
"""Operations of a result from which on computing it apart from its sum may be faster; what it reads counts as many as
take as long.
"""
SURE = 0.96
"""How much of the time may be left where what is fused is computed apart. By the model SwiGLU of 2048 x 4096 x 14336
takes 0.97 so, and took 0.98 where Inductor did that; its gradient takes 0.955, and took 814 us fused, where the model
says 482 (H200).
"""


def _results(kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule], pick: Pick) -> Iterator[Candidate]:
    """A product that stores its sums, and its results in a kernel of their own: few warps multiply, and take longer for
    what is dear than many would.
    """
    apart, rest = results_apart(kernel), _rest(kernel, gpu)
    if math.isinf(rest) or not all(rest + least(apart[0], gpu) < SURE * time for time in _times(kernel, gpu)):
        return  # which is found sooner than what the sums take
    if rest + _anyhow(apart[0], gpu) < SURE * _anyhow(kernel, gpu):
        whole = joined(pick(candidates(x, gpu, pinned, pick)) for x in apart)
        yield whole.after(("results_apart", kernel, apart))


def _written_out(
    kernel: l.Kernel, p: Product, gpu: Gpu, pinned: Mapping[str, Schedule], pick: Pick
) -> Iterator[Candidate]:
    """A product of few results as sums beside each other, which all threads share."""
    if math.isfinite(_beside_each_other(kernel, p, gpu)):
        made = written_out(kernel)
        whole = joined(pick(candidates(x, gpu, pinned, pick)) for x in made)
        yield whole.after(("written_out", kernel, made))


def _beside_each_other(kernel: l.Kernel, p: Product, gpu: Gpu) -> float:
    """Nanoseconds of a product so, by the model; infinity where it is not faster than tiles."""
    made = written_out(kernel)
    time = sum(estimate(x, gpu).time for x in made) if len(made) > 1 else math.inf
    return time if time < math.inf and time < FILLED * _soonest(kernel, p, gpu) else math.inf


def _across(kernel: l.Kernel, p: Product, gpu: Gpu, pinned: Mapping[str, Schedule], pick: Pick) -> Iterator[Candidate]:
    """A product whose results lie along an axis of its batch, where each would be alone in a sector: its sums are
    stored tile by tile, and a kernel of its own turns them, whose lanes lie along both.
    """
    stores = [l.Load(s.buffer, s.index) for s in kernel.stores]
    batch = [a for a in p.batch if all((a in x.free) == (a in y.free) for x, y in map(p.factors, p.sites))]
    if gpu.warpgroups is None or not any(size_of(a) > 1 and all(step(s, a) == 1 for s in stores) for a in batch):
        return
    points, size = math.prod(map(size_of, kernel.axes)), max(s.dtype.size for s in stores)
    if any(0 < (step(s, a) or SECTOR) * size < SECTOR for s in stores for a in kernel.axes if a not in batch):
        return  # they are in one sector with others
    turning = 2 * points * size / gpu.memory + gpu.launch
    apart = results_apart(kernel, p.batch)
    if len(apart) > 1 and turning < points * (SECTOR - size) / gpu.cache:
        whole = joined(pick(candidates(x, gpu, pinned, pick)) for x in apart)
        yield whole.after(("results_apart", kernel, apart))


def _anyhow(kernel: l.Kernel, gpu: Gpu) -> float:
    """Nanoseconds of a product in the best way to run it as one kernel after copies, by the model."""
    return min(_times(kernel, gpu), default=math.inf)


def _times(kernel: l.Kernel, gpu: Gpu) -> Iterator[float]:
    """Nanoseconds of a product in boxes, by taps, after its operands were stored, and in tiles: last comes what takes
    longest to find.
    """
    if (p := product(kernel)) is not None:
        yield boxed(kernel, p, gpu)
        yield from (x.time for x in taps.ways(kernel, gpu)[:1])
        yield from (x.time for x in shared(kernel, gpu)[:1])
        yield after(kernel, p, gpu)
        yield _best(kernel, gpu)


def _expected(kernel: l.Kernel, gpu: Gpu) -> float:
    """Nanoseconds of a product, with its results computed apart where they will be."""
    whole, parts = _anyhow(kernel, gpu), _in_two(kernel, gpu)
    return parts if parts < SURE * whole else whole


def _in_two(kernel: l.Kernel, gpu: Gpu) -> float:
    """Nanoseconds of a product that stores its sums and of what computes its results from these, by the model;
    infinity where they are not dear.
    """
    rest = _rest(kernel, gpu)
    return rest + _anyhow(results_apart(kernel)[0], gpu) if math.isfinite(rest) else math.inf


def _rest(kernel: l.Kernel, gpu: Gpu) -> float:
    """Nanoseconds of what computes the results of a product from its sums; infinity where they are not dear."""
    p, apart, has = product(kernel), results_apart(kernel), gpu.warpgroups
    if has is None or p is None or len(apart) == 1:
        return math.inf
    r = results(p)
    if r.operations + r.read * has.after / has.read < DEAR:
        return math.inf
    size = apart[0].stores[0].buffer.type.dtype.size
    return max((r.moved + r.points * size) / gpu.memory, r.points * r.operations / (gpu.fma / 2)) + gpu.launch


def _best(kernel: l.Kernel, gpu: Gpu) -> float:
    """By the model, the nanoseconds of the best tile of a product under any of its axes."""
    p = product(kernel)
    forms = [merged(kernel, p, gpu), *for_warpgroups(kernel, gpu)] if p is not None else [Form(kernel)]
    return min(best(x.kernel, gpu) for x in forms)


def _cut(kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule], pick: Pick) -> Iterator[Candidate]:
    """Rows divided among blocks, where these are few for what there is to read: reductions in pieces; a sum of squares
    together with the mean it is around; else those that others need in kernels before these, and of reductions that
    are not equally long the longest in one of its own. What is computed at the points of a row is a kernel of its own
    then, and where threads cannot divide these points alike, where they are many for few blocks, and where it has
    nothing to do with what is reduced.
    """
    _, inner, top = rows.parts(kernel)
    first = [r for r in top if not any(x in top for x in topological(r.args))]
    both = moments(kernel) is not None
    pieces = cuts.pieces(kernel, gpu, both)
    rest = len(inner) > 1 or (inner and pieces > 1) or cuts.strangers(kernel)
    if rest or cuts.crowded(kernel, gpu):
        yield from _apart_from(kernel, top, gpu, pinned, pick)
    elif _uneven(kernel, gpu):
        yield from _apart_from(kernel, cuts.uneven(kernel), gpu, pinned, pick)
    elif pieces > 1 and len(first) == len(top):
        yield from in_pieces(kernel, top, pieces, gpu, pinned, cuts.unit(top))
    elif pieces > 1 and cuts.in_moments(kernel, pieces) and (found := split_moments(kernel, pieces, cuts.unit(top))):
        part, second = found
        for chosen in partial_states(part, pieces, gpu, pinned):
            yield Candidate((chosen, meeting(second, gpu)), (("split_moments", kernel, (part, second)),))
    elif pieces > 1:
        yield from _apart_from(kernel, first, gpu, pinned, pick)


CACHED = 60e6
"""Bytes of rows, of those that two blocks of each processor have at once, which the cache still has when they are read
again. Of 26 MB a log-softmax took 1.05 as long in one pass, of 53 MB a loss as long, of 68 MB losses 0.6 (H200, 23
November 2026).
"""


def _walked(kernel: l.Kernel, gpu: Gpu) -> bool:
    """Whether rows are so long that threads walk them in steps, and read memory again for each reduction."""
    chosen = reductions.reduction(kernel, gpu)
    steps = [f for s in chosen.sites for _, b in s.axes if not isinstance(b, Like) for f in b if f.level == "time"]
    count = math.prod(map(size_of, rows.parts(kernel)[0]))
    found = [r for r in kernel.carried if isinstance(r, l.Reduce)]
    along = [(r.axes[-1], x) for r in found for x in topological(r.args) if isinstance(x, l.Load)]
    each = {x.buffer: size_of(a) * x.dtype.size for a, x in along if a in x.free}
    return any(f.size > 1 for f in steps) and min(count, 2 * gpu.processors) * sum(each.values()) > CACHED


def _uneven(kernel: l.Kernel, gpu: Gpu, before: int = 1) -> bool:
    """Whether reductions that are not equally long gain where they are apart, since one of the kernels is cut then."""
    apart = reduced_first(kernel, cuts.uneven(kernel))
    return len(apart) > 1 and any(
        cuts.pieces(x, gpu, moments(x) is not None, before) > 1 or _uneven(x, gpu, before + 1) for x in apart
    )


def _unpacked(kernel: l.Kernel, gpu: Gpu, pinned: Mapping[str, Schedule], pick: Pick) -> Iterator[Candidate]:
    """A vector times a matrix several of whose elements lie in a number, with a term for each of these, where that is
    faster by the model.
    """
    made = digits_summed(kernel)
    if len(made) > 1 and sum(estimate(x, gpu).time for x in made) < estimate(kernel, gpu).time:
        whole = joined(pick(candidates(x, gpu, pinned, pick)) for x in made)
        yield whole.after(("digits_summed", kernel, made))


def _apart_from(
    kernel: l.Kernel, reduces: Sequence[l.Reduce], gpu: Gpu, pinned: Mapping[str, Schedule], pick: Pick
) -> Iterator[Candidate]:
    """Some reductions of a kernel in one before it."""
    *before, after = reduced_first(kernel, reduces)
    if before:
        done = joined(pick(candidates(x, gpu, pinned, pick)) for x in (*before, after))
        yield done.after(("reduced_first", kernel, (*before, after)))
