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
    for those among the `results` of the forward pass; the nodes that are to be kept, and those to be computed again.
    """
    import torch

    kept: set[Any] = set()
    again: set[Any] = set()
    outputs = {x for x in graph.output_node().args[0][:results] if x is not None}
    forward = behind(outputs)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._log_softmax.default):
        names = _names(node)
        later = any(user not in forward for x in names for user in x.users if user not in names)
        if node in forward and later and outputs.isdisjoint(names) and (between := _logits(node, outputs)) is not None:
            again |= {*between, *names[1:]}
            _rewrite(graph, node, kept, again)
    return kept, again


def _rewrite(graph: Any, node: Any, kept: set[Any], again: set[Any]) -> None:
    """A log-softmax in place."""
    import torch

    aten = torch.ops.aten
    before = Nodes(graph, node)
    x, dim, _ = node.args
    given, wanted = x.meta["val"].dtype, node.meta["val"].dtype
    wide = torch.float32 if given.itemsize == 2 else given
    whole = x if given is wide else before.add(aten._to_copy.default, x, dtype=wide)
    top = before.add(aten.amax.default, whole, [dim], True)
    moved = before.add(aten.sub.Tensor, whole, top)
    rows = before.add(
        aten.log.default, before.add(aten.sum.dim_IntList, before.add(aten.exp.default, moved), [dim], True)
    )
    made = before.add(aten.sub.Tensor, moved, rows)
    value = made if wanted is wide else before.add(aten._to_copy.default, made, dtype=wanted)
    node.replace_all_uses_with(value)
    graph.erase_node(node)
    kept |= {top, rows}
    again |= {moved, made, value, *([] if whole is x else [whole])}


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
