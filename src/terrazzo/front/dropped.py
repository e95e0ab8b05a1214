"""What is dropped of attention's weights follows from places and a seed, so that nobody stores it.

PyTorch draws a number for every weight, and keeps for the backward pass which were dropped: tokens times tokens of
them. Instead both passes compute, for each weight, a hash of its place and of two numbers that PyTorch's generator
draws for a call; a weight is dropped where its hash is low. Which are dropped differs from eager's choice, as it does
from one kernel of PyTorch to the next; the same seed and call drop the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from terrazzo.front.nodes import Nodes

ROW = -1640531527
"""2^32 over the golden ratio: the places of rows begin as far from each other as those of so many can."""
ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)))
"""Of a hash of 32 bits: by how many bits a number is shifted before it is multiplied, and by what. Chris Wellons found
them; every bit of a place changes every bit of the hash with a probability of 0.5 to within 0.1 %.
"""
LAST = 16
DRAWN = 2
"""Numbers of 32 bits that a call draws."""


def drop_by_places(graph: Any, softmaxes: Iterable[Any]) -> tuple[set[Any], set[Any]]:
    """Have what is dropped of the weights of some softmaxes in a joint graph follow from places: the nodes that are
    drawn, and those that are made of these.
    """
    import torch

    aten = torch.ops.aten
    drawn: set[Any] = set()
    made: set[Any] = set()
    for softmax in softmaxes:
        for node in [x for y in _names(softmax) for x in y.users if x.target == aten.native_dropout.default]:
            _, part, training = node.args
            if training and 0 < part < 1:
                _replace(graph, node, float(part), drawn, made)
    if drawn:
        graph.eliminate_dead_code()
        graph.lint()
    return drawn, made


def _names(softmax: Any) -> list[Any]:
    """A softmax, and what is it under another name, or with zeros in rows of which all is hidden."""
    import torch

    aten = torch.ops.aten
    same = {aten.where.self, aten.expand.default, aten.view.default, aten.alias.default, aten._to_copy.default}
    found = [softmax]
    for node in found:
        found += [x for x in node.users if x.target in same and x not in found]
    return found


def _replace(graph: Any, node: Any, part: float, drawn: set[Any], made: set[Any]) -> None:
    """A dropout, by the product of its weights with what each is worth; and its mask, by whether that is not 0."""
    import torch

    aten = torch.ops.aten
    weights = node.args[0]
    shape, kind = [*weights.meta["val"].shape], weights.meta["val"].dtype
    new = Nodes(graph, node)
    where = {"device": weights.meta["val"].device, "dtype": torch.int32}
    low = -(1 << 31)
    seeds = new.add(aten.randint.low, low, -low, [DRAWN], **where)
    before = {*graph.nodes}
    first, second = (new.add(aten.select.int, seeds, 0, n) for n in range(DRAWN))
    rows = new.add(aten.arange.start_step, 0, math.prod(shape[:-1]), **where)
    rows = new.add(aten.mul.Tensor, new.add(aten.view.default, rows, [*shape[:-1], 1]), ROW)
    places = new.add(aten.add.Tensor, rows, new.add(aten.arange.start_step, 0, shape[-1], **where))
    hashed = new.add(aten.add.Tensor, places, first)
    for n, (shift, by) in enumerate(ROUNDS):
        hashed = new.add(aten.mul.Tensor, _mixed(new, hashed, shift), by)
        hashed = new.add(aten.bitwise_xor.Tensor, hashed, second) if n == 0 else hashed
    hashed = _mixed(new, hashed, LAST)
    kept = new.add(aten.ge.Scalar, hashed, low + round(part * (1 << 32)))
    scale = 1 / (1 - part)
    worth = new.add(aten.mul.Tensor, new.add(aten._to_copy.default, kept, dtype=torch.float32), scale)
    drawn.add(seeds)
    made |= {*graph.nodes} - before
    wide = weights if kind is torch.float32 else new.add(aten._to_copy.default, weights, dtype=torch.float32)
    result = new.add(aten.mul.Tensor, wide, worth)
    result = result if kind is torch.float32 else new.add(aten._to_copy.default, result, dtype=kind)
    for use in [*node.users]:
        use.replace_all_uses_with(result if use.args[1] == 0 else kept)
        graph.erase_node(use)
    graph.erase_node(node)
    casts = [x for x in kept.users if x.target == aten._to_copy.default]
    for cast in [x for x in casts if x.meta["val"].dtype is torch.float32]:
        for scaled in [x for x in cast.users if x.target == aten.mul.Tensor and x.args[1] == scale and x is not worth]:
            scaled.replace_all_uses_with(worth)  # of the backward pass


def _mixed(new: Nodes, x: Any, shift: int) -> Any:
    """A number of 32 bits, and in its low bits its high ones too."""
    import torch

    aten = torch.ops.aten
    high = new.add(aten.__rshift__.Scalar, x, shift)
    high = new.add(aten.bitwise_and.Scalar, high, (1 << 32 - shift) - 1)
    return new.add(aten.bitwise_xor.Tensor, x, high)
