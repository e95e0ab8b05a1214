"""Every instruction record, by itself: layouts are bijections, the meaning is a matrix product, the PTX assembles and, on a GPU, agrees."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terrazzo.hw import mma_sync
from terrazzo.hw.instruction import Fragment, MatrixInstruction

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
    return instruction.cuda() + f"""
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


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here")
def test_the_architecture_that_has_it_first_assembles_it(tmp_path: Path) -> None:
    for since in sorted({i.since for i in INSTRUCTIONS}):
        mine = [source(i).replace("one(", f"one{k}(") for k, i in enumerate(INSTRUCTIONS) if i.since <= since]
        (tmp_path / "all.cu").write_text("\n".join(mine))
        subprocess.run(["nvcc", f"-arch=sm_{since}", "-cubin", "-o", tmp_path / "all.cubin", tmp_path / "all.cu"], check=True)


def _registers(fragment: Fragment, held: Any) -> Any:
    return np.ascontiguousarray(held.astype(fragment.dtype.numpy)).view(np.int32)


@pytest.mark.gpu
@every
def test_the_gpu_agrees(instruction: MatrixInstruction) -> None:
    torch = pytest.importorskip("torch")
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

    device = Device()
    device.set_current()
    stream = device.create_stream()
    code = Program(source(instruction), code_type="c++", options=ProgramOptions(arch=f"sm_{device.arch}"))
    kernel = code.compile("cubin").get_kernel("one")
    for seed in range(20):
        a, b, c = operands(instruction, seed)
        held = [f.distribute(x) for f, x in ((instruction.a, a), (instruction.b, b), (instruction.d, c))]
        fragments = (instruction.a, instruction.b, instruction.d)
        x, y, d = (torch.from_numpy(_registers(f, h)).cuda() for f, h in zip(fragments, held, strict=True))
        torch.cuda.synchronize()
        launch(stream, LaunchConfig(grid=1, block=32), kernel, d.data_ptr(), x.data_ptr(), y.data_ptr())
        stream.sync()
        result = d.cpu().numpy().view(instruction.d.dtype.numpy).reshape(held[2].shape)
        assert np.array_equal(result, instruction.run(*held))
