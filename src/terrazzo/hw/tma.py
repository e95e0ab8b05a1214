"""TMA: copies of boxes between tensors in global memory and slabs in shared memory, by one thread, and the barriers they arrive at.

A tensor map describes the tensor and the box once, on the host; an instruction names the map and the coordinates of the box's first
element. What lies outside the tensor reads as zeros, and counts for the barrier. See the PTX ISA, "Tensor Map", and the CUDA driver API,
cuTensorMapEncodeTiled, for the limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from terrazzo.errors import Limitation
from terrazzo.ir.layout import HARDWARE
from terrazzo.ir.types import DType, Type

SPANS = tuple(HARDWARE)


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and a box of it. Shapes are outermost first; `strides` are in elements, the last one is 1.

    `swizzle` is the span in bytes (0, 32, 64 or 128) by which the slab is swizzled. Limitation, with the reason, where TMA cannot.
    """

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0

    def __post_init__(self) -> None:
        size, rank = self.dtype.size, len(self.shape)
        inner = self.box[-1] * size if self.box else 0
        steps = [s * size for s in self.strides[:-1]]
        for holds, reason in (
            (1 <= rank <= 5, f"the tensor has {rank} dimensions, and TMA takes 1 to 5"),
            (len(self.strides) == len(self.box) == rank, "shape, strides and box differ in length"),
            (all(1 <= n <= 1 << 32 for n in self.shape), f"a dimension of {list(self.shape)} is not in 1 to 2**32"),
            (all(1 <= n <= 256 for n in self.box), f"a side of the box {list(self.box)} is not in 1 to 256"),
            (self.strides[-1:] == (1,), "the last dimension is not contiguous"),
            (all(s % 16 == 0 and 0 <= s < 1 << 40 for s in steps), f"strides of {steps} bytes are not all multiples of 16 below 2**40"),
            (inner % 16 == 0, f"the box is {inner} bytes wide, which is no multiple of 16"),
            (self.swizzle in SPANS, f"there is no swizzle of {self.swizzle} bytes; there are {', '.join(map(str, SPANS))}"),
            (not self.swizzle or inner <= self.swizzle, f"the box is {inner} bytes wide, more than the swizzle's {self.swizzle}"),
        ):  # fmt: skip
            if not holds:
                raise Limitation(f"TMA: {reason}")

    @property
    def bytes(self) -> int:
        """What a box counts for at its barrier, wholly inside the tensor or not."""
        return math.prod(self.box) * self.dtype.size

    def load(self, tensor: Any, at: Sequence[int]) -> Any:
        """The slab as bytes, for the box at these coordinates (outermost first): the meaning of the instruction.

        The last coordinate must be a multiple of 16 bytes: an H200 takes no other, and the driver's manual does not say so.
        """
        if at[-1] * self.dtype.size % 16:
            raise Limitation(f"TMA: the box starts {at[-1] * self.dtype.size} bytes into a row, which is no multiple of 16")
        slab = np.zeros(self.box, self.dtype.numpy)
        inside = [slice(max(c, 0), max(min(c + b, n), 0)) for c, b, n in zip(at, self.box, self.shape, strict=True)]
        given = tensor[tuple(inside)]
        place = [slice(s.start - c, s.start - c + extent) for s, c, extent in zip(inside, at, given.shape, strict=True)]
        if given.size:
            slab[tuple(place)] = given
        plain = np.ascontiguousarray(slab).view(np.uint8).reshape(-1)
        out = np.empty_like(plain)
        out[HARDWARE[self.swizzle](np.arange(plain.size))] = plain
        return out


def tensor_map(kind: Type, box: tuple[int, ...], swizzle: int) -> TensorMap:
    """The map of a tensor of this type, whose sizes are known."""
    strides = tuple(s for s in kind.element_strides if isinstance(s, int))
    return TensorMap(kind.dtype, kind.static_shape, strides, box, swizzle)


def load_function(rank: int) -> str:
    """CUDA: `void tma_load_{rank}d(slab, map, barrier, c0, ...)`, coordinates innermost first, addresses of shared memory in bytes."""
    coordinates = ", ".join(f"int c{k}" for k in range(rank))
    given = ", ".join(f'"r"(c{k})' for k in range(rank))
    places = ", ".join(f"%{k + 3}" for k in range(rank))
    text = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {{{places}}}], [%2];"
    return (
        f"__device__ __forceinline__ void tma_load_{rank}d(unsigned slab, const void* map, unsigned barrier, {coordinates}) {{\n"
        f'  asm volatile("{text}" :: "r"(slab), "l"(map), "r"(barrier), {given} : "memory");\n'
        "}\n"
    )


BARRIERS = """// Barriers in shared memory. A phase ends when all arrivals are in and all bytes that were announced have come.
__device__ __forceinline__ void barrier_init(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned phase) {
  asm volatile(
    "{\\n .reg .pred done;\\n again_%=:\\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n @!done bra again_%=;\\n}"
    :: "r"(barrier), "r"(phase) : "memory");
}
"""
