"""Transposed convolutions phase by phase: what they compute, and where they are left as they are."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered
from tests.rules.test_catalog import example

from terrazzo import pipelines
from terrazzo.front.capture import capture
from terrazzo.hw.gpu import GPUS
from terrazzo.interp import loop as interpreter
from terrazzo.interp.torch import call_numpy
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import substitute
from terrazzo.ir.regions import regions
from terrazzo.ir.text import parse
from terrazzo.ir.types import Type, ordered_strides
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.layout import convolutions, few_results, phases
from terrazzo.rules.loop.layout.lookups import stored_first
from terrazzo.rules.loop.layout.phases import phases_apart
from terrazzo.rules.loop_to_tile.estimate import expected

BEFORE = example(inspect.getdoc(phases_apart) or "", "phases_apart")[0]
CASES = {
    "as many taps as points apart": (F.conv_transpose2d, (2, 16, 5, 4), (16, 12, 2, 2), {"stride": 2}),
    "twice as many": (F.conv_transpose2d, (2, 16, 5, 4), (16, 12, 4, 4), {"stride": 2, "padding": 1}),
    "an odd number": (
        F.conv_transpose2d, (2, 16, 5, 4), (16, 12, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1},
    ),
    "fewer": (F.conv_transpose1d, (2, 16, 5), (16, 12, 2), {"stride": 3, "output_padding": 1}),
    "in one dimension": (F.conv_transpose1d, (2, 16, 9), (16, 12, 16), {"stride": 8, "padding": 4}),
    "in three": (F.conv_transpose3d, (1, 8, 3, 2, 2), (8, 9, 2, 2, 2), {"stride": 2}),
    "in one of two": (F.conv_transpose2d, (2, 16, 5, 4), (16, 12, 3, 4), {"stride": (1, 2), "padding": 1}),
    "a padding as wide as the stride": (
        F.conv_transpose2d, (2, 16, 5, 4), (16, 12, 5, 5), {"stride": 2, "padding": 2, "output_padding": 1},
    ),
    "dilated taps": (
        F.conv_transpose1d, (2, 16, 5), (16, 12, 5), {"stride": 3, "padding": 4, "output_padding": 2, "dilation": 2},
    ),
    "dilated by more than the stride": (
        F.conv_transpose2d, (2, 16, 5, 4), (16, 12, 3, 2), {"stride": (2, 3), "padding": (1, 0), "dilation": (3, 5),
                                                           "output_padding": (1, 0)},
    ),
}  # fmt: skip


def fewest(steps: Any) -> float:
    """Prices by which what is stored first is cheaper."""
    return float(1 - len(steps))


@pytest.mark.parametrize("name", CASES)
def test_it_computes_the_same(name: str) -> None:
    """With infinities where steps that a phase has not would meet them."""
    fn, image, filters, options = CASES[name]
    torch.manual_seed(0)
    x, w = torch.randn(image), torch.randn(filters)
    x.view(-1)[7] = torch.inf
    found = lowered(lambda x, w: fn(x, w, **options), (x, w), "sm_80").lowering
    (before,) = [p for stage, p, _ in found.stages if stage.name == "order"]
    after = phases_apart(before, Log(), fewest)
    assert len(after.steps) == 2 and sum(isinstance(x, l.Reduce) for x in after.steps[1].terms) == 1
    assert work(after) < work(before)
    inputs = {b.name: v.numpy() for b, v in zip(before.inputs, (x, w), strict=True)}
    for one, other in zip(interpreter.run(before, inputs), interpreter.run(after, inputs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


UNEVEN = {
    "dilated as the stride": (
        F.conv_transpose2d,
        (2, 16, 5, 4),
        (16, 12, 3, 3),
        {"stride": 2, "padding": 1, "dilation": 2},
    ),
    "dilated by half the stride": (F.conv_transpose1d, (2, 16, 5), (16, 12, 5), {"stride": 4, "dilation": 2}),
    "one point less": (F.conv_transpose2d, (2, 16, 5, 4), (16, 12, 3, 3), {"stride": 2, "padding": 1}),
    "in one dimension alone": (F.conv_transpose2d, (2, 16, 5, 4), (16, 12, 3, 4), {"stride": (2, 2), "padding": 1}),
    "two points less": (F.conv_transpose1d, (2, 16, 5), (16, 12, 4), {"stride": 3}),
    "dilated taps, fewer than phases": (
        F.conv_transpose2d,
        (2, 16, 5, 4),
        (16, 12, 3, 3),
        {"stride": 5, "padding": 1, "dilation": 2},
    ),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_phases_of_unequal_length_go_on_beyond_the_last_point(name: str) -> None:
    """What is added to the results is read at their points alone."""
    fn, image, filters, options = UNEVEN[name]
    torch.manual_seed(0)
    x, w = torch.randn(image), torch.randn(filters)
    x.view(-1)[7] = torch.inf
    more = torch.randn(fn(x, w, **options).shape)
    found = lowered(lambda x, w, y: torch.relu(fn(x, w, **options) + y), (x, w, more), "sm_80").lowering
    (before,) = [p for stage, p, _ in found.stages if stage.name == "order"]
    after = phases_apart(before, Log(), lambda steps: 1.0 if len(steps) == 3 else 2.0)
    assert [len([x for x in s.terms if isinstance(x, l.Reduce)]) for s in after.steps] == [0, 1, 0]
    inputs = {b.name: v.numpy() for b, v in zip(before.inputs, (x, w, more), strict=True)}
    for one, other in zip(interpreter.run(before, inputs), interpreter.run(after, inputs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", UNEVEN)
def test_the_last_points_may_be_pieces_of_their_own(name: str) -> None:
    """What all phases have is a region of the result, and so is what is left of each dimension; nothing is copied."""
    fn, image, filters, options = UNEVEN[name]
    torch.manual_seed(0)
    x, w = torch.randn(image), torch.randn(filters)
    x[0, 3, 1] = torch.inf
    found = lowered(lambda x, w: fn(x, w, **options), (x, w), "sm_80").lowering
    (before,) = [channels_last(p) for stage, p, _ in found.stages if stage.name == "order"]
    after = phases_apart(before, Log(), fewest)
    named = regions(after.steps, after.results)
    uneven = sum(
        n % s != 0 for n, s in zip(fn(x, w, **options).shape[2:], strides(options, len(image) - 2), strict=True)
    )
    pieces = [s for s in after.steps[1:] if isinstance(s, l.Kernel)]
    assert len(pieces) == 2**uneven and len(named.of) == 2 ** (uneven + 1) - 2
    inputs = {b.name: v.numpy() for b, v in zip(before.inputs, (x, w), strict=True)}
    for one, other in zip(
        interpreter.run(before, inputs), interpreter.run(after, inputs, call=call_numpy), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def channels_last(program: Any) -> l.Program:
    """The same, of which the result lies otherwise."""
    (old,) = program.results
    order = (0, *range(2, old.type.rank), 1)
    new = l.Buffer(old.name, Type(old.type.dtype, old.type.shape, ordered_strides(old.type.static_shape, order)))
    steps = tuple(substitute(s, {old: new}) for s in program.steps)
    return l.Program(program.name, program.inputs, steps, (new,))


def strides(options: dict[str, Any], dimensions: int) -> tuple[int, ...]:
    """That of each dimension."""
    given = options["stride"]
    return given if isinstance(given, tuple) else (given,) * dimensions


def work(program: Any) -> int:
    """Products that the last kernel adds up for all of its points."""
    (reduce,) = (x for x in program.steps[-1].terms if isinstance(x, l.Reduce))
    return int(np.prod([a.extent for a in (*program.steps[-1].axes, *reduce.axes)]))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("-r1 + a1 + 1", "-r1 + a1 * 3 + 1"),
        ("-r1 + a1 + 1", "r1 + a1 + 1"),
    ],
)
def test_others_stay_as_they_are(old: str, new: str) -> None:
    program: Any = parse(BEFORE.replace(old, new))
    assert phases_apart(program, Log(), fewest).steps == program.steps


KINDS = pytest.mark.parametrize(("taps", "padding", "more"), [(4, 1, 0), (3, 1, 1), (2, 0, 0)])


def transposed(padding: int, more: int) -> Any:
    """With a stride of 2 and a bias."""
    return lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=padding, output_padding=more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@KINDS
def test_it_is_chosen(dtype: torch.dtype, taps: int, padding: int, more: int) -> None:
    """In the place of patches of which most would be 0: 8 x 256 x 32 x 32 with 2 x 2 taps took 358 us so, and eager 46
    (H100).
    """
    args = [torch.empty(s, dtype=dtype, device="meta") for s in ((32, 128, 16, 16), (128, 64, taps, taps), (64,))]
    captured = capture(transposed(padding, more), tuple(args), {})
    found = lowering(captured.program, Options(target="sm_90a", libraries="never"))
    assert any(isinstance(s, k.MultiplyAsync) for step in found.at("kernel").steps for s in k.walk(step.body))
    assert max(int(np.prod(b.type.static_shape)) for s in found.loop.steps for b in s.writes) == 32 * 64 * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@KINDS
def test_it_is_right(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, taps: int, padding: int, more: int) -> None:
    """Where few pixels would be multiplied otherwise, too."""

    def always(program: Any, log: Log, told: Any, find: Any, prices: Any, sure: float = 1.0) -> Any:
        return stored_first(program, log, told, find, lambda s, found: (1.0, 0.0))

    monkeypatch.setattr(phases, "stored_first", always)
    torch.manual_seed(0)
    args = [torch.randn(s).to(dtype) for s in ((2, 64, 8, 8), (64, 32, taps, taps), (32,))]
    found = lowered(transposed(padding, more), tuple(args), "sm_90a")
    exact, (ours,) = found.fn(*(x.double() for x in args)).numpy(), found.simulated()
    limit = 2e-7 if dtype == torch.float32 else 2.0**-8
    assert np.sqrt(((ours.astype(np.float64) - exact) ** 2).mean() / (exact**2).mean()) <= limit


FEW = {
    "two dimensions": (F.conv_transpose2d, (2, 21, 9, 10), (21, 5, 8, 8), {"stride": 4, "padding": 2}),
    "one of two": (F.conv_transpose2d, (2, 16, 9, 10), (16, 3, 3, 4), {"stride": (1, 2), "padding": 1}),
    "of which some have a point less": (F.conv_transpose1d, (4, 24, 33), (24, 6, 6), {"stride": 3, "padding": 4}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FEW)
def test_they_are_columns_beside_few_results(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    """With infinities, and what follows the sums, which reads what lies at their points."""

    def always(program: Any, log: Log, told: Any, find: Any, prices: Any, sure: float = 1.0) -> Any:
        return stored_first(program, log, told, find, lambda s, found: (1.0, 0.0))

    monkeypatch.setattr(few_results, "stored_first", always)
    monkeypatch.setattr(convolutions, "taps_after", lambda program, *others: program)
    fn, image, filters, options = FEW[name]
    torch.manual_seed(0)
    x, w = torch.randn(image).to(dtype), torch.randn(filters).to(dtype)
    x.view(-1)[77] = torch.inf
    more = torch.randn(fn(x, w, **options).shape).to(dtype)
    found = lowered(lambda x, w, y: torch.relu(fn(x, w, **options) + y), (x, w, more), "sm_90a")
    assert any(e.rule == "phases_beside" and e.fired for e in found.lowering.log.events)
    exact = found.fn(*(y.double() for y in (x, w, more))).numpy()
    ours, seen = found.simulated()[0].astype(np.float64), np.isfinite(exact)
    assert (np.isposinf(ours) == np.isposinf(exact)).all() and not np.isnan(ours).any()
    limit = 2e-7 if dtype == torch.float32 else 2.0**-8
    assert np.sqrt(((ours[seen] - exact[seen]) ** 2).mean() / (exact[seen] ** 2).mean()) <= limit


def test_they_are_columns_where_that_is_faster() -> None:
    """21 classes for every point, of which 64 phases took 21 of 32 columns each: 141 us by the model."""
    args = [torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((4, 21, 64, 64), (21, 21, 16, 16))]
    captured = capture(lambda x, w: F.conv_transpose2d(x, w, stride=8, padding=4), tuple(args), {})
    found = lowering(captured.program, Options(target="sm_90a", libraries="never"))
    assert any(e.rule == "phases_beside" and e.fired for e in found.log.events)
    assert expected(found.loop.steps, GPUS["sm_90a"]) < 60_000


READ = {
    "the largest channel": lambda y: y.amax(1),
    "the largest of a window": lambda y: F.max_pool2d(y, 2),
    "the mean of rows": lambda y: y.mean(-1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", READ)
def test_it_is_stored_where_it_is_reduced(dtype: torch.dtype, name: str) -> None:
    """It was computed by threads for each reduction: 27 ms by the model where 1 ms is enough."""
    args = [torch.empty(s, dtype=dtype, device="meta") for s in ((32, 128, 16, 16), (128, 64, 4, 4), (64,))]
    read, of = READ[name], transposed(1, 0)
    captured = capture(lambda x, w, b: read(of(x, w, b)), tuple(args), {})
    found = lowering(captured.program, Options(target="sm_90a", libraries="never"))
    kernels = [s for s in found.at("kernel").steps if isinstance(s, k.Kernel)]
    assert any(isinstance(s, k.MultiplyAsync) for x in kernels for s in k.walk(x.body))


def test_filters_of_few_channels_come_by_tma(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taps and phases are one dimension of a filter, which no box walks: with one for each there would be eight."""

    def always(program: Any, log: Log, told: Any, find: Any, prices: Any, sure: float = 1.0) -> Any:
        return stored_first(program, log, told, find, lambda s, found: (1.0, 0.0))

    monkeypatch.setattr(phases, "stored_first", always)
    torch.manual_seed(0)
    args = [torch.randn(s).bfloat16() for s in ((4, 8, 8, 8, 8), (8, 24, 3, 3, 3))]
    found = lowered(lambda x, w: F.conv_transpose3d(x, w, stride=2, output_padding=1), tuple(args), "sm_90a")
    last = found.lowering.at("kernel").steps[-1]
    assert any(isinstance(s, k.MultiplyAsync) for s in k.walk(last.body))
    exact, (ours,) = found.fn(*(x.double() for x in args)).numpy(), found.simulated()
    assert np.sqrt(((ours.astype(np.float64) - exact) ** 2).mean() / (exact**2).mean()) <= 2.0**-8


def test_boxes_lie_along_rows_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where these leave from registers: along a batch, each element is in a sector of its own, and 128 x 64 x 258 x 258
    with the means of its rows took 11 ms on an H200, where eager takes 4.
    """
    monkeypatch.setattr(pipelines, "turned_after", lambda program, *others: program)
    args = [torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((128, 16, 128, 128), (16, 64, 3, 3))]
    program = capture(lambda x, w: F.conv_transpose2d(x, w, stride=2, output_padding=1), tuple(args), {}).program
    found = lowering(program, Options(target="sm_90a", libraries="never"))
    (said,) = {e.reason for e in found.log.events if e.rule == "boxes" and e.fired}
    *_, last = re.findall(r"\d+", said.partition(" by ")[0])
    assert int(last) >= 8, said


def test_one_step_of_one_channel_is_no_sum() -> None:
    """Phases would have nothing to sum up."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 1, 2, 3), torch.randn(1, 2, 3, 3)
    found = lowered(lambda x, w: F.conv_transpose2d(x, w, stride=(5, 4), dilation=(2, 3)), (x, w), "sm_90a")
    exact = found.fn(x.double(), w.double())
    np.testing.assert_allclose(found.simulated()[0], exact, atol=1e-5)
