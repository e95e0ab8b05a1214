"""Schedules: how the axes of a kernel are factored and bound to the levels of a machine (ADR 004).

A schedule is plain data beside a kernel, which it never changes. Its text is Python's syntax, parsed and never run:

    with schedule("linear", target="sm_80"):
        a0 = grid(32, order=grouped(8)) * block(128)
        r0 = time(128, ring=4) * block(32)
        with site("acc0", on="mma.m16n8k16.f32.bf16"):
            a0 = warp(2) * reg(4) * inst.m(16)
            x = smem(by="cp.async", swizzle=64)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from terrazzo.errors import UserError, about

KERNEL_LEVELS = ("grid", "cluster", "time", "block")
SITE_LEVELS = ("warpgroup", "warp", "lane", "reg", "inst.m", "inst.n", "inst.k")
POWERS_OF_TWO = ("warp", "lane", "inst.m", "inst.k")
DIRECTIVES = ("persistent", "resident", "roles")
WARPS_IN_A_GROUP = 4


@dataclass(frozen=True)
class Word:
    """A name with arguments: `grouped(8)`, `longest_first`."""

    name: str
    args: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.args))})" if self.args else self.name


Value: TypeAlias = "int | bool | str | Word | tuple[Any, ...]"
Options: TypeAlias = tuple[tuple[str, Value], ...]


@dataclass(frozen=True)
class Factor:
    """A factor of an axis, bound to a level."""

    level: str
    size: int
    options: Options = ()

    def __str__(self) -> str:
        return f"{self.level}({', '.join([str(self.size), *show_options(self.options)])})"


@dataclass(frozen=True)
class Like:
    """The binding of the same axis in another site, or, as in "acc0.r0", of another axis there."""

    site: str

    def __str__(self) -> str:
        return f'like("{self.site}")'


Binding: TypeAlias = "tuple[Factor, ...] | Like"


@dataclass(frozen=True)
class Operand:
    """Where a load is held: "smem" or "reg", and how it gets there."""

    place: str
    options: Options = ()

    def __str__(self) -> str:
        return f"{self.place}({', '.join(show_options(self.options))})"


@dataclass(frozen=True)
class Site:
    """How sites (reductions by accumulator, stores by buffer) divide a block's part of the axes among its threads."""

    names: tuple[str, ...]
    axes: tuple[tuple[str, Binding], ...]
    operands: tuple[tuple[str, Operand], ...] = ()
    instruction: str | None = None

    def abreast(self, columns: int) -> int:
        """How many of its sums share an instruction of so many columns: each is bound to so many-th of them."""
        bound = [f.size for _, b in self.axes if not isinstance(b, Like) for f in b if f.level == "inst.n"]
        return max(1, columns // math.prod(bound)) if bound and len(self.names) > 1 else 1


@dataclass(frozen=True)
class Named:
    """A word of a schedule, by where it stands: its site ("" for the kernel's lines), the name its line begins with,
    and its text there.
    """

    site: str
    line: str
    word: str

    def __str__(self) -> str:
        where = f"{self.site}: " if self.site else ""
        return f"{where}{self.word}" if self.word.startswith(self.line) else f"{where}{self.line} = ... {self.word} ..."


@dataclass(frozen=True)
class Schedule:
    """The whole of it. `directives` are those of `DIRECTIVES`, with their arguments."""

    kernel: str
    target: str
    axes: tuple[tuple[str, Binding], ...]
    operands: tuple[tuple[str, Operand], ...] = ()
    directives: tuple[tuple[str, tuple[Value, ...], Options], ...] = ()
    sites: tuple[Site, ...] = ()
    origin: Schedule | None = field(default=None, compare=False, repr=False)
    """The schedule this one was made of, where it is not as somebody wrote it."""

    def part(self, site: str = "", line: str = "", word: str = "") -> tuple[Any, ...]:
        """What an error is about that arose from a word, a line, a site or the whole of a schedule: from the inside
        out.
        """
        whole = self.origin or self
        around = Named(site, line, word), Named(site, line, ""), Named(site, "", "")
        return (*((whole, x) for x in around), whole)

    def directive(self, name: str) -> tuple[Value, ...]:
        """The arguments of a directive; none where it is not given."""
        return next((args for given, args, _ in self.directives if given == name), ())

    def options(self, name: str) -> Options:
        """The options of a directive; none where it is not given."""
        return next((options for given, _, options in self.directives if given == name), ())

    @cached_property
    def words(self) -> tuple[Named, ...]:
        """Every word that must be read for the kernel to be what the schedule says: all but the factors of axes."""
        found = [Named("", name, name) for name, _, _ in self.directives]
        found += [Named("", name, x) for name, _, options in self.directives for x in show_options(options)]
        for site, axes, operands in (
            ("", self.axes, self.operands), *((s.names[0], s.axes, s.operands) for s in self.sites)
        ):  # fmt: skip
            found += [Named(site, a, x) for a, b in axes for f in _factors(b) for x in show_options(f.options)]
            found += [Named(site, name, operand.place) for name, operand in operands]
            found += [Named(site, name, x) for name, operand in operands for x in show_options(operand.options)]
        found += [Named(s.names[0], "on", s.instruction) for s in self.sites if s.instruction]
        return tuple(found)

    def locate(self, word: Named) -> str:
        """The line of the schedule's text that a word stands in, with its number and a caret."""
        inside, lines = "", str(self).splitlines()
        for number, line in enumerate(lines, 1):
            if line.strip().startswith("with site("):
                inside = line.split('"')[1]
            at = line.find(word.word)
            starts = f"{word.line} ", f"{word.line}(", "with site"
            if inside == word.site and at >= 0 and line.strip().startswith(starts):
                return f"line {number}, column {at + 1}\n    {line}\n    {' ' * at}^"
        return "line 1"

    def binding(self, site: Site | None, axis: str, around: tuple[Any, ...] = ()) -> tuple[Factor, ...]:
        """All factors of an axis as a site sees it: the kernel's down to its block, which the site divides.

        `around` are the sites and axes that are like this one.
        """
        outer: tuple[Factor, ...] = _of(self.axes, axis)
        inner: Binding = _of(site.axes, axis) if site else ()
        if isinstance(inner, Like):
            name, _, other = inner.site.partition(".")
            source = next((s for s in self.sites if any(n.partition(".")[0] == name for n in s.names)), None)
            if source is None or source is site:
                raise UserError(f"like({inner.site!r}): there is no other site of that name")
            if (source, other or axis) in around:
                raise UserError(f"like({inner.site!r}): that is like this one, and nobody says how {axis} is bound")
            return self.binding(source, other or axis, (*around, (site, axis)))
        if not inner:
            return outer
        return (*(f for f in outer if f.level != "block"), *inner)

    def alike(self, site: Site) -> Site | None:
        """The site whose threads a site's are, if all its axes are like those of one."""
        names = {b.site.partition(".")[0] if isinstance(b, Like) else "" for _, b in site.axes}
        if len(names) != 1 or names == {""}:
            return None
        (name,) = names
        return next(
            (s for s in self.sites if s is not site and any(n.partition(".")[0] == name for n in s.names)), None
        )

    def lines(self, site: Site | None) -> list[tuple[str, tuple[Factor, ...]]]:
        """What a site binds: the kernel's lines it leaves alone, then its own."""
        own = dict(site.axes) if site else {}
        return [*((a, _factors(b)) for a, b in self.axes if a not in own), *((a, self.binding(site, a)) for a in own)]

    def inner(self, factor: Factor, axis: str, site: Site | None) -> int:
        """The place value of a factor in the number of its level. What axes have outside of the site, where all sites
        must see it alike, counts fastest; then the axes' innermost factors, of these the later axes'. Where all axes
        are like another site's, threads are numbered as there.
        """
        if site is not None and (other := self.alike(site)) is not None:
            like = dict(site.axes).get(axis)
            name = like.site.partition(".")[2] if isinstance(like, Like) else ""
            return self.inner(factor, name or axis, other)
        ranked = []
        own = dict(site.axes) if site else {}
        for n, (a, binding) in enumerate(self.lines(site)):
            same = [f for f in binding if f.level == factor.level]
            ranked += [(a in own, rank, -n, a, f) for rank, f in enumerate(reversed(same))]
        ranked.sort(key=lambda x: x[:3])
        mine = next(n for n, (*_, a, f) in enumerate(ranked) if f is factor and a == axis)
        return math.prod(f.size for *_, f in ranked[:mine])

    def check(self, axes: Mapping[str, int], own: Mapping[str, Mapping[str, int]]) -> None:
        """UserError, with the reason, unless this can be a schedule of a kernel with these axes and sites.

        `axes` has the extents of the kernel's axes, `own` for each site (reduction or store) those of the axes that are
        its alone.
        """
        for where, lines in (("", self.axes), *((s.names[0], s.axes) for s in self.sites)):
            for axis, binding in lines:
                with about(*self.part(where, axis)):
                    _sizes(axis, binding)
        everywhere = dict(axes)
        for name, extents in own.items():
            for axis, extent in extents.items():
                if everywhere.setdefault(axis, extent) != extent and axis in dict(self.axes):
                    with about(*self.part("", axis)):
                        raise UserError(
                            f"{axis} has extent {everywhere[axis]} elsewhere and {extent} in {name}: "
                            "bind it in the sites"
                        )
        for axis, outer in self.axes:
            with about(*self.part("", axis)):
                _levels(axis, outer, _extent(axis, everywhere))
        warps: dict[int, Site] = {}
        for site in self.sites:
            with about(*self.part(site.names[0])):
                for name in site.names:
                    if name.partition(".")[0] not in own:
                        raise UserError(f"the kernel has no site {name}; it has {', '.join(own)}")
                visible = {**axes, **own[site.names[0].partition(".")[0]]}
                for axis, binding in site.axes:
                    with about(*self.part(site.names[0], axis)):
                        self._divides(site, axis, binding, _extent(axis, visible))
                if self.alike(site) is None:
                    warps.setdefault(self._threads(site), site)
        with about(*self.part()):
            self._threads(None)
        warps.pop(0, None)
        if len(warps) > 1:
            with about(*self.part(list(warps.values())[1].names[0])):
                raise UserError(f"the sites disagree on the number of warps: {', '.join(map(str, sorted(warps)))}")

    @property
    def together(self) -> bool:
        """Whether a thread takes steps for several points together."""
        return any(("jam", True) in f.options for _, binding in self.axes for f in _factors(binding))

    def _divides(self, site: Site, axis: str, binding: Binding, extent: int) -> None:
        """UserError unless a site can divide a block's part of an axis so."""
        if grid := [f for f in _factors(binding) if f.level == "grid"]:
            raise UserError(
                f"{site.names[0]}: {axis} = {_text(binding)}: {grid[0]} is for the kernel to bind, not for a site"
            )
        block = [f.size for f in _factors(_of(self.axes, axis)) if f.level == "block"]
        if block and not isinstance(binding, Like) and math.prod(f.size for f in binding) != block[0]:
            raise UserError(f"{site.names[0]}: {axis} divides into {_text(binding)}, but its block has {block[0]}")
        _levels(axis, self.binding(site, axis), extent, afresh=self.together)

    def _threads(self, site: Site | None) -> int:
        """The warps a site, or the kernel by itself, uses; 0 where it binds none. Its lanes must be a warp's, or its
        instruction's.
        """
        used = [f for _, factors in self.lines(site) for f in factors]
        name, instruction = (site.names[0], site.instruction) if site else (self.kernel, None)
        if not any(f.level in SITE_LEVELS for f in used):
            return 0
        lanes = math.prod(f.size for f in used if f.level == "lane")
        if site and not instruction and any(f.level.startswith("inst") for _, b in site.axes for f in _factors(b)):
            raise UserError(f"{name} binds axes of an instruction and names none (on=...)")
        bound = any(f.level.startswith("inst") for f in used)
        if (lanes > 1 and bound) or lanes > 32 or (site and lanes not in (1, 32)):
            raise UserError(f"{name}: {lanes} lanes; {'the instruction binds them' if bound else 'a warp has 32'}")
        groups = math.prod(f.size for f in used if f.level == "warpgroup")
        alone = math.prod(f.size for f in used if f.level == "warp")
        return alone * (groups * WARPS_IN_A_GROUP if any(f.level == "warpgroup" for f in used) else 1)

    def __str__(self) -> str:
        lines = [f'with schedule("{self.kernel}", target="{self.target}"):']
        lines += [f"    {axis} = {_text(b)}" for axis, b in self.axes]
        lines += [f"    {name} = {operand}" for name, operand in self.operands]
        lines += [
            f"    {name}({', '.join([*map(show_value, args), *show_options(options)])})"
            for name, args, options in self.directives
        ]
        for site in self.sites:
            on = [f'on="{site.instruction}"'] if site.instruction else []
            lines.append(f"    with site({', '.join([*(show_value(n) for n in site.names), *on])}):")
            lines += [f"        {axis} = {_text(b)}" for axis, b in site.axes]
            lines += [f"        {name} = {operand}" for name, operand in site.operands]
            lines += [] if site.axes or site.operands else ["        pass"]
        return "\n".join(lines if len(lines) > 1 else [*lines, "    pass"])


def _extent(axis: str, extents: Mapping[str, int]) -> int:
    if axis not in extents:
        raise UserError(f"there is no axis {axis} here; there are {', '.join(extents)}")
    return extents[axis]


def _of(pairs: tuple[tuple[str, Any], ...], name: str) -> Any:
    return next((value for other, value in reversed(pairs) if other == name), ())


def _factors(binding: Binding) -> tuple[Factor, ...]:
    return () if isinstance(binding, Like) else binding


def _sizes(axis: str, binding: Binding) -> None:
    for f in _factors(binding):
        if f.size < 1 or (f.level in POWERS_OF_TWO and f.size & f.size - 1):
            raise UserError(f"{axis}: {f} must be {'a power of two' if f.size > 0 else 'at least 1'}")


def _levels(axis: str, binding: Binding, extent: int, afresh: bool = False) -> None:
    """The kernel's levels come first and in order, and the product just covers the extent. There are several of time
    where reductions over the inner ones start `afresh`.
    """
    factors = _factors(binding)
    outer = [KERNEL_LEVELS.index(f.level) for f in factors if f.level in KERNEL_LEVELS]
    inside = [f.level for f in factors[len(outer) :]]
    time = KERNEL_LEVELS.index("time")
    once = [x for k, x in enumerate(outer) if not (afresh and x == time and time in outer[:k])]
    if once != sorted(set(outer)) or any(level in KERNEL_LEVELS for level in inside):
        raise UserError(f"{axis} = {_text(binding)}: {', '.join(KERNEL_LEVELS)} come first, in this order, each once")
    if not factors:
        return
    rest = math.prod(f.size for f in factors[1:])
    needed = max(-(-extent // rest), 1)
    if factors[0].size != needed:
        raise UserError(f"{axis} = {_text(binding)}: {factors[0].level} must be {needed} to cover {extent}")


def _text(binding: Binding) -> str:
    return str(binding) if isinstance(binding, Like) else " * ".join(map(str, binding))


def show_value(value: Value) -> str:
    """An option's value as schedules and plans print it."""
    if isinstance(value, tuple):
        return f"({', '.join(map(show_value, value))}{',' if len(value) == 1 else ''})"
    return f'"{value}"' if isinstance(value, str) else str(value)


def show_options(options: Options) -> list[str]:
    return [f"{name}={show_value(value)}" for name, value in options]
