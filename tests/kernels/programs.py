"""Small torch functions that between them need every way a kernel for a GPU is derived; and what they are lowered
to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.interp.costs import Costs, Count
from terrazzo.interp.torch import call_numpy, to_numpy
from terrazzo.ir.dialects import kernel as k
from terrazzo.options import Options
from terrazzo.pipelines import Lowering, lowering
from terrazzo.targets.cuda.predict import predict

TARGETS = ("sm_75", "sm_80", "sm_90a", "sm_120")


@dataclass(frozen=True)
class Case:
    """A function and what makes its arguments (after seeding)."""

    fn: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Lowered:
    """A function on its way down to one target, with its arguments and the program's inputs as arrays."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    inputs: dict[str, Any]
    lowering: Lowering

    @property
    def program(self) -> k.Program:
        """Its kernels."""
        found: k.Program = self.lowering.at("kernel")
        return found

    @property
    def kernels(self) -> list[k.Kernel]:
        """Without the calls of PyTorch."""
        return [s for s in self.program.steps if isinstance(s, k.Kernel)]

    def simulated(self, program: k.Program | None = None, costs: Costs | None = None) -> list[Any]:
        """What the simulator makes of the program, or of another one."""
        return simulator.run(program or self.program, self.inputs, call=call_numpy, costs=costs)


def lowered(fn: Callable[..., Any], args: tuple[Any, ...], target: str, **options: Any) -> Lowered:
    """A function down to our own kernels for a target."""
    captured = capture(fn, args, {})
    done = lowering(captured.program, Options(target=target, **{"libraries": "never", **options}))
    varying = iter([a for a in args if isinstance(a, torch.Tensor)])
    inputs = {
        b.name: to_numpy(captured.bound[b.name] if b.name in captured.bound else next(varying))
        for b in done.loop.inputs
    }
    return Lowered(fn, args, inputs, done)


@cache
def case(name: str, target: str) -> Lowered:
    """One of `CASES` for a target."""
    torch.manual_seed(0)
    args = CASES[name].make()
    return lowered(CASES[name].fn, args, target, schedules=PINNED.get((name, target), ()))


def programs() -> list[Any]:
    """Every case for every target."""
    return [pytest.param(name, target) for name in CASES for target in TARGETS]


def r(*shape: int) -> torch.Tensor:
    """Normal numbers, the same bits on every machine. Those of `torch.randn` differ with the width of a processor's
    vectors, and how far a simulated sum is from float64 would depend on that.
    """
    seed = int(torch.randint(1 << 31, ()))
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def b(*shape: int) -> torch.Tensor:
    return r(*shape).bfloat16()


def h(*shape: int) -> torch.Tensor:
    return r(*shape).half()


def n(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def swiglu(x: Any, gate: Any, up: Any) -> Any:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def attention(q: Any, keys: Any, values: Any) -> Any:
    scores = (q @ keys.transpose(-1, -2)) * q.shape[-1] ** -0.5
    return torch.softmax(scores, -1) @ values


def rotary(x: Any, cos: Any, sin: Any) -> Any:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def special() -> tuple[torch.Tensor]:
    x = r(6, 300)
    x[1, 7], x[2, 200], x[3], x[4, 5] = torch.nan, torch.inf, -torch.inf, -torch.inf
    return (x,)


CASES: dict[str, Case] = {
    # every point by itself
    "gelu": Case(lambda x: F.gelu(x), lambda: (r(32, 300),)),
    "tanh of an odd shape": Case(lambda x: torch.tanh(x) * 2 - 1, lambda: (r(7, 11, 13),)),
    "broadcast": Case(lambda x, y, z: x * y + z, lambda: (r(5, 1, 37), r(6, 1), r(37))),
    "transposed": Case(lambda x, y: x.t() + y, lambda: (r(70, 130), r(130, 70))),
    "strided": Case(lambda x: x[1::2, ::3].exp(), lambda: (r(33, 100),)),
    "flipped and rolled": Case(lambda x: x.flip(0) + x.roll(3, 1), lambda: (r(9, 40),)),
    "permuted": Case(lambda x: x.permute(2, 0, 1).contiguous() * 2, lambda: (r(6, 10, 21),)),
    "two results": Case(lambda x: (x + 1, x.t() * 2), lambda: (r(12, 50),)),
    "where": Case(lambda x, y: torch.where(x > y, x, y * 2), lambda: (r(3, 129), r(129))),
    "half": Case(lambda x, y: x * y + 1, lambda: (h(4, 96), h(96))),
    "bfloat16": Case(lambda x: F.silu(x) * x, lambda: (b(16, 96),)),
    "integers": Case(lambda x, y: (x * 3 - y) // 2 % 7, lambda: (n(100, 5, 33), n(50, 33))),
    "small integers": Case(lambda x: x * 2 + 1, lambda: (n(100, 65).to(torch.int8),)),
    "bools": Case(lambda x, y: (x > 0) & ~(y > 0), lambda: (r(5, 70), r(70))),
    "conversions": Case(lambda x: x.to(torch.int32).to(torch.float16) + 0.5, lambda: (r(77) * 9,)),
    "doubles": Case(lambda x: x.sin() * x, lambda: (r(130).double(),)),
    "scalar": Case(lambda x: x * 2, lambda: (torch.tensor(3.0),)),
    "one element": Case(lambda x: (x + 1).sum(-1), lambda: (r(1, 1, 1),)),
    "empty": Case(lambda x: x + 1, lambda: (r(0, 4),)),
    "empty sum": Case(lambda x: x.sum(0), lambda: (r(0, 4),)),
    # from elsewhere
    "embedding": Case(lambda i, w: F.embedding(i, w), lambda: (n(50, 7, 9), r(50, 64))),
    "gather": Case(lambda x, i: torch.gather(x, 1, i), lambda: (r(5, 40), n(40, 5, 13))),
    "index": Case(lambda x, i: x[:, i] * 2, lambda: (r(6, 30), n(30, 17))),
    "places that come from long numbers": Case(
        lambda x, i: (x[torch.arange(4096) * 1048573 % 100], i + torch.arange(4096) * 1048573),
        lambda: (r(100, 3), n(50, 1)),
    ),
    "cat": Case(lambda x, y: torch.cat([x, y], 1) * 2, lambda: (r(5, 7), r(5, 9))),
    "padded": Case(lambda x: F.pad(x, (2, 3, 1, 0), value=1.5), lambda: (r(6, 17),)),
    "rotary": Case(rotary, lambda: (r(2, 5, 32), r(5, 32), r(5, 32))),
    "max_pool2d": Case(lambda x: F.max_pool2d(x, 3, 2, 1), lambda: (r(2, 3, 15, 16),)),
    "avg_pool2d": Case(lambda x: F.avg_pool2d(x, 2), lambda: (r(2, 3, 16, 16),)),
    # reductions
    "sum of all": Case(lambda x: x.sum(), lambda: (r(70, 100),)),
    "sum of very many": Case(lambda x: x.sum(), lambda: (r(300, 1000),)),
    "sum of the first axis": Case(lambda x: x.sum(0), lambda: (r(300, 100),)),
    "sum of the last axis": Case(lambda x: x.sum(-1), lambda: (r(37, 301),)),
    "sum of the middle axis": Case(lambda x: x.sum(1), lambda: (r(5, 33, 18),)),
    "sum of short rows": Case(lambda x: x.sum(-1), lambda: (r(900, 5),)),
    "sum of the outer axes": Case(lambda x: x.sum((0, 2)), lambda: (r(6, 10, 35),)),
    "sum of integers": Case(lambda x: x.sum(-1), lambda: (n(9, 4, 100),)),
    "product": Case(lambda x: x.prod(-1), lambda: (r(5, 37),)),
    "largest": Case(lambda x: x.amax(-1), lambda: (r(10, 333),)),
    "argmax": Case(lambda x: x.argmax(-1), lambda: (r(30, 1000),)),
    "argmax of few values": Case(lambda x: x.argmax(-1), lambda: (r(9, 700).round(),)),
    "infinities and NaN": Case(lambda x: (x.amax(-1), x.argmin(-1), torch.logsumexp(x, -1), torch.relu(x)), special),
    "argmin of the first axis": Case(lambda x: x.argmin(0), lambda: (r(77, 40),)),
    "any": Case(lambda x: (x > 2).any(-1), lambda: (r(9, 200),)),
    "mean of bfloat16": Case(lambda x: x.mean(-1), lambda: (b(6, 200),)),
    "variance": Case(lambda x: x.var(-1), lambda: (r(12, 500),)),
    "variance of all": Case(lambda x: x.var(), lambda: (r(150, 200),)),
    "logsumexp": Case(lambda x: torch.logsumexp(x, -1), lambda: (r(5, 77),)),
    "cumsum": Case(lambda x: x.cumsum(-1), lambda: (r(30, 100),)),
    "cumsum of the first axis": Case(lambda x: x.cumsum(0), lambda: (r(30, 40),)),
    "softmax": Case(lambda x: torch.softmax(x, -1), lambda: (r(37, 1000),)),
    "softmax of long rows": Case(lambda x: torch.softmax(x, -1), lambda: (r(2, 9000),)),
    "softmax of the first axis": Case(lambda x: torch.softmax(x, 0), lambda: (r(60, 45),)),
    "log_softmax of bfloat16": Case(lambda x: F.log_softmax(x, -1), lambda: (b(9, 130),)),
    "layer norm": Case(lambda x, w, c: F.layer_norm(x, (512,), w, c), lambda: (r(33, 512), r(512), r(512))),
    "rms norm of prime width": Case(lambda x, w: F.rms_norm(x, (4099,), w), lambda: (r(3, 4099), r(4099))),
    "group norm": Case(lambda x: F.group_norm(x, 2), lambda: (r(4, 8, 5, 5),)),
    "batch norm": Case(lambda x: F.batch_norm(x, None, None, training=True), lambda: (r(4, 8, 5, 5),)),
    "cross entropy": Case(lambda x, i: F.cross_entropy(x, i), lambda: (r(20, 70), n(70, 20))),
    # products
    "linear": Case(lambda x, w, c: F.linear(x, w, c), lambda: (r(32, 100), r(72, 100), r(72))),
    "matmul": Case(lambda x, w: x @ w, lambda: (r(70, 95), r(95, 131))),
    "matmul, first transposed": Case(lambda x, w: x.t() @ w, lambda: (r(95, 70), r(95, 131))),
    "matmul, second transposed": Case(lambda x, w: x @ w.t(), lambda: (r(70, 95), r(131, 95))),
    "matmul, both transposed": Case(lambda x, w: x.t() @ w.t(), lambda: (r(95, 70), r(131, 95))),
    "bmm": Case(lambda x, w: torch.bmm(x, w), lambda: (r(3, 33, 48), r(3, 48, 65))),
    "product of a vector": Case(lambda x, w: F.linear(x, w), lambda: (r(1, 300), r(65, 300))),
    "outer product": Case(lambda x, y: torch.outer(x, y), lambda: (r(40), r(50))),
    "long product": Case(lambda x, w: x @ w, lambda: (r(16, 2048), r(2048, 24))),
    "long product in unlike pieces": Case(lambda x, w: F.linear(x, w), lambda: (r(16, 1184), r(24, 1184))),
    "einsum": Case(lambda x, y: torch.einsum("abc,dbc->ad", x, y), lambda: (r(17, 5, 12), r(20, 5, 12))),
    "product and row sums": Case(lambda x, w: (x @ w).sum(-1), lambda: (r(33, 4), r(4, 50))),
    "linear of bfloat16": Case(lambda x, w: F.linear(x, w), lambda: (b(64, 128), b(72, 128))),
    "matmul of bfloat16": Case(lambda x, w: x @ w, lambda: (b(64, 128), b(128, 128))),
    "ragged matmul of bfloat16": Case(lambda x, w: x @ w, lambda: (b(39, 72), b(72, 136))),
    "transposed matmul of bfloat16": Case(lambda x, w: x.t() @ w, lambda: (b(96, 64), b(96, 72))),
    "transposed matmul of bfloat16 in many steps": Case(lambda x, w: x.t() @ w, lambda: (b(1088, 64), b(1088, 72))),
    "odd matmul of bfloat16": Case(lambda x, w: x @ w, lambda: (b(17, 37), b(37, 21))),
    "matmul of half": Case(lambda x, w: x @ w, lambda: (h(64, 96), h(96, 64))),
    "gelu of linear of half": Case(lambda x, w, c: F.gelu(F.linear(x, w, c)), lambda: (h(40, 64), h(96, 64), h(96))),
    "bmm of half": Case(lambda x, w: torch.bmm(x, w), lambda: (h(2, 32, 64), h(2, 64, 40))),
    "residual": Case(lambda x, w, y: F.linear(x, w) + y, lambda: (b(33, 64), b(64, 64), b(33, 64))),
    "swiglu": Case(swiglu, lambda: (b(32, 64), b(96, 64), b(96, 64))),
    "swiglu of float": Case(swiglu, lambda: (r(20, 48), r(70, 48), r(70, 48))),
    "attention": Case(attention, lambda: (r(2, 17, 32), r(2, 40, 32), r(2, 40, 32))),
    "attention of half": Case(attention, lambda: (h(1, 16, 32), h(1, 40, 32), h(1, 40, 32))),
    "causal attention": Case(
        lambda q, c, v: F.scaled_dot_product_attention(q, c, v, is_causal=True),
        lambda: (r(1, 2, 24, 16), r(1, 2, 24, 16), r(1, 2, 24, 16)),
    ),
    "grouped attention": Case(
        lambda q, c, v: F.scaled_dot_product_attention(q, c, v, enable_gqa=True),
        lambda: (b(1, 4, 1, 32), b(1, 2, 90, 32), b(1, 2, 90, 32)),
    ),
    "conv2d": Case(lambda x, w, c: F.conv2d(x, w, c, padding=1), lambda: (r(2, 5, 9, 10), r(7, 5, 3, 3), r(7))),
    "strided conv2d in groups": Case(
        lambda x, w: F.conv2d(x, w, stride=2, groups=2), lambda: (r(1, 4, 11, 11), r(6, 2, 3, 3))
    ),
    "conv1d": Case(lambda x, w: F.conv1d(x, w, dilation=2), lambda: (r(2, 4, 30), r(8, 4, 3))),
}  # fmt: skip


TURNED = """\
with schedule("mm", target="sm_90a"):
    a0 = grid(1) * block(64)
    a1 = grid({tiles}) * block(16)
    r0 = time({steps}, ring=8) * block(64)
    persistent(132)
    roles(load=warp(1), math=warpgroup(1), registers=(40, 240))
    with site("acc0", on="wgmma.m64n16k16.f32.bf16"):
        a0 = warpgroup(1) * inst.m(64)
        a1 = inst.n(16)
        r0 = reg(4) * inst.k(16)
        x = smem(by="tma", swizzle=128)
        w = smem(by="tma", swizzle=32)
    with site("mm"):
        a1 = time(1, ring=2) * block(16)
        mm = smem(by="tma", swizzle=32)
"""
"""A product of a transposed factor in boxes: tiles of 16 columns, so many, and steps of 64."""

PINNED = {("transposed matmul of bfloat16 in many steps", "sm_90a"): (TURNED.format(tiles=5, steps=17),)}
"""Schedules of some of them for a target, so that they stay as they are whatever is chosen."""


def refuse_others(kernels: list[k.Kernel], counted: Costs) -> None:
    """AssertionError unless the simulator counted what was predicted of kernels, for every statement that does not
    depend on data.
    """
    accesses: dict[Any, Count] = {}
    issues: dict[Any, tuple[int, int]] = {}
    unknown: set[Any] = set()
    for done in map(predict, kernels):
        unknown |= set(done.unknown)
        for key, count in done.costs.accesses.items():
            accesses.setdefault(key, Count()).add(count)
        for s, (warps, lanes) in done.costs.issues.items():
            issues[s] = issues.get(s, (0, 0))[0] + warps, issues.get(s, (0, 0))[1] + lanes
    for s, number in counted.issues.items():
        assert s in unknown or issues[s] == number, f"{s}: {issues[s]} predicted, {number} counted"
    for (s, kind), found in counted.accesses.items():
        assert s in unknown or accesses[s, kind] == found, (
            f"{s}, {kind}: {accesses[s, kind]} predicted, {found} counted"
        )
    assert {key for key, c in accesses.items() if c != Count()} <= counted.accesses.keys()


def budget(target: str) -> int:
    """Bytes of shared memory a block may have."""
    return gpu(target).shared
