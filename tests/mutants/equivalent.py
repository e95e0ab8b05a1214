"""Mutants that survive because they are right: they compute the same, and order the same."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Equivalent:
    """Mutants of a kernel ("" for all) by an operator whose change contains a text, and why none of them is wrong."""

    kernel: str
    operator: str
    change: str
    reason: str

    def covers(self, kernel: str, operator: str, change: str) -> bool:
        return self.kernel in ("", kernel) and self.operator == operator and self.change in change


EQUIVALENT: tuple[Equivalent, ...] = ()
