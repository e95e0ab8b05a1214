"""Products whose first factor is made in registers, point by point, of whole numbers and scales (ADR 016)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import terrazzo
from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.sites import product
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile.products import warpgroups
from terrazzo.rules.loop_to_tile.products.unpacked import digits_summed
from terrazzo.rules.tile_to_kernel.lower import lower
from terrazzo.targets.cuda.check import check

H = gpu("sm_90a")
HALF = torch.bfloat16
Make = Callable[[int, int, int], tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]]


def whole(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    given = torch.Generator().manual_seed(1)
    low = 0 if dtype is torch.uint8 else -127
    return torch.randint(low, 128, shape, generator=given, dtype=torch.int32).to(dtype)


def normal(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def scaled_after(m: int, n: int, depth: int) -> Any:
    return lambda x, q, s: F.linear(x, q.to(x.dtype)) * s, (normal(m, depth), whole(n, depth), normal(n))


def by_channel(m: int, n: int, depth: int) -> Any:
    return lambda x, q, s: F.linear(x, q.to(x.dtype) * s[:, None]), (normal(m, depth), whole(n, depth), normal(n))


def by_group(m: int, n: int, depth: int, group: int = 128) -> Any:
    def product(x: Any, q: Any, s: Any, z: Any) -> Any:
        w = (q.view(n, depth // group, group).to(x.dtype) - z[:, :, None]) * s[:, :, None]
        return F.linear(x, w.view(n, depth))

    groups = n, depth // group
    return product, (normal(m, depth), whole(n, depth, dtype=torch.uint8), normal(*groups), normal(*groups))


def by_row(m: int, n: int, depth: int) -> Any:
    """Scales along what is summed over, and weights that memory runs across."""
    return lambda x, q, s: x @ (q.to(x.dtype) * s[:, None]), (normal(m, depth), whole(depth, n), normal(depth))


def in_half(m: int, n: int, depth: int) -> Any:
    given = normal(m, depth, dtype=torch.float16), whole(n, depth), normal(n, dtype=torch.float32)
    return lambda x, q, s: F.linear(x, (q.float() * s[:, None] * 0.1).to(x.dtype)), given


def two_in_a_byte(m: int, n: int, depth: int, group: int = 128) -> Any:
    """Four bits each, the lower ones first."""

    def product(x: Any, q: Any, s: Any, z: Any) -> Any:
        w = torch.stack([q & 0xF, q >> 4], -1).view(n, depth).to(x.dtype)
        w = (w.view(n, depth // group, group) - z[:, :, None]) * s[:, :, None]
        return F.linear(x, w.view(n, depth))

    groups = n, depth // group
    return product, (normal(m, depth), whole(n, depth // 2, dtype=torch.uint8), normal(*groups), normal(*groups))


def eight_in_a_word(m: int, n: int, depth: int, group: int = 128) -> Any:
    """As GPTQ has them: along what is summed over, zeros in words of their own."""

    def product(x: Any, q: Any, s: Any, z: Any) -> Any:
        shift = torch.arange(0, 32, 4, dtype=torch.int32, device=q.device)
        w = ((q[:, None, :] >> shift[None, :, None]) & 0xF).reshape(depth, n)
        zero = ((z[:, :, None] >> shift[None, None, :]) & 0xF).reshape(depth // group, n)
        w = (w.view(depth // group, group, n) - zero[:, None, :]).to(x.dtype) * s[:, None, :]
        return x @ w.view(depth, n)

    words = whole(depth // 8, n, dtype=torch.int32) * 16843009, whole(depth // group, n // 8, dtype=torch.int32) * 65793
    return product, (normal(m, depth), words[0], normal(depth // group, n), words[1])


KINDS = (scaled_after, by_channel, by_group, by_row, in_half, two_in_a_byte, eight_in_a_word)
MAKERS: dict[str, Make] = {f.__name__: f for f in KINDS}


def lowered(fn: Any, given: tuple[torch.Tensor, ...], **options: Any) -> Any:
    program = capture(fn, given, {}).program
    return program, lowering(program, Options(target="sm_90a", libraries="never", **options))


def made(kernel: k.Kernel) -> bool:
    """Whether a kernel makes the first factor of its products in registers."""
    return any(isinstance(s, k.Declare) and s.place.name.startswith("made") for s in k.walk(kernel.body))


def numbers(x: torch.Tensor) -> Any:
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype is HALF else x.numpy()


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", [f.__name__ for f in KINDS[:5]])
def test_factors_made_on_their_way_are_as_exact_as_eager(name: str, seed: int | None) -> None:
    """Where rows and columns fill no tile, whichever way memory runs, in the fair order and in another."""
    fn, given = MAKERS[name](5, 208, 256)
    _, done = lowered(fn, given)
    program = done.at("kernel")
    assert any(made(s) for s in program.steps), "no kernel makes a factor"
    check(program, H)
    inputs = {b.name: numbers(x) for b, x in zip(program.inputs, given, strict=True)}
    (y,) = simulator.run(program, inputs, seed=seed)
    as_exact_as_eager(y, fn, given)


def as_exact_as_eager(y: Any, fn: Any, given: tuple[torch.Tensor, ...]) -> None:
    """Results have no larger an error than those of PyTorch, which rounds as often."""
    exact = fn(*(x.double() if x.is_floating_point() else x for x in given)).numpy()
    eager = fn(*given).double().numpy()
    off, usual = (np.linalg.norm(z - exact) for z in (y.astype(np.float64), eager))
    assert off <= 1.05 * usual


@pytest.mark.parametrize("name", [f.__name__ for f in KINDS[5:]])
@pytest.mark.parametrize("rows", [2, 3, 8])
def test_as_many_rows_as_elements_in_a_number_are_no_others(name: str, rows: int) -> None:
    """Axes of a copy may be called as the kernel's, and be as long: int4 with 2 rows was wrong on an H200."""
    fn, given = MAKERS[name](rows, 40, 256)
    _, done = lowered(fn, given)
    *before, whole = done.at("loop").steps
    program = l.Program("f", done.at("loop").inputs, (*before, *digits_summed(whole)), whole.writes)
    assert len(program.steps) == len(before) + 2
    (y,) = loop.run(program, {b.name: numbers(x) for b, x in zip(program.inputs, given, strict=True)})
    as_exact_as_eager(y, fn, given)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", [f.__name__ for f in KINDS[5:]])
def test_elements_that_share_a_number_are_terms_of_a_product(name: str, seed: int | None) -> None:
    """Each with its own part of the other factor, which is copied for that; all of one slab of numbers."""
    fn, given = MAKERS[name](5, 208, 256)
    _, done = lowered(fn, given)
    *before, whole = done.at("loop").steps
    copy, form = digits_summed(whole)
    assert len(product(form).sites[0].terms) == (2 if name == "two_in_a_byte" else 8)
    plan = next(x for x in warpgroups.plans(product(form), H) if x.pieces == 1)
    last = lower(form, warpgroups.schedule(product(form), plan, H), H)
    assert made(last)
    inputs = {b.name: numbers(x) for b, x in zip(done.at("loop").inputs, given, strict=True)}
    steps = (*before, copy)
    stored = tuple(b for s in steps for b in s.writes)
    found = loop.run(l.Program("f", done.at("loop").inputs, steps, stored), inputs)
    inputs |= {b.name: v for b, v in zip(stored, found, strict=True)}
    kernels = k.Program("f", form.reads, (last,), form.writes)
    check(kernels, H)
    (y,) = simulator.run(kernels, {b.name: inputs[b.name] for b in form.reads}, seed=seed)
    as_exact_as_eager(y, fn, given)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_few_rows_read_quantised_weights_once(name: str, rows: int) -> None:
    """No kernel stores a weight of 16 bits, where few rows are multiplied by it: memory is read once, in bytes."""
    fn, given = MAKERS[name](rows, 14336, 4096)
    _, done = lowered(fn, tuple(x.to("meta") for x in given))
    stored = [b.type.numel for s in done.at("kernel").steps for b in s.params if b not in done.at("kernel").inputs]
    assert max(stored) < 14336 * 4096


@pytest.mark.parametrize(("name", "length"), [("scaled_after", 128), ("two_in_a_byte", 128), ("eight_in_a_word", 32)])
def test_steps_of_few_columns_are_long_where_registers_have_room(name: str, length: int) -> None:
    """Of one term and of two; eight are as many registers in a fourth of the step."""
    fn, given = MAKERS[name](16, 14336, 4096)
    _, done = lowered(fn, tuple(x.to("meta") for x in given))
    chosen = next(str(s) for _, s in done.at("tile").schedules if " on=" in str(s))
    assert re.search(rf"r0 = time\(\d+, ring=\d\) \* block\({length}\)", chosen) and "a0 = inst.n(16)" in chosen


def test_tiles_of_one_warpgroup_that_makes_factors_are_no_bargain() -> None:
    """Nothing is multiplied while it does: 198 us (H200), where 145 were expected; two of them take 135."""
    fn, given = scaled_after(512, 18944, 3584)
    _, done = lowered(fn, tuple(x.to("meta") for x in given))
    ((_, chosen),) = done.at("tile").schedules
    assert "math=warpgroup(2), registers=(40, 232))" in str(chosen)  # and none lags


def test_many_rows_have_weights_stored_where_that_is_cheaper() -> None:
    """Products of what is stored may have tiles in turns, which fill whole waves: the model says where they have."""
    fn, given = by_channel(3072, 3072, 3072)
    _, done = lowered(fn, tuple(x.to("meta") for x in given))
    assert not any(made(s) for s in done.at("kernel").steps)


@pytest.mark.parametrize("m", [8192, 16384])
def test_what_was_stacked_is_no_patch(m: int) -> None:
    """A copy of weights of four bits reads each byte where two lie: it is priced as other copies are."""
    fn, given = two_in_a_byte(m, 4096, 4096)
    _, done = lowered(fn, tuple(x.to("meta") for x in given))
    assert not any(made(s) for s in done.at("kernel").steps)


def test_sums_that_end_within_a_step_have_their_factor_stored() -> None:
    """Beyond the end a made factor need not be 0, and where it is infinite, times 0 is none."""
    fn, given = by_channel(16, 256, 200)
    _, done = lowered(fn, given)
    assert not any(made(s) for s in done.at("kernel").steps)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("rows", [1, 5, 16, 200])
def test_a_gpu_is_as_exact_as_eager(name: str, rows: int) -> None:
    fn, given = MAKERS[name](rows, 4096, 2048)
    there = tuple(x.cuda() for x in given)
    ours = terrazzo.compile(fn, *there, options=Options(libraries="never"))
    as_exact_as_eager(ours(*there).float().cpu().numpy(), fn, given)


def test_of_two_computed_factors_the_smaller_is_stored() -> None:
    """Few rows and a weight, both in float32 and multiplied in bfloat16: the weight is read as it is."""
    x, w = torch.empty(16, 4096, device="meta"), torch.empty(4096, 4096, device="meta")
    _, done = lowered(lambda x, w: F.linear(x.to(HALF), w.to(HALF)), (x, w))
    stored = [b.type.static_shape for s in done.at("kernel").steps for b in s.params if b.name.endswith("_x")]
    assert stored and set(stored) == {(16, 4096)}
    assert any(made(s) for s in done.at("kernel").steps)
