"""Statements that wait, arrive and order: groups of what is asynchronous, barriers, fences."""

from __future__ import annotations

from terrazzo.errors import UserError
from terrazzo.ir.dialects.kernel.statement import Cuda, Function, Statement, one_of
from terrazzo.ir.dialects.kernel.values import WARP, Barriers
from terrazzo.ir.expr import IntExpr

KINDS = {"cp.async": "cp_async", "wgmma": "wgmma", "bulk": "tma"}
"""What is grouped, each kind by itself: copies into shared memory, products of warpgroups, boxes on their way to global
memory; and what CUDA calls it."""


class Commit(Statement, dialect="kernel", op="commit"):
    """What this thread began asynchronously since the last commit, of one of the KINDS, becomes a group."""

    kind: str = "cp.async"

    def check(self) -> None:
        one_of("commit", self.kind, KINDS)

    def functions(self, cluster: int) -> tuple[Function, ...]:
        return ((self.kind,),)

    def cuda(self, w: Cuda) -> list[str]:
        return [f"{KINDS[self.kind]}_commit();"]


class WaitGroups(Statement, dialect="kernel", op="wait_groups"):
    """Until at most `open` groups of this thread, of a kind, are on their way. Boxes ("bulk") have then been read, not
    yet written.
    """

    open: int
    kind: str = "cp.async"

    def check(self) -> None:
        one_of("wait_groups", self.kind, KINDS)

    def functions(self, cluster: int) -> tuple[Function, ...]:
        return ((self.kind,),)

    def cuda(self, w: Cuda) -> list[str]:
        settled = w.settled() if self.kind == "wgmma" else []
        return [f"{KINDS[self.kind]}_wait<{self.open}>();", *(f"wgmma_settled({name});" for name in settled)]


class Sync(Statement, dialect="kernel", op="sync"):
    """Until `warps` warps are here (0: all of the block), at barrier `number`; what they wrote to shared memory is then
    seen by all.
    """

    number: int = 0
    warps: int = 0

    @property
    def together(self) -> str:  # type: ignore[override]
        """All of the block, or the warps that it names."""
        return "warp" if self.warps else "block"

    def check(self) -> None:
        if not (self.number == self.warps == 0 or (1 <= self.number <= 15 and 1 <= self.warps <= 32)):
            raise UserError(
                f"sync(number, warps) has numbers 1 to 15 and 1 to 32 warps, not {self.number} and {self.warps}"
            )

    def functions(self, cluster: int) -> tuple[Function, ...]:
        return (("named",),) if self.warps else ()

    def cuda(self, w: Cuda) -> list[str]:
        return [f"sync({self.number}, {self.warps * WARP});" if self.warps else "__syncthreads();"]


class ClusterSync(Statement, dialect="kernel", op="cluster_sync"):
    """Until all threads of the cluster are here."""

    together = "cluster"
    uses = ("cluster",)

    def cuda(self, w: Cuda) -> list[str]:
        return ["cluster_begins();" if w.begins else "cluster_sync();"]


FENCES = ("proxy", "wgmma")


class Fence(Statement, dialect="kernel", op="fence"):
    """An order between this thread's plain accesses and asynchronous ones that come after.

    "proxy": what was written to shared memory is seen by TMA and wgmma; "wgmma": what was written to registers is seen
    by wgmma.
    """

    kind: str

    def check(self) -> None:
        one_of("fence", self.kind, FENCES)

    def functions(self, cluster: int) -> tuple[Function, ...]:
        return ((self.kind,),)

    def cuda(self, w: Cuda) -> list[str]:
        return [f"{self.kind}_fence();"]


class InitBarriers(Statement, dialect="kernel", op="init_barriers"):
    """Barriers come into being, and are seen by asynchronous copies. One thread does this, before a barrier of the
    block.
    """

    together = "lane"
    uses = ("mbarrier",)

    barriers: Barriers

    def cuda(self, w: Cuda) -> list[str]:
        (count,) = self.barriers.type.static_shape
        one = f"barrier_init(shared_address({w.name(self.barriers)} + z), {self.barriers.arrivals});"
        return [f"for (int z = 0; z < {count}; z++) {one}", "barrier_init_fence();"]


class Expect(Statement, dialect="kernel", op="expect"):
    """Arrive at a barrier, and announce bytes that will come."""

    together = "lane"
    uses = ("mbarrier",)

    barriers: Barriers
    slot: IntExpr
    bytes: int

    def cuda(self, w: Cuda) -> list[str]:
        return [f"barrier_expect({w.shared(self.barriers, (self.slot,))}, {self.bytes});"]


class WaitBarrier(Statement, dialect="kernel", op="wait_barrier"):
    """Until the phase of this parity of a barrier has ended."""

    uses = ("mbarrier",)

    barriers: Barriers
    slot: IntExpr
    phase: IntExpr

    def cuda(self, w: Cuda) -> list[str]:
        return [f"barrier_wait({w.shared(self.barriers, (self.slot,))}, {w.index(self.phase)});"]


class Arrive(Statement, dialect="kernel", op="arrive"):
    """Arrive at a barrier: of this block, or of block `rank` of the cluster."""

    barriers: Barriers
    slot: IntExpr
    rank: IntExpr | None = None

    def functions(self, cluster: int) -> tuple[Function, ...]:
        return (("mbarrier",),) if self.rank is None else (("mbarrier",), ("cluster",))

    def cuda(self, w: Cuda) -> list[str]:
        at = w.shared(self.barriers, (self.slot,))
        return [f"barrier_arrive({at});" if self.rank is None else f"barrier_arrive_at({at}, {w.index(self.rank)});"]
