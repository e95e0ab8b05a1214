"""An operator of our own beside PyTorch's: the linear recurrence, which PyTorch has none for. Torch is imported only
when this is used.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

NAMESPACE = "terrazzo"
SCHEMA = "linear_recurrence(Tensor a, Tensor b, int dim) -> Tensor"


def linear_recurrence() -> Any:
    """The operator h[t] = a[t] * h[t - 1] + b[t] along `dim`, where h[-1] is 0, of tensors of one shape; the result has
    the type of `b`. Its gradients are another one, from the end.
    """
    import torch

    _library()
    return torch.ops.terrazzo.linear_recurrence.default


@lru_cache(maxsize=1)
def _library() -> Any:
    """What defines the operator, for as long as it is kept."""
    import torch

    library, name = torch.library.Library(NAMESPACE, "FRAGMENT"), f"{NAMESPACE}::linear_recurrence"
    library.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("linear_recurrence", _by_doubling, "CompositeExplicitAutograd")
    torch.library.register_fake(name, lambda a, b, dim: b.new_empty(b.shape), lib=library)
    torch.library.register_autograd(name, _gradients, setup_context=_keep, lib=library)
    return library


def _by_doubling(a: Any, b: Any, dim: int) -> Any:
    """Each step joins what the last one found of twice as many elements (Hillis and Steele 1986)."""
    import torch

    count, step = b.shape[dim], 1
    while step < count:
        now, before = (step, count - step), (0, count - step)
        joined = b.narrow(dim, *now) + a.narrow(dim, *now) * b.narrow(dim, *before)
        b = torch.cat([b.narrow(dim, 0, step), joined.to(b.dtype)], dim)
        a = torch.cat([a.narrow(dim, 0, step), a.narrow(dim, *now) * a.narrow(dim, *before)], dim)
        step *= 2
    return b.clone() if step == 1 else b


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    a, _, ctx.dim = inputs
    ctx.save_for_backward(a, output)


def _gradients(ctx: Any, grad: Any) -> Any:
    """What b[t] does to all later results is added up from the end; a[t] does so by way of h[t - 1]."""
    import torch

    (a, h), dim = ctx.saved_tensors, ctx.dim
    of_b = from_the_end(a, grad, dim)
    before = torch.cat([torch.zeros_like(h.narrow(dim, 0, 1)), h.narrow(dim, 0, h.shape[dim] - 1)], dim)
    return (of_b * before).to(a.dtype), of_b, None


def from_the_end(a: Any, b: Any, dim: int) -> Any:
    """The recurrence s[t] = b[t] + a[t + 1] * s[t + 1] along `dim`, where behind the last there is nothing."""
    import torch

    later = torch.cat([a.narrow(dim, 1, a.shape[dim] - 1), torch.zeros_like(a.narrow(dim, 0, 1))], dim)
    return linear_recurrence()(later.flip(dim), b.flip(dim), dim).flip(dim)
