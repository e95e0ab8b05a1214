"""The kernels that are mutated: derived ones of every shape, on small inputs, and all that were written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from terrazzo.hw.gpu import Gpu, gpu
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import tile
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.tile_to_kernel.lower import program as of_plans
from tests.kernels import by_hand
from tests.kernels.arrangements import Product
from tests.kernels.chains import DOWN, GROUPS, TMA, Chain
from tests.kernels.convolutions import Convolution
from tests.kernels.programs import TURNED, attention, b, h, lowered, n, r, swiglu
from tests.kernels.reduced import Reduced, losses


@dataclass(frozen=True)
class Subject:
    """A program of kernels, inputs for it, and the GPU it is for."""

    name: str
    program: k.Program
    inputs: dict[str, Any]
    gpu: Gpu


def spread(rows: int, columns: int) -> torch.Tensor:
    """Normal numbers, one of which is far above the others in every third row: exp() of a sum without it does not
    fit. Of four rows that a thread takes together each is such a one somewhere.
    """
    x = r(rows, columns)
    for i in range(0, rows, 3):
        x[i, i * (columns - 1) // ((rows - 1) // 3 * 3) | i % 2] += 200
    return x


def steep(x: torch.Tensor) -> torch.Tensor:
    """x with every second row so large that the differences of its products do not fit exp()."""
    x[:, ::2] *= 800
    return x


def ahead(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same with a key far ahead of all others for each of two queries, so that no maximum does without either."""
    for query, key in (0, 171), (2, 101):
        keys[:, key] = q[:, query] / 100
    return q, keys, values


def infinite(x: torch.Tensor, first: int) -> torch.Tensor:
    """x with an infinity in each of some rows: what is left of it where zeros should be makes a sum NaN."""
    for i in range(8):
        x[first + i, i] = torch.inf
    return x


DERIVED: dict[str, tuple[str, Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "gelu": ("sm_90a", lambda x: F.gelu(x), lambda: (r(3, 300),)),
    "transposed": ("sm_80", lambda x, y: x.t() + y, lambda: (r(40, 50), r(50, 40))),
    "embedding": ("sm_90a", lambda i, w: F.embedding(i, w), lambda: (n(50, 2, 3), r(50, 64))),
    "sum of rows": ("sm_90a", lambda x: x.sum(-1), lambda: (r(3, 500),)),
    "sum of columns": ("sm_80", lambda x: x.sum(0), lambda: (r(200, 40),)),
    "argmax": ("sm_90a", lambda x: x.argmax(-1), lambda: (spread(16, 700),)),
    "softmax": ("sm_90a", lambda x: torch.softmax(x, -1), lambda: (spread(12, 500),)),
    "softmax of columns": ("sm_80", lambda x: torch.softmax(x, 0), lambda: (spread(16, 40).t().contiguous(),)),
    "variance": ("sm_80", lambda x: x.var(-1), lambda: (r(3, 500),)),
    "layer norm": ("sm_90a", lambda x, w, c: F.layer_norm(x, (512,), w, c), lambda: (r(2, 512), r(512), r(512))),
    "rms norm": ("sm_75", lambda x, w: F.rms_norm(x, (1031,), w), lambda: (r(2, 1031), r(1031))),
    "cross entropy": ("sm_90a", lambda x, i: F.cross_entropy(x, i), lambda: (spread(27, 70), n(70, 27))),
    "linear": ("sm_80", lambda x, w, c: F.linear(x, w, c), lambda: (r(16, 180), r(24, 180), r(24))),
    "linear through registers": (
        "sm_75",
        lambda x, w: x.t() @ w.t(),
        lambda: (infinite(r(40, 20), 20), infinite(r(40, 64), 20).t().contiguous()),
    ),
    "split product": ("sm_80", lambda x, w: x @ w, lambda: (r(16, 1536), r(1536, 16))),
    "matmul of bfloat16": ("sm_80", lambda x, w: x @ w, lambda: (b(32, 616), b(616, 32))),
    "matmul of half": (
        "sm_75",
        lambda x, w: x @ w,
        lambda: (infinite(h(320, 32), 256).t().contiguous(), infinite(h(320, 32), 256)),
    ),
    "transposed matmul of bfloat16": ("sm_90a", lambda x, w: x.t() @ w, lambda: (b(640, 32), b(640, 40))),
    "ragged matmul of bfloat16": ("sm_80", lambda x, w: x @ w, lambda: (b(23, 584), b(584, 40))),
    "bmm of half": ("sm_90a", lambda x, w: torch.bmm(x, w), lambda: (h(2, 32, 616), h(2, 616, 32))),
    "swiglu": ("sm_90a", swiglu, lambda: (b(32, 616), b(16, 616), b(16, 616))),
    "attention": ("sm_90a", attention, lambda: ahead(steep(r(1, 8, 180)), r(1, 180, 180), r(1, 180, 24))),
    "attention of half": ("sm_80", attention, lambda: (steep(h(1, 24, 616)), h(1, 616, 616), h(1, 616, 24))),
    "conv2d": ("sm_80", lambda x, w, c: F.conv2d(x, w, c, padding=1), lambda: (r(1, 5, 6, 6), r(16, 5, 3, 3), r(16))),
    "conv1d": ("sm_90a", lambda x, w: F.conv1d(x, w, dilation=2), lambda: (r(1, 4, 36), r(32, 4, 3))),
}
"""For each: the target, the function, and its arguments (after seeding)."""

SCHEDULES = Path(__file__).with_name("schedules.txt")


def pinned() -> dict[str, str]:
    """A schedule for each of them, so that they stay as they are whatever is chosen. What finishes a product that
    blocks share has none: it is chosen.
    """
    parts = SCHEDULES.read_text(encoding="utf-8").split("# ")[1:]
    return dict(part.split("\n", 1) for part in parts)


PINNED = {**pinned(), "transposed matmul of bfloat16": TURNED.format(tiles=3, steps=10)}

ROLES: dict[str, Any] = {"tile": (64, 16, 64), "roles": True, "registers": None}
BOTH: dict[str, Any] = {"tile": (128, 16, 64), "groups": 2}
ARRANGED: dict[str, Product | Convolution | Chain | Reduced] = {
    "boxes": Product(**BOTH, shape=(256, 16, 320), ring=4, persistent=1),
    "boxes in panels": Product(tile=(128, 16, 128), groups=2, shape=(200, 20, 600), persistent=2),
    "roles": Product(**ROLES, shape=(192, 16, 320), persistent=1),
    "roles, staged": Product(
        **ROLES | {"tile": (64, 64, 64)}, shape=(180, 56, 192), ring=2, persistent=2, width=32,
        staged='by="tma", swizzle=64',
    ),
    "cluster of m": Product(**ROLES, shape=(256, 32, 320), cluster="m", persistent=2),
    "cluster of n": Product(**ROLES, shape=(128, 32, 192), ring=2, cluster="n", persistent=2),
    "blocks share sums": Product(**ROLES, shape=(64, 32, 512), ring=2, cluster="k"),
    "both turned": Product(
        **ROLES | {"tile": (64, 64, 32)}, shape=(64, 128, 160), ring=2, x_axes="km", w_axes="kn", persistent=1
    ),
    "copies for wgmma": Product(**BOTH, shape=(128, 16, 320), ring=4, by="cp.async", persistent=1, batch=2),
    "registers for wgmma": Product(**BOTH, shape=(140, 20, 200), ring=2, by="ld"),
    "three warpgroups": Product(
        **ROLES | {"tile": (192, 32, 64)}, shape=(360, 32, 192), groups=3, ring=2, staged="pad=8", persistent=1
    ),
    "convolution": Convolution(
        (2, 7, 9, 64), out=16, channels=16, groups=1, box=(1, 8, 8), ring=3, persistent=2, registers=False,
        staged='by="tma", swizzle=32',
    ),
    "convolution in strides": Convolution(
        (4, 16, 16, 32), out=16, channels=16, step=32, box=(2, 8, 8), ring=4, stride=2, persistent=1, registers=False,
        staged="",
    ),
    "turns": Product(**ROLES, shape=(320, 16, 192), ring=2, persistent=1, turns=2),
    "warpgroups share steps": Product(
        tile=(64, 16, 64), shape=(64, 16, 320), depth="warpgroup(2) * reg(2) * inst.k(16)", persistent=1, batch=2
    ),
    "warps share steps": Product(
        on="mma", target="sm_80", tile=(32, 16, 32), shape=(40, 24, 160), swizzle=64, by="cp.async", warps=(1, 1),
        persistent=2, depth="warp(2) * reg(1) * inst.k(16)",
    ),
    "lanes share steps": Product(
        on="fma", target="sm_80", dtype="f32", tile=(16, 16, 16), shape=(20, 20, 60), swizzle=0, by="ld", ring=2,
        warps=(2, 1), depth="lane(2) * reg(8)",
    ),
    "warps in roles": Product(
        on="mma", tile=(32, 32, 32), shape=(64, 32, 160), swizzle=64, roles=True, persistent=1, width=32, warps=(1, 2),
        staged='by="tma", swizzle=64',
    ),
    "warps, staged": Product(
        on="mma", target="sm_80", tile=(32, 32, 32), shape=(60, 40, 96), swizzle=64, by="cp.async", persistent=2,
        staged="swizzle=64", extra="b: bf16[40]", epilogue="y[{at}] = {out}(add(acc0, f32(b[{n}])))",
    ),
    "first factor in registers": Product(
        tile=(64, 16, 64), shape=(128, 16, 320), ring=3, first="reg", roles=True, registers=None, persistent=1
    ),
    "threads in roles": Product(
        on="fma", dtype="f32", tile=(16, 16, 16), shape=(32, 16, 80), swizzle=0, roles=True, ring=3, persistent=1,
        warps=(2, 1),
    ),
    "chain of warps that share keys": Chain(
        heads=1, warps=(1, 2), roles=True, shape=(48, 96, 32, 32), stay=1, held=2, **TMA
    ),
    "overlapped chain that stays": Chain(
        heads=1, overlap=True, between="causal", shape=(192, 192, 16, 16), step=64, ring=3, stay=1, held=2, **GROUPS
    ),
    "chain that stays": Chain(
        heads=1, between="window", roles=True, shape=(96, 160, 16, 16), ring=3, stay=1, held=2, **TMA
    ),
    "chain of keys down": Chain(heads=1, warps=(2, 2), shape=(32, 96, 32, 32), **DOWN),
    "chain of rows turned": Chain(heads=1, between="relu", across="m", shape=(32, 96, 32, 32)),
    "chain of rows across": Chain(heads=1, between="relu", second="b", shape=(32, 96, 32, 32)),
    "chain through memory": Chain(
        heads=1, between="relu", warps=(2, 1), apart=(1, 2), roles=True, shape=(96, 96, 32, 32), stay=1, held=2, **TMA
    ),
    "chain through a slot": Chain(
        heads=1, between="relu", warps=(2, 1), apart=(1, 2), shape=(32, 96, 32, 32), weights="smem()"
    ),
    "chain of unlike instructions": Chain(
        heads=1, between="relu", then="wgmma", second="b", target="sm_90a", shape=(64, 96, 16, 64)
    ),
    "reduced columns": Reduced(64, 40, 320, registers=False),
}  # fmt: skip
"""Products, chains of two, and products whose columns are reduced, under schedules that are pinned."""

NAMES = (*DERIVED, *ARRANGED, *(f"{name} by hand" for name in by_hand.MEANING))


@cache
def tiled(name: str) -> tile.Program:
    """One of `ARRANGED`, with its schedule and its plan."""
    arranged = ARRANGED[name]
    found: tile.Program = lowering(parse(arranged.text), Options(target=arranged.target)).at("tile")
    return found


@cache
def subject(name: str) -> Subject:
    """A kernel to mutate."""
    if name.endswith(" by hand"):
        program = by_hand.program(name.removesuffix(" by hand"))
        return Subject(name, program, by_hand.inputs(program, seed=2), gpu("sm_90a"))
    if name in ARRANGED:
        arranged = ARRANGED[name]
        program = of_plans(tiled(name), gpu(arranged.target))
        given = by_hand.inputs(program, seed=2)
        if isinstance(arranged, Chain) and arranged.between != "relu":
            for row in 2, 27:  # one of each 16 has differences of scores that do not fit exp(): a first or a second row
                given["q"][:, row::32] *= 800
        if isinstance(arranged, Reduced):
            given = losses(arranged, steep=20.0)
        return Subject(name, program, given, gpu(arranged.target))
    target, fn, make = DERIVED[name]
    torch.manual_seed(0)
    found = lowered(fn, make(), target, schedules=(PINNED[name],))
    return Subject(name, found.program, found.inputs, gpu(target))
