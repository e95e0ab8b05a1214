"""The price of a product has what its results read and what computing them takes; fusion is undone by it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered
from tests.kernels.test_attention import close, tensors

from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import topological
from terrazzo.ir.plan import Agent, Frame, Order
from terrazzo.ir.schedule import Word
from terrazzo.ir.sites import Product, product
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop.precision.parts import parts_of
from terrazzo.rules.loop_to_tile.chains.chain import nested
from terrazzo.rules.loop_to_tile.estimate import _derives, expected
from terrazzo.rules.loop_to_tile.products import products, tiles, traffic, warpgroup_tiles, warpgroups, work
from terrazzo.rules.loop_to_tile.products.results import results
from terrazzo.rules.loop_to_tile.reductions import reductions
from terrazzo.rules.loop_to_tile.walked.collapse import merge_product_axes
from terrazzo.rules.loop_to_tile.walked.crossed import copying

HOPPER = gpu("sm_90a")


def plain(x: Any, w: Any, r: Any, b: Any) -> Any:
    return F.linear(x, w)


def residual(x: Any, w: Any, r: Any, b: Any) -> Any:
    return F.linear(x, w) + r


def biased(x: Any, w: Any, r: Any, b: Any) -> Any:
    return F.relu(F.linear(x, w, b))


def gelu(x: Any, w: Any, r: Any, b: Any) -> Any:
    return F.gelu(F.linear(x, w, b))


def gradient(x: Any, w: Any, r: Any, b: Any) -> Any:
    """Of GELU, of what was stored before it, times a product: the backward of a layer of an MLP."""
    r = r.float()
    return (F.linear(x, w).float() * (0.5 * (1 + torch.erf(r * 0.7071)) + r * torch.exp(-0.5 * r * r) * 0.4)).to(
        x.dtype
    )


def on_meta(fn: Any, m: int, k: int, n: int, dtype: torch.dtype = torch.bfloat16) -> list[l.Kernel]:
    """What a function is fused to, and the names of the kernels that schedules are chosen for."""
    args = tuple(torch.empty(s, device="meta", dtype=dtype) for s in ((m, k), (n, k), (m, n), (n,)))
    done = lowering(capture(fn, args, {}).program, Options(target="sm_90a", libraries="never"))
    return [s for s in done.at("tile").loop.steps if isinstance(s, l.Kernel)]


def site(kernel: l.Kernel) -> Product:
    p = product(kernel)
    assert p is not None
    again = product(merge_product_axes(kernel, p.sites))
    assert again is not None
    return again


def test_what_results_read_and_compute_is_counted_once_for_each() -> None:
    """Not what a row or a column shares; not conversions."""
    m, n = 512, 768
    found = {fn: results(site(on_meta(fn, m, 256, n)[0])) for fn in (plain, residual, biased, gelu)}
    assert [found[fn].read for fn in (plain, residual, biased, gelu)] == [0, 2, 0, 0]
    assert found[plain].operations == 0 and found[biased].operations <= 2 < found[gelu].operations
    assert found[residual].moved == 2 * found[plain].moved == 4 * m * n
    assert found[biased].moved == 2 * (m * n + n)


def test_every_store_pays_for_what_it_is_made_of() -> None:
    """Each is computed anew on its way through shared memory: of two, the gate and its gradient are read twice."""

    def both(x: Any, w: Any, r: Any, b: Any) -> Any:
        y = F.linear(x, w) * r
        return y, y * torch.sigmoid(r)

    args = tuple(torch.empty(x, device="meta").bfloat16() for x in ((512, 4096), (512, 4096), (512, 512), (512,)))
    (kernel,) = lowering(capture(both, args, {}).program, Options(target="sm_90a", libraries="never")).at("loop").steps
    found = results(site(kernel))
    assert len(kernel.stores) == 2
    assert found.read == 4 and found.stored == 4


@pytest.mark.parametrize("plans", [warpgroups.plans, products.plans])
def test_a_price_has_what_results_are_made_of(plans: Any) -> None:
    """A residual costs as much as reading it takes, at least; a bias next to nothing."""
    times = {}
    for fn in (plain, residual, biased):
        p = site(on_meta(fn, 8192, 64, 4096)[0])
        times[fn] = min(x.time for x in plans(p, HOPPER))
    reading = 8192 * 4096 * 2 / HOPPER.memory
    assert times[residual] - times[plain] >= 0.5 * reading
    assert times[biased] - times[plain] < 0.5 * reading


def test_dear_results_are_computed_apart_from_short_sums() -> None:
    """Eight warps take longer for an error function and an exponential than memory does for the sums and back; for GELU
    after a long sum they do not.
    """
    assert on_meta(gradient, 100352, 96, 384)[0].name.endswith("_product")
    assert len(on_meta(gelu, 4096, 4096, 4096)) == len(on_meta(residual, 4096, 4096, 4096)) == 1


def test_results_apart_are_right() -> None:
    args = tensors((2048, 32), (128, 32), (2048, 128), (128,))
    found = lowered(gradient, args, "sm_90a")
    close(found, gradient, args)


def test_sums_of_unlike_factors_pay_for_what_they_load() -> None:
    """Three sums of one factor share its loads, three of three do not."""

    def shared(x: Any, w: Any, u: Any, v: Any) -> Any:
        return F.linear(x, w) * F.linear(x, u) * F.linear(x, v)

    def unlike(x: Any, y: Any, z: Any, w: Any, u: Any, v: Any) -> Any:
        return F.linear(x, w) + F.linear(y, u) + F.linear(z, v)

    def best(fn: Any, count: int) -> float:
        args = tuple(torch.empty(4096, 768, device="meta") for _ in range(count))
        args += tuple(torch.empty(768, 768, device="meta") for _ in range(3))
        options = Options(target="sm_90a", libraries="never", fp32="exact")
        (kernel,) = lowering(capture(fn, args, {}).program, options).at("loop").steps
        return products.plans(site(kernel), HOPPER, cores=True)[0].time

    assert best(unlike, 3) > 1.2 * best(shared, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_not_computed_where_data_says(dtype: torch.dtype) -> None:
    """Scores of relative positions are taken from a product that lies in memory: no tile has what data says."""

    def scores(q: Any, k: Any, p: Any, at: Any) -> Any:
        return q @ k.transpose(1, 2) + torch.gather(q @ p.transpose(1, 2), 2, at)

    args = [torch.empty(s, device="meta", dtype=dtype) for s in ((48, 512, 64), (48, 512, 64), (48, 512, 64))]
    at = torch.empty(48, 512, 512, device="meta", dtype=torch.int64)
    done = lowering(capture(scores, (*args, at), {}).program, Options(target="sm_90a", libraries="never"))
    sums = [x for x in done.at("tile").loop.steps if any(isinstance(y, l.Reduce) for y in topological(x.stores))]
    assert len(sums) == 2 and all(product(x) is not None for x in sums)


@pytest.mark.parametrize("batch", [1, 16])
def test_what_scales_channels_is_not_computed_for_every_pixel(batch: int) -> None:
    """Squeeze and excitation: two products of what is known of channels, which scale an image."""

    def excited(x: Any, w: Any, u: Any) -> Any:
        s = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(F.conv2d(F.relu(F.conv2d(s, w)), u))

    args = [torch.empty(s, device="meta").bfloat16() for s in ((batch, 128, 56, 56), (32, 128, 1, 1), (128, 32, 1, 1))]
    done = lowering(capture(excited, tuple(args), {}).program, Options(target="sm_90a", libraries="never"))
    found = done.at("tile")
    tiled = [found.loop.steps[i] for i, s in found.schedules if any(x.instruction for x in s.sites)]
    assert not any(a.extent == 56 or a.extent % 56**2 == 0 for k in tiled for a in k.axes)
    assert not any(len(list(nested(k))) for k in found.loop.steps if isinstance(k, l.Kernel))


def test_scaled_channels_are_right() -> None:
    def excited(x: Any, w: Any, u: Any) -> Any:
        s = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(F.conv2d(F.relu(F.conv2d(s, w)), u))

    args = tensors((3, 32, 12, 12), (16, 32, 1, 1), (32, 16, 1, 1))
    close(lowered(excited, args, "sm_90a"), excited, args)


def test_patches_that_overlap_cost_what_finding_them_does() -> None:
    """Each of their elements is found by divisions; a copy of as many bytes that moves nothing is cheap."""
    (maker,) = parse(PATCHES).steps
    (plain_,) = parse(PLAIN).steps
    size = sum(b.type.span for b in (*maker.reads, *maker.writes)) / HOPPER.memory
    assert copying(maker, HOPPER) - HOPPER.launch > 2 * size
    size = sum(b.type.span for b in (*plain_.reads, *plain_.writes)) / HOPPER.memory
    assert copying(plain_, HOPPER) - HOPPER.launch < 2 * size


def test_padding_is_no_patches() -> None:
    """Every element is read once and lies where its row and column say, though there are more points than elements."""
    text = PLAIN.replace("p=bf16[100352, 9]", "p=bf16[100352, 16]").replace("free(9)", "free(16)")
    (padded,) = parse(text.replace("x[a0, a1]", "x[a0, a1] if a1 < 9 else 0")).steps
    size = sum(b.type.span for b in (*padded.reads, *padded.writes)) / HOPPER.memory
    assert copying(padded, HOPPER) < 3 * size + HOPPER.launch


def test_two_products_of_odd_rows_are_padded() -> None:
    def critics(x: Any, v: Any, w: Any) -> Any:
        return F.relu(F.linear(x, v)), F.relu(F.linear(x, w))

    args = tuple(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((16384, 393), (256, 393), (256, 393)))
    done = lowering(capture(critics, args).program, Options(target="sm_90a"))
    assert any("on wgmma" in e.reason for e in done.log.events if e.pass_name == "schedule" and e.fired)


PATCHES = """@loop
def f(x: bf16[32, 56, 56]):
    with kernel('p', p=bf16[100352, 9]):
        for a0 in free(100352):
            for a1 in free(9):
                in0 = x[a0 // 3136, (a0 // 56) % 56 + a1 // 3 - 1, a0 % 56 + a1 % 3 - 1] if (a0 // 56) % 56 + a1 // 3 >= 1 and (a0 // 56) % 56 + a1 // 3 < 57 and a0 % 56 + a1 % 3 >= 1 and a0 % 56 + a1 % 3 < 57 else 0
                p[a0, a1] = in0
    return (p,)
"""  # noqa: E501
PLAIN = """@loop
def f(x: bf16[100352, 9]):
    with kernel('p', p=bf16[100352, 9]):
        for a0 in free(100352):
            for a1 in free(9):
                in0 = x[a0, a1]
                p[a0, a1] = in0
    return (p,)
"""


def test_blocks_of_a_cluster_share_sums_where_all_clusters_run_at_once() -> None:
    """Each has as many steps; the sums they give take shared memory from slots. Tiles that read the larger operand
    once are better than those that read it twice.
    """
    (kernel,) = on_meta(plain, 128, 4096, 4096)
    p, has = site(kernel), HOPPER.warpgroups
    assert has is not None
    found = warpgroups.plans(p, HOPPER)
    assert {x.tile.share for x in found} == {1, 2, 4}
    for x in found:
        alone = x.pieces == 1 and x.tile.split is None
        assert x.tile.share == 1 or (alone and traffic.clusters(p, x.tile) <= dict(has.clusters)[x.tile.share])
    without = replace(HOPPER, warpgroups=replace(has, clusters=()))
    assert {x.tile.share for x in warpgroups.plans(p, without)} == {1}
    slow, fast = (
        {(x.tile, x.pieces): x.time for x in warpgroups.plans(p, replace(HOPPER, warpgroups=replace(has, given=rate)))}
        for rate in (40.0, 80.0)
    )
    sharing = [x for x in slow if x[0].share > 1]
    assert sharing and all(fast[x] <= slow[x] for x in sharing) and any(fast[x] < slow[x] for x in sharing)
    shared = next(x for x in found if x.tile.share == 2 and x.tile.n == 128 and x.tile.rows is p.m)
    assert warpgroups._slots(p, shared.tile, HOPPER) == warpgroups._slots(p, replace(shared.tile, share=1), HOPPER)
    text = str(warpgroups.schedule(p, shared, HOPPER))
    assert "r0 = cluster(2) * time(32, ring=" in text and "persistent" not in text and "registers" not in text
    alike = next(
        x for x in found if x.tile.share == 2 and x.tile.n == 128 and x.tile.rows is p.n and x.tile.groups == 1
    )
    assert alike.tile.m == shared.tile.m == 64 and alike.time < shared.time  # all rows in a tile, which is turned


def test_what_a_block_fetches_is_found_once_for_power_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of no cluster draws the power of what it fetches, and one whose ring is short of what it would alone."""
    (kernel,) = on_meta(plain, 2048, 4096, 14336)
    p, fetched, asked = site(kernel), traffic.fetched, list[warpgroup_tiles.Tile]()
    has = HOPPER.warpgroups
    assert has is not None
    tiles = {x.tile for x in warpgroups.plans(p, HOPPER) if x.pieces == 1}
    monkeypatch.setattr(traffic, "fetched", lambda p, tile, *rest: asked.append(tile) or fetched(p, tile, *rest))
    for tile in tiles:
        asked.clear()
        found = warpgroups.work_of(p, tile, traffic.walk(p, tile, HOPPER), HOPPER, has)
        alone = replace(tile, split=None)
        if tile.split is None or found.drawn == found.fetched:
            assert asked == [tile] and found.drawn == found.fetched
        else:
            assert asked == [tile, alone]
            assert found.drawn == fetched(p, alone, has, traffic.alone(p, alone, HOPPER)) > found.fetched
    assert {t.split for t in tiles} == {None, p.m, p.n}


def test_what_boxes_have_beyond_the_end_takes_time() -> None:
    """Of 32 rows, tiles of 64 bring in as many zeros; turned, the batch is on the instruction's columns."""
    (kernel,) = on_meta(plain, 32, 4096, 4096)
    p = site(kernel)
    tiles = {x.tile: x.tile for x in warpgroups.plans(p, HOPPER) if x.pieces == 1}
    rows = [t for t in tiles if t.rows is p.m and t.groups == 1 and t.n == 64]
    turned = next(t for t in tiles if t.rows is p.n and t.groups == 1 and t.n == 32)
    assert traffic.beyond(p, turned) == 0.0
    assert {t.split for t in rows} >= {None, p.n}
    has = HOPPER.warpgroups
    assert has is not None
    assert {traffic.beyond(p, t) for t in rows} == {2 * 32 * 4096 * 64}  # blocks of a cluster do not share zeros
    long, short = (
        work.lasts(warpgroups.work_of(p, t, traffic.walk(p, t, HOPPER), HOPPER, has)._replace(beyond=beyond), HOPPER)
        for t, beyond in ((turned, 4200.0), (turned, 0.0))
    )
    assert long - short == pytest.approx(4200 / HOPPER.memory)
    assert min(warpgroups.plans(p, HOPPER), key=lambda x: x.time).tile.rows is p.n


@pytest.mark.parametrize(("tokens", "size"), [(8192, 256), (2048, 256), (2048, 128)])
def test_heads_with_no_room_for_the_next_tile_have_a_block_for_each(tokens: int, size: int) -> None:
    """Under a mask, where blocks that stay wait for the rows of every tile: 2145 us of 1 x 32 x 8192 x 256 were 1.26 of
    cuDNN's (H200, 22 November 2026). Two warpgroups are taken, not one.
    """

    def causal(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    heads = 32 * 8192 // tokens
    args = tuple(torch.empty(1, heads, tokens, size, device="meta", dtype=torch.bfloat16) for _ in range(3))
    done = lowering(capture(causal, args, {}).program, Options(target="sm_90a", libraries="never"))
    ((_, plan),) = done.at("tile").plans
    assert plan.one(Order).persistent == (size == 128)
    assert [x.teams for x in plan.all(Agent)] == [1, 2]


@pytest.mark.parametrize(("size", "stays"), [(256, [False] * 3), (128, [True] * 2)])
def test_gradients_of_heads_with_one_warpgroup_have_a_block_for_each_tile(size: int, stays: list[bool]) -> None:
    """Nobody multiplies while it waits for the next tile's rows: 867 and 904 us of 4 x 32 x 2048 x 256, causal, were
    698 and 820 then (H200, 23 November 2026).
    """

    def gradients(*args: Any) -> Any:
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in args[:3])
            return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), args[3])

    args = tuple(torch.empty(4, 32, 2048, size, device="meta", dtype=torch.bfloat16) for _ in range(4))
    done = lowering(capture(gradients, args, {}).program, Options(target="sm_90a", libraries="never"))
    plans = [p for _, p in done.at("tile").plans if len(p.all(Agent)) == 2 and not p.all(Frame)]
    assert [p.one(Order).persistent for p in plans] == stays


def parts_product(m: int, k: int, n: int) -> Product:
    """x @ w.T of numbers in float32, as parts that are stored."""
    text = f"""@loop
def f(x: f32[{m}, {k}], w: f32[{n}, {k}]):
    with kernel('y', y=f32[{m}, {n}]):
        for a0 in free({m}):
            for a1 in free({n}):
                for r0 in reduce({k}):
                    acc0 <- sum(mul(x[a0, r0], w[a1, r0]))
                y[a0, a1] = acc0
    return (y,)
"""
    found = product(parts_of(parse(text).steps[0], 3)[-1])
    assert found is not None
    return found


def test_parts_that_come_from_memory_take_their_time() -> None:
    """Whatever the tiles: with few rows, the best of these have as many blocks as there are processors, nearly."""
    p = parts_product(128, 4096, 4096)
    best = warpgroups.plans(p, HOPPER)[0]
    assert HOPPER.warpgroups is not None
    assert best.time > 6 * 4096 * 4096 / HOPPER.warpgroups.parts_memory
    assert 120 <= best.pieces * best.tile.clusters[0] * best.tile.clusters[1] * best.tile.blocks <= 132


@pytest.mark.parametrize(("rows", "third"), [(128, {"w"}), (512, set())])
def test_weights_that_one_tile_needs_run_further_ahead(rows: int, third: set[str]) -> None:
    """They come from memory, and the other factor from the cache; tiles that share them bring them there."""
    p = parts_product(rows, 3584, 3584)
    found = (x for x in warpgroups.plans(p, HOPPER) if x.tile.rows is p.m and not x.tile.split)
    plan = next(x for x in found if (x.tile.m, x.tile.n) == (128, 112))
    (site, *_) = warpgroups.schedule(p, plan, HOPPER).sites
    assert {name[0] for name, held in site.operands if ("slots", 3) in held.options} == third


@pytest.mark.parametrize(("shape", "tile"), [((128, 3584, 512), (64, 64, 8)), ((512, 3584, 512), (128, 128, 8))])
def test_parts_of_few_results_are_summed_in_short_pieces(
    shape: tuple[int, int, int], tile: tuple[int, int, int]
) -> None:
    """Of seven steps each: the first was 12.3 us in these, with x's parts, the second 28.2 (H200)."""
    best = next(x for x in warpgroups.plans(parts_product(*shape), HOPPER) if x.tile.rows.extent == shape[0])
    assert (best.tile.m, best.tile.n, best.pieces) == tile


def test_slabs_of_few_columns_have_three_slots() -> None:
    """Results in float32 leave registers, and take no memory."""
    p = parts_product(1024, 1024, 1024)
    best = warpgroups.plans(p, HOPPER)[0]
    assert best.tile.n == 64 and warpgroups._slots(p, best.tile, HOPPER) == 3


def test_a_ring_of_five_takes_no_memory_that_results_leave() -> None:
    """With a sixth slot it took 1.4 times as long (H200)."""
    x, w = torch.empty(32, 3584, dtype=torch.bfloat16), torch.empty(18944, 3584, dtype=torch.bfloat16)
    program = capture(F.linear, (x, w), {}).program
    ((_, chosen),) = lowering(program, Options(target="sm_90a", libraries="never")).at("tile").schedules
    assert "a1 = grid(74) * block(256)" in str(chosen) and "r0 = time(56, ring=5) * block(64)" in str(chosen)


def test_partial_sums_meet_in_vectors_where_there_are_many() -> None:
    """And one by one where that would leave processors without a block."""
    for points, each in ((128 * 3584, " * reg(4)"), (128 * 128, "")):
        text = f"""@loop
def f(x: f32[4, {points}]):
    with kernel('y', y=f32[{points}]):
        for a0 in free({points}):
            for r0 in reduce(4):
                acc0 <- sum(x[r0, a0])
            y[a0] = acc0
    return (y,)
"""
        schedule = str(reductions.finish(parse(text).steps[0], HOPPER))
        assert f"* warp(4) * lane(32){each}\n" in schedule


def gated(x: Any, w: Any, r: Any, b: Any) -> Any:
    return F.silu(F.linear(x, w)) * F.linear(x, w + 1)


def test_warpgroups_take_turns_where_their_tiles_fill_the_machine_and_others_do_not() -> None:
    """792 tiles of 128 x 96 are six waves; of a square, tiles of 192 columns leave a third of the last one."""
    (p,) = [x for k in on_meta(gated, 512, 3584, 18944) if (x := product(k)) is not None and len(x.sites) == 2]
    best = warpgroups.plans(p, HOPPER)[0]
    assert best.tile.turns and (best.tile.m, best.tile.n) == (128, 96) and "in turns" in str(best)
    (square,) = [x for k in on_meta(plain, 4096, 4096, 4096) if (x := product(k)) is not None]
    assert not warpgroups.plans(square, HOPPER)[0].tile.turns


def test_long_products_share_what_they_fetch_where_the_ring_is_far_ahead() -> None:
    found = []
    for side in (2048, 4096, 8192, 16384):
        (p,) = [x for k in on_meta(plain, side, side, side) if (x := product(k)) is not None]
        best = warpgroups.plans(p, HOPPER)[0].tile
        found.append((best.n, best.turns, best.split is p.m))
    assert found[2:] == [(192, True, False), (256, False, True)]
    assert not any(shared for _, _, shared in found[:2])


def test_few_blocks_share_the_steps_of_a_long_sum() -> None:
    """Four to a tile took 48.8 us with a residual, two 47.7, eight 51.1 (benchmarks/fits/h200-few.json)."""
    (p,) = [x for k in on_meta(plain, 128, 18944, 3584) if (x := product(k)) is not None]
    assert warpgroups.plans(p, HOPPER)[0].tile.share in (2, 4)


@pytest.mark.parametrize(("shape", "columns"), [((2048, 2048, 5632), 80), ((2048, 3584, 18944), 96)])
def test_gated_layers_of_many_rows_take_turns(shape: tuple[int, int, int], columns: int) -> None:
    (p,) = [x for k in on_meta(gated, *shape) if (x := product(k)) is not None and len(x.sites) == 2]
    best = warpgroups.plans(p, HOPPER)[0]
    assert best.tile.turns and best.tile.n == columns


def test_what_results_read_comes_in_wide_subtiles_where_warpgroups_take_turns() -> None:
    added = on_meta(lambda x, w, r, b: F.linear(x, w) + r, 8192, 2048, 2048)
    (p,) = [x for k in added if (x := product(k)) is not None]
    assert {x.tile.n for x in warpgroups.plans(p, HOPPER) if x.tile.turns} == {64, 128}
    for fn, widest in ((plain, 192), (biased, 192), (gelu, 160)):  # what a whole column reads takes no time of a tile's
        (p,) = [x for k in on_meta(fn, 8192, 2048, 2048) if (x := product(k)) is not None]
        found = {x.tile.n for x in warpgroups.plans(p, HOPPER) if x.tile.turns}
        assert {96, 160, widest} <= found and max(found) == widest


def test_nobody_takes_turns_with_one_tile_or_with_results_that_leave_registers() -> None:
    def turns(m: int, n: int, fn: Any = plain) -> bool:
        (p,) = [x for k in on_meta(fn, m, 4096, n) if (x := product(k)) is not None]
        return any(x.tile.turns for x in warpgroups.plans(p, HOPPER))

    assert turns(4096, 4096)
    assert not turns(512, 512)
    in_words = lambda x, w, r, b: F.linear(x, w).float()  # noqa: E731
    assert turns(3072, 3072) and not turns(3072, 3072, in_words)
    assert turns(4096, 4096, in_words)  # more than the cache has: they leave in boxes


def test_nobody_takes_turns_where_tiles_end_with_columns_that_are_normed(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(fn: Any) -> bool:
        """Whether there are such turns whose last tile has columns beyond the end."""
        (p,) = [x for k in on_meta(fn, 16384, 4096, 320) if (x := product(k)) is not None]
        return any(x.tile.turns and x.tile.columns.extent % x.tile.n for x in warpgroups.plans(p, HOPPER))

    def normed(x: Any, w: Any, r: Any, b: Any) -> Any:
        return (F.linear(x, w).float() * (1 / (b.float() + 1).sqrt())).bfloat16()

    assert ends(biased) and not ends(normed)
    monkeypatch.setattr(warpgroup_tiles, "ROOTS", math.inf)
    warpgroups._plans.cache_clear()
    assert ends(normed)


@pytest.mark.parametrize(
    ("rows", "walked", "together"),
    [(3, "a0", 3), (5, "a0", 5), (7, "a0", 7), (10, "a1", 8), (11, "a1", 8), (12, "a1", 8)],
)
def test_tiles_that_are_walked_together_divide_their_axis(rows: int, walked: str, together: int) -> None:
    (kernel,) = on_meta(plain, 128 * rows, 1024, 16384)
    p = product(kernel)
    assert p is not None
    best = next(x for x in warpgroups.plans(p, HOPPER) if (x.tile.m, x.tile.rows, x.tile.split) == (128, p.m, None))
    schedule = warpgroups.schedule(p, best._replace(tile=replace(best.tile, n=128)), HOPPER)
    assert dict(schedule.options("persistent")).get("order") == Word("grouped", (together,))
    assert schedule.axes[0][0] == walked


@pytest.mark.parametrize("pixels", [14, 28, 56])
def test_a_product_in_tiles_along_pixels_is_expected_to_take_what_they_take(pixels: int) -> None:
    """Rows of bfloat16 for all of 14 x 14 pixels would begin anywhere, and parts of float32 are made on their way: no
    tile of merged axes can be derived, but those along pixels can. So no library is called.
    """
    x, w = (torch.empty(s, device="meta") for s in ((16, 512, pixels, pixels), (256, 512, 1, 1)))
    done = lowering(capture(F.conv2d, (x, w)).program, Options(target="sm_90a"))
    told = {e.subject: e.reason for e in done.log.events if e.pass_name == "schedule" and e.rule == "tile" and e.fired}
    products = {s.name: s for s in done.loop.steps if isinstance(s, l.Kernel) and product(s)}
    assert told.keys() == products.keys() and not any(isinstance(s, l.Call) for s in done.loop.steps)
    for name, kernel in products.items():
        assert f"wgmma.m64n128k16.f32.bf16: {expected([kernel], HOPPER) / 1000:.1f} us" in told[name]


def test_what_the_best_tiles_cannot_have_others_take() -> None:
    """Scaled parts that are computed again beyond their range need many registers: the best tile has too few."""
    x, w, b = (torch.empty(s, device="meta") for s in ((8192, 2048), (2048, 2048), (2048,)))
    done = lowering(capture(lambda x, w, b: F.relu(F.linear(x, w, b)), (x, w, b)).program, Options(target="sm_90a"))
    whole = next(program for stage, program, _ in done.stages if stage.name == "parts")
    (kernel,) = (s for s in whole.steps if isinstance(s, l.Kernel) and (p := product(s)) and p.rescued)
    p = product(kernel)
    assert p is not None and not _derives(kernel, tiles.schedule(p, warpgroups.plans(p, HOPPER)[0], HOPPER), HOPPER)
    assert expected([kernel], HOPPER) < 1.05 * warpgroups.plans(p, HOPPER)[0].time
