"""What tracing makes of an op is asked once: programs are the same as where it is asked for every call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental import proxy_tensor

from terrazzo.errors import TerrazzoError
from terrazzo.front import functionalized
from terrazzo.front.capture import capture
from terrazzo.front.repeated import asked_once
from terrazzo.ir.show import show


def parts(x: Tensor) -> tuple[Tensor, ...]:
    """Views of one tensor and of each other, some of which are results."""
    for _ in range(3):
        a, b = x.chunk(2, 1)
        low, high = (a * b).split([1, 3], 1)
        x = torch.cat([low, high, b], 1)
    return x[:, 1:], x.T, low, *x.unbind(0)


def written(x: Tensor) -> Tensor:
    """Writes to views, which others see."""
    y = x.clone()
    for n in range(3):
        y[n].add_(1)
        y.T[n].mul_(2)
        y.view(-1)[n::4].relu_()
    return y


def numbers(x: Tensor) -> Tensor:
    """Arguments that are equal and of two types, or of two signs."""
    integers = (x * 8).to(torch.int32)
    y = integers * 1, integers * 1.0, integers * True, x + 0.0, x + -0.0, x + 0, x.sum(0, True), x.sum(0, False)
    return torch.cat([t.float().flatten() for t in y])


def operands(x: Tensor) -> Tensor:
    """One tensor twice, and two that lie alike."""
    y = x + 1
    return x * x + x * y + y * x + y * y - torch.where(x > y, x, x) + torch.where(y > x, y, x)


def random(x: Tensor) -> Tensor:
    """Every random op is one of its own."""
    for _ in range(3):
        x = torch.dropout(x, 0.5, True) + torch.rand_like(x)
    return x


def constants(x: Tensor) -> Tensor:
    """Numbers that are known while tracing."""
    two = torch.tensor(2)
    for _ in range(2):
        x = x * two + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
        x = x * (two + 1).item()
    return x


def settings(x: Tensor) -> Tensor:
    """What PyTorch is set to, which goes into ops."""
    y = (x * 8).long()
    found = [y.sqrt(), y / 3]
    torch.set_default_dtype(torch.float64)
    try:
        found += [y.sqrt(), y / 3]
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found += [x @ x.T, torch.nn.functional.linear(x, x)]
    found += [x @ x.T, torch.nn.functional.linear(x, x)]
    return torch.cat([t.double().flatten() for t in found])


def checked(x: Tensor) -> Tensor:
    """Checks that become part of an op that is there already."""
    for _ in range(2):
        m = x @ x.T + torch.eye(x.shape[0])
        x = torch.linalg.solve(m, x) + torch.linalg.cholesky(m) @ x
    return x


def several(x: Tensor) -> Tensor:
    """Ops with several results, in lists and in tuples with names."""
    for _ in range(3):
        values, places = x.sort(1)
        highest, variance = x.max(1, True).values, torch.var_mean(x, 1)[0][:, None]
        x = values + places.float() + nn.functional.logsigmoid(x) + highest + variance
    return x


def gradients(x: Tensor) -> Tensor:
    """Derivatives inside of a program."""
    w = x.detach().requires_grad_()
    with torch.enable_grad():
        y = w
        for _ in range(3):
            y = (y @ y.T).softmax(1) @ y
        return torch.autograd.grad(y.sum(), w)[0]


def factories(x: Tensor) -> Tensor:
    """Tensors that are made like others, also by decompositions."""
    labels = torch.arange(8) % 3
    for _ in range(3):
        x = torch.full_like(x, 2.0) + torch.zeros_like(x).add_(x) + x.new_ones(8, 8)
        w = x.detach().requires_grad_()
        with torch.enable_grad():
            x = torch.autograd.grad(nn.functional.cross_entropy(w, labels), w)[0]
    return x


FUNCTIONS = (factories, parts, written, numbers, operands, random, constants, settings, checked, several, gradients)
MODULES = (
    nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3))),
    nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True)) for _ in range(3))),
    nn.GRU(8, 8, 2),
)


@pytest.mark.parametrize("fn", [*FUNCTIONS, *MODULES], ids=lambda fn: getattr(fn, "__name__", type(fn).__name__))
def test_programs_are_the_same(fn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.rand(2, 8, 8) if isinstance(fn, nn.GRU) or fn is MODULES[0] else torch.rand(8, 8)
    found = []
    for once, mode in product((asked_once, nullcontext), (functionalized.mode, FunctionalTensorMode)):
        monkeypatch.setattr("terrazzo.front.capture.asked_once", once)
        monkeypatch.setattr("terrazzo.front.functionalized.mode", mode)
        done = capture(fn, (given,), views=True)
        found.append((show(done.program), done.results, done.structure, sorted(done.bound)))
    assert all(x == found[0] for x in found)


def test_functionalization_is_ours() -> None:
    """Where this PyTorch has all that it stands on, as it is to."""
    assert type(functionalized.mode()) is not FunctionalTensorMode


def test_another_functionalization_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_to_functional_tensor")
    assert type(functionalized.mode()) is FunctionalTensorMode


def test_equal_layers_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty layers ask as often as three; and what is asked with other sizes is asked anew."""
    asked: list[str] = []
    ask = proxy_tensor.proxy_call

    def counting(proxy_mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        asked.append(str(func))
        return ask(proxy_mode, func, pre_dispatch, args, kwargs)

    monkeypatch.setattr(proxy_tensor, "proxy_call", counting)

    def count(*sizes: int) -> int:
        asked.clear()
        net = nn.Sequential(*(nn.TransformerEncoderLayer(n, 2, 16, batch_first=True) for n in sizes)).eval()
        capture(net, (torch.rand(2, 4, sizes[0]),))
        return len(asked)

    assert count(*[8] * 20) == count(*[8] * 3) < 100
    assert proxy_tensor.proxy_call is counting


def test_what_fails_leaves_nothing_behind() -> None:
    ask = proxy_tensor.proxy_call

    def wrong(x: Tensor) -> Tensor:
        raise ValueError("no")

    with pytest.raises(TerrazzoError):
        capture(wrong, (torch.rand(2),))
    assert proxy_tensor.proxy_call is ask


def test_another_pytorch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose function takes something else."""
    ask = proxy_tensor.proxy_call

    def other(mode: Any, *rest: Any) -> Any:
        assert proxy_tensor.proxy_call is other
        return ask(mode, *rest)

    monkeypatch.setattr(proxy_tensor, "proxy_call", other)
    capture(operands, (torch.rand(8, 8),))


def test_traces_side_by_side() -> None:
    """One after the other, and PyTorch's function is back when the last one is through."""
    ask = proxy_tensor.proxy_call
    given = torch.rand(8, 8)
    with ThreadPoolExecutor(4) as pool:
        found = {*pool.map(lambda n: show(capture(parts, (given,)).program), range(8))}
    assert found == {show(capture(parts, (given,)).program)}
    assert proxy_tensor.proxy_call is ask


@pytest.mark.parametrize("part", ["question", "keep", "again"])
def test_another_pytorch_is_asked_every_time(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is private in PyTorch may change: then all is traced as ever, and it is told."""
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    expected = show(capture(net, (torch.rand(2, 8),)).program)

    def gone(*args: Any) -> Any:
        raise AttributeError("what was here is gone")

    monkeypatch.setattr(f"terrazzo.front.repeated._Answers.{part}", gone)
    with pytest.warns(RuntimeWarning, match="capture takes longer with PyTorch .* what was here is gone"):
        assert show(capture(net, (torch.rand(2, 8),)).program) == expected
