"""A product in float32 as three of float16, after the kernels that store the two parts of its factors, row by row."""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping, Sequence
from dataclasses import replace

from terrazzo.ir.contraction import Contraction, operand
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.types import Type, f16, f32
from terrazzo.rules.loop.precision.number_parts import laid_out
from terrazzo.rules.loop.precision.scaled_parts import Halves, depth_of, halves, makers, multiplied

TOGETHER = 32 << 20
"""Bytes of two tensors up to which one launch makes the halves of both. Of 3 to 15 MB it saved 1.1 to 1.7 us of 6 to 14
(H100, 27 November 2026); beyond, tiles of clusters save more, which need to tell two tensors apart.
"""

Rows = tuple[l.Buffer, int]
"""A tensor, and along which dimension its rows go."""
Fresh = Callable[[str], str]


def halved(
    kernel: l.Kernel,
    c: Contraction,
    known: MutableMapping[Rows, Halves],
    constant: Collection[l.Buffer],
    fresh: Fresh,
) -> tuple[list[l.Kernel], l.Kernel]:
    """The kernels that store the two parts of those factors of a product that are not `known`, and are so from then on;
    and the kernel of the product. Some tensors are `constant`: the same in every call.
    """
    sources: list[Rows] = []
    for x in map(operand, c.factors):
        depth = depth_of(x, c)
        assert isinstance(x, l.Load) and depth is not None
        sources.append((x.buffer, depth))
    missing = [key for key in dict.fromkeys(sources) if key not in known]
    groups = [missing] if len(missing) == 2 and _together(missing, constant) else [[x] for x in missing]
    made = [s for group in groups for s in _halve(group, kernel.source, known, fresh)]
    one, other = (known[key] for key in sources)
    return made, multiplied(kernel, c, (one, other))


def _halve(group: Sequence[Rows], source: str, known: MutableMapping[Rows, Halves], fresh: Fresh) -> list[l.Kernel]:
    """The kernels that store the two parts of a tensor; or of the rows of two, one behind the other."""
    buffers, (first, depth) = [b for b, _ in group], group[0]
    kind, name = first.type, "_".join(b.name for b in buffers)
    if len(buffers) > 1:
        kind = Type(f32, (sum(b.type.static_shape[0] for b in buffers), *kind.static_shape[1:]))
    new, rows = halves(name, depth, laid_out(kind, f16), fresh), 0
    for buffer in buffers:
        known[buffer, depth] = replace(new, before=rows)
        rows += buffer.type.static_shape[0]
    return makers(buffers, depth, new, fresh(f"{name}_parts"), source)


def _together(two: Sequence[Rows], constant: Collection[l.Buffer]) -> bool:
    """Whether the rows of two tensors may lie one behind the other, for one launch to make the parts of both: rows of a
    matrix, along memory, that are few, and of which either all or none are the same in every call.
    """
    buffers = [b for b, _ in two]
    alike = len({(depth, *b.type.static_shape[1:]) for b, depth in two}) == 1
    along = all(b.type.rank == 2 and depth == 1 and b.type.element_strides[1] == 1 for b, depth in two)
    same = len({b in constant for b in buffers}) == 1
    return alike and along and same and sum(b.type.span for b in buffers) < TOGETHER
