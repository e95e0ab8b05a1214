"""Places that data says, all of a block of them checked before anything is read there.

A check beside what is read makes each element wait for its own, one at a time. So the places of a block are vectors,
noted without a branch; then there are as many reads on their way as there can be, one by one, since an instruction that
gathers takes longer than these on many processors; and what is made of them is vectors again. What takes long to
compute, and is needed again behind a place, is kept. Places that are inside whatever data is, such as those of a
search, need no check, and are vectors as all else is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from terrazzo.ir import nest as n
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Loaded, Var
from terrazzo.ir.node import Node, topological
from terrazzo.ir.ranges import stays
from terrazzo.targets.cpu.rows import WORTH_KEEPING, computed_for, is_leaf, needed, price, vectorises
from terrazzo.targets.terms import Scope, c_type, in_memory, term

BLOCK = 64
"""Places that are checked together."""
FEW = 8
"""Points of a loop from which on there are vectors of places."""


class Writer(Protocol):
    """What is asked of the one who writes the nest."""

    gathered: list[Loaded]
    found: dict[int, dict[Node, str]]
    keep: dict[int, dict[Node, str]]

    def statements(
        self, body: Sequence[n.Statement], scope: Scope, keep: Mapping[Node, str] | None = None
    ) -> list[str]: ...


def written(writer: Writer, s: n.Loop, scope: Scope, shared: bool) -> list[str]:
    """A free loop without loops inside whose terms say places, in blocks, which threads share, where it is `shared`;
    nothing for another loop.
    """
    axis = s.axes[0]
    if s.kind != "free" or not is_leaf(s) or vectorises(s.body, scope.spans) or not isinstance(axis.extent, int):
        return []
    if axis.extent < FEW or id(s) in writer.found or id(s) in writer.keep:
        return []
    inner, block, step, i = scope.inner(), scope.fresh("b"), scope.fresh("places"), scope.fresh("i")
    inner.names[axis] = i
    head = ["for (int64_t l = 0; l < lanes; l++) {", f"  const int64_t {i} = {block} + l;"]
    lets = {x.term: None for x in s.body if isinstance(x, n.Let)}
    places = [e for e in writer.gathered if e.value in lets and not stays(e.value, e.extent, scope.spans)]
    ends = [y for x in s.body if isinstance(x, l.Store) for y in x.children]
    body: list[str] = []
    for k, e in enumerate(places):
        here, at = inner.inner(), scope.fresh("at")
        again = computed_for([e.value], here.names)
        inner.names[e] = f"(int64_t){at}[l]"
        named = {*again, *inner.names}
        behind = set(topological([*(x.value for x in places[k + 1 :]), *ends], stop=named.__contains__))
        kept = {x: scope.fresh("kept") for x in again if x in behind and _worth_keeping(x, axis)}
        lines = writer.statements([*map(n.Let, again)], here, {x: f"{name}[l]" for x, name in kept.items()})
        text = [*lines, f"{at}[l] = {term(l.Index(e), here)};"]
        kind = "u32" if isinstance(e.extent, int) and e.extent < 1 << 32 else "i64"
        body += [f"alignas(64) {c_type(x.dtype)} {name}[{BLOCK}];" for x, name in kept.items()]
        body += [f"alignas(64) {kind} {at}[{BLOCK}];", "#pragma omp simd", *head, *("  " + x for x in text), "}"]
        inner.names |= {x: f"{name}[l]" for x, name in kept.items()}
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


def _worth_keeping(x: l.Term, axis: Var) -> bool:
    """Whether storing a term and reading it back beats computing it twice. Truths are no vectors in memory."""
    return not isinstance(x.dtype, tuple) and x.dtype.kind != "bool" and price(x, axis) >= WORTH_KEEPING
