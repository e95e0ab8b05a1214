"""Gradients of gradients through `torch.compile`: as in eager mode, or an error; never a part of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import functional, grad
from torch.multiprocessing.reductions import StorageWeakRef

from terrazzo.errors import Limitation
from terrazzo.front import dynamo
from terrazzo.front.twice import TOLD

Compiler = Callable[[Any], Any]


def net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), *layers, nn.Linear(16, 1)).double()


def inputs() -> torch.Tensor:
    return torch.randn(8, 6, dtype=torch.double, requires_grad=True)


def penalty(compiler: Compiler, *layers: nn.Module) -> list[Any]:
    """The gradient penalty of WGAN-GP."""
    model, x = net(*(layers or (nn.Tanh(),))), inputs()
    critic = compiler(model)
    torch.manual_seed(3)  # dropped is what is dropped in eager mode, also where the graph is run again
    (slope,) = grad(critic(x).sum(), x, create_graph=True)
    (slope.norm(dim=1) - 1).square().mean().backward()
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def with_batch_norm(compiler: Compiler) -> list[Any]:
    return penalty(compiler, nn.BatchNorm1d(16), nn.Tanh())


def with_dropout(compiler: Compiler) -> list[Any]:
    return penalty(compiler, nn.Tanh(), nn.Dropout(0.3))


def equation(compiler: Compiler) -> list[Any]:
    """A physics-informed net: u_xx, and the gradient of its square for the weights."""
    model, x = net(nn.Tanh()), inputs()
    (u_x,) = grad(compiler(model)(x).sum(), x, create_graph=True)
    (u_xx,) = grad(u_x[:, 0].sum(), x, create_graph=True)
    (u_xx[:, 0] + u_x[:, 1]).square().mean().backward()
    return [u_xx, *(p.grad for p in model.parameters() if p.grad is not None)]


def inner_loop(compiler: Compiler) -> list[Any]:
    """Three steps of MAML, each of which depends on the one before."""
    x, y, start = inputs().detach(), torch.randn(8, 3).double(), torch.randn(6, 3).double().requires_grad_()
    loss = compiler(lambda w: (torch.tanh(x @ w) - y).square().mean())
    w = start
    for _ in range(3):
        w = w - 0.1 * grad(loss(w), w, create_graph=True)[0]
    return [*grad(loss(w), start)]


def cubes(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x.cumsum(0)).pow(3).sum()


def products(compiler: Compiler) -> list[Any]:
    x, v = torch.randn(2, 5).double()
    f = compiler(cubes)
    whole = compiler(lambda x, v: torch.func.jvp(torch.func.grad(cubes), (x,), (v,)))
    return [*functional.hvp(f, x, v), *functional.vhp(f, x, v), functional.hessian(f, x), *whole(x, v)]


def beside_eager(compiler: Compiler) -> list[Any]:
    """Part of the second derivative goes past the compiled graph: the other part was missing without a word."""
    model, x = net(nn.Tanh()), inputs()
    (slope,) = grad(compiler(model)(x).sum() + x.pow(3).sum(), x, create_graph=True)
    return [*grad(slope.square().sum(), x)]


def one_of_another(compiler: Compiler) -> list[Any]:
    """Of two inputs one depends on the other, which is no part of the graph."""
    x = inputs()
    (slope,) = grad(compiler(lambda a, b: (a.sin() * b).sum())(x, x.exp()), x, create_graph=True)
    return [*grad(slope.square().sum(), x)]


def views(compiler: Compiler) -> list[Any]:
    model, x = net(nn.Tanh()), inputs()
    y, first, given = compiler(lambda x: ((y := model(x)), y[0], x[1:]))(x)
    (slope,) = grad(y.square().sum() + first.pow(3).sum() + given.pow(3).sum(), x, create_graph=True)
    return [*grad(slope.square().sum(), x)]


def several_graphs(compiler: Compiler) -> list[Any]:
    """What one graph gives and the next one does not save, whole and in part, is made again."""
    x = inputs()
    first, second, third = map(
        compiler, (lambda x: (x.sin(), x.cumsum(0)), torch.add, lambda x, y: (x * y.exp()).sum())
    )
    a, b = first(x)
    c = second(a, b[:, :1])
    (slope,) = grad(third(c, second(a.t(), c.t()).t()), x, create_graph=True)
    del a, b, c
    slope.square().sum().backward()
    return [slope, x.grad]


def beside_another(compiler: Compiler) -> list[Any]:
    """What made an input was gone backward through before, for somebody else."""
    x, w = inputs(), torch.randn(6).double().requires_grad_()
    first, second = compiler(torch.sin), compiler(lambda x, w: (x + w).pow(3).sum())
    found = []
    for _ in range(2):
        a = first(x)
        one, other = second(a, w.detach()), second(a, w)
        del a
        one.backward()
        (slope,) = grad(other, w, create_graph=True)
        found += [slope, *grad(slope.square().sum(), w)]
    return found


CASES = [
    penalty, with_batch_norm, with_dropout, equation, inner_loop, products, beside_eager, one_of_another, views,
    several_graphs, beside_another,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_as_in_eager_mode(case: Callable[[Compiler], list[Any]]) -> None:
    torch.manual_seed(0)
    right = case(lambda f: f)
    torch.manual_seed(0)
    torch._dynamo.reset()
    found = case(lambda f: torch.compile(f, backend="terrazzo"))
    for mine, eager in zip(found, right, strict=True):
        assert torch.allclose(mine, eager, rtol=1e-9, atol=1e-12)


def test_it_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "_said", set())
    with pytest.warns(RuntimeWarning, match=r"create_graph=True.*PyTorch computes them") as told:
        penalty(lambda f: torch.compile(f, backend="terrazzo"))
        equation(lambda f: torch.compile(f, backend="terrazzo"))
    assert sum("create_graph" in str(w.message) for w in told) == 1


def test_pytorch_runs_the_graph_as_long_as_such_gradients_are_asked_for() -> None:
    """Forces and then the loss, of energies: what a call's gradients are asked for first says who runs the next."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = net(nn.Tanh())
    energy = torch.compile(model, backend="terrazzo")
    ours = []
    for forces in (True, True, True, False, False, True):
        x = inputs()
        found, right = energy(x), model(x)
        ours.append("Compiled" in type(found.grad_fn).__name__)
        slopes = []
        for e in (found, right):
            (slope,) = grad(e.sum(), x, create_graph=forces)
            loss = slope.square().sum() + e.square().sum() if forces else None
            slopes.append([slope, *(grad(loss, [*model.parameters()], allow_unused=True) if forces else ())])
        for mine, eager in zip(*slopes, strict=True):
            assert mine is eager is None or torch.allclose(mine, eager, rtol=1e-9, atol=1e-12)
    assert ours == [True, False, False, False, True, True]


@pytest.mark.skipif(not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="PyTorch has no such switch")
@pytest.mark.filterwarnings("error:terrazzo")
def test_gradients_within_a_function_are_compiled_where_pytorch_is_told_to_trace_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forces within a model, whose loss depends on them: what is told of such gradients says so."""
    monkeypatch.setattr(dynamo, "_said", set())
    monkeypatch.setattr(torch._dynamo.config, "trace_autograd_ops", True)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = net(nn.Tanh())

    def forces(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        energy = model(x).sum()
        return energy, -grad(energy, x, create_graph=True)[0]

    found = []
    x = inputs()
    for fn in (torch.compile(forces, backend="terrazzo", fullgraph=True), forces):
        energy, force = fn(x)
        loss = energy.square() + force.square().sum()
        found.append([energy, force, *grad(loss, [x, *model.parameters()], allow_unused=True)])
    for mine, eager in zip(*found, strict=True):
        assert mine is eager is None or torch.allclose(mine, eager, rtol=1e-9, atol=1e-12)
    assert "config.trace_autograd_ops" in TOLD


def test_old_values_that_are_gone_are_an_error() -> None:
    def grow(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = x.sin() * scale.clone()
        scale.mul_(1.5)
        return y

    x = inputs()
    y = torch.compile(grow, backend="terrazzo")(x, torch.ones(6).double())
    with pytest.raises(Limitation, match=r"it writes to its inputs.*torch.func.grad"):
        grad(y.sum(), x, create_graph=True)


def test_an_input_written_to_since_is_an_error() -> None:
    x, step = inputs(), torch.ones(6).double()
    y = torch.compile(lambda x, step: (x + step).sum(), backend="terrazzo")(x, step)
    step.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: an input of a compiled graph"):
        grad(y, x, create_graph=True)


def test_a_tensor_that_grows_in_place_does_not_hold_itself() -> None:
    x = inputs()
    z = x * 1
    alive = weakref.ref(z)
    z.add_(torch.compile(lambda z: z * 3 + 1, backend="terrazzo")(z))
    gc.disable()
    try:
        z.sum().backward()
        del z
        assert alive() is None
    finally:
        gc.enable()


def test_what_another_graph_gave_is_not_held() -> None:
    """Nor is what is written to: of a model in several graphs both took memory until the backward pass."""
    first, second = (
        torch.compile(f, backend="terrazzo") for f in (torch.sin, lambda a, b, c: (a + b * 2, c.add_(1))[0])
    )
    x = inputs()
    for _ in range(2):
        a, c = first(x), torch.zeros(8, 6).double()
        b = a[:, :1].expand(8, 6)
        alive = [StorageWeakRef(t.untyped_storage()) for t in (a, c)]
        loss = second(a, b, c).sum()
        del a, b, c
        assert all(ref.expired() for ref in alive)
        loss.backward()


def test_what_was_written_to_since_another_graph_gave_it_is_held() -> None:
    """It is another value than could be made again."""
    first, second = torch.compile(torch.exp, backend="terrazzo"), torch.compile(lambda a: a.pow(3), backend="terrazzo")
    x = inputs()
    a = first(x)
    with torch.no_grad():
        a.mul_(2)
    value = a.detach().clone()
    (slope,) = grad(second(a).sum(), a, create_graph=True)
    assert torch.allclose(slope, 3 * value.square())
