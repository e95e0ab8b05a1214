"""Views, and what rearranges elements: all of them index maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.expr import IntExpr
from terrazzo.ir.types import i64
from terrazzo.rewrite.rule import Rule, need
from terrazzo.rules.torch_to_tensor.common import aten, normalize, result


@aten("view.default", "_unsafe_view.default", "reshape.default", "view_copy.default", "_reshape_alias.default")
def view(node: Aten, x: Any, *args: Any) -> Any:
    """The same elements in row-major order under another shape."""
    return reshaped(x, result(node).shape)


def reshaped(x: Any, shape: Sequence[Any]) -> Any:
    """`reshape`, for empty tensors too."""
    if 0 in tuple(shape):
        return t.literal(0, x.type.dtype, shape)
    return t.reshape(x, shape)


@aten(
    "squeeze.default", "squeeze.dim", "squeeze.dims", "unsqueeze.default", "squeeze_copy.dim", "unsqueeze_copy.default"
)
def squeeze(node: Aten, x: Any, *args: Any) -> Any:
    """Dimensions of extent 1 removed or added."""
    return reshaped(x, result(node).shape)


@aten("permute.default", "permute_copy.default")
def permute(node: Aten, x: Any, perm: Sequence[int]) -> Any:
    """Dimension d of the result is dimension perm[d] of x."""
    return t.permute(x, [normalize(p, x.type.rank) for p in perm])


@aten("transpose.int", "transpose_copy.int")
def transpose(node: Aten, x: Any, a: int, b: int) -> Any:
    """Two dimensions exchanged."""
    perm = list(range(x.type.rank))
    if perm:
        a, b = normalize(a, len(perm)), normalize(b, len(perm))
        perm[a], perm[b] = perm[b], perm[a]
    return t.permute(x, perm)


@aten("t.default", "t_copy.default", "numpy_T.default")
def t_(node: Aten, x: Any) -> Any:
    """The dimensions in reverse order."""
    return t.permute(x, list(reversed(range(x.type.rank))))


@aten("expand.default", "expand_copy.default", "broadcast_to.default")
def expand(node: Aten, x: Any, *args: Any, **kwargs: Any) -> Any:
    """x repeated along dimensions of extent 1."""
    return t.broadcast(x, result(node).shape)


@aten("repeat.default")
def repeat(node: Aten, x: Any, repeats: Sequence[int]) -> Any:
    """x tiled: out[i] = x[i mod extent]."""
    shape = result(node).shape
    if 0 in shape:
        return t.literal(0, x.type.dtype, shape)
    lead = len(shape) - x.type.rank
    here = t.coordinates(shape)
    return t.index_map(x, shape, [here[lead + d] % e for d, e in enumerate(x.type.shape)])


@aten("select.int", "select_copy.int")
def select(node: Aten, x: Any, dim: int, index: int) -> Any:
    """One index of one dimension."""
    dim = normalize(dim, x.type.rank)
    here: list[IntExpr] = list(t.coordinates(result(node).shape))
    here.insert(dim, index % x.type.shape[dim])
    return t.index_map(x, result(node).shape, here)


def slice_bounds(extent: int, start: int | None, end: int | None) -> tuple[int, int]:
    """start and end of a Python slice, within [0, extent]."""
    first, last, _ = slice(start, end).indices(extent)
    return first, max(first, last)


@aten("slice.Tensor", "slice_copy.Tensor")
def slice_(node: Aten, x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    """out[i] = x[start + step * i] along one dimension."""
    dim = normalize(dim, x.type.rank)
    first, _ = slice_bounds(x.type.shape[dim], start, end)
    here: list[IntExpr] = list(t.coordinates(result(node).shape))
    here[dim] = here[dim] * step + first
    return taken(x, result(node).shape, here)


def taken(x: Any, shape: Sequence[Any], index: Sequence[IntExpr]) -> Any:
    """`index_map`, where the result may be empty."""
    return t.literal(0, x.type.dtype, shape) if 0 in tuple(shape) else t.index_map(x, shape, index)


def narrowed(x: Any, dim: int, start: int, length: int) -> Any:
    """`length` elements from `start` along one dimension."""
    shape = list(x.type.shape)
    shape[dim] = length
    here: list[IntExpr] = list(t.coordinates(shape))
    here[dim] = here[dim] + start
    return taken(x, shape, here)


def _pieces(node: Aten, x: Any, dim: int) -> tuple[Any, ...]:
    dim = normalize(dim, x.type.rank)
    out, start = [], 0
    for k in range(len(node.type)):  # type: ignore[arg-type]
        length = result(node, k).shape[dim]
        assert isinstance(length, int)
        out.append(narrowed(x, dim, start, length))
        start += length
    return tuple(out)


@aten("narrow_copy.default")
def narrow(node: Aten, x: Any, dim: int, start: int, length: int) -> Any:
    """`length` elements from `start` along one dimension."""
    dim = normalize(dim, x.type.rank)
    return narrowed(x, dim, start % x.type.shape[dim], length)


@aten("split.Tensor", "split_with_sizes.default", "split_copy.Tensor", "split_with_sizes_copy.default", "chunk.default")
def split(node: Aten, x: Any, sizes: Any, dim: int = 0) -> Any:
    """Consecutive pieces along one dimension."""
    return _pieces(node, x, dim)


@aten("unbind.int", "unbind_copy.int")
def unbind(node: Aten, x: Any, dim: int = 0) -> Any:
    """Every index of one dimension by itself."""
    dim = normalize(dim, x.type.rank)
    count = len(node.type)  # type: ignore[arg-type]
    return tuple(reshaped(narrowed(x, dim, k, 1), result(node, k).shape) for k in range(count))


@aten("cat.default", "concat.default", "concatenate.default")
def cat(node: Aten, xs: Sequence[Any], dim: int = 0) -> Any:
    """The tensors one after the other along one dimension."""
    out = result(node)
    xs = [x for x in xs if x.type.shape != (0,)]  # PyTorch skips legacy empty tensors
    if not xs or 0 in out.shape:
        return t.literal(0, out.dtype, out.shape)
    dim = normalize(dim, out.rank)
    return joined([t.cast(x, out.dtype) for x in xs if x.type.shape[dim] != 0], out.shape, dim)


def joined(xs: Sequence[Any], shape: Sequence[Any], dim: int) -> Any:
    """Concatenation: each piece where its coordinates are, told apart by comparisons."""
    here = t.coordinates(shape)
    position = t.iota(shape, here[dim])
    value, start = None, 0
    for x in xs:
        extent = x.type.shape[dim]
        moved = list[IntExpr](here)
        moved[dim] = here[dim] - start
        piece = t.index_map(x, shape, moved, [moved[dim], extent - 1 - moved[dim]])
        value = piece if value is None else t.where(t.apply("lt", position, t.literal(start, i64, shape)), value, piece)
        start += extent
    return value


@aten("stack.default")
def stack(node: Aten, xs: Sequence[Any], dim: int = 0) -> Any:
    """The tensors along a new dimension."""
    out = result(node)
    dim = normalize(dim, out.rank)
    if 0 in out.shape:
        return t.literal(0, out.dtype, out.shape)
    wide = [t.cast(x, out.dtype) for x in xs]
    return joined([t.reshape(x, (*x.type.shape[:dim], 1, *x.type.shape[dim:])) for x in wide], out.shape, dim)


@aten("flip.default")
def flip(node: Aten, x: Any, dims: Sequence[int]) -> Any:
    """Dimensions backwards."""
    flipped = {normalize(d, x.type.rank) for d in dims}
    here = t.coordinates(x.type.shape)
    if not here:
        return x
    return taken(x, x.type.shape, [x.type.shape[d] - 1 - e if d in flipped else e for d, e in enumerate(here)])


@aten("roll.default")
def roll(node: Aten, x: Any, shifts: Any, dims: Any = ()) -> Any:
    """Elements moved along, and round the end."""
    shape = x.type.shape
    shifts = (shifts,) if isinstance(shifts, int) else shifts
    dims = (dims,) if isinstance(dims, int) else dims
    if 0 in shape or not shape:
        return x
    if not dims:
        count = x.type.numel
        flat = t.reshape(x, (count,))
        (i,) = t.coordinates((count,))
        return t.reshape(t.index_map(flat, (count,), [(i + (-shifts[0]) % count) % count]), shape)
    here: list[IntExpr] = list(t.coordinates(shape))
    for shift, d in zip(shifts, dims, strict=True):
        d = normalize(d, len(shape))
        here[d] = (here[d] + (-shift) % shape[d]) % shape[d]
    return t.index_map(x, shape, here)


@aten("diagonal.default", "diagonal_copy.default")
def diagonal(node: Aten, x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """x[i, i + offset], as the last dimension."""
    d1, d2 = normalize(dim1, x.type.rank), normalize(dim2, x.type.rank)
    shape = result(node).shape
    here = list(t.coordinates(shape))
    i = here.pop() if here else 0
    index: list[IntExpr] = []
    rest = iter(here)
    for d in range(x.type.rank):
        index.append(i + max(-offset, 0) if d == d1 else i + max(offset, 0) if d == d2 else next(rest))
    return taken(x, shape, index)


@aten("unfold.default", "unfold_copy.default")
def unfold(node: Aten, x: Any, dim: int, size: int, step: int) -> Any:
    """Windows along a dimension, as a new last dimension."""
    shape = result(node).shape
    if not x.type.rank:
        return reshaped(x, shape)
    dim = normalize(dim, x.type.rank)
    here = t.coordinates(shape)
    return taken(x, shape, [e * step + here[-1] if d == dim else e for d, e in enumerate(here[:-1])])


@aten("as_strided.default", "as_strided_copy.default")
def as_strided(node: Aten, x: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    """Elements of x's storage at offset + i * stride; x must be contiguous."""
    need(x.type.strides is None, "its operand is not contiguous")
    shape = result(node).shape
    if 0 in shape:
        return t.literal(0, x.type.dtype, shape)
    place: IntExpr = offset or 0
    for i, s in zip(t.coordinates(shape), stride, strict=True):
        place = place + i * s
    last = (offset or 0) + sum((e - 1) * s for e, s in zip(size, stride, strict=True))
    need(0 <= last < x.type.numel, "it reads outside its operand")
    return t.index_map(t.reshape(x, (x.type.numel,)), shape, [place])


@aten("constant_pad_nd.default")
def constant_pad(node: Aten, x: Any, pad: Sequence[int], value: Any = 0) -> Any:
    """x in a frame of `value`; negative widths cut."""
    out = result(node)
    here = t.coordinates(out.shape)
    index: list[IntExpr] = list(here)
    inside: list[IntExpr] = []
    for k in range(len(pad) // 2):
        d = out.rank - 1 - k
        index[d] = here[d] - pad[2 * k]
        inside += [index[d], x.type.shape[d] - 1 - index[d]]
    if 0 in out.shape or 0 in x.type.shape:
        return t.literal(value, out.dtype, out.shape)
    framed = t.index_map(x, out.shape, index, inside)
    if not framed_needs_value(value):
        return framed
    return t.where(holds(out.shape, inside), framed, t.literal(value, out.dtype, out.shape))


def framed_needs_value(value: Any) -> bool:
    """False where a guarded map already gives the value outside: 0."""
    import math

    return bool(value != 0 or math.copysign(1, value) < 0)


def holds(shape: Sequence[Any], inside: Sequence[IntExpr]) -> Any:
    """True where all of `inside` are >= 0."""
    from terrazzo.ir.types import bool_

    condition: Any = t.literal(True, bool_, shape)
    for e in inside:
        condition = t.apply("and_", condition, t.apply("ge", t.iota(shape, e), t.literal(0, i64, shape)))
    return condition


@aten("slice_scatter.default")
def slice_scatter(
    node: Aten, x: Any, source: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """x with a slice replaced."""
    shape = x.type.shape
    dim = normalize(dim, x.type.rank)
    first, _ = slice_bounds(shape[dim], start, end)
    length = source.type.shape[dim]
    if length == 0 or 0 in shape:
        return x
    here = list[IntExpr](t.coordinates(shape))
    offset = here[dim] - first
    inside = [offset, (length - 1) * step - offset]
    here[dim] = (offset + step * (first // step + 1)) // step - (first // step + 1)
    piece = t.index_map(t.cast(source, x.type.dtype), shape, here, inside)
    chosen = holds(shape, inside)
    if step > 1:
        phase = t.iota(shape, (offset + step * (first // step + 1)) % step)
        chosen = t.apply("and_", chosen, t.apply("eq", phase, t.literal(0, i64, shape)))
    return t.where(chosen, piece, x)


@aten("select_scatter.default")
def select_scatter(node: Aten, x: Any, source: Any, dim: int, index: int) -> Any:
    """x with one index of one dimension replaced."""
    shape = x.type.shape
    dim = normalize(dim, x.type.rank)
    here = t.coordinates(shape)
    wide = t.index_map(t.cast(source, x.type.dtype), shape, [e for d, e in enumerate(here) if d != dim])
    chosen = t.apply("eq", t.iota(shape, here[dim]), t.literal(index % shape[dim], i64, shape))
    return t.where(chosen, wide, x)


@aten("pixel_shuffle.default")
def pixel_shuffle(node: Aten, x: Any, factor: int) -> Any:
    """[.., c·r², h, w] to [.., c, h·r, w·r]."""
    shape = result(node).shape
    *lead, c, h, w = t.coordinates(shape)
    return taken(x, shape, [*lead, c * factor * factor + (h % factor) * factor + w % factor, h // factor, w // factor])


@aten("pixel_unshuffle.default")
def pixel_unshuffle(node: Aten, x: Any, factor: int) -> Any:
    """[.., c, h·r, w·r] to [.., c·r², h, w]."""
    shape = result(node).shape
    *lead, c, h, w = t.coordinates(shape)
    inner = c % (factor * factor)
    return taken(x, shape, [*lead, c // (factor * factor), h * factor + inner // factor, w * factor + inner % factor])


RULES: tuple[Rule, ...] = (
    view, squeeze, permute, transpose, t_, expand, repeat, select, slice_, narrow, split, unbind, cat, stack, flip,
    roll, diagonal, unfold, as_strided, constant_pad, slice_scatter, select_scatter, pixel_shuffle, pixel_unshuffle,
)  # fmt: skip
