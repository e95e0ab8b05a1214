"""Index expressions by themselves: whatever the operators make of an expression, it has the value Python gives it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.errors import UserError
from terrazzo.ir.address import coefficient, evaluate, flatten, mentions, unflatten
from terrazzo.ir.expr import Expr, FloorDiv, IntExpr, Mod, Size, Var, at_least, at_most, bounds, floordiv

I, J, K = Var("i", 4), Var("j", 6), Var("k", 5)
N = Size("n", 1, 7)

Environment = dict[Expr, int]
Written = tuple[IntExpr, Callable[[Environment], int]]
"""An expression as our operators build it, and the same computed by Python's."""


def environments(*variables: Var) -> Iterator[Environment]:
    for values in itertools.product(*(range(int(v.extent)) for v in variables)):  # type: ignore[arg-type]
        yield dict(zip(variables, values, strict=True))


def holds(written: Written, environment: Environment) -> None:
    """The value, the range, and what follows from the range."""
    e, meant = written
    value = evaluate(e, environment)
    assert value == meant(environment), (e, environment)
    lo, hi = bounds(e)
    assert (lo is None or lo <= value) and (hi is None or value <= hi), (e, environment)
    for limit in (-3, 0, 3):
        assert not at_least(e, limit) or value >= limit
        assert not at_most(e, limit) or value <= limit


@pytest.mark.parametrize("b", range(1, 13))
@pytest.mark.parametrize("c", (-6, -4, -1, 1, 2, 3, 4, 6, 8))
def test_division_and_remainder_of_sums(b: int, c: int) -> None:
    for d, e in itertools.product((-7, 0, 1, 12), (1, 3)):
        a = I * c + J * e + d

        def dividend(x: Environment, c: int = c, d: int = d, e: int = e) -> int:
            return x[I] * c + x[J] * e + d

        for x in environments(I, J):
            holds((a // b, lambda x: dividend(x) // b), x)
            holds((a % b, lambda x: dividend(x) % b), x)
            assert evaluate((a // b) * b + a % b, x) == dividend(x)


@pytest.mark.parametrize(("b", "c"), list(itertools.product((1, 2, 3, 6), repeat=2)))
def test_division_and_remainder_of_each_other(b: int, c: int) -> None:
    for scale, shift in itertools.product((1, 4), (-5, 1)):
        a = I * 6 + J * scale + shift

        def value(x: Environment, scale: int = scale, shift: int = shift) -> int:
            return x[I] * 6 + x[J] * scale + shift

        for x in environments(I, J):
            holds((a // b // c, lambda x: value(x) // b // c), x)
            holds((a // b % c, lambda x: value(x) // b % c), x)
            holds((a % b // c, lambda x: value(x) % b // c), x)
            holds((a % b % c, lambda x: value(x) % b % c), x)
            holds(((J + a // b) // c, lambda x: (x[J] + value(x) // b) // c), x)
            holds(((J + a // b) % c, lambda x: (x[J] + value(x) // b) % c), x)


@st.composite
def written(draw: st.DrawFn, depth: int = 4) -> Written:
    """A random expression in i, j, k and the size n."""
    if depth == 0 or draw(st.integers(0, 4)) == 0:
        leaf: Any = draw(st.sampled_from((I, J, K, N)) | st.integers(-9, 9))
        return leaf, lambda x: x[leaf] if isinstance(leaf, Expr) else leaf
    a, f = draw(written(depth=depth - 1))
    op = draw(st.sampled_from("+-*/%"))
    if op in "/%":
        by: Any = draw(st.integers(1, 12) | st.just(N))
        divide = by if isinstance(by, int) else None
        if op == "/":
            return a // by, lambda x: f(x) // (divide or x[N])
        return a % by, lambda x: f(x) % (divide or x[N])
    b, g = draw(written(depth=depth - 1))
    if op == "+":
        return a + b, lambda x: f(x) + g(x)
    if op == "-":
        return a - b, lambda x: f(x) - g(x)
    return a * b, lambda x: f(x) * g(x)


@settings(max_examples=600, deadline=None)
@given(written(), st.data())
def test_random_expressions(e: Written, data: st.DataObject) -> None:
    for _ in range(8):
        values = {v: data.draw(st.integers(0, int(v.extent) - 1)) for v in (I, J, K)}  # type: ignore[arg-type]
        holds(e, {**values, N: data.draw(st.integers(1, 7))})


@settings(max_examples=200, deadline=None)
@given(written(depth=3), written(depth=3))
def test_equal_sums_are_one_object(a: Written, b: Written) -> None:
    assert a[0] + b[0] is b[0] + a[0] or a[0] + b[0] == b[0] + a[0]
    assert a[0] + b[0] - b[0] == a[0]
    assert (a[0] + b[0]) * 2 == a[0] * 2 + b[0] * 2


@pytest.mark.parametrize(
    ("ours", "normal"),
    [
        ((I * 6 + J) // 6, I),
        ((I * 6 + J) % 6, J),
        ((I * 6 + J) // 6 * 6 + (I * 6 + J) % 6, I * 6 + J),
        ((I * 30 + J * 5 + K) // 5 % 6, J),
        ((I * 30 + J * 5 + K) // 30, I),
        ((I * 12 + J * 2 + 1) // 4, I * 3 + J // 2),
        ((I * 2 + 1) // 2, I),
        ((K + (I * 6 + J) // 4) // 3, (I * 6 + J + K * 4) // 12),
        (I // 4, 0),
        (I % 4, I),
        (J // 2 // 3, 0),
        ((J % 4) % 2, J % 2),
        ((I * N + I) - I * (N + 1), 0),
        ((I * N) // N, I),
        ((I * N) % N, 0),
        ((N * 3 + 0) // N, 3),
    ],
    ids=str,
)
def test_normal_forms(ours: IntExpr, normal: IntExpr) -> None:
    assert ours == normal


@pytest.mark.parametrize("shape", [(4, 6, 5), (4, 1, 6), (7,), ()])
def test_flat_places_come_apart_again(shape: tuple[int, ...]) -> None:
    index = tuple(Var(f"a{d}", n) if n > 1 else 0 for d, n in enumerate(shape))
    strides = (
        tuple(int(s) for s in itertools.accumulate(reversed((*shape[1:], 1)), lambda a, b: a * b))[::-1]
        if shape
        else ()
    )
    assert tuple(unflatten(flatten(index, strides), shape)) == index


def test_symbolic_sizes_bound_what_lies_below_them() -> None:
    i = Var("i", N)
    assert at_most(i, N - 1) and at_least(N - 1 - i, 0) and not at_least(N - 2 - i, 0)
    assert (i // N, i % N) == (0, i)


def test_coefficients() -> None:
    assert coefficient(I * 12 + J + 3, I) == 12 and coefficient(I * N + J, I) == N
    assert mentions(I // 2 + J, I) and not mentions(J, I)


def test_what_stays_is_what_no_rule_can_remove() -> None:
    assert isinstance(J // 4, FloorDiv) and isinstance(J % 4, Mod)


@pytest.mark.parametrize(
    "divide", [lambda: I // 0, lambda: I % 0, lambda: I // -2, lambda: I % -2, lambda: floordiv(3, -1)]
)
def test_by_what_is_not_positive(divide: Callable[[], object]) -> None:
    with pytest.raises(UserError, match="a divisor must be positive"):
        divide()


def test_a_place_that_was_searched_for_is_ordered_soon() -> None:
    """Every step of a binary search in data uses the last one several times: its text doubles with every step."""
    from tests.kernels.programs import lowered

    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    rows, values = torch.randn(3, 5000).sort(-1).values, torch.randn(3, 40)
    found = lowered(torch.searchsorted, (rows, values), "sm_90a")
    assert (found.simulated()[0] == torch.searchsorted(rows, values).numpy()).all()
