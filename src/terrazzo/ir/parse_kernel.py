"""Reading Kernel IR."""

from __future__ import annotations

import ast
from typing import Any

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, Var
from terrazzo.ir.parse_loop import LoopReader
from terrazzo.ir.reader import Scope, elements, empty
from terrazzo.ir.types import Type, u64


class KernelReader(LoopReader):
    """Reads launches; calls of PyTorch are those of Loop IR."""

    def step(self, s: ast.stmt, scope: Scope) -> Any:
        match s:
            case ast.With(
                items=[ast.withitem(context_expr=ast.Call(func=ast.Name(id="launch"), args=[ast.Constant(value=str() as name)]) as head)]
            ):
                return self.launch(s, head, name, scope)
            case ast.With():
                self.fail(s, 'expected `with launch("name", _grid=..., _warps=..., _resident=..., _reads=[...], result=type):`')
        return super().step(s, scope)

    def launch(self, s: ast.With, head: ast.Call, name: str, scope: Scope) -> k.Kernel:
        grid, warps, resident = (self.natural(self.keyword(head, word)) for word in ("_grid", "_warps", "_resident"))
        reads = tuple(self.lookup(x, scope, l.Buffer) for x in elements(self.keyword(head, "_reads")))
        writes = []
        for key in head.keywords:
            if key.arg not in _SHAPE:
                if key.arg is None or key.arg in scope.values:
                    self.fail(head, f"{key.arg} is defined twice")
                writes.append(l.Buffer(key.arg, self.type(key.value, scope)))
                scope.values[key.arg] = writes[-1]
        inner = scope.inner()
        inner.values.update({"block": Var(k.BLOCK, grid), "warp": Var("warp", warps), "lane": k.LANE})
        shared: list[k.Shared] = []
        rest = list(s.body)
        while rest and (place := self.shared(rest[0], inner)) is not None:
            shared.append(place)
            rest.pop(0)
        body = self.statements(rest, inner)
        source = self.comments.get(s.lineno, "")
        params = (*reads, *writes)
        kernel: k.Kernel = self.build(s, k.Kernel, name, params, tuple(writes), grid, warps, tuple(shared), body, resident, source)
        if why := k.problem(kernel):
            self.fail(s, why)
        return kernel

    def natural(self, x: ast.AST) -> int:
        value = self.constant(x)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self.fail(x, "expected a number that is not negative")
        return value

    def shared(self, s: ast.stmt, scope: Scope) -> k.Shared | None:
        match s:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="shared"), args=[kind]) as call):
                swizzle = self.natural(self.keyword(call, "swizzle")) if call.keywords else 0
                if swizzle not in (0, 32, 64, 128):
                    self.fail(s, "a swizzle spans 0, 32, 64 or 128 bytes")
                place: k.Shared = self.build(s, k.Shared, name, self.type(kind, scope), swizzle)
                self.define(s, name, place, scope)
                return place
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="barriers"), args=[count, arrivals])):
                ring = Type(u64, (self.natural(count),))
                barriers: k.Barriers = self.build(s, k.Barriers, name, ring, 0, self.natural(arrivals))
                self.define(s, name, barriers, scope)
                return barriers
        return None

    def define(self, s: ast.AST, name: str, value: Any, scope: Scope) -> None:
        if isinstance(scope.values.get(name), Expr | l.Buffer):
            self.fail(s, f"{name} is defined twice")
        scope.values[name] = value

    def statements(self, body: list[ast.stmt], scope: Scope) -> tuple[Any, ...]:
        return tuple(self.statement(s, scope) for s in body if not isinstance(s, ast.Pass))

    def statement(self, s: ast.stmt, scope: Scope) -> Any:
        match s:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="registers"), args=[kind, *init])):
                if len(init) > 1:
                    self.fail(s, "registers(type) or registers(type, constant)")
                place = self.build(s, k.Registers, name, self.type(kind, scope))
                first = self.term(init[0], scope) if init else None
                if first is not None and not isinstance(first, l.Literal):
                    self.fail(init[0], "registers start at a constant, such as f32(0.0)")
                scope.values[name] = place
                return self.build(s, k.Declare, place, first)
            case ast.Assign(targets=[ast.Name(id=name)], value=v):
                term = self.term(v, scope)
                value = self.build(s, k.Value, name, term.dtype)
                self.define(s, name, value, scope)
                return self.build(s, k.Let, value, term)
            case ast.Assign(targets=[ast.Subscript() as target], value=v):
                return self.build(s, l.Store, *self.place(target, scope), self.term(v, scope))
            case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="serial" | "unrolled" as kind), args=[extent])):
                axis = Var(name, self.natural(extent))
                inner = scope.inner()
                inner.values[name] = axis
                return self.build(s, k.For, axis, self.statements(s.body, inner), kind == "unrolled")
            case ast.If(test=test, orelse=[]):
                return self.build(s, k.If, self.conditions(test, scope), self.statements(s.body, scope.inner()))
            case ast.Expr(value=ast.Call(func=ast.Name(id=op), args=args)) if op in _BARRIERS:
                return self.barrier(s, op, args, scope)
            case ast.Expr(value=ast.Call(func=ast.Name(id=op), args=args)) if op in _CALLS:
                return self.build(s, _CALLS[op], *self.operands(s.value, op, args, scope))
        self.fail(s, f"expected a loop, a condition, an assignment or one of {', '.join((*_CALLS, *_BARRIERS))}")

    def barrier(self, s: ast.stmt, op: str, args: list[ast.expr], scope: Scope) -> Any:
        """A statement about barriers."""
        if len(args) != _BARRIERS[op]:
            self.fail(s, f"{op} takes {_BARRIERS[op]} arguments")
        if op == "init_barriers":
            return self.build(s, k.InitBarriers, self.lookup(args[0], scope, k.Barriers))
        place, slot = self.place(args[-1] if op == "tensor_load" else args[0], scope)
        if not isinstance(place, k.Barriers) or len(slot) != 1:
            self.fail(s, "expected a barrier, such as full[0]")
        if op == "expect":
            return self.build(s, k.Expect, place, slot[0], self.natural(args[1]))
        if op == "wait_barrier":
            return self.build(s, k.WaitBarrier, place, slot[0], self.expr(args[1], scope))
        box = tuple(self.natural(x) for x in elements(args[2]))
        return self.build(s, k.TensorLoad, *self.place(args[0], scope), *self.place(args[1], scope), box, place, slot[0])

    def conditions(self, test: ast.expr, scope: Scope) -> tuple[Any, ...]:
        zero = ast.Subscript(value=ast.Name(id="_"), slice=ast.Tuple(elts=[]))
        return self.guarded(ast.copy_location(ast.IfExp(test=test, body=zero, orelse=ast.Constant(value=0)), test), scope)[1]

    def place(self, x: ast.AST, scope: Scope) -> tuple[l.Buffer, tuple[Any, ...]]:
        if not isinstance(x, ast.Subscript):
            self.fail(x, "expected a place, such as x[0, lane]")
        return self.lookup(x.value, scope, l.Buffer), () if empty(x.slice) else self.indices(x.slice, scope)

    def operands(self, where: ast.AST, op: str, args: list[ast.expr], scope: Scope) -> list[Any]:
        """The fields of a statement, from its arguments: names of instructions, places (two fields each), numbers."""
        found: list[Any] = []
        inside: tuple[Any, ...] = ()
        for x in args:
            if isinstance(x, ast.Constant) and isinstance(x.value, str):
                found.append(x.value)
            elif isinstance(x, ast.Constant):
                found.append(self.natural(x))
            elif isinstance(x, ast.IfExp):
                target, inside = self.guarded(x, scope)
                found += self.place(target, scope)
            else:
                found += self.place(x, scope)
        if len(found) != _ARGUMENTS[op]:
            self.fail(where, f"{op} takes other arguments")
        return [*found, inside] if op == "async_copy" else found

    def _read(self, x: ast.AST, scope: Scope) -> Any:
        return self.term(x, scope)  # an index from data may be an element of registers

    def term(self, x: ast.AST, scope: Scope) -> Any:
        match x:
            case ast.Call(func=ast.Name(id="shuffle"), args=[v, mask]):
                return self.build(x, k.Shuffle, self.term(v, scope), self.natural(mask))
        return super().term(x, scope)


_SHAPE = ("_grid", "_warps", "_resident", "_reads")
_CALLS: dict[str, Any] = {
    "move": k.Move,
    "async_copy": k.AsyncCopy,
    "commit": k.Commit,
    "wait_groups": k.WaitGroups,
    "sync": k.Sync,
    "load_matrix": k.LoadMatrix,
    "multiply": k.Multiply,
}
_BARRIERS = {"init_barriers": 1, "expect": 2, "wait_barrier": 2, "tensor_load": 4}
_ARGUMENTS = {"move": 5, "async_copy": 5, "commit": 0, "wait_groups": 1, "sync": 0, "load_matrix": 5, "multiply": 7}
