"""What kernels for a GPU once got wrong, each as small as it gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.programs import lowered, r

from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop
from terrazzo.interp.torch import call_numpy
from terrazzo.ir.text import parse, show
from terrazzo.options import Options
from terrazzo.pipelines import lowering


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        pytest.param(lambda x: x.mean(-1).expand(7, 5).contiguous(), (r(5, 100),), id="means in every row"),
        pytest.param(lambda x: x.mean(-1) + x.t(), (r(5, 300),), id="means and a transposed tensor"),
        pytest.param(
            lambda x, w: (x @ w).expand(3, 8, 16).contiguous(),
            (
                r(8, 64),
                r(64, 16),
            ),
            id="a product in every row",
        ),
        pytest.param(
            lambda x, y: x.sum(-1)[:, None] * y.sum(-1),
            (
                r(5, 300),
                r(7, 300),
            ),
            id="outer product of sums",
        ),
        pytest.param(
            lambda x: (x.expand(2, 33).contiguous(), x.expand(2, 33).sum(1)), (r(33),), id="rows and their sums"
        ),
        pytest.param(lambda x: (x @ x.t(), (x @ x.t()) @ (x @ x.t()).t()), (r(40, 40),), id="a product and its square"),
        pytest.param(lambda x: x.sum(0) + x.sum(1)[:, None], (r(33, 47),), id="sums of rows and of columns"),
        pytest.param(lambda x: x.sum(-1).cumsum(0), (r(30, 300),), id="a scan of sums"),
        pytest.param(lambda x: x.sum(-1).cumsum(0), (r(300, 300),), id="a scan of many sums"),
        pytest.param(
            lambda x, w: (x @ w).cumsum(0),
            (
                r(32, 64),
                r(64, 48),
            ),
            id="product and scan down",
        ),
        pytest.param(
            lambda x, w: (x @ w).cumsum(1),
            (
                r(32, 64),
                r(64, 48),
            ),
            id="product and scan along",
        ),
    ],
)
def test_it_means_what_its_loops_mean(fn: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> None:
    found = lowered(fn, args, "sm_90a")
    for a, b in zip(found.simulated(), loop.run(found.lowering.at("loop"), found.inputs, call=call_numpy), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


def test_a_gather_in_vectors_reads_back() -> None:
    text = "@tensor\ndef f(x: f32[3, 64, 64], ids: i64[3]):\n"
    text += "    v0: f32[3, 64, 64] = index_map(lambda i0, i1, i2: x[at(ids[i0], 3), i1, i2])\n    return (v0,)\n"
    program = lowering(parse(text), Options(target="sm_75")).at("kernel")
    assert parse(show(program)) == program


def test_a_scan_of_nothing() -> None:
    text = "@tensor\ndef f(x: f32[0]):\n    v0: f32[0] = scan.sum(x, axis=0)\n    return (v0,)\n"
    program = lowering(parse(text), Options(target="sm_90a")).at("kernel")
    assert simulator.run(program, {"x": np.zeros(0, np.float32)})[0].shape == (0,)
