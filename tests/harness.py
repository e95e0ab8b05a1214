"""What every rule and every pass is tested with: inputs, and the demand that meaning and text survive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from terrazzo.interp import loop as loop_interp
from terrazzo.interp import tensor as tensor_interp
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.program import Program
from terrazzo.ir.text import parse, show


def random_inputs(inputs: Sequence[Any], seed: int = 0) -> dict[str, Any]:
    """Normal floats, bools and 0 or 1 (indices of anything with extent 2), by name.

    Inputs called `whole…` hold small whole numbers, those called `special…` both infinities and NaN, and those called
    `infinite…` one infinity and a -0.
    """
    rng = np.random.default_rng(seed)
    out: dict[str, Any] = {}
    for i in inputs:
        shape, dtype = i.type.static_shape, i.type.dtype
        if i.name.startswith("whole"):
            data = rng.integers(0 if dtype.kind in ("bool", "uint") else -4, 5, shape)
        else:
            data = rng.standard_normal(shape) if dtype.is_float else rng.integers(0, 2, shape)
        if i.name.startswith("special") and data.size:
            data.flat[rng.integers(0, data.size, 3)] = (np.nan, np.inf, -np.inf)
        if i.name.startswith("infinite") and data.size:
            data.flat[rng.integers(0, data.size, 2)] = (-0.0, rng.choice((np.inf, -np.inf)))
        out[i.name] = np.asarray(data).astype(dtype.numpy)
    return out


def run(program: Program | l.Program, inputs: dict[str, Any], **options: Any) -> list[Any]:
    """The results by the interpreter of the program's IR."""
    interp = loop_interp if isinstance(program, l.Program) else tensor_interp
    return interp.run(program, inputs, **options)  # type: ignore[arg-type]


def assert_same_meaning(before: Any, after: Any, seed: int = 0) -> None:
    """Both programs give the same results on random inputs, up to rounding, judged in float64."""
    inputs = random_inputs(before.inputs, seed)
    for a, b in zip(run(before, inputs, precise=True), run(after, inputs, precise=True), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9, err_msg=show(after))


def assert_round_trip(program: Any) -> None:
    """The text of a program reads back as the same program."""
    text = show(program)
    again = parse(text)
    assert show(again) == text
    if isinstance(program, l.Program):
        assert again == program, text
    else:
        assert again.results == program.results and again.inputs == program.inputs, text
