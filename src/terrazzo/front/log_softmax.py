"""What a training graph keeps of a log-softmax for its backward pass: two numbers for each row.

PyTorch's default keeps the result. Of a row of logits a loss reads one number of it, so of 128,256 words it would be
stored for the backward pass alone, in 32 bits where the logits have 16. The logits are stored anyway, and with

    log_softmax(x) = (x - max(x)) - log(sum(exp(x - max(x))))

the result is computed again from these, in the kernel that needs it, bit by bit as it was.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from terrazzo.front.nodes import Nodes, behind

SHORT = 16
"""Numbers of a row below which its result is kept: two numbers are no little beside them."""


def keep_sums_of_rows(graph: Any, results: int) -> tuple[set[Any], set[Any]]:
    """Have the log-softmaxes of a joint graph that its backward pass reads computed from two numbers for each row, but
    for those among the `results` of the forward pass, and once more where the backward pass needs them; the nodes that
    are to be kept, and those to be computed again.
    """
    import torch

    kept: set[Any] = set()
    again: set[Any] = set()
    outputs = {x for x in graph.output_node().args[0][:results] if x is not None}
    forward = behind(outputs)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._log_softmax.default):
        names = _names(node)
        later = {user for x in names for user in x.users if user not in forward and user not in names}
        if node in forward and later and outputs.isdisjoint(names) and (between := _logits(node, outputs)) is not None:
            _rewrite(graph, node, between, later, kept, again)
    graph.eliminate_dead_code()
    return kept, {x for x in again if x in graph.nodes}


def _rewrite(graph: Any, node: Any, between: list[Any], later: set[Any], kept: set[Any], again: set[Any]) -> None:
    """A log-softmax in place, and another one for those who read it later: a node that both passes read is kept."""
    import torch

    aten = torch.ops.aten
    x, dim, _ = node.args
    before = Nodes(graph, node)
    whole = _widened(before, x)
    top = before.add(aten.amax.default, whole, [dim], True)
    each = before.add(aten.exp.default, before.add(aten.sub.Tensor, whole, top))
    rows = before.add(aten.log.default, before.add(aten.sum.dim_IntList, each, [dim], True))
    value, made = _made(before, x, whole, top, rows, node.meta["val"].dtype)
    first = next(y for y in graph.nodes if y in later)
    after, copies = Nodes(graph, first), dict[Any, Any]()
    for y in reversed(between):
        copies[y] = after.add(y.target, *(copies.get(z, z) for z in y.args), **y.kwargs)
    x = copies.get(x, x)
    value_again, made_again = _made(after, x, _widened(after, x), top, rows, node.meta["val"].dtype)
    for name in _names(node):
        name.replace_all_uses_with(value_again, lambda user: user in later)
    node.replace_all_uses_with(value)
    kept |= {top, rows}
    again |= {*between, *made, *copies.values(), *made_again}


def _widened(nodes: Nodes, x: Any) -> Any:
    """Logits in the type that they are computed in."""
    import torch

    narrow = x.meta["val"].dtype.itemsize == 2
    return nodes.add(torch.ops.aten._to_copy.default, x, dtype=torch.float32) if narrow else x


def _made(nodes: Nodes, x: Any, whole: Any, top: Any, rows: Any, dtype: Any) -> tuple[Any, set[Any]]:
    """A log-softmax of logits that were widened, by the two numbers of each row, and the nodes on the way to it."""
    import torch

    aten = torch.ops.aten
    moved = nodes.add(aten.sub.Tensor, whole, top)
    value = made = nodes.add(aten.sub.Tensor, moved, rows)
    if dtype is not made.meta["val"].dtype:
        value = nodes.add(aten._to_copy.default, made, dtype=dtype)
    return value, {moved, made, value, *([] if whole is x else [whole])}


def _logits(node: Any, outputs: Collection[Any]) -> list[Any] | None:
    """The names and conversions between what is stored anyway, as `outputs` are, and a log-softmax of it. None where
    nothing is, as of numbers in 32 bits that are computed on their way, or where rows are `SHORT`.
    """
    import torch

    aten = torch.ops.aten
    shaped = {aten._to_copy.default, aten.alias.default, aten.clone.default, aten.permute.default, aten.slice.Tensor,
              aten.squeeze.dim, aten.unsqueeze.default, aten.view.default, aten._unsafe_view.default}  # fmt: skip
    value = node.meta["val"]
    if not value.dim() or not isinstance(size := value.shape[node.args[1]], int) or size < SHORT:
        return None
    between, source = [], node.args[0]
    while source not in outputs and source.target in shaped and source.meta["val"].dtype.itemsize > 2:
        between.append(source)
        source = source.args[0]
    computed = isinstance(source.target, torch._ops.OpOverload) and torch.Tag.pointwise in source.target.tags
    smaller = source.meta["val"].dtype.itemsize < value.dtype.itemsize
    return between if smaller or not computed or source in outputs else None


def _names(node: Any) -> list[Any]:
    """A node and its other names."""
    import torch

    found = [node]
    for x in found:
        found += [user for user in x.users if user.target == torch.ops.aten.alias.default]
    return found
