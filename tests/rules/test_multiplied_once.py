"""Products whose results are repeated: scores of groups that several heads share."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.front.capture import capture
from terrazzo.options import Options
from terrazzo.pipelines import lowering


def scores(c: Any, b: Any, weights: Any) -> Any:
    """Scores of groups, weighted for each of 16 heads."""
    c, b = (x.float().repeat_interleave(16, dim=2, output_size=128) for x in (c, b))
    return torch.einsum("clhn,cshn->clsh", c, b) * weights.permute(0, 2, 3, 1)


def test_scores_of_groups_are_multiplied_once() -> None:
    with torch.device("meta"):
        rows = [torch.zeros(8, 256, 8, 128, dtype=torch.bfloat16) for _ in range(2)]
        given = (*rows, torch.zeros(8, 128, 256, 256))
    found = lowering(capture(scores, given).program, Options(target="sm_90a"))
    assert any(e.rule == "multiply_once" and e.fired for e in found.log.events)
    once, _ = found.loop.steps
    assert once.writes[0].type.shape == (8, 8, 256, 256)
