"""`terrazzo.compile`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from terrazzo.collector import paused
from terrazzo.errors import UserError
from terrazzo.options import Options

if TYPE_CHECKING:  # what needs numpy is imported where it is used: `terrazzo --help` loads this file too
    from terrazzo.front.capture import Captured


class CompiledCall:
    """What `terrazzo.compile` returns: called like the module or function it was made from, with tensors like the
    examples and everything else equal to what the examples had.
    """

    def __init__(self, captured: Captured, compiled: Any) -> None:
        import torch
        from torch.utils import _pytree as pytree

        from terrazzo.front.capture import TENSOR

        self.captured, self.compiled, self.tensor = captured, compiled, torch.Tensor
        self.tensors = frozenset((torch.Tensor, torch.nn.Parameter))  # what a call is given, nearly always
        self.only_tensors = all(expected is TENSOR for expected in captured.leaves)
        self.count = count = len(captured.leaves)
        self.positional = count if captured.arguments == pytree.tree_structure(((0,) * count, {})) else None
        self.single = captured.structure == pytree.tree_structure(0) and not captured.plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        captured, results = self.captured, self.captured.results
        assert results is not None  # it was captured with views
        inputs = self._tensors(self._leaves(args, kwargs))
        if captured.state:
            inputs = [*captured.state, *inputs]
        if captured.numbers:
            self._refuse_changed()
        if captured.changed:
            self._refuse_aliases(inputs)
        values = self.compiled(inputs)
        if self.single and results.fresh and not captured.changed:
            return results.only(values)
        import torch

        if changed := [inputs[k] for k in captured.changed if not inputs[k].is_inference()]:
            torch.autograd.graph.increment_version(changed)
        with torch.no_grad():
            return captured.whole(results.make(inputs, values))

    def _leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """The arguments without their nesting; UserError where that is another than that of the example."""
        if not kwargs and len(args) == self.positional:  # nothing was nested
            return args
        from torch.utils import _pytree as pytree

        flat, tree = pytree.tree_flatten((args, kwargs))
        if tree != self.captured.arguments:
            raise UserError(
                "called with other arguments than it was compiled for: their number, names or nesting differ"
            )
        return list(flat)

    def _tensors(self, flat: Sequence[Any]) -> list[Any]:
        """The tensors among the arguments; UserError where something else is not what it was compiled for."""
        if self.only_tensors and len(flat) == self.count and self.tensors.issuperset(map(type, flat)):
            return list(flat)
        from terrazzo.front.capture import TENSOR

        tensors = []
        for given, expected, name in zip(flat, self.captured.leaves, self.captured.names, strict=True):
            if isinstance(given, self.tensor) and expected is TENSOR:
                tensors.append(given)
            elif expected is TENSOR:
                raise UserError(f"argument {name}: compiled for a tensor, got {given!r}")
            elif not _equal(given, expected):
                raise UserError(
                    f"argument {name}: compiled for {expected!r}, got {given!r}. What is no tensor is fixed when it is "
                    "compiled: compile once for each value, give a tensor, or use "
                    'torch.compile(..., backend="terrazzo")'
                )
        return tensors

    def _refuse_changed(self) -> None:
        """UserError where a number that the call branches on is not what it was when that was compiled."""
        from terrazzo.front.capture import times_changed

        for name, tensor, changed in self.captured.numbers:
            if times_changed(tensor) != changed:
                raise UserError(
                    f"{name} was changed after the call was compiled, which branches on it: compile it again"
                )

    def _refuse_aliases(self, inputs: list[Any]) -> None:
        """UserError where a tensor that is changed in place shares memory with another one."""
        from terrazzo.front.effects import address

        captured = self.captured
        users = Counter(map(address, (*inputs, *captured.bound.values())))
        for k in captured.changed:
            if users[address(inputs[k])] > 1 and inputs[k].untyped_storage().nbytes():
                raise UserError(
                    f"input {captured.inputs[k]} is changed in place and shares memory with another input; "
                    "give a clone of it"
                )

    def __copy__(self) -> CompiledCall:
        """A call with the same weights."""
        return CompiledCall(self.captured, self.compiled)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledCall:
        """A call with weights of its own; machine code is shared."""
        own = {name: deepcopy(getattr(self.captured, name), memo) for name in ("bound", "state")}
        return CompiledCall(replace(self.captured, **own), self.compiled.rebound(own["bound"]))

    def __getstate__(self) -> Any:
        raise UserError(
            "a compiled call cannot be pickled: it holds machine code. Pickle the model and compile it where it is "
            "loaded; what is in the cache is not compiled again"
        )


def _equal(given: Any, expected: Any) -> bool:
    """Whether an argument that is no tensor is what the call was compiled for; NaN is like NaN."""
    if given is expected:
        return True
    return type(given) is type(expected) and bool(given == expected or (given != given and expected != expected))


@paused()  # one program is captured and compiled: cycles are looked for before, not between
def compile(
    fn: Callable[..., Any], *example_inputs: Any, options: Options | Mapping[str, object] | None = None, **kwargs: Any
) -> CompiledCall:
    """Compile a module or a function for the shapes and types of the example inputs.

    Parameters and buffers of a module are bound: later in-place changes to them are seen (with `freezing`, those that
    PyTorch counts), replacing them is not, nor is `.eval()` or `.train()`; whole numbers that a module keeps as buffers
    and branches on may not change. Tensors that the call changes in place are changed; a call with other side effects
    is refused, and so is one whose other arguments are not those of the example. Results that are no tensors (None,
    numbers, strings) are those of the example. `options` is an `Options` or a mapping of its fields. Raises UserError
    where the call cannot be captured.
    """
    import torch
    from torch.utils import _pytree as pytree

    from terrazzo.front.attention import may_be_called
    from terrazzo.front.capture import capture
    from terrazzo.run.compiled import compile_program
    from terrazzo.tune.search import tune

    chosen = options if isinstance(options, Options) else Options.from_mapping(options or {})
    tensors = [x for x in pytree.tree_leaves((example_inputs, kwargs)) if isinstance(x, torch.Tensor)]
    captured = capture(fn, example_inputs, kwargs, views=True, called=may_be_called(chosen, tensors))
    devices = [t.device for t in (*captured.bound.values(), *captured.state, *tensors) if t.device.type != "cpu"]
    device = str(devices[0]) if devices else "cpu"
    chosen = replace(chosen.bound(captured.bound), updated=tuple(captured.inputs[k] for k in captured.changed))
    tune(captured.program, chosen, device)
    return CompiledCall(captured, compile_program(captured.program, captured.bound, chosen, device))
