"""What fuzzing found, as small as it gets: each is right now, or refused with its reason."""

from __future__ import annotations

import re

import pytest
from tests.fuzz import checks
from tests.fuzz.schedules import terms

from terrazzo.errors import Limitation, UserError
from terrazzo.ir.schedule import parse_schedule
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering

RIGHT = {
    "an index that is the one element of a tensor": """@tensor
def f(x: f32[5], i: i64):
    v0: f32 = index_map(lambda: x[at(i[()], 5)])
    return (v0,)
""",
}


@pytest.mark.parametrize("name", RIGHT)
def test_programs(name: str) -> None:
    program = parse(RIGHT[name])
    assert checks.program(program, "sm_90a", True) == "right"  # type: ignore[arg-type]


SCHEDULES = {
    "more lanes than a warp has, in no site": (
        "sum of short rows", "a0 = warp(1) * lane(4) * lane(32)", "sum_1: 128 lanes; a warp has 32"),
    "a block that nobody divides": (
        "matmul", 'a0 = grid(5) * block(4)\na1 = grid(35)\nwith site("acc0"):\n    r0 = reg(23)', "a0: block(4) is divided among threads by no site that needs it"),
    "steps that nobody takes": (
        "matmul", "r0 = time(8) * block(3)", "r0: block(3) is divided among threads by no site that needs it"),
    "grid in a site": (
        "softmax", 'with site("_softmax"):\n    a1 = grid(100)', "_softmax: a1 = grid(100): grid(100) is for the kernel to bind"),
    "sites like each other": (
        "matmul", 'a0 = grid(5) * block(4)\nwith site("acc0"):\n    a0 = like("mm")\nwith site("mm"):\n    a0 = like("acc0")',
        "like('acc0'): that is like this one, and nobody says how a0 is bound"),
    "a reduction among lanes inside one among the same lanes": (
        "product and row sums", 'a0 = grid(3) * lane(8)\nwith site("acc0"):\n    r1 = reg(5) * lane(4)\nwith site("acc1"):\n    r0 = reg(4) * lane(4)',
        "sum_1: r1 is bound to threads that an axis around it is bound to already"),
    "a reduction among lanes of which only some are there": (
        "product and row sums", 'with site("acc0"):\n    r1 = reg(1) * lane(32)\nwith site("acc1"):\n    r0 = reg(1) * lane(32)',
        "sum_1: threads that are not all inside r1 meet in a reduction of its steps"),
    "a reduction over blocks": (
        "sum of short rows", "r0 = grid(5)", "blocks share the reduction over r0 in two kernels only"),
    "tiles one after the other": (
        "matmul", 'a0 = time(5) * block(4)\na1 = grid(5) * block(8)\nr0 = time(23) * block(1)\nwith site("acc0", on="fma.f32"):\n    a0 = lane(4)\n'
        '    a1 = lane(8)\n    r0 = reg(1)', "a0: only the grid walks the tiles of a contraction yet"),
    "a tile inside an axis of threads": (
        "bmm", 'a1 = grid(2) * block(8)\nr0 = time(8, ring=1) * block(2)\nwith site("bmm"):\n    a0 = like("acc0")\n    a1 = like("acc0")\n'
        'with site("acc0", on="fma.f32"):\n    a0 = reg(1) * lane(4)\n    a1 = lane(8)\n    r0 = reg(2)',
        "bmm: threads bring in a tile together, and an axis around it is divided among them"),
    "a slab of one element": (
        "bmm", 'a1 = grid(1) * block(32)\na2 = grid(17)\nr0 = time(16) * block(1)\nwith site("acc0", on="fma.f32"):\n    a1 = lane(32)\n    r0 = reg(1)\n'
        'with site("bmm"):\n    a1 = like("acc0")', "w: a step of the tile needs one element of it, which is no slab"),
}  # fmt: skip
"""Name: term, lines of its schedule, why it is refused. All were wrong results, races or crashes."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_that_are_refused(name: str) -> None:
    subject, lines, reason = SCHEDULES[name]
    term = terms(subject, "sm_80")[0]
    body = "".join(f"    {line}\n" for line in lines.split("\n"))
    text = f'with schedule("{term.kernel.name}", target="sm_80"):\n{body}'
    with pytest.raises((UserError, Limitation), match=re.escape(reason)):
        lowering(term.program, Options(target="sm_80", schedules=(text,)))


@pytest.mark.parametrize(
    ("subject", "lines"),
    [
        pytest.param("any", 'a0 = reg(9)\nwith site("acc0"):\n    r0 = warp(2) * lane(32)', id="warps meet in every step of an unrolled loop"),
        pytest.param("sum of short rows", 'a0 = grid(90)\nwith site("sum_1"):\n    pass', id="a site of nothing reads back"),
    ],
)
def test_schedules_that_are_right(subject: str, lines: str) -> None:
    term = terms(subject, "sm_80")[0]
    body = "".join(f"    {line}\n" for line in lines.split("\n"))
    assert checks.schedule(term, parse_schedule(f'with schedule("{term.kernel.name}", target="sm_80"):\n{body}')) == "right"


def test_a_kernel_stores_something() -> None:
    with pytest.raises(UserError, match="the kernel k stores nothing"):
        parse("@loop\ndef f(x: f32[4]):\n    with kernel('k', y=f32[4]):\n        for a0 in free(4):\n            in0 = x[a0]\n    return (x,)\n")
