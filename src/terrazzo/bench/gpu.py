"""Measuring on a GPU, honestly: correctness first, CUDA graphs over inputs that no cache holds, peers in turns,
medians, a roofline.
"""

from __future__ import annotations

import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from terrazzo.bench import fp32, products
from terrazzo.bench.article import article
from terrazzo.bench.attention import attention
from terrazzo.bench.gpu_suites import Case, block, convolution, gemm, pointwise, reduction
from terrazzo.bench.gradients import gradients
from terrazzo.bench.harness import accuracy, peak, surroundings, using
from terrazzo.bench.measure import save
from terrazzo.options import Options
from terrazzo.progress import at
from terrazzo.run.timing import graph_of, in_turns

SUITES: dict[str, Callable[[], tuple[Case, ...]]] = {
    "pointwise": pointwise,
    "reduction": reduction,
    "gemm": gemm,
    "fp32": fp32.large,
    "fp32-frozen": fp32.once,
    "fp32-small": fp32.small,
    "fp32-hard": fp32.hard,
    "attention": attention,
    "convolution": convolution,
    "gradients": gradients,
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
    parts included, is not measured again. Processes with the same folder compile side by side, and measure one at a
    time.
    """
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    if suite.startswith("fp32"):
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
        others = dict.fromkeys(name for c in cases for name in c["us"] if c.get("group") and name != "terrazzo")
        every_peer = [*others] if others else peers
        ratios = {p: _geomean([us[p] / us["terrazzo"] for us in right if p in us]) for p in every_peer}
        return {"suite": suite, "meta": meta, "geomean": ratios, "cases": cases}

    for done, case in enumerate(missing):
        if time.perf_counter() - start > within:
            break
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            found[case.name, case.dtype] = _tried(case, options, peers, folder)
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
    cases = [c for record in recorded_at(suite, folder, meta) for c in record["cases"]]
    known = (c for c in cases if not c["us"] or c.get("group") or {*peers} <= {*c["us"]})
    return {(c["case"], c["dtype"]): c for c in known}


def recorded_at(suite: str, folder: Path | None, meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records of a suite and of parts of it that are of this commit and such a GPU."""
    found = []
    for path in (kept(suite, folder, (1, 1)), *parts_of(suite, folder)) if folder is not None else ():
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if all(record["meta"].get(x) == meta[x] for x in ("commit", "gpu")):
            found.append(record)
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


def _tried(case: Case, options: Options, peers: Sequence[str], folder: Path | None) -> dict[str, Any]:
    """A case, or what became of it."""
    known = {"case": case.name, "dtype": case.dtype, "bytes": case.bytes, "operations": case.operations}
    known |= {"said": case.said, "group": case.group}
    try:
        return {**known, **_case(case, options, peers, folder)}
    except Exception as error:  # the other cases are to be measured, whatever this one ends with
        return {**known, "us": {}, "ok": False, "problem": _told(error)}


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _case(case: Case, options: Options, peers: Sequence[str], folder: Path | None) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    torch._dynamo.reset()
    alone = using(folder, alone=True) if folder is not None else nullcontext()
    with alone:
        fn, make, exact = case.make()
        sets = _sets(make)
        before = torch.cuda.memory_allocated()
    with said() as warned:
        ours, seconds = _ours(case, fn, sets[0], options)
    alone = using(folder, alone=True) if folder is not None else nullcontext()
    with alone, torch.no_grad():
        ours(*sets[0])
        kept = torch.cuda.memory_allocated() - before  # before any other may have cuBLAS keep 32 MiB
        found = accuracy(_leaves(ours(*sets[0])), _leaves(fn(*sets[0])), _leaves(exact(*sets[0])))
        torch.cuda.empty_cache()
        named = case.peers(fn) if case.peers else {p: _peer(p, fn) for p in peers}
        calls, without = {"terrazzo": ours}, {}
        for name, call in named.items():
            try:
                call(*sets[0])
            except Exception as error:
                if not case.peers:
                    raise
                without[name] = _told(error)
            else:
                calls[name] = call
        memory = {name: peak(lambda call=call: call(*sets[0])) for name, call in calls.items()}  # type: ignore[misc]
        memory["terrazzo"] += kept
        for args in sets if case.frozen else ():
            ours(*args)
        graphs = {name: graph_of(call, sets) for name, call in calls.items()}
        times = in_turns(graphs, len(sets), REPLAYS)
        wall = _wall(ours, sets)
    us = {name: statistics.median(values) for name, values in times.items()}
    problem = found.problem or _roofline(case, us, options)
    return {
        "us": us,
        "spread": {name: [_at(values, 0.1), _at(values, 0.9)] for name, values in times.items()},
        "wall_us": wall,
        "compile_s": seconds,
        "memory": memory,
        "without": without,
        "error": found.ours,
        "error_eager": found.eager,
        "ok": not problem,
        "problem": problem,
        "fallbacks": [*warned, *(f.op for f in (ours.compiled.fallbacks if hasattr(ours, "compiled") else ()))],
    }


def _sets(make: Callable[[], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Inputs that no cache holds together."""
    import torch

    sets = [make()]
    size = sum(t.numel() * t.element_size() for t in sets[0])
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    wanted = min(MOST_SETS, max(2, math.ceil(COLD * cache / max(size, 1))))
    return sets + [make() for _ in range(wanted - 1)]


def _ours(case: Case, fn: Any, args: tuple[Any, ...], options: Options) -> tuple[Any, float]:
    """The case, compiled, and the seconds that took."""
    import torch

    import terrazzo

    start = time.perf_counter()
    ours: Any
    if case.ours is None:
        pinned = replace(options, schedules=(case.schedule,)) if case.schedule else options
        ours = terrazzo.compile(fn, *args, options=replace(pinned, frozen=case.frozen))
    else:
        ours = case.ours(options)
        with torch.no_grad():
            ours(*args)
    return ours, time.perf_counter() - start


def _peer(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    mode = {"eager": None, "compile": "default", "max-autotune": "max-autotune-no-cudagraphs"}[name]
    return fn if mode is None else torch.compile(fn, dynamic=False, mode=mode)


@contextmanager
def said() -> Iterator[list[str]]:
    """What we warn of within it, be it for the first time or not: that PyTorch runs something."""
    from terrazzo.front import dynamo
    from terrazzo.run import compiled

    told: list[str] = []
    dynamo._said.clear()
    compiled._said.clear()
    with warnings.catch_warnings(record=True) as every:
        warnings.simplefilter("always")
        yield told
    told += [str(w.message).split(chr(10))[0] for w in every if str(w.message).startswith("terrazzo:")]


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
    products = {"auto": 3, "split": 3, "tf32": 3, "bf16": 1}.get(options.fp32)
    full = tensor if case.dtype != "f32" else max(fma, tensor / products) if products else fma
    least = max(case.bytes / memory, case.operations / full) / 1e3
    beaten = [name for name, t in us.items() if t < 0.95 * least]
    return f"{', '.join(beaten)} beat the roofline of {least:.1f} us" if beaten else ""


def _at(values: Sequence[float], part: float) -> float:
    return sorted(values)[round((len(values) - 1) * part)]


def _geomean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0.0
