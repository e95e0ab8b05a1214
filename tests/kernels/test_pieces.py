"""What a thread's points read crosswise, backwards or several times is read as one vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import terrazzo
from terrazzo.front.capture import capture
from terrazzo.interp import kernel as simulator
from terrazzo.interp.torch import to_numpy
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.types import Type, f32
from terrazzo.options import Options
from terrazzo.pipelines import stages
from terrazzo.rewrite.rule import Log
from terrazzo.rules.tile_to_kernel.pieces import pieces
from terrazzo.targets.cuda.predict import predict


def crosswise(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """A rotary embedding of neighbours."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def complex_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(y))


CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "crosswise": (crosswise, ((64, 32, 128), (32, 64), (32, 64))),
    "complex": (complex_product, ((256, 128, 2), (128, 2))),
    "backwards": (lambda x: x.flip(-1) * 2, ((512, 256),)),
    "twice": (lambda x: x.repeat_interleave(2, -1) * 2, ((512, 128),)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2) * 2, ((4, 16, 16, 64),)),
    "interleaved": (lambda x, y: torch.stack((x, y), -1).flatten(-2) * 2, ((512, 128), (512, 128))),
    "not aligned": (lambda x: x[:, 1:].flip(-1) * 2, ((512, 257),)),
    "shorter than the vector": (lambda x: x.flip(-1) * 2, ((513, 12),)),
}


def steps(call: Callable[..., Any], *args: torch.Tensor) -> Any:
    program = capture(call, args, {}).program
    return stages(program, Options(target="sm_90a", libraries="never"), Log())[-1][1]


OF_HALVES = [name for name in CASES if name != "complex"]  # no complex numbers are made of bfloat16
TYPED = [*((name, torch.float32) for name in CASES), *((name, torch.bfloat16) for name in OF_HALVES)]


@pytest.mark.parametrize(("name", "dtype"), TYPED)
def test_kernels_are_right(name: str, dtype: torch.dtype) -> None:
    call, shapes = CASES[name]
    torch.manual_seed(0)
    args = [torch.randn(s).to(dtype) for s in shapes]
    program = steps(call, *args)
    (found,) = simulator.run(program, {b.name: to_numpy(a) for b, a in zip(program.inputs, args, strict=True)})
    expected = terrazzo.compile(call, *args, options={"target": "interpreter"})(*args)
    np.testing.assert_array_equal(np.asarray(found), to_numpy(expected))


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("crosswise", ((4, 2048, 32, 128), (1, 2048, 1, 64)[1:], (2048, 1, 64))),
        ("complex", ((4096, 2048, 2), (2048, 2))),
        ("backwards", ((8192, 4096),)),
        ("twice", ((8192, 4096),)),
        ("interleaved", ((8192, 4096), (8192, 4096))),
    ],
)
def test_sectors_are_read_once(name: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Of what is as large as the result; and no element is loaded by itself."""
    kind = torch.float32 if name == "complex" else torch.bfloat16
    args = [torch.empty(s, dtype=kind, device="meta") for s in shapes]
    (kernel,) = [s for s in steps(CASES[name][0], *args).steps if isinstance(s, k.Kernel)]
    sectors = predict(kernel).costs.total("global read").sectors * 32
    largest = max(a.numel() * a.element_size() for a in args)
    result = kernel.writes[0].type
    most = sum(a.numel() * a.element_size() for a in args if a.numel() * a.element_size() == largest)
    operands = len(args) * result.dtype.size * int(np.prod(result.static_shape))
    assert sectors <= max(most, operands) * 1.01


def test_a_piece_has_no_gaps_and_is_aligned() -> None:
    x = l.Buffer("x", Type(f32, (1024,)))
    q, j = Var("q", 64), Var("j", 4)

    def found(*indices: Any, inside: tuple[Any, ...] = ()) -> list[tuple[Any, int]]:
        loads = [l.Load(x, (i,), inside) for i in indices]
        return [(p.at, p.count) for p in pieces([(y, y) for y in loads], j, 4)]

    assert found(q * 4 + 3 - j) == [((q * 4,), 4)]
    assert found(q * 2 + j // 2) == [((q * 2,), 2)]
    assert found(q * 4 + j // 2 * 2, q * 4 + j // 2 * 2 + 1) == [((q * 4,), 4)]
    assert found(q * 4 + 4 - j) == []  # not aligned
    assert found(q * 8 + j * 2) == []  # gaps
    assert found(q * 4 + j // 2 * 2) == []
    assert found(q * 4 + 0 * j) == []  # the same for all
    assert found(q * 4 + 3 - j, inside=(j - 1, 2 - j)) == [((q * 4 + 1,), 2)] or found() == []
