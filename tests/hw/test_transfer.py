"""What single lanes do: the GPU agrees with the records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from terrazzo.hw.transfer import CP_ASYNC, FMA, SHUFFLE, WIDE
from terrazzo.targets.cuda.emit import prelude
from tests.hw.device import run_block

RANDOM = np.random.default_rng(0)
TYPES = {"u8": np.uint8, "i16": np.int16, "f32": np.float32, "i64": np.int64, "f64": np.float64}


def kernel(body: str, *params: str, functions: str = "") -> str:
    head = f'{prelude()}{functions}extern "C" __global__ void one({", ".join(params)})'
    return f"{head} {{\n  const int lane = threadIdx.x;\n{body}\n}}\n"


def values(name: str, count: int) -> Any:
    return (RANDOM.standard_normal(count) * 100).astype(TYPES[name])


def test_a_multiply_add_is_rounded_once() -> None:
    a = np.float32(1 + 2**-12)
    exact = np.float64(a) * np.float64(a) - 1
    assert FMA.run(a, a, np.float32(-1)) == np.float32(exact) != np.float32(a * a) - 1


@pytest.mark.parametrize("mask", [1, 2, 4, 8, 16, 31])
def test_shuffles_are_their_own_inverse(mask: int) -> None:
    held = RANDOM.standard_normal((3, 32))
    once = SHUFFLE.run(held, mask)
    assert (once != held).any() and (SHUFFLE.run(once, mask) == held).all()


@pytest.mark.gpu
def test_the_gpu_multiplies_and_adds() -> None:
    a, b, c, d = (values("f32", 32) for _ in range(4))
    source = kernel(
        "  d[lane] = a[lane] * b[lane] + c[lane];", "const f32* a", "const f32* b", "const f32* c", "f32* d"
    )
    assert (run_block(source, a, b, c, d)[3] == FMA.run(a, b, c)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", TYPES)
def test_the_gpu_shuffles(name: str, mask: int) -> None:
    x = values(name, 32)
    source = kernel(
        f"  y[lane] = shuffle_xor(x[lane], {mask});", f"const {name}* x", f"{name}* y", functions=SHUFFLE.cuda
    )
    assert (run_block(source, x, np.zeros_like(x))[1] == SHUFFLE.run(x, mask)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", TYPES)
def test_the_gpu_moves_vectors(name: str, count: int) -> None:
    x = values(name, 64 * count)
    at = RANDOM.permutation(64)[:32] * count
    params = (f"const {name}* x", "const i64* at", f"{name}* y")
    source = kernel(f"  move<{count}>(y + lane * {count}, x + at[lane]);", *params, functions=WIDE.cuda)
    found = run_block(source, x, at.astype(np.int64), np.zeros(32 * count, x.dtype))[2]
    assert (found.reshape(32, count) == WIDE.run(x, at, count)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [4, 8, 16])
def test_the_gpu_copies_asynchronously(size: int) -> None:
    count = size // 4
    x = values("f32", 32 * count)
    inside = RANDOM.random(32) < 0.5
    body = f"""  __shared__ __align__(16) f32 slab[{32 * count}];
  cp_async<{size}>(slab + lane * {count}, x + lane * {count}, inside[lane]);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  for (int n = 0; n < {count}; n++) y[lane * {count} + n] = slab[(31 - lane) * {count} + n];"""
    source = kernel(body, "const f32* x", "const bool* inside", "f32* y", functions=CP_ASYNC.cuda)
    found = run_block(source, x, inside, np.zeros_like(x))[2].reshape(32, count)
    assert (found[::-1] == CP_ASYNC.run(x.reshape(32, count), inside)).all()
