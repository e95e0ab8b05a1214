"""Chains of products that share what they compute in a step: one kernel with two results, in which each product begins
as soon as what it is made of is there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.kernels.programs import lowered
from tests.kernels.test_arrangements import derived, right
from tests.kernels.test_training import causal, gradients, plain, tensors
from tests.rules.test_catalog import assert_same, example

from terrazzo.hw.gpu import gpu
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.plan import Plan, Product, Ring, Stream
from terrazzo.ir.text import parse, show
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop import beside
from terrazzo.rules.tile.complete import complete


@dataclass(frozen=True)
class Both:
    """The gradients of keys and of values of two heads, where `mask` says which queries see a key: "later" ones, those
    of a "window" of 80, or all. `groups` warpgroups divide the keys, and `lag` behind one another; `stay` blocks walk
    all tiles.
    """

    queries: int = 192
    keys: int = 128
    width: int = 64
    mask: str = "later"
    groups: int = 2
    step: int = 64
    slots: int = 3
    stay: int = 0
    overlap: bool = True
    lag: bool = True
    registers: int = 240

    @property
    def text(self) -> str:
        """A program of this kernel and its schedule."""
        q, n, w = self.queries, self.keys, self.width
        return "\n".join([
            "@tile",
            f"def f(q: bf16[2, {q}, {w}], g: bf16[2, {q}, {w}], key: bf16[2, {n}, {w}], v: bf16[2, {n}, {w}], "
            f"t: f32[2, {q}], d: f32[2, {q}]):",
            f"    with kernel('dk', dk=bf16[2, {n}, {w}], dv=bf16[2, {n}, {w}]):",
            "        for a0 in free(2):",
            f"            for a1 in free({n}):",
            f"                for a2 in free({w}):",
            f"                    for r1 in reduce({q}):",
            *("                        " + line for line in self.step_of()),
            "                    dk[a0, a1, a2] = bf16(mul(acc0, f32(0.25)))",
            "                    dv[a0, a1, a2] = bf16(acc1)",
            *("    " + line for line in self.schedule()),
            "    return (dk, dv)",
            "",
        ])  # fmt: skip

    def step_of(self) -> list[str]:
        masks = {"later": ["v1 = ge(v0, i64(0))"], "window": ["v1 = and_(ge(v0, i64(0)), le(v0, i64(80)))"]}
        return [
            *(["v0 = index(r1 - a1)", *masks[self.mask]] if self.mask else []),
            f"for r0 in reduce({self.width}):",
            "    acc2 <- sum(mul(f32(q[a0, r1, r0]), f32(key[a0, a1, r0])))",
            "    acc3 <- sum(mul(f32(g[a0, r1, r0]), f32(v[a0, a1, r0])))",
            "v4 = approx_exp2(sub(mul(acc2, f32(0.0625)), mul(t[a0, r1], f32(1.5))))",
            "v5 = where(v1, v4, f32(0.0))" if self.mask else "v5 = v4",
            "v6 = bf16(mul(v5, sub(acc3, d[a0, r1])))",
            "acc0 <- sum(mul(f32(v6), f32(q[a0, r1, a2])))",
            "acc1 <- sum(mul(f32(bf16(v5)), f32(g[a0, r1, a2])))",
        ]

    def schedule(self) -> list[str]:
        rows, w = 64 * self.groups, self.width
        panel = 2 * min(w & -w, 64)
        mine = f"    a1 = warpgroup({self.groups}) * inst.m(64)"
        lag = ", lag=True" if self.lag and self.overlap and self.groups > 1 else ""
        count, by = -(-self.queries // self.step), f'smem(by="tma", swizzle={panel})'
        inner, outer = (f'on="wgmma.m64n{n}k16.f32.bf16"' for n in (self.step, w))
        first = [mine, f"    r1 = inst.n({self.step})", f"    r0 = reg({w // 16}) * inst.k(16)"]
        last = [mine, f"    a2 = inst.n({w})", f"    r1 = reg({self.step // 16}) * inst.k(16)"]
        return [
            'with schedule("dk", target="sm_90a"):',
            "    a0 = grid(2)",
            f"    a1 = grid({-(-self.keys // rows)}) * block({rows})",
            f"    a2 = block({w})",
            f"    r1 = time({count}, ring={self.slots}{', overlap=1' * self.overlap}) * block({self.step})",
            *([f"    persistent({self.stay})"] if self.stay else []),
            f"    roles(load=warp(1), math=warpgroup({self.groups}), registers=(24, {self.registers}){lag})",
            *(f"    {x}" for x in (f'with site("acc2", {inner}):', *first, f"    key = {by}", f"    q = {by}")),
            *(f"    {x}" for x in (f'with site("acc3", {inner}):', *first, f"    v = {by}", f"    g = {by}")),
            *(f"    {x}" for x in (f'with site("acc0", {outer}):', *last, f"    q = {by}")),
            *(f"    {x}" for x in (f'with site("acc1", {outer}):', *last, f"    g = {by}")),
            *self.results("dk", panel // 2),
            *self.results("dv", panel // 2),
        ]

    def results(self, name: str, part: int) -> list[str]:
        return [
            f'    with site("{name}"):',
            f"        a2 = time({self.width // part}, ring=1) * block({part})",
            f'        {name} = smem(by="tma", swizzle={2 * part})',
        ]

    @property
    def plan(self) -> Plan:
        program = parse(self.text)
        found, _ = complete(program.loop.steps[0], program.schedules[0][1], gpu("sm_90a"))
        assert isinstance(found, Plan), found.reason
        return found


EVERY = {
    "later queries": Both(),
    "a window": Both(mask="window", keys=256),
    "all": Both(mask=""),
    "blocks stay": Both(keys=384, queries=256, stay=2, slots=2),
    "blocks stay in a window": Both(keys=384, queries=384, stay=3, mask="window", groups=1),
    "one warpgroup": Both(groups=1, slots=4),
    "wide": Both(width=128, queries=128),
    "heads of 80": Both(width=80),
    "small steps": Both(step=32, queries=96),
    "ends anywhere": Both(queries=200, keys=100, mask=""),
    "ends anywhere, masked": Both(queries=200, keys=150),
    "rows no box can have": Both(queries=130, keys=70),
    "one after the other": Both(overlap=False),
    "together": Both(lag=False),
    "three behind one another": Both(groups=3, keys=384, stay=2, width=32, registers=160),
}


@pytest.mark.parametrize("name", EVERY)
def test_both_are_right(name: str) -> None:
    right(EVERY[name].text)


def test_what_both_need_comes_once() -> None:
    """Queries and gradients of results come for scores and for results; numbers of rows come with them."""
    streams = {s.operand: s for s in Both().plan.all(Stream)}
    assert streams["q[a0, r1, r0]"].also == ("q[a0, r1, a2]",) and streams["g[a0, r1, r0]"].also == ("g[a0, r1, a2]",)
    assert streams["t[a0, r1]"].read and streams["d[a0, r1]"].read and len(streams) == 6
    assert all(r.late == bool(r.over) for r in Both().plan.all(Ring))
    assert [p.sites for p in Both().plan.all(Product)] == [("acc2",), ("acc3",), ("acc1",), ("acc0",)]


def test_what_is_no_box_comes_to_registers() -> None:
    streams = {s.operand for s in replace(Both(), queries=130, keys=70).plan.all(Stream)}
    assert not {"t[a0, r1]", "d[a0, r1]"} & streams


def test_products_go_on_while_the_next_step_begins() -> None:
    """In the loop over steps nothing waits for all products but the factor that is made of all that were begun."""
    (kernel,) = derived(Both().text).steps
    loops = [s for s in k.walk(kernel.body) if isinstance(s, k.For)]
    waits = [[x.open for x in s.body if isinstance(x, k.WaitGroups) and x.kind == "wgmma"] for s in loops]
    assert [w for w in waits if w] == [[1, 1, 0], [1, 1, 0]]  # of each team


def test_chains_that_share_sums_become_one_kernel() -> None:
    """By the example of the rewrite; where the model is against it, or a result is made of the other, they stay two."""
    before, after = map(parse, example(inspect.getdoc(beside.chains_beside) or "", "chains_beside"))

    def made(program: l.Program, price: Callable[[Any], float] = len, why: str = "") -> l.Program:
        return beside.chains_beside(program, Log(), price, lambda kernel: why)

    assert made(before) == after
    assert_same(before, after)
    assert made(before, lambda steps: -len(steps)) == made(before, why="there is no room") == before
    assert len(made(parse(show(before).replace("v[r1, a1]", "z[r1 % 4, a1]"))).steps) == 2


@pytest.mark.parametrize(("fn", "tokens"), [(causal, 320), (plain, 200)])
def test_all_gradients_in_adverse_orders(fn: Any, tokens: int) -> None:
    """The gradient of queries too has products that take turns: weights are found while the second sums are on their
    way, and keys come once for both of its products.
    """
    found = lowered(gradients(fn), tensors(*((1, 1, tokens, 64),) * 4), "sm_90a")
    program = found.lowering.at("tile")
    turns = [plan for _, plan in program.plans if any(r.late for r in plan.all(Ring))]
    assert [[x.sites for x in plan.all(Product)] for plan in turns] == [
        [("acc1",), ("acc2",), ("acc0",)],
        [("acc2",), ("acc3",), ("acc1",), ("acc0",)],
    ]
    assert [sum(len(s.also) for s in plan.all(Stream)) for plan in turns] == [1, 2]
    right(show(program))
