"""Loop nests of every kind through the CPU target: reductions, scans, guards, gathers, strides, products."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.run.cpu import COMPILER, MARCHES, OutOfRange, Suite, program

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.program import Input
from terrazzo.ir.types import DType, Type, bf16, bool_, f16, f32, f64, i8, i32, i64, u8
from terrazzo.options import Options

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

CASES: dict[str, tuple[Any, dict[str, Any], float]] = {}
"""By name: results in Tensor IR, inputs, and how far the results may be from the interpreter's."""

rng = np.random.default_rng(1)


def given(name: str, d: DType, *shape: int, strides: tuple[int, ...] | None = None) -> Input:
    return Input(name, Type(d, shape, strides))


def numbers(d: DType, *shape: int) -> Any:
    """Normal floats, small integers, bools."""
    if d.is_float:
        return rng.standard_normal(shape).astype(d.numpy)
    return rng.integers(0, 2 if d.kind == "bool" else 5, shape).astype(d.numpy)


def case(name: str, *results: Any, tolerance: float = 2e-6, **inputs: Any) -> None:
    CASES[name] = results, inputs, tolerance


SIMPLE = {
    "sum": (f32, f64, i32, i64, u8),
    "prod": (f32, i32),
    "max": (f32, f64, i64, i8, bool_),
    "min": (f32, u8, bool_),
}
SIMPLE |= {"any": (bool_, i32), "all": (bool_, i64), "xor": (i32,)}


def _reductions() -> None:
    for m, types in SIMPLE.items():
        for d in types:
            for shape, axes in (
                ((5, 67), [1]),
                ((67, 5), [0]),
                ((3, 4, 9), [0, 2]),
                ((300, 401), [0, 1]),
                ((3, 0), [1]),
                ((0, 3), [0]),
            ):
                x = given("x", d, *shape)
                values = numbers(d, *shape)
                if m == "prod" and d.is_float:
                    values = (1 + values / 300).astype(d.numpy)
                if m in ("max", "min") and d.is_float and values.size:
                    values[0, 0], values[2, 2] = -np.inf, np.nan
                case(f"{m} {d} {shape} over {axes}", t.reduce(m, x, axes), x=values, tolerance=1e-5)


def _tuples() -> None:
    for shape, axis in ((5, 67), 1), ((67, 5), 0), ((120000,), 0):
        x, y = given("x", f32, *shape), given("y", i64, *shape)
        floats = np.round(numbers(f32, *shape), 1)  # ties
        if len(shape) == 2:
            floats[2 if axis else 7, 3] = np.nan
        position = t.iota(shape, t.coordinates(shape)[axis])
        for m in ("argmax", "argmin", "argmax_last", "argmin_last"):
            case(f"{m} {shape}", *t.reduce(m, (x, position), [axis]), x=floats)
            case(f"{m} of integers {shape}", *t.reduce(m, (y, position), [axis]), y=numbers(i64, *shape))
        zero, one = t.literal(0.0, f32, shape), t.literal(1.0, f32, shape)
        case(
            f"welford {shape}", *t.reduce("welford", (x, zero, one), [axis]), x=numbers(f32, *shape) + 3, tolerance=3e-5
        )
        floats = numbers(f32, *shape) * 10
        floats[0] = -np.inf  # a row of nothing else, or one element
        case(f"logsumexp {shape}", *t.reduce("logsumexp", (x, one), [axis]), x=floats, tolerance=1e-5)


def _scans() -> None:
    for shape in (7, 33), (4, 5, 6), (3, 0):
        for axis in range(len(shape)):
            x = given("x", f32, *shape)
            for m in ("sum", "max", "prod"):
                case(f"scan {m} {shape} along {axis}", t.scan(m, x, axis), x=numbers(f32, *shape), tolerance=1e-5)
            position = t.iota(shape, t.coordinates(shape)[axis])
            case(
                f"scan argmax {shape} along {axis}",
                *t.scan("argmax", (x, position), axis),
                x=np.round(numbers(f32, *shape)),
            )
            pair = t.scan("logsumexp", (x, t.literal(1.0, f32, shape)), axis)
            case(f"scan logsumexp {shape} along {axis}", *pair, x=numbers(f32, *shape), tolerance=1e-5)
    for shape in (2, 6, 131), (3, 70), (4417,), (3, 4200):  # rows in turns, a row alone, and in chunks
        x, axis = given("x", f32, *shape), len(shape) - 1
        position = t.iota(shape, t.coordinates(shape)[axis])
        rounded = np.round(numbers(f32, *shape) * 3)
        rounded[..., 40:44] = np.inf, np.nan, 5, np.nan
        for m in "argmax_last", "argmin_last", "argmax":
            case(f"long scan {m} {shape}", *t.scan(m, (x, position), axis), x=rounded)
        scaled = t.apply("mul", t.scan("sum", t.apply("exp", x), axis), x)
        case(f"long scan of exponentials {shape}", scaled, x=numbers(f32, *shape), tolerance=1e-4)
        wide = t.scan("prod", t.cast(x, f64), axis)
        case(f"long scan prod {shape}", t.cast(wide, f32), x=1 + numbers(f32, *shape) / 50, tolerance=1e-5)
    x = given("x", i64, 6, 40)
    case("scan of integers with what follows", t.apply("mul", t.scan("sum", x, 1), x), x=numbers(i64, 6, 40))


def _views() -> None:
    x = given("x", f32, 6, 11)
    values = numbers(f32, 6, 11)
    i, j = t.coordinates((12, 15))
    pad = t.index_map(x, (12, 15), (i - 2, j - 3), (i - 2, 5 - (i - 2), j - 3, 10 - (j - 3)))
    case("pad", pad, x=values)
    case("what follows a pad", t.reduce("sum", t.apply("exp", pad), [1]), x=values, tolerance=1e-5)
    case("floor of negative indices", t.index_map(x, (12, 15), ((i - 12) // 2 + 6, (j - 4) % 11)), x=values)
    case(
        "an upsampling of a padding",
        t.index_map(pad, (12, 30), (t.coordinates((12, 30))[0], t.coordinates((12, 30))[1] // 2)),
        x=values,
    )
    case("iota", t.iota((12, 15), (i - 5) // 3 * j))
    case("flip", t.index_map(x, (6, 11), [5 - t.coordinates((6, 11))[0], 10 - t.coordinates((6, 11))[1]]), x=values)
    case("diagonal", t.index_map(x, (6,), [t.coordinates((6,))[0]] * 2), x=values)
    case("0-d", t.reduce("sum", given("y", f32), []), y=np.float32(2.5))
    case("nothing at all", t.apply("exp", given("y", f32, 0, 4)), y=numbers(f32, 0, 4))
    for strides in (1, 6), (22, 2), (0, 1), (11, 0):
        y = given("y", f32, 6, 11, strides=strides)
        row = values if 0 not in strides else np.broadcast_to(values[0] if strides[0] == 0 else values[:, :1], (6, 11))
        case(f"strides {strides}", t.apply("neg", y), t.reduce("max", y, [1]), t.reduce("sum", y, [0]), y=row)
    for d in (f16, bf16, bool_, u8, i8):
        y, z = given("y", d, 4, 33), given("z", f32, 4, 33)
        case(
            f"what {d} stores", t.cast(t.apply("add", t.cast(y, f32), z), d), y=numbers(d, 4, 33), z=numbers(i32, 4, 33)
        )


def _gathers() -> None:
    table, ids, short = given("table", f32, 10, 37), given("ids", i64, 5), given("short", i32, 5)
    i, j = t.coordinates((5, 37))
    values = {"table": numbers(f32, 10, 37), "ids": np.array([0, 9, 3, 3, 1]), "short": np.array([1, 2, 3, 4, 9])}
    rows = t.index_map(table, (5, 37), (t.loaded(ids, [i], 10), j))
    case("embedding", rows, **values)
    case("embedding by i32", t.index_map(table, (5, 37), (t.loaded(short, [i], 10), j)), **values)
    case("sum over embeddings", t.reduce("sum", rows, [0]), t.reduce("max", rows, [1]), **values, tolerance=1e-5)
    case("one of each row", t.index_map(table, (5,), (i, t.loaded(ids, [t.coordinates((5,))[0]], 37))), **values)
    wide = given("wide", i64, 5, 37)
    case(
        "element by element",
        t.index_map(table, (5, 37), (t.loaded(wide, [i, j], 10), j)),
        wide=numbers(i64, 5, 37),
        **values,
    )
    first = t.loaded(ids, [t.coordinates((5,))[0]], 5)
    again = t.loaded(t.index_map(ids, (5,), (first,)), [i], 10)
    case(
        "twice indirect", t.index_map(table, (5, 37), (again, j)), table=values["table"], ids=np.array([0, 4, 3, 3, 1])
    )


def product(x: Any, w: Any, d: DType | None = None) -> Any:
    """x[..., m, k] times w[..., n, k], summed over k in type `d`."""
    *batch, m, k = x.type.shape
    n = w.type.shape[-2]
    shape = (*batch, m, n, k)
    *b, i, j, c = t.coordinates(shape)
    left = t.index_map(x, shape, (*b, i, c))
    right = t.index_map(w, shape, (*b, j, c) if len(w.type.shape) > 2 else (j, c))
    cast = (lambda y: t.cast(y, d)) if d else (lambda y: y)
    return t.reduce("sum", t.apply("mul", cast(left), cast(right)), [len(shape) - 1])


def _products() -> None:
    for m, n, k in (
        (1, 1, 1),
        (2, 4, 1),
        (5, 33, 129),
        (13, 64, 300),
        (3, 7, 0),
        (1, 50, 70),
        (50, 1, 70),
        (200, 35, 31),
        (25, 65, 257),
    ):
        x, w, wt, xt = given("x", f32, m, k), given("w", f32, n, k), given("wt", f32, k, n), given("xt", f32, k, m)
        values = {"x": numbers(f32, m, k), "w": numbers(f32, n, k)}
        values |= {"wt": values["w"].T, "xt": values["x"].T}
        name, tolerance = f"{m} x {n} x {k}", 3e-6 * math.sqrt(k + 1)
        turned = t.permute(wt, (1, 0)), t.permute(xt, (1, 0))
        case(f"product {name}", product(x, w), tolerance=tolerance, **values)
        case(f"product, second turned, {name}", product(x, turned[0]), tolerance=tolerance, **values)
        case(f"product, first turned, {name}", product(turned[1], w), tolerance=tolerance, **values)
        case(f"product, both turned, {name}", product(turned[1], turned[0]), tolerance=tolerance, **values)
    for d in (f64, i32, i64):
        x, w = given("x", d, 19, 45), given("w", d, 37, 45)
        case(f"product of {d}", product(x, w), x=numbers(d, 19, 45), w=numbers(d, 37, 45), tolerance=1e-5)
    for d in (f16, bf16):
        x, w, wt = given("x", d, 19, 145), given("w", d, 37, 145), given("wt", d, 145, 37)
        values = {"x": numbers(d, 19, 145), "w": numbers(d, 37, 145), "wt": numbers(d, 145, 37)}
        case(f"product of {d}", t.cast(product(x, w, f32), d), tolerance=0.02, **values)
        case(f"product of {d}, turned", product(x, t.permute(wt, (1, 0)), f32), tolerance=1e-4, **values)


def _nested_products() -> None:
    x, w, v = given("x", f32, 21, 130), given("w", f32, 45, 130), given("v", f32, 45, 130)
    bias, residual = given("bias", f32, 45), given("residual", f32, 21, 45)
    values = {"x": numbers(f32, 21, 130), "w": numbers(f32, 45, 130), "v": numbers(f32, 45, 130)}
    a, b = product(x, w), product(x, v)
    case("two products", t.apply("mul", t.apply("tanh", a), b), tolerance=1e-4, **values)
    after = t.apply("add", t.apply("tanh", t.apply("add", a, t.broadcast(bias, (21, 45)))), residual)
    case(
        "what follows a product", after, tolerance=1e-4, bias=numbers(f32, 45), residual=numbers(f32, 21, 45), **values
    )
    case("what goes before", product(t.apply("exp", x), t.apply("neg", w)), tolerance=1e-3, **values)
    case("a product and its row sums", a, t.reduce("sum", a, [1]), tolerance=1e-3, **values)
    q, k, p = given("q", f32, 3, 21, 16), given("k", f32, 3, 33, 16), given("p", f32, 3, 33, 16)
    values = {"q": numbers(f32, 3, 21, 16), "k": numbers(f32, 3, 33, 16), "p": numbers(f32, 3, 33, 16)}
    scores = product(q, k)
    case("batched", scores, tolerance=1e-5, **values)
    top = t.index_map(t.reduce("max", scores, [2]), (3, 21, 33), t.coordinates((3, 21, 33))[:2])
    weights = t.apply("exp", t.apply("sub", scores, top))
    total = t.index_map(t.reduce("sum", weights, [2]), (3, 21, 33), t.coordinates((3, 21, 33))[:2])
    attention = product(t.apply("div", weights, total), t.permute(p, (0, 2, 1)))
    case("attention", attention, tolerance=1e-5, **values)


def _convolutions() -> None:
    for n, c, o, h, w, stride in (2, 3, 5, 9, 11, 1), (1, 4, 8, 12, 12, 2), (2, 1, 1, 5, 5, 1):
        x, f = given("x", f32, n, c, h, w), given("f", f32, o, c, 3, 3)
        oh, ow = (h - 1) // stride + 1, (w - 1) // stride + 1
        shape = (n, o, oh, ow, c, 3, 3)
        b, k, y, z, d, u, v = t.coordinates(shape)
        row, column = y * stride + u - 1, z * stride + v - 1
        image = t.index_map(x, shape, (b, d, row, column), (row, h - 1 - row, column, w - 1 - column))
        out = t.reduce("sum", t.apply("mul", image, t.index_map(f, shape, (k, d, u, v))), [4, 5, 6])
        case(f"convolution {shape}", out, x=numbers(f32, n, c, h, w), f=numbers(f32, o, c, 3, 3), tolerance=1e-5)


def _chosen() -> None:
    """Sums of terms that are there by a condition, over short axes: GCC loses some where it writes them out."""
    for d in f32, f64:
        for shape in (5, 6), (7, 3), (2, 3, 5), (3, 1, 6), (2, 4, 6, 6), (30, 3, 2), (9, 2, 7):
            for axes in list(range(len(shape))), list(range(1, len(shape))):
                x, y, z = (given(name, d, *shape) for name in "xyz")
                none = t.literal(0.0, d, shape)
                out = t.reduce("sum", t.apply("mul", t.where(t.apply("le", z, none), none, x), y), axes)
                inputs = {name: numbers(d, *shape) for name in "xyz"}
                case(f"sum of chosen {d.name} {shape} over {axes}", out, tolerance=1e-5, **inputs)


for _fill in (_reductions, _tuples, _chosen, _scans, _views, _gathers, _products, _nested_products, _convolutions):
    _fill()


@pytest.fixture(scope="module", params=MARCHES)
def nests(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    suite = Suite(tmp_path_factory.mktemp("nests"), request.param)
    for name, (results, _, _) in CASES.items():
        suite.add(name, program(*results))
    suite.build(4)
    return suite


@pytest.mark.parametrize("name", CASES)
def test_nests(name: str, nests: Suite) -> None:
    _, inputs, tolerance = CASES[name]
    nests.check(name, inputs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["embedding", "sum over embeddings", "one of each row"])
@pytest.mark.parametrize("bad", [-1, 37, 2**40])
def test_an_index_out_of_range_is_reported(name: str, bad: int, nests: Suite) -> None:
    inputs = dict(CASES[name][1], ids=np.array([0, 1, bad, 2, 3]))
    with pytest.raises(OutOfRange):
        nests.run(name, inputs)


def test_results_do_not_depend_on_the_number_of_threads(nests: Suite) -> None:
    for name in ("sum f32 (300, 401) over [0, 1]", "welford (120000,)", "product 25 x 65 x 257"):
        _, inputs, _ = CASES[name]
        one, many = nests.run(name, inputs, threads=1), nests.run(name, inputs, threads=3)
        assert all(np.array_equal(a, b) for a, b in zip(one, many, strict=True))


def test_a_sum_over_several_axes_is_as_exact_as_eager(tmp_path: Path) -> None:
    """Shorter sums are summed: of 16384 squares in one accumulator the error was 60 times eager's."""
    torch = pytest.importorskip("torch")
    import terrazzo

    torch.manual_seed(0)
    x = torch.randn(2, 32, 16, 16)

    def mean(x: Any) -> Any:
        return x.square().mean()

    ours = terrazzo.compile(mean, x, options=Options(target="cpu", cache_dir=tmp_path))(x)
    assert abs(float(ours) - float(mean(x.double()))) < 2e-7


@pytest.mark.parametrize("shape, over", [((8192, 96), (0,)), ((40, 300, 128), (0, 1)), ((3, 2100, 40), (1,))])
def test_sums_of_columns_are_as_exact_as_eager(shape: Any, over: Any, tmp_path: Path) -> None:
    """A gradient of a bias: of 8192 rows in one accumulator for each column the error was 20 times eager's."""
    torch = pytest.importorskip("torch")
    import terrazzo

    torch.manual_seed(0)
    x = torch.rand(shape)

    def total(x: Any) -> Any:
        return x.sum(over)

    exact = total(x.double())
    found = terrazzo.compile(total, x, options=Options(target="cpu", cache_dir=tmp_path))(x)
    off, eager = (float((y.double() - exact).norm() / exact.norm()) for y in (found, total(x)))
    assert off <= 2 * max(eager, 2.0**-24)
