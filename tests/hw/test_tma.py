"""TMA: what cannot be described is refused, a box is a copy, and the GPU agrees: swizzles, 1 to 5 dimensions, boxes
that stick out.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terrazzo.errors import Limitation
from terrazzo.hw.barrier import MBARRIERS
from terrazzo.hw.tma import TensorMap, load_function
from terrazzo.ir.layout import HARDWARE
from terrazzo.ir.types import DTYPES
from tests.hw.device import assemble, run_block

BF16, F32 = DTYPES["bf16"], DTYPES["f32"]


def plain(shape: tuple[int, ...], box: tuple[int, ...], swizzle: int = 0, dtype: Any = BF16) -> TensorMap:
    strides = tuple(int(np.prod(shape[d + 1 :])) for d in range(len(shape)))
    return TensorMap(dtype, shape, strides, box, swizzle)


CASES = [
    (plain((96,), (32,)), (32,)),
    (plain((40, 64), (16, 64), 128), (8, 0)),
    (plain((40, 64), (16, 64), 128), (32, 0)),  # eight rows beyond the end
    (plain((40, 64), (16, 64), 128), (-8, -16)),  # before the start
    (plain((40, 64), (8, 32), 64), (3, 40)),
    (plain((40, 64), (8, 16), 32), (1, 8)),
    (plain((40, 64), (8, 16)), (100, 0)),  # wholly outside
    (plain((40, 32), (8, 32), 128, F32), (5, 4)),
    (TensorMap(BF16, (8, 40), (64, 1), (8, 32), 64), (0, 16)),  # rows of a wider tensor
    (plain((3, 10, 64), (2, 8, 64), 128), (2, 5, 8)),
    (plain((2, 3, 10, 32), (1, 2, 4, 32), 64), (1, 2, 7, 8)),
    (plain((2, 2, 3, 10, 16), (1, 2, 2, 4, 16), 32), (1, -1, 2, 8, 8)),
]
every = pytest.mark.parametrize(("tensor_map", "at"), CASES, ids=lambda v: str(getattr(v, "box", v)))


def tensor(tensor_map: TensorMap) -> tuple[Any, Any]:
    """Memory of small integers, and the tensor as a view of it."""
    size = 1 + sum((n - 1) * s for n, s in zip(tensor_map.shape, tensor_map.strides, strict=True))
    memory = (np.arange(size) % 251 + 1).astype(tensor_map.dtype.numpy)
    width = tensor_map.dtype.size
    return memory, np.lib.stride_tricks.as_strided(memory, tensor_map.shape, [s * width for s in tensor_map.strides])


@every
def test_a_box_is_a_copy(tensor_map: TensorMap, at: tuple[int, ...]) -> None:
    _, view = tensor(tensor_map)
    slab = tensor_map.load(view, at)
    assert slab.size == tensor_map.bytes
    straight = (
        slab[HARDWARE[tensor_map.swizzle](np.arange(slab.size))].view(tensor_map.dtype.numpy).reshape(tensor_map.box)
    )
    for place in np.ndindex(*tensor_map.box):
        source = tuple(p + c for p, c in zip(place, at, strict=True))
        inside = all(0 <= c < n for c, n in zip(source, tensor_map.shape, strict=True))
        assert straight[place] == (view[source] if inside else 0)


@pytest.mark.parametrize(
    ("shape", "strides", "box", "swizzle", "reason"),
    [
        ((2,) * 6, (32, 16, 8, 4, 2, 1), (1,) * 6, 0, "the tensor has 6 dimensions"),
        ((8, 8), (8,), (8, 8), 0, "differ in length"),
        ((8, 512), (512, 1), (8, 512), 0, "a side of the box [8, 512] is not in 1 to 256"),
        ((8, 8), (16, 2), (8, 8), 0, "the last dimension is not contiguous"),
        ((8, 7), (7, 1), (8, 8), 0, "strides of [14] bytes are not all multiples of 16"),
        ((8, 16), (16, 1), (8, 4), 0, "the box is 8 bytes wide"),
        ((8, 16), (16, 1), (8, 8), 48, "there is no swizzle of 48 bytes"),
        ((8, 64), (64, 1), (8, 64), 64, "the box is 128 bytes wide, and the swizzle 64"),
        ((0, 64), (64, 1), (8, 64), 0, "is not in 1 to 2**32"),
    ],
)
def test_what_tma_cannot_take(shape: Any, strides: Any, box: Any, swizzle: int, reason: str) -> None:
    with pytest.raises(Limitation, match=re.escape(reason)):
        TensorMap(BF16, shape, strides, box, swizzle)


def test_boxes_start_at_multiples_of_16_bytes() -> None:
    with pytest.raises(Limitation, match="starts 6 bytes into a row"):
        CASES[1][0].load(np.zeros((40, 64)), (0, 3))


def source(tensor_map: TensorMap, at: tuple[int, ...]) -> str:
    """A kernel of one warp that loads a box and writes out the bytes it finds in shared memory."""
    rank, size = len(at), tensor_map.bytes
    where = ", ".join(str(c) for c in reversed(at))
    return (
        load_function(rank)
        + f"""
extern "C" __global__ void one(unsigned char* out, const void* map) {{
  __shared__ __align__(1024) unsigned char slab[{size}];
  __shared__ __align__(8) unsigned long long full;
  unsigned barrier = (unsigned)__cvta_generic_to_shared(&full);
  if (threadIdx.x == 0) {{ barrier_init(barrier, 1); barrier_init_fence(); }}
  __syncthreads();
  if (threadIdx.x == 0) {{
    barrier_expect(barrier, {size});
    tma_load_{rank}d((unsigned)__cvta_generic_to_shared(slab), map, barrier, {where});
  }}
  barrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < {size}; i += 32) out[i] = slab[i];
}}
"""
    )


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here")
def test_hopper_assembles_them(tmp_path: Path) -> None:
    by_rank = {len(at): source(m, at) for m, at in CASES}
    assemble([("90", (MBARRIERS if k == 0 else "") + text) for k, text in enumerate(by_rank.values())], tmp_path)


@pytest.mark.gpu
@every
def test_the_gpu_agrees(tensor_map: TensorMap, at: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("TMA came with Hopper")
    from terrazzo.run.tensor_map import encode

    memory, view = tensor(tensor_map)
    there = torch.from_numpy(memory.view(np.uint8)).cuda()
    encoded = np.frombuffer(encode(tensor_map, there.data_ptr()), np.uint8)
    out, _ = run_block(MBARRIERS + source(tensor_map, at), np.zeros(tensor_map.bytes, np.uint8), encoded)
    assert np.array_equal(out, tensor_map.load(view, at))


def test_every_whole_number_and_float_has_a_type_of_the_driver() -> None:
    """Weights may be packed into numbers of any length, signed or not."""
    from terrazzo.ir.types import DTYPES
    from terrazzo.run.tensor_map import _TYPES

    assert {t.name for t in DTYPES.values() if t.kind != "complex"} == {*_TYPES}


@pytest.mark.parametrize(("row", "together"), [(1024, 256), (1000, 128), (1088, 256), (1032, 128)])
def test_of_rows_that_begin_anywhere_in_lines_these_are_brought_one_by_one(row: int, together: int) -> None:
    from terrazzo.run import tensor_map as maps

    bf16 = DTYPES["bf16"]
    assert maps.together(TensorMap(bf16, (64, row), (row, 1), (8, 64), 128)) == together
    assert maps.together(TensorMap(bf16, (4, 64, 64), (64 * row, row, 1), (1, 8, 64), 128)) == together
