"""Reading plans. The fields of a line's class say what may stand in it."""

from __future__ import annotations

import ast
from functools import cache
from typing import Any, get_type_hints

from terrazzo.ir.node import OPS
from terrazzo.ir.parse_schedule import ScheduleReader
from terrazzo.ir.places import Places, TextLine, located
from terrazzo.ir.plan import AXIS, Line, Plan
from terrazzo.ir.reader import Reader, misplaced, python_tree
from terrazzo.ir.schedule import Schedule, Word

KINDS: dict[str, type[Line]] = {op: kind for op, kind in OPS["plan"].items() if issubclass(kind, Line)}
"""The lines of a plan by the word they begin with."""

_WORDS = {int: "an integer", bool: "True or False", str: "a text"}


def parse_plan(text: str, filename: str = "<plan>") -> Plan:
    """The one plan a text means. Anything wrong is a UserError with line, column and a caret."""
    text, tree = python_tree(text, filename)
    if len(tree.body) != 1:
        raise misplaced(located(filename, text, 1, 1, f"expected one plan, found {len(tree.body)}"))
    return PlanReader(Places(filename, text)).plan(tree.body[0])


def parse_pinned(
    text: str, filename: str = "<schedule>", places: Places | None = None
) -> list[tuple[Schedule, Plan | None]]:
    """The schedules a text means, one after the other, each with the plan that stands below it. `places` is filled with
    where everything stands.
    """
    text, tree = python_tree(text, filename)
    places = Places() if places is None else places
    places.filename, places.text = filename, text
    schedules, plans = ScheduleReader(places), PlanReader(places)
    found: list[tuple[Schedule, Plan | None]] = []
    for s in tree.body:
        if not plans.starts(s):
            found.append((schedules.schedule(s), None))
        elif not found or found[-1][1] is not None:
            plans.fail(s, "a plan stands below the schedule that it completes")
        else:
            found[-1] = found[-1][0], plans.plan(s, found[-1][0])
    return found


class PlanReader(Reader):
    """Reads the statements of a plan."""

    def starts(self, s: ast.stmt) -> bool:
        """Whether a statement is a plan."""
        match s:
            case ast.With(items=[ast.withitem(context_expr=ast.Call(func=ast.Name(id="plan")))]):
                return True
        return False

    def plan(self, s: ast.stmt, schedule: Schedule | None = None) -> Plan:
        """The plan that a statement is: of the schedule above it, where there is one."""
        match s:
            case ast.With(
                items=[
                    ast.withitem(
                        context_expr=ast.Call(
                            func=ast.Name(id="plan"),
                            args=[ast.Constant(value=str() as kernel)],
                            keywords=[ast.keyword(arg="target", value=ast.Constant(value=str() as target))],
                        ),
                        optional_vars=None,
                    )
                ],
                body=body,
            ):
                pass
            case _:
                self.fail(s, 'expected `with plan("kernel", target="..."):`')
        if schedule and (kernel, target) != (schedule.kernel, schedule.target):
            above = f"{schedule.kernel} for {schedule.target}"
            self.fail(s, f"the plan is one of {kernel} for {target}, and the schedule above it one of {above}")
        lines: list[Line] = []
        where: list[ast.stmt] = [s]
        for x in body:
            if not isinstance(x, ast.Pass):
                lines.append(self.line(x, {y.name: y for y in lines if hasattr(y, "name")}))
                where.append(x)
        plan = Plan(kernel, target, tuple(lines))
        for number, line in enumerate(where):
            self.places.add(TextLine(plan, number), line)
        return plan

    def line(self, s: ast.stmt, known: dict[str, Line]) -> Line:
        """One line, which may refer to those `known`."""
        match s:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id=op)) as call):
                pass
            case ast.Expr(value=ast.Call(func=ast.Name(id=op)) as call):
                name = ""
            case _:
                self.fail(s, "expected a line of a plan, such as `all = agent(first=0, warps=4)`")
        if op not in KINDS:
            self.fail(call, f"unknown line {op!r}; known: {', '.join(KINDS)}")
        kind = KINDS[op]
        if bool(name) != (kind._fields[0] == "name"):
            self.fail(s, f"{op} has {'no name' if name else 'a name: `name = ' + op + '(...)`'}")
        if name in known:
            self.fail(s, f"{name} is defined twice")
        if call.args:
            self.fail(call.args[0], f"the fields of {op} are named: {', '.join(_own(kind))}")
        given: dict[str, Any] = {"name": name} if name else {}
        for k in call.keywords:
            if k.arg is None:
                self.fail(k, "** is not allowed")
            if k.arg not in _own(kind):
                self.fail(k, f"{op} has no field {k.arg}; it has {', '.join(_own(kind))}")
            if k.arg in given:
                self.fail(k, f"{k.arg} is given twice")
            given[k.arg] = self.field(kind, k.arg, k.value, known)
        if missing := [f for f in _own(kind) if f not in given and f not in kind._defaults]:
            self.fail(call, f"{op} needs {missing[0]}=")
        found: Line = self.build(s, lambda: kind(**given))
        return found

    def field(self, kind: type[Line], field: str, x: ast.expr, known: dict[str, Line]) -> Any:
        """The value of a field, as its class declares it."""
        declared, refers = types(kind)[field], kind.references.get(field)

        def item(y: ast.expr) -> Any:
            return self.reference(y, refers, known) if refers else self.constant_of(y, field, str)

        if declared == tuple[str, ...]:
            return tuple(map(item, self.items(x, field)))
        if declared == tuple[Word, ...]:
            return tuple(self.part(y, field) for y in self.items(x, field))
        return item(x) if refers else self.constant_of(x, field, declared)

    def items(self, x: ast.expr, field: str) -> list[ast.expr]:
        if not isinstance(x, ast.Tuple):
            self.fail(x, f"{field} is a tuple, such as (a,) or (a, b)")
        return x.elts

    def constant_of(self, x: ast.expr, field: str, kind: Any) -> Any:
        if not isinstance(x, ast.Constant) or type(x.value) is not kind:
            self.fail(x, f"{field} is {_WORDS[kind]}")
        return x.value

    def reference(self, x: ast.expr, to: str, known: dict[str, Line]) -> str:
        """The name of an axis, or of a line above."""
        article = "an" if to[0] in "aeiou" else "a"
        if not isinstance(x, ast.Name):
            self.fail(x, f"expected the name of {article} {to}")
        if to != AXIS and (x.id not in known or known[x.id].op != to):
            names = ", ".join(n for n, line in known.items() if line.op == to) or "none"
            self.fail(x, f"there is no {to} {x.id} above; there is {names}")
        return x.id

    def part(self, x: ast.expr, field: str) -> Word:
        """A part of an axis: `a0(16)`."""
        match x:
            case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=int() as size)], keywords=[]) if (
                size is not True
            ):
                if size < 1:
                    self.fail(x, f"{field}: {name} has at least 1")
                return Word(name, (size,))
        self.fail(x, f"{field} has parts of axes, such as a0(16)")


@cache
def types(kind: type[Line]) -> dict[str, Any]:
    """The types of a line's fields."""
    hints = get_type_hints(kind)
    return {f: hints[f] for f in kind._fields}


def _own(kind: type[Line]) -> tuple[str, ...]:
    """The fields that stand between a line's parentheses."""
    return tuple(f for f in kind._fields if f != "name")
