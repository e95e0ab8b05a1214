"""Every instruction record, by itself: layouts are bijections, the meaning is a matrix product, the PTX assembles and,
on a GPU, agrees.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terrazzo.hw import mma_sync
from terrazzo.hw.instruction import Fragment, MatrixInstruction
from tests.hw.device import assemble, run_block

INSTRUCTIONS = mma_sync.INSTRUCTIONS
every = pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.name)


def operands(instruction: MatrixInstruction, seed: int = 0) -> tuple[Any, Any, Any]:
    """Small integers as [k, m], [k, n] and [m, n]: every sum of their products is exact."""
    rng, (m, n, k) = np.random.default_rng(seed), instruction.shape
    a, b, c = (rng.integers(-8, 9, shape) for shape in ((k, m), (k, n), (m, n)))
    return a.astype(instruction.a.dtype.numpy), b.astype(instruction.b.dtype.numpy), c.astype(instruction.d.dtype.numpy)


@every
def test_every_element_has_one_place(instruction: MatrixInstruction) -> None:
    m, n, k = instruction.shape
    for fragment, elements in ((instruction.a, m * k), (instruction.b, k * n), (instruction.d, m * n)):
        assert fragment.layout.covers and fragment.layout.injective
        assert fragment.layout.elements == elements == 32 * fragment.elements
    bits = {"m": m, "n": n, "k": k}
    for fragment in (instruction.a, instruction.b, instruction.d):
        assert all(1 << size == bits[c] for c, size in fragment.layout.extents)


@every
def test_it_multiplies_matrices(instruction: MatrixInstruction) -> None:
    a, b, c = operands(instruction)
    held = instruction.run(instruction.a.distribute(a), instruction.b.distribute(b), instruction.d.distribute(c))
    assert np.array_equal(instruction.d.collect(held), a.astype(np.int64).T @ b.astype(np.int64) + c.astype(np.int64))


def source(instruction: MatrixInstruction) -> str:
    """A kernel of one warp that executes the instruction once, on registers as they lie in memory."""
    nd, na, nb = (f.registers for f in (instruction.d, instruction.a, instruction.b))
    element = {"f32": "float", "i32": "int"}[instruction.d.dtype.name]
    return (
        instruction.cuda()
        + f"""
extern "C" __global__ void one({element}* d, const unsigned* a, const unsigned* b) {{
  unsigned x[{na}], y[{nb}];
  {element} z[{nd}];
  for (int i = 0; i < {na}; i++) x[i] = a[threadIdx.x * {na} + i];
  for (int i = 0; i < {nb}; i++) y[i] = b[threadIdx.x * {nb} + i];
  for (int i = 0; i < {nd}; i++) z[i] = d[threadIdx.x * {nd} + i];
  {instruction.function}(z, x, y);
  for (int i = 0; i < {nd}; i++) d[threadIdx.x * {nd} + i] = z[i];
}}
"""
    )


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here")
def test_the_architecture_that_has_it_first_assembles_it(tmp_path: Path) -> None:
    assemble([(i.since, source(i)) for i in INSTRUCTIONS], tmp_path)


def _registers(fragment: Fragment, held: Any) -> Any:
    return np.ascontiguousarray(held.astype(fragment.dtype.numpy)).view(np.int32)


@pytest.mark.gpu
@every
def test_the_gpu_agrees(instruction: MatrixInstruction) -> None:
    fragments = (instruction.d, instruction.a, instruction.b)
    for seed in range(5):
        a, b, c = (
            f.distribute(x)
            for f, x in zip((instruction.a, instruction.b, instruction.d), operands(instruction, seed), strict=True)
        )
        d, *_ = run_block(
            source(instruction), *(_registers(f, held) for f, held in zip(fragments, (c, a, b), strict=True))
        )
        assert np.array_equal(d.view(instruction.d.dtype.numpy).reshape(c.shape), instruction.run(a, b, c))
