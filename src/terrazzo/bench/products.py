"""Products as models have them: squares, projections, odd sizes and layouts, batches, with what surrounds them; and one
square with one ingredient after the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from terrazzo.bench import gpu_suites
from terrazzo.bench.gpu_suites import Case, Made

SIDES = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
MODELS = {"Qwen2.5-7B": (3584, 512, 18944), "Llama-3-8B": (4096, 1024, 14336), "TinyLlama": (2048, 256, 5632)}
"""Widths of the hidden state, of keys, and of what lies between up and down projections."""
ROWS = (1, 16, 32, 128, 512, 2048, 8192)
MOST, LARGEST = 30, 5000
"""Odd products, and their largest size."""
BATCHES = ((64, 512), (256, 256), (1024, 128), (4096, 64))
FUSED = ((4096, 4096, 4096), (512, 3584, 18944), (2048, 4096, 14336))
"""Rows, sums and columns of products with what surrounds them."""
GROUP = 128
"""Weights of four bits that have a scale in common."""
SIDE = 8192
"""Of the square that is taken step by step."""


def squares() -> tuple[Case, ...]:
    """Squares in bf16, and one in f16."""
    return tuple(linear(f"{n} cubed", n, n, n, "bf16") for n in SIDES) + (
        linear("4096 cubed", 4096, 4096, 4096, "f16"),
    )


def projections() -> tuple[Case, ...]:
    """The linear layers of three decoder models in bf16."""
    found = []
    for model in MODELS:
        found += [
            linear(f"{model} {name}, {m} rows", m, k, n, "bf16") for name, (k, n) in layers(model).items() for m in ROWS
        ]
    return tuple(found)


def layers(model: str) -> dict[str, tuple[int, int]]:
    """The inputs and outputs of a model's projections."""
    hidden, keys, inner = MODELS[model]
    return {"qo": (hidden, hidden), "kv": (hidden, keys), "up": (hidden, inner), "down": (inner, hidden)}


def odd() -> tuple[Case, ...]:
    """Products of sizes that a seed draws, either operand stored along either axis."""
    import torch

    drawn = random.Random(5)
    found = []
    for _ in range(MOST):
        m, k, n = (
            round(LARGEST ** drawn.random()) if drawn.random() < 0.4 else drawn.randint(1, LARGEST) for _ in range(3)
        )
        dtype = drawn.choice(("bf16", "f16", "f32"))
        turned = drawn.random() < 0.5, drawn.random() < 0.5
        letters = "".join("NT"[x] for x in turned)

        def given(m: int = m, k: int = k, n: int = n, dtype: str = dtype, turned: Any = turned) -> tuple[Any, ...]:
            shapes = (m, k), (k, n)
            made = [gpu_suites.normal(s[::-1] if t else s, dtype) for s, t in zip(shapes, turned, strict=True)]
            return tuple(x.t() if t else x for x, t in zip(made, turned, strict=True))

        size = 4 if dtype == "f32" else 2
        moved = size * (m * k + k * n + m * n)
        found.append(case(f"{m} x {k} x {n}, {letters}", dtype, torch.matmul, given, moved, 2.0 * m * k * n))
    return tuple(found)


def batched() -> tuple[Case, ...]:
    """Batches of squares in bf16."""
    import torch

    def batch(count: int, n: int) -> Case:
        given = lambda: tuple(gpu_suites.normal((count, n, n), "bf16") for _ in range(2))  # noqa: E731
        return case(f"{count} x {n} cubed", "bf16", torch.bmm, given, 6 * count * n * n, 2.0 * count * n**3)

    return tuple(batch(*x) for x in BATCHES)


def fused() -> tuple[Case, ...]:
    """Products with what stands before and after them, in bf16."""
    return tuple(case for m, k, n in FUSED for case in _fused(m, k, n))


def _fused(m: int, k: int, n: int) -> tuple[Case, ...]:
    import torch
    from torch.nn import functional as f

    second = 1024  # the depth of a second product
    shapes = {"x": (m, k), "w": (n, k), "b": (n,), "r": (m, n), "v": (n, k), "g": (k,)}
    shapes |= {"s": (n, k // GROUP), "y": (m, second), "u": (n, second)}

    def whole(*names: str) -> Callable[[], tuple[Any, ...]]:
        return lambda: tuple(gpu_suites.normal(shapes[x], "bf16") for x in names)

    def quantised() -> tuple[Any, ...]:
        x, w, s = whole("x", "w", "b")()
        return x, (w.float() * 40).clamp(-127, 127).to(torch.int8), s

    def packed() -> tuple[Any, ...]:
        x, s = whole("x", "s")()
        low, high = (gpu_suites.normal((n, k // 2), "f32").mul(4).add(8).clamp(0, 15).to(torch.uint8) for _ in range(2))
        return x, low + 16 * high, s

    def bias_gelu(x: Any, w: Any, b: Any) -> Any:
        return f.gelu(f.linear(x, w, b))

    def bias_relu(x: Any, w: Any, b: Any) -> Any:
        return f.relu(f.linear(x, w, b))

    def residual(x: Any, w: Any, r: Any) -> Any:
        return r + f.linear(x, w)

    def relu_first(x: Any, w: Any) -> Any:
        return f.linear(f.relu(x), w)

    def int8_weights(x: Any, q: Any, s: Any) -> Any:
        return f.linear(x, q.to(x.dtype)) * s

    def int4_weights(x: Any, q: Any, s: Any) -> Any:
        w = torch.stack([q & 15, q >> 4], -1).view(n, k // GROUP, GROUP).to(x.dtype) - 8
        return f.linear(x, (w * s[:, :, None]).view(n, k))

    def two_products(x: Any, w: Any, y: Any, u: Any) -> Any:
        return f.linear(x, w) + f.linear(y, u)

    def swiglu(x: Any, w: Any, v: Any) -> Any:
        return f.silu(f.linear(x, w)) * f.linear(x, v)

    def norm(x: Any, g: Any, w: Any) -> Any:
        return f.linear(f.rms_norm(x, (x.shape[-1],), g), w)

    product, moved = 2.0 * m * k * n, 2 * (m * k + n * k + m * n)
    rows: tuple[tuple[str, Any, Any, int, float], ...] = (
        ("bias and GELU", bias_gelu, whole("x", "w", "b"), moved + 2 * n, product),
        ("bias and ReLU", bias_relu, whole("x", "w", "b"), moved + 2 * n, product),
        ("a residual", residual, whole("x", "w", "r"), moved + 2 * m * n, product),
        ("ReLU before it", relu_first, whole("x", "w"), moved, product),
        ("int8 weights", int8_weights, quantised, moved - n * k + 2 * n, product),
        ("int4 weights", int4_weights, packed, moved - 3 * n * k // 2 + 2 * n * k // GROUP, product),
        (
            "two products", two_products, whole("x", "w", "y", "u"), moved + 2 * second * (m + n),
            product + 2.0 * m * n * second,
        ),
        ("SwiGLU", swiglu, whole("x", "w", "v"), moved + 2 * n * k, 2 * product),
        ("RMS norm before it", norm, whole("x", "g", "w"), moved + 2 * k, product),
    )  # fmt: skip
    return tuple(case(f"{name}, {m} x {k} x {n}", "bf16", *rest) for name, *rest in rows)


def staircase() -> tuple[Case, ...]:
    """One square in bf16 with a schedule for each step: every one has what those before it have, and one thing more.
    The last is what is chosen.
    """
    return tuple(linear(name, SIDE, SIDE, SIDE, "bf16", text) for name, text in stairs())


def stairs(side: int = SIDE) -> tuple[tuple[str, str], ...]:
    """The steps by name, with their schedules; nothing is pinned for the last."""
    on_cores = _schedule(
        side, (128, 128, 16), "fma.f32", rows="warp(2) * lane(8) * reg(8)", columns="warp(4) * lane(4) * reg(8)",
        depth="reg(16)", operands='by="ld", pad=8', ring=2,
    )  # fmt: skip

    def on_warps(by: str, ring: int) -> str:
        return _schedule(
            side, (128, 128, 64), "mma.m16n8k16.f32.bf16", rows="warp(2) * reg(4) * inst.m(16)",
            columns="warp(4) * reg(4) * inst.n(8)", depth="reg(4) * inst.k(16)", operands=f'by="{by}", swizzle=128',
            ring=ring,
        )  # fmt: skip

    def on_groups(columns: int, ring: int, *more: str, result: bool = False, cluster: bool = False) -> str:
        return _schedule(
            side, (128, columns, 64), f"wgmma.m64n{columns}k16.f32.bf16", rows="warpgroup(2) * inst.m(64)",
            columns=f"inst.n({columns})", depth="reg(4) * inst.k(16)", operands='by="tma", swizzle=128', ring=ring,
            more=more, result=result, cluster=cluster,
        )  # fmt: skip

    roles = "roles(load=warp(1), math=warpgroup(2), registers=(40, 232))"
    grouped = "persistent(132, order=grouped(8))"
    return (
        ("CUDA cores, tiles of 128 x 128 in shared memory", on_cores),
        ("tensor cores by `mma.sync`", on_warps("ld", 2)),
        ("copies beside products (`cp.async`, 3 slots)", on_warps("cp.async", 3)),
        ("boxes by TMA", on_warps("tma", 3)),
        ("`wgmma`, two warpgroups", on_groups(128, 4)),
        ("tiles of 128 x 256", on_groups(256, 4)),
        ("warps that only load", on_groups(256, 4, roles)),
        ("results in boxes, beside products", on_groups(256, 4, roles, result=True)),
        ("blocks that stay, tiles in groups", on_groups(256, 4, grouped, roles, result=True)),
        ("clusters of two, which share what they fetch", on_groups(256, 4, grouped, roles, result=True, cluster=True)),
        ("what the model chooses", ""),
    )


def _schedule(
    side: int,
    tile: tuple[int, int, int],
    instruction: str,
    rows: str,
    columns: str,
    depth: str,
    operands: str,
    ring: int,
    more: tuple[str, ...] = (),
    result: bool = False,
    cluster: bool = False,
) -> str:
    m, n, k = tile
    shared = 2 if cluster else 1
    down = f"grid({side // m // shared}) * {'cluster(2) * ' * cluster}block({m})"
    lines = [
        'with schedule("mm", target="sm_90a"):',
        f"    a0 = {down}",
        f"    a1 = grid({side // n}) * block({n})",
        f"    r0 = time({side // k}, ring={ring}) * block({k})",
        *(f"    {line}" for line in more),
        f'    with site("acc0", on="{instruction}"):',
        f"        a0 = {rows}",
        f"        a1 = {columns}",
        f"        r0 = {depth}",
        f"        x = smem({operands})",
        f"        w = smem({operands}{', multicast=True' * cluster})",
        '    with site("mm"):',
    ]
    if result:
        lines += [f"        a1 = time({n // 64}, ring=2) * block(64)", '        mm = smem(by="tma", swizzle=128)']
    else:
        lines += [f'        {a} = like("acc0")' for a in ("a0", "a1")]
    return "\n".join([*lines, ""])


def linear(name: str, m: int, k: int, n: int, dtype: str, schedule: str = "", frozen: tuple[str, ...] = ()) -> Case:
    """A linear layer without bias, of so many rows, sums and columns."""
    from torch.nn import functional as f

    def product(x: Any, w: Any) -> Any:
        return f.linear(x, w)

    size = 4 if dtype == "f32" else 2
    given = lambda: (gpu_suites.normal((m, k), dtype), gpu_suites.normal((n, k), dtype))  # noqa: E731
    return case(name, dtype, product, given, size * (m * k + n * k + m * n), 2.0 * m * k * n, schedule, frozen)


def case(
    name: str,
    dtype: str,
    fn: Callable[..., Any],
    given: Callable[[], tuple[Any, ...]],
    moved: int,
    operations: float,
    schedule: str = "",
    frozen: tuple[str, ...] = (),
) -> Case:
    """A case of a function that computes the exact results of inputs in float64."""

    def make() -> Made:
        return fn, given, lambda *a: fn(*(x.double() if x.is_floating_point() else x for x in a))

    return Case(name, dtype, make, moved, operations, schedule=schedule, frozen=frozen)
