"""Whole models: compiled, no fallback, and at most twice as far from float64 as eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.e2e.models import MODELS
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import terrazzo
from terrazzo.front import huggingface

LAYERS = ("tinyllama", "qwen2.5-7b", "llama-3-8b", "gpt2", "bert-base-uncased", "vit-b-16")


def rms(a: Any, b: Any) -> float:
    """Root mean square distance."""
    return float((a.double() - b.double()).pow(2).mean().sqrt())


def exact(module: Any, args: Any, kwargs: Any) -> list[Any]:
    """The results in float64."""
    wide = pytree.tree_map(
        lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, (args, kwargs)
    )
    return list(pytree.tree_leaves(copy.deepcopy(module).double()(*wide[0], **wide[1])))


def check(module: Any, args: Any, kwargs: Any, options: Any) -> None:
    """Our results against float64, beside eager's."""
    module = module.eval()
    with torch.no_grad():
        compiled = terrazzo.compile(module, *args, options=options, **kwargs)
        ours = pytree.tree_leaves(compiled(*args, **kwargs))
        eager = pytree.tree_leaves(module(*args, **kwargs))
        reference = exact(module, args, kwargs)
    assert not compiled.compiled.fallbacks
    for a, b, c in zip(ours, eager, reference, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert rms(a, c) <= 2 * rms(b, c) + 1e-9


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    check(make(), inputs(), {}, {"cache_dir": tmp_path, "libraries": "never"})


@pytest.mark.parametrize("name", MODELS)
def test_model_by_the_interpreter(name: str) -> None:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    check(make(), inputs(), {}, {"target": "interpreter", "libraries": "never"})


@pytest.mark.parametrize("name", ("gpt2", "bert-base-uncased", "tinyllama"))
@pytest.mark.parametrize("dtype", ("f32", "bf16"))
def test_layer(name: str, dtype: str, tmp_path: Any) -> None:
    module, args, kwargs = huggingface.load(name, layer=0, seq_len=16, random_weights=True, dtype=dtype)
    check(module, args, kwargs, {"cache_dir": tmp_path, "libraries": "never"})


def test_torch_compile_trains() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3))
    x, y = torch.randn(5, 8), torch.randint(0, 3, (5,))
    grads = []
    for fn in (model, torch.compile(model, backend="terrazzo")):
        model.zero_grad()
        torch.nn.functional.cross_entropy(fn(x), y).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_torch_compile_shapes_breaks_and_mutation() -> None:
    def f(x: Any) -> Any:
        y = x * 2
        if y.sum() > -1e9:  # a graph break
            y = y + 1
        y.mul_(2)
        return y.t()

    fast = torch.compile(f, backend="terrazzo")
    for n in (3, 5, 8, 9):
        x = torch.randn(2, n)
        out, expected = fast(x), f(x)
        torch.testing.assert_close(out, expected)
        assert out.stride() == expected.stride()
    z = torch.zeros(3)
    torch.compile(lambda x: x.add_(1), backend="terrazzo")(z)
    assert z.tolist() == [1, 1, 1]


def test_torch_compile_constants_expanded_results_and_sizes_from_data() -> None:
    def constant(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, torch.tensor(-3.0)).sum(0)

    def overlapping(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x + 1).expand(3, 4, 5), (x * 2).unfold(1, 3, 1), (x * 3).T, x.expand(2, 4, 5)

    x = torch.randn(4, 5)
    assert torch.equal(torch.compile(constant, backend="terrazzo", fullgraph=True)(x), constant(x))
    for ours, eager in zip(
        torch.compile(overlapping, backend="terrazzo", fullgraph=True)(x), overlapping(x), strict=True
    ):
        assert torch.equal(ours, eager) and ours.stride() == eager.stride()

    def split(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.tensor_split(x * 2, at)

    at = torch.tensor([1, 3])
    with pytest.warns(RuntimeWarning, match="PyTorch runs this graph"):
        parts = torch.compile(split, backend="terrazzo", fullgraph=True, dynamic=False)(x, at)
    assert all(torch.equal(a, b) for a, b in zip(parts, split(x, at), strict=True))


def test_a_compiler_bug_is_a_loud_warning_and_pytorch_runs_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        return [][1]

    monkeypatch.setattr("terrazzo.pipelines.fuse", broken)
    torch._dynamo.reset()
    x = torch.randn(5, 7)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 3, -1)

    with pytest.warns(RuntimeWarning, match="A BUG OF THE COMPILER .*: pass fuse: IndexError: list index") as said:
        ours = torch.compile(fn, backend="terrazzo")(x)
    assert torch.equal(ours, fn(x))
    (warning,) = [str(w.message) for w in said if "A BUG" in str(w.message)]
    assert "To see it again:\n    terrazzo check --from loop " in warning and "PyTorch runs this graph" in warning
    torch._dynamo.reset()
    with pytest.raises(Exception, match="pass fuse: IndexError: list index out of range"):
        torch.compile(fn, backend="terrazzo", options={"strict": True})(x)


@pytest.mark.parametrize("training", (False, True))
def test_pytorch_then_runs_what_it_was_given(monkeypatch: pytest.MonkeyPatch, training: bool) -> None:
    """Its own attention, say, and not the products and the softmax that we take it apart into."""

    def broken(*_: Any, **__: Any) -> Any:
        return [][1]

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr("terrazzo.pipelines.fuse", broken)
    torch._dynamo.reset()
    q, k, v = (torch.randn(2, 3, 8, 16, requires_grad=training) for _ in range(3))
    compiled = torch.compile(torch.nn.functional.scaled_dot_product_attention, backend="terrazzo")
    with pytest.warns(RuntimeWarning, match="A BUG OF THE COMPILER"):
        compiled(q, k, v)
    ran: list[str] = []
    with Ops():
        ours = compiled(q, k, v)
    assert torch.equal(ours, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    assert ran[0] == "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert ours.requires_grad is training


def test_what_fails_outside_of_a_pass_is_a_compiler_bug_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("slot")

    monkeypatch.setattr("terrazzo.run.compiled.make", broken)
    torch._dynamo.reset()
    x = torch.randn(5, 7)
    with pytest.warns(RuntimeWarning, match="A BUG OF THE COMPILER .*: compiling a graph: KeyError: 'slot'"):
        assert torch.equal(torch.compile(torch.tanh, backend="terrazzo")(x + 1), torch.tanh(x + 1))
