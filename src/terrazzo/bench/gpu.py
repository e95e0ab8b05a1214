"""Measuring on a GPU, honestly: correctness first, CUDA graphs over inputs that no cache holds, peers in turns,
medians, a roofline.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from terrazzo.bench import products
from terrazzo.bench.article import article
from terrazzo.bench.gpu_suites import Case, attention, block, convolution, fp32, gemm, pointwise, reduction
from terrazzo.bench.harness import accuracy, surroundings
from terrazzo.bench.measure import save
from terrazzo.options import Options
from terrazzo.progress import at
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


def measure(
    suite: str,
    options: Options,
    peers: Sequence[str],
    only: str = "",
    within: float = math.inf,
    part: tuple[int, int] = (1, 1),
    folder: Path | None = None,
) -> dict[str, Any]:
    """The record of a suite: what it was measured on, and every case whose name contains `only`, of these the k-th of
    every n for `part` k, n. No case begins after `within` seconds.

    It is written to the `folder` after every case. What the records there have of this commit and GPU, those of other
    parts included, is not measured again.
    """
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    if suite == "fp32":
        options = replace(options, fp32="split")
    start, meta = time.perf_counter(), measured_on()
    every = SUITES[suite]()
    found = recorded(suite, folder, meta, peers)
    number, count = part
    mine = [c for c in every if only in c.name][number - 1 :: count]
    missing = [c for c in mine if (c.name, c.dtype) not in found]

    def record() -> dict[str, Any]:
        cases = [found[key] for c in every if (key := (c.name, c.dtype)) in found]
        right = [c["us"] for c in cases if c["ok"]]
        ratios = {p: _geomean([us[p] / us["terrazzo"] for us in right if p in us]) for p in peers}
        return {"suite": suite, "meta": meta, "geomean": ratios, "cases": cases}

    for done, case in enumerate(missing):
        if time.perf_counter() - start > within:
            break
        found[case.name, case.dtype] = _tried(case, options, peers)
        if folder is not None:
            save(record(), kept(suite, folder, part))
        torch.cuda.empty_cache()  # an error of the GPU comes up here: nothing can be measured after it
        at(f"measured {case.name}", done + 1, len(missing))
    if folder is not None and found:
        save(record(), kept(suite, folder, part))
        for other in parts_of(suite, folder) if count == 1 else ():
            other.unlink()
    return record()


def kept(suite: str, folder: Path, part: tuple[int, int]) -> Path:
    """Where the record of a suite is, or of a part of it."""
    number, count = part
    return folder / (f"{suite}.json" if count == 1 else f"{suite}.{number}-of-{count}.part")


def parts_of(suite: str, folder: Path) -> list[Path]:
    """The records of parts."""
    return sorted(folder.glob(f"{suite}.*-of-*.part"))


def recorded(
    suite: str, folder: Path | None, meta: Mapping[str, Any], peers: Sequence[str]
) -> dict[tuple[str, str], dict[str, Any]]:
    """The cases that were measured at this commit on such a GPU beside these peers, by name and type."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in (kept(suite, folder, (1, 1)), *parts_of(suite, folder)) if folder is not None else ():
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if all(record["meta"].get(x) == meta[x] for x in ("commit", "gpu")):
            found |= {(c["case"], c["dtype"]): c for c in record["cases"] if not c["us"] or {*peers} <= {*c["us"]}}
    return found


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


def _tried(case: Case, options: Options, peers: Sequence[str]) -> dict[str, Any]:
    """A case, or what became of it."""
    try:
        return _case(case, options, peers)
    except Exception as error:  # the other cases are to be measured, whatever this one ends with
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        known = {"bytes": case.bytes, "operations": case.operations, "said": case.said}
        return {"case": case.name, "dtype": case.dtype, "us": {}, "ok": False, "problem": told, **known}


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
