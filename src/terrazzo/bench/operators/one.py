"""One case: compiled, compared with eager and float64, and timed beside eager."""

from __future__ import annotations

import contextlib
import fcntl
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from terrazzo.bench.operators.fills import Case
from terrazzo.bench.operators.judge import difference, exactly
from terrazzo.front.capture import capture
from terrazzo.options import Options
from terrazzo.run.compiled import compile_program


@contextlib.contextmanager
def _alone(path: str, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """While times are taken, nobody else uses the GPU. Who waits for that is before all who come later."""
    left = signal.alarm(0)  # waiting for others is not the case's fault
    with open(f"{path}.gate", "a") as gate, open(path, "a") as f:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(f, kind)
        fcntl.flock(gate, fcntl.LOCK_UN)
        signal.alarm(left)
        yield


def on_gpu(case: Case, lock: str, libraries: str) -> dict[str, Any]:
    """What became of a case: its verdict ("ok", "view" where nothing is computed, "wrong", "eager fails", "not
    captured"), microseconds of both in CUDA graphs with a cold cache, and, where we are slower, why its kernels are as
    they are. Who holds `lock` has the GPU.
    """

    def leaves(found: Any) -> list[Any]:
        return [x for x in pytree.tree_leaves(found) if isinstance(x, torch.Tensor)]

    with _alone(lock, fcntl.LOCK_SH):
        given = case.tensors("cuda")
        try:
            expected = leaves(case.call(*given))
            torch.cuda.synchronize()
        except Exception as error:
            return {"verdict": "eager fails", "reason": said(error)}
    if not expected or any(x.layout is not torch.strided for x in expected):
        return {"verdict": "eager fails", "reason": "no dense tensor"}
    if {_place(x) for x in expected} <= {_place(x) for x in given}:
        return {"verdict": "view", "reason": "nothing is computed"}
    begun = time.time()
    try:
        captured = capture(case.call, given)
    except Exception as error:
        return {"verdict": "not captured", "reason": said(error)}
    options = Options(cache_dir=Path(f"{lock}.cache"), libraries=libraries)
    done = compile_program(captured.program, captured.bound, options, "cuda:0")
    result: dict[str, Any] = {"compile_s": round(time.time() - begun, 2)}
    with _alone(lock, fcntl.LOCK_SH):
        found = done(given)[: len(expected)]
        torch.cuda.synchronize()
        result["bytes"] = sum(x.numel() * x.element_size() for x in (*given, *found))
        why = difference(expected, found, exactly(case.call, given, {}))
        if why and difference(expected, leaves(case.call(*given)), None):
            why = ""  # eager itself gives one thing or another, as places of equal values
        result |= {"verdict": "wrong" if why else "ok", "reason": why}
        del expected, found
        torch.cuda.empty_cache()
    with _alone(lock):
        us = {"terrazzo": _time(_graph(lambda: done(given))), "eager": _time(_graph(lambda: case.call(*given)))}
    us["terrazzo"] = max(us["terrazzo"], 0.1)  # what takes no time that a clock can tell
    ratio = round(us["eager"] / us["terrazzo"], 3)
    return result | {"us": us, "ratio": ratio} | _told(done, ratio < SLOWER)


SLOWER = 0.95
"""Of eager's speed: what is below is told with its kernels."""


def said(why: BaseException) -> str:
    """An error in a record."""
    return f"{type(why).__name__}: {str(why)[:400]}"


def _place(x: Any) -> int:
    return int(x.untyped_storage().data_ptr())


def _told(done: Any, wholly: bool) -> dict[str, Any]:
    """How many kernels there are, and `wholly` why they are as they are; what PyTorch ran."""
    chosen = [e for e in done.log.events if e.pass_name == "schedule" and e.fired]
    why = {"why": [f"{e.subject}: {e.rule}: {e.reason}"[:160] for e in chosen]} if wholly else {}
    return {"kernels": len(chosen), "calls": sorted({f.op for f in done.fallbacks}), **why}


def _graph(run: Callable[[], Any]) -> Callable[[], Any]:
    """A call as a CUDA graph, if it can be one."""
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        return graph.replay
    except Exception:
        torch.cuda.synchronize()
        return run


def _time(run: Callable[[], Any]) -> float:
    """The median of a few runs, in microseconds, each after the cache was filled with other things."""
    other = torch.empty(1 << 26, device="cuda")
    begun = time.time()
    run()
    torch.cuda.synchronize()
    least = 3 if time.time() - begun < 0.1 else 1
    times: list[float] = []
    begun = time.time()
    while len(times) < least or (len(times) < 11 and time.time() - begun < 0.1):
        other.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return round(statistics.median(times), 1)
