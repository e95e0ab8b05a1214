"""Phases of a convolution with a stride that goes backwards: each visits the taps that it sees, and no others."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels import programs

from terrazzo.interp.costs import Costs
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.plan import Order, Plan, Reach
from terrazzo.rules.loop.layout import phases
from terrazzo.rules.loop.layout.lookups import stored_first
from terrazzo.rules.loop_to_tile.products import image_forms, product_candidates

Options = dict[str, Any]
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Options, float]] = {
    "3 x 3, every 2": ((4, 64, 8, 8), (64, 32, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}, 9 / 4),
    "an odd number of points": ((4, 64, 5, 5), (64, 32, 3, 3), {"stride": 2, "padding": 1}, 9 / 4),
    "5 x 5, every 3": ((4, 64, 4, 4), (64, 32, 5, 5), {"stride": 3, "padding": 2, "output_padding": 1}, 25 / 9),
    "7 x 3, every 4 and 2": (
        (2, 64, 8, 8), (64, 32, 7, 3), {"stride": (4, 2), "padding": (3, 1), "output_padding": 1}, 21 / 8,
    ),
    "two of three dimensions": (
        (2, 64, 4, 4, 4), (64, 32, 3, 2, 3), {"stride": 2, "padding": (1, 0, 1), "output_padding": (1, 0, 1)}, 9 / 4,
    ),
    "some have none": ((4, 64, 8, 8), (64, 32, 3, 3), {"stride": 2, "padding": 2, "dilation": 2}, 9 / 4),
}  # fmt: skip
"""An image, filters, how they are multiplied, and how many taps a phase sees in the mean."""


def always(program: Any, log: Any, told: Any, find: Any, prices: Any, sure: float = 1.0) -> Any:
    """Few pixels would be multiplied otherwise."""
    return stored_first(program, log, told, find, lambda s, found: (1.0, 0.0))


def backwards(name: str, dtype: torch.dtype) -> programs.Lowered:
    """A transposed convolution on its way down, of an image with channels last that holds an infinity."""
    torch.manual_seed(0)
    shape, taps, options, _ = CASES[name]
    last = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]
    fn = {4: F.conv_transpose2d, 5: F.conv_transpose3d}[len(shape)]
    x, w = torch.randn(shape).to(dtype).to(memory_format=last), torch.randn(taps).to(dtype)
    x[0, 3, 1, 1] = torch.inf
    return programs.lowered(lambda x, w: fn(x, w, **options), (x, w), "sm_90a")


KINDS = [*((name, torch.bfloat16) for name in CASES), *((name, torch.float32) for name in [*CASES][:2])]


@pytest.mark.parametrize(("name", "dtype"), KINDS, ids=str)
def test_a_phase_visits_the_taps_that_it_sees(monkeypatch: Any, name: str, dtype: torch.dtype) -> None:
    """And is multiplied by no others: what is infinite is in eager mode's places alone."""
    monkeypatch.setattr(phases, "stored_first", always)
    found, costs = backwards(name, dtype), Costs()
    ours = found.simulated(costs=costs)[0].astype(np.float64)
    (plan,) = [p for _, p in found.lowering.at("tile").plans if isinstance(p, Plan) and p.all(Reach)]
    tiles = math.prod(w.args[0] for w in plan.one(Order).tiles)
    assert {lanes for s, (_, lanes) in costs.issues.items() if isinstance(s, k.TensorLoad)} == {tiles * CASES[name][3]}
    exact, eager = found.fn(*(x.double() for x in found.args)).numpy(), found.fn(*found.args).double().numpy()
    seen = np.isfinite(exact)
    assert not seen.all() and (np.isfinite(ours) == seen).all()
    off, off_eager = (math.sqrt(np.square(x[seen] - exact[seen]).mean()) for x in (ours, eager))
    assert off <= 2 * off_eager


def test_blocks_that_share_taps_may_have_none(monkeypatch: Any) -> None:
    """Eight phases see 1 to 8 of 3 x 3 x 3 taps, which eight blocks share, one each: 27 of 64 have one."""

    def in_pieces(*args: Any) -> Any:
        return [way for way in image_forms.boxed(*args) if way[1].rest]

    monkeypatch.setattr(phases, "stored_first", always)
    monkeypatch.setattr(product_candidates, "boxed", in_pieces)
    torch.manual_seed(0)
    x, w = torch.randn(1, 64, 4, 4, 4).bfloat16(), torch.randn(64, 32, 3, 3, 3).bfloat16()
    x = x.to(memory_format=torch.channels_last_3d)
    options = {"stride": 2, "padding": 1, "output_padding": 1}
    found, costs = programs.lowered(lambda x, w: F.conv_transpose3d(x, w, **options), (x, w), "sm_90a"), Costs()
    ours = found.simulated(costs=costs)[0].astype(np.float64)
    assert {lanes for s, (_, lanes) in costs.issues.items() if isinstance(s, k.TensorLoad)} == {27}
    exact, eager = found.fn(*(x.double() for x in found.args)).numpy(), found.fn(*found.args).double().numpy()
    off, off_eager = (math.sqrt(np.square(y - exact).mean()) for y in (ours, eager))
    assert off <= 2 * off_eager
