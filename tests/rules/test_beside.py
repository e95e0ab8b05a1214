"""What is stored beside what it is made of is made by who reads it, where all who read it can."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from terrazzo.front.capture import capture
from terrazzo.interp import loop as interpreter
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.memory.beside import read_beside
from terrazzo.targets import target

RATES = target("sm_90a").rates
HEAD = """@loop
def f(x: f32[2048, 64], y: f32[64, 512], w: f32[512, 64]):
    with kernel('t', t=f32[2048, 512], u=f32[2048, 512]):
        for a0 in free(2048):
            for a1 in free(512):
                for r0 in reduce(64):
                    in0 = x[a0, r0]
                    in1 = y[r0, a1]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                v1 = max(acc0, f32(0.0))
                v2 = exp(acc0)
                t[a0, a1] = {kept}
                u[a0, a1] = v1"""
SUM = """
    with kernel('z', z=f32[2048]):
        for a0 in free(2048):
            for r0 in reduce(512):
                in0 = u[a0, r0]
                acc0 <- sum(in0)
            z[a0] = acc0"""
PRODUCT = """
    with kernel('z', z=f32[2048, 64]):
        for a0 in free(2048):
            for a1 in free(64):
                for r0 in reduce(512):
                    in0 = u[a0, r0]
                    in1 = w[r0, a1]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                z[a0, a1] = acc0"""


def stored(kept: str, tail: str, results: str = "t, z", worth: int = 1 << 20) -> set[str]:
    """What is stored where a kernel stores what is `kept` of a product, and of that what is above zero; and who reads
    that, the `tail`.
    """
    program = parse(HEAD.format(kept=kept) + tail + f"\n    return ({results},)\n")
    assert isinstance(program, l.Program)
    return {b.name for s in read_beside(program, Log(), RATES, kept=(), worth=worth).steps for b in s.writes}


def test_who_reads_what_is_stored_beside_what_it_is_made_of_makes_it() -> None:
    assert stored("acc0", SUM) == {"t", "z"}


@pytest.mark.parametrize(
    "why, kept, tail, results, worth",
    [
        ("a product reads it", "acc0", PRODUCT, "t, z", 1),
        ("so does one beside another", "acc0", SUM + PRODUCT.replace("z", "o"), "t, z, o", 1),
        ("it is a result", "acc0", SUM, "t, u, z", 1),
        ("it is made of something else", "v2", SUM, "t, z", 1),
        ("it is small", "acc0", SUM, "t, z", 8 << 20),
    ],
)
def test_it_stays_stored(why: str, kept: str, tail: str, results: str, worth: int) -> None:
    assert "u" in stored(kept, tail, results, worth), why


IMAGES = """@loop
def f(x: f32[8, 64, 4096], y: f32[8, 64, 4096]):
    with kernel('s', s=f32[8, 64, 4096]):
        for a0 in free(8):
            for a1 in free(64):
                for a2 in free(4096):
                    in0 = x[a0, a1, a2]
                    in1 = y[a0, a1, a2]
                    v0 = add(in0, in1)
                    s[a0, a1, a2] = v0
    with kernel('p', p=bf16[8, 4096, 64], q=bf16[8, 4096, 64]):
        for a0 in free(8):
            for a1 in free(4096):
                for a2 in free(64):
                    in0 = s[a0, a2, a1]
                    v0 = bf16(in0)
                    v1 = f32(v0)
                    v2 = sub(in0, v1)
                    v3 = bf16(v2)
                    p[a0, a1, a2] = v0
                    q[a0, a1, a2] = v3"""
LATER = """
    with kernel('z', z=f32[8, 64]):
        for a0 in free(8):
            for a1 in free(64):
                for r0 in reduce(4096):
                    in0 = s[a0, a1, r0]
                    v0 = exp(in0)
                    acc0 <- sum(v0)
                z[a0, a1] = acc0"""


@pytest.mark.parametrize(
    "tail, results, kept, names",
    [("", "p, q", (), {"p", "q"}), ("", "p, q", ("s",), {"s", "p", "q"}), (LATER, "p, q, z", (), {"s", "p", "q", "z"})],
)
def test_what_only_parts_are_stored_of_is_not(tail: str, results: str, kept: tuple[str, ...], names: set[str]) -> None:
    """Nor is it made by another that does more with it; and what the user wants stored is."""
    program = parse(IMAGES + tail + f"\n    return ({results},)\n")
    assert isinstance(program, l.Program)
    done = read_beside(program, Log(), RATES, kept)
    assert {b.name for s in done.steps for b in s.writes} == names
    rng = np.random.default_rng(0)
    inputs = {b.name: rng.standard_normal(b.type.static_shape).astype(np.float32) for b in program.inputs}
    for one, other in zip(interpreter.run(program, inputs), interpreter.run(done, inputs), strict=True):
        np.testing.assert_array_equal(one, other)


LONGER = """
    with kernel('t', t=f32[8, 64, 4096], w=f32[8, 64, 4096]):
        for a0 in free(8):
            for a1 in free(64):
                for a2 in free(4096):
                    in0 = x[a0, a1, a2]
                    v0 = exp(in0)
                    v1 = sin(in0)
                    t[a0, a1, a2] = v0
                    w[a0, a1, a2] = v1"""


def test_nothing_else_lives_longer_for_it_than_it_did() -> None:
    """Of two temporaries, which nobody else reads: they would take twice as much until parts are stored."""
    of_two = IMAGES.replace("x[a0, a1, a2]", "t[a0, a1, a2]").replace("y[a0, a1, a2]", "w[a0, a1, a2]")
    head, *rest = of_two.split("\n    with kernel")
    between = LATER.replace("s[a0, a1, r0]", "x[a0, a1, r0]").replace("\n    with kernel", "")
    steps = "".join("\n    with kernel" + s for s in (*rest[:1], between, *rest[1:]))
    program = parse(head + LONGER + steps + "\n    return (p, q, z)\n")
    assert isinstance(program, l.Program)
    assert read_beside(program, Log(), RATES).steps == program.steps


def test_a_chain_of_skips_stores_no_activation() -> None:
    """Residual blocks of float32: each convolution's sum is kept for a skip, and its ReLU for the next one."""

    def blocks(x: Any, *weights: Any) -> Any:
        for w in weights:
            x = x + F.conv1d(F.leaky_relu(x), w, padding=1)
        return x

    shapes = ((4, 128, 8192), (128, 128, 3), (128, 128, 3), (128, 128, 3))
    program = capture(blocks, tuple(torch.empty(s, device="meta") for s in shapes)).program
    done = lowering(program, Options(target="sm_90a", fp32="split", libraries="never"))
    fired = [e.subject for e in done.log.events if e.rule == "read_beside" and e.fired]
    assert fired and {b.name for s in done.loop.steps for b in s.writes}.isdisjoint(fired)
