"""Complex numbers are computed with as pairs: what PyTorch computes, with no call of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import terrazzo
from terrazzo.front.capture import capture
from terrazzo.ir.dialects import loop as l
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.run import compiled

torch.manual_seed(0)
X, Y = torch.randn(3, 4, 6, dtype=torch.complex64), torch.randn(4, 6, dtype=torch.complex64)
R = torch.randn(4, 6)
WIDER = {"x": (3, 4, 12), "one": (1, 4, 6)}


def _put(x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros(WIDER["x"], dtype=x.dtype)
    out[:, :, :6] = x * y
    return out


COMPUTED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mul": lambda x, y, r: x * y,
    "by real": lambda x, y, r: x * r + r * y,
    "by numbers": lambda x, y, r: x * 2.5 + r * 1j + y * (2 + 1j),
    "div": lambda x, y, r: x / (r.abs() + 1) + y / 3,
    "quotient": lambda x, y, r: x / y + r / x + (2 - 1j) / y + x / (1 - 3j),
    "reciprocal": lambda x, y, r: torch.reciprocal(x * 2),
    "add": lambda x, y, r: torch.add(x, y, alpha=2) + r + 1,
    "sub": lambda x, y, r: torch.sub(x, y, alpha=2) - r - (1 + 2j),
    "neg": lambda x, y, r: -x,
    "conj": lambda x, y, r: (x.conj() * y).conj() + 0,
    "abs": lambda x, y, r: (x * y).abs(),
    "angle": lambda x, y, r: (x * y).angle(),
    "parts": lambda x, y, r: (x * y).real + (x * y).imag,
    "complex": lambda x, y, r: torch.complex(r, r + 1) * x,
    "polar": lambda x, y, r: torch.polar(r, r + 1) * x,
    "exp": lambda x, y, r: torch.exp(x * y),
    "to complex": lambda x, y, r: r.to(torch.complex64) * x,
    "wider": lambda x, y, r: (x * y).to(torch.complex128),
    "sum": lambda x, y, r: (x * y).sum() + (x * y).sum((0, -1)).sum(0, keepdim=True),
    "mean": lambda x, y, r: (x * y).mean(1),
    "where": lambda x, y, r: torch.where(r > 0, x * y, x),
    "square": lambda x, y, r: torch.square(x * y),
    "product": lambda x, y, r: (y * 2) @ y.t() + r.to(torch.complex64) @ y.t(),
    "products": lambda x, y, r: (x * y) @ x.transpose(1, 2).conj(),
    "ones": lambda x, y, r: torch.ones_like(x) * y,
    "view": lambda x, y, r: (x * y).view(12, 6) * 2,
    "reshape": lambda x, y, r: (x * y).transpose(0, 1).reshape(-1) * 2,
    "expand": lambda x, y, r: (y * 2)[None].expand(3, -1, -1) * x,
    "permute": lambda x, y, r: (x * y).permute(2, 0, 1).contiguous(),
    "t": lambda x, y, r: (y * 2).t() * 1,
    "unsqueeze": lambda x, y, r: (x * y).unsqueeze(-1) * x.unsqueeze(-2),
    "squeeze": lambda x, y, r: (x * y)[:1].squeeze(0) * y,
    "select": lambda x, y, r: (x * y)[:, -1] * 2,
    "slice": lambda x, y, r: (x * y)[:, :, 1::2] * 2,
    "cat": lambda x, y, r: torch.cat([x * y, x], -1) * 2,
    "stack": lambda x, y, r: torch.stack([x * y, x], -1) * 2,
    "index": lambda x, y, r: (x * y)[torch.tensor([0, 2])] * 2,
    "index_select": lambda x, y, r: (x * y).index_select(-1, torch.tensor([0, 2])) * 2,
    "pad": lambda x, y, r: torch.nn.functional.pad(x * y, (1, 2, 0, 1)) * 2,
    "flip": lambda x, y, r: (x * y).flip(-1, 0) * 2,
    "put": lambda x, y, r: _put(x, y),
    "inputs moved": lambda x, y, r: torch.view_as_real(x[:, 1:3].transpose(0, 1)) + 0,
}


def _calls(fn: Callable[..., Any], given: tuple[Tensor, ...]) -> list[str]:
    """The ops of PyTorch that a compiled call runs, but for views."""
    program = lowering(capture(fn, given).program, Options()).at("loop")
    found = [s.name for s in program.steps if isinstance(s, l.Call)]
    return [name for name in found if name not in ("aten.view_as_real.default", "aten.view_as_complex.default")]


@pytest.mark.parametrize("name", COMPUTED)
def test_it_is_what_pytorch_computes_and_nothing_is_called(name: str) -> None:
    given = X, Y, R

    def fn(x: Tensor, y: Tensor, r: Tensor) -> Tensor:
        out = COMPUTED[name](x, y, r)
        return torch.view_as_real(out) if out.is_complex() else out

    assert _calls(fn, given) == []
    torch.testing.assert_close(terrazzo.compile(fn, *given)(*given), fn(*given), rtol=2e-5, atol=2e-5)


def test_large_products_stay_calls() -> None:
    x, y = (torch.randn(*s, dtype=torch.complex64) for s in ((8, 32), (32, 8)))
    assert _calls(lambda x, y: torch.view_as_real((x * 2) @ y), (x, y)) == ["aten.mm.default"]


def test_gradients() -> None:
    """Those of a rotary embedding as Llama's authors write it, in one kernel, and no call."""

    def rotary(x: Tensor, angle: Tensor) -> Tensor:
        turn = torch.polar(torch.ones_like(angle), angle)
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn[None, :, None]).flatten(3).type_as(x)

    def step(x: Tensor, angle: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = rotary(x, angle)
            return out, torch.autograd.grad(out.square().sum(), x)[0]

    given = torch.randn(2, 5, 3, 8), torch.randn(5, 4)
    assert _calls(step, given) == []
    program = lowering(capture(rotary, given).program, Options()).at("loop")
    assert len(program.steps) == 1
    for a, b in zip(terrazzo.compile(step, *given)(*given), step(*given), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_between_two_calls_several_ops_are_one_kernel_and_one_stays_a_call() -> None:
    """Filters of a spectrum. What one op computes would be copied to where the next call of PyTorch takes it."""

    def filtered(x: Tensor, w: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(w))

    def shifted(x: Tensor, w: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(w) + torch.fft.rfft(w).conj())

    given = torch.randn(4, 32), torch.randn(32)
    transforms = {"aten._fft_r2c.default", "aten._fft_c2r.default"}
    assert {*_calls(filtered, given)} - transforms == {"aten.mul.Tensor"}
    assert {*_calls(shifted, given)} == transforms
    for fn in (filtered, shifted):
        torch.testing.assert_close(terrazzo.compile(fn, *given)(*given), fn(*given), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("scale", [1e25, 1e-25])
def test_no_square_of_a_divisor_overflows(scale: float) -> None:
    """Nor is it too small."""
    x, y = X * scale, Y * scale
    fn = lambda a, b: torch.view_as_real(a / b)  # noqa: E731
    assert _calls(fn, (x, y)) == []
    torch.testing.assert_close(terrazzo.compile(fn, x, y)(x, y), fn(x, y), rtol=2e-5, atol=2e-5)
    assert terrazzo.compile(lambda a: (a * 1).abs(), x)(x).isfinite().all()


def test_what_is_divided_by_zero_is_as_in_eager() -> None:
    """Infinite where a part is not 0, and no number where both are."""
    inf = float("inf")
    x = torch.tensor([1 + 2j, -1 + 0j, 0j, 3 - 1j, 2 + 2j, 1 + 1j])
    y = torch.tensor([0j, 0j, 0j, complex(inf, 0), complex(0, inf), complex(1, 0)])
    fn = lambda a, b: torch.view_as_real(a / b)  # noqa: E731
    torch.testing.assert_close(terrazzo.compile(fn, x, y)(x, y), fn(x, y), equal_nan=True)


def test_no_kernel_moves_complex_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A result that is to lie across, as in eager mode, is moved by PyTorch: CUDA has no such type."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x * y) * y + x

    given: list[Any] = []
    before = compiled.compile_program
    monkeypatch.setattr(compiled, "compile_program", lambda p, *rest: given.append(p) or before(p, *rest))
    across = X.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    torch._dynamo.reset()
    ours = torch.compile(f, backend="terrazzo", options={"cache_dir": tmp_path})(across, Y)
    torch.testing.assert_close(ours, f(across, Y))
    assert ours.stride() == f(across, Y).stride() != X.stride()
    steps = lowering(given[0], Options(target="sm_90a")).loop.steps
    kernels = [s for s in steps if isinstance(s, l.Kernel)]
    assert kernels and not any(b.type.dtype.kind == "complex" for s in kernels for b in (*s.reads, *s.writes))
