"""Two neighbours at once, where numbers of few bits become factors in bf16: instructions take two numbers of 16 bits.

What is computed in f32 of numbers of bf16 and rounded to bf16 is what one operation of bf16 gives, since f32 has more
than twice as many bits. A whole number below 128 is the lower half of a bf16 from 128 to 255.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from terrazzo.ir.address import coefficient, divides, flatten
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import IntExpr, Var
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.types import Type, bf16, f32, i8, u8

SMALL = 128
"""Whole numbers below have their bits in the lower half of a bf16 that is so much larger."""
EXACT = 256
"""Whole numbers up to here are numbers of bf16."""

Text = Callable[[Any], str]


@dataclass(frozen=True)
class _Bytes:
    """Two bytes, each in the lower half of 16 bits, of which the `bits` count: others may be set too."""

    text: str
    bits: int = 255
    signed: bool = False


@dataclass(frozen=True)
class _Small:
    """Whole numbers below 128, less one that is the same for both."""

    text: str
    bits: int
    less: int = 0

    @property
    def two(self) -> str:
        """As numbers of bf16."""
        return f"tz_two_small<{_lanes(self.bits)}>({self.text}, {_both(SMALL + self.less)})"


@dataclass(frozen=True)
class _Two:
    """Two numbers of bf16."""

    two: str


@dataclass(frozen=True)
class _Computed:
    """What a function gives in f32, before it is rounded."""

    name: str
    a: str
    b: str


_Pair = _Bytes | _Small | _Two | _Computed


def pairs(loop: k.For, term: Text, element: Callable[[Any, Any], str]) -> list[str] | None:
    """The lines of a loop of two rounds that computes neighbours of bf16, both at once; None where it does anything
    else.
    """
    if not loop.unrolled or loop.axis.extent != 2:
        return None
    work, lines = _Work(loop, term), list[str]()
    for s in loop.body:
        match s:
            case k.Let():
                if (found := work.of(s.term)) is None:
                    return None
                work.known[s.value] = found
            case l.Store(buffer=place, index=at) if place.type.dtype is bf16 and work.beside(place, at):
                value = work.of(s.value)
                if not isinstance(value, _Two | _Small):
                    return None
                here = tuple(work.first(e) for e in at)
                lines.append(f"reinterpret_cast<u32&>({element(place, here)}) = {value.two};")
            case _:
                return None
    return lines if work.reads else None


def neighbours_first(loop: k.For) -> list[Node] | None:
    """The statements of a longer loop whose rounds make numbers of bf16 of bytes: two rounds after the other, of which
    a loop makes these numbers first, as `pairs` does, and another one has the rest. None where there are none.
    """
    count = loop.axis.extent
    if not isinstance(count, int) or not loop.unrolled or count % 2 or count < 4:
        return None
    if not all(isinstance(s, k.Let | l.Store) for s in loop.body):
        return None
    pair, j, again = (Var(f"{loop.axis.name}{x}", n) for x, n in (("p", count // 2), ("j", 2), ("h", 2)))
    lets = {s.value: s for s in loop.body if isinstance(s, k.Let)}
    same = _the_same(loop, lets)
    moved = [substitute(s, {loop.axis: pair * 2 + j}) for s in loop.body if s not in same]
    work = _Work(k.For(j, tuple(moved), True), str)
    for s in moved:
        if isinstance(s, k.Let) and (found := work.of(s.term)) is not None:
            work.known[s.value] = found
    made = _frontier(loop, lets, work.known)
    if not work.reads or not made:
        return None
    places = {x: k.Registers(f"{loop.axis.name}two{n}", Type(bf16, (2,))) for n, x in enumerate(made)}
    before, stored = _needed(moved, made), {s.buffer for s in loop.body if isinstance(s, l.Store)}
    if any(isinstance(x, l.Load) and x.buffer in stored for x in topological(before)):
        return None
    first = [*before, *(l.Store(place, (j,), x) for x, place in places.items())]
    halves: dict[Any, Any] = {x: l.Load(place, (again,)) for x, place in places.items()}
    rest = [s for s in loop.body if s not in same and not (isinstance(s, k.Let) and s.value in places)]
    rest = [substitute(s, {**halves, loop.axis: pair * 2 + again}) for s in rest]
    later = _needed(rest, [s for s in rest if isinstance(s, l.Store)])
    both = (k.For(j, tuple(first), True), k.For(again, tuple(later), True))
    return [*same, k.For(pair, (*map(k.Declare, places.values()), *both), True)]


def _the_same(loop: k.For, lets: dict[Any, k.Let]) -> list[k.Let]:
    """What is the same in every round, conversions aside: it depends on no round, nor on what one stores."""
    stored = {s.buffer for s in loop.body if isinstance(s, l.Store)}
    found: dict[Any, k.Let] = {}
    for value, s in lets.items():
        terms = topological([s.term])
        others = any(x in lets and x not in found for x in terms)
        others = others or (isinstance(s.term, l.Apply) and is_cast(s.term.fn))
        if not (loop.axis in terms or others or any(isinstance(x, l.Load) and x.buffer in stored for x in terms)):
            found[value] = s
    return list(found.values())


def _frontier(loop: k.For, lets: dict[Any, k.Let], known: dict[Node, Any]) -> list[Any]:
    """The numbers of bf16 that are `known` of both rounds, and that are used by what is not."""
    known, stored = dict(known), {s.value for s in loop.body if isinstance(s, l.Store)}
    while True:
        used: dict[Any, None] = {}
        for s in loop.body:
            if not (isinstance(s, k.Let) and s.value in known):
                used |= dict.fromkeys(x for x in topological([s]) if x in known)
        found = {x: _rounded(x, lets, known, stored) for x in used}
        if None not in found.values():
            return list(dict.fromkeys(found.values()))
        known = {x: y for x, y in known.items() if found.get(x, x) is not None}


def _rounded(x: Any, lets: dict[Any, k.Let], known: dict[Node, Any], stored: set[Any]) -> Any:
    """A number itself, or what it was before it was converted to f32, if that is one of bf16 that was computed or is
    stored; None if it is not. What is no more than a byte becomes a number of f32 in one instruction: sums of one row
    of int8 took 24.6 us where it came from two of bf16, for 20.2 (H200).
    """
    term: Any = lets[x].term
    (of,) = term.args if x.dtype is f32 and is_cast(term.fn) else (x,)
    if of not in known or of.dtype is not bf16 or not isinstance(known[of], _Two | _Small):
        return None
    before: Any = lets[of].term
    return of if of in stored or isinstance(known.get(before.args[0]), _Computed) else None


def _needed(body: list[Any], roots: list[Any]) -> list[Any]:
    """Those of some statements that something is made of, in order."""
    wanted = set(topological(roots))
    kept: list[Any] = []
    for s in reversed(body):
        if s in wanted or (isinstance(s, k.Let) and s.value in wanted):
            kept.append(s)
            wanted |= set(topological(s.children))
    return kept[::-1]


class _Work:
    def __init__(self, loop: k.For, term: Text) -> None:
        self.axis, self.term = loop.axis, term
        self.known: dict[Node, _Pair | Any] = {}
        self.reads = False

    def first(self, e: IntExpr) -> IntExpr:
        """An index in the first round."""
        return substitute(e, {self.axis: 0}) if isinstance(e, Node) else e

    def beside(self, place: l.Buffer, at: tuple[IntExpr, ...]) -> bool:
        """Whether the two rounds go to neighbours, the first of which is an even one."""
        offset = flatten(at, place.type.element_strides)
        return isinstance(place, k.Registers) and coefficient(offset, self.axis) == 1 and divides(2, self.first(offset))

    def of(self, x: Any) -> _Pair | None:
        """What a term is in both rounds; None where that is no pair."""
        if x in self.known:
            return self.known[x]
        match x:
            case l.Load(buffer=k.Registers() as place, index=at) if x.dtype in (u8, i8) and self.beside(place, at):
                self.reads = True
                here = f"{self.term(l.Load(place, tuple(self.first(e) for e in at)))}"
                return _Bytes(f"tz_two_bytes({here})", signed=x.dtype is i8)
            case l.Apply() if is_cast(x.fn):
                return self.converted(x)
            case l.Apply():
                return self.applied(x)
        return None

    def converted(self, x: l.Apply) -> _Pair | None:
        """A conversion: of bytes to bf16, of bf16 to f32 and back."""
        (of,) = x.args
        if x.dtype is f32 and not self.moves(of) and of.dtype is bf16:  # type: ignore[attr-defined]
            return _Two(f"tz_two_same({self.term(of)})")
        found = self.of(of)
        match found:
            case _Bytes(signed=True) if x.dtype is bf16:
                return _Two(f"tz_two_signed({found.text})")
            case _Bytes() if x.dtype is bf16 and found.bits < SMALL:
                return _Small(found.text, found.bits)
            case _Small() | _Two() if x.dtype in (f32, bf16):
                return found
            case _Computed() if x.dtype is bf16:
                return _Two(f"tz_two_{found.name}({found.a}, {found.b})")
        return None

    def applied(self, x: l.Apply) -> _Pair | None:
        """A function of bytes and a constant, or of numbers of bf16 in f32."""
        name, (a, *rest) = x.fn.name, x.args
        if len(rest) != 1:
            return None
        (b,) = rest
        left = self.of(a)
        if isinstance(left, _Bytes) and isinstance(b, l.Literal) and not left.signed:
            if name == "and_":
                return _Bytes(left.text, left.bits & int(b.value))
            if name == "shr" and 0 <= b.value < 8:
                return _Bytes(f"({left.text} >> {b.value})", left.bits >> int(b.value))
            return None
        if x.dtype is not f32 or name not in ("add", "sub", "mul"):
            return None
        if isinstance(left, _Small) and name == "sub" and _whole(b, left.less):
            return _Small(left.text, left.bits, left.less + int(b.value))  # type: ignore[attr-defined]
        right = self.of(b)
        if isinstance(left, _Two | _Small) and isinstance(right, _Two | _Small):
            return _Computed(name, left.two, right.two)
        return None

    def moves(self, x: Any) -> bool:
        """Whether a term is another one in each round."""
        return any(y is self.axis or y in self.known for y in topological([x])) or self.axis in x.free


def _whole(x: Any, less: int) -> bool:
    """Whether a literal is a whole number so small that what is left of a small one is a number of bf16."""
    return isinstance(x, l.Literal) and float(x.value).is_integer() and 0 <= less + x.value <= EXACT - SMALL


def _lanes(bits: int) -> str:
    return f"{(bits & 0xFFFF) * 0x10001:#x}u"


def _both(number: int) -> str:
    """A whole number as two of bf16, negative."""
    import struct

    (bits,) = struct.unpack("<I", struct.pack("<f", float(-number)))
    return f"{(bits >> 16) * 0x10001:#x}u"
