"""What a call does besides giving results, where no program can: refused while it is traced.

Tensors that are changed in place are no matter of this file: a program gives their new values as results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from terrazzo.errors import UserError
from terrazzo.front.lines import note_line

_NO_STATE = ("_parameters", "_buffers", "_modules")


def shares_memory(a: Any, b: Any) -> bool:
    """Whether two tensors lie in one storage."""
    return bool(address(a)[0] and a.untyped_storage().nbytes() and address(a) == address(b))


def address(t: Any) -> tuple[int, Any]:
    """Where the memory of a tensor begins, on which device; 0 where nobody knows."""
    import torch

    return int(t.untyped_storage().data_ptr()) if t.layout is torch.strided else 0, t.device


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

    return torch.func.functional_call(Called(), _everywhere(module, weights), (), tie_weights=False)


def _everywhere(module: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors for all places of a module that hold the tensor of one of these names, each place by one of its names:
    PyTorch, given two names of the place that a shared module has, would leave the new tensor there.
    """
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    new = {id(t): weights[name] for name, t in own.items()}
    return {f"of.{name}": new[id(t)] for name, t in _tensors(module).items() if id(t) in new}


def _tensors(module: Any) -> dict[str, Any]:
    return {
        f"{path}.{name}" if path else name: t
        for path, m in module.named_modules()
        for group in (m._parameters, m._buffers)
        for name, t in group.items()
    }


def watched() -> Any:
    """Within this, writing to a tensor that has one element at several places (as after expand) is a UserError:
    PyTorch makes a functional write of it that is wrong. Tensors that the call finds elsewhere are constants of the
    trace: `refuse_writes_elsewhere` raises a UserError where it wrote to one.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    aten, device = torch.ops.aten, torch.ops.prim.device.default

    def shared(t: Any) -> bool:
        return isinstance(t, torch.Tensor) and any(n > 1 and s == 0 for n, s in zip(t.shape, t.stride(), strict=True))

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        """Looks at what ops read and write."""

        def __init__(self) -> None:
            super().__init__()
            self.elsewhere: dict[int, tuple[Any, Any]] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is device and type(args[0]) is FunctionalTensor:
                value = torch._from_functional_tensor(args[0].elem)
                if type(value) is FakeTensor:
                    return value.fake_device
            note_line()
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
            if func is aten.lift_fresh.default:  # a literal
                return func(*args, **kwargs)
            return func(*map(self.value, args), **{name: self.value(x) for name, x in kwargs.items()})

        def value(self, x: Any) -> Any:
            """What stands for a tensor of the outside in the trace, in lists of them too; anything else as it is."""
            if type(x) in (list, tuple):
                return type(x)(map(self.value, x))
            if type(x) not in (torch.Tensor, torch.nn.Parameter):
                return x
            if id(x) not in self.elsewhere:
                self.elsewhere[id(x)] = x, FunctionalTensor.to_functional(aten.alias.default(x))
            return self.elsewhere[id(x)][1]

        def refuse_writes_elsewhere(self) -> None:
            for t, value in self.elsewhere.values():
                if torch._functionalize_has_data_mutation(value.elem):
                    raise UserError(
                        f"the call writes to a tensor of shape {list(t.shape)} that is no argument of it; make it one, "
                        "or a buffer of the module"
                    )

    return Watch()


@dataclass(frozen=True)
class Set:
    """An attribute that a call sets: of which object, called what (with and without the path), and its new value."""

    owner: Any
    path: str
    name: str
    value: Any

    @property
    def is_plain(self) -> bool:
        """Whether it is a number, say, that nobody else asks for."""
        return _is_plain(self.value) and self.name != "training"


@contextmanager
def nothing_else_changes(module: Any, arguments: Any, later: list[Set] | None = None) -> Iterator[None]:
    """UserError where a call within this changes attributes of the module or of an argument, or what lists and
    dictionaries among the arguments hold; `later` gets those instead that are set to a plain value. The attributes are
    put back.
    """
    import torch
    from torch.utils import _pytree as pytree

    leaves, tree = pytree.tree_flatten(arguments)
    objects = [x for x in leaves if hasattr(x, "__dict__") and not isinstance(x, (torch.Tensor, type))]
    owners = {f"{type(o).__name__}.": o for o in objects}
    owners.update({f"{path}." if path else "": m for path, m in (module.named_modules() if module is not None else ())})
    before = {name: _attributes(o) for name, o in owners.items()}
    yield
    after, now = pytree.tree_flatten(arguments)
    if now != tree or any(a is not b for a, b in zip(leaves, after, strict=True)):
        raise UserError(f"the call changes a list or a dictionary among its arguments{_INSTEAD}")
    touched: list[Set] = []
    for path, o in owners.items():
        found = _attributes(o)
        names = [n for n, held in before[path].items() if not held.same(found.get(n))]
        names += [n for n in found if n not in before[path]]
        touched += [Set(o, path, n, vars(o).get(n, _GONE)) for n in names if not _of_torch(o, n)]
        if names:
            _put_back(o, before[path])
    if later is not None:
        later += [x for x in touched if x.is_plain]
        touched = [x for x in touched if not x.is_plain]
    if touched:
        raise not_set(touched)


def not_set(touched: Sequence[Set]) -> UserError:
    """What is said of attributes that a call sets."""
    names = ", ".join(x.path + x.name for x in touched[:3])
    names += f" and {len(touched) - 3} more" if len(touched) > 3 else ""
    once = "; if only its first call does (to fill a cache, say), make that call before it is compiled; if all do"
    return UserError(f"the call sets {names}, which a compiled one would not do{once}, {_INSTEAD[2:]}")


@contextmanager
def attributes_set(touched: Sequence[Set]) -> Iterator[None]:
    """Within this, the attributes have their new values."""
    before = {id(x.owner): (x.owner, _attributes(x.owner)) for x in touched}
    try:
        for x in touched:
            setattr(x.owner, x.name, x.value)
        yield
    finally:
        for owner, held in before.values():
            _put_back(owner, held)


_INSTEAD = '; return the new value instead, or use torch.compile(..., backend="terrazzo")'
_GONE = object()
"""Stands for the value of an attribute that was deleted."""


def _of_torch(o: Any, name: str) -> bool:
    """Whether an attribute is a list that a recurrent module makes anew when others stand for its weights."""
    import torch

    return isinstance(o, torch.nn.RNNBase) and name in ("_flat_weights", "_flat_weight_refs")


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))


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
