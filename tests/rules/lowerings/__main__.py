"""Looks for examples in the operator database, and writes the files anew."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from tests.rules.lowerings import TOPICS, examples, lowered, write
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from terrazzo.check.replay import Wrong
from terrazzo.check.shrink import alone
from terrazzo.front.fx import from_graph
from terrazzo.ir.text import show
from terrazzo.rewrite.rule import Log
from terrazzo.rules import torch_to_tensor
from terrazzo.rules.torch_to_tensor.lower import lower

LARGEST = 64
"""Elements of a result beyond which an example is not plain."""


def calls() -> Iterator[Any]:
    """Applications of all lowerings in what the first samples of every operator are made of."""
    for op in op_db:
        for dtype in (torch.float32, torch.int64, torch.bool):
            try:
                for _, sample in zip(range(5), op.sample_inputs("cpu", dtype, requires_grad=False), strict=False):
                    yield from _applications(op, sample)
            except Exception:  # what PyTorch itself cannot do or trace is no example
                continue


def _applications(op: Any, sample: Any) -> Any:
    flat, tree = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))

    def call(*tensors: Any) -> Any:
        rest = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(rest) if isinstance(x, torch.Tensor) else x for x in flat], tree)
        return op.op(*args, **kwargs)

    graph = make_fx(call, tracing_mode="fake")(*(x for x in flat if isinstance(x, torch.Tensor)))
    log = Log(applications=[])
    lower(from_graph(graph, "f")[0], torch_to_tensor.RULES, log)
    return log.applications


def plainest(missing: set[str]) -> dict[str, str]:
    """The shortest text of an application of each of these rules, with results of several but not many elements."""
    best: dict[str, tuple[Any, str]] = {}
    for a in calls():
        if a.rule not in missing:
            continue
        try:
            (program,) = alone(Wrong(a, "", ""))
            text = show(program)
            if a.rule not in lowered(text)[2]:
                continue
        except Exception:  # such as an argument that has no text
            continue
        size = max(r.type.numel for r in program.results)
        weight = (not 1 < size <= LARGEST, len(text))
        if a.rule not in best or weight < best[a.rule][0]:
            best[a.rule] = weight, text
    return {name: text for name, (_, text) in best.items()}


def main() -> None:
    """Find what is missing, write all, and say what has no example."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    befores = {name: before for name, (before, _) in examples().items() if name in TOPICS}
    missing = TOPICS.keys() - befores.keys()
    write(befores | (plainest(set(missing)) if missing else {}))
    if without := TOPICS.keys() - examples().keys():
        print(f"no example found, so write one: {', '.join(sorted(without))}")


main()
