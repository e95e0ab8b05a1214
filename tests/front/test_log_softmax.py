"""Of a log-softmax the backward pass is given two numbers for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

ROWS, WIDTH, WORDS = 24, 16, 200
WANTED = torch.randint(0, WORDS, (ROWS,), generator=torch.Generator().manual_seed(1))
WANTED[3] = -100  # which is ignored


def of_words(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w).float(), WANTED)


def attending(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Beside what is computed again of attention, where PyTorch looks for the least that can be kept."""
    heads = x.view(1, 2, ROWS // 2, WIDTH)
    return of_words(F.scaled_dot_product_attention(heads, heads, heads).view(ROWS, WIDTH), w)


def smoothed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w), WANTED, label_smoothing=0.1)


def hidden(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Words of which some are out of the question, for one row all."""
    out = torch.zeros(ROWS, WORDS, dtype=torch.bool)
    out[1], out[2, 40:] = True, True
    return F.linear(x, w).masked_fill(out, -torch.inf).float().log_softmax(-1).masked_fill(out, 0.0).square().mean()


def distilled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.kl_div(
        F.linear(x, w).log_softmax(-1), F.linear(2 * x, w).log_softmax(-1), log_target=True, reduction="batchmean"
    )


def along_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w).view(2, -1, WORDS)[:, 1:].float().log_softmax(1).square().mean()


def trained(call: Callable[..., Any], dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a function gives with its gradients, and what autograd keeps for these."""
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*s, generator=g).to(dtype).requires_grad_() for s in ((ROWS, WIDTH), (WORDS, WIDTH)))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        found = call(x, w)
    first, *rest = found if isinstance(found, tuple) else (found,)
    return [first, *rest, *torch.autograd.grad(first, (x, w))], kept


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(call, backend="terrazzo", options={"target": "interpreter", "strict": True})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("call", [of_words, smoothed, hidden, distilled, along_rows])
def test_gradients_are_right(call: Callable[..., Any], dtype: torch.dtype) -> None:
    found, _ = trained(compiled(call), dtype)
    eager, _ = trained(call, dtype)
    exact, _ = trained(call, torch.float64)
    for ours, theirs, truth in zip(found, eager, exact, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours.isnan() == theirs.isnan()).all()
        errors = [(x.double() - truth).nan_to_num().abs().max() for x in (ours, theirs)]
        assert errors[0] <= 2 * errors[1] + 1e-7


@pytest.mark.parametrize("call", [of_words, attending, smoothed])
def test_logits_are_kept_as_they_are(call: Callable[..., Any]) -> None:
    """In 16 bits, and once."""
    _, kept = trained(compiled(call), torch.bfloat16)
    logits = {t.untyped_storage().data_ptr(): t.dtype for t in kept if t.numel() == ROWS * WORDS}
    assert [*logits.values()] == [torch.bfloat16]


def test_what_is_a_result_is_kept() -> None:
    """It is there anyway."""

    def both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = F.linear(x, w).float().log_softmax(-1)
        return F.nll_loss(found, WANTED), found

    def logits(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = F.linear(x, w).float()
        return F.cross_entropy(found, WANTED), found

    for call in (both, logits):
        found, kept = trained(compiled(call), torch.bfloat16)
        eager, _ = trained(call, torch.bfloat16)
        torch.testing.assert_close(found, eager)
        assert len({t.untyped_storage().data_ptr() for t in kept if t.numel() == ROWS * WORDS}) == 1


def test_short_rows_and_what_is_not_stored_keep_their_results() -> None:
    def few(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w).view(-1, 8).log_softmax(-1).square().mean()

    def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (F.linear(x, w).float() * 0.1).log_softmax(-1).square().mean()

    for call in (few, scaled):
        _, kept = trained(compiled(call), torch.float32)
        assert not any(t.shape == (ROWS, 1) or t.shape == (ROWS * WORDS // 8, 1) for t in kept)
