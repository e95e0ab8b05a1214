"""Tile IR: prints, reads back, and refuses schedules that are not of the kernel above them."""

from __future__ import annotations

import re

import pytest
import torch

from terrazzo.errors import CompilerBug, UserError
from terrazzo.front.capture import capture
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.nest import accumulators
from terrazzo.ir.parse_schedule import parse_schedule
from terrazzo.ir.text import parse, show
from terrazzo.ir.verify import verify
from terrazzo.options import Options
from terrazzo.pipelines import lower
from terrazzo.rewrite.rule import Log

NORM = """with schedule("mul_1", target="sm_90a"):
    a0 = grid(32)
    x = reg()
    with site("acc0"):
        r0 = reg(2) * warp(8) * lane(32) * reg(4)
    with site("mul_1"):
        a1 = like("acc0.r0")"""


def norm() -> l.Program:
    return lower(capture(torch.nn.RMSNorm(2048), (torch.randn(32, 2048),)).program, Options(), Log())


def scheduled(text: str) -> tile.Program:
    return tile.Program(norm(), ((0, parse_schedule(text)),))


def test_it_reads_back() -> None:
    program = scheduled(NORM)
    verify(program)
    assert parse(show(program)) == program
    without = tile.Program(norm(), ())
    assert parse(show(without)) == without and show(without) == show(norm()).replace("@loop", "@tile")


def test_accumulators_are_called_as_they_are_printed() -> None:
    for fn in (lambda x: torch.softmax(x, -1), lambda x: torch.cumsum(x.sum(2), 1).mean(), torch.nn.LayerNorm(16)):
        program = lower(capture(fn, (torch.randn(8, 4, 16),)).program, Options(), Log())
        for kernel in program.steps:
            assert isinstance(kernel, l.Kernel)
            printed = dict(re.findall(r"(acc\d+) <- (\w+)", show(kernel)))
            assert printed == {name: site.monoid.name for name, site in accumulators(kernel).items()}


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ('schedule("mul_1"', 'schedule("other"', "the schedule is one of other, and the kernel above it is mul_1"),
        ("grid(32)", "grid(16)", "a0 = grid(16): grid must be 32 to cover 32"),
        ("acc0", "acc7", "the kernel has no site acc7; it has mul_1, acc0"),
        ("        r0 = reg(2)", "        r0 = reg(3)", "reg must be 2 to cover 2048"),
        ("        a1 = like", "        r0 = like", "there is no axis r0 here; there are a0, a1"),
    ],
)
def test_what_does_not_fit_is_refused(before: str, after: str, reason: str) -> None:
    bad = scheduled(NORM.replace(before, after))
    with pytest.raises(CompilerBug, match=re.escape(reason)):
        verify(bad)
    with pytest.raises(UserError, match=rf"line \d+, column \d+: .*{re.escape(reason)}"):
        parse(show(bad))


def test_a_schedule_stands_below_its_kernel() -> None:
    lines = show(scheduled(NORM)).splitlines()
    start = next(k for k, line in enumerate(lines) if "with schedule" in line)
    schedule = lines[start:-1]
    for text in (lines[:2] + schedule + lines[2:start] + lines[-1:], [*lines[:-1], *schedule, lines[-1]]):
        with pytest.raises(UserError, match="a schedule stands below the kernel it is one of"):
            parse("\n".join(text))
