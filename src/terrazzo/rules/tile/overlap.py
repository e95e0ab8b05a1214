"""Products of the next step beside what is made of this one's: tensor cores multiply while CUDA cores find weights."""

from __future__ import annotations

from typing import Any

from terrazzo.hw.products import matrix, warps
from terrazzo.ir.plan import Agent, Frame, Plan, Product, Ring
from terrazzo.rewrite.rule import need, rule
from terrazzo.rules.tile.draft import Draft, axis_name
from terrazzo.rules.tile.reach import masked, reached
from terrazzo.rules.tile.rings import steps


@rule(keys=(Plan,))
def start_early(plan: Plan, draft: Draft) -> Plan | None:
    """`r1 = time(16, ring=2, overlap=1)`: the scores of the next step are on their way to one set of registers while
    those of this step become weights in another, which the second product takes while the next weights are found.
    """
    products = plan.all(Product)
    if not plan.all(Ring) or any(p.early for p in products) or not overlaps(draft):
        return None
    check(plan, draft)
    first = p = products[0]
    early = Product(p.sites, p.on, p.agent, p.rings, p.m, p.n, p.a, p.b, p.promote, p.box, early=True)
    lines = tuple(early if x is first else x for x in plan.lines)
    read = [w for a, _ in steps(draft) for w in draft.read(None, axis_name(a), "overlap")]
    return Plan(plan.kernel, plan.target, lines, plan.open).plus(read=read)


def overlaps(draft: Draft) -> bool:
    """Whether the schedule has the steps overlap."""
    asked = [v for _, f in steps(draft) if (v := draft.option(f, "overlap", 0))] if draft.products else []
    if strange := [v for v in asked if v != 1]:
        raise draft.fail(f"overlap is 1, for one step starts early, not {strange[0]}")
    return bool(asked)


def check(plan: Plan, draft: Draft) -> None:
    """Declines where the products of the next step cannot be on their way beside this step's."""
    products, agents = plan.all(Product), plan.all(Agent)
    found: Any = masked(draft, products[-1])
    need(
        len(products) == 2
        and products[-1].a == "values"
        and found is not None
        and (plan.all(Frame) or found.bare.dtype.size == 4),
        "what overlaps are two products in a row, of which the second takes what is made of the first",
    )
    need(
        all(warps(matrix(p.on)) > 1 for p in products) and len(agents) == 2,
        "what overlaps are products of warpgroups, behind warps that load",
    )
    moving = {r.name: r.slots for r in plan.all(Ring) if r.over}
    need(
        not {*products[0].rings} & {*products[1].rings} & {*moving},
        "products that overlap take their operands from slots of their own",
    )
    need(min(moving.values()) > 1, "one step starts before another has ended, so each operand has two slots at least")
    need(min(reached(plan, draft)) > 0, "what overlaps are steps, of which every tile has one at least")


RULES = (start_early,)
