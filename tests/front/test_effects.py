"""`terrazzo.compile`: side effects happen, or are refused; what is no tensor is compared at every call."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import terrazzo
from terrazzo import Limitation, UserError

torch = pytest.importorskip("torch")

INTERPRETER = {"target": "interpreter"}


@pytest.mark.parametrize("target", ["cpu", "interpreter"])
def test_inputs_are_changed(target: str, tmp_path: Path) -> None:
    def f(x: Any, y: Any) -> Any:
        x.add_(1)
        x[0].mul_(y[0])
        y.copy_(x)
        return x, x[1], y * 2, y

    def made() -> Any:
        return torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)

    fast = terrazzo.compile(f, *made(), options={"target": target, "cache_dir": tmp_path})
    assert torch.equal(torch.ones(2, 3), made()[1])
    for _ in range(2):
        mine, theirs = made(), made()
        ours, eager = fast(*mine), f(*theirs)
        for a, b in zip((*ours, *mine), (*eager, *theirs), strict=True):
            assert torch.equal(a, b)
        assert ours[0] is mine[0] and ours[3] is mine[1]
        ours[1].zero_()
        assert mine[0][1].tolist() == [0, 0, 0]


def test_running_statistics() -> None:
    ours = torch.nn.BatchNorm1d(3)
    eager = copy.deepcopy(ours)
    fast = terrazzo.compile(ours, torch.randn(5, 3), options=INTERPRETER)
    assert ours.num_batches_tracked == 0, "capturing changes nothing"
    for _ in range(3):
        x = torch.randn(5, 3)
        torch.testing.assert_close(fast(x), eager(x))
    for a, b in zip(ours.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_statistics_that_no_schema_says_are_written() -> None:
    """What batch_norm is on a GPU: it writes to inputs, and its schema says nothing of that."""

    def norm(*args: Any) -> Any:
        return torch.ops.aten.cudnn_batch_norm(*args, True, 0.1, 1e-5)[0]

    def fn(batch_norm: Any, x: Any, weight: Any, bias: Any, mean: Any, var: Any) -> Any:
        mean.add_(1)
        once = batch_norm(x, weight, bias, mean, var)
        return batch_norm(once.relu(), weight, bias, mean, var), mean * 2

    def eager(*args: Any) -> Any:
        return fn(lambda x, w, b, m, v: torch.nn.functional.batch_norm(x, m, v, w, b, True), *args)

    def ours(*args: Any) -> Any:
        return fn(norm, *args)

    x, weight, bias = torch.randn(4, 8, 5), torch.rand(8), torch.rand(8)
    mine, theirs = ([torch.zeros(8), torch.ones(8)] for _ in range(2))
    fast = terrazzo.compile(ours, x, weight, bias, *mine, options=INTERPRETER)
    for _ in range(2):
        got, expected = fast(x, weight, bias, *mine), eager(x, weight, bias, *theirs)
        for a, b in zip((*got, *mine), (*expected, *theirs), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_running_statistics_on_a_gpu() -> None:
    ours = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).cuda()
    eager = copy.deepcopy(ours)
    x = torch.randn(4, 3, 8, 8, device="cuda")
    with torch.no_grad():
        fast = terrazzo.compile(ours, x)
        for _ in range(2):
            torch.testing.assert_close(fast(x), eager(x), rtol=1e-3, atol=1e-3)  # cuDNN's convolution is of tf32
    for a, b in zip(ours.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
        assert not torch.equal(a, torch.zeros_like(a))


class Counting(torch.nn.Module):  # type: ignore[misc]
    """Has every side effect a module may have; `how` says which."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.calls, self.seen = 0, []

    def forward(self, x: Any, how: str) -> Any:
        match how:
            case "buffer":
                self.total = self.total + x
            case "number":
                self.calls += 1
            case "list":
                self.seen.append(x)
            case "attribute":
                self.last = x
            case "mode":
                self.eval()
        return self.total + x


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("buffer", "the call gives the module another total; write into the one it has (total.copy_(...))"),
        ("number", "the call sets calls, which a compiled one would not do"),
        ("list", "the call sets seen, which a compiled one would not do"),
        ("attribute", "the call sets last, which a compiled one would not do"),
        ("mode", "the call sets training, which a compiled one would not do"),
    ],
)
def test_other_changes_of_a_module_are_refused(how: str, message: str) -> None:
    module = Counting()
    with pytest.raises(UserError, match=re.escape(message)):
        terrazzo.compile(module, torch.ones(3), how)
    assert module.calls == 0 and module.seen == [] and not hasattr(module, "last") and module.training
    assert module.total.tolist() == [0, 0, 0]


class Settling(torch.nn.Module):  # type: ignore[misc]
    """Sets attributes in its first call; `how` says which."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(3.0))
        self.shift, self.scaled, self.cache = 3, False, {}

    def forward(self, x: Any, how: str) -> Any:
        match how:
            case "same":  # the first call goes by the new value, too
                self.shift = 0
            case "later":
                x = x if self.scaled else x * 2
                self.scaled = True
            case "cache":
                if how not in self.cache:
                    self.cache[how] = self.weight.detach() * 2
                x = x + self.cache[how]
        return x * self.weight + self.shift


def test_an_attribute_that_makes_no_difference_may_be_set() -> None:
    module, x = Settling(), torch.randn(3)
    compiled = terrazzo.compile(module, x, "same", options=INTERPRETER)
    assert module.shift == 3
    torch.testing.assert_close(compiled(x, "same"), module(x, "same"))


@pytest.mark.parametrize("how", ["later", "cache"])
def test_what_the_first_call_sets_is_set_before_compiling(how: str) -> None:
    module, x = Settling(), torch.randn(3)
    message = "which a compiled one would not do; if only its first call does (to fill a cache, say), make that call"
    with pytest.raises(UserError, match=re.escape(message)):
        terrazzo.compile(module, x, how)
    assert not module.scaled and not module.cache
    module(x, how)
    compiled = terrazzo.compile(module, x, how, options=INTERPRETER)
    torch.testing.assert_close(compiled(x, how), module(x, how))


OUTSIDE = torch.ones(3)


def test_tensors_that_a_function_finds_elsewhere_are_constants() -> None:
    outside, weight = torch.randn(3), torch.nn.Parameter(torch.randn(3))

    def f(x: Any) -> Any:
        y = outside.clone()
        y.view(3)[1:].add_(1)
        return x * y + outside[1:].sum() + weight, outside

    compiled, x = terrazzo.compile(f, torch.ones(3), options=INTERPRETER), torch.randn(3)
    torch.testing.assert_close(compiled(x), f(x))
    outside.add_(1)  # which is seen
    torch.testing.assert_close(compiled(x)[0], f(x)[0])


@pytest.mark.parametrize(
    "f",
    [lambda x: OUTSIDE.add_(x), lambda x: OUTSIDE.view(3)[1:].mul_(2) + x[1:], lambda x: OUTSIDE.detach().zero_() + x],
)
def test_writes_to_tensors_that_are_no_arguments_are_refused(f: Callable[..., Any]) -> None:
    message = "the call writes to a tensor of shape [3] that is no argument of it; make it one, or a buffer"
    with pytest.raises(UserError, match=re.escape(message)):
        terrazzo.compile(f, torch.ones(3), options=INTERPRETER)
    assert OUTSIDE.tolist() == [1, 1, 1]


def appends(xs: Any) -> Any:
    xs.append(xs[0])
    return xs[0] * 2


def transposes(x: Any) -> Any:
    return x.t_() * 2


def expands(x: Any) -> Any:
    x[0].expand(3, 4).zero_()
    return x * 2


def resized(x: Any) -> Any:
    y = torch.empty(0)
    torch.add(x, 1, out=y)
    return y


def sets(x: Any) -> Any:
    y = torch.empty(0)
    y.set_(x)
    return y * 2


def adds(x: Any) -> Any:
    return x.add_(1)


def adds_both(x: Any, y: Any) -> Any:
    return x.add_(1), y * 2


X = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("f", "args", "message"),
    [
        (appends, ([X],), "the call changes a list or a dictionary among its arguments; return the new value instead"),
        (transposes, (X,), "the call gives one of its inputs, of shape [3, 4], another shape or other memory in place"),
        (expands, (X,), "aten.zero_.default writes to a tensor that has one element at several places"),
        (resized, (X,), "aten.add.out: results are not written to `out`; use out.copy_(...)"),
        (sets, (X,), "aten.set_.source_Tensor gives a tensor other memory; use another tensor instead"),
        (
            adds,
            (X[:, ::2],),
            "changes an input of shape [3, 2] and strides [4, 2] in place, which works for one without gaps",
        ),
        (adds_both, (X, X[0]), "x is changed in place and shares memory with y; give one of them as a clone"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_refused(f: Callable[..., Any], args: Any, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        terrazzo.compile(f, *args, options=INTERPRETER)
    assert X.shape == (3, 4) and bool((X == 1).all())


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_gradients_of_recurrent_modules(kind: Any) -> None:
    """Their lists hold what stands for the weights, in the middle of the call; that is undone."""
    net = kind(4, 3)

    class Step(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Any) -> Any:
            with torch.enable_grad():
                weights = {n: p.detach().requires_grad_() for n, p in self.net.named_parameters()}
                loss = torch.func.functional_call(self.net, weights, (x,))[0].pow(2).sum()
                return torch.autograd.grad(loss, list(weights.values()))

    module, x = Step(), torch.randn(5, 2, 4)
    compiled = terrazzo.compile(module, x, options=INTERPRETER)
    assert all(a is b for a, b in zip(net._flat_weights, net.parameters(), strict=True))
    torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_modules_keep_lists_of_their_weights(kind: Any) -> None:
    """They make them anew when others stand for the weights; that is no side effect, and is undone."""
    module, x = kind(4, 3, batch_first=True), torch.randn(2, 5, 4)
    compiled = terrazzo.compile(module, x)
    assert all(a is b for a, b in zip(module._flat_weights, module.parameters(), strict=True))
    torch.testing.assert_close(compiled(x)[0], module(x)[0])


def test_a_call_asks_for_gradients_by_weights_and_inputs() -> None:
    """A step of learning at test time; what was not kept for it is computed again, after the weights were replaced."""
    from torch.utils.checkpoint import checkpoint

    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))

    class Step(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Any) -> Any:
            with torch.enable_grad():
                loss = checkpoint(self.net, x, use_reentrant=False).pow(2).sum()
                slopes = torch.autograd.grad(loss, [x, *self.net.parameters()])
            return [p - 0.1 * g for p, g in zip([x, *self.net.parameters()], slopes, strict=True)]

    module, x = Step(), torch.randn(5, 4, requires_grad=True)
    compiled = terrazzo.compile(module, x, options=INTERPRETER)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))
    assert x.requires_grad and not compiled(x)[0].requires_grad


def test_inputs_that_begin_to_share_memory_are_refused() -> None:
    fast = terrazzo.compile(adds_both, torch.ones(4), torch.ones(4), options=INTERPRETER)
    x = torch.ones(8)
    with pytest.raises(UserError, match="input x is changed in place and shares memory with another input"):
        fast(x[:4], x[4:])


def test_what_is_no_tensor_is_compared() -> None:
    fast = terrazzo.compile(
        lambda x, n, flag=True: x * n if flag else x, torch.ones(3), 2, flag=True, options=INTERPRETER
    )
    assert fast(torch.ones(3), 2, flag=True).tolist() == [2, 2, 2]
    for args, flag, message in (
        ((torch.ones(3), 3), True, "argument n: compiled for 2, got 3. What is no tensor is fixed when it is compiled"),
        ((torch.ones(3), 2.0), True, "argument n: compiled for 2, got 2.0"),
        ((torch.ones(3), 2), False, "argument flag: compiled for True, got False"),
        ((2, torch.ones(3)), True, "argument x: compiled for a tensor, got 2"),
        ((torch.ones(3), torch.ones(3)), True, "argument n: compiled for 2, got tensor("),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            fast(*args, flag=flag)
    nan = terrazzo.compile(lambda x, n: x * n, torch.ones(1), float("nan"), options=INTERPRETER)
    assert nan(torch.ones(1), float("nan")).isnan().all()


def test_views_among_results() -> None:
    fast = terrazzo.compile(lambda x: ((y := x * 2), y[0], x.t()), torch.ones(2, 2), options=INTERPRETER)
    x = torch.ones(2, 2)
    y, first, turned = fast(x)
    first.zero_()
    turned.zero_()
    assert y.tolist() == [[0, 0], [2, 2]] and not x.any()


@pytest.mark.parametrize("target", ["cpu", "interpreter"])
def test_copies(target: str, tmp_path: Path) -> None:
    """A deep copy has weights of its own, and they are those of a model that is copied with it."""
    model = torch.nn.Linear(3, 3)
    model.fast = terrazzo.compile(model, torch.ones(1, 3), options={"target": target, "cache_dir": tmp_path})
    x = torch.ones(1, 3)
    same, other = copy.copy(model.fast), copy.deepcopy(model)
    before = model(x)
    with torch.no_grad():
        model.weight.add_(1)
        other.bias.sub_(2)
    torch.testing.assert_close(same(x), before + 3)
    torch.testing.assert_close(other.fast(x), before - 2)


def test_pickling_is_refused() -> None:
    fast = terrazzo.compile(torch.relu, torch.ones(3), options=INTERPRETER)
    with pytest.raises(UserError, match=r"a compiled call cannot be pickled.* Pickle the model and compile it where"):
        pickle.dumps(fast)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no mkldnn")
def test_mkldnn_tensors_are_a_limitation() -> None:
    with pytest.raises(
        Limitation, match=r"tensors of layout torch._mkldnn are not supported; torch.compile gives them"
    ):
        terrazzo.compile(torch.relu, torch.ones(3).to_mkldnn())


@pytest.mark.parametrize(
    ("code", "results"),
    [
        ("m = nn.BatchNorm1d(3).train()\nm(torch.randn(4, 3))", 4),
        ("m = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).train()\nm(torch.randn(4, 3))", 4),
        ("m = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))\nm[1].train()\nm(torch.randn(4, 3))", 4),
        ("b = nn.BatchNorm1d(3).train()\nm = nn.Sequential(b, nn.ReLU())\nm(torch.randn(4, 3))", 4),
        ("m = nn.BatchNorm1d(3)\nm(torch.randn(4, 3))", 1),
        ("x = torch.ones(3)\nx.add_(1)\nx * 2", 2),
    ],
)
def test_code_keeps_its_mode(code: str, results: int) -> None:
    """`-c`: modules are in evaluation mode unless the code says otherwise; new values of what changes are results."""
    from terrazzo.front import code as front
    from terrazzo.front.capture import capture

    assert len(capture(*front.load(code)).program.results) == results


class Shared(torch.nn.Module):
    """A module at two places, one of its weights in a third module too."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        self.layers = torch.nn.ModuleList((layer, layer))
        self.out = torch.nn.Linear(3, 3, bias=False)
        self.out.weight = layer[0].weight

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def test_a_shared_module_is_as_it_was_and_its_weights_are_seen_everywhere() -> None:
    """PyTorch's functional_call would leave what stood for its weights in it."""
    module, x = Shared().eval(), torch.randn(4, 3)
    compiled = terrazzo.compile(module, x, options=INTERPRETER)
    assert {type(t) for t in (*module.parameters(), *module.buffers())} == {torch.nn.Parameter, torch.Tensor}
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))
        module.out.weight.mul_(2)
        torch.testing.assert_close(compiled(x), module(x))


def test_results_that_are_no_tensors(tmp_path: Path) -> None:
    def f(x: Any, power: int) -> Any:
        y = x**power
        return {"y": y, "power": power, "none": None}, [y.sum(), "text", 0.5, y]

    def step(weight: Any, gradient: Any) -> None:
        weight.sub_(gradient)

    options = {"target": "interpreter", "cache_dir": tmp_path}
    x = torch.arange(6.0)
    fast = terrazzo.compile(f, x, 2, options=options)
    named, listed = fast(x + 1, 2)
    assert torch.equal(named["y"], (x + 1) ** 2) and (named["power"], named["none"]) == (2, None)
    assert torch.equal(listed[0], ((x + 1) ** 2).sum()) and listed[1:3] == ["text", 0.5] and listed[3] is named["y"]
    weight = x.clone()
    assert terrazzo.compile(step, weight.clone(), x, options=options)(weight, x + 1) is None
    assert torch.equal(weight, -torch.ones(6))


def test_a_number_that_is_another_each_time_is_refused() -> None:
    class Counted(torch.nn.Module):
        steps = 0

        def forward(self, x: Any) -> Any:
            self.steps += 1
            return x + 1, self.steps

    with pytest.raises(UserError, match="the call sets steps"):
        terrazzo.compile(Counted(), torch.ones(3), options=INTERPRETER)


def test_what_is_no_tensor_and_not_plain_is_refused() -> None:
    with pytest.raises(UserError, match="the results must be tensors; found int"):
        terrazzo.compile(lambda x: 3, torch.ones(3), options=INTERPRETER)
    with pytest.raises(UserError, match="the results must be tensors; found object"):
        terrazzo.compile(lambda x: (x + 1, object()), torch.ones(3), options=INTERPRETER)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_what_a_trace_within_the_call_left_is_refused() -> None:
    def f(x: Any) -> Any:
        value, tangent = torch.func.linearize(lambda x: x.tanh().sum() ** 2, x)
        return value, tangent(x)

    with pytest.raises(Limitation, match=r"left a tensor without data, as torch\.func\.linearize does"):
        terrazzo.compile(f, torch.ones(3), options=INTERPRETER)
