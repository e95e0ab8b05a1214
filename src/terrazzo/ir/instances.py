"""Kernels of a program as instances of their canonical forms (ADR 010).

Most kernels of a program differ from others in names only, while it is decided which of them become one, too. So a
kernel is a form and the buffers it has there; what is asked or made of a group of forms is found once, and a kernel is
written down when somebody needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from terrazzo.ir.canonical import Form, canonical, sorted_by_names, with_buffers
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import known_to_be, per_node

SHARED = 3
"""How many kernels have a form in common, at least, where forms are worth finding: in GPT-2 13 have, in a layer 1.5."""


@dataclass(frozen=True)
class Instance:
    """A kernel as its canonical form, and what it has for the buffers of the form, in order of appearance."""

    form: l.Kernel
    buffers: tuple[l.Buffer, ...]
    name: str
    source: str

    @staticmethod
    def of(kernel: l.Kernel, form: l.Kernel | None = None) -> Instance:
        """A kernel as an instance of its canonical form, or of another one."""
        made = Instance(form or canonical(kernel).kernel, buffers_of(kernel), kernel.name, kernel.source)
        made.__dict__["kernel"] = kernel
        return made

    @cached_property
    def kernel(self) -> l.Kernel:
        """The kernel, written down."""
        old = buffers_of(self.form)
        new = dict(zip(old, self.buffers, strict=True))
        made = l.Kernel(self.name, self.form.axes, with_buffers(self.form, new), self.source)
        if not sorted_by_names(self.form):
            made.__dict__.setdefault("reads", self.reads)  # as they are in the form, which is looked through once
        if canonical(self.form).kernel is self.form:
            names = {b.name: x.name for b, x in new.items()}
            known_to_be(canonical, made, Form(self.form, {**names, self.form.name: self.name}, self.source))
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


def instances(kernels: Iterable[l.Kernel]) -> Callable[[l.Kernel], Instance]:
    """What makes instances of kernels of a program. Where few are alike, as in one layer, each is a form of its own: to
    find the forms of all that is tried takes longer then than it saves.
    """
    every = list(kernels)
    alike = len({canonical(k).kernel for k in every}) * SHARED <= len(every)
    return Instance.of if alike else lambda kernel: Instance.of(kernel, kernel)


class Asked:
    """A function of kernels, asked once for all groups of kernels that differ in names only. What it makes of them, if
    anything, is called as the last of them; whatever else it gives has no names in it.
    """

    def __init__(self, ask: Callable[..., Any], instance: Callable[[l.Kernel], Instance] = Instance.of) -> None:
        self.ask, self.instance = ask, instance
        self.known: dict[Hashable, Any] = {}

    def __call__(self, *group: Instance, given: Collection[l.Buffer] = ()) -> Any:
        """What is made of a group, and of buffers of theirs that are given besides."""
        number: dict[l.Buffer, int] = {}
        places = [tuple([number.setdefault(b, len(number)) for b in x.buffers]) for x in group]
        forms = tuple([(x.form, at, bool(x.source)) for x, at in zip(group, places, strict=True)])
        key = forms, frozenset(number[b] for b in given)
        if key not in self.known:
            found = self.ask(*(x.kernel for x in group), *([frozenset(given)] if given else []))
            if isinstance(found, l.Kernel):
                made = self.instance(found)
                self.known[key] = _Made.of(made, group, number)
                return made
            self.known[key] = found
        known = self.known[key]
        return known.again(group, tuple(number)) if isinstance(known, _Made) else known


@dataclass(frozen=True)
class _Made:
    """A kernel that was made of a group: its form, which buffers of the group it has, and whose line of source."""

    form: l.Kernel
    places: tuple[int, ...]
    origin: int | None

    @staticmethod
    def of(made: Instance, group: Sequence[Instance], number: dict[l.Buffer, int]) -> _Made:
        origin = max((n for n, x in enumerate(group) if x.source and x.source == made.source), default=None)
        return _Made(made.form, tuple(number[b] for b in made.buffers), origin)

    def again(self, group: Sequence[Instance], buffers: Sequence[l.Buffer]) -> Instance:
        source = "" if self.origin is None else group[self.origin].source
        return Instance(self.form, tuple([buffers[n] for n in self.places]), group[-1].name, source)


@per_node
def buffers_of(kernel: l.Kernel) -> tuple[l.Buffer, ...]:
    """The buffers of a kernel in order of appearance, as those of its form are numbered."""
    return tuple(dict.fromkeys((*kernel.writes, *kernel.reads)))


@per_node
def _read(form: l.Kernel) -> tuple[int, ...]:
    """Which of its buffers a kernel reads."""
    return tuple(map(buffers_of(form).index, form.reads))
