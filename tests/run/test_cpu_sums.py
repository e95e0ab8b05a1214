"""Sums on a processor stay in registers, in wide blocks of columns; chains in bfloat16 are vectors."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.run.cpu import COMPILER, MARCHES

import terrazzo
from terrazzo.bench.harness import accuracy
from terrazzo.front.capture import capture
from terrazzo.ir.dialects import loop as l
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.targets.cpu.emit import emit

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def text_of(fn: Any, *given: Any) -> str:
    """The text of the one kernel of a function, without what every text begins with."""
    (kernel,) = lowering(capture(fn, given).program, Options(target="cpu")).loop.steps
    assert isinstance(kernel, l.Kernel)
    return emit(kernel)[1].partition('extern "C" int k_')[2]


@pytest.mark.parametrize("shape", [(3_000_001,), (300, 5003), (7000, 90)])
def test_no_loop_computes_where_it_ends_again(shape: Any) -> None:
    loops = [line for line in text_of(lambda x: x.sum(), torch.empty(shape)).splitlines() if "for (" in line]
    assert len(loops) > 6
    assert not any("std::min" in line or "LL *" in line for line in loops)


@pytest.mark.parametrize(("rows", "columns", "lanes"), [(37, 7169, 1024), (21, 3600, 512), (50, 1800, 256)])
def test_little_work_is_done_in_wide_blocks_of_columns(rows: int, columns: int, lanes: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    v, x = torch.randn(rows), torch.randn(rows, columns)
    assert f"lane3[{lanes}]" in text_of(torch.matmul, v, x)
    ours = terrazzo.compile(torch.matmul, v, x, options={"target": "cpu", "cache_dir": tmp_path, "compiler": COMPILER})
    assert accuracy([ours(v, x)], [v @ x], [v.double() @ x.double()]).problem == ""


@pytest.mark.parametrize("compiler", MARCHES)
def test_a_maximum_of_what_was_rounded_to_bfloat16_is_in_vectors(compiler: str, tmp_path: Path) -> None:
    """GCC that knows from the rounding which numbers are NaN branches where the maximum asks for them."""
    if "Free Software" not in subprocess.run([COMPILER or "", "--version"], capture_output=True, text=True).stdout:
        pytest.skip("only GCC says which loops are vectors")

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x + y) * y).clamp(0, 6)

    (kernel,) = lowering(
        capture(fn, [torch.empty(64, 999, dtype=torch.bfloat16)] * 2).program, Options(target="cpu")
    ).loop.steps
    assert isinstance(kernel, l.Kernel)
    (tmp_path / "kernel.cpp").write_text(emit(kernel)[1])
    flags = "-std=c++17 -O3 -fno-math-errno -fno-trapping-math -fopenmp-simd -fopt-info-vec-optimized -S -o /dev/null"
    native = [] if "-march" in compiler else ["-march=native"]
    command = [*shlex.split(compiler), *flags.split(), *native, str(tmp_path / "kernel.cpp")]
    assert "loop vectorized" in subprocess.run(command, capture_output=True, text=True, check=True).stderr


def test_what_lies_in_a_run_is_not_gathered(tmp_path: Path) -> None:
    """A lambda within what threads share has pointers by value, and the places that data says are vectors too."""
    x, i = torch.randn(512, 1024).bfloat16(), torch.randint(1024, (512, 1024))
    norm = lambda x: torch.nn.functional.rms_norm(x, (1024,))  # noqa: E731
    for fn, given in ((norm, (x,)), (lambda x, i: x.gather(1, i), (x, i))):
        text = text_of(fn, *given)
        assert "[&]" not in text
        source = tmp_path / "kernel.cpp"
        kernels = lowering(capture(fn, given).program, Options(target="cpu")).loop.steps
        source.write_text("".join(emit(k)[1] for k in kernels if isinstance(k, l.Kernel)))
        command = [*shlex.split(str(COMPILER)), "-std=c++17", "-O3", "-fopenmp", "-march=x86-64-v4", "-S", "-o", "-"]
        done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip("no compiler for x86-64-v4")
        assert not re.search(r"\tvp?gather", done.stdout)


@pytest.mark.parametrize("march", MARCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_what_is_read_across_is_turned(dtype: torch.dtype, march: str, tmp_path: Path) -> None:
    x = (torch.randn(3, 75, 64) * 9).to(dtype)
    for given in (x, x[:, :64, :40].contiguous()):
        fn = lambda x: x.transpose(1, 2).contiguous() * 2  # noqa: E731
        compiled = terrazzo.compile(fn, given, options={"compiler": march, "cache_dir": tmp_path})
        assert torch.equal(compiled(given), fn(given))
    assert dtype is torch.bool or "tz_across<" in text_of(lambda x: x.transpose(1, 2).contiguous(), x)


def test_parts_of_a_number_are_stored_one_by_one() -> None:
    """Not chosen by a condition along an axis of two, which is no vector."""
    x, y = torch.randn(2, 33, 2).chunk(2)
    fn = lambda a, b: torch.stack((a * b, a + b, a - b), -1)  # noqa: E731
    text = text_of(fn, x, y)
    assert "?" not in text and "< 3" not in text and "#pragma omp" in text
    assert torch.equal(terrazzo.compile(fn, x, y)(x, y), fn(x, y))


def test_a_long_sum_beside_a_count_is_one_of_short_sums(tmp_path: Path) -> None:
    """As a loss that counts the labels it ignores: its rows were added up one by one, to 14 units in the last place."""

    def loss(x: Any, label: Any) -> Any:
        return torch.nn.functional.cross_entropy(x, label, ignore_index=5, label_smoothing=0.1)

    call, off, theirs = None, 0.0, 0.0
    for seed in range(4):
        torch.manual_seed(seed)
        x, label = torch.randn(2048, 1000), torch.randint(1000, (2048,))
        given = {"target": "cpu", "cache_dir": tmp_path, "compiler": COMPILER}
        call = call or terrazzo.compile(loss, x, label, options=given)
        exact = loss(x.double(), label)
        off, theirs = off + float((call(x, label) - exact).abs()), theirs + float((loss(x, label) - exact).abs())
    assert off <= max(2 * theirs, 4 * float(exact) * 2**-24)

    def largest(x: Any, at: Any) -> Any:  # beside what is no sum, and in columns
        return torch.stack([x.sum(0), x.amax(0), x[at].sum(0)])

    x = torch.rand(5000, 40)
    at = torch.randint(5000, (3000,))
    call = terrazzo.compile(largest, x, at, options={"target": "cpu", "cache_dir": tmp_path, "compiler": COMPILER})
    assert accuracy([call(x, at)], [largest(x, at)], [largest(x.double(), at)]).problem == ""
