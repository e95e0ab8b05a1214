"""Whether results are as good as eager's, which float64 says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch.utils import _pytree as pytree


def difference(expected: list[Any], results: list[Any], exact: list[Any] | None) -> str:
    """Why our results are not as good as eager's, or nothing. Integers and bools must be equal, floats no further from
    float64.
    """
    if len(expected) != len(results):
        return f"{len(results)} results instead of {len(expected)}"
    for k, (a, b) in enumerate(zip(expected, results, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {k} is {b.dtype}{list(b.shape)}, not {a.dtype}{list(a.shape)}"
        a, b = _real(a), _real(b)
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return f"result {k} differs in {(a != b).sum().item()} of {a.numel()} elements"
            continue
        wide = _real(exact[k]) if exact is not None else None
        reference = wide if wide is not None and wide.shape == a.shape and wide.is_floating_point() else a.double()
        finite = a.isfinite() & b.isfinite()
        special = ~finite & ~_alike(a, b) & ~_alike(reference.to(a.dtype), b)
        if special.any():
            return f"result {k} has {b[special][0].item()} where eager has {a[special][0].item()}"
        a, b, reference = (torch.where(finite & reference.isfinite(), x, 0) for x in (a, b, reference))
        if not torch._dynamo.utils.same(a, b, reference, log_error=_quiet):
            worst = (b.double() - reference).abs().max().item()
            return f"result {k} is off by up to {worst:.3g}"
    return ""


def _real(x: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of real numbers, judged as such: PyTorch's own transforms round by the strides of what
    they are given.
    """
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _alike(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Equal, or both NaN."""
    return (a == b) | (a.isnan() & b.isnan())


def _quiet(*args: Any, **kwargs: Any) -> None:
    """What `same` has to say is in our own message."""


def exactly(call: Callable[..., Any], args: Any, kwargs: Any) -> list[Any] | None:
    """The results in float64, where PyTorch can compute them."""
    try:
        given, named = pytree.tree_map(raised, (args, kwargs))
        torch.manual_seed(0)
        return list(pytree.tree_leaves(call(*given, **named)))
    except Exception:
        return None


def raised(x: Any) -> Any:
    """A float tensor, or the name of a float type, in float64."""
    if isinstance(x, torch.Tensor):
        return x.double() if x.is_floating_point() else x.clone()
    return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x
