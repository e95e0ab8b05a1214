"""What a plan demands of the tensors it is given, and how it makes those it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from terrazzo.errors import UserError
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.torch_types import to_torch_dtype
from terrazzo.ir.types import DTYPES
from terrazzo.run.plan import Slot

ALIGNED = 16
"""Bytes that the start of a tensor on a GPU must be a multiple of: kernels read as wide as strides allow."""


class Expected:
    """What a tensor must be."""

    def __init__(self, slot: Slot, device: str = "cpu") -> None:
        import torch

        self.device = torch.device(device)
        self.slot, self.dtype = slot, to_torch_dtype(DTYPES[slot.dtype])
        self.layout, self.plain, self.complex = torch.strided, torch.Tensor, self.dtype.is_complex
        self.weight = torch.nn.Parameter
        self.shape, self.strides = slot.shape, slot.strides
        self.anywhere = self.device.type == "cpu"  # kernels there read at any address
        made = self._of_its_compiler() if self.anywhere else None
        self.made = made or partial(torch.empty_strided, self.shape, self.strides, dtype=self.dtype, device=self.device)

    def empty(self) -> Any:
        """A tensor to write to; MemoryError where there is no room for it."""
        try:
            return self.made()
        except RuntimeError:  # which is how PyTorch says so of the CPU's memory
            if self.device.type != "cpu":
                raise
            raise MemoryError(f"{self.slot.name} is {self.slot.dtype}{list(self.slot.shape)}") from None

    def maker(self) -> Callable[[], Any]:
        """What makes such tensors where their device is PyTorch's current one."""
        return self.empty if self.anywhere else self._of_its_compiler() or self.empty

    def _of_its_compiler(self) -> Callable[[], Any] | None:
        """What PyTorch's own compiler makes tensors by, in less than half the time; None where it has no such thing."""
        make = getattr(_guards(), f"_empty_strided_{self.device.type}", None)
        return make and partial(make, self.shape, self.strides, self.dtype)

    def holding(self, values: Any) -> Any:
        """A tensor of these values; of those that strides put at one place, one."""
        import torch

        found, slot = self.empty(), self.slot
        if 0 not in slot.strides:
            return found.copy_(values)
        one = tuple(slice(None) if step else slice(1) for step in slot.strides)
        torch.as_strided(found, found[one].shape, slot.strides).copy_(values[one])
        return found

    def may_keep(self, t: Any) -> bool:
        """Whether a tensor that an op gave lies as this one should."""
        fits = t.dtype is self.dtype and t.device == self.device and t.layout is self.layout
        if not (fits and t.shape == self.slot.shape and _strides_fit(t, self.slot)) or t.is_neg() or t.is_conj():
            return False
        aligned = self.anywhere or not t.data_ptr() % ALIGNED
        return aligned and type(t) is self.plain

    def check(self, t: Any) -> Any:
        """The tensor, or a copy where its memory is not its value or badly aligned. UserError where it is another one
        than was promised.
        """
        kind_of = type(t)
        if (  # the common case, with as few questions as there are
            (kind_of is self.plain or kind_of is self.weight)
            and t.dtype is self.dtype
            and t.device == self.device
            and t.layout is self.layout
            and t.shape == self.shape
            and t.stride() == self.strides
            and not (t.is_neg() or (self.complex and t.is_conj()))
            and (self.anywhere or not t.data_ptr() % ALIGNED)
        ):
            return t
        slot = self.slot
        kind = getattr(t, "dtype", None) is self.dtype and t.device == self.device and t.layout is self.layout
        if kind and t.shape == slot.shape and _strides_fit(t, slot):
            if t.is_neg() or (self.complex and t.is_conj()):  # what lies in its memory is not its value
                return self.holding(t.detach())
            if type(t) is self.plain or t.data_ptr() or not slot.bytes:
                aligned = self.anywhere or not t.data_ptr() % ALIGNED
                return t if aligned else self.holding(t.detach())
            raise UserError(f"input {slot.name}: a {type(t).__name__} without memory")
        import torch

        if not isinstance(t, torch.Tensor):
            raise UserError(f"input {slot.name}: expected a tensor, got {type(t).__name__}")
        if tuple(t.shape) != slot.shape:
            raise UserError(f"input {slot.name}: compiled for shape {list(slot.shape)}, got {list(t.shape)}")
        if t.dtype != self.dtype:
            raise UserError(f"input {slot.name}: compiled for {self.dtype}, got {t.dtype}")
        if t.device.type == "cpu" and not t.dim() and t.dtype is self.dtype:
            return t.detach().to(self.device)  # as PyTorch has it: a scalar may lie on the CPU
        if t.device != self.device:
            raise UserError(f"input {slot.name}: compiled for {self.device}, got a tensor on {t.device}")
        if t.layout is not self.layout:
            raise UserError(f"input {slot.name}: compiled for a dense tensor, got one of layout {t.layout}")
        raise UserError(
            f"input {slot.name}: compiled for strides {list(slot.strides)}, got {list(t.stride())}; "
            "call .contiguous() on it, or compile with an example laid out like this"
        )


def alike(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """What says of as many tensors whether they are of the types, shapes, strides and devices of these, and look at
    their memory in the same way. It asks PyTorch once for all, as Dynamo's guards do; None where this PyTorch cannot
    say.
    """
    try:
        sizes, strides = [[*t.shape] for t in tensors], [[*t.stride()] for t in tensors]
        check = _guards().TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return check if check(*tensors) else None  # one tensor that is given twice is not known to it
    except (AttributeError, TypeError, RuntimeError):
        return None


def window_maker() -> Callable[[Any, Sequence[int], Sequence[int], int], Any] | None:
    """What makes a window on the memory of a tensor (its shape, strides, and how many elements behind the first of that
    one it begins), of which autograd does not know, in a third of the time that PyTorch's own functions take; None
    where this PyTorch has no such thing.
    """
    return getattr(_guards(), "_reinterpret_tensor", None)


def _guards() -> Any:
    """What PyTorch's own compiler checks and makes tensors by."""
    import torch

    return getattr(torch._C._dynamo, "guards", None)


def _strides_fit(t: Any, slot: Slot) -> bool:
    """Strides matter only along dimensions with more than one element."""
    given = t.stride()
    return (
        given == slot.strides
        or all(e <= 1 or a == b for e, a, b in zip(slot.shape, given, slot.strides, strict=True))
        or 0 in slot.shape
    )


def slot_of(b: l.Buffer) -> Slot:
    """The slot of a buffer that is given or returned."""
    strides = tuple(int(s) for s in b.type.element_strides)  # type: ignore[arg-type]
    return Slot(b.name, b.type.dtype.name, b.type.static_shape, strides, "result")
