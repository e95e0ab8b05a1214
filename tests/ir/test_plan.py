"""Plans: those that rules complete print and read back; what is no plan is refused where it stands."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import CASES, Lowered, case, lowered

from terrazzo.errors import UserError
from terrazzo.ir.parse_plan import KINDS, parse_pinned, parse_plan
from terrazzo.ir.plan import Plan
from terrazzo.ir.text import parse, show

HOPPER = """\
with schedule("mm", target="sm_90a"):
    a0 = grid(2) * cluster(2) * block(128)
    a1 = grid(2) * block(256)
    r0 = time(4, ring=3) * block(64)
    persistent(4, order=grouped(2))
    roles(load=warp(1), math=warpgroup(2), registers=(40, 232))
    with site("acc0", on="wgmma.m64n256k16.f32.bf16"):
        a0 = warpgroup(2) * inst.m(64)
        a1 = inst.n(256)
        r0 = reg(4) * inst.k(16)
        x = smem(by="tma", swizzle=128)
        w = smem(by="tma", swizzle=128, multicast=True)
    with site("mm"):
        a1 = time(4, ring=2) * block(64)
        mm = smem(by="tma", swizzle=128)
"""
HOPPER_PLAN = """\
with plan("mm", target="sm_90a"):
    order(tiles=(a0(2), a1(2)), blocks=4, cluster=(a0(2),), grouped=(a0(2),), persistent=True)
    load = agent(first=0, warps=4, registers=40)
    math = agent(first=4, warps=8, teams=2, registers=232)
    ring0 = ring(over=(r0(4),), slots=3, ahead=3, by="tma", producer=load, consumer=math, late=True)
    product(sites=("acc0",), on="wgmma.m64n256k16.f32.bf16", agent=math, rings=(ring0,), m=a0, n=a1, a="shared", b="shared")
    x_s = stream(operand="x[a0, r0]", ring=ring0, axes=(a0(128), r0(64)), memory=r0, vector=0, swizzle=128)
    w_s = stream(operand="w[a1, r0]", ring=ring0, axes=(a1(256), r0(64)), memory=r0, vector=0, swizzle=128, multicast=2)
    result(store="mm", agent=math, slab="mm_s", rows=a0, columns=a1, width=64, slots=2, swizzle=128, put="stmatrix", by="tma")
    convert(value="mm", to="mm_s", by="stmatrix.x4", layout="reg: n1 m8 n8; lane: n2 n4 m1 m2 m4")
"""  # noqa: E501 - a plan is printed a line for each decision


def product(schedule: str, target: str = "sm_90a") -> Lowered:
    torch.manual_seed(0)
    args = (torch.randn(512, 256).bfloat16(), torch.randn(512, 256).bfloat16())
    return lowered(lambda x, w: F.linear(x, w), args, target, schedules=(schedule,))


def plans(found: Lowered) -> list[Plan]:
    return [plan for _, plan in found.lowering.at("tile").plans]


def test_a_plan_says_everything_the_schedule_left_open() -> None:
    (plan,) = plans(product(HOPPER))
    assert f"{plan}\n" == HOPPER_PLAN


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("name", list(CASES))
def test_every_plan_of_the_corpus_reads_back(name: str, target: str) -> None:
    done = case(name, target).lowering
    program = done.at("tile")
    assert len(program.plans) == len(program.schedules)
    for _, plan in program.plans:
        assert not plan.open and parse_plan(str(plan)) == plan
    assert parse(show(program)) == program


@cache
def attention() -> Lowered:
    """Two products with a softmax between them, in one kernel."""
    q, keys, values = (torch.zeros(2, 4, 1024, 64, dtype=torch.bfloat16) for _ in range(3))
    return lowered(lambda a, b, c: F.scaled_dot_product_attention(a, b, c, is_causal=True), (q, keys, values), "sm_90a")


def test_a_plan_of_attention_reads_back() -> None:
    program = attention().lowering.at("tile")
    (plan,) = plans(attention())
    assert '    frame(top="acc' in str(plan) and '    reach(axis=r2, rows=a2, until="(first // 2) + 1")' in str(plan)
    assert parse_plan(str(plan)) == plan and parse(show(program)) == program


def test_every_kind_of_line_has_been_read() -> None:
    seen = {type(line).op for found in (product(HOPPER), attention()) for plan in plans(found) for line in plan.lines}
    for name in ("softmax", "rms norm of prime width", "layer norm", "matmul", "max_pool2d"):
        seen |= {type(line).op for plan in plans(case(name, "sm_80")) for line in plan.lines}
    from tests.kernels.chains import Chain
    from tests.kernels.test_layouts import plan as plan_of
    from tests.kernels.test_ragged import SUM, x

    ragged = lowered(lambda x: x.sum(-1), (x(3, 1057),), "sm_90a", schedules=(SUM,))
    seen |= {type(line).op for plan in plans(ragged) for line in plan.lines}
    staged = plan_of(Chain(between="relu", weights="smem()"))
    assert parse_plan(str(staged)) == staged
    seen |= {type(line).op for line in staged.lines}
    from tests.kernels.test_rescued import lowered as rescued

    seen |= {type(line).op for _, plan in rescued(64, 64, 256)["tile"].plans for line in plan.lines}
    assert seen >= KINDS.keys() - {"keep", "limit"}


def test_a_plan_that_is_given_is_used_as_it_stands() -> None:
    """Fewer steps ahead than rules would take, and a pinned plan beside a pinned schedule."""
    from tests.kernels.test_schedules import HALVES, TENSOR_CORES, matmul, tensors

    args = tensors(*HALVES, dtype=torch.bfloat16)
    made = lowered(matmul, args, "sm_90a", schedules=(TENSOR_CORES,))
    (plan,) = plans(made)
    mine = str(plan).replace("ahead=3", "ahead=1")
    assert mine != str(plan)
    given = lowered(matmul, args, "sm_90a", schedules=(f"{TENSOR_CORES}{mine}",))
    assert [str(p) for p in plans(given)] == [mine] and given.program != made.program
    for a, b in zip(given.simulated(), made.simulated(), strict=True):
        assert (a == b).all()
    assert [e.line() for e in given.lowering.log.events if e.pass_name == "plan"] == [">>> plan:pin at mm: by the user"]


def test_text_of_tile_ir_keeps_its_plans() -> None:
    """With a plan below a schedule it is that one; without, rules complete the schedule again."""
    from terrazzo.options import Options
    from terrazzo.pipelines import lowering

    made = product(HOPPER)
    text = show(made.lowering.at("tile"))
    assert "    order(" in text
    options = Options(target="sm_90a")
    changed = text.replace("late=True", "late=False")
    assert changed != text
    again = lowering(parse(changed), options)
    assert "late=True" not in show(again.at("tile")) and again.at("kernel") != made.program
    start = next(k for k, x in enumerate(text.splitlines()) if "with plan" in x)
    without = "\n".join([*text.splitlines()[:start], text.splitlines()[-1]])
    assert "with plan" not in without
    assert lowering(parse(without), options).at("kernel") == made.program


def read(before: str, after: str) -> Any:
    assert before in HOPPER_PLAN
    return parse_plan(HOPPER_PLAN.replace(before, after, 1), "p.txt")


@pytest.mark.parametrize(
    ("before", "after", "where", "message"),
    [
        ('with plan("mm"', 'with plan("mm", "nn"', "with", 'expected `with plan("kernel", target="..."):`'),
        ("    order(", "    ordre(", "ordre(", "unknown line 'ordre'; known: order, agent, ring, stream, product,"),
        ("    order(", "    mine = order(", "mine", "order has no name"),
        ("    load = agent(", "    agent(", "agent(", "agent has a name: `name = agent(...)`"),
        ("    math = agent(", "    load = agent(", "load = agent(first=4", "load is defined twice"),
        ("    order(tiles", "    1 + 1; order(tiles", "1 + 1", "expected a line of a plan, such as `all = agent("),
        ("first=0, warps=4", "0, warps=4", "0,", "the fields of agent are named: first, warps, teams, registers"),
        ("warps=4", "wraps=4", "wraps", "agent has no field wraps; it has first, warps, teams, registers"),
        ("warps=4", "first=4", "first=4", "first is given twice"),
        ("warps=4, ", "", "agent(first=0", "agent needs warps="),
        ("warps=4", "warps=4.0", "4.0", "warps is an integer"),
        ("warps=4", "warps=True", "True", "warps is an integer"),
        ("persistent=True", "persistent=1", "1)", "persistent is True or False"),
        ('by="tma"', "by=tma", "tma,", "by is a text"),
        ("over=(r0(4),)", "over=(r0(4))", "r0(4))", "over is a tuple, such as (a,) or (a, b)"),
        ("over=(r0(4),)", "over=(r0,)", "r0,", "over has parts of axes, such as a0(16)"),
        ("over=(r0(4),)", "over=(r0(0),)", "r0(0)", "over: r0 has at least 1"),
        ("producer=load", 'producer="load"', '"load"', "expected the name of an agent"),
        ("producer=load", "producer=store", "store", "there is no agent store above; there is load, math"),
        ("rings=(ring0,)", "rings=(ring1,)", "ring1", "there is no ring ring1 above; there is ring0"),
        ("ring=ring0", "ring=load", "load,", "there is no ring load above; there is ring0"),
        ("memory=r0", 'memory="r0"', '"r0"', "expected the name of an axis"),
        ("    order(tiles", "    order(**tiles, tiles", "**tiles", "** is not allowed"),
    ],
)  # fmt: skip
def test_where_and_what(before: str, after: str, where: str, message: str) -> None:
    """The message, and what the caret points at."""
    with pytest.raises(UserError) as told:
        read(before, after)
    first, text, caret = str(told.value).splitlines()
    line, column = re.fullmatch(r"p\.txt, line (\d+), column (\d+): .*", first).groups()  # type: ignore[union-attr]
    assert f": {message}" in first
    assert text[len(caret) - 1 :].startswith(where) and int(column) == len(caret) - 4
    assert HOPPER_PLAN.replace(before, after, 1).splitlines()[int(line) - 1] == text[4:]


def test_a_plan_stands_below_its_schedule() -> None:
    ((schedule, plan),) = parse_pinned(HOPPER + HOPPER_PLAN)
    assert f"{schedule}\n{plan}\n" == HOPPER + HOPPER_PLAN
    below = "a plan stands below the schedule that it completes"
    for text, message in (
        (HOPPER_PLAN, f"line 1, column 1: {below}"),
        (HOPPER + HOPPER_PLAN + HOPPER_PLAN, f"line 26, column 1: {below}"),
        (HOPPER + HOPPER_PLAN.replace('"mm", target="sm_90a"', '"mm", target="sm_80"'),
         "the plan is one of mm for sm_80, and the schedule above it one of mm for sm_90a"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            parse_pinned(text)
    program = show(product(HOPPER).lowering.at("tile"))
    body = program.splitlines()
    start = next(k for k, x in enumerate(body) if "with plan" in x)
    for lines in ([*body[:-1], *body[start:]], [*body[:2], *body[start:-1], *body[2:start], body[-1]]):
        with pytest.raises(UserError, match=below):
            parse("\n".join(lines))
    with pytest.raises(UserError, match="expected one plan, found 0"):
        parse_plan("")
