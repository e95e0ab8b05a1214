"""Places that data says are not looked up where there is nothing to fetch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import terrazzo
from terrazzo.front.capture import capture
from terrazzo.ir.dialects import kernel as k
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.targets.cuda.emit import emit

ROWS = 35


def chosen(q: Any, places: Any, kv: Any) -> Any:
    """Attention of queries that data says: no tile of them is full."""
    heads = torch.arange(q.shape[0], device=q.device)[:, None]
    return (q[heads, places] @ kv.mT * 0.125).softmax(-1) @ kv


def given(device: str) -> tuple[Any, Any, Any]:
    g = torch.Generator(device).manual_seed(3)
    q, kv = (torch.randn(4, 720, 64, generator=g, device=device).half() for _ in range(2))
    return q, torch.randint(0, 720, (4, ROWS), generator=g, device=device), kv


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_rows_beyond_the_last_have_no_place(arch: str) -> None:
    done = lowering(capture(chosen, given("cpu")).program, Options(target=arch, libraries="never"))
    text = "\n".join(x for s in done.at("kernel").steps if isinstance(s, k.Kernel) for x in emit(s))
    copies = [line for line in text.splitlines() if "cp_async<" in line and "tz_at" in line]
    assert copies
    for line in copies:
        assert line.index(f"< {ROWS} ? ") < line.index("tz_at"), line


@pytest.mark.gpu
def test_nothing_behind_the_places_is_read() -> None:
    q, places, kv = given("cuda")
    behind = torch.full((places.numel() + 1000,), 1 << 40, device="cuda")  # what would be read is no place
    behind[: places.numel()] = places.flatten()
    args = q, behind[: places.numel()].view(places.shape), kv
    f = terrazzo.compile(chosen, *args, options={"libraries": "never"})
    torch.testing.assert_close(f(*args), chosen(*args), rtol=2e-3, atol=2e-3)
    torch.cuda.synchronize()
    f(*args)  # which says of a place in an earlier call that it was none
