"""Printing. One line per value; loops as the nest they mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from terrazzo.ir import nest as n
from terrazzo.ir.dialects import kernel, tile
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects import torch as aten
from terrazzo.ir.expr import Bound, Expr, FloorDiv, IntExpr, Loaded, Mod, Size, Sum, Var, comparison
from terrazzo.ir.node import Node, topological
from terrazzo.ir.program import Input, Program
from terrazzo.ir.types import DType, Type

Namer = Callable[[Node], str]


def show(x: Any) -> str:
    """The text of a program, a kernel or a single node."""
    if isinstance(x, Program):
        return _program(x)
    if isinstance(x, l.Program):
        return _loop_program(x)
    if isinstance(x, tile.Program):
        return _loop_program(x.loop, "tile", x.beside)
    if isinstance(x, kernel.Program):
        from terrazzo.ir.show_kernel import show_program

        return show_program(x)
    if isinstance(x, kernel.Kernel):
        from terrazzo.ir.show_kernel import show_kernel

        return "\n".join(show_kernel(x))
    if isinstance(x, l.Kernel):
        return "\n".join(_kernel(x))
    if isinstance(x, tuple):
        return ", ".join(map(show, x))
    return _node(x) if isinstance(x, Node) else repr(x)


def show_type(ty: Type | tuple[Any, ...] | None) -> str:
    """`f32[2, 3]`, `f32` for a scalar, `f32[4, 8] @ (1, 4)` with strides, a tuple for several."""
    if ty is None:
        return "None"
    if isinstance(ty, tuple):
        return "(" + ", ".join(map(show_type, ty)) + ("," if len(ty) == 1 else "") + ")"
    shape = f"[{', '.join(map(show_expr, ty.shape))}]" if ty.shape else ""
    strides = "" if ty.strides is None else f" @ ({', '.join(map(show_expr, ty.strides))}{',' if ty.rank == 1 else ''})"
    return ty.dtype.name + shape + strides


def show_expr(e: IntExpr, name: Namer | None = None) -> str:
    """An index expression; `name` names the terms behind loaded indices."""
    if isinstance(e, int):
        return str(e)
    match e:
        case Var() | Size():
            return e.name
        case Bound():
            return f"r{e.label}"
        case Sum():
            return _sum(e, name)
        case FloorDiv():
            return f"{_factor(e.a, name)} // {_factor(e.b, name)}"
        case Mod():
            return f"{_factor(e.a, name)} % {_factor(e.b, name)}"
        case Loaded():
            value, of = e.value, name or _node
            inner = f"{of(value.x)}[{show_list(value.index, name) or '()'}]" if isinstance(value, t.Read) else of(value)
            return f"at({inner}, {show_expr(e.extent, name)})"
    raise TypeError(f"no text for {type(e).__name__}")


def _sum(e: Sum, name: Namer | None) -> str:
    text = ""
    for c, factors in e.terms:
        product = " * ".join(_factor(f, name) for f in factors)
        part = product if abs(c) == 1 else f"{product} * {abs(c)}"
        text += (f" {'-' if c < 0 else '+'} " if text else ("-" if c < 0 else "")) + part
    if not text:
        return str(e.constant)
    return text + (f" {'-' if e.constant < 0 else '+'} {abs(e.constant)}" if e.constant else "")


def _factor(e: IntExpr, name: Namer | None) -> str:
    text = show_expr(e, name)
    return f"({text})" if isinstance(e, (Sum, FloorDiv, Mod)) else text


def show_list(items: Iterable[IntExpr], name: Namer | None = None) -> str:
    return ", ".join(show_expr(i, name) for i in items)


def show_condition(e: IntExpr, name: Namer | None = None) -> str:
    """`e >= 0` as a person would write it: `lane == 0`, `t < 53`, `warp >= 4`, `i <= j + 2`."""
    left, word, right = comparison(e)
    return f"{show_expr(left, name)} {word} {show_expr(right, name)}"


def show_conditions(inside: Iterable[IntExpr], name: Namer | None = None) -> str:
    """All of them."""
    return " and ".join(show_condition(e, name) for e in inside)


def show_inside(inside: Iterable[IntExpr], name: Namer | None = None) -> str:
    tests = show_conditions(inside, name)
    return f" if {tests} else 0" if tests else ""


def number(v: bool | int | float) -> str:
    """A Python number that reads back as itself; inf and nan are names."""
    if isinstance(v, float) and not math.isfinite(v):
        return "nan" if math.isnan(v) else ("inf" if v > 0 else "-inf")
    return repr(v)


def _argument(v: Any, name: Namer) -> str:
    if isinstance(v, l.View):
        return f"view({name(v.buffer)}, {list(v.shape)}, {list(v.strides)}, {v.offset})"
    if isinstance(v, Node):
        return name(v)
    if isinstance(v, tuple):
        return "[" + ", ".join(_argument(i, name) for i in v) + "]"
    if isinstance(v, (bool, int, float)):
        return number(v)
    if isinstance(v, DType):
        return v.name
    if isinstance(v, aten.TorchName):
        return f"torch({v.name!r})"
    return repr(v)


def _call(x: Any, name: Namer) -> str:
    given = [_argument(a, name) for a in x.args] + [f"{k}={_argument(v, name)}" for k, v in x.kwargs]
    return ", ".join(given + ([f"_order={x.order}"] if x.order else []))


def _value(x: Node, name: Namer) -> str:
    """The right-hand side for a value of Torch or Tensor IR."""
    match x:
        case aten.Aten():
            return f"{x.name}({_call(x, name)})"
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
            return f"opaque({', '.join(s for s in (repr(x.name), _call(x, name)) if s)})"
        case Input():
            return x.name
    return object.__repr__(x)


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


def header(dialect: str, name: str, inputs: Iterable[Any], everything: Iterable[Any]) -> list[str]:
    given = ", ".join(f"{i.name}: {show_type(i.type)}" for i in inputs)
    lines = [f"@{dialect}", f"def {name}({given}):"]
    sizes = {s.name: s for s in everything if isinstance(s, Size)}
    return lines + [f"    {s.name} = size({s.lo}, {s.hi})" for s in sizes.values()]


def _sizes(types: Iterable[Any]) -> list[Node]:
    """Every symbolic size in these types."""
    exprs: list[Node] = []
    for ty in types:
        for part in ty if isinstance(ty, tuple) else (ty,):
            if isinstance(part, Type):
                exprs += [e for e in (*part.shape, *(part.strides or ())) if isinstance(e, Expr)]
    return topological(exprs)


def _values(p: Program) -> list[Node]:
    order = topological(p.results, stop=lambda x: isinstance(x, Input))
    return [x for x in order if isinstance(x, (aten.Aten, aten.Get, t.Value)) and not isinstance(x, t.Read)]


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
    lines = header(p.dialect, p.name, p.inputs, _sizes([i.type for i in p.inputs] + [x.type for x in values]))  # type: ignore[attr-defined]
    for x in values:
        line = f"    {names[x]}: {show_type(x.type)} = {_value(x, names.__getitem__)}"  # type: ignore[attr-defined]
        source = p.sources.get(names[x])
        lines.append(f"{line}  # {source}" if source else line)
    results = ", ".join(names[r] for r in p.results) + ("," if len(p.results) == 1 else "")
    lines.append(f"    return ({results})")
    return "\n".join(lines) + "\n"


def _loop_program(p: l.Program, kind: str = "loop", beside: Callable[[int], str] = lambda number: "") -> str:
    buffers = [*p.inputs, *(b for s in p.steps for b in s.writes)]
    lines = header(kind, p.name, p.inputs, _sizes([b.type for b in buffers]))
    for number, step in enumerate(p.steps):
        text = _kernel(step) if isinstance(step, l.Kernel) else opaque(step)
        lines += ["    " + line for line in [*text, *beside(number).splitlines()]]
    results = ", ".join(b.name for b in p.results) + ("," if len(p.results) == 1 else "")
    lines.append(f"    return ({results})")
    return "\n".join(lines) + "\n"


def opaque(c: l.Call) -> list[str]:
    targets = ", ".join("_" if b is None else b.name for b in c.results)
    types = show_type(tuple(None if b is None else b.type for b in c.results))
    given = ", ".join(s for s in (repr(c.name), _call(c, lambda b: getattr(b, "name", "?"))) if s)
    return [f"{targets}, = call({given}, _types={types}){f'  # {c.source}' if c.source else ''}"]


def _kernel(k: l.Kernel) -> list[str]:
    outs = "".join(f", {b.name}={show_type(b.type)}" for b in dict.fromkeys(k.writes))
    head = f"with kernel({k.name!r}{outs}):" + (f"  # {k.source}" if k.source else "")
    return [head] + ["    " + line for line in _statements(n.nest(k), {})]


def _statements(body: Iterable[n.Statement], names: dict[Node, str]) -> list[str]:
    def name(x: Node) -> str:
        return names[x] if x in names else show_term(x, name)

    lines: list[str] = []
    for s in body:
        match s:
            case n.Let():
                text = show_term(s.term, name)
                names[s.term] = _fresh("in" if isinstance(s.term, l.Load) else "v", names)
                lines.append(f"{names[s.term]} = {text}")
            case n.Accumulate():
                names.setdefault(s.into, _fresh("acc", names))
                lines.append(f"{names[s.into]} <- {s.into.monoid.name}({', '.join(map(name, s.args))})")
            case l.Store():
                index = show_list(s.index, name) or "()"
                lines.append(f"{s.buffer.name}[{index}] = {name(s.value)}")
            case n.Loop():
                for r in s.carried:
                    names.setdefault(r, _fresh("acc", names))
                variables, extents = show_list(s.axes), show_list([a.extent for a in s.axes], name)
                lines.append(f"for {variables} in {s.kind}({extents}):")
                inner = dict(names)
                lines += ["    " + line for line in _statements(s.body, inner)]
                names.update({_Used(x): v for x, v in inner.items() if x not in names})  # type: ignore[misc]
    return lines


class _Used:
    """Reserves a name that an inner scope used, without making its term visible outside."""

    def __init__(self, term: Any) -> None:
        self.term = term


def _fresh(prefix: str, names: Mapping[Any, str]) -> str:
    return f"{prefix}{sum(v.startswith(prefix) and v[len(prefix) :].isdigit() for v in names.values())}"


def show_term(x: Node, name: Namer) -> str:
    """The right-hand side for a term of Loop IR."""
    match x:
        case l.Literal():
            return f"{x.type.name}({number(x.value)})"
        case l.Index():
            return f"index({show_expr(x.value, name)})"
        case l.Load():
            return f"{x.buffer.name}[{show_list(x.index, name) or '()'}]{show_inside(x.inside, name)}"
        case l.Apply():
            return f"{x.fn.name}({', '.join(map(name, x.args))})"
        case l.Get():
            return f"get({name(x.x)}, {x.index})"
        case l.Reduce():
            return f"{x.monoid.name}[{show_list(x.axes)}]({', '.join(map(name, x.args))})"
        case l.Scan():
            return f"scan.{x.monoid.name}[{show_expr(x.axis)} <= {show_expr(x.at)}]({', '.join(map(name, x.args))})"
    return object.__repr__(x)
