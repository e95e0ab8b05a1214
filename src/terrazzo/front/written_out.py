"""Attention that is written out in 16 bits, where gradients are wanted: its scores and weights are not rounded.

softmax(q @ k.T * scale + mask) @ v in 16 bits rounds scores and weights, tokens times tokens of them, which autograd
keeps. PyTorch's definition of scaled_dot_product_attention has them in 32 bits, so that its training graphs keep a
number for each row (`row_numbers`), and kernels hold the rest. Here what is written out becomes that: factors are
converted, which is exact, and only results are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from terrazzo.rules.loop.attention.gradients import HEAD

PRODUCTS = ("matmul", "bmm", "einsum", "baddbmm")
COPIES = ("to", "float", "type", "type_as", "half", "bfloat16", "clone")
VIEWS = ("view", "reshape", "transpose", "permute", "flatten", "unflatten", "contiguous", "squeeze", "unsqueeze")
SCORES = (*COPIES, *VIEWS, "mul", "truediv", "div", "add", "sub", "masked_fill", "where", "tanh", "clamp")
"""What may lie between a product and the softmax of it."""
WEIGHTS = (*COPIES, *VIEWS, "mul", "masked_fill", "where", "dropout")
"""What may be done to weights before they are multiplied."""
IN_PLACE = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv"}


def unround_weights(gm: Any, inputs: Sequence[Any]) -> bool:
    """Have the softmaxes of a graph of Dynamo's that lie between two products in 16 bits computed in 32 bits, where
    nobody else reads scores or weights, and what is done to them wants no gradients, but for what is added to scores;
    whether there are such. Heads are at most as wide as those whose gradients are chains of products.
    """
    unknown = {}  # what a graph for one of several shapes no longer says of its inputs
    for node, x in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if "example_value" not in node.meta:
            unknown[node] = node.meta["example_value"] = x
    scores = _scores(gm.graph)
    found = [a for n in gm.graph.nodes if _name(n) == "softmax" and (a := _attention(n, scores)) is not None]
    for node in unknown:
        del node.meta["example_value"]
    for attention in found:
        kinds = {n: _value(n).dtype for n in (attention.first, *attention.last)}
        for node in attention.between:
            if _name(node) in COPIES:
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
            elif "dtype" in node.kwargs:
                node.kwargs = {k: x for k, x in node.kwargs.items() if k != "dtype"}
        for node, dtype in kinds.items():
            equation, factors = _factors(node, attention.between)
            if _name(node) == "baddbmm":
                _add_after(node)
            node.args, node.kwargs = (equation, dtype, factors[0] in attention.between, *factors), {}
            node.op, node.target = "call_function", product
    if found:
        gm.recompile()
    return bool(found)


def _add_after(node: Any) -> None:
    """Have what a product of `baddbmm` is multiplied with, and what is added to it, apart from it."""
    import torch

    added, _, _, beta, alpha = _added(node)
    readers = [*node.users]
    with node.graph.inserting_after(node):
        result = node.graph.call_function(torch.mul, (node, alpha))
    if beta != 0:
        with node.graph.inserting_after(result):
            result = node.graph.call_function(torch.add, (result, added), {"alpha": beta})
    for reader in readers:
        reader.replace_input_with(node, result)


def product(equation: str | None, dtype: Any, weights: bool, one: Any, other: Any) -> Any:
    """A product of matrices in 32 bits, perhaps given as an equation: scores, of factors that are converted to `dtype`
    first, or, where the first one is `weights`, one that is rounded to `dtype`, before its dimensions are put in order.
    """
    import torch

    factors = [one if weights else one.to(dtype).float(), other.to(dtype).float()]
    order = _as_matrices(equation)
    if order is not None:
        factors = [_ordered(x, dims) for x, dims in zip(factors, order, strict=False)]
    with torch.autocast(factors[0].device.type, enabled=False):
        result = torch.matmul(*factors)
        result = result.to(dtype) if weights else result
    return result if order is None else _ordered(result, order[2])


def _ordered(x: Any, dims: list[int]) -> Any:
    return x if dims == sorted(dims) else x.permute(dims)


def _as_matrices(equation: str | None) -> tuple[list[int], ...] | None:
    """How the dimensions of two factors, and those of their product, are put in order where an equation is a product of
    matrices, perhaps of several; None where it is none.
    """
    both, _, result = (equation or "").replace(" ", "").partition("->")
    one, _, other = both.partition(",")
    batch = [c for c in one if c in other and c in result]
    rows, steps, columns = ([c for c in x if c not in batch and (c in y) == within] for x, y, within in (
        (one, other, False), (one, other, True), (other, one, False)))  # fmt: skip
    made = [*batch, *rows, *columns]
    plain = both.replace(",", "").isalpha() and all(len({*x}) == len(x) for x in (one, other, result))
    if not plain or sorted(made) != sorted(result) or (len(rows), len(steps), len(columns)) != (1, 1, 1):
        return None
    return (
        [one.index(c) for c in (*batch, *rows, *steps)],
        [other.index(c) for c in (*batch, *steps, *columns)],
        [made.index(c) for c in result],
    )


@dataclass(frozen=True)
class _Attention:
    """The products that scores come from and weights go to, and the nodes between them."""

    first: Any
    between: set[Any]
    last: list[Any]


def _attention(softmax: Any, made: Set[Any]) -> _Attention | None:
    scores = _value(softmax.args[0]) if softmax.args else None
    dim = softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)
    if scores is None or dim not in (-1, scores.dim() - 1):
        return None
    between: set[Any] = {softmax}
    firsts: list[Any] = []
    todo = [softmax.args[0]]
    while todo:
        node = todo.pop()
        if _name(node) in PRODUCTS:
            firsts.append(node)
        elif _name(node) in SCORES:
            between.add(node)
            todo += [x for x in _tensors(node) if x not in between and x in made]
            todo += [x for x in node.users if x not in between and _writes(x) and x.args[0] is node]
        else:
            return None
    weights, last = [softmax], []
    for node in weights:
        for x in node.users:
            if _name(x) in PRODUCTS:
                last += [x] if x not in last else []
            elif _name(x) in WEIGHTS and x.args[0] is node:
                weights += [x] if x not in weights else []
            else:
                return None
    between |= {*weights}
    whole = (
        len(firsts) == 1
        and last
        and not any(_name(x) == "baddbmm" for x in last)
        and all(_narrow(x, between) for x in (firsts[0], *last))
    )
    if not whole or any(x not in between for n in (firsts[0], *between - {*weights}) for x in n.users):
        return None
    copied = any(map(_writes, between)) and any(_name(n) in COPIES for n in between - {*weights})
    if copied or any(_learned(n, {firsts[0], *between}) for n in between if _name(n) not in COPIES):
        return None
    return _Attention(firsts[0], between, last)


def _learned(node: Any, known: set[Any]) -> bool:
    """Whether a node does to scores or weights what wants a gradient that is made of all of them, other than a sum."""
    return _name(node) not in ("add", "sub") and any(_value(x).requires_grad for x in _tensors(node) if x not in known)


def _scores(graph: Any) -> set[Any]:
    """The products of a graph, and what is made of them by what may be done to scores."""
    found: set[Any] = set()
    for node in graph.nodes:
        if _name(node) in PRODUCTS or (_name(node) in SCORES and not found.isdisjoint(_tensors(node))):
            found.add(node)
    return found


def _factors(node: Any, wide: set[Any]) -> tuple[str | None, list[Any]]:
    """The equation of a product, if it has one, and its factors, `wide` weights first where an equation may have them
    so.
    """
    factors = [x for x in node.args if not isinstance(x, str)]
    if _name(node) == "baddbmm":
        return None, [*_added(node)[1:3]]
    if _name(node) != "einsum":
        return None, factors
    if len(factors) == 2 and isinstance(node.args[0], str) and factors[1] in wide:
        both, _, result = node.args[0].partition("->")
        return f"{','.join(both.split(',')[::-1])}->{result}", factors[::-1]
    return node.args[0] if isinstance(node.args[0], str) else "", factors


def _added(node: Any) -> tuple[Any, ...]:
    """What `baddbmm` is given: what it adds, two factors, beta and alpha."""
    given = dict(zip(("input", "batch1", "batch2"), node.args, strict=False)) | {"beta": 1, "alpha": 1} | node.kwargs
    return tuple(given.get(name) for name in ("input", "batch1", "batch2", "beta", "alpha"))


def _narrow(node: Any, wide: set[Any]) -> bool:
    """Whether a product is one of 16 bits, of two factors, over no more than a head is wide; of `wide` weights, to no
    more columns.
    """
    import torch

    equation, factors = _factors(node, wide)
    named = node.kwargs and _name(node) != "baddbmm"
    two = len(factors) == 2 and not named and all(isinstance(x, torch.fx.Node) and _tensor(x) for x in factors)
    if not two or _value(node).dtype not in (torch.bfloat16, torch.float16) or factors[1] in wide:
        return False
    order, other = _as_matrices(equation), _value(factors[1])
    if (equation is not None and order is None) or other.dim() < 2:
        return False
    dims = order[1] if order else range(other.dim())
    size = other.shape[dims[-1 if factors[0] in wide else -2]]
    known = size if isinstance(size, int) else size.node.hint  # of a symbol, what it was traced with
    return known is not None and known <= HEAD


def _name(node: Any) -> str:
    """What a node does, whether a function, a method or an operator of Python says it."""
    import torch

    if not isinstance(node, torch.fx.Node) or node.op not in ("call_function", "call_method"):
        return ""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return IN_PLACE.get(name, name.rstrip("_")) if _tensor(node) else ""


def _writes(node: Any) -> bool:
    name = node.target if isinstance(node.target, str) else node.target.__name__
    return name in IN_PLACE or name.endswith("_") or bool(node.kwargs.get("inplace"))


def _value(node: Any) -> Any:
    return node.meta.get("example_value")


def _tensor(node: Any) -> bool:
    import torch

    return isinstance(_value(node), torch.Tensor)


def _tensors(node: Any) -> Iterator[Any]:
    return filter(_tensor, node.all_input_nodes)
