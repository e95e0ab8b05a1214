"""The rules of integer arithmetic in index expressions, proved by trying everything small.

Every form that index expressions take is built from small numbers, and has, for every value of its variables, the value
and the range that Python's own arithmetic gives it. Every line of every rule must be reached by one of them: a rule
that never fires is not proved.
"""

from __future__ import annotations

import dis
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

from terrazzo.ir import expr
from terrazzo.ir.address import evaluate, flatten, unflatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Expr, IntExpr, Size, Var, bounds
from terrazzo.ir.types import Type, f32
from terrazzo.ir.verify import store_problem
from terrazzo.rules.loop.fusion.inline import axes_at
from terrazzo.rules.loop.layout.layout import _groups, _merge

X, Y, N = Var("x", 6), Var("y", 4), Size("n", 1, 5)
GRID = dict(zip((X, Y, N), np.meshgrid(np.arange(6), np.arange(4), np.arange(1, 6), indexing="ij"), strict=True))

Form = tuple[IntExpr, Any]
"""An expression as our rules normalise it, and its value at every point of the grid by Python's operators."""


def var(v: Expr) -> Form:
    return v, GRID[v]


def op(f: Callable[[Any, Any], Any], a: Form, b: Form) -> Form:
    return f(a[0], b[0]), f(a[1], b[1])


def add(a: Form, b: Form) -> Form:
    return op(lambda x, y: x + y, a, b)


def times(a: Form, c: int) -> Form:
    return a[0] * c, a[1] * c


def div(a: Form, b: Form) -> Form:
    return op(lambda x, y: x // y, a, b)


def rem(a: Form, b: Form) -> Form:
    return op(lambda x, y: x % y, a, b)


def number(c: int) -> Form:
    return c, c


def sums() -> Iterator[Form]:
    """c x + d y + e."""
    for c, d, e in itertools.product((-4, -1, 1, 2, 3, 4, 6), (0, 1, 2, -3, 4), (-7, 0, 1, 12)):
        yield add(add(times(var(X), c), times(var(Y), d)), number(e))


def forms() -> Iterator[Form]:
    """Sums, their quotients and remainders, those of those, and what comes of putting parts together again; also by
    sizes.
    """
    yield from ((expr.floordiv(a, b), a // b) for a in range(-9, 10) for b in range(1, 5))
    yield from ((expr.mod(a, b), a % b) for a in range(-9, 10) for b in range(1, 5))
    for s in sums():
        for b in (1, 2, 3, 4, 6, 12):
            q, r = div(s, number(b)), rem(s, number(b))
            yield from (q, r, add(times(q, b), r))
            for c in (2, 3, 4):
                yield from (div(q, number(c)), rem(q, number(c)), div(r, number(c)), rem(r, number(c)))
                yield from (
                    div(add(times(var(Y), c), q), number(b)),
                    rem(add(times(q, c), rem(var(Y), number(c))), number(b * c)),
                )
    n = var(N)
    for c, d, e in itertools.product((0, 1, 2, -1), (0, 1, 3), (-2, 0, 1, 7)):
        s = add(add(op(lambda a, b: a * b, n, times(var(X), c)), times(var(Y), d)), number(e))
        for by in (n, times(n, 2), add(n, number(1)), op(lambda a, b: a * b, n, n)):
            yield from (div(s, by), rem(s, by), add(op(lambda a, b: a * b, div(s, by), by), rem(s, by)))


def right(form: Form) -> None:
    e, meant = form
    value = np.broadcast_to(evaluate(e, GRID), GRID[X].shape)
    assert np.array_equal(value, np.broadcast_to(meant, value.shape)), e
    lo, hi = bounds(e)
    assert lo is None or lo <= value.min(), (e, lo)
    assert hi is None or value.max() <= hi, (e, hi)


KEPT = (expr.floordiv, expr.mod)  # what they made is kept, and not made again
RULES = (*map(unwrap, KEPT), expr._recombine, expr._split, expr._quotient, expr._coarsen)


@contextmanager
def lines_run(functions: tuple[Any, ...]) -> Iterator[set[tuple[str, int]]]:
    """The lines of `functions` that run inside."""
    codes: dict[CodeType, str] = {f.__code__: f.__name__ for f in functions}
    seen: set[tuple[str, int]] = set()

    def line(frame: Any, event: str, arg: Any) -> Any:
        seen.add((codes[frame.f_code], frame.f_lineno))
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: line if frame.f_code in codes else None)
    try:
        yield seen
    finally:
        sys.settrace(before)


def test_every_rule_of_index_expressions_holds_and_fires() -> None:
    for rule in KEPT:
        rule.cache_clear()
    with lines_run(RULES) as seen:
        for form in forms():
            right(form)
    # What is refused (a divisor that is not positive) has its own tests among the errors; a `continue` guards what
    # nothing small reaches.
    source = Path(expr.__file__).read_text().splitlines()
    lines = {
        (f.__name__, n) for f in RULES for _, n in dis.findlinestarts(f.__code__) if n and n > f.__code__.co_firstlineno
    }
    missed = sorted(
        n for name, n in lines - seen if not source[n - 1].strip().startswith(("raise UserError", "continue"))
    )
    assert not missed, [f"{n}: {source[n - 1].strip()}" for n in missed]


def test_a_flat_index_and_its_digits() -> None:
    for shape in itertools.product(range(1, 5), repeat=3):
        total = int(np.prod(shape))
        strides = (shape[1] * shape[2], shape[2], 1)
        flat = Var("f", total)
        digits = unflatten(flat, shape)
        numbers: dict[Expr, Any] = {flat: np.arange(total)}
        assert np.array_equal(np.broadcast_to(evaluate(flatten(digits, strides), numbers), (total,)), numbers[flat])
        for digit, meant in zip(digits, np.unravel_index(numbers[flat], shape), strict=True):
            assert np.array_equal(np.broadcast_to(evaluate(digit, numbers), (total,)), meant)


def test_merged_dimensions_are_a_bijection() -> None:
    """Whatever `store_as_read` merges, every element of the old buffer has a place of its own in the new one."""
    merged = 0
    for shape in itertools.product((2, 3), repeat=3):
        for dims in itertools.permutations(range(3), 2):
            flat, other = Var("f", shape[dims[0]] * shape[dims[1]]), Var("o", shape[3 - sum(dims)])
            index: list[IntExpr] = [other] * 3
            index[dims[0]], index[dims[1]] = flat // shape[dims[1]], flat % shape[dims[1]]
            groups = _groups(l.Load(l.Buffer("b", Type(f32, shape)), tuple(index)))
            assert groups is not None
            merged += 1
            here = np.indices(shape)
            places = [np.asarray(_merge(tuple(here), g, shape)) for g in groups]
            sizes = [int(np.prod([shape[d] for d in g])) for g in groups]
            assert len(np.unique(np.ravel_multi_index(places, sizes))) == int(np.prod(shape))
    assert merged == 48


def test_the_axes_at_which_an_element_is_stored() -> None:
    """Whatever axes a store merges or takes apart, the element at an index is found again."""
    a, b, c, one = Var("a", 4), Var("b", 3), Var("c", 2), Var("one", 1)
    stores: list[tuple[IntExpr, ...]] = [
        (a, b, c, one),
        (b, a * 2 + c),
        (a * 6 + b * 2 + c,),
        (c, one * 3 + b, a),
        (a // 2, (b * 2 + a % 2) * 2 + c),
        (a % 2, b * 4 + c * 2 + a // 2, one),
        (3 - a, b, c),
        (b, a * 2 - c + 1),
        (b * 8 - (a % 2) * 4 + c * 2 + 4 - a // 2 + 1,),
    ]
    for index in stores:
        shape = tuple((bounds(e)[1] or 0) + 1 for e in index)
        axes = sorted({v for e in index if isinstance(e, Expr) for v in e.free}, key=lambda v: v.name)
        points = np.indices([v.extent for v in axes])
        value = l.Index(sum(v * 10**n for n, v in enumerate(axes)))
        store = l.Store(l.Buffer("s", Type(value.dtype, shape)), index, value)
        assert not store_problem(store)
        at = tuple(Var(f"i{d}", n) for d, n in enumerate(shape))
        env: dict[Expr, Any] = dict(zip(axes, points, strict=True))
        places: dict[Expr, Any] = {v: evaluate(e, env) for v, e in zip(at, index, strict=True)}
        found = axes_at(store, at)
        assert set(found) == set(axes)
        for v, e in found.items():
            assert np.array_equal(np.broadcast_to(evaluate(e, places), env[v].shape), env[v]), (index, v)
