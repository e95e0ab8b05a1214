"""New values of inputs: of which only what changes is stored, and what comes before them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import terrazzo
from terrazzo.errors import CompilerBug
from terrazzo.front.capture import capture
from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop as interpreter
from terrazzo.interp.kernel.machine import run_kernel
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import substitute
from terrazzo.ir.text import parse, show
from terrazzo.ir.verify import problem
from terrazzo.options import Options
from terrazzo.pipelines import Lowering, lowering
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.memory import lifetimes
from terrazzo.rules.loop.memory.renewed import renew

R, at = torch.randn, torch.tensor


def one_token(cache: Any, k: Any, place: Any) -> Any:
    cache.index_copy_(2, place, k)
    return cache.sum(2)


def each_its_own(cache: Any, k: Any, places: Any) -> Any:
    cache[torch.arange(cache.shape[0]), places] = k
    return cache.sum(1)


def counted(cache: Any, k: Any, count: Any) -> Any:
    cache.index_copy_(2, torch.arange(1) + count, k)
    return cache.sum(2)


def around(cache: Any, k: Any, count: Any) -> Any:
    """Rows of a ring, of which each batch has its own: which of them is written is stored first."""
    i, ring = torch.arange(cache.shape[0]), count % cache.shape[2]
    cache[i, :, ring] = k
    return cache.sum(2) * (ring[:, None, None] + 1)


def columns(x: Any, y: Any) -> Any:
    x[:, 2:5] = y
    return y * 2


def added_to_some(x: Any, y: Any) -> Any:
    x[1, 2:5] += y
    return y * 2


def last_row(x: Any, y: Any) -> Any:
    x[:, -1] = y
    return x[:, 0] + 1


def read_before(x: Any, y: Any) -> Any:
    before = x[:, 0] * 2
    x[:, 0] = y
    return before, x.sum()


def turned(x: Any, y: Any) -> Any:
    x.t()[1] = y
    return x * 2


def filled(x: Any, place: Any) -> Any:
    x.index_fill_(1, place, 5.0)
    return x + 1


def narrow(x: Any, y: Any) -> Any:
    x[:, at([3])] = y.to(x.dtype)
    return y * 2


def every_other(x: Any, y: Any) -> Any:
    x[:, ::2] = y
    return y * 2


def nothing_in_a_row(x: Any, y: Any) -> Any:
    x.diagonal().copy_(y)
    return y * 2


def moved(x: Any, y: Any) -> Any:
    x.copy_(torch.roll(x, -1, 1))
    x[:, -1] = y
    return x.sum()


def from_another_row(x: Any, y: Any) -> Any:
    x[0] = x[1] + y
    return y * 2


def whole(x: Any, y: Any) -> Any:
    x.mul_(0.9).add_(y, alpha=0.1)
    return x * y


PART: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], int]] = {
    "one token": (one_token, lambda: (R(2, 3, 16, 8), R(2, 3, 1, 8), at([5])), 2 * 3 * 8),
    "counted from the end": (each_its_own, lambda: (R(3, 16, 8), R(3, 8), at([-11, 0, -1])), 3 * 8),
    "each its own": (each_its_own, lambda: (R(3, 16, 8), R(3, 8), at([5, 0, 15])), 3 * 8),
    "a place that is computed": (counted, lambda: (R(2, 3, 16, 8), R(2, 3, 1, 8), at(5)), 2 * 3 * 8),
    "around a ring": (around, lambda: (R(3, 2, 16, 8), R(3, 2, 8), at([5, 31, 16])), 3 * 2 * 8),
    "columns": (columns, lambda: (R(4, 8), R(4, 3)), 4 * 3),
    "added to some": (added_to_some, lambda: (R(4, 8), R(3)), 3),
    "last row": (last_row, lambda: (R(4, 8, 3), R(4, 3)), 4 * 3),
    "read before": (read_before, lambda: (R(4, 8, 3), R(4, 3)), 4 * 3),
    "turned": (turned, lambda: (R(4, 8), R(4)), 4),
    "filled": (filled, lambda: (R(4, 8), at([2])), 4),
    "narrow": (narrow, lambda: (R(4, 8).bfloat16(), R(4, 1)), 4),
}
WHOLE: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], bool]] = {
    "every other, all but one": (every_other, lambda: (R(4, 8), R(4, 4)), True),
    "nothing in a row": (nothing_in_a_row, lambda: (R(8, 8), R(8)), True),
    "whole": (whole, lambda: (R(4, 8), R(4, 8)), True),
    "moved": (moved, lambda: (R(4, 8), R(4)), False),
    "from another row": (from_another_row, lambda: (R(4, 8), R(8)), False),
}


def lowered(fn: Any, args: Any, gpu: str = "") -> tuple[Lowering, dict[str, Any], str]:
    """A call lowered, its inputs by name, and which of them it changes."""
    captured = capture(fn, args, views=True)
    (changed,) = (captured.inputs[k] for k in captured.changed)
    options = Options(target=gpu or "cpu", updated=(changed,), libraries="never")
    given = {n: x.clone().float() if x.is_floating_point() else x.clone() for n, x in captured.given(args, {}).items()}
    return lowering(captured.program, options), {n: x.numpy() for n, x in given.items()}, changed


@pytest.mark.parametrize("case", PART)
def test_only_what_changes_is_stored(case: str) -> None:
    fn, make, count = PART[case]
    done, _, changed = lowered(fn, make())
    (store,) = (s for step in done.loop.steps if isinstance(step, l.Kernel) for s in step.stores if s.over is not None)
    (kernel,) = (step for step in done.loop.steps if isinstance(step, l.Kernel) and store in step.stores)
    assert store.over is not None and store.over.name == changed
    assert np.prod([int(a.extent) for a in kernel.axes], dtype=int) <= count
    assert parse(show(done.loop)) == done.loop and not problem(done.loop)


@pytest.mark.parametrize("case", PART)
def test_kernels_for_a_gpu_store_only_what_changes(case: str) -> None:
    """By the simulator, in adverse orders: into a copy of the old value, and where that lies."""
    fn, make, _ = PART[case]
    args = make()
    done, given, changed = lowered(fn, args, "sm_90a")
    program = done.at("kernel")
    assert parse(show(program)) == program
    fn(*args)
    for seed in (None, 0, 1):
        found = simulator.run(program, given, seed=seed)
        np.testing.assert_allclose(found[-1].astype(np.float32), args[0].float().numpy(), rtol=1e-6)
    (kernel,) = (s for s in program.steps if s.over)
    ((new, old),) = kernel.over
    read = {s.name: s for s in program.inputs}
    memory = {x: given[x.name].astype(x.type.dtype.numpy) for x in kernel.params if x.name in read}
    if len(memory) == len(kernel.params) - 1:  # else it reads what another kernel makes
        body = tuple(substitute(s, {old: new}) for s in kernel.body)
        params = tuple(x for x in kernel.params if x is not old)
        fields = {**dict(zip(kernel._fields, kernel.values, strict=True)), "params": params, "body": body, "over": ()}
        memory[new] = memory.pop(old)
        run_kernel(type(kernel)(**fields), memory, seed=0)
        np.testing.assert_allclose(memory[new].astype(np.float32), args[0].float().numpy(), rtol=1e-6)
    assert changed == old.name


@pytest.mark.parametrize("case", WHOLE)
def test_what_changes_everywhere_or_is_read_elsewhere(case: str, tmp_path: Path) -> None:
    """It lies where the input does if every element is made of its own place; else it is copied there."""
    fn, make, there = WHOLE[case]
    compiled = terrazzo.compile(fn, *make(), options={"target": "cpu", "cache_dir": tmp_path}).compiled
    assert bool(compiled.updated.there) == there


@pytest.mark.parametrize("case", [*PART, *WHOLE])
@pytest.mark.parametrize("fuse", [True, False])
def test_results_are_those_of_eager_mode(case: str, fuse: bool, tmp_path: Path) -> None:
    fn, make, _ = (PART | WHOLE)[case]
    args = make()
    others = copy.deepcopy(args)
    compiled = terrazzo.compile(fn, *make(), options={"target": "cpu", "cache_dir": tmp_path, "fuse": fuse})
    for _ in range(2):
        torch.testing.assert_close(compiled(*args), fn(*others))
        torch.testing.assert_close(args, others)


def test_two_caches_are_written_by_one_kernel() -> None:
    def both(keys: Any, values: Any, k: Any, v: Any, place: Any) -> Any:
        keys.index_copy_(2, place, k)
        values.index_copy_(2, place, v)
        return k + v

    args = (*(R(2, 3, 16, 8) for _ in range(2)), *(R(2, 3, 1, 8) for _ in range(2)), at([3]))
    captured = capture(both, args, views=True)
    names = tuple(captured.inputs[k] for k in captured.changed)
    found = lowering(captured.program, Options(target="sm_90a", updated=names)).loop
    assert [len(s.over) for s in found.steps if isinstance(s, l.Kernel) and s.over] == [2]


def test_what_is_stored_with_a_new_value_is_stored_apart() -> None:
    """Which token goes to which place, that others read, is no reason to store the rest of a cache."""
    program = parse("""@loop
def f(cache: f32[4, 64, 8], k: f32[4, 8], pos: i64[4]):
    with kernel('new', who=i64[4, 64], new=f32[4, 64, 8]):
        for a0 in free(4):
            in0 = pos[a0]
            v0 = index(at(in0, 64))
            for a1 in free(64):
                v1 = eq(v0, index(a1))
                v2 = where(v1, index(a0), i64(-1))
                who[a0, a1] = v2
                for a2 in free(8):
                    in1 = k[a0, a2]
                    in2 = cache[a0, a1, a2]
                    v3 = where(v1, in1, in2)
                    new[a0, a1, a2] = v3
    with kernel('s', s=i64[4]):
        for a0 in free(4):
            for r0 in reduce(64):
                in0 = who[a0, r0]
                acc0 <- max(in0)
            s[a0] = acc0
    return (s, new)
""")
    found = renew(program, ("cache",), Log())
    assert not problem(found) and [s.writes[0].name for s in found.steps] == ["who", "new", "s"]
    assert [bool(s.over) for s in found.steps if isinstance(s, l.Kernel)] == [False, True, False]
    given = {"cache": R(4, 64, 8).numpy(), "k": R(4, 8).numpy(), "pos": np.array([5, 0, 63, 7])}
    for one, other in zip(interpreter.run(program, given), interpreter.run(found, given), strict=True):
        np.testing.assert_array_equal(one, other)


SHARED = """
@loop
def f(keys: f32[4, 64, 8], values: f32[4, 64, 6], k: f32[4, 8], v: f32[4, 6], places: i64[4]):
    with kernel('one', which=i64[4, 64], one=f32[4, 64, 8]):
        for a0 in free(4):
            in0 = places[a0]
            v0 = index(at(in0, 64))
            v1 = index(a0)
            for a1 in free(64):
                v2 = index(a1)
                v3 = eq(v0, v2)
                v4 = where(v3, v1, i64(-1))
                v5 = max(v4, i64(0))
                which[a0, a1] = v4
                for a2 in free(8):
                    in1 = k[at(v5, 4), a2]
                    in2 = keys[a0, a1, a2]
                    v6 = where(v3, in1, in2)
                    one[a0, a1, a2] = v6
    with kernel('other', other=f32[4, 64, 6]):
        for a0 in free(4):
            for a1 in free(64):
                in0 = which[a0, a1]
                v0 = ge(in0, i64(0))
                v1 = max(in0, i64(0))
                for a2 in free(6):
                    in1 = v[at(v1, 4), a2]
                    in2 = values[a0, a1, a2]
                    v2 = where(v0, in1, in2)
                    other[a0, a1, a2] = v2
    return (one, other)
"""


def test_what_says_where_two_caches_change_is_left_to_neither() -> None:
    """Fusion leaves it to the kernel that writes one of them, which then stores more than the new value."""
    program = parse(SHARED)
    found = renew(program, ("keys", "values"), Log())
    assert not problem(found)
    assert [[s.over.name for s in step.stores if s.over] for step in found.steps] == [["keys"], ["values"]]
    kernels = [s for s in found.steps if isinstance(s, l.Kernel)]
    assert [len(s.writes) for s in kernels] == [1, 1], "nobody reads which row changes any more"
    r = np.random.default_rng(0)
    inputs = {b.name: r.normal(size=b.type.shape).astype(np.float32) for b in program.inputs[:4]}
    inputs["places"] = np.array([5, 0, 63, 7])
    for before, after in zip(interpreter.run(program, inputs), interpreter.run(found, inputs), strict=True):
        np.testing.assert_array_equal(before, after)


TEXT = """
@loop
def f(x: f32[8, 4], y: f32[4], ids: i64[4]):
    with kernel('new', new=over(x)):
        for a0 in free(4):
            in0 = y[a0]
            new[{index}] = in0
    return (new,)
"""


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("5, a0", ""),
        ("at(ids[0], 8), a0", ""),
        ("at(ids[a0], 8), a0", ""),
        ("a0 + 4, 1", ""),
        ("a0 + 5, 1", "may leave dimension 0"),
        ("8, a0", "may leave dimension 0"),
        ("at(ids[a0], 9), a0", "may leave dimension 0"),
        ("at(ids[a0], 8), 0", "may store a place of dimension 0 twice"),
        ("2 * a0, 0", "may store a place of dimension 0 twice"),
        ("a0 // 2, a0 % 2", ""),
        ("0, a0 % 2", "does not cover the digits of a0"),
        ("0, 0", "depends on an axis it does not have"),
    ],
)
def test_where_a_part_may_be_stored(index: str, message: str) -> None:
    text = TEXT.format(index=index)
    if message:
        with pytest.raises(Exception, match=message):
            parse(text)
    else:
        assert problem(parse(text)) == ""


READER = """
    with kernel('z', z=f32[8]):
        for a0 in free(8):
            z[a0] = {read}[a0, 0]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return (new,)", "return (x, new)", "which is no input, or a result"),
        ("over(x)", "over(y)", "2 indices into new"),
        ("    return (new,)", READER.format(read="x") + "    return (new, z)", "z reads x, which new lies over"),
        ("    return (new,)", READER.format(read="new") + "    return (z,)", "or is itself none"),
    ],
)
def test_what_a_part_may_be_stored_over(old: str, new: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        parse(TEXT.format(index="5, a0").replace(old, new))


def test_steps_stay_before_what_overwrites_what_they_read() -> None:
    text = TEXT.format(index="5, a0").replace(
        "    with kernel('new'", READER.format(read="x") + "    with kernel('new'"
    )
    program = parse(text.replace("return (new,)", "return (z, new)"))
    assert list(lifetimes.needs_of(program.steps)) == [set(), {0}]


def test_a_part_that_lies_nowhere_is_a_bug(tmp_path: Path) -> None:
    from terrazzo.run import plan

    program = parse(TEXT.format(index="5, a0"))
    entries = {s: plan.Entry("k", s.name, (*s.reads, *s.writes)) for s in program.steps}
    with pytest.raises(CompilerBug, match="only a part of new is stored, which does not lie over x"):
        plan.make(program, entries)
    (x, *_), (new,) = program.inputs, program.results
    made = plan.make(program, entries, updated=("x",), given={new: x})
    assert made.slots[made.results[0]].onto == made.inputs[0] and made.updated == (made.inputs[0],)
