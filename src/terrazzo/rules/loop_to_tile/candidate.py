"""What may take the place of a kernel: kernels with their schedules, and the rewrites that led there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.schedule import Schedule

Chosen = tuple[l.Kernel, Schedule, str, str]
"""A kernel with its schedule, the rule that made it, and why."""
Rewrite = tuple[str, l.Kernel, tuple[l.Kernel, ...]]
"""A rule, the kernel it was applied to, and what took that one's place."""


@dataclass(frozen=True)
class Candidate:
    """What may take the place of a kernel (two kernels after a split), and the rewrites that led there."""

    kernels: tuple[Chosen, ...]
    rewrites: tuple[Rewrite, ...] = ()

    @property
    def text(self) -> str:
        """Its schedules, which name it among the candidates of a kernel."""
        return "\n".join(str(chosen) for _, chosen, *_ in self.kernels)

    def after(self, *rewrites: Rewrite) -> Candidate:
        """The same where other rewrites came first; those that changed nothing are left out."""
        return Candidate(self.kernels, (*(r for r in rewrites if r[2] != (r[1],)), *self.rewrites))


def joined(parts: Iterable[Candidate]) -> Candidate:
    """What takes the places of several kernels that run one after the other."""
    every = tuple(parts)
    return Candidate(tuple(x for c in every for x in c.kernels), tuple(x for c in every for x in c.rewrites))
