"""The suite `gradients`: those of convolutions, of an image and of weights, each by itself."""

from __future__ import annotations

from typing import Any

from terrazzo.bench.gpu_suites import CONVOLUTION, Case, Made, convolution_name, normal

SIZES = (*CONVOLUTION, (32, 256, 512, 56, 1, 2, True), (16, 64, 64, 128, 3, 1, True), (8, 320, 320, 64, 3, 1, False))


def gradients() -> tuple[Case, ...]:
    """Of the convolutions of the suite `convolution` and some more, in both types."""
    return tuple(_case(*size, dtype, which) for dtype in ("bf16", "f32") for which in (0, 1) for size in SIZES)


def _case(n: int, c: int, k: int, size: int, taps: int, stride: int, last: bool, dtype: str, which: int) -> Case:
    import torch

    pad, after = taps // 2, -(-size // stride)
    options = (None, [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], 1, [which == 0, which == 1, False])

    def gradient(grad: Any, x: Any, w: Any) -> Any:
        return torch.ops.aten.convolution_backward(grad, x, w, *options)[which]

    def given() -> tuple[Any, ...]:
        layout = torch.channels_last if last else torch.contiguous_format
        shapes = (n, k, after, after), (n, c, size, size), (k, c, taps, taps)
        return tuple(normal(s, dtype).to(memory_format=layout) for s in shapes)

    def make() -> Made:
        return gradient, given, lambda *a: gradient(*(x.double() for x in a))

    of = ("image", "weights")[which]
    name = f"{of}, {convolution_name(n, c, k, size, taps, stride, last)}"
    images = n * k * after * after + n * c * size * size
    moved = (2 if dtype == "bf16" else 4) * (images + k * c * taps * taps)
    work = 2.0 * n * after * after * k * c * taps * taps
    return Case(name, dtype, make, moved, work, group=of)
