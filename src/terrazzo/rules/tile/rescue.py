"""Sums that stand in the place of others where these will not do."""

from __future__ import annotations

from terrazzo.ir.plan import Order, Plan, Product, Rescue
from terrazzo.rewrite.rule import need, rule
from terrazzo.rules.tile.draft import Draft


@rule(keys=(Plan,))
def rescue_sums(plan: Plan, draft: Draft) -> Plan | None:
    """Sums that are rarely wanted are no product of the tile's. Once a tile's sums are known, a warp that has some
    that will not do sums the others on CUDA cores, from memory.
    """
    if plan.all(Rescue) or not draft.rescued or not plan.all(Product) or not plan.all(Order):
        return None
    need(len(plan.all(Product)) == 1, f"{next(iter(draft.rescued))} stands in the place of sums of a chain")
    names = {r: name for name, r in draft.names.items()}
    return plan.plus(*(Rescue(name, names[x.of]) for name, x in draft.rescued.items()))


RULES = (rescue_sums,)
