"""Windows: depthwise convolutions, pooling, interpolation and stencils, whose points take the steps of their reductions
together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels import programs
from tests.kernels.programs import Lowered, b, h, r

from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.interp.torch import to_numpy
from terrazzo.ir import nest as n
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.expr import Loaded, Var
from terrazzo.ir.node import topological
from terrazzo.ir.sites import product
from terrazzo.ir.text import parse
from terrazzo.ir.types import Type, f32, i64
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop.layout import taps_after
from terrazzo.rules.loop_to_tile.candidates import candidates
from terrazzo.rules.loop_to_tile.estimate import estimate
from terrazzo.rules.loop_to_tile.products.stored import stored
from terrazzo.rules.loop_to_tile.walked import windows
from terrazzo.rules.loop_to_tile.walked.cache_lines import SCATTERED, lines_of
from terrazzo.rules.loop_to_tile.walked.collapse import merge_product_axes
from terrazzo.rules.loop_to_tile.walked.window_forms import form_of
from terrazzo.rules.torch_to_tensor.library import price
from terrazzo.targets.cuda.predict import predict

LAST = torch.channels_last
ULP = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def depthwise(x: Any, w: Any, **options: Any) -> Any:
    conv = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.dim()]
    return conv(x, w, groups=x.shape[1], **options)


def normed(x: Any, w: Any, mean: Any, scale: Any, skip: Any) -> Any:
    y = depthwise(x, w, padding=1)
    return F.hardtanh((y - mean[:, None, None]) * scale[:, None, None], 0.0, 6.0) + skip


def laplace(x: Any) -> Any:
    y = F.pad(x, (1, 1, 1, 1))
    return y[:, 2:, 1:-1] + y[:, :-2, 1:-1] + y[:, 1:-1, 2:] + y[:, 1:-1, :-2] - 4 * x


WINDOWS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "3 x 3": (lambda x, w: depthwise(x, w, padding=1), (b(2, 8, 14, 14), b(8, 1, 3, 3))),
    "7 x 7": (lambda x, w: depthwise(x, w, padding=3), (b(2, 8, 20, 20), b(8, 1, 7, 7))),
    "in single precision": (lambda x, w: depthwise(x, w, padding=2), (r(1, 4, 13, 11), r(4, 1, 5, 5))),
    "in half precision": (lambda x, w: depthwise(x, w, padding=1), (h(1, 4, 28, 28), h(4, 1, 3, 3))),
    "every second": (lambda x, w: depthwise(x, w, padding=1, stride=2), (b(2, 8, 28, 28), b(8, 1, 3, 3))),
    "dilated": (lambda x, w: depthwise(x, w, padding=2, dilation=2), (b(1, 8, 15, 17), b(8, 1, 3, 3))),
    "no padding": (depthwise, (b(1, 8, 19, 21), b(8, 1, 3, 3))),
    "channels last": (
        lambda x, w: depthwise(x, w, padding=3),
        (b(2, 32, 14, 14).to(memory_format=LAST), b(32, 1, 7, 7)),
    ),
    "odd channels last": (
        lambda x, w: depthwise(x, w, padding=1),
        (b(2, 31, 9, 11).to(memory_format=LAST), b(31, 1, 3, 3)),
    ),
    "channels last in single precision": (
        lambda x, w: depthwise(x, w, padding=1),
        (r(1, 32, 9, 10).to(memory_format=LAST), r(32, 1, 3, 3)),
    ),
    "what follows": (normed, (b(2, 8, 14, 14), b(8, 1, 3, 3), b(8), b(8), b(2, 8, 14, 14))),
    "a multiplier": (lambda x, w: F.conv2d(x, w, padding=1, groups=4), (b(1, 4, 16, 16), b(8, 1, 3, 3))),
    "in one dimension": (lambda x, w: depthwise(x, w, padding=3)[..., :-3], (b(2, 16, 100), b(16, 1, 4))),
    "in three dimensions": (lambda x, w: depthwise(x, w, padding=1), (b(1, 4, 6, 8, 9), b(4, 1, 3, 3, 3))),
    "average": (lambda x: F.avg_pool2d(x, 7), (b(2, 8, 49, 49),)),
    "average of neighbours": (lambda x: F.avg_pool2d(x, 3, 1, 1), (b(2, 8, 14, 14),)),
    "average, channels last": (lambda x: F.avg_pool2d(x, 2), (b(2, 32, 8, 8).to(memory_format=LAST),)),
    "maximum": (lambda x: F.max_pool2d(x, 3, 2, 1), (b(2, 8, 28, 28),)),
    "maximum with indices": (lambda x: F.max_pool2d(x, 2, return_indices=True)[0], (r(2, 8, 16, 16),)),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, (5, 7)), (b(2, 8, 28, 28),)),
    "pooled to few": (lambda x: F.adaptive_avg_pool2d(x, 2), (b(2, 8, 40, 40),)),
    "heads, normed": (lambda x: F.normalize(x.unflatten(-1, (2, 8)).permute(0, 2, 3, 1), dim=-1), (r(2, 20, 16),)),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), (b(2, 4, 8, 8),)),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bicubic"), (b(2, 4, 8, 8),)),
    "grid sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), (r(2, 8, 8, 8), r(2, 9, 10, 2))),
    "stencil": (laplace, (r(2, 20, 30),)),
    "transposed": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, groups=8),
        (b(1, 8, 9, 9), b(8, 1, 3, 3)),
    ),
    "in groups": (lambda x, w: F.conv2d(x, w, padding=1, groups=4), (b(2, 16, 14, 14), b(16, 4, 3, 3))),
    "in groups, channels last": (
        lambda x, w: F.conv2d(x, w, padding=1, groups=8),
        (b(2, 32, 14, 14).to(memory_format=LAST), b(32, 4, 3, 3)),
    ),
    "in groups, every second": (
        lambda x, w: F.conv2d(x, w, padding=1, stride=2, groups=2).relu(),
        (r(1, 8, 15, 17), r(12, 4, 3, 3)),
    ),
    "two steps": (lambda x, w, c: F.linear(x, w, c).tanh(), (b(70, 2), b(48, 2), b(48))),
    "seven steps of a batch": (lambda x, w: (x @ w).relu(), (r(3, 33, 7), r(3, 7, 20))),
}  # fmt: skip


def exact(found: Lowered) -> Any:
    return found.fn(*(x.double() for x in found.args)).numpy()


def right(found: Lowered) -> None:
    """The kernels give what PyTorch gives in float64, as exactly as rounding allows."""
    wanted = exact(found)
    ours = found.simulated()[0].astype(np.float64)
    assert np.abs(ours - wanted).max() <= 2 * ULP[found.args[0].dtype] * np.abs(wanted).max()


def chosen(found: Lowered) -> dict[str, str]:
    """The rule and the reason of every kernel's schedule."""
    events = [e for e in found.lowering.log.events if e.pass_name == "schedule" and e.fired]
    return {e.subject: f"{e.rule}: {e.reason}" for e in events}


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small problems are scheduled as large ones, which have threads enough whatever each of them computes."""
    monkeypatch.setattr(windows, "BUSY", 0.0)
    windows.window.cache_clear()
    yield
    windows.window.cache_clear()


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("target", programs.TARGETS)
def test_windows_are_right(name: str, target: str) -> None:
    fn, args = WINDOWS[name]
    right(programs.lowered(fn, args, target))


@pytest.mark.parametrize("name", WINDOWS)
def test_several_points_of_a_thread_are_right(name: str, many: None) -> None:
    fn, args = WINDOWS[name]
    right(programs.lowered(fn, args, "sm_90a"))


def depthwise_of(*shape: int, taps: int, last: bool = False, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """A depthwise convolution at a real size, which is only lowered."""
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    w = torch.empty((shape[1], 1, taps, taps), dtype=torch.bfloat16, device="meta")
    x = x.to(memory_format=LAST) if last else x
    return lambda x, w: F.relu(depthwise(x, w, padding=taps // 2, **options)), (x, w)


def lowering_of(fn: Any, args: tuple[Any, ...], **options: Any) -> Any:
    return lowering(capture(fn, args, {}).program, Options(target="sm_90a", **options))


def pooled_beside(x: Any, y: Any) -> Any:
    a, c = F.avg_pool2d(x, 2), F.avg_pool2d(y.expand_as(x), 2)
    return a * c, a, c, c * c


def test_a_window_may_be_that_of_all_points() -> None:
    """What no point of a thread moves is computed once for all, from sums that each of them has."""
    right(programs.lowered(lambda x, y: torch.stack(pooled_beside(x, y)), (r(8, 3, 16, 16), r(16, 16)), "sm_90a"))
    found = lowering_of(pooled_beside, tuple(torch.empty(s, device="meta") for s in ((8, 3, 256, 256), (256, 256))))
    ((_, schedule),) = found.at("tile").schedules
    assert "a0 = grid(1) * reg(8, jam=True)" in str(schedule) and found.at("kernel").steps


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("taps", [3, 7])
def test_a_window_is_loaded_once_for_several_points(taps: int, last: bool) -> None:
    """A point loads a fraction of its taps."""
    fn, args = depthwise_of(16, 256, 56, 56, taps=taps, last=last)
    found = lowering_of(fn, args, libraries="never")
    way = windows.window(found.at("tile").loop.steps[-1], gpu("sm_90a"))
    assert way is not None and way.time < 100e3
    (kernel,) = (s for s in found.at("kernel").steps if s.name == "relu")
    (acc,) = (s.place for s in k.walk(kernel.body) if isinstance(s, k.Declare) and s.place.name.startswith("acc"))
    points = acc.type.numel
    window = next(s.place for s in k.walk(kernel.body) if isinstance(s, k.Declare) and s.place.name.startswith("in"))
    assert points >= 8 and window.type.numel < points * taps


def test_a_library_is_called_for_what_it_is_better_at() -> None:
    """Depthwise convolutions are priced by what PyTorch's own kernels and cuDNN's were measured to take."""
    for last, least, most in ((False, 400e3, 500e3), (True, 100e3, 160e3)):
        fn, args = depthwise_of(16, 256, 56, 56, taps=7, last=last)
        (node,) = (
            x
            for x in topological(capture(fn, args, {}).program.results)
            if isinstance(x, Aten) and x.name == "aten.convolution.default"
        )
        assert least < price(node, gpu("sm_90a")) < most


PATCHES = {
    "as long as a step": (lambda x, w: F.conv2d(x, w, stride=16), (b(4, 3, 64, 64), b(64, 3, 16, 16))),
    "14 x 14": (lambda x, w: F.conv2d(x, w, stride=14), (b(4, 3, 56, 56), b(64, 3, 14, 14))),
    "every second of an odd number": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=1),
        (b(2, 64, 17, 17).to(memory_format=LAST), b(64, 64, 3, 3).to(memory_format=LAST)),
    ),
    "that overlap": (lambda x, w: F.conv2d(x, w, stride=4, padding=2), (b(2, 3, 40, 40), b(64, 3, 11, 11))),
}


@pytest.mark.parametrize("name", PATCHES)
def test_patches_of_few_channels_are_a_product(name: str) -> None:
    """Channels and taps are so many steps of one product, whose image is stored patch by patch."""
    fn, args = PATCHES[name]
    found = programs.lowered(fn, args, "sm_90a")
    right(found)
    assert any(isinstance(s, k.MultiplyAsync) for x in found.kernels for s in k.walk(x.body)), chosen(found)


def test_patches_are_not_stored_where_they_are_too_many() -> None:
    """An image of 11 x 11 patches, four pixels apart, takes 7.6 times its memory, which a batch may not have."""
    for batch, is_stored in ((64, True), (4096, False)):
        x = torch.empty((batch, 3, 224, 224), dtype=torch.bfloat16, device="meta")
        w = torch.empty((64, 3, 11, 11), dtype=torch.bfloat16, device="meta")
        found = lowering_of(lambda x, w: F.conv2d(x, w, stride=4, padding=2), (x, w), libraries="never")
        (kernel,) = found.at("loop").steps
        p = product(kernel)
        assert p is not None
        assert bool([*stored(merge_product_axes(kernel, p.sites), gpu("sm_90a"))]) == is_stored


def test_what_a_thread_sums_by_itself_comes_in_vectors() -> None:
    """A product of two steps is as wide as a vector, so is what is stored; a short row is one load."""
    x, w, c = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((262144, 2), (256, 2), (256,)))
    short = torch.empty((4096, 512, 8), dtype=torch.bfloat16, device="meta")
    for fn, args in ((lambda x, w, c: F.linear(x, w, c).sin(), (x, w, c)), (lambda x: x.sum(-1), (short,))):
        found = lowering_of(fn, args)
        (kernel,) = found.at("kernel").steps
        assert {e.rule for e in found.log.events if e.pass_name == "schedule" and e.fired} >= {"window"}
        moved = [c for (_, kind), c in predict(kernel).costs.accesses.items() if kind.startswith("global")]
        assert max(c.bytes / c.requests for c in moved) == 32 * 16


def test_channels_that_a_thread_sums_come_in_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pixel whose channels lie side by side a thread loads all at once, and not lane by lane across them."""
    monkeypatch.setattr(taps_after, "TIMES", 0)  # a product of all pixels with all taps is faster by the model
    fn = lambda x, w: F.conv2d(x, w, padding=1)  # noqa: E731
    found = programs.lowered(fn, (b(2, 32, 33, 33).to(memory_format=LAST), b(1, 32, 3, 3)), "sm_90a")
    right(found)
    (kernel,) = found.kernels
    assert max(s.count for s in k.walk(kernel.body) if isinstance(s, k.Move)) == 32


def test_long_filters_are_windows_and_long_poolings_are_rows() -> None:
    x, w = (torch.empty(s, device="meta") for s in ((8, 128, 56, 56), (128, 1, 31, 31)))
    for fn, args, rule in (
        (lambda x, w: depthwise(x, w, padding=15), (x, w), "window"),
        (lambda x: F.adaptive_avg_pool2d(x, 2), (x,), "share"),
    ):
        found = lowering_of(fn, args, libraries="never")
        assert [e.rule for e in found.log.events if e.pass_name == "schedule" and e.fired] == [rule]


@pytest.mark.parametrize(("dtype", "rule"), [(torch.float32, "window"), (torch.bfloat16, "tile")])
def test_threads_multiply_few_channels_in_float32(dtype: torch.dtype, rule: str) -> None:
    """As in a net's first convolution, which tiles of CUDA cores took twice as long for; in 16 bits a window took 74 us
    where patches and tensor cores took 51 (H100).
    """
    args = [torch.empty(s, dtype=dtype, device="meta") for s in ((32, 3, 224, 224), (32, 3, 3, 3))]
    program = capture(lambda x, w: F.conv2d(x, w, stride=2, padding=1), tuple(args), {}).program
    done = lowering(program, Options(target="sm_90a", libraries="never"))
    chosen = [e.rule for e in done.log.events if (e.pass_name, e.subject) == ("schedule", "convolution") and e.fired]
    assert chosen == [rule]
    if rule == "window":
        found = programs.lowered(
            lambda x, w: F.conv2d(x, w, stride=2, padding=1), (r(1, 3, 20, 20), r(8, 3, 3, 3)), "sm_90a"
        )
        right(found)


@pytest.mark.parametrize("last", [False, True])
def test_groups_of_few_channels_are_windows(last: bool) -> None:
    """Patches of all groups are nine times the image, and instructions would compute twice as much as is wanted."""
    x = torch.empty((32, 128, 56, 56), dtype=torch.bfloat16, device="meta")
    w = torch.empty((128, 4, 3, 3), dtype=torch.bfloat16, device="meta")
    x = x.to(memory_format=LAST) if last else x
    found = lowering_of(lambda x, w: F.conv2d(x, w, padding=1, groups=32).relu(), (x, w), libraries="never")
    assert any(e.rule == "window" and e.fired for e in found.log.events)
    assert all(x.grid < 1 << 14 for x in found.at("kernel").steps)


def heads_normed(x: Any) -> Any:
    y = x.unflatten(-1, (8, 48)).permute(0, 2, 3, 1)
    return F.normalize(y, dim=-1)


def heads_with_more(x: Any, more: Any) -> Any:
    return torch.cat((more, F.rms_norm(x.unflatten(-1, (8, 64)).transpose(1, 2), (64,))), 2)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda x: F.adaptive_avg_pool2d(x, 3), ((4, 512, 60, 60),)),  # each of few points has 400 steps
        (heads_normed, ((32, 196, 384),)),  # a sum that 196 points need
        (heads_with_more, ((4, 1024, 512), (4, 8, 154, 64))),
    ],
)
def test_windows_with_no_place_in_common_are_rows_that_threads_share(fn: Any, shapes: Any) -> None:
    found = lowering_of(fn, tuple(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes))
    rules = {e.rule for e in found.log.events if e.pass_name == "schedule" and e.fired}
    assert "share" in rules and "window" not in rules


def test_pixels_are_one_axis_where_channels_come_first() -> None:
    """A 1 x 1 convolution of images: all pixels of one are the rows of a product, which none of the others follow."""
    x = torch.empty((32, 96, 56, 56), dtype=torch.bfloat16, device="meta")
    w = torch.empty((96, 96, 1, 1), dtype=torch.bfloat16, device="meta")
    found = lowering_of(lambda x, w: F.conv2d(x, w).relu() + x, (x, w), libraries="never")
    (kernel,) = found.at("tile").loop.steps
    assert [a.extent for a in kernel.axes] == [32, 3136, 96]


def per_head(x: Any, w: Any, g: Any) -> Any:
    """The gradient of an RMS norm by heads that lie in one row of memory."""
    y = x.view(*g.shape)
    scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
    return g * w * scale - y * scale**3 * (g * w * y).mean(-1, keepdim=True)


def test_a_row_among_others_is_no_window() -> None:
    """Heads beside each other share no element; threads share a row's sum, and none is computed for every point."""
    x, w, g = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((2048, 2048), (256,), (2048, 8, 256)))
    found = lowering_of(per_head, (x, w, g), libraries="never")
    fired = {e.rule for e in found.log.events if e.pass_name == "schedule" and e.fired}
    assert fired == {"share"}
    pooled = lowering_of(lambda x: F.avg_pool2d(x, 7), (torch.empty(64, 512, 49, 49, device="meta"),))
    assert "window" in {e.rule for e in pooled.log.events if e.pass_name == "schedule" and e.fired}


def test_lines_that_a_warp_asks_the_cache_for() -> None:
    """Of an element for each lane: side by side, in steps, in rows; where numbers say, and where data does."""
    axis, row = Var("a", 1024), Var("b", 8)
    x = l.Buffer("x", Type(f32, (8, 4096)))

    def asked(*index: Any, lanes: Any = ((axis, 32, 1),), width: int = 1) -> int:
        return lines_of(l.Load(x, index), lanes, width)

    assert asked(0, axis) == 1
    assert asked(0, axis, lanes=((axis, 32, 4),), width=4) == 4
    assert asked(0, axis * 2) == 2
    assert asked(0, axis * 64) == 32
    assert asked(row, axis, lanes=((row, 4, 1), (axis, 8, 1))) == 4
    half = l.apply("floordiv", l.Index(axis), l.Literal(2, i64))
    assert asked(0, Loaded(half, 512)) == 1
    read = l.Load(l.Buffer("i", Type(i64, (1024,))), (axis,))
    assert asked(0, Loaded(read, 4096)) == asked(0, Loaded(l.apply("add", half, read), 4096)) == 32
    assert asked(Loaded(read, 8), row, lanes=((axis, 4, 1), (row, 8, 1))) == 4, "a line for each row of a table"
    moved = l.apply("i64", l.Load(l.Buffer("z", Type(f32, (1024,))), (axis,)))
    assert asked(0, Loaded(moved, 4096)) == SCATTERED, "near each other, as the places of an image are"


GATHERED = """@loop
def f(i: i64[65536], x: f32[1024, 1024], w: f32[65536, 8]):
    with kernel('y', y=f32[65536, 128]):
        for a0 in free(65536):
            in0 = i[a0]
            for a1 in free(128):
                for r0 in reduce(8):
                    in1 = x[at(in0, 1024), r0 * 128 + a1]
                    in2 = w[a0, r0]
                    v0 = mul(in1, in2)
                    acc0 <- sum(v0)
                y[a0, a1] = acc0
    return (y,)
"""


def test_lanes_lie_along_the_rows_of_a_table() -> None:
    """Data says which rows are read, not which of their elements: lanes that lie along a row ask for a line or two."""
    kernel = parse(GATHERED.strip()).steps[0]
    found = windows.window(kernel, gpu("sm_90a"))
    assert found is not None
    lanes = {a: f.size for a, own in found.schedule.axes for f in own if f.level == "lane"}
    assert lanes == {"a1": 32}


def test_a_table_costs_what_is_read_of_it() -> None:
    """512 rows of a vocabulary, whatever its size: beside a sum of the results of four experts they were 282 us by the
    model, for 1.2 GB that nobody reads.
    """
    text = GATHERED.replace("65536", "512").strip()
    few, many = (
        parse(text.replace("1024, 1024", f"{n}, 1024").replace("in0, 1024", f"in0, {n}")) for n in (1024, 99999)
    )
    times = [windows.window(x.steps[0], gpu("sm_90a")) for x in (few, many)]
    assert times[0] is not None and times[1] is not None
    assert times[0].time == times[1].time


SHARED = """@loop
def f(i: i64[65536], j: i64[65536], x: bf16[1024, 128], w: f32[65536, 3]):
    with kernel('y', y=bf16[65536, 257]):
        for a0 in free(65536):
            in0 = i[a0]
            in1 = j[a0]
            for r0 in reduce(3):
                in2 = w[a0, r0]
                v0 = mul(in2, in2)
                acc0 <- sum(v0)
            for a1 in free(257):
                in3 = x[at(in0, 1024), a1] if a1 < 128 else 0
                in4 = x[at(in1, 1024), a1 - 128] if a1 >= 128 and a1 < 256 else 0
                v1 = f32(in3)
                v2 = f32(in4)
                v3 = add(v1, v2)
                v4 = add(v3, acc0)
                v5 = bf16(v4)
                y[a0, a1] = v5
    return (y,)
"""


def test_a_sum_that_a_long_row_shares_is_a_kernel_of_its_own() -> None:
    """Lanes would go through a row of 257 each, and store to a sector each; beside the sum they lie along the rows."""
    kernel: Any = parse(SHARED.strip()).steps[0]
    found = next(candidates(kernel, gpu("sm_90a"), {}))
    assert [what for _, _, what, _ in found.kernels] == ["window", "points"]


def test_a_sum_in_the_steps_of_another_stays_there() -> None:
    """It is another number in each of them."""
    text = SHARED.replace("w: f32[65536, 3]", "w: f32[65536, 3, 2]")
    text = text.replace(
        "                in2 = w[a0, r0]\n                v0 = mul(in2, in2)\n                acc0 <- sum(v0)\n",
        "                for r1 in reduce(2):\n                    in2 = w[a0, r0, r1]\n"
        "                    acc1 <- sum(in2)\n                v0 = mul(acc1, acc1)\n                acc0 <- sum(v0)\n",
    )
    kernel: Any = parse(text.strip()).steps[0]
    assert len(kernel.carried) == 2
    for found in candidates(kernel, gpu("sm_90a"), {}):
        before = [x for x, *_ in found.kernels[:-1]]
        assert all(r.free <= {*x.axes} or r is x.carried[0] for x in before for r in x.carried), "of all its steps"
        assert not before or len(before[0].carried) == 2


def test_a_long_row_beside_what_is_looked_up_is_shared() -> None:
    """What a factorization machine adds up: weights of features, and products with long rows, which do not move."""

    def summed(i: Any, table: Any, x: Any, w: Any) -> Any:
        return table[i].sum(1) + x @ w

    i = torch.empty(2048, 26, dtype=torch.int64, device="meta")
    table, x, w = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((260000,), (2048, 400), (400,)))
    found = lowering_of(summed, (i, table, x, w), libraries="never")
    assert {e.rule for e in found.log.events if e.pass_name == "schedule" and e.fired} == {"share"}
    assert all(windows.window(x, gpu("sm_90a")) is None for x in found.at("tile").loop.steps)


def patches_normed(x: Any, w: Any) -> Any:
    """The first layer of a transformer of overlapping patches."""
    return F.layer_norm(F.unfold(x, 7, stride=4, padding=2).transpose(1, 2), (147,), w)


def test_a_norm_of_overlapping_windows_is_found_once() -> None:
    """Threads share a window's sums; a thread of a few of its points would find them for itself."""
    x, w = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((32, 3, 224, 224), (147,)))
    found = lowering_of(patches_normed, (x, w), libraries="never")
    assert {e.rule for e in found.log.events if e.pass_name == "schedule" and e.fired} == {"share"}


def along_channels(x: Any, w: Any) -> Any:
    """A convolution of words along time, which the next layer has channels first."""
    return F.conv1d(x.transpose(1, 2), w, padding=3, groups=x.shape[2])


def unpooled(g: Any, at: Any) -> Any:
    """The gradient of a pooling, of which what comes back lies channels last and the image does not."""
    image = at.new_empty((*at.shape[:2], 2 * at.shape[2], 2 * at.shape[3]), dtype=g.dtype)
    return torch.ops.aten.max_pool2d_with_indices_backward(g, image, [3, 3], [2, 2], [1, 1], [1, 1], False, at)


def pooled(*shape: int, channels_last: bool = True) -> tuple[Any, Any]:
    """A gradient, and where the largest of each window are."""
    at = F.max_pool2d(torch.randn(*shape[:2], 2 * shape[2], 2 * shape[3]), 3, 2, 1, return_indices=True)[1]
    g = torch.randn(shape).to(torch.bfloat16)
    return g.to(memory_format=LAST) if channels_last else g, at


def test_short_windows_across_memory_read_copies() -> None:
    """Lanes along the results would read a sector of an image for each point of every window."""
    x, w = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((2, 256, 2048), (2048, 1, 4)))
    g, at = (x.to("meta") for x in pooled(4, 64, 56, 56))
    for fn, args in ((along_channels, (x, w)), (unpooled, (g, at))):
        copy, last = lowering_of(fn, args, libraries="never").at("tile").loop.steps
        assert copy.writes[0] in last.reads and copy.reads[0] not in last.reads
    same = lowering_of(unpooled, tuple(x.to("meta") for x in pooled(4, 64, 56, 56, channels_last=False)))
    assert len(same.at("tile").loop.steps) == 1  # nothing lies across


def test_windows_of_copies_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "ACROSS", -math.inf)
    monkeypatch.setattr(windows, "WORTH", 0.0)
    windows.window.cache_clear()
    torch.manual_seed(2)
    right(programs.lowered(along_channels, (r(2, 40, 64), r(64, 1, 4)), "sm_90a"))
    args = pooled(1, 32, 23, 45)
    found = programs.lowered(unpooled, args, "sm_90a")
    windows.window.cache_clear()
    assert len(found.kernels) == 2
    wanted = unpooled(args[0].double(), args[1]).bfloat16()
    assert np.array_equal(found.simulated()[0], to_numpy(wanted))


def pooled_for_a_product(x: Any, w: Any) -> Any:
    """Pooled for a convolution, which takes its channels last."""
    return F.conv2d(F.adaptive_avg_pool2d(x, 3), w)


def pyramid(x: Any, w: Any) -> Any:
    """Pooled twice: a window of a whole image beside others."""
    return F.adaptive_avg_pool2d(x, 1), F.conv2d(F.adaptive_avg_pool2d(x, 6), w)


@pytest.mark.parametrize("fn", [pooled_for_a_product, pyramid])
def test_long_windows_across_memory_are_rows(fn: Any) -> None:
    """Lanes that had one each would lie across images; none is taken again at every point of another."""
    x, w = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((8, 2048, 60, 60), (512, 2048, 1, 1)))
    found = lowering_of(fn, (x, w), libraries="never")
    rules = {s.name: s for s in found.at("tile").loop.steps}
    fired = [e.rule for e in found.log.events if e.pass_name == "schedule" and e.fired and e.subject in rules]
    assert "window" not in fired and fired.count("share") == (2 if fn is pyramid else 1)
    for kernel in rules.values():
        reduces = [r for r in n.accumulators(kernel).values() if isinstance(r, l.Reduce)]
        assert all(r.free == reduces[0].free for r in reduces)


BANDS = """@loop
def f(x: f32[2, 256, 256], y: f32[256, 256, 2]):
    with kernel('bands', bands=f32[64, 2], more=f32[64, 2]):
        for a0 in free(64):
            for a1 in free(2):
                for r0 in reduce(1024):
                    in0 = x[a1, (r0 // 256) + a0 * 4, r0 % 256]
                    in1 = y[r0 % 256, (r0 // 256) + a0 * 4, 0]
                    v0 = mul(in0, in1)
                    in2 = y[r0 % 256, (r0 // 256) + a0 * 4, 1]
                    v1 = mul(in0, in2)
                    acc0 <- sum(v0)
                    acc1 <- sum(v1)
                bands[a0, a1] = acc0
                more[a0, a1] = acc1
    return (bands, more)
"""


@pytest.mark.parametrize(("apart", "windows"), [(4, False), (3, True)])
def test_bands_beside_each_other_are_no_windows(apart: int, windows: bool) -> None:
    """Steps over rows and columns are digits of one axis: 128 threads would go through 1024 of them by themselves, 583
    us by the model where threads that share them take 3.
    """
    (kernel,) = parse(BANDS.replace("a0 * 4", f"a0 * {apart}")).steps
    assert (form_of(kernel) is not None) == windows
    assert windows or estimate(kernel, gpu("sm_90a")).time < 10_000


def preferred(scores: Any, tokens: Any, mask: Any) -> Any:
    """What tokens after the first weigh together, in each of a few sequences."""
    return (scores.gather(2, tokens[:, 1:, None])[..., 0] * mask[:, 1:]).sum(-1)


def test_few_long_windows_are_rows() -> None:
    """Four threads with 511 steps each would wait for memory all the time."""
    tokens = torch.empty(4, 512, dtype=torch.int64, device="meta")
    scores, mask = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((4, 511, 32000), (4, 512)))
    found = lowering_of(preferred, (scores, tokens, mask), libraries="never")
    assert {e.rule for e in found.log.events if e.pass_name == "schedule" and e.fired} == {"share"}


def test_what_rows_do_not_know_is_summed_once() -> None:
    """As forward derivatives have products with zeros: sums that no row has a part in."""
    x, w, v = (torch.empty(s, dtype=torch.float32, device="meta") for s in ((4096, 256), (256, 256), (256,)))
    found = lowering_of(lambda x, w, v: v.expand_as(x) @ w + x, (x, w, v), libraries="never")
    *first, last = found.at("tile").loop.steps
    assert first and all(s.buffer.type.static_shape[-1] == 256 for x in first for s in x.stores)
    assert not any(isinstance(r, l.Reduce) for r in n.accumulators(last).values())


@pytest.mark.parametrize(("taps", "alone"), [(25, True), (40, False)])
def test_threads_have_short_rows_beside_which_most_is_computed(taps: int, alone: bool) -> None:
    """Filters of pixels: their softmax is over what lies side by side, and all else is computed for each pixel. Lanes
    that share a row would all do that.
    """

    def filtered(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(k.view(8, 256, 256, taps), -1)
        return sum(weights[..., n] * torch.roll(x, n % 5, 2) for n in range(taps))  # type: ignore[return-value]

    given = torch.empty(8, 256, 256, device="meta"), torch.empty(8, 256, 256 * taps, device="meta", dtype=torch.float16)
    done = lowering(capture(filtered, given, {}).program, Options(target="sm_90a", libraries="never")).at("tile")
    last = str(done.schedules[-1][1])
    assert ("site" not in last) is alone, last


@pytest.mark.parametrize(("size", "taken"), [(128, 4), (16, 16)])
def test_a_block_gathers_from_what_its_cache_holds(size: int, taken: int) -> None:
    """Planes of 32 KB, of which data says where they are read: with four of 32 channels in a block it took
    29.2 us on an H200, with sixteen 31.7. Of small planes a block reads more.
    """
    x, at = torch.randn(8, 32, size, size).bfloat16(), torch.rand(8, 128, 128, 2).bfloat16()
    found = lowering_of(lambda x, at: F.grid_sample(x, at, align_corners=False), (x, at))
    ((_, schedule),) = found.at("tile").schedules
    planes = math.prod(x.size for x in dict(schedule.axes)["a1"] if x.level != "grid")
    assert planes == taken


def test_many_short_sums_have_few_ways() -> None:
    def sums(x: Any) -> Any:
        z = x[:, 0]
        for i in range(12):
            z = z * (x[:, i : i + 3 + i % 5] * z[:, None]).sum(1)  # each waits for the one before it
        return z

    program = lowering(capture(sums, (r(1 << 17, 32),)).program, Options(target="sm_90a")).at("loop")
    (kernel,) = program.steps
    form = form_of(kernel)
    assert form is not None and len(form.loops) == 12
    assert len(form.serial) <= 13


def test_a_product_is_priced_as_the_window_that_it_is() -> None:
    """Its tiles would be mostly empty, so it runs as a window, and that is what `explain` says of it."""
    w = torch.empty((256, 8, 3, 3), dtype=torch.bfloat16, device="meta")
    x = torch.empty((16, 256, 56, 56), dtype=torch.bfloat16, device="meta")
    found = lowering_of(lambda x, w: F.conv2d(x, w, padding=1, groups=32), (x, w), libraries="never")
    kernel = found.at("tile").loop.steps[-1]
    way = windows.window(kernel, gpu("sm_90a"))
    assert way is not None and estimate(kernel, gpu("sm_90a")).time == way.time < 100e3


@pytest.mark.parametrize("size", [7, 56])
@pytest.mark.parametrize("last", [False, True])
def test_the_fastest_way_is_found_among_few(size: int, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the first of the fastest of all ways, of which most are never counted to the end."""
    fn, args = depthwise_of(16, 96, size, size, taps=3, last=last)
    form = form_of(lowering_of(fn, args, libraries="never").at("loop").steps[-1])
    assert form is not None
    found = [*windows._threads(form, gpu("sm_90a"))]
    asked: list[Any] = []
    monkeypatch.setattr(windows, "lines_of", lambda *x: asked.append(x) or lines_of(*x))
    best = windows._best(found)
    few = len(asked)
    every = ((w.time, w.busy, n) for n, x in enumerate(found) for w in x.ways() if w.registers <= windows.REGISTERS)
    assert best is not None and (best.time, best.busy, found.index(best.threads)) == min(every)
    assert few < len(asked) / 3
