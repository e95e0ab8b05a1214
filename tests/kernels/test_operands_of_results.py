"""What results of a product are made of besides its sums, and when it comes."""

from __future__ import annotations

import torch

from terrazzo.front.capture import capture
from terrazzo.ir.text import show
from terrazzo.options import Options
from terrazzo.pipelines import lowering


def test_a_residual_comes_in_whole_rows_before_its_tile_is_multiplied() -> None:
    """16 bytes a thread, of eight threads a row; fragments are read from where the results will be."""
    args = [torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((2048, 4096), (14336, 4096), (2048, 14336))]
    program = capture(lambda x, w, y: torch.nn.functional.linear(x, w) + y, args, {}).program
    text = show(lowering(program, Options(target="sm_90a", libraries="never")).at("kernel"))
    team = text[text.index("with role(4") :]
    assert -1 < team.find("], 8)") < team.find("multiply_async") < team.find("load_matrix('ldmatrix.x4'")
