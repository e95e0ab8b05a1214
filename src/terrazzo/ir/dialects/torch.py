"""Torch IR: the captured graph, one node per ATen call. What an op means is what PyTorch says it means.

def forward(x: f32[1, 32, 2048], w: f32[2048]):
    mul: f32[1, 32, 2048] = aten.mul.Tensor(x, x)                     # modeling_llama.py:72
    mean: f32[1, 32, 1] = aten.mean.dim(mul, [-1], True)              # modeling_llama.py:73
    return mul, mean
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from terrazzo.errors import UserError
from terrazzo.ir.node import Node
from terrazzo.ir.types import Type


@dataclass(frozen=True)
class TorchName:
    """A constant of the torch module that is no number: `torch.strided`, `torch.channels_last`,
    `torch.device('cpu')`.
    """

    name: str


class Aten(Node, dialect="torch", op="aten"):
    """One call of an ATen overload.

    `name` is spelled as in PyTorch: `aten.add.Tensor`. `args` and `kwargs` hold nodes, ints, floats, bools, strings,
    None, DType, TorchName and tuples of these. `result` is the type of the result as PyTorch gives it, or a tuple of
    types (None where an optional result is absent). `order` is 0 for pure ops and numbers the others, so that two
    random calls stay two.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    result: Type | tuple[Type | None, ...]
    order: int = 0

    @property
    def type(self) -> Type | tuple[Type | None, ...]:
        return self.result


class Get(Node, dialect="torch", op="get"):
    """One result of an op that has several."""

    x: Aten
    index: int

    @classmethod
    def make(cls, x: Any, index: int) -> Any:
        return x[index] if isinstance(x, tuple) else cls(x, index)  # a lowered op is a tuple of its results

    def check(self) -> None:
        results = self.x.type
        if not isinstance(results, tuple) or not 0 <= self.index < len(results):
            raise UserError(f"get: {self.x.name} has no result {self.index}")

    @property
    def type(self) -> Type | None:
        results = self.x.type
        assert isinstance(results, tuple)
        return results[self.index]
