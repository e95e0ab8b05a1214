"""What attention gives lies as in eager mode, whatever it is traced as: programs take it for rows of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import terrazzo
from terrazzo.front import dynamo
from terrazzo.options import Options

TOKENS, HEADS, WIDTH = 12, 4, 16


def heads(x: torch.Tensor) -> Any:
    """Queries, keys and values, of rows of tokens that have all three."""
    return x.unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4).unbind(0)


def rows(x: torch.Tensor) -> torch.Tensor:
    """Rows of tokens again, by a view: an error where the heads of a token do not lie beside each other."""
    return F.scaled_dot_product_attention(*heads(x)).transpose(1, 2).view(*x.shape[:-1], HEADS * WIDTH)


def tokens(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, TOKENS, 3 * HEADS * WIDTH).to(dtype)


def test_a_view_of_it_is_rows_of_tokens(tmp_path: Path) -> None:
    compiled = torch.compile(rows, backend="terrazzo", options={"strict": True, "cache_dir": tmp_path})

    def trained(fn: Any) -> list[torch.Tensor]:
        x = tokens().requires_grad_()
        out = fn(x)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [x])]

    torch.testing.assert_close(trained(compiled), trained(rows))


def test_a_view_of_it_where_a_call_is_captured_and_where_sizes_are_open(tmp_path: Path) -> None:
    x = tokens()
    captured = terrazzo.compile(rows, x, options=Options(cache_dir=tmp_path))
    open_sizes = torch.compile(rows, backend="terrazzo", dynamic=True, options={"strict": True, "cache_dir": tmp_path})
    for fn in (captured, open_sizes):
        torch.testing.assert_close(fn(x), rows(x))


def test_operands_may_be_named(tmp_path: Path) -> None:
    def named(x: torch.Tensor) -> torch.Tensor:
        q, k, v = heads(x)
        return F.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True)

    compiled = torch.compile(named, backend="terrazzo", options={"strict": True, "cache_dir": tmp_path})
    captured = terrazzo.compile(named, tokens(), options=Options(cache_dir=tmp_path))
    for fn in (compiled, captured):
        torch.testing.assert_close(fn(tokens()), named(tokens()))


def test_a_later_graph_takes_it_as_it_was_told(tmp_path: Path) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        out = F.scaled_dot_product_attention(*heads(x))
        torch._dynamo.graph_break()
        return out.transpose(1, 2).view(*x.shape[:-1], HEADS * WIDTH)

    x = tokens()
    compiled = torch.compile(broken, backend="terrazzo", options={"strict": True, "cache_dir": tmp_path})
    torch.testing.assert_close(compiled(x), broken(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", [[], [SDPBackend.MATH]], ids=["any", "its definition"])
def test_it_lies_as_what_the_user_allows(chosen: list[SDPBackend], dtype: torch.dtype, tmp_path: Path) -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*heads(x)) * 2

    def run(fn: Any) -> torch.Tensor:
        if not chosen:
            return fn(tokens(dtype))
        with sdpa_kernel(chosen):
            return fn(tokens(dtype))

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="terrazzo", options={"strict": True, "cache_dir": tmp_path})
    assert run(compiled).stride() == run(attend).stride()


def test_a_graph_that_is_not_compiled_calls_what_eager_mode_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is written as code, as PyTorch's graphs are, in which a function has a name."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise dynamo._Refused

    monkeypatch.setattr(dynamo, "partition", refused)
    torch._dynamo.reset()
    compiled = torch.compile(rows, backend=dynamo.terrazzo, options={"target": "sm_90a"})
    with torch.profiler.profile() as profile:
        out = compiled(tokens().requires_grad_())
    assert torch.equal(out, rows(tokens()))
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in {e.name for e in profile.events()}


def test_who_allows_the_definition_alone_is_given_another_layout() -> None:
    """Or the test above would say nothing."""
    with sdpa_kernel(SDPBackend.MATH):
        by_definition = F.scaled_dot_product_attention(*heads(tokens()))
    assert by_definition.stride() != F.scaled_dot_product_attention(*heads(tokens())).stride()
