"""Tensors that are written or read in windows: each piece takes memory only while it is in use."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.ir.dialects import loop as l
from terrazzo.ir.regions import LINE, Piece, lived, regions
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.rules.loop.memory.lifetimes import in_use
from terrazzo.run.arena import placed, repacked
from terrazzo.run.compiled import compile_program
from terrazzo.run.misfit import shared
from terrazzo.run.own import layout
from terrazzo.run.plan import Entry, Plan, make

MEGA = 1 << 20
HEAD = """@loop
def f(x: f32[1024, 512]):
    with kernel('h', h=f32[1024, 512]):
        for a0 in free(1024):
            for a1 in free(512):
                in0 = x[a0, a1]
                v0 = add(in0, f32(1.0))
                h[a0, a1] = v0"""
WINDOW = """
    {h}, = call('aten.alias.default', view(h, [512, 512], [512, 1], {start}), _types=(f32[512, 512],))
    with kernel('{t}', {t}=f32[512, 512]):
        for a0 in free(512):
            for a1 in free(512):
                in0 = {h}[a0, 511 - a1]
                v0 = mul(in0, f32(2.0))
                {t}[a0, a1] = v0
    with kernel('{y}', {y}=f32[512, 512]):
        for a0 in free(512):
            for a1 in free(512):
                in0 = {t}[a0, 511 - a1]
                v0 = sub(in0, f32(3.0))
                {y}[a0, a1] = v0"""
WINDOWS = [WINDOW.format(h=f"h{k}", t=f"t{k}", y=f"y{k}", start=k * 512 * 512) for k in range(2)]
WHOLE = "\n    y, = call('aten.cat.default', [y0, y1], 0, _types=(f32[1024, 512],))"
TAIL = """
    with kernel('z', z=f32[1024]):
        for a0 in free(1024):
            for r0 in reduce(512):
                in0 = y[a0, r0]
                acc0 <- sum(in0)
            z[a0] = acc0"""


def program(result: str) -> l.Program:
    text = HEAD + "".join(WINDOWS) + WHOLE + (TAIL if result == "z" else "") + f"\n    return ({result},)\n"
    found = parse(text)
    assert isinstance(found, l.Program)
    return found


def planned(p: l.Program) -> Plan:
    kernels = [s for s in p.steps if isinstance(s, l.Kernel)]
    return make(p, {s: Entry("k", s.name, tuple(dict.fromkeys((*s.reads, *s.writes)))) for s in kernels})


def test_what_windows_give_lies_where_windows_of_what_they_are_made_of_were() -> None:
    p = program("z")
    assert max(in_use(p.steps, p.results)) == 3 * MEGA, "two of either, and one between them"
    plan = planned(p)
    assert plan.arena == 3 * MEGA and shared(plan) == "" and Plan.from_json(plan.to_json()) == plan
    assert layout(plan, apart=True).size == 3 * MEGA


def test_what_is_between_lies_in_the_piece_of_a_result_that_comes_last() -> None:
    plan = planned(program("y"))
    slots = {s.name: s for s in plan.slots}
    k = next(n for n, s in enumerate(plan.slots) if s.name == "t0")
    assert plan.slots[k].within is not None and plan.slots[plan.slots[k].within].name == "y"
    assert plan.slots[k].offset == MEGA and slots["t1"].within is None and shared(plan) == ""
    slots_ = [replace(s, offset=0) if n == k else s for n, s in enumerate(plan.slots)]
    assert shared(replace(plan, slots=tuple(slots_))) == "t0 and y share memory"


def test_pieces_that_are_in_use_together_share_nothing() -> None:
    plan = planned(program("z"))
    by = {s.name: n for n, s in enumerate(plan.slots)}
    for name, other in (("y", "h"), ("t0", "h"), ("t1", "y")):
        moved = replace(plan.slots[by[name]], offset=plan.slots[by[other]].offset + (MEGA if name == "y" else 0))
        slots = tuple(moved if n == by[name] else s for n, s in enumerate(plan.slots))
        assert "share memory" in shared(replace(plan, arena=8 * MEGA, slots=slots)), (name, other)


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
@pytest.mark.parametrize("result", ["y", "z"])
def test_calls_that_use_memory_so_are_right(result: str, tmp_path: Path) -> None:
    x = torch.randint(-4, 5, (1024, 512)).float()
    found = compile_program(program(result), {}, Options(target="cpu", cache_dir=tmp_path, fuse=False))
    y = (x + 1) * 2 - 3
    torch.testing.assert_close(found([x])[0], y if result == "y" else y.sum(1), rtol=0, atol=0)
    assert found.plan.arena + (result == "y") * 2 * MEGA <= 4 * MEGA


NESTED = """@loop
def f(x: f32[64, 128]):
    a, = call('aten.alias.default', view(x, [32, 128], [128, 1], 4096), _types=(f32[32, 128],))
    b, = call('aten.alias.default', view(a, [16, 128], [128, 1], 2048), _types=(f32[16, 128],))
    with kernel('p', p=f32[16, 128]):
        for a0 in free(16):
            for a1 in free(128):
                in0 = b[a0, a1]
                p[a0, a1] = in0
    with kernel('q', q=f32[16, 128]):
        for a0 in free(16):
            for a1 in free(128):
                in0 = {read}[a0, a1]
                q[a0, a1] = in0
    s, = call('aten.cat.default', [p, q], 0, _types=(f32[32, 128],))
    with kernel('r', r=f32[32, 128]):
        for a0 in free(32):
            for a1 in free(128):
                in0 = a[a0, a1]
                r[a0, a1] = in0
    y, = call('aten.cat.default', [r, s], 0, _types=(f32[64, 128],))
    return (y,)
"""


@pytest.mark.parametrize("dimension", [", 0", ""])
def test_windows_of_windows_and_pieces_of_pieces(dimension: str) -> None:
    """The first dimension is that of a concatenation that names none."""
    p = parse(NESTED.format(read="b").replace("], 0", f"]{dimension}"))
    found = regions(p.steps, p.results)
    assert {b.name: (whole.name, start) for b, (whole, start) in found.of.items()} == {
        "a": ("x", 16384), "b": ("x", 24576), "r": ("y", 0), "s": ("y", 16384), "p": ("y", 16384), "q": ("y", 24576)
    }  # fmt: skip
    assert found.calls == {s for s in p.steps if isinstance(s, l.Call)}


def test_who_is_no_region_makes_none_of_others() -> None:
    """PyTorch makes a window that is read by one of its ops, and so what that is a window of."""
    sort = "    k, n = call('aten.sort.default', b, _types=(f32[16, 128], i64[16, 128]))\n    return (y, k)\n"
    p = parse(NESTED.format(read="b").replace("    return (y,)\n", sort))
    assert {b.name for b in regions(p.steps, p.results).of} == {"p", "q", "r", "s"}
    kept = parse(NESTED.format(read="b").replace("return (y,)", "return (y, s)"))
    assert {b.name for b in regions(kept.steps, kept.results).of} == {"a", "b", "p", "q"}


Use = tuple[int, str, int, int]
USES = st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abcd"), st.integers(0, 3), st.integers(1, 2)), min_size=1)


@settings(deadline=None, max_examples=100)
@given(USES)
def test_pieces_are_in_use_when_their_bytes_are(drawn: list[Any]) -> None:
    """Byte for byte, and placed so that none of them is used by two at a time."""
    uses: list[Use] = sorted((n, x, start * LINE, (start + size) * LINE) for n, x, start, size in drawn)
    found = lived(uses)
    for x, pieces in found.items():
        for line in range(0, 6 * LINE, LINE):
            steps = [n for n, y, start, end in uses if y == x and start <= line < end]
            there = [p for p in pieces if p.start <= line < p.end]
            assert [(p.first, p.last) for p in there] == ([(min(steps), max(steps))] if steps else [])
    items = list(found)
    first = placed(items, found.__getitem__, lambda n: range(n))
    again = repacked(items, found.__getitem__, lambda n: range(n), 0)
    assert again[1] <= first[1]
    for offsets, end in (first, again):
        taken = [p.at(offsets[x]) for x in items for p in found[x]]
        assert max(p.end for p in taken) == end
        for k, p in enumerate(taken):
            assert not any(p.beside(q) and p.start < q.end and q.start < p.end for q in taken[:k])


def test_a_piece_is_whole_lines() -> None:
    assert lived([(0, "a", 100, 300), (2, "a", 300, 301)]) == {"a": [Piece(0, LINE, 0, 0), Piece(LINE, 2 * LINE, 0, 2)]}
