"""What factors are made of besides sums comes with the slabs of a step, where it is a box of memory: what every column
of the step has once, as the sum of weights of a row of queries; or what all its scores have, as a bias that is added.
"""

from __future__ import annotations

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node, topological
from terrazzo.ir.plan import VALUES, Plan, Product, Ring, Stream
from terrazzo.ir.schedule import Named
from terrazzo.ir.sites import called
from terrazzo.rewrite.rule import need, rule
from terrazzo.rules.tile.draft import Draft, unused
from terrazzo.rules.tile.reach import masked
from terrazzo.rules.tile.rings import axis_called, brought, operand_text, staggered
from terrazzo.rules.tile.slabs import Slab


def vectors(draft: Draft, plan: Plan) -> dict[Node, Product]:
    """Loads that factors are made of and that know nothing of a tile but a step's columns, with the product of these
    that begins first, whose slots they may come to; and those of all of its points that the schedule has come so.
    """
    products = plan.all(Product)
    if not products or not staggered(draft, products):
        return dict.fromkeys(points(draft, plan), products[0]) if products else {}
    columns, found = axis_called(draft, products[0].n), []
    for p in products:
        hidden = masked(draft, p) if p.a == VALUES else None
        inside = topological([hidden.bare], stop=lambda x: isinstance(x, l.Reduce)) if hidden else ()
        found += [x for x in inside if isinstance(x, l.Load) and columns in x.free and not {*draft.tiled} & x.free]
    return {x: products[0] for x in found if not x.inside}


def points(draft: Draft, plan: Plan) -> list[Node]:
    """What is loaded for every score of a step, and comes to shared memory by the schedule. Where a product reads the
    same buffer, as with a residual, the schedule speaks of the product's operand.
    """
    first, last = plan.all(Product)[0], plan.all(Product)[-1]
    hidden = masked(draft, last) if last.a == VALUES else None
    asked = {name for name, held in getattr(draft.site(first.sites[0]), "operands", ()) if held.place == "smem"}
    asked -= {called(x) for p in plan.all(Product) for x in brought(draft, p) if isinstance(x, l.Load)}
    if hidden is None or not asked:
        return []
    every = topological([hidden.bare], stop=lambda x: isinstance(x, l.Reduce))
    axes = {axis_called(draft, first.m), axis_called(draft, first.n)}
    return [x for x in every if isinstance(x, l.Load) and axes <= x.free and called(x) in asked]


@rule(keys=(Plan,))
def bring_points(plan: Plan, draft: Draft) -> Plan | None:
    """`bias = smem(by="tma", swizzle=128)` in the site of scores: a step's part of it comes with the slabs that these
    are the product of, and threads read it where it lies while they wait for it.
    """
    if not plan.all(Stream) or staggered(draft, plan.all(Product)):
        return None
    lines: list[Stream] = []
    read: list[Named] = []
    done = {s.operand for s in plan.all(Stream)}
    for x, p in vectors(draft, plan).items():
        if operand_text(x) in done:
            continue
        ring = next((r for name in p.rings if (r := plan.named(name)).over), None)
        slab = Slab(draft, plan, p, plan.all(Ring)[0] if ring is None else ring, x)
        taken = {s.name for s in (*plan.all(Stream), *lines)}
        name = next(m for k in range(99) if (m := f"{slab.name}_s{k or ''}") not in taken)
        boxes = ring is not None and slab.by.boxes
        need(boxes, f"{slab.name}: what stands beside a product comes by TMA, step by step")
        line = slab.stream(name)
        lines.append(Stream(**{**{f: getattr(line, f) for f in line._fields}, "beside": True}))
        read += draft.read(draft.site(p.sites[0]), slab.name, "smem", "by", "swizzle", "pad")
    return plan.plus(*lines, read=read) if lines else None


@rule(keys=(Plan,))
def bring_vectors(plan: Plan, draft: Draft) -> Plan | None:
    """A vector of a step's columns is one more box in the slots of the first product's ring."""
    if not plan.all(Stream) or not staggered(draft, plan.all(Product)):
        return None
    lines: list[Stream] = []
    for x, p in vectors(draft, plan).items():
        taken = [s.name for s in (*plan.all(Stream), *lines)]
        if operand_text(x) in [s.operand for s in plan.all(Stream)]:
            continue
        ring = next(r for name in p.rings if (r := plan.named(name)).over)
        slab = Slab(draft, plan, p, ring, x)
        name = unused(f"{slab.name}_s", taken)
        if not slab.no_vector:
            lines.append(slab.stream(name))
    return plan.plus(*lines) if lines else None


RULES = (bring_points, bring_vectors)
