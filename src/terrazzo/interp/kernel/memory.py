"""Memory as the simulator of Kernel IR sees it: the elements, and who used them when.

Accesses are given as arrays of blocks `b`, elements `a` and warps `w` of one length. What is wrong with one is a
Conflict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from terrazzo.interp.kernel.clocks import Clocks
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.types import Type

NOBODY = -1
SEVERAL = -2
NEVER = np.iinfo(np.int32).max
"""A time that nobody knows of."""


def flat_memory(b: l.Buffer, array: Any) -> Any:
    """The memory of a buffer, from its first element to its last, holding an array (or zeros)."""
    size = k.shared_bytes(b) // b.type.dtype.size
    flat = np.zeros(max(size, 1), b.type.dtype.numpy)
    if array is not None:
        view(b.type, flat)[...] = array
    return flat


def view(tensor: Type, flat: Any) -> Any:
    """Memory as an array of a tensor's shape."""
    strides = [int(s) * flat.itemsize for s in tensor.element_strides]  # type: ignore[arg-type]
    return np.lib.stride_tricks.as_strided(flat, tensor.static_shape, strides)


@dataclass(frozen=True)
class Conflict:
    """What is wrong, with which of the accesses given (their first), and of the other access the agent and the
    statement.
    """

    what: str
    which: int
    agent: str = ""
    site: int = NOBODY


@dataclass(frozen=True)
class Access:
    """Elements `a` that warps `w` of blocks `b` use, in arrays of one length.

    `mask` [block, warp, lane, element] says which of a team's those are; or one thread uses all of them, `by`.
    """

    b: Any
    a: Any
    w: Any
    mask: Any = None
    by: tuple[int, int, int] | None = None


class Place:
    """A part of shared memory, of some blocks. `flying` counts the copies that may write an element at any time."""

    def __init__(self, place: k.Shared, clocks: Clocks) -> None:
        self.name, self.clocks = place.name, clocks
        size = (clocks.blocks, max(k.shared_bytes(place) // place.type.dtype.size, 1))
        self.data = np.zeros(size, place.type.dtype.numpy)
        self.writer = np.full(size, NOBODY, np.int16)
        self.written = np.zeros(size, np.int32)
        self.wrote = np.full(size, NOBODY, np.int32)
        self.read_at = np.zeros((clocks.readers, *size), np.int32)
        self.reader = np.full(size, NOBODY, np.int32)
        self.flying = np.zeros(size, np.int8)
        self.over: list[tuple[Place, int]] = []  # those that lie over it, and how many bytes further on it begins

    def check_read(self, b: Any, a: Any, w: Any, asynchronous: bool = False, by: Any = None) -> Conflict | None:
        """Whether these warps, of blocks `by` or the same, may read now, or let a copy read from now on."""
        writer, written, clocks, by = self.writer[b, a], self.written[b, a], self.clocks, b if by is None else by
        if (late := self.flying[b, a] > 0).any():
            return self._conflict(f"reads {self.name}, where a copy is on its way", late, None, self.wrote[b, a])
        if (none := writer == NOBODY).any():
            return self._conflict(f"reads elements of {self.name} that nobody wrote", none, None, self.wrote[b, a])
        if (early := written > clocks.visible[by, w, writer]).any():
            what = f"reads {self.name} as another warp wrote it, with no barrier between"
            return self._conflict(what, early, writer, self.wrote[b, a])
        if asynchronous and (plain := self._plain(by, w, writer, written)).any():
            what = f"reads {self.name} asynchronously, with no proxy fence since it was written"
            return self._conflict(what, plain, writer, self.wrote[b, a])
        return None

    def note_read(self, b: Any, a: Any, agent: Any, time: Any, site: int) -> None:
        """An agent reads at its time."""
        self.read_at[agent, b, a] = np.maximum(self.read_at[agent, b, a], time)
        self.reader[b, a] = site

    def check_write(
        self, b: Any, a: Any, w: Any, landing: bool = False, asynchronous: bool = False, by: Any = None
    ) -> Conflict | None:
        """Whether these warps, of blocks `by` or the same, may write now, or let a copy write; `landing` where their
        own copy arrives. What lies over the elements, or under them, holds nothing then.
        """
        for other, further in self.over:
            which, there = other.touched(a * self.data.itemsize + further, self.data.itemsize)
            blocks, warps, writers = (None if x is None else x[which] for x in (b, w, by))
            if wrong := other._check_write(blocks, there, warps, False, asynchronous, writers):
                return Conflict(wrong.what, int(which[wrong.which]), wrong.agent, wrong.site)
            other.writer[blocks, there] = NOBODY
        return self._check_write(b, a, w, landing, asynchronous, by)

    def touched(self, at: Any, size: int) -> tuple[Any, Any]:
        """The elements in so many bytes at each of some places: the number of the place, and the element."""
        each = self.data.itemsize
        there = (at[:, None] + np.arange(0, size, min(size, each))) // each
        which, _ = inside = np.nonzero((there >= 0) & (there < self.data.shape[1]))
        return which, there[inside]

    def _check_write(self, b: Any, a: Any, w: Any, landing: bool, asynchronous: bool, by: Any) -> Conflict | None:
        clocks, by = self.clocks, b if by is None else by
        early = self.read_at[:, b, a] > clocks.visible[by, w, : clocks.readers].T
        if early.any():
            reader = np.argmax(early, axis=0)
            what = f"writes {self.name} while another warp reads it, with no barrier between"
            return self._conflict(what, early.any(axis=0), reader, self.reader[b, a])
        if (others := self.flying[b, a] > landing).any():
            return self._conflict(f"writes {self.name}, where a copy is on its way", others, None, self.wrote[b, a])
        writer, written = self.writer[b, a], self.written[b, a]
        if (early := (writer != NOBODY) & (written > clocks.visible[by, w, writer])).any():
            what = f"writes {self.name} where another warp wrote, with no barrier between"
            return self._conflict(what, early, writer, self.wrote[b, a])
        if asynchronous and (plain := (writer != NOBODY) & self._plain(by, w, writer, written)).any():
            what = f"writes {self.name} asynchronously, with no proxy fence since it was written"
            return self._conflict(what, plain, writer, self.wrote[b, a])
        return None

    def write(self, b: Any, a: Any, agent: Any, time: Any, values: Any, site: int) -> Conflict | None:
        """An agent writes at its time. Several in one statement may only write the same."""
        self.data[b, a] = values
        self.writer[b, a], self.written[b, a], self.wrote[b, a] = agent, time, site
        if (twice := self.writer[b, a] != agent).any():
            return self._conflict(
                f"writes {self.name}: several warps write one element", twice, self.writer[b, a], self.wrote[b, a]
            )
        if (other := differ(self.data[b, a], values)).any():
            return self._conflict(
                f"writes {self.name}: threads write different values to one element", other, None, self.wrote[b, a]
            )
        return None

    def fly(self, b: Any, a: Any, site: int) -> None:
        """A copy may write here from now on."""
        self.flying[b, a] += 1
        self.wrote[b, a] = site

    def land(self, b: Any, a: Any) -> None:
        """It has written."""
        self.flying[b, a] -= 1

    def _plain(self, b: Any, w: Any, writer: Any, written: Any) -> Any:
        """What warps wrote themselves, and no fence known to `w` came after."""
        return (writer < self.clocks.readers) & (written > self.clocks.fenced[b, w, writer])

    def _conflict(self, what: str, where: Any, agent: Any, site: Any) -> Conflict:
        first = int(np.argmax(where))
        return Conflict(what, first, "" if agent is None else self.clocks.name(int(agent[first])), int(site[first]))


class Output:
    """A buffer in global memory that a kernel writes. Here `b` is of the clocks, and `ids` are the blocks' numbers in
    the grid.
    """

    def __init__(self, buffer: l.Buffer, before: Any) -> None:
        self.name, self.data, self.fresh = buffer.name, flat_memory(buffer, before), before is None
        self.block = np.full(self.data.size, NOBODY, np.int32)
        self.warp = np.zeros(self.data.size, np.int16)
        self.written = np.zeros(self.data.size, np.int32)
        self.wrote = np.full(self.data.size, NOBODY, np.int32)
        self.combined = np.zeros(self.data.size, bool)
        self.read_by: Any = None
        self.read_at: Any = None

    def read(self, clocks: Clocks, ids: Any, b: Any, a: Any, w: Any) -> Conflict | None:
        """Warps read what was there before the kernel, or what they know to be written."""
        if self.fresh and (none := self.block[a] == NOBODY).any():
            return Conflict(f"reads elements of {self.name} that nobody wrote", int(np.argmax(none)))
        if (late := self._unknown(clocks, ids, b, a, w)).any():
            return self._conflict(f"reads {self.name} as another thread wrote it, with no barrier between", late, a)
        if self.read_at is None:
            self.read_by, self.read_at = (
                np.full(self.data.size, NOBODY, np.int32),
                np.zeros((clocks.warps, self.data.size), np.int32),
            )
        for _ in range(2):  # once more, for those of several blocks that now read one element
            self.read_by[a] = np.where((self.read_by[a] == NOBODY) | (self.read_by[a] == ids), ids, SEVERAL)
        self.read_at[w, a] = np.maximum(self.read_at[w, a], clocks.now(b, w))
        return None

    def write(
        self, clocks: Clocks, ids: Any, b: Any, a: Any, w: Any, values: Any, site: int, box: bool = False
    ) -> Conflict | None:
        """Warps write, or a box of theirs, of which nobody knows when it has come. Two that nothing orders may only
        write the same.
        """
        if self.read_at is not None:
            seen = clocks.visible[b[:, None], w[:, None], clocks.agent(b[:, None], np.arange(clocks.warps))]
            late = (seen < self.read_at[:, a].T).any(axis=1) | (self.read_by[a] != ids)
            if (late := late & (self.read_by[a] != NOBODY)).any():
                return self._conflict(
                    f"writes {self.name} while another thread reads it, with no barrier between", late, a
                )
        alone = box | (self.written[a] == NEVER)
        if (late := self._unknown(clocks, ids, b, a, w, box) & (alone | differ(self.data[a], values))).any():
            return self._conflict(
                f"writes {self.name} where another thread wrote something else, with no barrier between", late, a
            )
        self.data[a] = values
        self._note(clocks, ids, b, a, w, site, box, combined=False)
        if (other := differ(self.data[a], values)).any():
            return self._conflict(f"writes {self.name}: threads write different values to one element", other, a)
        return None

    def combine(
        self, clocks: Clocks, ids: Any, b: Any, a: Any, w: Any, values: Any, function: str, site: int, box: bool = False
    ) -> Conflict | None:
        """Warps add to elements (or take the minimum, the maximum), one after the other, which nobody else uses in
        another way.
        """
        if self.fresh and (none := self.block[a] == NOBODY).any():
            return Conflict(f"combines elements of {self.name} that nobody wrote", int(np.argmax(none)))
        if (late := self._unknown(clocks, ids, b, a, w, box) & ~self.combined[a]).any():
            return self._conflict(
                f"combines elements of {self.name} as another thread wrote them, with no barrier between", late, a
            )
        {"add": np.add, "min": np.minimum, "max": np.maximum}[function].at(self.data, a, values)
        self._note(clocks, ids, b, a, w, site, box, combined=True)
        return None

    def _note(self, clocks: Clocks, ids: Any, b: Any, a: Any, w: Any, site: int, box: bool, combined: bool) -> None:
        """Who wrote last, and when."""
        self.block[a], self.warp[a], self.wrote[a], self.combined[a] = ids, w, site, combined
        self.written[a] = NEVER if box else clocks.now(b, w)

    def _unknown(self, clocks: Clocks, ids: Any, b: Any, a: Any, w: Any, box: bool = False) -> Any:
        """Whether somebody else wrote these elements, and nothing tells the warps; a box of theirs needs a proxy fence
        besides.
        """
        by = self.block[a]
        near = by // clocks.cluster == ids // clocks.cluster
        agent = np.where(near, clocks.agent(by, self.warp[a]), 0)
        return (by != NOBODY) & (~near | (self.written[a] > (clocks.fenced if box else clocks.visible)[b, w, agent]))

    def _conflict(self, what: str, where: Any, a: Any) -> Conflict:
        which = int(np.argmax(where))
        block, warp = int(self.block[a][which]), int(self.warp[a][which])
        return Conflict(what, which, f"warp {warp} of block {block}" if block >= 0 else "", int(self.wrote[a][which]))


def differ(x: Any, y: Any) -> Any:
    """Where two arrays differ in a bit; NaNs are all one."""
    return (x != y) & ~((x != x) & (y != y))
