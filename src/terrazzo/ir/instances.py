"""Kernels of a program as instances of their canonical forms (ADR 010).

Most kernels of a program differ from others in names only, while it is decided which of them become one, too. So a
kernel is a form and the buffers it has there; what is asked or made of a group of forms is found once, and a kernel is
written down when somebody needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add
from typing import Any

from terrazzo.ir.canonical import Form, canonical, sorted_by_names, with_buffers
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import known_to_be, per_node
from terrazzo.ir.placeless import begins, moved

SHARED = 3
"""How many kernels have a form in common, at least, where forms are worth finding: in GPT-2 13 have, in a layer 1.5."""


Place = tuple[int, ...]
"""How many elements further on something is, along each dimension; () where it is no further on along any."""


@dataclass(frozen=True)
class Instance:
    """A kernel as its canonical form, and what it has for the buffers of the form, in order of appearance; and where in
    each of these it begins to read, or nothing where it reads all as the form does.
    """

    form: l.Kernel
    buffers: tuple[l.Buffer, ...]
    name: str
    source: str
    places: tuple[Place, ...] = ()

    @staticmethod
    def of(kernel: l.Kernel, form: l.Kernel | None = None) -> Instance:
        """A kernel as an instance of its canonical form, or of another one."""
        made = Instance(form or canonical(kernel).kernel, buffers_of(kernel), kernel.name, kernel.source)
        made.__dict__["kernel"] = kernel
        return made

    @staticmethod
    def anywhere(kernel: l.Kernel) -> Instance:
        """A kernel as an instance of its canonical form at the beginnings of what it reads (`ir/placeless.py`)."""
        whole = canonical(kernel).kernel
        if not (found := begins(whole)):
            return Instance.of(kernel)
        places = tuple(found.get(b, ()) for b in buffers_of(whole))
        form = moved(whole, {b: tuple(-n for n in place) for b, place in found.items()})
        made = Instance(form, buffers_of(kernel), kernel.name, kernel.source, places)
        made.__dict__["kernel"] = kernel
        return made

    @cached_property
    def kernel(self) -> l.Kernel:
        """The kernel, written down."""
        old = buffers_of(self.form)
        new = dict(zip(old, self.buffers, strict=True))
        form = moved(self.form, {b: place for b, place in zip(old, self.places, strict=False) if place})
        made = l.Kernel(self.name, form.axes, with_buffers(form, new), self.source)
        if not sorted_by_names(form):
            made.__dict__.setdefault("reads", self.reads)  # as they are in the form, which is looked through once
        if canonical(self.form).kernel is self.form:
            names = {b.name: x.name for b, x in new.items()}
            known_to_be(canonical, made, Form(form, {**names, form.name: self.name}, self.source))
        return made

    @cached_property
    def writes(self) -> tuple[l.Buffer, ...]:
        """The buffers it stores to."""
        return self.buffers[: len(self.form.stores)]

    @cached_property
    def reads(self) -> tuple[l.Buffer, ...]:
        """The buffers it loads from."""
        return tuple(self.buffers[n] for n in _read(self.form))

    def named(self, text: str) -> str:
        """What is said of the form, with the names that this kernel has."""
        marks = (b.name for b in buffers_of(self.form))
        names = {mark: b.name for mark, b in zip(marks, self.buffers, strict=True)}
        return Form(self.form, {**names, self.form.name: self.name}, self.source).named(text)


def instances(kernels: Iterable[l.Kernel], anywhere: bool = False) -> Callable[[l.Kernel], Instance]:
    """What makes instances of kernels of a program, of those that read `anywhere` alike, if asked for. Where few are
    alike, as in one layer, each is a form of its own: to find the forms of all that is tried takes longer then than it
    saves. So it is where they are alike but for their places: what is made of steps of a scan grows with each.
    """
    every = list(kernels)
    alike = len({canonical(k).kernel for k in every}) * SHARED <= len(every)
    make = Instance.anywhere if anywhere else Instance.of
    return make if alike else lambda kernel: Instance.of(kernel, kernel)


class Asked:
    """A function of kernels, asked once for all groups of kernels that differ in names only, and in where they begin to
    read. What it makes of them, if anything, is called as the last of them; whatever else it gives has no names in it.
    """

    def __init__(self, ask: Callable[..., Any], instance: Callable[[l.Kernel], Instance] = Instance.of) -> None:
        self.ask, self.instance = ask, instance
        self.known: dict[Hashable, Any] = {}

    def __call__(self, *group: Instance, given: Collection[l.Buffer] = ()) -> Any:
        """What is made of a group, and of buffers of theirs that are given besides."""
        number: dict[l.Buffer, int] = {}
        at = [tuple([number.setdefault(b, len(number)) for b in x.buffers]) for x in group]
        first = _first(group)
        forms = tuple([(x.form, n, _from(first, x), bool(x.source)) for x, n in zip(group, at, strict=True)])
        key = forms, frozenset(number[b] for b in given)
        if key not in self.known:
            found = self.ask(*(x.kernel for x in group), *([frozenset(given)] if given else []))
            if isinstance(found, l.Kernel):
                made = self.instance(found)
                self.known[key] = _Made.of(made, group, number, first)
                return made
            self.known[key] = found
        known = self.known[key]
        return known.again(group, tuple(number), first) if isinstance(known, _Made) else known


def _first(group: Sequence[Instance]) -> dict[l.Buffer, Place]:
    """Where a group begins to read, in buffers that it does not write: what is made of it reads as much further on, or
    before that, wherever this is. Nowhere else where somebody reads nothing beyond an edge: there it makes a difference
    how far that is.
    """
    if not any(x.places for x in group) or any(_at_edges(x.form) for x in group):
        return {}
    written = {b for x in group for b in x.writes}
    found: dict[l.Buffer, Place] = {}
    for x in group:
        for b, place in zip(x.buffers, x.places or [()] * len(x.buffers), strict=True):
            if b not in written:
                found[b] = tuple(map(min, found.get(b, place), place))
    return {b: place for b, place in found.items() if any(place)}


def _from(first: Mapping[l.Buffer, Place], x: Instance) -> tuple[Place, ...]:
    """How much further on a kernel begins to read than the `first` places of some buffers."""
    back = {b: tuple(-n for n in place) for b, place in first.items()}
    return _further(x.buffers, x.places, back)


def _further(buffers: Sequence[l.Buffer], places: tuple[Place, ...], by: Mapping[l.Buffer, Place]) -> tuple[Place, ...]:
    """Places in some buffers, so much further on."""
    if not by:
        return places
    found: list[Place] = []
    for b, place in zip(buffers, places or [()] * len(buffers), strict=True):
        moved = tuple(map(add, place or (0,) * b.type.rank, by[b])) if b in by else place
        found.append(moved if any(moved) else ())
    return tuple(found) if any(found) else ()


@dataclass(frozen=True)
class _Made:
    """A kernel that was made of a group: its form, which buffers of the group it has, how much further on than these
    it begins to read, and whose line of source it has.
    """

    form: l.Kernel
    buffers: tuple[int, ...]
    places: tuple[Place, ...]
    origin: int | None

    @staticmethod
    def of(
        made: Instance, group: Sequence[Instance], number: Mapping[l.Buffer, int], first: Mapping[l.Buffer, Place]
    ) -> _Made:
        origin = max((n for n, x in enumerate(group) if x.source and x.source == made.source), default=None)
        return _Made(made.form, tuple(number[b] for b in made.buffers), _from(first, made), origin)

    def again(
        self, group: Sequence[Instance], buffers: Sequence[l.Buffer], first: Mapping[l.Buffer, Place]
    ) -> Instance:
        source = "" if self.origin is None else group[self.origin].source
        own = tuple([buffers[n] for n in self.buffers])
        return Instance(self.form, own, group[-1].name, source, _further(own, self.places, first))


@per_node
def _at_edges(form: l.Kernel) -> bool:
    """Whether a kernel reads nothing where it would read beyond an edge, or where names have a say."""
    return sorted_by_names(form) or any(isinstance(x, l.Load) and x.inside for x in form.terms)


@per_node
def buffers_of(kernel: l.Kernel) -> tuple[l.Buffer, ...]:
    """The buffers of a kernel in order of appearance, as those of its form are numbered."""
    return tuple(dict.fromkeys((*kernel.writes, *kernel.reads)))


@per_node
def _read(form: l.Kernel) -> tuple[int, ...]:
    """Which of its buffers a kernel reads."""
    return tuple(map(buffers_of(form).index, form.reads))
