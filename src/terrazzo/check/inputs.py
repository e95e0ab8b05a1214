"""Random inputs for a program."""

from __future__ import annotations

from typing import Any

from terrazzo.errors import about


def random_inputs(program: Any, seed: int = 0) -> dict[str, Any]:
    """Normal floats; integers that are 0 or 1, which are indices into anything that has two elements; random bools."""
    import torch

    from terrazzo.ir.torch_types import to_torch_dtype

    generator = torch.Generator().manual_seed(seed)
    found = {}
    for i in getattr(program, "loop", program).inputs:
        with about(i):
            shape, dtype, strides = i.type.static_shape, to_torch_dtype(i.type.dtype), i.type.strides
        try:
            if strides is None:
                floats = torch.randn(shape, generator=generator)
            else:  # elements that lie at one place are one
                floats = torch.randn((i.type.span // i.type.dtype.size,), generator=generator)
        except (RuntimeError, TypeError):  # which is how PyTorch says that memory or 64 bits do not suffice
            raise MemoryError(f"input {i.name} is {i.type}") from None
        values = (floats if i.type.dtype.is_float else floats > 0).to(dtype)
        found[i.name] = values if strides is None else values.as_strided(shape, strides)
    return found
