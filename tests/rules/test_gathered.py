"""Rows of which few elements are read are not stored."""

from __future__ import annotations

import torch
from tests.kernels.programs import lowered

from terrazzo.rules.loop.lifetimes import in_use


def likelihood(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Logarithms of probabilities of what was said, as losses of preferences have them."""
    found = torch.log_softmax(x.float(), -1).gather(-1, labels[..., None])[..., 0]
    return torch.sigmoid(found.sum(-1))


def test_logarithms_of_softmax_are_not_stored_for_labels() -> None:
    """What is kept of a row is its maximum and a sum."""
    torch.manual_seed(0)
    x, labels = torch.randn(4, 128, 4000).bfloat16(), torch.randint(0, 4000, (4, 128))
    program = lowered(likelihood, (x, labels), "sm_90a").lowering.loop
    assert max(in_use(program.steps, program.results)) < 4 * 128 * 4 * 4


def test_rows_of_which_much_is_read_are_stored() -> None:
    """A row is divided once, where all of it is looked up."""
    torch.manual_seed(0)
    x, labels = torch.randn(64, 4000), torch.randint(0, 4000, (64, 4000))
    program = lowered(lambda x, i: torch.softmax(x, -1).gather(-1, i).exp(), (x, labels), "sm_90a").lowering.loop
    assert max(in_use(program.steps, program.results)) >= 64 * 4000 * 4
