"""Reading Loop IR."""

from __future__ import annotations

import ast
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import BY_NAME, scalar
from terrazzo.ir.expr import Expr, Var
from terrazzo.ir.monoid import monoid
from terrazzo.ir.node import substitute
from terrazzo.ir.reader import Reader, Scope, empty
from terrazzo.ir.types import DTYPES
from terrazzo.ir.verify import store_problem, term_problem


class LoopReader(Reader):
    """Reads the statements of Loop IR."""

    def step(self, s: ast.stmt, scope: Scope) -> Any:
        source = self.comments.get(s.lineno, "")
        match s:
            case ast.With(
                items=[
                    ast.withitem(
                        context_expr=ast.Call(
                            func=ast.Name(id="kernel"), args=[ast.Constant(value=str() as name)]
                        ) as head
                    )
                ]
            ):
                for k in head.keywords:
                    if k.arg is None or k.arg in scope.values:
                        self.fail(head, f"{k.arg} is defined twice")
                    scope.values[k.arg] = self.stored(k.arg, k.value, scope)
                    self.places.add(k.arg, s)
                self.places.add(name, s)
                axes: list[Any] = []
                stores: list[Any] = []
                self.block(s.body, scope.inner(), axes, stores, [])
                if not stores:
                    self.fail(s, f"the kernel {name} stores nothing")
                return self.build(s, l.Kernel, name, tuple(axes), tuple(stores), source)
            case ast.Assign(
                targets=[ast.Tuple(elts=targets)], value=ast.Call(func=ast.Name(id="call"), args=[first, *rest]) as c
            ):
                types = self.type(self.keyword(c, "_types"), scope)
                args, kwargs, order = self.call(c, rest, scope)
                if not isinstance(types, tuple) or len(types) != len(targets):
                    self.fail(c, "one type per result is needed")
                buffers = []
                for target, ty in zip(targets, types, strict=True):
                    if not isinstance(target, ast.Name):
                        self.fail(target, "expected a name")
                    if ty is not None and target.id in scope.values:
                        self.fail(target, f"{target.id} is defined twice")
                    buffers.append(None if ty is None else l.Buffer(target.id, ty))
                    if ty is not None:
                        scope.values[target.id] = buffers[-1]
                        self.places.add(target.id, s)
                name = self.constant(first)
                self.operator(c, name, args, kwargs, list(types))
                return self.build(s, l.Call, name, args, kwargs, tuple(buffers), order, source)
        self.fail(s, 'expected `with kernel("name", result=type):` or `result, = call("aten.…", …, _types=(…,))`')

    def stored(self, name: str, x: ast.expr, scope: Scope) -> l.Buffer:
        """What a kernel stores: of a type, or like a buffer that it lies over."""
        match x:
            case ast.Call(func=ast.Name(id="over"), args=[old], keywords=[]):
                below = self.lookup(old, scope, l.Buffer)
                found = l.Buffer(name, below.type)
                scope.over[found] = below
                return found
        return l.Buffer(name, self.tensor_type(x, scope))

    def block(
        self, body: list[ast.stmt], scope: Scope, axes: list[Any], stores: list[Any], reduce_axes: list[Any]
    ) -> dict[str, Any]:
        """Read statements; returns what was accumulated here: name → (monoid, arguments)."""
        accumulated: dict[str, Any] = {}
        for s in body:
            match s:
                case ast.For(target=target, iter=ast.Call(func=ast.Name(id=kind), args=extents)) if kind in (
                    "free",
                    "scan",
                    "reduce",
                ):
                    self.loop(s, kind, target, extents, scope, axes, stores)
                case ast.Expr(
                    value=ast.Compare(
                        left=ast.Name(id=acc),
                        ops=[ast.Lt()],
                        comparators=[ast.UnaryOp(op=ast.USub(), operand=ast.Call(func=ast.Name(id=m)) as c)],
                    )
                ):
                    args = tuple(self.term(a, scope) for a in c.args)
                    accumulated[acc] = (c, self.build(c, monoid, m), args)
                    if not reduce_axes:  # a scan: its value is there at once, in order
                        scope.values[acc] = self.scan(c, accumulated.pop(acc), axes)
                case ast.Assign(targets=[ast.Name(id=name)], value=v):
                    if isinstance(scope.values.get(name), Expr):
                        self.fail(s, f"{name} is already a variable")
                    scope.values[name] = self.term(v, scope)
                case ast.Assign(targets=[ast.Subscript(value=target, slice=where)], value=v):
                    index = () if empty(where) else self.indices(where, scope)
                    buffer = self.lookup(target, scope, l.Buffer)
                    over = scope.over.get(buffer)
                    stores.append(self.build(s, l.Store, buffer, index, self.term(v, scope), over))
                    if why := store_problem(stores[-1]):
                        self.fail(target, why)
                case _:
                    self.fail(
                        s, "expected a loop, `name = term`, `accumulator <- monoid(term)` or `buffer[index] = term`"
                    )
        return accumulated

    def loop(
        self,
        s: ast.For,
        kind: str,
        target: ast.expr,
        extents: list[ast.expr],
        scope: Scope,
        axes: list[Any],
        stores: list[Any],
    ) -> None:
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        if len(targets) != len(extents) or not all(isinstance(x, ast.Name) for x in targets):
            self.fail(s, f"expected `for a in {kind}(extent):`, one extent per variable")
        pairs = [
            (x.id, self.extent(e, scope)) for x, e in zip(targets, extents, strict=True) if isinstance(x, ast.Name)
        ]
        inner = scope.inner()
        if kind != "reduce":
            if len(pairs) != 1:
                self.fail(s, f"a {kind} loop has one variable")
            axis = Var(*pairs[0])
            if axis.name in {a.name for a in axes}:
                self.fail(s, f"{axis.name} is bound twice")
            axes.append(axis)
            inner.values[axis.name] = axis
            self.block(s.body, inner, axes, stores, [])
            return
        fresh = tuple(Var(f"%{name}", extent) for name, extent in pairs)
        inner.values.update({name: v for (name, _), v in zip(pairs, fresh, strict=True)})
        found = self.block(s.body, inner, axes, stores, list(fresh))
        renamed = tuple(Var(l.fresh_name(), v.extent) for v in fresh)
        for name, (where, m, args) in found.items():
            moved = tuple(substitute(a, dict(zip(fresh, renamed, strict=True))) for a in args)
            scope.values[name] = self.build(where, l.Reduce.make, m, renamed, moved)

    def scan(self, where: ast.AST, accumulation: Any, axes: list[Any]) -> Any:
        if not axes:
            self.fail(where, "an accumulation stands in a reduce or scan loop")
        _, m, args = accumulation
        axis = Var(l.fresh_name(), axes[-1].extent)
        moved = tuple(substitute(a, {axes[-1]: axis}) for a in args)
        return self.build(where, l.Scan.make, m, axis, moved, axes[-1])

    def _read(self, x: ast.AST, scope: Scope) -> Any:
        return self.term(x, scope)  # an index from data is a term here

    def term(self, x: ast.AST, scope: Scope) -> Any:
        match x:
            case ast.Name():
                return self.lookup(x, scope, l.Term)
            case ast.Subscript() | ast.IfExp():
                source, inside = self.guarded(x, scope)
                index = () if empty(source.slice) else self.indices(source.slice, scope)
                return self.proved(x, self.build(x, l.Load, self.lookup(source.value, scope, l.Buffer), index, inside))
            case ast.Call(func=ast.Name(id="index"), args=[e]):
                return self.proved(x, self.build(x, l.Index, self.expr(e, scope)))
            case ast.Call(func=ast.Name(id="get"), args=[v, k]):
                return self.build(x, l.Get, self.term(v, scope), self.constant(k))
            case ast.Call(func=ast.Name(id=name), args=[c]) if name in DTYPES and _is_number(c):
                return self.build(x, l.Literal, self.constant(c), DTYPES[name])
            case ast.Call(func=ast.Name(id=name), args=args) if name in BY_NAME:
                return self.build(x, l.Apply, scalar(name), tuple(self.term(a, scope) for a in args))
        self.fail(x, "expected a term: a name, an element, a constant such as f32(1.0), or a scalar function of terms")

    def proved(self, where: ast.AST, term: Any) -> Any:
        """A term whose index, if it has one, stays in its buffer."""
        if why := term_problem(term):
            self.fail(where, why)
        return term


def _is_number(x: ast.AST) -> bool:
    if isinstance(x, ast.UnaryOp) and isinstance(x.op, ast.USub):
        x = x.operand
    return isinstance(x, ast.Constant) or (isinstance(x, ast.Name) and x.id in ("inf", "nan"))
