"""Wavefronts and sectors: as an H200 counted them, and as the layout engine proves them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from terrazzo.hw.memory import copied_sectors, matrix_wavefronts, sectors, wavefronts
from terrazzo.ir.layout import conflicts

LANE = np.arange(32)
ALL = np.ones(32, bool)


def lanes(address: Callable[[int], int]) -> np.ndarray:
    return np.array([address(n) for n in range(32)])


# Bytes a lane, its address, and what the H200's counters said of a load and of a store.
SHARED: list[tuple[int, Callable[[int], int], int, int]] = [
    (4, lambda n: 4 * n, 1, 1),
    (4, lambda n: 8 * n, 2, 2),
    (4, lambda n: 128 * n, 32, 32),
    (4, lambda n: 0, 1, 1),
    (4, lambda n: n // 8 * 4 + n % 8 * 80, 1, 1),
    (8, lambda n: 8 * n, 2, 2),
    (8, lambda n: n // 2 * 8, 1, 2),
    (8, lambda n: n % 2 * 8, 1, 2),
    (8, lambda n: n % 4 * 8, 2, 2),
    (16, lambda n: 16 * n, 4, 4),
    (16, lambda n: 0, 2, 4),
    (16, lambda n: n // 4 * 16, 2, 4),
    (16, lambda n: n % 4 * 16, 4, 4),
    (16, lambda n: n // 8 * 144, 2, 4),
    (16, lambda n: n % 8 * 144, 4, 4),
]


@pytest.mark.parametrize("number", range(len(SHARED)))
def test_shared_memory_as_counted(number: int) -> None:
    size, address, load, store = SHARED[number]
    assert wavefronts(lanes(address), ALL, size)[0] == load
    assert wavefronts(lanes(address), ALL, size, write=True)[0] == store


def test_lanes_that_take_no_part_cost_nothing() -> None:
    assert wavefronts(LANE * 128, LANE < 5, 4) == (5, 4)
    assert wavefronts(LANE * 16, LANE < 16, 16, write=True) == (2, 0)
    assert wavefronts(LANE * 16, LANE < 0, 16) == (0, 0)
    assert sectors(LANE * 32, LANE % 2 == 0) == 16


def test_rows_of_matrices() -> None:
    assert matrix_wavefronts(LANE * 16, ALL, 4) == (4, 0)
    assert matrix_wavefronts(LANE * 144, ALL, 4) == (4, 0)  # padded
    assert matrix_wavefronts(LANE * 128, ALL, 4) == (32, 28)
    assert matrix_wavefronts(LANE * 128, ALL, 1) == (8, 7)


def test_sectors() -> None:
    assert sectors(LANE * 4, ALL) == 4 and sectors(LANE * 4 + 16, ALL) == 5
    assert sectors(LANE * 128, ALL) == 32 and sectors(LANE * 0, ALL) == 1


def test_copies_take_half_sectors_where_the_halves_part() -> None:
    assert copied_sectors(LANE * 16, LANE * 16, ALL, 16) == 16
    assert copied_sectors(LANE * 16, LANE // 8 * 144 + LANE % 8 * 16, ALL, 16) == 24
    assert copied_sectors(LANE * 16, LANE * 128, ALL, 16) == 32
    assert copied_sectors(LANE // 2 * 16, LANE // 8 * 144 + LANE % 8 * 16, ALL, 16) == 28
    assert copied_sectors(LANE * 4, LANE * 128, ALL, 4) == 4


@pytest.mark.parametrize("access", [2, 3, 4])
@pytest.mark.parametrize("seed", range(40))
def test_the_layout_engine_proves_what_is_counted(access: int, seed: int) -> None:
    """Where the bits of the lane choose bits of the offset; several lanes at one address are left to the rule above."""
    rng = np.random.default_rng(seed)
    offsets = [
        int(x) << access for x in rng.permutation([1 << n for n in range(9)])[:5] ^ rng.integers(0, 32, 5) * (seed % 2)
    ]
    address = np.zeros(32, np.int64)
    for bit, offset in enumerate(offsets):
        address ^= (LANE >> bit & 1) * offset
    if len(set(address)) == 32:
        phases = max((1 << access) // 4, 1)
        assert wavefronts(address, ALL, 1 << access, write=True)[0] == phases * conflicts(offsets, access)
