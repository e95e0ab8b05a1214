"""Whether products of parts are worth it is asked once of those that differ only in what they read."""

from __future__ import annotations

import math
from typing import Any

import pytest

from terrazzo.hw.gpu import GPUS
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.text import parse
from terrazzo.rules.loop_to_tile.products import precision
from terrazzo.rules.loop_to_tile.products.apart import products_apart

COUNT = 6
SUM = """
                for r{k} in reduce(256):
                    in{a} = x{k}[a0, r{k}]
                    v{a} = f32(in{a})
                    in{b} = w{k}[a1, r{k}]
                    v{b} = f32(in{b})
                    v{c} = mul(v{a}, v{b})
                    acc{k} <- sum(v{c})"""


def sum_of_products(count: int) -> l.Kernel:
    """A kernel that adds up so many products, each of two tensors of its own."""
    inputs = ", ".join(f"{x}{k}: bf16[256, 256]" for k in range(count) for x in "xw")
    sums = "".join(SUM.format(k=k, a=3 * k, b=3 * k + 1, c=3 * k + 2) for k in range(count))
    total = "acc0"
    for k in range(1, count):
        sums += f"\n                t{k} = add({total}, acc{k})"
        total = f"t{k}"
    text = f"""@loop
def f({inputs}):
    with kernel('y', y=f32[256, 256]):
        for a0 in free(256):
            for a1 in free(256):{sums}
                y[a0, a1] = {total}
    return (y,)
"""
    (kernel,) = parse(text).steps
    return kernel  # type: ignore[no-any-return]


def test_products_of_a_sum_that_are_alike_are_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = sum_of_products(COUNT)
    assert len(products_apart(kernel)) >= COUNT
    asked: list[l.Kernel] = []

    def multiplied(x: l.Kernel, *rest: Any) -> tuple[float, str]:
        asked.append(x)
        return 100.0 if x is kernel else 1.0, ""

    monkeypatch.setattr(precision, "_multiplied", multiplied)
    time, why = precision._in_parts(kernel, GPUS["sm_90a"], lambda made: "", math.inf)
    assert (time, why) == (float(len(products_apart(kernel))), "")
    assert len(asked) < COUNT
