"""Remainders of float32 on a processor: exact for any numbers, in vectors where GCC knows of such functions."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.run.cpu import COMPILER

import terrazzo
from terrazzo.targets.cpu.emit import prelude, remainders

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -3e-39, 1.0, -2.0, 3.4e38, 2.0**-126]


def numbers(rng: np.random.Generator, count: int) -> Any:
    """Floats of any bits, many of them of a size, and some special ones."""
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    near = rng.random(count) < 0.5
    bits[near] = (bits[near] & 0x80FFFFFF) | 0x3F000000
    found = bits.view(np.float32)
    some = rng.random(count) < 0.05
    found[some] = rng.choice(np.array(SPECIAL, np.float32), int(some.sum()))
    return found


def test_remainders_are_exact(tmp_path: Path) -> None:
    """Where a quotient is beyond 2^28, or there is none, they are the C library's; also in the rest of a loop."""
    rng = np.random.default_rng(5)
    a, b = numbers(rng, 50_003), numbers(rng, 50_003)
    with np.errstate(all="ignore"):
        wanted, signed = np.fmod(a, b), np.remainder(a, b)
    call = terrazzo.compile(
        lambda x, y: (torch.fmod(x, y), torch.remainder(x, y)),
        torch.from_numpy(a), torch.from_numpy(b), options={"target": "cpu", "cache_dir": tmp_path},
    )  # fmt: skip
    found = [x.numpy() for x in call(torch.from_numpy(a), torch.from_numpy(b))]
    np.testing.assert_array_equal(found[0], wanted)
    np.testing.assert_array_equal(np.signbit(found[0][found[0] == 0]), np.signbit(wanted[wanted == 0]))
    finite = np.isfinite(b)  # with an infinite divisor NumPy says NaN or b, and PyTorch what C says
    np.testing.assert_array_equal(found[1][finite], signed[finite])


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="no x86")
@pytest.mark.parametrize(
    "value", ["tz_fmod(x[i], y[i])", "tz_mod(x[i], y[i])", "x[i] < 0 ? tz_fmod(x[i], y[i]) : y[i]"]
)
@pytest.mark.parametrize(("march", "lanes"), [("x86-64", 4), ("haswell", 8), ("skylake-avx512", 16)])
def test_remainders_have_vectors(value: str, march: str, lanes: int) -> None:
    """One by one, 400,000 of them took 10 ms, and with them all else in their loop; now 0.6."""
    assert COMPILER is not None
    said = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    if "clang" in said:
        pytest.skip("GCC is told of vector functions so")
    head = 'extern "C" void f(const float* __restrict x, const float* __restrict y, float* __restrict z)'
    loop = f"for (int i = 0; i < 4096; i++) z[i] = {value};"
    source = prelude() + remainders() + f"{head} {{\n#pragma omp simd\n{loop} }}"
    flags = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-DTZ_VECTOR_MATH"]
    wide = [f"-march={march}", "-mprefer-vector-width=512"]
    command = [COMPILER, *flags, *wide, "-S", "-x", "c++", "-", "-o", "-"]
    text = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    assert re.search(rf"call\s+_ZGV.N{lanes}vv_fmodf", text)
