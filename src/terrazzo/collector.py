"""What is kept while a program is compiled: Python's collector of reference cycles has nothing to find then, and what
was found of a kernel is asked for again by every pass.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")

SHARE = 2
"""Cycles are looked for among all objects before a program is compiled when, for so many of them, one was made while
others were, and nobody has looked since.
"""

MANY, FEW = 1 << 15, 1024
"""How many things functions are `remembered` of while a program is compiled, and up to how many afterwards. A stack of
400 layers has 2,800 kernels, and passes go through all of them: where the last 1024 were remembered, none was.
"""

_remembered: list[Any] = []


def remembered(fn: Callable[..., T]) -> Callable[..., T]:
    """`fn`, asked once of the same while a program is compiled. What is found may hold what it was found of, which
    would be a cycle where that held it.
    """
    found = lru_cache(maxsize=MANY)(fn)
    _remembered.append(found)
    return found


_unseen = 0
"""Objects made within `paused` that no collection has gone through."""
_known = 0
"""Objects there were when all had last been gone through for us, or we had first come, which imports much; 0 before."""


@contextmanager
def paused() -> Iterator[None]:
    """Within this no cycles are looked for. Nodes make none, and there are so many that a sixth of the time of a large
    program went into going through them again and again. What is left then is old, and Python does not count it as
    new: who compiles again has it gone through first, where there is much of it.
    """
    if not gc.isenabled():
        yield
        return
    _look()
    gc.disable()
    try:
        yield
    finally:
        for known in _remembered:
            if known.cache_info().currsize > FEW:
                known.cache_clear()
        if not gc.get_freeze_count():  # else somebody froze objects, which stay so
            _grow_old()
        gc.enable()


def _look() -> None:
    """Have all objects gone through, where many are unseen: what holds itself goes then, and all it holds."""
    global _known
    if SHARE * _unseen > _known > 0:
        gc.collect()
        _known = 0


def _grow_old() -> None:
    """Have the young objects pass for old ones, without going through them."""
    global _known, _unseen
    _unseen += gc.get_count()[0]
    gc.freeze()
    if not _known:
        _known, _unseen = gc.get_freeze_count(), 0
    gc.unfreeze()
