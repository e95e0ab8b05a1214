"""Numbers in float32 as two parts in float16, scaled by rows, and products of these: what they are worth, on tensor
cores that truncate, and where other sums stand in their place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.rules.test_parts import DISTRIBUTIONS, SPECIAL, factors, on_cuda_cores, text

from terrazzo.hw.wgmma import truncated
from terrazzo.interp import loop
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import topological
from terrazzo.ir.rescues import rescues
from terrazzo.ir.sites import product
from terrazzo.ir.text import parse, show
from terrazzo.ir.verify import verify
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.precision.parts import into_parts
from terrazzo.rules.loop.precision.scaled_parts import DEPTH, FEWER_DIGITS, LARGEST, SCALE
from terrazzo.rules.tile_to_kernel.promote import added, together


def halved(source: str) -> l.Program:
    """A program with its products in two parts each: those ways that store something else gain less."""
    found = into_parts(parse(source), Log(), 3, lambda old, new, beaten: (float(_halves(new)), ""))
    verify(found, "parts")
    assert parse(show(found)) == found
    return found


def _halves(steps: Any) -> bool:
    return any("_root" in b.name for s in steps for b in s.writes)


def made(x: Any, w: Any) -> dict[str, Any]:
    """What is stored of two factors."""
    program = halved(text(len(x), len(w), x.shape[1]))
    stored = tuple(b for s in program.steps[:-1] for b in s.writes)
    with np.errstate(all="ignore"):
        values = loop.run(l.Program("f", program.inputs, program.steps[:-1], stored), {"x": x, "w": w})
    both = {b.name: v for b, v in zip(stored, values, strict=True)}
    rows = {"x": slice(len(x)), "w": slice(len(x), None)}  # one behind the other
    return {f"{n}_{p}": both[f"x_w_{p}"][own] for n, own in rows.items() for p in ("1", "2", "root", "least")}


def run(x: Any, w: Any) -> Any:
    """The product, in Loop IR."""
    with np.errstate(all="ignore"):
        return loop.run(halved(text(len(x), len(w), x.shape[1])), {"x": x, "w": w})[0]


def on_tensor_cores(x: Any, w: Any, rescued: bool = True, each: int = 0) -> Any:
    """What a kernel computes: in every step of 64 the small products, then the large ones, by 32; sums of a few steps
    together, the last of which are added to the others by `nearer`. Where these will not do, sums on CUDA cores.
    """
    stored = made(x, w)
    a, b = ([stored[f"{n}_{p}"].astype(np.float64) for p in (1, 2)] for n in "xw")
    total, few = (np.zeros((len(x), len(w)), np.float32) for _ in range(2))
    steps = x.shape[1] // 64
    few_steps = each or together(steps, often=True)
    by = added(-(-steps // few_steps), often=True)
    for first in range(0, x.shape[1], 64):
        if first and first // 64 % few_steps == 0:
            total, few = nearer(total, few, by), np.zeros_like(few)
        for terms, length, scale in ((((1, 0), (0, 1)), 64, SCALE), (((0, 0),), 32, 1.0)):
            for begin in range(first, first + 64, length):
                c = np.zeros(total.shape)
                for i, j in terms:
                    for k in range(begin, begin + length, 16):
                        c = truncated(c, a[i][:, k : k + 16], b[j][:, k : k + 16].T)
                few = (few + c / scale).astype(np.float32)
    total = nearer(total, few, by)
    root = stored["x_root"][:, None] * stored["w_root"][None]
    doubted = np.abs(total) < stored["x_least"][:, None] + stored["w_least"][None]
    return np.where(doubted & rescued, on_cuda_cores(x, w), total * root * root)


def nearer(one: Any, other: Any, by: float) -> Any:
    """Two sums in float32, larger by so much of them, rounded once."""
    both = one + other
    with np.errstate(invalid="ignore"):
        left = other - (both - one)
    better = both + (both * np.float64(by) + left).astype(np.float32)
    return np.where(np.abs(left) <= np.abs(other), better, both)


def numbers(rows: int = 64, columns: int = 512) -> Any:
    """Rows of numbers of every exponent, each row of a part of them."""
    rng = np.random.default_rng(0)
    size = rng.integers(-149, 120, (rows, 1)) + rng.integers(-30, 8, (rows, columns))
    return (rng.standard_normal((rows, columns)) * 2.0**size).astype(np.float32)


# -- parts -------------------------------------------------------------------------------------------------------------


def test_parts_add_up_to_the_number() -> None:
    """To 2^-23 of it where it is no smaller than 2^-12 of scaled rows; what smaller ones lose is told."""
    x = numbers()
    stored = made(x, x)
    root = stored["x_root"].astype(np.float64)[:, None]
    assert (np.frexp(root)[0] == 0.5).all()
    scaled = x / root**2
    whole = np.abs(x).max(1) >= 2.0**-112  # whose scales are ordinary numbers
    largest = np.abs(scaled).max(1)
    assert (largest < 2.0 ** (LARGEST + 1)).all() and (largest >= 2.0 ** (LARGEST - 1))[whole].all()
    left = scaled - stored["x_1"].astype(np.float64) - stored["x_2"].astype(np.float64) / SCALE
    usual = np.abs(scaled) >= FEWER_DIGITS
    assert (np.abs(left) <= 2.0**-23 * np.abs(scaled))[usual].all() and usual.sum() > 5000
    least = np.where(usual, 0, np.abs(left)).sum(1) * 2.0 ** (LARGEST + 1) * 2.0**22
    assert (stored["x_least"] >= least * (1 - 1e-5)).all() and (least > 0).sum() > 10


def test_no_part_is_infinite_but_that_of_infinity() -> None:
    x = numbers()
    stored = made(x, x)
    assert all(np.isfinite(v.astype(np.float32)).all() for v in stored.values())
    assert (stored["x_1"] != 0)[x != 0].all()  # which infinity is multiplied by


def test_rows_of_ordinary_numbers_lose_nothing() -> None:
    """So their sums are hardly ever doubted: of 2^20 normal numbers one or none is 2^-25 of the largest of its row."""
    x = np.random.default_rng(0).standard_normal((256, 4096)).astype(np.float32)
    stored = made(x, x[:2])
    assert (stored["x_least"] > 0).sum() <= 2 and stored["x_least"].max() < 64


# -- products ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [DEPTH, 512])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_three_products_are_no_further_off_than_float32(name: str, depth: int) -> None:
    """In the norm of errors relative to the sum of absolute products, and from 512 products on in that of all errors,
    as six products of bfloat16 are. Only columns of all sizes are left to CUDA cores.
    """
    x, w = factors(name, 16, depth)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(w).T.astype(np.float64)
    plain, off = on_cuda_cores(x, w) - exact, on_tensor_cores(x, w) - exact
    assert np.linalg.norm(off / size) <= np.linalg.norm(plain / size)
    if name != "Cauchy" and depth > DEPTH:
        assert np.linalg.norm(off) <= np.linalg.norm(plain)
    assert (off == plain).all() == (name == "columns of all sizes")


@pytest.mark.parametrize(("depth", "ratio"), [(512, 0.45), (2048, 0.35)])
def test_sums_of_normal_numbers_are_closer(depth: int, ratio: float) -> None:
    """By half and more, and hardly smaller than they should be: a tensor core cuts off sums of numbers of 22 bits where
    those of 16 bits have nothing to be cut off.
    """
    x, w = factors("normal", 64, depth)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    off, plain = on_tensor_cores(x, w) - exact, on_cuda_cores(x, w) - exact
    assert np.linalg.norm(off) < ratio * np.linalg.norm(plain)
    assert -4e-8 < (off * exact).sum() / (exact**2).sum() < 1e-8


@pytest.mark.parametrize("spread", [20, 28, 36, 44, 60])
def test_a_diagonal_between_the_factors_changes_nothing(spread: int) -> None:
    """A diag(d) times diag(1/d) B: the parts know nothing of the smallest numbers where d spreads far, and those sums
    are not taken.
    """
    x, w = factors("normal", 16, 512)
    d = 2.0 ** np.random.default_rng(1).integers(-(spread // 2), spread // 2 + 1, 512).astype(np.float32)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    off, plain = (np.linalg.norm(f(x * d, w / d) - exact) for f in (on_tensor_cores, on_cuda_cores))
    assert off <= plain
    if spread >= 36:  # which is wrong without CUDA cores
        assert np.linalg.norm(on_tensor_cores(x * d, w / d, rescued=False) - exact) > 2 * plain


def test_large_numbers_that_meet_zeros_do_not_hide_small_ones() -> None:
    """One number of a row is 2^60 times as large as the others, and what it meets is 0."""
    x, w = factors("normal", 16, 512)
    x[:, 3], w[:, 3] = 2.0**60, 0.0
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    off, plain = (np.linalg.norm(f(x, w) - exact) for f in (on_tensor_cores, on_cuda_cores))
    assert off <= plain < np.linalg.norm(on_tensor_cores(x, w, rescued=False) - exact) / 1e4


@pytest.mark.parametrize("other", [0.0, 1.0, 1e-30, 1e30])
def test_products_with_infinities_nan_and_zeros(other: float) -> None:
    """Every pair of special numbers, in sums whose other products are `other`: what is not finite is so in both, and no
    zero is negative.
    """
    n = len(SPECIAL)
    x, w = np.full((n, DEPTH), other, np.float32), np.ones((n, DEPTH), np.float32)
    x[:, 5] = w[:, 5] = SPECIAL
    y = run(x, w)
    with np.errstate(all="ignore"):
        exact = np.sum(x[:, None].astype(np.float64) * w[None].astype(np.float64), -1)
        plain = exact.astype(np.float32)
        size = np.sum(np.abs(x[:, None].astype(np.float64) * w[None].astype(np.float64)), -1)
    assert np.array_equal(np.isnan(y), np.isnan(plain))
    added = DEPTH * 2.0**-24  # NumPy adds one after the other on some processors, in pairs on others
    edge = np.isfinite(exact) & np.isinf(plain) & (np.abs(exact) <= 2.0**128 * (1 + added))
    far, good = np.isinf(plain) & ~edge, np.isfinite(plain)
    assert np.array_equal(y[far], plain[far])
    largest = np.finfo(np.float32).max
    assert (np.copysign(np.minimum(np.abs(y), largest), y)[edge] == np.copysign(largest, exact)[edge]).all()
    assert np.isfinite(y[good]).all() and not np.signbit(y[y == 0]).any()
    assert (np.abs(y - exact)[good] <= (2.0**-21 + added) * size[good] + 2.0**-149).all()


TINY = {
    "small": (2.0**-110, 1.0),
    "denormal": (2.0**-135, 1.0),
    "least": (2.0**-148, 1.0),
    "small times large": (2.0**-120, 2.0**115),
    "large times small": (2.0**120, 2.0**-140),
    "large": (2.0**62, 2.0**57),
}


@pytest.mark.parametrize("name", TINY)
def test_rows_may_be_of_any_size(name: str) -> None:
    """Nothing over- or underflows on its way that does not in float32."""
    rng, (a, b) = np.random.default_rng(0), TINY[name]
    x, w = ((rng.standard_normal((8, 512)) * s).astype(np.float32) for s in (a, b))
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(w).T.astype(np.float64)
    assert (np.abs(run(x, w) - exact) <= 2.0**-21 * size + 2.0**-149).all()


def test_whole_numbers_are_exact() -> None:
    """Those of 11 bits, as counts and flags are, and those of 22 beside flags."""
    rng = np.random.default_rng(0)
    flags, counts = rng.integers(0, 2, (16, 512)), rng.integers(-200, 201, (16, 512))
    large = rng.integers(-(2**13), 2**13, (16, 512))
    for a, b in ((flags, flags), (flags, counts), (counts, counts), (flags, large)):
        y = on_tensor_cores(a.astype(np.float32), b.astype(np.float32))
        assert (y == a @ b.T).all()


# -- where ------------------------------------------------------------------------------------------------------------


def test_other_sums_stand_in_the_place_of_the_product() -> None:
    kernel = halved(text(128, 64, 512)).steps[-1]
    (found,) = rescues(kernel).values()
    p = product(kernel)
    assert p is not None and p.rescued and p.sites[0].reduce is found.of
    assert {b.name for b in kernel.reads} >= {"x", "w", "x_w_1", "x_w_2", "x_w_least", "x_w_root"}


@pytest.mark.parametrize(
    ("change", "scaled"),
    [
        (("", ""), True),
        (("reduce(512)", "reduce(128)"), False),  # too few
        (("x[a0, r0]", "x[a0 + 1, r0]"), False),  # a window
        (("x[a0, r0]", "exp(x[a0, r0])"), False),  # made on its way
        (("y[a0, a1] = acc0", "y[a0, a1] = tanh(acc0)"), True),
    ],
)
def test_which_products_are_scaled(change: tuple[str, str], scaled: bool) -> None:
    source = text(128, 64, 512).replace("x: f32[128,", "x: f32[129," if "+ 1" in change[1] else "x: f32[128,")
    assert _halves(halved(source.replace(*change)).steps) == scaled


def test_a_row_is_what_is_summed_however_it_lies() -> None:
    """Weights [k, n] are scaled by columns of theirs."""
    source = text(64, 48, 512).replace("w: f32[48, 512]", "w: f32[512, 48]").replace("w[a1, r0]", "w[r0, a1]")
    program = halved(source)
    shapes = {b.name: b.type.static_shape for s in program.steps for b in s.writes}
    assert shapes["w_1"] == (512, 48) and shapes["w_root"] == (48,) and shapes["x_least"] == (64,)
    x, w = factors("normal", 64, 512)
    x[:, 3] *= 1e9
    (y,) = loop.run(program, {"x": x, "w": np.ascontiguousarray(w[:48].T)})
    exact = x.astype(np.float64) @ w[:48].T.astype(np.float64)
    assert np.linalg.norm(y - exact) < 1e-6 * np.linalg.norm(exact)


def test_parts_are_stored_once_for_all_who_multiply_them() -> None:
    """Along one axis; those along another are others."""
    source = """@loop
def f(x: f32[512, 512], w: f32[512, 512]):
    with kernel('y', y=f32[512, 512]):
        for a0 in free(512):
            for a1 in free(512):
                for r0 in reduce(512):
                    acc0 <- sum(mul(x[a0, r0], w[a1, r0]))
                y[a0, a1] = acc0
    with kernel('z', z=f32[512, 512]):
        for a0 in free(512):
            for a1 in free(512):
                for r0 in reduce(512):
                    acc0 <- sum(mul(x[a0, r0], w[r0, a1]))
                z[a0, a1] = acc0
    return (y, z)
"""
    assert [s.name for s in halved(source).steps] == ["x_w_parts", "y", "w_root", "w_least", "w_parts", "z"]


@pytest.mark.parametrize("m, names", [(4096, ["x_w_parts", "y"]), (8192, ["x_parts", "w_parts", "y"])])
def test_one_launch_stores_the_parts_of_both_factors_that_are_small(m: int, names: list[str]) -> None:
    """Rows of the second one lie behind those of the first."""
    program = halved(text(m, 1024, 1024))
    assert [s.name for s in program.steps] == names
    read = {x.buffer.name: x.index[0] for x in topological(program.steps[-1].stores) if isinstance(x, l.Load)}
    if len(names) == 2:
        first = {b.type.static_shape[0] for b in program.steps[0].writes}
        assert first == {m + 1024} and "x_w_root" in read


def test_parts_of_a_constant_are_not_stored_with_those_of_others() -> None:
    source = parse(text(512, 512, 512))
    (w,) = (b for b in source.inputs if b.name == "w")
    found = into_parts(source, Log(), 3, lambda old, new, beaten: (float(_halves(new)), ""), constant=[w])
    assert [s.name for s in found.steps] == ["x_parts", "w_parts", "y"]


def test_special_numbers_have_parts_that_keep_their_meaning() -> None:
    x = np.ones((len(SPECIAL), DEPTH), np.float32)
    x[:, 7] = SPECIAL
    stored = made(x, x)
    first, second = (stored[f"x_{p}"].astype(np.float32)[:, 7] for p in (1, 2))
    assert np.isfinite(first).all() and (first != 0)[SPECIAL != 0].all()
    assert (second == SPECIAL)[np.isinf(SPECIAL)].all() and np.isnan(second[np.isnan(SPECIAL)]).all()
    assert np.isfinite(second[np.isfinite(SPECIAL)]).all()


def test_rows_across_memory_have_the_parts_of_rows_along_it() -> None:
    """In three kernels: of the roots, of what is lost, which is added up otherwise, and of the parts."""
    x = numbers(64, 512)
    source = text(64, 64, 512).replace("w: f32[64, 512]", "w: f32[512, 64]").replace("w[a1, r0]", "w[r0, a1]")
    *makers, _ = halved(source).steps
    assert [s.name for s in makers] == ["x_parts", "w_root", "w_least", "w_parts"]
    stored = tuple(b for s in makers for b in s.writes)
    with np.errstate(all="ignore"):
        values = loop.run(l.Program("f", parse(source).inputs, tuple(makers), stored), {"x": x, "w": x.T.copy()})
    found = {b.name: v for b, v in zip(stored, values, strict=True)}
    assert all(np.array_equal(found[f"x_{p}"], found[f"w_{p}"].T) for p in ("1", "2", "root"))
    assert np.allclose(found["x_least"], found["w_least"], rtol=1e-5, atol=0)
