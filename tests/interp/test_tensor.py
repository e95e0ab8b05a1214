"""The Tensor IR interpreter against numpy and PyTorch, and the laws of the monoids."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import pytest
import torch

from terrazzo.errors import CompilerBug, UserError
from terrazzo.interp import monoid as combining
from terrazzo.interp import tensor as interp
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.scalar import CASTS, SCALARS, scalar
from terrazzo.ir.monoid import MONOIDS, Monoid, numpy_builder
from terrazzo.ir.program import Input, Program
from terrazzo.ir.types import DTYPES, DType, Type, bf16, bool_, f16, f32, f64, i8, i32, i64, u8

RNG = np.random.default_rng(0)
SPECIAL = [0.0, -0.0, 1.0, -1.5, 3.0, 3.0, 1e30, -1e30, np.inf, -np.inf, np.nan]


def value(node: Any, **inputs: Any) -> Any:
    """The value of a node (or of a tuple of them) for the inputs it mentions."""
    results = node if isinstance(node, tuple) else (node,)
    given = tuple(Input(k, Type(_dtype(v), v.shape)) for k, v in inputs.items())
    out = interp.run(Program("tensor", "f", given, results), inputs)
    return tuple(out) if isinstance(node, tuple) else out[0]


def given(name: str, array: Any) -> Input:
    return Input(name, Type(_dtype(array), array.shape))


def _dtype(array: Any) -> DType:
    return next(d for d in DTYPES.values() if d.numpy == array.dtype)


X = RNG.standard_normal((3, 4, 5)).astype(np.float32)
K = RNG.integers(0, 4, (6,))


# the primitives


@pytest.mark.parametrize("dtype", [bool_, u8, i8, i32, i64, f16, bf16, f32, f64], ids=repr)
def test_literal(dtype: DType) -> None:
    out = value(t.literal(1, dtype, (2, 3)))
    assert out.dtype == dtype.numpy and out.shape == (2, 3) and (out == 1).all()


def test_a_literal_wraps_and_rounds_as_its_type_does() -> None:
    assert t.literal(300, u8).value == 44 and t.literal(200, i8).value == -56
    assert t.literal(0.1, f32).value == float(np.float32(0.1)) and t.literal(0.1, bf16).value == float(
        np.array(0.1).astype(bf16.numpy)
    )


def test_iota() -> None:
    i, j = t.coordinates((3, 4))
    np.testing.assert_array_equal(
        value(t.iota((3, 4), i * 10 - j % 2)), np.fromfunction(lambda a, b: a * 10 - b % 2, (3, 4)).astype(int)
    )


def test_elementwise() -> None:
    x = given("x", X)
    np.testing.assert_array_equal(
        value(t.where(t.apply("lt", x, t.literal(0, f32, X.shape)), x, t.apply("neg", x)), x=X), -np.abs(X)
    )


def test_a_precise_run_computes_every_float_in_float64() -> None:
    x = given("x", X)
    third = t.cast(t.apply("div", x, t.literal(3, f32, X.shape)), bf16)
    (out,) = interp.run(Program("tensor", "f", (x,), (third,)), {"x": X}, precise=True)
    assert out.dtype == np.float64
    np.testing.assert_array_equal(out, X.astype(np.float64) / 3)


I = t.coordinates((3, 5))
VIEWS = {
    "permute": (lambda x: t.permute(x, (2, 0, 1)), lambda x: x.transpose(2, 0, 1)),
    "reshape": (lambda x: t.reshape(x, (6, 10)), lambda x: x.reshape(6, 10)),
    "broadcast": (lambda x: t.broadcast(x, (2, 3, 4, 5)), lambda x: np.broadcast_to(x, (2, 3, 4, 5))),
    "a plane": (lambda x: t.index_map(x, (3, 5), (I[0], 2, I[1])), lambda x: x[:, 2]),
    "a step": (lambda x: t.index_map(x, (3, 2), (I[0], 1, t.coordinates((3, 2))[1] * 3 + 1)), lambda x: x[:, 1, 1::3]),
    "backwards": (
        lambda x: t.index_map(x, X.shape, [e - 1 - i for i, e in zip(t.coordinates(X.shape), X.shape, strict=True)]),
        lambda x: x[::-1, ::-1, ::-1],
    ),
    "a diagonal": (lambda x: t.index_map(x, (3, 5), (I[0], I[0], I[1])), lambda x: x[[0, 1, 2], [0, 1, 2]]),
    "to nothing": (lambda x: t.reshape(t.index_map(x, (0, 4), (0, 0, 0)), (4, 0)), lambda x: np.zeros((4, 0))),
}


@pytest.mark.parametrize("name", VIEWS)
def test_index_map(name: str) -> None:
    ours, numpy = VIEWS[name]
    out = value(ours(given("x", X)), x=X)
    np.testing.assert_array_equal(out, numpy(X))


def test_outside_its_guard_an_index_map_is_zero() -> None:
    shape = (3, 4, 9)
    i, j, k = t.coordinates(shape)
    padded = t.index_map(given("x", X), shape, (i, j, k - 2), (k - 2, 6 - k))
    np.testing.assert_array_equal(value(padded, x=X), np.pad(X, ((0, 0), (0, 0), (2, 2))))
    i, j, k = t.coordinates(X.shape)
    np.testing.assert_array_equal(value(t.index_map(padded, X.shape, (i, j, k + 2)), x=X), X)


def test_a_guarded_map_of_nothing_is_zero() -> None:
    empty = np.zeros((0,), np.float32)
    (i,) = t.coordinates((4,))
    np.testing.assert_array_equal(
        value(t.index_map(given("x", empty), (4,), (i - 2,), (i - 2, 1 - i)), x=empty), np.zeros(4)
    )


def test_an_index_may_come_from_data() -> None:
    here = t.coordinates((3, 6, 5))
    taken = t.index_map(given("x", X), (3, 6, 5), (here[0], t.loaded(given("k", K), here[1:2], 4), here[2]))
    np.testing.assert_array_equal(value(taken, x=X, k=K), X[:, K])


def test_an_index_may_be_made_by_more_ops_than_python_recurses() -> None:
    """What an index reads has a graph of its own, which nothing goes down into where the index is moved."""
    made: Any = given("k", K)
    for _ in range(2 * sys.getrecursionlimit()):
        made = t.apply("neg", made)
    i, j = t.coordinates((6, 5))
    taken = t.index_map(given("x", X[0]), (6, 5), (t.loaded(made, (i,), 4), j))
    moved = t.index_map(t.reshape(taken, (2, 3, 5)), (2, 5), (*t.coordinates((2, 5))[:1], 1, t.coordinates((2, 5))[1]))
    assert not taken.free and set(t.coordinates((2, 5))) == {v for e in moved.index_nodes for v in e.free}
    np.testing.assert_array_equal(value(moved, x=X[0], k=K), X[0][K][1::3])


@pytest.mark.parametrize("bad", [-1, 4])
def test_an_index_from_data_is_checked(bad: int) -> None:
    k = np.array([0, bad])
    (i,) = t.coordinates((2,))
    with pytest.raises(UserError, match=f"index {bad} is out of range for a dimension of size 4"):
        value(t.index_map(given("x", X[0, :, 0]), (2,), (t.loaded(given("k", k), (i,), 4),)), x=X[0, :, 0], k=k)


def test_an_index_that_leaves_its_operand_is_our_bug() -> None:
    (i,) = t.coordinates((5,))
    with pytest.raises(CompilerBug, match="index map leaves its operand"):
        value(t.index_map(given("x", X[0, 0]), (5,), (i + 1,)), x=X[0, 0])


NUMPY = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}


@pytest.mark.parametrize("name", NUMPY)
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 2), (0, 1, 2), ()], ids=str)
def test_reduce(name: str, axes: tuple[int, ...]) -> None:
    out = value(t.reduce(name, given("x", X), axes), x=X)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, NUMPY[name](X, axis=axes), rtol=1e-5)


@pytest.mark.parametrize("name", ["any", "all", "xor"])
def test_reduce_bools(name: str) -> None:
    x = X > 0.5
    numpy = {"any": np.any, "all": np.all, "xor": lambda v, axis: np.logical_xor.reduce(v, axis)}[name]
    np.testing.assert_array_equal(value(t.reduce(name, given("x", x), (1,)), x=x), numpy(x, axis=1))


@pytest.mark.parametrize("name", MONOIDS)
def test_a_reduction_of_nothing_is_the_identity(name: str) -> None:
    m = MONOIDS[name]
    args = [np.zeros((3, 0), d.numpy) for d in _types(m)]
    out = t.reduce(name, [given(f"x{k}", a) for k, a in enumerate(args)], [1])
    for result, expected in zip(out if m.width > 1 else (out,), m.identity(_types(m)), strict=True):
        np.testing.assert_array_equal(value(result), np.full(3, expected))
    direct = combining.reduce(m, args, (1,), _types(m))
    assert [r.shape for r in direct] == [(3,)] * m.width


@pytest.mark.parametrize("keepdim", [False, True])
def test_keepdim(keepdim: bool) -> None:
    out = t.reduce("sum", given("x", X), [-2], keepdim)
    np.testing.assert_allclose(value(out, x=X), X.sum(1, keepdims=keepdim), rtol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_scan(axis: int) -> None:
    np.testing.assert_allclose(value(t.scan("sum", given("x", X), axis), x=X), X.cumsum(axis), rtol=1e-5, atol=1e-6)
    best, where = t.scan("argmax_last", (given("x", X), t.iota(X.shape, t.coordinates(X.shape)[axis])), axis)
    expected = torch.cummax(torch.from_numpy(X), axis)
    np.testing.assert_array_equal(value(best, x=X), expected.values)
    np.testing.assert_array_equal(value(where, x=X), expected.indices)


def test_opaque_calls_are_handed_over() -> None:
    x = given("x", X)
    call = t.Opaque("aten.sort.default", (x, -1), (("descending", True),), (Type(f32, X.shape), Type(i64, X.shape)))
    program = Program("tensor", "f", (x,), (t.Get(call, 1),))
    seen: list[Any] = []

    def sort(name: str, args: Any, kwargs: Any, precise: bool) -> Any:
        seen.append((name, args[1], kwargs, precise))
        return np.sort(args[0])[..., ::-1], np.argsort(-args[0], axis=-1)

    (out,) = interp.run(program, {"x": X}, call=sort)
    np.testing.assert_array_equal(out, np.argsort(-X, axis=-1))
    assert seen == [("aten.sort.default", -1, {"descending": True}, False)]
    with pytest.raises(UserError, match=r"aten\.sort\.default is opaque"):
        interp.run(program, {"x": X})


def test_inputs_must_have_their_shape() -> None:
    with pytest.raises(UserError, match=r"input x has shape \[5\], expected \[3, 4, 5\]"):
        interp.run(Program("tensor", "f", (given("x", X),), (given("x", X),)), {"x": X[0, 0]})


# scalars: what PyTorch has under the same name it means the same by

SAME_NAME = [
    n for n, fn in SCALARS.items() if hasattr(torch, n) and fn.result([f64] * fn.arity) and n not in ("max", "min")
]


@pytest.mark.parametrize("name", SAME_NAME)
def test_scalar_function(name: str) -> None:
    fn = scalar(name)
    values = np.array(SPECIAL, np.float64)
    args = [np.array(a) for a in zip(*itertools.product(values, repeat=fn.arity), strict=True)]
    expected = getattr(torch, name)(*map(torch.from_numpy, args)).numpy()
    if name == "sign":  # ours says NaN where PyTorch says 0; the lowering of aten.sign does not use it
        expected = np.where(np.isnan(args[0]), np.nan, expected)
    np.testing.assert_allclose(fn.numpy(*args), expected, rtol=1e-12)


@pytest.mark.parametrize("to", CASTS, ids=repr)
def test_casts_round_as_pytorch_does(to: DType) -> None:
    from terrazzo.ir.torch_types import to_torch_dtype

    x = np.array([0.0, -0.0, 0.4, 1.0, 2.5, 100.3, 127.0], np.float32)
    expected = torch.from_numpy(x).to(to_torch_dtype(to)).double().numpy()
    np.testing.assert_array_equal(CASTS[to].numpy(x).astype(np.float64), expected)


# monoids: the identity changes nothing, and brackets do not matter


def _types(m: Monoid) -> list[DType]:
    if m.name in ("any", "all", "xor"):
        return [bool_]
    return [f64, i64] if m.name.startswith("arg") else [f64] * m.width


def _elements(m: Monoid, special: bool = True) -> list[Any]:
    """Values of the monoid, an array per component: lifted numbers, and what neighbours of them combine to."""
    numbers = np.array([x for x in SPECIAL if special or not abs(x) >= 1e6])
    finite = numbers[np.isfinite(numbers)]
    lifted = {
        "recurrence": [finite, np.arange(len(finite))],  # an infinite factor times the identity's 0 is NaN
        "any": [np.array([False, True])],
        "all": [np.array([False, True])],
        "xor": [np.array([False, True])],
        "welford": [numbers, np.zeros(len(numbers)), np.ones(len(numbers))],
        "logsumexp": [numbers, np.ones(len(numbers))],
    }.get(m.name, [numbers, np.arange(len(numbers))][: m.width])
    pairs = m.combine(numpy_builder, [x[:-1] for x in lifted], [x[1:] for x in lifted])
    return [np.concatenate(c) for c in zip(lifted, pairs, strict=True)]


def _read(m: Monoid, v: Any) -> Any:
    """What is read from a value of the monoid in the end: several pairs (maximum, sum) are one log-sum-exp."""
    if m.name == "logsumexp":
        with np.errstate(all="ignore"):
            return [v[0] + np.log(v[1])]
    return v


@pytest.mark.parametrize("name", MONOIDS)
def test_the_identity_changes_nothing(name: str) -> None:
    m = MONOIDS[name]
    e = [np.array([i]).astype(d.numpy) for d, i in zip(_types(m), m.identity(_types(m)), strict=True)]
    for a in (e, _elements(m)):
        for both in (m.combine(numpy_builder, e, a), m.combine(numpy_builder, a, e)):
            for ours, expected in zip(_read(m, both), _read(m, a), strict=True):
                np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("name", MONOIDS)
def test_brackets_do_not_matter(name: str) -> None:
    m = MONOIDS[name]
    rounded = name in (
        "sum",
        "prod",
        "welford",
        "logsumexp",
        "recurrence",
    )  # for these, up to rounding: (1e30 - 1e30) + 1 is not 1e30 + (1 - 1e30)
    elements = _elements(m, special=not rounded)
    chosen = np.array(list(itertools.product(range(len(elements[0])), repeat=3)))
    a, b, c = ([x[k] for x in elements] for k in chosen.T)
    left = m.combine(numpy_builder, m.combine(numpy_builder, a, b), c)
    right = m.combine(numpy_builder, a, m.combine(numpy_builder, b, c))
    for x, y in zip(_read(m, left), _read(m, right), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [u8, i8, i64, f16, bf16, f32], ids=repr)
@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin", "argmax_last", "argmin_last"])
def test_the_identities_of_every_type(name: str, dtype: DType) -> None:
    m = MONOIDS[name]
    e = m.identity([dtype, i64])
    worst = np.array([e[0]]).astype(dtype.numpy)
    assert worst[0] == e[0]
    a = (worst, np.array([5]))[: m.width]
    both = m.combine(numpy_builder, [worst, np.array(e[1:])][: m.width], a)
    np.testing.assert_array_equal(
        np.stack([x.astype(np.float64) for x in both]), np.stack([x.astype(np.float64) for x in a])
    )


@pytest.mark.parametrize("dtype", [bool_, u8, i8, i64], ids=repr)
def test_the_identity_of_all_has_every_bit_set(dtype: DType) -> None:
    (e,) = MONOIDS["all"].identity([dtype])
    ones = dtype.numpy.type(e)
    assert ones == ~dtype.numpy.type(0)


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_welford_is_the_variance(size: int, offset: float) -> None:
    x = RNG.standard_normal((4, size)) + offset
    one = np.ones_like(x)
    mean, spread, count = combining.reduce(MONOIDS["welford"], [x, 0 * x, one], (1,), [f64] * 3)
    np.testing.assert_allclose(mean, x.mean(1), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(spread / count, x.var(1), rtol=1e-7, atol=1e-12)
    np.testing.assert_array_equal(count, size)


@pytest.mark.parametrize(
    "row", [[-np.inf] * 3, [np.inf, 1.0], [1e3, 1e3, -1e3], [np.nan, 1.0], [-np.inf, 2.0], [5.0]], ids=str
)
def test_logsumexp_is_pytorchs(row: list[float]) -> None:
    x = np.array(row)
    top, total = combining.reduce(MONOIDS["logsumexp"], [x, np.ones_like(x)], (0,), [f64] * 2)
    with np.errstate(all="ignore"):
        ours = top + np.log(total)
        running = [
            a + np.log(b)
            for a, b in zip(*combining.scan(MONOIDS["logsumexp"], [x, np.ones_like(x)], 0, [f64] * 2), strict=True)
        ]
    np.testing.assert_allclose(ours, torch.logsumexp(torch.from_numpy(x), 0).numpy(), rtol=1e-12)
    np.testing.assert_allclose(running, torch.logcumsumexp(torch.from_numpy(x), 0).numpy(), rtol=1e-12)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_the_first_of_equals_wins_and_nan_beats_all(name: str) -> None:
    for _ in range(50):
        x = RNG.choice([1.0, 2.0, 2.0, np.nan, np.inf, -np.inf], 7)
        _, where = combining.reduce(MONOIDS[name], [x, np.arange(7)], (0,), [f64, i64])
        assert where == int(getattr(torch, name)(torch.from_numpy(x)))


@pytest.mark.parametrize("scale", (np.inf, -np.inf, np.nan, 2.0))
def test_a_factor_is_not_moved_out_of_a_sum_where_that_would_show(scale: float) -> None:
    """An infinity times numbers of either sign sums to NaN; times their sum it would be an infinity."""
    x = np.arange(-3.0, 5.0, dtype=np.float32)[None]
    factor = np.broadcast_to(np.float32(scale), x.shape)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(combining.sum_of_products(x, factor, (1,)), (x * factor).sum(1))
        np.testing.assert_array_equal(combining.sum_of_products(factor, x, (1,)), (x * factor).sum(1))
