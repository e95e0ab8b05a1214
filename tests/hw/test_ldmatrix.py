"""ldmatrix and stmatrix: what they load, which fragments they serve, and that the GPU agrees."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terrazzo.hw import mma_sync
from terrazzo.hw.instruction import Fragment, MatrixInstruction
from terrazzo.hw.ldmatrix import INSTRUCTIONS, MatrixMove, loader
from terrazzo.ir.layout import Layout, conflicts, smem, swizzle_for
from tests.hw.device import assemble, run_block

HALVES = [i for i in mma_sync.INSTRUCTIONS if i.a.dtype.size == 2]
every = pytest.mark.parametrize("move", INSTRUCTIONS, ids=lambda i: i.name)


def lane_addresses(rows: tuple[int, ...], fragment: Layout, strides: dict[str, int]) -> Any:
    """The element each lane names, where coordinates lie in memory at these strides."""
    lanes, shift = np.zeros(32, np.int64), 0
    for name, bits in fragment.extents:
        for k in range(bits):
            for lane_bit, image in enumerate(rows):
                if image >> shift + k & 1:
                    lanes += (np.arange(32) >> lane_bit & 1) * (strides[name] << k)
        shift += bits
    return lanes


@pytest.mark.parametrize("instruction", HALVES, ids=lambda i: i.name)
@pytest.mark.parametrize(("operand", "contiguous"), [("a", "k"), ("a", "m"), ("b", "k"), ("b", "n")])
def test_they_load_the_operands_of_mma(instruction: MatrixInstruction, operand: str, contiguous: str) -> None:
    fragment: Fragment = getattr(instruction, operand)
    sizes = {name: 1 << bits for name, bits in fragment.layout.extents}
    other = next(name for name in sizes if name != contiguous)
    strides = {contiguous: 1, other: sizes[contiguous]}
    matrix = np.arange(fragment.layout.elements).reshape([1 << bits for _, bits in fragment.layout.extents])
    memory = np.zeros(matrix.size, np.int64)
    for place, value in np.ndenumerate(matrix):
        memory[sum(p * strides[name] for p, (name, _) in zip(place, fragment.layout.extents, strict=True))] = value
    fitting = [(m, r) for m in INSTRUCTIONS if not m.store and (r := m.rows(fragment.layout)) is not None]
    assert len(fitting) == 2, "one for either coordinate being contiguous"
    transposed = contiguous != "k"  # the fragments of mma.sync pair neighbours along k
    move, rows = next((m, r) for m, r in fitting if m.name.endswith("trans") == transposed)
    held = move.load(memory, lane_addresses(rows, fragment.layout, strides))
    assert np.array_equal(held, fragment.distribute(matrix))


def test_what_they_do_not_serve() -> None:
    assert loader(Layout.parse("reg: m1 k1 k8; lane: k2 k4 m2 m4 m8"), 90) is None  # pairs along m, columns along k
    assert loader(Layout.parse("reg: k1 m8; lane: m1 k2 k4 m2 m4"), 90) is None
    assert loader(HALVES[0].a.layout, 70) is None
    bytes_ = mma_sync.INSTRUCTIONS[-1].a.layout
    assert bytes_.bits("reg") == 4 and loader(bytes_, 90) is None


def test_a_swizzle_serves_loads_and_copies() -> None:
    found = loader(HALVES[-1].a.layout, 80)
    assert found is not None and found[0].name == "ldmatrix.x4"
    eight_rows = Layout.parse("lane: m1 m2 m4 0 0; reg: k1 k2 k4 k8 k16 k32")
    copy = Layout.parse("lane: k8 k16 k32 m1 m2; reg: k1 k2 k4 m4")
    extents = [("k", 6), ("m", 3)]
    swizzle = swizzle_for([(eight_rows, 4), (copy, 4)], extents, 1)
    assert swizzle is not None and swizzle.bits == 3
    assert conflicts([*smem(extents, 1)["m"], 0, 0], 4) == 8


def source(move: MatrixMove) -> str:
    """A kernel of one warp that moves once between a copy of memory in shared memory and registers."""
    n = move.count
    act = (
        f"for (int i = 0; i < {n}; i++) x[i] = held[threadIdx.x * {n} + i];\n  {move.function}(x, at);"
        if move.store
        else f"{move.function}(x, at);\n  for (int i = 0; i < {n}; i++) held[threadIdx.x * {n} + i] = x[i];"
    )
    return (
        move.cuda()
        + f"""
extern "C" __global__ void one(unsigned short* memory, const int* addresses, unsigned* held) {{
  __shared__ __align__(16) unsigned short shared[1024];
  for (int i = threadIdx.x; i < 1024; i += 32) shared[i] = memory[i];
  __syncthreads();
  unsigned x[{n}], at = (unsigned)__cvta_generic_to_shared(shared + addresses[threadIdx.x]);
  {act}
  __syncthreads();
  for (int i = threadIdx.x; i < 1024; i += 32) memory[i] = shared[i];
}}
"""
    )


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here")
def test_the_architecture_that_has_them_first_assembles_them(tmp_path: Path) -> None:
    assemble([(i.since, source(i)) for i in INSTRUCTIONS], tmp_path)


@pytest.mark.gpu
@every
def test_the_gpu_agrees(move: MatrixMove) -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        memory = rng.integers(0, 1 << 15, 1024).astype(np.int16)
        addresses = (rng.permutation(128)[:32] * 8).astype(np.int32)  # 32 different rows of 16 bytes
        held = rng.integers(0, 1 << 15, (32, 2 * move.count)).astype(np.int16)
        there = run_block(source(move), memory, addresses, held)
        if move.store:
            move.put(memory, addresses, held)
        else:
            held = move.load(memory, addresses)
        assert np.array_equal(there[0], memory) and np.array_equal(there[2], held)
