"""What a call gives back, made of what its program computes.

The values of a program have no memory, but PyTorch's tensors do: a result may be a view of another result, or of an
input, and whoever writes to one of them sees it in the other. The tensors of a traced graph say who shares storage with
whom; results that share it are made here as views of one tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from terrazzo.errors import Limitation
from terrazzo.front.fx import attribute
from terrazzo.front.written import Write
from terrazzo.ir.torch_types import type_of
from terrazzo.ir.types import dense
from terrazzo.run.tensors import window_maker


@dataclass(frozen=True)
class View:
    """A window on the memory of another tensor: `offset` elements (of `dtype`) after that tensor's first.

    Autograd does not know of one that is not `tracked`, as with aten._unsafe_view.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: Any
    tracked: bool
    conjugate: bool
    negative: bool

    def of(self, base: Any) -> Any:
        """The window on the memory of `base`."""
        import torch

        if self.tracked and base.dtype is self.dtype:
            found = base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)
        elif base.dtype is self.dtype and (window := window_maker()):
            found = window(base, self.size, self.stride, self.offset)
        else:
            start = base.storage_offset() * base.itemsize // self.dtype.itemsize + self.offset
            found = torch.empty(0, dtype=self.dtype, device=base.device)
            found.set_(base.untyped_storage(), start, self.size, self.stride)
        found = found.conj() if self.conjugate else found
        return torch._neg_view(found) if self.negative else found


@dataclass(frozen=True)
class Result:
    """One result: what `of` says, or a view of that.

    `of` is "value", "input" or, for one tensor that is returned twice, "result", with its number `k`; or it is
    "constant", with the constant itself.
    """

    of: str
    k: Any
    view: View | None = None


@dataclass(frozen=True)
class Results:
    """All results of a call. `layouts` are the shapes and strides that its computed values must have in memory."""

    each: tuple[Result, ...]
    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @cached_property
    def fresh(self) -> bool:
        """Whether the results are the computed values, in order."""
        return self.each == tuple(Result("value", k) for k in range(len(self.layouts)))

    def only(self, values: Sequence[Any]) -> Any:
        """The one result that is the one computed value."""
        return laid_out(values[0], *self.layouts[0])

    def make(self, inputs: Any, values: Sequence[Any]) -> list[Any]:
        """The results, from the inputs of the call (those that are needed, by number) and the values of the program."""
        pairs = zip(values, self.layouts, strict=True)
        values = [v if v.stride() == at[1] else laid_out(v, *at) for v, at in pairs]
        if self.fresh:
            return values
        out: list[Any] = []
        sources = {"value": values, "input": inputs, "result": out}
        for r in self.each:
            base = sources[r.of][r.k] if r.of in sources else r.k
            out.append(base if r.view is None else r.view.of(base))
        return out


def arrange(
    graph: Any,
    wanted: Sequence[Any],
    *,
    views: bool = True,
    placed: Collection[Any] = (),
    known: Sequence[Result | None] = (),
    renewed: Sequence[Write] = (),
) -> tuple[list[Any], Results]:
    """The nodes whose values a program must compute for the `wanted` ones of a traced graph, and what becomes of them.

    `known` says where results come from, as far as that is known already. Without `views` every other wanted value is
    computed by itself, where it is no input, and lies row by row unless it is `placed`, as it was traced (see
    `lying_alike`). What looks at the new value of a `renewed` input looks at that input, which has it then; its old
    value is computed, as others.
    """
    import torch

    places = {n: k for k, n in enumerate(n for n in graph.graph.nodes if n.op == "placeholder")}
    roots, hidden = _roots(graph)
    for write in renewed:
        old, new = write.old.meta["val"], write.new.meta["val"]
        places[write.node] = places[write.old]
        fresh = roots[storage(new)] is write.new and write.new not in wanted  # else a result may have that memory, too
        if views and fresh and new.stride() == old.stride() and not new.storage_offset():
            places[write.new] = places[write.old]
    computed: dict[Any, int] = {}
    each: list[Result] = []
    stale = {write.old for write in renewed}
    rest = [w for k, w in enumerate(wanted) if not (known and known[k])]
    shared = Counter(_root(w, roots) for w in dict.fromkeys(rest) if isinstance(w, torch.fx.Node))
    for k, w in enumerate(wanted):
        root = _root(w, roots) if isinstance(w, torch.fx.Node) else None
        if known and (found := known[k]):
            each.append(found)
        elif root is None:
            each.append(Result("constant", w))
        elif w in places and w not in stale:
            each.append(Result("input", places[w]))
        elif w in wanted[:k]:
            each.append(Result("result", wanted.index(w)))
        elif views and root in places and root not in stale:
            each.append(Result("input", places[root], _between(w, root, hidden)))
        elif views and w is not root and (shared[root] > 1 or root.meta["val"].numel() <= w.meta["val"].numel()):
            alone = {w} if shared[root] == 1 else set()  # nothing else looks at that memory: autograd need not know
            each.append(Result("value", computed.setdefault(root, len(computed)), _between(w, root, hidden | alone)))
        else:
            each.append(Result("value", computed.setdefault(w, len(computed))))
    layouts = tuple((tuple(n.meta["val"].shape), _strides(n.meta["val"], views or n in placed)) for n in computed)
    return list(computed), Results(tuple(each), layouts)


def lying_alike(wanted: Sequence[Any], inputs: Sequence[Any]) -> set[Any]:
    """The gradients of a traced graph that lie as the inputs do which they are of, and not row by row: those of weights
    and images that are channels last, and of what is transposed. Others are traced so where eager's may lie otherwise
    (those of keys, which PyTorch's definition of attention has with their tokens innermost), and autograd lays out
    what it keeps as the leaf lies.
    """
    import torch

    def order(value: Any) -> Any:
        plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
        return dense(type_of(value)).strides if plain else None

    if len(wanted) != len(inputs):
        return set()
    values = [w.meta.get("val") if isinstance(w, torch.fx.Node) else None for w in wanted]
    return {w for w, v, x in zip(wanted, values, inputs, strict=True) if order(v) and order(v) == order(x)}


def _strides(value: Any, exactly: bool) -> tuple[int, ...]:
    """How a value that was traced is to lie: as it did, or plainly, where that takes no more room."""
    import torch

    traced = tuple(value.stride())
    if exactly or _span(value.shape, traced) < value.numel():
        return traced
    return tuple(torch.empty(value.shape, device="meta").stride())


def _roots(graph: Any) -> tuple[dict[Any, Any], set[Any]]:
    """For every storage of a graph the node that made it; and the nodes that hide from autograd that they are views."""
    import torch

    roots: dict[Any, Any] = {}
    hidden = set()
    for n in graph.graph.nodes:
        if n.op == "get_attr" and "val" not in n.meta:
            n.meta["val"] = attribute(graph, n.target)
        if not isinstance(n.meta.get("val"), torch.Tensor):
            continue
        root = roots.setdefault(storage(n.meta["val"]), n)
        if n.target is torch.ops.aten._unsafe_view.default or any(
            a in hidden and _root(a, roots) is root for a in n.all_input_nodes
        ):
            hidden.add(n)
    return roots, hidden


def _root(node: Any, roots: Mapping[Any, Any]) -> Any:
    import torch

    value = node.meta.get("val")
    return roots.get(storage(value), node) if isinstance(value, torch.Tensor) else node


def storage(tensor: Any) -> int:
    """What says whose memory a tensor lies in; a tensor without a storage has memory of its own."""
    import torch

    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)


def _between(node: Any, root: Any, hidden: set[Any]) -> View:
    return view(node.meta["val"], root.meta["val"], tracked=node not in hidden)


def view(value: Any, base: Any, *, tracked: bool = True) -> View:
    """How a tensor looks at the memory of another; Limitation where that cannot be said."""
    start = value.storage_offset() * value.itemsize - base.storage_offset() * base.itemsize
    end = start + value.itemsize * _span(value.shape, value.stride())
    inside = (start >= 0 and end <= base.itemsize * _span(base.shape, base.stride())) or not value.numel()
    if not inside or storage(value) != storage(base) or start % value.itemsize or base.is_conj() or base.is_neg():
        raise Limitation("a result lies in the memory of another tensor, and not within what the program knows of it")
    return View(
        tuple(value.shape),
        tuple(value.stride()),
        start // value.itemsize,
        value.dtype,
        tracked,
        value.is_conj(),
        value.is_neg(),
    )


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last, both included."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def laid_out(value: Any, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    """The value with these strides, which later graphs may rely on: as it is, where the program stores it so."""
    if value.stride() == stride:
        return value
    import torch

    if all(n == 1 or a == b for n, a, b in zip(shape, value.stride(), stride, strict=True)):
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(
            value.untyped_storage(), value.storage_offset(), shape, stride
        )
    room = _span(shape, stride)
    if room >= value.numel():
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device).copy_(value)
    storage = torch.empty(room, dtype=value.dtype, device=value.device)  # elements share places, as after expand
    places = torch.arange(room, device=value.device).as_strided(shape, stride)
    storage[places.reshape(-1)] = value.reshape(-1)
    return storage.as_strided(shape, stride)
