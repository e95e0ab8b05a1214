"""Sums of what is added where data says, as one addition: along other dimensions than those in which data says where.

Such is the gradient of what is gathered from a tensor that was repeated first, as blocks of keys are for every query
that selects some of them. PyTorch adds to a tensor that has all the repetitions, and sums these afterwards.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.node import topological
from terrazzo.ir.program import Program
from terrazzo.ir.types import DType, Type
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.torch_to_tensor.added import CAST
from terrazzo.rules.torch_to_tensor.common import normalize
from terrazzo.rules.torch_to_tensor.scatter import SCATTER_ADD
from terrazzo.rules.torch_to_tensor.sums import PASS, is_call, is_zero, replaced, reshaped, shape, uses

RULE = "scatters_summed"
SUM = "aten.sum.dim_IntList"


def scatters_summed(program: Program, log: Log) -> Program:
    """The program with what is added to zeros and then summed added to as many places as the sums are. Elements of 16
    bits are added in 32, as those of a sum are.

    @torch
    def f(i: i64[2, 3, 4], y: f32[2, 3, 4]):
        n: f32[2, 3, 8] = aten.full.default([2, 3, 8], 0, dtype=f32)
        a: f32[2, 3, 8] = aten.scatter_add.default(n, 2, i, y)
        b: f32[2, 8] = aten.sum.dim_IntList(a, [1])
        return (b,)
    =>
    @torch
    def f(i: i64[2, 3, 4], y: f32[2, 3, 4]):
        v0: f32[2, 8] = aten.full.default([2, 8], 0, dtype=f32)
        v1: i64[2, 12] = aten.reshape.default(i, [2, 12])
        v2: f32[2, 12] = aten.reshape.default(y, [2, 12])
        b: f32[2, 8] = aten.scatter_add.default(v0, 1, v1, v2)
        return (b,)
    """
    read = uses(program)
    new = {n: partial(_at_once, n) for n in topological(program.results) if _sums_a_scatter(n, read)}
    for n in new:
        log.add(Event(PASS, RULE, program.names.get(n, ""), True, f"{shape(n.children[0])} are summed"))
    return replaced(program, log, RULE, new) if new else program


def _sums_a_scatter(x: Any, read: Any) -> bool:
    """Whether a node sums what was added to zeros, and nobody else reads, along other dimensions."""
    if not is_call(x, SUM) or not is_call(x.args[0], SCATTER_ADD) or read[x.args[0]] != 1 or not x.args[1]:
        return False
    zeros, dim, index, source = x.args[0].args
    rank = len(shape(zeros))
    summed = [normalize(d, rank) for d in x.args[1]]
    fits = shape(index) == shape(source) and 0 not in shape(zeros) + shape(index)
    return fits and x.type.dtype.is_float and is_zero(zeros) and normalize(dim, rank) not in summed


def _at_once(total: Any, now: Any) -> Any:
    """The sum of an addition as one: elements of dimensions that are summed are beside those of the one that data says
    where in; those that one index is for are summed before.
    """
    zeros, dim, index, source = total.args[0].args
    rank, wide = len(shape(zeros)), total.type.dtype.compute
    dim, summed = normalize(dim, rank), {normalize(d, rank) for d in total.args[1]}
    index, source = now(index), now(source)
    own = index.args[0] if is_call(index, "aten.expand.default") else index
    own = reshaped(own, (*(1,) * (rank - len(shape(own))), *shape(own)))
    alike = tuple(d for d in sorted(summed) if shape(own)[d] == 1)
    if any(shape(index)[d] > 1 for d in alike):
        sizes = tuple(1 if d in alike else n for d, n in enumerate(shape(source)))
        source = Aten(SUM, (_cast(source, wide), alike, True), (), Type(wide, sizes))
    kept = [d for d in range(rank) if d not in summed]
    at = kept.index(dim)
    merged = (*sorted(summed), dim)
    full = tuple(shape(source)[d] if d in merged else n for d, n in enumerate(shape(own)))
    index, source = (_merged(x, kept, at, merged) for x in (_expanded(own, full), source))
    none = _filled(tuple(shape(zeros)[d] for d in kept), wide)
    found = Aten(SCATTER_ADD, (none, at, _expanded(index, shape(source)), _cast(source, wide)), (), none.type)
    return _cast(reshaped(found, shape(total)), total.type.dtype)


def _merged(x: Any, kept: list[int], at: int, merged: tuple[int, ...]) -> Any:
    """A value with the dimensions `merged` as one, which is the dimension `at` among those that are `kept`."""
    order = (*kept[:at], *merged, *kept[at + 1 :])
    sizes = tuple(shape(x)[d] for d in order)
    if order != tuple(range(len(order))):
        x = Aten("aten.permute.default", (x, order), (), Type(x.type.dtype, sizes))
    end = at + len(merged)
    return reshaped(x, (*sizes[:at], math.prod(sizes[at:end]), *sizes[end:]))


def _expanded(x: Any, sizes: tuple[int, ...]) -> Any:
    """A value with extents of 1 repeated."""
    return x if shape(x) == sizes else Aten("aten.expand.default", (x, sizes), (), Type(x.type.dtype, sizes))


def _filled(sizes: tuple[int, ...], dtype: DType) -> Aten:
    return Aten("aten.full.default", (sizes, 0), (("dtype", dtype),), Type(dtype, sizes))


def _cast(x: Any, dtype: DType) -> Any:
    return x if x.type.dtype is dtype else Aten(CAST, (x,), (("dtype", dtype),), Type(dtype, shape(x)))
