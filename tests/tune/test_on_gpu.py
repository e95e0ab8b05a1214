"""Candidates measured on a GPU, by the process that does so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from terrazzo.front.capture import capture
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile.estimate import estimate
from terrazzo.run.compiled import resolved
from terrazzo.targets import target
from terrazzo.tune.search import sources, tune

pytestmark = pytest.mark.gpu


def test_a_product_of_parts_is_measured_as_it_runs(tmp_path: Path) -> None:
    """Of random scales it would go the slow way, which is made for infinities, and take ten times as long."""
    program = capture(torch.nn.functional.linear, (torch.zeros(512, 2048), torch.zeros(256, 2048)), {}).program
    options = resolved(Options(fp32="split", libraries="never", tune=20, cache_dir=tmp_path), "cuda:0")
    found = tune(program, options, "cuda:0")
    (product,) = [x for x in found if x.kernel in sources(lowering(program, options))]
    gpu = target(options.target).gpu
    assert gpu is not None and product.first * 1e3 < 3.0 * estimate(product.kernel, gpu).time
    assert all(0.0 < x.best <= x.first for x in found)
    again = tune(program, options, "cuda:0")
    assert [x.timings for x in again] == [x.timings for x in found]
