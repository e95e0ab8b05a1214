"""Products whose results are reduced where they are summed: no tile of them leaves, only what each row makes of it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.hw.sass import sass
from tests.kernels.reduced import EVERY, Reduced, losses
from tests.kernels.test_arrangements import SEEDS
from tests.kernels.test_joined import lowered
from tests.kernels.test_quantised import numbers
from tests.rules.test_columns_reduced import fewest

import terrazzo
from terrazzo import pipelines
from terrazzo.front.capture import capture
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
from terrazzo.rules.loop.fusion.columns_reduced import columns_reduced
from terrazzo.targets.cuda.check import check


def derived(case: Reduced) -> tuple[tile.Program, k.Program]:
    """A text, and the kernel that is made of it."""
    found = parse(case.text)
    assert isinstance(found, tile.Program)
    kernels = lowering(found, Options(target=case.target)).at("kernel")
    check(kernels, gpu(case.target))
    return found, kernels


def log_sum_exp(results: Any) -> Any:
    """What states are one of: several pairs (maximum, sum) are the same."""
    with np.errstate(all="ignore"):
        return results[-2] + np.log(results[-1])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", EVERY)
def test_rows_of_a_tile_are_reduced(name: str, seed: int | None) -> None:
    program, kernels = derived(EVERY[name])
    given = losses(EVERY[name])
    ours, best = simulator.run(kernels, given, seed=seed), loop.run(program.loop, given)
    np.testing.assert_allclose(ours[0], best[0], atol=1e-2)  # a sum may be rounded the other way
    np.testing.assert_allclose(log_sum_exp(ours), log_sum_exp(best), atol=1e-2)
    assert np.count_nonzero(ours[0]) == len(given["y"])


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_infinite_is_as_the_monoid_has_it(value: float) -> None:
    program, kernels = derived(EVERY["warpgroups"])
    given = losses(EVERY["warpgroups"])
    given["w"][:, :] = np.abs(given["w"])
    given["x"][3, :] = value
    given["w"][256:] *= given["w"].dtype.type(-1 if value == np.inf else 1)
    with np.errstate(all="ignore"):
        mine, whole = map(log_sum_exp, (simulator.run(kernels, given), loop.run(program.loop, given)))
    np.testing.assert_array_equal(np.isfinite(mine), np.isfinite(whole))
    np.testing.assert_array_equal(mine[:, 3], whole[:, 3])


def test_the_plan_says_where_states_meet() -> None:
    for name, warps in {"in turns": 1, "warps": 2}.items():
        ((_, plan),) = lowering(parse(EVERY[name].text), Options(target=EVERY[name].target)).at("tile").plans
        assert set(plan.all(Combine)) == {Combine("acc0", 4, warps), Combine("acc1", 4, warps)}


def test_a_tile_of_sums_is_read_twice_and_each_element_raised_to_one_power() -> None:
    """The maximum of the sums is found first, and rounded once; then each is one exponential below it. The label's is
    picked where the tile has it.
    """
    _, program = derived(EVERY["in turns"])
    (kernel,) = program.steps
    assert isinstance(kernel, k.Kernel)
    role = next(s for s in k.walk(kernel.body) if isinstance(s, k.Role) and s.first == 4)
    applied = [x.fn.name for x in topological([role]) if isinstance(x, l.Apply)]
    assert applied.count("approx_exp2") == 1
    assert applied.count("bf16") == 2
    (guard,) = (s for s in k.walk(role.body) if isinstance(s, k.If) and "at(" in str(s.inside))
    assert len(guard.inside) == 2


@pytest.mark.parametrize("term", ["max(v2)", "sum(mul(acc2, acc2))"])
def test_other_reductions_go_one_by_one(term: str) -> None:
    text = EVERY["warpgroups"].text.replace("sum(where(eq(index(s * 256 + r1), v0), v2, f32(0.0)))", term)
    text = text.replace("                    acc1 <- logsumexp(v2, f32(1.0))\n", "").replace(', "top", "total"', "")
    text = re.sub(r"                (top|total)\[s, a0\].*\n", "", text).replace("acc2", "acc1")
    text = re.sub(r", (top|total)=f32\[2, 256\]", "", text).replace("(found, top, total)", "(found,)")
    program = parse(text)
    assert isinstance(program, tile.Program)
    given = losses(EVERY["warpgroups"])
    (ours,) = simulator.run(lowering(program, Options(target="sm_90a")).at("kernel"), given, seed=0)
    (best,) = loop.run(program.loop, given)
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


def shifted(x: Any, w: Any, y: Any) -> Any:
    """As language models were trained: no token has the logits of its own place."""
    return F.cross_entropy(F.linear(x, w)[:, :-1].float().reshape(-1, w.shape[0]), y[:, 1:].reshape(-1))


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
    "places shifted": (shifted, (words(2, 80, 64), words(512, 64), torch.randint(0, 512, (2, 80)))),
    "sum of exponentials": (log_sum, (words(136, 64), words(700, 64))),
    "maximum": (best, (words(136, 64), words(512, 64))),
    "sum of squares": (squares, (words(136, 64), words(512, 64))),
}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are reduced on their way wherever they can be."""
    monkeypatch.setattr(pipelines, "columns_reduced", lambda p, log, _, *given: columns_reduced(p, log, fewest, *given))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", LOSSES)
def test_it_is_as_exact_as_eager(name: str, seed: int | None) -> None:
    fn, given = LOSSES[name]
    program = lowered(fn, given).at("kernel")
    check(program, gpu("sm_90a"))
    rows, count = math.prod(given[0].shape[:-1]), given[1].shape[0]
    stored = [b for s in program.steps for b in s.writes]
    assert not [b for b in stored if math.prod(b.type.static_shape) >= rows * count / 2]
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
    schedule = str(chosen.schedules[0][1])
    assert "turns=True" in schedule and "multicast=True" in schedule
    assert "ring=5" in schedule, "no slot waits for states of rows, which leave registers: 27 ms for 11.6 with one slot"
    assert math.prod(first.writes[0].type.static_shape) * 192 == 8192 * 128256
    kept = lowered(entropy, given, materialize=("mm",)).at("loop")
    assert any(b.name == "mm" for s in kept.steps for b in s.writes)
    few = tuple(x[:1] if x.shape[0] == 8192 else x for x in given)
    assert not [s for s in lowered(entropy, few).at("loop").steps if reduced_product(s)]


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_without_tiles_results_are_stored(target: str) -> None:
    """Threads that each reduce a row of sums would take long, whatever few operations they have."""
    given = torch.randn(128, 64), torch.randn(64, 64), labels(128, 64)
    program = lowering(capture(entropy, given, {}).program, Options(target=target, libraries="never"))
    assert not [s for s in program.at("loop").steps if reduced_product(s)]


def test_rows_may_be_the_same_for_all_of_a_batch() -> None:
    """The axis of the batch, which rows do not have, is none that pieces of columns are counted by."""

    def scores(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return torch.einsum("mk,bnk->bmn", q, keys).float().logsumexp(-1)

    given = torch.randn(512, 64).bfloat16(), torch.randn(4, 4096, 64).bfloat16()
    program = lowering(capture(scores, given, {}).program, Options(target="sm_90a", libraries="never"))
    assert [s for s in program.at("loop").steps if reduced_product(s)]


def test_a_tile_of_sums_fits_into_registers(tmp_path: Path) -> None:
    """Beside 192 sums of a thread; of each it takes one exponential, in one text for both warpgroups or in two."""
    given = torch.empty(8192, 4096).bfloat16(), torch.empty(128256, 4096).bfloat16(), labels(8192, 128256)
    kernel, *_ = lowered(entropy, given).at("kernel").steps
    found = "\n".join(sass(kernel, "sm_90a", tmp_path))
    assert "HGMMA.64x192x16" in found and "STL" not in found
    assert found.count("MUFU.EX2") in (192, 384)


@pytest.mark.gpu
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", LOSSES)
def test_a_gpu_is_as_exact_as_eager(name: str) -> None:
    fn, given = LOSSES[name]
    there = tuple(x.cuda() for x in given)
    ours = terrazzo.compile(fn, *there, options=Options(libraries="never"))(*there).double().cpu().numpy()
    exact = fn(*(x.double() if x.is_floating_point() else x for x in given)).numpy()
    off, usual = (np.linalg.norm(z - exact) for z in (ours, fn(*there).double().cpu().numpy()))
    assert off <= 2 * usual + 1e-6 * np.linalg.norm(exact)
