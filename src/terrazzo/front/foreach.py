"""Ops on lists of tensors, as optimisers call them, are an op on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BESIDE = ("Scalar", "ScalarList")
"""Overloads whose last argument is a number, or one for each tensor."""
NAMED = ("addcmul", "addcdiv")
"""Ops that are given that number by name: `value`."""
CLAMPS = {"maximum": "clamp_min", "minimum": "clamp_max"}
"""Ops that take no number, and what they are then."""
LEFT = ("_foreach_powsum", "_foreach_addcmul.Tensor", "_foreach_addcdiv.Tensor")
"""No op is that of one tensor; or numbers for each are in a tensor, so that only its data tells them."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """What takes ops on lists apart, by overload."""
    import torch

    found: dict[Any, Callable[..., Any]] = {}
    for schema in torch._C._jit_get_all_schemas():
        name, overload = schema.name.removeprefix("aten::"), schema.overload_name or "default"
        if not name.startswith("_foreach_") or name.endswith("_") or "out" in overload:
            continue
        one = _of_one(name.removeprefix("_foreach_"), overload)
        if one is not None and not {name, f"{name}.{overload}"} & {*LEFT}:
            found[getattr(getattr(torch.ops.aten, name), overload)] = _for_each(one)
    return found


def _of_one(name: str, overload: str) -> Callable[..., Any] | None:
    """The op of one tensor."""
    import torch

    aten = torch.ops.aten
    if name == "norm":
        return lambda x, order=2, dtype=None: aten.linalg_vector_norm(x, order, None, False, dtype=dtype)
    if name == "zero":
        return lambda x: aten.zeros_like(x)
    if name == "copy":
        return lambda x, source, non_blocking=False: aten.copy(x, source)
    if name in NAMED:
        packet = getattr(aten, name)
        return lambda x, a, b, value=1: packet(x, a, b, value=value)
    return getattr(aten, CLAMPS.get(name, name) if overload in BESIDE else name, None)


def _for_each(one: Callable[..., Any]) -> Callable[..., list[Any]]:
    def called(*args: Any, **kwargs: Any) -> list[Any]:
        count = next(len(a) for a in args if isinstance(a, list | tuple))
        rows = [a if isinstance(a, list | tuple) else [a] * count for a in args]
        return [one(*row, **kwargs) for row in zip(*rows, strict=True)]

    return called
