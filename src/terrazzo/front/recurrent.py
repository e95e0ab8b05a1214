"""Recurrent nets as the steps they mean. On a GPU, PyTorch would call cuDNN, which wants their weights moved to memory
of their own, or kernels for one cell, which we would not look into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

State = tuple[Any, ...]
"""What a cell keeps from step to step: its output first."""
Cell = Callable[[Any, Any, State], State]
"""The state after a step, from what inputs and what the last output contribute to the gates, and the last state."""


@contextmanager
def recurrent_nets_by_definition(others: Mapping[Any, Callable[..., Any]] = MappingProxyType({})) -> Iterator[None]:
    """Within this, PyTorch's recurrent nets and cells are traced as products and elementwise functions, step by step,
    and `others` as what is given for them. Sequences that are packed are not known to it.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    nets = {
        torch.lstm: _net(_lstm),
        torch.gru: _net(_gru),
        torch.rnn_tanh: _net(lambda x, h, state: (torch.tanh(x + h),)),
        torch.rnn_relu: _net(lambda x, h, state: (torch.relu(x + h),)),
    }
    cells = {torch.lstm_cell: _one_step(_lstm), torch.gru_cell: _one_step(_gru)}
    meant: dict[Any, Callable[..., Any]] = {**{f: _unpacked(f, net) for f, net in nets.items()}, **cells, **others}

    class Mode(TorchFunctionMode):  # type: ignore[misc]
        """Looks at the functions that are called, of which there are a dozen for every op: one mode does it for all."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return meant.get(func, func)(*args, **(kwargs or {}))

    net: Any = torch.nn.RNNBase
    flatten = net.flatten_parameters
    net.flatten_parameters = lambda self: None  # cuDNN wants weights in one piece of memory: those of a trace have none
    try:
        with Mode():
            yield
    finally:
        net.flatten_parameters = flatten


def _unpacked(fn: Callable[..., Any], net: Callable[..., Any]) -> Callable[..., Any]:
    """A net by its definition, and as it is for a packed sequence, whose sizes of batches come before the state."""
    return lambda *args, **kwargs: (net if isinstance(args[3], bool) else fn)(*args, **kwargs)


def _lstm(x: Any, h: Any, state: State) -> State:
    i, f, g, o = (x + h).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(x: Any, h: Any, state: State) -> State:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
    new = (xn + (xr + hr).sigmoid() * hn).tanh()
    return ((state[0] - new) * (xz + hz).sigmoid() + new,)


def _one_step(cell: Cell) -> Callable[..., Any]:
    from torch.nn.functional import linear

    def run(x: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        state = tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
        new = cell(linear(x, w_ih, b_ih), linear(state[0], w_hh, b_hh), state)
        return new if isinstance(hx, (tuple, list)) else new[0]

    return run


CHUNK = 16
"""Steps whose inputs are multiplied together where a layer reads the one below it, so that it can begin before that is
through.
"""


def _net(cell: Cell) -> Callable[..., Any]:
    import torch

    def run(
        x: Any, hx: Any, weights: Sequence[Any], bias: bool, layers: int, dropout: float, train: bool, both: bool,
        batch_first: bool,
    ) -> Any:  # fmt: skip
        x = x.transpose(0, 1) if batch_first else x
        first = tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
        ways = 2 if both else 1
        each = len(weights) // (layers * ways)
        last: list[State] = []
        parts = [x]
        for layer in range(layers):
            outputs = []
            for way in range(ways):
                number = layer * ways + way
                mine = list(weights[number * each : (number + 1) * each])
                found, state = _layer(cell, parts, tuple(s.select(0, number) for s in first), mine, bias, bool(way))
                outputs.append(found)
                last.append(state)
            if both or (dropout and train) or layer == layers - 1:
                x = torch.cat([torch.stack(way) for way in outputs], -1) if both else torch.stack(outputs[0])
                parts = [torch.dropout(x, dropout, True) if dropout and train and layer < layers - 1 else x]
            else:
                parts = [torch.stack(outputs[0][n : n + CHUNK]) for n in range(0, len(outputs[0]), CHUNK)]
        (x,) = parts
        return (x.transpose(0, 1) if batch_first else x, *(torch.stack(s) for s in zip(*last, strict=True)))

    return run


def _layer(
    cell: Cell, parts: Sequence[Any], state: State, weights: Sequence[Any], bias: bool, backward: bool
) -> tuple[list[Any], State]:
    """The outputs of a layer, and its state after the last step. One product has what all inputs of a part of the steps
    contribute.
    """
    from torch.nn.functional import linear

    w_ih, w_hh, *rest = weights
    b_ih, b_hh = rest[:2] if bias else (None, None)
    project = rest[2 if bias else 0 :]
    steps = [step for x in parts for step in linear(x, w_ih, b_ih).unbind(0)]
    outputs = []
    for step in steps[::-1] if backward else steps:
        new = cell(step, linear(state[0], w_hh, b_hh), state)
        state = (linear(new[0], *project), *new[1:]) if project else new
        outputs.append(state[0])
    return outputs[::-1] if backward else outputs, state
