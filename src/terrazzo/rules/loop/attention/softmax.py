"""A softmax, found in the terms of the kernels that compute it, whatever they came from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Var
from terrazzo.ir.monoid import monoid
from terrazzo.ir.node import substitute
from terrazzo.rules.loop.definitions import Definitions


@dataclass(frozen=True)
class Softmax:
    """A kernel that stores exp(score - top) / total along `column`; `empty` says which rows are 0 instead."""

    kernel: l.Kernel
    column: Var
    score: Any
    top: Any
    total: Any
    empty: Any

    @property
    def buffer(self) -> l.Buffer:
        return self.kernel.stores[0].buffer

    @property
    def rows(self) -> list[Var]:
        return [a for a in self.kernel.axes if a is not self.column]


def softmaxes(program: l.Program, known: Definitions) -> list[Softmax]:
    """The kernels that end a softmax: not those whose weights another one of them only completes."""
    found = [w for s in program.steps if isinstance(s, l.Kernel) and (w := softmax(known, s)) is not None]
    kernels = {w.kernel for w in found}
    return [w for w in found if not set(known.readers.get(w.buffer, ())) <= kernels]


def softmax(known: Definitions, kernel: l.Kernel) -> Softmax | None:
    """A kernel as a softmax, or None."""
    (store, *more) = kernel.stores
    value: Any = store.value
    empty = None
    match value:
        case l.Apply(fn=fn, args=(condition, l.Literal(value=0), rest)) if fn.name == "where":
            empty, value = condition, rest
    match known.unfold(value):
        case l.Apply(fn=fn, args=(weight, total)) if fn.name == "div" and not more:
            pass
        case _:
            return None
    match known.unfold(weight):
        case l.Apply(fn=fn, args=(difference,)) if fn.name == "exp":
            pass
        case _:
            return None
    match known.unfold(difference):
        case l.Apply(fn=fn, args=(score, top)) if fn.name == "sub":
            pass
        case _:
            return None
    columns = [a for a in kernel.axes if a in score.free and a not in top.free]
    if len(columns) != 1 or value.dtype.name != "f32":
        return None
    over = partial(_over, columns[0])
    known_rows = known.unfold(top) is over("max", score) and known.unfold(total) is over("sum", weight)
    if not known_rows or (empty is not None and not _nothing(known, empty, columns[0], score)):
        return None
    return Softmax(kernel, columns[0], score, top, total, empty)


@dataclass(frozen=True)
class Exponential:
    """A kernel that stores exp(score - row) along `column`, where `row` is a number of each row that is stored: the
    logarithm of its sum, which another program keeps, or is given. Or exp(score - top - row), of two such numbers.
    """

    kernel: l.Kernel
    column: Var
    score: Any
    row: l.Load
    top: l.Load | None = None

    @property
    def buffer(self) -> l.Buffer:
        return self.kernel.stores[0].buffer


def exponentials(program: l.Program, known: Definitions) -> list[Exponential]:
    """The kernels that store such weights."""
    kernels = [s for s in program.steps if isinstance(s, l.Kernel) and len(s.stores) == 1]
    outside = {*program.inputs, *program.results}
    return [w for s in kernels if (w := _exponential(known, s)) is not None and w.row.buffer in outside]


def _exponential(known: Definitions, kernel: l.Kernel) -> Exponential | None:
    match kernel.stores[0].value:
        case l.Apply(fn=fn, args=(difference,), dtype=kind) if fn.name == "exp" and kind.name == "f32":
            pass
        case _:
            return None
    match known.unfold(difference):
        case l.Apply(fn=fn, args=(score, row)) if fn.name == "sub":
            row = _kept(known, row)
        case _:
            return None
    columns = [a for a in kernel.axes if a in score.free and a not in row.free]
    if len(columns) != 1 or not isinstance(row, l.Load) or row.inside:
        return None
    match known.unfold(score):
        case l.Apply(fn=fn, args=(whole, top)) if fn.name == "sub" and columns[0] not in top.free:
            top = _kept(known, top)
            if isinstance(top, l.Load) and top.buffer in known.kept and not top.inside:
                return Exponential(kernel, columns[0], whole, row, top)
    return Exponential(kernel, columns[0], score, row)


def _kept(known: Definitions, x: Any) -> Any:
    """A term; where it is loaded, from where the program keeps it."""
    while isinstance(x, l.Load) and x.buffer not in known.kept and isinstance(known.of(x), l.Load):
        x = known.of(x)
    return x


def of_products(known: Definitions, score: Any) -> bool:
    """Whether scores are products, or multiples of these, and -inf where they are hidden. The largest of a row has the
    rounding of a product then, and one number that it is added to loses no more. Of others nobody knows: where all of a
    row are hidden by -1e9, nothing of the logarithm of their number is left beside that.
    """
    x = known.unfold(score)
    if isinstance(x, l.Reduce):
        return bool(x.monoid.name == "sum")
    if not isinstance(x, l.Apply):
        return False
    if x.fn.name == "where":
        hidden = [isinstance(a, l.Literal) and a.value == -math.inf for a in x.args[1:]]
        return all(h or of_products(known, a) for h, a in zip(hidden, x.args[1:], strict=True)) and not all(hidden)
    if x.fn.name == "add":
        return any(
            _constants(known, a) <= {0.0, -math.inf} and of_products(known, b) for a, b in (x.args, x.args[::-1])
        )
    if x.fn.name in ("mul", "div"):
        return any(of_products(known, a) for a in x.args[: 2 if x.fn.name == "mul" else 1])
    return (is_cast(x.fn) or x.fn.name in ("neg", "tanh")) and of_products(known, x.args[0])


def _constants(known: Definitions, x: Any) -> set[Any]:
    """The numbers that a term is one of; None among them where it may be others."""
    x = known.core(x)
    if isinstance(x, l.Literal):
        return {x.value}
    if isinstance(x, l.Apply) and x.fn.name == "where":
        return _constants(known, x.args[1]) | _constants(known, x.args[2])
    return {None}


def _over(axis: Var, name: str, term: Any) -> l.Reduce:
    return l.Reduce.make(monoid(name), (axis,), (term,))


def _nothing(known: Definitions, empty: Any, column: Var, score: Any) -> bool:
    """Whether a condition says that all scores of a row are -inf."""
    found = known.unfold(empty)
    if not isinstance(found, l.Reduce) or found.monoid.name != "all" or len(found.axes) != 1:
        return False
    (axis,), (term,) = l.open_binder(found)
    match known.unfold(term):
        case l.Apply(fn=fn, args=(other, l.Literal(value=value))) if fn.name == "eq" and value == -math.inf:
            return bool(substitute(other, {axis: column}) is score)
    return False
