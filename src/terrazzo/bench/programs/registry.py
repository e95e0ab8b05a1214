"""How a model program is declared: once, in the file of its family, with real sizes as defaults and small ones beside.

    @program(small=dict(images=2, size=32, width=8), training=True)
    def unet(images: int = 8, size: int = 256, width: int = 64) -> Made:
        \"\"\"A U-Net of three levels.\"\"\"
        return UNet(width), normal(images, 3, size, size)

A program is a module and its inputs, made on whichever device is the default. `training` declares a second one beside
it: the loss and all gradients of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[Any, ...]
"""A module (or a function of tensors), and the tensors it is called with."""
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Program:
    """`make` takes sizes by name; its defaults are the real ones, `small` has what is smaller in tests.

    `dtypes` leaves out what PyTorch itself does not have.
    """

    name: str
    family: str
    make: Callable[..., Made]
    small: Mapping[str, Any]
    training: bool = False
    dtypes: tuple[str, ...] = tuple(DTYPES)

    def made(self, dtype: str, device: str = "cpu", small: bool = False) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The module, with random weights, and its inputs; everything of floating point has the type."""
        with torch.device(device):
            module, *inputs = self.make(**(self.small if small else {}))
        module = module if isinstance(module, nn.Module) else Function(module)
        module = module.to(device, DTYPES[dtype]).eval()  # some make weights on the processor in any case
        if self.training:
            module = Gradients(module)
        return module, tuple(x.to(DTYPES[dtype]) if x.is_floating_point() else x for x in inputs)


@dataclass
class Registry:
    """The programs by name, in the order they were declared in."""

    programs: dict[str, Program] = field(default_factory=dict)

    def add(self, program: Program) -> None:
        """Two programs of one name are a mistake."""
        assert program.name not in self.programs, f"two programs are called {program.name}"
        self.programs[program.name] = program


PROGRAMS = Registry()


def program(
    *, small: Mapping[str, Any] | None = None, training: bool = False, dtypes: Sequence[str] = tuple(DTYPES)
) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Declares the function as the program of its name, in the family its file is named after."""

    def declared(make: Callable[..., Made]) -> Callable[..., Made]:
        declare(make.__name__, make.__module__.rsplit(".", 1)[-1], make, small or {}, training, dtypes)
        return make

    return declared


def declare(
    name: str,
    family: str,
    make: Callable[..., Made],
    small: Mapping[str, Any],
    training: bool = False,
    dtypes: Sequence[str] = tuple(DTYPES),
) -> None:
    """The program, and with `training` its training step."""
    PROGRAMS.add(Program(name, family, make, small, dtypes=tuple(dtypes)))
    if training:
        PROGRAMS.add(Program(f"{name}_training", family, make, small, True, tuple(dtypes)))


class Function(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


class Learned(nn.Module):
    """A function of tensors that are learned, and of its inputs behind them."""

    def __init__(self, function: Callable[..., Any], *learned: Tensor) -> None:
        super().__init__()
        self.function = function
        self.learned = nn.ParameterList(nn.Parameter(x) for x in learned)

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*self.learned, *tensors)


class Gradients(nn.Module):
    """The loss of a module (`distance` of its first result) and its gradients by every parameter that has one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for part in module.modules():  # cuDNN has no gradients of other ones
            if isinstance(part, nn.RNNBase):
                part.train()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            weights = {name: p.detach().requires_grad_() for name, p in self.module.named_parameters()}
            loss = distance(torch.func.functional_call(self.module, weights, tensors))
            found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        return loss, *(g for g in found if g is not None)


def distance(results: Any) -> Tensor:
    """A loss of a module's first result, whatever that is: the mean square of what it is away from a fixed row.

    (From zero it would tell nothing of what was normed last.) In float32 at least.
    """
    first = results if isinstance(results, Tensor) else results[0]
    first = first if first.dtype == torch.float64 else first.float()
    row = torch.cos(torch.arange(first.shape[-1] if first.ndim else 1, device=first.device, dtype=first.dtype))
    return (first - row).square().mean()


def normal(*shape: int) -> Tensor:
    """Random normal numbers."""
    return torch.randn(shape)


def uniform(*shape: int) -> Tensor:
    """Random numbers from 0 to 1."""
    return torch.rand(shape)


def whole(high: int, *shape: int) -> Tensor:
    """Random whole numbers from 0 up to `high`."""
    return torch.randint(high, shape)


def scattered(high: int, *shape: int) -> Tensor:
    """Whole numbers from 0 up to `high` in no order, without a random number generator: for what a program holds."""
    return (torch.arange(math.prod(shape)) * 7919 % high).view(shape)
