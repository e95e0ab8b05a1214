"""What Kernel IR means by the instructions of whole warps: ldmatrix, stmatrix, movmatrix, mma.sync, and wgmma with
accumulators in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from terrazzo.hw import ldmatrix, mma_sync, wgmma
from terrazzo.hw.movmatrix import TURN
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.layout import HARDWARE
from terrazzo.ir.node import Node

if TYPE_CHECKING:
    from terrazzo.interp.kernel.threads import Threads


class InFlight:
    """Registers that products of a warpgroup use until they were waited for, and those that wgmma may not use before a
    fence.
    """

    def __init__(self, shape: tuple[int, ...], body: tuple[Node, ...]) -> None:
        used = [
            place
            for s in k.walk(body)
            if isinstance(s, k.MultiplyAsync)
            for place in (s.d, s.a)
            if isinstance(place, k.Registers)
        ]
        self.users: dict[k.Registers, Any] = {}
        self.touched: dict[k.Registers, Any] = {place: np.zeros(shape, bool) for place in used}

    def take(self, team: Threads, place: k.Registers, at: int, count: int, step: int) -> None:
        """One product more (step 1) or less (-1) uses registers of the threads of a team that are here."""
        if place not in self.users:
            self.users[place] = np.zeros(team.registers[place].shape, np.int16)
        self.users[place][..., at : at + count] += step * team.active[..., None]

    def refuse(self, team: Threads, place: k.Registers, at: int, count: int, s: Node) -> None:
        """CompilerBug where threads use registers that a product uses."""
        if (users := self.users.get(place)) is not None and (
            late := users[..., at : at + count].any(axis=-1) & team.active
        ).any():
            team.fail(
                s, f"uses registers of {place.name} that wgmma is using, before it was waited for", np.argwhere(late)[0]
            )

    def touch(self, place: k.Registers, threads: Any) -> None:
        """Threads use registers plainly."""
        if place in self.touched:
            self.touched[place] = self.touched[place] | threads

    def fence(self, threads: Any) -> None:
        """From here on wgmma may use what these threads touched."""
        self.touched = {place: touched & ~threads for place, touched in self.touched.items()}


def whole_warps(team: Threads, s: Node) -> None:
    """CompilerBug unless whole warps execute an instruction."""
    some = team.active.any(axis=2)
    if (team.active.all(axis=2) != some).any():
        team.fail(s, "is executed by some lanes of a warp only", np.argwhere(team.active)[0])


def rows(team: Threads, s: k.LoadMatrix | k.StoreMatrix, place: k.Shared, index: Any) -> Any:
    """The elements of shared memory that each lane gets or gives, from the rows that lanes name."""
    whole_warps(team, s)
    record = ldmatrix.move(s.instruction)
    named = team.at(place, index, 1, s)[..., 0]
    if (odd := team.active & (named * place.type.dtype.size % 16 != 0)).any():
        team.fail(s, f"names a row of {place.name} that is not aligned to 16 bytes", np.argwhere(odd)[0])
    where = _places(record)
    if team.machine.costs is not None:
        team.machine.costs.matrix(s, team.bytes(place, named), team.active)
    return named[..., where.get("j", 0) * 8 + where["r"]] + where["c"]


@cache
def _places(record: ldmatrix.MatrixMove) -> dict[str, Any]:
    """Of which matrix, row and column a lane's elements are."""
    reg, lane = np.meshgrid(np.arange(1 << record.layout.bits("reg")), np.arange(k.WARP))
    return record.layout.coordinates(reg=reg, lane=lane)


def load_matrix(team: Threads, s: k.LoadMatrix) -> None:
    data = np.ascontiguousarray(team.get(s.source, rows(team, s, s.source, s.at), s))
    held = data.view(s.target.type.dtype.numpy)
    team.put(s.target, team.at(s.target, s.to, held.shape[-1], s), held, s)


def store_matrix(team: Threads, s: k.StoreMatrix) -> None:
    at = rows(team, s, s.target, s.to)
    count = at.shape[-1] * s.target.type.dtype.size // s.source.type.dtype.size
    held = np.ascontiguousarray(team.get(s.source, team.at(s.source, s.at, count, s), s, count))
    team.put(s.target, at, held.view(s.target.type.dtype.numpy), s)


def turn_matrix(team: Threads, s: k.TurnMatrix) -> None:
    whole_warps(team, s)
    count = 4 // s.source.type.dtype.size
    held = np.ascontiguousarray(team.get(s.source, team.at(s.source, s.at, count, s), s, count))
    turned = np.ascontiguousarray(TURN.run(held.view(np.uint16))).view(s.target.type.dtype.numpy)
    team.put(s.target, team.at(s.target, s.to, turned.shape[-1], s), turned, s)


def multiply(team: Threads, s: k.Multiply) -> None:
    whole_warps(team, s)
    record = mma_sync.product(s.instruction)
    operands = []
    for place, at, fragment in ((s.a, s.a_at, record.a), (s.b, s.b_at, record.b), (s.d, s.d_at, record.d)):
        count = fragment.held_in(place)
        data = np.ascontiguousarray(team.get(place, team.at(place, at, count, s), s, count))
        operands.append(data.view(fragment.dtype.numpy))
    team.put(s.d, team.at(s.d, s.d_at, record.d.elements, s), record.run(*operands), s)


def multiply_async(team: Threads, s: k.MultiplyAsync) -> None:
    """The product is computed now, and until it was waited for nobody may use its registers, nor write what it
    reads.
    """
    record = wgmma.product(s.instruction)
    groups, fresh = _warpgroups(team, s), _fresh(team, s)
    d, count = team.at(s.d, s.d_at, record.d.registers, s), record.d.registers
    used = [(s.d, d, count)]
    if isinstance(s.a, k.Registers):
        used.append((s.a, team.at(s.a, s.a_at, record.a.held_in(s.a), s), record.a.held_in(s.a)))
    for place, at, n in used:
        if (unfenced := team.fragments.touched[place] & team.active).any():
            team.fail(
                s,
                f"uses registers of {place.name} with no wgmma fence since they were used plainly",
                np.argwhere(unfenced)[0],
            )
        needed = team.active & ~fresh if place is s.d else team.active
        if not (team.known[place][..., at : at + n].all(axis=-1) | ~needed).all():
            team.fail(s, f"reads registers of {place.name} that nobody wrote")
    team.known[s.d][..., d : d + count] |= team.active[..., None]
    held = team.registers[s.d][..., d : d + count]
    clocks, learned = team.machine.clocks, []
    for i, first in groups:
        four = slice(first, first + 4)
        b, w = int(team.block[i, 0, 0]), int(team.warp[0, first, 0])
        time, agent = clocks.send(b, w, "wgmma"), clocks.reader(b, w, "wgmma")
        if isinstance(s.a, k.Registers):
            place, at, n = used[1]
            packed = np.ascontiguousarray(team.registers[place][i, four, :, at : at + n])
            left = record.collect(packed.view(record.operand.numpy).reshape(128, -1))
        else:
            left = _slab(team, s, "a", s.a, s.a_at, i, first, agent, time)
        right = _slab(team, s, "b", s.b, s.b_at, i, first, agent, time)
        before = None if fresh[i, first, 0] else held[i, four].reshape(128, count)
        held[i, four] = record.run(left, right, before, team.machine.truncates).reshape(4, k.WARP, count)
        learned.append((i, first, b, agent, time))
    for place, at, n in used:
        team.fragments.take(team, place, at, n, 1)

    def done(threads: Any) -> None:
        here, team.active = team.active, threads
        for place, at, n in used:
            team.fragments.take(team, place, at, n, -1)
        team.active = here
        for i, first, b, agent, time in learned:
            for j in range(first, first + 4):
                if threads[i, j].any():
                    clocks.learn(b, int(team.warp[0, j, 0]), agent, time)

    team.groups.begin("wgmma", team.active, done)


def _warpgroups(team: Threads, s: Node) -> list[tuple[int, int]]:
    """The warpgroups that execute an instruction whole: block and first warp, as the team counts them."""
    whole: Any = team.active.all(axis=2)
    some: Any = team.active.any(axis=2)
    found = []
    for i in range(team.shape[0]):
        for j in np.nonzero(some[i])[0]:
            first = j - team.warp[0, j, 0] % 4
            if first < 0 or not whole[i, first : first + 4].all() or whole[i, first : first + 4].size < 4:
                team.fail(s, "is executed by a part of a warpgroup only", (i, j, 0))
            found.append((i, int(first)))
    return list(dict.fromkeys(found))


def _fresh(team: Threads, s: k.MultiplyAsync) -> Any:
    """The threads whose accumulators begin with this product: all or none of a warpgroup."""
    fresh = np.broadcast_to(team.number_of(s.fresh) >= 0, team.shape)
    for i, first in _warpgroups(team, s):
        if len(np.unique(fresh[i, first : first + 4])) > 1:
            team.fail(s, "adds to its accumulators in some threads of a warpgroup only", (i, first, 0))
    return fresh


def _slab(
    team: Threads, s: k.MultiplyAsync, operand: str, place: Any, index: Any, i: int, first: int, agent: Any, time: Any
) -> Any:
    """An operand of a warpgroup's product in shared memory, [rows of m or n, k], where its descriptor says it is."""
    record, transposed = wgmma.product(s.instruction), operand in s.transposed
    offset = team.start(place, index)[i, first : first + 4]
    if np.unique(offset).size > 1:
        team.fail(s, f"names several slabs of {place.name} in one warpgroup", (i, first, 0))
    size = place.type.dtype.size
    at = team.kernel.offsets[place] + int(offset[0, 0]) * size
    if at % 16:
        team.fail(s, f"has a slab in {place.name} that is not aligned to 16 bytes", (i, first, 0))
    described = wgmma.descriptor(at, wgmma.slab(place, transposed))
    addresses = wgmma.addresses(described, *record.extent(operand, transposed))[:, ::size]
    elements = (HARDWARE[place.swizzle](addresses - team.kernel.offsets[place])) // size
    if (elements < 0).any() or (elements >= team.size(place)).any():
        team.fail(s, f"has a slab that goes beyond the end of {place.name}", (i, first, 0))
    b = int(team.block[i, 0, 0])
    flat = elements.reshape(-1)
    memory = team.machine.places[place]
    for j in range(first, first + 4):  # every warp of the four must know that it may
        x = team.whole(b, flat, int(team.warp[0, j, 0]), (i, j, 0))
        team.refuse(memory.check_read(x.b, x.a, x.w, asynchronous=True), x, s)
    memory.note_read(np.full(flat.size, b), flat, np.full(flat.size, agent), time, team.line)
    if team.machine.costs is not None:
        team.machine.costs.slab(s, addresses.size * size)
    found = memory.data[b, elements].astype(np.float64)
    return found.T if transposed else found


MEANING: dict[type, Callable[[Threads, Any], None]] = {
    k.LoadMatrix: load_matrix,
    k.StoreMatrix: store_matrix,
    k.TurnMatrix: turn_matrix,
    k.Multiply: multiply,
    k.MultiplyAsync: multiply_async,
}
