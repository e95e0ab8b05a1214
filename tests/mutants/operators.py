"""Ways to make a kernel wrong: each operator takes a statement, with what is around it, and yields kernels with
something else there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.errors import UserError
from terrazzo.hw import ldmatrix
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, Var, bounds
from terrazzo.ir.node import substitute
from terrazzo.ir.show_kernel import show_kernel
from terrazzo.ir.types import Type
from terrazzo.ir.verify_kernel import declared
from tests.mutants.sites import Site, bare, commute, conditions, edges, indices, sites, terms

Kernels = Iterator[k.Kernel]

OPERATORS: dict[str, Callable[[Any], Kernels]] = {}
"""By name. Each takes a site, or a kernel."""


def operator(fn: Callable[[Any], Kernels]) -> Callable[[Any], Kernels]:
    OPERATORS[fn.__name__.replace("_", " ")] = fn
    return fn


# -- what orders is missing, or elsewhere ------------------------------------------------------------------------------

KINDS: dict[str, tuple[type, ...]] = {
    "barrier": (k.Sync, k.ClusterSync),
    "fence": (k.Fence,),
    "wait": (k.WaitGroups, k.WaitBarrier),
    "commit": (k.Commit,),
    "arrive": (k.Arrive, k.Expect),
    "integer": (k.SetInteger,),
}


def drops(kinds: tuple[type, ...]) -> Callable[[Site], Kernels]:
    """Leave one out."""
    return lambda site: iter([site.put()] if isinstance(site.s, kinds) else [])


def moves(kinds: tuple[type, ...]) -> Callable[[Site], Kernels]:
    """Exchange one (perhaps under a condition) with the statement after it, or with the one before."""

    def found(site: Site) -> Kernels:
        if isinstance(bare(site.s), kinds):
            if site.after and not commute(site.s, site.after):
                yield site.put(site.after, site.s, take=2)
            if site.before and not commute(site.before, site.s):
                yield site.put(site.s, site.before, first=-1, take=2)

    return found


for _kind, _types in KINDS.items():
    OPERATORS[f"no {_kind}"] = drops(_types)
    OPERATORS[f"moved {_kind}"] = moves(_types)
MATRICES = (k.LoadMatrix, k.StoreMatrix, k.TurnMatrix)
OPERATORS["no copy"] = drops((k.AsyncCopy, k.TensorLoad, k.TensorStore, k.Move, *MATRICES))
OPERATORS["no product"] = drops((k.Multiply, k.MultiplyAsync))
OPERATORS["no store"] = drops((l.Store, k.Atomic))
OPERATORS["no barriers made"] = drops((k.InitBarriers,))


@operator
def waits_for_too_little(site: Site) -> Kernels:
    """One group more may be on its way."""
    if isinstance(site.s, k.WaitGroups):
        yield site.but(open=site.s.open + 1)


@operator
def wrong_kind_of_group(site: Site) -> Kernels:
    """Another kind of asynchronous work is committed, or waited for."""
    if isinstance(site.s, k.Commit | k.WaitGroups):
        yield from (site.but(kind=kind) for kind in k.KINDS if kind != site.s.kind)


@operator
def wrong_kind_of_fence(site: Site) -> Kernels:
    if isinstance(site.s, k.Fence):
        yield from (site.but(kind=kind) for kind in k.FENCES if kind != site.s.kind)


@operator
def barrier_of_others(site: Site) -> Kernels:
    """A named barrier is for more or fewer warps."""
    if isinstance(site.s, k.Sync) and site.s.warps:
        yield from (site.but(warps=site.s.warps + step) for step in (1, -1, 4, -4) if site.s.warps + step > 0)


# -- rings
# ---------------------------------------------------------------------------------------------------------------


@operator
def wrong_phase(site: Site) -> Kernels:
    """The other parity; or one that never changes."""
    if isinstance(site.s, k.WaitBarrier):
        yield site.but(phase=1 - site.s.phase)
        if isinstance(site.s.phase, Expr):
            yield from (site.but(phase=0), site.but(phase=1))


@operator
def wrong_barrier(site: Site) -> Kernels:
    """The barrier of the next slot, or of the one before."""
    if isinstance(site.s, k.WaitBarrier | k.Arrive | k.Expect | k.TensorLoad):
        n = site.s.barriers.type.static_shape[0]
        yield from (site.but(slot=(site.s.slot + step) % n) for step in {1, n - 1} if n > 1)


@operator
def wrong_slot(site: Site) -> Kernels:
    """The next slot of a ring, which is not there yet, or the one before, which is still in use."""
    for place, index, put in indices(site):
        if isinstance(place, k.Shared) and place.type.rank > 2 and 1 < (n := place.type.static_shape[0]) <= 8:
            yield from (put(((index[0] + step) % n, *index[1:])) for step in {1, n - 1})


@operator
def wrong_bytes(site: Site) -> Kernels:
    if isinstance(site.s, k.Expect):
        yield from (site.but(bytes=site.s.bytes + step) for step in (16, -16, site.s.bytes))


@operator
def wrong_arrivals(kernel: k.Kernel) -> Kernels:
    """A barrier waits for one more, or for one less."""
    for s in kernel.shared:
        if isinstance(s, k.Barriers):
            yield from (substitute(kernel, {s: replace(s, arrivals=n)}) for n in (s.arrivals - 1, s.arrivals + 1) if n)


@operator
def one_slot_less(kernel: k.Kernel) -> Kernels:
    """A ring has room for one slab less, or one barrier less."""
    for s in kernel.shared:
        if (n := s.type.static_shape[0]) > 1:
            yield substitute(
                kernel, {s: replace(s, type=Type(s.type.dtype, (n - 1, *s.type.shape[1:]), s.type.strides))}
            )


@operator
def wrong_block_of_the_cluster(site: Site) -> Kernels:
    """A thread arrives elsewhere, reads elsewhere; a box goes elsewhere."""
    yield from (put(replace(x, rank=1 - x.rank)) for x, put in terms(site, k.Remote))
    if isinstance(site.s, k.Arrive) and site.s.rank is not None:
        yield from (site.but(rank=None), site.but(rank=1 - site.s.rank), site.but(rank=2))
    if isinstance(site.s, k.TensorLoad) and site.s.ranks:
        yield from (site.but(ranks=ranks) for ranks in (0, 1, 2))


# -- places
# --------------------------------------------------------------------------------------------------------------


@operator
def off_by_one(site: Site) -> Kernels:
    """An index is one too large or too small; where several elements are moved, by as many."""
    count = getattr(site.s, "count", 1)
    for place, index, put in indices(site):
        for d, e in enumerate(index):
            step = count if d == len(index) - 1 else 1
            if place.type.static_shape[d] > 1:
                yield put((*index[:d], e + step, *index[d + 1 :]))
                yield put((*index[:d], e - step, *index[d + 1 :]))


@operator
def of_another_warp(site: Site) -> Kernels:
    """A copy from or to shared memory is where another warp's, or another lane's, should be; all write where the first
    should.
    """
    for place, index, put in indices(site):
        variables = {
            e.name: e
            for x in index
            if isinstance(x, Expr)
            for e in x.free
            if e.name in ("warp", "lane") and e.extent > 1
        }
        store = isinstance(site.s, l.Store) and place is site.s.buffer
        if isinstance(place, k.Shared) and (
            store or isinstance(site.s, k.AsyncCopy | k.Move | k.LoadMatrix | k.StoreMatrix)
        ):
            for _, v in sorted(variables.items()):
                other = 0 if store else (v + 1) % v.extent
                yield put(tuple(substitute(e, {v: other}) for e in index))


@operator
def wrong_fragment_row(site: Site) -> Kernels:
    """The lanes name the rows of the next matrix, or the rows in another order; or the matrices are transposed."""
    if isinstance(site.s, k.LoadMatrix | k.StoreMatrix):
        field = "at" if isinstance(site.s, k.LoadMatrix) else "to"
        for rows in ((k.LANE + 8) % 32, (k.LANE // 8) * 8 + (k.LANE + 1) % 8):
            yield site.but(**{field: tuple(substitute(e, {k.LANE: rows}) for e in getattr(site.s, field))})
        name = site.s.instruction
        yield site.but(instruction=name.removesuffix(".trans") if name.endswith(".trans") else f"{name}.trans")
        if ldmatrix.move(name).count > 1:
            yield site.but(
                instruction=name.replace(f"x{ldmatrix.move(name).count}", f"x{ldmatrix.move(name).count // 2}")
            )


@operator
def not_turned(site: Site) -> Kernels:
    """A matrix in registers stays as it is."""
    if isinstance(site.s, k.TurnMatrix) and site.s.target.type.dtype is site.s.source.type.dtype:
        s = site.s
        yield site.put(k.Move(s.target, s.to, s.source, s.at, 4 // s.source.type.dtype.size))


@operator
def wrong_slice(site: Site) -> Kernels:
    """A product of a warpgroup takes the slice of k after, or one that is not aligned; or rows for columns."""
    if isinstance(site.s, k.MultiplyAsync):
        for operand in "ab" if isinstance(site.s.a, k.Shared) else "b":
            index = getattr(site.s, f"{operand}_at")
            along = -2 if operand in site.s.transposed else -1
            for step in (16, 8, 4):
                other = [*index]
                other[along] = other[along] + step
                yield site.but(**{f"{operand}_at": tuple(other)})
        yield from (site.but(transposed=word) for word in ("", "a", "b", "ab") if word != site.s.transposed)


@operator
def wrong_swizzle(kernel: k.Kernel) -> Kernels:
    """A slab of wgmma has another swizzle. That of other places is of their type, so all who use them agree on it."""
    used = {p for s in k.walk(kernel.body) if isinstance(s, k.MultiplyAsync) for p in (s.a, s.b)}
    for s in kernel.shared:
        if s in used:
            yield from (
                substitute(kernel, {s: replace(s, swizzle=span)}) for span in (0, 32, 64, 128) if span != s.swizzle
            )


@operator
def wrong_box(site: Site) -> Kernels:
    """A box is half as high, or half as wide."""
    if isinstance(site.s, k.TensorLoad | k.TensorStore):
        box = site.s.box
        yield from (site.but(box=(*box[:d], box[d] // 2, *box[d + 1 :])) for d in range(len(box)) if box[d] > 1)


@operator
def wrong_width(site: Site) -> Kernels:
    """Twice as many elements are moved, or half as many."""
    if isinstance(site.s, k.Move | k.AsyncCopy):
        if site.s.count > 1:
            yield site.but(count=site.s.count // 2)
        yield site.but(count=site.s.count * 2)


@operator
def wrong_reduction(site: Site) -> Kernels:
    """What is combined in global memory, or in a vote, is combined in another way."""
    if isinstance(site.s, k.Atomic):
        yield from (site.but(function=word) for word in ("add", "max") if word != site.s.function)
    yield from (put(replace(x, kind="all" if x.kind == "any" else "any")) for x, put in terms(site, k.Vote))
    if isinstance(site.s, k.TensorStore):
        yield from (site.but(reduction=word) for word in ("", "add", "max") if word != site.s.reduction)


# -- who, and how often
# --------------------------------------------------------------------------------------------------


@operator
def wrong_predicate(site: Site) -> Kernels:
    """A condition holds once more often, or once less; is the opposite; is missing."""
    for inside, put in conditions(site):
        for n, e in enumerate(inside):
            less, more = edges(e)
            others = [
                () if e == 0 else (-1 - e,),
                *([(e - less,)] if less else []),
                *([(e + more,), ()] if more else []),
            ]
            yield from (put((*inside[:n], *other, *inside[n + 1 :])) for other in others)


@operator
def wrong_number_of_steps(site: Site) -> Kernels:
    """A loop has one step more, or one less."""
    if isinstance(site.s, k.For):
        axis = site.s.axis
        for n in (axis.extent - 1, axis.extent + 1):
            if bounds(n)[1] > 0:
                yield site.put(substitute(site.s, {axis: Var(axis.name, n)}))


@operator
def wrong_integer(site: Site) -> Kernels:
    """An integer begins with another number, changes to another one, or does not change."""
    if isinstance(site.s, k.DeclareInteger | k.SetInteger):
        yield from (site.but(value=site.s.value + step) for step in (1, -1))
        yield from (site.but(value=(site.s.value + step) % site.s.variable.extent) for step in (1, 2))
    if isinstance(site.s, k.SetInteger):
        yield site.put()


@operator
def wrong_role(site: Site) -> Kernels:
    """A role begins one warp or warpgroup later, or has one less or more."""
    if isinstance(site.s, k.Role):
        for first, count in ((4, 0), (-4, 0), (0, -4), (0, 4), (4, -4)):
            if site.s.first + first >= 0 and site.s.count + count > 0:
                yield site.but(first=site.s.first + first, count=site.s.count + count)


@operator
def wrong_registers(site: Site) -> Kernels:
    """A role takes fewer registers than it declares, or more than there are."""
    if isinstance(site.s, k.Role) and site.s.registers:
        if (enough := declared(site.s.body)) > 24:
            yield site.but(registers=(enough - 1) // 8 * 8)
        if len(site.body) > 2:
            yield from (site.but(registers=n) for n in (site.s.registers + 8, site.s.registers + 64) if n <= 240)


@operator
def too_many_blocks(kernel: k.Kernel) -> Kernels:
    """More blocks are to be resident than there are registers for."""
    if any(isinstance(s, k.Role) and s.registers for s in kernel.body):
        yield replace(kernel, resident=kernel.resident + 1)


@operator
def wrong_lanes(site: Site) -> Kernels:
    """A shuffle reads from other lanes."""
    for x, put in terms(site, k.Shuffle):
        yield from (put(replace(x, mask=mask)) for mask in (x.mask * 2, x.mask // 2) if 0 < mask < k.WARP)


@operator
def wrong_beginning(site: Site) -> Kernels:
    """Registers begin at nothing, or at another number; accumulators once too often, or with what was there."""
    if isinstance(site.s, k.Declare) and site.s.init:
        yield site.but(init=None)
        if not isinstance(site.s.init.value, bool) and site.s.init.value in (0, 1):
            yield site.but(init=replace(site.s.init, value=site.s.init.value + 1))
    if isinstance(site.s, k.MultiplyAsync):
        if isinstance(site.s.fresh, int):
            yield site.but(fresh=-1 - site.s.fresh)
        else:
            yield from (site.but(fresh=e) for e in (-1, 0, site.s.fresh + 1, -1 - site.s.fresh))


# -- all of them
# ---------------------------------------------------------------------------------------------------------

ON_KERNELS = ("wrong arrivals", "one slot less", "wrong swizzle", "too many blocks")


@dataclass(frozen=True)
class Mutant:
    """A kernel with one change, by an operator. `change` says where; there is no kernel where such a node cannot
    exist.
    """

    operator: str
    change: str
    kernel: k.Kernel


def mutants(kernel: k.Kernel) -> Iterator[Mutant]:
    """Every mutant of a kernel, each once."""
    text = show_kernel(kernel)
    seen = {kernel}
    for name, fn in OPERATORS.items():
        for at in [kernel] if name in ON_KERNELS else sites(kernel):
            every = fn(at)
            while True:
                try:
                    other = next(every)
                except StopIteration:
                    break
                except UserError:  # no such node can exist: nothing to find
                    break
                if other not in seen:
                    seen.add(other)
                    yield Mutant(name, change(text, show_kernel(other)), other)


def change(before: list[str], after: list[str]) -> str:
    """Where two texts differ first."""
    n = next(n for n in range(len(before)) if n >= len(after) or before[n] != after[n])
    new = after[n].strip() if n < len(after) else "the end"
    return f"line {n} `{before[n].strip()}` {'->' if len(before) == len(after) else 'is gone, before'} `{new}`"
