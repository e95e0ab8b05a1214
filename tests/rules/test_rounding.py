"""Rules about where values are rounded: what they write, where they keep away, and that the numbers stay."""

from __future__ import annotations

import re

import pytest
from tests.harness import assert_same_meaning

from terrazzo.ir.parse import parse
from terrazzo.ir.show import show
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.precision.narrow import narrow
from terrazzo.rules.loop.precision.relax import relax

QUOTIENT = """
@loop
def f(x: {x}[4], y: {x}[4]):
    with kernel('z', z={z}[4]):
        for a0 in free(4):
            in0 = x[a0]
            in1 = y[a0]
            v0 = div(in0, in1)
            v1 = {z}(v0)
            z[a0] = v1
    return (z,)
"""

TEMPORARY = """
@loop
def f(x: f32[4]):
    with kernel('t', t=f32[4]):
        for a0 in free(4):
            in0 = x[a0]
            v0 = exp(in0)
            t[a0] = v0
    with kernel('z', z=f32[4, 4]):
        for a0 in free(4):
            for a1 in free(4):
                in0 = t[a0]
                v0 = bf16(in0)
                in1 = t[a1]
                v1 = {other}
                v2 = f32(v0)
                v3 = mul(v2, {second})
                z[a0, a1] = v3
    return (z,)
"""


@pytest.mark.parametrize(
    ("x", "z", "fires"), [("f32", "bf16", True), ("f32", "f16", True), ("f64", "f16", False), ("f32", "f64", False)]
)
def test_a_quotient_rounded_at_once_is_relaxed(x: str, z: str, fires: bool) -> None:
    program = parse(QUOTIENT.format(x=x, z=z))
    log = Log()
    after = relax(program, log)
    assert ("approx_div(" in show(after)) == fires == bool(log.events)
    assert ("v0 = div(" in show(after)) != fires
    assert_same_meaning(program, after)


@pytest.mark.parametrize(("term", "fires"), [("mul(in1, v0)", True), ("add(in1, v0)", False)])
def test_a_quotient_in_a_product_rounded_at_once_is_relaxed(term: str, fires: bool) -> None:
    """In a sum most of it may cancel, and its error not."""
    whole = QUOTIENT.format(x="f32", z="bf16").replace("bf16(v0)", "bf16(v2)")
    program = parse(re.sub(r"( +)v0 = div(.*)\n", rf"\1v0 = div\2\n\1v2 = {term}\n", whole))
    after = relax(program, Log())
    assert ("approx_div(" in show(after)) == fires
    assert_same_meaning(program, after)


@pytest.mark.parametrize("all_round", [True, False])
def test_a_temporary_is_rounded_by_its_writer_if_by_every_reader(all_round: bool) -> None:
    other, second = ("bf16(in1)", "f32(v1)") if all_round else ("neg(in1)", "v1")
    program = parse(TEMPORARY.format(other=other, second=second))
    after = narrow(program, Log())
    assert ("t=bf16[4]" in show(after)) == all_round
    assert_same_meaning(program, after)


ACTIVATION = """
@loop
def f(x: f32[64]):
    with kernel('z', z={z}[64]):
        for a0 in free(64):
            in0 = x[a0]
            {terms}
            z[a0] = v9
    return (z,)
"""
SIGMOID = ("v0 = neg(in0)", "v1 = exp(v0)", "v2 = add(v1, f32(1.0))", "v3 = div({top}, v2)")


@pytest.mark.parametrize(
    ("terms", "found", "left"),
    [
        ((*(x.format(top="f32(1.0)") for x in SIGMOID), "v4 = mul(in0, v3)"), "approx_logistic", "exp("),
        ((*(x.format(top="in0") for x in SIGMOID), "v4 = neg(v3)"), "", "exp("),
        ((*(x.format(top="in0") for x in SIGMOID), "v4 = mul(v3, f32(3.0))"), "approx_logistic", "exp("),
        (("v0 = tanh(in0)", "v1 = add(f32(1.0), v0)", "v4 = mul(in0, v1)"), "approx_logistic", "tanh("),
        (("v0 = tanh(in0)", "v4 = mul(in0, v0)"), "", "tanh("),
        (("v0 = ndtr(in0)", "v4 = mul(in0, v0)"), "approx_ndtr", " ndtr("),
        (("v0 = ndtr(in0)", "v4 = add(in0, v0)"), "", " ndtr("),
    ],
)
def test_factors_of_activations_are_relaxed(terms: tuple[str, ...], found: str, left: str) -> None:
    """Not the hyperbolic tangent itself, of which 1 - 2 / (1 + exp(2 x)) leaves nothing near 0."""
    lines = "\n            ".join((*terms, "v9 = bf16(v4)"))
    program = parse(ACTIVATION.format(z="bf16", terms=lines))
    after = relax(program, Log())
    assert (found in show(after)) if found else after.steps == program.steps
    assert (left in show(after)) != bool(found)
    assert_same_meaning(program, after)
