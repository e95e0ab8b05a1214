"""Two products in one loop of steps, under every arrangement a schedule can ask for: right in the simulator."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.kernels.chains import EVERY, Chain
from tests.kernels.test_arrangements import derived, right

from terrazzo.errors import Limitation, UserError
from terrazzo.hw.gpu import gpu
from terrazzo.hw.products import continued, matrix
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import topological
from terrazzo.ir.plan import Plan, Stream
from terrazzo.ir.text import parse
from terrazzo.rules.tile.complete import complete
from terrazzo.rules.tile.verify import verify

TEXT = Chain().text


@pytest.mark.parametrize("name", EVERY)
def test_a_chain_is_right(name: str) -> None:
    right(EVERY[name].text)


@pytest.mark.parametrize(
    ("first", "second", "meant"),
    [
        ("mma.m16n8k16.f32.bf16", "mma.m16n8k16.f32.bf16", True),
        ("mma.m16n8k16.f32.f16", "mma.m16n8k8.f32.f16", True),
        ("wgmma.m64n128k16.f32.bf16", "wgmma.m64n24k16.f32.bf16", True),
        ("wgmma.m64n24k16.f32.bf16", "wgmma.m64n128k16.f32.bf16", True),
        ("mma.m16n8k16.f32.bf16", "wgmma.m64n64k16.f32.bf16", True),  # what four warps have, one below the other
        ("wgmma.m64n64k16.f32.bf16", "mma.m16n8k16.f32.bf16", True),
        ("mma.m16n8k16.f32.bf16", "mma.m16n8k32.i32.i8", False),
    ],
)  # fmt: skip
def test_which_sums_are_another_instructions_first_factor(first: str, second: str, meant: bool) -> None:
    one, other = matrix(first), matrix(second)
    assert one is not None and other is not None
    assert (continued(one, other) == "nothing") == meant


ROWS = "a1 = warp(2) * inst.m(16)"


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (
            f"{ROWS}\n            a2 = reg(8)", "a1 = reg(2) * inst.m(16)\n            a2 = warp(2) * reg(4)",
            "acc4: its frame moves with rows (a1), which lie otherwise in its sums than in those of acc3",
        ),
        (
            f"{ROWS}\n            r2 = reg(4)", "a1 = reg(2) * inst.m(16)\n            r2 = warp(2) * reg(2)",
            "acc4: its frame moves with rows (a1), which lie otherwise in its sums than in those of acc3",
        ),
        (
            f'on="mma.m16n8k16.f32.bf16"):\n            {ROWS}\n            a2 = reg(8) * inst.n(8)\n'
            "            r2 = reg(2) * inst.k(16)",
            'on="fma.f32"):\n            a1 = warp(2) * lane(4) * reg(4)\n            a2 = lane(8) * reg(8)\n'
            "            r2 = reg(32)",
            "acc4: what acc3 sums is multiplied by no matrix instruction",
        ),
        (
            TEXT[TEXT.index('        with site("acc3"') : TEXT.index('        with site("acc4"')],
            "",
            "acc4: what a factor of it is made of is summed at no site",
        ),
    ],
)  # fmt: skip
def test_what_does_not_lie_as_the_next_product_takes_it_is_refused(before: str, after: str, reason: str) -> None:
    text = Chain().text
    assert before in text
    with pytest.raises((Limitation, UserError), match=re.escape(reason)):
        derived(text.replace(before, after))


@pytest.mark.parametrize("on", [Chain(between="relu", shape=(32, 40, 32, 32)), Chain(
    between="relu", shape=(64, 72, 64, 64), on="wgmma", target="sm_90a")])  # fmt: skip
def test_nothing_beyond_the_last_key_counts(on: Chain) -> None:
    """Not even where the function of a product that is 0 is infinite."""
    right(on.text.replace("max(s_acc0, f32(0.0))", "div(f32(1.0), add(mul(s_acc0, s_acc0), f32(1.0)))"))
    right(on.text.replace("max(s_acc0, f32(0.0))", "div(f32(1.0), mul(s_acc0, s_acc0))"))


OVERLAPPED = Chain(overlap=True, on="wgmma", target="sm_90a")


@pytest.mark.parametrize(
    ("chain", "reason"),
    [
        (replace(OVERLAPPED, ring=1), "each operand has two slots at least: line"),
        (Chain(overlap=True), "what overlaps are products of warpgroups, behind warps that load: line"),
    ],
)
def test_what_cannot_overlap_is_told(chain: Chain, reason: str) -> None:
    with pytest.raises(UserError, match=re.escape(reason)):
        derived(chain.text)


def test_what_is_made_point_by_point_overlaps_too() -> None:
    right(replace(OVERLAPPED, between="relu").text)


def test_overlap_is_one_step() -> None:
    with pytest.raises(UserError, match="overlap is 1, for one step starts early, not 2"):
        derived(OVERLAPPED.text.replace("overlap=1", "overlap=2"))


def test_two_groups_are_open_while_weights_are_found() -> None:
    """The next scores and the last weights' products; only the scores are waited for before the next weights."""
    (kernel,) = derived(OVERLAPPED.text).steps
    assert isinstance(kernel, k.Kernel)
    loops = [s for s in k.walk(kernel.body) if isinstance(s, k.For) and not s.unrolled]
    (steps,) = [s.body for s in loops if any(isinstance(x, k.WaitGroups) for x in s.body)]
    waits = [(n, s.open) for n, s in enumerate(steps) if isinstance(s, k.WaitGroups)]
    commits = [n for n, s in enumerate(steps) if isinstance(s, k.Commit)]
    assert [left for _, left in waits] == [1, 0] and len(commits) == 2 and max(commits) < waits[0][0]
    found = [n for n, s in enumerate(steps) for x in topological([s]) if isinstance(x, l.Apply) and "exp2" in x.fn.name]
    assert found and all(waits[0][0] < n < waits[1][0] for n in found)


def test_a_plan_may_not_overlap_by_itself() -> None:
    """What the schedule does not say, no line of a plan does, nor the other way around."""
    plainly = replace(OVERLAPPED, overlap=False)
    for one, other in ((OVERLAPPED, plainly), (plainly, OVERLAPPED)):
        kernel, schedule = parse(one.text).loop.steps[0], parse(other.text).schedules[0][1]
        plan, _ = complete(kernel, parse(one.text).schedules[0][1], gpu("sm_90a"))
        assert isinstance(plan, Plan)
        with pytest.raises(UserError, match=r"early is (True|False), and the schedule has (False|True)"):
            verify(kernel, schedule, plan, gpu("sm_90a"))


STAYS = Chain(overlap=True, on="wgmma", target="sm_90a", shape=(192, 128, 64, 64), stay=2, held=2)


@pytest.mark.parametrize(
    ("chain", "reason"),
    [
        (replace(STAYS, stay=0), "what is held for a tile has slots where blocks stay for several tiles"),
        (replace(STAYS, held=-1), "q: slots are a number, not -1"),
    ],
)
def test_what_is_held_has_slots_only_for_the_next_tile(chain: Chain, reason: str) -> None:
    text = chain.text if chain.held > 0 else replace(chain, held=2).text.replace("slots=2", "slots=-1")
    with pytest.raises((UserError, Limitation), match=re.escape(reason)):
        derived(text)


def test_steps_of_tiles_that_are_unlike_are_counted() -> None:
    """Slots go on from tile to tile, whose numbers of steps differ."""
    chain = EVERY["warpgroups that stay, causal"]
    (kernel,) = derived(chain.text).steps
    assert isinstance(kernel, k.Kernel)
    integers = {s.variable for s in k.walk(kernel.body) if isinstance(s, k.SetInteger)}
    assert {v.extent for v in integers} == {2 * chain.ring} and len(
        integers
    ) == 2  # of who loads, and of who multiplies
    alike = [s for s in derived(EVERY["warpgroups that stay"].text).steps if isinstance(s, k.Kernel)]
    assert not any(isinstance(s, k.SetInteger) for x in alike for s in k.walk(x.body))


ADDED_BETWEEN = """@tile
def f(x: bf16[128, 64], w: bf16[512, 64], r: bf16[128, 512], v: bf16[64, 512]):
    with kernel('y', y=bf16[128, 64]):
        for a0 in free(128):
            for a1 in free(64):
                for r1 in reduce(512):
                    in0 = r[a0, r1]
                    v0 = f32(in0)
                    in1 = v[a1, r1]
                    v1 = f32(in1)
                    for r0 in reduce(64):
                        in2 = x[a0, r0]
                        v2 = f32(in2)
                        in3 = w[r1, r0]
                        v3 = f32(in3)
                        v4 = mul(v2, v3)
                        acc1 <- sum(v4)
                    v5 = add(acc1, v0)
                    v6 = bf16(v5)
                    v7 = f32(v6)
                    v8 = mul(v7, v1)
                    acc0 <- sum(v8)
                v9 = bf16(acc0)
                y[a0, a1] = v9
    with schedule("y", target="sm_90a"):
        a0 = grid(2) * block(64)
        a1 = block(64)
        r1 = time(8, ring=2) * block(64)
        roles(load=warp(1), math=warpgroup(1), registers=(40, 232))
        with site("acc1", on="wgmma.m64n64k16.f32.bf16"):
            a0 = warpgroup(1) * inst.m(64)
            r1 = inst.n(64)
            r0 = reg(4) * inst.k(16)
            x = smem(by="tma", swizzle=128)
            w = smem(by="tma", swizzle=128)
            r = smem(by="tma", swizzle=128)
        with site("acc0", on="wgmma.m64n64k16.f32.bf16"):
            a0 = warpgroup(1) * inst.m(64)
            a1 = inst.n(64)
            r1 = reg(4) * inst.k(16)
            v = smem(by="tma", swizzle=128)
        with site("y"):
            a0 = like("acc0")
            a1 = like("acc0")
    return (y,)
"""


@pytest.mark.parametrize("overlap", [False, True])
def test_what_threads_add_between_products_stays_until_they_have_read_it(overlap: bool) -> None:
    """The slot that the first product's factor came to may be filled when that is multiplied and the rest was read."""
    text = ADDED_BETWEEN.replace("ring=2)", "ring=2, overlap=1)") if overlap else ADDED_BETWEEN
    program = parse(text)
    plan, _ = complete(program.loop.steps[0], program.schedules[0][1], gpu("sm_90a"))
    assert [s.operand for s in plan.all(Stream) if s.read] == ["r[a0, r1]"]
    right(text)
