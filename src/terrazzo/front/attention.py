"""Attention as the products and the softmax that it is defined by; or, on a processor, as PyTorch's op for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

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
    """What scaled_dot_product_attention is traced as within `attention_traced`, if not as it is."""
    import torch

    return {torch.nn.functional.scaled_dot_product_attention: _attention} if called else {}


def _attention(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
    """Attention whose op is not called where it is little work, or where its arguments stand for what functorch makes
    of them (batches, tangents), which it does not know. PyTorch's op keeps no scores, and multiplies bfloat16 as it
    lies: it takes 0.2 to 0.85 of the time of our kernels (one thread with AVX-512, float32, and AMX, bfloat16; 1 to
    1024 queries, forward and in training).
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attention = torch.nn.functional.scaled_dot_product_attention
    wrapped = any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in (q, k, v))
    work = 2 * q.numel() * k.shape[-2] * (1 + v.shape[-1] / max(q.shape[-1], 1))
    if not wrapped and work * (WAITS if q.shape[-2] == 1 else 1) >= WORK:
        return attention(q, k, v, *args, **kwargs)
    with sdpa_kernel(SDPBackend.MATH):
        return attention(q, k, v, *args, **kwargs)
