"""The order of steps in which least memory is in use at a time.

Steps come in the order of the user's program, where a product that only a gradient needs may stand long after what it
reads was made. What is made lives from the step that writes it to the last that reads it, results to the end. Inputs
that are donated, as what autograd keeps for a backward pass is, live from the start to the last step that reads them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.in_place import NOTHING_GIVEN, Given, pairs, taken_over
from terrazzo.ir.program import donated
from terrazzo.ir.regions import Regions, regions
from terrazzo.rewrite.rule import Event, Log

RULE = "in_order"
WORTH = 1 << 20
"""Bytes of memory in use from which on it is worth asking for another order."""
GAIN = 0.01
"""The part of it that another order must save: where nothing is gained, steps stay as the user has them."""
ROUNDS = 64
"""How often a step goes to the other side of where most is in use."""
LARGEST = 16
"""Of how many of the largest buffers in use there the steps that write or read them are tried."""

Steps = Sequence[l.Kernel | l.Call]
Among = Mapping[l.Buffer, Sequence[l.Buffer]]


def in_order(program: l.Program, log: Log, pass_name: str, in_place: bool = True) -> l.Program:
    """`program` with its steps in another order where less memory is in use in that one. Results of kernels may lie
    `in_place` of what these read.

    @loop
    def f(x: f32[512, 1024]):
        with kernel('y', y=f32[512, 1024]):
            for a0 in free(512):
                for a1 in free(1024):
                    in0 = x[a0, a1]
                    v0 = exp(in0)
                    y[a0, a1] = v0
        with kernel('z', z=f32[512, 1024]):
            for a0 in free(512):
                for a1 in free(1024):
                    in0 = x[a0, a1]
                    v0 = sin(in0)
                    z[a0, a1] = v0
        with kernel('s', s=f32[512]):
            for a0 in free(512):
                for r0 in reduce(1024):
                    in0 = y[a0, r0]
                    acc0 <- sum(in0)
                s[a0] = acc0
        with kernel('t', t=f32[512]):
            for a0 in free(512):
                for r0 in reduce(1024):
                    in0 = z[a0, r0]
                    acc0 <- sum(in0)
                t[a0] = acc0
        return (s, t)
    =>
    @loop
    def f(x: f32[512, 1024]):
        with kernel('y', y=f32[512, 1024]):
            for a0 in free(512):
                for a1 in free(1024):
                    in0 = x[a0, a1]
                    v0 = exp(in0)
                    y[a0, a1] = v0
        with kernel('s', s=f32[512]):
            for a0 in free(512):
                for r0 in reduce(1024):
                    in0 = y[a0, r0]
                    acc0 <- sum(in0)
                s[a0] = acc0
        with kernel('z', z=f32[512, 1024]):
            for a0 in free(512):
                for a1 in free(1024):
                    in0 = x[a0, a1]
                    v0 = sin(in0)
                    z[a0, a1] = v0
        with kernel('t', t=f32[512]):
            for a0 in free(512):
                for r0 in reduce(1024):
                    in0 = z[a0, r0]
                    acc0 <- sum(in0)
                t[a0] = acc0
        return (s, t)
    """
    found = _better(program, log, pass_name, in_place)
    return _moved(program, found) if found else program


def kernels_in_order(program: tile.Program, log: Log, pass_name: str, given: Given = NOTHING_GIVEN) -> tile.Program:
    """The same of Tile IR: schedules go along with their kernels. What reads the old value of an input stays before
    what writes a new one that is `given`.
    """
    if not (found := _better(program.loop, log, pass_name, in_place=True, given=given)):
        return program
    place = {old: new for new, old in enumerate(found)}
    schedules = sorted(((place[i], x) for i, x in program.schedules), key=lambda x: x[0])
    return tile.Program(_moved(program.loop, found), tuple(schedules))


def _moved(program: l.Program, order: Sequence[int]) -> l.Program:
    return l.Program(program.name, program.inputs, tuple(program.steps[i] for i in order), program.results)


def _better(program: l.Program, log: Log, pass_name: str, in_place: bool, given: Given = NOTHING_GIVEN) -> list[int]:
    """The order of steps in which less memory is in use at a time; empty where they stay as they are."""
    if any(not isinstance(e, int) for s in program.steps for b in s.writes for e in b.type.shape):
        return []  # who needs the sizes says where they are missing
    among = pairs(program.steps) if in_place else {}
    before = max(in_use(program.steps, program.results, among, inputs=program.inputs), default=0)
    if before < WORTH:
        return []
    after, found = _order(program, among, given)
    fired = after <= before * (1 - GAIN)
    why = f"{before / 1e6:.1f} MB are in use at a time, and {after / 1e6:.1f} MB in the best of other orders"
    log.add(Event(pass_name, RULE, program.name, fired, why))
    return found if fired else []


def reads_of(steps: Steps) -> dict[l.Buffer, list[int]]:
    """The numbers of the steps that read a buffer, in order."""
    found: dict[l.Buffer, list[int]] = {}
    for n, s in enumerate(steps):
        for b in s.reads:
            found.setdefault(b, []).append(n)
    return found


def last_uses(steps: Steps) -> dict[l.Buffer, int]:
    """The number of the last step that reads or writes a buffer."""
    found: dict[l.Buffer, int] = {}
    for n, s in enumerate(steps):
        found.update(dict.fromkeys((*s.reads, *s.writes), n))
    return found


def in_use(
    steps: Steps,
    results: Sequence[l.Buffer],
    among: Among | None = None,
    uses: Callable[[Steps], dict[l.Buffer, int]] = last_uses,
    named: Regions | None = None,
    inputs: Sequence[l.Buffer] = (),
) -> list[int]:
    """How many bytes what steps write, and what of the `inputs` is donated, takes while each of them runs, where
    results of kernels lie in place of what these read, as far as their terms allow (or `among` these), and regions
    where they are ones of: each piece of these while it is in use. The last `uses` of buffers may be known, and what is
    `named` a region, whatever the order.
    """
    among = pairs(steps) if among is None else among
    named = regions(steps, results) if named is None else named
    moved = [s for s in steps if s not in named.calls] if named.calls else steps
    pieces = named.pieces(moved) if named.calls else {}
    last = last_uses(moved) if named.calls else uses(steps)
    taken = taken_over(moved, results, among, apart=named.touched, last=last)
    last |= dict.fromkeys(results, len(moved))
    last |= {b: last[b] - 1 for b in taken.values()}
    change = [0] * (len(moved) + 2)
    there: set[l.Buffer] = set()
    for b, n in _last_reads(donated(inputs), last, named).items():
        change[0] += b.type.span
        change[n + 1] -= b.type.span
    for k, s in enumerate(moved):
        for b in s.writes:
            b, _ = named.of.get(b, (b, 0))
            if b in there:
                continue
            there.add(b)
            if b not in pieces:
                change[k] += b.type.span
                change[last[b] + 1] -= b.type.span
            for p in pieces.get(b, ()):
                change[p.first] += p.end - p.start
                change[(len(moved) if b in results else p.last) + 1] -= p.end - p.start
    found, now, more = list[int](), 0, iter(change)
    for s in steps:  # what only names memory changes nothing
        now += 0 if s in named.calls else next(more)
        found.append(now)
    return found


def _last_reads(ours: Collection[str], last: Mapping[l.Buffer, int], named: Regions) -> dict[l.Buffer, int]:
    """Of inputs that are `ours` the last step that reads one or a region of one."""
    found: dict[l.Buffer, int] = {}
    for b, n in last.items() if ours else ():
        whole, _ = named.of.get(b, (b, 0))
        if whole.name in ours:
            found[whole] = max(n, found.get(whole, 0))
    return found


def _order(program: l.Program, among: Among, given: Given) -> tuple[int, list[int]]:
    """The best of some orders of the steps, and how many bytes are in use at a time in it."""
    present = range(len(program.steps))
    needs = list(needs_of(program.steps, given))
    late = _late(needs)
    orders = [late, *(_freeing(program, needs, base) for base in (present, late))]
    named = regions(program.steps, program.results)

    def used(order: Sequence[int]) -> list[int]:
        steps = [program.steps[i] for i in order]
        return in_use(steps, program.results, among, named=named, inputs=program.inputs)

    return _around_peaks(program, needs, min(orders, key=lambda order: max(used(order))), used)


def _around_peaks(
    program: l.Program, needs: Sequence[set[int]], order: Sequence[int], used_in: Callable[[Sequence[int]], list[int]]
) -> tuple[int, list[int]]:
    """How many bytes are in use at a time, and an order, after steps went to the other side of where most is in use, as
    long as that lowers what is `used_in` an order.
    """

    def height(order: Sequence[int]) -> tuple[int, int, int]:
        """The most that is in use, in how many steps, and in which first."""
        used = used_in(order)
        return max(used), used.count(max(used)), used.index(max(used))

    found, now = list(order), height(order)
    for _ in range(ROUNDS):
        tried = ((height(x), x) for x in _around(program, needs, found, now[2]))
        better = next(((h, x) for h, x in tried if h[:2] < now[:2]), None)
        if better is None:
            break
        now, found = better
    return now[0], found


def _around(program: l.Program, needs: Sequence[set[int]], order: Sequence[int], peak: int) -> Iterator[list[int]]:
    """Orders in which a step that writes something large comes after the step at `peak`, with those before this that
    need it; or one that reads something large for the last time comes before it, with those after it that it needs.
    """
    steps, at = program.steps, order[peak]
    place = {i: n for n, i in enumerate(order)}
    readers: list[list[int]] = [[] for _ in order]
    for i, mine in enumerate(needs):
        for j in mine:
            readers[j].append(i)
    last = {b: i for i in order for b in (*steps[i].reads, *steps[i].writes)}
    first = {b: i for i in reversed(order) for b in steps[i].writes}
    alive = [b for b, i in first.items() if place[i] <= peak and (place[last[b]] > peak or b in program.results)]
    alive += [b for b, i in last.items() if i == at and b in first]
    ours = donated(program.inputs)
    alive += [b for b, i in last.items() if b.name in ours and place[i] > peak]
    for b in sorted(dict.fromkeys(alive), key=lambda b: -b.type.span)[:LARGEST]:
        later = followed(first[b], readers, lambda i: place[i] <= peak) if b in first else {at}
        if at not in later:
            yield [
                *(i for i in order[: peak + 1] if i not in later),
                *sorted(later, key=place.__getitem__),
                *order[peak + 1 :],
            ]
        sooner = followed(last[b], needs, lambda i: place[i] >= peak) if place[last[b]] > peak else {at}
        if at not in sooner:
            yield [*order[:peak], *sorted(sooner, key=place.__getitem__), *(i for i in order[peak:] if i not in sooner)]


def followed(step: int, others: Sequence[Iterable[int]], asked: Callable[[int], bool] = lambda _: True) -> set[int]:
    """A step and those that follow from it, one by one, as far as they are `asked` for."""
    found, front = {step}, [step]
    while front:
        new = {i for i in others[front.pop()] if asked(i)} - found
        found |= new
        front += new
    return found


def needs_of(steps: Steps, given: Given = NOTHING_GIVEN) -> Iterator[set[int]]:
    """The earlier steps that each one must come after: those that write what it reads, those that read what it stores
    over, and, of calls with an effect, such as drawing random numbers, the one before. So do those that read the old
    value of an input come before what writes one that is `given`.
    """
    writer: dict[l.Buffer, int] = {}
    readers: dict[l.Buffer, set[int]] = {}
    effect: int | None = None
    for i, s in enumerate(steps):
        found = {writer[b] for b in s.reads if b in writer}
        over = s.over if isinstance(s, l.Kernel) else {}
        for old in {given.get(b) or over.get(b) for b in s.writes} - {None}:
            found |= readers.get(old, set())  # type: ignore[arg-type]
        for b in s.reads:
            readers.setdefault(b, set()).add(i)
        if isinstance(s, l.Call) and s.order:
            found |= {effect} if effect is not None else set()
            effect = i
        yield found
        writer.update(dict.fromkeys(s.writes, i))


def _late(needs: Sequence[set[int]]) -> list[int]:
    """The steps in an order in which each comes right before the first that needs it."""
    asked = list(range(len(needs)))
    for i in reversed(range(len(needs))):
        for j in needs[i]:
            asked[j] = asked[i] if asked[j] == j else min(asked[j], asked[i])
    return sorted(range(len(needs)), key=lambda i: (asked[i], i))


def _freeing(program: l.Program, needs: Sequence[set[int]], base: Sequence[int]) -> list[int]:
    """The steps in the order `base`, but for those that free more than they take: they come as soon as they can, the
    one that frees most first.
    """
    steps, kept, ours = program.steps, set(program.results), donated(program.inputs)
    given = {b for b in program.inputs if b.name not in ours}
    place = {i: n for n, i in enumerate(base)}
    waits = [len(x) for x in needs]
    after: list[list[int]] = [[] for _ in steps]
    for i, found in enumerate(needs):
        for j in found:
            after[j].append(i)
    uses = [{*s.reads, *s.writes} for s in steps]
    users: dict[l.Buffer, set[int]] = {}
    for i, used in enumerate(uses):
        for b in used:
            users.setdefault(b, set()).add(i)
    left = Counter({b: len(x) for b, x in users.items()})

    def rank(i: int) -> tuple[int, int]:
        """Who comes first: by what is in use more after a step than before it, if that is less than none."""
        more = sum(b.type.span for b in steps[i].writes if left[b] > 1 or b in kept)
        less = sum(b.type.span for b in set(steps[i].reads) - given - kept if left[b] == 1)
        return min(more - less, 0), place[i]

    ready = [(*rank(i), i) for i in base if not waits[i]]
    heapq.heapify(ready)
    done: dict[int, None] = {}
    while ready:
        *_, i = heapq.heappop(ready)
        if i in done:  # it was ranked anew since
            continue
        done[i] = None
        for b in uses[i]:
            left[b] -= 1
            users[b].discard(i)
            if left[b] == 1 and not waits[last := next(iter(users[b]))]:
                heapq.heappush(ready, (*rank(last), last))
        for j in after[i]:
            waits[j] -= 1
            if not waits[j]:
                heapq.heappush(ready, (*rank(j), j))
    return list(done)
