"""What a training graph keeps of attention for its backward pass: a number for each row of scores, and its results.

The gradient of scores s with weights w = softmax(s), gradients dw of these and results o = w v is

    ds = w * (dw - sum(dw * w)),      w = exp(s - logsumexp(s)),      sum over keys(dw * w) = sum over columns(g * o)

where g is the gradient of o. PyTorch's graph has the left forms, so its backward part would compute the softmax of all
scores again, and their product with v, to have two numbers for each row. With the right ones it keeps the first number,
and makes the second one of results that are there anyway. Where scores are not only products, the first one is kept as
two, the largest score and the logarithm of the sum over that: added up, the second one may be lost. Where nothing is in
16 bits they are the largest score and 1 / the sum: the rounding of a logarithm would be an error of a whole row.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

from terrazzo.front.nodes import Nodes
from terrazzo.front.softmaxes import (
    Gradient,
    gradient_of,
    kinds_of,
    meets_products,
    multiplied,
    of_products,
    results_of,
    shifted,
    viewed,
    whole_of,
)
from terrazzo.rules.loop.attention.gradients import HEAD

COMMON = 8
"""Values have much in common where the largest is no more than so many times their mean, and that no more than so many
times their mean by the root of 1 / x: what a few have that are far larger, and perhaps hidden, is not in common with
the others.
"""


def keep_row_numbers(
    graph: Any, softmaxes: Iterable[Any], worth: Collection[Any] = (), exactly: bool = False
) -> tuple[set[Any], set[Any]]:
    """Have the gradients of some softmaxes in a joint graph computed from a number for each row, where what the rows
    are summed to is a product; the nodes that are to be kept, and those to be computed again. Weights may be multiplied
    by what each is `worth`, where some are dropped. The second number is made of rounded results, as PyTorch's own
    kernels have it, or `exactly`.

    Weights that gradients in float16 are multiplied with are rounded to that here: of an exponential of any difference
    nobody else knows that it has so small a range. What tensor cores cut off of g * o and of dw is not the same, so
    rows of ds no longer add up to 0: in float32 not where heads are wider than `HEAD`, which make no chain of products,
    nor where a temperature is learned.
    """
    kept: set[Any] = set()
    again: set[Any] = set()
    wanted = {*softmaxes}
    for found in [x for node in graph.nodes if (x := gradient_of(node)) is not None]:
        results = results_of(found, worth) if found.softmax in wanted else None
        if results is not None and _exact(found, results[1]):
            _rewrite(graph, found, *results, exactly, kept, again)
    if kept:
        graph.eliminate_dead_code()
        graph.lint()
    return {x for x in kept if x in graph.nodes}, {x for x in again if x in graph.nodes}


def _rewrite(
    graph: Any, found: Gradient, gradient: Any, results: Any, exactly: bool, kept: set[Any], again: set[Any]
) -> None:
    """A softmax and its gradient, in place."""
    import torch

    aten = torch.ops.aten
    before = Nodes(graph, found.softmax)
    scores = found.softmax.args[0]
    alone = all(x is found.softmax or x.target == aten.eq.Scalar for x in scores.users)
    top = before.add(aten.amax.default, scores, [-1], True)
    each = before.add(aten.exp.default, before.add(aten.sub.Tensor, scores, top))
    total = before.add(aten.sum.dim_IntList, each, [-1], True)
    kind = next((x for x in kinds_of(results) if x in (torch.bfloat16, torch.float16)), None)
    inverse = kind is None
    rows = before.add((aten.reciprocal if inverse else aten.log).default, total)
    apart = inverse or not of_products(scores)
    none = before.add(aten.eq.Scalar, top, -math.inf)
    if not apart:
        rows = before.add(aten.add.Tensor, top, rows)
    whole = whole_of(found.weights)
    if whole is not found.softmax:  # 0 * exp(-inf), or exp(-inf - inf), is the 0 that rows have of which all is hidden
        rows = before.add(
            aten.where.self, none, before.add(aten.full_like.default, rows, 0.0 if inverse else math.inf), rows
        )
        top = before.add(aten.where.self, none, before.add(aten.zeros_like.default, top), top)
    moved = before.add(aten.sub.Tensor, scores, top) if apart else scores
    above = before.add(aten.exp.default, moved) if inverse else before.add(aten.sub.Tensor, moved, rows)
    weights = before.add(aten.mul.Tensor, above, rows) if inverse else before.add(aten.exp.default, above)
    made = _made(results, whole)
    dropped = any(x.target == aten.mul.Tensor for x in made)  # they no longer add up to 1, nor do those of hidden rows
    inward, add_up = found.above, whole is found.softmax and not dropped
    if add_up and kinds_of(results) == {torch.float32}:
        inward, stored, more = _both_around_mean(graph, results, inward, again)
    elif add_up and exactly and kind is not None:
        results, stored, more = _around_mean(graph, results, kind, again)
        made |= {results}
    else:
        stored, more = _kept_results(graph, results, again)
    last = Nodes(graph, found.end)
    summed = last.add(aten.sum.dim_IntList, last.add(aten.mul.Tensor, gradient, more), [-1], True)
    summed = last.add(aten.view.default, summed, [*found.rows.meta["val"].shape])
    end = last.add(aten.mul.Tensor, whole, last.add(aten.sub.Tensor, inward, summed))
    found.end.replace_all_uses_with(end)
    if inverse and alone:
        kept |= _keys_around_mean(graph, scores, end, again)
    if kind is torch.float16:
        for node in {whole, *made} - {results}:
            again |= _round(graph, node, torch.float16, {*node.users} - made)
    whole.replace_all_uses_with(weights)
    kept |= {rows, *stored, *([top] if apart else [])}
    again |= {above, weights, *([moved] if apart else [])}


def _kept_results(graph: Any, results: Any, again: set[Any]) -> tuple[set[Any], Any]:
    """What is kept of results, rounded where others want them so, and the results made of it."""
    import torch

    aten = torch.ops.aten
    seen = [results]
    for node in seen:
        seen += [x for x in node.users if x.target == aten.view.default]
    casts = [x for node in seen for x in node.users if x.target == aten._to_copy.default]
    rounded = next((x for x in casts if x.meta["val"].dtype.itemsize == 2), None)
    if rounded is None:
        return {results}, results
    after = Nodes(graph, rounded.next)
    wide = after.add(aten._to_copy.default, rounded, dtype=results.meta["val"].dtype)
    whole = after.add(aten.view.default, wide, [*results.meta["val"].shape])
    again |= {wide, whole}
    return {rounded}, whole


def _around_mean(graph: Any, results: Any, dtype: Any, again: set[Any]) -> tuple[Any, set[Any], Any]:
    """Results as means of how far values in 16 bits are from what they have in common, rounded to these, and that: both
    are kept. So what values have in common has no error of weights or of results, which sums over keys would multiply;
    where they have little, nothing is taken off, since differences would be rounded. The product, what is kept, and the
    results.
    """
    import torch

    aten = torch.ops.aten
    weights, values = results.args
    wide, before = results.meta["val"].dtype, Nodes(graph, results)
    middle = before.add(aten._to_copy.default, _in_common(before, values, dtype), dtype=dtype)
    added = before.add(aten._to_copy.default, middle, dtype=wide)
    apart = before.add(aten._to_copy.default, before.add(aten.sub.Tensor, values, added), dtype=dtype)
    apart = before.add(aten._to_copy.default, apart, dtype=wide)
    product = before.add(aten.bmm.default, weights, apart)
    rounded = before.add(aten._to_copy.default, product, dtype=dtype)
    far = before.add(aten._to_copy.default, rounded, dtype=wide)
    whole = before.add(aten.add.Tensor, far, added)
    results.replace_all_uses_with(whole)
    again |= {added, far, whole}
    return product, {rounded, middle}, whole


def _both_around_mean(graph: Any, results: Any, inward: Any, again: set[Any]) -> tuple[Any, set[Any], Any]:
    """Results in float32 as means of how far values are from what they have in common, and the gradient of the weights
    as a product with these: neither has an error of what values have in common, which the rows of the scores' gradient
    would not add up to 0 for, so that what keys have in common would be multiplied by it. The gradient of the weights,
    what is kept, and what the rows are summed from.
    """
    import torch

    aten = torch.ops.aten
    (weights, values), before = results.args, Nodes(graph, results)
    middle = _in_common(before, values, results.meta["val"].dtype)
    apart = before.add(aten.sub.Tensor, values, middle)
    product = before.add(aten.bmm.default, weights, apart)
    whole = before.add(aten.add.Tensor, product, middle)
    results.replace_all_uses_with(whole)
    old = viewed(inward)
    after = Nodes(graph, old)
    turned = after.add(aten.permute.default, apart, [0, 2, 1])
    new = after.add(aten.bmm.default, old.args[0], turned)
    old.replace_all_uses_with(new)
    again |= {whole, apart, turned}
    return new if inward is old else inward, {product, middle}, product


def _keys_around_mean(graph: Any, scores: Any, gradient: Any, again: set[Any]) -> set[Any]:
    """Have keys in float32 taken around their mean, where nobody but a softmax reads their scores; what is kept. No
    weight changes by that, since all scores of a row do alike, nor does the gradient of queries, since rows of the
    scores' `gradient` add up to 0, in exact arithmetic; what they do add up to is multiplied by what keys have in
    common otherwise.
    """
    import torch

    aten = torch.ops.aten
    if (product := shifted(scores)) is None:
        return set()
    keys = product.args[1]
    turned = [x for x in keys.users if x.target == aten.permute.default and list(x.args[1]) == [0, 2, 1]]
    queries = {x for x in multiplied(gradient) if x.args[1] in turned}
    if not queries:
        return set()
    before = Nodes(graph, product)
    mean = before.add(aten.mean.dim, keys, [2], True)
    apart = before.add(aten.sub.Tensor, keys, mean)
    product.replace_input_with(keys, apart)
    again |= {apart}
    for user in queries:
        other = Nodes(graph, user).add(aten.permute.default, apart, [0, 2, 1])
        user.replace_input_with(user.args[1], other)
        again |= {other}
    return {mean}


def _in_common(nodes: Nodes, values: Any, dtype: Any) -> Any:
    """What values have in common over the keys: their mean, or 0 where that is little, and where they might leave the
    type without it.
    """
    import torch

    aten = torch.ops.aten
    mean = nodes.add(aten.mean.dim, values, [1], True)
    sizes, most = nodes.add(aten.abs.default, values), nodes.add(aten.abs.default, mean)
    largest = nodes.add(aten.amax.default, sizes, [1], True)
    root = nodes.add(aten.mean.dim, nodes.add(aten.rsqrt.default, sizes), [1], True)
    usual = nodes.add(aten.mul.Tensor, nodes.add(aten.mul.Tensor, most, root), root)
    common = nodes.add(aten.ge.Tensor, nodes.add(aten.mul.Scalar, most, COMMON), largest)
    for test in (
        nodes.add(aten.le.Scalar, usual, COMMON),
        nodes.add(aten.le.Scalar, largest, torch.finfo(dtype).max / 2),
    ):
        common = nodes.add(aten.logical_and.default, common, test)
    return nodes.add(aten.where.self, common, mean, nodes.add(aten.zeros_like.default, mean))


def _made(results: Any, softmax: Any) -> set[Any]:
    """The results, and what becomes of a softmax on its way to them."""
    found = {results}
    node = results.args[0]
    while node is not softmax and node.op == "call_function":
        found.add(node)
        node = node.args[0]
    return found


def _round(graph: Any, node: Any, dtype: Any, users: set[Any]) -> set[Any]:
    """Have some users read a node rounded; the new nodes."""
    import torch

    copy = torch.ops.aten._to_copy.default
    if not users:
        return set()
    after = Nodes(graph, node.next)
    rounded = after.add(copy, node, dtype=dtype)
    factor = after.add(copy, rounded, dtype=node.meta["val"].dtype)
    node.replace_all_uses_with(factor, lambda user: user in users)
    return {rounded, factor}


def _exact(found: Gradient, product: Any) -> bool:
    """Whether the rows of the weights' gradient may be summed from a product: in float32 not where heads are too wide,
    nor where the scores' gradient is multiplied by products and summed, as for a temperature that is learned. Tensor
    cores leave results 1e-7 too small, so rows of the scores' gradient do not add up to 0, and what products of a row
    have in common is multiplied by that: such a sum was 7 times as far off as eager's on an H200.
    """
    import torch

    if kinds_of(product) != {torch.float32}:
        return True
    return product.meta["val"].shape[-1] <= HEAD and not meets_products(found.end)
