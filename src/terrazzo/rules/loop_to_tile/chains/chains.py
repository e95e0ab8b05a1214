"""The ways to run a product of a product in one loop of steps, best first, or why there are none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain as chain_of
from typing import Any

from terrazzo.collector import remembered
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.plan import Plan, Reach
from terrazzo.ir.schedule import Schedule
from terrazzo.rules.loop_to_tile.chains import chain_groups
from terrazzo.rules.loop_to_tile.chains.chain import Chain, chain
from terrazzo.rules.loop_to_tile.chains.chain_groups import Groups, on_warpgroups
from terrazzo.rules.loop_to_tile.chains.chain_schedules import FEW, Warps, arrangements, on_warps
from terrazzo.rules.loop_to_tile.chains.few_rows import MOST, rows_in_line, share_rows, split_frames
from terrazzo.rules.loop_to_tile.products.warpgroup_tiles import ROWS
from terrazzo.rules.loop_to_tile.walked.threads import WARP, ceil
from terrazzo.rules.tile.complete import Refused, complete
from terrazzo.rules.tile.draft import Draft
from terrazzo.rules.tile.reach import reached
from terrazzo.rules.tile_to_kernel.lower import derived

WORTH = 1.25
"""How much fewer steps a processor must have for a second kernel to pay, which combines the states of pieces."""
STEPS = 4
"""Steps of a piece, at least."""
START = 2
"""Steps that a block takes to begin and to end."""


@dataclass(frozen=True)
class Way:
    """`kernel`, which is `whole` or computes its states in `pieces` pieces, under a schedule. `whole` means the same as
    the kernel it was made of; `rest` is the kernel that combines states.
    """

    whole: l.Kernel
    kernel: l.Kernel
    schedule: Schedule
    rest: l.Kernel | None = None
    pieces: int = 1


def ways(kernel: l.Kernel, gpu: Gpu) -> Iterator[Way | str]:
    """The ways that are plans, best first, and why others are none."""
    found = formed(kernel)
    if found is None:
        yield "no two products in one loop of steps on this machine"
    elif any(not isinstance(a.extent, int) for a in (*found.kernel.axes, found.steps, *found.depths)):
        yield "an axis has no size that is known"
    else:
        kinds = [_on_warpgroups(found, gpu), _on_warps(found, gpu)]
        first = next(arrangements(found, gpu), None)
        few = found.rows.extent <= MOST and first is not None and _pieces(found, first, gpu) > 1
        for kind in kinds[::-1] if few else kinds:
            yield from kind


def formed(kernel: l.Kernel) -> Chain | None:
    """The kernel as a chain, rows made one axis with those behind them, and few rows with those that share their keys;
    None where it is none.
    """
    found = chain(rows_in_line(kernel))
    return chain(share_rows(kernel)) if found is None or found.rows.extent <= FEW else found


def _on_warpgroups(c: Chain, gpu: Gpu) -> Iterator[Way | str]:
    """Where the machine has such, and there are rows for them, by what the model says: as many steps as a mask leaves
    a tile, and blocks that have a tile or several.
    """
    priced: list[tuple[float, int, Groups]] = []
    for x in _priced(c, gpu):
        if isinstance(x, str):
            yield x
        else:
            priced.append((x[0], len(priced), x[1]))
    for _, _, way in sorted(priced, key=lambda x: x[:2]):
        yield _planned(c.kernel, partial(on_warpgroups, c, gpu, way), gpu)


@remembered
def fastest(kernel: l.Kernel, gpu: Gpu) -> float | None:
    """Nanoseconds of a chain in the best of the ways on warpgroups, by the model, in which processors may be idle; None
    where there is none.
    """
    return min(_on_groups(kernel, gpu), default=None)


def _on_groups(kernel: l.Kernel, gpu: Gpu) -> Iterator[float]:
    """Nanoseconds of a chain in each of its ways on warpgroups."""
    found = chain(rows_in_line(kernel))
    if found is None or any(not isinstance(a.extent, int) for a in (*kernel.axes, found.steps, *found.depths)):
        return
    yield from (x[0] for x in _priced(found, gpu) if not isinstance(x, str))


@remembered
def _no_groups(kernel: l.Kernel, gpu: Gpu) -> bool:
    """Whether a chain has no way on warpgroups."""
    return next(_on_groups(kernel, gpu), None) is None


def rate(c: Chain, gpu: Gpu) -> float:
    """Operations per nanosecond of the instructions of a chain, or 0 where there are none for its types."""
    if gpu.warpgroups is not None:
        return gpu.warpgroups.sustained
    return 0.0 if nowhere(c.kernel, gpu) else gpu.tensor


BY_WARPS = 1.6
"""How much slower than those of warpgroups the instructions of warps multiply on a Hopper."""


def idle(c: Chain, gpu: Gpu) -> float:
    """How many times longer a chain takes than on the warpgroups of all processors. A block has all of the steps, but
    where frames of few rows meet, and so many rows: of 256 rows and 4096 steps four blocks take 400 us on an H200,
    where all processors would take 3; 8192 x 128 through 512 columns took 24 in blocks of 128 rows on warps.
    """
    if c.rows.extent <= MOST and not c.rounds and split_frames(c.kernel, STEPS, WARP) is not None:
        return 1.0
    way = next(arrangements(c, gpu), None) if _no_groups(c.kernel, gpu) else None
    blocks = math.prod(chain_groups.outside(c)) * ceil(c.rows.extent, way.rows if way else ROWS)
    slower = BY_WARPS if way and gpu.warpgroups else 1.0
    return slower * max(1.0, gpu.processors / blocks)


def carried(c: Chain, gpu: Gpu) -> int:
    """Bytes that all blocks of a chain bring to their processors: each has the operands of all steps, whatever others
    have of them. 6 rows for each of 1024 blocks, through 384 columns of 768 steps in 16 bits, took some 300 us on an
    H200: blocks brought 780 MB, where 13 us is what multiplying takes.
    """
    way = next(arrangements(c, gpu), None) if _no_groups(c.kernel, gpu) else None
    blocks = math.prod(chain_groups.outside(c)) * ceil(c.rows.extent, way.rows if way else 2 * ROWS)
    steps: Any = c.steps.extent
    along: int = sum(c.deep) + c.width * len(c.outside)
    return 2 * blocks * int(steps) * along * (3 if c.terms > 1 else 1)


def _priced(c: Chain, gpu: Gpu) -> Iterator[tuple[float, Groups] | str]:
    """The ways on warpgroups with what the model says of each, and why there are no others."""
    if "wgmma" not in gpu.features or c.rows.extent <= FEW:
        return
    every = list(chain_groups.arrangements(c, gpu))
    for tile in dict.fromkeys((way.count, way.step) for way in every):
        same = [way for way in every if (way.count, way.step) == tile]
        steps = _visits(c, gpu, same)
        if isinstance(steps, str):
            yield steps
            continue
        walked = steps[::-1] if _grows(steps) else steps
        for way in same:
            for x in (way, *chain_groups.staying(way, c, gpu, len({*steps}) > 1)):
                yield chain_groups.price(x, c, gpu, walked), x


def _visits(c: Chain, gpu: Gpu, same: Sequence[Groups]) -> list[int] | str:
    """The steps of a tile for each part of the rows, the first one first, by the first of some arrangements of the same
    tiles that has a plan; or why none has.
    """
    why = "a block has no room for two products in one loop of steps"
    for way in same:
        found = _made(c.kernel, on_warpgroups(c, gpu, way), gpu)
        if not isinstance(found, str):
            return reached(*found)
        why = found
    return why


def _on_warps(c: Chain, gpu: Gpu) -> Iterator[Way | str]:
    """In pieces, where there are few blocks otherwise; then whole. Many rows that skip steps stay whole: a piece does
    not know which of its steps a mask hides.
    """
    every = list(arrangements(c, gpu))
    skips = c.rows.extent > MOST and any(_skips(c, way, gpu) for way in every)
    for way in () if skips else every:
        pieces = _pieces(c, way, gpu)
        parts = split_frames(c.kernel, pieces, way.step) if pieces > 1 else None
        if parts is not None and (part := chain(parts[0])) is not None:
            found = _planned(parts[0], partial(on_warps, part, gpu, way), gpu)
            yield found if isinstance(found, str) else Way(c.kernel, found.kernel, found.schedule, parts[1], pieces)
    for way in every:
        yield _planned(c.kernel, partial(on_warps, c, gpu, way), gpu)


def _skips(c: Chain, way: Warps, gpu: Gpu) -> bool:
    """Whether there are steps that a mask hides from a whole tile."""
    schedule = on_warps(c, gpu, way, False)
    plan = complete(c.kernel, schedule, gpu)[0] if schedule is not None else None
    return isinstance(plan, Plan) and bool(plan.all(Reach))


def _planned(kernel: l.Kernel, schedule: Callable[[bool], Schedule | None], gpu: Gpu) -> Way | str:
    """A kernel under a schedule, with the last rows' tiles first where these are longer; why there is no plan of it."""
    found = _made(kernel, schedule(False), gpu)
    if isinstance(found, str):
        return found
    plan, draft = found
    backward = bool(plan.all(Reach)) and _grows(reached(plan, draft))
    return Way(kernel, kernel, schedule(True) or draft.schedule if backward else draft.schedule)


def _made(kernel: l.Kernel, schedule: Schedule | None, gpu: Gpu) -> tuple[Plan, Draft] | str:
    """The plan of a kernel under a schedule, or why there is none."""
    if schedule is None:
        return "its sizes are on no instruction of this machine"
    plan, _ = complete(kernel, schedule, gpu)
    return plan.reason if isinstance(plan, Refused) else (plan, Draft(kernel, schedule, gpu))


def _grows(steps: Sequence[int]) -> bool:
    """Whether the last tiles visit more steps than the first ones."""
    return steps[-1] > steps[0]


def _pieces(c: Chain, way: Warps, gpu: Gpu) -> int:
    """Into how many pieces steps are cut, so that all processors have some of them and all alike."""
    sizes: list[Any] = [a.extent for a in c.kernel.axes if a not in (c.rows, c.columns)]
    blocks = math.prod(sizes) * ceil(c.rows.extent, way.rows)
    room = gpu.processors * (2 if way.shared(c) <= gpu.shared // 2 else 1)
    steps = ceil(c.steps.extent, way.step)

    def rounds(pieces: int) -> int:
        return ceil(blocks * pieces, room) * (ceil(steps, pieces) + START)

    best = min(range(1, max(steps // STEPS, 1) + 1), key=rounds)
    return best if rounds(1) >= WORTH * rounds(best) else 1


def nowhere(kernel: l.Kernel, gpu: Gpu) -> bool:
    """Whether a kernel is no chain, or one whose sizes no block has room for: it has no schedule, let alone a plan."""
    c = formed(kernel)
    if c is None or any(not isinstance(a.extent, int) for a in (*c.kernel.axes, c.steps, *c.depths)):
        return True
    groups = "wgmma" in gpu.features and c.rows.extent > FEW
    tiles = (on_warpgroups(c, gpu, way) for way in chain_groups.arrangements(c, gpu)) if groups else ()
    return all(x is None for x in chain_of(tiles, (on_warps(c, gpu, way) for way in arrangements(c, gpu))))


def refusal(kernel: l.Kernel, gpu: Gpu, lost: Callable[[k.Kernel], str]) -> str:
    """Why a chain of two products is not worth one kernel, or nothing: none can be derived, or all were built and
    lost.
    """
    first = ""
    for way in ways(kernel, gpu):
        made = way if isinstance(way, str) else derived(way.kernel, way.schedule, gpu)
        why = made if isinstance(made, str) else made.reason if isinstance(made, Refused) else lost(made)
        if not why:
            return ""
        first = first or why
    return first or "a block has no room for two products in one loop of steps"
