"""Static checks of kernels: bounds, alignment, who meets at barriers, budgets, the order of copies and waits (`order`),
fences.

They are made of every kernel before CUDA is written. What ranges prove holds; what they do not is tried: on all threads
and steps where these are few, else on the first and last ones. A thread that goes wrong is a finding, but not where an
integer that threads carry is part of it, which may never be what was tried. What is neither proved nor refuted is left
to the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from terrazzo.collector import remembered
from terrazzo.errors import CompilerBug, UserError, about
from terrazzo.hw import mma_sync, wgmma
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.address import divides, evaluate, flatten
from terrazzo.ir.canonical import as_its_form
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.expr import Expr, FloorDiv, IntExpr, Loaded, Var, at_least, bounds, terms_of
from terrazzo.ir.node import Node, topological
from terrazzo.ir.places import TextLine
from terrazzo.ir.proof import holds
from terrazzo.ir.show_kernel import statement
from terrazzo.ir.types import u32
from terrazzo.ir.verify_kernel import REGISTERS, declared
from terrazzo.targets.cuda import fences, order
from terrazzo.targets.cuda.accesses import Access, Around, accesses, integers, most, slabs, statements, terms

MOST = 1 << 15
"""Threads and steps that are tried for one question, at most."""


@dataclass(frozen=True)
class Report:
    """What is wrong with a kernel, and of how many of its accesses it is proved that they stay inside and are
    aligned. `where` are the numbers of the problems' lines in the kernel's text (0 where it is none), and `unproved`
    the statements of which some access is neither proved nor refuted, with theirs.
    """

    problems: tuple[str, ...]
    proved: int
    accesses: int
    where: tuple[int, ...] = ()
    unproved: tuple[tuple[Node, int], ...] = ()

    def refusal(self) -> tuple[str, int] | None:
        """What a kernel that somebody else wrote is refused for, and in which line: more than a kernel of our own."""
        if self.problems:
            return self.problems[0], self.where[0]
        if self.unproved:
            s, line = self.unproved[0]
            return f"`{statement(s)[0]}`: it cannot be proved that it stays inside of what it reads and writes", line
        return None


def check(program: k.Program, gpu: Gpu, error: type[Exception] = CompilerBug) -> None:
    """Raise an error that names the kernel and the line of Kernel IR if a kernel cannot be right on this GPU, or, where
    it is the user's, if not all of its accesses are proved.
    """
    for step in program.steps:
        if not isinstance(step, k.Kernel):
            continue
        found = as_its_form(lambda kernel: report(kernel, gpu), step)
        if error is UserError and (refused := found.refusal()):
            with about(TextLine(step, refused[1])):
                raise error(f"{step.name}: {refused[0]}")
        if found.problems:
            raise error(f"{step.name}: {found.problems[0]}")


@remembered
def report(kernel: k.Kernel, gpu: Gpu) -> Report:
    """All that can be said of a kernel without running it."""
    problems: list[tuple[str, int]] = [(why, 0) for why in budgets(kernel, gpu)]
    unproved: list[tuple[Node, int]] = []
    count = 0
    sizes_around: dict[Around, dict[str, Any]] = {}
    apart: dict[tuple[str, Around], tuple[str, ...]] = {}  # what may not be where, by who is to reach it together
    for s, around, line in statements(kernel):
        if around not in sizes_around:
            loops = {v.name: most(v.extent) for v in around.loops}
            sizes_around[around] = {k.BLOCK: kernel.grid, "warp": kernel.warps, "lane": k.WARP} | loops
        sizes, who = sizes_around[around], together(s)
        if who and (who, around) not in apart:
            apart[who, around] = tuple(divided(who, around, sizes))
        why_not = (*operands(s), *(apart[who, around] if who else ()))
        problems += [(f"`{statement(s)[0]}` {why}", line) for why in why_not]
        for access in (*accesses(s, around), *slabs(s, around)):
            why, proved = inside(access, sizes)
            problems += [(f"`{statement(s)[0]}` {why}", line)] if why else []
            unproved += [] if proved or why else [(s, line)]
            count += 1
        if isinstance(s, k.SetInteger | k.DeclareInteger):
            why, proved = stays(s, around, sizes)
            problems += [(f"`{statement(s)[0]}` {why}", line)] if why else []
            unproved += [] if proved or why else [(s, line)]
            count += 1
    if not problems:
        problems += [(why, 0) for why in order.problems(kernel) + fences.problems(kernel)]
    texts, where = tuple(why for why, _ in problems), tuple(line for _, line in problems)
    return Report(texts, count - len(unproved), count, where, tuple(unproved))


def budgets(kernel: k.Kernel, gpu: Gpu) -> Iterator[str]:
    """What a block needs more of than there is."""
    for what, needs, has in (
        ("bytes of shared memory", kernel.shared_bytes, gpu.shared),
        ("threads in a block", kernel.threads, 1024),
        ("registers of a thread", declared(kernel.body), REGISTERS),
    ):
        if needs > has:
            yield f"needs {needs} {what}, and {gpu.arch} has {has}"


def operands(s: Node) -> Iterator[str]:
    """The factors and accumulators of a product that are not of the types its instruction takes."""
    if not isinstance(s, k.Multiply | k.MultiplyAsync):
        return
    record: Any = mma_sync.product(s.instruction) if isinstance(s, k.Multiply) else wgmma.product(s.instruction)
    factor = record.a.dtype
    for place, wanted in ((s.d, (record.d.dtype,)), (s.a, (factor, u32)), (s.b, (factor, u32))):
        wanted = (factor,) if isinstance(place, k.Shared) else wanted
        if place.type.dtype not in wanted:
            yield f"takes {' or '.join(x.name for x in wanted)}, and {place.name} holds {place.type.dtype}"


def together(s: Node) -> str:
    """Who must reach a statement together (a block, a warpgroup, a warp), or that it is for one lane; or nobody."""
    who = s.together if isinstance(s, k.Statement) else ""
    return who or ("warp" if any(isinstance(x, k.Shuffle | k.Vote) for x in terms(s)) else "")


def divided(who: str, around: Around, sizes: dict[str, Any]) -> Iterator[str]:
    """What only some threads reach of those that must reach it together, or several, and is for one."""
    one, whole = who == "lane", {"lane": 1, "warp": 1, "warpgroup": 4}.get(who, sizes["warp"])
    conditions = [g for g in around.inside if not at_least(g, 0)]
    names = ("lane",) if who == "warp" else ("lane", "warp")
    if any(v.name in k.THREADS[1:] for g in conditions if integers((g,)) for v in _variables((g,))):
        return
    if (
        not (one or any(v.name in names for v in _variables(conditions)))
        or (tried := _tried(conditions, sizes)) is None
    ):
        return
    env, _ = tried
    here = _holds(conditions, env) & np.ones([axis.size for axis in env.values()], bool)
    if one:
        if (here.sum(-1) > 1).any():
            yield "is executed by several threads of a warp, and is for one"
    elif sizes["warp"] % whole:
        yield f"needs groups of {whole} warps, and a block has {sizes['warp']}"
    elif ((group := here.reshape(-1, whole * k.WARP)).any(-1) != group.all(-1)).any():
        yield f"is reached by only some threads of a {'block' if who == 'cluster' else who}"


def stays(s: k.SetInteger | k.DeclareInteger, around: Around, sizes: dict[str, int]) -> tuple[str, bool]:
    """(where an integer leaves its range, or nothing; whether it is proved that it does not)."""
    extent = s.variable.extent
    left = [e for e in (s.value, extent - 1 - s.value) if not _implied(0, e, 1, around.inside)]
    if not left:
        return "", True
    if (tried := _tried([*left, *around.inside], sizes)) is None:
        return "", False
    env, complete = tried
    active = _holds(around.inside, env)
    wrong = [where for e in left if (where := _first(active & (_value(e, env) < 0))) is not None]
    if wrong and around.whole and not integers((*left, *around.inside)):
        return f"is outside [0, {extent}), at {_point(env, wrong[0])}", False
    return "", complete and not wrong


def inside(access: Access, sizes: dict[str, int]) -> tuple[str, bool]:
    """(what is wrong with an access, or nothing; whether it is proved to be right)."""
    place, shape, strides = access.place, access.place.type.static_shape, access.place.type.element_strides
    if 0 in sizes.values():
        return "", True  # nothing runs
    left: list[
        tuple[IntExpr, int, IntExpr]
    ] = []  # what must not be negative, by which dimension (-1: the end), and why
    for d, (e, extent) in enumerate(zip(access.index, shape, strict=True)):
        low, high = bounds(e)
        if (low is None or low < 0) and not _implied(0, e, 1, access.inside):
            left.append((e, d, e))
        whole, most = (e.a, extent * e.b) if isinstance(e, FloorDiv) and isinstance(e.b, int) else (e, extent)
        if (high is None or high >= extent) and not _implied(most - 1, whole, -1, access.inside):
            left.append((extent - 1 - e, d, e))
    size, wide = k.shared_bytes(place) // place.type.dtype.size, alignment(access)
    if access.count > 1 and (size % access.count or not _divides(access.count, access.index, strides)):
        offset = flatten(access.index, strides)
        left += (
            [] if _implied(size - access.count, offset, -1, access.inside) else [(size - access.count - offset, -1, 0)]
        )
    aligned = _divides(wide // math.gcd(wide, place.type.dtype.size), access.index, strides)
    left = [x for x in left if not holds(x[0], access.inside)]
    if not left and aligned:
        return "", True
    offset = 0 if aligned else flatten(access.index, strides) * place.type.dtype.size
    tried = _tried([*(e for e, _, _ in left), offset, *access.inside], sizes)
    if tried is None:
        return "", False
    env, complete = tried
    refutes = access.around.whole and not integers((*(e for e, _, _ in left), offset, *access.inside))
    active = _holds(access.inside, env)
    for e, d, index in left:
        if (where := _first(active & (_value(e, env) < 0))) is not None:
            outside = f"at [{index}] is outside [0, {shape[d]}) in dimension {d} of"
            what = outside if d >= 0 else f"goes {access.count} elements on, beyond the end of"
            return f"{what} {place.name}, at {_point(env, where)}" if refutes else "", False
    if not aligned and (where := _first(active & (_value(offset, env) % wide != 0))) is not None:
        return f"is not aligned to {wide} bytes in {place.name}, at {_point(env, where)}" if refutes else "", False
    return "", complete


def alignment(access: Access) -> int:
    """To how many bytes an access must be aligned."""
    match access.statement:
        case k.Move() | k.AsyncCopy():
            return min(access.count * access.place.type.dtype.size, 16)
        case k.TensorLoad() | k.TensorStore() if isinstance(access.place, k.Shared):
            return max(128, access.place.swizzle * 8)
        case k.LoadMatrix() | k.StoreMatrix() | k.MultiplyAsync() if isinstance(access.place, k.Shared):
            return 16
        case k.LoadMatrix() | k.StoreMatrix() | k.MultiplyAsync() | k.Multiply() | k.TurnMatrix():
            return 4  # whole 32-bit registers
    return 1


def _implied(constant: int, e: IntExpr, sign: int, conditions: Sequence[IntExpr]) -> bool:
    """Whether ranges prove constant + sign * e >= 0, perhaps given one of the conditions, each of which is an
    expression >= 0.
    """
    wanted = {factors: sign * c for factors, c in terms_of(e).items()}
    wanted[()] = wanted.get((), 0) + constant
    return any(_least(wanted, g) >= 0 for g in (0, *conditions))


def _least(terms: Mapping[tuple[Expr, ...], int], less: IntExpr) -> float:
    """A lower bound of a sum of products of atoms, less an expression."""
    total = dict(terms)
    for factors, c in terms_of(less).items():
        total[factors] = total.get(factors, 0) - c
    least: float = 0
    for factors, c in total.items():
        low, high = bounds(factors[0]) if len(factors) == 1 else (None, None) if factors else (1, 1)
        end = low if c > 0 else high
        least += 0 if not c else -math.inf if end is None else c * end
    return least


def _divides(count: int, index: Sequence[IntExpr], strides: Sequence[IntExpr]) -> bool:
    """Whether the offset of an index is visibly a multiple of `count` elements."""
    if count == 1 or not all(isinstance(step, int) for step in strides):
        return count == 1
    return divides(count, flatten(tuple(index), tuple(strides)))


def _variables(exprs: Sequence[IntExpr]) -> list[Var]:
    return [
        x
        for x in topological([e for e in exprs if isinstance(e, Expr)], stop=lambda n: isinstance(n, Loaded | Var))
        if isinstance(x, Var)
    ]


def _tried(exprs: Sequence[IntExpr], sizes: dict[str, int]) -> tuple[dict[str, Any], bool] | None:
    """Values of the variables to try, each along an axis of its own (warp and lane last), and whether these are all;
    None for data.
    """
    if any(isinstance(x, Loaded) for x in topological([e for e in exprs if isinstance(e, Expr)])):
        return None
    sizes = {v.name: most(v.extent) for v in integers(exprs)} | sizes
    names = {v.name for v in _variables(exprs)} | {"warp", "lane"}
    ordered = [n for n in sizes if n in names and n not in ("warp", "lane")] + ["warp", "lane"]
    values = [np.arange(sizes[n]) for n in ordered]
    complete = math.prod(map(len, values)) <= MOST
    for few in (3, 1, 0):
        if math.prod(map(len, values)) > MOST:
            values = [_ends(v, few) if n not in ("warp", "lane") else v for n, v in zip(ordered, values, strict=True)]
    if math.prod(map(len, values)) > MOST:
        return None
    axes = [v.reshape([-1 if d == n else 1 for d in range(len(ordered))]) for n, v in enumerate(values)]
    return dict(zip(ordered, axes, strict=True)), complete


def _ends(values: Any, few: int) -> Any:
    """The first and last values, and `few` next to each."""
    return values if len(values) <= 2 * few + 2 else np.concatenate([values[: few + 1], values[-few - 1 :]])


def _value(e: IntExpr, env: dict[str, Any]) -> Any:
    known: dict[Expr, Any] = {v: env[v.name] for v in _variables((e,))}
    return np.asarray(evaluate(e, known))


def _holds(conditions: Sequence[IntExpr], env: dict[str, Any]) -> Any:
    """Where all conditions hold."""
    active: Any = np.ones(1, bool)
    for g in conditions:
        active = active & (_value(g, env) >= 0)
    return active


def _first(where: Any) -> Any:
    return np.argwhere(where)[0] if where.any() else None


def _point(env: dict[str, Any], where: Any) -> str:
    """A thread and the step of its loops; a variable on which nothing depends is at its first value."""
    found = ((name, axis.reshape(-1)[where[n] if n < len(where) else 0]) for n, (name, axis) in enumerate(env.items()))
    return ", ".join(f"{name} {value}" for name, value in found)
