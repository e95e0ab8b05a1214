"""PyTorch's switches for products in float32, and for convolutions, obeyed at every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

WAYS = {"highest": "split", "high": "tf32", "medium": "bf16"}
"""What the option `fp32` is for each setting of `torch.set_float32_matmul_precision`."""


def asked() -> str:
    """How PyTorch is told to multiply in float32 on a GPU at present, as the option `fp32` says it."""
    import torch

    try:
        return WAYS[torch.get_float32_matmul_precision()]
    except RuntimeError:  # only the newer switch was used
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else WAYS["highest"]


def convolutions_in_tf32() -> bool:
    """Whether PyTorch is told that cuDNN may compute convolutions in float32 in TF32, and asks it at all."""
    import torch

    known = torch._C  # what the properties of torch.backends.cudnn ask, in a tenth of the time
    if not known._get_cudnn_enabled():
        return False
    try:
        return bool(known._get_cudnn_allow_tf32())
    except RuntimeError:  # only the newer switch was used
        return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")


class Switched:
    """A compiled program that is compiled anew when a switch is turned to what it was not compiled for: Dynamo's
    guards know whether products may be in TF32, not whether they may be in bfloat16, nor of convolutions. Otherwise the
    same as what `make` makes of a way to multiply, with convolutions as they are to be then.
    """

    def __init__(self, make: Callable[[str], Any]) -> None:
        self.make = make
        self.made: dict[tuple[str, bool], Any] = {}
        self.now()

    def now(self) -> Any:
        """The program as it is to be computed at present."""
        way = asked(), convolutions_in_tf32()
        if way not in self.made:
            self.made[way] = self.make(way[0])
        return self.made[way]

    def rebound(self, bound: Mapping[str, Any]) -> Switched:
        """The program with other weights; machine code is shared."""

        def make(way: str) -> Any:
            known = self.made.get((way, convolutions_in_tf32())) or self.make(way)
            return known.rebound(bound)

        return Switched(make)

    def __call__(self, inputs: Sequence[Any]) -> Any:
        return self.now()(inputs)

    def consume(self, inputs: list[Any]) -> Any:
        """The same as a call, and the list is emptied."""
        return self.now().consume(inputs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("make", "made"):
            raise AttributeError(name)
        return getattr(self.now(), name)
