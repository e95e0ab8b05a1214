"""The algebra of layouts against counting, and what ADR 004 says of particular layouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrazzo.errors import UserError
from terrazzo.ir.layout import (
    HARDWARE,
    Layout,
    Swizzle,
    addresses,
    conflicts,
    conversion,
    echelon,
    moves,
    rank,
    smem,
    solve,
    swizzle_for,
)  # fmt: skip

VECTORS = st.lists(st.integers(0, 255), max_size=8)

D = "reg: n1 m8; lane: n2 n4 m1 m2 m4"
A = "reg: k1 m8 k8; lane: k2 k4 m1 m2 m4"
B = "reg: k1 k8; lane: k2 k4 n1 n2 n4"


def sums(columns: list[int]) -> set[int]:
    found = {0}
    for c in columns:
        found |= {v ^ c for v in found}
    return found


@given(VECTORS, st.integers(0, 255))
def test_rank_and_solutions(columns: list[int], wanted: int) -> None:
    assert len(sums(columns)) == 1 << rank(columns)
    used = solve(columns, wanted)
    if used is None:
        assert wanted not in sums(columns)
    else:
        assert np.bitwise_xor.reduce([0, *(c for k, c in enumerate(columns) if used >> k & 1)]) == wanted
    for v, members in echelon(columns).values():
        assert np.bitwise_xor.reduce([0, *(c for k, c in enumerate(columns) if members >> k & 1)]) == v


def test_text_reads_back() -> None:
    for text in (A, B, D, "reg: m1+n2 n1; lane: 0 n2; warp: m2"):
        assert str(Layout.parse(text)) == text and Layout.parse(str(Layout.parse(text))) == Layout.parse(text)
    with pytest.raises(UserError, match="no image"):
        Layout.parse("reg: 8m")


def test_coordinates() -> None:
    layout = Layout.parse(A)
    for lane, reg in np.ndindex(32, 8):
        row = lane // 4 + 8 * (
            reg // 2 % 2
        )  # PTX ISA, m16n8k16: a0 a1 at (g, 2t), a2 a3 at (g + 8, 2t), a4 .. at k + 8
        column = 2 * (lane % 4) + reg % 2 + 8 * (reg // 4)
        assert layout.coordinates(lane=lane, reg=reg) == {"m": row, "k": column}
    with pytest.raises(UserError, match="has no warp"):
        layout.coordinates(warp=1)


def test_an_accumulator_is_the_next_instructions_left_operand() -> None:
    two = Layout.parse("reg: k1 m8 k8; lane: k2 k4 m1 m2 m4")  # two tiles of D side by side, n called k
    assert moves(two, Layout.parse(A)) == "nothing"


@pytest.mark.parametrize(
    ("source", "target", "cost"),
    [
        (A, A, "nothing"),
        ("reg: n1 m8; lane: n2 n4 m1 m2 m4", "reg: m8 n1; lane: n2 n4 m1 m2 m4", "registers"),
        ("reg: n1 k8; lane: n2 n4 k1 k2 k4", B, "lanes"),  # D with m called k: transposed, as in split-KV decoding
        ("reg: m1; lane: m2 m4 n1 n2 n4; warp: n8", "reg: n8; lane: m2 m4 n1 n2 n4; warp: m1", "memory"),
    ],
)
def test_what_a_conversion_takes(source: str, target: str, cost: str) -> None:
    assert moves(Layout.parse(source), Layout.parse(target)) == cost


def test_conversions_find_every_element() -> None:
    source, target = Layout.parse("reg: n1 k8; lane: n2 n4 k1 k2 k4"), Layout.parse(B)
    back = conversion(source, target)
    assert back is not None
    for lane, reg in np.ndindex(32, 4):
        place = np.bitwise_xor.reduce([0, *(bits for k, bits in enumerate(back) if (lane << 2 | reg) >> k & 1)])
        assert source.coordinates(reg=place & 3, lane=place >> 2) == target.coordinates(reg=reg, lane=lane)
    assert conversion(Layout.parse("reg: m1; lane: 0"), Layout.parse("reg: m1; lane: 0")) is not None
    assert conversion(Layout.parse("reg: m1+n1; lane: n1"), Layout.parse("reg: m1; lane: n1")) is not None


@given(st.lists(st.integers(0, 255).map(lambda v: v << 2), min_size=5, max_size=5), st.integers(2, 4))
def test_conflicts_are_those_one_counts(offsets: list[int], access: int) -> None:
    aligned = [v >> access << access for v in offsets]
    worst = 0
    lanes = 32 >> access - 2
    groups: dict[int, set[int]] = {}
    for lane in range(lanes):
        address = np.bitwise_xor.reduce([0, *(v for k, v in enumerate(aligned) if lane >> k & 1)])
        for word in range(1 << access - 2):
            groups.setdefault(int(address) // 4 + word & 31, set()).add(int(address) // 4 + word)
    worst = max(len(words) for words in groups.values())
    assert conflicts(aligned, access) == worst


LDMATRIX = Layout.parse("lane: m1 m2 m4 0 0; reg: k1 k2 k4")
"""Eight lanes of ldmatrix name eight rows of 16 bytes; the others name further matrices in further rounds."""


@pytest.mark.parametrize(("columns", "span", "plain"), [(64, 128, 8), (32, 64, 4), (16, 32, 2)])
def test_the_hardwares_swizzles_suit_ldmatrix(columns: int, span: int, plain: int) -> None:
    extents = [("k", columns.bit_length() - 1), ("m", 3)]
    layout = Layout.parse(f"lane: m1 m2 m4 0 0; reg: {' '.join(f'k{1 << i}' for i in range(extents[0][1]))}")
    before, after = (addresses(layout, "lane", smem(extents, 1, s)) for s in (HARDWARE[0], HARDWARE[span]))
    assert (conflicts(before, 4), conflicts(after, 4)) == (plain, 1)


def test_a_swizzle_is_found_for_all_accesses_at_once() -> None:
    extents = [("k", 5), ("m", 3)]  # the slab of ADR 004, 5: rows of 32 bf16
    read = Layout.parse("lane: m1 m2 m4 0 0; reg: k1 k2 k4 k8 k16")
    write = Layout.parse("lane: k8 k16 m1 m2 m4; reg: k1 k2 k4")  # cp.async, 16 bytes a lane
    assert swizzle_for([(write, 4)], extents, 1) == Swizzle(0, 4, 3)
    assert swizzle_for([(read, 4), (write, 4)], extents, 1) == HARDWARE[64]


@given(st.integers(0, 3), st.integers(3, 6), st.integers(0, 1 << 16))
def test_a_swizzle_is_its_own_inverse(bits: int, shift: int, offset: int) -> None:
    swizzle = Swizzle(bits, 4, shift)
    assert swizzle(swizzle(offset)) == offset and swizzle(offset) % 16 == offset % 16
