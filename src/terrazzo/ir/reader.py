"""What the readers of all IRs share: errors with positions, scopes, types, constants, index expressions, arguments."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from terrazzo.errors import TerrazzoError, UserError
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects import torch as aten
from terrazzo.ir.expr import Bound, Expr, IntExpr, Loaded, Size, Var, at_least, bounds
from terrazzo.ir.node import Node, topological
from terrazzo.ir.places import Places, lines_of, located, located_at
from terrazzo.ir.proof import WIDEST
from terrazzo.ir.types import DTYPES, Type

BYTE_ORDER_MARK = "\ufeff"
"""What some editors put at the head of a file; it means nothing."""


@dataclass
class Scope:
    """What names mean: values, buffers, terms, variables.

    Inside of a kernel its own names come first, but not in front of an index, where only a tensor can stand: those
    `outside` may be called as an axis or a value is. `over` has what buffers lie over.
    """

    values: dict[str, Any] = field(default_factory=dict)
    outside: dict[str, Any] = field(default_factory=dict)
    over: dict[Any, Any] = field(default_factory=dict)

    def inner(self) -> Scope:
        return Scope(dict(self.values), self.outside or self.values, self.over)


class Reader:
    """Reads one text. Subclasses read the statements of one family of IRs."""

    def __init__(self, places: Places, comments: Mapping[int, str] | None = None) -> None:
        """`places` has the text, and is filled with where everything stands in it."""
        self.places, self.comments = places, comments or {}

    def fail(self, where: ast.AST, message: str) -> NoReturn:
        raise misplaced(located_at(where, self.places.filename, self.places.text, message))

    def build(self, where: ast.AST, make: Callable[..., Any], *args: Any) -> Any:
        """Construct a node; what its constructor has against it is reported here."""
        try:
            made = make(*args)
            if isinstance(made, Node):
                self.places.add(made, where)
            return made
        except (TerrazzoError, TypeError, AttributeError, ValueError, ZeroDivisionError, OverflowError) as e:
            self.fail(self.places.of(getattr(e, "about", ())) or where, str(e))

    def sizes(self, body: list[ast.stmt], scope: Scope) -> list[ast.stmt]:
        rest = []
        for s in body:
            match s:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="size"), args=[lo, hi])):
                    low, high = self.constant(lo), self.constant(hi)
                    if not isinstance(low, int) or not (high is None or isinstance(high, int)):
                        self.fail(s, "size(lowest, highest) takes integers, or None for no highest")
                    if low < 0:
                        self.fail(s, "a dimension cannot be negative")
                    if name in scope.values:
                        self.fail(s, f"{name} is defined twice")
                    scope.values[name] = Size(name, low, high)
                case _:
                    rest.append(s)
        return rest

    def results(self, s: ast.Return, scope: Scope, kind: Any) -> tuple[Any, ...]:
        items = s.value.elts if isinstance(s.value, ast.Tuple) else [s.value] if s.value else []
        return tuple(self.lookup(i, scope, kind) for i in items)

    def lookup(self, where: ast.AST, scope: Scope, kind: Any = Node) -> Any:
        if not isinstance(where, ast.Name):
            self.fail(where, "expected a name")
        found = scope.values.get(where.id)
        if not isinstance(found, kind):
            found = scope.outside.get(where.id, found)
        if found is None:
            self.fail(where, f"{where.id} is not defined here")
        if not isinstance(found, kind):
            self.fail(where, f"{where.id} is no {kind.__name__.lower()}")
        return found

    def type(self, x: ast.AST, scope: Scope) -> Any:
        match x:
            case ast.Constant(value=None):
                return None
            case ast.Tuple(elts=elts):
                return tuple(self.type(e, scope) for e in elts)
            case ast.BinOp(left=left, op=ast.MatMult(), right=ast.Tuple(elts=elts)):
                base = self.type(left, scope)
                strides = tuple(self.extent(e, scope) for e in elts)
                if not isinstance(base, Type) or len(strides) != base.rank:
                    self.fail(x, "strides need one number per dimension")
                return Type(base.dtype, base.shape, strides)
            case ast.Name(id=name):
                return Type(self.dtype(x, name))
            case ast.Subscript(value=ast.Name(id=name), slice=s):
                shape = tuple(self.extent(e, scope) for e in (s.elts if isinstance(s, ast.Tuple) else [s]))
                return Type(self.dtype(x, name), shape)
        self.fail(x, "expected a type, such as f32[2, 3]")

    def tensor_type(self, x: ast.AST, scope: Scope) -> Type:
        """The type of one tensor, whose size in bytes 64 bits can hold."""
        found = self.type(x, scope)
        if not isinstance(found, Type):
            self.fail(x, "expected the type of one tensor, such as f32[2, 3]")
        spans = [(e, s) for e, s in zip(found.shape, found.element_strides, strict=True)]
        if all(isinstance(e, int) and isinstance(s, int) for e, s in spans):
            last = sum((e - 1) * s for e, s in spans)
            if max(last, *(e for e, _ in spans), 0, 0) * found.dtype.size > WIDEST:  # type: ignore[type-var, operator]
                self.fail(x, f"{found} does not fit into any memory")
        return found

    def extent(self, x: ast.AST, scope: Scope) -> IntExpr:
        """A dimension, a stride or the end of a loop: a number or made of sizes, and not negative."""
        found = self.expr(x, scope)
        if isinstance(found, Expr) and any(isinstance(n, Loaded | Var | Bound) for n in topological([found])):
            self.fail(x, "expected a number, or sizes")
        if not at_least(found, 0):
            self.fail(x, "a dimension cannot be negative")
        return found

    def operator(self, where: ast.AST, name: Any, args: Any, kwargs: Any, declared: Any, strided: bool = False) -> None:
        """Fail unless a text may call this operator of PyTorch, and the call gives what is declared."""
        from terrazzo.ir import operators

        if not isinstance(name, str):
            self.fail(where, "expected the name of an operator in quotes, such as 'aten.relu.default'")
        self.build(where, operators.check, name, args, dict(kwargs), declared, strided)

    def dtype(self, where: ast.AST, name: str) -> Any:
        if name not in DTYPES:
            self.fail(where, f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
        return DTYPES[name]

    def constant(self, x: ast.AST) -> Any:
        match x:
            case ast.Constant(value=v) if v is None or isinstance(v, (bool, int, float, str)):
                return v
            case ast.UnaryOp(op=ast.USub(), operand=o):
                v = self.constant(o)
                if isinstance(v, (int, float)) and not isinstance(v, bool):
                    return -v
            case ast.Name(id="inf" | "nan" as name):
                return float(name)
            case ast.Call(func=ast.Name(id="complex"), args=[real, imaginary], keywords=[]):
                parts = [self.constant(part) for part in (real, imaginary)]
                if all(isinstance(v, float) for v in parts):
                    return complex(*parts)
        self.fail(x, "expected a constant")

    def expr(self, x: ast.AST, scope: Scope) -> IntExpr:
        match x:
            case ast.Constant(value=int() as v) if not isinstance(v, bool):
                return v
            case ast.UnaryOp(op=ast.USub(), operand=o):
                return -self.expr(o, scope)
            case ast.BinOp(left=a, op=op, right=b):
                return self._arithmetic(x, op, self.expr(a, scope), self.expr(b, scope))
            case ast.Call(func=ast.Name(id="at"), args=[value, extent]):
                read: Expr = self.build(x, Loaded, self._read(value, scope), self.expr(extent, scope))
                return read
            case ast.Name():
                found: Expr = self.lookup(x, scope, Expr)
                return found
        self.fail(x, "expected an index expression")

    def _arithmetic(self, where: ast.AST, op: ast.operator, a: IntExpr, b: IntExpr) -> IntExpr:
        match op:
            case ast.Add():
                return a + b
            case ast.Sub():
                return a - b
            case ast.Mult():
                return a * b
            case ast.FloorDiv():
                return self.build(where, lambda: a // b)  # type: ignore[no-any-return]
            case ast.Mod():
                return self.build(where, lambda: a % b)  # type: ignore[no-any-return]
        self.fail(where, "index expressions have + - * // %")

    def _read(self, x: ast.AST, scope: Scope) -> Any:
        if isinstance(x, ast.Subscript):  # Tensor IR: at(ids[i0], n)
            return self.build(
                x,
                t.Read,
                self.lookup(x.value, Scope(scope.outside)),
                () if empty(x.slice) else self.indices(x.slice, scope),
            )
        return self.term(x, scope)

    def term(self, x: ast.AST, scope: Scope) -> Any:
        """A scalar term; only Loop IR has them."""
        self.fail(x, "expected an element of a tensor, such as at(ids[i0], 8)")

    def indices(self, s: ast.AST, scope: Scope) -> tuple[IntExpr, ...]:
        return tuple(self.expr(e, scope) for e in (s.elts if isinstance(s, ast.Tuple) else [s]))

    def guarded(self, x: ast.AST, scope: Scope) -> tuple[ast.Subscript, tuple[IntExpr, ...]]:
        """`x[...]` or `x[...] if a < b and c == 0 else 0`: the subscript and the conditions, expressions >= 0."""
        inside: tuple[IntExpr, ...] = ()
        if isinstance(x, ast.IfExp):
            inside = self.conditions(x.test, scope)
            x = x.body
        if not isinstance(x, ast.Subscript):
            self.fail(x, "expected an element, such as x[i0, i1]")
        return x, tuple(inside)

    def conditions(self, test: ast.expr, scope: Scope) -> tuple[IntExpr, ...]:
        """Comparisons of index expressions, joined by `and`: expressions that are >= 0 where they hold."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            return tuple(e for x in test.values for e in self.conditions(x, scope))
        if not isinstance(test, ast.Compare) or len(test.ops) > 1:
            self.fail(test, "a condition compares index expressions: `lane == 0 and t < 5`")
        more = self.expr(test.left, scope) - self.expr(test.comparators[0], scope)
        match test.ops[0]:
            case ast.GtE():
                return (more,)
            case ast.Gt():
                return (more - 1,)
            case ast.LtE():
                return (-more,)
            case ast.Lt():
                return (-more - 1,)
            case ast.Eq():
                low, high = bounds(more)
                return (
                    (-more,)
                    if low is not None and low >= 0
                    else (more,)
                    if high is not None and high <= 0
                    else (more, -more)
                )
        self.fail(test, "a condition is one of == < <= > >=")

    def call(self, x: ast.Call, args: list[ast.expr], scope: Scope) -> tuple[Any, Any, int]:
        order, kwargs = 0, []
        for k in x.keywords:
            if k.arg == "_order":
                order = self.constant(k.value)
            elif k.arg is None:
                self.fail(x, "** is not allowed")
            elif k.arg != "_types":
                kwargs.append((k.arg, self.argument(k.value, scope)))
        return tuple(self.argument(a, scope) for a in args), tuple(kwargs), order

    def argument(self, x: ast.AST, scope: Scope) -> Any:
        match x:
            case ast.List(elts=elts):
                return tuple(self.argument(e, scope) for e in elts)
            case ast.Call(func=ast.Name(id="torch"), args=[ast.Constant(value=str() as name)]):
                return aten.TorchName(name)
            case ast.Call(func=ast.Name(id="view"), args=[of, ast.List() as shape, ast.List() as strides, offset]):
                buffer = self.lookup(of, scope, l.Buffer)
                sizes = (self.argument(shape, scope), self.argument(strides, scope), self.constant(offset))
                return self.build(x, l.View, buffer, *sizes)
            case ast.Name(id=name) if name in scope.values:
                return scope.values[name]
            case ast.Name(id=name) if name in DTYPES:
                return DTYPES[name]
            case ast.Name(id=name) if name not in ("inf", "nan"):
                self.fail(x, f"{name} is not defined here")
        return self.constant(x)

    def keyword(self, x: ast.Call, name: str) -> ast.AST:
        """The value of a keyword argument that must be there."""
        for k in x.keywords:
            if k.arg == name:
                return k.value
        self.fail(x, f"missing {name}=")


def python_tree(text: str, filename: str) -> tuple[str, ast.Module]:
    """A text without a byte-order mark, and Python's tree of it, which is not run. What is no Python is a UserError.

    What Python would warn of, such as `5or`, is left to who reads it.
    """
    text = text.removeprefix(BYTE_ORDER_MARK)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return text, ast.parse(text, filename)
    except SyntaxError as e:
        raise misplaced(located(filename, text, e.lineno or 1, e.offset or 1, e.msg)) from None
    except ValueError as e:  # a null, or half of a character
        strange = re.search("[\0\ud800-\udfff]", text)
        before = lines_of(text[: strange.start() if strange else 0])
        message = f"not readable as the text of an IR: {e}"
        raise misplaced(located(filename, text, len(before), len(before[-1]) + 1, message)) from None
    except (RecursionError, MemoryError):  # Python's parser says either, and not where
        raise misplaced(too_deep(filename, text)) from None


def misplaced(message: str) -> UserError:
    """An error whose message says where in a text it is."""
    error = UserError(message)
    error.placed = True
    return error


def too_deep(filename: str, text: str) -> str:
    """Nobody knows where that is; what is nested deeply is long."""
    lines = lines_of(text)
    line = max(range(len(lines)), key=lambda n: len(lines[n]))
    return f"{filename}, line {line + 1}, column 1: expressions are nested too deeply"


def dotted(x: ast.AST) -> str:
    """`a.b.c` as a string, "" for anything else."""
    parts: list[str] = []
    while isinstance(x, ast.Attribute):
        parts.append(x.attr)
        x = x.value
    return ".".join([x.id, *reversed(parts)]) if isinstance(x, ast.Name) else ""


def elements(x: ast.AST) -> list[ast.expr]:
    """The items of a list or tuple, or the one expression there is."""
    return x.elts if isinstance(x, (ast.List, ast.Tuple)) else [x] if isinstance(x, ast.expr) else []


def empty(x: ast.AST) -> bool:
    """True for `()`: the index of a 0-d tensor."""
    return isinstance(x, ast.Tuple) and not x.elts
