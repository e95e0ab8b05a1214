"""The verifier: what must hold of a program between two passes. Types hold by construction; this checks the rest.

Torch and Tensor IR: only ops of the dialect; every input declared; no value read before it exists (by construction); it
is proved that no index leaves its tensor where its guards hold.
Loop IR: each buffer is written once, before it is read, by the step that owns it; every variable is bound by an axis of
its kernel or a reduction; it is proved that no index leaves its buffer where its guards hold; every element is stored
exactly once, or, over an input that nothing reads afterwards, at most once; and no two lie at one place. Tile IR: each
schedule is one of a kernel, and fits it; each plan is one of a schedule.
Kernel IR: every value and register exists where it is used, every loop's variable is bound, and no index leaves its
place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from terrazzo.collector import remembered
from terrazzo.errors import CompilerBug, UserError
from terrazzo.ir import verify_kernel
from terrazzo.ir.address import axis_digits, coefficient, upwards
from terrazzo.ir.canonical import as_its_form, canonical, form_of, many_alike
from terrazzo.ir.dialects import kernel, tile
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects import torch as aten
from terrazzo.ir.dialects.scalar import COMPARISONS, is_cast
from terrazzo.ir.expr import Expr, IntExpr, Loaded, Var, at_least, bounds
from terrazzo.ir.node import Node, per_node, substitute, topological
from terrazzo.ir.program import Input, Program
from terrazzo.ir.proof import ill, leaves
from terrazzo.ir.schedule import Schedule
from terrazzo.ir.types import Type

_ALLOWED: dict[str, tuple[Any, ...]] = {"torch": (aten.Aten, aten.Get, Input), "tensor": (t.Value, Input, Expr)}


def verify(program: Program | l.Program | tile.Program | kernel.Program, after: str = "") -> None:
    """Raise CompilerBug, naming the pass `after` which this was found, if the program breaks a rule of its IR."""
    if why := problem(program):
        raise CompilerBug(f"{'after ' + after + ': ' if after else ''}{program.name} is not valid: {why}")


def problem(program: Program | l.Program | tile.Program | kernel.Program) -> str:
    """Which rule of its IR a program breaks; "" if none."""
    if isinstance(program, kernel.Program):
        return next(
            (
                f"{s.name}: {why}"
                for s in program.steps
                if isinstance(s, kernel.Kernel) and (why := as_its_form(verify_kernel.problem, s))
            ),
            "",
        )
    if isinstance(program, tile.Program):
        return _tile(program)
    return _loop(program) if isinstance(program, l.Program) else _graph(program)


def _graph(p: Program) -> str:
    inputs = set(p.inputs)
    for node in topological(p.results):
        if not isinstance(node, _ALLOWED[p.dialect]):
            return f"{type(node).__name__} ({node.dialect}.{node.op}) is no part of {p.dialect} IR"
        if isinstance(node, Input) and node not in inputs:
            return f"input {node.name} is used but not declared"
        if why := value_problem(node, p.names.get(node, "")):
            return why
    return ""


def value_problem(node: Node, name: str = "") -> str:
    """What is wrong with the indices of a value of Tensor IR, itself; "" if nothing."""
    if isinstance(node, t.Iota):
        return ill((node.index,))
    if not isinstance(node, t.IndexMap | t.Read):
        return ""
    inside = node.inside if isinstance(node, t.IndexMap) else ()
    source: Type = node.x.type  # type: ignore[attr-defined]
    if why := ill((*node.index, *inside)):
        return why
    if (d := _leaves(node.index, source, inside)) is not None:
        what = f"the index map {name}" if isinstance(node, t.IndexMap) else "an index that is read"
        return f"{what} may leave dimension {d} of {source} with {node.index[d]}"
    return ""


def _tile(p: tile.Program) -> str:
    for number, schedule in p.schedules:
        step = p.loop.steps[number] if 0 <= number < len(p.loop.steps) else None
        if not isinstance(step, l.Kernel):
            return f"there is no kernel {number} for the schedule of {schedule.kernel}"
        form = form_of(step, schedule)
        if why := form.named(_misfit(form.schedule, form.kernel)) if form else _misfit(schedule, step):
            return f"kernel {step.name}: {why}"
    schedules = dict(p.schedules)
    for number, plan in p.plans:
        above = schedules.get(number)
        if above is None or (above.kernel, above.target) != (plan.kernel, plan.target):
            return f"there is no schedule that the plan of {plan.kernel} for {plan.target} completes"
    return _loop(p.loop)


@remembered
def _misfit(schedule: Schedule, kernel: l.Kernel) -> str:
    """Why a schedule does not fit a kernel; "" if it does. It is asked after several passes, of many that are alike."""
    try:
        tile.fit(schedule, kernel)
    except UserError as why:
        return str(why)
    return ""


def _loop(p: l.Program) -> str:
    ready = {b.name: b for b in p.inputs}
    problem = problem_of_form if many_alike(p) else kernel_problem
    for step in p.steps:
        if why := step_problem(step, ready, problem):
            return why
        ready.update((b.name, b) for b in step.writes)
    if why := overwritten(p.steps, p.inputs, p.results):
        return why
    return results_problem(p.results, ready)


def step_problem(
    step: l.Kernel | l.Call, ready: Mapping[str, l.Buffer], problem: Callable[[l.Kernel], str] | None = None
) -> str:
    """What is wrong with a step of Loop IR where these buffers are written already, by name; "" if nothing. `problem`
    says what is wrong with a kernel alone.
    """
    if missing := [b.name for b in step.reads if ready.get(b.name) is not b]:
        return f"{step.name} reads {missing[0]} before it is written"
    names = [b.name for b in dict.fromkeys(step.writes)]
    if twice := [x for n, x in enumerate(names) if x in ready or x in names[:n]]:
        return f"{twice[0]} is written twice"
    if isinstance(step, l.Kernel) and (why := (problem or kernel_problem)(step)):
        return f"kernel {step.name}: {why}"
    return ""


def overwritten(steps: Sequence[l.Kernel | l.Call], inputs: Collection[l.Buffer], results: Collection[l.Buffer]) -> str:
    """What lies over something that is no input, or is read or given back afterwards; "" if nothing."""
    gone: dict[l.Buffer, l.Buffer] = {}
    for step in steps:
        if lost := next((b for b in step.reads if b in gone), None):
            return f"{step.name} reads {lost.name}, which {gone[lost].name} lies over"
        for b, old in step.over.items() if isinstance(step, l.Kernel) else ():
            if old not in inputs or old in results or b not in results:
                return f"{b.name} lies over {old.name}, which is no input, or a result; or is itself none"
            gone[old] = b
    return ""


def results_problem(results: tuple[l.Buffer, ...], ready: Mapping[str, l.Buffer]) -> str:
    """What is wrong with the results of a program that has written these buffers; "" if nothing."""
    missing = [b.name for b in results if ready.get(b.name) is not b]
    return f"result {missing[0]} is never written" if missing else ""


@per_node
def problem_of_form(k: l.Kernel) -> str:
    """The same as `kernel_problem`, found once for all kernels that differ in names only. Finding their forms takes
    longer than that where few are alike.
    """
    form = canonical(k)
    why = kernel_problem(form.kernel)
    return form.named(why) if why else ""


@per_node
def kernel_problem(k: l.Kernel) -> str:
    """What is wrong with a kernel of Loop IR; "" if nothing."""
    axes = frozenset(k.axes)
    if not k.scans_in_order:
        return "a scan must run along the whole of the last axis"
    if idle := axes - frozenset().union(*(s.free for s in k.stores)):
        return f"no store depends on axis {min(a.name for a in idle)}"
    for store in k.stores:
        if stray := (store.free - axes):
            return f"{min(v.name if isinstance(v, Var) else f'r{v.label}' for v in stray)} is bound nowhere"
        if problem := store_problem(store):
            return problem
    return next(filter(None, map(term_problem, k.terms)), "")


@per_node
def term_problem(node: Node) -> str:
    """What is wrong with a term of Loop IR, itself: with its indices, or with what it compares; "" if nothing."""
    if isinstance(node, l.Apply) and node.fn.name in COMPARISONS and any(map(_orders_what_it_computes, node.args)):
        return "it computes twice what it compares by its order, and the last digits may differ"
    if isinstance(node, l.Index):
        return ill((node.value,))
    if not isinstance(node, l.Load):
        return ""
    if why := ill((*node.index, *node.inside, *node.buffer.type.element_strides)):
        return why
    if (d := _leaves(node.index, node.buffer.type, node.inside)) is not None:
        return f"the load {node} may leave dimension {d} of {node.buffer.type}"
    return ""


def _orders_what_it_computes(x: Node) -> bool:
    """Whether a number stands for the order of one that is not just read, or read and converted."""
    while isinstance(x, l.Apply) and (is_cast(x.fn) or x.fn.name == "not_"):
        x = x.args[0]
    if not isinstance(x, l.Apply) or x.fn.name != "order":
        return False
    x = x.args[0]
    while isinstance(x, l.Apply) and is_cast(x.fn):
        x = x.args[0]
    return not isinstance(x, l.Load)


def store_problem(store: l.Store) -> str:
    """What is wrong with where a store of Loop IR goes, itself; "" if nothing."""
    if why := ill((*store.index, *store.buffer.type.element_strides)) or _stores_all(store):
        return why
    if _overlaps(store.buffer.type):
        return f"{store.buffer.name} is stored to, and its strides put several elements at one place"
    return ""


def _overlaps(ty: Type) -> bool:
    """Whether strides let two elements lie at one place: one must be larger than all that smaller ones span."""
    if ty.strides is None or 0 in ty.shape:
        return False
    span: IntExpr = 0
    for step, extent in sorted(zip(ty.strides, ty.shape, strict=True), key=lambda x: (bounds(x[0])[0] or 0, str(x[0]))):
        if extent != 1:
            if not at_least(step - span, 1):
                return True
            span = span + (extent - 1) * step
    return False


def _place(e: Expr, v: Any) -> tuple[int, int]:
    """What a digit counts; of two that count the same, one has one value only, and comes first."""
    return bounds(_digit(e, v))[0] or 0, bounds(v.extent)[0] or 0


def _stores_all(store: l.Store) -> str:
    """Each dimension is counted by axes, or digits of axes, of its own, each perhaps from the end: every element is
    stored exactly once. Over something else a dimension may be counted from some place on, or be a place that follows
    from what others count by, or that data says: every element is stored at most once.
    """
    own = [(e, n) for e, n in zip(store.index, store.buffer.type.shape, strict=True) if not (e == 0 and n == 1)]
    axes = {e for e, n in own if isinstance(e, Var) and e.extent == n}
    if len(axes) == len(own) and store.value.free <= axes:  # which is what most are
        return ""
    part = store.over is not None
    if part and (left := _leaves(store.index, store.buffer.type, ())) is not None:
        return f"the store to {store.buffer.name} may leave dimension {left}"
    digits = axis_digits(store.index)
    used: set[Any] = set()
    later: list[tuple[int, IntExpr]] = []
    for d, (whole, extent) in enumerate(zip(store.index, store.buffer.type.shape, strict=True)):
        e, _ = upwards(substitute(whole, digits))
        radix: IntExpr = 1
        counted: IntExpr = 0
        mine = sorted(e.free, key=partial(_place, e)) if isinstance(e, Expr) else []
        for v in mine:
            if v in used or _digit(e, v) != radix:
                break
            counted = counted + v * radix
            radix = radix * v.extent
        else:  # so nothing else is in it: no constant, no size, no index from data
            if (radix == extent and e == counted) or (part and isinstance(e - counted, int)):
                used.update(mine)
                continue
        if not part:
            return f"the store to {store.buffer.name} does not cover dimension {d}"
        later.append((d, e))
    if open_ends := [d for d, e in later if isinstance(e, Expr) and not e.free <= used]:
        return f"the store to {store.buffer.name} may store a place of dimension {open_ends[0]} twice"
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


def _digit(e: IntExpr, v: Any) -> IntExpr:
    """What `v` is multiplied with in `e`; 0 where it is more than multiplied."""
    return coefficient(e, v) or 0


def _leaves(index: tuple[IntExpr, ...], ty: Type, inside: tuple[IntExpr, ...]) -> int | None:
    """The dimension of a tensor that an index may leave where its guards hold; None if it is proved to stay."""
    if any(v.extent == 0 for e in (*index, *inside) if isinstance(e, Expr) for v in e.free):
        return None  # a loop of no iterations reads nothing, whatever its index says
    refused = [isinstance(e, Loaded) and e.extent == 0 for e in index]  # no number is one, which is checked
    return leaves(index, tuple(1 if no else x for no, x in zip(refused, ty.shape, strict=True)), inside)
