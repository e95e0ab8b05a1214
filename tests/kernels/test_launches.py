"""Kernels that are launched while the one before them still runs, and what a loop counts along (ADR 014)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.hw.sass import sass
from tests.kernels import by_hand
from tests.kernels.programs import lowered

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.text import parse
from terrazzo.targets.cuda.counting import counters
from terrazzo.targets.cuda.emit import emit

LOADS = re.compile(r"\b(LDG|LD|UTMALDG|LDGSTS|STG|ST|UTMASTG|RED|ATOM)\b")


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)


PROGRAMS = {
    "points": (lambda x, y: torch.relu(x) + y, (torch.randn(64, 64), torch.randn(64, 64))),
    "rows": (lambda x: torch.softmax(x, -1), (torch.randn(32, 300),)),
    "a product in boxes": (F.linear, (bf16(128, 256), bf16(128, 256))),
    "a product on CUDA cores": (torch.matmul, (torch.randn(50, 70), torch.randn(70, 30))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_read_before_the_kernel_before_has_ended(name: str, tmp_path: Path) -> None:
    """In machine code too: inputs are const and restrict, and a compiler may load such things early."""
    fn, args = PROGRAMS[name]
    for kernel in lowered(fn, args, "sm_90a").kernels:
        lines = sass(kernel, "sm_90a", tmp_path)
        (waits,) = (n for n, line in enumerate(lines) if "ACQBULK" in line)
        first = next(n for n, line in enumerate(lines) if LOADS.search(line))
        assert waits < first and any("PREEXIT" in line for line in lines[waits:first])


def test_other_machines_wait_for_nothing(tmp_path: Path) -> None:
    fn, args = PROGRAMS["points"]
    (kernel,) = lowered(fn, args, "sm_80").kernels
    assert not any("ACQBULK" in line for line in sass(kernel, "sm_80", tmp_path))


def test_kernels_of_many_blocks_are_launched_in_turn() -> None:
    (kernel,) = lowered(PROGRAMS["points"][0], PROGRAMS["points"][1], "sm_90a").kernels
    some, many = (replace_grid(kernel, n) for n in (k.EARLY, k.EARLY + 1))
    assert some.early and emit(some)[1].count("tz_begins()") == 1
    assert not many.early and "tz_begins()" not in emit(many)[1]


def replace_grid(kernel: k.Kernel, grid: int) -> k.Kernel:
    values = dict(zip(type(kernel)._fields, kernel.values, strict=True))
    return k.Kernel(**{**values, "grid": grid})


def test_barriers_come_into_being_before_it() -> None:
    (kernel,) = by_hand.program("ring").steps
    _, text = emit(kernel)
    assert text.index("barrier_init(") < text.index("tz_begins()") < text.index("tma_load_2d(shared")


def gated(kind: torch.dtype) -> list[torch.Tensor]:
    return [torch.zeros(32, 2048, dtype=kind) for _ in range(2)]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_all_is_asked_for_before_something_is_computed(kind: torch.dtype, tmp_path: Path) -> None:
    """In machine code too: of silu(x) * y in float32 NVVM asks for y behind the first division, over whose branch ptxas
    moves nothing.
    """
    (kernel,) = lowered(lambda x, y: F.silu(x) * y, gated(kind), "sm_90a").kernels
    text = emit(kernel)[1]
    assert text.index("move<2>(in1, ") < text.index("tz_asked();") < text.index("in0[i0]")
    lines = sass(kernel, "sm_90a", tmp_path)
    loads = [n for n, line in enumerate(lines) if "LDG" in line]
    assert len(loads) == 2 and loads[1] < next(n for n, line in enumerate(lines) if "MUFU" in line)


def test_who_asks_for_one_thing_needs_no_fence() -> None:
    (kernel,) = lowered(lambda x: F.silu(x), gated(torch.float32)[:1], "sm_90a").kernels
    assert "tz_asked" not in emit(kernel)[1]


def test_boxes_are_sent_by_an_elected_lane_without_a_loop_over_lanes(tmp_path: Path) -> None:
    (kernel,) = by_hand.program("ring").steps
    _, text = emit(kernel)
    assert "elected()" in text
    assert not any("BRA.U.ANY" in line for line in sass(kernel, "sm_90a", tmp_path))


RING = """@kernel
def steps(x: f32[64, 7]):
    with launch('steps', _grid=1, _warps=1, _resident=1, _reads=[x], y=f32[64]):
        for i in serial(2):
            for t in serial(7):
                y[lane + i * 32] = x[lane + i * 32, ({slot})]
    return (y,)
"""


@pytest.mark.parametrize(
    ("slot", "counted"),
    [
        ("(i * 7 + t) % 5", [(5, True, False)]),
        ("(i * 7 + t) // 5", [(5, False, True)]),
        ("(i * 7 + t) // 5 + (i * 7 + t) % 5", [(5, True, True)]),
        ("(i * 7 + t) % 4", []),
        ("(i * 7 + t * 3) % 5", []),
        ("(lane + t) % 5", [(5, True, False)]),
    ],
)
def test_what_a_loop_counts_along(slot: str, counted: list[tuple[int, bool, bool]]) -> None:
    (kernel,) = parse(RING.format(slot=slot)).steps
    loops = [s for s in k.walk(kernel.body) if isinstance(s, k.For)]
    found = [(c.base, c.rest is not None, c.quotient is not None) for c in counters(loops[1])]
    assert found == counted and counters(loops[0]) == []
    _, text = emit(kernel)
    assert ("if (++t_mod5 == 5)" in text) == bool(counted)
