"""Factors that are made of sums and lie in shared memory: where threads divide them otherwise than the sums, or wgmma
reads them there.
"""

from __future__ import annotations

from typing import Any

from terrazzo.ir.plan import STORED, Plan, Product, Stage, Stream
from terrazzo.ir.schedule import Named, Word
from terrazzo.rewrite.rule import need, rule
from terrazzo.rules.swizzles import swizzled
from terrazzo.rules.tile.draft import Draft, axis_name, unused
from terrazzo.rules.tile.handed import asked, made, summed
from terrazzo.rules.tile.rings import axis_called
from terrazzo.rules.tile.slabs import panels

SLOTS = {False: 1, True: 2}
"""Slots of such a factor, where the schedule says nothing. Where others load (roles), threads need not wait then for
who reads the last step's; where all do everything, they have met since.
"""


@rule(keys=(Plan,))
def stage_factors(plan: Plan, draft: Draft) -> Plan | None:
    """Where what was summed cannot stay in registers, it is put into shared memory, rounded, and read from there. Its
    rows run along the columns of the instruction that summed it, so that threads put neighbours there at once; its
    swizzle is one that leaves no conflicts. `acc0 = smem(slots=1, swizzle=64)` in the site of the product that takes it
    says so too.
    """
    if plan.all(Stage) or not plan.all(Stream):
        return None
    lines: list[Stage] = []
    read: list[Named] = []
    for p in plan.all(Product):
        if STORED not in (p.a, p.b):
            continue
        site, inner = draft.site(p.sites[0]), next(summed(draft, p.sites[0]))
        given = next(iter(asked(draft, p.sites[0])), "")
        taken = {*(s.name for s in plan.all(Stream)), *(x.name for x in lines)}
        lines.append(stage(plan, draft, p, unused(f"{inner}_s", taken)))
        read += draft.read(site, given, "smem", "swizzle", "slots") if given else []
    return plan.plus(*lines, read=read) if lines else None


def stage(
    plan: Plan, draft: Draft, p: Product, name: str, swizzle: int | None = None, slots: int | None = None
) -> Stage:
    """How a product's factor lies in shared memory, given what is decided already."""
    site, inner = draft.site(p.sites[0]), next(summed(draft, p.sites[0]))
    options: dict[str, Any] = next((dict(x.options) for x in asked(draft, p.sites[0]).values()), {})
    first = next(x for x in plan.all(Product) if inner in x.sites)
    (term,) = made(draft.products[p.sites[0]])
    size: int = term.dtype.size  # type: ignore[attr-defined]
    *_, steps = draft.products[p.sites[0]].reduce.axes
    sizes = {a: draft.length(a, site) for a in (axis_called(draft, p.rows), steps)}
    axes = sorted(sizes, key=lambda a: axis_name(a) == first.n)
    wanted, pad = draft.spread(inner, options)
    need(not pad, f"{inner}: what is put into shared memory for a product is swizzled, and has no pad")
    wanted = swizzle if swizzle is not None else wanted
    span = swizzled(sizes[axes[-1]] * size) if wanted is None else wanted
    if slots is None:
        slots = options.get("slots", SLOTS[bool(draft.schedule.options("roles"))])
    if slots not in (1, 2) or isinstance(slots, bool):
        raise draft.fail(f"{inner}: it has one slot or two, not {slots}", *draft.line(inner), f"slots={slots}")
    need(
        span in (0, 32, 64, 128) and sizes[axes[-1]] * size % (span or 16) == 0,
        f"{inner}: rows of {sizes[axes[-1]] * size} bytes are not swizzled by {span}",
    )
    words = tuple(Word(axis_name(a), (sizes[a],)) for a in axes)
    return Stage(name, inner, p.sites[0], words, slots, span, panels(inner, size, p, axes, sizes, span))


RULES = (stage_factors,)
