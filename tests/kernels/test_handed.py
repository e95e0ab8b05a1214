"""What one product sums is a factor of another wherever it lies: in the same registers, in others, in other lanes, in
shared memory.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.kernels.chains import EVERY, GROUPS, Chain
from tests.kernels.test_arrangements import ADR, SEEDS, derived, inputs, right
from tests.kernels.test_layouts import plan, ways

from terrazzo.errors import Limitation, UserError
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.node import Node
from terrazzo.ir.parse_plan import parse_plan
from terrazzo.ir.plan import Plan, Stage
from terrazzo.ir.schedule import Schedule
from terrazzo.ir.text import parse
from terrazzo.rules.tile.draft import Draft
from terrazzo.rules.tile.reasons import reasons
from terrazzo.rules.tile.verify import verify
from terrazzo.rules.tile_to_kernel.lower import lower
from terrazzo.run.cache import Cache
from terrazzo.targets.cuda.emit import emit

HANDED = {
    name: chain
    for name, chain in EVERY.items()
    if chain.across == "m" or chain.second == "b" or chain.then or chain.weights or chain.apart
}
"""Chains in which weights are not the first factor of the instruction they were summed by, or lie as no sums do."""


def tiled(text: str) -> tuple[tile.Program, l.Kernel, Schedule]:
    """A program of one kernel, with its schedule."""
    program = parse(text)
    assert isinstance(program, tile.Program)
    ((number, schedule),) = program.schedules
    kernel = program.loop.steps[number]
    assert isinstance(kernel, l.Kernel)
    return program, kernel, schedule


def written(chain: Chain) -> k.Kernel:
    """Its kernel."""
    (found,) = derived(chain.text).steps
    assert isinstance(found, k.Kernel)
    return found


@pytest.mark.parametrize(
    ("name", "to", "by"),
    [
        ("rows across, weights second, relu", "acc0.b", "mov"),
        ("keys down, weights first, relu", "acc0.a", "movmatrix"),
        ("keys down, weights second, relu", "acc0.b", "movmatrix"),
        ("warps with keys down, then warpgroups", "acc0.a", "movmatrix"),
        ("warps, then warpgroups", "acc4.a", "registers"),
        ("warpgroups, then warps", "acc4.a", "registers"),
        ("rows apart, relu", "acc1_s", "st"),
        ("rows apart, roles, relu", "acc1_s", "stmatrix.x2"),
        ("warpgroups, weights second, relu", "acc1_s", "stmatrix.x4"),
    ],
)
def test_the_plan_says_how(name: str, to: str, by: str) -> None:
    assert [b for (_, t), b in ways(EVERY[name]).items() if t == to] == [by]
    statements = [*k.walk(written(EVERY[name]).body)]
    assert any(isinstance(s, k.TurnMatrix) for s in statements) == (by == "movmatrix")
    assert any(isinstance(s, k.StoreMatrix) for s in statements) == by.startswith("stmatrix")


def test_one_matrix_at_a_time() -> None:
    """Of 32 keys by 8 heads, four."""
    (kernel,) = derived(ADR["9_decode"].read_text()).steps
    assert isinstance(kernel, k.Kernel)
    assert _turned(kernel.body) == 4


def _turned(body: tuple[Node, ...]) -> int:
    """How many matrices a warp transposes in a step."""
    found = 0
    for s in body:
        if isinstance(s, k.For):
            found += _turned(s.body) * (s.axis.extent if s.unrolled and isinstance(s.axis.extent, int) else 1)
        found += isinstance(s, k.TurnMatrix)
    return found


@pytest.mark.parametrize(
    ("name", "lies", "meetings"),
    [
        ("rows apart, relu", "axes=(a1(32), r1(32)), slots=1, swizzle=64", 1),
        ("rows apart, roles, relu", "axes=(a1(32), r1(32)), slots=2, swizzle=64", 1),
        ("rows apart, roles, one slot, relu", "axes=(a1(32), r1(32)), slots=1, swizzle=64", 2),
        ("through memory, in panels, relu", "axes=(a1(64), r1(32)), slots=2, swizzle=32, panel=16", 1),
        ("warpgroups, keys down, weights second, relu", "axes=(r1(64), a1(64)), slots=2, swizzle=128", 1),
    ],
)
def test_it_lies_in_shared_memory(name: str, lies: str, meetings: int) -> None:
    """Swizzled as its rows are long. Threads meet where it is put there, and before where others load and there is
    one slot.
    """
    assert [str(x) for x in plan(EVERY[name]).all(Stage)] == [f'acc1_s = stage(of="acc1", product="acc0", {lies})']
    kernel = written(EVERY[name])
    (place,) = [s for s in kernel.shared if s.name.startswith("acc1_s")]
    found = [
        (s.body, at)
        for s in k.walk(kernel.body)
        if isinstance(s, k.For) and (at := [n for n, x in enumerate(s.body) if _puts(x, place)])
    ]
    steps, (at,) = found[0]
    around = steps[at - 1 : at + 3]
    assert sum(isinstance(x, k.Sync) for x in around) == meetings
    assert any(isinstance(x, k.Fence) for x in around) == EVERY[name].groups_multiply


def _puts(s: Node, place: k.Shared) -> bool:
    return isinstance(s, k.For) and s.unrolled and any(place in k.written(x) for x in k.walk((s,)))


RELU = Chain(between="relu", shape=(64, 96, 64, 64))
GROUP = replace(RELU, second="b", **GROUPS)
FRAME = "acc4: its frame moves with rows (a1), which lie otherwise in its sums than in those of acc3"


@pytest.mark.parametrize(
    ("chain", "reason"),
    [
        (replace(GROUP, weights="reg()"), "acc0: what acc1 sums does not stay in registers: wgmma.m64n64k16.f32.bf16"),
        (replace(RELU, apart=(1, 2), weights="reg()"), "stay in registers: threads divide a1 otherwise than those of"),
        (replace(RELU, weights="smem(slots=3)"), "acc1: it has one slot or two, not 3"),
        (replace(RELU, weights="smem(swizzle=48)"), "acc1: slabs are swizzled by 32, 64 or 128 bytes, or not (0)"),
        (replace(RELU, weights="smem(swizzle=128)"), "acc1: rows of 64 bytes are not swizzled by 128"),
        (replace(RELU, weights="smem(pad=8)"), "acc1: what is put into shared memory for a product is swizzled"),
        (replace(RELU, weights='smem(by="tma")'), 'nothing reads `acc0: acc1 = ... by="tma" ...`'),
        (replace(GROUP, weights="smem(swizzle=0)"), "acc1: wgmma reads slabs swizzled by 32, 64 or 128 bytes"),
        (
            replace(GROUP, groups=2, shape=(128, 96, 64, 128)),
            "reads its second factor there, and warpgroups that wait by themselves share nothing there",
        ),
        (Chain(overlap=True, weights="smem()", **GROUPS), "of which the second takes what is made of the first"),
        (Chain(across="m"), FRAME),
        (Chain(warps=(2, 1), apart=(1, 2)), FRAME),
        (Chain(warps=(2, 2), apart=(2, 2)), "acc4: warps share the steps of its frame otherwise in its sums"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(chain: Chain, reason: str) -> None:
    with pytest.raises((Limitation, UserError), match=re.escape(reason)):
        derived(chain.text)


def gated(chain: Chain, site: str = "") -> str:
    """A chain whose weights are made of two sums, at the same site or at one of their own."""
    k = chain.shape[1]
    loop = f"                    for r1 in reduce({k}):\n"
    product = "mul(f32(q[a0, a1, r0]), f32(other[a0, r1, r0]))"
    more = f"                        for r0 in reduce(64):\n                            acc2 <- sum({product})\n"
    held = '            key = smem(by="cp.async", swizzle=128)\n'
    changes = {
        "key: bf16": f"other: bf16[2, {k}, 64], key: bf16",
        loop: loop + more,
        "max(s_acc0, f32(0.0))": "mul(acc2, max(s_acc0, f32(0.0)))",
        'site("acc1"': 'site("acc1"' if site else 'site("acc1", "acc2"',
        held: held + (site or held.replace("key", "other")),
    }
    text = chain.text
    for before, after in changes.items():
        assert before in text, before
        text = text.replace(before, after)
    return text


@pytest.mark.parametrize(
    "chain", [RELU, replace(RELU, across="m", second="b"), replace(RELU, weights="smem()"), replace(RELU, second="b")]
)
def test_a_factor_is_made_of_two_sums(chain: Chain) -> None:
    right(gated(chain))


ALONE = """\
        with site("acc2", on="mma.m16n8k16.f32.bf16"):
            a1 = warp(2) * reg(2) * inst.n(8)
            r1 = reg(2) * inst.m(16)
            r0 = reg(4) * inst.k(16)
            other = smem(by="cp.async", swizzle=128)
"""
BOTH = """\
@tile
def f(q: bf16[64, 64], key: bf16[96, 64], v: bf16[96, 32], u: bf16[64, 32]):
    with kernel('o', o=bf16[64, 64]):
        for a0 in free(64):
            for a1 in free(64):
                for r1 in reduce(96):
                    for r0 in reduce(64):
                        acc0 <- sum(mul(f32(q[a0, r0]), f32(key[r1, r0])))
                    for r2 in reduce(32):
                        acc2 <- sum(mul(f32(v[r1, r2]), f32(u[a1, r2])))
                    acc1 <- sum(mul(f32(bf16(acc0)), f32(bf16(acc2))))
                o[a0, a1] = bf16(acc1)
    with schedule("o", target="sm_80"):
        a0 = grid(2) * block(32)
        a1 = block(64)
        r1 = time(3, ring=2) * block(32)
        with site("{one}", on="mma.m16n8k16.f32.bf16"):
            a0 = warp(2) * inst.m(16)
            r1 = reg(4) * inst.n(8)
            r0 = reg(4) * inst.k(16)
        with site("{two}", on="mma.m16n8k16.f32.bf16"):
            r1 = warp(2) * inst.m(16)
            a1 = reg(8) * inst.n(8)
            r0 = reg(2) * inst.k(16)
        with site("acc0", on="mma.m16n8k16.f32.bf16"):
            a0 = warp(2) * inst.m(16)
            a1 = reg(8) * inst.n(8)
            r1 = reg(2) * inst.k(16)
        with site("o"):
            a0 = like("acc0")
            a1 = like("acc0")
    return (o,)
"""


def test_what_no_factor_can_be_is_refused() -> None:
    """Sums of several sites that move, in registers and elsewhere, and products of two such factors."""
    turns = replace(RELU, shape=(128, 96, 64, 64), stay=1, weights="smem()", **GROUPS).text
    turns = turns.replace("math=warpgroup(1))", "math=warpgroup(2), turns=True)")
    places = gated(replace(RELU, weights="smem()")).replace("acc1 = smem()", "acc1 = smem()\n            acc2 = reg()")
    alone = gated(replace(RELU, across="m"), ALONE)
    for text, reason in (
        (turns, "acc0: warpgroups that take turns have no shared memory of their own for what acc1 sums"),
        (places, "acc0: what acc1 and acc2 sum is one factor, and lies in one place"),
        (alone, "acc0: what acc1 and acc2 sum at several sites is one factor where it stays in registers"),
        (BOTH.format(one="acc1", two="acc2"), "is one factor of it, and not both"),
    ):
        with pytest.raises((Limitation, UserError), match=re.escape(reason)):
            derived(text)


STAGED = EVERY["rows apart, relu"]
LINE = '    acc1_s = stage(of="acc1", product="acc0", axes=(a1(32), r1(32)), slots=1, swizzle=64)\n'


@pytest.mark.parametrize(
    ("name", "before", "after", "reason"),
    [
        ("rows apart, relu", LINE, "", "it is not said where what acc1 sums lies: a line `stage` is missing"),
        ("rows apart, relu", LINE, LINE + LINE.replace("acc1_s", "s"), "the stage for acc0 is decided twice"),
        ("rows apart, relu", 'stage(of="acc1"', 'stage(of="acc0"', "made of what is summed at acc0, and"),
        ("rows apart, relu", 'product="acc0", axes', 'product="acc1", axes', "acc1 takes nothing that was"),
        ("rows apart, relu", "r1(32)), slots=1, swizzle=64)\n", "r1(16)), slots=1, swizzle=64)\n",
         "axes of it are (a1(32), r1(16)), and the schedule has (a1(32), r1(32))"),
        ("rows apart, relu", "slots=1, swizzle=64)\n    result", "slots=3, swizzle=64)\n    result", "or two, not 3"),
        ("rows apart, relu", "slots=1, swizzle=64)\n    result", "slots=0, swizzle=64)\n    result", "or two, not 0"),
        ("rows apart, relu", "swizzle=64)\n    result", "swizzle=64, panel=16)\n    result", "panel of it is 16"),
        ("rows apart, relu", 'a="stored"', 'a="values"', "a comes from values: mma.m16n8k16.f32.bf16 takes stored"),
        ("rows apart, relu", 'to="acc1_s", by="st"', 'to="acc1_s", by="stmatrix.x2"', "acc1 comes to acc1_s by st"),
        ("rows apart, relu", 'to="acc0.a", by="ldmatrix.x4"', 'to="acc0.a", by="ldmatrix.x2"',
         "acc1_s comes to acc0.a by ldmatrix.x4, not by ldmatrix.x2"),
        ("keys down, weights second, relu", 'by="movmatrix"', 'by="registers"', "to acc0.b by movmatrix, not by regi"),
        ("keys down, weights second, relu", 'by="movmatrix"', 'by="mov"', "to acc0.b by movmatrix, not by mov"),
        ("through memory, in panels, relu", "slots=2, swizzle=32", "slots=1, swizzle=32", "slots is 1, and the"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused(name: str, before: str, after: str, reason: str) -> None:
    _, kernel, schedule = tiled(EVERY[name].text)
    text = str(plan(EVERY[name]))
    assert before in text, text
    with pytest.raises(UserError, match=re.escape(reason)):
        verify(kernel, schedule, parse_plan(text.replace(before, after)), gpu(schedule.target))


def test_a_plan_may_have_what_the_schedule_leaves_open() -> None:
    program, kernel, schedule = tiled(STAGED.text)
    text = str(plan(STAGED)).replace(LINE, LINE.replace("slots=1, swizzle=64", "slots=2, swizzle=32, panel=16"))
    edited, target = parse_plan(text), gpu(schedule.target)
    assert isinstance(edited, Plan)
    verify(kernel, schedule, edited, target)
    done = k.Program("f", program.loop.inputs, (lower(kernel, schedule, target, edited),), program.loop.results)
    given = inputs(program)
    (best,) = loop.run(program.loop, given, precise=True)
    for seed in SEEDS:
        (ours,) = simulator.run(done, given, seed=seed)
        assert np.abs(ours.astype(np.float64) - best).max() <= 2.0**-7 * np.abs(best).max()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "keys down, weights second, relu",
            "acc1: its sums are what acc0.b wants once matrices of 8 x 8",
        ),
        ("rows across, weights second, relu", "acc1: lanes have what acc0.b wants of its sums, in other registers"),
        (
            "rows apart, relu",
            "acc1: what acc0 takes of it lies in shared memory: threads divide a1 otherwise",
        ),
        (
            "through memory, in panels, relu",
            "acc1_s: ldmatrix reads 8 pieces of 16 bytes from rows of 32 bytes: 1",
        ),
    ],
)
def test_it_is_told_why(name: str, why: str) -> None:
    _, kernel, schedule = tiled(EVERY[name].text)
    told = [text for _, text in reasons(plan(EVERY[name]), Draft(kernel, schedule, gpu(schedule.target)))]
    assert any(x.startswith(why) for x in told), told


@pytest.mark.parametrize("name", HANDED)
def test_it_compiles(name: str, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings")
    from tests.kernels.test_nvrtc import compile_all

    chain = EVERY[name]
    compile_all([emit(s)[1] for s in derived(chain.text).steps], chain.target, Cache(tmp_path, 1 << 30))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*HANDED, "9_decode"])
def test_on_a_gpu(name: str) -> None:
    from tests.kernels.test_on_gpu import agree, on_gpu, target

    text = ADR[name].read_text() if name in ADR else EVERY[name].text
    if target() != "sm_90a":
        pytest.skip("they are for Hopper")
    program, _, _ = tiled(text)
    given = inputs(program)
    agree(on_gpu(derived(text), given)[0], simulator.run(derived(text), given)[0])
