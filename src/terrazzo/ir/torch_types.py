"""Our constants and PyTorch's, both ways. Torch is imported only when this is used."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from terrazzo.errors import Limitation, UserError
from terrazzo.ir import recurrence
from terrazzo.ir.dialects.torch import TorchName
from terrazzo.ir.types import DTYPES, DType, Type

_TORCH_NAMES = {
    "bool": "bool", "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
    "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "c64": "complex64", "c128": "complex128",
}  # fmt: skip


@lru_cache(maxsize=1)
def _pairs() -> tuple[dict[DType, Any], dict[Any, DType]]:
    import torch

    forward = {DTYPES[ours]: getattr(torch, theirs) for ours, theirs in _TORCH_NAMES.items()}
    return forward, {theirs: ours for ours, theirs in forward.items()}


def to_torch_dtype(dtype: DType) -> Any:
    """The torch.dtype of an element type."""
    return _pairs()[0][dtype]


def from_torch_dtype(dtype: Any) -> DType:
    """Our element type for a torch.dtype; Limitation where there is none."""
    found = _pairs()[1].get(dtype)
    if found is None:
        raise Limitation(f"tensors of {dtype} are not supported; PyTorch runs what uses them")
    return found


def type_of(tensor: Any) -> Type:
    """The type of a (fake or real) tensor. Strides are given where they are not row-major."""
    if not all(isinstance(e, int) for e in tensor.shape):
        raise Limitation("its shape depends on the data")
    shape = tuple(tensor.shape)
    if tensor.layout is not _strided():
        raise Limitation(f"tensors of layout {tensor.layout} are not supported")
    strides = tuple(int(s) for s in tensor.stride())
    plain = Type(from_torch_dtype(tensor.dtype), shape)
    if tensor.is_contiguous() or strides == plain.element_strides:
        return plain
    return Type(plain.dtype, shape, strides)


def _strided() -> Any:
    import torch

    return torch.strided


def from_torch(value: Any) -> Any:
    """An argument of a call as our constant: numbers and strings as they are, sequences as tuples, the rest by name."""
    import torch

    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if isinstance(value, torch.dtype):
        return from_torch_dtype(value)
    if isinstance(value, (list, tuple)):
        return tuple(from_torch(v) for v in value)
    if isinstance(value, torch.device):
        return TorchName(f"device:{value}")
    if isinstance(value, (torch.layout, torch.memory_format)):
        return TorchName(str(value).removeprefix("torch."))
    raise Limitation(f"an argument of type {type(value).__name__} cannot be written in Torch IR: {value!r}")


def to_torch(value: Any) -> Any:
    """The inverse of `from_torch`; anything else (a tensor) stays."""
    import torch

    if isinstance(value, DType):
        return to_torch_dtype(value)
    if isinstance(value, TorchName):
        if value.name.startswith("device:"):
            return torch.device(value.name.removeprefix("device:"))
        found = getattr(torch, value.name, None)
        if not isinstance(found, (torch.layout, torch.memory_format)):
            raise UserError(f"torch.{value.name} is no layout or memory format")
        return found
    if isinstance(value, (tuple, list)):
        return [to_torch(v) for v in value]
    return value


def operator(name: str) -> Any:
    """The callable behind `aten.add.Tensor`, or of our own; UserError if PyTorch has none of that name."""
    import torch

    parts = name.split(".")
    if parts[0] == recurrence.NAMESPACE:
        recurrence.linear_recurrence()
    found: Any = torch.ops
    for part in parts:
        found = getattr(found, part, None) if part.isidentifier() else None
        special = part.startswith("_" * 2)  # aten.__rshift__ is an operator, and __class__ is none
        if found is None or (special and not isinstance(found, torch._ops.OpOverloadPacket)):
            raise UserError(f"PyTorch has no operator {name}")
    if not isinstance(found, torch._ops.OpOverload):
        raise UserError(f"{name} is no operator overload; write it out, as in aten.add.Tensor")
    return found
