"""What the backward pass reads at shifted places of a tensor is that tensor, and no view that would be copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from terrazzo.run.tensors import ALIGNED

SIDE, MOVES = 8, 3


def correlated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Products of an image with another one at displacements."""
    around = F.pad(y.tanh(), (1, 1, 1, 1))
    moved = [around[:, :, i : i + SIDE, j : j + SIDE] for i in range(MOVES) for j in range(MOVES)]
    return torch.stack([(x * z).mean(1) for z in moved], 1)


def of_an_input(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same of an image that is given: it has the gradient of a leaf."""
    return x[..., 1:] * y[..., :-1]


def in_parts(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Parts of several, one after the other, which are views of views."""
    first, second, third = (x + y).exp().split((3, 2, 3), -1)
    return (first[..., 1:].unsqueeze(-1) * second.unsqueeze(-2)).flatten(3) * third.sum(-1, keepdim=True)


def attending(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Beside attention, where PyTorch looks for the least that can be kept."""
    q, k, v = (x.flatten(2), y.flatten(2), (x + y).flatten(2))
    return F.scaled_dot_product_attention(q, k, v).unflatten(-1, (SIDE, SIDE)) * correlated(x, y).sum(1, keepdim=True)


def trained(call: Callable[..., Any], dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a function gives with its gradients, and what autograd keeps for these."""
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 5, SIDE, SIDE, generator=g).to(dtype).requires_grad_() for _ in range(2))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        found = call(x, y)
    return [found.detach(), *torch.autograd.grad(found.square().sum(), (x, y))], kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", [correlated, of_an_input, in_parts, attending])
def test_no_view_that_is_kept_begins_in_between(call: Callable[..., Any], dtype: torch.dtype) -> None:
    """A kernel on a GPU would have a copy of each."""
    torch._dynamo.reset()
    options = {"target": "interpreter", "strict": True}
    found, kept = trained(torch.compile(call, backend="terrazzo", options=options), dtype)
    assert kept
    assert [t.shape for t in kept if t.storage_offset() * t.itemsize % ALIGNED] == []
    eager, _ = trained(call, dtype)
    exact, _ = trained(call, torch.float64)
    for ours, theirs, truth in zip(found, eager, exact, strict=True):
        errors = [float((x.double() - truth).norm()) for x in (ours, theirs)]
        assert errors[0] <= 2 * errors[1] + 1e-6 * float(truth.norm())


def test_an_image_is_kept_once() -> None:
    """And not as many views of it as there are displacements."""
    torch._dynamo.reset()
    options = {"target": "interpreter", "strict": True}
    _, kept = trained(torch.compile(correlated, backend="terrazzo", options=options), torch.float32)
    assert len(kept) < MOVES * MOVES


def test_one_part_that_is_read_is_kept_by_itself() -> None:
    """Nothing would be gained by keeping all that it is of."""
    torch._dynamo.reset()
    options = {"target": "interpreter", "strict": True}
    call = torch.compile(lambda x, y: (x + y)[..., 1:].square(), backend="terrazzo", options=options)
    _, kept = trained(call, torch.float32)
    assert [(*t.shape, t.storage_offset()) for t in kept] == [(2, 5, SIDE, SIDE - 1, 0)]


def test_a_copy_is_not_kept_beside_what_it_is_of() -> None:
    """Of attention of which nothing is dropped, with a probability of 0, the weights."""
    torch._dynamo.reset()

    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = F.dropout((x @ y.mT).softmax(-1), 0.0)
        return torch.bmm(weights.flatten(0, 1), y.flatten(0, 1))

    options = {"target": "interpreter", "strict": True}
    found, kept = trained(torch.compile(call, backend="terrazzo", options=options), torch.float32)
    assert len({t.untyped_storage().data_ptr() for t in kept}) == 3  # x, y and the weights
    exact, _ = trained(call, torch.float64)
    for ours, truth in zip(found, exact, strict=True):
        assert float((ours.double() - truth).norm()) <= 1e-6 * float(truth.norm())


def test_what_has_two_names_is_kept_by_one() -> None:
    """Rows of images, and images."""
    torch._dynamo.reset()

    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = (x + y).tanh()
        return hidden.flatten(2) @ hidden.flatten(2).mT + hidden.square().sum((2, 3)).unsqueeze(-1)

    options = {"target": "interpreter", "strict": True}
    found, kept = trained(torch.compile(call, backend="terrazzo", options=options), torch.float32)
    assert len(kept) == 1
    exact, _ = trained(call, torch.float64)
    for ours, truth in zip(found, exact, strict=True):
        assert float((ours.double() - truth).norm()) <= 1e-6 * float(truth.norm())


def test_what_is_written_later_is_kept_as_it_was() -> None:
    """A copy of a buffer that the call changes after it: the buffer itself is another tensor by then."""
    torch._dynamo.reset()
    options = {"target": "interpreter", "strict": True}

    class Counted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.arange(32.0) + 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before, rows = self.count.clone(), self.count.view(8, 4).clone()
            y = x * before + (x.view(8, 4) * rows).view(32)
            self.count.add_(1)
            return y

    x = torch.ones(32, requires_grad=True)
    torch.compile(Counted(), backend="terrazzo", options=options)(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * (torch.arange(32.0) + 1))
