"""Where values change their layout: what brings them from how they lie to how their next use wants them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from terrazzo.hw import ldmatrix
from terrazzo.hw.ldmatrix import MatrixMove, loader
from terrazzo.hw.products import Matrix, matrix, warps
from terrazzo.ir.contraction import operand
from terrazzo.ir.layout import Layout
from terrazzo.ir.plan import STORED, VALUES, Convert, Plan, Product, Result, Ring, Stage, Stream
from terrazzo.ir.sites import made_of
from terrazzo.rewrite.rule import need, rule
from terrazzo.rules.loop.precision.number_parts import counted
from terrazzo.rules.tile.draft import Draft
from terrazzo.rules.tile.handed import handed, summed
from terrazzo.rules.tile.products import CONVERTED
from terrazzo.rules.tile.rings import axis_called, operand_text

STMATRIX = min(x.since for x in ldmatrix.INSTRUCTIONS if x.store)
"""The first architecture that puts matrices into shared memory."""


@rule(keys=(Plan,))
def convert_layouts(plan: Plan, draft: Draft) -> Plan | None:
    """An instruction wants its factors as its record says, and results leave shared memory as rows. Where values lie
    otherwise, the layout engine finds what moves them: matrices, neighbours, or nothing but their names.
    """
    stored = any(STORED in (p.a, p.b) for p in plan.all(Product))
    needed = (Ring, Stream, *([Stage] if stored else []), Result)
    if plan.all(Convert) or not all(any(isinstance(x, kind) for x in plan.lines) for kind in needed):
        return None
    lines = tuple(conversions(plan, draft))
    return plan.plus(*lines) if lines else None


def conversions(plan: Plan, draft: Draft) -> Iterator[Convert]:
    """The lines that a plan needs. Declines, with the reason, where nothing moves a value so."""
    for p in plan.all(Product):
        instruction = matrix(p.on)
        if instruction is not None:
            yield from _factors(plan, draft, p, instruction)
    for r in plan.all(Result):
        if r.slab:
            yield _result(plan, r)


def _factors(plan: Plan, draft: Draft, p: Product, instruction: Matrix) -> Iterator[Convert]:
    """How both factors of a product come to its fragments, where these are registers."""
    streams = {x: s for s in plan.all(Stream) for x in (s.operand, *s.also)}
    m, n = (axis_called(draft, x) for x in (p.m, p.n))
    for letter, source in (("a", p.a), ("b", p.b)):
        to = f"{p.sites[0]}.{letter}"
        terms: dict[Any, None] = {}
        for name in p.sites:
            for pair in draft.products[name].terms:
                first, second = pair if m in pair[0].free else pair[::-1]
                terms[operand(first if letter == "a" else second)] = None
        if source == VALUES:
            by = handed(draft, p.sites[0], instruction, m, n).by
            layout = (instruction.a if letter == "a" else instruction.b).layout  # type: ignore[union-attr]
            yield Convert(next(summed(draft, p.sites[0])), to, by, str(layout))
        elif source == STORED:
            inner = next(summed(draft, p.sites[0]))
            stage = next((x for x in plan.all(Stage) if x.product in p.sites), None)
            need(stage is not None, f"it is not said where what {inner} sums lies")
            assert stage is not None
            first = next(x for x in plan.all(Product) if inner in x.sites)
            yield _put(inner, stage.name, first, "stmatrix" if draft.gpu.number >= STMATRIX else "st")
            if warps(instruction) == 1:
                move, layout = fragments(draft, p, instruction, letter, stage)
                yield Convert(stage.name, to, move.name, str(layout))
        elif source == CONVERTED:
            for x in dict.fromkeys(made_of(term) for term in terms):
                assert x is not None
                by = "parts" if counted([term for term in terms if made_of(term) is x], x) else "ld"
                yield Convert(streams[operand_text(x)].name, to, by, str(instruction.a.layout))
        elif source == "ldmatrix":
            for x in terms:
                s = streams[operand_text(x)]
                move, layout = fragments(draft, p, instruction, letter, s)
                yield Convert(s.name, to, move.name, str(layout))


def fragments(
    draft: Draft, p: Product, instruction: Matrix, letter: str, stream: Stream | Stage
) -> tuple[MatrixMove, Layout]:
    """The instruction that loads a factor's fragments from its slab, and what of these it loads at once: two fragments
    along m or n, where a warp has two side by side and one instruction loads both.
    """
    layout = (instruction.a if letter == "a" else instruction.b).layout  # type: ignore[union-attr]
    coordinate, axis = ("m", p.m) if letter == "a" else ("n", p.n)
    along = coordinate if stream.axes[-1].name == axis else "k"
    size = 1 << dict(layout.extents)[coordinate]
    if layout.bits("warp") == 0 and _side_by_side(draft, p, axis, size):
        double = Layout.parse(str(layout).replace("; lane", f" {coordinate}{size}; lane"))
        if (found := loader(double, draft.gpu.number, along)) is not None:
            return found[0], double
    found = loader(layout, draft.gpu.number, along)
    need(found is not None, f"{stream.name}: no load brings it into the fragments of {instruction.name}")
    assert found is not None
    return found[0], layout


def _side_by_side(draft: Draft, p: Product, axis: str, size: int) -> bool:
    """Whether a warp's registers have an even number of an instruction's parts of an axis, one beside the other."""
    site, apart = draft.site(p.sites[0]), 1
    for f in reversed(draft.binding(axis_called(draft, axis, p.sites), site)):
        if f.level == "reg" and f.size > 1:
            return apart == size and f.size % 2 == 0
        apart *= f.size
    return False


def _result(plan: Plan, r: Result) -> Convert:
    """How a store's values come from the sums' registers to its slab: as many matrices at once as there are."""
    product = next(p for p in reversed(plan.all(Product)) if matrix(p.on) is not None)
    return _put(r.store, r.slab, product, r.put, "m" if r.turned else "n")


def _put(value: str, slab: str, product: Product, put: str, along: str = "n") -> Convert:
    """How what a product sums comes to a slab whose rows run along its columns, or along its rows (m)."""
    instruction = matrix(product.on)
    assert instruction is not None
    layout = instruction.d.layout
    if put == "st":
        return Convert(value, slab, "st", str(_part(layout, int(along == "n"))))  # registers side by side have columns
    for move in sorted(ldmatrix.INSTRUCTIONS, key=lambda x: -x.count):
        some = _part(layout, move.count.bit_length())
        if move.store and move.rows(some, along) is not None:
            return Convert(value, slab, move.name, str(some))
    need(False, f"{value}: no matrices are made of what {product.on} sums")
    raise AssertionError


def _part(layout: Layout, bits: int) -> Layout:
    """The first registers of a layout, in all lanes of a warp."""
    return Layout((("reg", layout.part("reg")[:bits]), ("lane", layout.part("lane"))), layout.extents)


RULES = (convert_layouts,)
