"""Fields, flows, agents, and what else is no picture and no text."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.recommender import tower
from terrazzo.bench.programs.registry import Made, normal, program, uniform, whole


class RadianceField(nn.Module):
    """Sines of places, eight linear layers, colour and density, and the light along each ray (NeRF's)."""

    def __init__(self, width: int, octaves: int) -> None:
        super().__init__()
        self.octaves, size = octaves, 3 + 6 * octaves
        self.first, self.second = tower(size, *(width,) * 4), tower(size + width, *(width,) * 4)
        self.density, self.colour = (
            nn.Linear(width, 1),
            nn.Sequential(nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, 3)),
        )

    def forward(self, x: Tensor) -> Tensor:
        rate = 2.0 ** torch.arange(self.octaves, device=x.device, dtype=x.dtype)
        angle = (x[..., None] * rate).flatten(-2)
        given = torch.cat((x, angle.sin(), angle.cos()), -1)
        y = f.relu(self.second(torch.cat((given, f.relu(self.first(given))), -1)))
        thick = f.softplus(self.density(y))[..., 0].float() / x.shape[1]
        through = torch.exp(thick - thick.cumsum(-1))
        weight = through * (1 - torch.exp(-thick))
        return (weight[..., None] * torch.sigmoid(self.colour(y)).float()).sum(1).to(x.dtype)


@program(small={"rays": 4, "samples": 6, "width": 16, "octaves": 3}, training=True)
def nerf(rays: int = 1024, samples: int = 192, width: int = 256, octaves: int = 6) -> Made:
    """A radiance field, rendered."""
    return RadianceField(width, octaves), uniform(rays, samples, 3)


class Siren(nn.Module):
    """Linear layers with sines between them."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width if k else 2, width) for k in range(layers))
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(3 * layer(x))
        return self.out(x)


@program(small={"places": 20, "width": 16, "layers": 2}, training=True)
def siren(places: int = 262_144, width: int = 256, layers: int = 4) -> Made:
    """A picture as a net of its places."""
    return Siren(width, layers), uniform(places, 2)


class HashGrid(nn.Module):
    """Features from grids of several sizes, found by hashes and interpolated (Instant NGP's)."""

    def __init__(self, entries: int, levels: int, width: int) -> None:
        super().__init__()
        self.entries, self.levels = entries, levels
        self.table = nn.Parameter(torch.randn(levels, entries, 2))
        self.net = tower(2 * levels, width, width, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for level in range(self.levels):
            place = x.float() * (16 << level)
            low = place.floor()
            part, low = place - low, low.long()
            total: Tensor | float = 0.0
            for corner in range(8):
                bits = [(corner >> k) & 1 for k in range(3)]
                at = [low[:, k] + b for k, b in enumerate(bits)]
                number = (at[0] ^ (at[1] * 2654435761) ^ (at[2] * 805459861)) % self.entries
                weight = math.prod((part[:, k] if b else 1 - part[:, k]) for k, b in enumerate(bits))
                total = total + weight[:, None].to(x.dtype) * self.table[level][number]
            found.append(total)
        return self.net(torch.cat(found, -1))


@program(small={"places": 20, "entries": 64, "levels": 2, "width": 8}, training=True, dtypes=("f32",))
def hash_grid(places: int = 131_072, entries: int = 1 << 19, levels: int = 6, width: int = 64) -> Made:
    """Hashed grids and a small net."""
    return HashGrid(entries, levels, width), uniform(places, 3)


class Coupling(nn.Module):
    """Half of the values scaled and shifted by what the other half says, and the volume's logarithm (RealNVP's)."""

    def __init__(self, width: int, inner: int, layers: int) -> None:
        super().__init__()
        self.nets = nn.ModuleList(tower(width // 2, inner, inner, width) for _ in range(layers))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volume: Tensor | float = 0.0
        for net in self.nets:
            a, b = x.chunk(2, -1)
            scale, shift = net(a).chunk(2, -1)
            scale = torch.tanh(scale)
            x = torch.cat((b * scale.exp() + shift, a), -1)
            volume = volume + scale.sum(-1)
        return -0.5 * x.square().sum(-1) - 0.5 * x.shape[-1] * math.log(2 * math.pi) + volume, x


@program(small={"count": 5, "width": 8, "inner": 16, "layers": 2}, training=True)
def realnvp(count: int = 16_384, width: int = 64, inner: int = 512, layers: int = 6) -> Made:
    """A normalising flow."""
    return Coupling(width, inner, layers), normal(count, width)


class Autoregressive(nn.Module):
    """Linear layers whose masks let each value see those before it (MAF's)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, inner), nn.Linear(inner, 2 * width)
        order, hidden = torch.arange(width, device="cpu"), torch.arange(inner, device="cpu") % max(width - 1, 1)
        self.register_buffer("into", (hidden[:, None] >= order).float().to(self.first.weight.device))
        self.register_buffer("outof", (order.repeat(2)[:, None] > hidden).float().to(self.first.weight.device))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = f.relu(f.linear(x, self.first.weight * self.into, self.first.bias))
        shift, scale = f.linear(h, self.second.weight * self.outof, self.second.bias).chunk(2, -1)
        return (x - shift) * torch.exp(-torch.tanh(scale)), -torch.tanh(scale).sum(-1)


@program(small={"count": 5, "width": 6, "inner": 16}, training=True)
def masked_flow(count: int = 16_384, width: int = 128, inner: int = 1024) -> Made:
    """A masked autoregressive flow."""
    return Autoregressive(width, inner), normal(count, width)


class Spline(nn.Module):
    """A monotone quadratic spline for each value, its knots from softmaxes."""

    def __init__(self, width: int, bins: int) -> None:
        super().__init__()
        self.bins, self.net = bins, tower(width, 256, width * 2 * bins)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        wide, high = (t.softmax(-1) for t in self.net(condition).unflatten(-1, (x.shape[-1], 2, self.bins)).unbind(-2))
        ends, tops = wide.cumsum(-1), high.cumsum(-1)
        inside = torch.sigmoid((x[..., None] - ends) * 50)
        return (tops - high * inside).mean(-1) + (wide * high).sum(-1) * x


@program(small={"count": 5, "width": 4, "bins": 3}, training=True)
def spline_flow(count: int = 16_384, width: int = 32, bins: int = 8) -> Made:
    """Splines whose knots a net gives."""
    return Spline(width, bins), uniform(count, width), normal(count, width)


class Residuals(nn.Module):
    """An ordinary differential equation by the classical Runge-Kutta method."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.steps, self.net = steps, nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = 1 / self.steps
        for _ in range(self.steps):
            a = self.net(x)
            b = self.net(x + h / 2 * a)
            c = self.net(x + h / 2 * b)
            x = x + h / 6 * (a + 2 * b + 2 * c + self.net(x + h * c))
        return x


@program(small={"count": 4, "width": 8, "steps": 2}, training=True)
def neural_ode(count: int = 8192, width: int = 128, steps: int = 4) -> Made:
    """A neural differential equation."""
    return Residuals(width, steps), normal(count, width)


class Derivatives(nn.Module):
    """The residual of a heat equation: a net's derivatives by its inputs (a PINN's)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = (nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            slope = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]
            bend = torch.autograd.grad(slope[:, 1].sum(), x)[0][:, 1]
        return slope[:, 0] - 0.1 * bend


@program(small={"places": 10, "width": 8})
def physics_informed(places: int = 65_536, width: int = 256) -> Made:
    """Second derivatives of a net."""
    return Derivatives(width), uniform(places, 2)


class Atari(nn.Module):
    """Convolutions over frames, then values and advantages (a duelling net's)."""

    def __init__(self, width: int, actions: int, size: int) -> None:
        super().__init__()
        layers = (
            nn.Conv2d(4, width, 8, 4),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 4, 2),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3),
            nn.ReLU(),
        )
        self.net, flat = nn.Sequential(*layers, nn.Flatten()), 2 * width * size * size
        self.value, self.advantage = tower(flat, 16 * width, 1), tower(flat, 16 * width, actions)

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        advantage = self.advantage(y)
        return self.value(y) + advantage - advantage.mean(-1, keepdim=True)


@program(small={"count": 2, "width": 4, "actions": 3, "size": 2, "edge": 44}, training=True)
def duelling_dqn(count: int = 256, width: int = 32, actions: int = 18, size: int = 7, edge: int = 84) -> Made:
    """A duelling net for Atari."""
    return Atari(width, actions, size), uniform(count, 4, edge, edge)


class Clipped(nn.Module):
    """PPO's loss: the clipped ratio, the value's error, the entropy."""

    def __init__(self, width: int, actions: int) -> None:
        super().__init__()
        self.policy, self.value = tower(width, 256, 256, actions), tower(width, 256, 256, 1)

    def forward(self, x: Tensor, action: Tensor, before: Tensor, advantage: Tensor, wanted: Tensor) -> Tensor:
        logits = torch.log_softmax(self.policy(x).float(), -1)
        ratio = torch.exp(logits.gather(-1, action[:, None])[:, 0] + before.float())
        advantage = advantage.float()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        entropy = -(logits.exp() * logits).sum(-1).mean()
        return 0.5 * f.mse_loss(self.value(x)[:, 0].float(), wanted.float()) - policy - 0.01 * entropy


@program(small={"count": 8, "width": 6, "actions": 3}, training=True)
def ppo(count: int = 16_384, width: int = 376, actions: int = 17) -> Made:
    """PPO's loss."""
    given = whole(actions, count), uniform(count), normal(count), normal(count)
    return Clipped(width, actions), normal(count, width), *given


class SoftActorCritic(nn.Module):
    """An action drawn by a given noise, squashed, its probability, and the smaller of two values."""

    def __init__(self, width: int, actions: int) -> None:
        super().__init__()
        self.actor = tower(width, 256, 256, 2 * actions)
        self.critics = nn.ModuleList(tower(width + actions, 256, 256, 1) for _ in range(2))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, spread = self.actor(x).chunk(2, -1)
        spread = spread.clamp(-5, 2)
        action = torch.tanh(mean + spread.exp() * noise)
        chance = (-0.5 * noise.square() - spread - 0.5 * math.log(2 * math.pi)).sum(-1)
        chance = chance - torch.log(1 - action.square() + 1e-2).sum(-1)
        values = [critic(torch.cat((x, action), -1))[:, 0] for critic in self.critics]
        return torch.minimum(*values) - 0.2 * chance


@program(small={"count": 8, "width": 6, "actions": 2}, training=True)
def soft_actor_critic(count: int = 16_384, width: int = 376, actions: int = 17) -> Made:
    """Soft actor-critic's objective."""
    return SoftActorCritic(width, actions), normal(count, width), normal(count, actions)


class World(nn.Module):
    """A step of a recurrent state with a discrete part (Dreamer's), several times."""

    def __init__(self, hidden: int, groups: int, classes: int, actions: int) -> None:
        super().__init__()
        self.groups, flat = groups, groups * classes
        self.into, self.cell = tower(flat + actions, hidden, hidden), nn.GRUCell(hidden, hidden)
        self.prior = tower(hidden, hidden, flat)

    def forward(self, h: Tensor, actions: Tensor) -> Tensor:
        z = torch.softmax(self.prior(h).unflatten(-1, (self.groups, -1)), -1)
        for t in range(actions.shape[1]):
            h = self.cell(self.into(torch.cat((z.flatten(1), actions[:, t]), -1)), h)
            z = torch.softmax(self.prior(h).unflatten(-1, (self.groups, -1)), -1)
        return torch.cat((h, z.flatten(1)), -1)


@program(small={"count": 2, "hidden": 16, "groups": 2, "classes": 4, "actions": 2, "steps": 3}, training=True)
def world_model(
    count: int = 1024, hidden: int = 512, groups: int = 32, classes: int = 32, actions: int = 6, steps: int = 8
) -> Made:
    """An imagined path of a world model."""
    return World(hidden, groups, classes, actions), normal(count, hidden), normal(count, steps, actions)


class Triangles(nn.Module):
    """A pair representation updated by products over its rows (AlphaFold's triangle update)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(inner)
        self.values, self.gates = nn.Linear(width, 2 * inner), nn.Linear(width, 2 * inner)
        self.gate, self.out = nn.Linear(width, width), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        a, b = (self.values(y) * torch.sigmoid(self.gates(y))).chunk(2, -1)
        mixed = torch.einsum("nikc,njkc->nijc", a, b) / math.sqrt(x.shape[1])
        return x + torch.sigmoid(self.gate(y)) * self.out(self.last(mixed))


@program(small={"count": 1, "length": 6, "width": 8, "inner": 8}, training=True)
def triangle_update(count: int = 1, length: int = 256, width: int = 128, inner: int = 128) -> Made:
    """AlphaFold's triangle update."""
    return Triangles(width, inner), normal(count, length, length, width)


class KolmogorovArnold(nn.Module):
    """A sum of functions of each input, by radial bases (a KAN's layer)."""

    def __init__(self, width: int, out: int, grid: int) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, grid))
        self.norm, self.base = nn.LayerNorm(width), nn.Linear(width, out)
        self.spline = nn.Linear(width * grid, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        basis = torch.exp(-(2 * (self.norm(x)[..., None] - self.grid)).square())
        return self.base(f.silu(x)) + self.spline(basis.flatten(-2))


@program(small={"count": 6, "width": 8, "grid": 4}, training=True)
def kan(count: int = 4096, width: int = 512, grid: int = 8) -> Made:
    """Two layers of a Kolmogorov-Arnold net."""
    return nn.Sequential(KolmogorovArnold(width, width, grid), KolmogorovArnold(width, 10, grid)), normal(count, width)
