"""Recurrent nets are traced as their definition, which is the same on every device."""

from __future__ import annotations

import itertools
import warnings
import weakref
from typing import Any

import pytest

import terrazzo
from terrazzo.front.capture import capture
from terrazzo.front.recurrent import CHUNK, recurrent_nets_by_definition
from terrazzo.ir.node import topological
from terrazzo.rules.torch_to_tensor.sums import is_call

torch = pytest.importorskip("torch")
nn = torch.nn


def cases() -> Any:
    both = (False, True)
    for layers, bias, two_ways, batch_first in itertools.product((1, 2), both, both, both):
        options = {"num_layers": layers, "bias": bias, "bidirectional": two_ways, "batch_first": batch_first}
        yield nn.GRU, options
        yield nn.LSTM, options
        yield nn.LSTM, {**options, "proj_size": 3}
        yield nn.RNN, {**options, "nonlinearity": "relu" if bias else "tanh"}


@pytest.mark.parametrize("batched", [True, False])
def test_the_definition_is_what_pytorch_computes(batched: bool) -> None:
    torch.manual_seed(0)
    for kind, options in cases():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net, x = kind(5, 7, **options), torch.randn((4, 6, 5) if batched else (4, 5))
            expected = net(x)
        with recurrent_nets_by_definition():
            torch.testing.assert_close(net(x), expected, msg=f"{kind.__name__} {options}")


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False])
def test_cells(kind: Any, bias: bool) -> None:
    cell, x = kind(5, 7, bias=bias), torch.randn(4, 5)
    expected = cell(x)
    with recurrent_nets_by_definition():
        torch.testing.assert_close(cell(x), expected)


def test_dropout_between_layers() -> None:
    net, x = nn.LSTM(5, 7, 2, dropout=0.5), torch.randn(4, 2, 5)
    torch.manual_seed(1)
    expected = net(x)
    torch.manual_seed(1)
    with recurrent_nets_by_definition():
        torch.testing.assert_close(net(x), expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_layer_begins_before_the_one_below_is_through(kind: Any) -> None:
    """What it multiplies first needs 16 steps of that, and no more."""
    net, x = kind(5, 7, 2), torch.randn(2 * CHUNK + 3, 2, 5)
    expected = net(x)
    with recurrent_nets_by_definition():
        torch.testing.assert_close(net(x), expected)
    program = capture(net, (x,)).program
    inputs = {n: len(n.args[0]) for n in topological(program.results) if is_call(n, "aten.stack.default")}
    assert sorted(inputs.values())[-4:] == [3, CHUNK, CHUNK, 2 * CHUNK + 3]
    first = min((n for n, count in inputs.items() if count == CHUNK), key=lambda n: len(topological([n])))
    steps = [n for n in topological([first]) if is_call(n, "aten.tanh.default")]
    assert len(steps) == CHUNK * (2 if kind is nn.LSTM else 1)


def test_packed_sequences_are_left_to_pytorch() -> None:
    net = nn.GRU(5, 7)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(4, 2, 5), torch.tensor([4, 2]))
    expected = net(packed)[0].data
    with recurrent_nets_by_definition():
        torch.testing.assert_close(net(packed)[0].data, expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_gpu_has_the_same_program(kind: Any) -> None:
    """On tensors that say they are on a GPU: no call of cuDNN, and no op of a cell."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(*shape: int) -> Any:
        return FakeTensor(mode, torch.empty(*shape, device="meta"), torch.device("cuda", 0))

    net, steps = kind(5, 7), () if issubclass(kind, nn.RNNCellBase) else (4,)
    hidden = (*(1 for _ in steps), 2, 7)
    state = tuple(torch.empty(hidden) for _ in range(2)) if "LSTM" in kind.__name__ else torch.empty(hidden)
    here = capture(net, (torch.empty(*steps, 2, 5), state)).program
    for name, p in list(net.named_parameters()):
        delattr(net, name)
        net.register_parameter(name, nn.Parameter(fake(*p.shape), requires_grad=False))
    if steps:
        net._flat_weights = list(net.parameters())
        net._flat_weight_refs = [weakref.ref(w) for w in net._flat_weights]
    state = tuple(fake(*s.shape) for s in state) if isinstance(state, tuple) else fake(*state.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        there = capture(net, (fake(*steps, 2, 5), state)).program
    assert [str(x.type) for x in there.results] == [str(x.type) for x in here.results]
    assert there.results == here.results


def test_weights_of_a_trace_are_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, moving them to one piece of memory would ask for their addresses, which they do not have."""

    def refuse(_: Any) -> None:
        raise RuntimeError("Cannot access data pointer of Tensor")

    net, x = torch.nn.LSTM(4, 6), torch.randn(3, 2, 4)
    expected = net(x)[0]
    monkeypatch.setattr(torch.nn.RNNBase, "flatten_parameters", refuse)
    found = terrazzo.compile(net, x, options={"target": "interpreter"})(x)[0]
    torch.testing.assert_close(found, expected)
    assert torch.nn.RNNBase.flatten_parameters is refuse
