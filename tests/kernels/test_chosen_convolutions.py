"""What is chosen for convolutions of PyTorch in 16 bits: boxes by TMA on the tensor cores, whatever came before and
comes after them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels import programs
from tests.kernels.programs import Lowered

from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile.estimate import estimate
from terrazzo.rules.loop_to_tile.products import boxes
from terrazzo.rules.loop_to_tile.products.packed import packed

LAST = torch.channels_last
ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def t(*shape: int, dtype: torch.dtype = torch.bfloat16, last: bool = True) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    x = torch.randn(shape).to(dtype)
    return x.to(memory_format=LAST) if last and len(shape) == 4 else x


def lowered(fn: Any, args: tuple[Any, ...], **options: Any) -> Lowered:
    """A function down to kernels of ours."""
    return programs.lowered(fn, args, "sm_90a", **options)


def right(found: Lowered, ulps: float = 2.0) -> None:
    """The kernels give what PyTorch gives in float64, as exactly as rounding allows."""
    dtype = next(x.dtype for x in found.args if isinstance(x, torch.Tensor))
    exact = found.fn(*(x.double() for x in found.args)).numpy()
    ours = found.simulated()[0].astype(np.float64)
    assert np.abs(ours - exact).max() <= ulps * ULP[dtype] * np.abs(exact).max()


def uses(found: Lowered) -> list[tuple[str, bool, bool]]:
    """Of every kernel: its name, whether it multiplies by warpgroups, whether boxes come by TMA."""
    return [
        (x.name, *(any(isinstance(s, kind) for s in k.walk(x.body)) for kind in (k.MultiplyAsync, k.TensorLoad)))
        for x in found.kernels
    ]


def conv(**options: Any) -> Callable[..., torch.Tensor]:
    return lambda x, w: F.conv2d(x, w, **options)


BOXES = {
    "3 x 3": (conv(padding=1), t(2, 64, 8, 8), t(64, 64, 3, 3)),
    "in half": (conv(padding=1), t(2, 64, 8, 8, dtype=torch.float16), t(64, 64, 3, 3, dtype=torch.float16)),
    "ragged": (conv(padding=1), t(3, 72, 7, 9), t(40, 72, 3, 3)),
    "no padding": (conv(), t(2, 64, 10, 10), t(64, 64, 3, 3)),
    "dilated": (conv(padding=2, dilation=2), t(2, 64, 9, 9), t(64, 64, 3, 3)),
    "every second": (conv(padding=1, stride=2), t(2, 64, 16, 16), t(64, 64, 3, 3)),
    "few channels": (conv(padding=1), t(2, 16, 8, 8), t(64, 16, 3, 3)),
    "in groups": (conv(padding=1, groups=2), t(2, 64, 8, 8), t(96, 32, 3, 3)),
    "1 x 5": (conv(padding=(0, 2)), t(2, 64, 8, 8), t(64, 64, 1, 5)),
    "in one dimension": (
        lambda x, w: F.conv1d(x, w, padding=1), t(4, 64, 40).mT.contiguous().mT, t(64, 64, 3).mT.contiguous().mT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOXES)
def test_boxes_are_chosen(name: str) -> None:
    fn, *args = BOXES[name]
    found = lowered(fn, tuple(args))
    assert uses(found) == [("convolution", True, True)]
    right(found)


PARTS = {
    **{name: BOXES[name] for name in ("3 x 3", "ragged", "every second", "in groups", "1 x 5")},
    "channels first": (conv(padding=1), t(2, 64, 8, 8, last=False), t(64, 64, 3, 3, last=False)),
    "in three dimensions": (lambda x, w: F.conv3d(x, w, padding=1), t(2, 32, 4, 8, 8), t(32, 32, 3, 3, 3)),
}


@pytest.mark.parametrize("name", PARTS)
def test_convolutions_in_float32_multiply_parts(name: str) -> None:
    """In boxes, as exactly as products do. Where channels come first, parts lie channels last all the same."""
    fn, *args = PARTS[name]
    torch.manual_seed(1)
    args = [torch.randn_like(x, dtype=torch.float32, memory_format=torch.preserve_format) for x in args]
    found = lowered(fn, tuple(args))
    *_, product = uses(found)
    assert product == ("convolution", True, True)
    exact, (ours,) = fn(*(x.double() for x in args)).numpy(), found.simulated()
    assert np.sqrt(((ours - exact) ** 2).mean() / (exact**2).mean()) <= 1.5e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patches_without_a_border_are_dear(dtype: torch.dtype) -> None:
    """A layer of wav2vec took 372 us with patches in bfloat16, 225 of them for these; in boxes 250 (H100)."""
    args = [torch.empty(s, dtype=dtype, device="meta") for s in ((8, 512, 12799), (512, 512, 3))]
    program = capture(lambda x, w: F.conv1d(x, w, stride=2), tuple(args), {}).program
    found = lowering(program, Options(target="sm_90a", libraries="never"))
    assert any(e.rule == "boxes" and e.fired for e in found.log.events)
    assert all(b.type.numel <= 8 * 512 * 12800 for s in found.loop.steps for b in s.writes)


def test_parts_of_an_image_are_made_once() -> None:
    """For all convolutions that read it."""

    def fn(x: Any, w: Any, v: Any) -> Any:
        return F.conv2d(x, w, padding=1), F.conv2d(x, v, padding=2, dilation=2)

    args = [torch.randn(s) for s in ((2, 64, 8, 8), (64, 64, 3, 3), (32, 64, 3, 3))]
    steps = lowered(fn, tuple(args)).lowering.loop.steps
    assert sum(b.name.startswith("x_") for s in steps for b in s.writes) == 3


def test_what_follows_is_in_the_same_kernel() -> None:
    def fn(x: Any, w: Any, b: Any, scale: Any, y: Any) -> torch.Tensor:
        return F.relu(F.conv2d(x, w, b, padding=1) * scale[:, None, None] + y)

    args = (t(2, 64, 8, 8), t(64, 64, 3, 3), t(64), t(64), t(2, 64, 8, 8))
    found = lowered(fn, args)
    assert uses(found) == [("relu", True, True)]
    right(found, 4.0)


@pytest.mark.parametrize(
    ("image", "filters", "copied"), [(False, False, ["x", "w"]), (True, False, ["w"]), (False, True, ["x"])]
)
def test_what_lies_otherwise_is_copied_first(image: bool, filters: bool, copied: list[str]) -> None:
    found = lowered(conv(padding=1), (t(2, 64, 8, 8, last=image), t(64, 64, 3, 3, last=filters)))
    *copies, last = uses(found)
    assert copies == [(f"convolution_{x}", False, False) for x in copied]
    assert last == ("convolution", True, True)
    right(found)


@pytest.mark.parametrize(("channels", "last"), [(52, True), (20, False), (33, True)])
def test_channels_of_any_number_are_copied_in_even_rows(channels: int, last: bool) -> None:
    """Rows of pixels begin at multiples of 16 bytes then, as TMA takes them."""
    found = lowered(conv(padding=1), (t(2, channels, 16, 16, last=last), t(channels, channels, 3, 3)))
    *copies, product = uses(found)
    assert copies == [(f"convolution_{x}", False, False) for x in ("x", "w")]
    assert product == ("convolution", True, True)
    right(found)


def test_rows_that_begin_anywhere_are_no_boxes() -> None:
    (kernel,) = parse(NOT.format(c=12, summand="mul(in0, in1)")).steps
    assert boxes.moved(kernel) == (None, "rows of x do not begin at multiples of 16 bytes")
    *copies, even = packed(kernel)
    assert len(copies) == 2 and boxes.moved(even)[0] is not None


def test_dear_results_of_a_convolution_are_computed_apart() -> None:
    """A batch norm and a hyperbolic tangent take few warps longer than storing the sums, rounded, and reading them."""

    def fn(x: Any, w: Any, b: Any, mean: Any, scale: Any) -> torch.Tensor:
        return torch.tanh(F.batch_norm(F.conv1d(x, w, b, padding=2), mean, scale, scale, b))

    shapes = (16, 512, 800), (512, 512, 5), (512,), (512,), (512,)
    args = tuple(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes)
    found = lowering(capture(fn, args, {}).program, Options(target="sm_90a")).loop
    *_, product, last = (x for x in found.steps if isinstance(x, l.Kernel))
    assert product.stores[0].buffer.type.dtype.name == "bf16" and product.stores[0].buffer in last.reads


def test_a_copy_can_be_pinned() -> None:
    text = 'with schedule("convolution_w", target="sm_90a"):\n    a0 = grid(1152) * lane(32)\n'
    found = lowered(conv(padding=1), (t(2, 64, 8, 8), t(64, 64, 3, 3, last=False)), schedules=(text,))
    assert found.kernels[0].grid == 1152
    right(found)


def test_one_tap_is_a_plain_product_of_pixels() -> None:
    found = lowered(conv(), (t(2, 64, 32, 32), t(64, 64, 1, 1)))
    assert uses(found) == [("convolution", True, True)]
    (kernel,) = found.kernels
    load = next(s for s in k.walk(kernel.body) if isinstance(s, k.TensorLoad) and s.source.name == "x")
    assert load.tensor.shape == (2048, 64)  # images, rows and columns are one
    assert any(isinstance(s, k.TensorStore) and s.tensor.shape == (2048, 64) for s in k.walk(kernel.body))
    right(found)


@pytest.mark.parametrize(
    ("fn", "args", "on_matrix"),
    [
        (conv(padding=1, groups=64), (t(2, 64, 8, 8), t(64, 1, 3, 3)), False),
        (conv(padding=1), (t(8, 3, 64, 64), t(64, 3, 3, 3)), True),
    ],
    ids=["depthwise", "three channels"],
)
def test_few_channels(fn: Callable[..., torch.Tensor], args: tuple[torch.Tensor, ...], on_matrix: bool) -> None:
    """What is no product of matrices stays on CUDA cores; 27 numbers at a point are enough for tensor cores."""
    found = lowered(fn, args)
    assert any(multiplies for _, multiplies, _ in uses(found)) is on_matrix
    if not on_matrix:
        right(found)


def test_two_convolutions_that_are_added_stay_two_kernels() -> None:
    def fn(x: Any, w: Any, y: Any, v: Any) -> torch.Tensor:
        return F.conv2d(x, w, padding=1) + F.conv2d(y, v)

    found = lowered(fn, (t(2, 64, 8, 8), t(64, 64, 3, 3), t(2, 64, 8, 8), t(64, 64, 1, 1)))
    assert [multiplies for _, multiplies, _ in uses(found)] == [True, True]
    right(found, 4.0)


def strides(found: Lowered) -> dict[str, bool]:
    """Whether the channels of every image that is stored lie side by side."""
    kernels = [s for s in found.lowering.loop.steps if isinstance(s, l.Kernel)]
    return {b.name: b.type.element_strides[1] == 1 for s in kernels for b in s.writes if b.type.rank == 4}


class Two(torch.nn.Module):
    """Two convolutions with a pooling between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Conv2d(64, 64, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.max_pool2d(self.first(x), 2))


@pytest.mark.parametrize("last", [True, False])
def test_images_lie_as_convolutions_read_them(last: bool) -> None:
    """Temporaries always do; results where PyTorch's do."""
    torch.manual_seed(0)
    module = Two().bfloat16().eval()
    module = module.to(memory_format=LAST) if last else module
    x = t(2, 64, 16, 16, last=last)
    found = lowered(module, (x,))
    stored = strides(found)
    (result,) = found.lowering.loop.results
    assert stored.pop(result.name) == last == module(x).is_contiguous(memory_format=LAST)
    assert len(stored) == (2 if last else 5) and all(stored.values())  # channels first, three tensors are copied
    exact = module.double()(x.double()).detach().numpy()
    assert np.abs(found.simulated()[0].astype(np.float64) - exact).max() <= 2.0**-6 * np.abs(exact).max()


def test_the_estimate_knows_boxes() -> None:
    found = lowered(BOXES["3 x 3"][0], BOXES["3 x 3"][1:])
    kernel = found.lowering.loop.steps[0]
    assert isinstance(kernel, l.Kernel)
    image, _ = boxes.moved(kernel)
    assert image is not None
    best = boxes.plans(image, gpu("sm_90a"))[0]
    assert estimate(kernel, gpu("sm_90a")).time == best.time


def test_boxes_that_need_equally_many_registers_are_tried_twice_at_most() -> None:
    """Where one spills, those that differ in its sides only do."""
    shapes = torch.empty(8, 256, 28, 28, dtype=torch.bfloat16), torch.empty(256, 256, 3, 3, dtype=torch.bfloat16)
    found = lowered(conv(padding=1), tuple(x.to(memory_format=LAST) for x in shapes))
    kernel = next(s for s in found.lowering.loop.steps if isinstance(s, l.Kernel))
    image, _ = boxes.moved(kernel)
    assert image is not None
    plans = boxes.plans(image, gpu("sm_90a"))
    alike = Counter((x.tile.groups, x.tile.n) for x in plans)
    assert len(plans) == boxes.MOST and set(alike.values()) == {boxes.ALIKE}
    assert list(plans) == sorted(plans, key=lambda x: x.time)


NOT = """\
@loop
def f(x: bf16[2, 8, 8, {c}], w: bf16[64, 3, 3, {c}], v: bf16[64, 3, 3, {c}]):
    with kernel('y', y=bf16[2, 6, 6, 64]):
        for a0 in free(2):
            for a1 in free(6):
                for a2 in free(6):
                    for a3 in free(64):
                        for r0, r1, r2 in reduce(3, 3, {c}):
                            in0 = f32(x[a0, a1 + r0, a2 + r1, r2])
                            in1 = f32(w[a3, r0, r1, r2])
                            in2 = f32(v[a3, r0, r1, r2])
                            acc0 <- sum({summand})
                        y[a0, a1, a2, a3] = bf16(acc0)
    return (y,)
"""


@pytest.mark.parametrize(
    ("c", "summand", "why"),
    [
        (16, "mul(in0, mul(in1, in2))", "w is computed on its way"),
        (
            16,
            "add(mul(in0, in1), mul(f32(x[a0, a1 + r1, a2 + r0, r2]), in2))",
            "it sums 2 products in a step, of what is read at several places",
        ),
        (16, "mul(in0, f32(w[a3, r0, r1, 15 - r2]))", "x and w are contiguous along no axis that both are summed over"),
    ],
)
def test_why_a_sum_of_products_is_no_boxes(c: int, summand: str, why: str) -> None:
    program = parse(NOT.format(c=c, summand=summand))
    (kernel,) = program.steps
    assert boxes.moved(kernel) == (None, why)
    found = lowering(program, Options(target="sm_90a"))
    told = [e.reason for e in found.log.events if e.rule == "tensor_cores"]
    on_warpgroups = [isinstance(s, k.MultiplyAsync) for x in found.at("kernel").steps for s in k.walk(x.body)]
    assert any(why in x for x in told) or any(on_warpgroups)  # after its operands were stored patch by patch


def test_filters_with_several_axes_are_no_boxes() -> None:
    text = NOT.format(c=16, summand="mul(in0, in1)")
    for before, after in (
        ("w: bf16[64, 3, 3, 16]", "w: bf16[2, 32, 3, 3, 16]"), ("y=bf16[2, 6, 6, 64]", "y=bf16[2, 6, 6, 2, 32]"),
        ("w[a3, r0", "w[a3, a4, r0"), ("f32(v[a3, r0, r1, r2])", "f32(v[a3 + a4, r0, r1, r2])"),
        ("y[a0, a1, a2, a3]", "y[a0, a1, a2, a3, a4]"),
    ):  # fmt: skip
        assert before in text
        text = text.replace(before, after)
    inner = "                    for a3 in free(64):\n"
    head, rest = text.split(inner)
    *body, last, _ = rest.split("\n")
    loops = ["    " * 5 + "for a3 in free(2):", "    " * 6 + "for a4 in free(32):"]
    (kernel,) = parse("\n".join([head.rstrip("\n"), *loops, *("    " + x for x in body), last, ""])).steps
    assert boxes.moved(kernel) == (None, "w has 2 axes of its own, and instructions take one")


@pytest.mark.parametrize(
    ("image", "filters", "called"),
    [
        ((32, 128, 28, 28), (128, 128, 3, 3), False),
        ((32, 512, 7, 7), (512, 512, 3, 3), False),
        ((32, 64, 57, 57), (64, 64, 3, 3), True),  # every second of an odd number
    ],
)
def test_the_library_is_called_where_boxes_are_slow(
    image: tuple[int, ...], filters: tuple[int, ...], called: bool
) -> None:
    given = torch.empty(image, dtype=torch.bfloat16), torch.empty(filters, dtype=torch.bfloat16)
    x, w = (v.to(memory_format=LAST) for v in given)
    found = programs.lowered(conv(padding=1, stride=2 if image[2] == 57 else 1), (x, w), "sm_90a", libraries="auto")
    assert any(isinstance(s, l.Call) for s in found.lowering.loop.steps) == called


def shuffled(x: torch.Tensor, w: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return F.pixel_shuffle(F.conv2d(x, w, c, padding=1), 2)


def test_a_convolution_whose_pixels_are_shuffled_is_one() -> None:
    """Each of its axes is one factor's own again: what was one axis of the result is a row's and a filter's digit."""
    found = lowered(shuffled, (t(2, 64, 8, 8), t(128, 64, 3, 3), t(128)))
    assert uses(found)[-1][1:] == (True, True) and len(found.kernels) == 1
    right(found)


def test_no_shuffle_takes_a_convolution_off_the_tensor_cores() -> None:
    """At a real size, where memory runs through the image along its pixels."""
    shuffles = (lambda y: F.pixel_shuffle(y, 2), lambda y: y.view(8, 64, 4, -1).mT)
    for fn, dtype in (*((fn, torch.bfloat16) for fn in shuffles), (shuffles[0], torch.float32)):
        x, w = (torch.empty(s, dtype=dtype, device="meta") for s in ((8, 64, 96, 96), (256, 64, 3, 3)))
        shuffle = lambda x, w, fn=fn: fn(F.conv2d(x, w, padding=1))  # noqa: E731
        steps = lowering(programs.capture(shuffle, (x, w), {}).program, Options(target="sm_90a", libraries="never"))
        kernels = [s for s in steps.at("kernel").steps if isinstance(s, k.Kernel)]
        assert any(isinstance(s, k.MultiplyAsync) for x in kernels for s in k.walk(x.body))
