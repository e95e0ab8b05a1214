"""A compiled program as plain data: what to call, in which order, on which memory.

A plan holds numbers, names and nothing else. It is kept in the cache as JSON, so that a second process needs neither
the rules nor the compiler; what is read back is checked field by field, then against the program it is for (`misfit`),
and anything odd means the plan is made again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from terrazzo.errors import UserError
from terrazzo.ir.dialects import kernel
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.tensor import Opaque
from terrazzo.ir.dialects.torch import Aten, TorchName
from terrazzo.ir.node import topological
from terrazzo.ir.types import DTYPES, DType, Type

VERSION = 6
ALIGN = 256


Map = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
"""A tensor map that a kernel takes: which of its arguments, seen with which shape and strides, the box, the swizzle."""


@dataclass(frozen=True)
class Fallback:
    """An op that PyTorch runs for us: since there is no kernel for it, or `chosen` since its library is faster."""

    op: str
    source: str
    chosen: bool = False


@dataclass(frozen=True)
class Slot:
    """A tensor of the plan. `kind`: "input", "result" or "call" (memory of its own, which the op of a call makes), or
    "arena" (at `offset` bytes; of the result `within`, if that is not None, before that is written).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    kind: str
    offset: int = 0
    within: int | None = None

    @property
    def bytes(self) -> int:
        """How much memory it spans."""
        return _span(self.shape, self.strides, DTYPES[self.dtype])


@dataclass(frozen=True)
class Step:
    """A kernel (`key` finds its machine code, `name` is the function) or, with no key, a call of the PyTorch op `name`.

    `args` of a kernel are slots; of a call they are encoded values (see `encode`). `launch` is for a GPU: blocks,
    threads of a block, bytes of shared memory, and whether the kernel notes indices that are out of range (1 or 0).
    `maps` are the tensor maps it takes.
    """

    key: str
    name: str
    args: Any
    kwargs: Any
    results: tuple[int | None, ...]
    source: str
    label: str
    launch: tuple[int, ...] = ()
    maps: tuple[Map, ...] = ()


@dataclass(frozen=True)
class Entry:
    """The machine code of a kernel: its key in the cache, its function, the buffers that takes, and how it is
    launched.
    """

    key: str
    name: str
    buffers: tuple[l.Buffer, ...]
    launch: tuple[int, ...] = ()
    maps: tuple[Map, ...] = ()


@dataclass(frozen=True)
class Plan:
    """`inputs` and `results` are slots, in order; a result may be an input. `arena` is the size of the temporaries in
    bytes.
    """

    inputs: tuple[int, ...]
    results: tuple[int, ...]
    slots: tuple[Slot, ...]
    steps: tuple[Step, ...]
    arena: int

    def to_json(self) -> bytes:
        """The plan as text."""
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Plan:
        """Read a plan back; ValueError where it is not one."""
        try:
            given = json.loads(data)
            if given.pop("version") != VERSION:
                raise ValueError("another version")
            slots = tuple(_slot(s) for s in given["slots"])
            steps = tuple(_step(s, len(slots)) for s in given["steps"])
            inputs, results = (tuple(_index(i, len(slots)) for i in given[k]) for k in ("inputs", "results"))
            arena = _natural(given["arena"])
            if any(not _fits(v, slots) for s in steps if not s.key for v in _views([s.args, *s.kwargs.values()])):
                raise ValueError("a view leaves its slot")
            ends = [arena if s.within is None else slots[_index(s.within, len(slots))].bytes for s in slots]
            if any(s.kind == "arena" and s.offset + s.bytes > end for s, end in zip(slots, ends, strict=True)):
                raise ValueError("a slot lies outside the arena")
            return cls(inputs, results, slots, steps, arena)
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, RecursionError, MemoryError) as e:
            raise ValueError(f"not a plan: {e}") from None


def misfit(plan: Plan, program: Any) -> str:
    """Why a plan that was read back is none for this program, in any IR; "" if all that can be compared agrees."""
    whole = getattr(program, "loop", program)
    wanted = [(b.name, *_kind(b.type), whole_strides(b.type)) for b in whole.inputs]
    if [_described(plan.slots[k]) for k in plan.inputs] != wanted:
        return "its inputs are others"
    if [_described(plan.slots[k])[1:3] for k in plan.results] != [_kind(r.type) for r in whole.results]:
        return "its results are others"
    if stray := {s.name for s in plan.steps if not s.key} - _operators(whole):
        return f"it calls {min(stray)}"
    called = {k for s in plan.steps if not s.key for k in s.results}
    for k, slot in enumerate(plan.slots):
        kind = "input" if k in plan.inputs else "result" if k in plan.results else "call" if k in called else "arena"
        hidden = slot.within is not None and (kind != "arena" or plan.slots[slot.within].kind != "result")
        if slot.kind != kind or slot.offset % ALIGN or hidden:
            return f"{slot.name} lies elsewhere"
    return _shared(plan)


def _described(s: Slot) -> tuple[str, str, tuple[int, ...], tuple[int, ...]]:
    return s.name, s.dtype, s.shape, s.strides


def _kind(ty: Type) -> tuple[str, tuple[int, ...]]:
    return ty.dtype.name, ty.static_shape


def _operators(program: Any) -> set[str]:
    """The operators of PyTorch that a program names."""
    if hasattr(program, "steps"):
        return {s.name for s in program.steps if isinstance(s, l.Call)}
    return {n.name for n in topological(program.results) if isinstance(n, Aten | Opaque)}


def _shared(plan: Plan) -> str:
    """Which tensors of a plan share memory while both are in use; "" if none do."""
    first, last = _uses(plan)
    placed: dict[int | None, list[int]] = {}
    for k, s in enumerate(plan.slots):
        if k in first and s.bytes and s.kind == "arena":
            placed.setdefault(s.within, []).append(k)
    for place, slots in placed.items():
        live: dict[int, tuple[int, int]] = {}  # where each that is still used begins and ends
        for a in sorted(slots, key=first.__getitem__):
            if place is not None and last[a] >= first[place]:
                return f"{plan.slots[a].name} and {plan.slots[place].name} share memory"
            start, end = plan.slots[a].offset, plan.slots[a].offset + plan.slots[a].bytes
            live = {b: where for b, where in live.items() if last[b] >= first[a]}
            if shares := [b for b, (begins, ends) in live.items() if begins < end and start < ends]:
                return f"{plan.slots[shares[0]].name} and {plan.slots[a].name} share memory"
            live[a] = start, end
    return ""


def _uses(plan: Plan) -> tuple[dict[int, int], dict[int, int]]:
    """The first step that mentions a slot, and the last."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for n, s in enumerate(plan.steps):
        for k in s.args if s.key else [*slots_in([s.args, *s.kwargs.values()]), *s.results]:
            if k is not None:
                first.setdefault(k, n)
                last[k] = n
    return first, last


def spans(plan: Plan) -> tuple[dict[int, int], dict[int, int]]:
    """The first step and the last in which a slot's memory is in use, for itself or for what lies in it."""
    first, last = _uses(plan)
    for k, slot in enumerate(plan.slots):
        if slot.within is not None and k in first:
            first[slot.within] = min(first[k], first.get(slot.within, first[k]))
    return first, last


def make(program: l.Program | kernel.Program, entries: Mapping[Any, Entry]) -> Plan:
    """The plan of a program (of Loop IR, or of Kernel IR) whose kernels have this machine code."""
    buffers = list(dict.fromkeys([*program.inputs, *(b for s in program.steps for b in s.writes)]))
    number = {b: k for k, b in enumerate(buffers)}
    called = {b for s in program.steps if isinstance(s, l.Call) for b in s.writes}
    own = set(program.inputs) | set(program.results) | called
    temporaries = [b for b in buffers if b not in own]
    within = hosts(program, temporaries)
    offsets, arena = allocate(program, [b for b in temporaries if b not in within])
    offsets |= {b: offset for b, (_, offset) in within.items()}
    slots = []
    for b in buffers:
        kind = "call" if b in called else "arena"
        kind = "input" if b in program.inputs else "result" if b in program.results else kind
        strides = whole_strides(b.type)
        host = number[within[b][0]] if b in within else None
        slots.append(Slot(b.name, b.type.dtype.name, b.type.static_shape, strides, kind, offsets.get(b, 0), host))
    steps = []
    for s in program.steps:
        if not isinstance(s, l.Call):
            e = entries[s]
            steps.append(
                Step(e.key, e.name, tuple(number[b] for b in e.buffers), {}, (), s.source, s.name, e.launch, e.maps)
            )
        else:
            kwargs = {k: encode(v, number) for k, v in s.kwargs}
            results = tuple(None if b is None else number[b] for b in s.results)
            steps.append(Step("", s.name, encode(s.args, number), kwargs, results, s.source, s.name))
    return Plan(
        tuple(number[b] for b in program.inputs),
        tuple(number[b] for b in program.results),
        tuple(slots),
        tuple(steps),
        arena,
    )


MOST = 4000
"""Temporaries of which there may be more than one try at where they lie."""


def allocate(program: l.Program | kernel.Program, buffers: Sequence[l.Buffer]) -> tuple[dict[l.Buffer, int], int]:
    """Offsets for temporaries such that buffers that live at the same time do not overlap; and the total. They are
    placed one after the other where there is room first: as they come, the large ones first, or those that live long;
    whichever takes least.
    """
    lives = _lives(program)
    given = [b for b in lives if b in set(buffers)]
    longest = sorted(given, key=lambda b: (lives[b][0] - lives[b][1], -b.type.span))
    orders = [given, sorted(given, key=lambda b: -b.type.span), longest]
    return min((_placed(order, lives) for order in orders[: 1 if len(given) > MOST else 3]), key=lambda x: x[1])


def _placed(buffers: Sequence[l.Buffer], lives: Mapping[l.Buffer, tuple[int, int]]) -> tuple[dict[l.Buffer, int], int]:
    """Where buffers lie that are placed in this order; and the total."""
    taken: list[tuple[int, int, int, int]] = []  # offset, end, first and last step
    offsets: dict[l.Buffer, int] = {}
    for b in buffers:
        first, last = lives[b]
        size = _padded(b)
        place = 0
        for start, end in sorted((x, y) for x, y, begins, ends in taken if begins <= last and first <= ends):
            if start - place >= size:
                break
            place = max(place, end)
        offsets[b] = place
        taken.append((place, place + size, first, last))
    return offsets, max((end for _, end, *_ in taken), default=0)


def _lives(program: l.Program | kernel.Program) -> dict[l.Buffer, tuple[int, int]]:
    """The first and the last step that mention a buffer, in the order of the first."""
    found: dict[l.Buffer, tuple[int, int]] = {}
    for k, step in enumerate(program.steps):
        for b in (*step.reads, *step.writes):
            found[b] = found.get(b, (k, k))[0], k
    return found


def _padded(b: l.Buffer) -> int:
    """The bytes a temporary takes: what begins after it is aligned."""
    return (max(b.type.span, 1) + ALIGN - 1) // ALIGN * ALIGN


WORTH = 1 << 20
"""Bytes of temporaries from which on it is worth looking for room in results."""


def hosts(program: l.Program | kernel.Program, buffers: Sequence[l.Buffer]) -> dict[l.Buffer, tuple[l.Buffer, int]]:
    """Temporaries that lie in the memory of a result, which is written after their last use, and at which offset; none
    where that does not lower the memory in use at any time.
    """
    _, alone = allocate(program, buffers)
    if alone < WORTH:
        return {}
    called = {b for s in program.steps if isinstance(s, l.Call) for b in (*s.reads, *s.writes)}
    lives = _lives(program)
    first, last = ({b: x[n] for b, x in lives.items()} for n in (0, 1))
    rooms = [b for b in dict.fromkeys(program.results) if b in first and b not in called and b not in program.inputs]
    found: dict[l.Buffer, tuple[l.Buffer, int]] = {}
    for b in sorted((b for b in buffers if b not in called), key=lambda b: -b.type.span):
        size = _padded(b)
        for room in rooms:
            taken = sorted(
                (offset, offset + x.type.span)
                for x, (place, offset) in found.items()
                if place is room and first[x] <= last[b] and first[b] <= last[x]
            )
            offset = 0
            for start, end in taken:
                if start - offset >= size:
                    break
                offset = max(offset, (end + ALIGN - 1) // ALIGN * ALIGN)
            if last[b] < first[room] and offset + size <= room.type.span:
                found[b] = room, offset
                break
    _, rest = allocate(program, [b for b in buffers if b not in found])

    def most(arena: int, begin: Mapping[l.Buffer, int]) -> int:
        """The most that results and the arena take in any step."""
        return arena + max(sum(b.type.span for b in rooms if begin[b] <= k) for k in range(len(program.steps)))

    early = {r: min([first[r], *(first[b] for b, (place, _) in found.items() if place is r)]) for r in rooms}
    return found if rooms and most(rest, early) < most(alone, first) else {}


def encode(value: Any, number: Mapping[l.Buffer, int]) -> Any:
    """An argument of a PyTorch op as JSON."""
    if isinstance(value, l.Buffer):
        return {"slot": number[value]}
    if isinstance(value, l.View):
        return {"view": [number[value.buffer], list(value.shape), list(value.strides), value.offset]}
    if isinstance(value, tuple):
        return [encode(v, number) for v in value]
    if isinstance(value, DType):
        return {"dtype": value.name}
    if isinstance(value, TorchName):
        return {"torch": value.name}
    if isinstance(value, float):
        return {"float": value.hex() if math.isfinite(value) else repr(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise UserError(f"an argument of type {type(value).__name__} cannot be kept in a plan")


def decode(value: Any, tensors: Mapping[int, Any], whole: Callable[[int, Any], Any] = lambda _, t: t) -> Any:
    """The inverse of `encode`, with tensors for slots, or what `whole` makes of those that are no views; ValueError for
    anything else.
    """
    if isinstance(value, list):
        return tuple(decode(v, tensors, whole) for v in value)
    if isinstance(value, dict) and len(value) == 1:
        ((kind, inner),) = value.items()
        if kind == "slot":
            return whole(inner, tensors[inner])
        if kind == "view":
            k, shape, strides, offset = inner
            return tensors[k].as_strided(shape, strides, tensors[k].storage_offset() + offset)
        if kind == "dtype" and inner in DTYPES:
            return DTYPES[inner]
        if kind == "torch" and isinstance(inner, str):
            return TorchName(inner)
        if kind == "float" and isinstance(inner, str):
            return float.fromhex(inner) if inner not in ("inf", "-inf", "nan") else float(inner)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise ValueError(f"not an argument: {value!r}")


def slots_in(value: Any) -> list[int]:
    """The slots an encoded argument mentions."""
    if isinstance(value, list):
        return [s for v in value for s in slots_in(v)]
    if isinstance(value, dict):
        return (
            [value["slot"]]
            if set(value) == {"slot"}
            else [value["view"][0]]
            if set(value) == {"view"}
            else [s for v in value.values() for s in slots_in(v)]
            if "float" not in value
            else []
        )
    return []


def _views(value: Any) -> list[Any]:
    """The views of slots an encoded argument has."""
    if isinstance(value, list):
        return [found for v in value for found in _views(v)]
    return [value["view"]] if isinstance(value, dict) and set(value) == {"view"} else []


def _fits(view: Any, slots: Sequence[Slot]) -> bool:
    """Whether a view lies in the memory of its slot."""
    k, shape, strides, offset = view
    sizes = [_natural(x) for x in (*shape, *strides, offset)]
    slot = slots[_index(k, len(slots))]
    dtype = DTYPES[slot.dtype]
    return len(shape) == len(strides) and sizes[-1] * dtype.size + _span(shape, strides, dtype) <= slot.bytes


def whole_strides(kind: Type) -> tuple[int, ...]:
    """Strides in elements, of a type whose sizes are known."""
    return tuple(int(s) for s in kind.element_strides)  # type: ignore[arg-type]


def _span(shape: Sequence[int], strides: Sequence[int], dtype: DType) -> int:
    """How many bytes lie between the first element and the end of the last: more than they fill, where there are
    gaps.
    """
    return 0 if 0 in shape else (1 + sum((e - 1) * s for e, s in zip(shape, strides, strict=True))) * dtype.size


def _slot(s: Any) -> Slot:
    shape, strides = (tuple(_natural(e) for e in s[k]) for k in ("shape", "strides"))
    if s["dtype"] not in DTYPES or s["kind"] not in ("input", "result", "call", "arena") or len(shape) != len(strides):
        raise ValueError("not a slot")
    within = None if s["within"] is None else _natural(s["within"])
    return Slot(_text(s["name"]), s["dtype"], shape, strides, s["kind"], _natural(s["offset"]), within)


def _step(s: Any, count: int) -> Step:
    args, kwargs = s["args"], s["kwargs"]
    if s["key"]:
        args = tuple(_index(i, count) for i in args)
    else:
        for k in slots_in([args, *kwargs.values()]):
            _index(k, count)
    results = tuple(None if r is None else _index(r, count) for r in s["results"])
    launch = tuple(_natural(x) for x in s["launch"])
    if len(launch) not in (0, 4):
        raise ValueError("not a launch")
    maps = tuple(
        (_index(p, max(len(args), 1)), _naturals(shape), _naturals(strides), _naturals(box), _natural(swizzle))
        for p, shape, strides, box, swizzle in s["maps"]
    )
    return Step(
        _text(s["key"]), _text(s["name"]), args, kwargs, results, _text(s["source"]), _text(s["label"]), launch, maps
    )


def _natural(x: Any) -> int:
    if type(x) is not int or x < 0:
        raise ValueError(f"not a natural number: {x!r}")
    return x


def _naturals(xs: Any) -> tuple[int, ...]:
    return tuple(_natural(x) for x in xs)


def _index(x: Any, count: int) -> int:
    if _natural(x) >= count:
        raise ValueError(f"no slot {x}")
    return int(x)


def _text(x: Any) -> str:
    if not isinstance(x, str):
        raise ValueError(f"not a text: {x!r}")
    return x
