"""What TMA moves where the buffer's own dimensions are no boxes: memory seen by the axes of an access."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from tests.kernels.programs import lowered
from tests.kernels.test_arrangements import right
from tests.kernels.test_attention import close, lines, tensors

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import topological
from terrazzo.ir.plan import Frame, Result, Ring
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.access import box

MERGED = (2, 100, 64)


def flat(x: Any, w: Any) -> Any:
    return F.linear(x, w).reshape(-1, w.shape[0]).relu()


def turned(x: Any, w: Any) -> Any:
    return F.linear(x[:, 1:], w).reshape(-1, w.shape[0])


@pytest.mark.parametrize("fn", [flat, turned])
def test_rows_of_a_batch_come_by_tma(fn: Any) -> None:
    """As one axis, or as two where they do not follow one another in memory."""
    args = tensors(MERGED, (128, 64))
    found = lowered(fn, args, "sm_90a")
    assert [ring.by for ring in lines(found, Ring)] == ["tma"]
    close(found, fn, args)


def packed(x: Any) -> Any:
    q, k, v = (y.unflatten(-1, (2, 64)).transpose(1, 2) for y in x.chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v)


def shared(x: Any, kv: Any) -> Any:
    q = x.unflatten(-1, (4, 64)).transpose(1, 2)
    k, v = (y.unflatten(-1, (2, 64)).transpose(1, 2) for y in kv.chunk(2, -1))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize(("fn", "sizes"), [(packed, (384,)), (shared, (256, 256))])
def test_attention_over_tokens_that_fill_no_step(fn: Any, sizes: tuple[int, ...]) -> None:
    """Tokens of all sequences lie one behind the other: what lies beyond a sequence is the next one."""
    args = tensors(*((200, n) for n in sizes))

    def whole(*xs: Any) -> Any:
        return fn(*(x.view(2, 100, -1) for x in xs))

    found = lowered(whole, args, "sm_90a")
    assert len(found.kernels) == 1 and len(lines(found, Frame)) == 1
    assert {ring.by for ring in lines(found, Ring)} == {"tma"}
    close(found, whole, args)


def test_a_scale_of_one_keeps_attention_in_one_kernel() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, scale=1.0)

    args = tensors(*((1, 2, 128, 64),) * 3)
    found = lowered(fn, args, "sm_90a")
    assert len(lines(found, Frame)) == 1
    close(found, fn, args)


OVERHANG = """@loop
def f(x: bf16[2, 100, 64], w: bf16[64, 64]):
    with kernel('y', y=bf16[200, 64]):
        for a0 in free(2):
            for a1 in free(100):
                for a2 in free(64):
                    for r0 in reduce(64):
                        in0 = x[a0, a1, r0]
                        v0 = f32(in0)
                        in1 = w[a2, r0]
                        v1 = f32(in1)
                        v2 = mul(v0, v1)
                        acc0 <- sum(v2)
                    v3 = bf16(acc0)
                    y[a0 * 100 + a1, a2] = v3
    return (y,)
"""


def test_no_box_writes_beyond_the_end_of_an_axis() -> None:
    """A box of 64 rows that begins at row 64 of 100 would write into the next image."""
    (kernel,) = parse(OVERHANG).steps
    assert isinstance(kernel, l.Kernel)
    (store,), (_, rows, columns) = kernel.stores, kernel.axes
    sizes = {rows: 64, columns: 64}
    assert box(store, sizes, False) == "what lies beyond a1 is not beyond the tensor, and TMA would move it"
    found = box(store, sizes)
    assert not isinstance(found, str) and found.by_axes
    assert found.place.tensor.static_shape == (2, 100, 64) and found.sides == (1, 64, 64)


PINNED = """    with schedule("y", target="sm_90a"):
        a0 = grid(2)
        a1 = grid(2) * block(64)
        a2 = block(64)
        r0 = time(1, ring=2) * block(64)
        roles(load=warp(1), math=warpgroup(1), registers=(40, 232))
        with site("acc0", on="wgmma.m64n64k16.f32.bf16"):
            a1 = warpgroup(1) * inst.m(64)
            a2 = inst.n(64)
            r0 = reg(4) * inst.k(16)
            x = smem(by="tma", swizzle=128)
            w = smem(by="tma", swizzle=128)
        with site("y"):
            a2 = time(1) * block(64)
            y = smem(by="tma", swizzle=128)
"""


def test_a_pinned_store_leaves_by_axes_and_is_right() -> None:
    text = OVERHANG.replace("@loop", "@tile").replace("    return (y,)\n", PINNED + "    return (y,)\n")
    (_, plan), *_ = lowering(parse(text), Options(target="sm_90a")).at("tile").plans
    assert plan.one(Result).by_axes
    right(text)


def test_what_is_computed_of_data_is_no_box() -> None:
    text = OVERHANG.replace("w: bf16[64, 64]", "w: bf16[64, 64], i: i64[100]").replace(
        "in0 = x[a0, a1, r0]", "n0 = i[a1]\n                        in0 = x[a0, at(n0, 100), r0]"
    )
    (kernel,) = parse(text).steps
    assert isinstance(kernel, l.Kernel)
    load = next(x for x in topological(kernel.stores) if isinstance(x, l.Load) and x.buffer.name == "x")
    assert isinstance(box(load, dict.fromkeys(kernel.axes, 1)), str)


def permuted(x: Any, w: Any) -> Any:
    """Rows that no box has."""
    return F.linear(x.view(7, 40, 512).roll(3, 1).reshape(-1, 512), w)


def test_what_lies_in_no_boxes_is_copied_first() -> None:
    args = tensors((280, 512), (512, 512))
    found = lowered(permuted, args, "sm_90a")
    rules = [e.rule for e in found.lowering.log.events if e.pass_name == "schedule" and e.fired]
    assert rules == ["points", "tile"]
    assert [ring.by for ring in lines(found, Ring)] == ["tma"]
    close(found, permuted, args)


def heads(x: Any, w: Any) -> Any:
    """What is summed over runs through heads and their columns, between which other tokens lie."""
    return F.linear(x.transpose(1, 2).flatten(2), w)


def gradient(x: Any, y: Any) -> Any:
    """Of a weight after attention: its rows run through heads, and what is summed over through batches and tokens."""
    return x.transpose(1, 2).reshape(-1, 128).t() @ y.reshape(-1, y.shape[-1])


@pytest.mark.parametrize(
    ("fn", "shapes", "loops"),
    [(heads, ((1, 12, 256, 64), (256, 768)), 2), (gradient, ((3, 2, 200, 64), (3, 200, 128)), 2)],
)
def test_steps_go_along_several_axes(fn: Any, shapes: tuple[tuple[int, ...], ...], loops: int) -> None:
    """No copy merges them; what lies beyond the tokens of one batch is zero."""
    args = tensors(*shapes)
    found = lowered(fn, args, "sm_90a")
    assert [len(ring.over) for ring in lines(found, Ring)][:1] == [loops]
    close(found, fn, args)


def test_a_tensor_ends_where_its_load_has_zeros() -> None:
    """Rows that were padded are as long as the tensor that TMA sees."""
    text = OVERHANG.replace("in0 = x[a0, a1, r0]", "in0 = x[a0, a1, r0] if r0 < 60 else 0")
    (kernel,) = parse(text).steps
    assert isinstance(kernel, l.Kernel)
    load = next(x for x in topological(kernel.stores) if isinstance(x, l.Load) and x.buffer.name == "x")
    found = box(load, dict.fromkeys(load.free, 8))
    assert not isinstance(found, str)
    assert found.place.tensor.static_shape[-1] == 60 and load.inside[0] in found.place.bounds
