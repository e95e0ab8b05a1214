"""A product that others only multiply is computed by them again, and never stored.

The gradients of attention multiply weights, and the gradients of these, which are products themselves with something
pointwise between. Put into the sums that read them, these are chains of products: tiles are made, multiplied and
forgotten, so that memory grows with the tokens and not with their square. Every reader computes them anew, which is
more arithmetic and less traffic, so both ways have a price; and what is too large is not stored, whatever that costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from functools import partial, reduce
from itertools import chain
from typing import Any

from terrazzo.ir.canonical import together
from terrazzo.ir.contraction import contraction, operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.node import topological, transformed
from terrazzo.ir.placeless import placeless_together
from terrazzo.ir.sites import is_product
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.attention.multiples import scaled, stays_finite
from terrazzo.rules.loop.attention.online import apart, unrounded
from terrazzo.rules.loop.definitions import in_order
from terrazzo.rules.loop.fusion.beside import chains_beside
from terrazzo.rules.loop.fusion.inline import inline
from terrazzo.rules.loop.judging import Price, Refusal

PASS = "online"
RULE = "product_into_products"
LARGEST = 1 << 30
"""Bytes of what could be computed again that are stored at most, where that is faster."""
SURE = 0.9
"""By how much the model must favour chains where little would be stored: theirs is the less certain price."""

WIDE = 1.1
"""The same where 32 bits of each would be stored, which nobody else does: memory counts too."""

MOST = 4
"""Products that make each other and are computed again, at most: gradients of attention have two. Where one is made of
the one before twice, as with a residual, n of them put into each other are 2^n.
"""

Verdict = tuple[str, str]
"""Why products are not computed again, or nothing; and what both ways take."""
Once = Callable[[Hashable, Callable[[Price, Price, Refusal], Verdict]], Verdict]
"""What is found with what is known of prices, of what kernels take at least and of refusals, or was found for the same
before.
"""


def products_again(
    program: l.Program, log: Log, once: Once, materialize: Iterable[str] = (), sizes: tuple[int, ...] = (2,)
) -> l.Program:
    """`program` with products that are only factors of other products in these, where that is faster by the model, or
    much would be stored otherwise. A refusal says why a kernel is not worth having; `materialize` names what is kept.
    Factors have so many bytes. Those that differ in names only are judged `once`.
    """
    kept = {*program.inputs, *program.results, *(b for s in program.steps if isinstance(s, l.Call) for b in s.reads)}
    each = {s: _each(s, sizes) for s in program.steps if isinstance(s, l.Kernel)}
    kernels = [x for found in each.values() for x in found]
    kept |= {b for s in kernels for b in s.writes if b.name in frozenset(materialize)}
    gone: set[l.Kernel] = set()
    made: dict[l.Kernel, l.Kernel] = {}
    readers_of: dict[l.Buffer, list[l.Kernel]] = {}
    known: dict[Hashable, Verdict] = {}
    for s in kernels:
        for b in s.reads:
            readers_of.setdefault(b, []).append(s)
    for maker in kernels:
        group = _group(maker, readers_of, kept, sizes)
        if group is None or any(s in gone or s in made for s in chain(*group[:2])):  # a chain is of two products
            continue
        makers, readers, wanted = group
        rest = _rest(makers, wanted)
        saved = _stored(makers) - _stored(rest.values())
        if not saved:
            continue
        subject = ", ".join(s.name for s in makers)
        if not (why := _not_tried(makers, readers)):
            form = together((*makers, *readers, *rest.values()))
            alike, first, last = placeless_together(form.kernel), len(makers), len(makers) + len(readers)
            key = alike, first, last
            if key not in known:
                judged = partial(_judged, alike[:first], alike[first:last], rest=alike[last:])
                known[key] = once(key, judged)
            why, times = form.named(known[key])
        if why:
            log.add(Event(PASS, RULE, subject, False, why))
            continue
        new = [_whole(reader, makers) for reader in readers]
        into = ", ".join(s.name for s in readers)
        log.add(Event(PASS, RULE, subject, True, f"{into} compute it again: {times}, {saved >> 20} MiB not stored"))
        log.applied(PASS, RULE, subject, [*makers, *readers], [*rest.values(), *new])
        gone |= {*makers} - {*rest}
        made |= rest | dict(zip(readers, new, strict=True))
    whole = {s for s, found in each.items() if not {*found} & (gone | {*made})}
    every = [x for s in program.steps for x in ([s] if s in whole or isinstance(s, l.Call) else each[s])]
    return in_order(program, [made.get(s, s) if isinstance(s, l.Kernel) else s for s in every if s not in gone])


def _judged(
    makers: Sequence[l.Kernel],
    readers: Sequence[l.Kernel],
    price: Price,
    least: Price,
    refusal: Refusal,
    rest: Sequence[l.Kernel] = (),
) -> Verdict:
    """Whether readers are to compute again what makers store, of which the `rest` stays. Those that share what they
    compute then are one kernel, where that is faster. Where they would be slower at best, nobody asks whether they can
    be built, which takes long.
    """
    new: list[l.Kernel] = []
    after = 0.0
    for reader in readers:
        new.append(_whole(reader, makers))
        after += least(new[-1:])
        if math.isinf(after):  # and nobody writes down what the others would be
            why = "a block has no room for two products in one loop of steps"
            return why, why
    before = price([*makers, *readers]) - (price(rest) if rest else 0.0)
    most = (WIDE if _wide(makers) else SURE) * before if _stored(makers) - _stored(rest) <= LARGEST else math.inf
    if after <= most:
        after = price(new)
    if most < after <= len(new) * most:  # no kernel takes less than the longest of those in it
        after = price(_beside(new, price, refusal))
    times = f"{after / 1000:.1f} us as chains, {before / 1000:.1f} us stored, by the model"
    return times if after > most else next(filter(None, map(refusal, new)), ""), times


def _rest(makers: Sequence[l.Kernel], wanted: Container[l.Buffer]) -> dict[l.Kernel, l.Kernel]:
    """What is left of the makers of what others want: only that, with what it is made of inside."""
    found = {}
    for s in makers:
        if stores := tuple(x for x in s.stores if x.buffer in wanted):
            found[s] = _whole(l.Kernel(s.name, s.axes, stores, s.source), [x for x in makers if x is not s])
    return found


def _beside(new: Sequence[l.Kernel], price: Price, refusal: Refusal) -> list[l.Kernel]:
    """Chains, of which those that share what they compute are one kernel where that is faster."""
    inputs = tuple(dict.fromkeys(b for s in new for b in s.reads))
    results = tuple(b for s in new for b in s.writes)
    program = chains_beside(l.Program("alone", inputs, tuple(new), results), Log(), price, refusal)
    return [s for s in program.steps if isinstance(s, l.Kernel)]


def _stored(makers: Iterable[l.Kernel]) -> int:
    """Bytes that kernels store."""
    return sum(b.type.span for b in dict.fromkeys(b for s in makers for b in s.writes))


def _wide(makers: Sequence[l.Kernel]) -> bool:
    """Whether kernels store numbers of 32 bits."""
    return any(b.type.dtype.size != 2 for s in makers for b in s.writes)


def _not_tried(makers: Sequence[l.Kernel], readers: Sequence[l.Kernel]) -> str:
    """Why it is not tried to compute again what makers store, or nothing. Both sums of a chain are over one axis: those
    of images are over three, and would take long to put into each other.
    """
    if len(makers) > MOST:
        return f"more than {MOST} make each other, and to price what would be computed again takes long"
    if len(makers) > 1:
        return ""
    for side in (makers, readers):
        if not any(_long(r) == 1 for s in side for r in topological(s.stores) if isinstance(r, l.Reduce)):
            return "it sums over several axes, and chains of products over one each"
    return ""


def _long(r: l.Reduce) -> int:
    """How many axes a sum has that are not of one element."""
    return sum(not isinstance(a.extent, int) or a.extent > 1 for a in r.axes)


def _each(kernel: l.Kernel, sizes: tuple[int, ...]) -> list[l.Kernel]:
    """Products of 32 bits that became one kernel since they share an operand, each by itself: a chain has its own."""
    sums = [[x for x in topological([s]) if isinstance(x, l.Reduce)] for s in kernel.stores]
    alone = all(len(x) == 1 and contraction(x[0]) is not None for x in sums) and len({x[0] for x in sums}) == len(sums)
    if len(sums) < 2 or not alone or any(s.buffer.type.dtype.size != 4 for s in kernel.stores) or 4 not in sizes:
        return [kernel]
    return [l.Kernel(s.buffer.name, kernel.axes, (s,), kernel.source) for s in kernel.stores]


def _group(
    maker: l.Kernel,
    readers_of: Mapping[l.Buffer, Sequence[l.Kernel]],
    kept: set[l.Buffer],
    sizes: tuple[int, ...],
) -> tuple[list[l.Kernel], list[l.Kernel], set[l.Buffer]] | None:
    """The products that store factors of these sizes, from one on, the products these are factors of, and what sums of
    other kinds read; where there are too many, the first of them. None where somebody else reads them.
    """
    makers, readers, wanted = [maker], list[l.Kernel](), set[l.Buffer]()
    for s in makers:
        if len(makers) > MOST:
            return makers, readers, wanted
        if not is_product(s) or any(b in kept or b.type.dtype.size not in sizes for b in s.writes):
            return None
        for reader in dict.fromkeys(k for b in s.writes for k in readers_of.get(b, ())):
            if _multiplies(reader, s):
                readers.append(reader)
            elif is_product(reader):  # it makes a factor of a factor, point by point
                makers += [reader] if reader not in makers else []
            elif any(isinstance(x, l.Reduce) for x in topological(reader.stores)):
                wanted |= {*s.writes} & {*reader.reads}
            else:
                return None
    return (makers, list(dict.fromkeys(readers)), wanted) if readers else None


def _multiplies(reader: l.Kernel, maker: l.Kernel) -> bool:
    """Whether a kernel reads what another stores as factors of its one sum of products, and nowhere else."""
    sums = [x for x in topological(reader.stores) if isinstance(x, l.Reduce)]
    c = contraction(sums[0]) if len(sums) == 1 else None
    loads = {x for x in topological(reader.stores) if isinstance(x, l.Load) and x.buffer in maker.writes}
    return c is not None and len(c.terms) == 1 and len(loads) == 1 and bool(loads & set(map(operand, c.factors)))


def _whole(reader: l.Kernel, makers: Sequence[l.Kernel]) -> l.Kernel:
    """A kernel with the terms of others for what they store."""
    while behind := [s for s in makers if {*s.writes} & {*reader.reads}]:
        reader = inline(reader, behind[-1])
    stores = transformed(reader.stores, _simpler)
    return l.Kernel(reader.name, reader.axes, stores, reader.source)


def _simpler(x: Any) -> Any:
    """A factor that is rounded to 16 bits made of what is not rounded on the way to it. A weight exp(c * (score - t)),
    t a number for each row, is 0 where its score is hidden, and c t is subtracted from multiples of scores elsewhere.
    Where t is two numbers, they are subtracted one after the other. So is a power that a number for each row is taken
    off before it is multiplied by another one.
    """
    if isinstance(x, l.Apply) and is_cast(x.fn) and x.dtype.is_float and x.dtype.size == 2:
        return l.Apply(x.fn, (unrounded(x.args[0]),))
    match x:
        case l.Apply(
            fn=exp, args=(l.Apply(fn=times, args=(l.Apply(fn=minus, args=(score, t)), l.Literal() as by)),)
        ) if (exp.name, times.name, minus.name) == ("approx_exp2", "mul", "sub"):
            return _weight(x, score, t, by.value)
        case l.Apply(fn=exp, args=(l.Apply(fn=minus, args=(score, t)),)) if (exp.name, minus.name) == ("exp", "sub"):
            return _weight(x, score, t, 1.0)
    return x


def _weight(power: l.Apply, score: Any, t: Any, by: float) -> Any:
    """A power of (score - t) * by."""
    columns = [a for a in score.free if a not in t.free]
    if len(columns) != 1:
        return power
    tops = []
    while isinstance(score, l.Apply) and score.fn.name == "sub" and columns[0] not in score.args[1].free:
        score, top = score.args
        tops.append(top)
    bare, seen = apart(score, columns[0])
    below = reduce(lambda x, y: l.apply("sub", x, y), (*reversed(tops), t), bare)
    if by != 1.0 and not tops and stays_finite(bare, by):
        x = l.apply("sub", scaled(bare, by), l.apply("mul", t, l.Literal(by, t.dtype)))
    else:  # a score of -1e9 less the largest is 0 before both are rounded
        x = below if by == 1.0 else l.apply("mul", below, l.Literal(by, below.dtype))
    weight = l.Apply(power.fn, (x,))
    return l.apply("where", seen, weight, l.Literal(0.0, weight.dtype)) if seen is not None else weight
