"""What a case of the suite is: a call, and how the tensors that it is given are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Fill:
    """A tensor to be made: its size and layout, and what its values are drawn from."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    low: float
    high: float
    strided: bool = False
    along: int | None = None
    """The axis along which values are different."""

    def make(self, device: str, random: torch.Generator | None = None) -> torch.Tensor:
        """A tensor of it, of values drawn by `random`; on "meta" it has none."""
        found = self._values(device, random)
        if not self.strided or found.dim() < 2:
            return found
        if found.dim() == 4:
            return found.contiguous(memory_format=torch.channels_last)
        return found.transpose(-1, -2).contiguous().transpose(-1, -2)

    def _values(self, device: str, random: torch.Generator | None) -> torch.Tensor:
        def rand(*shape: int) -> torch.Tensor:
            return torch.rand(shape, device=device, generator=random)

        if device == "meta":
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        if self.dtype is torch.bool:
            return rand(*self.shape) < 0.5
        if self.along is not None:
            size = list(self.shape)
            size[self.along] = int(self.high) + 1
            return rand(*size).argsort(self.along).narrow(self.along, 0, self.shape[self.along])
        if not self.dtype.is_floating_point and not self.dtype.is_complex:
            low, high = int(self.low), int(self.high) + 1
            return torch.randint(low, high, self.shape, dtype=self.dtype, device=device, generator=random)
        if self.dtype.is_complex:
            return torch.view_as_complex(rand(*self.shape, 2) * (self.high - self.low) + self.low).to(self.dtype)
        return (rand(*self.shape) * (self.high - self.low) + self.low).to(self.dtype)


@dataclass(frozen=True)
class Case:
    """A call of an operator: a function of tensors only, and what these are."""

    op: str
    dtype: str
    form: str
    told: str
    call: Callable[..., Any]
    fills: tuple[Fill, ...]

    def tensors(self, device: str) -> list[torch.Tensor]:
        """The arguments; the same ones every time. PyTorch's own generators are left alone: one that a failed CUDA
        graph has used can be of no more use.
        """
        random = torch.Generator(device).manual_seed(0) if device != "meta" else None
        return [f.make(device, random) for f in self.fills]
