"""What must hold of a kernel for its text to mean something."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.loop import Buffer
from terrazzo.ir.expr import FloorDiv, IntExpr, Loaded, Mod, Sum, Var
from terrazzo.ir.node import Node, per_node, topological
from terrazzo.ir.proof import ill


@per_node
def problem(kernel: k.Kernel) -> str:
    """What is wrong with a kernel, or nothing: a name used where it does not exist, a variable no loop binds, an index
    too many.
    """
    if not 1 <= kernel.warps <= 32:
        return f"a block has 1 to 32 warps, not {kernel.warps}"
    if not 1 <= kernel.cluster <= 8 or kernel.grid % kernel.cluster:
        return f"a cluster has 1 to 8 blocks, and the grid a multiple of them, not {kernel.cluster} of {kernel.grid}"
    if kernel.resident < 1:
        return f"at least 1 block is resident on a processor, not {kernel.resident}"
    roles, everyone = [s for s in k.walk(kernel.body) if isinstance(s, k.Role)], k.Sync()
    for role in roles:
        if not 0 <= role.first < role.first + role.count <= kernel.warps:
            return f"a role of warps {role.first} to {role.first + role.count - 1}, and there are {kernel.warps}"
        if any(isinstance(s, k.Role) or s is everyone for s in k.walk(role.body)):
            return "a role has no roles in it, and does not wait for all threads of the block"
    if why := _registers(kernel, roles) or _shared(kernel):
        return why
    for s in k.walk(kernel.body):
        for place, index in places(s):
            boxed = isinstance(s, k.TensorLoad | k.TensorStore) and place in kernel.params  # it looks at these itself
            if len(index) != place.type.rank and not boxed:
                return f"{type(s).__name__} has {len(index)} indices into {place.name}: {place.type}"
            if isinstance(place, k.Registers) and any(
                isinstance(x, k.Integer) or getattr(x, "name", "") in k.THREADS for x in topological(list(_flat(index)))
            ):
                return f"{type(s).__name__} indexes the registers {place.name} by the number of a thread or an integer"
        for target in [s.buffer] if isinstance(s, l.Store) else k.written(s):
            if target in kernel.reads:
                return f"{type(s).__name__} writes {target.name}, which the kernel only reads"
    known: set[Any] = {*kernel.params, *kernel.shared}
    return _problem(kernel.body, known, {"block", "warp", "lane"})


def _shared(kernel: k.Kernel) -> str:
    """What is wrong with where memory of the block lies."""
    barriers = [s for s in kernel.shared if isinstance(s, k.Barriers)]
    for s in kernel.shared:
        first, align = kernel.offsets[s], 1024 if s.swizzle else 16
        if s.at == k.BEHIND:
            continue
        if first % align:
            return f"{s.name} begins at {first}, which is no multiple of {align} bytes"
        for x in barriers:
            if first < kernel.offsets[x] + k.shared_bytes(x) and kernel.offsets[x] < first + k.shared_bytes(s):
                return f"{s.name} lies over the barriers {x.name}"
    return ""


def _registers(kernel: k.Kernel, roles: list[k.Role]) -> str:
    """What is wrong with the registers that roles take. A block has what its threads begin with: multiples of 8."""
    first = k.REGISTER_FILE // (kernel.threads * kernel.resident) // 8 * 8
    taken = dict.fromkeys(range(kernel.warps), first)
    for role in roles:
        mine = range(role.first, role.first + role.count)
        if role.registers and any(
            other is not role and {*mine} & {*range(other.first, other.first + other.count)} for other in roles
        ):
            return (
                f"warps {mine.start} to {mine.stop - 1} are a role of {role.registers} registers, "
                "and some have another role"
            )
        taken.update(dict.fromkeys(mine, role.registers or first))
        if role.registers and declared(role.body) > role.registers:
            return f"a role of {role.registers} registers declares {declared(role.body)}"
    if sum(taken.values()) > first * kernel.warps:
        return f"its roles take {k.WARP * sum(taken.values())} registers, and a block has {first * kernel.threads}"
    return ""


REGISTERS = 255
"""32-bit registers a thread can have."""


def declared(body: tuple[Node, ...]) -> int:
    """The most 32-bit registers that are declared at once."""
    mine = sum(-(-k.shared_bytes(s.place) // 4) for s in body if isinstance(s, k.Declare))
    return mine + max((declared(s.body) for s in body if isinstance(s, k.For | k.If | k.Role)), default=0)


@per_node
def places(s: Node) -> tuple[tuple[Buffer, tuple[IntExpr, ...]], ...]:
    """The places that a statement names, itself or in a term, with the indices."""
    terms = [s.term] if isinstance(s, k.Let) else [s.value] if isinstance(s, l.Store | k.Atomic) else []
    found = [(x.buffer, x.index) for x in topological(terms) if isinstance(x, l.Load | k.Remote)]
    if isinstance(s, l.Store):
        found.append((s.buffer, s.index))
    elif isinstance(s, k.Statement):
        found += [(place, index) for _, place, _, index in s.places()]
    return tuple(found)


def _problem(body: tuple[Node, ...], known: set[Any], variables: set[str]) -> str:
    known = set(known)
    for s in body:
        mine = [
            c
            for f, c in zip(s._fields, s.values, strict=True)
            if f not in ("body", "axis", "value" if isinstance(s, k.Let) else "")
            and not (f == "variable" and isinstance(s, k.DeclareInteger))
        ]
        mine = [] if isinstance(s, k.Declare) else [*mine, s.axis.extent] if isinstance(s, k.For) else mine
        below = topological(list(_flat(mine)))
        if why := ill([x for x in below if isinstance(x, FloorDiv | Mod | Sum | Loaded)]):
            return f"{type(s).__name__}: {why}"
        for x in below:
            if isinstance(x, Buffer | k.Value) and x not in known:
                return f"{type(s).__name__} uses {x.name}, which does not exist there"
            if isinstance(x, k.Integer) and x not in known:
                return f"{type(s).__name__} uses the integer {x.name}, which does not exist there"
            if isinstance(x, Var) and not isinstance(x, k.Integer) and x.name not in variables:
                return f"{type(s).__name__} uses the variable {x.name}, which no loop around it binds"
        if isinstance(s, k.Let):
            known.add(s.value)
        elif isinstance(s, k.DeclareInteger):
            known.add(s.variable)
        elif isinstance(s, k.Declare):
            known.add(s.place)
        elif isinstance(s, k.For | k.If | k.Role):
            inner = variables | {s.axis.name} if isinstance(s, k.For) else variables
            if why := _problem(s.body, known, inner):
                return why
    return ""


def _flat(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, tuple | list):
        for v in value:
            yield from _flat(v)
