"""Kernels as instances of forms: what is found for some serves all that differ in names only."""

from __future__ import annotations

import pytest

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.instances import SHARED, Asked, Instance, instances
from terrazzo.ir.text import parse
from terrazzo.rules.loop.fusion.fused import merged, viewed

PAIR = """
@loop
def f({x}: f32[4, 3], {y}: f32[4, 3]):
    with kernel('add_{n}', {s}=f32[4, 3]):  # {first}
        for a0 in free(4):
            for a1 in free(3):
                in0 = {x}[a0, a1]
                in1 = {y}[a0, a1]
                v0 = add(in0, in1)
                {s}[a0, a1] = v0
    with kernel('exp_{n}', {e}=f32[4, 3]):  # {last}
        for a0 in free(4):
            for a1 in free(3):
                in0 = {s}[a0, a1]
                v0 = exp(in0)
                {e}[a0, a1] = v0
    return ({s}, {e})
"""
NAMES = {"x": "x", "y": "y", "s": "s", "e": "e", "n": 1, "first": "a.py:1", "last": "a.py:2"}
OTHERS = {"x": "y", "y": "x", "s": "e", "e": "tz0z", "n": 12, "first": "b.py:7", "last": "b.py:8"}


def pair(**names: object) -> list[Instance]:
    found = []
    for s in parse(PAIR.format(**names)).steps:
        assert isinstance(s, l.Kernel)
        found.append(Instance.of(s))
    return found


@pytest.mark.parametrize("ask", [viewed, merged])
def test_what_is_made_again_is_what_would_be_made(ask: object) -> None:
    asked: list[object] = []
    made = Asked(lambda *group: asked.append(group) or ask(*group))  # type: ignore[operator]
    made(*pair(**NAMES))
    first, last = pair(**OTHERS)
    again = made(first, last)
    assert len(asked) == 1
    anew = ask(first.kernel, last.kernel)  # type: ignore[operator]
    assert again.kernel is anew and again == Instance.of(anew)
    assert (again.writes, again.reads) == (anew.writes, anew.reads)


def test_groups_that_share_other_buffers_are_asked_for_themselves() -> None:
    asked: list[object] = []
    alone = Asked(lambda *group: asked.append(group))
    first, last = pair(**NAMES)
    other, _ = pair(**OTHERS)
    for group in ((first, last), (other, last), (first, last)):
        alone(*group)
    given = Asked(lambda first, last, given=frozenset(): asked.append(given))
    given(first, last)
    given(first, last, given=first.writes)
    given(first, last, given=last.writes)
    assert asked[2:] == [frozenset(), frozenset(first.writes), frozenset(last.writes)] and len(asked) == 5


def test_what_is_said_of_a_form_is_said_of_its_instances() -> None:
    _, last = pair(**OTHERS)
    store, load = (b.name for b in (*last.form.writes, *last.form.reads))
    assert last.named(f"{last.form.name} leaves {load} for {store}") == "exp_12 leaves e for tz0z"


STEP = """
@loop
def f(x: f32[64, 9, 32], h: f32[9, 32]):
    with kernel('v', v=f32[9, 32]):
        for a0 in free(9):
            for a1 in free(32):
                in0 = x[{at}, a0, a1]
                in1 = x[{at} + 2, a0, a1]
                v0 = add(in0, in1)
                v[a0, a1] = v0
    with kernel('z', z=f32[9, 32]):
        for a0 in free(9):
            for a1 in free(32):
                in0 = v[{read}
                in1 = x[{at} + {further}, a0, a1]
                v0 = mul(in0, in1)
                z[a0, a1] = v0
    return (v, z)
"""
WHOLE, BEHIND = "a0, a1]", "a0 - 1, a1] if a0 >= 1 else 0"


def step(at: int, read: str = WHOLE, further: int = 1) -> list[Instance]:
    kernels = parse(STEP.format(at=at, read=read, further=further)).steps
    return [Instance.anywhere(s) for s in kernels if isinstance(s, l.Kernel)]


@pytest.mark.parametrize("ask", [viewed, merged])
@pytest.mark.parametrize(("read", "times"), [(WHOLE, 1), (BEHIND, 3)])
def test_steps_of_a_sequence_are_asked_for_once(ask: object, read: str, times: int) -> None:
    """But for those that read nothing before the first: how far that is makes a difference."""
    asked: list[object] = []
    made = Asked(lambda *group: asked.append(group) or ask(*group), Instance.anywhere)  # type: ignore[operator]
    for at in (7, 0, 60):
        first, last = step(at, read)
        assert (first.kernel, last.kernel) == tuple(parse(STEP.format(at=at, read=read, further=1)).steps)
        anew = ask(first.kernel, last.kernel)  # type: ignore[operator]
        assert made(first, last).kernel is anew
    assert len(asked) == times


def test_who_reads_as_far_from_another_is_another_pair() -> None:
    asked: list[object] = []
    made = Asked(lambda *group: asked.append(group))
    for at, further in ((0, 1), (5, 1), (5, 3), (9, 3)):
        made(*step(at, further=further))
    assert len(asked) == 2


@pytest.mark.parametrize(("anywhere", "count"), [(False, 8), (True, 2)])
def test_places_are_parts_of_forms_unless_asked_otherwise(anywhere: bool, count: int) -> None:
    kernels = [s.kernel for at in range(4) for s in step(at)]
    instance = instances(kernels * SHARED, anywhere)
    assert len({instance(s).form for s in kernels}) == count
    assert [instance(s).kernel for s in kernels] == kernels
    alone = instances(kernels, anywhere)
    assert [alone(s).form for s in kernels] == kernels  # too few are alike, wherever they read
