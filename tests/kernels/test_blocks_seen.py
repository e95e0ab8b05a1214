"""Masks that data decides: blocks of keys that no row of a tile sees are not visited, and those that all see are not
asked about; whatever the data is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import Lowered, lowered
from tests.kernels.test_attention import lines, together
from tests.kernels.test_attention import tensors as random

from terrazzo.interp import kernel as simulator
from terrazzo.ir.plan import Product, Reach
from terrazzo.rules.loop.attention import blocks

N = 300


def attend(q: Any, k: Any, v: Any, seen: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def places(q: Any) -> tuple[Any, Any]:
    at = torch.arange(q.shape[-2], device=q.device)
    return at[:, None], at


def documents(q: Any, k: Any, v: Any, ids: Any) -> Any:
    return attend(q, k, v, ids[:, None] == ids)


def causal_documents(q: Any, k: Any, v: Any, ids: Any) -> Any:
    i, j = places(q)
    return attend(q, k, v, (ids[:, None] == ids) & (j <= i))


def others(q: Any, k: Any, v: Any, ids: Any) -> Any:
    return attend(q, k, v, ids[:, None] != ids)


def of_each(q: Any, k: Any, v: Any, ids: Any) -> Any:
    """Documents of each sequence, in numbers that are added, as some models have them."""
    mask = torch.where(ids[:, None, :, None] == ids[:, None, None], 0.0, -torch.inf).to(q.dtype)
    return attend(q, k, v, mask)


def padded(q: Any, k: Any, v: Any, valid: Any) -> Any:
    return attend(q, k, v, valid[:, None, None])


def ranges(q: Any, k: Any, v: Any, begin: Any, end: Any) -> Any:
    _, j = places(q)
    return attend(q, k, v, (begin[:, None] <= j) & (j < end[:, None]))


def counted(q: Any, k: Any, v: Any, count: Any) -> Any:
    _, j = places(q)
    return attend(q, k, v, (j < count)[:, None, None])


def sorted_ids(*sizes: int) -> torch.Tensor:
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


SORTED = sorted_ids(130, 20, 60, 90)
MIXED = torch.arange(N) * 7919 % 5
KINDS: dict[str, tuple[Any, int, tuple[Any, ...]]] = {
    "documents": (documents, 1, (SORTED,)),
    "one document": (documents, 1, (torch.zeros(N, dtype=torch.long),)),
    "documents in no order": (documents, 1, (MIXED,)),
    "causal": (causal_documents, 1, (SORTED,)),
    "other documents": (others, 1, (SORTED,)),
    "of each sequence": (of_each, 2, (torch.stack([SORTED, 3 - SORTED]),)),
    "padding": (padded, 2, (torch.arange(N) < torch.tensor([[40], [280]]),)),
    "all is padding": (padded, 2, (torch.arange(N) < torch.tensor([[0], [280]]),)),
    "ranges": (ranges, 1, (torch.arange(N) - 30, torch.arange(N) + 3)),
    "empty ranges": (ranges, 1, (torch.arange(N) % 3 * 140, torch.full((N,), 90))),
    "counts": (counted, 2, (torch.tensor([[170], [1]]),)),
}


@pytest.fixture(autouse=True)
def at_any_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "WORTH", 0)


def given(kind: str, size: int = 64) -> tuple[Any, tuple[Any, ...]]:
    fn, batch, data = KINDS[kind]
    return fn, (*random(*((batch, 1, N, size),) * 3), *data)


def close(found: Lowered, fn: Any, args: tuple[Any, ...], seed: int | None = None) -> None:
    exact = fn(*(a.double() if a.is_floating_point() else a for a in args)).numpy()
    eager = fn(*args).double().numpy()
    (ours,) = found.simulated() if seed is None else simulator.run(found.program, found.inputs, seed=seed)
    assert np.isfinite(ours).all()
    error, allowed = (np.sqrt(np.mean((np.asarray(x, np.float64) - exact) ** 2)) for x in (ours, eager))
    assert error <= 2 * allowed


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_visited_as_data_says(kind: str) -> None:
    fn, args = given(kind)
    found = lowered(fn, args, "sm_90a")
    (reach,) = lines(found, Reach)
    assert reach.at_first and reach.at_last and len(lines(found, Product)) == 2
    assert all(b.type.numel < N * N for s in found.kernels for b in s.writes), "no mask is stored"
    close(found, fn, args, seed=2)


@pytest.mark.parametrize(("target", "size"), [("sm_80", 64), ("sm_80", 40), ("sm_90a", 128), ("sm_90a", 256)])
@pytest.mark.parametrize("kind", ["documents", "empty ranges"])
def test_other_sizes_and_other_gpus(kind: str, target: str, size: int) -> None:
    fn, args = given(kind, size)
    found = lowered(fn, args, target)
    assert lines(found, Reach)[0].at_first
    close(found, fn, args)


def test_what_no_row_of_a_tile_sees_is_not_read() -> None:
    """It may be no number."""
    ids = sorted_ids(128, 172)
    q, k, v = random(*((1, 1, N, 64),) * 3)
    wanted = documents(*(x.double() for x in (q, k, v)), ids)[:, :, :128].numpy()
    for x in (k, v):
        x[:, :, 128:] = torch.nan
    (ours,) = lowered(documents, (q, k, v, ids), "sm_90a").simulated()
    np.testing.assert_allclose(np.asarray(ours, np.float64)[:, :, :128], wanted, atol=0.02)


def test_layers_with_the_same_mask_ask_once() -> None:
    def fn(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return documents(documents(q, k, v, ids), k, v, ids)

    args = (*random(*((1, 1, N, 64),) * 3), SORTED)
    found = lowered(fn, args, "sm_90a")
    assert len(found.kernels) == 4 and len(lines(found, Reach)) == 2
    close(found, fn, args)


def test_few_rows_and_masks_that_lie_in_memory_whole_are_not_asked_about() -> None:
    q, k, v = random((1, 2, 16, 64), (1, 2, N, 64), (1, 2, N, 64))
    found = lowered(padded, (q, k, v, KINDS["padding"][2][0][:1]), "sm_90a")
    assert not any(s.name.endswith("_first") for s in found.kernels)
    seen = torch.rand(N, N) < 0.5
    found = lowered(attend, (*random(*((1, 1, N, 64),) * 3), seen), "sm_90a")
    assert together(found)


def test_blocks_are_found_where_that_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "WORTH", 8)
    fn, args = given("documents")
    found = lowered(fn, args, "sm_90a")
    (event,) = [e for e in found.lowering.log.events if e.rule == blocks.RULE]
    assert not event.fired and event.reason.startswith(("3.", "4.", "5.", "6.", "7.", "8.", "9.", "1"))
