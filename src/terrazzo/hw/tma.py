"""TMA: copies of boxes between tensors in global memory and slabs in shared memory, by one thread.

A tensor map describes the tensor and the box once, on the host; an instruction names the map and the coordinates of the
box's first element. What lies outside the tensor reads as zeros, and counts for the barrier. See the PTX ISA, "Tensor
Map", and the CUDA driver API, cuTensorMapEncodeTiled, for the limits.
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
    """A tensor in global memory and a box of it. Shapes are outermost first; `strides` are in elements, the last one is
    1.

    `swizzle` is the span in bytes (0, 32, 64 or 128) by which the slab is swizzled. Limitation, with the reason, where
    TMA cannot.
    """

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0

    def __post_init__(self) -> None:
        if why := problem(Type(self.dtype, self.shape, self.strides), self.box, self.swizzle):
            raise Limitation(f"TMA: {why}")

    @property
    def bytes(self) -> int:
        """What a box counts for at its barrier, wholly inside the tensor or not."""
        return math.prod(self.box) * self.dtype.size

    def places(self, at: Sequence[int]) -> tuple[Any, Any]:
        """Of the box at these coordinates, what lies inside the tensor: its numbers in the box, and in the tensor's
        memory.
        """
        grid = np.meshgrid(*(np.arange(c, c + n) for c, n in zip(at, self.box, strict=True)), indexing="ij")
        inside = np.logical_and.reduce([(x >= 0) & (x < n) for x, n in zip(grid, self.shape, strict=True)]).reshape(-1)
        offsets: Any = sum(x * s for x, s in zip(grid, self.strides, strict=True))
        return np.nonzero(inside)[0], offsets.reshape(-1)[inside]

    def load(self, tensor: Any, at: Sequence[int]) -> Any:
        """The slab as bytes, for the box at these coordinates (outermost first): the meaning of the instruction.

        The last coordinate must be a multiple of 16 bytes: an H200 takes no other, and the driver's manual does not say
        so.
        """
        if at[-1] * self.dtype.size % 16:
            raise Limitation(
                f"TMA: the box starts {at[-1] * self.dtype.size} bytes into a row, which is no multiple of 16"
            )
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


def problem(tensor: Type, box: Sequence[int], swizzle: int) -> str:
    """Why TMA moves no such box of a tensor, whose sizes are known; nothing where it does."""
    size, shape, strides = tensor.dtype.size, tensor.static_shape, tensor.element_strides
    rank, inner = len(shape), box[-1] * size if box else 0
    steps = [s * size for s in strides[:-1] if isinstance(s, int)]
    for holds, reason in (
        (1 <= rank <= 5, f"the tensor has {rank} dimensions, and TMA takes 1 to 5"),
        (len(strides) == len(box) == rank, "shape, strides and box differ in length"),
        (all(1 <= n <= 1 << 32 for n in shape), f"a dimension of {list(shape)} is not in 1 to 2**32"),
        (all(1 <= n <= 256 for n in box), f"a side of the box {list(box)} is not in 1 to 256"),
        (strides[-1:] == (1,), "the last dimension is not contiguous"),
        (all(s % 16 == 0 and 0 <= s < 1 << 40 for s in steps),
         f"strides of {steps} bytes are not all multiples of 16 below 2**40"),
        (inner % 16 == 0, f"the box is {inner} bytes wide, which is no multiple of 16"),
        (swizzle in SPANS, f"there is no swizzle of {swizzle} bytes; there are {', '.join(map(str, SPANS))}"),
        (not swizzle or inner == swizzle, f"the box is {inner} bytes wide, and the swizzle {swizzle}"),
    ):  # fmt: skip
        if not holds:
            return reason
    return ""


def tensor_map(kind: Type, box: tuple[int, ...], swizzle: int) -> TensorMap:
    """The map of a tensor of this type, whose sizes are known."""
    strides = tuple(s for s in kind.element_strides if isinstance(s, int))
    return TensorMap(kind.dtype, kind.static_shape, strides, box, swizzle)


def load_function(rank: int, cluster: bool = False) -> str:
    """CUDA: `void tma_load_{rank}d(slab, map, barrier, c0, ...)`, coordinates innermost first, addresses of shared
    memory in bytes.

    For a `cluster` there is one that takes a set of ranks, after the barrier.
    """
    coordinates, given = _coordinates(rank)
    places = ", ".join(f"%{k + 3}" for k in range(rank))
    text = (
        "cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{to} "
        "[%0], [%1, {{{places}}}], [%2]{mask};"
    )
    kinds = [("", "", "", "", "")]
    if cluster:
        kinds.append(("_to", ".multicast::cluster", f", %{rank + 3}", "unsigned short ranks, ", ', "h"(ranks)'))
    return "".join(
        f"__device__ __forceinline__ void tma_load{name}_{rank}d"
        f"(unsigned slab, const void* map, unsigned barrier, {ranks}{coordinates}) "
        f'{{\n  asm volatile("{text.format(rank=rank, to=to, places=places, mask=mask)}"\n'
        f'    :: "r"(slab), "l"(map), "r"(barrier), {given}{last} : "memory");\n}}\n'
        for name, to, mask, ranks, last in kinds
    )


def store_function(rank: int, reduction: str) -> str:
    """CUDA: `void tma_store_{rank}d(map, slab, c0, ...)`, or tma_add, tma_min, tma_max where the box is combined with
    what is there.
    """
    coordinates, given = _coordinates(rank)
    places = ", ".join(f"%{k + 2}" for k in range(rank))
    kind = "cp.reduce.async.bulk" if reduction else "cp.async.bulk"
    operation = f".{reduction}" if reduction else ""
    text = f"{kind}.tensor.{rank}d.global.shared::cta{operation}.tile.bulk_group [%1, {{{places}}}], [%0];"
    return (
        f"__device__ __forceinline__ void tma_{reduction or 'store'}_{rank}d"
        f"(const void* map, unsigned slab, {coordinates}) {{\n"
        f'  asm volatile("{text}" :: "r"(slab), "l"(map), {given} : "memory");\n'
        "}\n"
    )


def _coordinates(rank: int) -> tuple[str, str]:
    return ", ".join(f"int c{k}" for k in range(rank)), ", ".join(f'"r"(c{k})' for k in range(rank))


ELECTED = """// One lane of a warp whose lanes are all here, always the same.
__device__ __forceinline__ bool elected() {
  unsigned one;
  asm volatile("{\\n .reg .pred one;\\n elect.sync _|one, 0xffffffff;\\n selp.u32 %0, 1, 0, one;\\n}" : "=r"(one));
  return one;
}
"""

STORES = """// Boxes on their way to global memory, in groups: waited for until they have been read.
__device__ __forceinline__ void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int open> __device__ __forceinline__ void tma_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(open) : "memory");
}
"""
