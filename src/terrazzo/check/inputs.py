"""Random inputs for a program."""

from __future__ import annotations

from typing import Any


def random_inputs(program: Any, seed: int = 0) -> dict[str, Any]:
    """Normal floats; integers that are 0 or 1, which are indices into anything that has two elements; random bools."""
    import torch

    from terrazzo.ir.torch_types import to_torch_dtype

    generator = torch.Generator().manual_seed(seed)
    found = {}
    for i in getattr(program, "loop", program).inputs:
        shape, dtype = i.type.static_shape, to_torch_dtype(i.type.dtype)
        try:
            floats = torch.randn(shape, generator=generator)
        except (RuntimeError, TypeError):  # which is how PyTorch says that memory or 64 bits do not suffice
            raise MemoryError(f"input {i.name} is {i.type}") from None
        found[i.name] = (floats if i.type.dtype.is_float else floats > 0).to(dtype)
    return found
