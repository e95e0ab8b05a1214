"""Layouts: which bits of a place (register, lane, warp, offset in shared memory) choose which bits of an element's
coordinates.

A layout is a linear map over F2, given by the image of every bit of the place; the image of several bits is the XOR of
theirs. Fragments of matrix instructions, tiles of registers and swizzled shared memory are all of this kind, and what
one wants to know of them is linear algebra on small matrices: whether an element has one place, where an element of one
layout lies in another, how many lanes meet in a bank. Extents are powers of two; whatever else there is lies in loops
around a layout.

The idea is that of Linear Layouts (arXiv 2505.23819).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from terrazzo.errors import UserError

Vector = int
"""A vector over F2: bit k is component k."""


def echelon(columns: Sequence[Vector]) -> dict[int, tuple[Vector, int]]:
    """Independent combinations of `columns` by their highest bit; with each, the set (as bits) of the columns it is the
    sum of.
    """
    found: dict[int, tuple[Vector, int]] = {}
    for k, column in enumerate(columns):
        v, used = column, 1 << k
        while v and (top := v.bit_length() - 1) in found:
            v, used = v ^ found[top][0], used ^ found[top][1]
        if v:
            found[v.bit_length() - 1] = v, used
    return found


def rank(columns: Sequence[Vector]) -> int:
    """The dimension of what `columns` span."""
    return len(echelon(columns))


def solve(columns: Sequence[Vector], wanted: Vector) -> int | None:
    """A set of columns (as bits) whose sum is `wanted`, or None where there is none."""
    basis, v, used = echelon(columns), wanted, 0
    while v:
        entry = basis.get(v.bit_length() - 1)
        if entry is None:
            return None
        v, used = v ^ entry[0], used ^ entry[1]
    return used


@dataclass(frozen=True)
class Layout:
    """A linear map from places to coordinates.

    `places` lists the parts of a place with the images of their bits, lowest bit first; `extents` the coordinates, each
    with the number of its bits. An image holds the bits of all coordinates, the first one lowest.
    """

    places: tuple[tuple[str, tuple[Vector, ...]], ...]
    extents: tuple[tuple[str, int], ...]

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, text: str) -> Layout:
        """Read `reg: n1 m8; lane: n2 n4 m1 m2 m4`: the images of a part's bits, lowest first; m8+n1 is a sum, 0 a
        replica.
        """
        parts = []
        for part in text.split(";"):
            name, _, images = part.partition(":")
            parts.append((name.strip(), [_terms(image, text) for image in images.split()]))
        sizes: dict[str, int] = {}
        for _, images_ in parts:
            for terms in images_:
                for coordinate, value in terms:
                    sizes[coordinate] = max(sizes.get(coordinate, 0), value.bit_length())
        extents = tuple(sorted(sizes.items()))
        shift = _shifts(extents)
        return cls(
            tuple((name, tuple(_xor(v << shift[c] for c, v in terms) for terms in images)) for name, images in parts),
            extents,
        )

    def __str__(self) -> str:
        shift = _shifts(self.extents)

        def image(v: Vector) -> str:
            found = [f"{c}{part}" for c, bits in self.extents if (part := v >> shift[c] & (1 << bits) - 1)]
            return "+".join(found) or "0"

        return "; ".join(f"{name}: {' '.join(map(image, images))}".strip() for name, images in self.places)

    @cached_property
    def columns(self) -> tuple[Vector, ...]:
        """The images of all bits of a place, in order."""
        return tuple(image for _, images in self.places for image in images)

    def bits(self, part: str) -> int:
        """How many bits a part of the place has."""
        return len(dict(self.places).get(part, ()))

    @property
    def elements(self) -> int:
        """How many elements there are."""
        return 1 << sum(bits for _, bits in self.extents)

    @property
    def covers(self) -> bool:
        """Every element has a place."""
        return 1 << rank(self.columns) == self.elements

    @property
    def injective(self) -> bool:
        """No element has two places."""
        return rank(self.columns) == len(self.columns)

    def coordinates(self, **place: Any) -> dict[str, Any]:
        """The coordinates of the element at a place. Ints or integer arrays; a part left out is 0."""
        flat: Any = 0
        for name, images in self.places:
            value = place.pop(name, 0)
            for k, image in enumerate(images):
                flat = flat ^ ((value >> k & 1) * image)
        if place:
            raise UserError(f"the layout has no {', '.join(place)}; it has {', '.join(n for n, _ in self.places)}")
        shift = _shifts(self.extents)
        return {c: flat >> shift[c] & (1 << bits) - 1 for c, bits in self.extents}

    def part(self, name: str) -> tuple[Vector, ...]:
        """The images of the bits of one part."""
        return dict(self.places).get(name, ())


def _terms(image: str, text: str) -> list[tuple[str, int]]:
    if image == "0":
        return []
    found = [re.fullmatch(r"([a-z]+)(\d+)", term) for term in image.split("+")]
    if not all(found):
        raise UserError(f"layout {text!r}: {image!r} is no image such as m8, m8+n1 or 0")
    return [(m[1], int(m[2])) for m in found if m]


def _xor(values: Any) -> int:
    total = 0
    for v in values:
        total ^= v
    return total


def _shifts(extents: Sequence[tuple[str, int]]) -> dict[str, int]:
    shift, at = {}, 0
    for name, bits in extents:
        shift[name] = at
        at += bits
    return shift


def conversion(source: Layout, target: Layout) -> tuple[int, ...] | None:
    """For each bit of a place in `target`, the bits of the place in `source` that hold the same element; None where
    some has none.

    Bits are numbered through the parts in order.
    """
    if source.extents != target.extents:
        raise UserError(f"layouts of different tensors: {source.extents} and {target.extents}")
    found = [solve(source.columns, image) for image in target.columns]
    return None if None in found else tuple(f for f in found if f is not None)


def moves(source: Layout, target: Layout) -> str:
    """What it takes to bring values from `source` to `target`: "nothing", "registers", "lanes" (shuffles) or "memory".

    Both have parts reg, lane and, where there are several, warp.
    """
    back = conversion(source, target)
    if back is None:
        raise UserError("the source does not hold all elements")
    owner = _numbered(source)
    worst = 0
    for (name, k), bits in zip(_numbered(target), back, strict=True):
        used = {owner[b] for b in range(bits.bit_length()) if bits >> b & 1}
        if used == {(name, k)}:
            continue
        parts = {part for part, _ in used} | {name}
        worst = max(worst, 3 if "warp" in parts else 2 if "lane" in parts else 1)
    return ("nothing", "registers", "lanes", "memory")[worst]


def _numbered(layout: Layout) -> list[tuple[str, int]]:
    return [(name, k) for name, images in layout.places for k in range(len(images))]


BANKS, BANK = 5, 2
"""log2 of the number of banks of shared memory, and of the bytes a bank is wide."""


def conflicts(offsets: Sequence[Vector], access: int) -> int:
    """How many rounds a warp's access to shared memory takes, where one would do with all lanes on banks of their own
    (1 is best).

    `offsets` are the byte offsets of the five bits of the lane, `access` is log2 of the bytes each lane moves (2 to 4).
    Wide accesses run in groups of 16 or 8 lanes, one after the other. Lanes at the same address do not conflict.
    """
    together = offsets[: len(offsets) - max(access - BANK, 0)]
    lines = [v >> access for v in together]  # which aligned piece of `access` bytes
    banks = [v & (1 << BANKS + BANK - access) - 1 for v in lines]
    return int(1 << rank(lines) - rank(banks))


@dataclass(frozen=True)
class Swizzle:
    """An XOR on byte offsets: `bits` bits from `base` on are changed by those `shift` above them. swizzle128 is
    Swizzle(3, 4, 3).
    """

    bits: int
    base: int
    shift: int

    def __call__(self, offset: Any) -> Any:
        """The offset after the exchange; its own inverse."""
        mask = (1 << self.bits) - 1 << self.base
        return offset ^ (offset >> self.shift & mask)


NONE = Swizzle(0, 4, 3)
HARDWARE = {0: NONE, 32: Swizzle(1, 4, 3), 64: Swizzle(2, 4, 3), 128: Swizzle(3, 4, 3)}
"""By their span in bytes: those TMA and wgmma know."""


def smem(extents: Sequence[tuple[str, int]], size: int, swizzle: Swizzle = NONE) -> dict[str, tuple[Vector, ...]]:
    """The byte offset of every bit of the coordinates of a slab in shared memory, the first coordinate contiguous.

    `extents` gives the bits of each coordinate, `size` is log2 of the bytes of an element.
    """
    at, offsets = size, {}
    for name, bits in extents:
        offsets[name] = tuple(swizzle(1 << at + k) for k in range(bits))
        at += bits
    return offsets


def addresses(layout: Layout, part: str, slab: Mapping[str, Sequence[Vector]]) -> tuple[Vector, ...]:
    """The byte offsets in a slab of the bits of one part of a place."""
    shift = _shifts(layout.extents)
    out = []
    for image in layout.part(part):
        bits = [slab[c][k] for c, n in layout.extents for k in range(n) if image >> shift[c] + k & 1]
        out.append(_xor(bits))
    return tuple(out)


def swizzle_for(
    accesses: Sequence[tuple[Layout, int]], extents: Sequence[tuple[str, int]], size: int
) -> Swizzle | None:
    """The smallest swizzle of 16-byte pieces under which no access conflicts; None where there is none.

    `accesses` are layouts of a warp (parts reg and lane) with log2 of the bytes each lane moves at once.
    """
    for bits in range(4):
        for shift in range(3, 7):
            candidate = Swizzle(bits, 4, shift)
            slab = smem(extents, size, candidate)
            if all(conflicts(addresses(layout, "lane", slab), access) == 1 for layout, access in accesses):
                return candidate
            if not bits:
                break
    return None
