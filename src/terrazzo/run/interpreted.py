"""Programs that an interpreter runs, that of Loop IR or of Kernel IR: where there is no compiler, or where that is
asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from terrazzo.errors import UserError
from terrazzo.ir.dialects import kernel
from terrazzo.ir.dialects import loop as l
from terrazzo.rewrite.rule import Log
from terrazzo.rules.torch_to_tensor.library import is_called
from terrazzo.run.plan import Fallback
from terrazzo.run.tensors import Expected, slot_of

if TYPE_CHECKING:
    from terrazzo.pipelines import Lowering


@dataclass
class Interpreted:
    """A program that an interpreter runs, with the interface of `Compiled`."""

    program: l.Program | kernel.Program
    bound: dict[str, Any]
    log: Log
    timings: dict[str, float]
    updated: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.expected = [Expected(slot_of(b)) for b in self.program.inputs if b.name not in self.bound]
        self.kernels: list[tuple[str, str]] = []

    def rebound(self, bound: Mapping[str, Any]) -> Interpreted:
        """The program with other weights."""
        return replace(self, bound={k: v.detach() for k, v in bound.items()})

    @property
    def fallbacks(self) -> list[Fallback]:
        """The ops PyTorch runs, each once."""
        calls = (s for s in self.program.steps if isinstance(s, l.Call))
        return list(dict.fromkeys(Fallback(s.name, s.source, is_called(s)) for s in calls))

    def consume(self, inputs: list[Any]) -> list[Any]:
        """The same as a call, and the list is emptied."""
        found = self(inputs)
        inputs.clear()
        return found

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        from terrazzo.interp import kernel as simulator
        from terrazzo.interp import loop as interpreter
        from terrazzo.interp.torch import call_numpy, from_numpy, to_numpy

        if len(inputs) != len(self.expected):
            raise UserError(f"the program takes {len(self.expected)} tensors, got {len(inputs)}")
        given = {e.slot.name: e.check(t) for e, t in zip(self.expected, inputs, strict=True)}
        arrays = {name: to_numpy(t) for name, t in {**self.bound, **given}.items()}
        if isinstance(self.program, kernel.Program):
            found = simulator.run(self.program, arrays, call=call_numpy)
        else:
            found = interpreter.run(self.program, arrays, call=call_numpy, zero_divides=False)
        out = [from_numpy(r) for r in found]
        count = len(out) - len(self.updated)
        changed = dict(zip((e.slot.name for e in self.expected), inputs, strict=True)) | self.bound
        for name, value in zip(self.updated, out[count:], strict=True):
            changed[name].data.copy_(value)  # who calls says that they were changed
        kept = zip(self.program.results[:count], out[:count], strict=True)
        return [Expected(slot_of(b)).holding(value) for b, value in kept]


def interpreted(done: Lowering, bound: Mapping[str, Any], updated: Sequence[str] = ()) -> Interpreted:
    """A program that was lowered to Loop IR or, for a GPU, to Kernel IR, for its interpreter. Its last results are new
    values of the inputs that are `updated`.
    """
    weights = {k: v.detach() for k, v in bound.items()}
    return Interpreted(done.at("kernel") or done.loop, weights, done.log, done.seconds, updated)
