"""What holds of the lowerings as a whole, and which fusions pay: `test_catalog` and `test_lowerings` test the rules
themselves.
"""

from __future__ import annotations

import pytest
from tests.harness import assert_same_meaning

from terrazzo.ir.text import parse, show
from terrazzo.rewrite.rule import Log
from terrazzo.rules import torch_to_tensor
from terrazzo.rules.loop.cost import Rates
from terrazzo.rules.loop.fusion.fuse import fuse


def test_every_lowering_says_what_it_computes() -> None:
    silent = [r.name for r in torch_to_tensor.RULES if not r.doc]
    assert not silent, f"these lowerings have no docstring: {silent}"


def test_no_two_lowerings_claim_one_op() -> None:
    claimed: dict[str, str] = {}
    for r in torch_to_tensor.RULES:
        for key in r.keys:
            assert key not in claimed, f"{key} is lowered by {claimed[key]} and {r.name}"
            claimed[key] = r.name


FUSIONS = {
    "a producer is computed where it is read": (
        """
@loop
def f(x: f32[64, 64], y: f32[64, 64]):
    with kernel('s', s=f32[64, 64]):
        for a0 in free(64):
            for a1 in free(64):
                in0 = x[a0, a1]
                in1 = y[a0, a1]
                v0 = add(in0, in1)
                s[a0, a1] = v0
    with kernel('m', m=f32[64]):
        for a0 in free(64):
            for r0 in reduce(64):
                in0 = s[a0, r0]
                acc0 <- max(in0)
            m[a0] = acc0
    return (m,)
""",
        """
@loop
def f(x: f32[64, 64], y: f32[64, 64]):
    with kernel('m', m=f32[64]):
        for a0 in free(64):
            for r0 in reduce(64):
                in0 = x[a0, r0]
                in1 = y[a0, r0]
                v0 = add(in0, in1)
                acc0 <- max(v0)
            m[a0] = acc0
    return (m,)
""",
    ),
    "one kernel stores two results over the same rows": (
        """
@loop
def f(x: f32[64, 64], y: f32[64, 64]):
    with kernel('s', s=f32[64, 64]):
        for a0 in free(64):
            for a1 in free(64):
                in0 = x[a0, a1]
                in1 = y[a0, a1]
                v0 = add(in0, in1)
                s[a0, a1] = v0
    with kernel('m', m=f32[64]):
        for a0 in free(64):
            for r0 in reduce(64):
                in0 = s[a0, r0]
                acc0 <- max(in0)
            m[a0] = acc0
    return (s, m)
""",
        """
@loop
def f(x: f32[64, 64], y: f32[64, 64]):
    with kernel('m', m=f32[64], s=f32[64, 64]):
        for a0 in free(64):
            for r0 in reduce(64):
                in0 = x[a0, r0]
                in1 = y[a0, r0]
                v0 = add(in0, in1)
                acc0 <- max(v0)
            m[a0] = acc0
            for a1 in free(64):
                in2 = x[a0, a1]
                in3 = y[a0, a1]
                v1 = add(in2, in3)
                s[a0, a1] = v1
    return (s, m)
""",
    ),
    "a matmul is not computed again for every reader": (
        """
@loop
def f(x: f32[64, 64], w: f32[64, 64]):
    with kernel('p', p=f32[64, 64]):
        for a0 in free(64):
            for a1 in free(64):
                for r0 in reduce(64):
                    in0 = x[a0, r0]
                    in1 = w[a1, r0]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                p[a0, a1] = acc0
    with kernel('q', q=f32[64, 64]):
        for a0 in free(64):
            for a1 in free(64):
                for r0 in reduce(64):
                    in0 = p[a0, r0]
                    in1 = w[a1, r0]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                q[a0, a1] = acc0
    return (q,)
""",
        None,
    ),
    "a constant leaves a contraction, and its factor is read as it is": (
        """
@loop
def f(x: f32[64, 64], w: f32[64, 64]):
    with kernel('s', s=f32[64, 64]):
        for a0 in free(64):
            for a1 in free(64):
                in0 = x[a0, a1]
                v0 = mul(in0, f32(0.25))
                s[a0, a1] = v0
    with kernel('q', q=f32[64, 64]):
        for a0 in free(64):
            for a1 in free(64):
                for r0 in reduce(64):
                    in0 = s[a0, r0]
                    in1 = w[a1, r0]
                    v0 = mul(f32(2.0), in1)
                    v1 = mul(in0, v0)
                    acc0 <- sum(v1)
                q[a0, a1] = acc0
    return (q,)
""",
        """
@loop
def f(x: f32[64, 64], w: f32[64, 64]):
    with kernel('q', q=f32[64, 64]):
        for a0 in free(64):
            for a1 in free(64):
                for r0 in reduce(64):
                    in0 = x[a0, r0]
                    in1 = w[a1, r0]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                v1 = mul(acc0, f32(0.5))
                q[a0, a1] = v1
    return (q,)
""",
    ),
    "a constant is not tied to what it scales before a contraction could take it": (
        """
@loop
def f(x: f32[64, 64], w: f32[64, 64]):
    with kernel('e', e=f32[64, 64]):
        for a0 in free(64):
            for a1 in free(64):
                in0 = x[a0, a1]
                v0 = exp(in0)
                e[a0, a1] = v0
    with kernel('s', s=f32[64, 64]):
        for a0 in free(64):
            for a1 in free(64):
                in0 = e[a0, a1]
                v0 = mul(in0, f32(0.25))
                s[a0, a1] = v0
    with kernel('q', q=f32[64, 64]):
        for a0 in free(64):
            for a1 in free(64):
                for r0 in reduce(64):
                    in0 = s[a0, r0]
                    in1 = w[a1, r0]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                q[a0, a1] = acc0
    return (q,)
""",
        """
@loop
def f(x: f32[64, 64], w: f32[64, 64]):
    with kernel('e', e=f32[64, 64]):
        for a0 in free(64):
            for a1 in free(64):
                in0 = x[a0, a1]
                v0 = exp(in0)
                e[a0, a1] = v0
    with kernel('q', q=f32[64, 64]):
        for a0 in free(64):
            for a1 in free(64):
                for r0 in reduce(64):
                    in0 = e[a0, r0]
                    in1 = w[a1, r0]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                v1 = mul(acc0, f32(0.25))
                q[a0, a1] = v1
    return (q,)
""",
    ),
}


@pytest.mark.parametrize("name", FUSIONS)
def test_fusion(name: str) -> None:
    before, after = FUSIONS[name]
    program, log = parse(before.lstrip()), Log()
    fused = fuse(program, log, Rates())  # type: ignore[arg-type]
    assert show(fused) == (before if after is None else after).lstrip()
    assert log.events[0].reason, "a choice records the price of both sides"
    for seed in range(3):
        assert_same_meaning(program, fused, seed)
