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
