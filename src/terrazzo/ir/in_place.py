"""What a kernel stores in the memory of something else: of what it reads for the last time, or of an input whose new
value it is.

Each of its elements is made of what lies in its own place, and of nothing else there: whoever stores it has read that
before, and nobody else needs it. So the order in which elements are computed does not matter. The old value of an input
may also be read by nobody any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from terrazzo.errors import UserError
from terrazzo.ir.contraction import contraction
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr
from terrazzo.ir.node import per_node, topological
from terrazzo.ir.torch_types import operator
from terrazzo.ir.types import Type

WORTH = 1 << 20
"""Bytes from which on it is done."""

Steps = Sequence[l.Kernel | l.Call]


@per_node
def replaceable(kernel: l.Kernel) -> tuple[tuple[l.Buffer, l.Buffer], ...]:
    """What a kernel stores, with what it may take the place of by the kernel's term alone.

    That is read in one place only, and in no sum: others would read it too, or again. Nor is it read for another store,
    unless both have one loop and no sums, so that they are computed together: stores of a tile go one after the other.
    """
    loads: dict[l.Buffer, list[l.Load]] = {}
    for x in kernel.terms:
        if isinstance(x, l.Load):
            loads.setdefault(x.buffer, []).append(x)
    once = [x for x, *others in loads.values() if not others and not x.inside]
    found = []
    for s in kernel.stores:
        same = [x for x in once if _same_place(x, s)]
        if not same or not set(kernel.axes) <= {a for e in s.index for a in _axes(e)}:
            continue
        others = [t for t in kernel.stores if t is not s]
        apart = [t.value for t in others if kernel.carried or t.index != s.index]
        wanted = set(topological([s.value]))
        wanted -= {*topological([x for r in kernel.carried for x in r.args]), *topological(apart)}
        if all(t.buffer is not s.buffer for t in others):
            found += [(s.buffer, x.buffer) for x in same if x in wanted]
    return tuple(found)


def _same_place(x: l.Load, s: l.Store) -> bool:
    """Whether what is loaded lies as far behind the first element as what is stored, in as much memory."""
    one, other = x.buffer.type, s.buffer.type
    if one.dtype is not other.dtype or one.span != other.span:
        return False
    return (one == other and x.index == s.index) or _place(x.index, one) == _place(s.index, other)


def _place(index: tuple[IntExpr, ...], kind: Type) -> IntExpr:
    place: IntExpr = 0
    for e, stride in zip(index, kind.element_strides, strict=True):
        place = place + e * stride
    return place


def _axes(index: IntExpr) -> frozenset[object]:
    return index.free if isinstance(index, Expr) else frozenset()


Given = Mapping[l.Buffer, l.Buffer]
"""New values of inputs that may lie where these do, with these."""
NOTHING_GIVEN: Given = MappingProxyType({})


def pairs(steps: Steps, kernels: bool = True) -> dict[l.Buffer, list[l.Buffer]]:
    """What `kernels` store that is large, with all that each may take the place of; and what ops of PyTorch give that
    can do what they do to their first operand in place.
    """
    found: dict[l.Buffer, list[l.Buffer]] = {}
    for s in steps:
        if isinstance(s, l.Call):
            if (old := changed_by(s)) is not None:
                found[s.writes[0]] = [old]
        elif kernels and isinstance(s, l.Kernel):
            for b, old in _large(s):
                found.setdefault(b, []).append(old)
    return found


@per_node
def _large(kernel: l.Kernel) -> tuple[tuple[l.Buffer, l.Buffer], ...]:
    """What a kernel stores that is large, with what it may take the place of."""
    if all(b.type.span < WORTH for b in kernel.writes):  # most are small, and terms take long to look through
        return ()
    return tuple((b, old) for b, old in replaceable(kernel) if b.type.span >= WORTH)


def updates(program: l.Program, updated: Sequence[str], products: bool = True) -> dict[l.Buffer, l.Buffer]:
    """The new values of `updated` inputs, which are the program's last results, with these, as far as the terms of
    kernels let them lie there: where one reads the input, it is that of its own place, and beside `products` only where
    these are through before it stores.
    """
    inputs = {b.name: b for b in program.inputs}
    writer = {b: s for s in program.steps for b in s.writes}
    found = {}
    for b, old in zip(program.results[len(program.results) - len(updated) :], map(inputs.get, updated), strict=True):
        if old is None or b not in writer or b.type != old.type or program.results.count(b) > 1:
            continue
        if lies_over(writer[b], b, old, products):
            found[b] = old
    return found


def lies_over(kernel: l.Kernel | l.Call, new: l.Buffer, old: l.Buffer, products: bool = True) -> bool:
    """Whether a kernel may store in the memory of something that nobody reads afterwards, by its term alone; or an op
    of PyTorch work there.
    """
    if isinstance(kernel, l.Call):
        return changed_by(kernel) is old
    if not any(isinstance(x, l.Load) and x.buffer is old for x in kernel.terms):
        return True
    alone = products or not any(isinstance(x, l.Reduce) and contraction(x) for x in kernel.carried)
    return alone and (new, old) in replaceable(kernel)


def taken_over(
    steps: Sequence[Any],
    results: Sequence[l.Buffer],
    among: Mapping[l.Buffer, Sequence[l.Buffer]],
    ahead: Callable[[Iterable[int], int], bool] | None = None,
    apart: Collection[l.Buffer] = (),
    given: Given = NOTHING_GIVEN,
    last: Mapping[l.Buffer, int] | None = None,
) -> dict[l.Buffer, l.Buffer]:
    """What steps (of any IR) store in the memory of something else, with that, `among` what their terms allow. They go
    one after the other, or as `ahead` says, which is asked whether steps are through when another begins.

    That was written by a step before, and is used by none after, not even as a view that PyTorch has of it. What one of
    PyTorch's ops made becomes a result of the same type only; what is kept `apart` is left alone. What is `given` may
    lie in the memory of an input, if none uses that afterwards. The number of the `last` step that uses a buffer may be
    known, which is all that is asked where nothing is `given` and steps go one after the other.
    """
    if not among and not given:
        return {}
    asked = {old for some in among.values() for old in some}.union(given.values())
    known = last if last is not None and ahead is None and not given else None
    uses: dict[l.Buffer, list[int]] = {b: [] if known is None else [known[b]] for b in asked}
    for n, s in enumerate(steps if known is None else ()):
        for b in asked.intersection((*s.reads, *s.writes)):
            uses[b].append(n)
    calls = [s for s in steps if isinstance(s, l.Call)]
    seen = {b for s in calls if views(s.name) for b in (*s.reads, *s.writes)}.union(apart)
    made = {b for s in calls for b in s.writes}
    theirs = set(made)  # what lies in memory that PyTorch has made
    found: dict[l.Buffer, l.Buffer] = {}
    kept = set(results)
    there: set[l.Buffer] = set()  # what was written, has not been taken over, and is no result
    for n, s in enumerate(steps):
        for b in s.writes:
            if (home := given.get(b)) is not None:
                users = [m for m in uses[home] if m != n]
                through = all(m < n for m in users) and (ahead is None or ahead(users, n))
                if through and home not in seen and home not in kept and b not in apart:
                    found[b] = home
                    made.discard(b)
                    theirs.discard(b)
                    continue
            for old in among.get(b, ()) if b not in apart else ():
                through = uses[old][-1] == n and (ahead is None or ahead([m for m in uses[old] if m != n], n))
                fits = old not in theirs or b not in kept or (old in made and old.type == b.type)
                if old in there and through and old not in seen and fits:
                    found[b] = old
                    there.discard(old)
                    made.discard(b)
                    theirs.discard(b)
                    theirs |= {b} if old in theirs else set()
                    break
        there.update(b for b in s.writes if b not in kept)
    return found


@per_node
def changed_by(call: l.Call) -> l.Buffer | None:
    """The operand of an op of PyTorch that a variant of the op writes its one result to; None where there is none."""
    if call.order or len(call.results) != 1 or not call.args or not isinstance(call.args[0], l.Buffer):
        return None
    (new,), old = call.results, call.args[0]
    again = l.Call(call.name, call.args[1:], call.kwargs, call.results)
    alone = new is not None and new.type == old.type and old not in again.reads
    return old if alone and in_place_variant(call.name) else None


@lru_cache(maxsize=1024)
def in_place_variant(name: str) -> str:
    """What the op is called that does the same to its first operand, as aten.index_add_.default; "" if none does."""
    head, _, overload = name.rpartition(".")
    try:
        plain, found = operator(name)._schema, operator(f"{head}_.{overload}")._schema
    except UserError:
        return ""
    same = [(x.name, str(x.type)) for x in plain.arguments] == [(x.name, str(x.type)) for x in found.arguments]
    written = [x.alias_info is not None and x.alias_info.is_write for x in found.arguments]
    alone = len(plain.returns) == 1 and not any(x.alias_info for x in (*plain.arguments, *plain.returns))
    first = written[:1] == [True] and not any(written[1:])
    return f"{head}_.{overload}" if same and alone and first else ""


def can_be_told(call: l.Call) -> bool:
    """Whether an op of PyTorch writes its one result where it is told to."""
    return not call.order and len(call.writes) == len(call.results) == 1 and bool(given_variant(call.name))


@lru_cache(maxsize=1024)
def given_variant(name: str) -> str:
    """What the op is called that writes its one result where it is told to, as aten.mm.out; "" if none does. Those of
    PyTorch's "structured" kernels do, which alone have one that is for each device and not functional; others make a
    result and copy it there.
    """
    import torch

    head, _, overload = name.rpartition(".")
    given = "out" if overload == "default" else f"{overload}_out"
    try:
        plain, found = operator(name)._schema, operator(f"{head}.{given}")._schema
    except UserError:
        return ""
    *same, last = ((x.name, str(x.type)) for x in found.arguments)
    one = [str(x.type) for x in plain.returns] == ["Tensor"] and not any(x.alias_info for x in plain.arguments)
    alike = [(x.name, str(x.type)) for x in plain.arguments] == same and last == ("out", "Tensor")
    plainly = "::".join(name.removesuffix(".default").split(".", 1))
    structured = torch._C._dispatch_has_kernel_for_dispatch_key(plainly, "CompositeExplicitAutogradNonFunctional")
    return f"{head}.{given}" if one and alike and structured else ""


@lru_cache(maxsize=1024)
def views(name: str) -> bool:
    """Whether an op of PyTorch may give a view of what it is given."""
    try:
        return any(x.alias_info is not None for x in operator(name)._schema.returns)
    except UserError:
        return True


def viewed(steps: Iterable[Any]) -> dict[l.Buffer, l.Buffer]:
    """What ops of PyTorch give that may be views, with what these are views of in the end."""
    found: dict[l.Buffer, l.Buffer] = {}
    for s in steps:
        if isinstance(s, l.Call) and len(s.results) == 1 and s.writes and s.reads and views(s.name):
            found[s.writes[0]] = found.get(s.reads[0], s.reads[0])
    return found
