"""How many processors there are for this process, and how many threads its kernels may have."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

QUOTAS = ("/sys/fs/cgroup/cpu.max",), ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us")
"""Where Linux says what time a container has of each period: in one file, or, before cgroups 2, in two."""

_first = 0
"""The process in which a kernel first had several threads."""


@lru_cache(maxsize=8)
def processors(quotas: tuple[tuple[str, ...], ...] = QUOTAS) -> int:
    """Those that this process may run on, at most as many as its container's time is good for. A container of two may
    see the 192 of its host, and has no memory for as many compilers.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in quotas:
        with suppress(OSError, ValueError):  # there is no such file, or it says "max"
            quota, period = map(int, " ".join(Path(f).read_text() for f in files).split())
            if quota > 0 and period > 0:
                usable = min(usable, -(-quota // period))
    return max(usable, 1)


def team(asked: int | None) -> int:
    """How many threads a kernel gets that may have so many, or else as many as PyTorch uses now: a worker of a
    DataLoader has one. So has a process whose parent's kernels had several: GNU's OpenMP waits for those there, which
    did not come along, and never ends.
    """
    global _first
    if asked is None:
        import torch

        asked = int(torch.get_num_threads())
    if asked > 1:
        _first = _first or os.getpid()
        if _first != os.getpid():
            return 1
    return asked
