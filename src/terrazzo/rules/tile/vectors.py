"""What factors are made of besides sums, and that every column of a step has once, as the sum of weights of a row of
queries: it comes with the slabs of the step, where it is a box of memory.
"""

from __future__ import annotations

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node, topological
from terrazzo.ir.plan import Plan, Product, Stream
from terrazzo.rewrite.rule import rule
from terrazzo.rules.tile.draft import Draft
from terrazzo.rules.tile.reach import masked
from terrazzo.rules.tile.rings import axis_called, operand_text, staggered
from terrazzo.rules.tile.slabs import Slab


def vectors(draft: Draft, plan: Plan) -> dict[Node, Product]:
    """Loads that factors are made of and that know nothing of a tile but a step's columns, with the product of these
    that begins first, whose slots they may come to.
    """
    products = plan.all(Product)
    if not products or not staggered(draft, products):
        return {}
    columns, found = axis_called(draft, products[0].n), []
    for p in products:
        hidden = masked(draft, p) if p.a == "values" else None
        inside = topological([hidden.bare], stop=lambda x: isinstance(x, l.Reduce)) if hidden else ()
        found += [x for x in inside if isinstance(x, l.Load) and columns in x.free and not {*draft.tiled} & x.free]
    return {x: products[0] for x in found if not x.inside}


@rule(keys=(Plan,))
def bring_vectors(plan: Plan, draft: Draft) -> Plan | None:
    """A vector of a step's columns is one more box in the slots of the first product's ring."""
    if not plan.all(Stream):
        return None
    lines: list[Stream] = []
    for x, p in vectors(draft, plan).items():
        taken = [s.name for s in (*plan.all(Stream), *lines)]
        if operand_text(x) in [s.operand for s in plan.all(Stream)]:
            continue
        ring = next(r for name in p.rings if (r := plan.named(name)).over)
        slab = Slab(draft, plan, p, ring, x)
        name = next(m for m in (slab.name + "_s", *(f"{slab.name}_s{k}" for k in range(1, 99))) if m not in taken)
        if not slab.no_vector:
            lines.append(slab.stream(name))
    return plan.plus(*lines) if lines else None


RULES = (bring_vectors,)
