"""One product in every arrangement a schedule can ask for, and the schedules of ADR 004: derived, checked, simulated by
a fair and by adverse schedulers, and compared with float64.
"""

from __future__ import annotations

import os
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels import by_hand
from tests.kernels.arrangements import BY_HAND, EVERY, F90, M90, K, M, Product
from tests.kernels.programs import lowered

from terrazzo.errors import CompilerBug, Limitation, UserError
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import tile
from terrazzo.ir.text import parse, show
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.targets.cuda.check import check

ADR = {path.stem: path for path in sorted((Path(__file__).parent / "adr_004").glob("*.tile"))}
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}
SEEDS = (None, *range(int(os.environ.get("SIMULATED_SEEDS", "2"))))
"""The orders every kernel runs in: the fair one, and so many adverse ones."""


SAID = {name: product.text for name, product in BY_HAND.items()} | {
    path.stem: path.read_text() for path in sorted(by_hand.FOLDER.glob("*.tile"))
}
"""The texts by hand that a schedule says, as terms with these; it says no other that is under `by_hand`."""


def target(program: tile.Program) -> str:
    return program.schedules[0][1].target


def inputs(program: tile.Program) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {b.name: rng.standard_normal(b.type.static_shape).astype(b.type.dtype.numpy) for b in program.loop.inputs}


@cache
def derived(text: str) -> k.Program:
    """The kernels of a text of Tile IR."""
    program = parse(text)
    return lowering(program, Options(target=target(program))).at("kernel")


def right(text: str) -> None:
    """What is derived from a text passes the checks, and gives what the loops give in float64."""
    program, kernels = parse(text), derived(text)
    check(kernels, gpu(target(program)))
    given = inputs(program)
    best = loop.run(program.loop, given, precise=True)
    for seed in SEEDS:
        for ours, exact in zip(simulator.run(kernels, given, seed=seed), best, strict=True):
            assert np.abs(ours.astype(np.float64) - exact).max() <= 2 * ROUNDING[ours.dtype.name] * np.abs(exact).max()


@pytest.mark.parametrize("name", EVERY)
def test_an_arrangement_is_right(name: str) -> None:
    right(EVERY[name].text)


@pytest.mark.parametrize("name", ADR)
def test_a_schedule_of_the_adr_is_right(name: str) -> None:
    right(ADR[name].read_text())


UNEVEN = {"shape": (512, 128, 192), "cluster": "m", "roles": True, "persistent": 4, "grouped": 8}
MULTICAST = "w: who multicasts must know that slots of other blocks are free"
GROUPS = "warpgroup(2) * reg(2) * inst.k(16)"


@pytest.mark.parametrize(
    ("product", "reason"),
    [
        (Product(cluster="m"), MULTICAST),
        (Product(**M90 | {"cluster": "m", "roles": True}), MULTICAST),
        (Product(**F90 | {"cluster": "m", "roles": True}), MULTICAST),
        (
            Product(roles=True, depth=GROUPS, groups=2, tile=(128, 64, 64)),
            "roles give 8 warps to math, and its sites bind 16",
        ),
        (
            Product(**M | {"depth": "warp(2) * reg(1) * inst.k(16)", "staged": "swizzle=128"}),
            "y: warps share the steps of acc0, whose sums meet",
        ),
        (
            Product(roles=True, tile=(64, 48, 64), columns=2, w_axes="kn", swizzle=32),
            "w: every product takes 24 of a1, which begin inside a panel of 16",
        ),
        (Product(roles=True, turns=2), "roles: warpgroups that take turns multiply a tile each"),
        (Product(roles=True, turns=2, persistent=1, groups=2, tile=(128, 64, 64)), "roles: warpgroups that take turns"),
        (Product(roles=True, registers=(40, 236)), "roles: math: registers are for whole warpgroups from sm_90 on"),
        (Product(roles=True, registers=(20, 232)), "roles: load: registers are for whole warpgroups from sm_90 on"),
        (
            Product(roles=True, turns=3, persistent=1, registers=(40, 232)),
            "roles: math: 94208 registers with those before it, and a block of 512 threads has 65536",
        ),
        (Product(roles=True, begin="r0"), "begin is an axis of tiles, by which steps begin: a0 or a1, not r0"),
        (Product(**UNEVEN), "groups of 8 rows do not divide a0(4)"),
        (Product(ring=0), "a ring has one slot at least, not 0"),
        (Product(ring=1), "TMA fills a ring of two slots at least where all warps do everything"),
    ],
)  # fmt: skip
def test_what_would_race_or_wait_for_ever_is_refused(product: Product, reason: str) -> None:
    with pytest.raises((Limitation, UserError), match=re.escape(reason)):
        derived(product.text)


@pytest.mark.parametrize(
    ("product", "before", "after", "reason"),
    [
        (
            Product(shape=(64, 64, 256)), "r0 = time(4", "r0 = cluster(2) * time(2",
            "acc0: blocks of a cluster share the steps of tiles that some warps load and others multiply",
        ),
        (
            Product(shape=(64, 64, 256), roles=True), "r0 = time(4", "r0 = cluster(2) * time(2",
            "who stores in the end has no registers of a role",
        ),
        (
            Product(**K, shape=(64, 64, 256), persistent=2), "", "",
            "the blocks of a cluster share the sums over r0 of one tile: persistent walks several",
        ),
        (
            Product(**K, shape=(64, 128, 256), tile=(64, 128, 64), columns=2), "", "",
            "blocks of a cluster share the steps of tiles whose columns are an instruction's alone, not reg(2)",
        ),
        (
            Product(**M90 | {"roles": True, "shape": (64, 64, 256)}), "r0 = time(8", "r0 = cluster(2) * time(4",
            "acc0: blocks of a cluster share the steps of one product of warpgroups",
        ),
        (
            Product(roles=True, depth="warpgroup(2) * reg(2) * inst.k(16)"), "math=warpgroup(1)", "math=warpgroup(2)",
            "acc0: warpgroups that wait by themselves share no reduction",
        ),
    ],
)  # fmt: skip
def test_what_is_not_derived_is_refused(product: Product, before: str, after: str, reason: str) -> None:
    assert before in product.text
    with pytest.raises(Limitation, match=re.escape(reason)):
        derived(product.text.replace(before, after))


@pytest.mark.parametrize("which", [1, 2])
def test_blocks_that_share_sums_meet_before_they_take_them_and_before_they_leave(which: int) -> None:
    """Without either barrier of the cluster, the simulator finds a race or a block that left."""
    text = EVERY["shared sums"].text
    (kernel,) = derived(text).steps
    assert isinstance(kernel, k.Kernel)
    places = [n for n, s in enumerate(kernel.body) if isinstance(s, k.ClusterSync)]
    assert len(places) == 3 and kernel.cluster == 2
    body = tuple(s for n, s in enumerate(kernel.body) if n != places[which])
    program = parse(text)
    fields = {name: getattr(kernel, name) for name in kernel._fields}
    wrong = k.Program("f", program.loop.inputs, (k.Kernel(**fields | {"body": body}),), program.loop.results)
    with pytest.raises(CompilerBug, match=r"given0|may have ended"):
        simulator.run(wrong, inputs(program))


def test_shared_sums_lie_where_slabs_were() -> None:
    """They take no memory of their own; given before all warpgroups are done with the slabs, they are a race."""
    text = Product(**K, shape=(128, 128, 256), tile=(128, 64, 64), groups=2).text
    (kernel,) = derived(text).steps
    assert isinstance(kernel, k.Kernel)
    given = [s for s in kernel.shared if s.name.startswith("given")]
    slabs = [s for s in kernel.shared if s.swizzle]
    assert given and all(kernel.offsets[s] + k.shared_bytes(s) <= sum(map(k.shared_bytes, slabs)) for s in given)
    shown = show(derived(text))
    assert parse(shown) == derived(text)
    (meeting,) = set(re.findall(r"sync\(\d, \d\)", shown))
    with pytest.raises(CompilerBug, match=r"nobody wrote|another warp"):
        simulator.run(parse(shown.replace(meeting, "pass")), inputs(parse(text)))


SPLIT = """\
with schedule("{name}", target="sm_90a"):
    a0 = block(32)
    a1 = grid(2) * block(64)
    r0 = grid(4) * time(2, ring=3) * block(32)
    with site("acc0", on="fma.f32"):
        a0 = lane(8) * reg(4)
        a1 = warp(2) * lane(4) * reg(8)
        r0 = warp(2) * reg(16)
        x = smem(by="cp.async", pad=4)
        w = smem(by="cp.async", pad=4)
"""


@pytest.mark.parametrize("depth", [256, 200])
def test_a_pinned_split_over_the_grid_is_two_kernels(depth: int) -> None:
    """Schedule 4 of the ADR, which splits twice: over the grid, and over the warps of a block."""
    torch.manual_seed(0)
    x, w, b = torch.randn(32, depth), torch.randn(128, depth), torch.randn(128)
    linear = partial(lowered, lambda x, w, b: F.gelu(F.linear(x, w, b)), (x, w, b), "sm_90a", fp32="exact")
    name = linear().kernels[-1].name
    found = linear(schedules=(SPLIT.format(name=name),))
    part, whole = found.kernels
    assert (part.name, part.grid, part.warps, whole.name) == (f"{name}_part", 8, 4, name)
    exact = F.gelu(F.linear(x.double(), w.double(), b.double())).numpy()
    for seed in SEEDS:
        (ours,) = simulator.run(found.program, found.inputs, seed=seed)
        assert np.abs(ours - exact).max() <= 2.0**-20 * np.abs(exact).max()


def test_a_sum_split_over_the_grid() -> None:
    """Any reduction, not only of products."""
    text = """\
with schedule("sum_1", target="sm_80"):
    a0 = grid(3)
    r0 = grid(4) * reg(2) * lane(32)
"""
    x = torch.randn(3, 256)
    found = lowered(lambda x: x.sum(-1), (x,), "sm_80", schedules=(text,))
    assert found.kernels[0].grid == 12
    np.testing.assert_allclose(found.simulated()[0], x.double().sum(-1), rtol=1e-5)


def test_only_the_last_axis_of_all_reductions_is_split() -> None:
    text = """\
with schedule("_softmax", target="sm_80"):
    a0 = grid(3)
    r0 = grid(4) * reg(2) * lane(32)
"""
    with pytest.raises(UserError, match=re.escape("blocks share r0, and can share the last axis")):
        lowered(lambda x: torch.softmax(x, -1), (torch.randn(3, 256),), "sm_80", schedules=(text,))


@pytest.mark.parametrize("name", SAID)
def test_what_was_written_by_hand_follows_from_a_schedule(name: str) -> None:
    """Of as many threads, by the same statements; only where partial sums meet is another way taken."""
    program, text = by_hand.program(name), SAID[name]
    (hand,), (ours,) = program.steps, derived(text).steps
    assert isinstance(hand, k.Kernel) and isinstance(ours, k.Kernel)
    assert (ours.grid, ours.warps, ours.cluster) == (hand.grid, hand.warps, hand.cluster)
    for kind in (k.Role, k.TensorLoad, k.AsyncCopy, k.MultiplyAsync, k.WaitBarrier, k.Arrive, k.StoreMatrix):
        assert _has(ours, kind) == _has(hand, kind), kind
    given = by_hand.inputs(program)
    best = by_hand.exact(name, given)
    for seed in SEEDS:
        (result,) = simulator.run(derived(text), given, seed=seed)
        assert np.abs(result.astype(np.float64) - best).max() <= ROUNDING[result.dtype.name] * np.abs(best).max()


def test_what_no_schedule_says() -> None:
    """Numbers that are counted where data says, and a factor of which whole tiles are left out."""
    assert {*by_hand.MEANING} - {*SAID} == {"histogram", "causal", "turned"}


def _has(kernel: k.Kernel, kind: type) -> bool:
    return any(isinstance(s, kind) for s in k.walk(kernel.body))


def test_rows_run_along_an_axis_of_the_operand() -> None:
    text = EVERY["fma"].text.replace('x = smem(by="cp.async")', 'x = smem(by="cp.async", along="a1")')
    with pytest.raises(UserError, match=re.escape("x: its rows cannot run along a1: it has a0, r0 in a step")):
        derived(text)
