"""On a processor attention is PyTorch's op, which keeps no scores, where it is work enough; elsewhere what it means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import terrazzo
from terrazzo.front.attention import may_be_called
from terrazzo.options import Options

OP = "aten._scaled_dot_product_flash_attention_for_cpu.default"
LONG, SHORT = 256, 16


def attend(q: Any, k: Any, v: Any, **how: Any) -> Any:
    """Attention over tokens of heads that lie together, as models have them."""
    heads = [x.unflatten(-1, (4, -1)).transpose(1, 2) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*heads, **how).transpose(1, 2).flatten(2) * 2


def tokens(count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, count, 128).to(dtype) for _ in range(3))


def called(fn: Callable[..., Any], count: int, folder: Path, **options: Any) -> list[str]:
    """The ops that a compiled call has PyTorch run; its results are those of eager mode."""
    given = tokens(count)
    found = terrazzo.compile(fn, *given, options=Options(cache_dir=folder, **options))
    torch.testing.assert_close(found(*given), fn(*given))
    return [f.op for f in found.compiled.fallbacks]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_its_gradients_are_eagers(dtype: torch.dtype, causal: bool, tmp_path: Path) -> None:
    def run(*given: Any) -> Any:
        return attend(*given, is_causal=causal)

    def trained(fn: Callable[..., Any]) -> list[torch.Tensor]:
        leaves = [x.requires_grad_() for x in tokens(LONG, dtype)]
        out = fn(*leaves)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    compiled = torch.compile(run, backend="terrazzo", options={"cache_dir": tmp_path, "strict": True})
    with torch.profiler.profile() as profile:
        found = trained(compiled)
    ops = {e.name for e in profile.events()}
    assert {f"aten::{OP[5:-8]}", f"aten::{OP[5:-8]}_backward"} <= ops
    for ours, theirs in zip(found, trained(run), strict=True):
        assert torch.equal(ours, theirs)


def test_little_work_is_what_it_means(tmp_path: Path) -> None:
    assert called(attend, LONG, tmp_path) == [OP]
    assert called(attend, SHORT, tmp_path) == []


def test_heads_lie_as_in_eager_mode(tmp_path: Path) -> None:
    """The op takes elements of a head to be beside each other: what is turned is copied, as eager mode does."""

    def turned(q: Any, k: Any, v: Any) -> Any:
        kept = (k.mT.contiguous(), (v.mT + 0).contiguous())
        return F.scaled_dot_product_attention(q, *kept)

    given = torch.randn(2, 4, LONG, 32), torch.randn(2, 4, 32, LONG), torch.randn(2, 4, 32, LONG)
    found = terrazzo.compile(turned, *given, options=Options(cache_dir=tmp_path))
    assert [f.op for f in found.compiled.fallbacks] == [OP]
    torch.testing.assert_close(found(*given), turned(*given))


def test_one_query_waits_for_its_keys(tmp_path: Path) -> None:
    q, k, v = torch.randn(2, 1, 128), torch.randn(2, 2048, 128), torch.randn(2, 2048, 128)
    found = terrazzo.compile(attend, q, k, v, options=Options(cache_dir=tmp_path))
    assert [f.op for f in found.compiled.fallbacks] == [OP]


def test_it_is_said_where_none_is_called(tmp_path: Path) -> None:
    assert called(attend, LONG, tmp_path, libraries="never") == []
    with sdpa_kernel(SDPBackend.MATH):  # the user's choice
        assert called(attend, LONG, tmp_path) == []


def test_batches_of_vmap_are_what_they_mean(tmp_path: Path) -> None:
    assert called(torch.vmap(attend), LONG, tmp_path) == []


def test_other_machines_have_kernels() -> None:
    given = tokens(SHORT)
    assert may_be_called(Options(), given)
    assert not may_be_called(Options(target="sm_90a"), given)
    assert not may_be_called(Options(), [x.to("meta") for x in given])
