"""Neighbours that are made of bytes, two at a time: which text has them, and that they are the right numbers."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from terrazzo.front.capture import capture
from terrazzo.interp import kernel as simulator
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.expr import Var
from terrazzo.ir.node import substitute
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.targets.cuda.emit import emit
from terrazzo.targets.cuda.pairs import neighbours_first

bf16 = ml_dtypes.bfloat16
N, K, GROUP = 4096, 4096, 128


def text(fn: Any, *given: Any) -> str:
    done = lowering(capture(fn, given).program, Options(target="sm_90a", libraries="never")).at("kernel")
    return "".join(emit(s)[1] for s in done.steps)


def eight(x: Any, q: Any, s: Any) -> Any:
    return F.linear(x, q.to(x.dtype) * s[:, None])


def four(x: Any, q: Any, s: Any) -> Any:
    w = torch.stack([q & 15, q >> 4], -1).view(N, K // GROUP, GROUP).to(x.dtype) - 8
    return F.linear(x, (w * s[:, :, None]).view(N, K))


def zeros(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.zeros(*shape, dtype=dtype)


CASES = [
    (eight, (zeros(16, K), zeros(N, K, dtype=torch.int8), zeros(N)), {"tz_two_signed", "tz_two_mul"}),
    (four, (zeros(16, K), zeros(N, K // 2, dtype=torch.uint8), zeros(N, K // GROUP)), {"tz_two_small", "tz_two_mul"}),
]


@pytest.mark.parametrize(("fn", "given", "wanted"), CASES, ids=["int8", "int4"])
def test_weights_of_few_bits_are_made_two_at_a_time(fn: Any, given: Any, wanted: set[str]) -> None:
    made = text(fn, *given)
    called = set(re.findall(r"tz_two_\w+", made))
    assert wanted <= called and "tz_round_bf16" not in made


def test_four_bits_are_masked_and_lowered_at_once() -> None:
    fn, given, _ = CASES[1]
    low, high = re.findall(r"tz_two_small<(\w+)>\((.*?), (\w+)\)", text(fn, *given))[:2]
    assert (low[0], low[2]) == (high[0], high[2]) == ("0xf000fu", "0xc308c308u")  # -136
    assert low[1].startswith("tz_two_bytes(") and high[1].endswith(">> 4)")


LOOP = """@kernel
def f(x: u8[64]):
    with launch('y', _grid=1, _warps=1, _resident=1, _reads=[x], y=bf16[64]):
        raw = registers(u8[2])
        made = registers(bf16[2])
        raw[0] = x[lane * 2]
        raw[1] = x[lane * 2 + 1]
        for j in unrolled(2):
{body}
        y[lane * 2] = made[0]
        y[lane * 2 + 1] = made[1]
    return (y,)
"""


def loop(*body: str) -> str:
    (step,) = parse(LOOP.format(body="\n".join(f"            {line}" for line in body))).steps
    return emit(step)[1]


def test_what_is_no_pair_is_written_number_by_number() -> None:
    seven = "v0 = and_(raw[j], u8(127))", "v1 = bf16(v0)"
    assert "tz_two_small" in loop(*seven, "made[j] = v1")
    assert "tz_two" not in loop("v1 = bf16(raw[j])", "made[j] = v1")  # 8 bits are more than the half of a bf16 has
    assert "tz_two" not in loop(*seven, "made[1 - j] = v1")
    more = "v2 = f32(v1)", "v3 = sub(v2, f32(0.5))", "v4 = bf16(v3)"
    assert "tz_two" not in loop(*seven, *more, "made[j] = v4")
    assert "tz_two_small" in loop(*seven, *more[:1], "v3 = sub(v2, f32(64.0))", more[2], "made[j] = v4")


LONG = """@kernel
def f(x: i8[256], s: bf16[4]):
    with launch('y', _grid=1, _warps=1, _resident=1, _reads=[x, s], y=f32[32], z=bf16[256]):
        raw = registers(i8[8])
        move(raw[0], x[lane * 8], 8)
        out = registers(bf16[8])
        sum0 = registers(f32, f32(0.0))
        for j in unrolled(8):
            in0 = s[lane % 4]
            v0 = f32(in0)
            v1 = bf16(raw[j])
            v2 = f32(v1)
            v3 = mul(v2, v0)
            v4 = bf16(v3)
            v5 = f32(v4)
            v6 = mul(v5, v2)
            sum0[()] = add(sum0[()], v6)
            out[j] = v4
        y[lane] = sum0[()]
        move(z[lane * 8], out[0], 8)
    return (y, z)
"""


def test_longer_loops_make_neighbours_first() -> None:
    """In the same order, with the same results; what is the same in every round is loaded once."""
    program: Any = parse(LONG)
    (step,) = program.steps
    (loop,) = (s for s in step.body if isinstance(s, k.For))
    found = neighbours_first(loop)
    assert found is not None
    again = substitute(program, {loop: k.For(Var("once", 1), tuple(found), True)})
    given = np.random.default_rng(1)
    inputs = {"x": given.integers(-128, 128, 256).astype(np.int8), "s": given.normal(size=4).astype(bf16)}
    for ours, theirs in zip(simulator.run(again, inputs), simulator.run(program, inputs), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    written = emit(step)[1]
    assert "tz_two_mul(tz_two_signed(" in written and written.count("s_p[") == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("unrolled(8)", "serial(8)"),
        ("v1 = bf16(raw[j])", "v1 = bf16(raw[7 - j])"),
        ("v4 = bf16(v3)", "v7 = add(v3, f32(0.1))\n            v4 = bf16(v7)"),
        ("out[j] = v4", "raw[j] = i8(1)"),
    ],
)
def test_longer_loops_without_such_neighbours_are_as_they_were(old: str, new: str) -> None:
    assert old in LONG
    (step,) = parse(LONG.replace(old, new)).steps
    (loop,) = (s for s in step.body if isinstance(s, k.For))
    assert neighbours_first(loop) is None or "tz_two_mul" not in emit(step)[1]


def both(low: Any, high: Any) -> Any:
    """Two numbers of 16 bits as words have them."""
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


def numbers(words: Any) -> list[Any]:
    """Words as two numbers of bf16."""
    return [(words >> np.uint32(16 * n)).astype(np.uint16).view(bf16) for n in range(2)]


def test_a_byte_in_a_bf16_is_so_much_more() -> None:
    """What `prelude.cuh` says of all bytes."""
    low, high = (x.ravel().astype(np.uint8) for x in np.meshgrid(np.arange(256), np.arange(256)))
    x = both(low, high)
    small = numbers((x & 0x007F007F) | 0x43004300), numbers(np.full_like(x, 0xC308C308))
    signed = numbers((x & 0x007F007F) | 0x43004300), numbers((x & 0x00800080) | 0xC300C300)
    for n, byte in enumerate((low, high)):
        assert ((small[0][n] + small[1][n]).astype(int) == (byte & 127).astype(int) - 8).all()
        assert ((signed[0][n] + signed[1][n]).astype(int) == byte.view(np.int8)).all()
