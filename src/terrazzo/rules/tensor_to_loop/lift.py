"""Lift each tensor primitive to the term of one of its elements; each value becomes a kernel that stores that term."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from terrazzo.errors import CompilerBug
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.expr import Expr, IntExpr, Var
from terrazzo.ir.node import Node, topological, transform
from terrazzo.ir.program import Inputs, Program, donated, in_turn
from terrazzo.rewrite.engine import index
from terrazzo.rewrite.rule import Log, Rule, rule
from terrazzo.rules.loop.fusion.inline import select
from terrazzo.rules.tensor_to_loop.alike import Alike

Element = Callable[..., Any]
"""element(x, index, inside=()) is the term of one element of the value x."""
Context = tuple[tuple[IntExpr, ...], Element]
"""What a lifting rule gets: the coordinates of the element, and the way to elements of the operands."""


@rule
def elementwise(node: t.Elementwise, ctx: Any) -> Any:
    """out[i] = fn(args[i]...).

    @tensor
    def f(x: f32[3, 3], y: f32[3, 3]):
        z: f32[3, 3] = add(x, y)
        return (z,)
    =>
    @loop
    def f(x: f32[3, 3], y: f32[3, 3]):
        with kernel('z', z=f32[3, 3]):
            for a0 in free(3):
                for a1 in free(3):
                    in0 = x[a0, a1]
                    in1 = y[a0, a1]
                    v0 = add(in0, in1)
                    z[a0, a1] = v0
        return (z,)
    """
    here, element = ctx
    return l.Apply(node.fn, tuple(element(a, here) for a in node.args))


@rule
def index_map(node: t.IndexMap, ctx: Any) -> Any:
    """out[i] = x[f(i)] inside, 0 outside.

    @tensor
    def f(x: f32[3, 3]):
        z: f32[3, 3] = index_map(lambda i0, i1: x[i1, i0 - 1] if i0 >= 1 else 0)
        return (z,)
    =>
    @loop
    def f(x: f32[3, 3]):
        with kernel('z', z=f32[3, 3]):
            for a0 in free(3):
                for a1 in free(3):
                    in0 = x[a1, a0 - 1] if a0 >= 1 else 0
                    z[a0, a1] = in0
        return (z,)
    """
    here, element = ctx
    move = dict(zip(t.coordinates(node.shape), here, strict=True))
    exprs = [_expr(e, move, element) for e in (*node.index, *node.inside)]
    return element(node.x, tuple(exprs[: len(node.index)]), tuple(exprs[len(node.index) :]))


@rule
def literal(node: t.Literal) -> Any:
    """A constant is a constant in every element.

    @tensor
    def f(x: f32[3]):
        two: f32[3] = literal(2.0)
        z: f32[3] = mul(x, two)
        return (z,)
    =>
    @loop
    def f(x: f32[3]):
        with kernel('z', z=f32[3]):
            for a0 in free(3):
                in0 = x[a0]
                v0 = mul(in0, f32(2.0))
                z[a0] = v0
        return (z,)
    """
    return l.Literal(node.value, node.dtype)


@rule
def iota(node: t.Iota, ctx: Any) -> Any:
    """out[i] = index(i).

    @tensor
    def f():
        z: i64[3, 3] = iota(lambda i0, i1: i1 - i0)
        return (z,)
    =>
    @loop
    def f():
        with kernel('z', z=i64[3, 3]):
            for a0 in free(3):
                for a1 in free(3):
                    v0 = index(-a0 + a1)
                    z[a0, a1] = v0
        return (z,)
    """
    here, element = ctx
    return l.Index(_expr(node.index, dict(zip(t.coordinates(node.shape), here, strict=True)), element))


@rule
def reduce(node: t.Reduce, ctx: Any) -> Any:
    """out[i] = the combination of args[i, r] over r.

    @tensor
    def f(x: f32[3, 3]):
        z: f32[3] = reduce.max(x, axes=[0])
        return (z,)
    =>
    @loop
    def f(x: f32[3, 3]):
        with kernel('z', z=f32[3]):
            for a0 in free(3):
                for r0 in reduce(3):
                    in0 = x[r0, a0]
                    acc0 <- max(in0)
                z[a0] = acc0
        return (z,)
    """
    here, element = ctx
    shape = node.args[0].type.shape  # type: ignore[attr-defined]
    axes = {d: Var(f"r{d}", shape[d]) for d in node.axes}
    kept = iter(here)
    inner = tuple(axes[d] if d in axes else next(kept) for d in range(len(shape)))
    inner = tuple(0 if d in axes and shape[d] == 1 else e for d, e in enumerate(inner))
    bound = tuple(v for d, v in axes.items() if shape[d] != 1)
    args = tuple(element(a, inner) for a in node.args)
    if not bound and node.monoid.width == 1:
        return args[0]
    return l.Reduce.make(node.monoid, bound or (Var("r", 1),), args)


@rule
def scan(node: t.Scan, ctx: Any) -> Any:
    """out[.., i, ..] = the combination of args[.., j, ..] over j <= i.

    @tensor
    def f(x: f32[3, 3]):
        z: f32[3, 3] = scan.sum(x, axis=0)
        return (z,)
    =>
    @loop
    def f(x: f32[3, 3]):
        with kernel('z', z=f32[3, 3]):
            for a1 in free(3):
                for a0 in scan(3):
                    in0 = x[a0, a1]
                    acc0 <- sum(in0)
                    z[a0, a1] = acc0
        return (z,)
    """
    here, element = ctx
    shape = node.args[0].type.shape  # type: ignore[attr-defined]
    axis = Var("r", shape[node.axis])
    inner = tuple(axis if d == node.axis else e for d, e in enumerate(here))
    if shape[node.axis] == 1:
        args = tuple(element(a, here) for a in node.args)
        return args[0] if node.monoid.width == 1 else l.Reduce.make(node.monoid, (axis,), args)
    return l.Scan.make(node.monoid, axis, tuple(element(a, inner) for a in node.args), here[node.axis])


@rule
def get(node: t.Get, ctx: Any) -> Any:
    """One value of several.

    @tensor
    def f(x: f32[3], k: i64[3]):
        best: (f32, i64) = reduce.argmax(x, k, axes=[0])
        z: i64 = get(best, 1)
        return (z,)
    =>
    @loop
    def f(x: f32[3], k: i64[3]):
        with kernel('z', z=i64):
            for r0 in reduce(3):
                in0 = x[r0]
                in1 = k[r0]
                acc0 <- argmax(in0, in1)
            v0 = get(acc0, 1)
            z[()] = v0
        return (z,)
    """
    here, element = ctx
    return l.Get(element(node.x, here), node.index)


@rule
def laid_out(node: t.LaidOut, ctx: Any) -> Any:
    """The values stay; only their buffer has other strides.

    @tensor
    def f(x: f32[3, 2]):
        z: f32[3, 2] @ (1, 3) = laid_out(x)
        return (z,)
    =>
    @loop
    def f(x: f32[3, 2]):
        with kernel('z', z=f32[3, 2] @ (1, 3)):
            for a0 in free(3):
                for a1 in free(2):
                    in0 = x[a0, a1]
                    z[a0, a1] = in0
        return (z,)
    """
    here, element = ctx
    return element(node.x, here)


RULES: tuple[Rule, ...] = (elementwise, index_map, literal, iota, reduce, scan, get, laid_out)


def lift(program: Program, rules: Sequence[Rule] = RULES, log: Log | None = None) -> l.Program:
    """`program` as one kernel per value, opaque ops as calls. Constants and iotas are not stored; scans put their axis
    last. What is laid out as a result is stored so at once, for whoever reads it.
    """
    table = index(tuple(rules))
    buffers: dict[Node, l.Buffer] = {i: l.Buffer(i.name, i.type) for i in program.inputs}
    steps: list[l.Kernel | l.Call] = []
    nodes = in_turn(program.results)
    parts: dict[Node, dict[int, t.Get]] = {}
    for n in nodes:
        if isinstance(n, t.Get):
            parts.setdefault(n.x, {})[n.index] = n
    # What somebody who is no kernel of ours needs in memory.
    where = {r.x: r for r in program.results if isinstance(r, t.LaidOut) and _ours(r.x) and r.x not in program.results}
    outside = {*program.results, *(c for n in nodes if isinstance(n, t.Opaque) for c in n.children)}
    taken = {i.name for i in program.inputs}
    last: dict[str, int] = {}
    alike = Alike(buffers)

    def term(node: Node, here: tuple[IntExpr, ...], element: Element) -> Any:
        found = table.get(type(node))
        if not found:
            raise CompilerBug(f"tensor_to_loop: no rule lifts {type(node).__name__}")
        return found[0].rewrite(node, (here, element))

    def element(x: Node, here: tuple[IntExpr, ...], inside: tuple[IntExpr, ...] = ()) -> Any:
        if x in buffers:
            return l.Load.make(buffers[x], here, inside)
        if isinstance(x, (t.Literal, t.Iota)) and inside:
            return select(inside, term(x, here, element))
        return term(x, here, element)

    def stored(node: t.Value, buffer: l.Buffer, source: str) -> l.Kernel:
        axes = tuple(Var(f"a{d}", e) for d, e in enumerate(_loops(node.type.shape)))
        rest = iter(axes)
        here = tuple(0 if e == 1 else next(rest) for e in node.type.shape)
        store = l.Store(buffer, here, term(node, here, element))
        last = {n.at for n in topological([store.value]) if isinstance(n, l.Scan)}
        return l.Kernel(buffer.name, tuple(sorted(axes, key=lambda a: a in last)), (store,), source)

    def named(node: Node, hint: str = "t") -> str:
        base = name = program.names.get(node, hint)
        while name in taken:
            last[base] = last.get(base, 0) + 1
            name = f"{base}_{last[base]}"
        taken.add(name)
        return name

    for node in nodes:
        many = isinstance(getattr(node, "type", None), tuple)
        if isinstance(node, t.Opaque):
            types = node.result if isinstance(node.result, tuple) else (node.result,)
            gets: dict[int, Any] = parts.get(node, {}) if many else {0: node}
            results = tuple(
                None if r is None or k not in gets else l.Buffer(named(gets[k]), r) for k, r in enumerate(types)
            )
            buffers.update({n: b for k, n in gets.items() if (b := results[k]) is not None})
            source = program.sources.get(program.names.get(node, ""), "")
            args, kwargs = _fill(node.args, buffers), tuple((k, _fill(v, buffers)) for k, v in node.kwargs)
            steps.append(l.Call(node.name, args, kwargs, results, node.order, source))
            if log is not None:
                log.applied("tensor_to_loop", "call", node.name, [gets.get(k) for k in range(len(results))], steps[-1:])
            continue
        kept = isinstance(node, t.Value) and not many and node not in buffers and not isinstance(node, t.Read)
        if not kept or (isinstance(node, (t.Literal, t.Iota)) and node not in outside):
            continue
        assert isinstance(node, t.Value)
        placed = where.get(node, node)
        buffer = l.Buffer(named(placed), placed.type)
        source = program.sources.get(program.names.get(placed, ""), "")
        steps.append(alike.kernel(node, buffer, source, partial(stored, node, buffer, source)))
        buffers[node] = buffers[placed] = buffer
        if log is not None:
            for value in dict.fromkeys((node, placed)):
                log.applied("tensor_to_loop", table[type(value)][0].name, buffer.name, [value], steps[-1:])
    return l.Program(
        program.name,
        Inputs((buffers[i] for i in program.inputs), donated(program.inputs)),
        tuple(steps),
        tuple(buffers[r] for r in program.results),
    )


def _ours(x: Node) -> bool:
    """Whether a kernel stores a value, and nobody has said where."""
    called = isinstance(x.x if isinstance(x, t.Get) else x, t.Opaque)
    return isinstance(x, t.Value) and not called and not isinstance(x, t.LaidOut | t.Literal | t.Iota)


def _loops(shape: Sequence[IntExpr]) -> list[IntExpr]:
    return [e for e in shape if e != 1]


def _expr(e: IntExpr, move: Mapping[Any, Any], element: Element) -> Any:
    """An index expression at other coordinates, with the tensors it reads as loads."""
    if not isinstance(e, Expr):
        return e

    def visit(node: Node) -> Any:
        return element(node.x, node.index) if isinstance(node, t.Read) else node

    moved = t.moved(e, move)
    return transform(moved, visit, dict(t.tensors_read(moved))) if isinstance(moved, Node) else moved


def _fill(value: Any, buffers: Mapping[Node, l.Buffer]) -> Any:
    if isinstance(value, Node):
        return buffers[value]
    return tuple(_fill(v, buffers) for v in value) if isinstance(value, tuple) else value
