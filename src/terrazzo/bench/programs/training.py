"""Training steps: losses of many kinds, and optimisers' steps written as functions of weights and state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.recommender import tower
from terrazzo.bench.programs.registry import Function, Made, declare, normal, program, uniform, whole

State = tuple[Tensor, ...]
Update = Callable[[Tensor, Tensor, State], tuple[Tensor, State]]
"""A weight, its gradient and its state: the new weight, the new state."""


class Step(nn.Module):
    """A step of training: the loss, the new weights, the new states. `states` are as many tensors for each weight."""

    def __init__(self, net: nn.Module, loss: Callable[..., Tensor], update: Update, states: int) -> None:
        super().__init__()
        self.net, self.loss, self.update, self.states = net, loss, update, states

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            weights = {name: p.detach().requires_grad_() for name, p in self.net.named_parameters()}
            given = len(tensors) - self.states * len(weights)
            call = lambda *x: torch.func.functional_call(self.net, weights, x)  # noqa: E731
            loss = self.loss(call, *tensors[:given])
            gradients = torch.autograd.grad(loss, list(weights.values()))
        found = [loss]
        for k, (weight, gradient) in enumerate(zip(weights.values(), gradients, strict=True)):
            own = tensors[given + k * self.states : given + (k + 1) * self.states]
            new, state = self.update(weight.detach(), gradient, own)
            found += [new, *state]
        return tuple(found)


def step(net: nn.Module, loss: Callable[..., Tensor], update: Update, states: int, *inputs: Tensor) -> Made:
    """A step and its inputs: those of the loss, and states above zero for every weight."""
    own = (torch.rand_like(p) for p in net.parameters() for _ in range(states))
    return Step(net, loss, update, states), *inputs, *(p.detach() for p in own)


def sgd(weight: Tensor, gradient: Tensor, state: State) -> tuple[Tensor, State]:
    """SGD with momentum (Nesterov's) and weight decay."""
    gradient = gradient + 1e-4 * weight
    speed = 0.9 * state[0] + gradient
    return weight - 0.1 * (gradient + 0.9 * speed), (speed,)


def adam(weight: Tensor, gradient: Tensor, state: State) -> tuple[Tensor, State]:
    """Adam with decoupled weight decay, at its tenth step."""
    mean = 0.9 * state[0] + 0.1 * gradient
    square = 0.999 * state[1] + 0.001 * gradient.square()
    moved = mean / (1 - 0.9**10) / (torch.sqrt(square / (1 - 0.999**10)) + 1e-8)
    return weight * (1 - 1e-5) - 1e-3 * moved, (mean, square)


def lion(weight: Tensor, gradient: Tensor, state: State) -> tuple[Tensor, State]:
    """Lion, its sign made smooth, since a sign of nearly zero is chance."""
    moved = torch.tanh(100 * (0.9 * state[0] + 0.1 * gradient))
    return weight - 1e-4 * (moved + 0.1 * weight), (0.99 * state[0] + 0.01 * gradient,)


def rmsprop(weight: Tensor, gradient: Tensor, state: State) -> tuple[Tensor, State]:
    """RMSprop with momentum."""
    square = 0.99 * state[0] + 0.01 * gradient.square()
    speed = 0.9 * state[1] + gradient / (square.sqrt() + 1e-8)
    return weight - 1e-3 * speed, (square, speed)


def adagrad(weight: Tensor, gradient: Tensor, state: State) -> tuple[Tensor, State]:
    """Adagrad."""
    total = state[0] + gradient.square()
    return weight - 0.01 * gradient / (total.sqrt() + 1e-10), (total,)


def lamb(weight: Tensor, gradient: Tensor, state: State) -> tuple[Tensor, State]:
    """LAMB: Adam, scaled by the norms of weight and step."""
    mean = 0.9 * state[0] + 0.1 * gradient
    square = 0.999 * state[1] + 0.001 * gradient.square()
    moved = mean / (square.sqrt() + 1e-6) + 0.01 * weight
    trust = weight.float().norm() / (moved.float().norm() + 1e-6)
    return weight - 1e-3 * trust.clamp(max=10).to(weight.dtype) * moved, (mean, square)


def adafactor(weight: Tensor, gradient: Tensor, state: State) -> tuple[Tensor, State]:
    """Adafactor without state: the square's rows and columns."""
    square = gradient.float().square() + 1e-30
    if weight.ndim > 1:
        rows, columns = square.mean(-1, keepdim=True), square.mean(-2, keepdim=True)
        square = rows * columns / rows.mean(-2, keepdim=True)
    moved = gradient * torch.rsqrt(square).to(gradient.dtype)
    size = moved.float().square().mean().sqrt()
    return weight - 1e-2 * moved / size.clamp(min=1).to(weight.dtype), state


def orthogonal(weight: Tensor, gradient: Tensor, state: State) -> tuple[Tensor, State]:
    """Muon: the momentum made nearly orthogonal by five steps of Newton and Schulz."""
    speed = 0.95 * state[0] + gradient
    if weight.ndim != 2:
        return weight - 0.01 * speed, (speed,)
    x = speed / (speed.float().norm() + 1e-7).to(weight.dtype)
    for _ in range(3):
        square = x @ x.T
        x = 1.5 * x - 0.5 * square @ x
    return weight - 0.02 * x, (speed,)


def classes(net: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy with smoothed labels."""
    return f.cross_entropy(net(x).float(), y, label_smoothing=0.1)


def squares(net: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The mean square."""
    return f.mse_loss(net(x).float(), y.float())


def huber(net: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Huber's loss, with a penalty on what the net gives."""
    out = net(x).float()
    return f.huber_loss(out, y.float(), delta=0.5) + 1e-3 * out.square().mean()


def binary(net: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Binary cross-entropy, weighted."""
    weight = torch.full_like(y, 2.0, dtype=torch.float32)
    return f.binary_cross_entropy_with_logits(net(x).float(), y.float(), pos_weight=weight[0])


def contrast(net: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Each of one batch against all of the other, in both directions (CLIP's)."""
    a, b = f.normalize(net(x), dim=-1), f.normalize(net(y), dim=-1)
    scores = (a @ b.T).float() * 14
    target = torch.arange(len(x), device=x.device)
    return (f.cross_entropy(scores, target) + f.cross_entropy(scores.T, target)) / 2


def distilled(net: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The divergence from a teacher's softened classes."""
    return 4 * f.kl_div(f.log_softmax(net(x).float() / 2, -1), f.softmax(y.float() / 2, -1), reduction="batchmean")


def triplet(net: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Distances to a like and to an unlike, with a soft margin."""
    a, near, far = net(x).float(), net(y).float(), net(y.flip(0)).float()
    gap = torch.linalg.vector_norm(a - near + 1e-6, dim=-1) - torch.linalg.vector_norm(a - far + 1e-6, dim=-1)
    return f.softplus(gap).mean()


def mlp_step(
    name: str, loss: Callable[..., Tensor], update: Update, states: int, target: Callable[..., Tensor]
) -> None:
    """Declares a step of an MLP with this loss and optimiser."""

    def make(count: int = 8192, sizes: Sequence[int] = (1024, 2048, 2048, 512)) -> Made:
        return step(tower(*sizes), loss, update, states, normal(count, sizes[0]), target(count, sizes))

    declare(name, "training", make, {"count": 6, "sizes": (8, 16, 12)})


def labels(count: int, sizes: Sequence[int]) -> Tensor:
    """Classes."""
    return whole(sizes[-1], count)


def wanted(count: int, sizes: Sequence[int]) -> Tensor:
    """Values like the net's."""
    return normal(count, sizes[-1])


def chances(count: int, sizes: Sequence[int]) -> Tensor:
    """Chances of the net's classes."""
    return uniform(count, sizes[-1])


def others(count: int, sizes: Sequence[int]) -> Tensor:
    """Other inputs."""
    return normal(count, sizes[0])


mlp_step("sgd_step", classes, sgd, 1, labels)
mlp_step("adam_step", squares, adam, 2, wanted)
mlp_step("lion_step", huber, lion, 1, wanted)
mlp_step("rmsprop_step", binary, rmsprop, 2, chances)
mlp_step("adagrad_step", contrast, adagrad, 1, others)
mlp_step("lamb_step", distilled, lamb, 2, wanted)
mlp_step("adafactor_step", triplet, adafactor, 0, others)
mlp_step("muon_step", classes, orthogonal, 1, labels)


@program(small={"images": 2, "size": 8, "width": 4})
def convolutional_step(images: int = 64, size: int = 32, width: int = 64) -> Made:
    """A step of SGD of a convolutional net with batch norm."""
    layers: list[nn.Module] = []
    for a, b in ((3, width), (width, 2 * width), (2 * width, 2 * width)):
        layers += [
            nn.Conv2d(a, b, 3, padding=1),
            nn.BatchNorm2d(b, track_running_stats=False),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 100))
    return step(net, classes, sgd, 1, normal(images, 3, size, size), whole(100, images))


@program(small={"count": 2, "length": 6, "width": 16, "heads": 2, "words": 30})
def transformer_step(
    count: int = 16, length: int = 512, width: int = 768, heads: int = 12, words: int = 32_000
) -> Made:
    """A step of Adam of a transformer's layer under a language model's loss."""

    class Model(nn.Module):
        """Embedding, layer, scores."""

        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(words, width)
            self.layer = nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            return self.layer(self.words(x), src_mask=mask) @ self.words.weight.T

    def next_word(net: Callable[..., Tensor], x: Tensor) -> Tensor:
        return f.cross_entropy(net(x)[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())

    return step(Model(), next_word, adam, 2, whole(words, count, length))


@program(small={"count": 4, "classes": 6, "width": 8})
def arcface(count: int = 1024, classes: int = 100_000, width: int = 512) -> Made:
    """The loss of a face's angle with a margin, and its gradients."""

    def loss(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
            cosine = (f.normalize(x, dim=-1) @ f.normalize(w, dim=-1).T).float().clamp(-0.99, 0.99)
            hit = torch.arange(len(w), device=y.device) == y[:, None]
            moved = cosine * math.cos(0.5) - torch.sqrt(1 - cosine.square()) * math.sin(0.5)
            found = f.cross_entropy(16 * torch.where(hit, moved, cosine), y)
            return found, *torch.autograd.grad(found, (x, w))

    return Function(loss), normal(count, width), normal(classes, width), whole(classes, count)


@program(small={"count": 2, "steps": 8, "classes": 5, "length": 3}, dtypes=("f32",))
def ctc(count: int = 16, steps: int = 64, classes: int = 64, length: int = 8) -> Made:
    """A loss over all alignments, as a loop over time."""

    def loss(x: Tensor, labels: Tensor) -> Any:
        scores = torch.log_softmax(x.float(), -1)
        spaced = torch.stack((torch.zeros_like(labels), labels), -1).flatten(1)
        spaced = torch.cat((spaced, torch.zeros_like(labels[:, :1])), -1)
        given = scores.gather(-1, spaced[:, None].expand(-1, x.shape[1], -1))
        far = torch.zeros_like(spaced, dtype=torch.bool)
        far[:, 2:] = (spaced[:, 2:] != spaced[:, :-2]) & (spaced[:, 2:] != 0)
        low = torch.full_like(given[:, 0], -1e5)
        alpha = torch.cat((given[:, 0, :2], low[:, 2:]), -1)
        for t in range(1, x.shape[1]):
            one = torch.cat((low[:, :1], alpha[:, :-1]), -1)
            two = torch.where(far, torch.cat((low[:, :2], alpha[:, :-2]), -1), low)
            alpha = torch.logsumexp(torch.stack((alpha, one, two)), 0) + given[:, t]
        return -torch.logsumexp(alpha[:, -2:], -1)

    return Function(loss), normal(count, steps, classes), 1 + whole(classes - 1, count, length)
