"""The instructions of a warpgroup: fragments, meaning, PTX, and on a Hopper GPU the same numbers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terrazzo.hw.wgmma import DESCRIPTOR, INSTRUCTIONS, WarpgroupInstruction, addresses, descriptor
from terrazzo.ir.layout import HARDWARE
from tests.hw.device import assemble, run_block

every = pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.name)
K, ROW = 64, 128
"""Four slices of k, which is a row of a slab, in bytes under the swizzle of 128."""


@every
def test_every_element_has_one_place(instruction: WarpgroupInstruction) -> None:
    m, n, _ = instruction.shape
    layout = instruction.d.layout
    assert layout.covers and layout.injective and layout.elements == m * n == 128 * instruction.d.elements


def slabs(instruction: WarpgroupInstruction) -> tuple[Any, Any, Any, Any]:
    """Small integers a [m, K], b [n, K] and c [m, n], and the bytes of shared memory that hold a and then b."""
    rng, (m, n, _) = np.random.default_rng(0), instruction.shape
    a, b, c = (rng.integers(-8, 9, shape) for shape in ((m, K), (n, K), (m, n)))
    memory = np.zeros((m + n) * ROW, np.uint8)
    plain = np.concatenate([a, b]).astype(instruction.operand.numpy).view(np.uint8).reshape(-1)
    memory[HARDWARE[ROW](np.arange(plain.size))] = plain
    return a, b, c, memory


@every
def test_a_factor_in_registers(instruction: WarpgroupInstruction) -> None:
    a, b, c, _ = slabs(instruction)
    total, held = instruction.distribute(c.astype(np.float32)), held_in_registers(instruction, a)
    for k in range(4):
        left = instruction.collect(held[k].view(instruction.operand.numpy))
        total = instruction.run(left, b[:, 16 * k : 16 * k + 16], total)
    assert np.array_equal(total, instruction.distribute((a @ b.T + c).astype(np.float32)))


@every
def test_it_multiplies_slabs(instruction: WarpgroupInstruction) -> None:
    a, b, c, memory = slabs(instruction)
    held, start = instruction.distribute(c.astype(np.float32)), instruction.shape[0] * ROW
    for k in range(0, K, 16):
        left, right = (
            memory[addresses(descriptor(at + 2 * k, ROW), rows, 32)].view(instruction.operand.numpy)
            for at, rows in ((0, instruction.shape[0]), (start, instruction.shape[1]))
        )
        held = instruction.run(left, right, held)
    assert np.array_equal(held, instruction.distribute((a @ b.T + c).astype(np.float32)))


def held_in_registers(instruction: WarpgroupInstruction, a: Any) -> Any:
    """What the threads hold of a [m, K], [slice of k, thread, register]; a slice that is collected is what it was."""
    reg, thread = np.meshgrid(np.arange(instruction.a.elements), np.arange(128))
    at = instruction.a.layout.coordinates(reg=reg, lane=thread % 32, warp=thread // 32)
    slices = [a.astype(instruction.operand.numpy)[:, k : k + 16] for k in range(0, K, 16)]
    held = [x[at["m"], at["k"]] for x in slices]
    assert all(np.array_equal(instruction.collect(h), x) for h, x in zip(held, slices, strict=True))
    return np.ascontiguousarray(np.stack(held)).view(np.int32)


def source(instruction: WarpgroupInstruction, registers: bool = False) -> str:
    """A kernel of one warpgroup that multiplies two slabs, given as bytes, or one that it has in `registers` by a
    slab.
    """
    m, n, _ = instruction.shape
    count, size = instruction.d.registers, (m + n) * ROW
    return (
        instruction.cuda(registers)
        + f"""
extern "C" __global__ void __launch_bounds__(128, 1) one(float* d, const unsigned* memory, const unsigned* fragments) {{
  __shared__ __align__(1024) unsigned shared[{size // 4}];
  float x[{count}];
  unsigned held[4][4];
  for (int i = 0; i < 16; i++) held[i / 4][i % 4] = fragments[(i / 4 * 128 + threadIdx.x) * 4 + i % 4];
  for (int i = threadIdx.x; i < {size // 4}; i += 128) shared[i] = memory[i];
  for (int i = 0; i < {count}; i++) x[i] = d[threadIdx.x * {count} + i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  unsigned long long a = slab_descriptor<{ROW}>((unsigned)__cvta_generic_to_shared(shared));
  unsigned long long b = slab_descriptor<{ROW}>((unsigned)__cvta_generic_to_shared(shared) + {m * ROW});
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  #pragma unroll
  for (int k = 0; k < 4; k++) {instruction.function}(x, {"held[k]" if registers else "a + 2 * k"}, b + 2 * k);
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < {count}; i++) d[threadIdx.x * {count} + i] = x[i];
}}
"""
    )


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here")
def test_hopper_assembles_them(tmp_path: Path) -> None:
    kernels = [
        ("90a", source(i, registers)) for i in INSTRUCTIONS if i.shape[1] in (8, 256) for registers in (False, True)
    ]
    assemble([(arch, (DESCRIPTOR if k == 0 else "") + text) for k, (arch, text) in enumerate(kernels)], tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("registers", [False, True])
@every
def test_the_gpu_agrees(instruction: WarpgroupInstruction, registers: bool) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is Hopper's alone")
    a, b, c, memory = slabs(instruction)
    held = instruction.distribute(c.astype(np.float32))
    given = held, memory.view(np.int32), held_in_registers(instruction, a)
    d, *_ = run_block(DESCRIPTOR + source(instruction, registers), *given, threads=128, arch="sm_90a")
    assert np.array_equal(d, instruction.distribute((a @ b.T + c).astype(np.float32)))
