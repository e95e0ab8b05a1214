"""`torch.compile`: results that share memory in eager share it when compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import terrazzo  # noqa: E402
from terrazzo.front import results  # noqa: E402


def broken(x: Any) -> Any:
    y = x * 2
    first = y[0]
    torch._dynamo.graph_break()
    first.zero_()
    return y


def cache_window(x: Any) -> Any:
    cache = torch.zeros(2, 8) + x[0, 0]
    window = cache[:, 2:6]
    torch._dynamo.graph_break()
    window.copy_(x[:2])
    return cache, window


def given_window(x: Any) -> Any:
    window = x[:, 1:3]
    y = x.sum() + 1
    torch._dynamo.graph_break()
    window.mul_(y)
    return window


def both(x: Any) -> Any:
    y = x * 2
    return y, y[0], y.t(), y.detach(), y.view(-1)[3:]


def of_inputs(x: Any) -> Any:
    return x[0], x.t(), x * 1, x.expand(2, 4, 4)


def conjugate(x: Any) -> Any:
    y = torch.complex(x, x)
    return y, y.conj(), y.real


def turned_in_place(x: Any) -> Any:
    y = (x * 2)[:, :2].reshape(-1, 4)
    torch._dynamo.graph_break()
    y.t_()
    return y, x


PROGRAMS = (turned_in_place, broken, cache_window, given_window, both, of_inputs, conjugate)


def outcome(f: Callable[..., Any], leaf: Any) -> Any:
    """Who shares storage with whom, and all values after a write to every result."""
    x = leaf * 1
    found = f(x)
    tensors = [*(found if isinstance(found, tuple) else (found,)), x]
    storages = [t.untyped_storage().data_ptr() for t in tensors]
    shared = [[a == b for b in storages] for a in storages]
    facts = [(t.shape, t.stride(), t.storage_offset(), t.requires_grad) for t in tensors]
    values = []
    for k, t in enumerate(tensors):
        if 0 not in t.stride():
            t.detach().add_(k + 1)
        values += [u.detach().resolve_conj().clone() for u in tensors]
    return shared, facts, values


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:terrazzo")
def test_who_shares_memory(program: Callable[..., Any], grad: bool, dynamic: bool) -> None:
    if grad and program is conjugate:
        pytest.skip("no gradients of complex numbers")
    torch._dynamo.reset()
    fast = torch.compile(program, backend="terrazzo", dynamic=dynamic, options={"target": "interpreter"})
    x = torch.arange(16.0).reshape(4, 4).requires_grad_(grad)
    shared, facts, values = outcome(program, x)
    for _ in range(2):
        ours = outcome(fast, x)
        assert ours[:2] == (shared, facts)
        for a, b in zip(ours[2], values, strict=True):
            torch.testing.assert_close(a, b)


def test_inputs_that_begin_to_share_memory() -> None:
    """Sizes are open: what is compiled for inputs apart is not run for inputs that alias."""

    def f(x: Any, y: Any) -> Any:
        x.add_(1)
        return y * 2

    torch._dynamo.reset()
    fast = torch.compile(f, backend="terrazzo", dynamic=True, options={"target": "interpreter"})
    for make in (
        lambda: (torch.ones(6), torch.ones(6)),
        lambda: (x := torch.ones(6), x[:]),
        lambda: (torch.ones(6),) * 2,
    ):
        torch.testing.assert_close(fast(*make()), f(*make()))


def test_gradients_are_tensors_of_their_own() -> None:
    """Two gradients of one value must not be one memory, or a step of an optimizer changes both."""
    torch._dynamo.reset()
    a, b = torch.ones(4, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    fast = torch.compile(
        lambda a, b: ((a + b.view(-1)) * 3).sum(), backend="terrazzo", options={"target": "interpreter"}
    )
    fast(a, b).backward()
    a.grad.zero_()
    assert b.grad.tolist() == [[3, 3], [3, 3]]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no mkldnn")
def test_mkldnn_tensors_go_to_pytorch() -> None:
    torch._dynamo.reset()
    x = torch.randn(3, 3)
    fast = torch.compile(lambda x, y: (x.to_dense() + y) * 2, backend="terrazzo")
    with pytest.warns(RuntimeWarning, match="layout torch._mkldnn are not supported; PyTorch runs this graph"):
        assert torch.equal(fast(x.to_mkldnn(), x), x * 4)


@pytest.mark.parametrize("target", ["interpreter", "cpu"])
def test_a_copy_of_an_expanded_input(target: str) -> None:
    def ravelled(x: Any) -> Any:
        wide = x.expand(3, *x.shape)
        torch._dynamo.graph_break()
        return wide.ravel()

    x = torch.arange(24.0).reshape(4, 6)
    compiled = torch.compile(ravelled, backend="terrazzo", options={"target": target})
    assert torch.equal(compiled(x), ravelled(x))


def test_gradients_lie_plainly_and_as_their_leaves_lie() -> None:
    """The traced gradient of keys has its tokens innermost: as nobody relies on that, it is not copied to lie so. What
    autograd keeps lies as the leaf does, and what flows into another graph lies as that one was traced.
    """

    def attend(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def apart(x: Any, y: Any) -> Any:
        z = (x @ y).t().mul(y)
        torch._dynamo.graph_break()
        return (x @ z.t()).exp().t()

    torch._dynamo.reset()
    torch.manual_seed(0)
    fast = torch.compile(attend, backend="terrazzo", dynamic=False, options={"target": "interpreter"})
    q, k, v, g = (torch.randn(1, 2, 6, 4) for _ in range(4))
    plain = [x.clone().requires_grad_() for x in (q, k, v)]
    ours, eager = (torch.autograd.grad(f(*plain), plain, g) for f in (fast, attend))
    assert [x.is_contiguous() for x in ours] == [True] * 3
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    fast(*turned).backward(g)
    assert [x.grad.stride() for x in turned] == [x.stride() for x in turned]
    for a, b, c in zip(ours, turned, eager, strict=True):
        torch.testing.assert_close(a, c)
        torch.testing.assert_close(b.grad, c)
    broken = torch.compile(apart, backend="terrazzo", dynamic=False, options={"target": "interpreter"})
    x, y = (torch.randn(4, 4).requires_grad_() for _ in range(2))
    found = [torch.autograd.grad(f(x, y).square().sum(), (x, y)) for f in (broken, apart)]
    torch.testing.assert_close(*found)


LAST = torch.channels_last
LYING = {
    "convolution": (torch.conv2d, (2, 3, 6, 6), (4, 3, 3, 3), LAST),
    "convolution, statistics": (
        lambda x, w: torch.nn.functional.batch_norm(torch.conv2d(x, w), None, None, training=True).relu(),
        (2, 3, 6, 6),
        (4, 3, 3, 3),
        LAST,
    ),
    "transposed convolution": (torch.conv_transpose2d, (2, 3, 6, 6), (3, 4, 3, 3), LAST),
    "product": (torch.matmul, (3, 5), (5, 4), None),
}


@pytest.mark.parametrize("case", LYING)
@pytest.mark.parametrize("target", ["interpreter", "cpu"])
def test_gradients_lie_as_in_eager_mode_where_their_inputs_do_not_lie_row_by_row(case: str, target: str) -> None:
    f, *shapes, form = LYING[case]
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = [torch.randn(s if form else s[::-1], dtype=torch.float64) for s in shapes]
    x, w = (y.to(memory_format=form) if form else y.t() for y in made)
    x, w = x.requires_grad_(), w.requires_grad_()
    fast = torch.compile(f, backend="terrazzo", options={"target": target, "strict": True})
    ours, eager = (torch.autograd.grad(g(x, w).square().sum(), (x, w)) for g in (fast, f))
    assert not eager[0].is_contiguous() and [a.stride() for a in ours] == [b.stride() for b in eager]
    torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize(
    "share",
    [
        lambda x: (x * 2).unfold(-1, 3, 2),
        lambda x: (x * 2).as_strided((3, 3), (1, 2)),
        lambda x: (x * 2)[None].expand(3, 8),
    ],
    ids=("unfold", "as_strided", "expand"),
)
def test_gradients_of_results_whose_elements_share_places(share: Callable[..., Any]) -> None:
    """AOTAutograd would lay such a gradient out as the result, where one element overwrites another."""
    found = []
    for f in (share, torch.compile(share, backend="terrazzo")):
        torch._dynamo.reset()
        x = torch.arange(8.0).requires_grad_()
        y = f(x)
        (y * torch.arange(1.0, y.numel() + 1).reshape(y.shape)).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_tangents_are_kept() -> None:
    """Of forward-mode differentiation kernels know nothing: PyTorch runs the graph, which is said."""
    from torch.autograd import forward_ad

    def program(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x

    compiled = torch.compile(program, backend="terrazzo")
    x, t = torch.randn(4), torch.randn(4)
    compiled(x)
    with forward_ad.dual_level():
        torch.testing.assert_close(compiled(x), program(x))  # nothing is dual yet
        dual = forward_ad.make_dual(x, t)
        expected = forward_ad.unpack_dual(program(dual))
        with pytest.warns(RuntimeWarning, match="have tangents, of forward-mode differentiation; PyTorch runs this"):
            found = forward_ad.unpack_dual(compiled(dual))
        assert torch.equal(found.tangent, expected.tangent) and torch.equal(found.primal, expected.primal)


def test_a_gradient_may_be_that_of_a_complex_number_times_something() -> None:
    def hologram(x: Any) -> Any:
        with torch.enable_grad():
            phase = x.detach().requires_grad_()
            loss = (torch.exp(1j * phase).real * x).sum()
            return torch.autograd.grad(loss, phase)[0]

    x = torch.randn(8)
    torch.testing.assert_close(terrazzo.compile(hologram, x)(x), hologram(x))


@pytest.mark.parametrize("known", [True, False])
def test_a_window_of_which_autograd_does_not_know(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made as PyTorch's own compiler makes it, or by PyTorch's own functions where there is no such thing: who
    writes to one sees it in the other, which counts no change.
    """
    if not known:
        monkeypatch.setattr(results, "window_maker", lambda: None)
    called = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **given: called.append(sizes) or empty(*sizes, **given))
    memory = torch.arange(40.0)
    base = torch.nn.Parameter(memory[8:].view(4, 8))
    window = results.View((2, 3), (1, 8), 9, torch.float32, False, False, False).of(base)
    assert bool(called) != known
    assert type(window) is torch.Tensor and not window.requires_grad and not window._is_view()
    assert window.tolist() == [[17, 25, 33], [18, 26, 34]] and window.data_ptr() == memory[17:].data_ptr()
    window.mul_(2)
    assert memory[17] == 34 and base._version == 0 and not window._is_view()
