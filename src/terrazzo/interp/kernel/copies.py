"""What Kernel IR means by copies that arrive later: cp.async, boxes of TMA, and the barriers and groups they are waited
for by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from terrazzo.hw import tma
from terrazzo.hw.transfer import CP_ASYNC
from terrazzo.interp.kernel.barriers import Ring, Wait
from terrazzo.interp.kernel.memory import view
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.layout import HARDWARE

if TYPE_CHECKING:
    from terrazzo.interp.kernel.threads import Threads

Done = Callable[[Any], None]


@dataclass
class Operation:
    """Something that some threads began: the group it is of, for each, and what happens when they have waited for
    it.
    """

    group: Any
    mask: Any
    done: Done


class Groups:
    """Asynchronous work of the threads of a team, kind by kind, in groups."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.committed = {kind: np.zeros(shape, np.int32) for kind in k.KINDS}
        self.begun: dict[str, list[Operation]] = {kind: [] for kind in k.KINDS}

    def begin(self, kind: str, threads: Any, done: Done) -> None:
        """These threads begin something; `done` is told which of them have waited for it."""
        self.begun[kind].append(Operation(self.committed[kind].copy(), threads.copy(), done))

    def commit(self, kind: str, threads: Any) -> None:
        """What they began and did not commit becomes a group."""
        self.committed[kind] += threads

    def wait(self, kind: str, threads: Any, open_: int) -> None:
        """These threads wait until at most that many groups are open."""
        for x in self.begun[kind]:
            done = x.mask & threads & (x.group < self.committed[kind] - open_)
            if done.any():
                x.done(done)
                x.mask &= ~done
        self.begun[kind] = [x for x in self.begun[kind] if x.mask.any()]


def async_copy(team: Threads, s: k.AsyncCopy) -> None:
    """The copy may write from now on; it has written once its group was waited for."""
    inside = team.holds(s.inside)
    reading = team.active & inside
    source = team.at(s.source, s.at, s.count, s, reading)
    data = CP_ASYNC.run(team.get(s.source, source, s, active=reading), inside)
    at = team.at(s.target, s.to, s.count, s)
    x, memory = team.access(at, team.active), team.machine.places[s.target]
    team.refuse(memory.check_write(x.b, x.a, x.w), x, s)
    memory.fly(x.b, x.a, team.line)
    line = team.line
    if team.machine.costs is not None:
        read = source[..., 0] * s.source.type.dtype.size
        team.machine.costs.copy(s, read, team.bytes(s.target, at[..., 0]), team.active, inside)

    def done(threads: Any) -> None:
        landing = team.access(at, threads)
        here, team.line = team.line, line
        team.write(s.target, landing, np.broadcast_to(data, at.shape)[landing.mask], s, landing=True)
        team.line = here

    team.groups.begin("cp.async", team.active, done)


def commit(team: Threads, s: k.Commit) -> None:
    team.groups.commit(s.kind, team.active)


def wait_groups(team: Threads, s: k.WaitGroups) -> None:
    team.groups.wait(s.kind, team.active, s.open)


def fence(team: Threads, s: k.Fence) -> None:
    if s.kind == "wgmma":
        team.fragments.fence(team.active)
    else:
        i, j = np.nonzero(team.active.any(axis=2))
        team.machine.clocks.fence(team.block[i, 0, 0], team.warp[0, j, 0])


def init_barriers(team: Threads, s: k.InitBarriers) -> None:
    for b, w, where in team.one_thread(s):
        if why := team.machine.rings[s.barriers].make(b, w):
            team.fail(s, why, where)


def expect(team: Threads, s: k.Expect) -> None:
    for (b, w, where), n in zip(team.one_thread(s), team.chosen(s.slot), strict=True):
        if why := ring(team, s, b, (b, w), int(n)).arrive(b, int(n), (b, w), s.bytes):
            team.fail(s, why, where)


def arrive(team: Threads, s: k.Arrive) -> None:
    """Every thread that executes it arrives."""
    ranks = None if s.rank is None else team.chosen(s.rank)
    for i, ((x, y, z), n) in enumerate(zip(np.argwhere(team.active), team.chosen(s.slot), strict=True)):
        b, w = int(team.block[x, 0, 0]), int(team.warp[0, y, 0])
        to = b if ranks is None else peer(team, s, b, int(ranks[i]))
        if why := ring(team, s, to, (b, w), int(n)).arrive(to, int(n), (b, w)):
            team.fail(s, why, (x, y, z))


def peer(team: Threads, s: Any, b: int, rank: int) -> int:
    """The block of the same cluster with this rank."""
    if not 0 <= rank < team.kernel.cluster:
        team.fail(s, f"names block {rank} of a cluster of {team.kernel.cluster}")
    return b - b % team.kernel.cluster + rank


def ring(team: Threads, s: Any, b: int, by: tuple[int, int], n: int) -> Ring:
    """The barriers of a block that a statement names, used by a warp (block, warp)."""
    found = team.machine.rings[s.barriers]
    if why := found.unusable(b, by):
        team.fail(s, why)
    if not 0 <= n < found.phase.shape[1]:
        team.fail(s, f"at {found.name}[{n}] is outside [0, {found.phase.shape[1]})")
    return found


def wait_barrier(team: Threads, s: k.WaitBarrier) -> Iterator[Wait]:
    """All warps of a block that are here wait for one barrier; what came before its phase ended, they know then."""
    slots, phases = (np.broadcast_to(team.number_of(e), team.shape) for e in (s.slot, s.phase))
    waits: list[tuple[int, int, int, int]] = []
    for i, j in np.argwhere(team.active.any(axis=2)):
        here = team.active[i, j]
        if any(np.unique(x[i, j][here]).size > 1 for x in (slots, phases)):
            team.fail(s, "waits for several barriers in one warp", (i, j, 0))
        b, w, n, phase = (
            int(x) for x in (team.block[i, 0, 0], team.warp[0, j, 0], slots[i, j][here][0], phases[i, j][here][0])
        )
        if phase not in (0, 1):
            team.fail(s, f"waits for phase {phase}, which is neither 0 nor 1", (i, j, 0))
        ring(team, s, b, (b, w), n)
        waits.append((b, w, n, phase))
    barriers, line = team.machine.rings[s.barriers], team.line

    def short() -> list[tuple[int, int, int, int]]:
        return [(b, w, n, phase) for b, w, n, phase in waits if not barriers.passed(b, n, phase)]

    while late := short():
        for b, w, n, phase in late:
            if barriers.lapped(b, n, w, phase):
                team.line = line
                team.fail(s, f"waits for a phase of {barriers.name}[{n}] that ended, as did the next")
        b, _, n, phase = late[0]
        yield Wait(
            line,
            lambda: not short(),
            lambda b=b, n=n, phase=phase: f"phase {phase}: {barriers.short(b, n)}",  # type: ignore[misc]
            lambda b=b, n=n: barriers.miscounted(b, n),  # type: ignore[misc]
        )
    for b, w, n, _ in waits:
        barriers.waited[b, n] = barriers.phase[b, n] - 1
        team.machine.clocks.acquire(barriers.released[n], np.array([b]), np.array([w]))


def box(team: Threads, place: k.Shared, to: tuple[IntExpr, ...], size: int, s: Any) -> list[Any]:
    """For every thread that is here, the elements of a box's slab, as many as `size`."""
    starts = team.start(place, to)[team.active]
    if (starts < 0).any() or (starts + size > team.size(place)).any():
        team.fail(s, f"goes {size} elements on, beyond the end of {place.name}")
    align = 128 if not place.swizzle else 8 * place.swizzle
    if (starts * place.type.dtype.size % align).any():
        team.fail(s, f"has a slab in {place.name} that is not aligned to {align} bytes")
    return [int(x) + np.arange(size) for x in starts]


def tensor_load(team: Threads, s: k.TensorLoad) -> None:
    """Boxes set out now; where they go, nobody may still be reading. They have come when the phase of their barrier
    ends.
    """
    threads = team.one_thread(s)
    slots, at = team.chosen(s.slot), [team.chosen(e) for e in s.at]
    description = tma.tensor_map(s.tensor, s.box, s.target.swizzle)
    memory = team.machine.memory
    if s.source not in memory:
        team.fail(s, f"reads {s.source.name}, which the kernel writes")
    places = box(team, s.target, s.to, description.bytes // s.target.type.dtype.size, s)
    for i, (b, w, where) in enumerate(threads):
        data = description.load(view(s.tensor, memory[s.source]), [int(a[i]) for a in at])
        plain = data[HARDWARE[s.target.swizzle](np.arange(data.size))].view(s.target.type.dtype.numpy)
        peers = [peer(team, s, b, rank) for rank in range(16) if s.ranks >> rank & 1] or [b]
        for to in peers:
            n = int(slots[i])
            barriers = ring(team, s, to, (b, w), n)
            x = team.whole(to, places[i], w, where)
            place = team.machine.places[s.target]
            team.refuse(place.check_write(x.b, x.a, x.w, asynchronous=True, by=np.full(x.a.size, b)), x, s)
            place.fly(x.b, x.a, team.line)
            if why := barriers.send(to, n, (b, w), place, places[i], plain, team.line):
                team.fail(s, why, where)


def tensor_store(team: Threads, s: k.TensorStore) -> None:
    """The box is read from now until its group was waited for; what it wrote is seen when the kernel has ended."""
    threads = team.one_thread(s)
    at = [team.chosen(e) for e in s.to]
    description = tma.tensor_map(s.tensor, s.box, s.source.swizzle)
    places = box(team, s.source, s.at, description.bytes // s.source.type.dtype.size, s)
    clocks, memory = team.machine.clocks, team.machine.places[s.source]
    for i, (b, w, where) in enumerate(threads):
        x = team.whole(b, places[i], w, where)
        team.refuse(memory.check_read(x.b, x.a, x.w, asynchronous=True), x, s)
        time, agent = clocks.send(b, w, "bulk"), clocks.reader(b, w, "bulk")
        memory.note_read(x.b, x.a, np.full(x.a.size, agent), time, team.line)
        inside, to = description.places([int(a[i]) for a in at])
        values, y = memory.data[x.b, x.a][inside], team.whole(b, to, w, where)
        if s.reduction:
            team.combine(s.target, y, values, s.reduction, s, box=True)
        else:
            team.write_output(s.target, y, values, s, box=True)

        def done(threads: Any, b: int = b, w: int = w, agent: Any = agent, time: Any = time) -> None:
            clocks.learn(b, w, agent, time)

        one = np.zeros(team.shape, bool)
        one[where] = True
        team.groups.begin("bulk", one, done)


MEANING: dict[type, Callable[[Threads, Any], None]] = {
    k.AsyncCopy: async_copy,
    k.Commit: commit,
    k.WaitGroups: wait_groups,
    k.Fence: fence,
    k.InitBarriers: init_barriers,
    k.Expect: expect,
    k.Arrive: arrive,
    k.TensorLoad: tensor_load,
    k.TensorStore: tensor_store,
}
