"""What products look up is stored first, on a GPU: once for all that look it up, and only where that is cheaper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as f

from terrazzo.front.capture import capture
from terrazzo.ir.dialects import loop as l
from terrazzo.options import Options
from terrazzo.pipelines import LOWER, stages
from terrazzo.rewrite.rule import Log

UPPER = LOWER[: LOWER.index("store_as_read")]


def fused(fn: Any, *args: Any, target: str = "sm_90a") -> list[l.Kernel]:
    """The kernels of a program after lookups were stored."""
    program = capture(fn, args, {}).program
    return list(stages(program, Options(target=target, libraries="never"), Log(), UPPER)[-1][1].steps)


def towers(table: Any, w: Any, v: Any, i: Any) -> Any:
    return f.linear(f.embedding(i, table), w).relu(), f.linear(f.embedding(i, table), v).tanh()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_that_look_up_the_same_read_what_is_stored_once(dtype: torch.dtype) -> None:
    table, w, v = (torch.zeros(*shape, dtype=dtype) for shape in ((9000, 128), (512, 128), (256, 128)))
    steps = fused(towers, table, w, v, torch.zeros(4096, dtype=torch.int64))
    looked = [s for s in steps if any(b.name == "table" for b in s.reads)]
    assert len(looked) == 1 and looked[0].stores[0].buffer.type.shape == (4096, 128)
    assert sum(looked[0].writes[0] in s.reads for s in steps) == len(steps) - 1


def test_on_a_processor_they_are_looked_up_on_the_way() -> None:
    table, w, v = (torch.zeros(*shape) for shape in ((9000, 128), (512, 128), (256, 128)))
    steps = fused(towers, table, w, v, torch.zeros(4096, dtype=torch.int64), target="cpu")
    assert all(any(b.name == "table" for b in s.reads) for s in steps)


def test_few_products_are_not_worth_a_kernel() -> None:
    table, w = torch.zeros(9000, 16), torch.zeros(8, 16)
    (step,) = fused(lambda t, w, i: f.linear(f.embedding(i, t), w), table, w, torch.zeros(64, dtype=torch.int64))
    assert any(b.name == "t" for b in step.reads)
