"""Models of the usual kinds at real sizes, and how many ops of them are called where there is a GPU.

Nothing is run and no weight is made: the models are traced on tensors without memory.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from terrazzo.ir.program import Program
from terrazzo.options import Options


@dataclass(frozen=True)
class Model:
    """`make` gives a module, of this element type, and its inputs."""

    name: str
    make: Callable[[str], tuple[Any, tuple[Any, ...], Mapping[str, Any]]]


def models() -> tuple[Model, ...]:
    """The models that are counted."""
    return (
        Model("GPT-2, 4 x 512", lambda dtype: known("gpt2", 4, 512, dtype)),
        Model("BERT-base, 16 x 128", lambda dtype: known("bert-base", 16, 128, dtype)),
        Model("ViT-B/16, 32 images", lambda dtype: known("vit-b-16", 32, 0, dtype)),
        *(
            Model(f"{name} layer, 512 tokens", partial(known, name, 1, 512, layer=0))
            for name in ("tinyllama", "qwen2.5-7b", "llama-3-8b")
        ),
        Model("ResNet-50, 32 images, channels last", lambda dtype: of(resnet50(), (32, 3, 224, 224), dtype)),
        Model("U-Net, 8 images of 256 x 256, channels last", lambda dtype: of(unet(), (8, 3, 256, 256), dtype)),
    )


def count(chosen: Sequence[str] = (), target: str = "sm_90a") -> dict[str, Any]:
    """The record of docs/libraries.md: for every model, type and pass the ops that are called, and why."""
    cases = []
    for model in models():
        for dtype, training in itertools.product(("f32", "bf16"), (False, True)):
            if not chosen or model.name in chosen:
                found = counted(model, dtype, training, target)
                cases.append({"model": model.name, "dtype": dtype, "training": training, **found})
    return {"suite": "libraries", "target": target, "cases": cases}


def counted(model: Model, dtype: str, training: bool, target: str) -> dict[str, Any]:
    """How many ops are called since a library is `faster`, and since a kernel is `missing`, by name."""
    from terrazzo.pipelines import stages
    from terrazzo.rewrite.rule import Log

    module, args, kwargs = model.make(dtype)
    log = Log()
    stages(traced(module, args, kwargs, training), Options(target=target), log, ("torch_to_tensor",))
    faster = Counter(e.reason.split(":")[0] for e in log.events if e.rule == "library" and e.fired)
    missing = Counter(e.subject.split(" ")[0] for e in log.events if e.rule == "opaque" and e.fired)
    return {"faster": dict(faster), "missing": dict(missing)}


def traced(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], training: bool) -> Program:
    """A call of a module in Torch IR; with `training`, in that mode, the gradients of its result's squares."""
    import torch
    from torch.utils import _pytree as pytree

    from terrazzo.front.capture import capture, trace
    from terrazzo.front.fx import from_graph

    if not training:
        return capture(module, args, kwargs).program
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    given, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    tensors = [*state.values(), *(x for x in given if isinstance(x, torch.Tensor))]
    module.train()

    def step(traced: list[Any]) -> list[Any]:
        rest = iter(traced[len(state) :])
        args, kwargs = pytree.tree_unflatten([next(rest) if torch.is_tensor(x) else x for x in given], structure)
        with torch.enable_grad():
            own = {
                name: t.detach().requires_grad_() if isinstance(x, torch.nn.Parameter) else t
                for (name, x), t in zip(state.items(), traced, strict=False)
            }
            out = torch.func.functional_call(module, own, args, kwargs)
            weights = [t for t in own.values() if t.requires_grad]
            gradients = torch.autograd.grad(out.square().sum(), weights, allow_unused=True)
        return [g for g in gradients if g is not None]

    graph, _ = trace(step, [t.detach() for t in tensors])
    return from_graph(graph, "step")[0]


def known(name: str, batch: int, tokens: int, dtype: str, layer: int | None = None) -> Any:
    """A model of Hugging Face, or a layer of it, and its inputs, without memory."""
    import torch

    from terrazzo.front.huggingface import load

    with torch.device("meta"):
        return load(name, batch=batch, seq_len=tokens or 32, dtype=dtype, layer=layer, random_weights=True)


def of(module: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """A module of images, in this type and channels last, and its input."""
    import torch

    from terrazzo.ir.torch_types import to_torch_dtype
    from terrazzo.ir.types import dtype as named

    kind, format = to_torch_dtype(named(dtype)), torch.channels_last
    x = torch.empty(shape, dtype=kind, device="meta").to(memory_format=format)
    return module.to(kind).to(memory_format=format).eval(), (x,), {}


def resnet50() -> Any:
    """The shape of ResNet-50: blocks of 1x1, 3x3 and 1x1 convolutions with a shortcut."""
    import torch
    from torch import nn

    class Bottleneck(nn.Module):  # type: ignore[misc]
        def __init__(self, width: int, inner: int, stride: int) -> None:
            super().__init__()
            out = 4 * inner
            self.convs = nn.Sequential(
                nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
                nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
                nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out),
            )  # fmt: skip
            same = stride == 1 and width == out
            short = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            self.short = nn.Identity() if same else short

        def forward(self, x: Any) -> Any:
            return torch.relu(self.convs(x) + self.short(x))

    with torch.device("meta"):
        layers: list[Any] = [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]
        width = 64
        for k, (inner, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
            for number in range(blocks):
                layers.append(Bottleneck(width, inner, 2 if k and not number else 1))
                width = 4 * inner
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


def unet() -> Any:
    """The shape of a U-Net: four levels down and up, two 3x3 convolutions with group norm and SiLU at each."""
    import torch
    from torch import nn

    def level(width: int, out: int) -> Any:
        return nn.Sequential(
            nn.Conv2d(width, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU(),
            nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU(),
        )  # fmt: skip

    class UNet(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            widths = (64, 128, 256, 512)
            self.down = nn.ModuleList(level(a, b) for a, b in zip((3, *widths), widths, strict=False))
            self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[-2::-1])
            self.join = nn.ModuleList(level(2 * w, w) for w in widths[-2::-1])
            self.out = nn.Conv2d(64, 1, 1)

        def forward(self, x: Any) -> Any:
            skips = []
            for k, down in enumerate(self.down):
                x = down(x if not k else nn.functional.max_pool2d(x, 2))
                skips.append(x)
            for up, join, skip in zip(self.up, self.join, skips[-2::-1], strict=True):
                x = join(torch.cat((up(x), skip), 1))
            return self.out(x)

    with torch.device("meta"):
        return UNet()
