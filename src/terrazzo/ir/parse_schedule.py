"""Reading schedules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from terrazzo.ir.places import Places, located
from terrazzo.ir.reader import Reader, misplaced, python_tree
from terrazzo.ir.schedule import (
    DIRECTIVES,
    KERNEL_LEVELS,
    SITE_LEVELS,
    Binding,
    Factor,
    Like,
    Named,
    Operand,
    Options,
    Schedule,
    Site,
    Value,
    Word,
    show_options,
)


def parse_schedule(text: str, filename: str = "<schedule>") -> Schedule:
    """The one schedule a text means. Anything wrong is a UserError with line, column and a caret."""
    found = parse_schedules(text, filename)
    if len(found) != 1:
        raise misplaced(located(filename, text, 1, 1, f"expected one schedule, found {len(found)}"))
    return found[0]


def parse_schedules(text: str, filename: str = "<schedule>") -> list[Schedule]:
    """The schedules a text means, one after the other."""
    text, tree = python_tree(text, filename)
    reader = ScheduleReader(Places(filename, text))
    return [reader.schedule(s) for s in tree.body]


class ScheduleReader(Reader):
    """Reads the statements of a schedule."""

    def starts(self, s: ast.stmt) -> bool:
        """Whether a statement is a schedule."""
        match s:
            case ast.With(items=[ast.withitem(context_expr=ast.Call(func=ast.Name(id="schedule")))]):
                return True
        return False

    def schedule(self, s: ast.stmt) -> Schedule:
        args, options, body = self.header(s, "schedule")
        if len(args) != 1 or set(options) != {"target"}:
            self.fail(s, 'expected `with schedule("kernel", target="...")`')
        self.words: dict[Named, ast.AST] = {}
        axes, operands = self.lines("", (x for x in body if isinstance(x, ast.Assign)))
        if like := [name for name, binding in axes if isinstance(binding, Like)]:
            self.fail(self.words[Named("", like[0], "")],
                      f"{like[0]} is the kernel's; only in a site can it be like another site's")  # fmt: skip
        sites, directives = [], []
        for x in body:
            if isinstance(x, ast.With):
                sites.append(self.site(x))
            elif isinstance(x, ast.Expr) and isinstance(x.value, ast.Call):
                name = self.word(x.value.func)
                if name not in DIRECTIVES:
                    self.fail(x, f"unknown directive {name!r}; known: {', '.join(DIRECTIVES)}")
                self.stands(Named("", name, ""), x)
                self.stands(Named("", name, name), x)
                directives.append((name, tuple(map(self.value, x.value.args)), self.keywords(x.value, "", name)))
            elif not isinstance(x, ast.Assign | ast.Pass):
                self.fail(x, "expected `axis = ...`, `operand = ...`, a directive or a site")
        found = Schedule(args[0], str(options["target"]), axes, operands, tuple(directives), tuple(sites))
        self.places.add(found, s)
        for named, where in self.words.items():
            self.places.add((found, named), where)
        return found

    def site(self, s: ast.With) -> Site:
        names, given, inner = self.header(s, "site")
        if not names or not set(given) <= {"on"}:
            self.fail(s, 'expected `with site("name", ..., on="instruction")`')
        self.stands(Named(names[0], "", ""), s)
        for k in s.items[0].context_expr.keywords:  # type: ignore[attr-defined]
            self.stands(Named(names[0], "on", given["on"]), k)
        lines = self.lines(names[0], (y for y in inner if not isinstance(y, ast.Pass)))
        return Site(names, *lines, given.get("on"))

    def stands(self, named: Named, where: ast.AST) -> None:
        """Note where a word of the schedule stands, or with no word a line or site."""
        self.words.setdefault(named, where)

    def header(self, s: ast.stmt, word: str) -> tuple[tuple[str, ...], dict[str, str], list[ast.stmt]]:
        match s:
            case ast.With(items=[ast.withitem(context_expr=ast.Call(func=ast.Name(id=name), args=args) as call)]) if (
                name == word
            ):
                texts = tuple(map(self.text_constant, args))
                return texts, {k.arg or "": self.text_constant(k.value) for k in call.keywords}, s.body
        self.fail(s, f"expected `with {word}(...):`")

    def text_constant(self, x: ast.AST) -> str:
        if not isinstance(x, ast.Constant) or not isinstance(x.value, str):
            self.fail(x, "expected a text")
        return x.value

    def lines(self, site: str, body: Any) -> tuple[tuple[tuple[str, Binding], ...], tuple[tuple[str, Operand], ...]]:
        """Bindings of axes, and places of operands."""
        axes: dict[str, Binding] = {}
        operands: dict[str, Operand] = {}
        for s in body:
            if not isinstance(s, ast.Assign) or len(s.targets) != 1 or not isinstance(s.targets[0], ast.Name):
                self.fail(s, "expected `axis = factors` or `operand = place(...)`")
            name, value = s.targets[0].id, s.value
            place = self.word(value.func) if isinstance(value, ast.Call) and not value.args else ""
            if name in (operands if place in ("smem", "reg") else axes):  # a tensor may be called as an axis is
                self.fail(s, f"{name} is bound twice")
            self.stands(Named(site, name, ""), s)
            if isinstance(value, ast.Call) and place in ("smem", "reg"):
                self.stands(Named(site, name, place), value)
                operands[name] = Operand(place, self.keywords(value, site, name))
            elif isinstance(value, ast.Call) and self.word(value.func) == "like" and len(value.args) == 1:
                axes[name] = Like(self.text_constant(value.args[0]))
            else:
                axes[name] = tuple(self.factors(value, site, name))
        return tuple(axes.items()), tuple(operands.items())

    def factors(self, x: ast.AST, site: str, axis: str) -> Iterator[Factor]:
        if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Mult):
            yield from self.factors(x.left, site, axis)
            x = x.right
        if not isinstance(x, ast.Call) or len(x.args) != 1:
            self.fail(x, "expected a factor, such as warp(4)")
        level, size = self.word(x.func), self.constant(x.args[0])
        if level not in (*KERNEL_LEVELS, *SITE_LEVELS):
            self.fail(x, f"unknown level {level!r}; known: {', '.join((*KERNEL_LEVELS, *SITE_LEVELS))}")
        if not isinstance(size, int) or isinstance(size, bool):
            self.fail(x, "the size of a factor is an integer")
        yield Factor(level, size, self.keywords(x, site, axis))

    def keywords(self, x: ast.Call, site: str, line: str) -> Options:
        found = tuple((k.arg or "", self.value(k.value)) for k in x.keywords)
        for word, k in zip(show_options(found), x.keywords, strict=True):
            self.stands(Named(site, line, word), k)
        return found

    def value(self, x: ast.AST) -> Value:
        match x:
            case ast.Name(id=name):
                return Word(name)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return Word(name, tuple(map(self.constant, args)))
            case ast.Tuple(elts=elts):
                return tuple(map(self.value, elts))
        found: Value = self.constant(x)
        return found

    def word(self, x: ast.AST) -> str:
        match x:
            case ast.Name(id=name):
                return name
            case ast.Attribute(value=ast.Name(id=first), attr=second):
                return f"{first}.{second}"
        self.fail(x, "expected a name")
