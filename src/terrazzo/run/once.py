"""What a program computes of frozen inputs alone, kept from call to call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from terrazzo.run.compiled import Compiled

_version = attrgetter("_version")


@dataclass
class _Made:
    """What was computed of tensors, what was known of these then, and whether a graph has captured where it lies."""

    of: tuple[weakref.ref[Any], ...]
    state: tuple[list[int], list[int]]
    values: list[Any]
    captured: bool = False


class Once:
    """The part of a program that depends on frozen inputs alone, with what it gave for each set of them.

    It runs when it meets tensors for the first time, and again, into the same memory, when one of them is another or
    was changed, as far as PyTorch counts changes. What it gave goes when one of the tensors does.
    """

    def __init__(self, compiled: Compiled, sources: Sequence[int], results: Sequence[int]) -> None:
        """`sources` are the slots of the whole program that `compiled` takes, and `results` those of what it gives."""
        self.compiled, self.sources, self.results = compiled, tuple(sources), tuple(results)
        self.made: dict[tuple[int, ...], _Made] = {}
        self.lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """The memory of what is kept."""
        return sum(t.untyped_storage().nbytes() for made in tuple(self.made.values()) for t in made.values)

    def again(self) -> Once:
        """The same, with nothing computed yet."""
        return Once(self.compiled, self.sources, self.results)

    def __call__(self, tensors: Mapping[int, Any]) -> dict[int, Any]:
        """By slots, what depends on frozen inputs among these tensors."""
        given = [tensors[k] for k in self.sources]
        key, state = tuple(map(id, given)), _state(given)
        if not _holds(found := self.made.get(key), given, state):
            with self.lock:  # in which another thread may have computed it
                if not _holds(found := self.made.get(key), given, state):
                    found = self._make(key, given, state)
        assert found is not None
        if not found.captured and self.compiled.machine.capturing():
            found.captured = True
            _outlive(found.values, given)
        return dict(zip(self.results, found.values, strict=True))

    def _make(self, key: tuple[int, ...], given: list[Any], state: tuple[list[int], list[int]]) -> _Made:
        """Compute it. What is computed while a graph is captured is part of the graph, and not kept: it is there only
        when that is replayed. What replaced older values lies where these do: graphs may have captured where that is.
        """
        import torch

        machine = self.compiled.machine
        with torch.inference_mode(False), torch.no_grad():
            values = self.compiled(given)
            if machine.capturing():
                return _Made((), state, values, captured=True)
            machine.settle()  # any stream may read it, and none still reads what was there
            self.compiled.frames.clear()  # with their temporaries
            old = self.made.get(key)
            if old is not None and _of(old, given):  # they were changed
                for kept, new in zip(old.values, values, strict=True):
                    kept.copy_(new)
                values = old.values
                machine.settle()
        gone = weakref.WeakMethod(self._gone)

        def forget(_: Any) -> None:
            if (method := gone()) is not None:
                method(key)

        self.made[key] = _Made(tuple(weakref.ref(t, forget) for t in given), state, values)
        return self.made[key]

    def _gone(self, key: tuple[int, ...]) -> None:
        self.made.pop(key, None)


_KEPT: list[list[Any]] = []
"""What graphs have captured that was made of no tensor: it stays to the end."""


def _outlive(values: list[Any], given: Sequence[Any]) -> None:
    """Keep what was made of tensors as long as the memory of these: a captured graph may outlive the program, though
    not what it reads.
    """
    if given:
        weakref.finalize(given[0].untyped_storage(), values.clear).atexit = False
    else:
        _KEPT.append(values)


def _holds(made: _Made | None, given: Sequence[Any], state: tuple[list[int], list[int]]) -> bool:
    """Whether something is what these tensors give."""
    return made is not None and made.state == state and _of(made, given)


def _of(made: _Made, given: Sequence[Any]) -> bool:
    """Whether something was computed of these very tensors."""
    return all(map(is_, [r() for r in made.of], given))


def _state(given: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Where tensors lie, and how often each was changed, as far as PyTorch counts that: it does not for tensors that
    were made in inference mode.
    """
    pointers = [t.data_ptr() for t in given]
    try:
        return pointers, list(map(_version, given))
    except RuntimeError:
        return pointers, [-1 if t.is_inference() else _version(t) for t in given]
