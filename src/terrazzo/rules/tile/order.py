"""Which tiles there are, and who walks them."""

from __future__ import annotations

import math

from terrazzo.ir.plan import Limit, Order, Plan
from terrazzo.ir.schedule import Factor, Like, Word
from terrazzo.rewrite.rule import need, rule
from terrazzo.rules.tile.draft import Draft, axis_name

OUTSIDE = "tiles in groups of rows have another axis inside of that of the rows"


@rule(keys=(Plan,))
def walk_tiles(plan: Plan, draft: Draft) -> Plan | None:
    """Grid factors count the tiles. Each has a block, or a cluster, of its own, or those that fit walk all of them."""
    if plan.all(Order):
        return None
    schedule = draft.schedule
    lines = _factors(draft)
    free = {a.name for a in draft.kernel.axes}
    shared = [a for a, f in lines if a not in free and f.level == "grid" and f.size > 1]
    need(
        not shared,
        f"blocks share the reduction over {', '.join(shared)} in two kernels only, each with a schedule of its own",
    )
    for a, f in lines:
        if f.level != "grid" and dict(f.options).get("order"):
            why = f"{a}: order is that in which tiles are walked: grid has one, and not {f.level}"
            raise draft.fail(why, "", a)
    tiles = grid(draft)
    grouped = tuple(Word(a, w.args) for a, f in lines if f.level == "grid" and (w := _rows(draft, f)))
    outer = [w.name for w in tiles[:-1]]
    need(all(w.name in outer for w in grouped), OUTSIDE)
    last = Word("longest_first")
    backward = tuple(a for a, f in lines if f.level == "grid" and dict(f.options).get("order") == last)
    cluster = clusters(draft)
    size = cluster[0].args[0] if cluster else 1
    if len(cluster) > 1 and any(w.args[0] != size for w in cluster):
        raise draft.fail(f"blocks of a cluster divide one axis: {', '.join(map(str, cluster))}")
    if size > 8 or (size > 1 and draft.gpu.number < 90):
        raise draft.fail(f"a cluster has at most 8 blocks, from sm_90 on; not {size} on {draft.gpu.arch}")
    count = math.prod(w.args[0] for w in tiles)
    read = [w for a, f in lines if f.level == "grid" for w in draft.read(None, a, "order")]
    blocks, persistent = count * size, schedule.directive("persistent")
    summed = [w.name for w in cluster[:1] if w.name not in free and draft.products]
    need(
        not summed or not persistent,
        f"the blocks of a cluster share the sums over {', '.join(summed)} of one tile: persistent walks several",
    )
    if persistent:
        (most,) = persistent
        if not isinstance(most, int) or most < size or most % size:
            why = f"persistent takes a number of blocks, a multiple of the cluster's {size}"
            raise draft.fail(why, "", "persistent")
        blocks = min(most, blocks)
        order = dict(schedule.options("persistent")).get("order")
        if isinstance(order, Word) and order.name == "grouped":
            need(outer, OUTSIDE)
            rows = tiles[-2]
            need(rows.args[0] % order.args[0] == 0, f"groups of {order.args[0]} rows do not divide {rows}")
            grouped = (Word(rows.name, order.args),)
            read += draft.read(None, "persistent", "order")
        read += draft.read(None, "persistent", "persistent")
    begin = begun(draft)
    read += [w for c in draft.products.values() for a in c.reduce.axes for w in draft.read(None, axis_name(a), "begin")]
    return plan.plus(Order(tiles, blocks, cluster[:1], grouped, backward, bool(persistent), begin), read=read)


def begun(draft: Draft) -> str:
    """The axis by whose tile the steps begin; nothing where they all begin with the first."""
    every = {a: None for c in draft.products.values() for a in c.reduce.axes}
    times = [f for a in every for f in draft.schedule.binding(None, axis_name(a)) if f.level == "time"]
    asked = [v for f in times if (v := draft.option(f, "begin", ""))]
    if not asked:
        return ""
    walked = [w.name for w in grid(draft)]
    if asked[0] not in walked or len(set(asked)) > 1:
        raise draft.fail(f"begin is an axis of tiles, by which steps begin: {' or '.join(walked)}, not {asked[0]}")
    need(
        len({c.reduce.axes for c in draft.products.values()}) == 1,
        f"the steps of a chain of products begin with the first, and not by {asked[0]}",
    )
    return str(asked[0])


def _factors(draft: Draft) -> list[tuple[str, Factor]]:
    return [(a, f) for a, b in draft.schedule.axes if not isinstance(b, Like) for f in b]


def grid(draft: Draft) -> tuple[Word, ...]:
    """How often every axis has a tile."""
    return tuple(Word(a, (f.size,)) for a, f in _factors(draft) if f.level == "grid")


def clusters(draft: Draft) -> tuple[Word, ...]:
    """The axes that blocks of a cluster divide, for the kernel or in its sites."""
    schedule = draft.schedule
    inside = ((a, f) for s in schedule.sites for a, _ in s.axes for f in schedule.binding(s, a))
    found = (Word(a, (f.size,)) for a, f in (*_factors(draft), *inside) if f.level == "cluster")
    return tuple(dict.fromkeys(found))


def _rows(draft: Draft, f: Factor) -> Word | None:
    order = dict(f.options).get("order")
    if not isinstance(order, Word) or order.name != "grouped":
        return None
    if len(order.args) != 1 or order.args[0] < 1:
        raise draft.fail(f"{f}: grouped takes the number of rows of a group")
    need(f.size % order.args[0] == 0, f"groups of {order.args[0]} rows do not divide {f}")
    return order


@rule(keys=(Plan,))
def limit_registers(plan: Plan, draft: Draft) -> Plan | None:
    """`resident(2)`: two blocks are to fit on a processor."""
    if plan.all(Limit) or not draft.schedule.directive("resident"):
        return None
    (blocks,) = draft.schedule.directive("resident")
    if not isinstance(blocks, int) or blocks < 1:
        raise draft.fail("resident takes a number of blocks", "", "resident")
    return plan.plus(Limit(blocks), read=draft.read(None, "resident"))


RULES = (walk_tiles, limit_registers)
