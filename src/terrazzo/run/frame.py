"""What a call works in: its temporaries, its prepared launches, and what it does in which order."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from terrazzo.ir.torch_types import to_torch_dtype
from terrazzo.ir.types import DTYPES
from terrazzo.run.arena import ALIGN
from terrazzo.run.called import Called
from terrazzo.run.cpu import Cpu
from terrazzo.run.cuda import Cuda
from terrazzo.run.own import Layout, layout
from terrazzo.run.plan import Plan, made_by_calls, places_in, spans
from terrazzo.run.streams import Streams
from terrazzo.run.taken import adopted, roots, updated
from terrazzo.run.tensors import Expected


class Frame:
    """Temporaries and prepared launches of one call at a time, whose steps run one after the other, or `beside` each
    other.
    """

    def __init__(
        self,
        plan: Plan,
        machine: Cpu | Cuda,
        functions: Sequence[Any],
        as_graph: bool,
        bound: Set[int],
        beside: bool = False,
    ) -> None:
        import torch

        self.plan, self.machine, self.root = plan, machine, roots(plan.slots)
        self.adopted = adopted(plan.slots)
        self.overwritten = frozenset(s.onto for s in plan.slots if s.onto is not None)
        self.layout = layout(plan, machine.hands_on and not as_graph and not beside)
        try:
            self.arena = torch.empty(self.layout.size + ALIGN, dtype=torch.uint8, device=machine.device)
        except RuntimeError:  # which is how PyTorch says that the CPU's memory does not suffice
            if machine.device != "cpu":
                raise
            raise MemoryError(f"temporaries take {self.layout.size} bytes") from None
        self.base = (self.arena.data_ptr() + ALIGN - 1) // ALIGN * ALIGN
        launches: list[Any] = []
        self.pointers: dict[int, list[tuple[Any, int, int]]] = {}
        for number, (step, function) in enumerate(zip(plan.steps, functions, strict=True)):
            if function is None:
                launches.append(None)
                continue
            array = (ctypes.c_void_p * len(step.args))()
            for position, mine in enumerate(step.args):
                k, start = self.root.get(mine, mine), plan.slots[mine].start
                slot = plan.slots[k]
                if k in self.layout.offsets:
                    array[position] = self.base + self.layout.offsets[k] + start
                else:
                    alone = slot.within is None or k in self.layout.own
                    where, offset = (k, 0) if alone else (slot.within, slot.offset)
                    self.pointers.setdefault(where, []).append((array, position, offset + start))
            launches.append(machine.prepare(step, function, array, number, plan.slots))
        self.calls = {n: Called(plan.steps[n], self) for n, launch in enumerate(launches) if launch is None}
        singly = [[n] for n in range(len(launches))]
        self.single = _work(plan, launches, singly, machine.device, bound, self.layout)
        self.work = self.single
        if as_graph and not isinstance(machine, Cpu):  # the launches between calls of PyTorch are a graph each
            groups = [list(g) for _, g in itertools.groupby(range(len(launches)), lambda n: launches[n] is None or -1)]
            groups = [g for group in groups for g in ([[n] for n in group] if launches[group[0]] is None else [group])]
            graphs = [
                machine.graph([launches[n] for n in g], places_in(plan, g)) if launches[g[0]] else None for g in groups
            ]
            self.work = _work(plan, graphs, groups, machine.device, bound, self.layout)

    @cached_property
    def streams(self) -> Streams:
        """What the branches of the plan run on while a graph is captured."""
        return Streams(self.machine, places_in(self.plan, range(len(self.plan.steps))))

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
        start = self.base - self.arena.data_ptr() + self.layout.offsets[at]
        dtype = to_torch_dtype(DTYPES[slot.dtype])
        return self.arena[start : start + slot.bytes].view(dtype).as_strided(slot.shape, slot.strides)


@dataclass(frozen=True)
class Work:
    """A launch, or the call of PyTorch that step `number` is; the results that exist from here on, and the tensors that
    nothing needs after it.
    """

    number: int
    launch: Any
    begins: list[tuple[int, Expected]]
    ends: list[int]


def _work(
    plan: Plan,
    launches: Sequence[Any],
    groups: Sequence[Sequence[int]],
    device: str,
    bound: Set[int],
    layout: Layout,
) -> list[Work]:
    """What a call does in order: launches, each of a group of steps. What is never written exists from the start; of
    temporaries those exist that have memory of their `own`.
    """
    at = {n: k for k, group in enumerate(groups) for n in group}
    own = layout.own
    first, last = spans(plan, layout.moved)
    begins: list[list[tuple[int, Expected]]] = [[] for _ in groups]
    ends: list[list[int]] = [[] for _ in groups]
    there = made_by_calls(plan) | updated(plan.slots).keys()
    for k, slot in enumerate(plan.slots):
        if (k in own or (slot.kind == "result" and k not in there)) and groups:
            begins[at[first.get(k, 0)]].append((k, Expected(slot, device)))
        if (k in own or slot.kind in ("input", "call")) and k not in bound and k not in plan.results and k in last:
            ends[at[last[k]]].append(k)
    return [Work(g[0], x, b, e) for g, x, b, e in zip(groups, launches, begins, ends, strict=True)]
