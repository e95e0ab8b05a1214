"""Measuring against PyTorch, honestly: correctness first, both in one process and in turns, medians with their
spread.
"""

from __future__ import annotations

import fcntl
import gc
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SHORTEST = 200e-6
"""Seconds below which calls are timed several at once, because reading the clock is not free."""
STEADY = 1.5
"""How far apart the ends of a spread may be, as a ratio, before a measurement is taken for disturbed."""
FEW = 64
"""Numbers of which the mean error of one computation says little about that of another."""
RARE = 2**-10
"""The part of whole numbers of which eager's may differ from float64's for float64 to judge others by: more are bits of
something, or of a narrow type, and must be equal to eager's.
"""
BREATH = 2
"""Calls of each before anything counts: they fault in memory, start threads and fill caches."""


@dataclass(frozen=True)
class Accuracy:
    """How far results are from float64: root mean square errors, the worst result counting. `problem` is empty if all
    is well.

    The rule: our error is at most twice eager's own, or at most what rounding the exact result to its type can cost.
    """

    ours: float
    eager: float
    difference: float
    problem: str

    @property
    def ok(self) -> bool:
        return not self.problem


def accuracy(
    ours: Sequence[Any], eager: Sequence[Any], exact: Sequence[Any], few: float = 0.0, jumps: Sequence[float] = ()
) -> Accuracy:
    """Compare results; `difference` is the largest from eager. Integers and bools must be equal, but where few of
    eager's are on the other side of a rounding or a comparison than float64's, at most twice as many of ours may be;
    NaNs must be at the same places. A result of few numbers, such as a loss, of which eager's own error is chance, may
    be off by `few` times its size. `jumps` say by how much results jump within reach of a rounding: eager's errors may
    as well have been these.
    """
    quads = zip(ours, eager, exact, jumps or [0.0] * len(exact), strict=True)
    found = [_compare(*quad, few) for quad in quads]
    problems = "; ".join(f"result {k}: {a.problem}" for k, a in enumerate(found) if a.problem)
    worst = max(found, key=lambda a: (bool(a.problem), a.ours), default=Accuracy(0.0, 0.0, 0.0, ""))
    return Accuracy(worst.ours, worst.eager, max((a.difference for a in found), default=0.0), problems)


def _compare(ours: Any, eager: Any, exact: Any, jump: float, few: float) -> Accuracy:
    import torch

    if ours.shape != eager.shape or ours.dtype != eager.dtype:
        return Accuracy(
            math.inf, 0.0, math.inf, f"{ours.dtype}{list(ours.shape)}, not {eager.dtype}{list(eager.shape)}"
        )
    if not (eager.is_floating_point() or eager.is_complex()):
        return _compare_whole(ours, eager, exact, jump)
    wide = torch.complex128 if eager.is_complex() else torch.float64
    a, b, c = (t.detach().to(wide) for t in (ours, eager, exact))
    ordinary = torch.isfinite(b) & torch.isfinite(c)
    special = a[~ordinary], b[~ordinary]
    if not torch.isfinite(a[ordinary]).all() or not torch.allclose(*special, equal_nan=True):
        return Accuracy(math.inf, 0.0, math.inf, "infinities or NaNs at other places than eager's")
    a, b, c = a[ordinary], b[ordinary], c[ordinary]
    mine, theirs, scale = (float(d.abs().square().mean().sqrt()) if d.numel() else 0.0 for d in (a - c, b - c, c))
    difference = float((a - b).abs().max()) if a.numel() else 0.0
    least = max(torch.finfo(eager.dtype).eps / 2, few if a.numel() <= FEW else 0.0)
    allowed = max(2 * theirs, least * scale, 2 * jump)
    return Accuracy(mine, theirs, difference, "" if mine <= allowed else f"error {mine:.2e} is above {allowed:.2e}")


def _compare_whole(ours: Any, eager: Any, exact: Any, jump: float) -> Accuracy:
    """Of whole numbers the errors are the parts that differ from float64's."""
    differ, count = int((ours != eager).sum()), max(eager.numel(), 1)
    mine, theirs = (int((x != exact).sum()) for x in (ours, eager))
    fine = not differ or (mine <= 2 * max(theirs, jump * count) and max(mine / 2, theirs) <= RARE * count)
    said = f"{differ} of {eager.numel()} elements differ, from float64's {mine}, and {theirs} of eager's"
    return Accuracy(mine / count, theirs / count, float(differ > 0), "" if fine else said)


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median, and between which two values eight of ten measurements lie."""

    median: float
    low: float
    high: float
    measurements: int


def interleaved(calls: Mapping[str, Callable[[], object]], seconds: float = 1.0, least: int = 7) -> dict[str, Timing]:
    """Time the calls in turns for about `seconds` in all, so that whatever else the machine does falls on all of
    them.
    """
    repeats: dict[str, int] = {}
    for name, call in calls.items():
        for _ in range(BREATH):
            start = time.perf_counter()
            call()
            once = time.perf_counter() - start
        repeats[name] = max(1, math.ceil(SHORTEST / max(once, 1e-7)))
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found[names[0]]) < least:
        for name in names:
            call, count = calls[name], repeats[name]
            start = time.perf_counter()
            for _ in range(count):
                call()
            found[name].append((time.perf_counter() - start) / count)
        names.reverse()  # neither always runs in the other's wake
    return {name: _timing(values) for name, values in found.items()}


def confirmed(calls: Mapping[str, Callable[[], object]], seconds: float, attempts: int = 4) -> dict[str, Timing]:
    """`interleaved`, measured anew while something else disturbs it; of all attempts the steadiest counts, whoever it
    favours.
    """
    best: dict[str, Timing] = {}
    for _ in range(attempts):
        found = interleaved(calls, seconds)
        if not best or _unsteadiness(found) < _unsteadiness(best):
            best = found
        if _unsteadiness(best) < STEADY:
            break
    return best


def _unsteadiness(timings: Mapping[str, Timing]) -> float:
    return max(t.high / t.low for t in timings.values())


def _timing(values: Sequence[float]) -> Timing:
    ordered = sorted(values)
    last = len(ordered) - 1
    return Timing(statistics.median(ordered), ordered[round(last * 0.1)], ordered[round(last * 0.9)], len(ordered))


@contextmanager
def using(room: Path, alone: bool = False) -> Iterator[None]:
    """The GPU, with others or alone. Who waits at the door lets nobody pass, so that those who share leave it some
    time. The room is made where there is none.
    """
    room.mkdir(parents=True, exist_ok=True)
    with (room / "gpu").open("a") as inside, (room / "door").open("a") as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(inside, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield


def peak(call: Callable[[], Any]) -> int:
    """The most bytes that are allocated at a time within a call, over what was before."""
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = int(torch.cuda.memory_allocated())
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before


def surroundings(threads: int) -> dict[str, Any]:
    """What a number means nothing without: the commit, the date, the versions, the processor, and what else it had to
    do.
    """
    import numpy
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
    return {
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": versions,
        "cpu": processor(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2),
    }


def busy(record: Mapping[str, Any]) -> bool:
    """Whether other processes wanted the processor when a record was begun: its times then tell more about them."""
    return bool(record["load"] > record["threads"] / 2)


def processor() -> str:
    """The name of this machine's processor, as Linux tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    """The commit of the sources that are measured, marked if they were changed since; empty outside a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("-changed" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
