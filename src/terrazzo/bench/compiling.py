"""How long programs take to compile, and to start again from the cache: cold, each in a process of its own.

Programs are captured on tensors without memory, so no GPU is needed: all is done but loading. Where there is a GPU,
kernels are loaded too.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from terrazzo.bench.harness import surroundings
from terrazzo.bench.models import known, of, resnet50
from terrazzo.collector import paused
from terrazzo.hw.gpu import GPUS
from terrazzo.options import Options
from terrazzo.progress import at

LIMIT = 600
"""Seconds after which a process is ended."""
PHASES = ("capture", "fusion", "choosing", "deriving", "emitting", "nvrtc", "loading")
_CHOOSING, _DERIVING = ("schedule",), ("plan", "derive")


@dataclass(frozen=True)
class Case:
    """A program of a family that grows with `size`, 0 where it has one size; `make` gives a module and its inputs."""

    family: str
    size: int
    make: Callable[[], Any]

    @property
    def name(self) -> str:
        """As a row is called, and as `--only` looks for it."""
        return f"{self.family}, {self.size}" if self.size else self.family


def cases() -> tuple[Case, ...]:
    """What is measured: models, and programs of growing size."""
    grown = (
        ("encoder layers", layers, (25, 100, 200, 400)),
        ("unrolled steps of a GRU", recurrent, (64, 128, 256, 512)),
        ("layers that read all before them", dense, (50, 100, 200)),
        ("elementwise functions in a chain", chain, (1000, 5000, 20000)),
    )
    return (
        Case("a product of 4096 x 4096 x 4096", 0, product),
        Case("GPT-2, 4 x 512", 0, lambda: known("gpt2", 4, 512, "bf16")),
        Case("ResNet-50, 32 images", 0, lambda: of(resnet50(), (32, 3, 224, 224), "bf16")),
        Case("a decoder layer of Llama-3-8B, 512 tokens", 0, lambda: known("llama-3-8b", 1, 512, "bf16", layer=0)),
        *(Case(family, n, partial(make, n)) for family, make, sizes in grown for n in sizes),
    )


def product() -> Any:
    """A linear layer: one kernel."""
    from torch import nn

    return _half(lambda: nn.Linear(4096, 4096, bias=False), (4096, 4096))


def layers(count: int) -> Any:
    """A stack of transformer layers of one shape."""
    from torch import nn

    def make() -> Any:
        return nn.Sequential(*(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(count)))

    return _half(make, (4, 128, 512))


def recurrent(steps: int) -> Any:
    """A recurrent net over a sequence, unrolled."""
    from torch import nn

    return _half(lambda: nn.GRU(256, 512, 1, batch_first=True), (32, steps, 256))


def dense(count: int) -> Any:
    """Layers each of which reads the results of all before it, one beside the other."""
    import torch
    from torch import nn

    class Dense(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64 + 16 * n, 16) for n in range(count))

        def forward(self, x: Any) -> Any:
            found = [x]
            for layer in self.layers:
                found.append(torch.relu(layer(torch.cat(found, -1))))
            return torch.cat(found, -1)

    return _half(Dense, (512, 64))


def chain(count: int) -> Any:
    """Elementwise functions, one of the other."""
    from torch import nn

    class Chain(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            for n in range(count):
                x = x.sin() if n % 2 else x * 1.01
            return x

    return _half(Chain, (1024, 1024))


def _half(make: Callable[[], Any], shape: tuple[int, ...]) -> Any:
    import torch

    with torch.device("meta"):
        return make().bfloat16().eval(), (torch.empty(shape, dtype=torch.bfloat16),), {}


def measure(
    only: Sequence[str] = (),
    target: str = "",
    limit: float = LIMIT,
    within: float = math.inf,
    before: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The record: for every case what each phase took, cold, and what starting again took, in seconds.

    `only` are parts of names. No case begins after `within` seconds; what a record from `before` has of this commit and
    target is not measured again.
    """
    start = time.perf_counter()
    target = target or _here() or "sm_90a"
    record = {
        "suite": "compile",
        **surroundings(os.cpu_count() or 1),
        "target": target,
        "loaded": bool(_here()),
    }
    same = before is not None and all(before.get(x) == record[x] for x in ("suite", "commit", "target", "loaded"))
    found = {(c["family"], c["size"]): c for c in before["cases"] if "failed" not in c} if before and same else {}
    chosen = [c for c in cases() if any(x in c.name for x in only or ("",)) and (c.family, c.size) not in found]
    for number, case in enumerate(chosen):
        left = within - (time.perf_counter() - start)
        if left <= 0:
            break
        found[case.family, case.size] = _measured(case, target, min(limit, left))
        at(f"compiled {case.name}", number + 1, len(chosen))
    order = [(c.family, c.size) for c in cases()]
    return {**record, "cases": sorted(found.values(), key=lambda c: order.index((c["family"], c["size"])))}


def recorded(path: Path) -> dict[str, Any] | None:
    """The record of a file, if there is one."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("suite") == "compile" else None


def _measured(case: Case, target: str, limit: float) -> dict[str, Any]:
    """A case, cold and then again."""
    with tempfile.TemporaryDirectory() as room:
        cold = in_a_process(case.name, target, Path(room), limit)
        warm = {} if "failed" in cold else in_a_process(case.name, target, Path(room), limit)
    return {"family": case.family, "size": case.size, **cold, "warm": warm}


def in_a_process(name: str, target: str, room: Path, limit: float = LIMIT) -> dict[str, Any]:
    """What `one` finds in a process of its own; if it does not get so far, what became of it."""
    command = [sys.executable, "-m", "terrazzo.bench.compiling", name, target, str(room.absolute())]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit, cwd=Path(__file__).parents[2])
    except subprocess.TimeoutExpired:
        return {"failed": f"not through in {limit:g} seconds"}
    if ended.returncode:
        return {"failed": f"the process ended with {ended.returncode}: {ended.stderr.strip()[-1000:]}"}
    result: dict[str, Any] = json.loads((room / "result.json").read_text())
    return result


def one(case: Case, target: str, room: Path) -> dict[str, Any]:
    """Seconds by phase and in all, kernels, and sources compiled; where the cache has the plan, what it took to start.

    The modules that compiling needs are imported before.
    """
    import terrazzo.pipelines
    import terrazzo.run.cuda  # noqa: F401
    from terrazzo.front.capture import capture
    from terrazzo.run.cache import Cache

    module, args, kwargs = case.make()
    capture(chain(2)[0], chain(2)[1])  # PyTorch imports much of itself in the first one
    options = Options(target=target, cache_dir=room / "cache")
    cache = Cache(options.cache_dir, options.cache_limit)
    with paused():  # as `terrazzo.compile` does it
        return _started(module, args, kwargs, options, cache)


def _started(module: Any, args: Any, kwargs: Any, options: Options, cache: Any) -> dict[str, Any]:
    """The same of a module."""
    from terrazzo.front.capture import capture
    from terrazzo.run.compiled import plan_key
    from terrazzo.run.misfit import misfit
    from terrazzo.run.plan import Plan

    target = options.target
    start = time.perf_counter()
    program = capture(module, args, kwargs).program
    seconds = {"capture": time.perf_counter() - start}
    key = plan_key(program, options, target)
    if (path := cache.get(key, ".plan")) is not None:
        plan = Plan.from_json(path.read_bytes())
        if why := misfit(plan, program):
            raise ValueError(why)
        paths = {s.key: cache.get(s.key, ".cubin") for s in plan.steps if s.key}
        seconds["loading"] = _loaded(plan, paths, target) if _here() else 0.0
        return {"seconds": seconds, "total": time.perf_counter() - start}
    plan, built = _cold(program, options, cache, seconds)
    cache.put(key, ".plan", plan.to_json())
    seconds["loading"] = _loaded(plan, built.paths, target) if _here() else 0.0
    return {
        "seconds": seconds,
        "total": time.perf_counter() - start,
        "kernels": sum(bool(s.key) for s in plan.steps),
        "sources": len({source for _, source in built.sources}),
    }


def _cold(program: Any, options: Options, cache: Any, seconds: dict[str, float]) -> Any:
    """The plan of a program, compiled as where there is a GPU, and what it was built as; phases go to `seconds`."""
    from terrazzo.pipelines import lowering
    from terrazzo.run.cuda import build
    from terrazzo.run.nvrtc import Tried, abandoned_on_error
    from terrazzo.run.plan import make

    tried = Tried(options.target, cache, options.spills, ahead=True)
    with abandoned_on_error():
        done = lowering(program, options, tried=tried)
        built = build(done, options, cache, options.target, tried=tried)
    passes = done.seconds
    seconds["choosing"] = sum(passes.get(p, 0.0) for p in _CHOOSING)
    seconds["deriving"] = sum(passes.get(p, 0.0) for p in _DERIVING)
    seconds["fusion"] = sum(passes.values()) - seconds["choosing"] - seconds["deriving"]
    seconds["choosing"] += built.seconds["again"]
    seconds |= {"emitting": built.seconds["emit"], "nvrtc": built.seconds["compile"]}
    return make(built.program, built.entries, GPUS[options.target].processors), built


def _here() -> str:
    """The architecture of this machine's GPU, if there is one."""
    from terrazzo.run.cuda import architecture, devices

    return architecture() if devices() else ""


def _loaded(plan: Any, paths: Any, target: str) -> float:
    from terrazzo.run.cuda import Cuda

    start = time.perf_counter()
    Cuda("cuda:0", target).load(plan, paths)
    return time.perf_counter() - start


def main(given: Sequence[str]) -> None:
    """`python -m terrazzo.bench.compiling CASE TARGET DIR` writes DIR/result.json."""
    name, target, room = given
    case = next(c for c in cases() if c.name == name)
    found = one(case, target, Path(room))
    (Path(room) / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
