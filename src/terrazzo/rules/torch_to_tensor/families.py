"""Families of ops that libraries compute: which an op is of, and how many operations it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.types import Type
from terrazzo.rules.torch_to_tensor.scatter import PUTS, SCATTER_ADD, UNSORTED

Operations = Callable[..., float]
"""How many operations a library computes, given an op's arguments, its first result, and a tile."""
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
"""Ops whose results lie row by row whatever they are given."""


def family_of(op: Any) -> tuple[str, Operations]:
    """The family of an op with these arguments, and its operations."""
    if is_convolution(op) and is_depthwise(convolved(op)):
        last = channels_at_end(convolved(op)[0].type)
        return ("depthwise last", _taps) if last else ("depthwise", _taps_and_more)
    family, operations = FAMILIES[op.name]
    if family == "index put" and True in op.args[3:4]:
        return f"{family} added", _placed
    if family == "embedding gradient" and op.args[1].type.numel > UNSORTED:
        return f"{family} sorted", _looked_up
    if op.name == SCATTER_ADD and op.args[2].type.rank and not op.args[2].type.element_strides[-1]:
        return f"{family} of rows", operations
    if op.name in ORDERED:
        return family, partial(operations, length=ordered_along(op))
    if operations is _rows:
        x, dim = op.args[0].type, op.args[1]
        if x.rank == 0 or x.numel == x.shape[dim]:
            return f"{family} of one row", _passes
        if x.element_strides[dim] != 1:
            return "scan of columns", _steps
    return family, operations


def ordered_along(op: Any) -> int:
    """The elements of each row that an op orders."""
    shape, place = op.args[0].type.static_shape or (1,), ORDERED[op.name]
    dim: int = dict(op.kwargs).get("dim", op.args[place] if len(op.args) > place else -1)
    return int(shape[dim])


def sorting(op: Any) -> tuple[int, bool]:
    """The dimension that a sort goes along, and whether it descends."""
    given = dict(zip(("dim", "descending"), op.args[1:], strict=False)) | dict(op.kwargs)
    return given.get("dim", -1), given.get("descending", False)


def inverts(op: Any, order: Any) -> bool:
    """Whether an op sorts an order that a sort along the same dimension gave: what it gives is the inverse of that."""
    first = order.x if getattr(order, "index", None) == 1 else None
    if op.name not in SORTS or getattr(first, "name", "") not in SORTS or not (rank := order.type.rank):
        return False
    (dim, descends), (other, _) = sorting(op), sorting(first)
    return not descends and (dim - other) % rank == 0


def channels_at_end(image: Type) -> bool:
    """Whether an image has its channels beside each other in memory."""
    return image.rank > 2 and image.shape[1] != 1 and image.element_strides[1] == 1


def convolved(op: Any) -> Sequence[Any]:
    """What a convolution is given, image and weights first, or the one whose gradients an op computes."""
    return op.args[1:10] if op.name == BACKWARD else op.args  # type: ignore[no-any-return]


def is_convolution(op: Any) -> bool:
    """Whether an op is a convolution, or has its gradients."""
    return op.name in (FORWARD, BACKWARD)


def arithmetic(op: Any) -> float:
    """The operations of a convolution, or of one of its gradients."""
    return _convolution(convolved(op), op.args[0].type if op.name == BACKWARD else first_result(op), 1)


def is_depthwise(args: Sequence[Any]) -> bool:
    """Whether a convolution has a channel in each of its groups."""
    return bool(args[8] > 1 and args[1].type.shape[1] == 1 and args[1].type.shape[0] >= args[8])


def kind_of(op: Any) -> str:
    return next((str(x.type.dtype.name) for x in tensors_in(op.args)), "")


def first_result(op: Any) -> Type:
    """The type of its result, or of the first of several."""
    return results_of(op)[0]


def results_of(op: Any) -> list[Type]:
    """The types of its results."""
    if not isinstance(op, Aten):
        return [x.type for x in op.writes]
    return [x for x in (op.result if isinstance(op.result, tuple) else (op.result,)) if x is not None]


def read_by(op: Any) -> list[Any]:
    """The tensors that are read: for an image's gradient not the image, for that of weights not the weights."""
    found = tensors_in(op.args)
    if op.name == BACKWARD:
        of_image, of_weights, _ = op.args[-1]
        found = [found[0], *found[1 : 1 + of_weights], *found[2 : 2 + of_image]]
    return found


def tensors_in(args: Sequence[Any]) -> list[Any]:
    """The tensors among arguments, in lists of them too."""
    found = [x for a in args for x in (a if isinstance(a, tuple | list) else (a,))]
    return [x for x in found if isinstance(getattr(x, "type", None), Type)]


def _tiles(extent: int, tile: int) -> int:
    return -(-extent // tile) * tile


def _product(args: Sequence[Any], out: Type, tile: int) -> float:
    """Of x @ y, the last two tensors."""
    x, y = (a.type.static_shape for a in tensors_in(args)[-2:])
    *batch, m, k = x
    n = y[-1]
    return float(2 * math.prod(batch) * _tiles(m, tile) * _tiles(n, tile) * k)


def _convolution(args: Sequence[Any], out: Type, tile: int) -> float:
    """Of every point of the result (of the input, where the convolution is transposed) with every weight, channels in
    whole tiles.
    """
    x, w, transposed, groups = args[0].type.static_shape, args[1].type.static_shape, args[6], args[8]
    points = x if transposed else out.static_shape
    spatial = len(w) - 2
    pixels = math.prod(points[-spatial:]) * (points[0] if len(points) > spatial + 1 else 1)
    own = _tiles(w[0] // groups, tile), _tiles(w[1], tile)
    return float(2 * pixels * groups * math.prod(own) * math.prod(w[2:]))


def _taps(args: Sequence[Any], out: Type, tile: int) -> float:
    """Of every point of the result (of the input, where the convolution is transposed) with the taps of its filter."""
    points = args[0].type.static_shape if args[6] else out.static_shape
    return float(2 * math.prod(points) * math.prod(args[1].type.static_shape[2:]))


def _taps_and_more(args: Sequence[Any], out: Type, tile: int) -> float:
    """The same, and what finding a point costs: as much as some taps."""
    taps: int = math.prod(args[1].type.static_shape[2:])
    return _taps(args, out, tile) * (taps + POINT) / taps


POINT = 8
"""As many taps as a point costs PyTorch's depthwise kernels besides: a thousand take 10 ns at 3x3, 35 at 7x7."""


def _passes(args: Sequence[Any], out: Type, tile: int) -> float:
    """An operation for every element: memory decides."""
    return float(math.prod(out.static_shape))


def _given(args: Sequence[Any], out: Type, tile: int) -> float:
    """An operation for every element that is given."""
    return float(math.prod(args[0].type.static_shape))


def _rows(args: Sequence[Any], out: Type, tile: int) -> float:
    """Elements of rows that are scanned: a block of PyTorch's kernel has some, and so many of them fill the machine."""
    return float(max(math.prod(out.static_shape), ROWS * out.static_shape[args[1]]))


ROWS = 256
"""As many rows as fill the machine where PyTorch scans them: a row takes 2.8 ns an element, alone or beside 255."""


def _steps(args: Sequence[Any], out: Type, tile: int) -> float:
    """Steps of columns that are scanned side by side."""
    return float(out.static_shape[args[1]])


def _written(args: Sequence[Any], out: Type, tile: int) -> float:
    """Places that are written one by one."""
    return float(math.prod(args[2].type.static_shape))


def _added(args: Sequence[Any], out: Type, tile: int) -> float:
    """Elements that are added."""
    return float(math.prod(args[3].type.static_shape))


def _placed(args: Sequence[Any], out: Type, tile: int) -> float:
    """Rows that are sorted by where they are added."""
    return float(max(x.type.numel for x in args[1] if x is not None))


def _looked_up(args: Sequence[Any], out: Type, tile: int) -> float:
    """Rows that are sorted by where they go."""
    return float(args[1].type.numel)


def _sorted(args: Sequence[Any], out: Type, tile: int, length: int = 1) -> float:
    """Elements of rows that are sorted, each by a block that has so many places: 32, 128, or 1024."""
    places = next((n for n in (32, 128, 1024) if length <= n), length)
    return _given(args, out, tile) / max(length, 1) * places


def _selected(args: Sequence[Any], out: Type, tile: int, length: int = 1) -> float:
    """Elements of rows of which some are selected, and for each row as many as what it costs besides."""
    return _given(args, out, tile) / max(length, 1) * (length + SELECTED)


SELECTED = 40
"""As many elements as a row costs of which some are selected."""
SPECIAL = ("digamma", "polygamma")
"""Functions of an element that our kernels compute in float64, and PyTorch in its type."""
FORWARD, BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"
"""A convolution, and its gradients."""


SORTS = ("aten.sort.default", "aten.sort.stable")
ORDERED = {
    **dict.fromkeys(SORTS, 1), "aten.topk.default": 2, "aten.kthvalue.default": 2,
    "aten.median.dim": 1, "aten.nanmedian.dim": 1,
}  # fmt: skip
"""Ops that order the elements of rows, and where among their arguments the dimension stands that these go along."""


ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
"""Attention on a processor: it is there where it was traced to be called."""


ON_A_PROCESSOR = (
    ("product", "bf16"), ("attention", "f16"), ("attention", "f64"),
    *((family, kind) for family in ("sampling", "resampling", "maximum", "attention") for kind in ("f32", "bf16")),
)  # fmt: skip
"""Families that are called on processors only, with their types."""
FAMILIES: dict[str, tuple[str, Operations]] = {
    **{f"aten.{name}.default": ("product", _product) for name in PRODUCTS},
    FORWARD: ("convolution", _convolution),
    BACKWARD: ("convolution", _convolution),
    "aten.cumsum.default": ("scan", _rows),
    "aten.cumprod.default": ("scan", _rows),
    "aten.logcumsumexp.default": ("log scan", _rows),
    "aten.scatter.src": ("scatter", _written),
    "aten.scatter.value": ("scatter", _written),
    "aten.scatter_add.default": ("scatter", _written),
    "aten.scatter_reduce.two": ("scatter with", _written),
    "aten.index_add.default": ("index add", _added),
    "aten.index_reduce.default": ("scatter with", _added),
    **dict.fromkeys((*PUTS, "aten.index_copy.default"), ("index put", _passes)),
    "aten.embedding_dense_backward.default": ("embedding gradient", _passes),
    "aten.cat.default": ("cat", _passes),
    "aten.stack.default": ("cat", _passes),
    "aten.grid_sampler_2d.default": ("sampling", _passes),
    **{
        f"aten.upsample_{way}{back}.default": ("resampling", _passes)
        for way in ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d")
        for back in ("", "_backward")
    },
    "aten.adaptive_max_pool2d.default": ("maximum", _given),
    "aten.masked_scatter.default": ("masked scatter", _passes),
    **dict.fromkeys(SORTS, ("sort", _sorted)),
    "aten.topk.default": ("topk", _selected),
    **dict.fromkeys(("aten.kthvalue.default", "aten.median.dim", "aten.nanmedian.dim"), ("kth value", _selected)),
    **dict.fromkeys((f"{ATTENTION}.default", f"{ATTENTION}_backward.default"), ("attention", _passes)),
    **{f"aten.{name}.default": ("special", _passes) for name in SPECIAL},
    **{f"aten.max_pool{n}d_with_indices_backward.default": ("pooling", _passes) for n in (2, 3)},
}
"""The family of an op, and how many operations its library computes, given its arguments, result and tile."""
