"""Kernels with several reductions of any lengths, of factors that lie in any way: each is divided among threads by
itself, though all of them walk an axis called r0.
"""

from __future__ import annotations

import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop as interpreter
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering

LENGTHS = (1, 2, 3, 5, 8, 17, 31, 32, 33, 63, 64, 100, 127, 128, 257, 384, 500, 1000, 1024, 1057, 2048, 4096, 8192)
TYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
CASES = 100
EVERY = 5
"""As many tests as share the cases."""


def term(draw: random.Random) -> tuple[str, dict[str, tuple[int, ...]], str]:
    """The text of a kernel, the shapes of its inputs, and their type."""
    rows, columns, dtype = draw.choice((1, 2, 3, 5)), draw.choice((0, 0, 3, 8, 33)), draw.choice([*TYPES, "bf16"])
    shapes: dict[str, tuple[int, ...]] = {}
    lines, total = [], ""
    for k in range(draw.randint(2, 4)):
        length = draw.choice(LENGTHS)
        inner = draw.choice([n for n in LENGTHS if n <= length])
        match draw.choice(("rows", "columns", "matrices")):
            case "rows":
                one, other, shapes[f"x{k}"], shapes[f"y{k}"] = "r0", "a0, r0", (length,), (rows, length)
            case "columns":
                one, other, shapes[f"x{k}"], shapes[f"y{k}"] = "r0", "r0, a0", (length,), (length, rows)
            case _:
                outer, one = length // inner, f"r0 // {inner}, r0 % {inner}"
                length, other = outer * inner, f"a0, {one}"
                shapes[f"x{k}"], shapes[f"y{k}"] = (outer, inner), (rows, outer, inner)
        lines += [
            f"            for r0 in reduce({length}):",
            f"                p{k} = f32(x{k}[{one}])",
            f"                q{k} = f32(y{k}[{other}])",
            f"                acc{k} <- {draw.choice(('sum', 'sum', 'max'))}(mul(p{k}, q{k}))",
        ]
        if k:
            lines.append(f"            t{k} = add({total}, acc{k})")
        total = f"t{k}" if k else "acc0"
    if columns:
        shapes["z"] = rows, columns
        lines += [
            f"            for a1 in free({columns}):",
            f"                s[a0, a1] = mul(f32(z[a0, a1]), {total})",
        ]
    else:
        lines.append(f"            s[a0] = {total}")
    given = ", ".join(f"{name}: {dtype}{list(shape)}" for name, shape in shapes.items())
    shape = [rows, columns] if columns else [rows]
    head = f"@loop\ndef f({given}):\n    with kernel('s', s=f32{shape}):\n        for a0 in free({rows}):\n"
    text = head + "\n".join(lines) + "\n    return (s,)\n"
    return (text if dtype != "f32" else text.replace("f32(x", "(x").replace("f32(y", "(y")), shapes, dtype


@pytest.mark.parametrize("part", range(EVERY))
@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_each_is_reduced_once(target: str, part: int) -> None:
    for number in range(part, CASES, EVERY):
        text, shapes, dtype = term(random.Random(number))
        program = parse(text)
        rng = np.random.default_rng(number)
        given: dict[str, Any] = {n: rng.standard_normal(shape).astype(TYPES[dtype]) for n, shape in shapes.items()}
        (right,) = (x.astype(np.float64) for x in interpreter.run(program, given))
        kernels = lowering(program, Options(target=target)).at("kernel")
        (found,) = (x.astype(np.float64) for x in simulator.run(kernels, given))
        assert np.abs(found - right).max() <= 1e-3 * (1 + np.abs(right).max()), text
