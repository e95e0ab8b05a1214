"""Python's collector of reference cycles, which has nothing to find while a program is compiled."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SHARE = 2
"""Cycles are looked for among all objects before a program is compiled when, for so many of them, one was made while
others were, and nobody has looked since.
"""

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
