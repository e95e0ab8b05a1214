"""Schedules: the ten of ADR 004 read, print and fit their kernels; what does not fit is refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

from terrazzo.errors import UserError
from terrazzo.ir.parse_schedule import parse_schedule
from terrazzo.ir.schedule import Schedule

ADR = (Path(__file__).parents[2] / "docs" / "adr" / "004-a-schedule-is-a-binding.md").read_text()


def sections() -> list[tuple[str, str]]:
    """(title, first listing) of the ten."""
    parts = re.split(r"^## (\d+\. .*)$", ADR, flags=re.MULTILINE)[1:]
    return [
        (title, re.search(r"```python\n(.*?)```", body, re.DOTALL)[1])
        for title, body in zip(parts[::2], parts[1::2], strict=True)
    ]  # type: ignore[index]


def axes(listing: str) -> dict[str, int]:
    return {name: int(extent) for name, extent in re.findall(r"(\w+) in (?:free|reduce)\((\d+)\)", listing)}


SECTIONS = sections()
# Where a section says that the term is another's, these are its axes.
AXES = {
    6: axes(SECTIONS[4][1]),
    9: {**axes(SECTIONS[7][1]), "a0": 64, "a1": 8, "r1": 32768},
}


@pytest.mark.parametrize("number", range(1, 11))
def test_the_adr(number: int) -> None:
    title, listing = SECTIONS[number - 1]
    assert title.startswith(f"{number}. ")
    text = dedent(listing[listing.index("with schedule") :])
    schedule = parse_schedule(re.sub(r" +#.*", "", text))
    assert str(schedule) == text.strip()
    assert parse_schedule(str(schedule)) == schedule
    check(schedule, AXES.get(number) or axes(listing))


def check(schedule: Schedule, extents: dict[str, int]) -> None:
    """As for a kernel whose every site has all the axes that reduce."""
    own = {a: e for a, e in extents.items() if a.startswith("r")}
    sites = {name.partition(".")[0] for site in schedule.sites for name in site.names} - {"linaer"}
    schedule.check({a: e for a, e in extents.items() if a not in own}, dict.fromkeys(sorted(sites | {"linear"}), own))


MATMUL = dedent(SECTIONS[4][1][SECTIONS[4][1].index("with schedule") :])
EXTENTS = axes(SECTIONS[4][1])


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("grid(32) * block(128)", "grid(31) * block(128)", "a1 = grid(31) * block(128): grid must be 32 to cover 4096"),
        (
            "grid(32) * block(128)",
            "block(128) * grid(32)",
            "grid, cluster, time, block come first, in this order, each once",
        ),
        (
            "a1 = warp(4) * reg(4) * inst.n(8)",
            "a1 = warp(4) * reg(2) * inst.n(8)",
            "acc0: a1 divides into warp(4) * reg(2) * inst.n(8)",
        ),
        (
            "a0 = warp(2) * reg(4) * inst.m(16)",
            "a0 = warp(3) * reg(4) * inst.m(16)",
            "a0: warp(3) must be a power of two",
        ),
        (
            "a1 = warp(4) * reg(4) * inst.n(8)",
            "a1 = lane(4) * reg(4) * inst.n(8)",
            "4 lanes; the instruction binds them",
        ),
        (', on="mma.m16n8k16.f32.bf16"', "", "acc0 binds axes of an instruction and names none"),
        ("    a1 = grid", "    a7 = grid", "there is no axis a7 here; there are a0, a1, r0"),
        ('site("linear")', 'site("linaer")', "the kernel has no site linaer; it has acc0, linear"),
    ],
)
def test_what_does_not_fit(before: str, after: str, reason: str) -> None:
    assert before in MATMUL
    with pytest.raises(UserError, match=re.escape(reason)):
        check(parse_schedule(MATMUL.replace(before, after)), EXTENTS)


def test_sites_must_agree_on_the_threads() -> None:
    text = 'with schedule("f", target="sm_80"):\n    with site("acc0"):\n        r0 = reg(4) * warp(4) * lane(32)\n'
    text += '    with site("f"):\n        a0 = reg(2) * warp(8) * lane(32)\n'
    with pytest.raises(UserError, match="disagree on the number of warps: 4, 8"):
        check(parse_schedule(text), {"r0": 512, "a0": 512})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a0 = grid(2)", "line 1, column 1: expected `with schedule"),
        ('with schedule("f"):\n    a0 = grid(2)', 'line 1, column 1: expected `with schedule\\("kernel", target='),
        ('with schedule("f", target="x"):\n    a0 = girt(2)', "line 2, column 10: unknown level 'girt'; known: grid"),
        ('with schedule("f", target="x"):\n    a0 = grid(2.5)', "the size of a factor is an integer"),
        ('with schedule("f", target="x"):\n    a0 = grid(2)\n    a0 = grid(2)', "line 3, column 5: a0 is bound twice"),
        ('with schedule("f", target="x"):\n    evil(__import__("os"))', "unknown directive 'evil'"),
        ('with schedule("f", target="x"):\n    roles(load=__import__("os"))', None),
        ("with schedule(", "was never closed"),
        ("", "expected one schedule, found 0"),
    ],
)
def test_broken_text(text: str, message: str | None) -> None:
    if message is None:  # a word like any other: nothing is looked up, nothing runs
        assert isinstance(parse_schedule(text), Schedule)
        return
    with pytest.raises(UserError, match=message):
        parse_schedule(text)
