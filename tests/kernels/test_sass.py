"""What must not be in machine code, and what must: looked up in what ptxas made of kernels written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.hw.sass import sass
from tests.kernels import by_hand

from terrazzo.ir.dialects import kernel as k


@pytest.mark.parametrize("name", ["ring", "cluster", "persistent", "copied"])
def test_no_wait_for_all_memory(name: str, tmp_path: Path) -> None:
    """Arrivals at another block's barrier and fences of shared memory wait for no more than the block's own accesses: a
    MEMBAR of the GPU would stand in the main loop. Only where a cluster meets is there one.
    """
    (kernel,) = by_hand.program(name).steps
    lines = sass(kernel, "sm_90a", tmp_path)
    assert any("HGMMA" in line for line in lines)
    meetings = sum(isinstance(s, k.ClusterSync) for s in k.walk(kernel.body))
    assert len([line for line in lines if "MEMBAR" in line and not line.endswith(".CTA")]) == meetings
