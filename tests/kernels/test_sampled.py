"""Images sampled at places that data says, in the steps of sums over their channels."""

from __future__ import annotations

import numpy as np
import torch
from tests.kernels.programs import lowered

from terrazzo.bench.programs import programs


def test_corners_of_a_cell_are_written_out_in_the_steps_of_channels() -> None:
    """Where they lie and what they weigh is found once for all channels. Lanes have neighbouring points, which cells
    have in common.
    """
    torch.manual_seed(0)
    module, inputs = programs()["plenoxels"].made("f32", "cpu", small=True)
    with torch.no_grad():
        found = lowered(module, inputs, "sm_90a")
        (schedule,) = [str(s) for _, s in found.lowering.at("tile").schedules if s.kernel == "view_4"]
        assert "r1 = reg(8)" in schedule
        ours, eager, exact = found.simulated()[0], module(*inputs), module.double()(*(x.double() for x in inputs))
    one, other = (np.abs(np.asarray(y, np.float64) - exact.numpy()).max() for y in (ours, eager))
    assert one <= 2 * other + 1e-6
