"""The instructions of a warpgroup: fragments, meaning, PTX, and on a Hopper GPU the same numbers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terrazzo.errors import UserError
from terrazzo.hw.wgmma import DESCRIPTOR, INSTRUCTIONS, Slab, WarpgroupInstruction, addresses, descriptor, product
from terrazzo.ir.layout import HARDWARE
from tests.hw.device import assemble, run_block

every = pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.name)
some = pytest.mark.parametrize(
    "instruction", [i for i in INSTRUCTIONS if i.shape[1] in (8, 24, 64, 136, 256)], ids=lambda i: i.name
)
majors = pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
K, ROW = 64, 128
"""Four slices of k, which is a row of a slab, in bytes under the swizzle of 128."""
PANEL = K * ROW
"""Bytes of a panel of an operand whose rows go along m or n."""


@every
def test_every_element_has_one_place(instruction: WarpgroupInstruction) -> None:
    m, n, _ = instruction.shape
    threads, reg = np.arange(128)[:, None], np.arange(instruction.d.elements)
    at = instruction.d.coordinates(reg, lane=threads % 32, warp=threads // 32)
    assert at["m"].size == m * n == len(np.unique(at["m"] * n + at["n"]))
    assert at["m"].max() == m - 1 and at["n"].max() == n - 1


def test_every_width_has_a_record() -> None:
    assert [i.shape[1] for i in INSTRUCTIONS if i.operand.name == "bf16"] == list(range(8, 257, 8))
    with pytest.raises(
        UserError, match=r"unknown instruction wgmma.m64n12k16.f32.bf16; known: .* every n that is a multiple of 8"
    ):
        product("wgmma.m64n12k16.f32.bf16")


def test_a_swizzle_has_a_width() -> None:
    with pytest.raises(UserError, match="a slab is swizzled by 32, 64 or 128 bytes, not 0"):
        Slab(0)


def laid(x: Any, transposed: bool) -> Any:
    """The bytes of a slab of x [rows, K], swizzled: rows of K, or panels of [K, 64 rows]."""
    if transposed:
        rows = -(-len(x) // 64) * 64
        x = np.concatenate([x, np.zeros((rows - len(x), K), x.dtype)]).reshape(-1, 64, K).swapaxes(1, 2)
    plain = np.ascontiguousarray(x).view(np.uint8).reshape(-1)
    memory = np.zeros_like(plain)
    memory[HARDWARE[ROW](np.arange(plain.size))] = plain
    return memory


def given(instruction: WarpgroupInstruction, transposed: str = "") -> tuple[Any, Any, Any, list[Any]]:
    """Small integers a [m, K], b [n, K] and c [m, n], and the bytes of shared memory that hold a and b."""
    rng, (m, n, _) = np.random.default_rng(0), instruction.shape
    a, b, c = (rng.integers(-8, 9, shape) for shape in ((m, K), (n, K), (m, n)))
    kind = instruction.operand.numpy
    return a, b, c, [laid(x.astype(kind), name in transposed) for name, x in (("a", a), ("b", b))]


def slice_of(instruction: WarpgroupInstruction, memory: Any, operand: str, at: int, k: int, transposed: bool) -> Any:
    """What a descriptor says that a slice of k of an operand is."""
    start = at + (k * ROW if transposed else 2 * k)
    where = addresses(descriptor(start, Slab(ROW, PANEL)), *instruction.extent(operand, transposed))
    found = memory[where].view(instruction.operand.numpy)
    return found.T if transposed else found


@every
def test_a_factor_in_registers(instruction: WarpgroupInstruction) -> None:
    a, b, c, _ = given(instruction)
    total, held = instruction.distribute(c.astype(np.float32)), held_in_registers(instruction, a)
    for k in range(4):
        left = instruction.collect(held[k].view(instruction.operand.numpy))
        total = instruction.run(left, b[:, 16 * k : 16 * k + 16], total)
    assert np.array_equal(total, instruction.distribute((a @ b.T + c).astype(np.float32)))


@majors
@every
def test_it_multiplies_slabs(instruction: WarpgroupInstruction, transposed: str) -> None:
    a, b, c, slabs = given(instruction, transposed)
    memory, at = np.concatenate(slabs), (0, slabs[0].size)
    held: Any = None
    for k in range(0, K, 16):
        left, right = (slice_of(instruction, memory, name, at[n], k, name in transposed) for n, name in enumerate("ab"))
        held = instruction.run(left, right, held)
    assert np.array_equal(held, instruction.distribute((a @ b.T).astype(np.float32)))
    more = instruction.run(left, right, instruction.distribute(c.astype(np.float32)))
    assert np.array_equal(more, instruction.distribute((a[:, -16:] @ b[:, -16:].T + c).astype(np.float32)))


def held_in_registers(instruction: WarpgroupInstruction, a: Any) -> Any:
    """What the threads hold of a [m, K], [slice of k, thread, register]; a slice that is collected is what it was."""
    reg, thread = np.meshgrid(np.arange(instruction.a.elements), np.arange(128))
    at = instruction.a.layout.coordinates(reg=reg, lane=thread % 32, warp=thread // 32)
    slices = [a.astype(instruction.operand.numpy)[:, k : k + 16] for k in range(0, K, 16)]
    held = [x[at["m"], at["k"]] for x in slices]
    assert all(np.array_equal(instruction.collect(h), x) for h, x in zip(held, slices, strict=True))
    return np.ascontiguousarray(np.stack(held)).view(np.int32)


def source(
    instruction: WarpgroupInstruction, sizes: tuple[int, int], registers: bool, fresh: bool, transposed: str
) -> str:
    """A kernel of one warpgroup that multiplies two slabs, given as bytes, or one that it has in `registers` by a
    slab. If `fresh`, the first of its products overwrites.
    """
    count, size = instruction.d.registers, sum(sizes)
    step = {name: ROW if name in transposed else 2 for name in "ab"}  # (bytes of 16 of k) >> 4
    a = "held[k]" if registers else f"a + {step['a']} * k"
    return (
        instruction.cuda(registers, fresh, transposed)
        + f"""
extern "C" __global__ void __launch_bounds__(128, 1) one(float* d, const unsigned* memory, const unsigned* fragments) {{
  extern __shared__ __align__(1024) unsigned shared[];
  float x[{count}];
  unsigned held[4][4];
  for (int i = 0; i < 16; i++) held[i / 4][i % 4] = fragments[(i / 4 * 128 + threadIdx.x) * 4 + i % 4];
  for (int i = threadIdx.x; i < {size // 4}; i += 128) shared[i] = memory[i];
  for (int i = 0; i < {count}; i++) x[i] = d[threadIdx.x * {count} + i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const unsigned at = (unsigned)__cvta_generic_to_shared(shared);
  unsigned long long a = slab_descriptor<{Slab(ROW, PANEL).bits}ull>(at, 0);
  unsigned long long b = slab_descriptor<{Slab(ROW, PANEL).bits}ull>(at, {sizes[0] // 16});
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  #pragma unroll
  for (int k = 0; k < 4; k++) {instruction.function(transposed)}(x, {a}, b + {step["b"]} * k{", k" if fresh else ""});
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < {count}; i++) d[threadIdx.x * {count} + i] = x[i];
}}
"""
    )


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here")
def test_hopper_assembles_them(tmp_path: Path) -> None:
    kernels = []
    for i in (product("wgmma.m64n24k16.f32.f16"), product("wgmma.m64n256k16.f32.bf16")):
        for registers, fresh, transposed in (
            (False, False, ""),
            (True, False, ""),
            (False, True, "ab"),
            (True, True, "b"),
        ):
            sizes = tuple(x.size for x in given(i, transposed)[3])
            kernels.append(("90a", source(i, (sizes[0], sizes[1]), registers, fresh, transposed)))
    assemble([(arch, (DESCRIPTOR if k == 0 else "") + text) for k, (arch, text) in enumerate(kernels)], tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    ("registers", "transposed"), [(False, ""), (True, ""), (False, "a"), (False, "b"), (False, "ab"), (True, "b")]
)
@some
def test_the_gpu_agrees(instruction: WarpgroupInstruction, registers: bool, transposed: str, fresh: bool) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is Hopper's alone")
    a, b, c, slabs = given(instruction, transposed)
    held, size = instruction.distribute(c.astype(np.float32)), sum(x.size for x in slabs)
    text = DESCRIPTOR + source(instruction, (slabs[0].size, slabs[1].size), registers, fresh, transposed)
    arrays = held, np.concatenate(slabs).view(np.int32), held_in_registers(instruction, a)
    d, *_ = run_block(text, *arrays, threads=128, arch="sm_90a", shared=size)
    best = a @ b.T + (0 if fresh else c)
    assert np.array_equal(d, instruction.distribute(best.astype(np.float32)))


@pytest.mark.gpu
@every
def test_the_gpu_agrees_for_every_width(instruction: WarpgroupInstruction) -> None:
    test_the_gpu_agrees(instruction, False, "", False)
