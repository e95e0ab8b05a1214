"""How far the model's choices are from the fastest schedules that were measured."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from terrazzo.bench.choice import choices
from terrazzo.bench.gpu_report import SHAPES, shape_rows
from terrazzo.front.capture import capture
from terrazzo.hw.gpu import gpu
from terrazzo.ir.sites import product
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile.products import warpgroups
from terrazzo.rules.loop_to_tile.products.warpgroup_tiles import GROUPS

FITS = Path(__file__).parents[2] / "benchmarks" / "fits"
RECORD = FITS / "h200-tiles.json"


def test_the_model_chooses_nearly_the_fastest(tmp_path: Path) -> None:
    """Every sixth product, so that who changes the model or its constants is told what that loses."""
    cases = json.loads(RECORD.read_text())["cases"]
    some = sorted({(c["m"], c["k"], c["n"]) for c in cases})[::6]
    few = tmp_path / "some.json"
    few.write_text(json.dumps({"cases": [c for c in cases if (c["m"], c["k"], c["n"]) in some]}))
    found = choices(few, gpu("sm_90a"))
    assert [c.shape for c in found] and len(found) == len(some)
    assert math.exp(sum(math.log(c.lost) for c in found) / len(found)) <= 1.04
    assert max(c.lost for c in found) <= 1.2


def test_the_model_chooses_nearly_the_fastest_of_small_products(tmp_path: Path) -> None:
    """Of which subtiles of few columns take long to leave, as far as they are walked now as they were."""
    cases = json.loads((FITS / "h100-small.json").read_text())["cases"]
    few = tmp_path / "walked.json"
    few.write_text(json.dumps({"cases": [c for c in cases if walked(c) == walked(c, (8, 4, 2, 1))]}))
    found = choices(few, gpu("sm_90a"))
    assert len(found) == 11 and max(c.lost for c in found) <= 1.08
    assert math.exp(sum(math.log(c.lost) for c in found) / len(found)) <= 1.02


def test_the_model_chooses_nearly_the_fastest_where_tiles_hardly_fill_the_machine(tmp_path: Path) -> None:
    """Of those that end beyond what they cover, or whose rows begin anywhere, as they are walked now."""
    cases = json.loads((FITS / "h200-order.json").read_text())["cases"]
    few = tmp_path / "walked.json"
    few.write_text(json.dumps({"cases": [c for c in cases if "slots" not in c and walked(c) == c["together"]]}))
    found = choices(few, gpu("sm_90a"))
    assert len(found) == 11 and max(c.lost for c in found) <= 1.08
    assert math.exp(sum(math.log(c.lost) for c in found) / len(found)) <= 1.02


def walked(case: dict[str, Any], groups: Sequence[int] = GROUPS) -> int:
    """How many rows of tiles are walked together."""
    size = case["tile"][1 if case["turned"] else 0]
    pairs = case["cluster"] == ("columns" if case["turned"] else "rows")
    rows = -(-case["m"] // (2 * size if pairs else size))
    return next(g for g in groups if rows % g == 0)


def test_shapes_are_a_row_for_each_group() -> None:
    """By hand: 3 / 2 and 2 / 4 of the better peer have a geometric mean of 0.87."""
    cases = [
        {"group": group, "us": us}
        for group in SHAPES
        for us in ({"terrazzo": 2.0, "eager": 9.0, "cudnn": 3.0}, {"terrazzo": 4.0, "eager": 2.0})
    ]
    _, *rows = shape_rows({"cases": cases})
    assert len(rows) == len(SHAPES) and {row[1:] for row in rows} == {("2", "**0.87x**", "0.50x", "1.50x")}


def test_the_model_chooses_nearly_the_fastest_of_rows_that_fill_no_tiles() -> None:
    """1025 rows of a linear layer, 1288 and 2309 of gated ones; those in one piece of k."""
    cases = json.loads((FITS / "h200-rows.json").read_text())["cases"]
    lost = []
    for m, k, n in sorted({(c["m"], c["k"], c["n"]) for c in cases}):
        mine = [c for c in cases if (c["m"], c["k"], c["n"]) == (m, k, n)]
        fn = F.linear if mine[0]["kind"] == "linear" else lambda x, w, v: F.silu(F.linear(x, w)) * F.linear(x, v)
        (p,) = (product(s) for s in on_meta(fn, (m, k), *[(n, k)] * (1 if fn is F.linear else 2)))
        assert p is not None
        times = {str(x).split(": ")[0]: x.time for x in warpgroups.plans(p, gpu("sm_90a")) if x.pieces == 1}
        known = [(times[c["what"]], c["us"]) for c in mine if c["what"] in times]
        assert len(known) >= 11
        lost.append(min(known)[1] / min(us for _, us in known))
    assert max(lost) <= 1.2 and math.exp(sum(map(math.log, lost)) / len(lost)) <= 1.12


def on_meta(fn: Any, *shapes: tuple[int, int]) -> tuple[Any, ...]:
    """The kernels of a function of matrices in bf16, before they have schedules."""
    given = tuple(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes)
    done = lowering(capture(fn, given, {}).program, Options(target="sm_90a", libraries="never"))
    return tuple([program for stage, program, _ in done.stages if stage.dst == "loop"][-1].steps)
