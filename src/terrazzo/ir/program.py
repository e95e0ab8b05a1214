"""A program of Torch or Tensor IR: named inputs, named values, results.

The values form a graph of interned nodes; the names (and source lines) beside it are what the text shows and what
kernels are called after. They carry no meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from terrazzo.errors import UserError
from terrazzo.ir.node import Node
from terrazzo.ir.types import Type


class Input(Node, dialect="program", op="input"):
    """A tensor the program is given. Inputs are told apart by name."""

    name: str
    type: Type


@dataclass(frozen=True)
class Program:
    """`dialect` is "torch" or "tensor". `names` says what nodes are called, `sources` which source line a name came
    from.
    """

    dialect: str
    name: str
    inputs: tuple[Input, ...]
    results: tuple[Node, ...]
    names: Mapping[Node, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen = [i.name for i in self.inputs]
        if len(set(seen)) != len(seen):
            raise UserError(f"program {self.name}: two inputs have the same name among {', '.join(seen)}")

    @cached_property
    def input_names(self) -> tuple[str, ...]:
        return tuple(i.name for i in self.inputs)
