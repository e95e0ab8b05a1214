"""What products look up is stored first, on a GPU: once for all that look it up, and only where that is cheaper."""

from __future__ import annotations

import inspect
from dataclasses import replace
from textwrap import dedent
from typing import Any

import pytest
import torch
from tests.kernels.programs import r
from torch.nn import functional as f

from terrazzo.front.capture import capture
from terrazzo.interp import loop
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import substitute
from terrazzo.ir.sites import sites
from terrazzo.ir.text import parse
from terrazzo.ir.verify import problem
from terrazzo.options import Options
from terrazzo.pipelines import LOWER, lowering, stages
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.cost import looked_up
from terrazzo.rules.loop.layout import lookups
from terrazzo.rules.loop.layout.images import strewn
from terrazzo.rules.loop.layout.lookups import operands_stored
from terrazzo.targets import target

UPPER = LOWER[: LOWER.index("store_as_read")]


def fused(fn: Any, *args: Any, arch: str = "sm_90a") -> list[l.Kernel]:
    """The kernels of a program after lookups were stored."""
    program = capture(fn, args, {}).program
    return list(stages(program, Options(target=arch, libraries="never"), Log(), UPPER)[-1][1].steps)


def towers(table: Any, w: Any, v: Any, i: Any) -> Any:
    return f.linear(f.embedding(i, table), w).relu(), f.linear(f.embedding(i, table), v).tanh()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_that_look_up_the_same_read_what_is_stored_once(dtype: torch.dtype) -> None:
    table, w, v = (torch.zeros(*shape, dtype=dtype) for shape in ((9000, 128), (512, 128), (256, 128)))
    steps = fused(towers, table, w, v, torch.zeros(4096, dtype=torch.int64))
    looked = [s for s in steps if any(b.name == "table" for b in s.reads)]
    assert len(looked) == 1 and looked[0].stores[0].buffer.type.shape == (4096, 128)
    assert sum(looked[0].writes[0] in s.reads for s in steps) == len(steps) - 1


def test_on_a_processor_they_are_looked_up_on_the_way() -> None:
    table, w, v = (torch.zeros(*shape) for shape in ((9000, 128), (512, 128), (256, 128)))
    steps = fused(towers, table, w, v, torch.zeros(4096, dtype=torch.int64), arch="cpu")
    assert all(any(b.name == "table" for b in s.reads) for s in steps)


def test_few_products_are_not_worth_a_kernel() -> None:
    table, w = torch.zeros(9000, 16), torch.zeros(8, 16)
    (step,) = fused(lambda t, w, i: f.linear(f.embedding(i, t), w), table, w, torch.zeros(64, dtype=torch.int64))
    assert any(b.name == "t" for b in step.reads)


def pooled(x: Any, near: Any, w: Any) -> Any:
    return f.linear(x[near], w).relu().amax(1)


def test_a_product_of_what_is_looked_up_is_not_part_of_a_reduction() -> None:
    """It is stored before, on tensor cores; in the reduction it would be computed on none."""
    x, w = torch.zeros(20000, 128, dtype=torch.bfloat16), torch.zeros(128, 128, dtype=torch.bfloat16)
    steps = fused(pooled, x, torch.zeros(20000, 10, dtype=torch.int64), w)
    assert [s.stores[0].buffer.type.shape for s in steps] == [(20000, 10, 128), (20000, 10, 128), (20000, 128)]


def banded(weights: Any, v: Any, some: Any, first: Any) -> Any:
    """Each token's weights for those around it, as rows of a band, times these; and a product with the first tokens."""
    batch, n, k = weights.shape
    band = f.pad(weights, (0, n)).flatten(1)[:, : n * (n + k - 1)].view(batch, n, n + k - 1)
    return band @ v + some @ first


def test_a_band_is_stored_and_its_product_is_no_part_of_another() -> None:
    """A step's place in it is found by division. As a part of the sum with another product, whose steps are others,
    every thread found it for each step: 19 ms for 384 blocks of 256 x 768 times 64 (H200).
    """
    args = r(16, 128, 65), r(16, 192, 64), r(16, 128, 2), r(16, 2, 64)
    program = capture(banded, args, {}).program
    done = stages(program, Options(target="sm_90a", libraries="never"), Log(), UPPER)[-1][1]
    assert sum(s.stores[0].buffer.type.shape == (16, 128, 192) for s in done.steps) == 1
    assert all(len(sites(s).contractions) < 2 for s in done.steps)
    assert not any(
        strewn(x, c.reduce.axes) for s in done.steps for c in sites(s).contractions.values() for x in c.operands
    )
    (found,) = loop.run(done, {b.name: x.numpy() for b, x in zip(done.inputs, args, strict=True)})
    exact = banded(*(x.double() for x in args))
    eager = (banded(*args) - exact).abs().max()
    assert (torch.from_numpy(found).double() - exact).abs().max() <= 2 * eager


def test_what_is_looked_up_in_the_steps_of_another_reduction_is_stored_for_all_of_them() -> None:
    """As a maximum over neighbours of products of what they are; the operand knows the neighbour."""
    text = """
        @loop
        def f(x: bf16[500, 64], near: i64[4096, 10], w: bf16[64, 64]):
            with kernel('z', z=f32[4096, 64]):
                for a0 in free(4096):
                    for a1 in free(64):
                        for r1 in reduce(10):
                            in0 = near[a0, r1]
                            for r0 in reduce(64):
                                in1 = x[at(in0, 500), r0]
                                v0 = f32(in1)
                                in2 = w[a1, r0]
                                v1 = f32(in2)
                                v2 = mul(v0, v1)
                                acc1 <- sum(v2)
                            acc0 <- max(acc1)
                        z[a0, a1] = acc0
            return (z,)
    """
    (kernel,) = parse(dedent(text)).steps
    found = operands_stored(kernel, lambda x: looked_up([x]), frozenset(), {})
    assert found is not None
    made, whole = found
    assert made.stores[0].buffer.type.shape == (4096, 10, 64)
    assert not problem(l.Program("f", kernel.reads, (made, whole), whole.writes))


def shuffled(x: Any, w: Any) -> Any:
    return f.conv2d(f.pixel_shuffle(x, 2), w, padding=1)


def repeated(x: Any, w: Any) -> Any:
    return f.conv2d(f.interpolate(x, scale_factor=2), w, padding=1)


def reflected(x: Any, w: Any) -> Any:
    return f.conv2d(f.pad(x, (2, 2, 2, 2), mode="reflect"), w, stride=2, dilation=2)


def twice(x: Any, w: Any) -> Any:
    return f.pixel_shuffle(shuffled(x, w), 2)


def rolled(x: Any, w: Any) -> Any:
    return f.conv2d(x.roll((1, 2), (2, 3)), w, padding=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("fn", "channels"), [(shuffled, 16), (repeated, 64), (reflected, 64), (rolled, 64)])
@pytest.mark.parametrize(("images", "side"), [(4, 48), (1, 33)])
def test_images_under_windows_are_stored(fn: Any, channels: int, images: int, side: int, dtype: torch.dtype) -> None:
    """Once, with their border; the windows read them at places that steps move evenly."""
    x = torch.zeros(images, 64, side, side, dtype=dtype)
    w = torch.zeros(96, channels, 3, 3, dtype=dtype)
    image, product_ = fused(fn, x, w)
    (site,) = sites(product_).contractions.values()
    assert not any(strewn(y, site.reduce.axes) for y in site.operands) and not looked_up(site.operands)
    assert image.stores[0].buffer.type.numel <= 4.5 * x.numel()


def test_pixels_are_not_shuffled_on_the_way_between_convolutions() -> None:
    """The image of the first, the product, and what is shuffled of that: a tile has a digit of no axis."""
    steps = fused(twice, torch.zeros(4, 256, 48, 48), torch.zeros(256, 64, 3, 3))
    assert len(steps) == 3 and [len(sites(s).contractions) for s in steps] == [0, 1, 0]


@pytest.mark.parametrize("fn", [shuffled, repeated, reflected, rolled])
def test_stored_images_are_right(fn: Any) -> None:
    x, w = r(2, 16, 9, 10), r(24, 4 if fn is shuffled else 16, 3, 3)
    program = capture(fn, (x, w), {}).program
    before = stages(program, Options(target="sm_90a", libraries="never"), Log(), UPPER[:-1])[-1][1]
    cheap = lookups.store_lookups(before, Log(), replace(target("sm_90a").rates, launch=0.0))
    assert len(cheap.steps) == len(before.steps) + 1
    ours = loop.run(cheap, {"x": x.numpy(), "w": w.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(ours), fn(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("taps", "first"), [(63, True), (5, False)])
def test_what_a_long_filter_reads_by_division_is_stored_first(taps: int, first: bool) -> None:
    """One filter for all that a turned signal holds: 16 x 160160 samples of 255 taps were 2.8 ms by the model."""

    def fn(x: Any, w: Any) -> Any:
        return f.conv1d(x.transpose(1, 2).reshape(2, 1, -1), w, padding=taps // 2)

    large = fused(fn, torch.empty(2, 160, 10001, device="meta"), torch.empty(1, 1, taps, device="meta"))
    assert len(large) == 1 + first
    x, w = torch.randn(2, 7, 11), torch.randn(1, 1, taps)
    (small,) = fused(fn, x, w)
    made = operands_stored(small, lambda _: False, set(), {}, images=True)
    assert (made is not None) is first
    program = l.Program("f", small.reads, made or (small,), small.writes)
    (ours,) = loop.run(program, dict(zip((b.name for b in small.reads), (x.numpy(), w.numpy()), strict=True)))
    torch.testing.assert_close(torch.from_numpy(ours), fn(x, w), rtol=1e-4, atol=1e-5)


def behind_a_column(a: Any, b: Any, c: Any) -> Any:
    return torch.cat([c, a @ b], 1) / 0.07


def test_a_product_is_not_written_behind_a_column_in_which_no_box_begins_where_it_may() -> None:
    """Behind eight columns its factor is read from where a box may begin."""
    a, b = torch.zeros(512, 128, dtype=torch.bfloat16), torch.zeros(128, 65536, dtype=torch.bfloat16)
    for columns, alone in ((1, True), (8, False)):
        steps = fused(behind_a_column, a, b, torch.zeros(512, columns, dtype=torch.bfloat16))
        product = next(s for s in steps if b.shape in [x.type.shape for x in s.reads])
        assert (product.stores[0].buffer.type.shape == (512, 65536)) == alone


def biased(q: Any, k: Any, v: Any, table: Any, near: Any) -> Any:
    """Attention in windows, with what a table says of how tokens lie to each other."""
    bias = table[near.view(-1)].view(*near.shape, -1).permute(2, 0, 1)
    return f.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])


def windows(count: int, tokens: int = 49, heads: int = 4, kind: torch.dtype = torch.bfloat16) -> tuple[Any, ...]:
    q, k, v = (r(count, heads, tokens, 16).to(kind) for _ in range(3))
    return q, k, v, r(4 * tokens, heads).to(kind), torch.randint(0, 4 * tokens, (tokens, tokens))


def readers(steps: list[l.Kernel], name: str) -> list[str]:
    return [s.name for s in steps if any(b.name == name for b in s.reads)]


@pytest.mark.parametrize(("count", "tokens"), [(512, 49), (64, 197)])
def test_what_many_windows_add_to_their_scores_is_looked_up_once(count: int, tokens: int) -> None:
    """And stays so where two products become one kernel, be its rows few or many."""
    program = capture(biased, windows(count, tokens), {}).program
    steps = lowering(program, Options(target="sm_90a", libraries="never")).loop.steps
    (maker,) = [s for s in steps if any(b.name == "table" for b in s.reads)]
    assert maker.writes[0].type.shape == (4, tokens, tokens)
    (reader,) = [s for s in steps if maker.writes[0] in s.reads]
    assert {"q", "k", "v"} <= {b.name for b in reader.reads}


def test_what_several_products_add_is_stored_once() -> None:
    doc = inspect.getdoc(lookups.store_beside) or ""
    before = parse(doc[doc.index("@loop") : doc.index("=>")])
    (z,) = before.steps
    y = substitute(z, {z.writes[0]: l.Buffer("y", z.writes[0].type)})
    y = l.Kernel("y", y.axes, y.stores, y.source)
    both = l.Program("f", before.inputs, (z, y), (*z.writes, *y.writes))
    after = lookups.store_beside(both, Log(), replace(target("sm_90a").rates, launch=0.0, byte=0.0))
    assert readers(list(after.steps), "t") == ["z_t"] and len(after.steps) == 3


def test_what_few_windows_add_is_looked_up_on_the_way() -> None:
    steps = fused(biased, *windows(8))
    (maker,) = readers(steps, "table")
    assert maker in [s.name for s in steps if any(b.name == "q" for b in s.reads)]


def test_what_windows_add_is_right() -> None:
    given = windows(8, 9, 2, torch.float32)
    program = capture(biased, given, {}).program
    before = stages(program, Options(target="sm_90a", libraries="never"), Log(), UPPER[:-1])[-1][1]
    after = lookups.store_beside(before, Log(), replace(target("sm_90a").rates, launch=-1e6))
    assert len(after.steps) == len(before.steps) + 1
    names = dict(zip(("q", "k", "v", "table", "near"), (x.numpy() for x in given), strict=True))
    torch.testing.assert_close(torch.from_numpy(loop.run(after, names)[0]), biased(*given), rtol=1e-4, atol=1e-4)
