"""`terrazzo.compile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from terrazzo.errors import UserError
from terrazzo.options import Options


class CompiledCall:
    """What `terrazzo.compile` returns: called like the module or function it was made from, with tensors like the
    examples.
    """

    def __init__(self, captured: Any, compiled: Any) -> None:
        self.captured, self.compiled = captured, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch
        from torch.utils import _pytree as pytree

        flat, tree = pytree.tree_flatten((args, kwargs))
        if tree != self.captured.arguments:
            raise UserError(
                "called with other arguments than it was compiled for: their number, names or nesting differ"
            )
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        return pytree.tree_unflatten(self.compiled(tensors), self.captured.results)


def compile(
    fn: Callable[..., Any], *example_inputs: Any, options: Options | Mapping[str, object] | None = None, **kwargs: Any
) -> CompiledCall:
    """Compile a module or a function for the shapes and types of the example inputs.

    Parameters and buffers of a module are bound: later in-place changes to them are seen, replacing them is not.
    `options` is an `Options` or a mapping of its fields. Raises UserError where the call cannot be captured.
    """
    import torch
    from torch.utils import _pytree as pytree

    from terrazzo.front.capture import capture
    from terrazzo.run.compiled import compile_program

    chosen = options if isinstance(options, Options) else Options.from_mapping(options or {})
    captured = capture(fn, example_inputs, kwargs)
    tensors = [x for x in pytree.tree_leaves((example_inputs, kwargs)) if isinstance(x, torch.Tensor)]
    device = next((str(t.device) for t in (*captured.bound.values(), *tensors) if t.device.type != "cpu"), "cpu")
    return CompiledCall(captured, compile_program(captured.program, captured.bound, chosen, device))
