"""Products whose results are reduced where they are summed: no tile of them leaves, only what each row makes of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.test_arrangements import SEEDS
from tests.kernels.test_joined import lowered
from tests.kernels.test_quantised import numbers
from tests.rules.test_columns_reduced import fewest

from terrazzo import pipelines
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.node import topological
from terrazzo.ir.plan import Combine
from terrazzo.ir.sites import reduced_product
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop.columns_reduced import columns_reduced
from terrazzo.targets.cuda.check import check

LOSS = """@tile
def f(x: bf16[256, 128], w: bf16[{words}, 128]):
    with kernel("loss", top=f32[{pieces}, 256], total=f32[{pieces}, 256]):
        for a0 in free(256):
            for s in free({pieces}):
                for r1 in reduce({chunk}):
                    for r0 in reduce(128):
                        acc1 <- sum(mul(f32(x[a0, r0]), f32(w[s * {chunk} + r1, r0])))
                    acc0 <- logsumexp(f32(bf16(acc1)), f32(1.0))
                top[s, a0] = get(acc0, 0)
                total[s, a0] = get(acc0, 1)
    with schedule("loss", target="{target}"):
{schedule}
    return (top, total)
"""
WARPGROUPS = """
a0 = grid({grid}) * {cluster}block({rows})
s = grid({pieces})
r1 = block({chunk})
r0 = time(2, ring=3) * block(64)
persistent(2)
roles(load=warp(1), math=warpgroup(2), registers=(40, 232){turns})
with site("acc1", on="wgmma.m64n{chunk}k16.f32.bf16"):
    a0 = {own} * inst.m(64)
    r1 = inst.n({chunk})
    r0 = reg(4) * inst.k(16)
    x = smem(by="tma", swizzle=128)
    w = smem(by="tma", swizzle=128{multicast})
with site("top", "total"):
    a0 = like("acc1")
"""
WARPS = """
a0 = grid(4) * block(64)
s = grid(4)
r1 = block(32)
r0 = time(4, ring=3) * block(32)
with site("acc1", on="mma.m16n8k16.f32.bf16"):
    a0 = warp(2) * reg(2) * inst.m(16)
    r1 = warp(2) * reg(2) * inst.n(8)
    r0 = reg(2) * inst.k(16)
    x = smem(by="cp.async", swizzle=64)
    w = smem(by="cp.async", swizzle=64)
with site("top", "total"):
    a0 = like("acc1")
"""


def text(schedule: str, words: int, chunk: int, target: str = "sm_90a", loss: str = LOSS, **given: Any) -> str:
    pieces = words // chunk
    usual = {"rows": 128, "grid": 2, "cluster": "", "turns": "", "own": "warpgroup(2)", "multicast": ""}
    lines = schedule.format(**{"chunk": chunk, "pieces": pieces, **usual, **given}).strip().splitlines()
    bound = "\n".join(f"        {line}" for line in lines)
    return loss.format(words=words, pieces=pieces, chunk=chunk, target=target, schedule=bound)


CASES = {
    "warpgroups": text(WARPGROUPS, 512, 256),
    "in turns": text(WARPGROUPS, 384, 192, turns=", turns=True", own="warpgroup(1) * reg(2)"),
    "cluster": text(WARPGROUPS, 128, 64, grid=1, cluster="cluster(2) * ", multicast=", multicast=True"),
    "more rows": text(WARPGROUPS, 256, 128, rows=256, grid=1, own="warpgroup(2) * reg(2)"),
    "warps": text(WARPS, 128, 32, "sm_80"),
}


def read(source: str) -> tile.Program:
    found = parse(source)
    assert isinstance(found, tile.Program)
    return found


def both(program: tile.Program, seed: int | None, given: dict[str, Any]) -> tuple[Any, Any]:
    """What a derived kernel gives, and what the loops do."""
    (target,) = {s.target for _, s in program.schedules}
    kernels = lowering(program, Options(target=target)).at("kernel")
    check(kernels, gpu(target))
    return simulator.run(kernels, given, seed=seed), loop.run(program.loop, given)


def inputs(program: tile.Program) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        b.name: (rng.standard_normal(b.type.static_shape) / 4).astype(b.type.dtype.numpy) for b in program.loop.inputs
    }


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_rows_of_a_tile_are_reduced(name: str, seed: int | None) -> None:
    program = read(CASES[name])
    (top, total), (best, whole) = both(program, seed, inputs(program))
    np.testing.assert_allclose(top, best, atol=1e-2)  # a sum that is rounded the other way
    np.testing.assert_allclose(top + np.log(total), best + np.log(whole), atol=1e-2)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_infinite_is_as_the_monoid_has_it(value: float) -> None:
    program = read(CASES["warpgroups"])
    given = inputs(program)
    given["w"][:, :] = np.abs(given["w"])
    given["x"][3, :] = value
    given["w"][256:] *= given["w"].dtype.type(-1 if value == np.inf else 1)
    ours, best = both(program, None, given)
    with np.errstate(all="ignore"):
        mine, whole = (top + np.log(total) for top, total in (ours, best))
    np.testing.assert_array_equal(np.isfinite(mine), np.isfinite(whole))
    np.testing.assert_array_equal(mine[:, 3], whole[:, 3])


def test_the_plan_says_where_states_meet() -> None:
    for name, meets in {"in turns": Combine("acc0", 4), "warps": Combine("acc0", 4, 2)}.items():
        program = read(CASES[name])
        ((_, plan),) = lowering(program, Options(target=program.schedules[0][1].target)).at("tile").plans
        assert plan.all(Combine) == (meets,)


def test_a_tile_of_sums_is_read_twice_and_each_element_raised_to_one_power() -> None:
    """The maximum of the sums is found first, and rounded once; then each is one exponential below it."""
    (kernel,) = lowering(read(CASES["in turns"]), Options(target="sm_90a")).at("kernel").steps
    assert isinstance(kernel, k.Kernel)
    role = next(s for s in k.walk(kernel.body) if isinstance(s, k.Role) and s.first == 4)
    applied = [x.fn.name for x in topological([role]) if isinstance(x, l.Apply)]
    assert applied.count("approx_exp2") == 1
    assert applied.count("bf16") == 2


@pytest.mark.parametrize(
    ("term", "of"),
    [("max(f32(bf16(acc1)))", "top"), ("sum(mul(acc1, acc1))", "top")],
)
def test_other_reductions_go_one_by_one(term: str, of: str) -> None:
    plain = LOSS.replace("logsumexp(f32(bf16(acc1)), f32(1.0))", term)
    plain = plain.replace("get(acc0, 0)", "acc0").replace("                total[s, a0] = get(acc0, 1)\n", "")
    plain = plain.replace(", total=f32[{pieces}, 256]", "").replace("return (top, total)", "return (top,)")
    program = read(text(WARPGROUPS.replace(', "total"', ""), 512, 256, loss=plain))
    (ours,), (best,) = both(program, 0, inputs(program))
    np.testing.assert_allclose(ours, best, rtol=1e-2)


# -- as they are chosen ------------------------------------------------------------------------------------------------


def words(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def labels(rows: int, count: int) -> torch.Tensor:
    found = torch.randint(0, count, (rows,))
    found[:3] = torch.tensor([0, count - 1, -100])
    return found


def entropy(x: Any, w: Any, y: Any) -> Any:
    return F.cross_entropy(F.linear(x, w).float(), y)


def each(x: Any, w: Any, y: Any) -> Any:
    return F.cross_entropy(F.linear(x, w).float(), y, reduction="none")


def capped(x: Any, w: Any, c: Any, y: Any) -> Any:
    return F.cross_entropy(torch.tanh(F.linear(x, w, c).float() / 3) * 3, y)


def log_sum(x: Any, w: Any) -> Any:
    return torch.logsumexp(F.linear(x, w).float(), -1)


def best(x: Any, w: Any) -> Any:
    return F.linear(x, w).amax(-1)


def squares(x: Any, w: Any) -> Any:
    return F.linear(x, w).float().square().sum(-1)


LOSSES: dict[str, tuple[Any, tuple[torch.Tensor, ...]]] = {
    "loss": (entropy, (words(256, 64), words(512, 64), labels(256, 512))),
    "ragged": (entropy, (words(200, 72), words(520, 72), labels(200, 520))),
    "a loss of each row": (each, (words(130, 64), words(384, 64), labels(130, 384))),
    "bias and cap": (capped, (words(128, 64), words(512, 64), words(512), labels(128, 512))),
    "sum of exponentials": (log_sum, (words(136, 64), words(700, 64))),
    "maximum": (best, (words(136, 64), words(512, 64))),
    "sum of squares": (squares, (words(136, 64), words(512, 64))),
}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are reduced on their way wherever they can be."""
    monkeypatch.setattr(pipelines, "columns_reduced", lambda p, log, price, kept: columns_reduced(p, log, fewest, kept))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", LOSSES)
def test_it_is_as_exact_as_eager(name: str, seed: int | None) -> None:
    fn, given = LOSSES[name]
    program = lowered(fn, given).at("kernel")
    check(program, gpu("sm_90a"))
    rows, count = given[0].shape[0], given[1].shape[0]
    stored = [b for s in program.steps for b in s.writes]
    assert not [b for b in stored if math.prod(b.type.static_shape) >= rows * count]
    assert any(isinstance(s, k.MultiplyAsync) for x in program.steps for s in k.walk(x.body))
    y = simulator.run(program, dict(zip((b.name for b in program.inputs), map(numbers, given), strict=True)), seed=seed)
    exact = fn(*(x.double() if x.is_floating_point() else x for x in given)).numpy()
    eager = fn(*given).double().numpy()
    off, usual = (np.linalg.norm(z - exact) for z in (y[0].astype(np.float64), eager))
    assert off <= 1.1 * usual + 1e-6 * np.linalg.norm(exact)


def test_it_is_chosen_by_price_and_undone_by_name() -> None:
    given = torch.empty(8192, 4096).bfloat16(), torch.empty(128256, 4096).bfloat16(), labels(8192, 128256)
    chosen = lowered(entropy, given).at("tile")
    first, *_ = chosen.loop.steps
    assert reduced_product(first) is not None
    assert "turns=True" in str(chosen.schedules[0][1]) and "multicast=True" in str(chosen.schedules[0][1])
    assert math.prod(first.writes[0].type.static_shape) * 192 == 8192 * 128256
    kept = lowered(entropy, given, materialize=("mm",)).at("loop")
    assert any(b.name == "mm" for s in kept.steps for b in s.writes)
    few = tuple(x[:1] if x.shape[0] == 8192 else x for x in given)
    assert not [s for s in lowered(entropy, few).at("loop").steps if reduced_product(s)]
