"""Whole numbers that a module keeps as buffers, and branches on, are part of the program."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import terrazzo
from terrazzo.errors import Limitation, UserError
from terrazzo.front.capture import capture


class Padded(nn.Module):
    """A convolution whose padding is computed of buffers, as that of audio codecs is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 4, 2)
        self.register_buffer("kernel", torch.tensor(4))
        self.register_buffer("stride", torch.tensor(2), persistent=False)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        frames = torch.ceil((x.shape[-1] - self.kernel) / self.stride + 1).to(torch.int64)
        extra = (frames - 1) * self.stride + self.kernel - x.shape[-1]
        return self.conv(nn.functional.pad(x, (0, int(extra)))) * self.scale


class Counting(Padded):
    """One that counts its calls, and returns the number."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x)


def test_the_values_are_part_of_the_program() -> None:
    module, x = Padded(), torch.randn(2, 2, 17)
    ours = terrazzo.compile(module, x, options={"target": "interpreter"})
    torch.testing.assert_close(ours(x), module(x))
    assert {n for n, *_ in ours.captured.numbers} == {"kernel", "stride", "seen"}
    assert set(ours.captured.bound) == {"weight", "bias", "scale"}
    module.scale.fill_(2)
    torch.testing.assert_close(copy.deepcopy(ours)(x), module(x))
    module.stride.fill_(1)
    with pytest.raises(UserError, match=r"stride was changed after the call was compiled"):
        ours(x)


def test_where_nothing_branches_they_are_inputs() -> None:
    assert capture(nn.BatchNorm1d(3).eval(), (torch.randn(2, 3),)).numbers == ()


@pytest.mark.parametrize("module", [Counting(), lambda x: x + 1 if x.sum() > 0 else x])
def test_what_changes_or_is_given_is_data(module: object) -> None:
    with pytest.raises(Limitation, match=r"branches on its data|depends on the data"):
        capture(module, (torch.randn(2, 2, 17),))  # type: ignore[arg-type]
