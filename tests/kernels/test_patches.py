"""Patches that overlap, stored before a product reads them: a thread goes from one to the next, lanes store sectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels import programs
from tests.kernels.programs import Lowered

from terrazzo.interp import kernel as simulator
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
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


TURNED = """@loop
def f(p: bf16[192, 196, 32] @ (6272, 1, 196), c: bf16[16, 12, 32, 32]):
    with kernel('z', z=bf16[192, 196, 32]):
        for a0 in free(192):
            for a1 in free(196):
                for a2 in free(32):
                    for r0 in reduce(32):
                        in0 = p[a0, a1, r0]
                        v0 = f32(in0)
                        in1 = c[a0 // 12, a0 % 12, r0, a2]
                        v1 = f32(in1)
                        v2 = mul(v0, v1)
                        acc0 <- sum(v2)
                    v3 = bf16(acc0)
                    z[a0, a1, a2] = v3
    return (z,)
"""


def test_rows_made_longer_in_turned_memory_are_no_patches() -> None:
    """Their copy has more elements than there are, and its last dimension does not lie along rows."""
    copy, product = lowering(parse(TURNED), Options(target="sm_90a")).at("kernel").steps
    (place,) = copy.writes
    assert place in product.reads and place.type.element_strides == (6400, 1, 200)
    x = np.random.default_rng(0).standard_normal(place.type.static_shape[:1] + (196, 32)).astype(place.type.dtype.numpy)
    (stored_,) = simulator.run(k.Program("copy", copy.reads, (copy,), copy.writes), {copy.reads[0].name: x})
    assert np.array_equal(stored_[:, :196], x) and not stored_[:, 196:].any()
