"""Tensors of a plan that lie in one place, one after the other: what that saves, and that calls stay right."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import terrazzo
from terrazzo.bench import memory
from terrazzo.ir.in_place import pairs
from terrazzo.ir.text import parse
from terrazzo.rules.loop.memory.lifetimes import in_use
from terrazzo.run import plan
from terrazzo.run.cpu import Cpu
from terrazzo.run.misfit import shared
from terrazzo.run.own import _most, layout
from terrazzo.run.taken import adopted, roots

SIZE = 1 << 20  # bytes of 512 x 512 numbers

KERNEL = """
    with kernel('{y}', {y}=f32[512, 512]):
        for a0 in free(512):
            for a1 in free(512):
                in0 = {x}[{at}]
                v0 = exp(in0)
                {y}[a0, a1] = v0"""

SUM = """
    with kernel('{y}', {y}=f32[512, 512]):
        for a0 in free(512):
            for a1 in free(512):
                in0 = {x}[a0, a1]
                for r0 in reduce(512):
                    in1 = {z}[a0, r0]
                    acc0 <- sum(in1)
                v0 = add(in0, acc0)
                {y}[a0, a1] = v0"""


def program(*kernels: str, results: str) -> Any:
    return parse("@loop\ndef f(x: f32[512, 512]):" + "".join(kernels) + f"\n    return ({results},)")


def exp(x: str, y: str, at: str = "a0, a1") -> str:
    return KERNEL.format(x=x, y=y, at=at)


def added(x: str, z: str, y: str) -> str:
    return SUM.format(x=x, y=y, z=z)


def planned(p: Any, onto: Any = None) -> plan.Plan:
    entries = {s: plan.Entry("k", s.name, (*s.reads, *s.writes)) for s in p.steps}
    return plan.make(p, entries, onto=pairs(p.steps) if onto is None else onto)


def places(made: plan.Plan) -> dict[str, str]:
    """What lies in the memory of what, by names; and where that has a place."""
    return {s.name: made.slots[s.onto].name for s in made.slots if s.onto is not None}


def test_a_chain_lies_in_one_place() -> None:
    p = program(exp("x", "a"), exp("a", "b"), exp("b", "c"), exp("c", "d", "a1, a0"), results="d")
    made = planned(p)
    assert places(made) == {"b": "a", "c": "b"}, "what is turned lies elsewhere, and inputs are not ours"
    assert made.arena == SIZE == layout(made, apart=False).size and max(in_use(p.steps, p.results)) == 2 * SIZE
    assert shared(made) == ""
    assert plan.Plan.from_json(made.to_json()) == made


def test_a_result_takes_over_what_it_is_made_of() -> None:
    p = program(exp("x", "a"), exp("a", "b"), exp("b", "c"), results="c")
    made = planned(p)
    names = [s.name for s in made.slots]
    assert {names[k]: names[r] for k, r in roots(made.slots).items()} == {"a": "c", "b": "c"}
    assert made.arena == 0 and plan.spans(made)[0][names.index("c")] == 0
    assert _most(made, layout(made, apart=True)) == max(in_use(p.steps, p.results)) == SIZE
    assert shared(made) == ""


def test_what_is_read_in_sums_or_later_stays() -> None:
    """Beside a sum of something else one is replaced; in its own sum, or where it is read once more, none."""
    p = program(exp("x", "a"), exp("x", "b"), added("a", "b", "c"), results="c")
    assert places(planned(p)) == {"c": "a"}
    assert not places(planned(program(exp("x", "a"), added("a", "a", "c"), results="c")))
    later = program(exp("x", "a"), exp("a", "b"), added("a", "b", "c"), results="b, c")
    assert places(planned(later)) == {"c": "a"}, "only who reads it last takes it over"
    assert not places(planned(program(exp("x", "a"), exp("a", "b"), results="a, b")))


def test_small_ones_stay() -> None:
    text = exp("x", "a") + exp("a", "b")
    p = parse(f"@loop\ndef f(x: f32[512, 512]):{text}\n    return (b,)".replace("512", "500"))
    assert not places(planned(p))


def test_plans_in_which_what_is_needed_is_overwritten_are_refused() -> None:
    p = program(exp("x", "a"), exp("x", "b"), added("a", "b", "c"), exp("c", "d", "a1, a0"), results="d")
    made = planned(p)
    names = [s.name for s in made.slots]
    assert places(made) == {"c": "a"}

    def edited(name: str, onto: str | None, **fields: Any) -> str:
        k = names.index(name)
        slot = replace(made.slots[k], onto=None if onto is None else names.index(onto), **fields)
        return shared(replace(made, slots=(*made.slots[:k], slot, *made.slots[k + 1 :])))

    assert edited("c", "a") == ""
    for name, onto in (("b", "a"), ("d", "a"), ("c", "x"), ("c", "c"), ("a", "c"), ("d", "b")):
        assert "memory" in edited(name, onto), (name, onto)
    assert "memory" in edited("c", "a", shape=(512, 511))


def test_another_shape_of_the_same_memory() -> None:
    flat = (
        exp("x", "a")
        + """
    with kernel('b', b=f32[1, 262144]):
        for a0 in free(512):
            for a1 in free(512):
                in0 = a[a0, a1]
                v0 = exp(in0)
                b[0, a0 * 512 + a1] = v0"""
    )
    assert places(planned(program(flat, results="b"))) == {"b": "a"}
    assert not places(planned(program(flat.replace("a[a0, a1]", "a[a1, a0]"), results="b")))


def steps(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Calls of PyTorch in between, of which some give views."""
    y = torch.sort(x.sin().cos(), -1).values  # memory that PyTorch has made
    z = torch.complex(y.exp().tanh(), y)
    return torch.view_as_real(z).sum(-1), torch.sort(y.sin(), 0).values.cos() * w


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
@pytest.mark.parametrize("hands_on", [False, True])
def test_calls_stay_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hands_on: bool) -> None:
    x, w = torch.randn(512, 600), torch.randn(512, 600)
    most = []
    for in_place in (False, True):  # the kernels are the same
        monkeypatch.setattr(Cpu, "in_place", in_place)
        monkeypatch.setattr(Cpu, "hands_on", hands_on)
        ours = terrazzo.compile(steps, x, w, options={"cache_dir": tmp_path / str(in_place), "fuse": False})
        for given in (x, x * 2, x):
            for got, want in zip(ours(given, w), steps(given, w), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        made = ours.compiled.plan
        assert bool(places(made)) == in_place and shared(made) == ""
        ((frame,),) = ours.compiled.frames.values()
        most.append(frame.arena.numel() + memory._watched(lambda call=ours: call(x, w)))
    assert most[1] < most[0]
    again = terrazzo.compile(steps, x, w, options={"cache_dir": tmp_path / "True", "fuse": False})
    assert again.compiled.program is None and places(again.compiled.plan) == places(made)
    assert all(map(torch.equal, again(x, w), ours(x, w)))


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
def test_what_an_op_gives_back_as_it_was_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some return their input, and do not tell: a kernel that stores in its place would change what the user has."""
    from terrazzo.run import called

    monkeypatch.setattr(Cpu, "in_place", True)
    monkeypatch.setattr(called, "operator", lambda name: lambda x, *args, **kwargs: (x, x.long()))
    x = torch.randn(512, 600)
    before = x.clone()
    ours = terrazzo.compile(
        lambda x: torch.sort(x, -1).values.sin().cos(), x, options={"cache_dir": tmp_path, "fuse": False}
    )
    assert places(ours.compiled.plan)
    torch.testing.assert_close(ours(x), before.sin().cos(), rtol=1e-4, atol=1e-5)
    assert torch.equal(x, before)


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
@pytest.mark.parametrize("hands_on", [False, True])
def test_what_an_op_made_becomes_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hands_on: bool) -> None:
    """Of the same type, and only if nothing else lies there before."""
    monkeypatch.setattr(Cpu, "in_place", True)
    monkeypatch.setattr(Cpu, "hands_on", hands_on)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.sort(x, -1).values
        z = torch.sort((x.sin() @ x.t()).tanh() @ x, 0).values
        return y.cos(), (z.t() * 2).contiguous()

    x = torch.randn(512, 600)
    ours = terrazzo.compile(f, x, options={"cache_dir": tmp_path, "fuse": False})
    made = ours.compiled.plan
    slots = [made.slots[k] for k in made.results]
    theirs = {made.slots[k].name: made.slots[old].kind for k, old in adopted(made.slots).items()}
    assert theirs == {slots[0].name: "call"} and shared(made) == ""
    apart = replace(made, slots=tuple(replace(s, onto=None) if s is slots[0] else s for s in made.slots))
    assert _most(made, layout(made, False)) <= _most(apart, layout(apart, False))
    first = ours(x)
    kept = [t.clone() for t in first]
    for given in (x * 2, x):
        for got, want in zip(ours(given), f(given), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert all(map(torch.equal, first, kept)), "what a call gave is the user's"
    again = terrazzo.compile(f, x, options={"cache_dir": tmp_path, "fuse": False})
    assert again.compiled.program is None and all(map(torch.equal, again(x), first))
    host = made.results[0]
    within = next(k for k, s in enumerate(made.slots) if s.kind == "arena" and s.onto is None)
    odd = replace(made.slots[within], within=host, offset=0)
    assert shared(replace(made, slots=(*made.slots[:within], odd, *made.slots[within + 1 :])))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [999, 4001, 16_003])
def test_on_a_gpu_what_was_overwritten_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Kernels that are launched while the one before them still writes, in blocks whose edges share cache lines."""
    from terrazzo.run.cuda import Cuda

    def deep(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            y = x.sin().cos()
            x = torch.tanh(y.flip(0) + x.abs()).neg()
        return x

    x = torch.randn(rows, 1048, device="cuda")[:, :1047].contiguous()
    ours = []
    for in_place in (False, True):
        monkeypatch.setattr(Cuda, "in_place", in_place)
        options = {"cache_dir": tmp_path / str(in_place), "fuse": False, "libraries": "never"}
        ours.append(terrazzo.compile(deep, x, options=options))
        assert bool(places(ours[-1].compiled.plan)) == in_place
    for k in range(30):
        given = x.roll(k, 0) * (1 + k % 3)
        want = ours[0](given)
        assert all(torch.equal(ours[1](given), want) for _ in range(5))
