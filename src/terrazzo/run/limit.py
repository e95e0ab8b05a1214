"""NVRTC is stopped where one source takes it too long."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

LIMIT = 20.0
"""Seconds of a processor that a source has. The longest that we have seen finish took 9; a convolution whose 288
accumulators were normed and stored twice had no end in sight at 10, and its next candidate took 2.
"""


@contextmanager
def stopped(program: Any, limit: float = LIMIT) -> Iterator[None]:
    """Within this NVRTC compiles `program` in this thread, and gives up once that took it so many seconds.

    It asks whether to go on thousands of times, which must not wait for Python: it calls `atoi` of the C library with
    the text that we gave it, "0" at first, and stops where that says 1. A library that cannot be stopped goes on.
    """
    from cuda.bindings import nvrtc

    answer = ctypes.create_string_buffer(b"0")
    asked = ctypes.cast(ctypes.CDLL(None).atoi, ctypes.c_void_p).value
    with suppress(AttributeError, RuntimeError):  # before CUDA 12.9
        nvrtc.nvrtcSetFlowCallback(program, asked, ctypes.addressof(answer))
    clock = time.pthread_getcpuclockid(threading.get_ident())
    end, over = time.clock_gettime(clock) + limit, threading.Event()

    def watch() -> None:
        rest = limit
        while not over.wait(max(rest, 0.01)):
            rest = end - time.clock_gettime(clock)
            if rest <= 0:
                answer.value = b"1"
                return

    threading.Thread(target=watch, name="terrazzo-limit", daemon=True).start()
    try:
        yield
    finally:
        over.set()
