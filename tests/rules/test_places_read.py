"""Kernels that differ in the places where they read are one: which become so, and that nothing is moved for it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import terrazzo
from terrazzo.front.capture import capture
from terrazzo.ir.canonical import nameless
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.regions import regions
from terrazzo.ir.text import parse, show
from terrazzo.ir.verify import problem
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.memory.places_read import places_read


def rows(count: int, width: int, kind: str = "f32") -> Any:
    lines = ["@loop", f"def f(x: {kind}[{count}, {width}]):"]
    for k in range(count):
        lines += [
            f"    with kernel('y{k}', y{k}={kind}[{width}]):",
            f"        for a0 in free({width}):",
            f"            in0 = x[{k}, a0]",
            "            v0 = neg(in0)",
            f"            y{k}[a0] = v0",
        ]
    return parse("\n".join([*lines, f"    return ({', '.join(f'y{k}' for k in range(count))},)"]))


def kernels(p: Any) -> set[l.Kernel]:
    return {nameless(s) for s in p.steps if isinstance(s, l.Kernel)}


def test_rows_become_windows() -> None:
    p = rows(4, 64)
    log = Log()
    found = places_read(p, log)
    assert not problem(found) and parse(show(found)) == found
    assert len(kernels(p)) == 4 and len(kernels(found)) == 1 and len(log.events) == 4
    named = regions(found.steps, found.results)
    assert named.calls == {s for s in found.steps if isinstance(s, l.Call)}, "of them nothing is executed"
    assert sorted(start for _, start in named.of.values()) == [0, 256, 512, 768]


def test_what_stays() -> None:
    """Rows of 5 numbers begin where no vector may; one kernel alone gains nothing; constants are computed once."""
    for p, constants in ((rows(4, 5), ()), (rows(1, 64), ()), (rows(4, 64), rows(4, 64).inputs)):
        assert places_read(p, Log(), constants) == p


def test_one_of_them_reads_a_whole_buffer() -> None:
    """A kernel that reads all of one buffer, or a constant, beside a part of another is one with those that read parts
    of both: a load has its place whether that is a window or not.
    """
    lines = ["@loop", "def f(x: f32[64], y: f32[2, 64]):"]
    for k, (a, b) in enumerate([("x[a0]", "y[0, a0]"), ("x[a0]", "y[1, a0]"), ("y[0, a0]", "x[a0]")]):
        lines += [
            f"    with kernel('z{k}', z{k}=f32[64]):",
            "        for a0 in free(64):",
            f"            in0 = {a}",
            f"            in1 = {b}",
            "            v0 = mul(in0, in1)",
            f"            z{k}[a0] = v0",
        ]
    p: Any = parse("\n".join([*lines, "    return (z0, z1, z2)"]))
    for constants in ((), p.inputs[:1], p.inputs):
        found = places_read(p, Log(), constants)
        assert not problem(found)
        assert len(kernels(found)) == (2 if p.inputs[1] not in constants else 3)


class Unrolled(torch.nn.Module):
    """Steps of a net over what is given for each; the last state, and all of them."""

    def __init__(self, steps: int, width: int = 16) -> None:
        super().__init__()
        self.cell, self.steps = torch.nn.GRUCell(width, width), steps

    def forward(self, x: Any) -> Any:
        h, states = torch.zeros(x.shape[0], x.shape[2]), []
        for k in range(self.steps):
            h = self.cell(x[:, k], h)
            states.append(h)
        return h, torch.stack(states, 1)


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_steps_of_an_unrolled_net_are_few_kernels(target: str) -> None:
    program = capture(Unrolled(18, 256), (torch.randn(32, 18, 256),)).program
    steps = lowering(program, Options(target=target)).loop
    assert sum(isinstance(s, l.Kernel) for s in steps.steps) > 2 * 18
    assert len(kernels(steps)) <= 8


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_states_are_as_eager_has_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Unrolled(6), torch.randn(4, 6, 16)
    with torch.no_grad():
        ours = terrazzo.compile(net, x, options=Options(target="cpu", cache_dir=tmp_path))
        for mine, theirs in zip(ours(x), net(x), strict=True):
            torch.testing.assert_close(mine, theirs)
