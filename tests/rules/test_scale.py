"""Constants leave contractions, as do factors that are the same in all steps, and nothing else moves."""

from __future__ import annotations

import numpy as np
import pytest

from terrazzo.interp import loop
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.text import parse, show
from terrazzo.rules.loop.cost import on_matrix
from terrazzo.rules.loop.fusion.scale import scale_after
from terrazzo.targets import target

TEXT = """@loop
def f(x: f32[3, 5], y: f32[5, 4]):
    with kernel('z', z=f32[3, 4]):
        for a0 in free(3):
            for a1 in free(4):
                for r0 in reduce(5):
                    in0 = x[a0, r0]
                    v0 = mul(in0, f32(0.375))
                    in1 = y[r0, a1]
                    v1 = mul(v0, in1)
                    acc0 <- sum(v1)
                z[a0, a1] = acc0
    return (z,)
"""


def scaled(text: str) -> tuple[l.Program, l.Program]:
    program = parse(text)
    (kernel,) = program.steps
    return program, l.Program(program.name, program.inputs, (scale_after(kernel),), program.results)


def test_a_constant_leaves_a_contraction() -> None:
    before, after = scaled(TEXT)
    text = show(after)
    assert text.index("acc0 <- sum") < text.index("f32(0.375)")
    rng = np.random.default_rng(0)
    inputs = {b.name: rng.standard_normal(b.type.static_shape).astype(np.float32) for b in before.inputs}
    for a, b in zip(loop.run(before, inputs, precise=True), loop.run(after, inputs, precise=True), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


SCALE = "                    v0 = mul(in0, f32(0.375))\n"


def test_a_factor_of_one_is_none() -> None:
    _, after = scaled(TEXT.replace("f32(0.375)", "f32(1.0)"))
    assert after == scaled(TEXT.replace("mul(v0, in1)", "mul(in0, in1)").replace(SCALE, ""))[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("f32(0.375)", "f32(0.0)"),  # infinities would become NaN in other places
        ("f32(0.375)", "f32(1e30)"),  # what is large overflows
        ("f32(0.375)", "f32(1e-06)"),  # sums that are scaled to little may be large
        ("f32(0.375)", "f32(-0.375)"),  # a sum that is 0 would become -0
        ("acc0 <- sum", "acc0 <- max"),
        ("mul(in0, f32(0.375))", "add(in0, f32(0.375))"),
    ],
)
def test_what_stays(old: str, new: str) -> None:
    assert old in TEXT
    before, after = scaled(TEXT.replace(old, new))
    assert after == before


SHARED = """@loop
def f(x: f32[3], y: f32[5, 4]):
    with kernel('z', z=f32[3, 4]):
        for a0 in free(3):
            in0 = x[a0]
            for a1 in free(4):
                for r0 in reduce(5):
                    in1 = y[r0, a1]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                z[a0, a1] = acc0
    return (z,)
"""


def test_a_factor_that_no_step_moves_leaves_a_sum_that_is_shared() -> None:
    before, after = scaled(SHARED)
    (kernel,) = after.steps
    assert isinstance(kernel, l.Kernel)
    (total,) = kernel.carried
    assert total.free == {kernel.axes[1]}  # one sum for all rows
    rng = np.random.default_rng(0)
    inputs = {b.name: rng.standard_normal(b.type.static_shape).astype(np.float32) for b in before.inputs}
    for a, b in zip(loop.run(before, inputs, precise=True), loop.run(after, inputs, precise=True), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("y[r0, a1]", "y[r0, a0]"),  # all sums are different
        ("acc0 <- sum", "acc0 <- max"),
        ("mul(in0, in1)", "add(in0, in1)"),
    ],
)
def test_what_is_not_shared_stays(old: str, new: str) -> None:
    assert old in SHARED
    before, after = scaled(SHARED.replace(old, new))
    assert after == before


ROUNDED = """@loop
def f(x: bf16[3, 5], y: bf16[5, 4]):
    with kernel('z', z=f32[3, 4]):
        for a0 in free(3):
            for a1 in free(4):
                for r0 in reduce(5):
                    in0 = x[a0, r0]
                    v0 = f32(in0)
                    v1 = mul(v0, f32(0.375))
                    v2 = bf16(v1)
                    v3 = f32(v2)
                    in1 = y[r0, a1]
                    v4 = f32(in1)
                    v5 = mul(v3, v4)
                    acc0 <- sum(v5)
                z[a0, a1] = acc0
    return (z,)
"""


def test_what_is_scaled_and_rounded_again_is_multiplied_as_it_was() -> None:
    _, after = scaled(ROUNDED)
    text = show(after)
    assert text.index("acc0 <- sum") < text.index("f32(0.375)")
    assert "bf16(v" not in text
    (kernel,) = after.steps
    assert isinstance(kernel, l.Kernel)
    (product,) = kernel.carried
    assert on_matrix(product, target("sm_90a").rates)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x: bf16", "x: f32"),  # rounded for the first time
        ("mul(v0, f32(0.375))", "add(v0, f32(0.375))"),
    ],
)
def test_what_is_rounded_otherwise_stays(old: str, new: str) -> None:
    assert old in ROUNDED
    before, after = scaled(ROUNDED.replace(old, new))
    assert after == before
