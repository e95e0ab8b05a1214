"""Printing Kernel IR: a launch per kernel, a line per statement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.node import Node
from terrazzo.ir.show import header, opaque, show_condition, show_expr, show_inside, show_list, show_term, show_type


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
    outs = "".join(f", {b.name}={show_type(b.type)}" for b in kernel.writes)
    shape = f"_grid={kernel.grid}, _warps={kernel.warps}, _resident={kernel.resident}, _reads=[{reads}]"
    shape += f", _cluster={kernel.cluster}" if kernel.cluster > 1 else ""
    lines = [f"with launch({kernel.name!r}, {shape}{outs}):{f'  # {kernel.source}' if kernel.source else ''}"]
    for s in kernel.shared:
        if isinstance(s, k.Barriers):
            lines.append(f"    {s.name} = barriers({s.type.shape[0]}, {s.arrivals})")
            continue
        swizzle = f", swizzle={s.swizzle}" if s.swizzle else ""
        lines.append(f"    {s.name} = shared({show_type(s.type)}{swizzle})")
    lines += ["    " + line for line in _statements(kernel.body)]
    return lines if len(lines) > 1 else [*lines, "    pass"]


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
        case k.Move():
            return [f"move({_at(s.target, s.to)}, {_at(s.source, s.at)}, {s.count})"]
        case k.Atomic():
            return [f"atomic({s.function!r}, {_at(s.buffer, s.index)}, {_term(s.value)})"]
        case k.AsyncCopy():
            return [f"async_copy({_at(s.target, s.to)}, {_at(s.source, s.at)}{show_inside(s.inside)}, {s.count})"]
        case k.Commit():
            return [f"commit({_kind(s.kind)})"]
        case k.WaitGroups():
            return [f"wait_groups({s.open}{', ' if _kind(s.kind) else ''}{_kind(s.kind)})"]
        case k.Sync():
            return [f"sync({s.number}, {s.warps})" if s.warps else "sync()"]
        case k.ClusterSync():
            return ["cluster_sync()"]
        case k.Fence():
            return [f"fence({s.kind!r})"]
        case k.InitBarriers():
            return [f"init_barriers({s.barriers.name})"]
        case k.Expect():
            return [f"expect({_at(s.barriers, (s.slot,))}, {s.bytes})"]
        case k.Arrive():
            return [f"arrive({_at(s.barriers, (s.slot,))}{'' if s.rank is None else f', {show_expr(s.rank)}'})"]
        case k.WaitBarrier():
            return [f"wait_barrier({_at(s.barriers, (s.slot,))}, {show_expr(s.phase)})"]
        case k.TensorLoad():
            ranks = f", {s.ranks}" if s.ranks else ""
            return [
                f"tensor_load({_at(s.target, s.to)}, {_at(s.source, s.at)}, {list(s.box)}, "
                f"{_at(s.barriers, (s.slot,))}{ranks})"
            ]
        case k.TensorStore():
            reduction = f", {s.reduction!r}" if s.reduction else ""
            return [f"tensor_store({_at(s.target, s.to)}, {_at(s.source, s.at)}, {list(s.box)}{reduction})"]
        case k.LoadMatrix() | k.StoreMatrix():
            return [f"{s.op}({s.instruction!r}, {_at(s.target, s.to)}, {_at(s.source, s.at)})"]
        case k.Multiply() | k.MultiplyAsync():
            words = ""
            if isinstance(s, k.MultiplyAsync):
                words += f", transposed={s.transposed!r}" if s.transposed else ""
                words += f", fresh={show_condition(s.fresh, _term)}" if s.fresh != -1 else ""
            return [f"{s.op}({s.instruction!r}, {_at(s.d, s.d_at)}, {_at(s.a, s.a_at)}, {_at(s.b, s.b_at)}{words})"]
        case k.Role():
            registers = f", registers={s.registers}" if s.registers else ""
            return [f"with role({s.first}, {s.count}{registers}):", *_block(s.body)]
        case k.For():
            kind = "unrolled" if s.unrolled else "serial"
            return [f"for {s.axis.name} in {kind}({show_expr(s.axis.extent, _term)}):", *_block(s.body)]
        case k.If():
            return [f"if {' and '.join(f'{show_expr(e, _term)} >= 0' for e in s.inside)}:", *_block(s.body)]
    raise TypeError(f"no text for {type(s).__name__}")


def _kind(kind: str) -> str:
    return "" if kind == "cp.async" else repr(kind)


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
