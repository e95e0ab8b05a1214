"""How results lie in memory: Torch IR says so in their types, and rules know of values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from terrazzo.errors import UserError, about
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten, Get
from terrazzo.ir.node import Node, topological, transform
from terrazzo.ir.program import Input, Program
from terrazzo.ir.types import Type, dense

Strides = tuple[int, ...] | None


def row_by_row(program: Program) -> tuple[Program, tuple[Strides, ...], dict[int, tuple[Strides, ...]]]:
    """`program` without strides, but for those of its inputs; the strides that its results are to have; and those that
    calls with an order, such as of what draws random numbers, are to be given, by that order.
    """
    wanted = tuple(None if isinstance(r, Input) else _wanted(r, program) for r in program.results)
    ordered = [n for n in topological(program.results) if isinstance(n, Aten) and n.order]
    given = {n.order: tuple(map(_laid, n.children)) for n in ordered}
    given = {order: strides for order, strides in given.items() if any(strides)}
    if not any(wanted) and not given:
        return program, wanted, given

    def visit(node: Any) -> Any:
        if not isinstance(node, Aten):
            return node
        result: Any = tuple(map(_plain, node.result)) if isinstance(node.result, tuple) else _plain(node.result)
        return Aten(node.name, node.args, node.kwargs, result, node.order)

    memo: dict[Node, Any] = {}
    results = tuple(transform(r, visit, memo) for r in program.results)
    names: dict[Node, str] = {}
    for node, name in program.names.items():
        names.setdefault(memo.get(node, node), name)
    return Program(program.dialect, program.name, program.inputs, results, names, program.sources), wanted, given


def _wanted(result: Any, program: Program) -> Strides:
    strides = result.type.strides
    if strides is not None and dense(result.type).strides is None:
        name = program.names.get(result, "a result")
        with about(result):
            raise UserError(
                f"{name} cannot lie as {result.type}: a result has no gaps, and no two elements at one place"
            )
    return strides  # type: ignore[no-any-return]


def _laid(value: Any) -> Strides:
    """The strides that an operand is to have, where every place is that of one element; an input lies as it does."""
    known = not isinstance(value, Input) and isinstance(value.type, Type)
    return dense(value.type).strides if known else None  # type: ignore[return-value]


def _plain(kind: Type | None) -> Type | None:
    return kind and Type(kind.dtype, kind.shape)


def typed(call: Aten, node: Aten, wanted: Mapping[Node, Strides]) -> Aten:
    """The call of PyTorch that an op became, whose results lie as those of the op are to."""
    if isinstance(call.result, Type):
        result: Any = _strided(call.result, wanted.get(node))
    else:
        result = tuple(r and _strided(r, wanted.get(Get(node, k))) for k, r in enumerate(call.result))
    return Aten(call.name, call.args, call.kwargs, result, call.order)


def _strided(kind: Type, strides: Strides) -> Type:
    return Type(kind.dtype, kind.shape, strides) if strides else kind


def laid_out(call: Aten, strides: Sequence[Strides]) -> Aten:
    """The call with values that lie so for its arguments."""
    found: Aten = call.with_children([placed(x, s) for x, s in zip(call.children, strides, strict=True)])
    return found


def placed(value: Any, strides: Strides) -> Any:
    """A value of Tensor IR in memory as it is to lie."""
    return value if strides is None or value.type.strides == strides else moved(value, strides)


def moved(value: Any, strides: Sequence[int]) -> Any:
    """A value where it is to lie. Complex numbers PyTorch moves: no kernel has them."""
    kind = Type(value.type.dtype, value.type.shape, tuple(strides))
    if kind.dtype.kind == "complex":
        return t.Opaque("aten.clone.default", (value,), (), kind)
    return t.LaidOut(value, tuple(strides))
