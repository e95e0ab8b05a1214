"""How results leave, where partial states meet, what stays in registers."""

from __future__ import annotations

import math
from typing import Any

from terrazzo.errors import Limitation
from terrazzo.hw import tma
from terrazzo.hw.products import warps
from terrazzo.ir.address import coefficient, divides, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.layout import HARDWARE
from terrazzo.ir.node import substitute
from terrazzo.ir.plan import EVERYONE, Agent, Align, Combine, Jam, Keep, Plan, Product, Result, Stream
from terrazzo.ir.schedule import Factor, Like, Named, Site, Word
from terrazzo.rewrite.rule import need, rule
from terrazzo.rules.access import WIDEST, box
from terrazzo.rules.swizzles import swizzled
from terrazzo.rules.tile.agents import MATH
from terrazzo.rules.tile.digits import runs
from terrazzo.rules.tile.draft import Draft, axis_name

EIGHT = 8
"""Columns that every instruction of a warpgroup has a multiple of."""
WIDE = max(HARDWARE)
"""Bytes of the widest swizzle."""


@rule(keys=(Plan,))
def stage_results(plan: Plan, draft: Draft) -> Plan | None:
    """A store leaves registers directly, or its columns gather in shared memory, a subtile at a time."""
    if plan.all(Result) or not plan.all(Agent) or (draft.products and not plan.all(Stream)):
        return None
    agent = next(a.name for a in plan.all(Agent) if a.name in (EVERYONE, MATH))
    lines: list[Result] = []
    read: list[Named] = []
    for s in draft.kernel.stores:
        name = s.buffer.name
        site = draft.site(name)
        if site is None or name not in dict(site.operands):
            lines.append(Result(name, agent))
            continue
        need(plan.all(Product), f"{name} gathers in shared memory, and there is no tile of it")
        line = _gathered(plan, draft, site, s, agent)
        lines.append(line)
        read += draft.read(site, name, "smem", "by", "swizzle", "pad")
        read += draft.read(site, line.columns, "ring")
    return plan.plus(*lines, read=read)


def _gathered(plan: Plan, draft: Draft, site: Site, s: l.Store, agent: str) -> Result:
    name, product = s.buffer.name, plan.all(Product)[-1]
    instruction = draft.instruction(draft.site(product.sites[0]))
    need(instruction is not None, f"{name}: only results of matrix instructions gather in shared memory")
    assert instruction is not None
    options: dict[str, Any] = dict(dict(site.operands)[name].options)
    size = s.buffer.type.dtype.size
    over = draft.products[product.sites[0]].reduce.axes
    shared = [f.level for a in over for f in draft.binding(a, draft.site(product.sites[0])) if f.size > 1]
    need(
        not {"warp", "warpgroup"} & set(shared),
        f"{name}: warps share the steps of {product.sites[0]}, whose sums meet: results leave from registers then",
    )
    columns = next(a for a in draft.kernel.axes if axis_name(a) == product.n)
    turned = is_turned(draft, product, s)
    need(
        turned or runs_along(s, columns),
        f"{name} is contiguous along neither {product.n}, whose values lie side by side in registers, nor {product.m}",
    )
    times = [f for f in draft.schedule.binding(site, product.n) if f.level == "time"]
    length = draft.length(columns, draft.site(product.sites[0]))
    (swizzle, pad), by = draft.spread(name, options), options.get("by", "ld")
    width = length // math.prod(f.size for f in times) if turned else _width(draft, site, s, columns, length)
    panel = panelled(draft, product, size) if turned else 0
    row = (panel or (height(draft, product) if turned else width)) * size
    if swizzle is None:
        swizzle = row if swizzled(row) == row else 0
    need(length % width == 0 and width % 8 == 0, f"{name}: {length} columns are no subtiles of {width}")
    need(not swizzle or row == swizzle, f"{name}: a subtile is {row} bytes wide, and the swizzle {swizzle}")
    need(by in ("ld", "tma"), f"{name} leaves by ld or by tma, not by {by}")
    need(by == "ld" or draft.gpu.number >= 90, f"{name}: there is no TMA on {draft.gpu.arch}")
    need(by == "ld" or not pad, f"{name}: TMA leaves no room between rows")
    slots = max([1, *(v for f in times if isinstance(v := draft.option(f, "ring", 1), int))])
    put = "stmatrix" if draft.gpu.number >= 90 and size == 2 else "st"
    need(not turned or by == "tma", f"{name} is contiguous along {product.m}: results that are turned leave by TMA")
    sizes = parts(draft, product, width, turned, panel)
    boxes = box(s, sizes, None, (), draft.beyond(sizes, draft.site(product.sites[0]))) if by == "tma" else ""
    by_axes = not isinstance(boxes, str) and boxes.by_axes
    args = (product.m, product.n, width, slots, swizzle, pad, put, by, by_axes, product.box, turned, panel)
    line = Result(name, agent, f"{name}_s", *args)
    why = no_boxes(line, s, draft, product) if by == "tma" else ""
    need(not why, f"{name}: {why}")
    return line


def runs_along(store: l.Store, axis: Any) -> bool:
    """Whether a store goes along an axis where memory does."""
    return coefficient(flatten(store.index, store.buffer.type.element_strides), axis) == 1


def is_turned(draft: Draft, product: Product, store: l.Store) -> bool:
    """Whether a store's memory runs along the rows of a product's tile (in a box along the innermost of their axes),
    and not along its columns.
    """
    named = {axis_name(a): a for a in draft.kernel.axes}
    inner = named[(product.box or (product.m,))[-1]]
    return not runs_along(store, named[product.n]) and runs_along(store, inner)


def height(draft: Draft, product: Product) -> int:
    """Rows of a product's tile that a warpgroup has, or all warps."""
    return math.prod(_sides(draft, product).values())


def panelled(draft: Draft, product: Product, size: int) -> int:
    """Of how many rows a panel of turned results is, whose elements have so many bytes: those that lie side by side in
    memory, and as many as the widest swizzle spans at most; 0 where this is all of them.
    """
    *_, side = _sides(draft, product).values()
    panel = WIDE // size if side * size > WIDE and side * size % WIDE == 0 else side
    return panel if panel < height(draft, product) else 0


def _sides(draft: Draft, product: Product) -> dict[Any, int]:
    """What a warpgroup has, or all warps, of the axes of a product's rows."""
    site, named = draft.site(product.sites[0]), {axis_name(a): a for a in draft.kernel.axes}
    rows = [named[x] for x in product.box or (product.m,)]
    groups = {a: math.prod(f.size for f in draft.binding(a, site) if f.level == "warpgroup") for a in rows}
    return {a: draft.length(a, site) // groups[a] for a in rows}


def parts(draft: Draft, product: Product, width: int, turned: bool = False, panel: int = 0) -> dict[Any, int]:
    """What a box of so many columns has of the axes of a product's tile, columns last; or where `turned` first, with
    the rows of a panel, or all, of the innermost axis of rows.
    """
    site, named = draft.site(product.sites[0]), {axis_name(a): a for a in draft.kernel.axes}
    rows = {named[x]: draft.length(named[x], site) for x in product.box or (product.m,)}
    if turned:
        *outer, inner = rows
        return {**dict.fromkeys(outer, 1), named[product.n]: width, inner: panel or height(draft, product)}
    return {**rows, named[product.n]: width}


def no_boxes(line: Result, store: l.Store, draft: Draft, product: Product) -> str:
    """Why the subtiles of a store are no boxes that TMA takes away, or nothing."""
    sizes = parts(draft, product, line.width, line.turned, line.panel)
    found = box(store, sizes, line.by_axes, (), draft.beyond(sizes, draft.site(product.sites[0])))
    if isinstance(found, str):
        return found
    *_, inner = sizes
    wide = [a for a in sizes if a in found.along and sizes[a] > 1]
    if [a for a in found.along if a in wide] != wide:
        return "its rows and columns are not in the order of the tensor's dimensions, which TMA keeps"
    begins = substitute(found.place.index[-1], {inner: 0})
    if found.along[-1] is not inner or not divides(WIDEST // store.buffer.type.dtype.size, begins):
        return "its boxes do not begin at multiples of 16 bytes"
    return tma.problem(found.place.tensor, found.sides, line.swizzle)


@rule(keys=(Plan,))
def meet(plan: Plan, draft: Draft) -> Plan | None:
    """A reduction's partial states are where its axes are: lanes, warps, blocks of a cluster. There they meet, and so
    do those of a scan.
    """
    if plan.all(Combine) or (draft.products and not plan.all(Product)):
        return None
    lines = []
    for name in draft.names:
        if why := _apart(plan, draft, name):
            raise Limitation(f"{plan.kernel}: {name}: {why}")
        if line := combination(draft, name):
            lines.append(line)
    return plan.plus(*lines) if lines else None


def combination(draft: Draft, name: str) -> Combine | None:
    """Where the partial states of a reduction are; None where every one is whole."""
    if name in draft.rescued:
        return None
    lanes, warps, groups, blocks = _shares(draft, name)
    parts = column_parts(draft, name, blocks) if name in draft.products else 1
    return Combine(name, lanes, warps * groups, blocks, parts) if max(lanes, warps, groups, blocks) > 1 else None


def column_parts(draft: Draft, name: str, blocks: int) -> int:
    """Into how many parts the columns of a product's tile go whose blocks share the sums: as many as there are blocks,
    or fewer, where each has whole subtiles of every result, and of the instruction's eight columns.
    """
    site = draft.site(name)
    columns = next((a for a in draft.kernel.axes if any(f.level == "inst.n" for f in draft.binding(a, site))), None)
    if blocks == 1 or columns is None:
        return 1
    length, each = draft.length(columns, site), EIGHT
    for store in draft.kernel.stores:
        own = draft.site(store.buffer.name)
        if own is not None and store.buffer.name in dict(own.operands):
            each = math.lcm(each, _width(draft, own, store, columns, length))
    return max(d for d in range(1, blocks + 1) if (blocks % d == 0 and length % (d * each) == 0) or d == 1)


def _width(draft: Draft, site: Site, store: l.Store, columns: Any, length: int) -> int:
    """Columns of a subtile of a store, of a tile of so many."""
    name, size = store.buffer.name, store.buffer.type.dtype.size
    times = [f for f in draft.schedule.binding(site, axis_name(columns)) if f.level == "time"]
    swizzle, _ = draft.spread(name, dict(dict(site.operands)[name].options))
    return length // math.prod(f.size for f in times) if times else swizzle // size if swizzle else length


def _shares(draft: Draft, name: str) -> tuple[int, int, int, int]:
    """Among how many lanes, warps, warpgroups and blocks of a cluster a reduction is divided."""
    r = draft.names[name]
    axes = r.axes if isinstance(r, l.Reduce) else (r.at,)
    around = draft.site(name) is None and draft.products and {*axes} <= {*draft.tiled}
    site = draft.site(next(iter(draft.products))) if around else draft.site(name)
    factors = [f for a in axes for f in draft.binding(a, site)]
    lanes, warps, groups, blocks = (
        math.prod(f.size for f in factors if f.level == level) for level in ("lane", "warp", "warpgroup", "cluster")
    )
    if around and (instruction := draft.instruction(site)) is not None:
        own, layout = [f.level[-1] for f in factors if f.level in ("inst.m", "inst.n")], instruction.d.layout
        inside = [x for c in own for x in runs(layout, c, 0, dict(layout.extents)[c])]
        lanes *= math.prod(count for part, _, _, count in inside if part == "lane")
        warps *= math.prod(count for part, _, _, count in inside if part == "warp")
    return lanes, warps, groups, blocks


def _apart(plan: Plan, draft: Draft, name: str) -> str:
    """Why the partial states of a reduction cannot meet, or nothing."""
    lanes, warps, groups, blocks = _shares(draft, name)
    if blocks > 1 and isinstance(draft.names[name], l.Scan):
        return "blocks of a cluster share no scan"
    if name not in draft.products:
        return "warpgroups share no reduction but a product's" if groups > 1 else ""
    products = plan.all(Product)
    if blocks > 1 and (why := _alone(plan, draft, products, max(lanes, warps, groups))):
        return f"blocks of a cluster share the steps of {why}"
    if max(lanes, warps, groups) > 1 and len(products) > 1 and (name not in products[-1].sites or lanes * groups > 1):
        return "warps alone share the reduction of a chain of products, and of the outer one only"
    if groups > 1 and any(a.teams > 1 for a in plan.all(Agent)):
        return "warpgroups that wait by themselves share no reduction"
    return ""


def _alone(plan: Plan, draft: Draft, products: tuple[Product, ...], threads: int) -> str:
    """Of what tiles blocks of a cluster share the steps, where this is none; else nothing."""
    if len(products) > 1 or warps(draft.instruction(draft.site(products[0].sites[0]))) == 1:
        return "one product of warpgroups"
    if threads > 1:
        return "tiles whose threads share none"
    agents = plan.all(Agent)
    if len(agents) == 1 or agents[-1].turns or agents[-1].registers:
        return "tiles that some warps load and others multiply: who stores in the end has no registers of a role"
    columns = [f for a, b in draft.schedule.lines(draft.site(products[0].sites[0])) if a == products[0].n for f in b]
    inner = [f for f in columns if f.level not in ("grid", "cluster", "time", "block", "inst.n") and f.size > 1]
    return f"tiles whose columns are an instruction's alone, not {inner[0]}" if inner else ""


@rule(keys=(Plan,))
def keep_in_registers(plan: Plan, draft: Draft) -> Plan | None:
    """`x = reg()`: what is loaded or computed once stays until it is wanted again."""
    names = kept(draft)
    if plan.all(Keep) or not names:
        return None
    return plan.plus(*map(Keep, names), read=[w for x in names for w in draft.read(None, x, "reg")])


def kept(draft: Draft) -> list[str]:
    """What the schedule keeps in registers."""
    known = {b.name for b in (*draft.kernel.reads, *draft.kernel.writes)} | set(draft.names)
    return [name for name, operand in draft.schedule.operands if operand.place == "reg" and name in known]


@rule(keys=(Plan,))
def jam_points(plan: Plan, draft: Draft) -> Plan | None:
    """`reg(8, jam=True)`: a thread takes each step of the reductions for these points together."""
    points = jammed(draft)
    if plan.all(Jam) or not points:
        return None
    need(not draft.tiled, f"a tile of {', '.join(map(axis_name, draft.tiled))} is divided among threads by a product")
    return plan.plus(Jam(points), read=[w for p in points for w in draft.read(None, p.name, "jam")])


def jammed(draft: Draft) -> tuple[Word, ...]:
    """How many points of an axis a thread takes together."""
    found = []
    for a in draft.kernel.axes:
        binding = dict(draft.schedule.axes).get(a.name, ())
        for f in () if isinstance(binding, Like) else binding:
            if _jams(draft, f):
                found.append(Word(a.name, (f.size,)))
    return tuple(found)


def _jams(draft: Draft, f: Factor) -> bool:
    asked = draft.option(f, "jam", False)
    if not isinstance(asked, bool) or (asked and f.level != "reg"):
        raise draft.fail(f"{f}: jam=True is said of the points of a thread, reg(n)")
    return asked


@rule(keys=(Plan,))
def align_vectors(plan: Plan, draft: Draft) -> Plan | None:
    """`reg(8, aligned=True)`: a thread's vectors begin where memory is aligned, wherever rows begin."""
    vectors = aligned(draft)
    if plan.all(Align) or not vectors:
        return None
    need(not draft.tiled, f"a tile of {', '.join(map(axis_name, draft.tiled))} is divided among threads by a product")
    sites = (None, *draft.schedule.sites)
    return plan.plus(Align(vectors), read=[w for s in sites for v in vectors for w in draft.read(s, v.name, "aligned")])


def aligned(draft: Draft) -> tuple[Word, ...]:
    """The axes along which vectors begin where memory is aligned, and how many elements they have."""
    found = {}
    for site in (None, *draft.schedule.sites):
        for name, binding in draft.schedule.lines(site):
            for f in binding:
                asked = draft.option(f, "aligned", False)
                if not isinstance(asked, bool) or (asked and (f.level != "reg" or f is not binding[-1])):
                    raise draft.fail(f"{f}: aligned=True is said of what a thread takes at once, the last reg(n)")
                if asked:
                    found[name] = f.size
    return tuple(Word(name, (size,)) for name, size in found.items())


RULES = (stage_results, meet, keep_in_registers, jam_points, align_vectors)
