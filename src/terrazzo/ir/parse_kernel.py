"""Reading Kernel IR."""

from __future__ import annotations

import ast
from typing import Any

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, Var
from terrazzo.ir.node import OPS
from terrazzo.ir.parse_loop import LoopReader
from terrazzo.ir.places import TextLine
from terrazzo.ir.reader import Scope, elements, empty
from terrazzo.ir.types import Type, u64
from terrazzo.ir.verify_kernel import problem


class KernelReader(LoopReader):
    """Reads launches; calls of PyTorch are those of Loop IR."""

    def step(self, s: ast.stmt, scope: Scope) -> Any:
        match s:
            case ast.With(
                items=[
                    ast.withitem(
                        context_expr=ast.Call(
                            func=ast.Name(id="launch"), args=[ast.Constant(value=str() as name)]
                        ) as head
                    )
                ]
            ):
                return self.launch(s, head, name, scope)
            case ast.With():
                self.fail(
                    s,
                    'expected `with launch("name", _grid=..., _warps=..., _resident=..., _reads=[...], result=type):`',
                )
        return super().step(s, scope)

    def launch(self, s: ast.With, head: ast.Call, name: str, scope: Scope) -> k.Kernel:
        grid, warps, resident = (self.natural(self.keyword(head, word)) for word in ("_grid", "_warps", "_resident"))
        cluster = self.natural(self.keyword(head, "_cluster")) if any(x.arg == "_cluster" for x in head.keywords) else 1
        reads = tuple(self.lookup(x, scope, l.Buffer) for x in elements(self.keyword(head, "_reads")))
        writes = []
        for key in head.keywords:
            if key.arg not in _SHAPE:
                if key.arg is None or key.arg in scope.values:
                    self.fail(head, f"{key.arg} is defined twice")
                writes.append(self.stored(key.arg, key.value, scope))
                scope.values[key.arg] = writes[-1]
                self.places.add(key.arg, s)
        self.places.add(name, s)
        inner = scope.inner()
        inner.values.update({"block": Var(k.BLOCK, grid), "warp": Var("warp", warps), "lane": k.LANE})
        shared: list[k.Shared] = []
        rest = list(s.body)
        while rest and (place := self.shared(rest[0], inner)) is not None:
            shared.append(place)
            rest.pop(0)
        self.lines: list[ast.AST] = [s, *s.body[: len(shared)]]
        body = self.statements(rest, inner)
        source = self.comments.get(s.lineno, "")
        params, over = (*reads, *writes), tuple((b, scope.over[b]) for b in writes if b in scope.over)
        shape = (grid, warps, tuple(shared), body, resident, source, cluster, over)
        kernel: k.Kernel = self.build(s, k.Kernel, name, params, tuple(writes), *shape)
        for number, line in enumerate(self.lines):
            self.places.add(TextLine(kernel, number), line)
        if why := problem(kernel):
            self.fail(s, why)
        return kernel

    def natural(self, x: ast.AST) -> int:
        value = self.constant(x)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self.fail(x, "expected a number that is not negative")
        return value

    def shared(self, s: ast.stmt, scope: Scope) -> k.Shared | None:
        match s:
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="shared"), args=[kind]) as call
            ):
                said = {x.arg: self.natural(x.value) for x in call.keywords}
                if not said.keys() <= {"swizzle", "at"}:
                    self.fail(s, "shared memory has a type, a swizzle, and where it begins (at)")
                if said.get("swizzle", 0) not in (0, 32, 64, 128):
                    self.fail(s, "a swizzle spans 0, 32, 64 or 128 bytes")
                place: k.Shared = self.build(
                    s, k.Shared, name, self.tensor_type(kind, scope), said.get("swizzle", 0), said.get("at", k.BEHIND)
                )
                self.define(s, name, place, scope)
                return place
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="barriers"), args=[count, arrivals])
            ):
                ring = Type(u64, (self.natural(count),))
                barriers: k.Barriers = self.build(s, k.Barriers, name, ring, 0, k.BEHIND, self.natural(arrivals))
                self.define(s, name, barriers, scope)
                return barriers
        return None

    def define(self, s: ast.AST, name: str, value: Any, scope: Scope) -> None:
        if isinstance(found := scope.values.get(name), Expr | l.Buffer) and found is not scope.outside.get(name):
            self.fail(s, f"{name} is defined twice")
        scope.values[name] = value

    def statements(self, body: list[ast.stmt], scope: Scope) -> tuple[Any, ...]:
        found = []
        for s in body:
            if not isinstance(s, ast.Pass):
                self.lines.append(s)
                found.append(self.statement(s, scope))
        if not found and body:
            self.lines.append(body[0])  # which is printed as `pass`
        return tuple(found)

    def statement(self, s: ast.stmt, scope: Scope) -> Any:
        match s:
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="registers"), args=[kind, *init])
            ):
                if len(init) > 1:
                    self.fail(s, "registers(type) or registers(type, constant)")
                place = self.build(s, k.Registers, name, self.tensor_type(kind, scope))
                if place.type.strides is not None:
                    self.fail(kind, "registers lie one behind the other, without strides")
                first = self.term(init[0], scope) if init else None
                if first is not None and not isinstance(first, l.Literal):
                    self.fail(init[0], "registers start at a constant, such as f32(0.0)")
                scope.values[name] = place
                return self.build(s, k.Declare, place, first)
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="integer"), args=[value, below])
            ):
                variable = k.Integer(name, self.natural(below))
                first = self.expr(value, scope)
                self.define(s, name, variable, scope)
                return self.build(s, k.DeclareInteger, variable, first)
            case ast.Assign(targets=[ast.Name(id=name)], value=v) if isinstance(scope.values.get(name), k.Integer):
                return self.build(s, k.SetInteger, scope.values[name], self.expr(v, scope))
            case ast.Assign(targets=[ast.Name(id=name)], value=v):
                term = self.term(v, scope)
                value = self.build(s, k.Value, name, term.dtype)
                self.define(s, name, value, scope)
                return self.build(s, k.Let, value, term)
            case ast.Assign(targets=[ast.Subscript() as target], value=v):
                return self.build(s, l.Store, *self.place(target, scope), self.term(v, scope))
            case ast.For(
                target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="serial" | "unrolled" as kind), args=[extent])
            ):
                if isinstance(scope.values.get(name), Expr):
                    self.fail(s, f"{name} is already a variable")
                steps = self.expr(extent, scope)
                axis = Var(name, self.natural(extent) if isinstance(steps, int) else steps)
                inner = scope.inner()
                inner.values[name] = axis
                return self.build(s, k.For, axis, self.statements(s.body, inner), kind == "unrolled")
            case ast.If(test=test, orelse=[]):
                return self.build(s, k.If, self.conditions(test, scope), self.statements(s.body, scope.inner()))
            case ast.With(
                items=[ast.withitem(context_expr=ast.Call(func=ast.Name(id="role"), args=[first, count]) as head)]
            ):
                registers = self.natural(self.keyword(head, "registers")) if head.keywords else 0
                body = self.statements(s.body, scope.inner())
                return self.build(s, k.Role, self.natural(first), self.natural(count), body, registers)
            case ast.Expr(value=ast.Call(func=ast.Name(id=op)) as call) if op in _CALLS:
                return self.call_statement(call, scope)
        self.fail(s, f"expected a loop, a condition, a role, an assignment or one of {', '.join(_CALLS)}")

    def call_statement(self, call: ast.Call, scope: Scope) -> Any:
        """A statement that is written as a call."""
        op = call.func.id  # type: ignore[attr-defined]
        arguments = _CALLS[op].arguments()
        positional, named = [x for x in arguments if not x.named], {x.fields[0]: x for x in arguments if x.named}
        least = sum(not x.optional for x in positional)
        if not least <= len(call.args) <= len(positional) or any(x.arg not in named for x in call.keywords):
            self.fail(call, f"expected {op}({', '.join(map(str, arguments))})")
        given = [*zip(positional, call.args, strict=False), *((named[str(x.arg)], x.value) for x in call.keywords)]
        fields: dict[str, Any] = {}
        for argument, x in given:
            fields |= zip(argument.fields, self.fields(argument.kind, x, scope), strict=True)
        return self.build(call, lambda: _CALLS[op](**fields))

    def fields(self, kind: str, x: ast.expr, scope: Scope) -> tuple[Any, ...]:
        """The fields of a statement that an argument of this kind gives."""
        match kind:
            case "number":
                return (self.natural(x),)
            case "word":
                name = self.constant(x)
                if not isinstance(name, str):
                    self.fail(x, "expected a name in quotes")
                return (name,)
            case "type":
                return (self.tensor_type(x, scope),)
            case "term":
                return (self.term(x, scope),)
            case "expression":
                return (self.expr(x, scope),)
            case "condition":
                found = self.conditions(x, scope)
                if len(found) != 1:
                    self.fail(
                        x, "expected one comparison, whose left side is never below its right side, or never above"
                    )
                return found
            case "box":
                return (tuple(self.natural(e) for e in elements(x)),)
            case "barriers":
                return (self.lookup(x, scope, k.Barriers),)
            case "barrier":
                place, slot = self.place(x, scope, k.Barriers)
                if len(slot) != 1:
                    self.fail(x, "expected a barrier, such as full[0]")
                return (place, slot[0])
            case "source":
                subscript, conditions = self.guarded(x, scope)
                return (*self.place(subscript, scope), conditions)
        return self.place(x, scope, k.PLACES[kind])

    def place(self, x: ast.AST, scope: Scope, kind: Any = l.Buffer) -> tuple[l.Buffer, tuple[Any, ...]]:
        if not isinstance(x, ast.Subscript):
            self.fail(x, "expected a place, such as x[0, lane]")
        return self.lookup(x.value, scope, kind), () if empty(x.slice) else self.indices(x.slice, scope)

    def proved(self, where: ast.AST, term: Any) -> Any:
        return term  # the conditions around it say where it is; `targets.cuda.check` looks at all of that

    def term(self, x: ast.AST, scope: Scope) -> Any:
        match x:
            case ast.Call(func=ast.Name(id="shuffle"), args=[v, mask]):
                return self.build(x, k.Shuffle, self.term(v, scope), self.natural(mask))
            case ast.Call(func=ast.Name(id="vote"), args=[ast.Constant(value=str() as kind), v]):
                return self.build(x, k.Vote, kind, self.term(v, scope))
            case ast.Call(func=ast.Name(id="remote"), args=[place, rank]):
                return self.build(x, k.Remote, *self.place(place, scope, k.Shared), self.expr(rank, scope))
        return super().term(x, scope)


_SHAPE = ("_grid", "_warps", "_resident", "_reads", "_cluster")
_CALLS: dict[str, Any] = {op: kind for op, kind in OPS["kernel"].items() if issubclass(kind, k.Statement)}
"""The statements that are written as calls."""
