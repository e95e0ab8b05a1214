"""Costs that are predicted from a kernel's text, where the simulator is too slow to say the same; and what is made of
them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.kernels import by_hand
from tests.kernels.programs import case, lowered, refuse_others

from terrazzo.front.capture import capture
from terrazzo.interp import kernel as simulator
from terrazzo.interp.costs import Costs
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.text import parse, show
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile.estimate import work
from terrazzo.targets.cuda import predict as prediction
from terrazzo.targets.cuda.predict import predict


@pytest.mark.parametrize("name", by_hand.MEANING)
def test_kernels_by_hand_cost_what_is_predicted(name: str) -> None:
    program, costs = by_hand.program(name), Costs()
    simulator.run(program, by_hand.inputs(program), costs=costs)
    refuse_others([s for s in program.steps if isinstance(s, k.Kernel)], costs)


def test_products_of_warpgroups_are_counted() -> None:
    (kernel,) = by_hand.program("ring").steps
    costs = predict(kernel).costs
    assert costs.operations["wgmma.m64n256k16.f32.bf16"] == 2 * 128 * 256 * 512
    assert costs.box_bytes == 8 * 49152
    assert costs.total("shared read").bytes == 2 * 8 * 4 * (64 + 256) * 16 * 2


@pytest.mark.parametrize(
    "name", ["ragged matmul of bfloat16", "matmul", "gelu", "conv2d", "softmax of the first axis", "attention"]
)
def test_warps_that_cost_alike_are_counted_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the blocks without tails are told from those with."""
    whole = [predict.__wrapped__(kernel).costs for kernel in case(name, "sm_80").kernels]
    monkeypatch.setattr(prediction, "SPLIT", 2)
    parts = [predict.__wrapped__(kernel).costs for kernel in case(name, "sm_80").kernels]
    assert [c.issues for c in parts] == [c.issues for c in whole]
    for a, b in zip(parts, whole, strict=True):
        assert {key: c for key, c in a.accesses.items() if c.requests} == {
            key: c for key, c in b.accesses.items() if c.requests
        }


def linear(size: int, dtype: torch.dtype, target: str) -> Any:
    (kernel,) = lowered(
        F.linear, (torch.empty(size, size, dtype=dtype), torch.empty(size, size, dtype=dtype)), target
    ).kernels
    found = predict(kernel)
    assert not found.unknown
    return found.costs, kernel


def test_a_large_product_moves_what_the_model_says() -> None:
    """The traffic of `products`: every block reads its rows and columns once; and no access to shared memory
    conflicts.
    """
    costs, kernel = linear(4096, torch.bfloat16, "sm_80")
    (m, n), size = (128, 128), 4096
    assert kernel.grid == (size // m) * (size // n)
    assert costs.total("global read").bytes == 2 * size * (size * (size // n) + size * (size // m))
    assert costs.total("global write").bytes == 2 * size * size
    assert costs.total("shared write").bytes == costs.total("global read").bytes
    assert costs.operations["mma.m16n8k16.f32.bf16"] == 2 * size**3
    for kind in ("shared read", "shared write"):
        assert costs.total(kind).conflicts == 0 and costs.total(kind).wavefronts == costs.total(kind).bytes // 128


def test_boxes_move_what_the_model_says() -> None:
    """Blocks that walk over all tiles bring in their rows and columns, and take their results away, as boxes alone."""
    costs, kernel = linear(4096, torch.bfloat16, "sm_90a")
    (m, n), size = (128, 256), 4096
    assert f"wgmma.m64n{n}k16" in show(kernel) and kernel.grid == 132 and kernel.warps == 12
    assert costs.box_bytes == 2 * size * (size * (size // n) + size * (size // m) + size)
    assert costs.operations[f"wgmma.m64n{n}k16.f32.bf16"] == 2 * size**3
    assert costs.total("global read").bytes == costs.total("global write").bytes == 0
    assert costs.total("shared read").conflicts == costs.total("shared write").conflicts == 0


SMALL = """@kernel
def forward(x: f32[1024]):
    with launch('y', _grid=1, _warps=2, _resident=1, _reads=[x], y=f32[64]):
        s = shared(f32[2048])
        {}
    return (y,)
"""


def costs_of(*lines: str) -> Costs:
    (kernel,) = parse(SMALL.format("\n        ".join(lines))).steps
    return predict(kernel).costs


@pytest.mark.parametrize(("step", "conflicts"), [(1, 0), (2, 1), (4, 3), (8, 7), (16, 15), (32, 31), (3, 0), (33, 0)])
def test_conflicts_of_strides(step: int, conflicts: int) -> None:
    found = costs_of(f"s[lane * {step}] = f32(0.0)").total("shared write")
    assert (found.requests, found.bytes, found.conflicts, found.wavefronts) == (
        2,
        256,
        2 * conflicts,
        2 * conflicts + 2,
    )


def test_sectors_of_strides_and_tails() -> None:
    assert costs_of("v0 = x[lane + warp * 32]").total("global read").sectors == 8
    assert costs_of("v0 = x[lane * 8 + warp * 256]").total("global read").sectors == 64
    assert costs_of("v0 = x[lane * 8 + warp * 256] if lane + warp * 32 < 36 else 0").total("global read").sectors == 36
    assert (
        costs_of("for i in serial(10):", "    if i >= 3:", "        v0 = x[lane + i * 32]").total("global read").sectors
        == 56
    )
    assert costs_of("for i in serial(10):", "    if i >= 3:", "        v0 = x[lane]").kinds == {"let": 14}


@pytest.mark.parametrize(
    ("fn", "shapes", "read"),
    [
        (lambda x: F.glu(x), [(64, 256)], 64 * 256),  # two windows that do not meet
        (lambda x: x[:, 1:] - x[:, :-1], [(64, 256)], 64 * 256),  # two that do
        (lambda x: x[:, :64].sum(1), [(64, 256)], 64 * 64),
        (lambda x: F.avg_pool1d(x, 3, 1), [(4, 8, 64)], 4 * 8 * 64),  # three for each point, which others have too
        (lambda x, y: x[:, :64] @ y[:, 64:128].mT, [(4, 256, 64), (4, 256, 64)], 2 * 4 * 64 * 64),
        (lambda x, y: torch.add(x[:, :8], y), [(16, 32), (8,)], 16 * 8 + 8),
    ],
)
def test_of_a_window_what_lies_there_is_read(fn: Any, shapes: list[tuple[int, ...]], read: int) -> None:
    given = tuple(torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    done = lowering(capture(fn, given, {}).program, Options(target="sm_90a", libraries="never"))
    (kernel,) = done.loop.steps
    assert sum(count for b, count in work(kernel)[1].items() if b not in kernel.writes) == read
