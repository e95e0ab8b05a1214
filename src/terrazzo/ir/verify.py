"""The verifier: what must hold of a program between two passes. Types hold by construction; this checks the rest.

Torch and Tensor IR: only ops of the dialect; every input declared; no value read before it exists (by construction); no
index leaves its tensor unless it is guarded.
Loop IR: each buffer is written once, before it is read, by the step that owns it; every variable is bound by an axis of
its kernel or a reduction; every index is within its buffer wherever ranges can tell; every element is stored exactly
once. Tile IR: each schedule is one of a kernel, and fits it; each plan is one of a schedule.
Kernel IR: every value and register exists where it is used, every loop's variable is bound, and no index leaves its
place.
"""

from __future__ import annotations

from typing import Any

from terrazzo.errors import CompilerBug, UserError
from terrazzo.ir.address import coefficient
from terrazzo.ir.dialects import kernel, tile
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects import torch as aten
from terrazzo.ir.expr import Expr, FloorDiv, IntExpr, Mod, Var, at_least, bounds
from terrazzo.ir.node import substitute, topological
from terrazzo.ir.program import Input, Program
from terrazzo.ir.verify_kernel import problem as kernel_problem

_ALLOWED: dict[str, tuple[Any, ...]] = {"torch": (aten.Aten, aten.Get, Input), "tensor": (t.Value, Input, Expr)}


def verify(program: Program | l.Program | tile.Program | kernel.Program, after: str = "") -> None:
    """Raise CompilerBug, naming the pass `after` which this was found, if the program breaks a rule of its IR."""
    if why := problem(program):
        raise CompilerBug(f"{'after ' + after + ': ' if after else ''}{program.name} is not valid: {why}")


def problem(program: Program | l.Program | tile.Program | kernel.Program) -> str:
    """Which rule of its IR a program breaks; "" if none."""
    if isinstance(program, kernel.Program):
        return next(
            (f"{s.name}: {why}" for s in program.steps if isinstance(s, kernel.Kernel) and (why := kernel_problem(s))),
            "",
        )
    if isinstance(program, tile.Program):
        return _tile(program)
    return _loop(program) if isinstance(program, l.Program) else _graph(program)


def _graph(p: Program) -> str:
    for node in topological(p.results):
        if not isinstance(node, _ALLOWED[p.dialect]):
            return f"{type(node).__name__} ({node.dialect}.{node.op}) is no part of {p.dialect} IR"
        if isinstance(node, Input) and node not in p.inputs:
            return f"input {node.name} is used but not declared"
        if isinstance(node, t.IndexMap) and not node.inside and all(bounds(e)[1] != 0 for e in node.shape):
            for d, (e, extent) in enumerate(zip(node.index, node.x.type.shape, strict=True)):  # type: ignore[attr-defined]
                if not at_least(e, 0) or not at_least(extent - 1 - e, 0):
                    return f"the index map {p.names.get(node, '')} may leave dimension {d} of {node.x.type} with {e}"  # type: ignore[attr-defined]
    return ""


def _tile(p: tile.Program) -> str:
    for number, schedule in p.schedules:
        step = p.loop.steps[number] if 0 <= number < len(p.loop.steps) else None
        if not isinstance(step, l.Kernel):
            return f"there is no kernel {number} for the schedule of {schedule.kernel}"
        try:
            tile.fit(schedule, step)
        except UserError as why:
            return f"kernel {step.name}: {why}"
    schedules = dict(p.schedules)
    for number, plan in p.plans:
        above = schedules.get(number)
        if above is None or (above.kernel, above.target) != (plan.kernel, plan.target):
            return f"there is no schedule that the plan of {plan.kernel} for {plan.target} completes"
    return _loop(p.loop)


def _loop(p: l.Program) -> str:
    ready = set(p.inputs)
    names = {b.name for b in p.inputs}
    for step in p.steps:
        if missing := [b.name for b in step.reads if b not in ready]:
            return f"{step.name} reads {missing[0]} before it is written"
        for b in dict.fromkeys(step.writes):
            if b in ready or b.name in names:
                return f"{b.name} is written twice"
            names.add(b.name)
        ready.update(step.writes)
        if isinstance(step, l.Kernel) and (problem := _kernel(step)):
            return f"kernel {step.name}: {problem}"
    if missing := [b.name for b in p.results if b not in ready]:
        return f"result {missing[0]} is never written"
    return ""


def _kernel(k: l.Kernel) -> str:
    axes = frozenset(k.axes)
    if not k.scans_in_order:
        return "a scan must run along the whole of the last axis"
    if idle := axes - frozenset().union(*(s.free for s in k.stores)):
        return f"no store depends on axis {min(a.name for a in idle)}"
    for store in k.stores:
        if stray := (store.free - axes):
            return f"{min(v.name if isinstance(v, Var) else f'r{v.label}' for v in stray)} is bound nowhere"
        if problem := _stores_all(store):
            return problem
        for node in topological([store.value]):
            if isinstance(node, l.Load) and (problem := _in_bounds(node)):
                return problem
    return ""


def _stores_all(store: l.Store) -> str:
    """Each dimension is counted by axes, or digits of axes, of its own: every element is stored exactly once."""
    digits: dict[Expr, Var] = {}
    for e in topological([e for e in store.index if isinstance(e, Expr)]):
        if isinstance(e, Mod | FloorDiv) and (digit := _part(e)) is not None:
            digits[e] = digit
    used: set[Any] = set()
    for d, (whole, extent) in enumerate(zip(store.index, store.buffer.type.shape, strict=True)):
        e = substitute(whole, digits)
        axes = sorted(e.free, key=lambda v: bounds(_digit(e, v))[0] or 0) if isinstance(e, Expr) else []
        radix: IntExpr = 1
        for v in axes:
            if v in used or _digit(e, v) != radix:
                return f"the store to {store.buffer.name} does not cover dimension {d}"
            used.add(v)
            radix = radix * v.extent
        if radix != extent or (not isinstance(e, Expr) and e != 0):
            return f"the store to {store.buffer.name} does not cover dimension {d}"
    for axis in {e.free for e in digits}:
        (v,) = axis
        mine = sorted(
            (int(d.name.rpartition("/")[2]), d.extent) for e, d in digits.items() if v in e.free and d in used
        )
        radix = 1
        for place, size in mine:
            radix = radix * size if place == radix else -1
        if v in used or radix != v.extent:
            return f"the store to {store.buffer.name} does not cover the digits of {v}"
        used.add(v)
    return "" if store.value.free <= used else f"the store to {store.buffer.name} depends on an axis it does not have"


def _part(e: IntExpr) -> Var | None:
    """The digit v // place % size of an axis, as a variable of its own called v/place."""
    inner: IntExpr = e
    size, place = None, 1
    if isinstance(inner, Mod) and isinstance(inner.b, int):
        size, inner = inner.b, inner.a
    if isinstance(inner, FloorDiv) and isinstance(inner.b, int):
        place, inner = inner.b, inner.a
    if not isinstance(inner, Var) or not isinstance(inner.extent, int):
        return None
    return Var(f"{inner.name}/{place}", size or -(-inner.extent // place))


def _digit(e: IntExpr, v: Any) -> IntExpr:
    """What `v` is multiplied with in `e`; 0 where it is more than multiplied."""
    return coefficient(e, v) or 0


def _in_bounds(load: l.Load) -> str:
    """An unguarded load is provably inside; a guarded one may be outside only where the guard can fail."""
    if load.inside:
        return ""
    for d, (e, extent) in enumerate(zip(load.index, load.buffer.type.shape, strict=True)):
        if not at_least(e, 0) or not at_least(extent - 1 - e, 0):
            if isinstance(extent, int) and _empty(load):
                continue
            return f"the load {load} may leave dimension {d} of {load.buffer.type}"
    return ""


def _empty(load: l.Load) -> bool:
    """A loop of no iterations reads nothing, whatever its index says."""
    return any(v.extent == 0 for v in load.free) or 0 in load.buffer.type.shape
