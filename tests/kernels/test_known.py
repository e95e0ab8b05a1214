"""What kernels for a GPU get wrong today, each as small as it gets. One that is right again fails here, and moves to the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.programs import lowered, r

from terrazzo.errors import CompilerBug, Limitation
from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop
from terrazzo.interp.torch import call_numpy
from terrazzo.ir.text import parse, show
from terrazzo.options import Options
from terrazzo.pipelines import lowering

SHARED = "lanes (or warps) share the axis of a loop inside a loop whose axis they share already"
SCAN = "the threads share an axis that a scan runs along, where a reduction or a product comes before it"


def known(name: str, fn: Callable[..., Any], *args: torch.Tensor, why: str, raises: Any = AssertionError) -> Any:
    return pytest.param(fn, args, id=name, marks=pytest.mark.xfail(strict=True, reason=why, raises=raises))


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        known("means in every row", lambda x: x.mean(-1).expand(7, 5).contiguous(), r(5, 100), why=SHARED),
        known("means and a transposed tensor", lambda x: x.mean(-1) + x.t(), r(5, 300), why=SHARED, raises=CompilerBug),
        known("a product in every row", lambda x, w: (x @ w).expand(3, 8, 16).contiguous(), r(8, 64), r(64, 16), why=SHARED),
        known("outer product of sums", lambda x, y: x.sum(-1)[:, None] * y.sum(-1), r(5, 300), r(7, 300), why=SHARED),
        known("rows and their sums", lambda x: (x.expand(2, 33).contiguous(), x.expand(2, 33).sum(1)), r(33), why=SHARED),
        known("a product and its square", lambda x: (x @ x.t(), (x @ x.t()) @ (x @ x.t()).t()), r(40, 40), why=SHARED),
        known("sums of rows and of columns", lambda x: x.sum(0) + x.sum(1)[:, None], r(33, 47), why=SHARED),
        known("a scan of sums", lambda x: x.sum(-1).cumsum(0), r(30, 300), why="every block computes one step of a scan, from nothing"),
        known("a scan of many sums", lambda x: x.sum(-1).cumsum(0), r(300, 300), why=SCAN, raises=Limitation),
        known("product and scan down", lambda x, w: (x @ w).cumsum(0), r(32, 64), r(64, 48), why=SCAN, raises=Limitation),
        known("product and scan along", lambda x, w: (x @ w).cumsum(1), r(32, 64), r(64, 48), why=SCAN, raises=Limitation),
    ],
)
def test_it_means_what_its_loops_mean(fn: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> None:
    found = lowered(fn, args, "sm_90a")
    for a, b in zip(found.simulated(), loop.run(found.lowering.at("loop"), found.inputs, call=call_numpy), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.xfail(strict=True, reason="an index from data in a vector access is read back as one of Tensor IR")
def test_a_gather_in_vectors_reads_back() -> None:
    text = "@tensor\ndef f(x: f32[3, 64, 64], ids: i64[3]):\n"
    text += "    v0: f32[3, 64, 64] = index_map(lambda i0, i1, i2: x[at(ids[i0], 3), i1, i2])\n    return (v0,)\n"
    program = lowering(parse(text), Options(target="sm_75")).at("kernel")
    assert parse(show(program)) == program


@pytest.mark.xfail(strict=True, raises=ZeroDivisionError, reason="a loop of no steps has no digits")
def test_a_scan_of_nothing() -> None:
    text = "@tensor\ndef f(x: f32[0]):\n    v0: f32[0] = scan.sum(x, axis=0)\n    return (v0,)\n"
    program = lowering(parse(text), Options(target="sm_90a")).at("kernel")
    assert simulator.run(program, {"x": np.zeros(0, np.float32)})[0].shape == (0,)
