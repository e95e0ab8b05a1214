"""Schedules of contractions: which tile, on which instruction, by a model of what each costs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.collector import remembered
from terrazzo.hw import mma_sync
from terrazzo.hw.gpu import Gpu
from terrazzo.hw.products import matrix
from terrazzo.ir.address import coefficient, divides, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, FloorDiv, Mod
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.schedule import Factor, Like, Operand, Schedule, Site, Word
from terrazzo.ir.sites import Product, called, loads
from terrazzo.ir.types import f32
from terrazzo.rules.access import WIDEST
from terrazzo.rules.loop_to_tile.products.results import apart, partly_stored, results
from terrazzo.rules.loop_to_tile.products.sizes import CUDA_CORES, TENSOR_CORES, WITH_TMA, Tile
from terrazzo.rules.loop_to_tile.products.warpgroups import after
from terrazzo.rules.loop_to_tile.walked.threads import ceil, grid, size_of, step, vector_of
from terrazzo.rules.swizzles import swizzled
from terrazzo.rules.tile.complete import Refused, complete


@dataclass(frozen=True)
class Plan:
    """A tile of a product, in so many pieces of k, on an instruction (None: CUDA cores), and the nanoseconds the model
    gives it. `by` is how operands come whose rows are no multiples of 16 bytes.
    """

    tile: Tile
    pieces: int
    instruction: str | None
    time: float
    by: str = ""

    @property
    def unit(self) -> int:
        """What pieces of k are multiples of."""
        return self.tile.k

    def __str__(self) -> str:
        t = self.tile
        return f"{t.m} x {t.n} x {t.k} on {self.instruction or 'CUDA cores'}: {self.time / 1000:.1f} us by the model"


def plans(p: Product, gpu: Gpu, cores: bool = False) -> list[Plan]:
    """Every plan that fits, best first: on matrix instructions where the operands allow it and unless `cores` is asked
    for. There may be none, as for many products of one factor; there is none for sums of several terms.
    """
    if any(len(c.terms) > 1 for c in p.sites):
        return []
    instruction = None if cores else instruction_for(p, gpu)[0]
    by = _by(p, gpu) if instruction else ""
    some = _tiles(gpu, instruction) if instruction else [_as_long(t, p) for t in CUDA_CORES]
    tiles = (_ring(_shared(t, len(p.sites)), p, gpu, by) for t in some)
    size = 4 if instruction else p.sites[0].reduce.dtype.size
    cut = (
        (t if instruction else _promoted(t, p, s), s) for t in tiles if t for s in _pieces(p, t, gpu, instruction, by)
    )
    found = [
        _plan(p, gpu, t, s, instruction, by)
        for t, s in cut
        if instruction or t.registers(len(p.sites), size) < 65536 // max(t.threads, 256)
    ]
    return sorted(found, key=lambda x: x.time)


LONG = 8192
"""Products that a sum on CUDA cores has, from which on those of every step are added up by themselves. The error of one
that adds them one after the other grows with the root of their number, and libraries cut long sums."""


def _promoted(t: Tile, p: Product, pieces: int) -> Tile:
    """A tile on CUDA cores for a sum in so many pieces, promoted where these are long sums in float32."""
    length = math.prod(a.extent for a in p.axes) // pieces
    return replace(t, promoted=length >= LONG and p.sites[0].reduce.dtype is f32)


def _tiles(gpu: Gpu, instruction: str | None) -> tuple[Tile, ...]:
    return CUDA_CORES if not instruction else WITH_TMA if gpu.number >= 90 else TENSOR_CORES


def _as_long(t: Tile, p: Product) -> Tile:
    """A tile on CUDA cores as long as a sum that is one step: nothing is multiplied by zeros behind it, and blocks that
    need no more slabs share a processor. With a ring of four, 200,000 x 20 x 20 took 50 us, where a library took 21
    (H100).
    """
    length = math.prod(a.extent for a in p.axes)
    if length > t.k or p.axes[-1].extent < length:
        return t
    return replace(t, k=ceil(length, t.inner) * t.inner, ring=2, resident=t.resident * t.ring // 2)


def _shared(t: Tile, count: int) -> Tile | None:
    """The tile for `count` products with one factor in common: so much narrower that loads, registers and rate stay
    those of one.
    """
    narrow = t.n >> (count - 1).bit_length()
    return replace(t, n=narrow) if narrow >= t.warps[1] * max(t.lanes[1], 8) else None


def _ring(t: Tile | None, p: Product, gpu: Gpu, by: str = "") -> Tile | None:
    """The tile with no more slabs than a block has shared memory for, padding included, two where they come through
    registers; None where there is no room for two, or a thread for what it fetches.
    """
    if t is None or (by == "ld" and sum(_fetched(x, p, t) for x in p.operands) > FETCHED * t.threads):
        return None
    step = sum(rows * t.k + 4 * max(rows, t.k) for rows in (t.m, *(t.n for _ in p.sites))) * max(
        _bytes(x) for x in p.operands
    )
    ring = min(2 if by == "ld" else t.ring, gpu.shared // step)
    return replace(t, ring=ring) if ring > 1 else None


FETCHED = 96
"""Pieces of a step that a thread fetches at once, at most: each takes a register."""


def _fetched(x: Node, p: Product, t: Tile) -> int:
    """Pieces of an operand in a step, which threads move one by one."""
    return (t.m if p.m in x.free else t.n) * t.k // vector(x, p)


def _bytes(x: Node) -> int:
    found: int = x.dtype.size  # type: ignore[attr-defined]
    return found


def instruction_for(p: Product, gpu: Gpu) -> tuple[str | None, str]:
    """A matrix instruction for all of the operands (plain loads, contiguous and 16 bytes aligned, of its type), or None
    and why there is none.
    """
    types = {x.dtype: called(x) for x in p.operands}  # type: ignore[attr-defined]
    total = p.sites[0].reduce.dtype
    if (terms := max(len(c.terms) for c in p.sites)) > 1:
        return None, f"it sums {terms} products in a step, which instructions of warpgroups are chosen for only"
    if len(types) != 1:
        return None, f"factors are of different types: {', '.join(f'{name} is {kind}' for kind, name in types.items())}"
    (kind,) = types
    found = [
        i for i in mma_sync.INSTRUCTIONS if i.a.dtype is kind and i.since <= gpu.number and i.d.dtype.name == "f32"
    ]
    if not found or total.name != "f32":
        return None, f"no instruction of {gpu.arch} adds up products of {kind} in {total}"
    if len(p.axes) != 1:
        return None, f"it sums over {len(p.axes)} axes, and instructions over one"
    if why := next(filter(None, (_unaligned(x, p) for x in p.operands)), ""):
        return None, why
    return max(found, key=lambda i: i.shape[2]).name, ""


def _unaligned(x: Node, p: Product) -> str:
    """Why an operand is no load that threads bring in in pieces: along k, m or n it is contiguous, and where its place
    follows from divisions, everything else is a multiple of 16 bytes. Only the end of a piece of k reads as zeros.
    """
    if not isinstance(x, l.Load):
        return f"{called(x)} is computed on its way, and instructions take what lies in memory"
    if any(p.m in e.free or p.n in e.free for e in x.inside if isinstance(e, Node)):
        return f"{x.buffer.name} is padded on its way, and instructions take what lies in memory"
    offset = flatten(x.index, x.buffer.type.element_strides)
    if not any(coefficient(offset, a) == 1 for a in (*p.axes, p.m, p.n) if a in x.free):
        return f"{x.buffer.name} is contiguous along no axis of the product"
    digits = any(isinstance(e, FloorDiv | Mod) for e in topological([e for e in x.index if isinstance(e, Expr)]))
    if vector(x, p) < WIDEST // x.dtype.size and digits:
        return f"rows of {x.buffer.name} do not begin at multiples of {WIDEST} bytes"
    return ""


def vector(x: Any, p: Product) -> int:
    """Elements of an operand that lie together wherever a piece of them begins, of 16 bytes at most."""
    offset = flatten(x.index, x.buffer.type.element_strides)
    inner = next(a for a in (*p.axes, p.m, p.n) if a in x.free and coefficient(offset, a) == 1)
    first = substitute(offset, {inner: 0})
    return next(v for v in (8, 4, 2, 1) if v * x.dtype.size <= WIDEST and not inner.extent % v and divides(v, first))


def _by(p: Product, gpu: Gpu) -> str:
    """How operands of a matrix instruction come whose rows begin anywhere, or which end in zeros; nothing where they
    may come in boxes.
    """
    pieces = min(vector(x, p) * _bytes(x) for x in p.operands)
    if pieces == WIDEST and not any(x.inside for x in loads(p.kernel.stores[0].value) if x in p.operands):
        return ""
    return "cp.async" if pieces >= 4 and gpu.number >= 80 else "ld"


def _pieces(p: Product, t: Tile, gpu: Gpu, instruction: str | None, by: str) -> Iterator[int]:
    """Into how many pieces k may be cut, while they are long and blocks not too many. The last is short only where
    plain loads end in 0, beside what is made of places.
    """
    ends = (isinstance(x, l.Load) or not any(p.axes[-1] in y.free for y in loads(x)) for x in p.operands)
    plain = (instruction is None or by != "") and all(ends)
    steps, rest = divmod(p.axes[-1].extent, t.k)
    steps += plain and rest > 0
    blocks = _blocks(p, t)
    yield 1
    full = (w * gpu.processors // blocks for w in (1, 2, 4))
    full = (ceil(steps, ceil(steps, s)) for s in full if s > 0)  # of which the last has something to do
    for s in (*range(2, 33), *(s for s in full if s > 32)):
        each = ceil(steps, s)
        if (
            (s * each == steps or (plain and (s - 1) * each < steps))
            and (plain or not rest)
            and each >= 4
            and blocks * s <= gpu.processors * 8
        ):
            yield s


def _blocks(p: Product, t: Tile) -> int:
    batch: int = math.prod(a.extent for a in p.batch)
    return ceil(p.m.extent, t.m) * ceil(p.n.extent, t.n) * batch


STEP = {True: 700.0, False: 250.0}
"""Nanoseconds from asking for a slab to having it, on matrix instructions or not; a ring hides all but its share."""
BOXES = 300.0
"""The same where TMA brings them."""
ALONE = {True: 0.35, False: 0.1}
"""Where an n-th of the blocks that fit share a processor, arithmetic is as fast as an n-th to this power."""
MOVING = {"cp.async": 9, "ld": 11}
"""Instructions of a warp that move a piece to shared memory, with what says where and whether: counted in SASS."""
ISSUING = 128
"""Threads that a processor needs to have something to begin in every clock on CUDA cores: a warp for each of the four
that begin instructions. With half of them 3326 x 549 x 8 took 14.5 us on an H200.
"""
ISSUED = 4
"""Instructions that a processor begins in a clock."""
GATHERED = 4.3
"""How much longer the steps of a product on `mma.sync` take than its model says where an operand's place follows from
divisions: a 1x1 convolution of 32 x 256 x 56 x 56 took 71.8 us on an H200 (21 November 2026), and the model said 16.5.
"""
STREAMED = 1.3
"""How much longer than memory needs a product on matrix instructions takes that waits for it."""
IN_FLIGHT = {True: 36 << 10, False: 24 << 10}
"""Bytes a processor must have on their way to use its share of the memory's rate, on matrix instructions or not."""


def _plan(p: Product, gpu: Gpu, t: Tile, pieces: int, instruction: str | None, by: str = "") -> Plan:
    """Time: the slowest of arithmetic (on the busiest processor), cache, memory and latency; a split pays for its
    partial sums, and threads that move operands in pieces for each of these.
    """
    batch, depth = math.prod(a.extent for a in p.batch), math.prod(a.extent for a in p.axes)
    size = max(map(_bytes, p.operands))
    count, last = len(p.sites), p.axes[-1].extent
    blocks = _blocks(p, t) * pieces
    down = sum(p.m in x.free for x in p.operands)
    beside = len(p.operands) - down
    slab = (t.m * down + t.n * beside) * t.k * size
    resident = max(
        1,
        min(
            t.resident,
            gpu.shared // (t.ring * slab),
            65536 // (t.threads * (128 if instruction else t.registers(count, p.sites[0].reduce.dtype.size))),
        ),
    )
    busiest = ceil(blocks, gpu.processors)
    together = min(busiest, resident)  # blocks that share a processor hide each other's waits
    kind = instruction is not None
    rate = (gpu.tensor if kind else gpu.fma) / gpu.processors * t.rate * (together / resident) ** ALONE[kind]
    rate *= 1.0 if kind else min(1.0, together * t.threads / ISSUING)
    steps = depth // last * ceil(ceil(last, pieces), t.k)
    rate /= 1.0 if kind else _starved(t, count, down, beside) * _widened(t, p) * (1 + t.promoted / t.k)
    arithmetic = busiest * 2.0 * t.m * t.n * t.k * steps * count / rate
    moved = sum(_fetched(x, p, t) for x in p.operands) / 32 * MOVING[by] if by else 0.0
    issue = moved / (ISSUED * gpu.fma / gpu.processors / 256)
    arithmetic += busiest * steps * issue
    flying = min(blocks / gpu.processors, resident) * (t.ring - 1) * slab
    m, n = p.m.extent * down, p.n.extent * beside
    traffic = batch * depth * size * (m * ceil(p.n.extent, t.n) + n * ceil(p.m.extent, t.m))
    least = sum(_bytes(x) * p.touched(x) for x in p.operands) / min(1.0, flying / IN_FLIGHT[kind])
    least *= STREAMED if kind else 1.0
    has = gpu.warpgroups if kind else None
    waves = ceil(busiest, resident)
    wait = BOXES if has and not by else STEP[kind]
    wait += issue if by == "ld" else 0.0  # what threads wait for goes to shared memory then
    latency = wait * (steps / (t.ring - 1) + 2) * waves
    gathering = GATHERED if kind and gathered(p) else 1.0
    time = max(arithmetic, traffic / gpu.cache, least / gpu.memory, latency) * gathering
    time += has.fill + gpu.wave * (waves - 1) if has else gpu.launch
    if has and not by:  # what boxes bring from beyond the ends of operands, as in `warpgroups`
        m, n = -p.m.extent % t.m * down, -p.n.extent % t.n * beside
        time += batch * depth * size * (m * ceil(p.n.extent, t.n) + n * ceil(p.m.extent, t.m)) / gpu.memory
    time += 0.75 * results(p).moved / gpu.memory + (apart(p, gpu) if kind else _scattered(t, p, gpu)) + partly_stored(p)
    time += busiest * pieces * after(p, ceil(results(p).points, blocks), has) if has else _computing(p, gpu)
    if pieces > 1:
        time += has.part if has else gpu.launch
        time += 2.5 * pieces * batch * p.m.extent * p.n.extent * count * 4 / gpu.cache
    return Plan(t, pieces, instruction, time, by)


def _computing(p: Product, gpu: Gpu) -> float:
    """Nanoseconds in which all processors compute the results from sums."""
    return results(p).operations * results(p).points / (gpu.fma / 2)


@remembered
def gathered(p: Product) -> bool:
    """Whether an operand is read where division says."""
    places = [flatten(x.index, x.buffer.type.element_strides) for o in p.operands for x in loads(o)]
    return any(isinstance(x, FloorDiv | Mod) for x in topological([e for e in places if isinstance(e, Expr)]))


def _starved(t: Tile, count: int, down: int, beside: int) -> float:
    """How much longer a step on CUDA cores takes for what its threads load of so many operands than for its products: 1
    where no longer. A warp's load of up to 16 bytes a lane takes two turns of shared memory, four products one.
    """
    if t.inner > 1:
        return 1.0
    m, n = t.m // t.warps[0] // t.lanes[0], t.n // t.warps[1] // t.lanes[1]
    return max(1.0, 2 * (down * ceil(m, 4) + beside * ceil(n, 4)) / (count * m * n / 4))


def _scattered(t: Tile, p: Product, gpu: Gpu) -> float:
    """Nanoseconds in which bytes go to the cache again and again where threads of CUDA cores have vectors of results
    and memory has none: a store of a warp touches all sectors of its rows then, for one element of each vector. 2000
    products of 49 x 32 x 49 in float32 took 40 us in tiles of 64 x 64, which have such vectors, 25 in others (H100).
    """
    found, points = 0.0, math.prod(size_of(a) for a in p.kernel.axes)
    for s in p.kernel.stores if t.inner == 1 else ():
        for a, size, warps, lanes in ((p.m, t.m, t.warps[0], t.lanes[0]), (p.n, t.n, t.warps[1], t.lanes[1])):
            each = min(size // warps // lanes, 4)
            if (run := _run(s, a)) is not None and run < each:
                found += each * s.buffer.type.dtype.size * points
    return found / gpu.cache


@remembered
def _run(s: l.Store, axis: Any) -> int | None:
    """How many elements along an axis are stored as vectors; None where memory does not run along it."""
    return vector_of([s], axis) if step(s, axis) == 1 else None


def _widened(t: Tile, p: Product) -> float:
    """How much longer a step on CUDA cores takes for converting narrower operands, which each thread does with all that
    it loads: 2000 products of 49 x 32 x 49 in bfloat16 took 28 us, where the model said 18 without (H100).
    """
    m, n = t.m // t.warps[0] // t.lanes[0], t.n // t.warps[1] // t.lanes[1]
    narrow = [m if p.m in x.free else n for x in p.operands if _bytes(x) < p.sites[0].reduce.dtype.size]
    return 1.0 + sum(narrow) / (len(p.sites) * m * n)


def schedule(p: Product, plan: Plan, gpu: Gpu) -> Schedule:
    """The bindings of a plan that is in one piece; operands come by TMA where the machine has it and their shape allows
    it.
    """
    if plan.by:
        return _schedule(p, plan, gpu, plan.by)
    if plan.instruction and gpu.number >= 90:
        boxes = _schedule(p, plan, gpu, "tma")
        if not isinstance(complete(p.kernel, boxes, gpu)[0], Refused):
            return boxes
    return _schedule(p, plan, gpu, "cp.async" if gpu.number >= 80 else "ld")


def _schedule(p: Product, plan: Plan, gpu: Gpu, transport: str) -> Schedule:
    t, kernel = plan.tile, p.kernel
    down, across = ceil(p.m.extent, t.m), ceil(p.n.extent, t.n)
    group = next(g for g in (8, 4, 2, 1) if down % g == 0)
    order = (("order", Word("grouped", (group,))),) if group > 1 and across > 1 else ()
    lines: list[tuple[str, Any]] = [(a.name, grid(a.extent)) for a in p.batch]
    lines.append((p.m.name, (Factor("grid", down, order), Factor("block", t.m))))
    lines.append((p.n.name, (Factor("grid", across), Factor("block", t.n))))
    *outer, last = p.axes
    lines += [(f"r{a.label}", (Factor("time", a.extent),)) for a in outer]
    step = min(t.k, 1 << (last.extent - 1).bit_length())
    if instruction := matrix(plan.instruction or None):
        m, nn, k = instruction.shape
        step = max(step, k)
        site = [
            (p.m.name, _factors(("warp", t.warps[0]), ("reg", t.m // t.warps[0] // m), ("inst.m", m))),
            (p.n.name, _factors(("warp", t.warps[1]), ("reg", t.n // t.warps[1] // nn), ("inst.n", nn))),
            (f"r{last.label}", _factors(("reg", step // k), ("inst.k", k))),
        ]
        rows = [(called(x), swizzled(_row(x, p, t, step)) or 128) for x in p.operands]
        swizzles = {
            name: min(s for other, s in rows if other == name) for name, _ in rows
        }  # two loads of one buffer are held alike
        operands = tuple((name, Operand("smem", (("by", transport), ("swizzle", s)))) for name, s in swizzles.items())
    else:
        site = [
            (p.m.name, _factors(("warp", t.warps[0]), *_threads(t.m // t.warps[0], t.lanes[0], t.inner))),
            (p.n.name, _factors(("warp", t.warps[1]), *_threads(t.n // t.warps[1], t.lanes[1], t.inner))),
            (f"r{last.label}", _factors(("reg", step // min(t.inner, step)), ("reg", min(t.inner, step)))),
        ]
        by = "cp.async" if gpu.number >= 80 and all(_copies(x, p) for x in p.operands) else "ld"
        along = {x: (("along", (p.m if p.m in x.free else p.n).name),) if t.inner == 1 else () for x in p.operands}
        pad = ("pad", 4 if t.inner == 1 or step % 8 == 0 else 0)  # neighbouring rows have banks of their own
        operands = tuple({called(x): Operand("smem", (("by", by), *along[x], pad)) for x in p.operands}.items())
    alone = plan.instruction or by == "ld"  # what is fetched ahead needs registers too
    resident = (
        1 if alone else min(t.resident, 65536 // (t.threads * t.registers(len(p.sites), p.sites[0].reduce.dtype.size)))
    )
    ring = t.ring if (transport if plan.instruction else by) != "ld" else 2
    how = (("ring", ring), *((("promote", True),) if t.promoted else ()))
    lines.append((f"r{last.label}", (Factor("time", ceil(last.extent, step), how), Factor("block", step))))
    stores = tuple(dict.fromkeys(b.name for b in kernel.writes))
    like = Site(stores, ((p.m.name, Like(p.names[0])), (p.n.name, Like(p.names[0]))))
    return Schedule(
        kernel.name, gpu.arch, tuple(lines), (), (("resident", (resident,), ()),) if resident > 1 else (),
        (Site(p.names, tuple(site), operands, plan.instruction or "fma.f32"), like),
    )  # fmt: skip


def _threads(size: int, lanes: int, inner: int) -> tuple[tuple[str, int], ...]:
    """A warp's part of an axis between lanes and registers: lanes innermost where vectors run along k, else in vectors
    of 16 bytes.

    Then two lanes that differ in the lowest or the second lowest bit read the same of one operand, for the lanes of
    both axes interleave: shared memory serves a warp that reads so in two turns, and otherwise in four.
    """
    each = size // lanes
    if inner > 1:
        return (("reg", each), ("lane", lanes))
    vector = min(each, 4)
    return (("reg", each // vector), ("lane", lanes // 2), ("lane", 2), ("reg", vector))


def _row(x: Node, p: Product, t: Tile, step: int) -> int:
    """Bytes of a row of an operand's slab."""
    (load,) = loads(x)
    each: int = x.dtype.size  # type: ignore[attr-defined]
    offset = flatten(load.index, load.buffer.type.element_strides)
    for a, size in ((p.axes[-1], step), (p.m, t.m), (p.n, t.n)):
        if a in x.free and coefficient(offset, a) == 1:
            return size * each
    return 0


def _copies(x: Node, p: Product) -> bool:
    """Whether cp.async can bring an operand in: a load of 4 bytes at least."""
    return isinstance(x, l.Load) and x.dtype.size >= 4


def _factors(*pairs: tuple[str, int]) -> tuple[Factor, ...]:
    kept = [Factor(level, size) for level, size in pairs if size > 1]
    return tuple(kept) or (Factor(pairs[-1][0], pairs[-1][1]),)
