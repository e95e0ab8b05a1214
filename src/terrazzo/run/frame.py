"""What a call works in: its temporaries, its prepared launches, and what it does in which order."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import methodcaller
from typing import Any

from terrazzo.errors import UserError
from terrazzo.ir.torch_types import to_torch_dtype
from terrazzo.ir.types import DTYPES
from terrazzo.run.arena import ALIGN
from terrazzo.run.branches import Place
from terrazzo.run.called import Called
from terrazzo.run.cpu import Cpu
from terrazzo.run.cuda import Cuda
from terrazzo.run.own import layout, runs
from terrazzo.run.plan import Plan, held, made_by_calls, places_in, spans
from terrazzo.run.streams import Streams
from terrazzo.run.taken import adopted, roots, updated
from terrazzo.run.tensors import Expected

SINGLY = 2
"""Calls in which a frame launches kernels one by one before it makes graphs of them: many are called no more often."""
FEW = 4
"""Launches that are a graph at least: the device begins with a graph later than with a kernel."""


class Frame:
    """Temporaries and prepared launches of one call at a time. Its steps run one after the other, or those of other
    `branches` beside each other. After so many `singly` kernels are launched as graphs.
    """

    def __init__(
        self,
        plan: Plan,
        machine: Cpu | Cuda,
        functions: Sequence[Any],
        bound: Set[int],
        branches: bool = False,
        singly: float = math.inf,
    ) -> None:
        import torch

        self.plan, self.root, self.bound = plan, roots(plan.slots), bound
        self.machine: Any = machine
        self.branches, self.singly = branches, singly
        self.overwritten = frozenset(s.onto for s in plan.slots if s.onto is not None)
        self.held = held(plan)
        self.layout = layout(plan, machine.hands_on and not branches)
        try:
            self.arena = torch.empty(self.layout.size + ALIGN, dtype=torch.uint8, device=machine.device)
        except RuntimeError:  # which is how PyTorch says that the CPU's memory does not suffice
            if machine.device != "cpu":
                raise
            raise MemoryError(f"temporaries take {self.layout.size} bytes") from None
        self.base = (self.arena.data_ptr() + ALIGN - 1) // ALIGN * ALIGN
        self.launches: list[Any] = []
        self.pointers: dict[int, list[tuple[Any, int, int]]] = {}
        self.told: list[int] = []  # the addresses of what the last call was given
        size = ctypes.sizeof(ctypes.c_void_p)
        self.begins = [0, *accumulate(size * len(step.args) if step.key else 0 for step in plan.steps)]
        self.addresses = bytearray(self.begins[-1])  # those of all launches, in their order
        for number, (step, function) in enumerate(zip(plan.steps, functions, strict=True)):
            if function is None:
                self.launches.append(None)
                continue
            array = (ctypes.c_void_p * len(step.args)).from_buffer(self.addresses, self.begins[number])
            for position, mine in enumerate(step.args):
                k, start = self.root.get(mine, mine), plan.slots[mine].start
                slot = plan.slots[k]
                if k in self.layout.offsets:
                    array[position] = self.base + self.layout.offsets[k] + start
                else:
                    alone = slot.within is None or k in self.layout.own
                    where, offset = (k, 0) if alone else (slot.within, slot.offset)
                    self.pointers.setdefault(where, []).append((array, position, offset + start))
            self.launches.append(machine.prepare(step, function, array, number, plan.slots))
        self.calls = {n: Called(plan.steps[n], self) for n, launch in enumerate(self.launches) if launch is None}
        self.work = self.single = self._work(self.launches, [[n] for n in range(len(self.launches))])

    def begin(self) -> list[Work]:
        """What this call does in order."""
        if self.singly == 0:
            with suppress(UserError):  # of the driver, which has no room for graphs
                self.work = self._in_graphs()
        self.singly -= 1
        return self.work

    def _in_graphs(self) -> list[Work]:
        """The same with kernels that follow each other as one CUDA graph each, which takes the host as long as one
        kernel, and half a microsecond for each that reads or writes elsewhere than in the last call.
        """
        plan, launches = self.plan, self.launches
        found = [g for run in runs(plan, self.layout) for g in ([run] if len(run) >= FEW else [[n] for n in run])]

        def launch(group: Sequence[int]) -> Any:
            if len(group) == 1:
                return launches[group[0]]
            places = places_in(plan, group) if self.branches else [Place()] * len(group)
            addresses = memoryview(self.addresses)[self.begins[group[0]] : self.begins[group[-1] + 1]]
            return self.machine.graph([launches[n] for n in group], places, addresses)

        return self._work([launch(group) for group in found], found)

    @cached_property
    def streams(self) -> Streams:
        """What the branches of the plan run on while a graph is captured."""
        return Streams(self.machine, places_in(self.plan, range(len(self.plan.steps))))

    def given(self, tensors: Mapping[int, Any]) -> None:
        """Write the addresses of what a call is given, always in the same order, unless all lies where it did."""
        now = [*map(_address, tensors.values())]
        if now != self.told:
            self.point(tensors)
            self.told = now

    def point(self, tensors: Mapping[int, Any]) -> None:
        """Write the addresses of tensors that are no temporaries of ours."""
        pointers = self.pointers
        for k, tensor in tensors.items():
            if k in pointers:
                begin = tensor.data_ptr()
                for array, position, offset in pointers[k]:
                    array[position] = begin + offset

    def view(self, k: int, tensors: Mapping[int, Any]) -> Any:
        """A tensor of the plan: one of these, or a temporary, or what lies in the memory of one of them."""
        slot, at = self.plan.slots[k], self.root.get(k, k)
        if at in tensors:
            return tensors[at] if at == k else tensors[at].as_strided(slot.shape, slot.strides)
        dtype, lying = to_torch_dtype(DTYPES[slot.dtype]), self.plan.slots[at]
        if at not in self.layout.offsets and lying.within is not None:
            host = tensors[lying.within]
            place = host.storage_offset() * host.element_size() + lying.offset
            return host.new_empty(0, dtype=dtype).set_(
                host.untyped_storage(), place // dtype.itemsize, slot.shape, slot.strides
            )
        start = self.base - self.arena.data_ptr() + self.layout.offsets[at]
        return self.arena[start : start + slot.bytes].view(dtype).as_strided(slot.shape, slot.strides)

    def _work(self, launches: Sequence[Any], groups: Sequence[Sequence[int]]) -> list[Work]:
        """What a call does in order: launches, each of a group of steps. What is never written exists from the start;
        of temporaries those exist that have memory of their `own`.
        """
        plan, own, bound = self.plan, self.layout.own, self.bound
        at = {n: k for k, group in enumerate(groups) for n in group}
        first, last = spans(plan, self.layout.moved)
        begins: list[list[Made]] = [[] for _ in groups]
        ends: list[list[int]] = [[] for _ in groups]
        there = made_by_calls(plan) | updated(plan.slots).keys()
        theirs = adopted(plan.slots)
        for k, slot in enumerate(plan.slots):
            if (k in own or (slot.kind == "result" and k not in there)) and groups:
                make = Expected(slot, self.machine.device).maker()
                begins[at[first.get(k, 0)]].append(Made(k, make, theirs.get(k), self.pointers.get(k, [])))
            if (k in own or slot.kind in ("input", "call")) and k not in bound and k not in plan.results and k in last:
                ends[at[last[k]]].append(k)
        return [Work(g[0], x, b, e) for g, x, b, e in zip(groups, launches, begins, ends, strict=True)]


_address = methodcaller("data_ptr")


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that a call makes: what makes it, or the slot `onto` whose memory it takes; and where its address is to
    be written, with how far behind its begin a kernel reads or writes it.
    """

    slot: int
    make: Callable[[], Any]
    onto: int | None
    places: Sequence[tuple[Any, int, int]]


@dataclass(frozen=True, slots=True)
class Work:
    """A launch, or the call of PyTorch that step `number` is; the tensors that exist from here on, and those that
    nothing needs after it.
    """

    number: int
    launch: Any
    begins: list[Made]
    ends: list[int]
