"""Products in float32 as sums of products of bfloat16, for tensor cores (ADR 009): what the parts of a number are says
`number_parts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from terrazzo.ir.contraction import Contraction, contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Bound, Loaded, Var
from terrazzo.ir.node import Node, substitute, topological
from terrazzo.ir.sites import product
from terrazzo.ir.types import Type, f32
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.definitions import unused
from terrazzo.rules.loop.precision import one_part
from terrazzo.rules.loop.precision.factors import (
    along_channels,
    along_sums,
    is_rearranged,
    is_window,
    made_inside,
    multiplied,
    points_of,
    sides,
    summed,
    sums_outside,
)
from terrazzo.rules.loop.precision.halved import halved
from terrazzo.rules.loop.precision.number_parts import EXACT, SCALE, few_parts, laid_out, order_of, parts
from terrazzo.rules.loop.precision.peaks import peaked
from terrazzo.rules.loop.precision.scaled_parts import Halves, why_not
from terrazzo.rules.loop_to_tile.chains.chain import chain
from terrazzo.rules.loop_to_tile.walked.threads import step

PASS = "parts"
RULE = "into_parts"
EVERY_DIGIT = 3
"""Parts in bfloat16 that have all digits of float32: who asks for so many may be given two in float16."""
IN_TF32 = 2
"""Parts in bfloat16 that have more digits than TF32."""
LITTLE = 2 << 20
"""Bytes that a kernel writes up to which it takes hardly longer than its launch."""

Gain = Callable[[Sequence[l.Kernel], Sequence[l.Kernel], float], tuple[float, str]]
"""What is gained by kernels in place of others, if it is more than so much, or why they are not worth having."""
Refused = Callable[[l.Kernel, int], str]
"""Why a kernel is not worth having as products of so many parts, whatever it becomes; or nothing."""


def into_parts(
    program: l.Program,
    log: Log,
    count: int,
    gain: Gain,
    refused: Refused = lambda kernel, count: "",
    constant: Collection[l.Buffer] = (),
    lean: Collection[l.Kernel] = (),
    any_way: bool = False,
) -> l.Program:
    """`program` with its products of float32 as `count` * (`count` + 1) / 2 products of bfloat16, in the way that gains
    most, or, of the `lean` ones, that stores least; or in `any_way` that gains. What is `refused` is not tried.

    Parts of a tensor are stored by a kernel of their own, once for all who multiply it; or by the kernel that makes
    it, which keeps it for those who need it whole. Those of one factor may be terms of the product, which makes them on
    their way (ADR 016). One launch stores the parts of several factors that are small and of one shape, unless one of
    them is `constant`: its parts are stored once, and those of others in every call.

    @loop
    def f(x: f32[4, 8]):
        with kernel('y', y=f32[4, 4]):
            for a0 in free(4):
                for a1 in free(4):
                    for r0 in reduce(8):
                        in0 = x[a0, r0]
                        in1 = x[a1, r0]
                        v0 = mul(in0, in1)
                        acc0 <- sum(v0)
                    y[a0, a1] = acc0
        return (y,)
    =>
    @loop
    def f(x: f32[4, 8]):
        with kernel('x_parts', x_1=bf16[4, 8], x_2=bf16[4, 8], x_3=bf16[4, 8]):
            for a0 in free(4):
                for a1 in free(8):
                    in0 = x[a0, a1]
                    v0 = abs(in0)
                    v1 = ge(v0, f32(1.152921504606847e+18))
                    v2 = eq(in0, f32(0.0))
                    v3 = lt(v0, f32(inf))
                    v4 = max(v0, f32(9.183549615799121e-41))
                    v5 = where(v3, v4, f32(1.0))
                    v6 = copysign(v5, in0)
                    v7 = where(v2, in0, v6)
                    v8 = bf16(v7)
                    v9 = f32(v8)
                    v10 = where(v1, v7, v9)
                    v11 = cut_bf16(v10)
                    v12 = f32(v11)
                    v13 = sub(in0, v12)
                    v14 = mul(v13, f32(64.0))
                    v15 = bf16(v14)
                    v16 = f32(v15)
                    v17 = where(v1, v14, v16)
                    v18 = where(v3, v17, f32(0.0))
                    v19 = cut_bf16(v18)
                    v20 = f32(v19)
                    v21 = sub(v14, v20)
                    v22 = mul(v21, f32(64.0))
                    v23 = bf16(v22)
                    x_1[a0, a1] = v11
                    x_2[a0, a1] = v19
                    x_3[a0, a1] = v23
        with kernel('y', y=f32[4, 4]):
            for a0 in free(4):
                for a1 in free(4):
                    for r0 in reduce(8):
                        in0 = x_3[a0, r0]
                        v0 = f32(in0)
                        in1 = x_1[a1, r0]
                        v1 = f32(in1)
                        v2 = mul(v0, v1)
                        in2 = x_2[a0, r0]
                        v3 = f32(in2)
                        in3 = x_2[a1, r0]
                        v4 = f32(in3)
                        v5 = mul(v3, v4)
                        v6 = add(v2, v5)
                        in4 = x_1[a0, r0]
                        v7 = f32(in4)
                        in5 = x_3[a1, r0]
                        v8 = f32(in5)
                        v9 = mul(v7, v8)
                        v10 = add(v6, v9)
                        v11 = mul(v10, f32(0.000244140625))
                        v12 = mul(v3, v1)
                        v13 = mul(v7, v4)
                        v14 = add(v12, v13)
                        v15 = mul(v14, f32(0.015625))
                        v16 = add(v11, v15)
                        v17 = mul(v7, v1)
                        v18 = add(v16, v17)
                        acc0 <- sum(v18)
                    y[a0, a1] = acc0
        return (y,)
    """
    work = _Parts(program, log, count, gain, refused, constant, lean, any_way)
    for kernel in [s for s in program.steps if isinstance(s, l.Kernel)]:
        work.kernel(kernel)
    return one_part.exact(l.Program(program.name, program.inputs, tuple(work.steps), program.results))


def parts_of(kernel: l.Kernel, count: int) -> tuple[l.Kernel, ...]:
    """A kernel by itself as products of parts, after those that store parts; alone where it has no products of
    float32.
    """
    alone = l.Program("alone", tuple(b for b in kernel.reads), (kernel,), kernel.writes)
    return into_parts(alone, Log(), count, lambda old, new, beaten: (0.0, "")).steps  # type: ignore[return-value]


@dataclass(frozen=True)
class _Way:
    """How the parts of a product's factors are made: those of operands that are `inside` on their way; two of each row,
    `scaled`, or a `single` one; and those of buffers that lie along another dimension than the buffer does, with that
    `inner` one. A last `resort` is there for products that have no other way.
    """

    inside: frozenset[Node] = frozenset()
    scaled: bool = False
    single: bool = False
    inner: Mapping[l.Buffer, int] = field(default_factory=dict)
    resort: bool = False


class _Parts:
    """The steps of a program on their way, and the parts that are in memory, by what they are of: a buffer, or a term
    and its axes.
    """

    def __init__(
        self,
        program: l.Program,
        log: Log,
        count: int,
        gain: Gain,
        refused: Refused,
        constant: Collection[l.Buffer],
        lean: Collection[l.Kernel],
        any_way: bool,
    ) -> None:
        self.program, self.log, self.most, self.gain, self.refused = program, log, count, gain, refused
        self.count, self.rough = count, False
        self.any_way = any_way
        self.constant, self.lean = frozenset(constant), frozenset(lean)
        self.makers: set[l.Kernel] = set()
        self.steps = list(program.steps)
        self.made: dict[Any, tuple[l.Buffer | None, ...]] = {}
        self.scale = SCALE
        self.names = {b.name for b in program.inputs} | {b.name for s in program.steps for b in s.writes}
        self.windows: frozenset[Node] = frozenset()
        self.way = _Way()
        self.halved: dict[tuple[l.Buffer, int], Halves] = {}
        self.single: dict[Any, one_part.Single] = {}

    def kernel(self, kernel: l.Kernel) -> None:
        """One kernel, where it multiplies numbers in float32. Parts are of whole tensors; or else, where it reads less,
        of what it reads, which begins elsewhere.
        """
        sums = [x for x in topological(kernel.stores) if isinstance(x, l.Reduce | l.Scan)]
        products = [c for r in sums if isinstance(r, l.Reduce) and (c := contraction(r)) is not None]
        both = chain(kernel) if products else None
        outside = sums_outside(both) if both is not None else []
        types = {x.dtype for c in (*products, *outside) for x in c.operands}  # type: ignore[attr-defined]
        whole = types == {f32} or (both is None and f32 in types and types <= {f32, *EXACT})
        if not whole or any(c.reduce.dtype is not f32 for c in (*products, *outside)):
            return
        products += outside
        self.scale = SCALE if both is None else 1.0
        self.rough = self.most == IN_TF32 or (self.most > IN_TF32 and all(c.in_tf32 for c in products))
        self.count = IN_TF32 if self.rough else self.most
        why = self.why_not(kernel, sums if both is None else (), products)
        why = why or self.refused(kernel, self.count)
        if not why:
            every = frozenset(x for c in products for x in c.operands if is_window(x) or is_rearranged(x))
            for some in dict.fromkeys((self.little(kernel, every), frozenset(), every)):
                self.windows = some
                if not (why := self.replace(kernel, products)):
                    break
            self.windows = frozenset()
        if why:
            self.log.add(Event(PASS, RULE, kernel.name, False, why))

    def replace(self, kernel: l.Kernel, products: Sequence[Contraction]) -> str:
        """Put products of parts in a kernel's place, in the way that gains most, or stores least, or say why not."""
        before, there = self.state(), set(self.steps)
        best: tuple[tuple[float, float], _Way, list[Any], list[Any], tuple[Any, ...]] | None = None
        first = ""
        for way in self.ways(kernel, products):
            if best is not None and (way.resort or self.any_way):
                break
            self.way = way
            self.become(map(copy, before))
            self.put(kernel, products)
            kept, new = set(self.steps), [s for s in self.steps if isinstance(s, l.Kernel) and s not in there]
            old = [s for s in before[0] if s not in kept]
            stored = sum(b.type.span for s in new for b in s.writes) if kernel in self.lean else 0
            beaten = best[0][1] if best is not None and best[0][0] == -stored else -math.inf
            gained, why = self.gain(old, new, beaten)
            first = first or why
            if not why and (best is None or (-stored, gained) > best[0]):
                best = (-stored, gained), way, old, new, self.state()
        if best is None:
            self.become(before)
            self.way = _Way()
            return first
        _, self.way, old, new, after = best
        self.become(after)
        terms = max(len(c.terms) for x in topological(new[-1].stores) if (c := summed(x)))
        what = f"a product of float32 is {terms} of {'float16' if self.way.scaled or self.way.single else 'bfloat16'}"
        for s in new:
            role = what if s.name == kernel.name else f"it stores parts of what {kernel.name} multiplies"
            self.log.add(Event(PASS, RULE, s.name, True, role))
        self.log.applied(PASS, RULE, kernel.name, old, new)
        self.way = _Way()
        return ""

    def ways(self, kernel: l.Kernel, products: Sequence[Contraction]) -> Iterator[_Way]:
        """How parts may be made: of both factors by kernels of their own, of one on its way, of rows that are scaled;
        and along another dimension than memory runs along. Where one part has all digits that are wanted, several are
        there for products that have no other way.
        """
        channels, sums = along_channels(kernel), along_sums(kernel)
        alone = self.rough and len(products) == 1 and not one_part.why_not(products[0])
        single = alone and one_part.in_memory(products[0])
        if alone:
            yield _Way(single=True)
            yield from (_Way(single=True, inner=inner) for inner in (channels, sums) if inner)
        yield _Way(resort=single)
        yield from (_Way(inside=side, resort=single) for side in sides(kernel))
        if self.count == EVERY_DIGIT and not why_not(product(kernel)):
            yield _Way(scaled=True)
        if channels:
            yield _Way(inner=channels, resort=single)
        if sums:
            yield _Way(inner=sums, resort=True)  # what may stay as it lies does

    def state(self) -> tuple[Any, ...]:
        """What becomes another as kernels are put in the place of others: the steps, and what is known of parts."""
        return self.steps, self.made, self.names, self.halved, self.single

    def become(self, state: Iterable[Any]) -> None:
        """Be as at another time."""
        self.steps, self.made, self.names, self.halved, self.single = state

    def put(self, kernel: l.Kernel, products: Sequence[Contraction]) -> None:
        """Put products of parts in a kernel's place."""
        for c in products:
            for x in () if self.way.scaled or self.way.single else c.operands:
                if x not in self.way.inside and not made_inside(x):
                    self.make(x, c, kernel)
        if self.way.single:
            product = self.one_part(kernel, *products)
        else:
            product = self.halves(kernel, *products) if self.way.scaled else self.multiplied(kernel, products)
        self.steps[self.steps.index(kernel)] = product
        self.forget()

    def little(self, kernel: l.Kernel, windows: Collection[Any]) -> frozenset[Node]:
        """Of what a kernel reads less of than there is, that of which it reads half at most, and nobody else multiplies
        any: such as the values among queries and keys that were turned.
        """
        read: dict[l.Buffer, int] = {}
        for x in (x for x in windows if is_window(x)):
            read[x.buffer] = read.get(x.buffer, 0) + points_of(x)
        few = {b for b, n in read.items() if 2 * n <= math.prod(b.type.static_shape) and not self.known(b)}
        others = (s for s in self.program.steps if isinstance(s, l.Kernel) and s is not kernel)
        few -= {b for s in others for b in few.intersection(s.reads) if any(map(summed, s.carried))}
        return frozenset(x for x in windows if x.buffer in few)

    def known(self, buffer: l.Buffer) -> bool:
        """Whether parts of the whole of a buffer are there."""
        return any(source is buffer for source, *_ in self.made)

    def why_not(self, kernel: l.Kernel, sums: Sequence[Any], products: Sequence[Contraction]) -> str:
        """Why a kernel stays as it is, whatever that costs; or nothing."""
        if len(products) < len(sums) or any(len(c.terms) > 1 for c in products):
            return "not all it sums are products of two factors"
        read = [x for c in products for x in c.operands if not made_inside(x)]
        if any(isinstance(x, Loaded | l.Index) for x in topological(read)):
            return "where a factor is read depends on data, or a factor on its place"
        if self.count == 3 and any(peaked(x, self.steps) for x in read):
            return "a factor has numbers added on its diagonal, beside which tensor cores cut off the others"
        later = self.steps[self.steps.index(kernel) :]
        for x in [x for x in topological(read) if isinstance(x, l.Load)]:
            if any(x.buffer in s.writes for s in later):
                return f"{x.buffer.name} is written again later"
        sizes = [*kernel.axes, *(a for c in products for a in c.reduce.axes)]
        if not all(isinstance(a.extent, int) and a.extent > 0 for a in sizes):
            return "an axis is empty, or its extent is not known"
        return ""

    # -- parts in memory -----------------------------------------------------------------------------------------------

    def key(self, x: Node, c: Contraction, reader: l.Kernel) -> tuple[Any, tuple[Any, ...], float, int | None, int]:
        """What parts of an operand are of: a buffer as it is, or a term at every point of axes; how they are scaled,
        the dimension along which they lie if not along that of the buffer, and how many they are.
        """
        if isinstance(x, l.Load) and (x not in self.windows or x.buffer in self.way.inner):
            return x.buffer, (), self.scale, self.way.inner.get(x.buffer), self.count
        own = (*reader.axes, *c.reduce.axes)
        steps = sorted((a for a in x.free if isinstance(a, Bound) and a not in own), key=lambda a: a.label)
        axes = [a for a in (*own, *steps) if a in x.free]
        if x in self.windows:  # they lie as what they are of does: a copy that turns it stores number by number
            axes.sort(key=lambda a: step(x, a) == 1)
        return x, tuple(axes), self.scale, None, self.count

    def make(self, x: Node, c: Contraction, reader: l.Kernel) -> None:
        """Have the parts of an operand stored, before who multiplies them."""
        source, free, _, inner, _ = key = self.key(x, c, reader)
        if key in self.made:
            return
        whole = source
        if isinstance(source, l.Buffer):
            kind, name = laid_out(source.type, inner=inner), source.name
            free = tuple(Var(f"${d}", e) for d, e in enumerate(source.type.static_shape))
            whole = l.Load(source, free)
        else:
            kind = laid_out(Type(f32, tuple(a.extent for a in free)))
            name = next((y.buffer.name for y in topological([x]) if isinstance(y, l.Load)), "factor")
        buffers = tuple(p and l.Buffer(self.fresh(f"{name}_{n}"), kind) for n, p in enumerate(self.split(x), 1))
        self.made[key] = buffers
        if isinstance(source, l.Buffer) and self.beside(source, buffers):
            return
        order = order_of(kind)
        axes = tuple(Var(f"a{order.index(d)}", a.extent) for d, a in enumerate(free))
        values = self.split(substitute(whole, dict(zip(free, axes, strict=True))))
        stores = tuple(l.Store(b, axes, v) for b, v in zip(buffers, values, strict=True) if b)
        maker = l.Kernel(self.fresh(f"{name}_parts"), tuple(axes[d] for d in order), stores, reader.source)
        at = self.steps.index(reader)
        if at and (both := self.in_one(self.steps[at - 1], maker)):
            self.steps[at - 1] = maker = both
        else:
            self.steps.insert(at, maker)
        self.makers.add(maker)

    def in_one(self, first: Any, second: l.Kernel) -> l.Kernel | None:
        """One kernel that stores the parts that two store, where these are small and of one shape, and either both or
        none of them are the same in every call.
        """
        if first not in self.makers or [a.extent for a in first.axes] != [a.extent for a in second.axes]:
            return None
        if sum(b.type.span for b in (*first.writes, *second.writes)) > LITTLE:
            return None
        if self.constant.issuperset(first.reads) != self.constant.issuperset(second.reads):
            return None
        axes = dict(zip(second.axes, first.axes, strict=True))
        stores = (*first.stores, *(substitute(s, axes) for s in second.stores))
        return l.Kernel(first.name, first.axes, stores, first.source)

    def split(self, x: Any) -> list[Any]:
        """The parts of a term: None for those that are always 0."""
        return parts(x, self.count, self.scale) if x.dtype is f32 else few_parts(x, self.count)

    def beside(self, buffer: l.Buffer, parts_of: Sequence[l.Buffer | None]) -> bool:
        """Have the kernel that stores a buffer store its parts too, where that is no product itself, and nobody else
        stores some of it.
        """
        makers = [s for s in self.steps if buffer in s.writes]
        if any(p and order_of(p.type) != order_of(buffer.type) for p in parts_of):  # who stores it walks memory
            return False
        if len(makers) != 1 or buffer in self.program.inputs or not isinstance(step := makers[0], l.Kernel):
            return False
        if any(isinstance(x, l.Reduce) and contraction(x) is not None for x in topological(step.stores)):
            return False
        store, *others = (s for s in step.stores if s.buffer is buffer)
        if others:  # each stores a part of it
            return False
        values = self.split(store.value)
        more = (l.Store(b, store.index, v) for b, v in zip(parts_of, values, strict=True) if b)
        self.steps[self.steps.index(step)] = l.Kernel(step.name, step.axes, (*step.stores, *more), step.source)
        return True

    def forget(self) -> None:
        """Kernels that store parts no longer store the whole, where nobody reads it any more."""
        whole = {source for source, free, *_ in self.made if not free}
        found = [(n, s) for n, s in enumerate(self.steps) if len(s.writes) > 1 and not whole.isdisjoint(s.writes)]
        read = {b for s in self.steps for b in s.reads} | set(self.program.results) if found else set()
        for n, s in found:
            gone = {b for b in s.writes if b in whole and b not in read}
            if isinstance(s, l.Kernel) and gone and gone < set(s.writes):
                kept = tuple(x for x in s.stores if x.buffer not in gone)
                self.steps[n] = l.Kernel(s.name, s.axes, kept, s.source)

    def halves(self, kernel: l.Kernel, c: Contraction) -> l.Kernel:
        """A kernel whose product is three of float16, after those that store the two parts of its factors."""
        makers, product = halved(kernel, c, self.halved, self.constant, self.fresh)
        at = self.steps.index(kernel)
        self.steps[at:at] = makers
        return product

    def one_part(self, kernel: l.Kernel, c: Contraction) -> l.Kernel:
        """A kernel whose product is one of float16, after those that store its factors so."""
        at, found = self.steps.index(kernel), {}
        for x in c.operands:
            load = x if isinstance(x, l.Load) else self.stored(x, c, kernel)
            at = self.steps.index(kernel)
            key = load.buffer, one_part.rows_of(load, c), self.way.inner.get(load.buffer)
            if key not in self.single:
                self.single[key], makers = one_part.makers(*key, kernel.source, self.fresh)
                self.steps[at:at] = makers
            found[x] = load, self.single[key]
        return one_part.multiplied(kernel, c, found)

    def stored(self, x: Node, c: Contraction, reader: l.Kernel) -> l.Load:
        """A factor that is computed on its way, in memory at every point of its axes, before who multiplies it."""
        term, free, *_ = key = (*self.key(x, c, reader), "whole")
        if key not in self.made:
            name = next((y.buffer.name for y in topological([x]) if isinstance(y, l.Load)), "factor")
            place = l.Buffer(self.fresh(f"{name}_whole"), Type(f32, tuple(a.extent for a in free)))
            axes = tuple(Var(f"a{n}", a.extent) for n, a in enumerate(free))
            value = substitute(term, dict(zip(free, axes, strict=True)))
            maker = l.Kernel(place.name, axes, (l.Store(place, axes, value),), reader.source)
            self.steps.insert(self.steps.index(reader), maker)
            self.made[key] = (place,)
        (buffer,) = self.made[key]
        assert buffer is not None
        return l.Load(buffer, free)

    def fresh(self, name: str) -> str:
        """A name that no buffer has."""
        found = unused(name, self.names)
        self.names.add(found)
        return found

    # -- their products ------------------------------------------------------------------------------------------------

    def multiplied(self, kernel: l.Kernel, products: Sequence[Contraction]) -> l.Kernel:
        """A kernel whose products are those of parts, inner ones first."""
        read = {x: tuple(self.loads(x, c, kernel)) for c in products for x in c.operands if not made_inside(x)}
        return multiplied(kernel, tuple(products), tuple(read.items()), self.count, self.scale)

    def loads(self, x: Node, c: Contraction, kernel: l.Kernel) -> Sequence[Node | None]:
        """What a factor is in the products of parts: loads of parts, or terms of the factor as it lies in memory."""
        if x in self.way.inside:
            return parts(x, self.count)
        source, free, *_ = key = self.key(x, c, kernel)
        if isinstance(x, l.Load) and isinstance(source, l.Buffer):
            return [b and l.Load(b, x.index, x.inside) for b in self.made[key]]
        return [b and l.Load(b, free) for b in self.made[key]]
