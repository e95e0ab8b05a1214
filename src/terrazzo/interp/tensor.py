"""The meaning of Tensor IR, on numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from terrazzo.errors import CompilerBug, UserError, about
from terrazzo.interp import index, monoid
from terrazzo.ir.contraction import PRODUCTS
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Expr
from terrazzo.ir.node import Node
from terrazzo.ir.program import Program, in_turn
from terrazzo.ir.types import DTYPES, DType, Type, f32, f64

Call = Callable[[str, Any, Any, bool], Any]
"""How an opaque op runs: (name, args, kwargs, precise) -> array or tuple of arrays."""


def run(program: Program, inputs: Mapping[str, Any], *, precise: bool = False, call: Call | None = None) -> list[Any]:
    """The results of `program`, as arrays of their dtypes. With `precise`, every float is computed in float64."""
    values: dict[Node, Any] = {}
    for i in program.inputs:
        given = np.asarray(inputs[i.name])
        if given.shape != i.type.static_shape:
            raise UserError(f"input {i.name} has shape {list(given.shape)}, expected {list(i.type.shape)}")
        values[i] = given.astype(numpy_type(i.type.dtype, precise))
    complete(program.results, values, precise, call)
    return [values[r] for r in program.results]


def complete(roots: Sequence[Node], values: dict[Node, Any], precise: bool = False, call: Call | None = None) -> None:
    """Add the values of `roots`, and of all below them that have none yet. Products that are only summed get none."""
    below = in_turn(roots, values.__contains__)
    spared = {n.args[0] for n in below if _factors(n)} - set(roots)  # type: ignore[attr-defined]
    spared -= {c for n in below if not _factors(n) for c in n.children}
    for node in below:
        if isinstance(node, t.Value) and not isinstance(node, t.Read) and node not in values and node not in spared:
            with about(node):
                values[node] = evaluate(node, values, precise, call)


def _factors(node: Node) -> tuple[Node, ...]:
    """The factors of a sum of products of floats, whose products need not be written out."""
    product = node.args[0] if isinstance(node, t.Reduce) and node.monoid.name == "sum" else None
    found = isinstance(product, t.Elementwise) and product.fn.name in PRODUCTS and product.type.dtype in (f32, f64)
    return product.args if found else ()  # type: ignore[union-attr]


def numpy_type(dtype: DType, precise: bool) -> Any:
    """The numpy dtype an element type is computed in."""
    return np.dtype(np.float64) if precise and dtype.is_float else dtype.numpy


def evaluate(node: t.Value, values: Mapping[Node, Any], precise: bool = False, call: Call | None = None) -> Any:
    """The value of one node, given those of the nodes below it."""
    match node:
        case t.Literal():
            return np.full(node.type.static_shape, node.value, numpy_type(node.dtype, precise))
        case t.Elementwise():
            if is_cast(node.fn):
                return _cast(node, values, precise)
            return np.asarray(node.fn.numpy(*(values[a] for a in node.args)))
        case t.Iota():
            shape = node.type.static_shape
            env = index.grid(t.coordinates(shape), shape)
            return np.broadcast_to(index.values([node.index], env, _reader(values))[0], shape).astype(np.int64)
        case t.IndexMap():
            return _index_map(node, values)
        case t.LaidOut():
            return values[node.x]
        case t.Reduce() if factors := _factors(node):
            a, b = (values[x] for x in factors)
            return monoid.sum_of_products(a, b, node.axes)
        case t.Reduce():
            dtypes = [a.type.dtype for a in node.args]  # type: ignore[attr-defined]
            out = monoid.reduce(node.monoid, [values[a] for a in node.args], node.axes, dtypes)
            return out if node.monoid.width > 1 else out[0]
        case t.Scan():
            dtypes = [a.type.dtype for a in node.args]  # type: ignore[attr-defined]
            out = monoid.scan(node.monoid, [values[a] for a in node.args], node.axis, dtypes)
            return out if node.monoid.width > 1 else out[0]
        case t.Get():
            return values[node.x][node.index]
        case t.Opaque():
            if call is None:
                raise UserError(f"{node.name} is opaque and this interpreter was given no way to run PyTorch")
            return call(node.name, filled(node.args, values), {k: filled(v, values) for k, v in node.kwargs}, precise)
    raise CompilerBug(f"the Tensor IR interpreter does not know {type(node).__name__}")


def _cast(node: t.Elementwise, values: Mapping[Node, Any], precise: bool) -> Any:
    to = DTYPES[node.fn.name]
    x = values[node.args[0]]
    return x.astype(np.float64) if precise and to.is_float else np.asarray(node.fn.numpy(x))


def _index_map(node: t.IndexMap, values: Mapping[Node, Any]) -> Any:
    x, shape = values[node.x], node.type.static_shape
    env = index.grid(t.coordinates(node.shape), shape)
    found = index.values(node.index + node.inside, env, _reader(values))
    where, mask = found[: len(node.index)], np.asarray(True)
    for e in found[len(node.index) :]:
        mask = mask & (np.asarray(e) >= 0)
    if 0 in shape:
        return np.empty(shape, x.dtype)
    if not mask.all():
        if 0 in x.shape:
            return np.zeros(shape, x.dtype)
        where = [np.where(mask, w, 0) for w in where]
    for w, extent in zip(where, x.shape, strict=True):
        if np.min(w) < 0 or np.max(w) >= extent:
            raise CompilerBug(f"index map leaves its operand: indices {np.min(w)}..{np.max(w)} into extent {extent}")
    out = np.broadcast_to(x[tuple(where)], shape)
    return out if mask.all() else np.where(mask, out, np.zeros((), x.dtype))


def _reader(values: Mapping[Node, Any]) -> index.Read:
    def read(term: Node, env: Mapping[Expr, Any]) -> Any:
        assert isinstance(term, t.Read)
        return values[term.x][tuple(index.values(term.index, env, read))]

    return read


def filled(value: Any, values: Mapping[Node, Any]) -> Any:
    """An argument of an opaque op with values in the place of nodes."""
    if isinstance(value, Node):
        return values[value]
    return tuple(filled(v, values) for v in value) if isinstance(value, tuple) else value


__all__ = ["Type", "evaluate", "numpy_type", "run"]
