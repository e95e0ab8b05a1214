"""Products of float32 and of what a bfloat16 holds as it is: whole numbers of 8 bits, flags, bfloat16 itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.sites import product
from terrazzo.options import Options
from terrazzo.pipelines import lowering, stages
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.precision.parts import into_parts
from terrazzo.targets.cuda.check import check

KINDS = {torch.int8: 3, torch.uint8: 3, torch.bool: 3, torch.bfloat16: 4}
"""How many products of parts there are beside a factor of a type."""


def given(kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    w = torch.randn(72, 128).bfloat16() if kind is torch.bfloat16 else torch.randint(-100, 100, (72, 128)).to(kind)
    return torch.randn(64, 128), w


def multiplied(x: Any, w: Any) -> Any:
    return x @ w.to(x.dtype).T


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_factor_that_is_exact_has_fewer_parts(kind: torch.dtype, count: int) -> None:
    x, w = given(kind)
    options = Options(target="sm_90a", libraries="never")
    before = next(
        p for q, p, _ in lowering(capture(multiplied, (x, w), {}).program, options).stages if q.name == "parts"
    )
    program = into_parts(before, Log(), count, lambda old, new, beaten: (1.0, ""))
    (p,) = [found for s in program.steps if isinstance(s, l.Kernel) and (found := product(s))]
    assert [len(c.terms) for c in p.sites] == [{1: 1, 2: KINDS[kind] - 1, 3: KINDS[kind]}[count]]
    kernels = stages(program, Options(target="sm_90a"), Log(), ("schedule", "plan", "derive"))[-1][1]
    check(kernels, gpu("sm_90a"))
    args = [x.numpy(), w.float().numpy().astype(before.inputs[1].type.dtype.numpy)]
    inputs = dict(zip((b.name for b in program.inputs), args, strict=True))
    (ours,) = simulator.run(kernels, inputs, seed=3)
    (meant,) = loop.run(program, inputs, precise=True)
    exact = multiplied(x.double(), w.double()).numpy()
    usual = np.linalg.norm(multiplied(x, w).numpy() - exact)
    for found in (ours, meant):
        off = np.linalg.norm(found - exact)
        assert off <= 1.5 * usual if count == 3 else off <= 2.0 ** (-7 * count) * np.linalg.norm(exact)


def test_what_is_not_finite_stays_so() -> None:
    """An infinite bfloat16 meets no part of the other factor that is 0 where the factor is not."""
    x, w = given(torch.bfloat16)
    x[0], w[3, 5], w[4, 6], w[5, 7] = 2.0, torch.inf, torch.nan, -torch.inf
    x[1, 5], x[2] = 0.0, torch.inf
    before = next(
        p
        for q, p, _ in lowering(
            capture(multiplied, (x, w), {}).program, Options(target="sm_90a", libraries="never")
        ).stages
        if q.name == "parts"
    )
    program = into_parts(before, Log(), 3, lambda old, new, beaten: (1.0, ""))
    args = x.numpy(), w.float().numpy().astype(before.inputs[1].type.dtype.numpy)
    with np.errstate(all="ignore"):
        (ours,) = loop.run(program, dict(zip((b.name for b in program.inputs), args, strict=True)))
    torch.testing.assert_close(torch.from_numpy(ours), multiplied(x, w), equal_nan=True, rtol=1e-4, atol=1e-4)
    assert not np.isfinite(ours).all()


@pytest.mark.parametrize("kind", KINDS)
def test_large_ones_are_chosen_for_tensor_cores(kind: torch.dtype) -> None:
    """They ran on CUDA cores, in five times the time by the model."""
    with torch.device("meta"):
        x, w = torch.empty(2048, 1024), torch.empty(2048, 1024, dtype=kind)
    done = lowering(capture(multiplied, (x, w), {}).program, Options(target="sm_90a", fp32="split", libraries="never"))
    assert f"a product of float32 is {KINDS[kind]} of bfloat16" in [e.reason for e in done.log.events]
    assert "wgmma" in str(done.at("tile").schedules[-1][1])
