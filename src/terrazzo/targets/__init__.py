"""The targets, by name. Each is one record; nothing else lists them."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.errors import UserError
from terrazzo.rules.loop.cost import Rates


@dataclass(frozen=True)
class Target:
    """What programs are compiled for. `rates` price its kernels."""

    name: str
    description: str
    rates: Rates


TARGETS = {
    t.name: t
    for t in (
        Target("cpu", "C++ with OpenMP, compiled by this machine's compiler", Rates()),
        Target("interpreter", "numpy, on any machine, slowly", Rates()),
    )
}


def target(name: str) -> Target:
    """The target called `name`."""
    if name not in TARGETS:
        raise UserError(f"unknown target {name!r}; known: {', '.join(TARGETS)}")
    return TARGETS[name]
