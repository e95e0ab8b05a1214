"""Chains of products that would leave most processors idle are two kernels: what lies between is stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.programs import lowered

from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile.chains import chains
from terrazzo.rules.loop_to_tile.chains.chain import chain
from terrazzo.rules.loop_to_tile.estimate import estimate


def layers(x: Any, w: Any, v: Any) -> Any:
    return torch.sigmoid(x @ w.t()) @ v


def chained(rows: int, middle: int, width: int, dtype: torch.dtype) -> list[l.Kernel]:
    """The chains among the kernels of two layers."""
    args = tuple(torch.empty(s, dtype=dtype, device="meta") for s in ((rows, width), (middle, width), (middle, width)))
    with torch.no_grad():
        done = lowering(capture(layers, args, {}).program, Options(target="sm_90a", libraries="never"))
    return [s for s in done.loop.steps if isinstance(s, l.Kernel) and chain(s) is not None]


@pytest.mark.parametrize(
    ("rows", "middle", "width", "dtype", "one"),
    [
        (256, 4096, 64, torch.float32, False),  # four blocks: 400 us on an H200, and 20 as two kernels by the model
        (512, 256, 256, torch.bfloat16, False),
        (1 << 17, 256, 64, torch.bfloat16, True),
    ],
)
def test_what_fills_no_machine_is_stored(rows: int, middle: int, width: int, dtype: torch.dtype, one: bool) -> None:
    assert bool(chained(rows, middle, width, dtype)) == one


def test_idle_processors_and_dear_functions_count() -> None:
    """Half of the blocks take as long, where they fill half of the machine; tanh takes longer than a maximum."""
    text = """
@loop
def f(q: bf16[{r}, 64], k: bf16[4096, 64], v: bf16[4096, 64]):
    with kernel("y", y=bf16[{r}, 64]):
        for a0 in free({r}):
            for a1 in free(64):
                for r1 in reduce(4096):
                    for r0 in reduce(64):
                        acc1 <- sum(mul(f32(q[a0, r0]), f32(k[r1, r0])))
                    acc0 <- sum(mul(f32(bf16({f})), f32(v[r1, a1])))
                y[a0, a1] = bf16(acc0)
    return (y,)
"""
    machine = gpu("sm_90a")

    def kernel(rows: int, fn: str = "max(acc1, f32(0.0))") -> l.Kernel:
        return parse(text.format(r=rows, f=fn)).steps[0]  # type: ignore[attr-defined, no-any-return]

    found = {r: estimate(kernel(r), machine).time - machine.launch for r in (256, 512, 1 << 15)}
    assert found[256] == pytest.approx(found[512], rel=0.05)
    assert found[1 << 15] < 64 * found[512] / 4
    assert chains.idle(chain(kernel(1 << 15)), machine) == 1.0  # type: ignore[arg-type]
    dear = "mul(tanh(acc1), add(tanh(mul(acc1, f32(0.5))), f32(1.0)))"
    assert estimate(kernel(1 << 15, dear), machine).time > 1.5 * estimate(kernel(1 << 15), machine).time


def test_chains_whose_blocks_bring_more_than_they_multiply_are_two_kernels() -> None:
    """Six rows for each of 1024 pairs of an image and an expert, whose factors each pair's block would bring whole."""

    def mixed(y: Any, up: Any, x: Any) -> Any:
        return torch.einsum("bepd,bmd->bmep", torch.einsum("ebph,edh->bepd", y, up), x)

    sizes = (32, 32, 6, 768), (32, 384, 768), (32, 196, 384)
    args = tuple(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in sizes)
    done = lowering(capture(mixed, args, {}).program, Options(target="sm_90a", libraries="never"))
    assert not [s for s in done.loop.steps if isinstance(s, l.Kernel) and chain(s) is not None]


def gelu_between(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ w) @ v


def causal(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Heads that share keys."""
    kv = k.expand(-1, q.shape[1], -1, -1)
    return torch.nn.functional.scaled_dot_product_attention(q, kv, kv, is_causal=True)


@pytest.mark.parametrize(
    ("fn", "shapes", "axes"),
    [
        (gelu_between, ((16, 64, 49, 64), (64, 256), (256, 64)), 2),
        (causal, ((2, 8, 512, 64), (2, 1, 512, 64)), 4),  # masks ask which token of a head a row is
    ],
)
def test_rows_of_several_axes_are_one(fn: Any, shapes: tuple[tuple[int, ...], ...], axes: int) -> None:
    """Of windows of 49 rows no tile has as many; beside 50,176 rows tiles of 128 leave no rest."""
    given = [torch.empty(s, device="meta", dtype=torch.bfloat16) for s in shapes]
    done = lowering(capture(fn, tuple(given)).program, Options(target="sm_90a", libraries="never"))
    ((_, schedule),) = done.at("tile").schedules
    assert len([a for a, _ in schedule.axes if a.startswith("a")]) == axes


def test_rows_of_windows_are_right() -> None:
    torch.manual_seed(0)
    given = tuple(torch.randn(s).mul(0.2).bfloat16() for s in ((2, 3, 49, 64), (64, 128), (128, 64)))
    (ours,) = lowered(gelu_between, given, "sm_90a").simulated()
    right = gelu_between(*(x.double() for x in given)).numpy()
    assert np.abs(np.asarray(ours, np.float64) - right).max() <= 2**-6 * np.abs(right).max()
