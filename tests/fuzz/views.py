"""Index maps of random programs: the views that models have, and any quasi-affine index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.types import bool_

if TYPE_CHECKING:
    from tests.fuzz.programs import Draft


def affine(draft: Draft, here: Sequence[Any], extent: int) -> Any:
    """An index into an extent; it may leave it."""
    v = draft.one((*here, 0)) if here else 0
    w = draft.one((*here, 0)) if here else 0
    c = draft.number(0, 3)
    forms = (
        v,
        extent - 1 - v,
        v + w,
        v * 2 + c,
        (v + c) % max(extent, 1),
        v // (c + 1),
        v - c,
        v * w,
        v // 2 * 2 + w % 2,
        c,
    )
    return draft.one(forms)


def view(draft: Draft, x: Any, shape: tuple[int, ...]) -> Any:
    """A view as models have them."""
    kind = draft.one(("permute", "reshape", "flip", "slice", "diagonal", "expand", "pad", "roll", "cat", "squeeze"))
    here = t.coordinates(shape)
    if kind == "expand" and math.prod(shape) * 3 <= draft.cap:
        at = draft.number(0, len(shape))
        wider = (*shape[:at], draft.one((1, 2, 3)), *shape[at:])
        there = t.coordinates(wider)
        return t.index_map(x, wider, (*there[:at], *there[at + 1 :])) if len(wider) <= 6 else x
    if not shape:
        return t.reshape(x, (1,) * draft.number(0, 3))
    d = draft.number(0, len(shape) - 1)
    extent = shape[d]

    def along(size: int, index: Any, guarded: bool = False) -> Any:
        """Axis d with another index."""
        wide = (*shape[:d], size, *shape[d + 1 :])
        there = t.coordinates(wide)
        e = index(there[d])
        return t.index_map(x, wide, (*there[:d], e, *there[d + 1 :]), (e, extent - 1 - e) if guarded else ())

    match kind:
        case "permute":
            return t.permute(x, draft.draw(st.permutations(range(len(shape)))))
        case "reshape":
            return t.reshape(x, factored(draft, math.prod(shape)))
        case "squeeze":
            return t.reshape(x, tuple(e for e in shape if e != 1))
        case "flip":
            return t.index_map(x, shape, [extent - 1 - i if k == d else i for k, i in enumerate(here)])
        case "slice" if extent > 1:
            start, step = draft.number(0, extent - 1), draft.number(1, 3)
            return along(-(-(extent - start) // step), lambda i: start + i * step)
        case "diagonal" if len(shape) > 1 and shape[d] == shape[d - 1] and d:
            there = t.coordinates((*shape[:d], *shape[d + 1 :]))
            return t.index_map(x, (*shape[:d], *shape[d + 1 :]), (*there[:d], there[d - 1], *there[d:]))
        case "pad":
            low, high = draft.number(-2, 3), draft.number(-2, 3)
            return along(max(extent + low + high, 0), lambda i: i - low, guarded=True)
        case "roll" if extent:
            by = draft.number(0, extent)
            return along(extent, lambda i: (i + by) % extent)
        case "cat" if (
            x.type.dtype.compute is x.type.dtype and x.type.dtype is not bool_ and 2 * math.prod(shape) <= draft.cap
        ):
            return t.apply(
                "add",
                along(2 * extent, lambda i: i, guarded=True),
                along(2 * extent, lambda i: i - extent, guarded=True),
            )
    return x


def factored(draft: Draft, n: int) -> tuple[int, ...]:
    """A shape of n elements."""
    out: list[int] = []
    while n > 1 and len(out) < 5:
        factor = draft.one([f for f in (1, 2, 3, 4, 5, 7, 8, 16, n) if n % f == 0])
        out.append(factor)
        n //= factor
    return (*out, n) if n != 1 or draft.chance(3) else tuple(out)
