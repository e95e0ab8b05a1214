"""Convolutions as a ring of boxes: derived from pinned schedules, checked, simulated by a fair and by adverse
schedulers, and compared with the loops and with PyTorch.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benchmarks.pinned import BOXES, CHAINS, PRODUCTS
from tests.kernels.arrangements import EVERY, Product
from tests.kernels.chains import Chain
from tests.kernels.convolutions import Convolution
from tests.kernels.test_arrangements import SEEDS, derived, inputs, right

from terrazzo.errors import Limitation, UserError
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.ir.parse_plan import parse_plan
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.tile.verify import verify
from terrazzo.targets.cuda.check import check

RELU = {"epilogue": "y[{at}] = {dtype}(max(add(acc0, f32(b[a1])), f32(0.0)))", "extra": "b: bf16[64]"}
RESIDUAL = {"epilogue": "y[{at}] = {dtype}(add(acc0, f32(z[{at}])))", "extra": "z: bf16[2, 64, 8, 8]"}

CASES: dict[str, Convolution] = {
    "two images a block": Convolution(),
    "rows of an image": Convolution((1, 9, 16, 64), box=(1, 8, 16)),
    "four images a block": Convolution((5, 4, 9, 64), box=(4, 4, 8)),
    "more channels than a step": Convolution((2, 7, 7, 160), ring=3),
    "more filters than a block has": Convolution(out=96),
    "128 filters": Convolution((3, 7, 7, 64), out=128, channels=128, ring=3),
    "narrow steps": Convolution((2, 8, 8, 32), step=32),
    "less than a step": Convolution((2, 8, 8, 40)),
    "one warpgroup": Convolution((1, 10, 10, 64), box=(1, 8, 8), groups=1),
    "a box as wide as an image": Convolution((2, 6, 32, 64), box=(1, 4, 32)),
    "a row of 128": Convolution((1, 2, 130, 64), box=(1, 1, 128)),
    "no padding": Convolution((2, 10, 10, 64), pad=0),
    "more padding than taps reach": Convolution((2, 4, 4, 64), pad=3),
    "dilated": Convolution((1, 9, 16, 64), box=(1, 8, 16), dilation=2),
    "five taps": Convolution((1, 8, 8, 64), box=(1, 8, 16), taps=5),
    "one tap": Convolution(taps=1),
    "half": Convolution(dtype="f16"),
    "all warps load": Convolution(roles=False),
    "persistent": Convolution((3, 12, 8, 64), persistent=2),
    "from registers": Convolution((2, 7, 7, 64), staged=""),
    "in rows of 16 bytes": Convolution((3, 7, 7, 64), staged="swizzle=128"),
    "bias and relu": Convolution((2, 7, 7, 64), **RELU),
    "residual": Convolution(**RESIDUAL),
    "cp.async": Convolution((2, 7, 7, 64), by="cp.async", roles=False),
    "strides": Convolution((2, 16, 16, 64), stride=2),
    "strides, no padding": Convolution((2, 16, 18, 64), stride=2, pad=0, box=(4, 4, 8)),
    "one tap, strides": Convolution((2, 16, 16, 64), stride=2, taps=1),
    "strides of three": Convolution((1, 27, 24, 64), stride=3, box=(1, 8, 16)),
    "strides, dilated": Convolution((2, 16, 16, 64), stride=2, dilation=2),
    "strides by cp.async": Convolution((2, 14, 14, 64), stride=2, by="cp.async", roles=False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_convolution_is_right(name: str) -> None:
    right(CASES[name].text)


@pytest.mark.parametrize(
    "name", ["two images a block", "dilated", "more padding than taps reach", "no padding", "strides"]
)
def test_it_is_what_pytorch_computes(name: str) -> None:
    c = CASES[name]
    given = inputs(parse(c.text))
    x, w = (torch.from_numpy(given[n].astype(np.float64)) for n in "xw")
    exact = F.conv2d(x, w, padding=c.padding, dilation=c.dilation, stride=c.stride).numpy()
    for seed in SEEDS:
        (ours,) = simulator.run(derived(c.text), given, seed=seed)
        assert np.abs(ours.astype(np.float64) - exact).max() <= 2.0**-7 * np.abs(exact).max()


BASE = Convolution().text
COPIED = Convolution(by="cp.async", roles=False, staged="").text
SHUFFLED = EVERY["staged by tma"].text.replace("y=bf16[128, 128]", "y=bf16[2, 64, 128]")


@pytest.mark.parametrize(
    ("text", "changes", "reason"),
    [
        (BASE, {" a2 + r1 - 1 >= 0": " a2 + r1 - 2 >= 0"}, "this load has zeros elsewhere too"),
        (
            Convolution((2, 15, 16, 64), stride=2).text,
            {},
            "x_s: TMA takes one axis with a stride of one along each dimension, not r1 + a2 * 2 - 1",
        ),
        (
            Convolution((2, 16, 16, 72), stride=2).text,
            {},
            "x_s: what lies beyond r0 is not beyond the tensor, and TMA would move it",
        ),
        (
            Convolution((1, 8, 16, 64), box=(1, 8, 16)).text,
            {"warpgroup(2) * inst.m(4)": "inst.m(8)", "inst.m(16)": "warpgroup(2) * inst.m(8)"},
            "a3 is wholly inst.m, since an axis outside is",
        ),
        (
            BASE,
            {"a2 = inst.m(8)\n            a3 = inst.m(8)": "a3 = inst.m(8)\n            a2 = inst.m(8)"},
            "the axes of a box are bound in the order of the kernel: a0, a3, a2",
        ),
        (BASE, {"inst.n(64)": "inst.m(1) * inst.n(64)"}, "a0, a1, a2, a3 and a1 do not belong to one factor each"),
        (BASE, {"inst.m(1)": "inst.n(1)"}, "2 axes of acc0 are bound to inst.n"),
        (
            COPIED,
            {"x: bf16[2, 64, 8, 8] @ (4096, 1, 512, 64)": "x: bf16[2, 64, 8, 8]"},
            "x: its rows are a box, and run along a3, one of its axes",
        ),
        (
            BASE,
            {"y[a0, a1, a2, a3]": "y[a0, a1, a3, a2]"},
            "y: its rows and columns are not in the order of the tensor's dimensions",
        ),
        (
            SHUFFLED,
            {"y[a0, a1]": "y[a0 % 2, a0 // 2, a1]"},
            "y: TMA takes one axis with a stride of one along each dimension, not a0 % 2",
        ),
        (
            COPIED,
            {
                "wgmma.m64n64k16": "mma.m16n8k16",
                "warpgroup(2) * inst.m(1)": "warp(2)",
                "a2 = inst.m(8)": "a2 = reg(4) * inst.m(2)",
                "inst.n(64)": "reg(8) * inst.n(8)",
            },
            "only instructions of warpgroups take rows of several axes",
        ),
        (Convolution((2, 8, 8, 60)).text, {}, "TMA: strides"),
    ],
)
def test_what_is_no_box_is_refused(text: str, changes: dict[str, str], reason: str) -> None:
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    with pytest.raises((Limitation, UserError), match=re.escape(reason)):
        derived(text)


@pytest.mark.parametrize("c", [replace(c, persistent=n) for n in (0, 132) for c in BOXES], ids=str)
def test_what_is_timed_can_be_built(c: Convolution) -> None:
    (kernel,) = derived(c.text).steps
    check(derived(c.text), gpu(c.target))
    tiles = math.prod(map(math.ceil, np.divide(c.sizes, c.box))) * c.out // c.channels
    assert kernel.grid == min(c.persistent or tiles, tiles)


@pytest.mark.parametrize("other", [*PRODUCTS, *CHAINS], ids=str)
def test_what_else_is_timed_can_be_built(other: Product | Chain) -> None:
    check(derived(other.text), gpu("sm_90a"))


def test_an_edited_box_is_refused() -> None:
    program = lowering(parse(BASE), Options(target="sm_90a")).at("tile")
    ((number, schedule),), ((_, plan),) = program.schedules, program.plans
    kernel = program.loop.steps[number]
    for line in ("product", "result"):
        text = "\n".join(
            x.replace("box=(a0, a2, a3)", "box=(a0, a3)") if x.strip().startswith(line) else x
            for x in str(plan).splitlines()
        )
        with pytest.raises(UserError, match=re.escape("its box is (a0, a3), and the schedule has (a0, a2, a3)")):
            verify(kernel, schedule, parse_plan(text), gpu("sm_90a"))
