"""What must not be in machine code, and what must: looked up in what ptxas made of kernels written by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.hw.sass import sass
from tests.kernels import by_hand
from tests.kernels.programs import lowered

from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.text import parse


@pytest.mark.parametrize("name", ["ring", "cluster", "persistent", "copied"])
def test_no_wait_for_all_memory(name: str, tmp_path: Path) -> None:
    """Arrivals at another block's barrier and fences of shared memory wait for no more than the block's own accesses: a
    MEMBAR of the GPU would stand in the main loop. Only where a cluster meets is there one, and not at first, when all
    that there is to see are barriers.
    """
    (kernel,) = by_hand.program(name).steps
    lines = sass(kernel, "sm_90a", tmp_path)
    assert any("HGMMA" in line for line in lines)
    meetings = [n for n, s in enumerate(kernel.body) if isinstance(s, k.ClusterSync)]
    assert len(meetings) == (2 if kernel.cluster > 1 else 0)
    found = [line for line in lines if "MEMBAR" in line and not line.endswith(".CTA")]
    assert len(found) == len(meetings[1:])
    assert len([line for line in lines if "UCGABAR_WAIT" in line]) == len(meetings)


def test_two_floats_are_rounded_at_once(tmp_path: Path) -> None:
    """Of 128 accumulators, neighbours are packed: 64 instructions."""
    (kernel,) = by_hand.program("cluster").steps
    assert sum("F2FP.BF16.F32.PACK_AB" in line for line in sass(kernel, "sm_90a", tmp_path)) == 64


MAXIMUM = """@kernel
def largest(x: f32[64, 8]):
    with launch('largest', _grid=1, _warps=2, _resident=1, _reads=[x], y=f32[64]):
        m = registers(f32, f32(-inf))
        for i in unrolled(8):
            m[()] = max(m[()], x[lane + warp * 32, i])
        y[lane + warp * 32] = m[()]
    return (y,)
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_maximum_with_nan_is_one_instruction(arch: str, tmp_path: Path) -> None:
    lines = sass(parse(MAXIMUM).steps[0], arch, tmp_path)
    assert sum("FMNMX.NAN" in line for line in lines) == 8
    assert not any("FSETP" in line or "FSEL" in line for line in lines)


@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_weights_are_found_while_products_are_open(width: int, causal: bool, tmp_path: Path) -> None:
    """In the loop of all warpgroups all exponentials of a step stand between the wait for its scores and the wait for
    the product of the weights before; one multiplication and addition in one, and one maximum, for each score; and no
    fence of all memory. Another wait for that product is jumped over, with all that sums are multiplied by, where the
    frame stays.
    """
    q = torch.empty(4, 16, 1024, width, dtype=torch.bfloat16)
    found = lowered(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), (q, q, q), "sm_90a")
    (kernel,) = found.kernels
    lines = sass(kernel, "sm_90a", tmp_path)
    waits = [n for n, line in enumerate(lines) if line.startswith("WARPGROUP.DEPBAR")]
    ((begin, moved, end),) = (x for x in zip(waits, waits[1:], waits[2:], strict=False) if lines[x[0]].endswith("0x1"))
    assert lines[moved].endswith("0x0") and lines[end].endswith("0x0")
    scores, body = 64 if width <= 128 else 32, lines[begin:end]
    (vote,) = (n for n in range(begin, end) if "VOTE.ANY" in lines[n])
    (jump,) = (n for n in range(vote, moved) if "BRA" in lines[n])
    assert lines[jump].startswith("@") and not any("MUFU" in line for line in lines[begin:jump])
    assert sum("MUFU.EX2" in line for line in body) == scores + 2  # and what the sums of two rows are worth
    assert sum("MUFU.EX2" in line for line in lines[moved:end]) >= scores
    assert scores <= sum("FFMA" in line for line in body) <= scores + 8
    assert scores <= sum("FMNMX" in line for line in body) <= scores + 8
    assert not any("SHFL" in line or "MEMBAR" in line for line in lines[begin:jump])
    assert width // 2 <= sum("FMUL" in line for line in lines[jump:end]) <= width // 2 + 8  # all of them in the branch
    assert not [line for line in lines if "MEMBAR" in line and not line.endswith(".CTA")]


SMALLEST = """@kernel
def far(x: i16[64]):
    with launch('far', _grid=1, _warps=2, _resident=1, _reads=[x], y=bool[64]):
        y[lane + warp * 32] = gt(abs(x[lane + warp * 32]), i16(20000))
    return (y,)
"""


def test_no_absolute_value_of_16_bits_is_taken_in_32(tmp_path: Path) -> None:
    """The smallest number is its own; ptxas of CUDA 13.0 made 32768 of it, and compared that."""
    (kernel,) = parse(SMALLEST).steps
    assert not any(line.startswith("IABS") for line in sass(kernel, "sm_90a", tmp_path))


@pytest.mark.gpu
def test_the_smallest_number_is_its_own_absolute_value() -> None:
    from tests.kernels.test_on_gpu import on_gpu

    x = np.full(64, -32768, np.int16)
    x[1::2] = -20001
    np.testing.assert_array_equal(on_gpu(parse(SMALLEST), {"x": x})[0], np.arange(64) % 2 == 1)
