"""What a call does besides giving results, where no program can: refused while it is traced.

Tensors that are changed in place are no matter of this file: a program gives their new values as results.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from terrazzo.errors import UserError

_NO_STATE = ("_parameters", "_buffers", "_modules")


def shares_memory(a: Any, b: Any) -> bool:
    """Whether two tensors lie in one storage."""
    return bool(_address(a) and a.untyped_storage().nbytes() and a.device == b.device and _address(a) == _address(b))


def _address(t: Any) -> int:
    import torch

    return int(t.untyped_storage().data_ptr()) if t.layout is torch.strided else 0


def functional(module: Any, weights: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
    """The module's result with these tensors in place of its own; UserError where it puts others into their place."""
    import torch

    class Called(torch.nn.Module):  # type: ignore[misc]
        """The module, looked at when its call is over and the tensors are still in place."""

        def __init__(self) -> None:
            super().__init__()
            self.of = module

        def forward(self) -> Any:
            before = _tensors(module)
            out = module(*args, **kwargs)
            for name, t in _tensors(module).items():
                if t is not before.get(name):
                    raise UserError(
                        f"the call gives the module another {name}; write into the one it has ({name}.copy_(...)), or "
                        'use torch.compile(..., backend="terrazzo")'
                    )
            return out

    return torch.func.functional_call(Called(), {f"of.{name}": t for name, t in weights.items()}, ())


def _tensors(module: Any) -> dict[str, Any]:
    return {
        f"{path}.{name}" if path else name: t
        for path, m in module.named_modules()
        for group in (m._parameters, m._buffers)
        for name, t in group.items()
    }


def writes_where_elements_share_places_refused() -> Any:
    """Within this, writing to a tensor that has one element at several places (as after expand) is a UserError:
    PyTorch makes a functional write of it that is wrong.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten

    def shared(t: Any) -> bool:
        return isinstance(t, torch.Tensor) and any(n > 1 and s == 0 for n, s in zip(t.shape, t.stride(), strict=True))

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        """Looks at what ops write to."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func._schema.is_mutable:
                given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
                written = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
                if func.overloadpacket in (aten.set_, aten.resize_, aten.resize_as_):
                    raise UserError(f"{func} gives a tensor other memory; use another tensor instead")
                if any(shared(given.get(name)) for name in written):
                    raise UserError(
                        f"{func} writes to a tensor that has one element at several places, as after expand; "
                        "clone it first"
                    )
                if any(a.kwarg_only for a in func._schema.arguments if a.name in written):  # it might be resized
                    raise UserError(f"{func}: results are not written to `out`; use out.copy_(...)")
            return func(*args, **kwargs)

    return Watch()


@contextmanager
def nothing_else_changes(module: Any, arguments: Any, weights: Collection[Any] = ()) -> Iterator[None]:
    """UserError where a call within this changes attributes of the module or of an argument, or what lists and
    dictionaries among the arguments hold. The attributes are put back.

    A list of the module's own tensors, as recurrent modules keep one, may have become one of the `weights` that stand
    for them in the call: it is put back, and that is all.
    """
    import torch
    from torch.utils import _pytree as pytree

    leaves, tree = pytree.tree_flatten(arguments)
    objects = [x for x in leaves if hasattr(x, "__dict__") and not isinstance(x, (torch.Tensor, type))]
    owners = {f"{type(o).__name__}.": o for o in objects}
    owners.update({f"{path}." if path else "": m for path, m in (module.named_modules() if module is not None else ())})
    before = {name: _attributes(o) for name, o in owners.items()}
    own = list(_tensors(module).values()) if module is not None else []
    yield
    after, now = pytree.tree_flatten(arguments)
    if now != tree or any(a is not b for a, b in zip(leaves, after, strict=True)):
        raise UserError(f"the call changes a list or a dictionary among its arguments{_INSTEAD}")
    touched, changed = [], False
    for owner, o in owners.items():
        found = _attributes(o)
        others = [n for n, held in before[owner].items() if not held.same(found.get(n))]
        changed = changed or bool(others)
        touched += [
            owner + n for n in others if n not in found or not (before[owner][n].of(own) and found[n].of(weights))
        ]
        touched += [owner + n for n in found if n not in before[owner]]
    if touched or changed:
        for owner, o in owners.items():
            _put_back(o, before[owner])
    if touched:
        raise UserError(f"the call sets {', '.join(touched)}, which a compiled one would not do{_INSTEAD}")


_INSTEAD = '; return the new value instead, or use torch.compile(..., backend="terrazzo")'


@dataclass(frozen=True)
class _Held:
    """The value of an attribute, and what it held where it is a list, a set or a dictionary."""

    value: Any
    contents: tuple[Any, ...] = ()

    def same(self, other: _Held | None) -> bool:
        return (
            other is not None
            and _equal(self.value, other.value)
            and len(self.contents) == len(other.contents)
            and all(map(_equal, self.contents, other.contents))
        )

    def of(self, tensors: Collection[Any]) -> bool:
        """Whether it is a list of some of these tensors, or of weak references to them."""
        held = [x() if isinstance(x, weakref.ref) else x for x in self.contents]
        return isinstance(self.value, list) and all(any(x is t for t in tensors) for x in held)

    def back(self) -> Any:
        """The value, holding again what it held."""
        if isinstance(self.value, list):
            self.value[:] = self.contents
        elif isinstance(self.value, (set, dict)):
            self.value.clear()
            self.value.update(self.contents)
        return self.value


def _attributes(o: Any) -> dict[str, _Held]:
    found = {n: v for n, v in vars(o).items() if n not in _NO_STATE or not hasattr(o, "_modules")}
    return {
        name: _Held(v, tuple(v.items() if isinstance(v, dict) else v if isinstance(v, (list, set)) else ()))
        for name, v in found.items()
    }


def _equal(a: Any, b: Any) -> bool:
    """The same object, or equal plain values."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a is b or (type(a) is type(b) and isinstance(a, (bool, int, float, complex, str, bytes)) and a == b)


def _put_back(o: Any, before: Mapping[str, _Held]) -> None:
    for name in [n for n in _attributes(o) if n not in before]:
        del vars(o)[name]
    vars(o).update({name: held.back() for name, held in before.items()})
