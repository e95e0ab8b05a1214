"""How what one product sums comes to another as a factor: it stays where it lies, or moves through registers, lanes or
shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from terrazzo.hw.movmatrix import TURN
from terrazzo.hw.products import Matrix, continued, warps
from terrazzo.ir.contraction import operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node, topological
from terrazzo.ir.plan import STORED, VALUES
from terrazzo.ir.schedule import WARPS_IN_A_GROUP, Operand, Site
from terrazzo.rewrite.rule import need
from terrazzo.rules.tile.draft import Draft, axis_name

REGISTERS = "registers"
"""They lie as the factor does, and are rounded where they are."""
COPIES = "mov"
"""Each lane has what it needs, in other registers."""
MEMORY = "memory"
SIZE = 2
"""Bytes of an element that goes that way: what ldmatrix and wgmma read."""
WAYS = {"nothing": REGISTERS, "registers": COPIES, TURN.name: TURN.name}
"""The ways that the layout engine finds, but for those through memory."""


@dataclass(frozen=True)
class Way:
    """How a factor of a product ("a" or "b") comes to be one that is made of what others sum; and why not in registers
    alone, where it does not.
    """

    letter: str = ""
    by: str = ""
    why: str = ""

    @property
    def source(self) -> str:
        """Where the product takes it from."""
        return STORED if self.by == MEMORY else VALUES


def handed(draft: Draft, name: str, instruction: Matrix | None, m: Any, n: Any) -> Way:
    """The way of a product's factor that is made of other products' sums; an empty one where none is."""
    c = draft.products[name]
    made = {x for x in topological(c.operands) if isinstance(x, l.Reduce)}
    need(
        not made or any(x.reduce in made for x in draft.products.values()),
        f"{name}: what a factor of it is made of is summed at no site",
    )
    inside = list(summed(draft, name))
    if not inside:
        return Way()
    need(
        instruction is not None,
        f"{name}: what {inside[0]} sums is multiplied by no matrix instruction, along one axis",
    )
    assert instruction is not None
    factors = [f for f in c.factors if any(isinstance(x, l.Reduce) for x in topological([f]))]
    need(len(factors) == 1, f"{name}: what {inside[0]} sums is one factor of it, and not both")
    letter, rows = ("a", m) if m in factors[0].free else ("b", n)
    found = {inner: _way(draft, name, inner, instruction, letter, rows) for inner in inside}
    need(
        len(inside) == 1 or all(x.by == REGISTERS for x in found.values()),
        f"{name}: what {' and '.join(inside)} sum is one factor of it where it stays in their registers",
    )
    return found[inside[0]]


def summed(draft: Draft, name: str) -> Iterator[str]:
    """The products whose sums a factor of this one is made of."""
    inside = topological(draft.products[name].operands)
    yield from (x for x, c in draft.products.items() if x != name and c.reduce in inside)


def asked(draft: Draft, site: Site | None, inner: str) -> Operand | None:
    """Where the schedule has a factor lie that is made of a product's sums, if it says that."""
    return dict(site.operands).get(inner) if site is not None else None


def _way(draft: Draft, name: str, inner: str, instruction: Matrix, letter: str, rows: Any) -> Way:
    """How one product's sums come to be a factor of another: as the schedule has it, or in registers where they can."""
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
    by, why = MEMORY, f"{instruction.name} reads its second factor there"
    if letter == "a" or warps(instruction) == 1:
        by = continued(first, instruction, letter, along)
        if (by, letter) == ("nothing", "b"):  # each instruction takes a part of what one has of the rows
            by = "registers"
        by = WAYS.get(by, MEMORY)
        why = "" if by != MEMORY else "what a lane has is wanted by other warps"
    for axis in (rows, steps):
        if not why and divided(draft, axis, site) != divided(draft, axis, other):
            why = f"threads divide {axis_name(axis)} otherwise than those of {inner}"
    given = asked(draft, site, inner)
    if given is not None and given.place == "reg":
        need(not why, f"{name}: what {inner} sums does not stay in registers: {why}")
    if not why and (given is None or given.place == "reg"):
        return Way(letter, by)
    for axis in (rows, steps):
        mine, its = ({x for x in divided(draft, axis, s) if x[2] >= WARPS_IN_A_GROUP} for s in (site, other))
        need(
            mine == its or not draft.schedule.options("roles"),
            f"{name}: {why or f'what {inner} sums is put into shared memory'}, and warpgroups that wait by themselves "
            "share nothing there",
        )
    terms = made(draft.products[name])
    need(
        len(terms) == 1 and terms[0].dtype.size == SIZE,  # type: ignore[attr-defined]
        f"{name}: what {inner} sums goes through shared memory as one number of 16 bits, not {len(terms)} of "
        f"{terms[0].dtype}",  # type: ignore[attr-defined]
    )
    turns = dict(draft.schedule.options("roles")).get("turns", False)
    need(not turns, f"{name}: warpgroups that take turns have no shared memory of their own for what {inner} sums")
    return Way(letter, MEMORY, why or "the schedule has it lie there")


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
