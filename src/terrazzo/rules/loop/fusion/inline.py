"""Inlining: a load of a buffer becomes the term that was stored there. All fusion is this substitution."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from terrazzo.errors import UserError
from terrazzo.ir.address import axis_digits, coefficient, digit, flatten, upwards
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Bound, Expr, IntExpr, Loaded, Var, at_least
from terrazzo.ir.node import Node, rebuilt, substitute, topological, transform
from terrazzo.ir.types import Type, i64
from terrazzo.ir.verify import kernel_problem

Replace = Callable[[l.Load], Any]


def inline(consumer: l.Kernel, producer: l.Kernel) -> l.Kernel:
    """`consumer` with every load of what `producer` stores replaced by the stored term."""
    stored = {s.buffer: s for s in producer.stores}
    binds = bool(producer.carried)
    made: dict[Hashable, dict[Any, Any]] = {}

    def replace(load: l.Load) -> Any:
        store = stored.get(load.buffer)
        return load if store is None else element(store, load.index, load.inside, made)

    memo: dict[Node, Any] = {}  # stores have terms in common
    values = (rewrite_loads(s.value, replace, set(stored), binds, memo) for s in consumer.stores)
    stores = (l.Store(s.buffer, s.index, value) for s, value in zip(consumer.stores, values, strict=True))
    return l.Kernel(consumer.name, consumer.axes, tuple(stores), consumer.source)


def unproved(kernels: Iterable[l.Kernel]) -> str:
    """Why kernels are not valid though those they were made of are, or nothing: proofs do not find all that is so."""
    return next((f"it would not be proved right: {why}" for k in kernels if (why := kernel_problem(k))), "")


def element(
    store: l.Store,
    index: tuple[IntExpr, ...],
    inside: tuple[IntExpr, ...] = (),
    made: dict[Hashable, dict[Any, Any]] | None = None,
) -> Any:
    """The term of the stored buffer's element at `index`, or 0 where a guard does not hold. Stores have terms in
    common: what was `made` of them for elements at the same place, or behind the same guards, is there already.
    """
    made = {} if made is None else made
    axes = {axis: at for axis, at in axes_at(store, index).items() if axis is not at}
    value = substitute(store.value, axes, made.setdefault(frozenset(axes.items()), dict(axes)))
    inside = tuple(e for e in inside if not at_least(e, 0))
    if not inside:
        return value
    binds = any(isinstance(v, Bound) for e in inside if isinstance(e, Expr) for v in e.free)
    if keeps_zero(value):
        return rewrite_loads(value, lambda load: guarded(load, inside), binds=binds)
    guard = lambda load: looked_up(load, inside) if in_bounds(load) else guarded(load, inside)  # noqa: E731
    value = rewrite_loads(value, guard, binds=binds, memo=made.setdefault(inside, {}))
    return select(inside, _dividing_only(value, inside))


def axes_at(store: l.Store, index: tuple[IntExpr, ...]) -> dict[Any, IntExpr]:
    """What the axes of a kernel are where it stores the element at `index`. Axes may be stored merged and taken apart,
    as a0 * 12 + a1 // 4: digits of the index are digits of them. One may be stored from the end, as 11 - a0, or
    a0 * 12 + 11 - a1. Several may be one number, of which dimensions are the digits: (a0 * 3 + a1) // 2 and
    (a0 * 3 + a1) % 2.
    """
    found: dict[Any, IntExpr] = {}
    shape = store.buffer.type.shape
    if all(isinstance(e, Var) and e.extent == n for e, n in zip(store.index, shape, strict=True)):
        return dict(zip(store.index, index, strict=True))
    digits = axis_digits(store.index)
    dims: list[Any] = list(zip(store.index, index, shape, strict=True))
    if any(_tangled(substitute(whole, digits)) for whole, _, _ in dims):
        rows = Type(store.buffer.type.dtype, shape)
        dims = [(flatten(store.index, rows.element_strides), flatten(index, rows.element_strides), rows.numel)]
    for whole, at, extent in dims:
        e, down = upwards(substitute(whole, digits))
        if _tangled(e):
            raise UserError(f"{store.buffer.name} is stored at {whole}, from which no axis follows")
        for v in e.free if isinstance(e, Expr) else ():
            place: Any = coefficient(e, v)
            up = at // place if place * v.extent == extent else at // place % v.extent
            found[v] = v.extent - 1 - up if v in down else up
    for e, v in digits.items():
        axis, place, _ = digit(e)
        if v in found:  # and not only a part of another digit
            found[axis] = found.pop(v) * place + found.get(axis, 0)
    return found


def _tangled(e: IntExpr) -> bool:
    """Whether an index is no sum of multiples of variables."""
    return isinstance(e, Expr) and any(coefficient(e, v) is None for v in e.free)


def _dividing_only(value: Any, inside: Sequence[IntExpr]) -> Any:
    """`value` with 1 as the divisor of whole numbers where a guard does not hold: a division by zero is an error."""
    if not any(l.may_divide_by_zero(n) for n in topological([value])):
        return value

    def divided(x: Node) -> Node:
        if not isinstance(x, l.Apply) or not l.may_divide_by_zero(x):
            return x
        return l.apply(x.fn.name, x.args[0], select(inside, x.args[1], other=1))

    return transform(value, divided)


def guarded(load: l.Load, inside: tuple[IntExpr, ...]) -> l.Load:
    """The load, or 0 where a condition does not hold. Conditions that others imply are left out."""
    more = (e for e in inside if not any(_implies(x, e) for x in load.inside))
    return l.Load.make(load.buffer, load.index, (*load.inside, *more))


def _implies(x: IntExpr, e: IntExpr) -> bool:
    """Whether e >= 0 where x >= 0, visibly: they differ by a number."""
    more = e - x
    return isinstance(more, int) and more >= 0


def in_bounds(load: l.Load) -> bool:
    """Whether a load may be made whatever the values of its variables are."""
    return all(
        at_least(e, 0) and at_least(n - 1 - e, 0) for e, n in zip(load.index, load.buffer.type.shape, strict=True)
    )


def looked_up(load: l.Load, inside: Sequence[IntExpr]) -> l.Load:
    """The load, at 0 where a guard does not hold and where it reads is computed: it is in its range elsewhere only.
    What is loaded, to be looked up, is 0 there by itself.
    """
    places = topological([e for e in load.index if isinstance(e, Node)], stop=lambda x: isinstance(x, Loaded))
    computed = [x for x in places if isinstance(x, Loaded) and not keeps_zero(x.value)]
    if not computed:
        return load
    where = {x: Loaded(select(inside, x.value), x.extent) for x in computed}
    return l.Load.make(load.buffer, tuple(substitute(e, where) for e in load.index), load.inside)


def select(inside: Sequence[IntExpr], value: Any, other: float = 0) -> Any:
    """`value` where every expression of `inside` is >= 0, else `other`."""
    zero, condition = l.Literal(0, i64), None
    for e in inside:
        test = l.apply("ge", l.Index(e), zero)
        condition = test if condition is None else l.apply("and_", condition, test)
    dtype = value.dtype
    none = l.Literal(bool(other) if dtype.kind == "bool" else float(other) if dtype.is_float else int(other), dtype)
    return value if condition is None else l.apply("where", condition, value, none)


def rewrite_loads(
    root: Node,
    replace: Replace,
    only: set[l.Buffer] | None = None,
    binds: bool = True,
    memo: dict[Node, Any] | None = None,
) -> Any:
    """`root` with `replace` applied to its loads (of the buffers `only`), inside reductions too, with their axes kept
    apart where what loads become `binds` axes itself. What stands in several reductions is rewritten once: `memo` has
    it, so that reductions of reductions, each read twice, take no longer than there are of them.
    """
    memo = {} if memo is None else memo
    within = memo

    def known(node: Node) -> bool:
        return node in within or (binds and isinstance(node, l.Reduce | l.Scan))

    for node in topological([root], stop=known):
        if node in memo:
            continue
        if binds and isinstance(node, l.Reduce | l.Scan):
            memo[node] = _in_binder(node, replace, only, memo)
            continue
        new = rebuilt(node, memo)
        memo[node] = replace(new) if isinstance(new, l.Load) else _narrowed(new)
    return memo[root]


def _narrowed(x: Any) -> Any:
    """What is converted to a wider type and back is what it was: bf16(f32(x)) of an x in bf16, as where PyTorch resizes
    an image in float32. A factor of a product is a plain load again then.
    """
    if not isinstance(x, l.Apply) or not is_cast(x.fn):
        return x
    wide = x.args[0]
    if not isinstance(wide, l.Apply) or not is_cast(wide.fn):
        return x
    source: Any = wide.args[0]
    same = source.dtype is x.dtype and source.dtype.kind == wide.dtype.kind
    return source if same and wide.dtype.size > source.dtype.size else x


def _in_binder(
    node: l.Reduce | l.Scan, replace: Replace, only: set[l.Buffer] | None, memo: dict[Node, Any]
) -> l.Reduce | l.Scan:
    if only is not None and not any(isinstance(n, l.Load) and n.buffer in only for n in topological([node])):
        return node
    axes, args = l.open_binder(node)
    new = tuple(rewrite_loads(a, replace, only, memo=memo) for a in args)
    if isinstance(node, l.Reduce):
        return l.Reduce.make(node.monoid, axes, new)
    return l.Scan.make(node.monoid, axes[0], new, node.at)


def keeps_zero(value: Node) -> bool:
    """True if the term is 0 by itself where its loads are guarded: a load, or a conversion of one."""
    while isinstance(value, l.Apply) and len(value.args) == 1 and is_cast(value.fn):
        value = value.args[0]
    return isinstance(value, l.Load)
