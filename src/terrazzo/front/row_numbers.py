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
from dataclasses import dataclass
from typing import Any

from terrazzo.front.nodes import Nodes
from terrazzo.rules.loop.attention.gradients import HEAD

COMMON = 8
"""Values have much in common where the largest is no more than so many times their mean, and that no more than so many
times their mean by the root of 1 / x: what a few have that are far larger, and perhaps hidden, is not in common with
the others.
"""


@dataclass(frozen=True)
class Gradient:
    """dw * w - w * sum(dw * w), which `end` is: `weights` is w, `softmax` what it is made of, `rows` the sum."""

    end: Any
    weights: Any
    softmax: Any
    above: Any
    rows: Any


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
    for found in [x for node in graph.nodes if (x := _gradient(node)) is not None]:
        results = _results(found, worth) if found.softmax in wanted else None
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
    kind = next((x for x in _kinds(results) if x in (torch.bfloat16, torch.float16)), None)
    inverse = kind is None
    rows = before.add((aten.reciprocal if inverse else aten.log).default, total)
    apart = inverse or not _of_products(scores)
    none = before.add(aten.eq.Scalar, top, -math.inf)
    if not apart:
        rows = before.add(aten.add.Tensor, top, rows)
    whole = _whole(found.weights)
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
    if add_up and _kinds(results) == {torch.float32}:
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


def _of_products(scores: Any) -> bool:
    """Whether scores are products, or multiples of these, and -inf where they are hidden: the largest of a row has the
    rounding of a product then, and one number that it is added to loses no more. Of others nobody knows: where all of a
    row are hidden by -1e9, nothing of the logarithm of their number is left beside that.
    """
    import torch

    aten = torch.ops.aten
    node = _seen(scores)
    args = [x for x in node.args if isinstance(x, torch.fx.Node)]
    if _is_product(node):
        return True
    if node.target in (aten._to_copy.default, aten.neg.default, aten.tanh.default, aten.permute.default):
        return _of_products(args[0])
    if node.target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
        return any(_of_products(x) for x in args[: 2 if "mul" in str(node.target) else 1])
    if node.target == aten.where.self:
        return all(_constant(x) == {-math.inf} or _of_products(x) for x in args[1:])
    if node.target == aten.add.Tensor and len(args) == 2:
        return any(_constant(x) <= {0.0, -math.inf} and _of_products(y) for x, y in (args, args[::-1]))
    return False


def _constant(node: Any) -> set[Any]:
    """The numbers that a node is made of, wherever which is; None among them where there are others."""
    import torch

    aten = torch.ops.aten
    views = (aten.view.default, aten.expand.default, aten.alias.default, aten.unsqueeze.default, aten._to_copy.default)
    while node.target in views:
        node = node.args[0]
    made = {aten.full.default: 1, aten.full_like.default: 1, aten.scalar_tensor.default: 0}
    if node.target in made:
        return {node.args[made[node.target]]}
    if node.target in (aten.zeros_like.default, aten.zeros.default):
        return {0.0}
    return _constant(node.args[1]) | _constant(node.args[2]) if node.target == aten.where.self else {None}


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
    old = _seen(inward)
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
    product = _shifted(scores)
    keys = product.args[1] if product is not None else None
    turned = (
        [x for x in keys.users if x.target == aten.permute.default and list(x.args[1]) == [0, 2, 1]] if keys else []
    )
    queries = {x for x in _multiplied(gradient) if x.args[1] in turned}
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


def _shifted(scores: Any) -> Any:
    """The product that scores are a multiple of, with anything added or some hidden by -inf, so that they change alike
    where all products of a row do; None where others read it, or what becomes of it.
    """
    import torch

    aten = torch.ops.aten
    if scores.target == aten.bmm.default:
        return scores
    made: list[Any] = []
    if _is_multiple(scores):
        made = [scores.args[0]]
    elif scores.target == aten.add.Tensor and not scores.kwargs:
        made = [*scores.args]
    elif scores.target == aten.where.self and {-math.inf} in map(_constant, scores.args[1:]):
        made = [x for x in scores.args[1:] if _constant(x) != {-math.inf}]
    found = [x for y in made if isinstance(y, torch.fx.Node) and len(y.users) == 1 and (x := _shifted(y)) is not None]
    return found[0] if len(found) == 1 else None


def _multiplied(gradient: Any) -> Iterable[Any]:
    """The products of a gradient of scores, or of a multiple of it, or of a part, with something."""
    import torch

    for user in gradient.users:
        if user.target == torch.ops.aten.bmm.default and user.args[0] is gradient:
            yield user
        elif user.target == torch.ops.aten.where.self or _is_multiple(user):
            yield from _multiplied(user)


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

    if _kinds(product) != {torch.float32}:
        return True
    return product.meta["val"].shape[-1] <= HEAD and not _meets_products(found.end)


def _meets_products(gradient: Any) -> bool:
    """Whether a gradient of scores, or a multiple or a part of it, is multiplied by products."""
    import torch

    aten = torch.ops.aten
    for user in gradient.users:
        if user.target == aten.mul.Tensor and any(_of_products(x) for x in user.all_input_nodes if x is not gradient):
            return True
        if (user.target == aten.where.self or _is_multiple(user)) and _meets_products(user):
            return True
    return False


def _is_multiple(node: Any) -> bool:
    """Whether a node is the first node that it is made of in another shape, or times a number."""
    import torch

    aten = torch.ops.aten
    views = (aten.view.default, aten._unsafe_view.default, aten.alias.default, aten.clone.default, aten.expand.default)
    times = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
    return node.target in views or (node.target in times and isinstance(node.args[1], (int, float)))


def _is_product(node: Any) -> bool:
    """Whether a node is a product of matrices, seen in another shape."""
    import torch

    aten = torch.ops.aten
    return isinstance(node, torch.fx.Node) and _seen(node).target in (aten.bmm.default, aten.mm.default)


def _kinds(product: Any) -> set[Any]:
    """What the factors of a product were before they were converted."""
    import torch

    kinds = set()
    for node in product.args:
        before = node.all_input_nodes
        while node.meta["val"].dtype is torch.float32 and len(before) == 1 and hasattr(before[0].meta["val"], "dtype"):
            (node,) = before
            before = node.all_input_nodes
        kinds.add(node.meta["val"].dtype)
    return kinds


def _gradient(node: Any) -> Gradient | None:
    """A node as the end of a softmax's gradient."""
    import torch

    aten = torch.ops.aten
    if node.target != aten.sub.Tensor or len(node.args) != 2 or node.kwargs:
        return None
    one, other = node.args
    if getattr(one, "target", None) != aten.mul.Tensor or getattr(other, "target", None) != aten.mul.Tensor:
        return None
    for weights, rows in (other.args, other.args[::-1]):
        summed = getattr(rows, "target", None) == aten.sum.dim_IntList and rows.args[0] is one
        if not summed or list(rows.args[1]) != [-1] or rows.args[2:] != (True,) or weights not in one.args:
            continue
        above = one.args[0] if one.args[1] is weights else one.args[1]
        softmax = _softmax(weights)
        if softmax is not None:
            return Gradient(node, weights, softmax, above, rows)
    return None


def _softmax(node: Any) -> Any:
    """The softmax that weights are: itself, or with rows of zeros where all scores are -inf."""
    import torch

    aten = torch.ops.aten
    node = _whole(node)
    if node.target == aten.where.self:
        node = node.args[2] if _hidden(node.args[0]) is node.args[2].args[0] else node
    last = node.target == aten._softmax.default and node.args[1] in (-1, node.meta["val"].dim() - 1)
    return node if last and not node.args[2] else None


def _whole(node: Any) -> Any:
    """What weights are another name of."""
    import torch

    while node.target == torch.ops.aten.alias.default:
        node = node.args[0]
    return node


def _hidden(node: Any) -> Any:
    """The scores of which a condition says that all of a row are -inf; None where it says something else."""
    import torch

    aten = torch.ops.aten
    if node.target != aten.all.dim or node.args[1:] != (-1, True):
        return None
    (test,) = node.args[:1]
    return test.args[0] if test.target == aten.eq.Scalar and test.args[1] == -math.inf else None


def _results(found: Gradient, worth: Collection[Any]) -> tuple[Any, Any] | None:
    """The gradient of what weights are multiplied to, and that: a product of both with the same values is what the
    gradient of the weights is, and what they are multiplied to. Both are multiplied by what weights are worth.
    """
    import torch

    aten = torch.ops.aten
    inward, times = _taken_off(found.above, worth)
    if inward.target != aten.bmm.default or inward.args[1].target != aten.permute.default:
        return None
    gradient, turned = inward.args
    if list(turned.args[1]) != [0, 2, 1]:
        return None
    values = turned.args[0]
    products = (x for x in values.users if x.target == aten.bmm.default and x.args[1] is values)
    results = next((x for x in products if _is_softmax(x.args[0], found.softmax, times, worth)), None)
    if results is None or results.meta["val"].shape != gradient.meta["val"].shape:
        return None
    return gradient, results


def _is_softmax(node: Any, softmax: Any, times: Any, worth: Collection[Any]) -> bool:
    """Whether a factor is the weights of a softmax, multiplied by the same."""
    bare, found = _taken_off(node, worth)
    return found is times and _softmax(bare) is softmax


def _taken_off(node: Any, worth: Collection[Any]) -> tuple[Any, Any]:
    """What a node is a view of, and what that is multiplied by of what weights are worth, if it is."""
    import torch

    node = _seen(node)
    if node.target == torch.ops.aten.mul.Tensor:
        for bare, times in (node.args, node.args[::-1]):
            if times in worth:
                return _seen(bare), times
    return node, None


def _seen(node: Any) -> Any:
    """What a node is a view of."""
    import torch

    aten = torch.ops.aten
    views = {aten.view.default, aten.expand.default, aten.alias.default, aten._unsafe_view.default, aten.clone.default}
    while node.target in views and node.args[0].meta["val"].numel() == node.meta["val"].numel():
        node = node.args[0]
    return node
