"""An order of steps in which each comes after what it needs, kept while steps merge.

Whether one step needs another by way of others is asked for every pair that may merge. The order bounds the search:
what lies between two steps in every chain of needs lies between them in the order too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

Readers = Callable[[int], Iterable[int]]
"""The steps that read what a step writes."""


class Order:
    """The steps 0 to `count` - 1, which are given in such an order."""

    def __init__(self, count: int, readers: Readers) -> None:
        self.steps: list[int | None] = list(range(count))  # None where there was one
        self.place = {i: i for i in range(count)}
        self.readers = readers

    def drop(self, i: int) -> None:
        """Step i is gone; who needed it needs what it needed."""
        self.steps[self.place.pop(i)] = None

    def close_up(self) -> None:
        """Forget where steps were, so that places count steps."""
        self.steps = [i for i in self.steps if i is not None]
        self.place = {i: n for n, i in enumerate(self.steps) if i is not None}

    def beside(self, i: int, distance: int) -> list[int]:
        """The steps at most so many places from step i."""
        at = self.place[i]
        return [j for j in self.steps[max(at - distance, 0) : at + distance + 1] if j is not None and j != i]

    def needing(self, i: int, until: int, direct: bool = True) -> Iterator[int]:
        """The steps no later than step `until` that need step i, each once. Without `direct`, step `until` counts only
        where it needs step i by way of another.
        """
        last = self.place[until]
        found: set[int] = set()
        front = [j for j in self.readers(i) if direct or j != until]
        while front:
            j = front.pop()
            if j not in found and self.place[j] <= last:
                found.add(j)
                yield j
                front += self.readers(j)

    def apart(self, i: int, j: int) -> bool:
        """Whether no step stands between the two, of which the second may need the first."""
        if self.place[i] < self.place[j]:
            return j not in self.needing(i, j, direct=False)
        return i not in self.needing(j, i)

    def join(self, i: int, j: int) -> None:
        """Step i becomes part of step j, and no step stands between them: what needs either comes after both."""
        first, last = sorted((i, j), key=self.place.__getitem__)
        later = set(self.needing(first, last))
        start, end = self.place[first], self.place[last] + 1
        between = [k for k in self.steps[start:end] if k is not None and k not in (i, j)]
        moved = [*(k for k in between if k not in later), j, *(k for k in between if k in later)]
        self.steps[start:end] = [*moved, *[None] * (end - start - len(moved))]
        del self.place[i]
        self.place.update({k: start + n for n, k in enumerate(moved)})
