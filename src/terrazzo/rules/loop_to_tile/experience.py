"""What is known of a machine because kernels were built or measured on it, and its libraries were asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l

T = TypeVar("T")


class Experience:
    """Nothing is: what somebody knows is said by a subclass."""

    def __call__(self, kernel: k.Kernel) -> str:
        """Why a kernel that is to be used could not be built; "" where it could, or nobody tried."""
        return self.lost(kernel)

    def lost(self, kernel: k.Kernel) -> str:
        """The same for a kernel that may not be used after all."""
        return ""

    def perhaps(self, kernel: k.Kernel) -> None:
        """Hear of a kernel that is to be used if another one is lost."""

    def spilled(self, kernel: k.Kernel) -> float:
        """How many bytes of registers a kernel that lost spills, where it runs all the same; infinitely many where it
        does not.
        """
        return math.inf

    def once(self, what: Hashable, find: Callable[[Experience], T]) -> T:
        """What `find` finds for `what` with what is known; that of an earlier time, where the same was known then."""
        return find(self)

    def asking(self) -> Experience:
        """The same, for somebody of whom it is kept what he asks."""
        return self

    def agrees(self, other: Experience) -> bool:
        """Whether somebody else would say the same of all that this one was asked, as far as that was kept."""
        return False

    def fastest(self, kernel: l.Kernel) -> str:
        """The texts of the schedules with which a kernel, in its canonical form, was the fastest when candidates were
        measured; "" where none were.
        """
        return ""

    def rough(self, op: Any) -> tuple[bool, ...]:
        """Which results of a convolution in float32, or of its gradients, the library computes in TF32 where it may;
        nothing where nobody asked it. Its operands are inputs that lie as in eager mode.
        """
        return ()


@dataclass(frozen=True)
class Told(Experience):
    """Of a single op it is known which of its results the library computes in TF32."""

    told: tuple[bool, ...]

    def rough(self, op: Any) -> tuple[bool, ...]:
        return self.told


NONE = Experience()
