"""A conversion that a product reads through takes it off the tensor cores: it has a price, and the log says so."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from terrazzo.front.capture import capture
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import topological
from terrazzo.options import Options
from terrazzo.pipelines import Lowering, lowering
from terrazzo.rules.loop.cost import Rates, cost, on_matrix
from terrazzo.targets import target

BF16 = torch.bfloat16


def e(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def lowered(fn: Any, args: tuple[torch.Tensor, ...], arch: str) -> Lowering:
    return lowering(capture(fn, args, {}).program, Options(target=arch, libraries="never"))


def instructions(done: Lowering) -> list[str]:
    """What the products of matrices run on, a kernel each, without the width of a warpgroup's instructions."""
    steps = [s for s in done.at("kernel").steps if isinstance(s, k.Kernel)]
    products = (k.Multiply, k.MultiplyAsync)
    found = [{s.instruction for s in k.walk(step.body) if isinstance(s, products)} for step in steps]
    return [re.sub(r"(wgmma\.m64)n\d+", r"\1", name) for names in found for name in names]


def autocast(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=BF16):
        return F.linear(F.gelu(F.linear(x, w)), v)


def normed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(F.rms_norm(x, (1024,)).to(BF16), w)


LARGE = e(512, 1024), e(1024, 1024)


@pytest.mark.parametrize(("arch", "instruction"), [("sm_80", "mma.m16n8k16.f32"), ("sm_90a", "wgmma.m64k16.f32")])
@pytest.mark.parametrize(
    ("fn", "args", "products"),
    [
        (lambda x, w: x.half() @ w.half(), LARGE, ["f16"]),
        (lambda x, w: x.bfloat16() @ w.bfloat16().T, LARGE, ["bf16"]),
        (normed, (LARGE[0], e(1024, 1024, dtype=BF16)), ["bf16"]),
        (autocast, (e(512, 1024), e(4096, 1024), e(1024, 4096)), ["bf16"] * 2),
    ],
)  # fmt: skip
def test_a_large_product_of_converted_matrices_runs_on_tensor_cores(
    fn: Any, args: tuple[torch.Tensor, ...], products: list[str], arch: str, instruction: str
) -> None:
    done = lowered(fn, args, arch)
    assert instructions(done) == [f"{instruction}.{kind}" for kind in products]
    skipped = [e.reason for e in done.log.events if e.pass_name == "fuse" and not e.fired]
    assert any(reason.endswith("; fused, 1 product leaves the tensor cores") for reason in skipped)


def test_turing_has_matrix_instructions_for_half_alone() -> None:
    assert target("sm_75").rates.matrix == ("f16",) and set(target("sm_90a").rates.matrix) == {"f16", "bf16"}
    assert len(lowered(lambda x, w: x.half() @ w.half(), LARGE, "sm_75").at("kernel").steps) > 1
    assert "product leaves" not in str(lowered(lambda x, w: x.to(BF16) @ w.to(BF16), LARGE, "sm_75").log.events)


def test_where_a_launch_costs_more_the_product_reads_through_and_the_log_says_so() -> None:
    done = lowered(lambda x, w: x.half() @ w.half(), (e(16, 32), e(32, 32)), "sm_90a")
    assert len(done.at("kernel").steps) == 1 and not instructions(done)
    (fired,) = [e for e in done.log.events if e.fired and "tensor cores" in e.reason]
    assert fired.rule == "inline" and fired.reason.endswith("apart; fused, 1 product leaves the tensor cores")


def test_what_produces_a_matrix_converts_it() -> None:
    done = lowered(lambda x, w: F.linear(F.gelu(x).to(BF16), w), (LARGE[0], e(1024, 1024, dtype=BF16)), "sm_90a")
    first, second = done.loop.steps
    assert [b.type.dtype.name for b in first.writes] == ["bf16"] and set(first.writes) <= set(second.reads)


def test_elsewhere_conversions_are_read_through() -> None:
    """Where there are no matrix instructions, and in kernels without products."""
    fn = lambda x, w: x.half() @ w.half()  # noqa: E731
    assert len(lowered(fn, LARGE, "cpu").loop.steps) == 1
    assert len(lowered(lambda x: torch.softmax(x.half(), -1).float() * 2, (e(64, 100),), "sm_90a").loop.steps) == 1


def reduces(kernel: l.Kernel) -> list[Any]:
    return [x for x in topological(kernel.stores) if isinstance(x, l.Reduce)]


RATES = Rates(tensor=0.001, matrix=("f16", "bf16"))


def test_products_on_matrix_instructions_have_their_own_price() -> None:
    halves = e(512, 1024, dtype=BF16), e(1024, 1024, dtype=BF16)
    done = lowered(lambda x, w: x @ w, halves, "sm_90a")
    (kernel,) = done.loop.steps
    points = 512 * 1024 * 1024
    assert cost(kernel, Rates()) - cost(kernel, RATES) == pytest.approx(points * (0.012 - 0.001))
    wide = lowered(lambda x, w: x @ w, LARGE, "sm_90a").loop.steps[0]
    assert cost(wide, Rates()) == cost(wide, RATES)
    vector = lowered(lambda x, w: F.linear(x, w), (e(1, 1024, dtype=BF16), halves[1]), "sm_90a").loop.steps[0]
    assert not any(on_matrix(r, RATES) for r in reduces(vector))
