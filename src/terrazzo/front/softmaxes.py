"""What a graph of PyTorch's says of its softmaxes: where their gradients end, what weights are multiplied to, what
scores are made of, and what becomes of their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gradient:
    """dw * w - w * sum(dw * w), which `end` is: `weights` is w, `softmax` what it is made of, `rows` the sum."""

    end: Any
    weights: Any
    softmax: Any
    above: Any
    rows: Any


def gradient_of(node: Any) -> Gradient | None:
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
    node = whole_of(node)
    if node.target == aten.where.self:
        node = node.args[2] if _hidden(node.args[0]) is node.args[2].args[0] else node
    last = node.target == aten._softmax.default and node.args[1] in (-1, node.meta["val"].dim() - 1)
    return node if last and not node.args[2] else None


def whole_of(node: Any) -> Any:
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


def results_of(found: Gradient, worth: Collection[Any]) -> tuple[Any, Any] | None:
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
    """Whether a factor is the weights of a softmax, multiplied by the same, and its rows are rows of that."""
    bare, found = _taken_off(node, worth)
    return found is times and _softmax(bare) is softmax and _row(node) == _row(softmax)


def _taken_off(node: Any, worth: Collection[Any]) -> tuple[Any, Any]:
    """What a node is a view of, and what that is multiplied by of what weights are worth, if it is."""
    import torch

    node = viewed(node)
    if node.target == torch.ops.aten.mul.Tensor:
        for bare, times in (node.args, node.args[::-1]):
            if times in worth:
                return viewed(bare), times
    return node, None


def viewed(node: Any) -> Any:
    """What a node is a view of."""
    import torch

    aten = torch.ops.aten
    views = {aten.view.default, aten.expand.default, aten.alias.default, aten._unsafe_view.default, aten.clone.default}
    while node.target in views and node.args[0].meta["val"].numel() == node.meta["val"].numel():
        node = node.args[0]
    return node


def kinds_of(product: Any) -> set[Any]:
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


def of_products(scores: Any) -> bool:
    """Whether scores are products, or multiples of these, and -inf where they are hidden: the largest of a row has the
    rounding of a product then, and one number that it is added to loses no more. Of others nobody knows: where all of a
    row are hidden by -1e9, nothing of the logarithm of their number is left beside that.
    """
    import torch

    aten = torch.ops.aten
    node = viewed(scores)
    args = [x for x in node.args if isinstance(x, torch.fx.Node)]
    if _is_product(node):
        return True
    if node.target in (aten._to_copy.default, aten.neg.default, aten.tanh.default, aten.permute.default):
        return of_products(args[0])
    if node.target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
        return any(of_products(x) for x in args[: 2 if "mul" in str(node.target) else 1])
    if node.target == aten.where.self:
        return all(_constant(x) == {-math.inf} or of_products(x) for x in args[1:])
    if node.target == aten.add.Tensor and len(args) == 2:
        return any(_constant(x) <= {0.0, -math.inf} and of_products(y) for x, y in (args, args[::-1]))
    return False


def _is_product(node: Any) -> bool:
    """Whether a node is a product of matrices, seen in another shape."""
    import torch

    aten = torch.ops.aten
    return isinstance(node, torch.fx.Node) and viewed(node).target in (aten.bmm.default, aten.mm.default)


def _is_multiple(node: Any) -> bool:
    """Whether a node is the first node that it is made of in another shape, or times a number."""
    import torch

    aten = torch.ops.aten
    views = (aten.view.default, aten._unsafe_view.default, aten.alias.default, aten.clone.default, aten.expand.default)
    times = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
    return node.target in views or (node.target in times and isinstance(node.args[1], (int, float)))


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


def shifted(scores: Any) -> Any:
    """The product that scores are a multiple of, with anything added or taken off, or some hidden by -inf, so that they
    change alike where all products of a row do; None where others read it, or what becomes of it.
    """
    import torch

    aten = torch.ops.aten
    if scores.target == aten.bmm.default:
        return scores
    made: list[Any] = []
    if _is_multiple(scores):
        made = [scores.args[0]]
    elif scores.target in (aten.add.Tensor, aten.sub.Tensor) and not scores.kwargs:
        made = [*scores.args]
    elif scores.target == aten.where.self and {-math.inf} in map(_constant, scores.args[1:]):
        made = [x for x in scores.args[1:] if _constant(x) != {-math.inf}]
    made = [x for x in made if isinstance(x, torch.fx.Node) and len(x.users) == 1 and _row(x) == _row(scores)]
    found = [x for y in made if (x := shifted(y)) is not None]
    return found[0] if len(found) == 1 else None


def _row(node: Any) -> tuple[int, ...]:
    """The extent of a row; none of a single number."""
    return tuple(node.meta["val"].shape[-1:])


def multiplied(gradient: Any) -> Iterable[Any]:
    """The products of a gradient of scores, or of a multiple of it, or of a part, with something."""
    import torch

    for user in gradient.users:
        if user.target == torch.ops.aten.bmm.default and user.args[0] is gradient:
            yield user
        elif user.target == torch.ops.aten.where.self or _is_multiple(user):
            yield from multiplied(user)


def meets_products(gradient: Any) -> bool:
    """Whether a gradient of scores, or a multiple or a part of it, is multiplied by products."""
    import torch

    aten = torch.ops.aten
    for user in gradient.users:
        if user.target == aten.mul.Tensor and any(of_products(x) for x in user.all_input_nodes if x is not gradient):
            return True
        if (user.target == aten.where.self or _is_multiple(user)) and meets_products(user):
            return True
    return False
