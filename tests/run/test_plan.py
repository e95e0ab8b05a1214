"""Plans: memory is shared only by what is never alive together, and text that is no plan is never taken for one."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from terrazzo.errors import UserError
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.torch import TorchName
from terrazzo.ir.types import DTYPES, Type, f32
from terrazzo.run.arena import ALIGN
from terrazzo.run.plan import Plan, Step, allocate, decode, encode, make, slots_in

often = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@st.composite
def types(draw: Any) -> Type:
    """Any element type and shape, empty ones included, in any order of dimensions and with gaps between the rows."""
    shape = tuple(draw(st.lists(st.sampled_from((0, 1, 2, 3, 7, 64)), max_size=3)))
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    if draw(st.booleans()):
        return Type(dtype, shape)
    order, strides, step = draw(st.permutations(range(len(shape)))), [0] * len(shape), 1
    for d in order:
        strides[d] = step
        step *= max(shape[d], 1) + draw(st.integers(0, 2))
    return Type(dtype, shape, tuple(strides))


@st.composite
def programs(draw: Any) -> l.Program:
    """Calls that read some of what is there and write one to three buffers; some of these are the results."""
    inputs = (l.Buffer("x", draw(types())),)
    there: list[Any] = list(inputs)
    steps: list[l.Call] = []
    for k in range(draw(st.integers(1, 10))):
        reads = draw(st.lists(st.sampled_from(there), max_size=3, unique=True))
        writes: list[Any] = [l.Buffer(f"t{k}_{j}", draw(types())) for j in range(draw(st.integers(1, 3)))]
        absent: list[Any] = [None] if draw(st.booleans()) else []
        steps.append(l.Call("aten.f.default", (tuple(reads), 1), (), tuple(writes + absent), k))
        there += writes
    results = draw(st.lists(st.sampled_from(there), min_size=1, max_size=3))
    return l.Program("f", inputs, tuple(steps), tuple(results))


@often
@given(programs())
def test_what_is_alive_together_does_not_overlap(program: l.Program) -> None:
    plan = make(program, {})
    slots = {s.name: s for s in plan.slots}
    lives: list[tuple[int, int, int, int]] = []  # first and last step, first and one past the last byte
    for k, step in enumerate(program.steps):
        for b in step.writes:
            slot = slots[b.name]
            assert (slot.kind == "result") == (b in program.results)
            if slot.kind == "arena":
                last = max([k, *(m for m, s in enumerate(program.steps) if b in s.reads)])
                assert slot.offset % ALIGN == 0 and slot.offset + slot.bytes <= plan.arena
                lives.append((k, last, slot.offset, slot.offset + slot.bytes))
    for (a, b, start, end), (c, d, other, other_end) in itertools.combinations(lives, 2):
        if a <= d and c <= b and start < end and other < other_end:
            assert end <= other or other_end <= start


@often
@given(types())
def test_a_slot_spans_its_last_element(t: Type) -> None:
    program = l.Program("f", (l.Buffer("x", t),), (), ())
    (slot,) = make(program, {}).slots
    places = [
        sum(i * s for i, s in zip(index, slot.strides, strict=True))
        for index in itertools.product(*map(range, slot.shape))
    ]
    assert slot.bytes == (1 + max(places)) * t.dtype.size if places else slot.bytes == 0
    assert t.strides is not None or slot.bytes == math.prod(slot.shape) * t.dtype.size


def test_memory_is_used_again() -> None:
    buffers = [l.Buffer(f"t{k}", Type(f32, (1000,))) for k in range(10)]
    x = l.Buffer("x", Type(f32, (1000,)))
    steps = tuple(l.Call("aten.f.default", (a,), (), (b,)) for a, b in itertools.pairwise([x, *buffers]))
    _, arena = allocate(l.Program("f", (x,), steps, (buffers[-1],)), buffers[:-1])
    assert arena == 2 * 4096  # one is read while the next is written


def taken(lives: dict[str, tuple[int, int, int]], unit: int) -> int:
    """The arena of temporaries of which each has a first and a last step, and a size, in units of so many bytes."""
    buffers = {name: l.Buffer(name, Type(f32, (unit * size // 4,))) for name, (*_, size) in lives.items()}
    x = l.Buffer("x", Type(f32, (64,)))
    steps = []
    for k in range(1 + max(last for _, last, _ in lives.values())):
        read = tuple(buffers[name] for name, (first, last, _) in lives.items() if first < k <= last)
        made = tuple(buffers[name] for name, (first, *_) in lives.items() if first == k)
        steps.append(l.Call("aten.f.default", (x, *read), (), made))
    return allocate(l.Program("f", (x,), tuple(steps), ()), [*buffers.values()])[1]


def test_what_is_in_use_when_most_is_lies_together() -> None:
    """The large first, or as they come, or by how long they live, this takes 12 blocks: 10 are in use at a time."""
    assert taken({"a": (1, 3, 5), "b": (3, 4, 4), "c": (4, 4, 3), "d": (4, 4, 3)}, 256) == 10 * 256


def test_what_stands_on_others_is_placed_sooner() -> None:
    """In every order that is tried first this takes 10 units or more: 8 are in use at a time."""
    sizes = [(1, 1, 1), (1, 4, 2), (2, 3, 5), (4, 6, 2), (4, 7, 2), (5, 5, 4), (6, 7, 2)]
    lives = dict(zip("abcdefg", sizes, strict=True))
    assert taken(lives, 1 << 17) == 8 << 17
    assert taken(lives, 256) >= 10 * 256, "where little is in use, nobody looks for better places"


@often
@given(programs())
def test_a_plan_reads_back(program: l.Program) -> None:
    plan = make(program, {})
    assert Plan.from_json(plan.to_json()) == plan


X = l.Buffer("x", Type(f32, (2,)))
ARGUMENTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([*DTYPES.values(), TorchName("float32"), X]),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=8,
)


@often
@given(ARGUMENTS)
def test_arguments_read_back(value: Any) -> None:
    """Through JSON; floats bit for bit, so -0.0 and NaN too."""
    text = json.loads(json.dumps(encode(value, {X: 5})))
    assert repr(decode(text, {5: X})) == repr(value)
    assert set(slots_in(text)) <= {5}


def test_what_no_plan_can_hold() -> None:
    with pytest.raises(UserError, match="an argument of type bytes cannot be kept in a plan"):
        encode((1, b"2"), {})
    for text in ({"float": 3}, {"dtype": "q8"}, {"torch": 1}, {"other": 1}, {}, 1.5):
        with pytest.raises(ValueError, match="not an argument"):
            decode(text, {})


def small() -> Plan:
    """An op of PyTorch, a kernel, a temporary and a result."""
    x, y = (l.Buffer(n, Type(f32, (3, 4))) for n in "xy")
    plan = make(l.Program("f", (x,), (l.Call("aten.f.default", (x, 2.5), (("dim", 1),), (y,)),), (y,)), {})
    temporary = replace(plan.slots[1], name="t", kind="arena", offset=64)
    return Plan((0,), (1,), (*plan.slots, temporary), (*plan.steps, Step("k" * 64, "g", (0, 2), {}, (), "", "")), 256)


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to everything in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(p for k, v in items for p in paths(v, (*here, k)))]


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    out = dict(value) if isinstance(value, dict) else list(value)
    out[path[0]] = changed(value[path[0]], path[1:], new)
    return out


WRONG = (None, True, -1, 1 << 70, 0.5, "", "other", [], [[]], {}, {"slot": 9}, [0, 1, 99])


def test_a_plan_with_anything_odd_in_it_is_no_plan() -> None:
    """Everything replaced by something else: it is refused, or it is another plan, and nothing else happens."""
    plan = small()
    whole = json.loads(plan.to_json())
    assert Plan.from_json(json.dumps(whole).encode()) == plan
    refused = 0
    for path, new in itertools.product(paths(whole), WRONG):
        try:
            other = Plan.from_json(json.dumps(changed(whole, path, new)).encode())
        except ValueError:
            refused += 1
            continue
        assert all(s.offset + s.bytes <= other.arena for s in other.slots if s.kind == "arena"), (path, new)
        mentioned = [*other.inputs, *other.results, *(r for s in other.steps for r in s.results if r is not None)]
        mentioned += [k for s in other.steps for k in (s.args if s.key else slots_in([s.args, *s.kwargs.values()]))]
        assert all(0 <= k < len(other.slots) for k in mentioned), (path, new)
    assert refused > 300


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe", b'{"version": 0}', b"[" * 100_000], ids=range(9)
)
def test_what_is_no_json_of_a_plan(data: bytes) -> None:
    with pytest.raises(ValueError):
        Plan.from_json(data)


def test_a_truncated_plan_is_none() -> None:
    data = small().to_json()
    for end in range(len(data)):
        with pytest.raises(ValueError):
            Plan.from_json(data[:end])
