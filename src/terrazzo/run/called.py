"""Calls of ops of PyTorch: what is known of one before its tensors are is worked out once for a frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from terrazzo.errors import note
from terrazzo.ir.in_place import given_variant, in_place_variant
from terrazzo.ir.operators import draws
from terrazzo.ir.torch_types import operator, to_torch
from terrazzo.rules.torch_to_tensor.library import takes_any_strides
from terrazzo.run.plan import Slot, Step, decode, slots_in
from terrazzo.run.taken import works_on
from terrazzo.run.tensors import ALIGNED, Expected, alike

if TYPE_CHECKING:
    from terrazzo.run.frame import Frame

Made = Callable[[Mapping[int, Any]], Any]


class Called:
    """A call of an op of PyTorch in a frame. Its results stay where they are, if they lie as the program has them."""

    def __init__(self, step: Step, frame: Frame) -> None:
        plan = frame.plan
        self.frame, self.slots = frame, plan.slots
        self.mine = {k: self._found(k) for k in slots_in([step.args, *step.kwargs.values()])}
        self.finders = tuple(self.mine.values())
        here = works_on(step)
        result = step.results[0]
        self.there = here is not None and result is not None and self.slots[result].onto == here
        self.told = self._found(result) if step.told and result is not None else None
        exactly = not (takes_any_strides(step.name) or draws(step.name))
        # Of an input, it may be a copy that eager gives the op: it gets the plainest.
        inputs = (k for k, s in enumerate(self.slots) if s.kind == "input" and not (self.there and k == here))
        self.copied = frozenset(inputs if exactly else ())
        self.args = [self._made(x) for x in step.args]
        self.kwargs = [(name, self._made(x)) for name, x in step.kwargs.items()]
        variant = in_place_variant if self.there else given_variant if self.told else str
        self.operator = operator(variant(step.name))
        self.call = getattr(self.operator, "_op", self.operator)  # what that calls
        self.from_begin = step.name.startswith("aten.as_strided")
        self.results = [None if k is None else self._result(k) for k in step.results]
        self.alone = self._alone()

    def _alone(self) -> _Result | None:
        """The result, where the op has one that may lie wherever it likes."""
        if len(self.results) > 1 or (x := self.results[0]) is None:
            return None
        return None if x.empty or x.apart or self.slots[x.slot].kind == "result" else x

    def _found(self, k: int) -> Made:
        """What finds a tensor that it is given, or writes to. One that lies in the frame's memory is there from the
        start, and others may be views of one.
        """
        frame = self.frame
        at = frame.root.get(k, k)
        if at in frame.layout.offsets:
            lying = frame.view(k, {})
            return lambda _: lying
        return partial(frame.view, k) if at != k or self.slots[k].within is not None else itemgetter(k)

    def _made(self, value: Any) -> Made:
        """What makes an argument of the tensors of the plan."""
        if not (mentioned := slots_in([value])):
            found = to_torch(decode(value, {}))
            return lambda _: found
        if isinstance(value, list):
            each = [self._made(x) for x in value]
            return lambda tensors: [x(tensors) for x in each]
        (k,) = mentioned
        find = self.mine[k]
        if set(value) == {"view"}:
            return lambda tensors: decode(value, {k: find(tensors)})
        if k in self.copied:
            return lambda tensors: find(tensors).contiguous()
        return find

    def _result(self, k: int) -> _Result:
        """What is known of a result."""
        frame, slots = self.frame, self.slots
        # Nobody else will have their memory, or not as long as the view is needed.
        own = {n for n in self.mine if frame.root.get(n, n) in frame.layout.own}
        own |= {n for n in self.mine if k in frame.held and frame.held[k] == frame.held.get(n, n)}
        lost = self.mine if k in frame.overwritten else frame.overwritten
        apart = (n for n in self.mine if n in lost or (n not in own and not _may_share(slots[n], slots[k])))
        return _Result(k, Expected(slots[k], frame.machine.device), tuple(apart), not slots[k].bytes)

    def __call__(self, tensors: dict[int, Any]) -> None:
        """Call it with the tensors of the plan by their slots, among which its results are then. Nobody asks for
        gradients of what it does.
        """
        args = [x(tensors) for x in self.args]
        if self.from_begin and args[0].storage_offset():  # it counts from where memory begins: in an arena, there lie
            args[0] = args[0].clone()  # others
        kwargs = {name: x(tensors) for name, x in self.kwargs}
        if self.told:
            kwargs["out"] = self.told(tensors)
        try:
            out = self.call(*args, **kwargs)
        except Exception as error:
            note(error, *(self.slots[x.slot].name for x in self.results if x is not None))
            raise
        if self.there or self.told:
            return
        if (alone := self.alone) is not None and not isinstance(out, (tuple, list)):
            kept = out if alone.fits(out) else alone.expected.empty().copy_(out)
            tensors[alone.slot] = kept
            self.frame.point({alone.slot: kept})
            return
        made: dict[int, Any] = {}
        taken = [_place(find(tensors)) for find in self.finders]
        for x, value in zip(self.results, out if isinstance(out, (tuple, list)) else (out,), strict=True):
            if x is None:
                continue
            if x.empty:  # it may be anything
                kept = x.expected.empty()
            elif x.fits(value) and ((place := _place(value)) not in taken or self._may_lie(x, place, made, tensors)):
                kept = value
            else:
                kept = x.expected.empty().copy_(value)
            made[x.slot] = kept
            taken.append(_place(kept))
        tensors.update(made)
        self.frame.point(made)

    def _may_lie(self, x: _Result, place: int, made: Mapping[int, Any], tensors: Mapping[int, Any]) -> bool:
        """Whether a result may lie in memory that something else has taken: nothing that it is to be apart from, and
        none of the other results, of the call and of the plan.
        """
        if place in map(_place, [*(self.mine[n](tensors) for n in x.apart), *made.values()]):
            return False
        others = self.frame.plan.results if self.slots[x.slot].kind == "result" else ()
        return place not in (_place(tensors[r]) for r in others if r in tensors)


@dataclass
class _Result:
    """The slot of a result, what it must be, the tensors given in whose memory it may not lie, whether it is empty; and
    what says at once that one is as another was that could be kept.
    """

    slot: int
    expected: Expected
    apart: tuple[int, ...]
    empty: bool
    alike: Callable[..., bool] | None = None

    def fits(self, value: Any) -> bool:
        """Whether it can stay as an op gave it, wherever others lie."""
        if self.alike and self.alike(value) and (self.expected.anywhere or not value.data_ptr() % ALIGNED):
            return True
        if fits := self.expected.may_keep(value):
            self.alike = alike([value])
        return fits


def _place(t: Any) -> int:
    """Where the memory of a tensor begins."""
    return int(t.untyped_storage().data_ptr())


def _may_share(given: Slot, result: Slot) -> bool:
    """Whether what an op gives may lie in the memory of what it was given: PyTorch keeps what is its own as long as
    somebody needs it, and inputs, which nobody writes while a plan runs, are not given back as results.
    """
    return given.kind == "call" or (given.kind == "input" and result.kind == "call")
