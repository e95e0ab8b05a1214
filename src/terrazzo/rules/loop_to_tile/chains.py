"""Schedules of a product of a product: both in one loop of steps, what lies between them in registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from terrazzo.hw.gpu import Gpu
from terrazzo.hw.wgmma import PRODUCTS
from terrazzo.ir.contraction import contraction, nested_contraction, operand
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.nest import accumulators
from terrazzo.ir.node import Node, topological
from terrazzo.ir.plan import Reach
from terrazzo.ir.schedule import Factor, Like, Operand, Schedule, Site, Word
from terrazzo.ir.sites import called
from terrazzo.rules.loop_to_tile.threads import ceil, grid
from terrazzo.rules.loop_to_tile.warpgroups import REGISTERS, ROWS
from terrazzo.rules.tile.complete import Refused, complete
from terrazzo.rules.tile.draft import axis_name
from terrazzo.rules.tile_to_kernel.lower import lower

STEP = 128
"""Columns of the inner product in a step, at most."""
SLOTS = 2
FEW = 16
"""Rows below which a warpgroup's 64 are not worth it."""


@dataclass(frozen=True)
class Chain:
    """sum over `steps` of f(sum over `depth` of a * b) * c: `rows` only a knows, `columns` only c."""

    kernel: l.Kernel
    inner: str
    outer: str
    rows: Any
    columns: Any
    steps: Any
    depth: Any
    operands: tuple[Node, Node, Node]


def chain(kernel: l.Kernel) -> Chain | None:
    """The kernel as a chain of two products, or None."""
    names = {r: name for name, r in accumulators(kernel).items() if isinstance(r, l.Reduce)}
    for r, name in names.items():
        outer = nested_contraction(r)
        if outer is None or len(r.axes) != 1 or len(outer.terms) > 1 or contraction(r) is not None:
            continue
        (steps,) = r.axes
        for f, g in (outer.factors, outer.factors[::-1]):
            found = [contraction(x) for x in topological([f]) if isinstance(x, l.Reduce)]
            inner = [c for c in found if c and c.reduce in names and steps in c.reduce.free]
            inner = [c for c in inner if len(c.reduce.axes) == len(c.terms) == 1]
            if len(inner) != 1 or not isinstance(operand(g), l.Load):
                continue
            (c,) = inner
            a, b = c.factors if steps in c.factors[1].free else c.factors[::-1]
            rows = [x for x in kernel.axes if x in a.free and x not in b.free and x not in g.free]
            columns = [x for x in kernel.axes if x in g.free and x not in a.free and x not in b.free]
            if rows and columns:
                (depth,) = c.reduce.axes
                of = operand(a), operand(b), operand(g)
                return Chain(kernel, names[c.reduce], name, rows[-1], columns[-1], steps, depth, of)
    return None


def schedule(c: Chain, gpu: Gpu, gathered: bool, longest_first: bool = False) -> Schedule | None:
    """Its bindings: a producer warp, one or two warpgroups of 64 rows, two slots for each operand of a step."""
    order = (("order", Word("longest_first")),) if longest_first else ()
    kind = c.operands[0].dtype.name  # type: ignore[attr-defined]
    width, depth = c.columns.extent, c.depth.extent
    step = min(STEP if width <= 128 else STEP // 2, ceil(c.steps.extent, 16) * 16)
    inner, outer = (f"wgmma.m64n{n}k16.f32.{kind}" for n in (step, width))
    if depth % 16 or inner not in PRODUCTS or outer not in PRODUCTS:
        return None
    groups = 2 if c.rows.extent > ROWS else 1
    rows = groups * ROWS
    lines: list[tuple[str, Any]] = [(a.name, grid(_size(a))) for a in c.kernel.axes if a not in (c.rows, c.columns)]
    lines.append((c.rows.name, (Factor("grid", ceil(c.rows.extent, rows), order), Factor("block", rows))))
    lines.append((c.columns.name, (Factor("block", width),)))
    name = axis_name(c.steps)
    lines.append((name, (Factor("time", ceil(c.steps.extent, step), (("ring", SLOTS),)), Factor("block", step))))
    roles = (
        ("load", Word("warp", (1,))),
        ("math", Word("warpgroup", (groups,))),
        ("registers", (24, 240) if groups == 2 else REGISTERS[1]),
    )
    a, b, v = c.operands
    mine = (c.rows.name, (Factor("warpgroup", groups), Factor("inst.m", ROWS)))
    first = Site(
        (c.inner,),
        (mine, (name, (Factor("inst.n", step),)), (axis_name(c.depth), _depth(depth))),
        tuple({called(x): _operand(depth) for x in (a, b)}.items()),
        inner,
    )
    second = Site(
        (c.outer,),
        (mine, (c.columns.name, (Factor("inst.n", width),)), (name, _depth(step))),
        ((called(v), _operand(width)),),
        outer,
    )
    (store,) = c.kernel.stores
    part = min(width & -width, 64)
    if gathered:
        last = Site(
            (store.buffer.name,),
            ((c.columns.name, (Factor("time", width // part, (("ring", 2),)), Factor("block", part))),),
            ((store.buffer.name, Operand("smem", (("by", "tma"), ("swizzle", 2 * part)))),),
        )
    else:
        last = Site((store.buffer.name,), tuple((x.name, Like(c.outer)) for x in (c.rows, c.columns)))
    return Schedule(
        c.kernel.name, gpu.arch, tuple(lines), (), (("roles", (), roles),), (first, second, last)
    )  # fmt: skip


def _depth(size: int) -> tuple[Factor, ...]:
    return (Factor("reg", size // 16), Factor("inst.k", 16))


def _operand(width: int) -> Operand:
    """By TMA, in panels as wide as a swizzle."""
    return Operand("smem", (("by", "tma"), ("swizzle", next(s for s in (128, 64, 32) if 2 * width % s == 0))))


def best(kernel: l.Kernel, gpu: Gpu) -> tuple[Schedule | None, str]:
    """A schedule that is a plan, or why there is none."""
    found = chain(kernel)
    if found is None or "wgmma" not in gpu.features or len(kernel.stores) != 1:
        return None, "no two products in one loop of steps on this machine"
    if isinstance(found.rows.extent, int) and found.rows.extent < FEW:
        return None, f"{found.rows.extent} rows leave a warpgroup idle"
    if any(not isinstance(a.extent, int) for a in (*kernel.axes, found.steps, found.depth)):
        return None, "an axis has no size that is known"
    why = ""
    for gathered in (True, False):
        made = schedule(found, gpu, gathered)
        if made is None:
            return None, f"products of {found.depth.extent} and {found.columns.extent} columns are on no instruction"
        plan, _ = complete(kernel, made, gpu)
        if not isinstance(plan, Refused):
            return (schedule(found, gpu, gathered, True) if plan.all(Reach) else made), ""
        why = why or plan.reason
    return None, why


def refusal(kernel: l.Kernel, gpu: Gpu, lost: Callable[[k.Kernel], str]) -> str:
    """Why a chain of two products is not worth one kernel, or nothing: it cannot be derived, or was built and lost."""
    made, why = best(kernel, gpu)
    return why if made is None else lost(lower(kernel, made, gpu))


def _size(axis: Any) -> int:
    found: int = axis.extent
    return found
