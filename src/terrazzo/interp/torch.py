"""The meaning of Torch IR: what PyTorch says (docs/adr/003)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from terrazzo.errors import CallFailed, IndexOutOfRange, about
from terrazzo.ir.dialects.torch import Aten, Get
from terrazzo.ir.node import Node
from terrazzo.ir.program import Program, in_turn
from terrazzo.ir.torch_types import operator, to_torch
from terrazzo.ir.types import DType, f64


def run(program: Program, inputs: Mapping[str, Any], *, precise: bool = False) -> list[Any]:
    """The results as torch tensors. With `precise`, every float is computed in float64."""
    import torch

    values: dict[Node, Any] = {i: _raise(torch.as_tensor(inputs[i.name]), precise) for i in program.inputs}
    with torch.no_grad():
        for node in in_turn(program.results):
            if isinstance(node, Aten):
                with about(node):
                    values[node] = call(
                        node.name, _fill(node.args, values), {k: _fill(v, values) for k, v in node.kwargs}, precise
                    )
            elif isinstance(node, Get):
                values[node] = values[node.x][node.index]
    return [values[r] for r in program.results]


def call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], precise: bool = False) -> Any:
    """Run one ATen op on tensors and our constants. What PyTorch has against the data is an IndexOutOfRange or a
    CallFailed.
    """
    given = to_torch(_precise(tuple(args)) if precise else tuple(args))
    named = {k: to_torch(_precise(v) if precise else v) for k, v in kwargs.items()}
    try:
        return operator(name)(*given, **named)
    except (IndexError, RuntimeError, ValueError, TypeError) as error:
        if "can't allocate memory" in str(error):
            raise
        kind = IndexOutOfRange if isinstance(error, IndexError) else CallFailed
        told = next(filter(str.strip, str(error).splitlines()), type(error).__name__)
        raise kind(f"PyTorch cannot run {name}: {told}") from error


def call_numpy(name: str, args: Any, kwargs: Mapping[str, Any], precise: bool = False) -> Any:
    """`call` for the numpy interpreters: arrays in, arrays out."""
    out = call(name, _tensors(args), {k: _tensors(v) for k, v in kwargs.items()}, precise)
    return tuple(to_numpy(o) for o in out) if isinstance(out, (tuple, list)) else to_numpy(out)


def to_numpy(tensor: Any) -> Any:
    """A tensor as an array of the numpy type of its element type; bfloat16 included."""
    import ml_dtypes
    import torch

    if tensor is None:
        return None
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def from_numpy(array: Any) -> Any:
    """The inverse of `to_numpy`."""
    import ml_dtypes
    import torch

    array = np.array(array)
    if array.dtype == np.dtype(ml_dtypes.bfloat16):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _tensors(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return from_numpy(value)
    return tuple(_tensors(v) for v in value) if isinstance(value, (tuple, list)) else value


def _fill(value: Any, values: Mapping[Node, Any]) -> Any:
    if isinstance(value, Node):
        return values[value]
    return tuple(_fill(v, values) for v in value) if isinstance(value, tuple) else value


def _raise(tensor: Any, precise: bool) -> Any:
    return tensor.double() if precise and tensor.is_floating_point() else tensor


def _precise(value: Any) -> Any:
    if isinstance(value, DType):
        return f64 if value.is_float else value
    return tuple(_precise(v) for v in value) if isinstance(value, tuple) else value
