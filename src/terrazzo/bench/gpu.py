"""Measuring on a GPU, honestly: correctness first, CUDA graphs over inputs that no cache holds, peers in turns,
medians, a roofline.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from terrazzo.bench import products
from terrazzo.bench.article import article
from terrazzo.bench.gpu_suites import Case, attention, block, convolution, fp32, gemm, pointwise, reduction
from terrazzo.bench.harness import accuracy, surroundings
from terrazzo.options import Options
from terrazzo.run.timing import graph_of, in_turns

SUITES: dict[str, Callable[[], tuple[Case, ...]]] = {
    "pointwise": pointwise,
    "reduction": reduction,
    "gemm": gemm,
    "fp32": fp32,
    "attention": attention,
    "convolution": convolution,
    "block": block,
    "article": article,
    "squares": products.squares,
    "projections": products.projections,
    "odd": products.odd,
    "batched": products.batched,
    "fused": products.fused,
    "staircase": products.staircase,
}
PEERS = ("eager", "compile", "max-autotune")
REPLAYS = 25
"""Replays of every graph, in turns; each replay calls once per set of inputs."""
COLD = 2.0
"""Sets of inputs are together so many times larger than the second-level cache."""
MOST_SETS = 160


def measure(suite: str, options: Options, peers: Sequence[str], only: str = "") -> dict[str, Any]:
    """The record of a suite: what it was measured on, and every case (whose name contains `only`)."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    if suite == "fp32":
        options = replace(options, fp32="split")
    cases = []
    for case in SUITES[suite]():
        if only in case.name:
            cases.append(_case(case, options, peers))
            torch.cuda.empty_cache()
    ratios = {p: _geomean([c["us"][p] / c["us"]["terrazzo"] for c in cases if p in c["us"] and c["ok"]]) for p in peers}
    return {"suite": suite, "meta": measured_on(), "geomean": ratios, "cases": cases}


def measured_on() -> dict[str, Any]:
    """Commit, date, the GPU, its driver and the versions that matter."""
    import importlib.metadata

    import torch
    from cuda.bindings import driver

    from terrazzo.run.nvrtc import nvrtc_version

    _, version = driver.cuDriverGetVersion()
    libraries = {"triton": importlib.metadata.version("triton")} if "triton" in _installed() else {}
    return {
        **surroundings(1),
        "gpu": torch.cuda.get_device_name(),
        "driver": f"CUDA {version // 1000}.{version % 1000 // 10}",
        "nvrtc": nvrtc_version(),
        **libraries,
    }


def _installed() -> set[str]:
    import importlib.metadata

    return {d.name.lower() for d in importlib.metadata.distributions()}


def _case(case: Case, options: Options, peers: Sequence[str]) -> dict[str, Any]:
    import torch

    import terrazzo

    torch.manual_seed(0)
    torch._dynamo.reset()
    fn, make, exact = case.make()
    sets = [make()]
    size = sum(t.numel() * t.element_size() for t in sets[0])
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    wanted = min(MOST_SETS, max(2, math.ceil(COLD * cache / max(size, 1))))
    sets += [make() for _ in range(wanted - 1)]
    start = time.perf_counter()
    pinned = replace(options, schedules=(case.schedule,)) if case.schedule else options
    ours = terrazzo.compile(fn, *sets[0], options=pinned)
    seconds = time.perf_counter() - start
    calls: dict[str, Callable[..., Any]] = {"terrazzo": ours}
    with torch.no_grad():
        found = accuracy(_leaves(ours(*sets[0])), _leaves(fn(*sets[0])), _leaves(exact(*sets[0])))
        for peer in peers:
            mode = {"eager": None, "compile": "default", "max-autotune": "max-autotune-no-cudagraphs"}[peer]
            calls[peer] = fn if mode is None else torch.compile(fn, dynamic=False, mode=mode)
        graphs = {name: graph_of(call, sets) for name, call in calls.items()}
        times = in_turns(graphs, len(sets), REPLAYS)
        wall = _wall(ours, sets)
    us = {name: statistics.median(values) for name, values in times.items()}
    spread = {name: [_at(values, 0.1), _at(values, 0.9)] for name, values in times.items()}
    problem = found.problem or _roofline(case, us, options)
    return {
        "case": case.name,
        "dtype": case.dtype,
        "us": us,
        "spread": spread,
        "wall_us": wall,
        "compile_s": seconds,
        "error": found.ours,
        "error_eager": found.eager,
        "ok": not problem,
        "problem": problem,
        "bytes": case.bytes,
        "operations": case.operations,
        "said": case.said,
        "fallbacks": [f.op for f in ours.compiled.fallbacks],
    }


def _leaves(x: Any) -> list[Any]:
    from torch.utils import _pytree as pytree

    return list(pytree.tree_leaves(x))


def _wall(call: Callable[..., Any], sets: Sequence[tuple[Any, ...]], calls: int = 50) -> float:
    """Microseconds per call as a user sees them, in a loop without graphs."""
    import torch

    for args in sets[:3]:
        call(*args)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for n in range(calls):
        call(*sets[n % len(sets)])
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e6


def _roofline(case: Case, us: Mapping[str, float], options: Options) -> str:
    """What is wrong with a time that the machine cannot reach."""
    from terrazzo.hw.gpu import gpu
    from terrazzo.run.cuda import architecture

    memory, fma, tensor = gpu(architecture() if options.target == "auto" else options.target).roof
    products = {"auto": 6, "split": 6, "tf32": 3, "bf16": 1}.get(options.fp32)
    full = tensor if case.dtype != "f32" else max(fma, tensor / products) if products else fma
    least = max(case.bytes / memory, case.operations / full) / 1e3
    beaten = [name for name, t in us.items() if t < 0.95 * least]
    return f"{', '.join(beaten)} beat the roofline of {least:.1f} us" if beaten else ""


def _at(values: Sequence[float], part: float) -> float:
    return sorted(values)[round((len(values) - 1) * part)]


def _geomean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0.0
