"""How what one product sums comes to another as a factor: it stays where it lies, or moves through registers, lanes or
shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from terrazzo.hw.movmatrix import TURN
from terrazzo.hw.products import Matrix, continued, warps
from terrazzo.ir.contraction import operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node, topological
from terrazzo.ir.schedule import WARPS_IN_A_GROUP, Operand, Site
from terrazzo.rewrite.rule import need
from terrazzo.rules.tile.draft import Draft, axis_name

REGISTERS = "registers"
"""They lie as the factor does, and are rounded where they are."""
COPIES = "mov"
"""Each lane has what it needs, in other registers."""
MEMORY = "memory"
WAYS = {"nothing": REGISTERS, "registers": COPIES, TURN.name: TURN.name}
"""The ways that the layout engine finds, but for those through memory."""


def handed(draft: Draft, name: str, instruction: Matrix | None, m: Any, n: Any) -> tuple[str, str]:
    """Which factor of a product is made of other products' sums ("a" or "b"), and how it comes to be one; nothing where
    none is.
    """
    c = draft.products[name]
    made = {x for x in topological(c.operands) if isinstance(x, l.Reduce)}
    need(
        not made or any(x.reduce in made for x in draft.products.values()),
        f"{name}: what a factor of it is made of is summed at no site",
    )
    inside = list(summed(draft, name))
    if not inside:
        return "", ""
    need(
        instruction is not None,
        f"{name}: what {inside[0]} sums is multiplied by no matrix instruction, along one axis",
    )
    assert instruction is not None
    factors = [f for f in c.factors if any(isinstance(x, l.Reduce) for x in topological([f]))]
    need(len(factors) == 1, f"{name}: what {inside[0]} sums is one factor of it, and not both")
    letter, rows = ("a", m) if m in factors[0].free else ("b", n)
    found = {inner: _way(draft, name, inner, instruction, letter, rows) for inner in inside}
    way = found[inside[0]]
    need(
        len(inside) == 1 or {*found.values()} == {REGISTERS},
        f"{name}: what {' and '.join(inside)} sum is one factor of it where it stays in their registers",
    )
    return letter, way


def summed(draft: Draft, name: str) -> Iterator[str]:
    """The products whose sums a factor of this one is made of."""
    inside = topological(draft.products[name].operands)
    yield from (x for x, c in draft.products.items() if x != name and c.reduce in inside)


def asked(draft: Draft, site: Site | None, inner: str) -> Operand | None:
    """Where the schedule has a factor lie that is made of a product's sums, if it says that."""
    return dict(site.operands).get(inner) if site is not None else None


def _way(draft: Draft, name: str, inner: str, instruction: Matrix, letter: str, rows: Any) -> str:
    """How one product's sums come to be a factor of another."""
    site, other = draft.site(name), draft.site(inner)
    first = draft.instruction(other)
    need(first is not None, f"{name}: what {inner} sums lies as no instruction has it")
    assert first is not None
    *_, steps = draft.products[name].reduce.axes
    along = _coordinate(draft, steps, other)
    need(
        along and {along, _coordinate(draft, rows, other)} == {"m", "n"},
        f"{name}: {axis_name(rows)} and {axis_name(steps)} are not the rows and columns of what {inner} sums",
    )
    held = letter == "a" or warps(instruction) == 1  # fragments in registers
    by = continued(first, instruction, letter, along) if held else MEMORY
    by = "registers" if (by, letter) == ("nothing", "b") else by  # each instruction takes a part of those of the rows
    by = WAYS.get(by, by)
    why = f"it would have to move through {by}" if by not in WAYS.values() else ""
    for axis in (rows, steps):
        if not why and divided(draft, axis, site) != divided(draft, axis, other):
            why = f"threads divide {axis_name(axis)} otherwise than those of {inner}"
    need(not why, f"{name}: what {inner} sums does not lie as {instruction.name} takes it: {why}")
    return by


def _coordinate(draft: Draft, axis: Any, site: Site | None) -> str:
    """Of which rows or columns of a site's instruction an axis is."""
    found = [f.level.removeprefix("inst.") for f in draft.binding(axis, site)]
    return next((x for x in found if x in ("m", "n")), "")


def divided(draft: Draft, axis: Any, site: Site | None) -> set[tuple[int, int, int]]:
    """How warps divide an axis: into how many parts, how far apart, and by which place value of a warp's number."""
    found: set[tuple[int, int, int]] = set()
    stride, instruction = 1, draft.instruction(site)
    for f in reversed(draft.binding(axis, site)):
        if f.level in ("warp", "warpgroup"):
            inner = draft.schedule.inner(f, axis_name(axis), site)
            found |= _parts(f.size, stride, inner * (WARPS_IN_A_GROUP if f.level == "warpgroup" else 1))
        elif f.level == "inst.m" and warps(instruction) > 1:
            found |= _parts(WARPS_IN_A_GROUP, stride * f.size // WARPS_IN_A_GROUP, 1)
        stride *= f.size
    return found


def _parts(size: int, stride: int, inner: int) -> set[tuple[int, int, int]]:
    """A part of a warp's number, bit by bit where it is a power of two."""
    if size & size - 1:
        return {(size, stride, inner)}
    return {(2, stride << n, inner << n) for n in range(size.bit_length() - 1)}


def made(c: Any) -> list[Node]:
    """The terms of a contraction that are made of sums, each once."""
    every = dict.fromkeys(operand(f) for pair in c.terms for f in pair)
    return [x for x in every if any(isinstance(y, l.Reduce) for y in topological([x]))]
