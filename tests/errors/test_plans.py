"""Plans edited by hand: what is incomplete, contradictory or over budget is refused with the line that is wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import Terrazzo
from tests.ir.test_plan import HOPPER, HOPPER_PLAN, attention, product
from tests.kernels.arrangements import Product
from tests.kernels.programs import Lowered, case, lowered
from tests.kernels.test_schedules import HALVES, TENSOR_CORES, matmul, tensors

from terrazzo.errors import UserError
from terrazzo.hw.gpu import gpu
from terrazzo.ir.parse_plan import parse_plan
from terrazzo.ir.text import parse, show
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.tile.complete import Refused
from terrazzo.rules.tile.verify import verify
from terrazzo.rules.tile_to_kernel import lower as deriving


@cache
def made(name: str) -> Lowered:
    """Kernels with plans: a product on a Hopper's warpgroups, one on an Ampere's warps, rows shared by threads."""
    if name == "hopper":
        return product(HOPPER)
    if name == "ampere":
        text = TENSOR_CORES.replace("sm_90a", "sm_80")
        return lowered(matmul, tensors(*HALVES, dtype=torch.bfloat16), "sm_80", schedules=(text,))
    return attention() if name == "attention" else case(name, "sm_80")


def tiled(name: str) -> Any:
    """The same as Tile IR; also warpgroups that take turns, as their schedule says."""
    if name == "turns":
        turns = Product(shape=(320, 16, 192), tile=(64, 16, 64), roles=True, persistent=1, turns=2, registers=None)
        return lowering(parse(turns.text), Options(target="sm_90a")).at("tile")
    return made(name).lowering.at("tile")


def refused(name: str, before: str, after: str) -> str:
    """What is said of a plan of which something is replaced."""
    program = tiled(name)
    ((_, schedule),), ((number, plan),) = program.schedules, program.plans
    target = gpu(plan.target)
    verify(program.loop.steps[number], schedule, plan, target)
    assert before in str(plan)
    text = str(plan).replace(before, after, 1)
    edited = parse_plan(text)
    with pytest.raises(UserError) as told:
        verify(program.loop.steps[number], schedule, edited, target)
    first, line = str(told.value).splitlines()
    found = re.fullmatch(rf"the plan of {plan.kernel}, line (\d+): (.*)", first)
    assert found and text.splitlines()[int(found[1]) - 1].strip() == line.strip()
    return f"{found[1]}: {found[2]}"


X = re.search(r"    x_s = .*\n", HOPPER_PLAN)[0]  # type: ignore[index]
PRODUCT = re.search(r"    product.*\n", HOPPER_PLAN)[0]  # type: ignore[index]
RESULT = re.search(r"\n    result.*", HOPPER_PLAN)[0]  # type: ignore[index]
CONVERT = re.search(r"\n    convert.*", HOPPER_PLAN)[0]  # type: ignore[index]
AGENTS = re.search(r"    load = .*\n    math = .*\n", HOPPER_PLAN)[0]  # type: ignore[index]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        # incomplete
        ("    order(tiles=(a0(2), a1(2)), blocks=4, cluster=(a0(2),), grouped=(a0(2),), persistent=True)\n", "",
         "1: it has no line `order`"),
        (RESULT, "", "1: nothing says how mm leaves: a line `result` is missing"),
        (PRODUCT, "", "1: nothing says on what acc0 runs: a line `product` is missing"),
        (X, "", "1: nothing brings x[a0, r0]: a line `stream` is missing"),
        # contradictory
        (X, X + X, "8: x_s is defined twice"),
        (X, X + X.replace("x_s", "x_t"), "8: the stream of x[a0, r0] is decided twice"),
        (RESULT, RESULT * 2, "10: the result mm is decided twice"),
        (PRODUCT, PRODUCT * 2, "7: the product acc0 is decided twice"),
        ("    order", "    order(tiles=(a0(2), a1(2)), blocks=8)\n    order", "3: order is decided twice"),
        ("slab=\"mm_s\"", "slab=\"x_s\"", "9: x_s is decided twice"),
        # tiles
        ("tiles=(a0(2), a1(2))", "tiles=(a0(2), a1(4))",
         "2: tiles are (a0(2), a1(4)), and the schedule has (a0(2), a1(2))"),
        ("cluster=(a0(2),)", "cluster=(a1(2),)", "2: the schedule's cluster is (a0(2))"),
        ("cluster=(a0(2),), ", "", "2: the schedule's cluster is (a0(2))"),
        ("blocks=4", "blocks=3", "2: 3 blocks: at most 8, a multiple of 2"),
        ("blocks=4", "blocks=16", "2: 16 blocks: at most 8, a multiple of 2"),
        (", persistent=True", "", "2: the schedule is persistent"),
        ("grouped=(a0(2),)", "grouped=(a0(3),)", "2: groups of a0(3) do not divide a0(2)"),
        ("grouped=(a0(2),)", "grouped=(a0(2), a0(2))", "2: grouped are (a0(2), a0(2)): an axis once"),
        ("grouped=(a0(2),)", "grouped=(a1(2),)", "2: rows of a1 are grouped, and no axis of tiles is inside of it"),
        # who
        ("first=4, warps=8", "first=3, warps=8", "4: its first warp is 3, and 4 warps stand before it"),
        ("first=4, warps=8", "first=6, warps=8", "4: its first warp is 6, and 4 warps stand before it"),
        ("first=4, warps=8", "first=4, warps=4", "4: warps are 4, and the schedule has 8"),
        ("teams=2", "teams=4", "4: teams are 4, and 2 of it wait by themselves"),
        ("teams=2", "teams=3", "4: 8 warps are no 3 teams of as many each"),
        ("teams=2", "teams=0", "4: 8 warps are no 0 teams of as many each"),
        ("registers=40", "registers=48", "3: registers are 48, and the schedule has 40"),
        ("warps=4, registers", "warps=24, registers", "3: warps are 24, and the schedule has 4"),
        ("first=0, warps=4", "first=0, warps=0", "3: it has no warp"),
        ("load = agent", "lord = agent", "5: there is no agent load above; there is lord, math"),
        # rings
        ("over=(r0(4),)", "over=(r0(2),)", "5: its steps are (r0(2)), and those of the tile (r0(4))"),
        ("slots=3, ahead=3", "slots=3, ahead=2", "5: 2 steps ahead, and of 3 slots 3 can be filled early"),
        ("slots=3, ahead=3", "slots=4, ahead=4", "5: slots are 4, and the schedule has 3"),
        ("slots=3, ahead=3", "slots=0, ahead=0", "5: slots are 0, and a ring has one at least"),
        ("slots=3, ahead=3", "slots=1, ahead=1", "5: the only slot is freed late, and the next step waits for it"),
        ('by="tma", producer', 'by="ld", producer', "5: load loads by tma, not by ld"),
        ('by="tma", producer', 'by="pigeon", producer', "5: 'pigeon' is no transport; known: ld, cp.async, tma"),
        ("producer=load", "producer=math", "5: load loads, not math"),
        ("consumer=math", "consumer=load", "5: math multiplies, not load"),
        # products
        ('sites=("acc0",)', 'sites=("acc1",)', "6: a block is divided for no contraction acc1; for acc0"),
        ("m64n256k16", "m64n128k16",
         "6: it is on wgmma.m64n128k16.f32.bf16, and the schedule has wgmma.m64n256k16.f32.bf16"),
        ("agent=math, rings", "agent=load, rings", "6: math computes, not load"),
        ("m=a0, n=a1", "m=a1, n=a0", "6: m is a1, and the schedule has a0"),
        ("m=a0, n=a1", "m=a0, n=a7", "6: there is no axis a7; there are a0, a1, r0"),
        ('a="shared"', 'a="registers"', "6: a comes from registers: wgmma.m64n256k16.f32.bf16 takes shared"),
        ("rings=(ring0,)", "rings=()", "5: no product waits for it"),
        # streams
        ('"x[a0, r0]"', '"y[a0, r0]"', "7: the kernel has no operand y[a0, r0]; it has x[a0, r0], w[a1, r0]"),
        ("a0(128), r0(64)", "a0(64), r0(64)", "7: a step needs (a0(128), r0(64)) of it, not (a0(64), r0(64))"),
        ("axes=(a0(128), r0(64))", "axes=(r0(64), a0(128))", "7: "),
        ("memory=r0", "memory=a0", "7: global memory is contiguous along r0, not a0"),
        ("vector=0", "vector=8", "7: TMA brings the whole slab: vector is 0"),
        ("swizzle=128)", "swizzle=64)", "7: swizzle is 64, and the schedule has 128"),
        (", multicast=2", "", "8: multicast is False, and the schedule has True"),
        ("multicast=2", "multicast=4", "8: its boxes go to 4 blocks, and a cluster has 2"),
        ("swizzle=128)", "swizzle=128, multicast=2)", "7: x: every block of the cluster has its own part of it"),
        ("swizzle=128)", "swizzle=128, pad=8)",
         "7: x_s: TMA leaves no room between rows: a slab has a pad or comes by TMA"),
        ("swizzle=128)", "swizzle=128, panel=32)", "7: panels are 32 wide, and wgmma.m64n256k16.f32.bf16 takes 0"),
        # results
        ('store="mm"', 'store="nn"', "9: the kernel does not store nn; it stores mm"),
        ("rows=a0, columns=a1", "rows=a1, columns=a0", "9: its rows are a0 and its columns a1"),
        ("width=64", "width=32", "9: 256 columns are no subtiles of 32"),
        ("width=64", "width=48", "9: 256 columns are no subtiles of 48"),
        ("slots=2", "slots=0", "9: it has a slot at least, and no negative pad"),
        ('put="stmatrix"', 'put="movmatrix"', "9: 'movmatrix' puts no bf16 into shared memory"),
        ('put="stmatrix", by="tma"', 'put="stmatrix", by="ld"', "9: by is ld, and the schedule has tma"),
        (RESULT, '\n    result(store="mm", agent=math)', "9: the schedule has it gather in shared memory"),
        # conversions
        ("stmatrix.x4", "stmatrix.x2", "10: mm comes to mm_s by stmatrix.x4, not by stmatrix.x2"),
        ("reg: n1 m8 n8", "reg: n1 m8",
         "10: by stmatrix.x4, registers have `reg: n1 m8 n8; lane: n2 n4 m1 m2 m4`, "
         "not `reg: n1 m8; lane: n2 n4 m1 m2 m4`"),
        ('to="mm_s"', 'to="acc0.a"', "10: mm is not converted to acc0.a: mm to mm_s is"),
        (CONVERT, "", "1: nothing brings mm to the layout of mm_s: `convert("),
        (CONVERT, CONVERT * 2, "11: the conversion of mm to mm_s is decided twice"),
        # what the kernel does not have
        (RESULT, f'{RESULT}\n    combine(site="acc0", lanes=32)',
         "10: by the schedule its partial states are to meet as nowhere: each is whole"),
        (RESULT, f'{RESULT}\n    combine(site="acc9")', "10: the kernel has no reduction acc9; it has acc0"),
        (RESULT, f'{RESULT}\n    keep(what="z")', "10: nothing is called z; there are x, w, mm, acc0"),
        (RESULT, f"{RESULT}\n    limit(resident=0)", "10: a block at least is to fit on a processor"),
    ],
)  # fmt: skip
def test_a_plan_for_warpgroups(before: str, after: str, message: str) -> None:
    if "is defined twice" in message or "there is no agent" in message:  # which the reader finds already
        with pytest.raises(UserError, match=re.escape(message.split(": ", 1)[1])):
            refused("hopper", before, after)
        return
    assert refused("hopper", before, after).startswith(message)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("slots=4, ahead=3", "slots=4, ahead=4", "4: 4 steps ahead, and of 4 slots 3 can be filled early"),
        ("slots=4, ahead=3", "slots=4, ahead=0", "4: 0 steps ahead, and of 4 slots 3 can be filled early"),
        ("slots=4, ahead=3", "slots=1, ahead=0", "4: cp.async fills one slot while another is read: two at least"),
        ('by="cp.async"', 'by="tma"', "4: tma needs sm_90, and the target is sm_80"),
        ('by="cp.async"', 'by="ld"', "4: ld fills 2 slots at most"),
        ("consumer=all", "consumer=all, late=True",
         "4: slots are freed late by one product of warpgroups only, or by several that overlap"),
        ("vector=8", "vector=16", "6: 16 elements of x[a0, r0] do not lie together wherever a thread begins"),
        ("vector=8", "vector=3", "6: 3 elements of x[a0, r0] do not lie together wherever a thread begins"),
        ("vector=8", "vector=1", "6: cp.async needs a plain load of which 4 bytes at least lie together"),
        ("swizzle=64", "swizzle=64, multicast=2", "6: x: there is no cluster to multicast to"),
        ('a="ldmatrix"', 'a="values"', "5: a comes from values: mma.m16n8k16.f32.bf16 takes ldmatrix"),
        ("all = agent(first=0, warps=4)", "all = agent(first=0, warps=4, registers=128)",
         "3: registers are for whole warpgroups from sm_90 on, and a multiple of 8 from 24 to 240"),
        ("all = agent", "load = agent(first=0, warps=4)\n    all = agent",
         "3: agents are all, or load and math, not load, all"),
        ('result(store="mm", agent=all)', 'result(store="mm", agent=all, width=8)',
         "8: only what gathers in shared memory has rows, columns or a way there"),
        ("ldmatrix.x4", "ldmatrix.x1", "9: x_s comes to acc0.a by ldmatrix.x4, not by ldmatrix.x1"),
        ('convert(value="x_s", to="acc0.a"', 'convert(value="x_s", to="acc0.b"',
         "9: x_s is not converted to acc0.b: x_s to acc0.a, w_s to acc0.b is"),
    ],
)  # fmt: skip
def test_a_plan_for_warps(before: str, after: str, message: str) -> None:
    assert refused("ampere", before, after) == message


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("warps=8, teams=2", "warps=12, teams=3", "4: warps are 12, and the schedule has 8"),
        ("warps=8, teams=2", "warps=9, teams=2", "4: 9 warps are no 2 teams of as many each"),
        (", turns=True", "", "4: its teams take turns"),
        (", turns=True", ", lag=True", "4: its teams take turns"),
    ],
)  # fmt: skip
def test_a_plan_for_warpgroups_that_take_turns(before: str, after: str, message: str) -> None:
    assert refused("turns", before, after) == message


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('combine(site="acc0"', 'combine(site="acc1"', r"\d: the combination of acc1 is decided twice"),
        ("lanes=32", "lanes=16",
         r'\d: by the schedule its partial states are to meet as combine\(site="acc0", lanes=32'),
        (", agent=all)", ", agent=all, by=\"tma\")", r"\d: only what gathers in shared memory has rows"),
    ],
)  # fmt: skip
def test_a_plan_for_rows(before: str, after: str, message: str) -> None:
    assert re.match(message, refused("softmax", before, after))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('backward=("a2",)', 'backward=("a9",)', r"2: backward are \(a9\), and the schedule has \(a2\)"),
        (', backward=("a2",)', "", r"2: backward are \(\), and the schedule has \(a2\)"),
        ('until="(first // 2) + 1"', 'until="first"',
         r'\d+: from the term follows reach\(axis=r2, rows=a2, until="\(first // 2\) \+ 1"\)'),
        ("    reach(axis=r2, rows=a2, until=\"(first // 2) + 1\")\n", "",
         r"1: nothing says what follows from the term: `reach\("),
        ('product="acc4"', 'product="acc3"', r'\d+: from the term follows frame\(top="acc0", product="acc4"'),
        ("    reach", '    frame(top="acc0", product="acc4", total="acc2")\n    reach',
         r"\d+: the frame of acc4 is decided twice"),
    ],
)  # fmt: skip
def test_a_plan_for_attention(before: str, after: str, message: str) -> None:
    assert re.match(message, refused("attention", before, after))


def test_a_step_multiplies_in_order() -> None:
    """A product whose first factor is made of another one's sums comes after it."""
    first, second = (without("attention", f'product(sites=("{name}",)') for name in ("acc3", "acc4"))
    told = refused("attention", first + second, second + first)
    assert re.match(r"\d+: a step multiplies for acc3 before it does for acc4, which stands above it", told)


def without(name: str, start: str) -> str:
    program = tiled(name)
    text = str(program.plans[0][1])
    return next(x for x in text.splitlines() if x.strip().startswith(start)) + "\n"


def test_partial_states_must_meet() -> None:
    line = without("softmax", 'combine(site="acc0"')
    told = refused("softmax", line, "")
    assert told == f"1: nothing says where the partial states of acc0 meet: `{line.strip()}` is missing"


@pytest.mark.parametrize(
    ("words", "after", "message"),
    [
        (("slots=4, ahead=3", "ring=4"), ("slots=40, ahead=39", "ring=40"),
         "7: 245760 bytes of shared memory with those before it, and sm_80 has 166912"),
    ],
)  # fmt: skip
def test_over_budget(words: tuple[str, str], after: tuple[str, str], message: str) -> None:
    """A plan for more shared memory than there is, below a schedule that asks for as much."""
    from terrazzo.ir.parse_schedule import parse_schedule

    program = tiled("ampere")
    ((_, schedule),), ((number, plan),) = program.schedules, program.plans
    text, bound = str(plan).replace(words[0], after[0]), str(schedule).replace(words[1], after[1])
    with pytest.raises(UserError, match=re.escape(f"the plan of mm, line {message}")):
        verify(program.loop.steps[number], parse_schedule(bound), parse_plan(text), gpu("sm_80"))


def test_more_registers_than_a_processor_has() -> None:
    from terrazzo.ir.parse_schedule import parse_schedule

    program = tiled("hopper")
    (kernel,) = program.loop.steps
    for registers, message in (
        (240, "4: 73728 registers with those before it, and a block of 384 threads has 64512"),
        (236, "4: registers are for whole warpgroups from sm_90 on, and a multiple of 8 from 24 to 240"),
    ):
        mine = HOPPER_PLAN.replace("232", str(registers)).replace("registers=40", "registers=96")
        bound = HOPPER.replace("(40, 232)", f"(96, {registers})")
        with pytest.raises(UserError, match=f"the plan of mm, line {message}"):
            verify(kernel, parse_schedule(bound), parse_plan(mine), gpu("sm_90a"))


def test_a_plan_of_something_else() -> None:
    program = tiled("ampere")
    ((number, plan),) = program.plans
    other: Any = parse_plan(str(plan).replace('plan("mm"', 'plan("nn"'))
    with pytest.raises(UserError, match="line 1: it is not one of mm for sm_80"):
        verify(program.loop.steps[number], program.schedules[0][1], other, gpu("sm_80"))


def test_what_cannot_be_written_is_the_plan_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the checks found an edited plan in order, and no kernel can be written from it."""
    program = tiled("ampere")
    ((number, plan),) = program.plans
    edited = parse_plan(str(plan).replace("ahead=3", "ahead=2"))
    refusal = Refused(UserError("mm: the schedule needs 320 registers of a thread, and sm_80 has 255"))
    monkeypatch.setattr(deriving, "derived", lambda *given: refusal)
    with pytest.raises(UserError, match="the plan of mm, line 1: the schedule needs 320 registers") as told:
        deriving.program(replace(program, plans=((number, edited),)), gpu("sm_80"))
    assert str(told.value).splitlines()[1].strip() == 'with plan("mm", target="sm_80"):'


@pytest.mark.parametrize("passes", ["plan", "derive"])
def test_on_the_command_line(terrazzo: Terrazzo, tmp_path: Path, passes: str) -> None:
    """The file is read, and the line that is wrong is told, whichever pass looks at it first."""
    text = show(tiled("ampere"))
    file = tmp_path / "tile.txt"
    file.write_text(text.replace("ahead=3", "ahead=7"))
    line = 1 + next(n for n, line in enumerate(text.splitlines()) if "ahead=3" in line)
    told = terrazzo("opt", str(tmp_path / "tile.txt"), "-p", passes, "--target", "sm_80", code=2)
    assert told.stdout == "" and told.stderr.startswith(
        f"error: {file}, line {line}, column 9: the plan of mm: 7 steps ahead, and of 4 slots 3 can be filled early\n"
        "            ring0 = ring(over="
    )
