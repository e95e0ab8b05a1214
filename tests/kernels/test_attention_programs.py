"""Attention as programs have it, at their sizes: one kernel each. Nothing is computed here."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from terrazzo.front.capture import capture
from terrazzo.ir.dialects import loop as l
from terrazzo.options import Options
from terrazzo.pipelines import LOWER, stages
from terrazzo.rewrite.rule import Log


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(s, dtype=dtype, device="meta") for s in shapes)


def names(fn: Any, *args: Any, last: str = "schedule") -> list[str]:
    """The kernels of a program for an H200."""
    program = capture(fn, args, {}).program
    passes = LOWER[: LOWER.index(last) + 1]
    done = stages(program, Options(target="sm_90a", libraries="never"), Log(), passes)[-1][1]
    loop = done.loop if last == "schedule" else done
    return [s.name for s in loop.steps if isinstance(s, l.Kernel)]


def test_many_scores_are_scaled_after_their_product() -> None:
    """Each operand is scaled, and neither alone is worth scaling the scores instead."""

    def window(q: Any, k: Any, v: Any) -> Any:
        at = torch.arange(q.shape[-2], device=q.device)
        seen = (at[:, None] >= at) & (at[:, None] - at < 1024)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    assert len(names(window, *tensors(*((1, 16, 16384, 128),) * 3))) == 1
