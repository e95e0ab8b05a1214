"""A smaller program that is still wrong in the same way, for a bug report."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from terrazzo.check.inputs import random_inputs
from terrazzo.check.replay import Wrong, check
from terrazzo.errors import TerrazzoError
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects import tile
from terrazzo.ir.dialects.torch import Aten, Get
from terrazzo.ir.expr import Expr
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.program import Input, Program
from terrazzo.ir.text import parse, show
from terrazzo.ir.types import Type
from terrazzo.ir.verify import verify
from terrazzo.options import Options

SECONDS = 30.0
"""How long a program is shrunk at most."""


def smallest(program: Any, wrong: Wrong, options: Options, seconds: float = SECONDS) -> Any | None:
    """A small program in which the same rule is wrong, or None where that shows in no program that stands alone.

    Looked for first among the operands of the wrong application alone, then in the whole `program`.
    """

    def fails(candidate: Any) -> bool:
        found = check(candidate, random_inputs(candidate), options).wrong
        return found is not None and found.rule == wrong.rule

    for start in (*alone(wrong), program):
        if holds(start, fails):
            return shrink(start, fails, seconds)
    return None


def shrink(program: Any, fails: Callable[[Any], bool], seconds: float = SECONDS) -> Any:
    """A program as small as can be found for which `fails` still holds. Torch, Tile and Kernel IR stay as they are."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        tries = (x for x in _smaller(program) if time.monotonic() < end)
        found = next((x for x in tries if _weight(x) < _weight(program) and holds(x, fails)), None)
        if found is None:
            break
        program = found
    return program


def holds(program: Any, fails: Callable[[Any], bool]) -> bool:
    """Whether a program is valid, can be read back, and fails; whatever is raised on purpose means that it does not."""
    try:
        verify(program)
        return fails(parse(show(program)))
    except TerrazzoError:
        return False


def alone(wrong: Wrong) -> list[Any]:
    """What a wrong application was applied to, as a program whose inputs are the operands."""
    before = wrong.application.before
    kernels = [x for x in before if isinstance(x, l.Kernel)]
    if kernels:
        after = {b for x in wrong.application.after for b in x.writes} or {b for x in kernels for b in x.writes}
        written = [b for x in kernels for b in x.writes]
        return [_loops(wrong.application.subject, kernels, [b for b in written if b in after] or written)]
    if len(before) != 1 or not isinstance(before[0], Aten | t.Value):
        return []
    node = before[0]
    get: Any = Get if isinstance(node, Aten) else t.Get
    results: list[Any] = (
        [get(node, k) for k, r in enumerate(node.type) if r is not None] if isinstance(node.type, tuple) else [node]
    )

    def given(x: Any) -> bool:
        return isinstance(x, t.Value | Input) and not isinstance(x, t.Read) and x is not node and x not in results

    operands = [x for x in topological(results, stop=given) if given(x)]
    inputs: dict[Node, Any] = {x: Input(f"x{n}", x.type) for n, x in enumerate(operands)}  # type: ignore[attr-defined]
    return [_graph("torch" if isinstance(node, Aten) else "tensor", [substitute(r, inputs) for r in results])]


def _weight(program: Any) -> tuple[int, int]:
    """How large a program is: its nodes, then its elements and the length of its text."""
    loops = isinstance(program, l.Program)
    nodes = topological(program.steps if loops else program.results)
    sizes = [kind.numel for x in nodes if isinstance(kind := getattr(x, "type", None), Type)]
    return sum(not isinstance(x, Expr) for x in nodes), sum(s for s in sizes if isinstance(s, int)) + len(show(program))


def _smaller(program: Any) -> Iterator[Any]:
    """Programs that are a little smaller, the much smaller ones first. They may be invalid."""
    if isinstance(program, l.Program):
        yield from _fewer_steps(program)
        yield from _other_extents(program)
        yield from _simpler_terms(program)
    elif isinstance(program, Program) and program.dialect == "tensor":
        yield from _fewer_values(program)
        yield from _other_extents(program)
    elif isinstance(program, tile.Program):
        yield program.loop


def _fewer_values(program: Program) -> Iterator[Program]:
    """One result alone; a value given as an input; a value replaced by an operand of its type."""
    if len(program.results) > 1:
        yield from (_graph("tensor", [r]) for r in program.results)
    values = [x for x in reversed(topological(program.results)) if isinstance(x, t.Value) and isinstance(x.type, Type)]
    for number, x in enumerate(values):
        if not isinstance(x, t.Read):
            same = [
                c
                for c in topological([x])
                if c is not x and getattr(c, "type", None) == x.type and not isinstance(c, t.Read)
            ]
            for new in (Input(f"cut{number}", x.type), *same[::-1]):
                if (replaced := _put(new, x, program.results)) is not None:
                    yield _graph("tensor", replaced)


def _fewer_steps(program: l.Program) -> Iterator[l.Program]:
    """One result alone; a temporary as a result; what a step writes as inputs."""
    if len(program.results) > 1:
        yield from (_loops(program.name, program.steps, [b]) for b in program.results)
    for n, step in enumerate(program.steps):
        yield _loops(program.name, program.steps[: n + 1], step.writes[:1])
        if n + 1 < len(program.steps):
            yield _loops(program.name, (*program.steps[:n], *program.steps[n + 1 :]), program.results)
        if isinstance(step, l.Kernel) and len(step.stores) > 1:
            for s in step.stores:
                new = l.Kernel(step.name, step.axes, tuple(x for x in step.stores if x is not s), step.source)
                yield _loops(program.name, (*program.steps[:n], new, *program.steps[n + 1 :]), program.results)


def _simpler_terms(program: l.Program) -> Iterator[l.Program]:
    """A term replaced by an operand of its type."""
    for n, step in enumerate(program.steps):
        for x in [x for x in topological([step]) if isinstance(x, l.Apply)]:
            for new in x.args:
                if getattr(new, "dtype", None) is x.dtype and (kernels := _put(new, x, [step])) is not None:
                    yield _loops(program.name, (*program.steps[:n], *kernels, *program.steps[n + 1 :]), program.results)


_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")


def _other_extents(program: Any) -> Iterator[Any]:
    """Every multiple of a number in the text becomes that of a smaller one: most extents are products of few."""
    text = show(program)
    for old in sorted({int(x) for x in _NUMBER.findall(text)} - {0, 1}, reverse=True):
        for new in sorted({1, 2, 3, old // 4, old // 2, old - 1} & set(range(1, old))):
            for multiples in (True, False):
                with suppress(*_INVALID):
                    yield parse(_NUMBER.sub(partial(_scaled, old=old, new=new, multiples=multiples), text))


def _scaled(found: re.Match[str], old: int, new: int, multiples: bool) -> str:
    number = int(found[0])
    if number and (number % old == 0 if multiples else number == old):
        return str(number // old * new)
    return str(new - 1) if number == old - 1 and new > 1 else str(number)


def _graph(dialect: str, results: Iterable[Any]) -> Program:
    found = tuple(results)
    return Program(dialect, "small", tuple(x for x in topological(found) if isinstance(x, Input)), found)


def _loops(name: str, steps: Iterable[Any], results: Iterable[l.Buffer]) -> l.Program:
    """The steps that the results need, and what they read from elsewhere as inputs."""
    needed, kept = set(results := tuple(dict.fromkeys(results))), list[Any]()
    for step in reversed(list(steps)):
        if needed & set(step.writes):
            needed |= set(step.reads)
            kept.insert(0, step)
    written = {b for s in kept for b in s.writes}
    inputs = tuple(dict.fromkeys(b for s in kept for b in s.reads if b not in written))
    return l.Program(re.sub(r"\W+", "_", name), inputs, tuple(kept), results)


_INVALID = (TerrazzoError, ValueError, TypeError, AssertionError)
"""What may be raised where a program that was changed at random has no meaning."""


def _put(new: Any, x: Node, roots: Iterable[Node]) -> list[Any] | None:
    """The roots with `new` in the place of `x`, or None where that cannot be."""
    try:
        return [substitute(r, {x: new}) for r in roots]
    except _INVALID:
        return None
