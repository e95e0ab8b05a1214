"""Products that are only reduced along their columns are not stored."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tests.harness import random_inputs
from tests.rules.test_catalog import example

from terrazzo.interp.loop import run
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.sites import reduced_product
from terrazzo.ir.text import parse, show
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.attention import frames
from terrazzo.rules.loop.fusion import columns_reduced as rules


def fewest(steps: Sequence[l.Kernel]) -> float:
    """A price by which results that are reduced on their way cost nothing."""
    return float(sum(reduced_product(s) is None for s in steps))


def reduced(program: l.Program, **given: Any) -> l.Program:
    return rules.columns_reduced(program, Log(), fewest, lambda _: "", **given)


def framed(program: l.Program) -> l.Program:
    steps = tuple(frames.in_frames(s) if isinstance(s, l.Kernel) else s for s in program.steps)
    return l.Program(program.name, program.inputs, steps, program.results)


@pytest.mark.parametrize(("rule", "apply"), [(rules.columns_reduced, reduced), (frames.in_frames, framed)])
def test_the_example_is_what_it_says(rule: Callable[..., Any], apply: Callable[[Any], l.Program]) -> None:
    before, after = example(inspect.getdoc(rule) or "", rule.__name__)
    program: Any = parse(before)
    made = apply(program)
    assert show(made) == after
    for seed in range(4):
        inputs = random_inputs(program.inputs, seed)
        for ours, theirs in zip(run(made, inputs), run(program, inputs), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


BEFORE, _ = example(inspect.getdoc(rules.columns_reduced) or "", "columns_reduced")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return (z,)", "return (z, mm)"),
        ("at(y[a0], 6)", "5 - at(y[a0], 6)"),
        ("f32(mm[a0, at(y[a0], 6)])", "f32(mm[a0, 3])"),
        ("max(f32(mm[a0, r0]))", "max(f32(mm[a0, 0]))"),
    ],
)
def test_what_wants_results_in_memory_has_them_there(old: str, new: str) -> None:
    program: Any = parse(BEFORE.replace(old, new))
    assert reduced(program) is program


def test_a_user_may_want_them_there() -> None:
    program: Any = parse(BEFORE)
    assert reduced(program, materialize=("mm",)) is program
    assert len(reduced(program).steps) == 1


def test_what_is_dearer_by_the_model_is_left() -> None:
    program: Any = parse(BEFORE)
    for refusal, why in ("", "us stored, by the model"), ("no tile", "no tile"):
        log = Log()
        assert rules.columns_reduced(program, log, lambda _: 1.0, lambda _, refusal=refusal: refusal) is program  # type: ignore[misc]
        (event,) = log.events
        assert not event.fired and why in event.reason


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_infinite_rows_are_as_they_were(value: float) -> None:
    program: Any = parse(BEFORE)
    inputs = random_inputs(program.inputs)
    inputs["w"] = np.abs(inputs["w"])
    inputs["x"] = np.abs(inputs["x"])
    inputs["x"][1, :] = value
    with np.errstate(all="ignore"):
        ((ours,), (theirs,)) = run(reduced(program), inputs), run(program, inputs)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert np.isnan(ours[1])
