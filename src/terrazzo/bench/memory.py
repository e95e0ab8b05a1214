"""How much memory a call takes at its peak, ours and eager's, on this processor."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from terrazzo.options import Options

Case = tuple[str, Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]], bool]


def cases() -> tuple[Case, ...]:
    """Name, what makes a module and its inputs, and whether a training step is measured."""
    return (
        ("GPT-2, 2 x 128", lambda: _known("gpt2", 2, 128), False),
        ("BERT-base, 4 x 128", lambda: _known("bert-base", 4, 128), False),
        ("ViT-B/16, 2 images", lambda: _known("vit-b-16", 2, 32), False),
        ("MLP of 512, 2048, 2048, 512, 256 rows", _mlp, True),
        ("convolutions and batch norm, 8 images of 32 x 32", _convolutions, True),
    )


def measure(options: Options) -> dict[str, Any]:
    """The record: bytes above what weights, gradients and inputs take; ours with the temporaries that are kept."""
    import torch

    found = []
    for name, make, training in cases():
        torch.manual_seed(0)
        torch._dynamo.reset()
        module, args, kwargs = make()
        ours = torch.compile(module, backend="terrazzo", options=_given(options))
        eager, compiled = (_peak(call, module, args, kwargs, training) for call in (module, ours))
        found.append({"name": name, "training": training, "eager": eager, "terrazzo": compiled})
    return {"suite": "memory", "torch": torch.__version__, "cases": found}


def _given(options: Options) -> dict[str, Any]:
    return {"threads": options.threads, "cache_dir": options.cache_dir, "target": "cpu"}


def _peak(call: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> int:
    """The most that is allocated at a time within a call, over what was before; what stays after it included."""
    import torch

    def step() -> Any:
        if not training:
            with torch.no_grad():
                return call(*args, **kwargs)
        return call(*args, **kwargs).square().sum().backward()

    kept = _kept(step, module)
    step()
    module.zero_grad()
    gc.collect()
    return kept + _watched(step)


def _kept(step: Callable[[], Any], module: Any) -> int:
    """What plans keep between calls: their temporaries, which the first call makes, and what is computed once."""
    from terrazzo.run.compiled import Compiled

    made: list[Compiled] = []
    before = Compiled.__post_init__

    def noted(self: Compiled) -> None:
        before(self)
        made.append(self)

    Compiled.__post_init__ = noted  # type: ignore[method-assign]
    try:
        step()
    finally:
        Compiled.__post_init__ = before  # type: ignore[method-assign]
    module.zero_grad()
    arenas: int = sum(frame.arena.numel() for one in made for pool in one.frames.values() for frame in pool)
    return arenas + sum(one.once.bytes for one in made if one.once)


def _watched(call: Callable[[], Any]) -> int:
    """The most that is allocated at a time within a call, by PyTorch's own account."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
        out = call()
    del out
    events = [e for e in watch.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: int(e.start_ns())):
        now += int(event.nbytes())
        most = max(most, now)
    return most


def _known(name: str, batch: int, tokens: int) -> Any:
    from terrazzo.front.huggingface import load

    return load(name, batch=batch, seq_len=tokens, random_weights=True)


def _mlp() -> Any:
    import torch
    from torch import nn

    layers = (nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 512))
    return nn.Sequential(*layers), (torch.randn(256, 512),), {}


def _convolutions() -> Any:
    import torch
    from torch import nn

    layers = []
    for a, b in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
    return (
        nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
        (torch.randn(8, 3, 32, 32),),
        {},
    )
