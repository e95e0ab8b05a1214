"""A compiled program as plain data: what to call, in which order, on which memory.

A plan holds numbers, names and nothing else. It is kept in the cache as JSON, so that a second process needs neither
the rules nor the compiler; what is read back is checked field by field, then against the program it is for (`misfit`),
and anything odd means the plan is made again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.errors import CompilerBug, UserError
from terrazzo.ir.dialects import kernel
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.torch import TorchName
from terrazzo.ir.in_place import NOTHING_GIVEN, Given, can_be_told, taken_over, viewed, views
from terrazzo.ir.program import donated
from terrazzo.ir.regions import NONE, Piece, Regions, lived, regions
from terrazzo.ir.types import DTYPES, DType, Type
from terrazzo.run.arena import allocate, hosts, padded
from terrazzo.run.branches import LITTLE, MOST, ROOM, Ahead, Place, side_by_side
from terrazzo.run.taken import rooted, roots

VERSION = 12
Onto = Mapping[l.Buffer, Sequence[l.Buffer]]
"""What kernels store, with what else it may lie in the memory of (`in_place.pairs`)."""
NOTHING: Onto = {}

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
    "arena" (at `offset` bytes; of the result `within`, if that is not None, before that is written). It may lie in the
    memory of another one, `onto`, which the kernel that writes it reads for the last time; it has no other place then.
    Or it is a region `of` another one, which begins at `offset` bytes there. The memory of an input that is `donated`
    is free after the last step that mentions it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    kind: str
    offset: int = 0
    within: int | None = None
    onto: int | None = None
    of: int | None = None
    donated: bool = False

    @property
    def bytes(self) -> int:
        """How much memory it spans."""
        return _span(self.shape, self.strides, DTYPES[self.dtype])

    @property
    def start(self) -> int:
        """The byte at which it begins in what it is a region of, or in its own place."""
        return 0 if self.of is None else self.offset


@dataclass(frozen=True)
class Step:
    """A kernel (`key` finds its machine code, `name` is the function) or, with no key, a call of the PyTorch op `name`.

    `args` of a kernel are slots; of a call they are encoded values (see `encode`), and an op that is `told` where to
    write makes no memory for its result. `launch` is for a GPU: blocks,
    threads of a block, bytes of shared memory, and whether the kernel notes indices that are out of range (1 or 0).
    `maps` are the tensor maps it takes. Where steps may run side by side, it is the next of its `branch`, and waits for
    the steps `after` of others.
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
    branch: int = 0
    after: tuple[int, ...] = ()
    told: bool = False


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
    """`inputs` and `results` are slots, in order; a result may be an input. The last results are the new values of the
    inputs that are `updated`. `arena` is the size of the temporaries in bytes.
    """

    inputs: tuple[int, ...]
    results: tuple[int, ...]
    slots: tuple[Slot, ...]
    steps: tuple[Step, ...]
    arena: int
    updated: tuple[int, ...] = ()

    @property
    def branches(self) -> int:
        """How many steps may run at a time."""
        return 1 + max((s.branch for s in self.steps), default=0)

    def to_json(self) -> bytes:
        """The plan as text."""
        return json.dumps({"version": VERSION, **vars(self)}, separators=(",", ":"), default=vars).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Plan:
        """Read a plan back; ValueError where it is not one."""
        try:
            given = json.loads(data)
            if given.pop("version") != VERSION:
                raise ValueError("another version")
            slots = tuple(_slot(s) for s in given["slots"])
            steps = tuple(_step(s, len(slots), n) for n, s in enumerate(given["steps"]))
            inputs, results = (tuple(_index(i, len(slots)) for i in given[k]) for k in ("inputs", "results"))
            arena, updated = _natural(given["arena"]), tuple(_index(k, len(slots)) for k in given["updated"])
            if len(updated) > len(results) or len({*updated}) < len(updated) or not {*inputs}.issuperset(updated):
                raise ValueError("what is updated is no input")
            if any(not _fits(v, slots) for s in steps if not s.key for v in _views([s.args, *s.kwargs.values()])):
                raise ValueError("a view leaves its slot")
            if any(s.onto is not None and s.onto >= len(slots) for s in slots):
                raise ValueError("a slot lies in none")
            for s in (s for s in slots if s.of is not None):
                whole = slots[_index(s.of, len(slots))]
                if (
                    whole.of is not None
                    or s.offset + s.bytes > whole.bytes
                    or s.within is not None
                    or s.onto is not None
                ):
                    raise ValueError("a slot leaves that which it is a region of")
            ends = [arena if s.within is None else slots[_index(s.within, len(slots))].bytes for s in slots]
            root = roots(slots)
            lying = [(s, end) for k, (s, end) in enumerate(zip(slots, ends, strict=True)) if k not in root]
            if any(s.kind == "arena" and s.offset + s.bytes > end for s, end in lying):
                raise ValueError("a slot lies outside the arena")
            return cls(inputs, results, slots, steps, arena, updated)
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, RecursionError, MemoryError) as e:
            raise ValueError(f"not a plan: {e}") from None


def mentioned(s: Step) -> list[int]:
    """The slots that a step mentions."""
    found = s.args if s.key else [*slots_in([s.args, *s.kwargs.values()]), *s.results]
    return [k for k in found if k is not None]


def made_by_calls(plan: Plan) -> set[int]:
    """The slots that ops of PyTorch make memory for; others work in that of an operand, or where they are told."""
    given = (k for s in plan.steps if not s.key and not s.told for k in s.results if k is not None)
    return {k for k in given if plan.slots[k].onto is None}


def uses(plan: Plan) -> tuple[dict[int, int], dict[int, int]]:
    """The first step that mentions a slot, and the last."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for n, s in enumerate(plan.steps):
        for k in mentioned(s):
            first.setdefault(k, n)
            last[k] = n
    return first, last


def places_in(plan: Plan, group: Sequence[int]) -> list[Place]:
    """The places of steps in a row, as if there were no others."""
    steps = [plan.steps[n] for n in group]
    return [Place(s.branch, tuple(d - group[0] for d in s.after if d >= group[0])) for s in steps]


def views_in(plan: Plan) -> dict[int, int]:
    """The tensors that PyTorch's ops give as views of others, with these."""
    alone = [(s, s.results[0]) for s in plan.steps if not s.key and len(s.results) == 1]
    made = [(s, k) for s, k in alone if k is not None and plan.slots[k].kind == "call" and views(s.name)]
    return {k: given[0] for s, k in made if (given := slots_in(s.args))}


def held(plan: Plan) -> dict[int, int]:
    """Views of temporaries, with these, whose memory is in use as long as they are; not those of what lies in the
    memory of something else or has something in its own, part of which may be free sooner.
    """
    slots, root, found = plan.slots, roots(plan.slots), dict[int, int]()
    shared = root.keys() | root.values()
    for k, of in views_in(plan).items():
        base = found.get(of, of)
        if slots[base].kind == "arena" and slots[base].within is None and base not in shared:
            found[k] = base
    return found


def as_rooted(plan: Plan, first: dict[int, int], last: dict[int, int]) -> None:
    """Let memory be in use from the first step to the last that mention what lies there, not only its own slot."""
    for k, r in (roots(plan.slots) | held(plan)).items():
        first[r] = min(first[k], first.get(r, first[k]))
        last[r] = max(last[k], last.get(r, last[k]))


def spans(plan: Plan, moved: Collection[int] = ()) -> tuple[dict[int, int], dict[int, int]]:
    """The first step and the last in which a slot's memory is in use, for itself or for what lies in it, but for what
    was `moved` elsewhere.
    """
    first, last = uses(plan)
    as_rooted(plan, first, last)
    for k, slot in enumerate(plan.slots):
        if slot.within is not None and k in first and k not in moved:
            first[slot.within] = min(first[k], first.get(slot.within, first[k]))
    return first, last


def pieces(plan: Plan, first: Mapping[int, int], last: Mapping[int, int]) -> dict[int, list[Piece]]:
    """When the pieces of slots are in use, of steps one after the other: of those that others are regions of each by
    itself, of others all from the first step to the last.
    """
    wholes = {s.of for s in plan.slots if s.of is not None}
    placed = ((n, k, plan.slots[k]) for n, s in enumerate(plan.steps) for k in mentioned(s))
    of = [(n, k if s.of is None else s.of, s.start, s.start + s.bytes) for n, k, s in placed]
    found = lived([use for use in of if use[1] in wholes])
    rest = (k for k in first if k not in found)
    return found | {k: [Piece(0, padded(plan.slots[k].bytes), first[k], last[k])] for k in rest}


def make(
    program: l.Program | kernel.Program,
    entries: Mapping[Any, Entry],
    processors: int = 0,
    onto: Onto = NOTHING,
    updated: Sequence[str] = (),
    given: Given = NOTHING_GIVEN,
    told: bool = False,
) -> Plan:
    """The plan of a program (of Loop IR, or of Kernel IR) whose kernels have this machine code. Small ones may run side
    by side on a GPU with so many processors. What kernels store may lie in the memory of what they read, by `onto`; the
    last results are new values of the inputs that are `updated`, where those that are `given` may lie. Ops of PyTorch
    that can are `told` where to write.
    """
    named = regions(program.steps, program.results)
    program = replace(program, steps=tuple(s for s in program.steps if s not in named.calls))  # type: ignore[arg-type]
    plain = _made(program, entries, [Place()] * len(program.steps), onto, named, updated, given, told)
    if not processors:
        return plain

    def small(s: Any) -> bool:
        if isinstance(s, l.Call) and s.order:
            return False
        few = s in entries and entries[s].launch[0] < processors
        return few or sum(b.type.span for b in s.writes) <= LITTLE

    there = {b: given[b] for b in given if any(s.name == b.name and s.onto is not None for s in plain.slots)}
    moved, places = side_by_side(program, small, {**named.wholes, **there})
    if all(p.branch == 0 for p in places):
        return plain
    beside = _made(moved, entries, places, onto, named, updated, given, told)
    return beside if beside.arena <= plain.arena + ROOM else plain


def _made(
    program: l.Program | kernel.Program,
    entries: Mapping[Any, Entry],
    places: Sequence[Place],
    onto: Onto = NOTHING,
    named: Regions = NONE,
    updated: Sequence[str] = (),
    given: Given = NOTHING_GIVEN,
    told: bool = False,
) -> Plan:
    whole = named.wholes
    written = (whole.get(b, b) for s in program.steps for b in s.writes)
    there = {b for s in program.steps for b in (*s.reads, *s.writes)}
    buffers = list(dict.fromkeys([*program.inputs, *written, *(b for b in whole if b in there)]))
    number = {b: k for k, b in enumerate(buffers)}
    apart = any(p.branch for p in places)
    taken = taken_over(program.steps, program.results, onto, Ahead(places) if apart else None, named.touched, given)
    inputs, ends, free = frozenset(program.inputs), frozenset(program.results), donated(program.inputs)
    calls = [s for s in program.steps if isinstance(s, l.Call)]
    seen = {b for s in calls if views(s.name) for b in s.reads}  # of what an op has made, a view is no copy
    telling = (s for s in calls if told and can_be_told(s) and s.writes[0] not in seen)
    writing = {s for s in telling if taken.get(s.writes[0]) not in s.reads}
    making = [s for s in calls if s not in writing]
    called = {b for s in making for b in s.writes if taken.get(b) not in s.reads}
    own = inputs | ends | called
    for b, below in (pair for s in program.steps for pair in dict(getattr(s, "over", ())).items()):
        if taken.get(b) is not below:
            raise CompilerBug(f"only a part of {b.name} is stored, which does not lie over {below.name}")
    root = rooted(taken, program.results, called, inputs) | whole
    theirs = {b for b, old in taken.items() if b in ends and (old in called or old in inputs)}
    temporaries = [b for b in buffers if b not in own and b not in root]
    pieces = {} if apart else named.pieces(program.steps)
    lying = root | {b: of for b, of in viewed(calls).items() if of in temporaries and b not in ends}  # as in `held`
    within = {} if apart else hosts(program, temporaries, lying, theirs, pieces, making)
    offsets, arena = allocate(program, [b for b in temporaries if b not in within], places, lying, pieces)
    offsets |= {b: offset for b, (_, offset) in within.items()}
    slots = []
    for b in buffers:
        kind = "call" if b in called else "arena"
        kind = "input" if b in inputs else "result" if b in ends else kind
        strides = whole_strides(b.type)
        host = number[within[b][0]] if b in within else None
        old = number[taken[b]] if b in taken else None
        of, start = (number[whole[b]], named.of[b][1]) if b in whole else (None, offsets.get(b, 0))
        where = kind, start, host, old, of, b in inputs and b.name in free
        slots.append(Slot(b.name, b.type.dtype.name, b.type.static_shape, strides, *where))
    steps = []
    for s, p in zip(program.steps, places, strict=True):
        if not isinstance(s, l.Call):
            e = entries[s]
            used = tuple(number[b] for b in e.buffers)
            steps.append(Step(e.key, e.name, used, {}, (), s.source, s.name, e.launch, e.maps, p.branch, p.after))
        else:
            kwargs = {k: encode(v, number) for k, v in s.kwargs}
            results = tuple(None if b is None else number[b] for b in s.results)
            args = encode(s.args, number)
            end = p.branch, p.after, s in writing
            steps.append(Step("", s.name, args, kwargs, results, s.source, s.name, (), (), *end))
    return Plan(
        tuple(number[b] for b in program.inputs),
        tuple(number[b] for b in program.results),
        tuple(slots),
        tuple(steps),
        arena,
        tuple(number[b] for name in updated for b in program.inputs if b.name == name),
    )


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
    if isinstance(value, complex):
        return {"complex": [encode(part, number) for part in (value.real, value.imag)]}
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
        if kind == "complex" and isinstance(inner, list) and len(inner) == 2:
            return complex(*(decode(part, tensors) for part in inner))
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
    onto = None if s["onto"] is None else _natural(s["onto"])
    of = None if s["of"] is None else _natural(s["of"])
    lying = s["kind"], _natural(s["offset"]), within, onto, of, s["donated"] is True
    return Slot(_text(s["name"]), s["dtype"], shape, strides, *lying)


def _step(s: Any, count: int, number: int) -> Step:
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
    after = tuple(_index(n, number) for n in s["after"])
    branch = _index(s["branch"], MOST)
    key, name, source, label = (_text(s[k]) for k in ("key", "name", "source", "label"))
    told = s["told"] is True and not key and len(results) == 1 and results[0] is not None
    return Step(key, name, args, kwargs, results, source, label, launch, maps, branch, after, told)


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
