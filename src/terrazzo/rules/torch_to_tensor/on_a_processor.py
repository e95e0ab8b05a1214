"""Which ops of PyTorch are called on a processor, where nothing is priced: by what was measured of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set

from terrazzo.hw.processor import multiplies_bfloat16
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.node import Node, topological
from terrazzo.ir.program import Program
from terrazzo.ir.types import Type, bf16, f32
from terrazzo.rules.torch_to_tensor.families import (
    BACKWARD,
    FAMILIES,
    FORWARD,
    ORDERED,
    channels_at_end,
    first_result,
    inverts,
    is_depthwise,
    ordered_along,
    tensors_in,
)
from terrazzo.rules.torch_to_tensor.library import is_called
from terrazzo.rules.torch_to_tensor.scatter import WRITES, compares_many

WORK = 2e6
"""Operations from which on a call, and storing what a kernel would go on with, takes little beside them."""
WORK_IN_BFLOAT16 = 1e7
"""The same of bfloat16: what is gained is half of the time, and a call takes Python besides."""
WORK_IN_FLOAT32, SIDE, ROWS = 1e8, 64, 96
"""The same of products in float32, whose results have so many columns at least, and rows, or so many where these are
read as they lie: what a kernel would go on with is little beside so many operations.
"""
SHORT = 128
"""Products added up for a score, and for which it is read, on an average, up to which what lies between two products is
better kept where it was made.
"""
POINTS, CUBIC = 20_000, 2
"""Points from which on an image is sampled, or gets its gradient, by a call; and a way that is ours."""
TAPS, TAPS_IN_BFLOAT16 = 25, 49
"""Taps of the filters of images, in float32 and in bfloat16, from which on a library is faster, one channel in each
group and wherever channels lie.
"""
PLACES, CHANNELS, LAST = 256, 32, 16
"""Places of an image, at most, and channels, at least, with which oneDNN is faster than kernels in blocks; and channels
where these are last in memory."""
COMPARED = 16
"""Elements of a row up to which ours compares each with all others to order them: of 16384 rows of 4 to 16 it takes
0.2 to 1.06 of what PyTorch takes (one thread with AVX-512), of 64 up to 5.
"""


def on_a_processor(program: Program, laid_out: Callable[[Node], Type]) -> list[Aten]:
    """The ops of a program of Torch IR that are called on a processor."""
    nodes = topological(program.results)
    chained = products_of_scores(nodes, {*program.results})
    ops = [x for x in nodes if isinstance(x, Aten) and is_called(x) and x not in chained]
    return [x for x in ops if _is_faster(x, laid_out)]


def products_of_scores(nodes: Sequence[Node], results: Set[Node]) -> set[Node]:
    """The products in float32 between which there are numbers that nobody else reads and that take few operations each,
    such as the scores of attention: a kernel that keeps these is worth more than a library's.
    """
    readers: dict[Node, list[Node]] = {}
    for x in nodes:
        for y in dict.fromkeys(x.children):
            readers.setdefault(y, []).append(x)
    pairs = [(x, _only_product(x, readers, results)) for x in nodes if isinstance(x, Aten) and _is_product(x)]
    return {x for first, last in pairs if last is not None and _short(first, last) for x in (first, last)}


def _is_product(x: Node) -> bool:
    return isinstance(x, Aten) and FAMILIES.get(x.name, ("",))[0] == "product"


def _only_product(first: Aten, readers: Mapping[Node, Sequence[Node]], results: Set[Node]) -> Aten | None:
    """The product that alone reads one, or what is made of that; None where there are several, or results between."""
    made: dict[Node, None] = {first: None}
    waiting, last = [first], None
    while waiting:
        x = waiting.pop()
        if x in results:
            return None
        for y in readers.get(x, ()):
            if not _is_product(y):
                waiting += [] if y in made else [y]  # type: ignore[list-item]
                made[y] = None
            elif last not in (None, y):
                return None
            else:
                last = y
    return last  # type: ignore[return-value]


def _short(first: Aten, last: Aten) -> bool:
    """Whether numbers in float32 are made by the first of two products, and read by the last, in few operations."""
    between = math.prod(first_result(first).static_shape)
    work = sum(FAMILIES[x.name][1](x.args, first_result(x), 1) for x in (first, last))
    return first_result(first).dtype is f32 and work <= 2 * 2 * SHORT * between


def _is_faster(op: Aten, laid_out: Callable[[Node], Type]) -> bool:
    """Whether an op is called on a processor: gradients of convolutions, and convolutions in float32 that are work
    enough and are transposed, or have filters of several taps and many channels, and strides or few places, or channels
    last in memory. And products in float32 that are more work and have many rows and columns; all products and
    convolutions in bfloat16 that are work enough, where the processor multiplies such numbers; but of those with a
    channel in each group, which multiply no matrices, the ones whose images have channels last in memory, or whose
    filters are large; images read at places of their own, linearly or the nearest, of which all channels are read at
    once there; images in bfloat16 that are resampled, and gradients of cubic weights; largest elements of windows that
    differ, and gradients of largest elements, which are added where these were; and writes where data says, if ours
    compare many indices; and attention, where it was traced as an op. oneDNN takes 0.3 to 0.93 of our time for the
    gradient of an image, 0.13 to 0.97 for that of weights (two threads; 3x3, 7x7, 1x1, 3 to 256 channels), but 2.1 and
    1.6 for those of 64 channels, channels first, at 56 x 56; 0.16 to 1.0 for transposed convolutions (one thread with
    AVX-512, eleven of one to three dimensions, 64 channels one by one to 512 together); 0.57 to 1.13 for such others
    (3x3 and 2x2, 64 to 512), and 0.73 to 0.87 with 32 channels and strides (AVX2); 0.68 to 0.87 for those whose
    channels are last (AVX2, 3x3 and 5x5, 16 to 128 channels, at 28 x 28 to 56 x 56). For products in float32 0.51 to
    0.83 (one thread with AVX-512; 128 to 1024 rows and columns, alone and in batches, in all four layouts), but 1.2 to
    1.4 for those of 4 to 64 rows with a layer's weights. In bfloat16, which our kernels multiply in float32, 0.32 to
    0.77 for products and 0.23 to 0.67 for convolutions (one thread with AVX-512, without AMX). For those with a channel
    in each group 0.12 to 0.33 where channels are last (3x3 and 7x7, 144 and 384 channels, both types), and where they
    are not 0.31 to 0.72 for 5x5 and 7x7 in float32 and 0.55 to 0.85 for 7x7 in bfloat16, but 1.0 to 6.7 for others (3x3
    to 5x5, 32 to 672 channels). For places of their own 0.39 to 0.56 in float32, and 0.33 to 0.76 in bfloat16; for
    resampled ones in bfloat16 0.4 to 0.9, for a cubic gradient 0.7 to 0.8, for largest ones of windows that differ 0.3,
    and for gradients of largest ones 0.3 to 0.9.
    """
    family, operations = FAMILIES[op.name]
    if family in ("pooling", "sampling"):
        ours = family == "sampling" and op.args[2] == CUBIC
        return not ours and operations(op.args, first_result(op), 1) >= POINTS
    if family == "resampling":
        theirs = first_result(op).dtype is bf16 or op.name == "aten.upsample_bicubic2d_backward.default"
        return theirs and operations(op.args, first_result(op), 1) >= POINTS
    if family == "maximum":  # of windows that differ
        uneven = any(n % m for n, m in zip(op.args[0].type.static_shape[-2:], op.args[1], strict=True))
        return uneven and operations(op.args, first_result(op), 1) >= POINTS
    if family in WRITES:
        return compares_many(op)
    if family == "attention":
        return True
    if op.name in ORDERED:
        return ordered_along(op) > COMPARED and not inverts(op, op.args[0])
    if family not in ("product", "convolution") or op.name == BACKWARD:
        return op.name == BACKWARD
    kind, work = first_result(op).dtype, operations(op.args, first_result(op), 1)
    if op.name == FORWARD and is_depthwise(op.args) and not op.args[6]:
        known = kind is f32 or (kind is bf16 and multiplies_bfloat16())
        taps = op.args[1].type.static_shape[2:]
        large = len(taps) == 2 and math.prod(taps) >= (TAPS if kind is f32 else TAPS_IN_BFLOAT16)
        return known and work >= WORK and (large or channels_at_end(laid_out(op.args[0])))
    if kind is bf16:  # a product with one row, or column, waits for memory
        waits = op.name != FORWARD and 1 in first_result(op).shape[-2:]
        return work >= WORK_IN_BFLOAT16 and not waits and multiplies_bfloat16()
    if kind is f32 and op.name != FORWARD:
        rows, columns = first_result(op).static_shape[-2:]
        x = laid_out(tensors_in(op.args)[-2])
        least = ROWS if x.element_strides[-1] == 1 else SIDE
        return work >= WORK_IN_FLOAT32 and rows >= least and columns >= SIDE
    if kind is not f32 or work < WORK:
        return False
    w, image, strides = op.args[1].type.static_shape, first_result(op).static_shape[2:], op.args[3]
    if op.args[6] or op.args[8] > 1 or math.prod(w[2:]) == 1:
        return bool(op.args[6])
    far = max(strides) > 1 or math.prod(image) <= PLACES
    return (far and w[1] >= CHANNELS) or (w[1] >= LAST and channels_at_end(laid_out(op.args[0])))
