"""One product in every arrangement a schedule can ask for, and the schedules of ADR 004: derived, checked, simulated by
a fair and by adverse schedulers, and compared with float64.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kernels.arrangements import EVERY, F90, M90, Product

from terrazzo.errors import Limitation
from terrazzo.hw.gpu import gpu
from terrazzo.interp import kernel as simulator
from terrazzo.interp import loop
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import tile
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.targets.cuda.check import check

ADR = {path.stem: path for path in sorted((Path(__file__).parent / "adr_004").glob("*.tile"))}
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}
SEEDS = (None, *range(int(os.environ.get("SIMULATED_SEEDS", "2"))))
"""The orders every kernel runs in: the fair one, and so many adverse ones."""


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


@pytest.mark.parametrize(
    ("product", "reason"),
    [
        (Product(cluster="m"), "w: who multicasts must know that slots of other blocks are free"),
        (Product(**M90 | {"cluster": "m", "roles": True}), "w: who multicasts must know that slots of other blocks are free"),
        (Product(**F90 | {"cluster": "m", "roles": True}), "w: who multicasts must know that slots of other blocks are free"),
        (Product(ring=1), "TMA fills a ring of two slots at least where all warps do everything"),
    ],
)  # fmt: skip
def test_what_would_race_or_wait_for_ever_is_refused(product: Product, reason: str) -> None:
    with pytest.raises(Limitation, match=re.escape(reason)):
        derived(product.text)
