"""Recurrent nets, and scans over time."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Made, normal, program, whole


class Reader(nn.Module):
    """A recurrent net, and a linear layer over its last step."""

    def __init__(self, net: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.net, self.out = net, nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.net(x)[0][:, -1])


@program(small={"count": 2, "steps": 4, "width": 8, "hidden": 16}, training=True)
def lstm(count: int = 32, steps: int = 64, width: int = 256, hidden: int = 512) -> Made:
    """An LSTM of two layers."""
    return Reader(nn.LSTM(width, hidden, 2, batch_first=True), hidden, 10), normal(count, steps, width)


@program(small={"count": 2, "steps": 4, "width": 8, "hidden": 16})
def gru(count: int = 32, steps: int = 64, width: int = 256, hidden: int = 512) -> Made:
    """A GRU."""
    return nn.GRU(width, hidden, 1, batch_first=True), normal(count, steps, width)


@program(small={"count": 2, "steps": 4, "width": 8, "hidden": 16})
def bidirectional_gru(count: int = 32, steps: int = 32, width: int = 256, hidden: int = 256) -> Made:
    """A GRU in both directions."""
    net = nn.GRU(width, hidden, 1, batch_first=True, bidirectional=True)
    return Reader(net, 2 * hidden, 10), normal(count, steps, width)


@program(small={"count": 2, "steps": 4, "width": 8, "hidden": 16}, training=True)
def elman(count: int = 64, steps: int = 64, width: int = 256, hidden: int = 512) -> Made:
    """A plain recurrent net with ReLU."""
    net = nn.RNN(width, hidden, nonlinearity="relu", batch_first=True)
    return Reader(net, hidden, 10), normal(count, steps, width)


class Unrolled(nn.Module):
    """`h = tanh(linear(cat(x[t], h)))`, written as a loop, the steps stacked."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden, self.linear = hidden, nn.Linear(width + hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], self.hidden)
        steps = []
        for t in range(x.shape[0]):
            h = torch.tanh(self.linear(torch.cat((x[t], h), -1)))
            steps.append(h)
        return torch.stack(steps)


@program(small={"steps": 4, "count": 2, "width": 8, "hidden": 16}, training=True)
def unrolled(steps: int = 16, count: int = 8, width: int = 256, hidden: int = 256) -> Made:
    """A recurrent net as a loop."""
    return Unrolled(width, hidden), normal(steps, count, width)


class Cells(nn.Module):
    """An LSTM cell in a loop over embeddings, each step scored (a character model's)."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words, self.cell, self.out = nn.Embedding(words, width), nn.LSTMCell(width, width), nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        given = self.words(x)
        h = c = given.new_zeros(len(x), given.shape[-1])
        steps = []
        for t in range(x.shape[1]):
            h, c = self.cell(given[:, t], (h, c))
            steps.append(h)
        return self.out(torch.stack(steps, 1))


@program(small={"count": 2, "steps": 4, "words": 20, "width": 16}, training=True)
def character_model(count: int = 32, steps: int = 32, words: int = 128, width: int = 512) -> Made:
    """A character model of LSTM cells."""
    return Cells(words, width), whole(words, count, steps)


class Quasi(nn.Module):
    """Gates by a convolution over time, then `h = f h + (1 - f) z` (QRNN's)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gates = nn.Conv1d(width, 3 * hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        z, keep, out = self.gates(f.pad(x, (1, 0))).chunk(3, 1)
        z, keep, out = torch.tanh(z), torch.sigmoid(keep), torch.sigmoid(out)
        h = torch.zeros_like(z[..., 0])
        steps = []
        for t in range(x.shape[-1]):
            h = keep[..., t] * h + (1 - keep[..., t]) * z[..., t]
            steps.append(h)
        return out * torch.stack(steps, -1)


@program(small={"count": 2, "width": 8, "hidden": 8, "steps": 6})
def qrnn(count: int = 32, width: int = 256, hidden: int = 512, steps: int = 32) -> Made:
    """A quasi-recurrent layer."""
    return Quasi(width, hidden), normal(count, width, steps)


class Selective(nn.Module):
    """A selective state space over time as a loop, each step linear in its state (Mamba's, as it is defined)."""

    def __init__(self, width: int, state: int) -> None:
        super().__init__()
        self.into, self.parts, self.out = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, 2 * state + 1),
            nn.Linear(width, width),
        )
        self.rate, self.state = nn.Parameter(torch.randn(width, state)), state

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.into(x).chunk(2, -1)
        b, c, step = self.parts(x).split((self.state, self.state, 1), -1)
        step = f.softplus(step)
        decay = torch.exp(-step[..., None] * torch.exp(self.rate))
        new = (step * x)[..., None] * b[:, :, None]
        h = torch.zeros_like(new[:, 0])
        steps = []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + new[:, t]
            steps.append((h * c[:, t, None]).sum(-1))
        return self.out(torch.stack(steps, 1) * f.silu(gate))


@program(small={"count": 2, "steps": 5, "width": 8, "state": 4}, training=True)
def selective_scan(count: int = 8, steps: int = 64, width: int = 1024, state: int = 16) -> Made:
    """A selective scan in a loop."""
    return Selective(width, state), normal(count, steps, width)


class ParallelScan(nn.Module):
    """A linear recurrence by sums of logarithms, all steps at once (minGRU's)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.value, self.out = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).float()
        value = f.softplus(self.value(x).float()) + 0.5
        keep = -f.softplus(gate).cumsum(1)
        new = torch.logcumsumexp(-f.softplus(-gate) + value.log() - keep, 1)
        return self.out(torch.exp(keep + new).to(x.dtype))


@program(small={"count": 2, "steps": 12, "width": 8, "hidden": 8})
def parallel_scan(count: int = 8, steps: int = 1024, width: int = 512, hidden: int = 512) -> Made:
    """minGRU over 1024 steps."""
    return ParallelScan(width, hidden), normal(count, steps, width)


class Attending(nn.Module):
    """A decoder of GRU cells that attends to what was read at every step (Bahdanau's)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.key, self.query, self.score = (
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.Linear(width, 1, bias=False),
        )
        self.cell = nn.GRUCell(2 * width, width)

    def forward(self, read: Tensor, given: Tensor) -> Tensor:
        keys, h = self.key(read), read.mean(1)
        steps = []
        for t in range(given.shape[1]):
            weight = torch.softmax(self.score(torch.tanh(keys + self.query(h)[:, None])), 1)
            h = self.cell(torch.cat((given[:, t], (weight * read).sum(1)), -1), h)
            steps.append(h)
        return torch.stack(steps, 1)


@program(small={"count": 2, "read": 6, "steps": 3, "width": 16}, training=True)
def attending_decoder(count: int = 64, read: int = 50, steps: int = 20, width: int = 512) -> Made:
    """A recurrent decoder with attention."""
    return Attending(width), normal(count, read, width), normal(count, steps, width)


class ConvolutionalLstm(nn.Module):
    """An LSTM whose gates are convolutions."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden, self.gates = hidden, nn.Conv2d(width + hidden, 4 * hidden, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), self.hidden, *x.shape[-2:])
        for t in range(x.shape[1]):
            i, keep, o, g = self.gates(torch.cat((x[:, t], h), 1)).chunk(4, 1)
            c = torch.sigmoid(keep) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h


@program(small={"count": 1, "steps": 3, "width": 2, "hidden": 8, "size": 6}, training=True)
def convolutional_lstm(count: int = 8, steps: int = 8, width: int = 8, hidden: int = 64, size: int = 64) -> Made:
    """A convolutional LSTM over pictures."""
    return ConvolutionalLstm(width, hidden), normal(count, steps, width, size, size)
