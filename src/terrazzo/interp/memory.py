"""What the simulator of Kernel IR remembers of memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l


def flat_memory(b: l.Buffer, array: Any) -> Any:
    """The memory of a buffer, from its first element to its last, holding an array (or zeros)."""
    size = k.shared_bytes(b) // b.type.dtype.size
    flat = np.zeros(max(size, 1), b.type.dtype.numpy)
    if array is not None:
        view(b, flat)[...] = array
    return flat


def view(b: l.Buffer, flat: Any) -> Any:
    """Memory as an array of the buffer's shape."""
    strides = [int(s) * flat.itemsize for s in b.type.element_strides]  # type: ignore[arg-type]
    return np.lib.stride_tricks.as_strided(flat, b.type.static_shape, strides)


@dataclass
class SharedState:
    """A place in shared memory for every block: elements, and for each since when (which barrier) and by which warp it was used.

    A warp is -1 where there is none, and -2 where there are several. `flying` marks elements that a copy may write at any time, and
    `flyer` whose it is.
    """

    data: Any
    written: Any
    writer: Any
    read: Any
    reader: Any
    flying: Any
    flyer: Any


@dataclass
class BarrierState:
    """Barriers of every block: since when they are there, phases that ended; by block and slot, bytes announced and boxes on their way."""

    born: int
    done: Any
    expected: dict[tuple[int, int], int] = field(default_factory=dict)
    flying: dict[tuple[int, int], list[tuple[k.Shared, Any, Any]]] = field(default_factory=dict)
