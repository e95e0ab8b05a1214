"""Sizes that vary are noticed, and what does not depend on them is compiled once."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import terrazzo
from terrazzo.front import dynamo
from terrazzo.run import compiler


def test_sizes_that_vary_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "_said", set())
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.exp(x) + 1, backend="terrazzo", options={"target": "interpreter"})
    told = []
    for n in range(2, 12):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            x = torch.randn(n, 4)
            torch.testing.assert_close(compiled(x), torch.exp(x) + 1)
        told += [str(w.message) for w in found if "sizes of the inputs vary" in str(w.message)]
    assert len(told) == 1
    assert "compiled 3 times" in told[0] and "Pad inputs" in told[0]


def test_sizes_that_do_not_vary_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "_said", set())
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.exp(x) + 1, backend="terrazzo", options={"target": "interpreter"})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for n in (2, 3, 2, 3, 2, 3):
            compiled(torch.randn(n, 4))
    assert not [w for w in found if "sizes of the inputs vary" in str(w.message)]


def test_no_thread_compiles_while_dynamo_traces_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled for a new size is traced in the middle of a call, which replaces functions of PyTorch."""
    from torch._dynamo.convert_frame import compile_lock

    alone = []
    specialised = dynamo._specialised

    def traced(*args: Any) -> Any:
        with ThreadPoolExecutor(1) as another:
            alone.append(not another.submit(compile_lock.acquire, blocking=False).result())
        return specialised(*args)

    monkeypatch.setattr(dynamo, "_specialised", traced)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.exp(x) + 1, backend="terrazzo", options={"target": "interpreter"})
    for n in (2, 3, 4):
        compiled(torch.randn(n, 4))
    assert alone == [True, True]


def test_kernels_without_the_size_are_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built: list[int] = []
    build = compiler._build_all
    monkeypatch.setattr(compiler, "_build_all", lambda c, s: built.append(len(s)) or build(c, s))

    def both(x: Any, w: Any) -> Any:
        return torch.exp(x), torch.tanh(w).sum(0)

    for n in (3, 5):
        terrazzo.compile(both, torch.randn(n, 4), torch.randn(6, 4), options={"target": "cpu", "cache_dir": tmp_path})
    assert built == [2, 1]


class Numbered(torch.nn.Module):
    """Its layers keep numbers, which Dynamo holds open as it does sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(6), torch.nn.BatchNorm1d(6)])
        self.act, self.scale = torch.nn.LeakyReLU(0.13), 0.37

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            x = self.act(norm(x)) * self.scale
        return x


def test_numbers_of_layers_whose_sizes_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "_said", set())
    torch._dynamo.reset()
    plain, module = Numbered(), Numbered()
    options = {"target": "interpreter", "strict": True}
    compiled = torch.compile(module, backend="terrazzo", dynamic=True, options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (4, 5):
            x, y = (torch.randn(n, 6).requires_grad_() for _ in range(2))
            y.data.copy_(x)
            found, wanted = compiled(x), plain(y)
            torch.testing.assert_close(found, wanted)
            torch.testing.assert_close(
                *(torch.autograd.grad(z.square().sum(), t) for z, t in ((found, x), (wanted, y)))
            )
        torch.testing.assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_that_vary_are_compiled_for_a_few_times(monkeypatch: pytest.MonkeyPatch, dynamic: bool | None) -> None:
    monkeypatch.setattr(dynamo, "_said", set())
    torch._dynamo.reset()
    made: list[Any] = []
    specialised = dynamo._specialised
    monkeypatch.setattr(dynamo, "_specialised", lambda *args: made.append(args) or specialised(*args))

    def fn(x: torch.Tensor, t: float) -> torch.Tensor:
        return torch.sin(x * t).clamp(max=t)

    compiled = torch.compile(fn, backend="terrazzo", dynamic=dynamic, options={"target": "interpreter"})
    x, told = torch.randn(5, 4), []
    for t in [0.1 * n for n in range(dynamo.VALUES + 4)] * 2:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.testing.assert_close(compiled(x, t), fn(x, t))
        told += [str(w.message) for w in found if "terrazzo" in str(w.message)]
    assert len(made) == dynamo.VALUES
    assert len(told) == 1 and "another value in every call" in told[0]
