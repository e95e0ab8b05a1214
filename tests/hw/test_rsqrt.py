"""1 / sqrt(x) without a branch, as kernels have it: what the compiler's own division and root give, for every float."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from terrazzo.front.capture import capture
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.run.cache import Cache
from terrazzo.run.compiler import compile_all
from terrazzo.targets.cpu.emit import prelude
from terrazzo.targets.cuda.emit import emit
from terrazzo.targets.cuda.emit import prelude as for_gpus
from tests.hw.device import run_block
from tests.hw.sass import disassembled

MADE = """
static float root(float x) { return (float)(1.0 / __builtin_sqrt((double)x)); }
static float inverse(float x) { return (float)(1.0 / (double)x); }
extern "C" void made(const float *x, float *y, long n) {
  for (long i = 0; i < n; i++) y[i] = tz_rsqrt_from(x[i], root, inverse);
}
"""
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, -1.0, -1e-45, 1e-45, 2**-101, 2**-126], np.float32)


def test_it_is_rounded_twice_whatever_its_size(tmp_path: Path) -> None:
    """What a GPU computes, of approximations that are as good as floats are: numbers of every exponent, and those that
    are none.
    """
    options = Options(target="cpu", cache_dir=tmp_path)
    (library,) = compile_all([prelude() + MADE], options, Cache(tmp_path, options.cache_limit))
    bits = np.concatenate([np.arange(0, 1 << 31, 1021, np.uint32), np.arange(0, 1 << 16, dtype=np.uint32)])
    x = np.concatenate([SPECIAL, bits.view(np.float32), np.nextafter(np.float32(2**-101), np.float32([0, 1]))])
    y = np.empty_like(x)
    pointers = [a.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for a in (x, y)]
    ctypes.CDLL(str(library)).made(*pointers, ctypes.c_long(len(x)))
    with np.errstate(all="ignore"):
        true = np.float32(1) / np.sqrt(x)
    assert np.array_equal(y, true, equal_nan=True)
    assert np.array_equal(np.signbit(y[np.isinf(y)]), np.signbit(true[np.isinf(y)]))


KERNEL = """
extern "C" __global__ void one(unsigned* different) {
  for (unsigned n = 0; n < 1u << 22; n++) {
    float x = __uint_as_float(n * 1024 + threadIdx.x);
    if (__float_as_uint(1.0f / sqrtf(x)) != __float_as_uint(tz_rsqrt(x))) different[threadIdx.x]++;
  }
}
"""


@pytest.mark.gpu
def test_it_is_what_a_division_and_a_root_give() -> None:
    (different,) = run_block(for_gpus() + KERNEL, np.zeros(1024, np.uint32), threads=1024)
    assert not different.any()


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_120"])
def test_it_has_no_branch_and_the_same_instructions(arch: str, tmp_path: Path) -> None:
    """The steps behind both approximations are those that the compiler takes for a root and a division by themselves,
    so that they have the same digits, whatever the approximations are off.
    """

    def steps(expression: str) -> list[str]:
        text = f'extern "C" __global__ void one(float* x) {{ x[threadIdx.x] = {expression}; }}'
        return disassembled(text, arch, tmp_path)

    mine = steps("tz_rsqrt(x[threadIdx.x])")
    assert not [x for x in mine if "CALL" in x or "BSSY" in x]
    assert sum("MUFU.RSQ" in x for x in mine) == sum("MUFU.RCP" in x for x in mine) == 1
    both = steps("1.0f / sqrtf(x[threadIdx.x])")
    near = both[: next(n for n, x in enumerate(both) if "EXIT" in x)]
    assert sum(any(op in x for op in ("FFMA", "MUFU")) for x in mine) == sum(
        any(op in x for op in ("FFMA", "MUFU")) for x in near
    )
    assert len(mine) < len(near) + 8


def written(fn: Any) -> str:
    """The CUDA of a function of 4096 numbers in float32."""
    program = capture(fn, (torch.empty(4096, device="meta"),)).program
    (kernel,) = lowering(program, Options(target="sm_90a")).at("kernel").steps
    return str(emit(kernel)[1])


def test_a_root_that_1_is_divided_by_is_part_of_it_where_nothing_else_reads_it() -> None:
    assert "tz_rsqrt(" in written(torch.rsqrt)
    text = written(lambda x: 1 / torch.sqrt(x + 1))
    assert text.count("tz_rsqrt(") == 1 and "sqrtf(" not in text and " / v" not in text
    both = written(lambda x: 1 / torch.sqrt(x) + torch.sqrt(x))
    assert "tz_rsqrt(" not in both and "sqrtf(" in both and " / v" in both
