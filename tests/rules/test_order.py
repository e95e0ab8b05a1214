"""The order of steps says what stands between two of them, and stays one while steps merge."""

from __future__ import annotations

import random

from terrazzo.rules.loop.fusion.order import Order


def reach(reads: dict[int, set[int]], i: int) -> set[int]:
    """All steps that need step i, by brute force."""
    found: set[int] = set()
    front = list(reads.get(i, ()))
    while front:
        j = front.pop()
        if j not in found:
            found.add(j)
            front += reads.get(j, ())
    return found


def test_random_graphs() -> None:
    rng = random.Random(3)
    joined = refused = 0
    for _ in range(60):
        count = rng.randrange(2, 14)
        reads = {i: {j for j in range(i + 1, count) if rng.random() < 0.25} for i in range(count)}
        order = Order(count, lambda i, reads=reads: reads[i])
        while len(reads) > 1:
            i, j = rng.sample(sorted(reads), 2)
            between = {k for k in reads if k not in (i, j) and k in reach(reads, i) and j in reach(reads, k)}
            apart = not between and i not in reach(reads, j)
            assert order.apart(i, j) == apart
            if not apart:
                refused += 1
                if rng.random() < 0.2:
                    break
                continue
            order.join(i, j)
            joined += 1
            reads[j] = (reads[j] | reads.pop(i)) - {i, j}
            for later in reads.values():
                if i in later:
                    later.discard(i)
                    later.add(j)
            if rng.random() < 0.3:
                order.close_up()
            assert sorted(order.place) == sorted(reads)
            assert [k for k in order.steps if k is not None] == sorted(order.place, key=order.place.__getitem__)
            assert all(order.place[a] < order.place[b] for a in reads for b in reads[a])
    assert joined > 100 and refused > 100
