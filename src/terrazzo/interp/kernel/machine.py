"""Some blocks of a kernel: their memory, barriers and teams, and who goes next."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, permutations
from typing import Any, NoReturn

import numpy as np

from terrazzo.errors import CompilerBug, about, note
from terrazzo.interp.costs import Costs
from terrazzo.interp.kernel.barriers import Meeting, Ring, Wait
from terrazzo.interp.kernel.clocks import Clocks
from terrazzo.interp.kernel.memory import NOBODY, Output, Place, flat_memory, view
from terrazzo.interp.kernel.team import Team
from terrazzo.interp.loop import run_call
from terrazzo.interp.tensor import Call
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.node import topological
from terrazzo.ir.places import TextLine
from terrazzo.ir.show_kernel import show_kernel

TOGETHER = 1 << 14
"""How many threads are simulated together, at most."""
SHADOW = 1 << 24
"""How many times of reads are remembered together, at most."""


def run(
    program: k.Program,
    inputs: Mapping[str, Any],
    *,
    call: Call | None = None,
    seed: int | None = None,
    costs: Costs | None = None,
    truncates: bool = False,
) -> list[Any]:
    """The results of `program`. See run_kernel for `seed`, `costs` and `truncates`."""
    memory: dict[l.Buffer, Any] = {b: np.asarray(inputs[b.name]).astype(b.type.dtype.numpy) for b in program.inputs}
    for step in program.steps:
        with about(step):
            if isinstance(step, k.Kernel):
                run_kernel(step, memory, seed=seed, costs=costs, truncates=truncates)
            else:
                run_call(step, memory, False, call)
    return [memory[b] for b in program.results]


def run_kernel(
    kernel: k.Kernel,
    memory: dict[l.Buffer, Any],
    *,
    seed: int | None = None,
    blocks: Sequence[int] | None = None,
    costs: Costs | None = None,
    truncates: bool = False,
) -> None:
    """Run a kernel on `memory`, arrays in the shape of their buffers; adds those it writes.

    With a `seed` every warp goes its own way, in an order that a scheduler with that seed finds adverse. `blocks` are
    those to run (with the others of their clusters), else all; `costs` counts what is used. Where it
    `truncates`, wgmma adds up in float32 as a Hopper does. CompilerBug where the kernel is wrong.
    """
    flat = {b: flat_memory(b, memory[b]) for b in kernel.params if b not in kernel.writes}
    for b, old in kernel.over:
        memory.setdefault(b, memory[old].copy())
    outputs = {b: Output(b, memory.get(b)) for b in kernel.writes}
    clusters = (
        list(range(kernel.grid // kernel.cluster)) if blocks is None else sorted({b // kernel.cluster for b in blocks})
    )
    cells = sum(k.shared_bytes(s) // s.type.dtype.size for s in kernel.shared) * kernel.warps * kernel.cluster
    step = max(min(TOGETHER // kernel.threads, SHADOW // max(cells, 1)) // kernel.cluster, 1)
    for first in range(0, len(clusters), step):
        ids = [c * kernel.cluster + rank for c in clusters[first : first + step] for rank in range(kernel.cluster)]
        Machine(kernel, flat, outputs, np.array(ids), seed, costs, truncates).run()
    for b in kernel.writes:
        if blocks is None and outputs[b].fresh and (left := np.argwhere(view(b.type, outputs[b].block) == NOBODY)).size:
            raise CompilerBug(
                f"{kernel.name}: nobody writes {b.name}{left[0].tolist()}; {len(left)} of its elements stay unwritten"
            )
        memory[b] = view(b.type, outputs[b].data).copy()


class Machine:
    """The blocks numbered `ids`, whole clusters, step by step. `b` is a block's place in `ids` wherever arrays have a
    block axis.
    """

    def __init__(
        self,
        kernel: k.Kernel,
        memory: Mapping[l.Buffer, Any],
        outputs: Mapping[l.Buffer, Output],
        ids: Any,
        seed: int | None,
        costs: Costs | None,
        truncates: bool = False,
    ) -> None:
        self.truncates = truncates
        self.kernel, self.memory, self.outputs, self.ids, self.costs = kernel, memory, outputs, ids, costs
        self.random = None if seed is None else random.Random(seed)
        self.teams: list[Team] = []
        self.rank: dict[Team, float] = {}
        rings = [s for s in kernel.shared if isinstance(s, k.Barriers)]
        self.clocks = Clocks(len(ids), kernel.warps, sum(r.type.static_shape[0] for r in rings), kernel.cluster)
        self.places = {s: Place(s, self.clocks) for s in kernel.shared if not isinstance(s, k.Barriers)}
        for (s, one), (t, other) in permutations(self.places.items(), 2):
            further = kernel.offsets[s] - kernel.offsets[t]
            if -k.shared_bytes(s) < further < k.shared_bytes(t):
                one.over.append((other, further))
        self.rings: dict[k.Shared, Ring] = {}
        first = 0
        for r in rings:
            count = r.type.static_shape[0]
            self.rings[r] = Ring(r.name, count, r.arrivals, self.clocks, first)
            first += count
        self.meetings: dict[tuple[int, int], Meeting] = {}
        self.variables = [e for e in topological(kernel.body) if isinstance(e, Var) and e.name in k.THREADS]
        self.first_line = 1 + len(kernel.shared)

    def run(self) -> None:
        """Until all teams are done. CompilerBug where none can go on."""
        every = range(len(self.ids))
        alone = [[b] for b in every] if self.kernel.cluster > 1 else [list(every)]
        self.teams = [Team(self, np.array(blocks), np.array(warps)) for blocks in alone for warps in self.parts()]
        going = [(team, team.statements(self.kernel.body, self.first_line)) for team in self.teams]
        waiting: dict[Team, Wait] = {}
        while going:
            able = [x for x in going if (wait := waiting.get(x[0])) is None or wait.ready()]
            if not able:
                self.stuck(waiting[team] for team, _ in going)
            for team, steps in self.order(able):
                found = self.advance(team, steps)
                if found is None:
                    going.remove((team, steps))
                    waiting.pop(team, None)
                else:
                    waiting[team] = found
        self.end()
        self.let_go()

    def advance(self, team: Team, steps: Iterator[Wait]) -> Wait | None:
        """Run a team up to where it waits next, or to its end (None)."""
        try:
            return next(steps, None)
        except Exception as error:
            note(error, TextLine(self.kernel, team.line))
            raise

    def parts(self) -> Iterator[list[int]]:
        """The warps of each team: those that nothing tells apart; each by itself where the scheduler is adverse."""
        body = list(k.walk(self.kernel.body))
        warps = self.kernel.warps
        grain = 4 if any(isinstance(s, k.MultiplyAsync) for s in body) else 1
        apart = self.random is not None or _waits_apart(body)
        cuts = {0, warps, *(range(0, warps, grain) if apart else ())}
        for s in body:
            if isinstance(s, k.Role):
                cuts |= {s.first, s.first + s.count}
        ordered = sorted(cuts)
        return (list(range(a, b)) for a, b in pairwise(ordered))

    def order(self, able: list[tuple[Team, Iterator[Wait]]]) -> list[tuple[Team, Iterator[Wait]]]:
        """Who goes next: all in turn; or the first of a ranking which changes now and then, so that some run far
        ahead.
        """
        if self.random is None:
            return able
        if not self.rank or self.random.random() < 0.1:
            self.rank = {team: self.random.random() for team in self.teams}
        return [min(able, key=lambda x: self.rank[x[0]])]

    def stuck(self, waits: Iterable[Wait]) -> NoReturn:
        """Nobody can go on."""
        waits = list(waits)
        for w in waits:
            if fault := w.fault():
                with about(TextLine(self.kernel, w.line)):
                    raise CompilerBug(f"{self.kernel.name}: line {w.line} `{self.text(w.line)}`: {fault}")
        told = {(self.text(w.line), w.why()): w.line for w in waits}
        lines = "; ".join(f"line {line} `{text}`{f' ({why})' if why else ''}" for (text, why), line in told.items())
        with about(*(TextLine(self.kernel, line) for line in told.values())):
            raise CompilerBug(f"{self.kernel.name}: waits for ever at {lines}")

    def end(self) -> None:
        """Shared memory may belong to another block now: somebody must have waited for all that comes there or reads
        it.
        """
        late = [place.name for place in self.places.values() if (place.flying > 0).any()]
        for ring in self.rings.values():
            for b, n in ring.state:
                if ring.sent[b, n] > self.clocks.known[b, :, self.clocks.barrier(b, ring.first + n)].max():
                    late.append(f"{ring.name}[{n}]")
        if any(self.clocks.known[b, :, agent].max() < time for (b, agent), time in self.clocks.visits.items()):
            raise CompilerBug(
                f"{self.kernel.name}: a block may have ended when another of its cluster uses its shared memory"
            )
        if any(team.groups.begun["bulk"] for team in self.teams):
            raise CompilerBug(f"{self.kernel.name}: ends while boxes are read that it stores")
        if late:
            raise CompilerBug(f"{self.kernel.name}: ends while copies are on their way to {late[0]}")

    def let_go(self) -> None:
        """Break the cycles of references, which would keep all that memory until somebody looks for some."""
        self.teams, self.rank = [], {}
        for place in self.places.values():
            place.over.clear()

    def meeting(self, number: int, warps: int) -> Meeting:
        """A barrier of the block: all of them by its number, and how many warps it is for."""
        return self.meetings.setdefault((number, warps), Meeting(self.clocks, warps or self.kernel.warps))

    def cluster_meeting(self) -> Meeting:
        """The barrier of the cluster."""
        return self.meetings.setdefault((-1, 0), Meeting(self.clocks, self.kernel.warps, self.kernel.cluster))

    def text(self, line: int) -> str:
        """A line of the kernel's text."""
        return show_kernel(self.kernel)[line].strip()


def _waits_apart(body: list[Any]) -> bool:
    """Whether some warps of a block wait where others do not: they cannot go step by step then."""
    waits = k.WaitBarrier | k.Sync | k.ClusterSync
    varying = k.varying(tuple(body), ("warp", "lane"))
    return any(
        k.depends(e, ("warp",), varying)
        for s in body
        if isinstance(s, k.If | k.For) and any(isinstance(x, waits) for x in k.walk(s.body))
        for e in (s.inside if isinstance(s, k.If) else (s.axis.extent,))
    )
