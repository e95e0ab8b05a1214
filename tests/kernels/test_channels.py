"""Short reductions across memory, over the channels of images: one kernel, whose threads read every element once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered

from terrazzo.front.capture import capture
from terrazzo.ir.dialects import kernel as k
from terrazzo.options import Options
from terrazzo.pipelines import lowering


def layer_norm(x: Any) -> Any:
    return F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2]).permute(0, 3, 1, 2)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize(
    ("fn", "channels", "dtype", "warps"),
    [
        (lambda x: torch.softmax(x, 1), 11, torch.bfloat16, 1),
        (lambda x: torch.log_softmax(x, 1), 9, torch.float32, 1),
        (lambda x: F.normalize(x, dim=1), 40, torch.bfloat16, 2),
        (lambda x: x.var(1), 6, torch.float32, 1),
        (layer_norm, 40, torch.float32, 1),
        (layer_norm, 70, torch.float32, 2),
    ],
)
def test_channels_stay_in_registers(fn: Any, channels: int, dtype: torch.dtype, warps: int) -> None:
    """Also where warps share them, and where they are no multiple of these."""
    x = random(2, channels, 129, 72, dtype=dtype)
    found = lowered(fn, (x,), "sm_90a")
    ((_, schedule),) = found.lowering.at("tile").schedules
    assert dict(schedule.operands).keys() >= {"x"}
    (first, *_) = schedule.sites
    assert [f.size for _, b in first.axes for f in b if f.level == "warp"] == [warps] * (warps > 1)
    (ours,) = found.simulated()
    exact = fn(x.double()).numpy()
    tight = dtype is torch.float32
    np.testing.assert_allclose(
        np.asarray(ours, np.float64), exact, rtol=1e-4 if tight else 1e-2, atol=1e-4 if tight else 1e-2
    )


def test_what_follows_a_reduction_is_computed_in_its_kernel_where_rows_are_short_and_many() -> None:
    """Rows that no registers hold stay in kernels of their own."""

    def kernels(fn: Any, *shape: int) -> int:
        given = (torch.empty(shape, device="meta"),)
        done = lowering(capture(fn, given, {}).program, Options(target="sm_90a", libraries="never"))
        return len(done.at("kernel").steps)

    softmax = lambda x: torch.softmax(x, 1)  # noqa: E731
    assert kernels(softmax, 16, 21, 512, 512) == kernels(layer_norm, 32, 96, 56, 56) == 1
    assert kernels(softmax, 16, 2048, 64, 64) > 1


def test_rows_that_data_picks_stay_in_registers_beside_their_numbers() -> None:
    """Columns side by side have one number: it is kept once for both, not once for each."""
    torch.manual_seed(1)
    table, rows = random(30000, 16, dtype=torch.bfloat16), torch.randint(0, 30000, (1200, 39))
    found = lowered(lambda rows, table: table[rows].var(1), (rows, table), "sm_90a")
    ((_, schedule),) = found.lowering.at("tile").schedules
    assert dict(schedule.operands).keys() == {"rows", "table"}
    (kernel,) = found.kernels
    kept = [s.place for s in k.walk(kernel.body) if isinstance(s, k.Declare)]
    sizes = {b.name.rsplit("_", 1)[0]: b.type.shape for b in kept}
    assert len(sizes["table"]) == 2
    assert sizes["rows"] == sizes["table"][:1]
    (ours,) = found.simulated()
    exact = table.double()[rows].var(1).numpy()
    np.testing.assert_allclose(np.asarray(ours, np.float64), exact, rtol=1e-2, atol=1e-2)


def test_what_one_loop_reads_for_several_sums_is_not_kept() -> None:
    """Nothing is read again of the vectors of a factorisation machine, whose sums one loop carries."""
    torch.manual_seed(1)
    table, rows = torch.randint(-1, 3, (30000, 16)).bfloat16(), torch.randint(0, 30000, (1200, 39))

    def pairs(rows: Any, table: Any) -> Any:
        v = table[rows]
        return v.sum(1).square() - v.square().sum(1)

    found = lowered(pairs, (rows, table), "sm_90a")
    assert not any(schedule.operands for _, schedule in found.lowering.at("tile").schedules)
    (ours,) = found.simulated()
    np.testing.assert_array_equal(np.asarray(ours, np.float64), pairs(rows, table).double().numpy())


@pytest.mark.parametrize("shape", [(1, 3, 200, 300), (70000, 8)])
def test_a_loss_of_short_rows_is_cut_into_pieces(shape: tuple[int, ...]) -> None:
    """Each thread reduces rows by itself, inside the mean of all, which one block alone would take long for."""
    torch.manual_seed(1)
    x, y = torch.randn(shape), torch.randint(0, shape[1], (shape[0], *shape[2:]))
    found = lowered(F.cross_entropy, (x, y), "sm_90a")
    assert max(kernel.grid for kernel in found.kernels) >= 32
    (ours,) = found.simulated()
    np.testing.assert_allclose(float(ours), float(F.cross_entropy(x.double(), y)), rtol=1e-5)
