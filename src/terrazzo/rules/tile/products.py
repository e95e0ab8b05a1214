"""On which instruction contractions run, and where their factors come from."""

from __future__ import annotations

import math
from typing import Any

from terrazzo.errors import UserError, about
from terrazzo.hw.instruction import MatrixInstruction
from terrazzo.hw.ldmatrix import loader
from terrazzo.hw.products import Matrix, missing, operands, warps
from terrazzo.hw.transfer import FMA
from terrazzo.hw.wgmma import WarpgroupInstruction
from terrazzo.ir.concatenated import loaded
from terrazzo.ir.contraction import Contraction, operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node, topological
from terrazzo.ir.plan import EVERYONE, VALUES, Agent, Plan, Product
from terrazzo.ir.schedule import Named, Site
from terrazzo.ir.sites import called, loads, made_of
from terrazzo.rewrite.rule import need, rule
from terrazzo.rules.loop.precision.number_parts import counted
from terrazzo.rules.tile.agents import MATH
from terrazzo.rules.tile.draft import Draft, axis_name
from terrazzo.rules.tile.handed import Way, asked, handed

CONVERTED = "converted"
"""Where a first factor comes from that threads make in registers of a slab that lies in shared memory."""
SHARING = "sums that share an instruction"


@rule(keys=(Plan,))
def place_products(plan: Plan, draft: Draft) -> Plan | None:
    """The contractions of a site run on its instruction. Those over the same axes, bound alike, share their steps.

    `r0 = time(64, promote=True)` has the sums of every step added up on CUDA cores.
    """
    if plan.all(Product) or not draft.products or not plan.all(Agent):
        return None
    lines: list[Product] = []
    read: list[Named] = []
    agent = next(a.name for a in plan.all(Agent) if a.name in (EVERYONE, MATH))
    done: set[str] = set()
    for name in draft.products:
        if name in done:
            continue
        together, instruction, m, n, a, b = place(draft, name)
        done.update(together)
        on = instruction.name if instruction else FMA.name
        site = draft.site(name)
        assert site is not None
        rows = tuple(map(axis_name, box(draft, site, instruction, m, n)))
        held = VALUES in (a, b) or (a in ("ldmatrix", CONVERTED) and warps(instruction) > 1)
        need(not (rows and held), f"{name}: what lies in registers is no box of several axes")
        promote = promoted(draft, together)
        lines.append(Product(tuple(together), on, agent, (), axis_name(m), axis_name(n), a, b, promote, rows))
        read += draft.read(draft.site(name), "on")
        read += [w for inner in asked(draft, name) for w in draft.read(site, inner, "reg")]
        read += [w for a in draft.products[name].reduce.axes for w in draft.read(None, axis_name(a), "promote")]
    left = [x for x in draft.names if x not in done and draft.tiled and isinstance(draft.names[x], l.Reduce)]
    need(
        not any(draft.site(x) for x in left),
        "a block is divided among threads for contractions over the same axes only",
    )
    return plan.plus(*lines, read=read)


def place(draft: Draft, name: str) -> tuple[list[str], Matrix | None, Any, Any, str, str]:
    """The contractions that run together with one, on what, its rows and columns, and where its factors come from."""
    c, site = draft.products[name], draft.site(name)
    assert site is not None
    together = [x for x in site.names if x in draft.products and draft.products[x].reduce.axes == c.reduce.axes]
    need(
        set(together) == {x for x in site.names if x in draft.names},
        "a block is divided among threads for contractions over the same axes only",
    )
    instruction = draft.instruction(site)
    _covers(draft, site, instruction)
    m, n = _rows_and_columns(draft, site, [draft.products[x] for x in together], instruction)
    if instruction is not None:
        _fits(draft, site, instruction, [draft.products[x] for x in together], m)
    if draft.abreast(site) > 1:
        _side_by_side(draft, site, instruction, [draft.products[x] for x in together], m)
    ways = [handed(draft, x, instruction, m, n) for x in together]
    need(len({(w.letter, w.by) for w in ways}) == 1, f"{name}: what is made of sums comes to it in several ways")
    return together, instruction, m, n, *_sources(draft, site, instruction, draft.products[together[0]], m, ways[0])


def promoted(draft: Draft, together: list[str]) -> bool:
    """Whether the schedule has the sums of every step added up on CUDA cores."""
    c, site = draft.products[together[0]], draft.site(together[0])
    scales = {draft.products[x].scales for x in together}
    asked = [draft.option(f, "promote", False) for a in c.reduce.axes for f in draft.times(a, site)]
    if strange := [x for x in asked if not isinstance(x, bool)]:
        raise draft.fail(f"promote is True or False, not {strange[0]}")
    scaled = any(s != 1 for x in scales for s in x)
    if True not in asked:
        need(not scaled, f"{together[0]}: sums that are scaled are promoted, and its loop does not say promote=True")
        return False
    need(not scaled or len(scales) == 1, f"{together[0]}: its sums are scaled otherwise than those beside them")
    overlaps = any(draft.option(f, "overlap", 0) for a in c.reduce.axes for f in draft.times(a, site))
    need(
        len(together) == len(draft.products) or not overlaps,
        f"{together[0]}: sums of a chain whose steps overlap are not promoted",
    )
    return True


def _covers(draft: Draft, site: Site, instruction: Matrix | None) -> None:
    """As much is bound to each axis of an instruction as it has, and it has it side by side."""
    used = [f for _, binding in draft.schedule.lines(site) for f in binding]
    if not any(f.level.startswith("inst") for f in used):
        return
    name, where = site.names[0], draft.schedule.part(site.names[0])
    if instruction is None:
        with about(*where):
            raise UserError(f"{name} binds axes of an instruction, and {site.instruction} has none")
    count = draft.abreast(site)
    for axis, size in zip("mnk", instruction.shape, strict=True):
        have = math.prod(f.size for f in used if f.level == f"inst.{axis}")
        have *= count if axis == "n" and count == len(site.names) else 1
        if have != size:
            with about(*where):
                raise UserError(f"{name}: {instruction.name} has {axis} = {size}, and inst.{axis} is bound to {have}")
    for line, binding in draft.schedule.lines(site):
        within = [f.level.startswith("inst") for f in binding if f.size > 1]
        if within != sorted(within):
            with about(*draft.schedule.part(name, line)):
                raise UserError(
                    f"{name}: {instruction.name} has its part of {line} side by side: what is bound to the instruction "
                    "stands last in the binding"
                )


def _rows_and_columns(
    draft: Draft, site: Site, products: list[Contraction], instruction: Matrix | None
) -> tuple[Any, Any]:
    """The axes of an instruction's rows and columns; on CUDA cores the first of the tile's axes and the last."""
    free = dict.fromkeys((*draft.axes, *(a for c in draft.products.values() for a in c.reduce.axes)))
    if instruction is None:
        return draft.tiled[0], draft.tiled[-1]
    found = []
    for name in "mn":
        bound = [a for a in free if any(f.level == f"inst.{name}" for f in draft.schedule.binding(site, axis_name(a)))]
        need(bound, f"no axis of {site.names[0]} is bound to inst.{name}")
        need(len(bound) == 1 or name == "m", f"{len(bound)} axes of {site.names[0]} are bound to inst.{name}")
        found.append(bound)
    (m, *more), (n,) = found
    for c in products:
        pairs = [f for f in c.factors if m in f.free]
        need(
            len(pairs) == 1 and n not in pairs[0].free and all(a in pairs[0].free for a in more),
            f"{', '.join(map(axis_name, [m, *more]))} and {axis_name(n)} do not belong to one factor each",
        )
    deep = [a for a in products[0].reduce.axes if draft.length(a, site) > 1]
    bound = [a for a in deep if any(f.level == "inst.k" for f in draft.binding(a, site))]
    need(
        len(bound) == 1 and bound == deep,
        f"a step of {site.names[0]} goes along one axis, which is bound to inst.k; it sums over others step by step",
    )
    return m, n


def box(draft: Draft, site: Site, instruction: Matrix | None, m: Any, n: Any) -> tuple[Any, ...]:
    """The axes whose points are a tile's rows, outermost first, where they are several: a box. Declines where those of
    an instruction do not lie one behind the other.
    """
    if instruction is None or warps(instruction) == 1:
        bound = [a for a in draft.tiled if any(f.level == "inst.m" for f in draft.binding(a, site))]
        need(len(bound) < 2, "only instructions of warpgroups take rows of several axes")
        return ()
    factor = next(f for f in draft.products[site.names[0]].factors if m in f.free)
    rows = [a for a in draft.tiled if a in factor.free and a is not n]
    if len(rows) < 2:
        return ()
    lines = [name for name, _ in draft.schedule.lines(site) if name in map(axis_name, rows)]
    need(
        lines == [*map(axis_name, rows)], f"the axes of a box are bound in the order of the kernel: {', '.join(lines)}"
    )
    begun = False
    for a in rows:
        mine = math.prod(f.size for f in draft.binding(a, site) if f.level == "inst.m")
        need(
            not begun or mine == draft.length(a, site),
            f"rows of an instruction lie side by side: {axis_name(a)} is wholly inst.m, since an axis outside is",
        )
        begun = begun or mine > 1
    return tuple(rows)


def _fits(draft: Draft, site: Site, instruction: Matrix, products: list[Contraction], m: Any) -> None:
    """The machine has the instruction, and it takes the operands as they are."""
    if needs := missing(instruction, draft.gpu):
        why = f"{instruction.name} needs {needs}, and the target is {draft.gpu.arch}"
        raise draft.fail(why, site.names[0], "on", instruction.name)
    for c in products:
        pairs = [pair if m in pair[0].free else pair[::-1] for pair in c.terms]
        given = [(operand(f), takes) for pair in pairs for f, takes in zip(pair, operands(instruction), strict=True)]
        for x, takes in (*given, (c.reduce, instruction.d.dtype)):
            if x.dtype is not takes:  # type: ignore[attr-defined]
                named = loads(x)[0].buffer.name if isinstance(x, l.Load) else site.names[0]
                why = f"{instruction.name} takes {takes}, and {named} is {x.dtype}"  # type: ignore[attr-defined]
                raise draft.fail(why, site.names[0], "on", instruction.name)


def _side_by_side(draft: Draft, site: Site, instruction: Matrix | None, products: list[Contraction], m: Any) -> None:
    """Sums that share an instruction have the first factor in common, and second ones that lie one behind the other."""
    name = site.names[0]
    pairs = [pair if m in pair[0].free else pair[::-1] for c in products for pair in c.terms]
    firsts, seconds = ({operand(pair[side]) for pair in pairs} for side in (0, 1))
    whole = len(pairs) == len(products) == len(draft.products)
    need(
        isinstance(instruction, WarpgroupInstruction) and whole,
        f"{name}: {SHARING} of warpgroups are all of a kernel's",
    )
    need(
        len(firsts) == 1 and len(seconds) == len(pairs),
        f"{name}: {SHARING} have the first factor in common, and no more",
    )
    need(all(isinstance(x, l.Load) for x in (*firsts, *seconds)), f"{name}: {SHARING} have factors that lie in memory")
    need(draft.held(site, called(*firsts)).place == "smem", f"{name}: {SHARING} have a first factor in shared memory")
    steps = [f for c in products for a in c.reduce.axes for f in draft.binding(a, site)]
    meet = any(f.level == "cluster" or draft.option(f, "promote", False) for f in steps)
    need(not meet, f"{name}: {SHARING} are not promoted, and no blocks of a cluster share their steps")


def _sources(draft: Draft, site: Site, instruction: Matrix | None, c: Contraction, m: Any, way: Way) -> tuple[str, str]:
    """Where both factors come from, of which one may be made of sums."""
    if instruction is None:
        return "ld", "ld"
    a, b = c.factors if m in c.factors[0].free else c.factors[::-1]
    if warps(instruction) > 1:
        held = [draft.held(site, called(operand(f))).place for f in (a, b)]
        need(held[1] == "smem", "wgmma reads its second factor from shared memory")
        if held[0] == "reg":
            need(
                len(draft.products) == len(c.terms) == 1,
                f"{called(operand(a))}: fragments in registers are for a product alone, of one term",
            )
        if converts(draft, site, c, a):
            return CONVERTED, "shared"
        if way.letter:
            return (way.source, "shared") if way.letter == "a" else ("shared", way.source)
        return "ldmatrix" if held[0] == "reg" else "shared", "shared"
    assert isinstance(instruction, MatrixInstruction)
    sources = []
    for letter, fragment in (("a", instruction.a), ("b", instruction.b)):
        if way.letter == letter:
            sources.append(way.source)
            continue
        need(
            any(
                loader(fragment.layout, draft.gpu.number, x)
                for x in ("m", "n", "k")
                if x in dict(fragment.layout.extents)
            ),
            f"{site.names[0]}: no load brings the fragments of {instruction.name} from shared memory",
        )
        sources.append("ldmatrix")
    return sources[0], sources[1]


def converts(draft: Draft, site: Site, c: Contraction, a: Node) -> bool:
    """Whether the first factor of a warpgroup's product is made in registers, point by point, of a slab that TMA brings
    in, and of what threads load beside it. All terms are made of the same slab then.
    """
    name = called(operand(a))
    made = [operand(f) for pair in c.terms for f in pair if f.free == a.free]
    if _computed(a) or loaded(operand(a)) or dict(draft.held(site, name).options).get("by") != "tma":
        return False
    sources = {made_of(term) for term in made}
    alone = len(sources) == 1 and all(x is not None and x.free == a.free for x in sources)
    need(alone, f"{name}: fragments are made of one slab, point by point, and these of several")
    (source,) = sources
    assert source is not None
    whole = not source.inside and all(x.extent % draft.length(x, site) == 0 for x in c.reduce.axes)
    nothing = whole or counted(made, source)
    need(nothing, f"{name}: fragments are made beyond the end of what is summed over too, where they need not be 0")
    chain = any(x.reduce.axes != c.reduce.axes for x in draft.products.values())
    need(not chain, f"{name}: fragments are not made for a chain of products")
    need(draft.schedule.options("roles"), f"{name}: fragments are made of what others load, and there are no roles")
    return True


def _computed(factor: Node) -> bool:
    """Whether a factor is made of what was reduced before, and so lies in registers."""
    return any(isinstance(x, l.Reduce | l.Scan) for x in topological([factor]))


RULES = (place_products,)
