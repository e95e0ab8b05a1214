"""What is known of kernels because they were built or measured."""

from __future__ import annotations

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l


class Experience:
    """Nothing is: what somebody knows is said by a subclass."""

    def __call__(self, kernel: k.Kernel) -> str:
        """Why a kernel could not be built when that was tried; "" where it could, or was not tried."""
        return ""

    def fastest(self, kernel: l.Kernel) -> str:
        """The texts of the schedules with which a kernel, in its canonical form, was the fastest when candidates were
        measured; "" where none were.
        """
        return ""


NONE = Experience()
