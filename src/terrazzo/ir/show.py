"""Printing. One line per value; loops as the nest they mean."""

from __future__ import annotations

from typing import Any

from terrazzo.ir import show_kernel, show_loop
from terrazzo.ir.dialects import kernel, tile
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects import torch as aten
from terrazzo.ir.expr import Expr, IntExpr
from terrazzo.ir.node import Node
from terrazzo.ir.program import Input, Program, in_turn
from terrazzo.ir.show_expr import Namer, number, show_expr, show_inside, show_list, show_type
from terrazzo.ir.show_loop import called, header, show_term, sizes


def show(x: Any) -> str:
    """The text of a program, a kernel or a single node."""
    if isinstance(x, Program):
        return _program(x)
    if isinstance(x, l.Program):
        return show_loop.show_program(x)
    if isinstance(x, tile.Program):
        return show_loop.show_program(x.loop, "tile", x.beside)
    if isinstance(x, kernel.Program):
        return show_kernel.show_program(x)
    if isinstance(x, kernel.Kernel):
        return "\n".join(show_kernel.show_kernel(x))
    if isinstance(x, l.Kernel):
        return "\n".join(show_loop.show_kernel(x))
    if isinstance(x, tuple):
        return ", ".join(map(show, x))
    return _node(x) if isinstance(x, Node) else repr(x)


def _value(x: Node, name: Namer) -> str:
    """The right-hand side for a value of Torch or Tensor IR."""
    match x:
        case aten.Aten():
            return f"{x.name}({called(x, name)})"
        case aten.Get() | t.Get():
            return f"get({name(x.x)}, {x.index})"
        case t.Literal():
            return f"literal({number(x.value)})"
        case t.Iota():
            return f"iota(lambda{_coordinates(x.shape)}: {show_expr(x.index, name)})"
        case t.Elementwise():
            return f"{x.fn.name}({', '.join(map(name, x.args))})"
        case t.IndexMap():
            body = f"{name(x.x)}[{show_list(x.index, name) or '()'}]{show_inside(x.inside, name)}"
            return f"index_map(lambda{_coordinates(x.shape)}: {body})"
        case t.Reduce():
            return f"reduce.{x.monoid.name}({', '.join(map(name, x.args))}, axes={list(x.axes)})"
        case t.Scan():
            return f"scan.{x.monoid.name}({', '.join(map(name, x.args))}, axis={x.axis})"
        case t.LaidOut():
            return f"laid_out({name(x.x)})"  # the strides are in its type
        case t.Opaque():
            return f"opaque({', '.join(s for s in (repr(x.name), called(x, name)) if s)})"
        case Input():
            return x.name
    return x.plainly()


def _coordinates(shape: tuple[IntExpr, ...]) -> str:
    return "".join(f"{',' if d else ''} i{d}" for d in range(len(shape)))


def _node(x: Node) -> str:
    """One node by itself, for messages: operands are shown as their kind."""
    if isinstance(x, Expr):
        return show_expr(x, lambda v: _node(v))
    if isinstance(x, l.Term):
        return show_term(x, lambda v: _node(v) if isinstance(v, l.Term) else "...")
    if isinstance(x, l.Buffer):
        return x.name
    return _value(x, lambda v: v.name if isinstance(v, Input) else f"<{v.op}>")


def _values(p: Program) -> list[Node]:
    return [
        x for x in in_turn(p.results) if isinstance(x, (aten.Aten, aten.Get, t.Value)) and not isinstance(x, t.Read)
    ]


def value_names(p: Program) -> dict[Node, str]:
    """The name of every value of a program: its own if it has one, else a number."""
    names: dict[Node, str] = {i: i.name for i in p.inputs}
    taken = set(names.values()) | set(p.names.values())
    count = 0
    for x in _values(p):
        if x in p.names:
            names[x] = p.names[x]
            continue
        while f"v{count}" in taken:
            count += 1
        names[x] = f"v{count}"
        count += 1
    return names


def _program(p: Program) -> str:
    names, values = value_names(p), _values(p)
    types = [x.type for x in (*p.inputs, *values)]  # type: ignore[attr-defined]
    lines = header(p.dialect, p.name, p.inputs, sizes(types))
    for x in values:
        line = f"    {names[x]}: {show_type(x.type)} = {_value(x, names.__getitem__)}"  # type: ignore[attr-defined]
        source = p.sources.get(names[x])
        lines.append(f"{line}  # {source}" if source else line)
    results = ", ".join(names[r] for r in p.results) + ("," if len(p.results) == 1 else "")
    lines.append(f"    return ({results})")
    return "\n".join(lines) + "\n"


Node.printer = staticmethod(show)
