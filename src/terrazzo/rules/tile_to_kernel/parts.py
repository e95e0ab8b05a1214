"""How the sites of a tile divide its axes among the threads of a team."""

from __future__ import annotations

from typing import Any

from terrazzo.rules.tile.agents import LOAD
from terrazzo.rules.tile.digits import Bindings, Digit
from terrazzo.rules.tile.draft import Draft, axis_name
from terrazzo.rules.tile_to_kernel.copies import Part, Steps


class Parts:
    """The block's parts of axes, as sites divide them. There is one for each, since its digits are loops' variables."""

    def __init__(self, draft: Draft, bindings: Bindings, steps: Steps) -> None:
        self.draft, self.bindings, self.steps = draft, bindings, steps
        self.known: dict[Any, Part] = {}

    def __call__(self, axis: Any, site: Any) -> Part:
        """The block's part of an axis, as a site divides it."""
        if (key := (axis, site.names)) not in self.known:
            self.known[key] = self._part(axis, site)
        return self.known[key]

    def _part(self, axis: Any, site: Any) -> Part:
        outer = ("grid", "cluster", "time")
        if axis in self.steps.depth and axis in self._own_axes(site):
            return Part(axis, 0, self.draft.length(axis, site), ())
        base, length = self.bindings.base(axis_name(axis), site), self.draft.length(axis, site)
        if self.bindings.agent.name == LOAD:
            return Part(axis, base, length, ())
        digits = self.bindings.digits(axis_name(axis), site, axis.extent, whole=True)
        return Part(axis, base, length, tuple(d for d in digits if d.level not in outer))

    def _own_axes(self, site: Any) -> tuple[Any, ...]:
        """The axes that a site's contractions reduce over."""
        return next(c.reduce.axes for name, c in self.draft.products.items() if name in site.names)

    def inner(self, axis: Any, site: Any, piece: int = 0, pieces: int = 1) -> tuple[Digit, ...]:
        """The digits of a reduce axis inside a step, or a piece of it: the loop over instructions is a part then."""
        found = []
        stride = 1
        for f in reversed(self.draft.binding(axis, site)):
            if f.level == "reg":
                size = f.size // pieces if f.size > 1 else 1
                found.append(Digit("reg", size, self.bindings.loop_variable("k", size), stride))
                if size < f.size:
                    found.append(Digit("piece", pieces, piece, stride * size))
            elif f.level in ("lane", "warp", "warpgroup") and f.size > 1:
                inner = self.bindings.schedule.inner(f, axis_name(axis), site)
                number = self.bindings.number(f.level, site)
                found.append(Digit(f.level, f.size, number // inner % f.size, stride, inner))
            if f.level not in ("grid", "cluster", "time", "block"):
                stride *= f.size
        return tuple(reversed(found))
