"""Numbers in float32 as parts in bfloat16, and products of these: what they are worth, ordinary or not."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from terrazzo.hw.wgmma import truncated
from terrazzo.interp import loop
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.text import parse, show
from terrazzo.ir.types import Type, f32
from terrazzo.ir.verify import verify
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.precision.number_parts import LARGE, SCALE, ordinary, pairs
from terrazzo.rules.loop.precision.parts import into_parts
from terrazzo.rules.tile_to_kernel.promote import TOGETHER

MAX, LEAST = np.finfo(np.float32).max, np.float32(2.0**-149)
NEVER = 1 << 30
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.5, 1e30, -3e-20, 1e-40, LEAST, -LEAST, 3.3961775e38, MAX, -MAX, np.inf, -np.inf, np.nan],
    np.float32,
)  # fmt: skip


def in_bfloat16(old: Any, new: Any, beaten: float) -> tuple[float, str]:
    """A gain of all ways but those that scale rows for float16 (`test_one_part`, `test_scaled_parts`)."""
    return 1.0, "rows are scaled" if any("_root" in b.name for s in new for b in s.writes) else ""


def text(m: int, n: int, k: int) -> str:
    return f"""@loop
def f(x: f32[{m}, {k}], w: f32[{n}, {k}]):
    with kernel('y', y=f32[{m}, {n}]):
        for a0 in free({m}):
            for a1 in free({n}):
                for r0 in reduce({k}):
                    acc0 <- sum(mul(x[a0, r0], w[a1, r0]))
                y[a0, a1] = acc0
    return (y,)
"""


def split(source: str, count: int = 3, log: Log | None = None) -> l.Program:
    """A program with all products in parts, whatever they cost."""
    found = into_parts(parse(source), log or Log(), count, in_bfloat16)
    verify(found, "parts")
    assert parse(show(found)) == found
    return found


def parts(x: Any, count: int = 3) -> list[Any]:
    """The parts of numbers, as kernels make them."""
    program = split(text(len(x), len(x), 1), count)
    stored = {b.name: b for s in program.steps for b in s.writes}
    names = [f"x_{p + 1}" for p in range(count)]
    whole = l.Program("f", program.inputs, program.steps[:-1], tuple(stored[n] for n in names))
    column = x.reshape(-1, 1).astype(np.float32)
    return [p[:, 0].astype(np.float32) for p in loop.run(whole, {"x": column, "w": column})]


@pytest.mark.parametrize(
    "m, n, k, constant, makers",
    [
        (64, 64, 64, "", ["x_parts"]),
        (64, 64, 64, "xw", ["x_parts"]),
        (64, 64, 64, "w", ["x_parts", "w_parts"]),  # which is stored once, and x's in every call
        (64, 128, 64, "", ["x_parts", "w_parts"]),
        (1024, 1024, 1024, "", ["x_parts", "w_parts"]),  # a launch is nothing beside what they move
    ],
)
def test_one_launch_stores_small_parts_of_one_shape(m: int, n: int, k: int, constant: str, makers: list[str]) -> None:
    program = parse(text(m, n, k))
    same = [b for b in program.inputs if b.name in constant]
    found = into_parts(program, Log(), 3, lambda old, new, beaten: (1.0, ""), constant=same)
    assert [s.name for s in found.steps] == [*makers, "y"]


def numbers() -> Any:
    """Numbers in float32 of every exponent."""
    bits = np.random.default_rng(0).integers(0, 2**32, 1500, np.uint64).astype(np.uint32)
    found = np.concatenate([bits.view(np.float32), SPECIAL])
    return found[np.isfinite(found)]


def test_parts_add_up_to_the_number() -> None:
    x = numbers()
    total = sum(p.astype(np.float64) / SCALE**rank for rank, p in enumerate(parts(x)))
    assert np.abs(total - x).max() <= 2.0**-134 / SCALE**2  # half of the least bfloat16, as it is scaled
    ordinary = np.abs(x) >= 2.0**-122
    assert (total == x)[ordinary].all()


def test_two_parts_have_sixteen_bits() -> None:
    x = numbers()
    x = x[np.abs(x) >= 2.0**-122].astype(np.float64)
    first, second = (p.astype(np.float64) for p in parts(x, 2))
    assert (np.abs(first + second / SCALE - x) <= 2.0**-16 * np.abs(x)).all()


@pytest.mark.parametrize("count", [2, 3])
def test_only_the_last_part_is_infinite_or_nan(count: int) -> None:
    found = parts(SPECIAL, count)
    for p in found[:-1]:
        assert np.isfinite(p[~np.isnan(SPECIAL)]).all()
    assert (found[0] != 0)[SPECIAL != 0].all()  # which an infinity is multiplied by
    assert (np.signbit(found[0]) == np.signbit(SPECIAL))[~np.isnan(SPECIAL)].all()
    assert (found[-1] == SPECIAL)[np.isinf(SPECIAL)].all() and np.isnan(found[-1][np.isnan(SPECIAL)]).all()


@pytest.mark.parametrize("count", [2, 3])
def test_parts_of_large_numbers_have_their_sign(count: int) -> None:
    """So products that overflow do so on one side."""
    x = numbers()
    x = x[np.abs(x) >= LARGE]
    assert len(x) > 100 and all((np.sign(p) * x >= 0).all() for p in parts(x, count))


@pytest.mark.parametrize("count", [2, 3])
def test_ordinary_numbers_have_the_same_parts_in_fewer_operations(count: int) -> None:
    """To the bit, where a number is not large and its first part is not 0; elsewhere some have others."""
    x = np.concatenate([numbers(), SPECIAL, np.float32([0.0, 2.0**59, 2.0**-133, 2.0**-134])])
    a = Var("a0", len(x))
    source = l.Buffer("x", Type(f32, (len(x),)))
    found, size, first = ordinary(l.Load(source, (a,)), count)
    names = [f"p{n}" for n in range(count + 2)]
    stores = [
        l.Store(l.Buffer(n, Type(v.dtype, (len(x),))), (a,), v)  # type: ignore[attr-defined]
        for n, v in zip(names, (*found, size, first), strict=True)
    ]
    kernel = l.Kernel("k", (a,), tuple(stores))
    with np.errstate(all="ignore"):
        *ours, size, first = loop.run(l.Program("f", (source,), (kernel,), kernel.writes), {"x": x})
    usual = (size < LARGE) & (first > 0)
    same = [
        m.astype(np.float32).view(np.uint32) == t.view(np.uint32) for m, t in zip(ours, parts(x, count), strict=True)
    ]
    assert usual.sum() > 500 and all(s[usual].all() for s in same)
    assert not np.all(same, axis=0)[~usual].all()


def test_what_products_of_parts_leave_out_is_of_either_sign() -> None:
    """Cut parts left out 4e-8 of every product, and of every sum of such, whoever adds up how many of them."""
    x, w = (np.random.default_rng(seed).standard_normal(20000).astype(np.float32) for seed in (0, 1))
    a, b = parts(x), parts(w)
    found = sum(a[i].astype(np.float64) * b[j] / SCALE ** (i + j) for i, j in pairs(3))
    off = found / (x.astype(np.float64) * w) - 1
    assert abs(off.mean()) < 1e-9 and np.sqrt((off**2).mean()) < 1e-8


@pytest.mark.parametrize("together", [NEVER, TOGETHER])
def test_sums_on_tensor_cores_are_hardly_smaller_than_they_should_be(together: int) -> None:
    """What tensor cores truncate makes all sums smaller, and a sum over many of them keeps that, as a gradient of a
    bias does. Cut parts, promoted every 64 products, made it 9e-8.
    """
    x, w = factors("normal", 64, 512)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    off = on_tensor_cores(x, w, together=together) - exact
    assert -3e-8 < (off * exact).sum() / (exact**2).sum() < 1e-8


def test_sums_of_a_few_steps_are_rounded_by_themselves() -> None:
    """Long sums are further off by what CUDA cores round, less where there are registers for a third set of sums."""
    x, w = factors("normal", 16, 4096)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    off = [np.linalg.norm(on_tensor_cores(x, w, together=n) - exact) for n in (NEVER, TOGETHER)]
    assert 2 * off[1] < off[0] < np.linalg.norm(on_cuda_cores(x, w) - exact) / 4


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("other", [0.0, 1.0])
def test_products_with_infinities_nan_and_zeros(count: int, other: float) -> None:
    """Every pair of special numbers in sums whose other products are `other`: what is not finite is so in both."""
    n = len(SPECIAL)
    x, w = np.full((n, 8), other, np.float32), np.ones((n, 8), np.float32)
    x[:, 5] = w[:, 5] = SPECIAL
    (y,) = loop.run(split(text(n, n, 8), count), {"x": x, "w": w})
    with np.errstate(all="ignore"):
        exact = np.sum(x[:, None].astype(np.float64) * w[None].astype(np.float64), -1)
        plain = exact.astype(np.float32)
    if count == 1:  # as PyTorch rounds it: a large number may become infinite, a small one zero
        rounded = (v.astype(ml_dtypes.bfloat16).astype(np.float64) for v in (x, w))
        with np.errstate(all="ignore"):
            first, second = rounded
            plain = np.sum(first[:, None] * second[None], -1).astype(np.float32)
    assert np.array_equal(np.isnan(y), np.isnan(plain))
    assert np.array_equal(y[np.isinf(plain)], plain[np.isinf(plain)])
    good = np.isfinite(plain) & (np.abs(exact) < 2.0**128 * (1 - 2.0**-15 * (count == 2)))
    assert np.isfinite(y[good]).all()
    assert not np.signbit(y[y == 0]).any()
    relative = {1: 2.0**-7, 2: 2.0**-13, 3: 2.0**-20}[count]
    lost = lost_of(count, x, w)
    off = np.abs(y[good].astype(np.float64) - exact[good])
    assert (off <= relative * np.abs(exact[good]) + lost[good] + 2.0**-149).all()


def lost_of(count: int, x: Any, w: Any) -> Any:
    """What small numbers lose at most: of each, what its last part is too small for."""
    least = 2.0**-134 / SCALE ** (count - 1)
    one, other = (np.abs(v).astype(np.float64).sum(1) for v in (x, w))
    return least * (one[:, None] + other[None])


TINY = {
    "small": (2.0**-110, 1.0),
    "smaller": (2.0**-120, 1.0),
    "denormal": (2.0**-135, 1.0),
    "small times large": (2.0**-120, 2.0**115),
}


@pytest.mark.parametrize("name", TINY)
def test_small_numbers_lose_what_no_bfloat16_holds(name: str) -> None:
    """Below 2^-122 the last parts vanish: what is lost is 2^-146 of the other factor at most."""
    rng, (a, b) = np.random.default_rng(0), TINY[name]
    x, w = ((rng.standard_normal((8, 512)) * s).astype(np.float32) for s in (a, b))
    (y,) = loop.run(split(text(8, 8, 512)), {"x": x, "w": w})
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(w).T.astype(np.float64)
    assert (np.abs(y - exact) <= 2.0**-21 * size + lost_of(3, x, w) + 2.0**-149).all()
    if name != "denormal":
        plain = np.linalg.norm(on_cuda_cores(x, w) - exact)
        assert np.linalg.norm(on_tensor_cores(x, w) - exact) <= plain


# -- errors, on tensor cores that truncate -----------------------------------------------------------------------------


def on_tensor_cores(x: Any, w: Any, count: int = 3, chunk: int = 64, together: int = NEVER) -> Any:
    """What a kernel of the schedule computes: a sum on CUDA cores of sums over `chunk` of the small products, those of
    one scale after those of another, and of sums of the large ones over 32; those of a few chunks `together`, where
    there are registers for them.
    """
    a, b = (np.stack(parts(v.reshape(-1), count)).reshape(count, *v.shape) for v in (x, w))
    total, few = (np.zeros((len(x), len(w)), np.float32) for _ in range(2))
    for first in range(0, x.shape[1], chunk):
        c = np.zeros(total.shape)
        for rank, group in groupby(pairs(count), sum):
            terms, length = list(group), chunk if rank else 32
            for begin in range(first, first + chunk, length):
                for i, j in terms:
                    for k in range(begin, begin + length, 16):
                        c = truncated(c, a[i][:, k : k + 16], b[j][:, k : k + 16].T)
                if rank < 2:
                    few, c = (few + c / SCALE**rank).astype(np.float32), np.zeros(total.shape)
            c = c / SCALE
        if first // chunk % together == together - 1:
            total, few = total + few, np.zeros_like(few)
    return total + few


def on_cuda_cores(x: Any, w: Any) -> Any:
    """Multiply-adds one after the other, which is what cuBLAS computes: its error was 1.1e-6 at 4096 products of normal
    numbers, and so is this one's.
    """
    total = np.zeros((len(x), len(w)), np.float32)
    for a, b in zip(x.T.astype(np.float64), w.T.astype(np.float64), strict=True):
        total = (total + a[:, None] * b[None]).astype(np.float32)
    return total


def factors(name: str, m: int, k: int) -> tuple[Any, Any]:
    """Two matrices [m, k] of a distribution."""
    rng = np.random.default_rng(0)
    normal = lambda: rng.standard_normal((m, k))  # noqa: E731
    x, w = normal(), normal()
    along = 2.0 ** rng.integers(-60, 61, k)
    rows = 10.0 ** rng.uniform(-15, 15, (2, m, 1))
    found = {
        "normal": lambda: (x, w),
        "from 0 to 1": lambda: (rng.random((m, k)), rng.random((m, k))),
        "from -1 to 1": lambda: (rng.uniform(-1, 1, (m, k)), rng.uniform(-1, 1, (m, k))),
        "around 100": lambda: (100 + x, 100 + w),
        "log-normal": lambda: (np.exp(3 * x), np.exp(3 * w)),
        "log-normal, of both signs": lambda: (np.exp(3 * x) * np.sign(normal()), np.exp(3 * w)),
        "Cauchy": lambda: (rng.standard_cauchy((m, k)), rng.standard_cauchy((m, k))),
        "whole numbers": lambda: (rng.integers(-4096, 4097, (m, k)), rng.integers(-4096, 4097, (m, k))),
        "rows of all sizes": lambda: (x * rows[0], w * rows[1]),
        "columns of all sizes": lambda: (x * along, w / along),
        "cancelling": lambda: (np.where(np.arange(k) % 2, x, -np.roll(x, -1, 1)), w + np.roll(w, 1, 1)),
        "one large column": lambda: (np.where(np.arange(k) == 7, 1e6, 1) * x, w),
        "constant": lambda: (np.full((m, k), 0.1), np.full((m, k), 0.3)),
        "large": lambda: (x * 1e37, w * 1e-3),
        "small": lambda: (x * 1e-30, w),
    }
    first, second = found[name]()
    return first.astype(np.float32), second.astype(np.float32)


DISTRIBUTIONS = (
    "normal", "from 0 to 1", "from -1 to 1", "around 100", "log-normal", "log-normal, of both signs", "Cauchy",
    "whole numbers", "rows of all sizes", "columns of all sizes", "cancelling", "one large column", "constant", "large",
    "small",
)  # fmt: skip


@pytest.mark.parametrize("together", [NEVER, TOGETHER])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_six_products_are_no_further_off_than_float32(name: str, together: int) -> None:
    """From 512 products on, where the rule takes them: in the norm of all errors, and in that of errors relative to the
    sum of absolute products.
    """
    x, w = factors(name, 16, 512)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(w).T.astype(np.float64)
    off, plain = on_tensor_cores(x, w, together=together) - exact, on_cuda_cores(x, w) - exact
    assert np.linalg.norm(off / size) <= np.linalg.norm(plain / size)
    if name != "Cauchy":  # whose norm is the error of one result
        assert np.linalg.norm(off) <= np.linalg.norm(plain)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize(("depth", "chunk"), [(128, 32), (256, 64)])
def test_short_sums_are_at_most_twice_as_far_off(name: str, depth: int, chunk: int) -> None:
    """An error below 1e-7 counts as that much."""
    x, w = factors(name, 16, depth)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    off, plain = (np.linalg.norm(y - exact) for y in (on_tensor_cores(x, w, 3, chunk), on_cuda_cores(x, w)))
    assert off <= 2 * max(plain, 1e-7 * np.linalg.norm(exact))


def test_three_products_are_closer_than_tf32() -> None:
    x, w = factors("normal", 16, 512)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    tf32 = [(v.view(np.uint32) + 0x1000 & 0xFFFFE000).view(np.float32).astype(np.float64) for v in (x, w)]
    ours, other = (np.linalg.norm(y - exact) for y in (on_tensor_cores(x, w, 2), tf32[0] @ tf32[1].T))
    assert ours * 20 < other


# -- factors with a diagonal ---------------------------------------------------------------------------------------


def scored(value: str) -> str:
    """A product of a matrix that another kernel stores, whose element at (a0, a1) is `value`."""
    return f"""@loop
def f(s: f32[512, 512], w: f32[512, 64]):
    with kernel('p', p=f32[512, 512]):
        for a0 in free(512):
            for a1 in free(512):
                p[a0, a1] = {value}
    with kernel('y', y=f32[512, 64]):
        for a0 in free(512):
            for a1 in free(64):
                for r0 in reduce(512):
                    acc0 <- sum(mul(p[a0, r0], w[r0, a1]))
                y[a0, a1] = acc0
    return (y,)
"""


ONE = "where(eq(index(a0), index(a1)), f32(-1.0), f32(0.0))"


@pytest.mark.parametrize(
    "value",
    [
        f"sub({ONE}, exp(s[a0, a1]))",
        f"div(add(exp(s[a0, a1]), mul(f32(0.5), {ONE})), f32(0.05))",
        f"where(ge(s[a0, a1], f32(0.0)), add({ONE}, s[a0, a1]), f32(0.0))",
    ],
)
def test_a_factor_with_a_diagonal_is_not_cut(value: str) -> None:
    """Beside the one large number of a row tensor cores cut off the others, and who adds up rows sees it."""
    log = Log()
    found = split(scored(value), log=log)
    assert len(found.steps) == 2
    (event,) = [e for e in log.events if not e.fired]
    assert event.subject == "y" and "numbers added on its diagonal" in event.reason


@pytest.mark.parametrize(
    "value",
    [
        ONE,  # all others are 0
        f"exp(add(s[a0, a1], {ONE}))",  # a mask of scores
        f"mul(s[a0, a1], {ONE})",
        "add(s[a0, a1], where(ge(s[a1, a0], f32(0.0)), f32(1.0), f32(0.0)))",
    ],
)
def test_other_factors_are(value: str) -> None:
    assert len(split(scored(value)).steps) > 2


def test_sums_of_rows_lose_more_on_tensor_cores_where_there_is_a_diagonal() -> None:
    """What the rule is for: the gradient by softmax of scores of unit vectors, added up over rows."""
    rng = np.random.default_rng(0)
    v, w = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in rng.standard_normal((2, 256, 32)) + 1)
    scores = np.exp(v @ w.T / 0.05)
    p = (scores / scores.sum(1, keepdims=True) - np.eye(256)).astype(np.float32)
    exact = (p.astype(np.float64) @ w.astype(np.float32)).sum(0)
    columns = np.ascontiguousarray(w.T, np.float32)
    off, plain = (f(p, columns).sum(0, np.float64) - exact for f in (on_tensor_cores, on_cuda_cores))
    assert np.linalg.norm(off) > 2 * np.linalg.norm(plain)


THIRD = """
@loop
def f(x: f32[256, 3, 64], w: f32[128, 64]):
    with kernel('t', t=f32[256, 3, 64]):
        for a0 in free(256):
            for a1 in free(3):
                for a2 in free(64):
                    in0 = x[a0, a1, a2]
                    v0 = exp(in0)
                    for r0 in reduce(3):
                        in1 = x[a0, r0, a2]
                        acc0 <- max(in1)
                    v1 = mul(v0, acc0)
                    t[a0, a1, a2] = v1
{others}
    with kernel('y', y=f32[256, 128]):
        for a0 in free(256):
            for a1 in free(128):
                for r0 in reduce(64):
                    in0 = t[a0, 2, r0]
                    in1 = w[a1, r0]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                y[a0, a1] = acc0
    return ({results},)
"""
OTHER = """
    with kernel('z', z=f32[256, 128]):
        for a0 in free(256):
            for a1 in free(128):
                for r0 in reduce(64):
                    in0 = t[a0, 1, r0]
                    in1 = w[a1, r0]
                    v0 = mul(in0, in1)
                    acc0 <- sum(v0)
                z[a0, a1] = acc0"""


@pytest.mark.parametrize(("others", "results", "shape"), [("", "y", (256, 64)), (OTHER, "y, z", (256, 3, 64))])
def test_of_what_is_read_in_part_no_more_has_parts(others: str, results: str, shape: tuple[int, ...]) -> None:
    """Values are a third of what one product gave, and queries and keys that were turned lie elsewhere. Where another
    product reads the rest, there is one set of parts for both.
    """
    done = split(THIRD.format(others=others, results=results).replace("\n\n", "\n").strip())
    verify(done, "parts")
    stored = {b.name: b.type.shape for s in done.steps for b in s.writes if b.name.startswith("t_")}
    assert stored == {f"t_{n}": shape for n in (1, 2, 3)}
