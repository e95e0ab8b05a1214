"""Printing Loop IR: a kernel as the nest it means, a line per value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from terrazzo.ir import nest as n
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import torch as aten
from terrazzo.ir.expr import Expr, Size
from terrazzo.ir.node import Node, topological
from terrazzo.ir.program import donated
from terrazzo.ir.show_expr import Namer, number, show_expr, show_inside, show_list, show_type
from terrazzo.ir.types import DType, Type


def show_program(p: l.Program, kind: str = "loop", beside: Callable[[int], str] = lambda number: "") -> str:
    buffers = [*p.inputs, *(b for s in p.steps for b in s.writes)]
    lines = header(kind, p.name, p.inputs, sizes([b.type for b in buffers]))
    for place, step in enumerate(p.steps):
        text = show_kernel(step) if isinstance(step, l.Kernel) else opaque(step)
        lines += ["    " + line for line in [*text, *beside(place).splitlines()]]
    results = ", ".join(b.name for b in p.results) + ("," if len(p.results) == 1 else "")
    lines.append(f"    return ({results})")
    return "\n".join(lines) + "\n"


def opaque(c: l.Call) -> list[str]:
    targets = ", ".join("_" if b is None else b.name for b in c.results)
    types = show_type(tuple(None if b is None else b.type for b in c.results))
    given = ", ".join(s for s in (repr(c.name), called(c, lambda b: getattr(b, "name", "?"))) if s)
    return [f"{targets}, = call({given}, _types={types}){f'  # {c.source}' if c.source else ''}"]


def show_kernel(k: l.Kernel) -> list[str]:
    over = {b: f"over({old.name})" for b, old in k.over.items()}
    outs = "".join(f", {b.name}={over.get(b) or show_type(b.type)}" for b in dict.fromkeys(k.writes))
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
    return x.plainly()


def header(dialect: str, name: str, inputs: Sequence[Any], everything: Iterable[Any]) -> list[str]:
    ours = donated(inputs)
    kinds = (f"donated({show_type(i.type)})" if i.name in ours else show_type(i.type) for i in inputs)
    given = ", ".join(f"{i.name}: {kind}" for i, kind in zip(inputs, kinds, strict=True))
    lines = [f"@{dialect}", f"def {name}({given}):"]
    sizes = {s.name: s for s in everything if isinstance(s, Size)}
    return lines + [f"    {s.name} = size({s.lo}, {s.hi})" for s in sizes.values()]


def sizes(types: Iterable[Any]) -> list[Node]:
    """Every symbolic size in these types."""
    exprs: list[Node] = []
    for ty in types:
        for part in ty if isinstance(ty, tuple) else (ty,):
            if isinstance(part, Type):
                exprs += [e for e in (*part.shape, *(part.strides or ())) if isinstance(e, Expr)]
    return topological(exprs)


def _argument(v: Any, name: Namer) -> str:
    if isinstance(v, l.View):
        return f"view({name(v.buffer)}, {list(v.shape)}, {list(v.strides)}, {v.offset})"
    if isinstance(v, Node):
        return name(v)
    if isinstance(v, tuple):
        return "[" + ", ".join(_argument(i, name) for i in v) + "]"
    if isinstance(v, (bool, int, float, complex)):
        return number(v)
    if isinstance(v, DType):
        return v.name
    if isinstance(v, aten.TorchName):
        return f"torch({v.name!r})"
    return repr(v)


def called(x: Any, name: Namer) -> str:
    given = [_argument(a, name) for a in x.args] + [f"{k}={_argument(v, name)}" for k, v in x.kwargs]
    return ", ".join(given + ([f"_order={x.order}"] if x.order else []))
