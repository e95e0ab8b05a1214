"""Places that data says, all of a block of them checked before anything is read there.

A check beside what is read makes each element wait for its own, one at a time. So the places of a block are vectors,
noted without a branch; then there are as many reads on their way as there can be, one by one, since an instruction that
gathers takes longer than these on many processors; and what is made of them is vectors again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from terrazzo.ir import nest as n
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Loaded
from terrazzo.ir.node import Node, topological
from terrazzo.targets.cpu.rows import computed_for, is_leaf, needed, vectorises
from terrazzo.targets.terms import Scope, in_memory, term

BLOCK = 64
"""Places that are checked together."""
FEW = 8
"""Points of a loop from which on there are vectors of places."""


class Writer(Protocol):
    """What is asked of the one who writes the nest."""

    gathered: list[Loaded]
    found: dict[int, dict[Node, str]]
    keep: dict[int, dict[Node, str]]

    def statements(self, body: Sequence[n.Statement], scope: Scope) -> list[str]: ...


def written(writer: Writer, s: n.Loop, scope: Scope, shared: bool) -> list[str]:
    """A free loop without loops inside whose terms say places, in blocks, which threads share, where it is `shared`;
    nothing for another loop.
    """
    axis = s.axes[0]
    if s.kind != "free" or not is_leaf(s) or vectorises(s.body) or not isinstance(axis.extent, int):
        return []
    if axis.extent < FEW or id(s) in writer.found or id(s) in writer.keep:
        return []
    inner, block, step, i = scope.inner(), scope.fresh("b"), scope.fresh("places"), scope.fresh("i")
    inner.names[axis] = i
    head = ["for (int64_t l = 0; l < lanes; l++) {", f"  const int64_t {i} = {block} + l;"]
    lets = {x.term: None for x in s.body if isinstance(x, n.Let)}
    places = [e for e in writer.gathered if e.value in lets]
    body: list[str] = []
    for e in places:
        here, at = inner.inner(), scope.fresh("at")
        again = [n.Let(x) for x in computed_for([e.value], here.names)]
        text = [*writer.statements(again, here), f"{at}[l] = {term(l.Index(e), here)};"]
        kind = "u32" if isinstance(e.extent, int) and e.extent < 1 << 32 else "i64"
        body += [f"alignas(64) {kind} {at}[{BLOCK}];", "#pragma omp simd", *head, *("  " + x for x in text), "}"]
        inner.names[e] = f"(int64_t){at}[l]"
        for x in lets:
            asked = [y for y in topological([x]) if isinstance(y, Loaded) and y in places]
            if isinstance(x, l.Load) and x not in inner.names and asked and all(y in inner.names for y in asked):
                read = scope.fresh("in")
                text = [f"{read}[l] = {term(x, inner)};", 'asm volatile("");']
                body += [f"alignas(64) {in_memory(x.dtype)} {read}[{BLOCK}];", "#pragma GCC unroll 4", *head]
                body += [*("  " + y for y in text), "}"]
                inner.names[x] = f"{read}[l]"
    rest = writer.statements(needed(s.body, inner.names), inner)
    body += ["#pragma omp simd", *head, *("  " + x for x in rest), "}"]
    lines = [
        f"const auto {step} = [&](int64_t {block}, int64_t lanes, int& bad) __attribute__((always_inline)) {{",
        *("  " + x for x in body),
        "};",
        *(["#pragma omp parallel for num_threads(threads) schedule(static)"] if shared else []),
        f"for (int64_t {block} = 0; {block} < {axis.extent}; {block} += {BLOCK})",
    ]
    full = f"{step}({block}, {BLOCK}, bad);"
    if axis.extent % BLOCK:
        full = f"if ({block} + {BLOCK} <= {axis.extent}) {full} else {step}({block}, {axis.extent} - {block}, bad);"
    return [*lines, "  " + full]
