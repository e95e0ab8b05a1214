"""Kernels that differ in the places where they read are one kernel, which reads windows.

A net that is unrolled over time has a kernel for every step, and each reads what belongs to its step out of what was
made for all of them at once: the same kernel, but for a number in an index. It is scheduled and compiled once where the
number becomes where a window begins (`ir/regions.py`): of that nothing is executed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from terrazzo.ir.canonical import nameless
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import bounds
from terrazzo.ir.node import substitute
from terrazzo.ir.regions import ALIGNED, WINDOW
from terrazzo.ir.types import Type
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.definitions import unused

PASS = "windows"
RULE = "places_read"

Place = tuple[tuple[int, int], ...]
"""The part of a buffer that a load goes through: where it begins in each dimension, and how long it is there."""


def places_read(program: l.Program, log: Log, constants: Collection[l.Buffer] = ()) -> l.Program:
    """`program` with kernels that read windows along the dimensions in which they read different places, where they are
    one kernel then; but what is `constants`, and computed once, is read as it is.

    @loop
    def f(x: f32[2, 64]):
        with kernel('a', a=f32[64]):
            for a0 in free(64):
                in0 = x[0, a0]
                v0 = exp(in0)
                a[a0] = v0
        with kernel('b', b=f32[64]):
            for a0 in free(64):
                in0 = x[1, a0]
                v0 = exp(in0)
                b[a0] = v0
        return (a, b)
    =>
    @loop
    def f(x: f32[2, 64]):
        x_at, = call('aten.alias.default', view(x, [1, 64], [64, 1], 0), _types=(f32[1, 64],))
        with kernel('a', a=f32[64]):
            for a0 in free(64):
                in0 = x_at[0, a0]
                v0 = exp(in0)
                a[a0] = v0
        x_at_2, = call('aten.alias.default', view(x, [1, 64], [64, 1], 64), _types=(f32[1, 64],))
        with kernel('b', b=f32[64]):
            for a0 in free(64):
                in0 = x_at_2[0, a0]
                v0 = exp(in0)
                b[a0] = v0
        return (a, b)
    """
    places = {s: _places(s, constants) for s in program.steps if isinstance(s, l.Kernel)}
    names = {b.name for b in (*program.inputs, *(b for s in program.steps for b in s.writes))}
    everywhere, windows = _Windows({*names}), _Windows(names)
    alike: dict[l.Kernel, list[l.Kernel]] = {}
    for kernel, found in places.items():
        alike.setdefault(nameless(everywhere.reading(kernel, found)), []).append(kernel)
    new: dict[l.Kernel, l.Kernel] = {}
    for group in alike.values():
        if len(set(map(nameless, group))) > 1:
            new |= windows.along({s: places[s] for s in group})
    steps: list[l.Kernel | l.Call] = []
    there: set[l.Buffer] = set()
    counts = Counter(map(nameless, new.values()))
    for s in program.steps:
        if not isinstance(s, l.Kernel) or s not in new:
            steps.append(s)
            continue
        calls = [windows.named(b, s.source) for b in new[s].reads if b in windows.of and b not in there]
        there.update(new[s].reads)
        steps += [*calls, new[s]]
        log.add(Event(PASS, RULE, s.name, True, f"{counts[nameless(new[s])]} kernels are one that reads windows"))
        log.applied(PASS, RULE, s.name, [s], [*calls, new[s]])
    return l.Program(program.name, program.inputs, tuple(steps), program.results) if new else program


def _places(kernel: l.Kernel, constants: Collection[l.Buffer]) -> dict[l.Load, Place]:
    """The places of the loads of a kernel, in order; constants are read whole."""
    loads = [x for x in kernel.terms if isinstance(x, l.Load)]
    return {x: _whole(x.buffer.type) if x.buffer in constants else _place(x) for x in loads}


def _place(x: l.Load) -> Place:
    """Where a load goes, as far as ranges say it; it may be guarded where it would go beyond the buffer."""
    found = []
    for e, n in zip(x.index, x.buffer.type.shape, strict=True):
        least, most = bounds(e)
        known = isinstance(n, int) and least is not None and most is not None and least >= 0 and most < n
        found.append((least, most - least + 1) if known else (0, n))  # type: ignore[operator]
    return tuple(found)  # type: ignore[arg-type]


def _whole(kind: Type) -> Place:
    return tuple((0, n) for n in kind.shape)  # type: ignore[misc]


class _Windows:
    """Windows at places of buffers, each with one name."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.at: dict[tuple[l.Buffer, Place], l.Buffer] = {}
        self.of: dict[l.Buffer, tuple[l.Buffer, Place]] = {}

    def reading(self, kernel: l.Kernel, places: Mapping[l.Load, Place]) -> l.Kernel:
        """The kernel that reads windows at these places; what it reads whole, it reads as it is."""
        new: dict[Any, Any] = {}
        for x, place in places.items():
            if place == _whole(x.buffer.type):
                continue
            index = tuple(e - start for e, (start, _) in zip(x.index, place, strict=True))
            new[x] = l.Load(self.window(x.buffer, place), index, x.inside)
        there: l.Kernel = substitute(kernel, new)
        return there

    def along(self, group: Mapping[l.Kernel, Mapping[l.Load, Place]]) -> dict[l.Kernel, l.Kernel]:
        """Kernels that are one where each reads windows in all dimensions, with windows along those only in which some
        read other parts. Nothing where a window cannot begin there.
        """
        found: dict[l.Kernel, dict[l.Load, Place]] = {kernel: {} for kernel in group}
        for loads in zip(*group.values(), strict=True):  # those that are one load then
            each = [group[kernel][x] for kernel, x in zip(group, loads, strict=True)]
            differ = [len(set(parts)) > 1 for parts in zip(*each, strict=True)]
            for kernel, x, place in zip(group, loads, each, strict=True):
                rest = _whole(x.buffer.type)
                cut = tuple(p if d else r for p, d, r in zip(place, differ, rest, strict=True))
                if _offset(x.buffer.type, cut) * x.buffer.type.dtype.size % ALIGNED:
                    return {}
                found[kernel][x] = cut
        new = {kernel: self.reading(kernel, places) for kernel, places in found.items()}
        return new if len(set(map(nameless, new.values()))) == 1 else {}

    def window(self, b: l.Buffer, place: Place) -> l.Buffer:
        """The part of a buffer at a place; it lies as the buffer does."""
        if (b, place) not in self.at:
            name = unused(f"{b.name}_at", self.names)
            self.names.add(name)
            shape = tuple(size for _, size in place)
            plain = Type(b.type.dtype, shape)
            same = all(n == 1 or a == c for n, a, c in zip(shape, _strides(plain), _strides(b.type), strict=True))
            made = l.Buffer(name, plain if same else Type(b.type.dtype, shape, b.type.element_strides))
            self.at[b, place] = made
            self.of[made] = b, place
        return self.at[b, place]

    def named(self, window: l.Buffer, source: str) -> l.Call:
        """What says where a window is."""
        whole, place = self.of[window]
        view = l.View(whole, window.type.static_shape, _strides(whole.type), _offset(whole.type, place))
        return l.Call(WINDOW, (view,), (), (window,), 0, source)


def _offset(kind: Type, place: Place) -> int:
    """How many elements after the first one of a buffer a place begins."""
    return sum(start * stride for (start, _), stride in zip(place, _strides(kind), strict=True))


def _strides(kind: Type) -> tuple[int, ...]:
    """The strides of a type, in elements."""
    return tuple(map(int, kind.element_strides))  # type: ignore[arg-type]
