"""Patches that overlap, stored before a product reads them: a thread goes from one to the next, lanes store sectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels import programs
from tests.kernels.programs import Lowered

from terrazzo.ir.dialects import kernel as k
from terrazzo.rules.loop_to_tile.products import patches, stored
from terrazzo.targets.cuda.emit import emit


def lowered(shape: tuple[int, ...], filters: tuple[int, ...], **options: int) -> Lowered:
    """A convolution of images whose channels come first down to kernels of ours."""
    torch.manual_seed(0)
    args = torch.randn(shape).bfloat16(), torch.randn(filters).bfloat16()
    conv = {3: F.conv1d, 4: F.conv2d}[len(shape)]
    return programs.lowered(lambda x, w: conv(x, w, **options), args, "sm_90a")


CASES = {
    "7 x 7, every second": ((32, 3, 64, 64), (64, 3, 7, 7), {"stride": 2, "padding": 3}),
    "5 x 5, nothing around": ((256, 1, 28, 28), (32, 1, 5, 5), {}),
    "11 x 11, every fourth": ((64, 3, 64, 64), (96, 3, 11, 11), {"stride": 4, "padding": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_threads_go_from_patch_to_patch(name: str) -> None:
    shape, filters, options = CASES[name]
    first, *_, last = lowered(shape, filters, **options).kernels
    assert [b.type.shape[-1] % 8 for b in first.writes] == [0]  # whole vectors, behind the last weight too
    assert "move<8>" in emit(first)[1] and any(isinstance(s, k.MultiplyAsync) for s in k.walk(last.body))


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    ("shape", "filters"), [((2, 3, 18, 30), (32, 3, 5, 5)), ((16, 3, 3000), (64, 3, 21))], ids=["images", "sounds"]
)
def test_patches_are_right(
    shape: tuple[int, ...], filters: tuple[int, ...], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "WAVES", 1 / 4096 if steps > 1 else 2)
    monkeypatch.setattr(stored, "copying", lambda *_: 0.0)
    found = lowered(shape, filters, stride=2, padding=2)
    assert len(found.kernels) == 3 and found.kernels[0].writes[0].type.shape[-1] % 8 == 0
    exact = found.fn(*(x.double() for x in found.args)).numpy()
    assert np.abs(found.simulated()[0].astype(np.float64) - exact).max() <= 2.0**-7 * np.abs(exact).max()
