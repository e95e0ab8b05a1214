"""Kernels that store several things become several where most memory is in use: what it saves, where it is left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from terrazzo.hw.gpu import GPUS
from terrazzo.interp import loop as interpreter
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.text import parse
from terrazzo.ir.verify import problem
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.memory import divided
from terrazzo.rules.loop.memory.divided import divide
from terrazzo.rules.loop.memory.lifetimes import in_use
from terrazzo.rules.loop_to_tile.choose import schedule
from terrazzo.rules.loop_to_tile.copies import makers_divided
from terrazzo.targets import target

RATES = target("sm_90a").rates
FREE = replace(RATES, launch=0.0, byte=0.0, op=0.0, load=0.0)
SIZE = 16 * 4


@pytest.fixture(autouse=True)
def any_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """These programs take no longer than a few kernels more."""
    monkeypatch.setattr(divided, "LOSS", 10.0)


def step(name: str, before: str) -> list[str]:
    """The next state, made of all of the one before."""
    return [
        f"    with kernel('{name}', {name}=f32[16]):",
        "        for a0 in free(16):",
        "            for r0 in reduce(16):",
        f"                in0 = {before}[r0]",
        "                v0 = mul(in0, f32(0.5))",
        "                acc0 <- max(v0)",
        f"            {name}[a0] = acc0",
    ]


def read_at_the_end(count: int) -> l.Program:
    """States of a recurrence, of each of which one kernel at the end stores the sum."""
    lines = ["@loop", "def f(x: f32[16]):"]
    for k in range(count):
        lines += step(f"t{k}", f"t{k - 1}" if k else "x")
    lines.append(f"    with kernel('out', {', '.join(f's{k}=f32[1]' for k in range(count))}):")
    for k in range(count):
        lines += [
            f"        for r{k} in reduce(16):",
            f"            in{k} = t{k}[r{k}]",
            f"            acc{k} <- sum(in{k})",
        ]
    lines += [f"        s{k}[0] = acc{k}" for k in range(count)]
    return parse("\n".join([*lines, f"    return ({', '.join(f's{k}' for k in range(count))},)"]))


def made_at_the_start(count: int) -> l.Program:
    """Gates of all steps of a recurrence, which one kernel stores."""
    lines = ["@loop", "def f(x: f32[16], y: f32[16]):"]
    lines.append(f"    with kernel('gates', {', '.join(f'g{k}=f32[16]' for k in range(count))}):")
    lines += ["        for a0 in free(16):", "            in0 = y[a0]"]
    lines += [f"            v{k} = mul(in0, f32({k + 1}.0))" for k in range(count)]
    lines += [f"            g{k}[a0] = v{k}" for k in range(count)]
    for k in range(count):
        lines += step(f"m{k}", f"t{k - 1}" if k else "x")
        lines += [
            f"    with kernel('t{k}', t{k}=f32[16]):",
            "        for a0 in free(16):",
            f"            in0 = m{k}[a0]",
            f"            in1 = g{k}[a0]",
            "            v0 = add(in0, in1)",
            f"            t{k}[a0] = v0",
        ]
    return parse("\n".join([*lines, f"    return (t{count - 1},)"]))


@pytest.mark.parametrize("made", [read_at_the_end, made_at_the_start])
def test_what_waits_for_others_does_not(made: object) -> None:
    """Eight states or gates are there at a time; then hardly more than two."""
    program = made(8)  # type: ignore[operator]
    log = Log()
    found = divide(program, log, FREE, 0)
    before, after = (max(in_use(p.steps, p.results)) for p in (program, found))
    assert before >= 8 * SIZE and after <= 4 * SIZE
    assert not problem(found) and log.events and all(e.rule == "divide" and e.fired for e in log.events)
    assert len({s.name for s in found.steps}) == len(found.steps), "each kernel has a name of its own"
    inputs = {b.name: np.random.default_rng(0).standard_normal(16).astype(np.float32) for b in program.inputs}
    for one, other in zip(interpreter.run(program, inputs), interpreter.run(found, inputs), strict=True):
        np.testing.assert_array_equal(one, other)


def test_it_must_be_worth_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is done below a megabyte, nor for a large part of the time, or for one that memory is not worth."""
    program = read_at_the_end(8)
    assert divide(program, Log(), RATES) is program
    assert divide(program, Log(), replace(RATES, launch=0.0), 0) is not program
    for name, limit in (("RATE", 1e6), ("LOSS", 1e-6)):
        with monkeypatch.context() as m:
            m.setattr(divided, name, limit)
            assert divide(program, Log(), RATES, 0) is program


def test_sums_are_taken_once() -> None:
    """What shares a sum stays together: nothing of a kernel of parts of one sum is divided."""
    text = """
@loop
def f(x: f32[16], u: f32[16]):
    with kernel('t', y=f32[16], z=f32[16]):
        for r0 in reduce(16):
            in0 = x[r0]
            acc0 <- sum(in0)
        for a0 in free(16):
            in1 = u[a0]
            v0 = mul(acc0, in1)
            v1 = add(acc0, in1)
            y[a0] = v0
            z[a0] = v1
    with kernel('m', m=f32[16]):
        for a0 in free(16):
            for r0 in reduce(16):
                in0 = y[r0]
                acc0 <- max(in0)
            m[a0] = acc0
    with kernel('w', w=f32[16]):
        for a0 in free(16):
            in0 = m[a0]
            in1 = z[a0]
            v0 = add(in0, in1)
            w[a0] = v0
    return (w,)
"""
    program = parse(text.strip())
    assert divide(program, Log(), FREE, 0) is program


@pytest.mark.parametrize("seed", range(40))
def test_makers_come_with_parts_in_an_order_that_runs(seed: int) -> None:
    """Whatever reads what: steps that only some kernels need come right before them, and after what they read."""
    rng = np.random.default_rng(seed)
    lines, names = ["@loop", "def f(x: f32[16]):"], ["x"]
    for k in range(14):
        mine = rng.choice(names, size=min(len(names), int(rng.integers(1, 4))), replace=False)
        lines += [f"    with kernel('t{k}', t{k}=f32[16]):", "        for a0 in free(16):"]
        lines += [f"            in{n} = {name}[a0]" for n, name in enumerate(mine)]
        lines += [f"            v{n} = {'neg(in0)' if not n else f'add(v{n - 1}, in{n})'}" for n in range(len(mine))]
        lines.append(f"            t{k}[a0] = v{len(mine) - 1}")
        names.append(f"t{k}")
    p: l.Program = parse("\n".join([*lines, "    return (t13,)"]))
    unread = [s for s in p.steps if not any(s.writes[0] in x.reads for x in p.steps)]
    found = divided._with_makers(p.steps, unread, {*p.inputs})
    assert sorted(s.name for s in found) == sorted(s.name for s in p.steps)
    assert not problem(replace_steps(p, found)), problem(replace_steps(p, found))


def replace_steps(p: l.Program, steps: list[l.Kernel | l.Call]) -> l.Program:
    return l.Program(p.name, p.inputs, tuple(steps), p.results)


MAKER = """@loop
def f(x: f32[1024, 512], w: f32[1024, 512]):
    with kernel('b', a=f32[1024, 512], b=f32[1024, 512]):
        for a0 in free(1024):
            for a1 in free(512):
                in0 = x[a0, a1]
                in1 = w[a0, a1]
                v0 = neg(in0)
                v1 = abs(in1)
                a[a0, a1] = v0
                b[a0, a1] = v1"""
SUM = """
    with kernel('{y}', {y}=f32[512]):
        for a0 in free(512):
            for r0 in reduce(1024):
                in0 = {x}[r0, a0]
                acc0 <- sum(in0)
            {y}[a0] = acc0"""


def test_what_is_made_for_several_is_made_for_each_once_there_are_schedules() -> None:
    p = parse(MAKER + SUM.format(x="a", y="s") + SUM.format(x="b", y="t") + "\n    return (s, t)")
    assert isinstance(p, l.Program)

    def scheduled(p: l.Program, log: Log) -> tile.Program:
        return schedule(p, GPUS["sm_90a"], log)

    done, log = scheduled(p, Log()), Log()
    found = makers_divided(done, log, FREE, scheduled)
    most = [max(in_use(q.loop.steps, q.loop.results)) for q in (done, found)]
    assert most[1] < 0.6 * most[0] and not problem(found)
    assert [e.pass_name for e in log.events if e.rule == "divide"] == ["schedule"]
    assert {n for n, _ in found.schedules} == {n for n, s in enumerate(found.loop.steps) if isinstance(s, l.Kernel)}
    rng = np.random.default_rng(0)
    given = {b.name: rng.integers(-4, 5, b.type.static_shape).astype(np.float32) for b in p.inputs}
    for one, other in zip(interpreter.run(p, given), interpreter.run(found.loop, given), strict=True):
        np.testing.assert_array_equal(one, other)
    assert makers_divided(found, Log(), FREE, scheduled) is found
