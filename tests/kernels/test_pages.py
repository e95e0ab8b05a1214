"""Caches of keys and values: their pages are found by a table, and how many keys there are a tensor on the device says.
A token more is no other program.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import Lowered, lowered
from tests.kernels.test_attention import lines, tensors
from tests.rules.test_catalog import assert_same, example

from terrazzo.interp import kernel as simulator
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.parse import parse
from terrazzo.ir.plan import Reach, Stream
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.attention import pages

COUNTS = (5, 130, 300)


def gathered(x: Any, table: Any) -> Any:
    """Keys by their pages: (pages, keys of a page, heads, size) as (batch, heads, keys, size)."""
    return x[table].flatten(1, 2).transpose(1, 2)


def paged(q: Any, k: Any, v: Any, count: Any, table: Any) -> Any:
    k, v = gathered(k, table), gathered(v, table)
    seen = torch.arange(k.shape[2], device=q.device) < count
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def cache(page: int, keys: int, heads: int = 2, queries: int = 1, size: int = 64, unused: int = 3) -> tuple[Any, ...]:
    """Three sequences of so many keys at most, in pages that lie in no order, and some that belong to none."""
    torch.manual_seed(5)
    batch, count = len(COUNTS), keys // page
    q = torch.randn(batch, 4, queries, size).bfloat16()
    k, v = (torch.randn(batch * count + unused, page, heads, size).bfloat16() for _ in range(2))
    table = torch.randperm(batch * count + unused)[: batch * count].view(batch, count)
    return q, k, v, torch.tensor(COUNTS).view(batch, 1, 1, 1), table


def close(found: Lowered, args: tuple[Any, ...], seed: int | None = None) -> None:
    exact = paged(*(a.double() if a.is_floating_point() else a for a in args)).numpy()
    eager = paged(*args).double().numpy()
    (ours,) = found.simulated() if seed is None else simulator.run(found.program, found.inputs, seed=seed)
    error, allowed = (np.sqrt(np.mean((np.asarray(x, np.float64) - exact) ** 2)) for x in (ours, eager))
    assert error <= 2 * allowed


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(("page", "queries"), [(64, 1), (16, 1), (128, 1), (8, 3)], ids=lambda x: str(x))
def test_pages_are_looked_up_by_the_chain(page: int, queries: int, target: str) -> None:
    """No keys are copied, and no scores are stored."""
    args = cache(page, 384, queries=queries)
    found = lowered(paged, args, target)
    streams = [x.operand for x in lines(found, Stream)]
    assert sum("at(" in x and "table[" in x for x in streams) == 2
    written = [b.type.numel for s in found.kernels for b in s.writes]
    assert len(found.kernels) <= 2 and max(written) < args[1].numel()
    close(found, args)
    close(found, args, seed=3)


def test_lengths_are_data() -> None:
    """The same kernels, whatever the counts are: none, one, all, or more than there is room for."""
    args = cache(32, 384)
    found = lowered(paged, args, "sm_90a")
    for counts in ((0, 1, 384), (384, 17, 64), (1 << 40, 500, -3)):
        given = (*args[:3], torch.tensor(counts).view(3, 1, 1, 1), args[4])
        again = lowered(paged, given, "sm_90a")
        assert [str(x) for x in again.kernels] == [str(x) for x in found.kernels]
        close(again, given)


def counted(q: Any, k: Any, v: Any, count: Any) -> Any:
    seen = torch.arange(k.shape[2], device=q.device) < count
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


@pytest.mark.parametrize(("target", "queries"), [("sm_90a", 1), ("sm_80", 1), ("sm_80", 64)])
def test_steps_that_data_hides_are_not_visited(target: str, queries: int) -> None:
    """What lies beyond the last step of a length is not read: it may be no number."""
    q, k, v = tensors((3, 4, queries, 64), (3, 2, 512, 64), (3, 2, 512, 64))
    count = torch.tensor(COUNTS).view(3, 1, 1, 1)
    exact = counted(*(x.double() for x in (q, k, v)), count).numpy()
    eager = counted(q, k, v, count).double().numpy()
    for x in (k, v):
        for number, keys in enumerate(COUNTS):
            x[number, :, -(-keys // 64) * 64 :] = torch.nan
    found = lowered(counted, (q, k, v, count), target)
    (reach,) = lines(found, Reach)
    assert "count[a0, 0, 0, 0]" in reach.length
    (ours,) = found.simulated()
    error, allowed = (np.sqrt(np.mean((np.asarray(x, np.float64) - exact) ** 2)) for x in (ours, eager))
    assert error <= 2 * allowed


def test_many_queries_read_a_copy() -> None:
    """Boxes of memory are faster than pieces where keys are multiplied with many rows."""
    args = cache(64, 512, queries=256)
    found = lowered(paged, args, "sm_90a")
    assert not [x for x in lines(found, Stream) if "at(" in x.operand]
    assert all(b.type.shape[-2:] != (256, 512) for s in found.kernels for b in s.writes), "no scores are stored"
    refused = [e.reason for e in found.lowering.log.events if e.rule == pages.RULE]
    assert refused == ["rows are many, whose tiles come in boxes of memory"]


def test_a_table_may_count_from_the_end() -> None:
    """As PyTorch's indices may: who has no page there says -1."""
    q, k, v, count, table = cache(64, 384)
    table[:, -1] = -1
    found = lowered(paged, (q, k, v, count, table), "sm_90a")
    close(found, (q, k, v, count, table))


def test_the_example() -> None:
    before, after = map(parse, example(inspect.getdoc(pages.look_up_on_the_way) or "", "look_up_on_the_way"))

    def made(price: Any, why: str = "") -> Any:
        return pages.look_up_on_the_way(before, Log(), price, lambda kernel: why)

    cheap = lambda steps: float(len(steps))  # noqa: E731
    assert made(cheap) == after
    assert_same(before, after)
    assert made(cheap, "it is not worth having") == before
    assert made(lambda steps: -float(len(steps))) == before


def test_a_copy_that_others_read_stays() -> None:
    before, _ = map(parse, example(inspect.getdoc(pages.look_up_on_the_way) or "", "look_up_on_the_way"))
    assert isinstance(before, l.Program)
    copy = before.steps[0].writes[0]
    kept = l.Program(before.name, before.inputs, before.steps, (*before.results, copy))
    assert pages.look_up_on_the_way(kept, Log(), lambda steps: float(len(steps)), lambda kernel: "") == kept
