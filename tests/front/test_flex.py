"""FlexAttention under torch.compile: traced as what it is defined by, and one kernel where rules find that."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from tests.kernels.programs import lowered
from tests.kernels.test_training import plans, tensors
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from terrazzo.ir.plan import Frame, Reach

MASK = create_block_mask(lambda b, h, i, j: i >= j + 3, 1, 1, 128, 128, device="cpu")


def masked(q: Any, k: Any, v: Any) -> Any:
    return flex_attention(q, k, v, block_mask=MASK, return_lse=True, enable_gqa=True)


def capped(q: Any, k: Any, v: Any) -> Any:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.tanh(s / 2) * 2 + (j - i), enable_gqa=True)


@pytest.mark.parametrize("fn", [masked, capped])
def test_flex_attention_is_traced(fn: Any, recwarn: pytest.WarningsRecorder) -> None:
    """Nothing of it is left to PyTorch; the first queries see no key."""
    args = tensors((1, 4, 128, 32), (1, 2, 128, 32), (1, 2, 128, 32), dtype=torch.float32)
    wanted = fn(*args)
    torch._dynamo.reset()
    found = torch.compile(fn, backend="terrazzo", options={"target": "interpreter"})(*args)
    assert not [w for w in recwarn if str(w.message).startswith("terrazzo:")]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_mask_of_flex_attention_skips_steps() -> None:
    """What it is defined by is one kernel, which stores the logarithms too and visits no hidden step."""
    flex = importlib.import_module("torch._higher_order_ops.flex_attention")
    blocks = (*(None,) * 12, lambda b, h, i, j: i >= j)

    def fn(q: Any, k: Any, v: Any) -> Any:
        return flex.math_attention(q, k, v, lambda s, b, h, i, j: s, blocks, 0.125, {})[:2]

    found = lowered(fn, tensors((1, 2, 256, 64), (1, 1, 256, 64), (1, 1, 256, 64)), "sm_90a")
    assert len(found.kernels) == 1 and len(plans(found, Frame)) == 1 and plans(found, Reach)


def test_numbers_stand_where_tensors_may() -> None:
    """A constant in 32 bits is a number of the program, and a number that is converted is one too."""

    def fn(x: Any) -> Any:
        return torch.where(x > 0, x, torch.tensor(-torch.inf)) + torch.ops.aten._to_copy.default(2, dtype=torch.float32)

    x = torch.randn(8)
    torch._dynamo.reset()
    found = torch.compile(fn, backend="terrazzo", options={"target": "interpreter"})(x)
    torch.testing.assert_close(found, torch.where(x > 0, x, -torch.inf) + 2)
