"""Compiled programs as they are called: memory shared in time, threads, weights, and the plan in the cache."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import terrazzo
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.types import DTYPES, Type
from terrazzo.run import compiled as run
from terrazzo.run.plan import ALIGN, Plan, allocate


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@st.composite
def calls(draw: st.DrawFn) -> l.Program:
    """Opaque calls that read some of what was written before; allocation asks for nothing else."""
    x = l.Buffer("x", Type(DTYPES["f32"], (4,)))
    known, steps = [x], []
    for k in range(draw(st.integers(1, 12))):
        reads = draw(st.lists(st.sampled_from(known), max_size=3, unique=True))
        size, dtype = draw(st.integers(0, 100)), draw(st.sampled_from(("f32", "bool", "f64")))
        out = l.Buffer(f"b{k}", Type(DTYPES[dtype], (size,)))
        steps.append(l.Call("aten.cat.default", (tuple(reads),), (), (out,), ""))
        known.append(out)
    return l.Program("f", (x,), tuple(steps), (known[-1],))


@settings(max_examples=200, deadline=None)
@given(calls())
def test_buffers_that_live_at_the_same_time_do_not_overlap(program: l.Program) -> None:
    temporaries = [b for s in program.steps for b in s.writes if b not in program.results]
    offsets, total = allocate(program, temporaries)
    alive = {}
    for b in temporaries:
        uses = [k for k, s in enumerate(program.steps) if b in s.reads or b in s.writes]
        alive[b] = (uses[0], uses[-1])
        assert offsets[b] % ALIGN == 0 and offsets[b] + b.type.static_shape[0] * b.type.dtype.size <= total
    for a, b in itertools.combinations(temporaries, 2):
        apart = alive[a][1] < alive[b][0] or alive[b][1] < alive[a][0]
        ends = [offsets[c] + c.type.static_shape[0] * c.type.dtype.size for c in (a, b)]
        assert apart or ends[0] <= offsets[b] or ends[1] <= offsets[a]


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Two products with something between, so that there are temporaries."""
    return torch.softmax(torch.relu(x @ w) @ w.T, -1) + x


def test_several_threads_may_call_at_once(cache: Path) -> None:
    xs, w = [torch.randn(48, 64) for _ in range(16)], torch.randn(64, 32)
    done = terrazzo.compile(block, xs[0], w, options={"cache_dir": cache, "threads": 1})
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda k: done(xs[k % 16], w), range(200)))
    for k, r in enumerate(results):
        torch.testing.assert_close(r, block(xs[k % 16], w))
    assert len(done.compiled.frames) <= 8


def test_weights_that_change_in_place_are_seen(cache: Path) -> None:
    module, x = torch.nn.Linear(8, 8), torch.randn(3, 8)
    done = terrazzo.compile(module, x, options={"cache_dir": cache})
    with torch.no_grad():
        module.weight.mul_(2).add_(1)
        module.bias.zero_()
    torch.testing.assert_close(done(x), module(x))


def test_results_are_the_callers_own(cache: Path) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, x + 1, x

    x = torch.randn(4)
    first, second = (terrazzo.compile(f, x, options={"cache_dir": cache})(x) for _ in range(2))
    first[0].zero_()
    first[1].zero_()
    assert torch.equal(second[0], x) and torch.equal(second[1], x + 1) and torch.equal(first[2], x)


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _rewritten(*swap: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        assert swap[0] in path.read_bytes()
        path.write_bytes(path.read_bytes().replace(*swap))

    return change


@pytest.mark.parametrize(
    "damage",
    [_truncated, _rewritten(b'"arena":', b'"arena":-'), _rewritten(b'"version":1', b'"version":0'), lambda p: p.write_bytes(b"\x00" * 99)],
)
def test_a_damaged_plan_is_made_again(damage: Callable[[Path], None], tmp_path: Path) -> None:
    x, w, options = torch.randn(4, 8), torch.randn(8, 8), {"cache_dir": tmp_path}
    terrazzo.compile(block, x, w, options=options)
    (plan,) = tmp_path.rglob("*.plan")
    sound = plan.read_bytes()
    damage(plan)
    torch.testing.assert_close(terrazzo.compile(block, x, w, options=options)(x, w), block(x, w))
    assert plan.read_bytes() == sound


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_no_change_to_a_plan_is_worse_than_a_value_error(data: st.DataObject) -> None:
    text = bytearray(PLAN)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.sampled_from([b"", b"-", b"9", b"[", b'"', b"null", b"1e9"]))
    try:
        found = Plan.from_json(bytes(text))
    except ValueError:
        return
    assert all(s.kind != "arena" or s.offset + s.bytes <= found.arena for s in found.slots)


PLAN = Plan(
    (0,), (1,), (run.Slot("x", "f32", (4,), (1,), "input"), run.Slot("y", "f32", (4,), (1,), "result")), (), 0
).to_json()  # fmt: skip

PROGRAM = """
import sys, torch, terrazzo
from unittest.mock import patch
torch.manual_seed(0)
model, x = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32)), torch.randn(4, 16)
def refuse(*args, **kwargs): raise AssertionError("a warm start must not do this")
guards = [patch("terrazzo.run.compiled.compile_all", refuse), patch("terrazzo.pipelines.stages", refuse)] if "warm" in sys.argv else []
for g in guards: g.start()
assert torch.allclose(terrazzo.compile(model, x)(x), model(x), atol=1e-5)
"""


def test_a_second_process_lowers_and_compiles_nothing(tmp_path: Path) -> None:
    environment: dict[str, Any] = {**os.environ, "TERRAZZO_CACHE_DIR": str(tmp_path)}
    for words in ([], ["warm"]):
        subprocess.run([sys.executable, "-c", PROGRAM, *words], env=environment, check=True)
