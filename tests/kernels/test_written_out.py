"""Products of a few rows and columns over many steps, as sums beside each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.ir.dialects import loop as l
from terrazzo.options import Options
from terrazzo.pipelines import Lowering, lowering
from terrazzo.targets.cuda.check import check

FEW: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "rows": (lambda x, w: x @ w.T, ((2, 40000), (5, 40000))),
    "columns": (lambda x, w: x.T @ w, ((40000, 3), (40000, 2))),
    "in batches": (lambda x, w: x @ w.transpose(1, 2), ((3, 2, 20000), (3, 3, 20000))),
    "two axes of rows": (lambda x, w: torch.einsum("abk,ck->abc", x, w), ((2, 2, 60000), (3, 60000))),
    "of what is computed on its way": (lambda x, w: torch.tanh(x) @ torch.exp(w).T, ((2, 40000), (4, 40000))),
    "ten columns": (lambda x, w: x.T @ w, ((200000, 8), (200000, 10))),
    "and what follows": (lambda x, w: torch.tanh(x @ w.T) + 1, ((2, 40000), (2, 40000))),
}


def lowered(fn: Any, shapes: tuple[tuple[int, ...], ...]) -> Lowering:
    program = capture(fn, tuple(map(torch.zeros, shapes)), {}).program
    return lowering(program, Options(target="sm_90a", libraries="never"))


def sums(done: Lowering) -> list[l.Kernel]:
    return [s for s in done.at("tile").loop.steps if isinstance(s, l.Kernel) and "_sums" in s.name]


@pytest.mark.parametrize("name", FEW)
def test_few_results_of_many_steps_are_sums_beside_each_other(name: str) -> None:
    fn, shapes = FEW[name]
    done = lowered(fn, shapes)
    assert sums(done)
    check(done.at("kernel"), gpu("sm_90a"))
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    (ours,) = simulator.run(
        done.at("kernel"), dict(zip((b.name for b in done.at("tile").loop.inputs), args, strict=True)), seed=5
    )
    plain, exact = (fn(*(torch.from_numpy(x).to(t) for x in args)) for t in (torch.float32, torch.float64))
    off, usual = (np.abs(np.asarray(x, np.float64) - exact.numpy()).max() for x in (ours, plain))
    assert off <= max(2 * usual, 1e-6 * np.abs(exact.numpy()).max())


@pytest.mark.parametrize("shapes", [((2, 512), (16, 512)), ((64, 40000), (64, 40000)), ((1, 40000), (5, 40000))])
def test_others_are_not(shapes: tuple[tuple[int, ...], ...]) -> None:
    """Few steps, many results, vectors."""
    assert not sums(lowered(lambda x, w: x @ w.T, shapes))


def test_many_sums_beside_each_other_are_in_pieces() -> None:
    """What adds up the pieces of 80 sums takes an element at a time: several of each would not fit in registers."""
    fn, shapes = FEW["ten columns"]
    names = [s.name for s in lowered(fn, shapes).at("tile").loop.steps]
    assert names == ["mm_sums_part", "mm_sums", "mm"]
