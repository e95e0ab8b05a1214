"""A program while rules change it: its steps, what is known of them, and what there is to say."""

from __future__ import annotations

from functools import partial
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import transform
from terrazzo.rewrite.rule import Event
from terrazzo.rules.loop.definitions import Definitions, in_order, unused

FAR = 4
"""Kernels from weights to what is stored of the product they are a factor of, at most."""


def kernels_of(program: l.Program) -> list[l.Kernel]:
    """The steps that are kernels."""
    return [s for s in program.steps if isinstance(s, l.Kernel)]


class Edited:
    """A program on its way; `label` is what the pass is called."""

    def __init__(self, program: l.Program, label: str) -> None:
        self.program, self.label = program, label
        self.known = Definitions(program)
        self.names = {b.name for s in program.steps for b in s.writes} | {b.name for b in program.inputs}
        self.events: list[Event] = []

    def readers(self, buffer: l.Buffer, far: int) -> list[l.Kernel]:
        """Who reads a buffer, or what is made of it, over so many kernels; the near ones first."""
        found: dict[l.Kernel, None] = {}
        front = [buffer]
        for _ in range(far):
            near = [s for b in front for s in self.known.readers.get(b, ()) if s not in found]
            found.update(dict.fromkeys(near))
            front = [b for s in near for b in s.writes]
        return list(found)

    def behind(self, buffer: l.Buffer) -> set[l.Kernel]:
        """The last kernels that lead to what is stored in a buffer."""
        found: set[l.Kernel] = set()
        front = {buffer}
        for _ in range(FAR):
            near = {self.known.makers[b] for b in front if b in self.known.makers} - found
            found |= near
            front = {b for s in near for b in s.reads}
        return found

    def fresh(self, name: str) -> str:
        """A name that no buffer has."""
        found = unused(name, self.names)
        self.names.add(found)
        return found

    def replace(self, new: dict[l.Kernel, list[l.Kernel]]) -> None:
        """Put kernels in the places of others."""
        steps = [x for s in self.program.steps for x in (new.get(s, [s]) if isinstance(s, l.Kernel) else [s])]
        self.program = l.Program(self.program.name, self.program.inputs, tuple(steps), self.program.results)
        self.known = Definitions(self.program)

    def say(self, rule: str, subject: str, reason: str, fired: bool = True) -> None:
        """What a rule did, or why it did not where it might have."""
        self.events.append(Event(self.label, rule, subject, fired, reason))

    def done(self, before: l.Program) -> l.Program:
        """The program without what nobody reads any more, every step after what it reads. Numbers in 32 bits that are
        made of rounded weights now are called otherwise.
        """
        while gone := {s for s in kernels_of(self.program) if self.unread(s)}:
            self.replace({s: [] for s in gone})
        old = {x for s in kernels_of(before) for x in s.stores}
        written = {x.buffer for x in old} - self.known.kept
        new: dict[l.Buffer, l.Buffer] = {}
        steps: list[l.Kernel | l.Call] = []
        for s in in_order(self.program, self.program.steps).steps:
            for x in s.stores if isinstance(s, l.Kernel) else ():
                changed = x not in old or new.keys() & {*s.reads}
                if changed and x.buffer in written and x.buffer.type.dtype.size == 4:
                    new[x.buffer] = l.Buffer(self.fresh(f"{x.buffer.name}_rounded"), x.buffer.type)
            steps.append(transform(s, partial(_renamed, new)) if isinstance(s, l.Kernel) else s)
        return l.Program(before.name, before.inputs, tuple(steps), before.results)

    def unread(self, kernel: l.Kernel) -> bool:
        """Whether nobody wants what a kernel stores."""
        return not any(b in self.known.kept or self.known.readers.get(b) for b in kernel.writes)


def _renamed(new: dict[l.Buffer, l.Buffer], x: Any) -> Any:
    if isinstance(x, l.Load):
        return l.Load(new.get(x.buffer, x.buffer), x.index, x.inside)
    if isinstance(x, l.Store):
        return l.Store(new.get(x.buffer, x.buffer), x.index, x.value)
    return x
