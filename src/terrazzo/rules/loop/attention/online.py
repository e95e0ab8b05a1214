"""A softmax between two products becomes part of the second: one kernel, and no matrix of scores in memory.

    out[r] = sum over k of softmax(score)[k] * value[k]     =     sum(2^(s - m) * value) / sum(2^(s - m)),   m = max(s)

where s is the score times log2(e). Where that could be an infinity though the score is none, as masks of the lowest
number are, the difference is multiplied, and not the score. Both sums are over the same k, and m is their *frame*:
when it grows from m to n, what was summed so far is worth 2^(m - n) as much. So all three can go along in one pass
(ADR 004 §8). Found in the terms, whatever they came from; weights, which are in [0, 1], are rounded to the type of the
values, as PyTorch's own kernels do it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np

from terrazzo.ir.address import flatten, unflatten
from terrazzo.ir.canonical import together
from terrazzo.ir.contraction import contraction, nested_contraction, operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Var, terms_of
from terrazzo.ir.monoid import monoid
from terrazzo.ir.node import Node, per_node, substitute, topological
from terrazzo.ir.types import DType, contiguous_strides, f32
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.attention.multiples import at_most, is_value, scaled, stays_finite, unscaled
from terrazzo.rules.loop.attention.told import both, conjuncts, easy, every, masks, masks_told
from terrazzo.rules.loop.attention.weights import Known, plain
from terrazzo.rules.loop.attention.weights import apart as taken_off
from terrazzo.rules.loop.definitions import in_order
from terrazzo.rules.loop.folding.fold import folded, negated
from terrazzo.rules.loop.fusion.inline import axes_at, inline, unproved
from terrazzo.rules.loop.fusion.results_after import in_two
from terrazzo.rules.loop.judging import Price, Refusal, dearer
from terrazzo.rules.loop.layout.lookups import operands_stored

PASS = "online"
LOG2E = math.log2(math.e)
LARGEST_GATE = 1024.0
"""What weights in float16 are multiplied by at most, in whose frame the product is still one."""
LOWEST = {-float(np.finfo(np.float32).max), -float(np.finfo(np.float16).max), -float.fromhex("0x1.fep127")}
"""The lowest numbers of f32, f16 and bf16."""


def online(
    program: l.Program,
    log: Log,
    refusal: Refusal,
    sizes: tuple[int, ...] = (2,),
    price: Price = lambda steps: 0.0,
) -> l.Program:
    """`program` with scores, softmax and the product with values in one kernel, where nobody else reads what lies
    between them, and `refusal` has nothing against it, nor, of few scores, the `price`. Values and results have so
    many bytes.
    """
    program = _values_stored(program, log)
    steps = ChainSteps(program)
    made_of: dict[tuple[l.Kernel, ...], l.Kernel | None] = {}
    told: set[l.Kernel] = set()  # those whose masks others make again
    apart: dict[l.Kernel, list[l.Kernel]] = {}  # chains with results that are made after them
    for last in [s for s in program.steps if isinstance(s, l.Kernel)]:
        found = kernels_between(steps, last)
        if not found:
            continue
        known_masks = masks((*found, last), steps.writers)
        group = together(tuple(masks_told(x, known_masks) for x in (*found, last)))
        if group.kernel not in made_of:  # each once, whatever its buffers are called
            whole = with_rows(group.kernel[:-1], group.kernel[-1]) if _softens(group.kernel) else None
            made_of[group.kernel] = softmax_into_product(whole, sizes) if whole is not None else None
        made = group.named(made_of[group.kernel])
        if made is None:
            log.add(
                Event(PASS, "softmax_into_product", last.name, False, "what lies between the products is no softmax")
            )
            continue
        dear = partial(dearer, made, (*found[::-1], last), price)
        alone = in_two(made) if len(made.stores) > 1 and refusal(made) else None  # what it makes of a result is apart
        refused = refusal(alone[0] if alone else made)
        if why := steps.around(found[0], last) or unproved([made]) or refused or dear():
            log.add(Event(PASS, "softmax_into_product", last.name, False, why))
            continue
        steps.replace(found, last, made)
        apart |= {made: alone} if alone else {}
        names = " and ".join(kernel.name for kernel in found[::-1])
        log.add(Event(PASS, "softmax_into_product", last.name, True, f"{names} became part of it"))
        makers = dict.fromkeys(known_masks.values())
        told |= {*makers}
        parts = [*found[::-1], last], alone or [made]
        log.applied(PASS, "softmax_into_product", last.name, [*makers, *parts[0]], [*makers, *parts[1]])
    masks_read = {b for s in steps.made.values() for b in s.reads} | {*program.results}
    left = [s for s in steps.made.values() if s not in told or masks_read & {*s.writes}]
    return in_order(program, [x for s in left for x in apart.get(s, (s,))])


@per_node
def _has_exponential(kernel: l.Kernel) -> bool:
    """Whether a kernel has an exponential, as every softmax does."""
    return any(isinstance(x, l.Apply) and x.fn.name == "exp" for x in kernel.terms)


def _softens(kernels: Sequence[l.Kernel]) -> bool:
    """Whether one of some kernels may be a softmax."""
    return any(map(_has_exponential, kernels))


def _values_stored(program: l.Program, log: Log) -> l.Program:
    """`program` with values that are computed on their way to the product with weights stored first, as it takes them:
    it was no product for tensor cores when they became part of it.
    """
    steps = ChainSteps(program)
    names = {b.name for s in program.steps for b in s.writes} | {b.name for b in program.inputs}
    made: list[Any] = []
    for s in program.steps:
        found = None
        if isinstance(s, l.Kernel) and (between := kernels_between(steps, s)) and _softens((*between, s)):
            weights = {b for kernel in between for b in kernel.writes}
            found = operands_stored(s, partial(_computed, weights=weights), names, {})
            if found is not None:
                log.applied(PASS, "values_stored", s.name, [s], found)
        made += found or (s,)
    return l.Program(program.name, program.inputs, tuple(made), program.results)


def _computed(x: Any, weights: set[l.Buffer]) -> bool:
    """Whether an operand is no load, and made of no weights."""
    terms = topological([x])
    made = not isinstance(x, l.Load) and not any(isinstance(y, l.Reduce | l.Scan) for y in terms)
    return made and x.dtype.size <= 4 and not any(isinstance(y, l.Load) and y.buffer in weights for y in terms)


class ChainSteps:
    """The steps of a program, and who writes and reads what lies between them."""

    def __init__(self, program: l.Program) -> None:
        self.made: dict[Any, Any] = {s: s for s in program.steps}
        self.outside = {*program.inputs, *program.results}
        self.writers = {b: s for s in program.steps for b in s.writes}
        self.readers: dict[l.Buffer, set[Any]] = {}
        self.place = {s: n for n, s in enumerate(program.steps)}
        for s in program.steps:
            for b in s.reads:
                self.readers.setdefault(b, set()).add(s)

    def producer(self, load: Node, reader: l.Kernel) -> l.Kernel | None:
        """The kernel that stores what a load reads, for `reader` alone, and besides it only something of its rows."""
        if not isinstance(load, l.Load) or load.buffer in self.outside or self.readers[load.buffer] != {reader}:
            return None
        writer = self.writers[load.buffer]
        return writer if isinstance(writer, l.Kernel) and split_stores(writer)[0].buffer is load.buffer else None

    def around(self, first: l.Kernel, last: l.Kernel) -> str:
        """Why two kernels cannot be one: the second reads what others make of the first one's results. Else nothing."""
        front = [s for b in first.writes for s in self.readers.get(b, ()) if s is not last]
        seen = set(front)
        while front:
            for reader in (s for b in front.pop().writes for s in self.readers.get(b, ())):
                if reader is last:
                    return f"it reads what is made of other results of {first.name}"
                if reader not in seen and self.place[reader] < self.place[last]:
                    seen.add(reader)
                    front.append(reader)
        return ""

    def replace(self, gone: tuple[l.Kernel, ...], last: l.Kernel, made: l.Kernel) -> None:
        """One kernel in the place of the last of several."""
        for s in gone:
            del self.made[s]
        self.made[last] = made
        self.place[made] = self.place[last]
        self.writers.update(dict.fromkeys(made.writes, made))
        for b in {b for s in (*gone, last) for b in s.reads}:
            self.readers[b] -= {*gone, last}
        for b in made.reads:
            self.readers[b].add(made)


def kernels_between(steps: ChainSteps, last: l.Kernel) -> tuple[l.Kernel, ...]:
    """The kernel of weights before a product with values, where there is one, and that of scores, which only the next
    one reads; the last one first. Nothing where these are no products with a reduction between them.
    """
    for r in topological([s.value for s in last.stores]):
        if not isinstance(r, l.Reduce) or (c := nested_contraction(r)) is None:
            continue
        for factor in map(operand, c.factors):
            made = (steps.producer(x, last) for x in _factors(factor))
            middle = next((s for s in made if s is not None), None)
            weights = [split_stores(middle)[0].value] if middle is not None else [factor]
            if not any(isinstance(x, l.Reduce) for x in topological(weights)):
                continue
            for x in dict.fromkeys(x for x in topological(weights) if isinstance(x, l.Load)):
                first = steps.producer(x, middle or last)
                if first is None or len(first.stores) > 1:
                    continue
                if any(isinstance(y, l.Reduce) and contraction(y) for y in topological([first.stores[0].value])):
                    return (middle, first) if middle is not None else (first,)
    return ()


def _factors(x: Any) -> list[Any]:
    """What a factor is a product of, as weights are by what each is worth, without conversions."""
    if isinstance(x, l.Apply) and x.fn.name == "mul":
        return [y for a in x.args for y in _factors(operand(a))]
    return [x]


def split_stores(kernel: l.Kernel) -> tuple[l.Store, tuple[l.Store, ...]]:
    """The first store at every point of a kernel, and those at every row, which do not know its last axis."""
    deepest = max(len(s.free) for s in kernel.stores)
    rows = tuple(s for s in kernel.stores if len(s.free) == deepest - 1)
    return next(s for s in kernel.stores if len(s.free) == deepest), rows


def with_rows(found: tuple[l.Kernel, ...], last: l.Kernel) -> l.Kernel | None:
    """`last` with the terms of others for what they stored for it, and with what the first of them stores of every row
    besides. None where its rows are not those of `last`.
    """
    whole = reduce(inline, found, last)
    main, rows = split_stores(found[0])
    loads = [x for x in topological(last.stores) if isinstance(x, l.Load) and x.buffer is main.buffer]
    if len(found[0].stores) == 1:
        return whole
    if len(rows) + 1 < len(found[0].stores) or len(loads) > 1:
        return None
    beside = reduce(inline, found[1:], l.Kernel(found[0].name, found[0].axes, rows, found[0].source))
    stores = [substitute(s, axes_at(main, loads[0].index)) for s in beside.stores]
    if not all(_every_row(s, last.axes) for s in stores):
        return None
    return l.Kernel(whole.name, whole.axes, (*stores, *whole.stores), whole.source)


def _every_row(store: l.Store, axes: tuple[Var, ...]) -> bool:
    """Whether a store reaches every element of its buffer once: its elements, counted through, have axes as digits."""
    reached: Any = 1
    shape = store.buffer.type.static_shape
    walked: list[Any] = []
    for atoms, stride in sorted(terms_of(flatten(store.index, contiguous_strides(shape))).items(), key=lambda x: x[1]):
        if atoms or stride:
            axis: Any = atoms[0] if len(atoms) == 1 else None
            if axis not in axes or stride != reached:
                return False
            reached *= axis.extent
            walked.append(axis)
    return reached == math.prod(shape) and len({*walked}) == len(walked)


def softmax_into_product(kernel: l.Kernel, sizes: tuple[int, ...] = (2,)) -> l.Kernel | None:
    """`kernel` with its sum over weights times values framed: no weight is divided, the sum is. None where its weights
    are no softmax. What it stores of rows besides is made of the maximum and the sum that are known then.
    """
    rows = split_stores(kernel)[1]
    kinds = {s.buffer.type.dtype.size for s in kernel.stores if s not in rows}
    if len(kinds) > 1 or not kinds <= {*sizes}:
        return None  # weights of 16 bits are exact enough for results of 16 bits only
    (size,) = kinds
    for r in topological([s.value for s in kernel.stores if s not in rows]):
        if not isinstance(r, l.Reduce) or r.monoid.name != "sum":
            continue
        if new := _framed(_along_one(r), bool(rows), size):
            stores = tuple(new.row(s) if s in rows else substitute(s, {r: new.value}) for s in kernel.stores)
            if not any(_reductions(s.value, new.kept) for s in stores):
                return l.Kernel(kernel.name, kernel.axes, stores, kernel.source)
    return None


def _along_one(r: l.Reduce) -> l.Reduce:
    """A sum along several axes along one, as scores are: keys that lie in pages, say."""
    if len(r.axes) == 1:
        return r
    axes, args = l.open_binder(r)
    whole = Var(l.fresh_name(), math.prod(a.extent for a in axes))
    digits = dict(zip(axes, unflatten(whole, tuple(a.extent for a in axes)), strict=True))
    made: l.Reduce = l.Reduce.make(r.monoid, (whole,), tuple(substitute(x, digits) for x in args))
    return made


@dataclass(frozen=True)
class _Framed:
    """A sum whose weights are in a frame, what other reductions of the scores are in it, and those that are left."""

    value: Any
    known: Known
    kept: set[Any]

    def row(self, s: l.Store) -> l.Store:
        """What is stored of a row, as it is known then."""
        return l.Store(s.buffer, s.index, self.known.rewritten(s.value))


def _reductions(x: Any, known: set[Any]) -> list[Any]:
    """The reductions of a term, but for those that are known."""
    return [y for y in topological([x], stop=known.__contains__) if isinstance(y, l.Reduce) and y not in known]


def _framed(r: l.Reduce, told: bool, size: int) -> _Framed | None:
    """sum(w * v), where w = exp(s - t) in places where only multiples of it are wanted, and v has `size` bytes. Where
    others are `told` of the maximum, they compute the scores again, and round them as they were rounded.
    """
    (axis,), (product,) = l.open_binder(r)
    if not isinstance(product, l.Apply) or product.fn.name != "mul":
        return None
    for weight, value in (product.args, product.args[::-1]):
        v = operand(value)
        kind: DType = v.dtype  # type: ignore[attr-defined]
        if kind.size != size or not kind.is_float or not _exponential(weight, axis):
            continue
        core, gates, rebuild = _peeled(weight if told else plain(weight, axis.extent), axis)
        if not isinstance(core, l.Apply) or core.fn.name != "exp":
            continue
        if kind.name == "f16" and math.prod(map(at_most, gates)) > LARGEST_GATE:
            continue  # the largest weight of a row is 1 in its frame, and less outside
        score, t = taken_off(core.args[0], axis)
        if not any(isinstance(x, l.Reduce) and axis in x.free for x in topological([score])):
            continue
        bare: Any = hidden_alone(score, axis)
        bare = capped(bare) if size == 2 else bare
        early = stays_finite(bare, LOG2E)
        s: Any
        s, by = unscaled(scaled(bare, LOG2E)) if early else (scaled(bare, 1.0), None)
        m: Any = l.Reduce.make(monoid("max"), (axis,), (s,))
        difference = l.apply("sub", *(l.apply("mul", x, by) if by is not None else x for x in (s, m)))
        e: Any = l.apply("approx_exp2", difference if early else l.apply("mul", difference, l.Literal(LOG2E, r.dtype)))
        rounded = _cast(_cast(_gated(e, gates), kind), r.dtype)
        total: l.Reduce = l.Reduce.make(r.monoid, (axis,), (l.apply("mul", rounded, value),))
        sums: l.Reduce = l.Reduce.make(r.monoid, (axis,), (e,))
        unit = (1.0 if by is None else by.value) / LOG2E
        highest = l.apply("mul", m, l.Literal(unit, s.dtype)) if early else m
        nothing: Any = l.apply("eq", m, l.Literal(-math.inf, s.dtype))
        kept = {total, m, sums}
        known = Known(axis, score, highest, sums, nothing, frozenset(kept))
        worth = known.worth(t)
        new = known.rewritten(rebuild(total if worth is None else l.apply("mul", total, worth)))
        if not _reductions(new, kept):
            return _Framed(new, known, kept)
    return None


def _exponential(weight: Any, axis: Var) -> bool:
    """Whether a weight is made of reductions, and, outside of these, of an exponential that depends on an axis."""
    outside = topological([weight], stop=lambda x: isinstance(x, l.Reduce))
    exp = any(isinstance(x, l.Apply) and x.fn.name == "exp" and axis in x.free for x in outside)
    return exp and any(isinstance(x, l.Reduce) for x in outside)


def _peeled(x: Any, axis: Var) -> tuple[Any, tuple[Any, ...], Callable[[Any], Any]]:
    """What of a weight depends on the axis, what else it is multiplied by there, as by what is dropped of weights, and
    how the rest is made of a multiple of it: quotients, products, 0 under a condition, and conversions, which are left
    out.
    """
    if not isinstance(x, l.Apply):
        return x, (), lambda y: y
    if is_cast(x.fn):
        return _peeled(x.args[0], axis)
    fixed = [axis not in a.free for a in x.args]
    if x.fn.name in ("div", "approx_div") and fixed == [False, True]:
        core, gates, inner = _peeled(x.args[0], axis)
        return core, gates, lambda y: l.apply("approx_div", inner(y), x.args[1])  # 16 bits are wanted of it
    if x.fn.name == "mul" and sum(fixed) == 1:
        core, gates, inner = _peeled(x.args[fixed.index(False)], axis)
        return core, gates, lambda y: l.apply("mul", inner(y), x.args[fixed.index(True)])
    if x.fn.name == "mul" and not any(fixed):
        given = [not any(isinstance(y, l.Reduce) for y in topological([a])) for a in x.args]
        if sum(given) == 1:
            core, gates, inner = _peeled(x.args[given.index(False)], axis)
            return core, (*gates, x.args[given.index(True)]), inner
    zero = isinstance(x.args[1], l.Literal) and x.args[1].value == 0 if x.fn.name == "where" else False
    if zero and fixed == [True, True, False]:
        core, gates, inner = _peeled(x.args[2], axis)
        return core, gates, lambda y: l.apply("where", x.args[0], x.args[1], inner(y))
    return x, (), lambda y: y


def hidden_alone(score: Any, axis: Var) -> Any:
    """A score with the predicate on indices that hides parts of it outside: `where(seen, score, -inf)`. What is hidden
    by the lowest number of a type weighs nothing, as with -inf, where every row sees something: no score is as low.
    """
    bare, seen = apart(score, axis)
    return l.apply("where", seen, bare, l.Literal(-math.inf, bare.dtype)) if seen is not None else bare


def apart(score: Any, axis: Var) -> tuple[Any, Any]:
    """A score, and the predicate on indices that hides parts of it, if there is one."""
    bare, seen, lowest = _apart(score)
    if lowest and not any(_always(seen, axis, x) for x in (0, axis.extent - 1, *seen.free)):
        return score, None
    return bare, seen


def capped(score: Any) -> Any:
    """A score with tanh(x) = 1 - 2 / (1 + exp(2 x)), exact to 2^-21 of what it is multiplied by, and not of itself: of
    weights, which are rounded to 16 bits, only the difference of scores is wanted.
    """
    if not isinstance(score, l.Apply):
        return score
    args = tuple(map(capped, score.args))
    if score.fn.name != "tanh" or score.dtype is not f32:
        return l.Apply(score.fn, args)
    half = l.apply("approx_logistic", scaled(args[0], 2 * LOG2E))
    return l.apply("sub", l.Literal(1.0, f32), l.apply("mul", half, l.Literal(2.0, f32)))


def unrounded(x: Any) -> Any:
    """A score without what is rounded to 16 bits on the way to it: as PyTorch's own kernels have it, and more exact."""
    if not isinstance(x, l.Apply):
        return x
    args = tuple(map(unrounded, x.args))
    if is_cast(x.fn) and isinstance(inner := args[0], l.Apply) and is_cast(inner.fn):
        wide = inner.args[0]
        half = inner.dtype.is_float and inner.dtype.size == 2
        if x.dtype.is_float and half and wide.dtype is x.dtype:  # type: ignore[attr-defined]
            return wide
    return l.Apply(x.fn, args)


def _apart(x: Any) -> tuple[Any, Any, bool]:
    """A score, under which condition it is seen (None: always), and whether it is hidden by a finite number."""
    if not isinstance(x, l.Apply):
        return x, None, False
    name, args = x.fn.name, tuple[Any, ...](x.args)
    if is_cast(x.fn) and x.dtype.is_float and args[0].dtype.is_float:
        bare, seen, lowest = _apart(args[0])
        return (l.Apply(x.fn, (bare,)) if bare is not args[0] else x), seen, lowest
    for hidden in (args[2], args[1]) if name == "where" and easy(args[0]) else ():
        shown = args[0] if hidden is args[2] else negated(args[0])
        if _low(hidden) and shown is not None:
            return _both(args[3 - args.index(hidden)], shown, not math.isinf(hidden.value))
    if name == "where" and is_value(args[2], -math.inf) and (places := conjuncts(args[0])):
        rest = [y for y in every(args[0]) if y not in places]
        return _both(l.apply("where", both(rest), *args[1:]), both(places), False)
    for one, other in (args, args[::-1]) if name == "add" else ():
        if is_value(other, 0.0):
            return _apart(one)
        if (found := _hides(other)) is not None:
            return _both(one, *found)
        data = not any(isinstance(y, l.Reduce) for y in topological([other]))
        bare, seen, lowest = _apart(other) if data else (other, None, False)
        if seen is not None:  # of a mask that is data, something is known
            return _both(l.apply("add", one, bare), seen, lowest)
    return x, None, False


def _hides(x: Any) -> tuple[Any, bool] | None:
    """The predicate under which a term that is added is 0, where it is -inf or the lowest number otherwise,
    and whether it may be that; None where it is none of these.
    """
    if isinstance(x, l.Apply) and x.fn.name == "add":
        one, other = map(_hides, x.args)
        return None if one is None or other is None else (l.apply("and_", one[0], other[0]), one[1] or other[1])
    if not isinstance(x, l.Apply) or x.fn.name != "where" or not easy(x.args[0]):
        return None
    condition, one, other = tuple[Any, ...](x.args)
    if is_value(other, 0.0) and _low(one):
        one, other, condition = other, one, negated(condition)
    if not is_value(one, 0.0) or not _low(other) or condition is None:
        return None
    return condition, not math.isinf(other.value)


def _both(x: Any, condition: Any, finite: bool) -> tuple[Any, Any, bool]:
    bare, seen, lowest = _apart(x)
    seen = condition if seen is None else l.apply("and_", condition, seen)
    return bare, seen, lowest or finite


def _low(x: Any) -> bool:
    """Whether a constant is -inf, or the lowest number of a type of floats."""
    return isinstance(x, l.Literal) and x.dtype.is_float and (x.value == -math.inf or x.value in LOWEST)


def _always(seen: Any, axis: Var, x: Any) -> bool:
    """Whether every row sees the key number x."""
    inside = isinstance(x, int) or (x is not axis and x.extent == axis.extent)
    return inside and is_value(folded(substitute(seen, {axis: x})), True)


def _gated(weight: Any, gates: Sequence[Any]) -> Any:
    """A weight, multiplied by what else it is multiplied by."""
    return reduce(lambda x, gate: l.apply("mul", x, _cast(gate, weight.dtype)), gates, weight)


def _cast(x: Any, to: DType) -> Any:
    return x if x.dtype is to else l.apply(to.name, x)
