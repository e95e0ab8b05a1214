"""What a training graph keeps of its forward pass for the backward pass.

PyTorch's default is everything that the backward pass reads. Of attention in 16 bits that is weights in 32 bits, tokens
times tokens of them, and q, k and v in 32 bits. They are computed again instead, from q, k and v in 16 bits: memory
grows with the number of tokens, and products have factors in 16 bits. Of attention in 32 bits scores and weights are
computed again from q and k, where a machine does so in one kernel. What is spread out of little is computed again, too,
and so is a log-softmax.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from terrazzo.front.dropped import drop_by_places
from terrazzo.front.kept_once import keep_once
from terrazzo.front.log_softmax import keep_sums_of_rows
from terrazzo.front.row_numbers import keep_row_numbers
from terrazzo.front.spread import spread_out


def partition(joint: Any, inputs: Any, *, wide: bool = False, exactly: bool = False, **options: Any) -> tuple[Any, Any]:
    """The forward and the backward graph of a joint one: a `partition_fn` for AOTAutograd. `wide`: weights in 32 bits
    are computed in the kernel that multiplies them. `exactly`: rows of scores' gradients add up to 0, as they do where
    their weights are kept.
    """
    import torch
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
    from torch.utils.checkpoint import CheckpointPolicy

    view_weights(joint.graph)
    sums, made_again = keep_sums_of_rows(joint.graph, options["num_fwd_outputs"])
    made_again |= keep_once(joint.graph, options["num_fwd_outputs"])
    again, nothing = computed_again(joint.graph, wide), made_of_nothing(joint.graph)
    for node in spread_out(joint.graph, options["num_fwd_outputs"], nothing):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    if not again:
        found: tuple[Any, Any] = default_partition(joint, inputs, **options)
        return found
    softmaxes = [x for x in again if x.target == torch.ops.aten._softmax.default]
    drawn, worth = drop_by_places(joint.graph, softmaxes)
    again = computed_again(joint.graph, wide, worth) if worth else again
    numbers, more = keep_row_numbers(joint.graph, softmaxes, worth, exactly)
    for node in ((again | worth | made_again) & {*joint.graph.nodes}) | more | nothing:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    for node in sums | numbers | drawn:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return min_cut_rematerialization_partition(joint, inputs, **options)  # type: ignore[no-any-return]


def view_weights(graph: Any) -> None:
    """Have dimensions that `einsum` moves of weights and their gradients, there and back, or that have one element, be
    parts of views, as other products have them.
    """
    import torch

    aten = torch.ops.aten
    permute, grown = aten.permute.default, (aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)
    sizes = {x.meta["val"].numel() for x in graph.find_nodes(op="call_function", target=aten._softmax.default)}
    for node in [x for x in graph.nodes if sizes and x.target in (permute, *grown)]:
        inner, dims = node.args[0], node.args[1] if node.target == permute else []
        if node.meta["val"].numel() not in sizes or any(x.op == "output" for x in node.users):
            continue
        source = inner
        if dims and inner.target == permute:
            source, dims = inner.args[0], [inner.args[1][d] for d in dims]
        shape = source.meta["val"].shape
        kept = [d % len(shape) for d in dims if shape[d] != 1]
        if kept == sorted(kept):
            node.target, node.args = aten.view.default, (source, [*node.meta["val"].shape])
        if not inner.users:
            graph.erase_node(inner)


def made_of_nothing(graph: Any) -> set[Any]:
    """The nodes that no input and no chance has a part in, as masks of places are: who reads them knows what they say,
    and not only what is kept of that.
    """
    import torch

    found: set[Any] = set()
    for node in graph.nodes:
        chance = isinstance(node.target, torch._ops.OpOverload) and (
            torch.Tag.nondeterministic_seeded in node.target.tags or node.target._schema.is_mutable
        )
        if node.op == "call_function" and not chance and all(x in found for x in node.all_input_nodes):
            found.add(node)
    return found


def computed_again(graph: Any, wide: bool = False, worth: Collection[Any] = ()) -> set[Any]:
    """The nodes of softmaxes in 32 bits of what was in 16 bits, as far as what their weights are multiplied with; and,
    where it is `wide`, those from products in 32 bits to what multiplies their weights. Weights are still weights when
    they are multiplied by what each is `worth`.
    """
    import torch

    aten = torch.ops.aten
    multiplied = (aten.bmm.default, aten.mm.default)
    shaped = {aten.where.self, aten.expand.default, aten.view.default, aten.alias.default, aten._to_copy.default}
    found: set[Any] = set()
    for softmax in graph.find_nodes(op="call_function", target=aten._softmax.default):
        before = _behind([softmax])
        narrow = any(_bits(source) == 16 for node in before for source in node.all_input_nodes)
        if not narrow:
            before = _behind([softmax], multiplied)
            if not wide or not any(node.target in multiplied for node in before):
                continue
        weights = [softmax]
        for node in weights:
            readers = [x for x in node.users if x.target in shaped or _times(x, worth)]
            readers = [x for x in readers if x not in weights]
            weights += readers
            before |= {x for r in readers for x in _between(r, before)}
        products = {x for node in weights for x in node.users if x.target in multiplied}
        if products or narrow:
            found |= before | {*weights}
        if narrow:
            found |= _behind(y for x in products for y in x.all_input_nodes)
    return found


def _times(node: Any, worth: Collection[Any]) -> bool:
    import torch

    return node.target == torch.ops.aten.mul.Tensor and any(x in worth for x in node.args)


def _behind(nodes: Iterable[Any], until: Sequence[Any] = ()) -> set[Any]:
    """Nodes in 32 bits, and those that they are made of, but for what some are made of `until` which it goes."""
    todo = [x for x in nodes if x.op == "call_function" and _bits(x) == 32]
    seen = set(todo)
    for node in todo:
        if node.target in until:
            continue
        more = {x for x in node.all_input_nodes if x.op == "call_function" and _bits(x) == 32} - seen
        seen |= more
        todo += more
    return seen


def _between(node: Any, known: set[Any]) -> set[Any]:
    """What a node reads that is made of known nodes and of no others."""
    found: set[Any] = set()
    for x in node.all_input_nodes:
        if x not in known and x.op == "call_function":
            behind = _between(x, known)
            if behind or any(y in known for y in x.all_input_nodes):
                found |= {x, *behind}
    return found


def _bits(node: Any) -> int:
    """The bits of a tensor's numbers; 0 of what is no tensor of floating-point numbers."""
    import torch

    value = node.meta.get("val")
    return value.dtype.itemsize * 8 if isinstance(value, torch.Tensor) and value.is_floating_point() else 0
