"""Tensor maps for the driver: the 128 bytes a kernel names when it asks TMA for a box."""

from __future__ import annotations

import ctypes
from typing import Any

from terrazzo.errors import CompilerBug, UserError
from terrazzo.hw.tma import TensorMap

_TYPES = {
    "u8": "UINT8", "i8": "UINT8", "bool": "UINT8", "u16": "UINT16", "i16": "UINT16", "u32": "UINT32", "i32": "INT32",
    "u64": "UINT64", "i64": "INT64",
    "f16": "FLOAT16", "bf16": "BFLOAT16", "f32": "FLOAT32", "f64": "FLOAT64",
}  # fmt: skip


LINE = 128
"""Bytes of a line of the cache."""


def together(tensor_map: TensorMap) -> int:
    """Bytes that the cache is to bring from memory together: two lines, or one where rows begin anywhere in lines. Of
    boxes of such rows two are more than is needed, and products with 1000 columns of bfloat16 took 6 to 12 % longer so:
    1000 cubed 9.8 us for 9.2, 300 x 1000 x 3000 11.3 for 10.6 (H100). Where rows begin with lines it made no
    difference from 512 x 2048 x 5632 to 4096 cubed.
    """
    size = tensor_map.dtype.size
    return LINE if any(s * size % LINE for s in tensor_map.strides[:-1]) else 2 * LINE


def encode(tensor_map: TensorMap, address: int) -> bytes:
    """The map of the tensor that starts at `address` in global memory, which must be a multiple of 16. UserError
    without a driver.
    """
    try:
        from cuda.bindings import driver
    except ImportError as e:
        raise UserError(f"tensor maps need {e.name}: pip install 'terrazzo[cuda]'") from None
    if tensor_map.dtype.name not in _TYPES:
        raise CompilerBug(f"TMA has no type for {tensor_map.dtype}")
    names: Any = driver.CUtensorMapDataType
    size, rank = tensor_map.dtype.size, len(tensor_map.shape)
    error, encoded = driver.cuTensorMapEncodeTiled(
        getattr(names, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[tensor_map.dtype.name]}"),
        rank,
        address,
        [driver.cuuint64_t(n) for n in reversed(tensor_map.shape)],
        [driver.cuuint64_t(s * size) for s in reversed(tensor_map.strides[:-1])]
        or [driver.cuuint64_t(16)],  # it wants one, even unread
        [driver.cuuint32_t(n) for n in reversed(tensor_map.box)],
        [driver.cuuint32_t(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(
            driver.CUtensorMapSwizzle,
            f"CU_TENSOR_MAP_SWIZZLE_{f'{tensor_map.swizzle}B' if tensor_map.swizzle else 'NONE'}",
        ),
        getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{together(tensor_map)}B"),
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise CompilerBug(
            f"the driver refuses a tensor map it should take ({error.name}): {tensor_map} at {address:#x}"
        )
    return ctypes.string_at(int(encoded.getPtr()), 128)
