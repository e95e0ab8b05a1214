"""What everything in a program is worth: values of nodes and buffers, computed when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from terrazzo.errors import about
from terrazzo.interp import loop, tensor
from terrazzo.interp.tensor import numpy_type
from terrazzo.interp.torch import call_numpy, to_numpy
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.torch import Aten, Get
from terrazzo.ir.node import Node, topological
from terrazzo.ir.program import Program


class Values:
    """The values of a program in its own types, or with `precise` in float64, on the inputs given (torch tensors, by
    name).

    `source` says what a buffer holds: the Tensor IR value it stands for, or the step that writes it.
    """

    def __init__(self, program: Program | l.Program, inputs: Mapping[str, Any], precise: bool) -> None:
        self.precise = precise
        self.known: dict[Any, Any] = {}
        self.source: dict[l.Buffer, Node] = {}
        for i in program.inputs:
            array = to_numpy(inputs[i.name]).astype(numpy_type(i.type.dtype, precise))
            self.known[i] = self.known[l.Buffer(i.name, i.type)] = array
        if isinstance(program, l.Program):
            self.source.update({b: s for s in program.steps for b in s.writes})

    def of(self, x: Node) -> Any:
        """The value of a node or buffer; a tuple where a node has several results."""
        if x not in self.known:
            if isinstance(x, l.Buffer):
                self._fill(x)
            else:
                self._complete(x)
        return self.known[x]

    def run(self, steps: tuple[l.Kernel | l.Call, ...]) -> dict[l.Buffer, Any]:
        """What steps write, in order; what none of them writes is read from here."""
        memory: dict[l.Buffer, Any] = {}
        for step in steps:
            memory.update({b: self.of(b) for b in step.reads if b not in memory})
            with about(step):
                if isinstance(step, l.Call):
                    loop.run_call(step, memory, self.precise, call_numpy)
                else:
                    loop.run_kernel(step, memory, self.precise)
        return {b: memory[b] for s in steps for b in s.writes}

    def _fill(self, buffer: l.Buffer) -> None:
        source = self.source[buffer]
        if isinstance(source, l.Kernel | l.Call):
            self.known |= self.run((source,))
        else:
            self.known[buffer] = self.of(source)

    def _complete(self, root: Node) -> None:
        """The value of a node of Torch or Tensor IR, or of both mixed, as they are half-way down."""
        for node in topological([root], stop=self.known.__contains__):
            if isinstance(node, Aten) and node not in self.known:
                tensor.complete(
                    [c for c in node.children if not isinstance(c, Aten | Get)], self.known, self.precise, call_numpy
                )
                args = tensor.filled(node.args, self.known), {k: tensor.filled(v, self.known) for k, v in node.kwargs}
                with about(node):
                    self.known[node] = call_numpy(node.name, *args, self.precise)
            elif isinstance(node, Get) and node not in self.known:
                self.known[node] = self.known[node.x][node.index]
        tensor.complete([root], self.known, self.precise, call_numpy)


def size(buffer: l.Buffer) -> int:
    """How many elements a buffer has."""
    return int(np.prod(buffer.type.static_shape, dtype=np.int64))
