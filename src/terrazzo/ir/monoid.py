"""Monoids: what a reduction or a scan combines with. One value or a tuple; an identity; an associative combination.

`combine` is written once, with the scalar functions, against a builder `f(name, *args)`: called with numpy values it
computes, called with terms it builds them, so the interpreter and every code generator share one definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from terrazzo.errors import UserError
from terrazzo.ir.dialects.scalar import scalar
from terrazzo.ir.node import distinct
from terrazzo.ir.types import DType

Builder = Callable[..., Any]
Values = Sequence[Any]


@distinct
@dataclass(frozen=True, eq=False)
class Monoid:
    """`width` values are combined together. `identity` gives their neutral element for their types.

    `ufunc` is numpy's name for a monoid of one value. A monoid in a `frame` combines its first values by that
    function; the others are sums, each in the frame of all, where they are exp(own frame - that of all) times as much.
    `after` combines with what is known to come later, where that is less work. One that does not commute is for scans,
    whose elements are combined in order.
    """

    name: str
    width: int
    identity: Callable[[Sequence[DType]], tuple[Any, ...]]
    combine: Callable[[Builder, Values, Values], tuple[Any, ...]]
    ufunc: Any = None
    frame: str = ""
    after: Callable[[Builder, Values, Values], tuple[Any, ...]] | None = None
    commutes: bool = True

    def __repr__(self) -> str:
        return self.name


def _simple(name: str, fn: str, identity: Callable[[DType], Any], ufunc: Any) -> Monoid:
    return Monoid(name, 1, lambda t: (identity(t[0]),), lambda f, a, b: (f(fn, a[0], b[0]),), ufunc)


def _arg(better: str, last: bool) -> Callable[[Builder, Values, Values], tuple[Any, ...]]:
    """(value, index): the better value wins, NaN beats every number, and among equals the first (or last) index."""

    def combine(f: Builder, a: Values, b: Values) -> tuple[Any, ...]:
        nan_a, nan_b = f("ne", a[0], a[0]), f("ne", b[0], b[0])
        wins = f("or_", f(better, b[0], a[0]), f("and_", nan_b, f("not_", nan_a)))  # nothing is better than NaN
        tie = f("or_", f("eq", a[0], b[0]), f("and_", nan_a, nan_b))
        take = f("or_", wins, f("and_", tie, f("gt" if last else "lt", b[1], a[1])))
        return f("where", take, b[0], a[0]), f("where", take, b[1], a[1])

    return combine


def _arg_after(no_worse: str) -> Callable[[Builder, Values, Values], tuple[Any, ...]]:
    """The same of a later index that wins among equals."""

    def combine(f: Builder, a: Values, b: Values) -> tuple[Any, ...]:
        take = f("or_", f(no_worse, b[0], a[0]), f("ne", b[0], b[0]))
        return f("where", take, b[0], a[0]), f("where", take, b[1], a[1])

    return combine


def _arg_identity(worst: str, last: bool) -> Callable[[Sequence[DType]], tuple[Any, ...]]:
    return lambda t: (getattr(t[0], worst), -1 if last else t[1].highest)


def _welford(f: Builder, a: Values, b: Values) -> tuple[Any, ...]:
    """(mean, sum of squared deviations, count), combined as Chan, Golub and LeVeque (1979) do; an empty side changes
    nothing.
    """
    n = f("add", a[2], b[2])
    zero = f("sub", n, n)
    left, right = f("eq", b[2], zero), f("eq", a[2], zero)  # only that side has elements
    share = f("div", b[2], n)
    delta = f("sub", b[0], a[0])
    mean = f("add", a[0], f("mul", delta, share))
    spread = f("add", f("add", a[1], b[1]), f("mul", f("mul", delta, delta), f("mul", a[2], share)))
    return (*(f("where", left, a[k], f("where", right, b[k], both)) for k, both in enumerate((mean, spread))), n)


def _logsumexp(f: Builder, a: Values, b: Values) -> tuple[Any, ...]:
    """(maximum, sum of exp(x - maximum)): the pair behind a stable log-sum-exp and online softmax."""
    top = f("max", a[0], b[0])

    def rescaled(x: Values) -> Any:  # inf - inf is NaN; equal maxima need no rescaling
        return f("where", f("eq", x[0], top), x[1], f("mul", x[1], f("exp", f("sub", x[0], top))))

    return top, f("add", rescaled(a), rescaled(b))


def _recurrence(f: Builder, a: Values, b: Values) -> tuple[Any, ...]:
    """(factor, summand) of the steps h -> factor * h + summand, those of `a` before those of `b` (Blelloch 1990)."""
    return f("mul", a[0], b[0]), f("add", f("mul", b[0], a[1]), b[1])


MONOIDS = {
    m.name: m
    for m in (
        _simple("sum", "add", lambda t: 0, np.add),
        _simple("prod", "mul", lambda t: 1, np.multiply),
        _simple("max", "max", lambda t: t.lowest, np.maximum),
        _simple("min", "min", lambda t: t.highest, np.minimum),
        _simple("any", "or_", lambda t: False, np.bitwise_or),
        _simple("all", "and_", lambda t: -1 if t.kind == "int" else t.highest, np.bitwise_and),
        _simple("xor", "xor", lambda t: False if t.kind == "bool" else 0, np.bitwise_xor),
        Monoid("argmax", 2, _arg_identity("lowest", False), _arg("gt", False)),
        Monoid("argmin", 2, _arg_identity("highest", False), _arg("lt", False)),
        Monoid("argmax_last", 2, _arg_identity("lowest", True), _arg("gt", True), after=_arg_after("ge")),
        Monoid("argmin_last", 2, _arg_identity("highest", True), _arg("lt", True), after=_arg_after("le")),
        Monoid("welford", 3, lambda t: (0.0, 0.0, 0.0), _welford),
        Monoid("logsumexp", 2, lambda t: (t[0].lowest, 0.0), _logsumexp, None, "max"),
        Monoid("recurrence", 2, lambda t: (1, 0), _recurrence, commutes=False),
    )
}


def monoid(name: str) -> Monoid:
    """The monoid called `name`."""
    if name not in MONOIDS:
        raise UserError(f"unknown monoid {name!r}; known: {', '.join(MONOIDS)}")
    return MONOIDS[name]


def numpy_builder(name: str, *args: Any) -> Any:
    """The builder that computes with numpy."""
    return scalar(name).numpy(*args)
