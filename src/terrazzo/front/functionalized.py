"""PyTorch's functionalization, with what it asks at every op asked once for the op.

Above what is traced, `FunctionalTensorMode` makes programs functional: it finds out what kind an op is, takes its
operands out of trees and their wrappers, has C++ do the work, and puts the results back. For an op of ATen that changes
nothing, and that is not taken apart, only the work in C++ matters; and where it is no view, and what it becomes is
known (`front/repeated.py`), there is nothing to do but for the wrappers. All else is left to PyTorch.
"""

from __future__ import annotations

from typing import Any

from terrazzo.front.repeated import known_again

_WANTED = (
    "_from_functional_tensor",
    "_to_functional_tensor",
    "_functionalize_enable_reapply_views",
    "_disable_functionalization",
)
"""Private functions of PyTorch that this stands on."""
_PLAIN = (int, bool, float, complex, str, type(None))


def mode() -> Any:
    """The mode under which a call becomes functional: PyTorch's own where it is not as we know it."""
    import torch
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
    from torch.utils import _python_dispatch

    aliased: Any = getattr(_python_dispatch, "return_and_correct_aliasing", None)
    guards = ("_ForceDispatchKeyGuard", "_dispatch_tls_local_include_set", "_dispatch_tls_local_exclude_set")
    known = all(hasattr(torch, n) for n in _WANTED) and all(hasattr(torch._C, n) for n in guards)
    if aliased is None or not known or not hasattr(FunctionalTensor, "_extra_dispatch_keys"):
        return FunctionalTensorMode()
    synced: Any = getattr(FunctionalTensorMode, "_sync_view_replay_annotations", None)
    words = (torch.dtype, torch.device, torch.layout, torch.memory_format)
    functionalize = torch._C.DispatchKey.Functionalize
    only, extra = torch._C.DispatchKeySet(functionalize), FunctionalTensor._extra_dispatch_keys

    class Unlike(Exception):
        """An argument is neither a tensor of this mode nor plain."""

    def unwrapped(x: Any) -> Any:
        kind = type(x)
        if kind is FunctionalTensor:
            return x.elem
        if kind in _PLAIN or kind in words:
            return x
        if kind in (list, tuple):
            return kind([unwrapped(y) for y in x])
        raise Unlike

    def inside(x: Any) -> Any:
        """The same, where nothing was written to since it was made."""
        if isinstance(x, (list, tuple)):
            return type(x)([inside(y) for y in x])
        return torch._from_functional_tensor(x) if isinstance(x, torch.Tensor) else x

    class Mode(FunctionalTensorMode):  # type: ignore[misc]
        """One for a trace."""

        def __init__(self) -> None:
            super().__init__()
            self.views: dict[Any, bool | None] = {}
            self.written = False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in self.views:
                self.views[func] = None if func in FunctionalTensor.metadata_fns else _is_view(func)
            view = self.views[func]
            if view is None or (self.written and synced is None):
                self.written = self.written or not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable
                return super().__torch_dispatch__(func, types, args, kwargs)
            kwargs = kwargs or {}
            try:
                given = unwrapped(args)
                named = {name: unwrapped(x) for name, x in kwargs.items()}
            except Unlike:
                return super().__torch_dispatch__(func, types, args, kwargs)
            if self.written:
                synced(self, args, kwargs)
            if not view and (again := known_again(func, inside(given), {n: inside(x) for n, x in named.items()})):
                return self.wrapped(again[0], torch._to_functional_tensor)
            include = torch._C._dispatch_tls_local_include_set() | only
            exclude = torch._C._dispatch_tls_local_exclude_set().remove(functionalize) - extra
            with torch._C._ForceDispatchKeyGuard(include, exclude):
                before = torch._functionalize_enable_reapply_views(True)
                try:
                    found = self.wrapped(func._op_dk(functionalize, *given, **named))
                finally:
                    torch._disable_functionalization()
                    torch._functionalize_enable_reapply_views(before)
            shares = view and isinstance(next(iter(args), None), torch.Tensor)  # autograd asks for the conjugate of 1j
            return aliased(func, args, kwargs, found) if shares else found

        def wrapped(self, x: Any, of: Any = lambda x: x) -> Any:
            if isinstance(x, (list, tuple)):
                items = [self.wrapped(y, of) for y in x]
                return items if isinstance(x, list) else tuple(items)
            if not isinstance(x, torch.Tensor):
                return x
            value = of(x)
            return FunctionalTensor(value, self) if torch._is_functional_tensor(value) else value

    return Mode()


def _is_view(func: Any) -> bool | None:
    """Whether an op gives views of its operands; None where it is not sure to be one that C++ makes functional."""
    import torch

    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or func._schema.is_mutable:
        return None
    special = func is torch.ops.aten.lift_fresh.default or not func._schema.returns
    if special or not hasattr(func, "_op_dk") or getattr(func, "_can_decompose", lambda: True)():
        return None
    return any(x.alias_info for x in (*func._schema.returns, *func._schema.arguments))
