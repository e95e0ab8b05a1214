"""Attention and encoder layers that PyTorch runs as one op where nobody wants gradients are kernels of ours."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from terrazzo.front import fast_paths

MASKS = {"none": None, "queries and keys": (0, (5, 5)), "keys": (1, (2, 5)), "all": (2, (2, 4, 5, 5))}


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_attention_is_what_the_op_computes(name: str, weights: bool, hidden: bool) -> None:
    """A row of which all is hidden is NaN in both."""
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 5, 16), torch.randn(48, 16) / 4, torch.randn(48)
    rest = torch.randn(16, 16) / 4, torch.randn(16)
    kind, shape = MASKS[name] or (None, None)
    mask = None
    if shape:
        mask = torch.rand(shape) > 0.6
        mask[..., 0] = False
        mask.view(-1, 5)[0] |= torch.tensor(hidden)
    args = (x, x, x, 16, 4, w, b, *rest, mask, weights, False, kind)
    wanted = torch.ops.aten._native_multi_head_attention.default(*args)
    found = fast_paths.attention(*args)
    torch.testing.assert_close(found[0], wanted[0], equal_nan=True)
    if weights:
        torch.testing.assert_close(found[1], wanted[1], equal_nan=True)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_nothing_is_left_to_pytorch(activation: str, first: bool, masked: bool, tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, activation=activation, norm_first=first, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 16)
    hidden = {"src_key_padding_mask": torch.tensor([[False] * 3 + [True] * 2, [False] * 5])} if masked else {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(torch.compile(model, backend="terrazzo")(x, **hidden), model(x, **hidden))


@pytest.mark.parametrize("average", [False, True])
def test_weights_of_attention_alone(average: bool, tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = nn.MultiheadAttention(16, 4, batch_first=True).eval()

    def attend(x: Any) -> Any:
        return model(x, x, x, average_attn_weights=average)

    x = torch.randn(2, 5, 16)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for a, b in zip(torch.compile(attend, backend="terrazzo")(x), attend(x), strict=True):
            torch.testing.assert_close(a, b)
