"""Kernels that were written by hand: with roles, rings between them, products of warpgroups, clusters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.kernels.by_hand import FOLDER, MEANING, exact, inputs, program

from terrazzo.interp import kernel as simulator
from terrazzo.ir.text import parse, show

every = pytest.mark.parametrize("name", MEANING)


def test_every_text_is_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.kernel")} == MEANING.keys()


def close(result: Any, best: Any) -> None:
    """Right but for the rounding of the result, and of sums in float32."""
    if result.dtype.kind == "i":
        return np.testing.assert_array_equal(result, best)
    digits = {"bfloat16": 8, "float16": 11, "float32": 20}[result.dtype.name]
    assert np.abs(result.astype(np.float64) - best).max() <= 2.0**-digits * np.abs(best).max()


@every
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_it_computes_what_it_should(name: str, seed: int | None) -> None:
    given = inputs(program(name))
    (result,) = simulator.run(program(name), given, seed=seed)
    close(result, exact(name, given))


@every
def test_it_reads_back(name: str) -> None:
    text = (FOLDER / f"{name}.kernel").read_text()
    assert show(program(name)) == text
    assert show(parse(text)) == text
