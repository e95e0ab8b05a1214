"""Printing Kernel IR: a launch per kernel, a line per statement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.node import Node, per_node
from terrazzo.ir.show_expr import show_condition, show_conditions, show_expr, show_inside, show_list, show_type
from terrazzo.ir.show_loop import header, opaque, show_term


def show_program(p: k.Program) -> str:
    """The text of a program."""
    lines = header("kernel", p.name, p.inputs, ())
    for step in p.steps:
        lines += ["    " + line for line in (show_kernel(step) if isinstance(step, k.Kernel) else opaque(step))]
    results = ", ".join(b.name for b in p.results) + ("," if len(p.results) == 1 else "")
    return "\n".join([*lines, f"    return ({results})"]) + "\n"


def show_kernel(kernel: k.Kernel) -> list[str]:
    """The lines of a kernel."""
    reads = ", ".join(b.name for b in kernel.params if b not in kernel.writes)
    over = {b: f"over({old.name})" for b, old in kernel.over}
    outs = "".join(f", {b.name}={over.get(b) or show_type(b.type)}" for b in kernel.writes)
    shape = f"_grid={kernel.grid}, _warps={kernel.warps}, _resident={kernel.resident}, _reads=[{reads}]"
    shape += f", _cluster={kernel.cluster}" if kernel.cluster > 1 else ""
    lines = [f"with launch({kernel.name!r}, {shape}{outs}):{f'  # {kernel.source}' if kernel.source else ''}"]
    for s in kernel.shared:
        if isinstance(s, k.Barriers):
            lines.append(f"    {s.name} = barriers({s.type.shape[0]}, {s.arrivals})")
            continue
        swizzle = f", swizzle={s.swizzle}" if s.swizzle else ""
        at = f", at={s.at}" if s.at != k.BEHIND else ""
        lines.append(f"    {s.name} = shared({show_type(s.type)}{swizzle}{at})")
    lines += ["    " + line for line in _statements(kernel.body)]
    return lines if len(lines) > 1 else [*lines, "    pass"]


@per_node
def lines(s: Node) -> int:
    """How many lines of text a statement takes, one for itself and one for each in its body (one for an empty one)."""
    return 1 + (sum(map(lines, s.body)) or 1) if isinstance(s, k.For | k.If | k.Role) else 1


def _statements(body: Iterable[Node]) -> list[str]:
    return [line for s in body for line in statement(s)]


def statement(s: Node) -> list[str]:
    """The lines of one statement."""
    match s:
        case k.Let():
            return [f"{s.value.name} = {_term(s.term)}"]
        case k.Declare():
            return [f"{s.place.name} = registers({show_type(s.place.type)}{f', {_term(s.init)}' if s.init else ''})"]
        case k.DeclareInteger():
            return [f"{s.variable.name} = integer({show_expr(s.value, _term)}, {s.variable.extent})"]
        case k.SetInteger():
            return [f"{s.variable.name} = {show_expr(s.value, _term)}"]
        case l.Store():
            return [f"{_at(s.buffer, s.index)} = {_term(s.value)}"]
        case k.Statement():
            return [f"{s.op}({', '.join(_arguments(s))})"]
        case k.Role():
            registers = f", registers={s.registers}" if s.registers else ""
            return [f"with role({s.first}, {s.count}{registers}):", *_block(s.body)]
        case k.For():
            kind = "unrolled" if s.unrolled else "serial"
            return [f"for {s.axis.name} in {kind}({show_expr(s.axis.extent, _term)}):", *_block(s.body)]
        case k.If():
            return [f"if {show_conditions(s.inside, _term)}:", *_block(s.body)]
    raise TypeError(f"no text for {type(s).__name__}")


def _arguments(s: k.Statement) -> list[str]:
    """What is written in the parentheses; what may be missing and says nothing is left out at the end."""
    given = [x for x in s.arguments() if not x.named]
    while given and given[-1].optional and _default(s, given[-1]):
        given.pop()
    given += [x for x in s.arguments() if x.named and not _default(s, x)]
    return [_argument(s, x) for x in given]


def _default(s: k.Statement, x: k.Argument) -> bool:
    return bool(getattr(s, x.fields[0]) == s._defaults[x.fields[0]])


def _argument(s: k.Statement, x: k.Argument) -> str:
    value, *more = (getattr(s, field) for field in x.fields)
    match x.kind:
        case "place" | "shared" | "registers":
            return _at(value, *more)
        case "source":
            return _at(value, more[0]) + show_inside(more[1])
        case "barrier":
            return _at(value, (more[0],))
        case "barriers":
            text = value.name
        case "word":
            text = repr(value)
        case "term":
            text = _term(value)
        case "type":
            text = show_type(value)
        case "condition":
            text = show_condition(value, _term)
        case "box":
            text = str(list(value))
        case _:
            text = show_expr(value)
    return f"{x.fields[0]}={text}" if x.named else text


def _block(body: Sequence[Node]) -> list[str]:
    return ["    " + line for line in _statements(body)] or ["    pass"]


def _at(place: l.Buffer, index: tuple[IntExpr, ...]) -> str:
    return f"{place.name}[{show_list(index, _term) or '()'}]"


def _term(x: Any) -> str:
    match x:
        case k.Value():
            return x.name
        case k.Shuffle():
            return f"shuffle({_term(x.x)}, {x.mask})"
        case k.Vote():
            return f"vote({x.kind!r}, {_term(x.x)})"
        case k.Remote():
            return f"remote({_at(x.buffer, x.index)}, {show_expr(x.rank)})"
    return show_term(x, _term)
