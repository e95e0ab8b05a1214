"""Kernels of a program as instances of their canonical forms (ADR 010).

Most kernels of a program differ from others in names only, while it is decided which of them become one, too. So a
kernel is a form and the buffers it has there; what is asked or made of a group of forms is found once, and a kernel is
written down when somebody needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from terrazzo.ir.canonical import Form, canonical
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import per_node, substitute


@dataclass(frozen=True)
class Instance:
    """A kernel as its canonical form, and what it has for the buffers of the form, in order of appearance."""

    form: l.Kernel
    buffers: tuple[l.Buffer, ...]
    name: str
    source: str

    @staticmethod
    def of(kernel: l.Kernel) -> Instance:
        """A kernel as an instance of its form."""
        made = Instance(canonical(kernel).kernel, _buffers(kernel), kernel.name, kernel.source)
        made.__dict__["kernel"] = kernel
        return made

    @cached_property
    def kernel(self) -> l.Kernel:
        """The kernel, written down."""
        new = dict(zip(_buffers(self.form), self.buffers, strict=True))
        stores = tuple(substitute(s, new) for s in self.form.stores)
        return l.Kernel(self.name, self.form.axes, stores, self.source)

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
        marks = (b.name for b in _buffers(self.form))
        names = {mark: b.name for mark, b in zip(marks, self.buffers, strict=True)}
        return Form(self.form, {**names, self.form.name: self.name}, self.source).named(text)


class Asked:
    """A function of kernels, asked once for all groups of kernels that differ in names only. What it makes of them, if
    anything, is called as the last of them; whatever else it gives has no names in it.
    """

    def __init__(self, ask: Callable[..., Any]) -> None:
        self.ask = ask
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
                self.known[key] = _Made.of(found, group, number)
                return Instance.of(found)
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
    def of(kernel: l.Kernel, group: Sequence[Instance], number: dict[l.Buffer, int]) -> _Made:
        origin = max((n for n, x in enumerate(group) if x.source and x.source == kernel.source), default=None)
        return _Made(canonical(kernel).kernel, tuple(number[b] for b in _buffers(kernel)), origin)

    def again(self, group: Sequence[Instance], buffers: Sequence[l.Buffer]) -> Instance:
        source = "" if self.origin is None else group[self.origin].source
        return Instance(self.form, tuple([buffers[n] for n in self.places]), group[-1].name, source)


@per_node
def _buffers(kernel: l.Kernel) -> tuple[l.Buffer, ...]:
    """The buffers of a kernel in order of appearance, as those of its form are numbered."""
    return tuple(dict.fromkeys((*kernel.writes, *kernel.reads)))


@per_node
def _read(form: l.Kernel) -> tuple[int, ...]:
    """Which of its buffers a kernel reads."""
    return tuple(map(_buffers(form).index, form.reads))
