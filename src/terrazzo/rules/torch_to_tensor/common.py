"""What the lowerings of ATen ops share: the decorator, PyTorch's promotion, and scalars."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.node import Node
from terrazzo.ir.types import DType, Type
from terrazzo.rewrite.rule import Rule, need


def aten(*names: str, same: bool = False) -> Callable[[Callable[..., Any]], Rule]:
    """Make a lowering of the ATen overloads `names` (given without the leading `aten.`; `prims.` and
    `terrazzo.` stay).

    The function gets the node, whose `type` is PyTorch's own answer for shape and dtype of the result, and then the
    arguments as PyTorch's schema has them, tensors already lowered. It returns a Tensor IR value, or a tuple for
    several results. With `same` the tensors must be of one type: PyTorch has no meaning for others and says so when it
    is called, though it traces them.
    """

    def make(fn: Callable[..., Any]) -> Rule:
        def lower(node: Aten, ctx: Any) -> Any:
            types = [*_types(node), *(y for x in node.children for y in _types(x))]
            need(all(y.dtype.kind != "complex" for y in types), "complex numbers are not compiled")
            given = {str(y.dtype) for x in node.children for y in _types(x)}
            need(not same or len(given) < 2, f"PyTorch refuses operands of several types ({', '.join(sorted(given))})")
            results = _types(node)
            if results and all(0 in y.shape for y in results):  # nothing to compute
                empty = tuple(t.literal(0, y.dtype, y.shape) for y in results)
                return empty if isinstance(node.type, tuple) else empty[0]
            return fn(node, *node.args, **dict(node.kwargs))

        return Rule(
            fn.__name__,
            tuple(n if n.startswith(("prims.", "terrazzo.")) else f"aten.{n}" for n in names),
            lower,
            inspect.getdoc(fn) or "",
        )

    return make


def _types(x: Any) -> list[Type]:
    found = getattr(x, "type", None)
    return [y for y in (found if isinstance(found, tuple) else (found,)) if isinstance(y, Type)]


def result(node: Aten, index: int | None = None) -> Type:
    """The type PyTorch gives the result (or result `index`) of the node."""
    found = node.type if index is None else node.type[index]  # type: ignore[index]
    assert isinstance(found, Type)
    return found


def operand(x: Any, dtype: DType, shape: Sequence[Any]) -> Any:
    """A tensor or a Python number as a tensor of this dtype and shape."""
    if isinstance(x, Node):
        return t.broadcast(t.cast(x, dtype), shape)
    return t.literal(x, dtype, shape)


def pointwise(node: Aten, compute: DType, *args: Any, fn: Callable[..., Any] | str) -> Any:
    """Broadcast `args` to the result's shape, convert them to `compute`, apply `fn`, convert to the result's dtype.

    A tensor meets a 16-bit result as PyTorch's promotion has it: rounded to that type, then widened. 0-d tensors and
    numbers stay.
    """
    out = result(node)
    rounds = out.dtype.compute is compute is not out.dtype
    given = [
        operand(t.cast(a, out.dtype) if rounds and getattr(a, "type", Type(out.dtype)).rank else a, compute, out.shape)
        for a in args
    ]
    value = t.apply(fn, *given) if isinstance(fn, str) else fn(*given)
    return t.cast(value, out.dtype)


def promoted(*xs: Any) -> DType:
    """The type PyTorch compares or combines these in, where the result's type does not say (as for comparisons).

    Tensors with dimensions come before 0-d tensors, and those before Python numbers; a weaker one counts only where it
    is of a higher kind (bool < integer < float).
    """
    import torch

    from terrazzo.ir.torch_types import from_torch_dtype, to_torch_dtype

    def example(x: Any) -> Any:
        return (
            torch.empty([1] * _types(x)[0].rank, dtype=to_torch_dtype(_types(x)[0].dtype)) if isinstance(x, Node) else x
        )

    found = example(xs[0])
    if len(xs) == 1:
        return from_torch_dtype(found.dtype)
    return from_torch_dtype(torch.result_type(found, example(xs[1])))


def normalize(dim: int, rank: int) -> int:
    """A possibly negative dimension as one in [0, rank); 0-d tensors behave as if they had one."""
    return dim % max(rank, 1)


def dims(dim: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """A `dim` argument (one, several, none or an empty list meaning all) as increasing axes."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(rank))
    given = (dim,) if isinstance(dim, int) else dim
    return tuple(sorted(normalize(d, rank) for d in given)) if rank else ()
