"""Large temporaries have memory of their own where that takes less: what it saves, and that calls stay right."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import terrazzo
from terrazzo.bench import memory
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.text import parse
from terrazzo.run import own
from terrazzo.run.cpu import Cpu
from terrazzo.run.frame import FEW, SINGLY
from terrazzo.run.misfit import shared
from terrazzo.run.own import LARGE, layout, runs
from terrazzo.run.plan import Entry, Plan, held, make, views_in

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")


def saved_for_later(x: torch.Tensor, ws: list[torch.Tensor]) -> list[torch.Tensor]:
    """Much is kept at first, and then, step by step, given up for results."""
    kept = [x]
    for w in ws:
        kept.append(torch.tanh(kept[-1] @ w))
    out, g = [], kept[-1]
    for w, y in zip(reversed(ws), reversed(kept[:-1]), strict=True):
        out.append(y.t() @ g)
        g = torch.sort(g @ w.t(), -1).values  # a call of PyTorch in between
    return out


def compiled(cache: Path, *args: Any) -> Any:
    """A program of kernels alone."""
    return terrazzo.compile(saved_for_later, *args, options={"cache_dir": cache, "libraries": "never"})


@pytest.mark.parametrize("hands_on", [False, True])
def test_memory_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hands_on: bool) -> None:
    monkeypatch.setattr(Cpu, "hands_on", hands_on)
    torch.manual_seed(0)
    args = torch.randn(900, 600), [torch.randn(600, 600) / 25 for _ in range(12)]
    ours = compiled(tmp_path, *args)
    first = ours(*args)
    for got, want in zip(first, saved_for_later(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    other = ours(2 * args[0], args[1])
    assert all(map(torch.equal, first, ours(*args))) and not torch.equal(first[-1], other[-1])
    ((frame,),) = ours.compiled.frames.values()
    assert bool(frame.layout.own) == hands_on
    assert set(frame.layout.offsets).isdisjoint(frame.layout.own)
    whole = frame.arena.numel() + memory._watched(lambda: ours(*args))
    plain = layout(ours.compiled.plan, apart=False).size + sum(x.numel() * 4 for x in first)
    assert whole < 0.9 * plain if hands_on else whole > 0.95 * plain


def test_no_more_than_it_saves(tmp_path: Path) -> None:
    """Small temporaries, and those whose arena takes no more than they do, stay where they are."""
    x = torch.randn(64, 64)
    plan = compiled(tmp_path, x, [x, x]).compiled.plan
    assert not layout(plan, apart=True).own
    chain = terrazzo.compile(lambda x: torch.sort(x.exp().cumsum(0), -1).values.sum(), torch.randn(900, 900))
    assert not layout(chain.compiled.plan, apart=True).own


def test_many_that_are_not_large_may_be_as_much_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a megabyte each: they have memory of their own where an arena of all of them would stand beside results."""
    monkeypatch.setattr(Cpu, "hands_on", True)
    torch.manual_seed(0)
    args = torch.randn(500, 360), [torch.randn(360, 360) / 19 for _ in range(12)]
    ours = compiled(tmp_path, *args)
    for got, want in zip(ours(*args), saved_for_later(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    ((frame,),) = ours.compiled.frames.values()
    assert frame.layout.own and max(ours.compiled.plan.slots[k].bytes for k in frame.layout.own) < LARGE
    monkeypatch.setattr(own, "MUCH", 1.0)
    assert not layout(ours.compiled.plan, apart=True).own


def test_what_is_in_use_while_ops_take_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a convolution nobody knows how much that is: what it does not need is handed on before, even if most is in use
    elsewhere.
    """

    def sorted_twice(x: torch.Tensor) -> torch.Tensor:
        few = torch.sort(x.exp(), -1).values[:, :300]
        return torch.sort(few.cumsum(0), -1).values.sum()

    plan = terrazzo.compile(sorted_twice, torch.randn(900, 900)).compiled.plan
    assert not layout(plan, apart=True).own
    monkeypatch.setattr(own, "BESIDE", "aten.sort")
    assert {plan.slots[k].shape for k in layout(plan, apart=True).own} == {(900, 900), (900, 300)}
    assert not layout(plan, apart=False).own


@pytest.mark.parametrize("hands_on", [False, True])
def test_views_of_them_are_no_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hands_on: bool) -> None:
    """A complex tensor lies where its pairs do, which a kernel wrote."""
    monkeypatch.setattr(Cpu, "hands_on", hands_on)

    def turned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.fft.fft(torch.complex(x.sin(), x.cos()))
        return torch.view_as_real(z).sum(-1), z.abs()

    x = torch.randn(500, 700)
    ours = terrazzo.compile(turned, x, options={"cache_dir": tmp_path})
    plan = ours.compiled.plan
    views = views_in(plan)
    assert "arena" in {plan.slots[k].kind for k in views.values()}, "a temporary of ours is seen as another type"
    for got, want in zip(ours(x), turned(x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    first = [y.clone() for y in ours(x)]
    ours(x + 1)
    assert all(map(torch.equal, first, ours(x)))
    ((frame,),) = ours.compiled.frames.values()
    assert bool(frame.layout.own) == hands_on
    pairs = x.numel() * 8
    most = frame.arena.numel() + memory._watched(lambda: ours(x))
    assert most < 3.1 * pairs  # one is that of the FFT of PyTorch


def test_nothing_lies_in_the_memory_of_a_view_that_is_needed() -> None:
    """A temporary is in use as long as a view of it, and as a view of that; a plan that forgets this is refused."""
    program = parse("""
@loop
def f(x: f32[300, 2]):
    with kernel('p', p=f32[300, 2]):
        for i in free(300):
            for j in free(2):
                p[i, j] = exp(x[i, j])
    z, = call('aten.view_as_complex.default', p, _types=(c64[300],))
    row, = call('aten.unsqueeze.default', z, 0, _types=(c64[1, 300],))
    with kernel('t', t=f32[300, 2]):
        for i in free(300):
            for j in free(2):
                t[i, j] = sin(x[i, j])
    s, = call('aten._fft_c2c.default', row, [1], 0, True, _types=(c64[1, 300],))
    with kernel('u', u=f32[300, 2]):
        for i in free(300):
            for j in free(2):
                u[i, j] = cos(t[i, j])
    q, = call('aten.view_as_complex.default', u, _types=(c64[300],))
    r, = call('aten.add.Tensor', s, q, _types=(c64[1, 300],))
    return (r,)
""")
    kernels = [s for s in program.steps if isinstance(s, l.Kernel)]
    plan = make(program, {s: Entry(s.name, s.name, (*s.reads, *s.writes)) for s in kernels})
    slots = {s.name: s for s in plan.slots}
    assert {plan.slots[k].name: plan.slots[of].name for k, of in held(plan).items()} == {"z": "p", "row": "p", "q": "u"}
    assert slots["p"].offset != slots["t"].offset and slots["p"].offset == slots["u"].offset and not shared(plan)
    moved = tuple(replace(s, offset=slots["p"].offset) if s.name == "t" else s for s in plan.slots)
    assert shared(replace(plan, slots=moved)) == "p and t share memory"
    whole = next(k for k, s in enumerate(plan.slots) if s.name == "p")
    region = tuple(replace(s, of=whole, offset=0) if s.name == "t" else s for s in plan.slots)
    assert {plan.slots[k].name for k in held(replace(plan, slots=region))} == {"q"}  # parts of a whole are free sooner


def together(launches: list[Any], places: list[Any]) -> Any:
    """What stands for a CUDA graph of launches."""

    def launch(queue: int) -> None:
        for each in launches:
            each(queue)

    return launch


@pytest.mark.parametrize("hands_on", [False, True])
def test_kernels_that_are_launched_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hands_on: bool) -> None:
    """After a few calls, and with what they make from the start and to the end: results stay right, and memory as it
    was.
    """
    made: list[int] = []

    def graph(machine: Any, launches: list[Any], places: list[Any], addresses: memoryview) -> Any:
        made.append(len(launches))
        return together(launches, places)

    monkeypatch.setattr(Cpu, "hands_on", hands_on)
    monkeypatch.setattr(Cpu, "launches_singly", False)
    monkeypatch.setattr(Cpu, "graph", graph, raising=False)
    torch.manual_seed(0)
    args = torch.randn(900, 600), [torch.randn(600, 600) / 25 for _ in range(12)]
    ours = compiled(tmp_path, *args)
    first = ours(*args)
    for _ in range(SINGLY - 1):
        ours(*args)
    assert not made
    ((frame,),) = ours.compiled.frames.values()
    before = frame.arena.numel() + memory._watched(lambda: ours(*args))
    assert made and min(made) >= FEW
    for _ in range(3):
        assert all(map(torch.equal, first, ours(*args)))
        other = ours(2 * args[0], args[1])
        assert not torch.equal(first[-1], other[-1])
    after = frame.arena.numel() + memory._watched(lambda: ours(*args))
    assert after <= before + max(LARGE, before // 50)


def test_runs_take_no_more_memory(tmp_path: Path) -> None:
    """What a run of launches makes fits beside what is there when it begins; a call of PyTorch is alone."""
    args = torch.randn(900, 600), [torch.randn(600, 600) / 25 for _ in range(12)]
    plan = compiled(tmp_path, *args).compiled.plan
    for lying in (layout(plan, apart=False), layout(plan, apart=True)):
        found = runs(plan, lying)
        assert [n for run in found for n in run] == [*range(len(plan.steps))]
        assert all(len(run) == 1 for run in found for n in run if not plan.steps[n].key)
        used, (begin, _) = own._used(plan, lying), own._changes(plan, lying)
        room = max(used) + max(LARGE, max(used) // 100)
        assert all(used[run[0]] + sum(begin[n] for n in run[1:]) <= room for run in found)
        assert any(len(run) >= FEW for run in found)


@pytest.mark.parametrize("donated", [False, True])
def test_what_is_donated_makes_room_for_temporaries(donated: bool) -> None:
    """An arena would stand beside it from the start."""
    kind = "donated(f32[1024, 1024])" if donated else "f32[1024, 1024]"
    program = parse(f"""
@loop
def f(y: {kind}):
    with kernel('a', a=f32[1024]):
        for i in free(1024):
            for k in reduce(1024):
                s <- sum(y[i, k])
            a[i] = s
    with kernel('t', t=f32[1024, 1024]):
        for i in free(1024):
            for j in free(1024):
                t[i, j] = mul(a[i], a[j])
    with kernel('r', r=f32[1024]):
        for i in free(1024):
            for k in reduce(1024):
                s <- sum(t[i, k])
            r[i] = s
    return (r,)
""")
    plan = make(program, {s: Entry(s.name, s.name, (*s.reads, *s.writes)) for s in program.steps})
    assert Plan.from_json(plan.to_json()) == plan
    assert [plan.slots[k].name for k in layout(plan, apart=True).own] == (["t"] if donated else [])


@pytest.mark.parametrize("donated", [False, True])
def test_kernels_that_are_launched_at_once_let_go_of_what_is_donated(donated: bool) -> None:
    """All that a group reads is there until it ends."""
    kind = "donated(f32[1024, 1024])" if donated else "f32[1024, 1024]"
    each = "".join(
        f"""
    with kernel('{r}', {r}=f32[1024, 1024]):
        for i in free(1024):
            for j in free(1024):
                {r}[i, j] = exp({x}[j, i])"""
        for r, x in (("a", "x"), ("b", "y"))
    )
    program = parse(f"@loop\ndef f(x: {kind}, y: {kind}):{each}\n    return (a, b)\n")
    plan = make(program, {s: Entry(s.name, s.name, (*s.reads, *s.writes)) for s in program.steps})
    assert runs(plan, layout(plan, apart=True)) == ([[0], [1]] if donated else [[0, 1]])
