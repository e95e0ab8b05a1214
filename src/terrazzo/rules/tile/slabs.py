"""How operands of products lie in shared memory: slabs of the parts that a step covers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from terrazzo.hw import tma
from terrazzo.hw.products import matrix, warps
from terrazzo.ir.address import coefficient, divides, flatten
from terrazzo.ir.concatenated import concatenated, loaded
from terrazzo.ir.contraction import operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import IntExpr, Var, at_least
from terrazzo.ir.node import Node, substitute
from terrazzo.ir.plan import Order, Plan, Product, Ring, Stream
from terrazzo.ir.schedule import Named, Word
from terrazzo.ir.sites import called, loads
from terrazzo.ir.types import Type
from terrazzo.rewrite.rule import need, rule
from terrazzo.rules.access import WIDEST, box, wide
from terrazzo.rules.swizzles import swizzled
from terrazzo.rules.tile.draft import Draft, axis_name, unused
from terrazzo.rules.tile.products import CONVERTED
from terrazzo.rules.tile.reach import ends_early
from terrazzo.rules.tile.rings import (
    axis_called,
    brought,
    loops_of,
    operand_text,
    ring_of,
    slab_sizes,
    steps,
    twins,
)
from terrazzo.rules.tile.spans import span, spanned
from terrazzo.rules.transports import TRANSPORTS


@rule(keys=(Plan,))
def lay_out_operands(plan: Plan, draft: Draft) -> Plan | None:
    """A slab has the part of every axis that a step covers, the contiguous one last; how much is moved at once follows
    from where it lies.
    """
    if plan.all(Stream) or not plan.all(Ring):
        return None
    lines: dict[Node, Stream] = {}
    read: list[Named] = []
    same = twins(plan, draft)
    for p in plan.all(Product):
        site = draft.site(p.sites[0])
        rings = [plan.named(r) for r in p.rings]
        for x in brought(draft, p):
            if x in same:
                lines[same[x]] = Slab(draft, plan, p, plan.named(lines[same[x]].ring), x).with_twin(lines[same[x]])
                read += draft.read(site, called(x))
                continue
            over = loops_of(draft, plan.all(Product), x)
            ring = ring_of(draft, p, x, [r for r in rings if r.over == over])
            name = called(x) + "_s"
            taken = [s.name for s in lines.values()]
            name = unused(name, taken)
            if x not in lines:
                slab = Slab(draft, plan, p, ring, x)
                first = next((y for y in beside_it(draft, p, x) if y in lines), None)
                lines[x] = slab.stream(name) if first is None else slab.behind(name, lines[first])
            held = draft.held(site, called(x))
            words = [held.place, "by", "swizzle", "pad", "along", "over", "slots"]
            words += ["multicast"] if lines[x].multicast > 1 else []
            where = site if site and called(x) in dict(site.operands) else None
            if held.place == "smem" or where is not None:
                read += draft.read(where, called(x), *words)
    return plan.plus(*lines.values(), read=read)


def beside_it(draft: Draft, p: Product, x: Node) -> list[Node]:
    """The second factors of a product that share columns of an instruction with one of them, in order; none where
    nothing is shared, or this is no such factor.
    """
    if draft.abreast(draft.site(p.sites[0])) == 1:
        return []
    n = axis_called(draft, p.n)
    every = [operand(f) for name in p.sites for pair in draft.products[name].terms for f in pair if n in f.free]
    return every if x in every else []


LIES = ("vector", "swizzle", "pad", "panel", "multicast")
"""The fields of a stream that say how its slab lies, besides its axes."""


class Slab:
    """An operand of a product as it may lie in shared memory."""

    def __init__(self, draft: Draft, plan: Plan, product: Product, ring: Ring, term: Node) -> None:
        self.draft, self.plan, self.product, self.ring, self.term = draft, plan, product, ring, term
        self.site = draft.site(product.sites[0])
        self.name, self.by = called(term), TRANSPORTS[ring.by]
        self.options: dict[str, Any] = dict(draft.held(self.site, self.name).options)
        self.instruction = matrix(product.on)
        self.span = span(draft, term)

    @property
    def sizes(self) -> dict[Any, int]:
        """Its axes, and how much it has of each."""
        return slab_sizes(self.draft, self.product, self.term)

    def stream(self, name: str) -> Stream:
        """How it lies there and is moved. Declines, with the reason, where it cannot be."""
        sizes = self.sizes
        need(sizes, f"{self.name}: a step of the tile needs one element of it, which is no slab")
        axes = list(sizes)
        memory = self.memory(axes)
        asked = self.options.get("along", axis_name(memory))
        if asked not in map(axis_name, axes):
            found = ", ".join(map(axis_name, axes))
            why = f"{self.name}: its rows cannot run along {asked}: it has {found} in a step"
            raise self.draft.fail(why, *self.draft.line(self.name))
        along = next(a for a in axes if axis_name(a) == asked)
        axes.sort(key=lambda a: a is along)
        words = tuple(Word(axis_name(a), (sizes[a],)) for a in axes)
        swizzle, pad = self.draft.spread(self.name, self.options)
        swizzle = self.swizzle(sizes, along) if swizzle is None else swizzle
        panel, cast = self.panel(axes, sizes, swizzle), self.cast(axes, bool(self.options.get("multicast")))
        vector = 0
        if not self.by.boxes:
            most = WIDEST // self.term.dtype.size  # type: ignore[attr-defined]
            vector = next(v for v in (16, 8, 4, 2, 1) if v <= most and self.fits(axes, sizes, memory, pad, v))
            need(not (why := self.by.refuses(self.term, vector)), f"{self.name}: {why}")
        text, along = operand_text(self.term), axis_name(memory)
        plain = self.by.boxes and isinstance(self.term, l.Load)
        own = self.draft.beyond(sizes, self.site)
        boxes = box(self.term, sizes, None, self.draft.kernel.axes, own) if plain else ""  # type: ignore[arg-type]
        by_axes = not isinstance(boxes, str) and boxes.by_axes
        line = Stream(name, text, self.ring.name, words, along, vector, swizzle, pad, panel, cast, by_axes)
        self.aligned(line, axes, sizes)
        if self.by.boxes:
            self.box(line, axes, sizes)
        return line

    def with_twin(self, line: Stream) -> Stream:
        """A stream whose slab this operand is too. Declines where it would lie otherwise."""
        mine = self.stream(line.name)
        lies = (*(w.args for w in mine.axes), *(getattr(mine, f) for f in LIES))
        its = (*(w.args for w in line.axes), *(getattr(line, f) for f in LIES))
        need(lies == its, f"{self.name}: two products take the same slab of it, and it would lie otherwise for one")
        fields = {f: getattr(line, f) for f in line._fields}
        return Stream(**{**fields, "also": (*line.also, mine.operand)})

    def behind(self, name: str, line: Stream) -> Stream:
        """A stream whose slab lies behind another one's, as more columns. Declines where it would lie otherwise."""
        mine = self.stream(name)
        lies = (*mine.axes, *(getattr(mine, f) for f in LIES))
        need(
            lies == (*line.axes, *(getattr(line, f) for f in LIES)), f"{name}: it would lie otherwise than {line.name}"
        )
        along = mine.axes[-1].name == self.product.n
        need(not along or mine.panel, f"{name}: its rows run along columns, and are no panels that others lie behind")
        return Stream(**{**{f: getattr(mine, f) for f in mine._fields}, "behind": line.name})

    def memory(self, axes: Sequence[Any]) -> Any:
        """The axis along which global memory is contiguous, or else the last."""
        found = [self.term] if isinstance(self.term, l.Load) else loads(self.term)  # not what says where it is
        offset = flatten(found[0].index, found[0].buffer.type.element_strides) if found else 0
        return next((a for a in axes if coefficient(offset, a) == 1), axes[-1])

    def aligned(self, line: Stream, axes: Sequence[Any], sizes: dict[Any, int]) -> None:
        """UserError where ldmatrix cannot read the slab's rows."""
        if self.instruction is not None and self.span.halo(axes[-1]):
            name = axis_name(axes[-1])
            raise self.draft.fail(
                f"{line.name}: its rows run along {name}, along which a loop moves them, and ldmatrix reads rows that "
                f"begin at multiples of {WIDEST} bytes: let them run along another axis (along=...)"
            )
        rows = sizes[axes[-1]] + line.pad
        apart = rows * self.term.dtype.size % WIDEST  # type: ignore[attr-defined]
        if self.instruction is not None and warps(self.instruction) == 1 and apart:
            raise self.draft.fail(
                f"{line.name}: its rows lie {rows} elements apart, and ldmatrix reads pieces of {WIDEST} bytes"
            )

    def swizzle(self, sizes: dict[Any, int], along: Any) -> int:
        """What matrices of such rows want. What threads read number by number needs none, and a box that ends where no
        swizzle repeats, as one with a halo may, has none where it may lie plainly.
        """
        if self.instruction is None or len(sizes) == 1:
            return 0
        size: int = self.term.dtype.size  # type: ignore[attr-defined]
        found = swizzled(sizes[along] * size)
        ragged = self.by.boxes and math.prod(sizes.values()) * size % max(found * 8, 128)
        return 0 if ragged and warps(self.instruction) == 1 else found

    def panel(self, axes: Sequence[Any], sizes: dict[Any, int], swizzle: int) -> int:
        """How wide the panels of a slab are whose rows are wider than its swizzle, along k, m or n: as wide as that."""
        if len(axes) == 1:
            return 0  # a vector, which threads read
        return panels(self.name, self.term.dtype.size, self.product, axes, sizes, swizzle)  # type: ignore[attr-defined]

    def cast(self, axes: Sequence[Any], wanted: bool) -> int:
        """To how many blocks of the cluster a box goes: all, where the operand misses the axis they divide."""
        if not wanted:
            return 1
        need(self.plan.all(Order), f"{self.name}: nobody walks the tiles, so it is not known who shares it")
        order = self.plan.one(Order)
        need(order.cluster_size > 1, f"{self.name}: there is no cluster to multicast to")
        need(
            axis_called(self.draft, order.cluster[0].name) not in self.term.free,
            f"{self.name}: every block of the cluster has its own part of it",
        )
        need(self.by.boxes, f"{self.name}: only TMA multicasts")
        made = self.product.a == CONVERTED
        need(
            not made, f"{self.name}: slots that threads read themselves are freed in their own block, with no multicast"
        )
        need(
            self.ring.producer != self.ring.consumer and warps(self.instruction) > 1,
            f"{self.name}: who multicasts must know that slots of other blocks are free: roles and wgmma say so",
        )
        need(
            self.draft.length(axes[0], self.site) % (8 * order.cluster_size) == 0,
            f"{self.name}: {axis_name(axes[0])} does not divide among the blocks of the cluster",
        )
        return order.cluster_size

    def coordinates(self, axes: Sequence[Any], sizes: dict[Any, int], at: Sequence[IntExpr]) -> dict[Any, Any]:
        """The axes' values at an element of the slab, whichever tile and step it is of."""
        env: dict[Any, Any] = {}
        inside = spanned(self.draft)
        for a in {*self.draft.kernel.axes, *(x for x, _ in steps(self.draft)), *inside, *axes}:
            length = self.draft.length(a, self.site)
            count = 1 if a in inside else -(-a.extent // length)
            first = Var(f"${axis_name(a)}", count) * length if count > 1 else 0
            env[a] = first + (at[axes.index(a)] if a in axes else 0)
        return env

    def fits(self, axes: list[Any], sizes: dict[Any, int], memory: Any, pad: int, width: int) -> bool:
        """Whether a thread may bring in `width` elements along the last axis at once."""
        last = axes[-1]
        if width == 1:
            return True
        if not isinstance(self.term, l.Load) or memory is not last or sizes[last] % width:
            return False
        if (sizes[last] + pad) % width:
            return False
        q, j = Var("$q", max(sizes[last] // width, 1)), Var("$j", width)
        env = self.coordinates(
            axes, sizes, [*(Var(f"$s{k}", sizes[a]) for k, a in enumerate(axes[:-1])), q * width + j]
        )
        found: l.Load = substitute(self.term, env)
        extent = last.extent + self.span.halo(last)
        uniform = at_least(extent - 1 - env[last], 0) or divides(width, extent)
        return uniform and wide(found, j, width)

    def loads(self, name: str) -> list[l.Load]:
        """The operand as a load, or as several that are one after the other. Declines, where it is more than that."""
        found = loaded(self.term)
        need(found, f"{name}: TMA brings in plain loads only")
        return found

    def box(self, line: Stream, axes: list[Any], sizes: dict[Any, int]) -> None:
        """Declines, with the reason, where the slab is no box of the tensor."""
        if line.pad:
            raise self.draft.fail(f"{line.name}: TMA leaves no room between rows: a slab has a pad or comes by TMA")
        why = self.no_box(axes, sizes, line.by_axes, line.panel, line.swizzle)
        need(not why, f"{line.name}: {why}")

    def no_box(
        self, axes: list[Any], sizes: dict[Any, int], by_axes: bool | None, panel: int = 0, swizzle: int = 0
    ) -> str:
        """Why the slab is no box of the tensor, or of those that are one after the other, or nothing."""
        every, pieces = self.loads(self.name), concatenated(self.term)
        if any(x.axis not in sizes or x.first % sizes[x.axis] for x in pieces):
            return "a tensor ends within a step, and another begins"
        free = [(*self.draft.kernel.axes, *(x.axis for x in pieces[:1])) for _ in every[:-1]]  # the next begins there
        free += [self.draft.kernel.axes]
        whys = (self.box_of(x, axes, sizes, by_axes, panel, swizzle, f) for x, f in zip(every, free, strict=True))
        return next(filter(None, whys), "")

    def box_of(
        self,
        term: l.Load,
        axes: list[Any],
        sizes: dict[Any, int],
        by_axes: bool | None,
        panel: int,
        swizzle: int,
        free: Sequence[Any],
    ) -> str:
        """Why the slab is no box of a tensor, or nothing."""
        found = box(term, sizes, by_axes, free, self.draft.beyond(sizes, self.site))
        if isinstance(found, str):
            return found
        end = ends_early(self.draft)  # beyond which nothing is brought
        if any(e not in found.place.bounds for e in term.inside if end is None or e is not end.inside):
            return "TMA brings in zeros for what lies outside the tensor, and this load has zeros elsewhere too"
        if [a for a in found.along if a is not None] != axes:
            return "the slab's dimensions are not in the order of the tensor's, which TMA keeps"
        sides = (*found.sides[:-1], panel or found.sides[-1])
        if why := tma.problem(found.place.tensor, sides, swizzle):
            return f"TMA: {why}"
        size = math.prod(sizes.values()) * term.dtype.size
        if size % max(swizzle * 8, 128):
            return f"a slab of {size} bytes does not end where the swizzle of {swizzle} bytes repeats"
        begins: IntExpr = substitute(found.place.index[-1], self.coordinates(axes, sizes, [0] * len(axes)))
        aligned = divides(WIDEST // term.dtype.size, begins)
        return "" if aligned else "its boxes do not begin at multiples of 16 bytes"

    @property
    def no_vector(self) -> str:
        """Why it cannot come as one more box with other slabs of the ring, or nothing."""
        sizes = self.sizes
        return self.no_box([*sizes], sizes, None) if len(sizes) == 1 else "it is no vector"


def panels(name: str, size: int, product: Product, axes: Sequence[Any], sizes: dict[Any, int], swizzle: int) -> int:
    """How wide the panels of a product's slab are, whose elements have so many bytes; 0 where it has none."""
    width, instruction, rows = swizzle // size, matrix(product.on), sizes[axes[-1]]
    if warps(instruction) == 1:
        wider = instruction is not None and swizzle and rows > width
        return width if wider and rows % width == 0 else 0
    need(swizzle in (32, 64, 128), f"{name}: wgmma reads slabs swizzled by 32, 64 or 128 bytes")
    extents = instruction.shape  # type: ignore[union-attr]
    shape = dict(zip((product.m, product.n), extents, strict=False))
    along = axis_name(axes[-1])
    need(along not in product.box, f"{name}: its rows are a box, and run along {along}, one of its axes")
    each = shape.get(along, width)
    need(
        each % width == 0 or each >= rows,
        f"{name}: every product takes {each} of {along}, which begin inside a panel of {width}",
    )
    need(rows % width == 0, f"{name}: rows of {rows} are no panels of {swizzle} bytes")
    return width if rows > width else 0


def slab_type(stream: Stream, dtype: Any, slots: int) -> Type:
    """The type of a stream's place in shared memory: its slots, its panels, its axes."""
    sizes = [w.args[0] for w in stream.axes]
    if stream.panel:
        return Type(dtype, (slots, sizes[-1] // stream.panel, *sizes[:-1], stream.panel))
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step = step * size + (stream.pad if len(strides) == 1 else 0)
    return Type(dtype, (slots, *sizes), (step, *reversed(strides)))


RULES = (lay_out_operands,)
