"""What the results of a product are computed from, besides its sums: residuals, gates, biases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered
from tests.kernels.test_attention import close, lines, tensors

from terrazzo.front.capture import capture
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.node import topological
from terrazzo.ir.plan import Result
from terrazzo.ir.text import show
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.tile_to_kernel import gather


def residual(x: Any, w: Any, r: Any) -> Any:
    return F.linear(x, w) + r


def gate(x: Any, w: Any, r: Any) -> Any:
    return F.silu(r) * F.linear(x, w)


def both(x: Any, w: Any, r: Any, s: Any) -> Any:
    return F.linear(x, w) * r + s


def _moves(found: Any) -> list[k.Move]:
    """Moves from global memory into registers."""
    (kernel,) = found.kernels
    moves = [x for x in topological(kernel.body) if isinstance(x, k.Move)]
    return [x for x in moves if isinstance(x.target, k.Registers) and x.source in kernel.params]


@pytest.mark.parametrize(
    ("fn", "m", "n", "reads", "slots"),
    [
        (residual, 384, 384, 1, 1),
        (residual, 1024, 1024, 1, 2),
        (residual, 2048, 768, 1, 3),
        (gate, 1024, 1024, 1, 2),
        (both, 384, 384, 2, 1),
        (residual, 392, 328, 1, 1),
    ],
)
def test_neighbours_are_loaded_at_once_and_ahead(
    fn: Any, m: int, n: int, reads: int, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one operand 16 bytes of a row, of others two 16-bit values at a time, for all of a subtile; for all subtiles,
    or as many as there is room for. Rows become fragments where the results will be.
    """
    if reads == 2:
        monkeypatch.setattr(gather, "ROOM", gather.ROOM // 2)
    args = tensors((m, 64), (n, 64), *((m, n),) * reads)
    found = lowered(fn, args, "sm_90a")
    assert lines(found, Result)[0].by == "tma"
    moves = _moves(found)
    assert len({x.source for x in moves}) == reads
    assert sorted(x.count for x in {x.source: x for x in moves}.values()) == [2, 8][2 - reads :]
    assert any(isinstance(x, k.LoadMatrix) for x in topological(found.kernels[0].body))
    assert {x.target.type.static_shape[0] for x in moves} == {slots}
    close(found, fn, args)


def test_rows_of_odd_length_are_read_one_by_one() -> None:
    """A pair of neighbours would begin at no multiple of its size."""
    args = tensors((384, 64), (384, 64))
    long = tensors((384, 385))[0]

    def odd(x: Any, w: Any, r: Any) -> Any:
        return F.linear(x, w) + r[:, :384]

    found = lowered(odd, (*args, long), "sm_90a")
    assert not _moves(found)
    close(found, odd, (*args, long))


def test_a_residual_comes_in_whole_rows_before_its_tile_is_multiplied() -> None:
    """16 bytes a thread, of eight threads a row; fragments are read from where the results will be."""
    args = [torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((1024, 4096), (4096, 4096), (1024, 4096))]
    program = capture(residual, args, {}).program
    text = show(lowering(program, Options(target="sm_90a", libraries="never")).at("kernel"))
    team = text[text.index("with role(4") :]
    assert -1 < team.find("], 8)") < team.find("multiply_async") < team.find("load_matrix('ldmatrix.x4'")
