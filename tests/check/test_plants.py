"""A wrong rule is found wherever it is planted: `check` and `bisect` name it, the place where it fired, and the
kernel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from terrazzo.check.bisect import bisect
from terrazzo.check.inputs import random_inputs
from terrazzo.check.replay import check
from terrazzo.check.shrink import smallest
from terrazzo.front.capture import capture
from terrazzo.ir.text import parse, show
from terrazzo.options import Options
from tests.check.plants import PLANTS, Plant, odd


def prepared(plant: Plant, cache: Path) -> tuple[Any, dict[str, Any], Options]:
    """The program of a plant, its inputs, and how it is compiled."""
    torch.manual_seed(0)
    args = plant.make()
    captured = capture(plant.fn, args, {})
    inputs = {**captured.bound, **dict(zip(captured.inputs, args, strict=True))}
    return captured.program, inputs, Options(target=plant.target, cache_dir=cache)


def test_what_a_dropped_cast_costs_depends_on_no_order_of_summation() -> None:
    rows = odd(4, 901).numpy()
    exact = rows.sum(-1, dtype=np.float64)
    assert (exact == rows[:, ::-1].cumsum(-1, dtype=np.float64)[:, -1]).all()
    for lanes in (1, 4, 8, 16):  # as many partial sums as a processor may keep
        partial = np.stack([rows[:, i::lanes].cumsum(-1, dtype=np.float32)[:, -1] for i in range(lanes)], -1)
        assert (partial.cumsum(-1, dtype=np.float32)[:, -1] != exact).all()


@pytest.mark.parametrize("name", PLANTS)
def test_what_is_right_is_not_blamed(name: str, tmp_path: Path) -> None:
    program, inputs, options = prepared(PLANTS[name], tmp_path)
    report = check(program, inputs, options)
    assert report.wrong is None and sum(report.applications.values()) > 0
    assert bisect(program, inputs, options) is None


@pytest.mark.parametrize("name", PLANTS)
def test_check_names_a_planted_rule(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant = PLANTS[name]
    program, inputs, options = prepared(plant, tmp_path)
    plant.plant(monkeypatch)
    wrong = check(program, inputs, options).wrong
    assert wrong is not None
    assert (wrong.rule, wrong.application.subject) == (plant.rule, plant.subject), str(wrong)


@pytest.mark.parametrize("name", PLANTS)
def test_bisect_names_the_kernel_and_the_planted_rule(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = PLANTS[name]
    program, inputs, options = prepared(plant, tmp_path)
    plant.plant(monkeypatch)
    found = bisect(program, inputs, options)
    assert found is not None
    assert (found.kernel, found.wrong.rule, found.wrong.application.subject) == (
        plant.kernel,
        plant.rule,
        plant.subject,
    ), str(found)


@pytest.mark.parametrize("name", PLANTS)
def test_a_wrong_program_is_shrunk(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is small, can be read back, and still shows the same rule."""
    plant = PLANTS[name]
    program, inputs, options = prepared(plant, tmp_path)
    plant.plant(monkeypatch)
    wrong = check(program, inputs, options).wrong
    assert wrong is not None
    small = smallest(program, wrong, options, seconds=5.0)
    assert small is not None
    text = show(small)
    again = check(parse(text), random_inputs(small), options).wrong
    assert again is not None and again.rule == plant.rule
    assert len(text.splitlines()) <= 24, text
