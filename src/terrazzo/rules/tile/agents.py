"""Which warps do what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from terrazzo.hw.gpu import Gpu
from terrazzo.hw.products import warps
from terrazzo.ir.dialects.kernel import REGISTER_FILE, WARP
from terrazzo.ir.plan import EVERYONE, Agent, Plan
from terrazzo.ir.schedule import WARPS_IN_A_GROUP, Word
from terrazzo.rewrite.rule import rule
from terrazzo.rules.tile.draft import Draft

LOAD, MATH = "load", "math"
ROLES = ("", "roles")
"""The line of a schedule that says who does what."""


@rule(keys=(Plan,))
def assign_warps(plan: Plan, draft: Draft) -> Plan | None:
    """All warps do everything, or, with `roles`, those that load stand before those that compute.

    A role with registers of its own is of whole warpgroups. Warpgroups that multiply each work and wait by themselves;
    with `turns=True` each has a tile of its own.
    """
    if plan.all(Agent):
        return None
    schedule = draft.schedule
    count = bound_warps(draft)
    groups = any(warps(draft.instruction(s)) > 1 for s in schedule.sites)
    options = dict(schedule.options("roles"))
    if not options:
        return plan.plus(Agent(EVERYONE, 0, count))
    asked = role_warps(draft)
    turns = options.get("turns", False) is True
    alone = groups and count == WARPS_IN_A_GROUP and asked[MATH] % count == 0
    if turns and not (alone and schedule.directive("persistent")):
        why = "roles: warpgroups that take turns multiply a tile each, of those a persistent block walks"
        raise draft.fail(why, *ROLES)
    if asked[MATH] != count and not turns:
        raise draft.fail(f"roles give {asked[MATH]} warps to {MATH}, and its sites bind {count}", *ROLES)
    registers = options.get("registers", (0, 0))
    if not isinstance(registers, tuple) or len(registers) != 2 or not all(isinstance(r, int) for r in registers):
        why = "roles: registers are two numbers, those of a thread that loads and of one that computes"
        raise draft.fail(why, *ROLES)
    first = asked[LOAD]
    load = Agent(LOAD, 0, first, 1, registers[0])
    every = asked[MATH]
    math = Agent(MATH, first, every, every // WARPS_IN_A_GROUP if groups else 1, registers[1], turns)
    resident = schedule.directive("resident") or (1,)
    for agent, why in beyond((load, math), resident[0] if isinstance(resident[0], int) else 1, draft.gpu):
        raise draft.fail(f"roles: {agent.name}: {why}", *ROLES)
    return plan.plus(load, math, read=draft.read(None, "roles", "roles", LOAD, MATH, "registers", "turns"))


def beyond(agents: Sequence[Agent], resident: int, gpu: Gpu) -> Iterator[tuple[Agent, str]]:
    """What is wrong with the registers that agents are given, where so many blocks are to fit on a processor: their
    threads share those that a block begins with.
    """
    threads = WARP * sum(a.warps for a in agents)
    each = REGISTER_FILE // max(threads * resident, 1) // 8 * 8
    taken = 0
    for a in agents if any(a.registers for a in agents) else ():
        whole = a.first % WARPS_IN_A_GROUP == a.warps % WARPS_IN_A_GROUP == 0 and gpu.number >= 90
        if a.registers and not (whole and a.registers in range(24, 241, 8)):
            yield a, "registers are for whole warpgroups from sm_90 on, and a multiple of 8 from 24 to 240"
        taken += WARP * a.warps * (a.registers or each)
        if taken > each * threads:
            yield a, f"{taken} registers with those before it, and a block of {threads} threads has {each * threads}"


def role_warps(draft: Draft) -> dict[str, int]:
    """How many warps each role has. Those that load are whole warpgroups where these have registers of their own, or
    multiply.
    """
    options = dict(draft.schedule.options("roles"))
    groups = any(warps(draft.instruction(s)) > 1 for s in draft.schedule.sites)
    whole = WARPS_IN_A_GROUP if groups or options.get("registers", (0, 0)) != (0, 0) else 1
    asked = {name: _warps(draft, name, options.get(name)) for name in (LOAD, MATH)}
    return asked | {LOAD: -(-asked[LOAD] // whole) * whole}


def bound_warps(draft: Draft) -> int:
    """The warps that compute."""
    return max([1, draft.warps(None), *(draft.warps(s) for s in draft.schedule.sites)])


def _warps(draft: Draft, name: str, given: object) -> int:
    """`warp(1)` or `warpgroup(2)` as a number of warps."""
    match given:
        case Word("warp", (count,)) if count > 0:
            return count
        case Word("warpgroup", (count,)) if count > 0:
            return count * WARPS_IN_A_GROUP
    raise draft.fail(f"roles: {name} is given warp(n) or warpgroup(n), not {given}", *ROLES)


RULES = (assign_warps,)
