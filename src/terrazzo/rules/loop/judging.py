"""What rewrites that put kernels into each other ask of the model of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from terrazzo.ir.dialects import loop as l

Price = Callable[[Sequence[l.Kernel]], float]
"""Nanoseconds of kernels, one after the other."""
Refusal = Callable[[l.Kernel], str]
"""Why a kernel is not worth having, or nothing."""
