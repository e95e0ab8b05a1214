"""Attention as the products and the softmax that it is defined by; or, on a processor, as PyTorch's op for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from terrazzo.front.in_rows import moved
from terrazzo.options import Options

WORK = 1e7
"""Operations from which on attention is called on a processor: below, ours take as long as the call and its Python."""
WAITS = 8
"""As many operations as one takes where there is a single query, which waits for keys and values."""


def may_be_called(options: Options, given: Iterable[Any]) -> bool:
    """Whether a program of these tensors may call attention: it runs on a processor."""
    import torch

    here = all(x.device.type == "cpu" for x in given if isinstance(x, torch.Tensor))
    return here and options.libraries == "auto" and options.target in ("auto", "cpu")


@contextmanager
def attention_traced(called: bool = False) -> Iterator[None]:
    """Within this, scaled_dot_product_attention is traced by its definition; `called`, as the op that PyTorch has for
    processors, where eager mode takes that.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    op = called and torch.backends.cuda.flash_sdp_enabled()  # which means processors, too
    with sdpa_kernel([SDPBackend.MATH, *([SDPBackend.FLASH_ATTENTION] if op else [])]):
        yield


def attentions(called: bool) -> dict[Any, Callable[..., Any]]:
    """What scaled_dot_product_attention is traced as within `attention_traced`. The ops that eager mode would choose
    from are those that are allowed now.
    """
    import torch
    from torch.nn.attention import _cur_sdpa_kernel_backends

    allowed = tuple(_cur_sdpa_kernel_backends())

    def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return _attention(called, allowed, query, key, value, *args, **kwargs)

    return {torch.nn.functional.scaled_dot_product_attention: attention}


def _attention(called: bool, allowed: Sequence[Any], q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
    """Attention by its definition, whose result lies as eager mode's: ops that are not that definition have the heads
    of a token beside each other, and programs take such a result for rows of tokens (`transpose(1, 2).view(...)`).

    Where its op may be `called`, it is but for little work, and for arguments that stand for what functorch makes of
    them (batches, tangents), which it does not know. PyTorch's op keeps no scores, and multiplies bfloat16 as it lies:
    it takes 0.2 to 0.85 of the time of our kernels (one thread with AVX-512, float32, and AMX, bfloat16; 1 to 1024
    queries, forward and in training). Where nothing is traced, as in a graph that PyTorch runs after all, it is as it
    was.
    """
    import torch
    from torch._guards import detect_fake_mode
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attention = torch.nn.functional.scaled_dot_product_attention
    wrapped = any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in (q, k, v))
    work = 2 * q.numel() * k.shape[-2] * (1 + v.shape[-1] / max(q.shape[-1], 1))
    by_op = called and not wrapped and work * (WAITS if q.shape[-2] == 1 else 1) >= WORK
    if by_op or detect_fake_mode((q, k, v)) is None:
        return attention(q, k, v, *args, **kwargs)
    with sdpa_kernel(SDPBackend.MATH):
        result = attention(q, k, v, *args, **kwargs)
    if wrapped or allowed == (SDPBackend.MATH,):
        return result
    return moved(result, _strides(allowed, (q, k, v, *args), kwargs))


def _strides(allowed: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """How what eager mode calls lies, of all that is `allowed`: asked of tensors that have no values."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import sdpa_kernel
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import _disable_current_modes

    def like(x: Any) -> Any:
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return made.requires_grad_(x.requires_grad)

    with _disable_current_modes(), FakeTensorMode(), sdpa_kernel(list(allowed)):
        args, kwargs = pytree.tree_map_only(torch.Tensor, like, (tuple(args), dict(kwargs)))
        strides: tuple[int, ...] = torch.nn.functional.scaled_dot_product_attention(*args, **kwargs).stride()
    return strides
