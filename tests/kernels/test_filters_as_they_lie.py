"""Filters whose columns lie side by side, as those of images' gradients with channels last: boxes read them as they
lie, phase by phase where there are phases, and nothing is copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels import programs

from terrazzo.ir.dialects import kernel as k

CASES = {"every point": (128, 8, 3, 1), "96 columns": (96, 8, 3, 1), "every 2": (64, 8, 3, 2), "5 x 5": (64, 9, 5, 3)}
"""Channels and size of an image, taps and stride."""


@pytest.mark.parametrize("name", CASES)
def test_one_kernel_is_all_there_is(name: str) -> None:
    channels, size, width, stride = CASES[name]
    pad, out = width // 2, (size + 2 * (width // 2) - width) // stride + 1
    options = (None, [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], 1, [True, False, False])
    torch.manual_seed(0)
    shapes = (8, 64, out, out), (8, channels, size, size), (64, channels, width, width)
    given = tuple(torch.randn(s).bfloat16().to(memory_format=torch.channels_last) for s in shapes)

    def of_image(g: Any, x: Any, w: Any) -> Any:
        return torch.ops.aten.convolution_backward(g, x, w, *options)[0]

    found = programs.lowered(of_image, given, "sm_90a")
    (kernel,) = found.kernels
    assert any(isinstance(s, k.MultiplyAsync) for s in k.walk(kernel.body))
    exact, eager = of_image(*(x.double() for x in given)).numpy(), of_image(*given).double().numpy()
    off, off_eager = (np.sqrt(np.square(y - exact).mean()) for y in (found.simulated()[0].astype(np.float64), eager))
    assert off <= 2 * off_eager
