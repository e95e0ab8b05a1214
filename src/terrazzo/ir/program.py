"""A program of Torch or Tensor IR: named inputs, named values, results.

The values form a graph of interned nodes; the names (and source lines) beside it are what the text shows and what
kernels are called after. They carry no meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from terrazzo.errors import UserError
from terrazzo.ir.node import Node, topological
from terrazzo.ir.types import Type


class Input(Node, dialect="program", op="input"):
    """A tensor the program is given. Inputs are told apart by name."""

    name: str
    type: Type


T = TypeVar("T")


class Inputs(tuple[T, ...]):
    """What a program of any IR is given, in order. For inputs that are `donated`, by name, nobody else has a use: their
    memory is free when the program is through with them. That changes no value, and no kernel.
    """

    donated: frozenset[str]

    def __new__(cls, inputs: Iterable[T], donated: Iterable[str] = ()) -> Inputs[T]:
        made = super().__new__(cls, inputs)
        made.donated = frozenset(donated)
        return made


def donated(inputs: Sequence[Any]) -> frozenset[str]:
    """The names of those inputs of a program that are donated to it."""
    return inputs.donated if isinstance(inputs, Inputs) else frozenset()


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


def in_turn(results: Iterable[Node], stop: Callable[[Node], bool] = lambda n: isinstance(n, Input)) -> list[Node]:
    """What results are made of, children first, each once, and nothing below where it is to `stop`: those that are
    numbered, since they draw random numbers, in their order. Who draws first is who was called first, whichever result
    that is part of.
    """
    roots = tuple(results)
    found = topological(roots, stop)
    drawn = [n for n in found if _turn(n)]
    ordered = sorted(drawn, key=_turn)
    return found if drawn == ordered else topological((*ordered, *roots), stop)


def _turn(node: Node) -> int:
    """The number of a call that is not to be moved past others; 0 for what may be."""
    order = getattr(node, "order", 0)
    return order if isinstance(order, int) else 0  # there are orders of dimensions, too
