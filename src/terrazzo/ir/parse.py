"""Reading the text of an IR. Nothing in it is ever executed: `ast` gives a tree, and this builds nodes from it."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Mapping
from typing import Any

from terrazzo.ir.dialects import kernel, tile
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects import torch as aten
from terrazzo.ir.dialects.scalar import BY_NAME, scalar
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.monoid import monoid
from terrazzo.ir.node import Node, topological
from terrazzo.ir.parse_kernel import KernelReader
from terrazzo.ir.parse_loop import LoopReader
from terrazzo.ir.parse_plan import PlanReader
from terrazzo.ir.parse_schedule import ScheduleReader
from terrazzo.ir.places import HEAD, Places, lines_of, located
from terrazzo.ir.program import Input, Inputs, Program
from terrazzo.ir.reader import Reader, Scope, dotted, elements, empty, misplaced, python_tree, too_deep
from terrazzo.ir.show_expr import show_type
from terrazzo.ir.types import Type
from terrazzo.ir.verify import overwritten, results_problem, step_problem, value_problem

IRS = ("torch", "tensor", "loop", "tile", "kernel")
_IRS = "@torch, @tensor, @loop, @tile or @kernel"
LONGEST = 1 << 26
"""Texts longer than this (characters) are refused."""


def parse(
    text: str, filename: str = "<text>", places: Places | None = None
) -> Program | l.Program | tile.Program | kernel.Program:
    """The valid program a text means. Anything wrong is a UserError with line, column and a caret.

    `places` is filled with where everything stands, for who finds more that is wrong.
    """
    if len(text) > LONGEST:
        before = lines_of(text[:LONGEST])
        message = f"the text is longer than {LONGEST} characters"
        raise misplaced(located(filename, text, len(before), len(before[-1]) + 1, message))
    text, tree = python_tree(text, filename)
    places = Places() if places is None else places
    places.filename, places.text = filename, text
    try:
        return _module(tree, _comments(text), places)
    except tokenize.TokenError as e:  # a comment that only Python's parser accepts
        message, (line, column) = e.args
        raise misplaced(located(filename, text, line, column + 1, message)) from None
    except RecursionError:
        raise misplaced(too_deep(filename, text)) from None


def _comments(text: str) -> dict[int, str]:
    found: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            found[token.start[0]] = token.string[1:].strip()
    return found


def _module(
    tree: ast.Module, comments: Mapping[int, str], places: Places
) -> Program | l.Program | tile.Program | kernel.Program:
    reader = Reader(places, comments)
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        reader.fail(tree.body[0] if tree.body else tree, f"expected one function: {_IRS}, then def")
    f = tree.body[0]
    if len(f.decorator_list) != 1 or not isinstance(f.decorator_list[0], ast.Name):
        reader.fail(f, f"expected the name of the IR above: {_IRS}")
    kind = f.decorator_list[0].id
    places.add(HEAD, f.decorator_list[0])
    if kind not in IRS:
        reader.fail(f.decorator_list[0], f"unknown IR {kind!r}; known: {', '.join(IRS)}")
    scope = Scope()
    body = reader.sizes(f.body, scope)
    if not _plain(f.args):
        reader.fail(f, "inputs are plain `name: type`")
    given: list[Any] = []
    ours: list[str] = []
    for a in f.args.args:
        if a.arg in scope.values:
            reader.fail(a, f"{a.arg} is defined twice")
        if a.annotation is None:
            reader.fail(a, f"input {a.arg} needs a type, such as f32[2, 3]")
        annotation = a.annotation
        if isinstance(annotation, ast.Call) and dotted(annotation.func) == "donated" and not annotation.keywords:
            (annotation,) = annotation.args if len(annotation.args) == 1 else (annotation,)
            ours.append(a.arg)
        ty = reader.tensor_type(annotation, scope)
        node = (l.Buffer if kind in ("loop", "tile", "kernel") else Input)(a.arg, ty)
        scope.values[a.arg] = node
        places.add(node, a)
        places.add(a.arg, a)
        given.append(node)
    inputs = Inputs(given, ours)
    if not body or not isinstance(body[-1], ast.Return):
        reader.fail(f, "the function must end with return")
    if kind == "kernel":
        launches = KernelReader(places, comments)
        found_steps = tuple(launches.step(s, scope) for s in body[:-1])
        return kernel.Program(f.name, inputs, found_steps, reader.results(body[-1], scope, l.Buffer))
    if kind in ("loop", "tile"):
        loops, schedules = LoopReader(places, comments), ScheduleReader(places)
        completed = PlanReader(places)
        steps: list[Any] = []
        found: dict[int, Any] = {}
        plans: dict[int, Any] = {}
        ready: dict[str, l.Buffer] = {b.name: b for b in inputs}
        for s in body[:-1]:
            if kind == "tile" and schedules.starts(s):
                if not steps or not isinstance(steps[-1], l.Kernel) or len(steps) - 1 in found:
                    reader.fail(s, "a schedule stands below the kernel it is one of")
                found[len(steps) - 1] = schedules.schedule(s)
                reader.build(s, tile.fit, found[len(steps) - 1], steps[-1])
            elif kind == "tile" and completed.starts(s):
                if len(steps) - 1 not in found or len(steps) - 1 in plans:
                    reader.fail(s, "a plan stands below the schedule that it completes")
                plans[len(steps) - 1] = completed.plan(s, found[len(steps) - 1])
            else:
                steps.append(loops.step(s, scope))
                if why := step_problem(steps[-1], ready):
                    reader.fail(s, why)
                ready.update((b.name, b) for b in steps[-1].writes)
        results = reader.results(body[-1], scope, l.Buffer)
        if why := results_problem(results, ready) or overwritten(steps, inputs, results):
            reader.fail(body[-1], why)
        program = l.Program(f.name, inputs, tuple(steps), results)
        return program if kind == "loop" else tile.Program(program, tuple(found.items()), tuple(plans.items()))
    names: dict[Node, str] = {i: i.name for i in inputs}
    sources: dict[str, str] = {}
    values = GraphReader(places, comments)
    for s in body[:-1]:
        values.value_statement(s, kind, scope, names, sources)
    returned = reader.results(body[-1], scope, Node)
    built: Program = reader.build(f, Program, kind, f.name, inputs, returned, names, sources)
    return built


def _plain(args: ast.arguments) -> bool:
    """No defaults, no stars, nothing that could be given otherwise than in order."""
    return not (args.vararg or args.kwarg or args.kwonlyargs or args.defaults or args.posonlyargs)


class GraphReader(Reader):
    """Reads the statements of Torch and Tensor IR."""

    def value_statement(
        self, s: ast.stmt, kind: str, scope: Scope, names: dict[Node, str], sources: dict[str, str]
    ) -> None:
        if not isinstance(s, ast.AnnAssign) or not isinstance(s.target, ast.Name) or s.value is None:
            self.fail(s, "expected `name: type = value`")
        name, declared = s.target.id, self.type(s.annotation, scope)
        if name in scope.values:
            self.fail(s, f"{name} is defined twice")
        node = self.value(s.value, kind, declared, scope)
        if node.type != declared:
            self.fail(s.annotation, f"{name} is declared {show_type(declared)} but is {show_type(node.type)}")
        for x in (node, *topological(node.index_nodes)) if isinstance(node, t.IndexMap) else (node,):
            if kind == "tensor" and (why := value_problem(x, name)):
                self.fail(s.value, why)
        scope.values[name] = node
        self.places.add(name, s)
        names.setdefault(node, name)
        if comment := self.comments.get(s.end_lineno or s.lineno):
            sources[name] = comment

    def value(self, x: ast.AST, kind: str, declared: Any, scope: Scope) -> Any:
        if not isinstance(x, ast.Call):
            self.fail(x, "expected a call")
        path = dotted(x.func)
        if path == "get" and len(x.args) == 2:
            make = aten.Get if kind == "torch" else t.Get
            return self.build(x, make, self.lookup(x.args[0], scope), self.constant(x.args[1]))
        if kind == "torch":
            if "." not in path:
                self.fail(x, "expected an op, such as aten.add.Tensor(x, y)")
            args, kwargs, order = self.call(x, x.args, scope)
            self.operator(x, path, args, kwargs, declared, strided=True)
            return self.build(x, aten.Aten, path, args, kwargs, declared, order)
        if path == "opaque":
            if not x.args:
                self.fail(x, "opaque needs the name of an op")
            name = self.constant(x.args[0])
            args, kwargs, order = self.call(x, x.args[1:], scope)
            self.operator(x, name, args, kwargs, declared)
            return self.build(x, t.Opaque, name, args, kwargs, declared, order)
        if not isinstance(declared, Type) and not path.startswith(("reduce.", "scan.")):
            self.fail(x, f"{path} has one result")
        match path.split("."):
            case ["literal"] if len(x.args) == 1:
                return self.build(x, t.Literal, self.constant(x.args[0]), declared.dtype, declared.shape)
            case ["iota"] if len(x.args) == 1:
                body, inner = self.lambda_(x.args[0], declared.shape, scope)
                return self.build(x, t.Iota, self.expr(body, inner), declared.shape)
            case ["index_map"] if len(x.args) == 1:
                body, inner = self.lambda_(x.args[0], declared.shape, scope)
                source, inside = self.guarded(body, inner)
                index = () if empty(source.slice) else self.indices(source.slice, inner)
                return self.build(x, t.IndexMap, self.lookup(source.value, scope), declared.shape, index, inside)
            case ["reduce", m]:
                axes = self.keyword(x, "axes")
                return self.build(
                    x,
                    t.Reduce,
                    self.build(x, monoid, m),
                    self.operands(x, scope),
                    tuple(map(self.constant, elements(axes))),
                )
            case ["scan", m]:
                return self.build(
                    x, t.Scan, self.build(x, monoid, m), self.operands(x, scope), self.constant(self.keyword(x, "axis"))
                )
            case ["laid_out"] if len(x.args) == 1 and declared.strides is not None:
                return self.build(x, t.LaidOut, self.lookup(x.args[0], scope), declared.strides)
            case [fn] if fn in BY_NAME:
                return self.build(x, t.Elementwise, scalar(fn), self.operands(x, scope))
        self.fail(x, f"unknown Tensor IR op {path!r}")

    def operands(self, x: ast.Call, scope: Scope) -> tuple[Any, ...]:
        return tuple(self.lookup(a, scope) for a in x.args)

    def lambda_(self, x: ast.AST, shape: tuple[IntExpr, ...], scope: Scope) -> tuple[ast.AST, Scope]:
        names = [f"i{d}" for d in range(len(shape))]
        if not isinstance(x, ast.Lambda) or not _plain(x.args) or [a.arg for a in x.args.args] != names:
            self.fail(x, f"expected `lambda {', '.join(names)}: …`, one coordinate per dimension")
        inner = scope.inner()
        inner.values.update({v.name: v for v in t.coordinates(shape)})
        return x.body, inner
