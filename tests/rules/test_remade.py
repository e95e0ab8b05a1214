"""What is made again where it is needed: products of few steps are, which take hardly longer than what they store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from terrazzo.interp import loop as interpreter
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.text import parse
from terrazzo.ir.verify import problem
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.memory.lifetimes import in_use
from terrazzo.rules.loop.memory.remake import remake
from terrazzo.targets import target

RATES = replace(target("sm_90a").rates, launch=0.0, byte=0.0, fma=0.0, mixed=0.0, load=0.0)
PRODUCT = """
@loop
def f(x: f32[64, {k}], w: f32[{k}, 64]):
    with kernel('y', y=f32[64, 64]):
        for a0 in free(64):
            for a1 in free(64):
                for r0 in reduce({k}):
                    in0 = x[a0, r0]
                    in1 = w[r0, a1]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                y[a0, a1] = acc0
    with kernel('s', s=f32[64]):
        for a0 in free(64):
            for r0 in reduce(64):
                in0 = y[a0, r0]
                acc0 <- max(in0)
            s[a0] = acc0
    with kernel('z', z=f32[64, 64, 4]):
        for a0 in free(64):
            for a1 in free(64):
                for a2 in free(4):
                    for r0 in reduce(64):
                        in0 = s[r0]
                        in1 = x[a0, 0]
                        v0 = mul(in0, in1)
                        acc0 <- max(v0)
                    z[a0, a1, a2] = acc0
    with kernel('t', t=f32[64]):
        for a0 in free(64):
            for r0, r1 in reduce(64, 4):
                in0 = z[a0, r0, r1]
                acc0 <- max(in0)
            t[a0] = acc0
    with kernel('u', u=f32[64]):
        for a0 in free(64):
            in0 = t[a0]
            for r0 in reduce(64):
                in1 = y[a0, r0]
                acc0 <- max(in1)
            v0 = add(in0, acc0)
            u[a0] = v0
    return (u,)
"""


@pytest.mark.parametrize(("steps", "again"), [(2, True), (16, True), (17, False)])
def test_products_of_few_steps_are_made_again(steps: int, again: bool) -> None:
    program = parse(PRODUCT.format(k=steps).strip())
    found = remake(program, Log(), RATES, lambda steps: 0.0, 0)
    assert not problem(found)
    assert any(s.name.startswith("y_again") for s in found.steps) == again
    before, after = (max(in_use(p.steps, p.results)) for p in (program, found))
    assert (after < before - 4 * 64 * 50) == again
    rng = np.random.default_rng(0)
    inputs = {b.name: rng.standard_normal(b.type.static_shape).astype(np.float32) for b in program.inputs}
    for one, other in zip(interpreter.run(program, inputs), interpreter.run(found, inputs), strict=True):
        np.testing.assert_array_equal(one, other)


CHAINED = """
@loop
def f(x: f32[64, 64], w: bf16[4096, 64], v: bf16[4096, 64]):
    with kernel('t', t=f32[64, 64]):
        for a0 in free(64):
            for a1 in free(64):
                in0 = x[a0, a1]
                v0 = exp(in0)
                v1 = sin(v0)
                t[a0, a1] = v1
    with kernel('s', s=f32[64]):
        for a0 in free(64):
            for r0 in reduce(64):
                in0 = t[a0, r0]
                acc0 <- max(in0)
            s[a0] = acc0
    with kernel('y', y=f32[64, 64, 4]):
        for a0 in free(64):
            in0 = s[a0]
            for a1 in free(64):
                for r0 in reduce(4096):
                    in1 = v[r0, a1]
                    v0 = f32(in1)
                    for r1 in reduce(64):
                        in2 = w[a0, r1]
                        v1 = f32(in2)
                        in3 = w[r0, r1]
                        v2 = f32(in3)
                        v3 = mul(v1, v2)
                        acc1 <- sum(v3)
                    v4 = bf16(acc1)
                    v5 = f32(v4)
                    v6 = mul(v5, v0)
                    acc0 <- sum(v6)
                v7 = add(acc0, in0)
                for a2 in free(4):
                    y[a0, a1, a2] = v7
    with kernel('m', m=f32[64]):
        for a0 in free(64):
            for r0, r1 in reduce(64, 4):
                in0 = y[a0, r0, r1]
                acc0 <- max(in0)
            m[a0] = acc0
    with kernel('u', u=f32[64]):
        for a0 in free(64):
            in0 = m[a0]
            for r0 in reduce(64):
                in1 = t[a0, r0]
                acc0 <- max(in1)
            v0 = add(in0, acc0)
            u[a0] = v0
    return (u,)
"""


@pytest.mark.parametrize(("nanoseconds", "again"), [(1.0, False), (1e9, True)])
def test_products_of_products_take_what_is_expected_of_them(nanoseconds: float, again: bool) -> None:
    """By the rates they take so long that whatever is made again is no part of it."""
    program = parse(CHAINED.strip())
    asked: list[str] = []

    def expected(steps: Sequence[l.Kernel | l.Call]) -> float:
        asked.extend(s.name for s in steps)
        return nanoseconds

    found = remake(program, Log(), RATES, expected, 0)
    assert set(asked) == {"y"}
    assert (found.steps != program.steps) == again


STORED = """@loop
def f(x: bf16[512, 64], y: bf16[64, 512], w: bf16[512, 64]):
    with kernel('t', t=bf16[512, 512], u=bf16[512, 512]):
        for a0 in free(512):
            for a1 in free(512):
                for r0 in reduce(64):
                    in0 = x[a0, r0]
                    v0 = f32(in0)
                    in1 = y[r0, a1]
                    v1 = f32(in1)
                    v2 = mul(v0, v1)
                    acc0 <- sum(v2)
                v3 = bf16(acc0)
                v4 = f32(v3)
                v5 = {made}
                v6 = bf16(v5)
                t[a0, a1] = v3
                u[a0, a1] = v6
    with kernel('p', p=f32[512, 64]):
        for a0 in free(512):
            for a1 in free(64):
                for r0 in reduce(512):
                    in0 = u[a0, r0]
                    v0 = f32(in0)
                    in1 = w[r0, a1]
                    v1 = f32(in1)
                    v2 = mul(v0, v1)
                    acc0 <- sum(v2)
                p[a0, a1] = acc0
    with kernel('z', z=f32[512, 64, 8]):
        for a0 in free(512):
            for a1 in free(64):
                for a2 in free(8):
                    for r0 in reduce(64):
                        in0 = p[a0, r0]
                        v0 = add(in0, f32(1.0))
                        acc0 <- max(v0)
                    z[a0, a1, a2] = acc0
    with kernel('s', s=f32[512]):
        for a0 in free(512):
            for r0, r1 in reduce(64, 8):
                in0 = z[a0, r0, r1]
                acc0 <- max(in0)
            s[a0] = acc0
    with kernel('o', o=f32[512, 64]):
        for a0 in free(512):
            in0 = s[a0]
            for a1 in free(64):
                for r0 in reduce(512):
                    in1 = u[r0, a0]
                    v0 = f32(in1)
                    in2 = w[r0, a1]
                    v1 = f32(in2)
                    v2 = mul(v0, v1)
                    acc0 <- sum(v2)
                v3 = add(acc0, in0)
                o[a0, a1] = v3
    return (t, o)
"""


@pytest.mark.parametrize("made, again", [("max(v4, f32(0.0))", True), ("max(acc0, f32(0.0))", False)])
def test_what_a_product_stores_beside_its_sum_is_made_again_of_that(made: str, again: bool) -> None:
    """Products read it, early and late, so it is stored for both; in between what it was made of is enough. What was
    made of the sum before that was rounded is not there any more.
    """
    p = parse(STORED.format(made=made))
    assert isinstance(p, l.Program)
    found = remake(p, Log(), replace(RATES, op=0.0), lambda steps: 0.0, 0)
    clones = [s for s in found.steps if s.name == "t_again"]
    assert [[b.name for b in s.reads] for s in clones] == ([["t"]] if again else []) and not problem(found)
    before, after = (max(in_use(x.steps, x.results)) for x in (p, found))
    assert (after < before) == again
    rng = np.random.default_rng(0)
    inputs = {b.name: rng.integers(-4, 5, b.type.static_shape).astype(np.float32) for b in p.inputs}
    for one, other in zip(interpreter.run(p, inputs), interpreter.run(found, inputs), strict=True):
        np.testing.assert_array_equal(one, other)
