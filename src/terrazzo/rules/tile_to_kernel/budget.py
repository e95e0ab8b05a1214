"""What a kernel may ask for: shared memory, threads, registers, blocks, and room in its machine code."""

from __future__ import annotations

from functools import lru_cache

from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node, topological
from terrazzo.ir.verify_kernel import REGISTERS, declared

WRITTEN = 1 << 14
"""Additions and what costs as much, written out, of a kernel whose sums are accumulators of matrix instructions. All of
them wait in registers, and ptxas, which nothing stops, takes far longer than by their number: soft-capped logits, each
computed three times by two warpgroups, were not through in minutes with 192 accumulators of a thread (34,600), with 128
(23,000) not in 20 s; Mish of 128 (15,200) took a second.
"""


def over_budget(kernel: k.Kernel, gpu: Gpu) -> str:
    """What a block would need that it cannot have; nothing where there is room for it."""
    for what, needs, has in (
        ("bytes of shared memory", kernel.shared_bytes, gpu.shared),
        ("threads in a block", kernel.threads, 1024),
        ("registers of a thread", declared(kernel.body), REGISTERS),
        ("blocks", kernel.grid, (1 << 31) - 1),
    ):
        if needs > has:
            return f"the schedule needs {needs} {what}, and {gpu.arch} has {has}"
    inside = list(k.walk(kernel.body))
    for role in (s for s in inside if isinstance(s, k.Role) and s.registers):
        if (needs := declared(role.body)) > role.registers:
            return f"the schedule needs {needs} registers of a thread that computes, and its role has {role.registers}"
    if any(isinstance(s, k.Multiply | k.MultiplyAsync) for s in inside) and (size := written(kernel.body)) > WRITTEN:
        return f"the schedule writes out {size:.0f} operations, and ptxas takes minutes for more than {WRITTEN}"
    return ""


def written(body: tuple[Node, ...]) -> float:
    """What a body computes, in additions, as often as it is written out."""
    return sum(_written(s) for s in body)


def _written(s: Node) -> float:
    if isinstance(s, k.For):
        return (s.most if s.unrolled else 1) * written(s.body)
    if isinstance(s, k.If | k.Role):
        return written(s.body)
    return 1 + (_cost(s.term) if isinstance(s, k.Let) else _cost(s.value) if isinstance(s, l.Store) else 0.0)


@lru_cache(maxsize=4096)
def _cost(term: Node) -> float:
    return sum(x.fn.cost for x in topological([term]) if isinstance(x, l.Apply))
