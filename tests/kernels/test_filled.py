"""How products fill a machine: blocks share the steps of few results, and products that were fused are kernels of their
own where wider tiles gain more.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from terrazzo import pipelines
from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.nest import accumulators
from terrazzo.ir.sites import product
from terrazzo.options import Options
from terrazzo.pipelines import Lowering, lowering
from terrazzo.rules.loop_to_tile.products import products, tiles, warpgroups
from terrazzo.rules.loop_to_tile.products.apart import products_apart
from terrazzo.targets import TARGETS
from terrazzo.targets.cuda.check import check

TALL = {
    "both columns": (lambda a, b: a.T @ b, (2600, 64), (2600, 64)),
    "both rows": (lambda a, b: a @ b.T, (64, 2600), (64, 2600)),
    "rows and columns": (lambda a, b: a @ b, (64, 2600), (2600, 64)),
    "over two axes": (lambda a, b: torch.einsum("btk,btn->kn", a, b), (4, 650, 64), (4, 650, 64)),
    "with what follows": (lambda a, b: torch.relu(a.T @ b).t() + 1, (2600, 64), (2600, 96)),
}


@pytest.fixture(autouse=True)
def no_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a cluster share the steps of few results where a machine says what that takes: not here."""
    for name, machine in TARGETS.items():
        if machine.gpu is not None and (has := machine.gpu.warpgroups) is not None:
            alone = replace(machine.gpu, warpgroups=replace(has, clusters=()))
            monkeypatch.setitem(TARGETS, name, replace(machine, gpu=alone))


def chosen(fn: Any, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, arch: str = "sm_90a") -> Lowering:
    """What is chosen for a function of tensors of these shapes."""
    given = tuple(torch.empty(s, dtype=dtype, device="meta") for s in shapes)
    return lowering(capture(fn, given, {}).program, Options(target=arch, libraries="never"))


def blocks(done: Lowering) -> int:
    """The tiles of the first kernel, which blocks take."""
    (_, plan), *_ = done.at("tile").plans
    return int(np.prod([w.args[0] for w in next(x for x in plan.lines if x.op == "order").tiles]))


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in TALL), ("both columns", torch.float16)]
)
def test_pieces_may_end_anywhere(name: str, dtype: torch.dtype) -> None:
    """2600 is no multiple of a step: the last piece ends in zeros."""
    fn, *shapes = TALL[name]
    done = chosen(fn, *shapes, dtype=dtype)
    tile, kernels = done.at("tile"), done.at("kernel")
    pieces = (1, 2) if name == "over two axes" else (2,)  # a piece that ends within a row of an axis is no box
    assert len(tile.schedules) in pieces and "wgmma" in str(tile.schedules[0])
    check(kernels, gpu("sm_90a"))
    torch.manual_seed(0)
    args = [torch.randn(s).to(dtype) for s in shapes]
    given = {b.name: _array(x) for b, x in zip(done.loop.inputs, args, strict=True)}
    (y,) = simulator.run(kernels, given, seed=3)
    exact, eager = fn(*(x.double() for x in args)), fn(*args)
    off, usual = (np.linalg.norm(np.asarray(v, np.float64) - exact.numpy()) for v in (y, eager.double()))
    assert off <= 1.1 * usual


def _array(x: torch.Tensor) -> Any:
    import ml_dtypes

    if x.dtype != torch.bfloat16:
        return x.numpy()
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


ODD = {
    "float32": (torch.float32, (31, 1301), (1301, 24)),
    "bfloat16": (torch.bfloat16, (70, 1301), (1301, 21)),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_steps_are_shared_too(name: str) -> None:
    dtype, *shapes = ODD[name]
    done = chosen(torch.matmul, *shapes, dtype=dtype)
    assert any(e.rule == "split" for e in done.log.events) and len(done.loop.steps) >= 2
    torch.manual_seed(0)
    args = [torch.randn(s).to(dtype) for s in shapes]
    given = {b.name: _array(x) for b, x in zip(done.loop.inputs, args, strict=True)}
    (y,) = simulator.run(done.at("kernel"), given, seed=3)
    exact, eager = torch.matmul(*(x.double() for x in args)), torch.matmul(*args)
    off, usual = (np.linalg.norm(np.asarray(v, np.float64) - exact.numpy()) for v in (y, eager.double()))
    assert off <= 1.2 * usual


def test_odd_rows_are_copied_where_many_multiply_them() -> None:
    done = chosen(torch.matmul, (1200, 8003), (8003, 1000))
    assert [len(accumulators(x)) for x in done.loop.steps][:2] == [0, 1]
    assert "wgmma" in str(done.at("tile").schedules[1][1])


@pytest.mark.parametrize("shapes", [((100000, 64), (100000, 64)), ((50000, 128), (50000, 256))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pieces_fill_the_machine(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    done = chosen(lambda a, b: a.T @ b, *shapes, dtype=dtype)
    assert blocks(done) >= 110


@pytest.mark.parametrize("depth", [100000, 99991, 77777])
def test_no_tile_lacks_the_pieces_that_fill_the_machine(depth: int) -> None:
    """Steps need not be a multiple of the pieces: 6250 of them in 132 are 48 each, which 131 pieces have."""
    kernel = chosen(lambda a, b: a.T @ b, (depth, 64), (depth, 64), dtype=torch.float32).at("loop").steps[0]
    p = product(kernel)
    assert p is not None
    found: dict[tuple[int, int], int] = {}
    for plan in products.plans(p, gpu("sm_90a"), cores=True):
        size = plan.tile.m, plan.tile.n
        found[size] = max(found.get(size, 0), plan.pieces * math.ceil(64 / size[0]) * math.ceil(64 / size[1]))
        length = math.ceil(math.ceil(depth / plan.tile.k) / plan.pieces) * plan.tile.k
        assert (plan.pieces - 1) * length < depth, "the last piece has something to do"
    assert found[64, 64] > 396 and min(found.values()) > 132


def test_threads_share_the_states_of_many_pieces() -> None:
    """A thread by itself would wait for one after the other."""
    done = chosen(lambda a, b: a.T @ b, (100000, 64), (100000, 64))
    assert re.search(r"(warp|lane)\(", str(done.at("tile").schedules[1][1]).split("acc0")[1])


GATED = (lambda x, a, b: torch.nn.functional.silu(x @ a) * (x @ b), (4096, 14336), (4096, 14336))


@pytest.mark.parametrize("rows", (2048, 16))
def test_two_products_are_one_kernel_whatever_the_rows(rows: int) -> None:
    """Many rows have the widest instruction, of which each product has a half; few wait for memory in any way."""
    fn, *weights = GATED
    done = chosen(fn, (rows, 4096), *weights).at("tile")
    ((_, schedule),) = done.schedules
    assert rows == 16 or max(int(n) for n in re.findall(r"m64n(\d+)k16", str(schedule))) == 256


def test_two_products_apart_are_right() -> None:
    done = chosen(GATED[0], (128, 64), (64, 64), (64, 64))
    (kernel,) = done.loop.steps
    apart = products_apart(kernel)
    assert [len(accumulators(x)) for x in apart] == [1, 1]
    given = {b.name: torch.randn(b.type.static_shape, dtype=torch.bfloat16) for b in done.loop.inputs}
    given = {name: _array(x) for name, x in given.items()}
    whole = l.Program("f", done.loop.inputs, apart, done.loop.results)
    assert np.array_equal(*(loop.run(p, given)[0] for p in (whole, done.loop)))


def test_products_that_are_added_one_by_one_are_apart() -> None:
    """Terms of a polynomial in a graph's matrix: what is rounded behind a sum has the sums before it within, which are
    stored by themselves. Each of the first was made of all of them, and apart as long as one was.
    """

    def polynomial(w: Any, *terms: Any) -> Any:
        out = terms[0] @ w[0]
        for x, y in zip(terms[1:], w[1:], strict=True):
            out = torch.addmm(out, x, y)
        return out

    done = chosen(polynomial, (5, 64, 16), *((128, 64),) * 5)
    kernel = next(s for s in done.loop.steps if len(accumulators(s)) == 5)
    apart = products_apart(kernel)
    assert [len(accumulators(x)) for x in apart] == [1] * 5
    given = {b.name: _array(torch.randn(b.type.static_shape).to(torch.bfloat16)) for b in done.loop.inputs}
    whole = l.Program("f", done.loop.inputs, apart, done.loop.results)
    assert np.array_equal(*(loop.run(p, given)[0] for p in (whole, done.loop)))


def of_one_filter(x: Any, y: Any, w: Any) -> Any:
    """Convolutions of two images with the same filter."""
    return tuple(torch.relu(torch.nn.functional.conv2d(i, w, padding=1)) for i in (x, y))


def test_results_that_share_a_filter_alone_are_kernels_of_their_own() -> None:
    """Boxes are of one image: with both, patches of each were stored first, nine times what an image is."""
    done = chosen(of_one_filter, (1, 64, 256, 256), (1, 64, 256, 256), (64, 64, 3, 3))
    sums = [len(accumulators(s)) for s in done.at("tile").loop.steps]
    assert sums.count(1) == 2 and max(sums) == 1
    assert max(b.type.numel for s in done.at("tile").loop.steps for b in s.writes) == 64 * 256 * 256


def test_products_of_different_results_apart_are_right() -> None:
    done = chosen(lambda x, y, w: (torch.relu(x @ w.T), y @ w.T), (128, 64), (128, 64), (64, 64))
    kernel = next(s for s in done.loop.steps if len(accumulators(s)) == 2)
    apart = products_apart(kernel)
    assert [x.writes for x in apart] == [(b,) for b in kernel.writes]  # nothing is stored that was not
    given = {b.name: _array(torch.randn(b.type.static_shape).to(torch.bfloat16)) for b in done.loop.inputs}
    whole = l.Program("f", done.loop.inputs, apart, done.loop.results)
    for ours, theirs in zip(*(loop.run(p, given) for p in (whole, done.loop)), strict=True):
        assert np.array_equal(ours, theirs)


def test_few_rows_take_one_wave() -> None:
    """18944 columns are 148 tiles of 128, and a machine has 132 processors: those of the second wave wait alone."""
    done = chosen(torch.nn.functional.linear, (32, 3584), (18944, 3584))
    assert 66 <= blocks(done) <= 132


def windows(x: Any, *weights: Any) -> Any:
    """Three linear layers on the windows of images, as Swin has them."""
    b, h, w, c = x.shape
    rows = x.view(b, h // 7, 7, w // 7, 7, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, c)
    return tuple(torch.nn.functional.linear(rows, x) for x in weights)


def test_rows_that_lie_in_windows_are_on_warpgroups() -> None:
    """Copied first, or as boxes of all windows' rows at the same place: each thread dividing is no better."""
    done = chosen(windows, (32, 56, 56, 96), *[(96, 96)] * 3)
    *_, products = done.loop.steps
    assert len(accumulators(products)) == 3
    *_, (_, schedule) = done.at("tile").schedules
    assert "wgmma" in str(schedule)


def shifted(x: Any, w: Any) -> Any:
    """A linear layer on the shifted windows of images."""
    return windows(torch.roll(x, (-3, -3), (1, 2)), w)[0]


def test_rows_of_shifted_windows_are_copied_first() -> None:
    """Where they are found follows from indices, not from data."""
    done = chosen(shifted, (8, 56, 56, 96), (96, 96))
    assert [len(accumulators(x)) for x in done.loop.steps][:2] == [0, 1]
    assert "wgmma" in str(done.at("tile").schedules[1])


def picked(x: Any, i: Any, w: Any) -> Any:
    return x[i] @ w


def test_rows_that_data_picks_are_copied_first() -> None:
    """No product would know where to find them, and every one of 1024 columns would look them up again."""
    given = [torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((8192, 1024), (1024, 1024))]
    i = torch.empty(4096, dtype=torch.int64, device="meta")
    program = capture(picked, (given[0], i, given[1]), {}).program
    done = lowering(program, Options(target="sm_90a", libraries="never"))
    assert [len(accumulators(x)) for x in done.loop.steps][:2] == [0, 1]
    assert "reg(8)" in str(done.at("tile").schedules[0][1]) and "wgmma" in str(done.at("tile").schedules[1][1])


def gradient(x: Any, y: Any) -> Any:
    """Of a weight after attention."""
    c = x.shape[1] * x.shape[3]
    return x.transpose(1, 2).reshape(-1, c).t() @ y.reshape(-1, y.shape[-1])


def test_heads_that_lie_apart_are_axes_again() -> None:
    """The digits of rows, and those of steps, of which blocks share the last."""
    done = chosen(gradient, (8, 12, 1024, 64), (8, 1024, 768))
    first, _ = done.loop.steps
    (r,) = accumulators(first).values()
    assert [a.extent for a in r.axes] in ([8, 384], [8, 512]) and "wgmma" in str(done.at("tile").schedules[0])


VECTORS = {
    "vector times matrix": (lambda a, b: b @ a, (16384, 16384), (16384,)),
    "matrix times vector": (lambda a, b: a @ b, (16384, 16384), (16384,)),
    "a row times a matrix": (torch.matmul, (1, 3584), (3584, 18944)),
    "batched vectors times matrices": (torch.matmul, (64, 1, 4096), (64, 4096, 4096)),
    "batched matrices times vectors": (torch.matmul, (64, 4096, 4096), (64, 4096, 1)),
}


@pytest.mark.parametrize("name", VECTORS)
def test_products_with_vectors_ask_for_enough_at_once(name: str) -> None:
    """A thread loads 16 bytes at a time, four times before it waits, and blocks are several for each processor."""
    fn, *shapes = VECTORS[name]
    done = chosen(fn, *shapes)
    assert blocks(done) >= 3 * gpu("sm_90a").processors
    (_, first), *_ = done.at("tile").schedules
    assert "reg(8)" in str(first) and "reg(4)" in str(first)


def test_parts_have_tiles_that_fill_waves() -> None:
    """18944 columns are 237 tiles of 80, which fill two waves but for a tenth: sums of 144 have no room beside those
    of a few steps. What makes its factors in registers has no room for sums of so many either.
    """
    x, w = (torch.empty(n, 3584, device="meta") for n in (128, 18944))
    program = capture(lambda x, w: x @ w.t(), (x, w), {}).program
    options = Options(target="sm_90a", libraries="never", fp32="split")
    for frozen, columns in ((("w",), 80), ((), 128)):
        done = lowering(program, replace(options, frozen=frozen))
        (schedule,) = [s for _, s in done.at("tile").schedules if "wgmma" in str(s)]
        assert f"m64n{columns}k16" in str(schedule) and "promote=True" in str(schedule)
        assert (blocks_of(done) == 237) == bool(frozen)


def blocks_of(done: Lowering) -> int:
    """The tiles of the kernel that multiplies on warpgroups."""
    (plan,) = [p for _, p in done.at("tile").plans if "wgmma" in str(p)]
    return int(np.prod([w.args[0] for w in next(x for x in plan.lines if x.op == "order").tiles]))


@pytest.mark.parametrize("columns", [144, 160])
def test_wide_tiles_of_parts_are_right(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows and columns that end within a tile."""
    plans = warpgroups.plans
    wide = lambda p, gpu: tuple(  # noqa: E731
        x for x in plans(p, gpu) if (x.tile.n, x.tile.groups, x.tile.rows, x.pieces) == (columns, 2, p.m, 1)
    )
    monkeypatch.setattr(warpgroups, "plans", wide)
    monkeypatch.setattr(tiles, "_plans", tiles._plans.__wrapped__)  # which remembers those of other columns
    monkeypatch.setattr(pipelines, "gain", lambda *_: (1.0, ""))
    torch.manual_seed(0)
    x, w = torch.randn(130, 192), torch.randn(300, 192)
    options = Options(target="sm_90a", libraries="never", fp32="split")
    done = lowering(capture(lambda x, w: torch.relu(x @ w.t() + 1), (x, w), {}).program, options)
    assert f"m64n{columns}k16" in str(done.at("tile").schedules)
    (y,) = simulator.run(done.at("kernel"), {"x": x.numpy(), "w": w.numpy()}, seed=3)
    exact = torch.relu(x.double() @ w.double().t() + 1).numpy()
    assert np.linalg.norm(y - exact) <= 2e-7 * np.linalg.norm(exact)
