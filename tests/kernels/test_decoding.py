"""Attention of few queries to many keys: heads of a group are rows, warps and blocks share the keys, and states meet in
the highest frame.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import Lowered, lowered
from tests.kernels.test_attention import close, grouped, lines, plain, tensors

from terrazzo.errors import UserError
from terrazzo.interp import kernel as simulator
from terrazzo.ir.dialects import kernel as kernel_ir
from terrazzo.ir.plan import Combine, Order
from terrazzo.ir.schedule import Word


def rules(found: Lowered) -> list[str]:
    return [e.rule for e in found.lowering.log.events if e.pass_name == "schedule" and e.fired]


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(
    ("shapes", "rows"),
    [
        (((2, 8, 1, 64), (2, 2, 1024, 64)), 4),
        (((2, 8, 1, 64), (2, 2, 1000, 64)), 4),
        (((1, 4, 1, 128), (1, 1, 600, 128)), 4),
        (((2, 4, 3, 64), (2, 2, 700, 64)), 6),
        (((2, 3, 1, 64), (2, 3, 700, 64)), 1),
        (((1, 3, 1, 64), (1, 3, 700, 64)), 1),
        (((1, 2, 5, 64), (1, 2, 700, 64)), 5),
        (((1, 8, 9, 64), (1, 2, 500, 64)), 36),
    ],
)  # fmt: skip
def test_blocks_share_the_keys(shapes: tuple[tuple[int, ...], tuple[int, ...]], rows: int, target: str) -> None:
    args = tensors(shapes[0], shapes[1], shapes[1])
    found = lowered(grouped, args, target)
    assert len(found.kernels) == 2
    assert rules(found) == ["chain", "finish"]
    keys = found.lowering.at("tile").loop.steps[0].axes[0].extent
    order = lines(found, Order)[0]
    assert order.tiles[0] == Word("s", (keys,)) and keys > 1
    assert any(a.extent == rows for a in found.lowering.at("tile").loop.steps[0].axes)
    assert (rows > 16) == (not lines(found, Combine))
    close(found, grouped, args)
    again, other = (simulator.run(found.program, found.inputs, seed=seed)[0] for seed in (1, 2))
    assert again.tobytes() == other.tobytes()  # in whatever order blocks and warps come


def test_pieces_that_see_nothing_add_nothing() -> None:
    args = tensors((1, 4, 1, 64), (1, 1, 900, 64), (1, 1, 900, 64))

    def first(q: Any, k: Any, v: Any) -> Any:
        seen = torch.arange(900) < 70
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[None], enable_gqa=True)

    found = lowered(first, args, "sm_90a")
    assert rules(found) == ["chain", "finish"]
    close(found, first, args)


def test_rows_that_see_nothing_are_as_in_eager() -> None:
    args = tensors((1, 4, 1, 64), (1, 1, 900, 64), (1, 1, 900, 64))

    def nothing(q: Any, k: Any, v: Any, seen: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)

    seen = torch.zeros(1, 900, dtype=torch.bool)
    found = lowered(nothing, (*args, seen), "sm_90a")
    assert rules(found) == ["chain", "finish"]
    (ours,) = found.simulated()
    eager = nothing(*args, seen).float().numpy()
    np.testing.assert_array_equal(np.asarray(ours, np.float32), eager)


def test_few_keys_are_not_split() -> None:
    args = tensors((2, 3, 1, 64), (2, 3, 100, 64), (2, 3, 100, 64))
    found = lowered(plain, args, "sm_90a")
    assert rules(found) == ["chain"]
    close(found, plain, args)


NINE = """\
with schedule("{name}", target="sm_80"):
    a0 = grid(2)
    a1 = grid(2)
    a2 = grid(1) * block(16)
    a3 = block(128)
    r2 = grid({pieces}) * time(2, ring=2) * block(64)
    with site("acc3", on="mma.m16n8k16.f32.bf16"):
        a2 = inst.m(16)
        r2 = warp(4) * reg(2) * inst.n(8)
        r0 = reg(8) * inst.k(16)
        q = smem(by="cp.async", swizzle=128)
        k = smem(by="cp.async", swizzle=128)
    with site("acc4", on="mma.m16n8k16.f32.bf16"):
        a2 = inst.m(16)
        a3 = reg(16) * inst.n(8)
        r2 = warp(4) * inst.k(16)
        v = smem(by="cp.async", swizzle=128)
    with site("{name}"):
        a2 = like("acc4")
        a3 = like("acc4")
"""


@pytest.mark.parametrize("keys", [512, 450])
def test_keys_may_be_split_over_the_grid_by_a_schedule(keys: int) -> None:
    """Schedule 9 of ADR 004, with queries as rows."""
    args = tensors((2, 8, 1, 128), (2, 2, keys, 128), (2, 2, keys, 128))
    name = lowered(grouped, args, "sm_80").kernels[-1].name
    found = lowered(grouped, args, "sm_80", schedules=(NINE.format(name=name, pieces=4),))
    part, whole = found.kernels
    assert (part.name, part.grid, part.warps, whole.name) == (f"{name}_part", 16, 4, name)
    assert rules(found) == ["pin", "finish"]
    close(found, grouped, args)


DOWN = """\
with schedule("{name}", target="sm_90a"):
    a0 = grid(2)
    a1 = grid(2)
    a2 = grid(1) * block(8)
    a3 = block(128)
    r2 = grid(4) * time(2, ring=2) * block(64)
    with site("acc3", on="mma.m16n8k16.f32.bf16"):
        r2 = warp(2) * reg(2) * inst.m(16)
        a2 = inst.n(8)
        r0 = reg(8) * inst.k(16)
        q = smem(by="cp.async", swizzle=128)
        k = smem(by="cp.async", swizzle=128)
    with site("acc4", on="mma.m16n8k16.f32.bf16"):
        a3 = reg(8) * inst.m(16)
        a2 = inst.n(8)
        r2 = warp(2) * reg(2) * inst.k(16)
        acc3 = reg()
        v = smem(by="cp.async", swizzle=128)
    with site("{name}"):
        a2 = like("acc4")
        a3 = like("acc4")
"""


@pytest.mark.parametrize("keys", [512, 450])
def test_keys_may_be_rows_and_heads_columns(keys: int) -> None:
    """Schedule 9 of ADR 004 as it stands there: the weights, in their frame, are the second factor of the values."""
    args = tensors((2, 16, 1, 128), (2, 2, keys, 128), (2, 2, keys, 128))
    name = lowered(grouped, args, "sm_90a").kernels[-1].name
    found = lowered(grouped, args, "sm_90a", schedules=(DOWN.format(name=name),))
    part, whole = found.kernels
    assert (part.name, part.grid, part.warps, whole.name) == (f"{name}_part", 16, 2, name)
    assert any(isinstance(s, kernel_ir.TurnMatrix) for s in kernel_ir.walk(part.body))
    close(found, grouped, args)


def written(q: Any, k: Any, v: Any) -> Any:
    """With a key for each query, as nothing is hidden: the maximum is in the sums alone."""
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


@pytest.mark.parametrize("fn", [plain, written])
@pytest.mark.parametrize(
    ("site", "line", "why"),
    [("", "r1 = reg(512)", "leave r1 out"), ("acc0", "r1 = warp(4) * reg(128)", "does not fit a piece that blocks")],
)
def test_steps_that_blocks_share_are_bound_once(fn: Any, site: str, line: str, why: str) -> None:
    """The maximum of the scores goes along the same keys: it is cut as they are."""
    args = tensors((2, 2, 16, 128), (2, 2, 512, 128), (2, 2, 512, 128))
    name = lowered(fn, args, "sm_80").kernels[-1].name
    given = NINE.format(name=name, pieces=4)
    more = f'    with site("{site}"):\n        {line}\n' if site else f"    {line}\n"
    at = given.index(f'    with site("{name if site else "acc3"}"')
    with pytest.raises(UserError, match=why) as e:
        lowered(fn, args, "sm_80", schedules=(given[:at] + more + given[at:],))
    _, word = e.value.about[0]
    assert (word.site, word.line) == (site, "r1")
