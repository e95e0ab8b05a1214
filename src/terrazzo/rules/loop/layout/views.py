"""Give calls of PyTorch views of memory in place of copies of it."""

from __future__ import annotations

from typing import Any

from terrazzo.ir.address import coefficient, flatten
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.node import substitute
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.torch_to_tensor.library import takes_any_strides


def pass_views(program: l.Program, log: Log) -> l.Program:
    """`program` with a view of another buffer in place of every copy that only calls read. The calls are those that a
    library was chosen for, which take tensors of any strides, and those that expect the strides that the view has.

    @loop
    def f(x: f32[3, 2], y: f32[3, 4]):
        with kernel('t', t=f32[2, 3]):
            for a0 in free(2):
                for a1 in free(3):
                    in0 = x[a1, a0]
                    t[a0, a1] = in0
        z, = call('aten.mm.default', t, y, _types=(f32[2, 4],))
        return (z,)
    =>
    @loop
    def f(x: f32[3, 2], y: f32[3, 4]):
        z, = call('aten.mm.default', view(x, [2, 3], [1, 2], 0), y, _types=(f32[2, 4],))
        return (z,)
    """
    needed = set(program.results) | {b for s in program.steps if isinstance(s, l.Kernel) for b in s.reads}
    asked = {b for s in program.steps if isinstance(s, l.Call) and not takes_any_strides(s.name) for b in s.reads}
    views: dict[Any, l.View] = {}
    for store in (x for s in program.steps if isinstance(s, l.Kernel) for x in s.stores):
        found = _view(store) if store.buffer not in needed else None
        if found is not None and (store.buffer not in asked or _lies_like(found, store.buffer)):
            views[store.buffer] = found
    if not views:
        return program
    for buffer, view in views.items():
        log.add(Event("pass_views", "pass_views", buffer.name, True, f"a view of {view.buffer.name}"))
    steps: list[l.Kernel | l.Call] = []
    for s in program.steps:
        if isinstance(s, l.Call):
            steps.append(s if views.keys().isdisjoint(s.reads) else _given(s, views))
        elif views.keys().isdisjoint(s.writes):
            steps.append(s)
        elif stores := tuple(x for x in s.stores if x.buffer not in views):
            axes = tuple(a for a in s.axes if any(a in x.free for x in stores))
            steps.append(l.Kernel(s.name, axes, stores, s.source))
    return l.Program(program.name, program.inputs, tuple(steps), program.results)


def _lies_like(view: l.View, buffer: l.Buffer) -> bool:
    """Whether a view has the strides of a buffer, as far as these matter."""
    places = zip(view.shape, view.strides, buffer.type.element_strides, strict=True)
    return all(extent == 1 or a == b for extent, a, b in places)


def _given(call: l.Call, views: dict[Any, l.View]) -> l.Call:
    """The call with views for its arguments."""
    kwargs = tuple((k, _argument(v, views)) for k, v in call.kwargs)
    return l.Call(call.name, _argument(call.args, views), kwargs, call.results, call.order, call.source)


def _argument(value: Any, views: dict[Any, l.View]) -> Any:
    if isinstance(value, tuple):
        return tuple(_argument(v, views) for v in value)
    return views.get(value, value) if isinstance(value, l.Buffer) else value


def _view(store: l.Store) -> l.View | None:
    """What a kernel copies, as a view of where it is; None where it does more, or where strides cannot say it."""
    load, shape = store.value, store.buffer.type.shape
    if not isinstance(load, l.Load) or load.inside or not all(isinstance(e, int) for e in shape):
        return None
    place = flatten(load.index, load.buffer.type.element_strides)
    strides = []
    for at, extent in zip(store.index, shape, strict=True):
        step = 0 if at == 0 else coefficient(place, at) if isinstance(at, Var) else None
        if not isinstance(step, int) or step < 0:
            return None
        strides.append(step if extent != 1 else 1)
    offset = substitute(place, {at: 0 for at in store.index if isinstance(at, Var)})
    found = all(isinstance(s, int) for s in shape) and isinstance(offset, int) and offset >= 0
    return l.View(load.buffer, tuple(shape), tuple(strides), offset) if found else None  # type: ignore[arg-type]
