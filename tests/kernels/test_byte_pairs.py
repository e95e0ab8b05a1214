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
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.targets.cuda.emit import emit

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
