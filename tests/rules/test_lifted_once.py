"""What is lifted again, since only its operands differ, is what it would be without: the same steps, node by node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from tests.fuzz.programs import tensor_programs

from terrazzo.ir.canonical import canonical
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node, transform
from terrazzo.ir.program import Input, Program
from terrazzo.ir.text import parse
from terrazzo.rules.tensor_to_loop import lift as lifting
from terrazzo.rules.tensor_to_loop.alike import Alike
from terrazzo.rules.tensor_to_loop.lift import lift

TWICE = """
@tensor
def f(x: f32[4, 6], y: f32[4, 6], p: i64[4, 6]):
    a_1: f32[4, 6] = add(x, y)
    a_2: f32[4, 6] = add(y, a_1)
    a_3: f32[4, 6] = add(x, x)
    a_4: f32[4, 6] = add(a_3, a_3)
    two: f32[4, 6] = literal(2.0)
    b_1: f32[4, 6] = mul(a_2, two)
    b_2: f32[4, 6] = mul(a_4, two)
    s_1: f32[4, 6] = scan.sum(b_1, axis=0)
    s_2: f32[4, 6] = scan.sum(b_2, axis=0)
    g_1: f32[4, 6] = index_map(lambda i0, i1: s_1[i0, at(p[i0, i1], 6)])
    g_2: f32[4, 6] = index_map(lambda i0, i1: s_2[i0, at(p[i0, i1], 6)])
    return (a_1, g_1, g_2)
"""


class Apart(Alike):
    """Every value is lifted by itself."""

    def kernel(self, value: Node, result: l.Buffer, source: str, make: Callable[[], l.Kernel]) -> l.Kernel:
        return make()


def steps(program: Program, alike: type[Alike], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    with monkeypatch.context() as patched:
        patched.setattr(lifting, "Alike", alike)
        return lift(program).steps


def doubled(program: Program) -> Program:
    """A program beside itself, with inputs of its own."""
    memo: dict[Node, Any] = {i: Input(f"{i.name}_2", i.type) for i in program.inputs}
    inputs = (*program.inputs, *(memo[i] for i in program.inputs))
    again = tuple(transform(r, lambda x: x, memo) for r in program.results)
    names = {**program.names, **{memo[x]: f"{name}_2" for x, name in program.names.items() if x in memo}}
    return Program(program.dialect, program.name, inputs, (*program.results, *again), names)


def assert_same(program: Program) -> None:
    with pytest.MonkeyPatch.context() as patched:
        once, apart = steps(program, Alike, patched), steps(program, Apart, patched)
    assert once == apart
    for step in once:
        if isinstance(step, l.Kernel):  # what is said of a kernel is so
            anew = canonical.__wrapped__(step)  # type: ignore[attr-defined]
            form = canonical(step)
            assert (form.kernel, dict(form.names), form.source) == (anew.kernel, dict(anew.names), anew.source)
            seen = dict.fromkeys(x.buffer for x in step.terms if isinstance(x, l.Load))
            assert step.reads == tuple(seen)


def test_what_is_alike() -> None:
    program = parse(TWICE)
    assert_same(program)
    made: list[str] = []

    class Counting(Alike):
        def kernel(self, value: Node, result: l.Buffer, source: str, make: Callable[[], l.Kernel]) -> l.Kernel:
            return super().kernel(value, result, source, lambda: made.append(result.name) or make())  # type: ignore

    with pytest.MonkeyPatch.context() as patched:
        steps(program, Counting, patched)
    assert sorted(made) == ["a_1", "a_3", "b_1", "g_1", "g_2", "s_1"]  # x + x is no x + y


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(tensor_programs(opaque=False))
def test_random_programs_beside_themselves(program: Program) -> None:
    assert_same(doubled(program))
