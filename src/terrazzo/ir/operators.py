"""Which operators of PyTorch a text may name: those that compute tensors from tensors and numbers, and do nothing else.

The list is PyTorch's own, by what it says of each operator: the schema (what is changed, what kinds of arguments and
results there are) and whether shapes can be told without running it. A call is tried on tensors without memory, so that
a text is refused where it declares another type than the call gives. Torch is imported only when this is used.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from terrazzo.errors import Limitation, UserError
from terrazzo.ir.dialects.torch import TorchName
from terrazzo.ir.expr import Expr
from terrazzo.ir.recurrence import NAMESPACE
from terrazzo.ir.torch_types import from_torch_dtype, operator, to_torch, to_torch_dtype
from terrazzo.ir.types import Type

PLAIN = ("Tensor", "number", "bool", "int", "float", "str", "Device", "Generator")
"""What an argument of an operator may be: one of these, an optional one or a list of them."""
PRIVATE = (
    "_conj", "_conj_physical", "_trilinear", "_index_put_impl", "_ctc_loss",
    "_histogramdd_bin_edges", "_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors",
    *(f"_upsample_nearest_exact{d}d_backward" for d in (1, 2, 3)),
)  # fmt: skip
"""Operators that are captured although PyTorch neither takes them apart nor tells their shapes."""
UNCHECKED = ("_reshape_alias",)
"""Operators that PyTorch calls only with sizes it has checked itself."""
DEVICES = ("cpu", "cuda")


def check(name: str, args: Any, kwargs: Mapping[str, Any], declared: Any, strided: bool = False) -> None:
    """Raise UserError unless a text may call this operator, these are arguments for it and `declared` is what it gives.

    `declared` is a type, a tuple of them (None where a result is absent) or, as in Loop IR, a list that may be of one.
    Tensors among the arguments are anything with a `type`, laid out as that says where `strided` is True, else row by
    row.
    """
    called = operator(name)
    if why := impure(name):
        raise UserError(f"{name} may not be called by a text: {why}")
    values = [*_flat(args), *_flat(tuple(kwargs.values()))]
    for v in values:
        if isinstance(v, TorchName) and v.name.startswith("device:") and v.name[7:].partition(":")[0] not in DEVICES:
            raise UserError(f"{name}: {v.name[7:]!r} is no device a program runs on")
    types = [v.type for v in values if isinstance(getattr(v, "type", None), Type)]
    if any(isinstance(e, Expr) for ty in types for e in (*ty.shape, *(ty.strides or ()))):
        return  # what symbolic sizes give is known when they are
    found = _shapes(called, args, kwargs, strided)
    if found is not None:
        _compare(name, found, declared)


@lru_cache(maxsize=4096)
def impure(name: str) -> str:
    """Why a text may not call an operator of PyTorch; "" if it may."""
    called = operator(name)
    schema = called._schema
    arguments = [(a, str(a.type).removeprefix("Optional[").removeprefix("List[").strip("[]")) for a in schema.arguments]
    arguments = [(a, kind.removeprefix("Optional[")) for a, kind in arguments]
    if called.namespace not in ("aten", "prims", NAMESPACE):
        return "it is none of PyTorch's own (aten, prims)"
    if schema.is_mutable:
        return "it changes its arguments"
    if not schema.returns or any(str(r.type) not in ("Tensor", "List[Tensor]") for r in schema.returns):
        return "it gives something else than tensors"
    if other := [kind for _, kind in arguments if kind not in PLAIN]:
        return f"it takes a {other[0]}, which no program holds"
    if any(kind == "str" for _, kind in arguments) and not any(kind == "Tensor" for _, kind in arguments):
        return "it takes a name, and no tensor"
    own = schema.name.partition("::")[2]
    if own in UNCHECKED or (re.match("_[^_]", own) and own not in PRIVATE and not _described(called)):
        return "it is private to PyTorch, which checks what it is given elsewhere"
    return ""


@lru_cache(maxsize=4096)
def draws(name: str) -> bool:
    """Whether an operator draws random numbers, in the order in which its arguments or results lie in memory."""
    import torch

    return torch.Tag.nondeterministic_seeded in operator(name).tags


def _described(called: Any) -> bool:
    """Whether PyTorch says what a private operator means by others, or at least what shapes it gives."""
    import torch
    import torch._meta_registrations  # which fills the tables
    from torch._decomp import decomposition_table, meta_table

    return torch.Tag.core in called.tags or called in decomposition_table or called in meta_table


def _shapes(called: Any, args: Any, kwargs: Mapping[str, Any], strided: bool) -> Any:
    """What a call gives, as tensors without memory; None where only running it tells. UserError where it fails."""
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    def empty(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(empty, value))
        ty = getattr(value, "type", None)
        if not isinstance(ty, Type):
            return value
        dtype, strides = to_torch_dtype(ty.dtype), ty.strides if strided and ty.strides is not None else None
        shape: Any = ty.shape
        return torch.empty(shape, dtype=dtype) if strides is None else torch.empty_strided(shape, strides, dtype=dtype)

    try:
        with torch.no_grad(), _without_memory():
            return called(*to_torch(empty(tuple(args))), **{k: to_torch(empty(v)) for k, v in kwargs.items()})
    except (DataDependentOutputException, DynamicOutputShapeException, NotImplementedError):
        return None
    except UserError:
        raise
    except Exception as why:  # whatever PyTorch has against it
        told = [line for line in str(why).splitlines() if line.strip()]
        raise UserError(f"{called}: {told[0] if told else type(why).__name__}") from why


def tried(name: str, args: Any, kwargs: Any, of: Any) -> Any:
    """What an operator gives by PyTorch's own word, with strides: a type, or a tuple of them; None where only running
    it tells. `of` gives the types of the nodes among the arguments, or None.
    """
    from terrazzo.ir.node import Node, key_of

    def typed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(typed, value))
        if not isinstance(value, Node):
            return value
        if not isinstance(found := of(value), Type):
            raise UserError(f"{name}: an argument of no known type")
        return _Typed(found)

    try:
        given = typed(args), tuple((k, typed(v)) for k, v in kwargs)
    except UserError:
        return None
    key = name, key_of(given)
    if key not in _tried:
        if len(_tried) == TRIED:
            _tried.clear()
        _tried[key] = _types(name, *given)
    return _tried[key]


def pointwise(name: str) -> bool:
    """Whether an operator goes point by point, as PyTorch marks it."""
    import torch

    return torch.Tag.pointwise in operator(name).tags


TRIED = 4096
"""Calls whose results are remembered."""
_tried: dict[Any, Any] = {}


def _types(name: str, args: Any, kwargs: Any) -> Any:
    from terrazzo.ir.torch_types import type_of

    try:
        found = _shapes(operator(name), args, dict(kwargs), True)
        several = isinstance(found, tuple | list)
        types = tuple(None if x is None else type_of(x) for x in (found if several else (found,)))
    except (UserError, Limitation):  # the op works on real tensors only
        return None
    return types if several else types[0]


@dataclass(frozen=True)
class _Typed:
    """Stands for a tensor."""

    type: Type


@contextmanager
def _without_memory() -> Iterator[None]:
    """Within this, tensors have no memory. PyTorch says nothing of ops that it cannot try so: we ask whether it can."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        with FakeTensorMode():
            yield
    finally:
        log.disabled = before


def _compare(name: str, found: Any, declared: Any) -> None:
    several = isinstance(found, tuple | list)
    given = tuple(found) if several else (found,)
    said = tuple(declared) if isinstance(declared, tuple | list) else (declared,)
    if len(given) != len(said) or (several != isinstance(declared, tuple) and not isinstance(declared, list)):
        gives = f"a tuple of {len(given)}" if several else "one tensor"
        says = f"a tuple of {len(said)}" if isinstance(declared, tuple | list) else "one tensor"
        raise UserError(f"{name} gives {gives}, and the text declares {says}")
    for tensor, ty in zip(given, said, strict=True):
        if ty is None:
            continue
        is_ = None if tensor is None else (from_torch_dtype(tensor.dtype), tuple(tensor.shape))
        if is_ != (ty.dtype, ty.shape):
            raise UserError(f"{name} gives {'nothing' if is_ is None else Type(*is_)}, and the text declares {ty}")


def _flat(value: Any) -> list[Any]:
    return [x for v in value for x in _flat(v)] if isinstance(value, tuple) else [value]
