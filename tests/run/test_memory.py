"""What a call takes of memory, and that it gives it back."""

from __future__ import annotations

import itertools
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import terrazzo
from terrazzo.bench import memory
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.types import Type, f32
from terrazzo.options import Options
from terrazzo.run import plan
from terrazzo.run.own import layout
from terrazzo.run.tensors import Expected

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def chain(*sizes: int) -> tuple[l.Program, list[l.Buffer]]:
    """Kernels of which each reads what the one before wrote, so many elements each."""
    buffers = [l.Buffer(f"t{k}", Type(f32, (n,))) for k, n in enumerate(sizes)]
    steps = []
    for before, after in itertools.pairwise(buffers):
        a = Var("a0", after.type.shape[0])
        read = l.Load(before, (a % before.type.shape[0],))
        steps.append(l.Kernel(after.name, (a,), (l.Store(after, (a,), read),)))
    return l.Program("f", (buffers[0],), tuple(steps), (buffers[-1],)), buffers


def test_temporaries_lie_in_a_result_that_is_not_written_yet() -> None:
    mega = 1 << 18  # elements of a megabyte
    program, (_, first, second, third, result) = chain(4, 2 * mega, 2 * mega, mega, 8 * mega)
    found = plan.hosts(program, [first, second, third])
    assert {b.name: (place.name, offset) for b, (place, offset) in found.items()} == {
        "t1": ("t4", 0),
        "t2": ("t4", 8 * mega),
    }  # the last one is read while the result is written
    assert result not in found
    small, buffers = chain(4, 100, 100, 100, 800)
    assert plan.hosts(small, buffers[1:-1]) == {}


def test_a_result_of_the_same_odd_size_holds_a_temporary() -> None:
    odd = (1 << 19) + 3  # what would begin behind it is aligned, but nothing does
    program, (_, first, second, third, _) = chain(4, odd, odd, 8, odd)
    assert next(b.name for b in plan.hosts(program, [first, second, third])) == "t1"


def test_large_temporaries_leave_results_where_that_takes_less() -> None:
    mega = 1 << 18
    program, _ = chain(4, 4 * mega, 4 * mega, mega, 4 * mega)
    entries = {s: plan.Entry("k", s.name, (*s.reads, *s.writes)) for s in program.steps if isinstance(s, l.Kernel)}
    made = plan.make(program, entries)
    numbers = {s.name: k for k, s in enumerate(made.slots)}
    assert made.slots[numbers["t1"]].within == numbers["t4"]
    assert layout(made, apart=False).own == frozenset()
    found = layout(made, apart=True)
    assert found.own == {numbers[x] for x in ("t1", "t2", "t3")}
    first, last = plan.spans(made, found.moved)
    assert (first[numbers["t4"]], last[numbers["t1"]]) == (3, 1)  # the result is not there while the first one is
    assert plan.spans(made)[0][numbers["t4"]] == 0


def test_a_result_that_is_smaller_holds_nothing() -> None:
    mega = 1 << 18
    program, buffers = chain(4, 2 * mega, 2 * mega, 10)
    assert plan.hosts(program, buffers[1:-1]) == {}


def big(x: Any, w: Any, v: Any) -> Any:
    scores = (x @ w).softmax(-1)
    return ((scores + scores.t()) @ w.t()).softmax(-1) @ v


def test_results_that_held_temporaries_are_right(cache: Path) -> None:
    """Each call has results of its own, and one call's do not change with the next."""
    x, w, v = torch.randn(600, 64), torch.randn(64, 600), torch.randn(64, 8000)
    compiled = terrazzo.compile(big, x, w, v, options={"cache_dir": cache})
    slots = compiled.compiled.plan.slots
    assert any(s.within is not None for s in slots)
    assert all(slots[s.within].kind == "result" for s in slots if s.within is not None)
    one, other = compiled(x, w, v), compiled(2 * x, w, v)
    torch.testing.assert_close(one, big(x, w, v), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(other, big(2 * x, w, v), rtol=1e-4, atol=1e-4)
    again = terrazzo.compile(big, x, w, v, options={"cache_dir": cache})
    assert again.compiled.program is None, "it came from the cache"
    assert torch.equal(again(x, w, v), one)


def test_what_only_a_call_held_goes_within_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Any) -> Any:
        return (x.softmax(-1) @ x.t()).softmax(-1).sum(0)

    x = torch.randn(50, 50)
    compiled = terrazzo.compile(fn, x, options={"cache_dir": cache}).compiled
    gone = weakref.ref(x)
    alive: list[bool] = []
    empty = Expected.empty

    def noted(self: Expected) -> Any:
        alive.append(gone() is not None)
        return empty(self)

    monkeypatch.setattr(Expected, "empty", noted)
    given, wanted = [x], fn(x)
    del x
    (found,) = compiled.consume(given)
    assert given == [] and gone() is None and alive == [False]
    torch.testing.assert_close(found, wanted)


def test_a_list_of_inputs_stays_as_it_is(cache: Path) -> None:
    x = torch.randn(5)
    compiled = terrazzo.compile(torch.exp, x, options={"cache_dir": cache}).compiled
    given = [x]
    compiled(given)
    assert given == [x]


def test_memory_that_runs_out_leaves_the_call_usable(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, v = torch.randn(6, 4), torch.randn(4, 6), torch.randn(4, 8)
    compiled = terrazzo.compile(big, x, w, v, options={"cache_dir": cache})
    wanted = compiled(x, w, v)
    guards = torch._C._dynamo.guards
    empty, tried = guards._empty_strided_cpu, []

    def none(*args: Any, **kwargs: Any) -> Any:
        tried.append(args)
        if len(tried) == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(guards, "_empty_strided_cpu", none)
    compiled.compiled.frames.clear()
    with pytest.raises(MemoryError, match=r"is f32\[6, 8\]"):
        compiled(x, w, v)
    assert torch.equal(compiled(x, w, v), wanted)
    assert sum(map(len, compiled.compiled.frames.values())) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("free", "mode"), [(8, None), (8, "reduce-overhead"), (72, None)])
def test_memory_of_a_gpu_that_runs_out_leaves_the_process_usable(free: int, mode: str | None) -> None:
    """Megabytes that are left: too few for temporaries; or enough for these, but not for the results of 16 calls."""
    x, w, v = (torch.randn(2048, 2048, device="cuda") for _ in range(3))
    torch._dynamo.reset()
    ours = torch.compile(big, backend="terrazzo", mode=mode)
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved() + free * 2**20
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            [ours(x, w, v) for _ in range(16)]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()
    torch.testing.assert_close(ours(x, w, v), big(x, w, v), rtol=1e-3, atol=1e-3)


def test_a_training_step_takes_no_more_than_eager(cache: Path) -> None:
    (case,) = (c for c in memory.cases() if c[0].startswith("MLP"))
    torch._dynamo.reset()
    module, args, kwargs = case[1]()
    given = memory._given(Options(cache_dir=cache))
    ours = torch.compile(module, backend="terrazzo", options=given)
    eager, compiled = (memory._peak(call, module, args, kwargs, True) for call in (module, ours))
    assert compiled <= 1.05 * eager
