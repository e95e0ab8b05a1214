"""Values of Tensor IR that differ in their operands only, lifted once (ADR 010): equal layers have the same ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from terrazzo.ir.canonical import canonical, form_name
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.expr import Expr
from terrazzo.ir.instances import Instance
from terrazzo.ir.node import Node, key_of, per_node


class _Unlike(Exception):
    """What a value is made of is more than what kernels have stored, constants, and where these are read."""


class Alike:
    """The kernels that values became, by what the values are: from the second one on, a kernel is an instance of the
    form of the first. What operands are stored in, `buffers` has.
    """

    def __init__(self, buffers: Mapping[Node, l.Buffer]) -> None:
        self.buffers = buffers
        self.known: dict[Hashable, tuple[l.Kernel, tuple[l.Buffer, ...]]] = {}
        self.forms: dict[Hashable, tuple[l.Kernel, tuple[int, ...]]] = {}

    def kernel(self, value: Node, result: l.Buffer, source: str, make: Callable[[], l.Kernel]) -> l.Kernel:
        """The kernel that stores a value, which is what `make` gives."""
        try:
            question, buffers = self._question(value, result)
        except _Unlike:
            return make()
        if question not in self.known:
            self.known[question] = kernel, _ = make(), buffers
            return kernel
        if question not in self.forms:
            first, had = self.known[question]
            places = tuple(had.index(b) for b in dict.fromkeys((*first.writes, *first.reads)))
            self.forms[question] = canonical(first).kernel, places
        form, places = self.forms[question]
        return Instance(form, tuple([buffers[n] for n in places]), result.name, source).kernel

    def _question(self, value: Node, result: l.Buffer) -> tuple[Hashable, tuple[l.Buffer, ...]]:
        """What a kernel follows from but for names, and the buffers that it may have."""
        numbers = {result: 0}

        def of(x: Any) -> Any:
            if type(x) is tuple:
                return tuple(map(of, x))
            if not isinstance(x, Node):
                return key_of(x)
            if (buffer := self.buffers.get(x)) is not None:
                return numbers.setdefault(buffer, len(numbers)), buffer.type
            if isinstance(x, t.Literal) or (isinstance(x, Expr) and _of_coordinates(x)):
                return x
            raise _Unlike

        question = type(value), *map(of, value.values), result.type, form_name(result.name)
        return question, tuple(numbers)


@per_node
def _of_coordinates(x: Node) -> bool:
    """Whether nothing is read from memory in an index."""
    return not isinstance(x, t.Value) and all(map(_of_coordinates, x.children))
