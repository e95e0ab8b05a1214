"""Every operator of PyTorch's database at a large shape: right? as fast as eager?

On a machine with a GPU, compiled and beside eager; what is not reached in time is said:

    PYTHONPATH=src:. python -m tests.opinfo.large --jobs 16 --seconds 200 --out large.jsonl
    PYTHONPATH=src:. python -m tests.opinfo.large --jobs 16 --seconds 200 --by-hand --out by_hand.jsonl

The second runs what `tests.opinfo.shapes` lists, at shapes that models have.
Without one, lowered for sm_90a on meta tensors and compiled by NVRTC, with the bytes that each kernel needs beside the
sectors that it touches and the instructions that its warps issue, which tells foolish schedules:

    PYTHONPATH=src:. python -m tests.opinfo.large --meta -k softmax --out meta.jsonl

A line of the file is a case: its verdict ("ok", "view", "wrong", "crash", "eager fails", "not captured", "late"),
microseconds of both in CUDA graphs with a cold cache, and its kernels with the reasons of their schedules. A summary
comes last.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT = 40
"""Seconds for one case."""
ROUNDS = ((("even", "float32", 1), ("even", "bfloat16", 1)), (("even", "float32", 4), ("backward", "float32", 1)),
          (("backward", "bfloat16", 2), ("odd", "bfloat16", 2)), (("strided", "float32", 1), ("rows", "float32", 2)),
          (("columns", "bfloat16", 2), ("even", "int64", 2), ("even", "bfloat16", 4)))  # fmt: skip
"""What is tried first, in what form and type, and how many calls of an operator: later rounds add what earlier ones
had not.
"""


@dataclass(frozen=True)
class Job:
    """An operator (or a case by hand) in some forms."""

    pattern: str
    index: int
    round: int


def jobs(pattern: str, by_hand: bool) -> list[Job]:
    """All of them, in the order of rounds."""
    from tests.opinfo.grow import chosen, plain
    from tests.opinfo.shapes import CASES

    if by_hand:
        return [Job(pattern, k, -1) for k, name in enumerate(CASES) if pattern in name]
    found = list(enumerate(chosen(pattern)))
    return [Job(pattern, k, r) for r in range(len(ROUNDS)) for k, op in found if r == 0 or not plain(op)]


def cases(job: Job) -> Iterator[Any]:
    """The cases of a job, but those that rounds before it had."""
    import torch

    from tests.opinfo.grow import chosen, grown
    from tests.opinfo.shapes import by_hand

    if job.round < 0:
        yield from by_hand(job.index)
        return
    op = chosen(job.pattern)[job.index]
    before = {(f, d): n for r in ROUNDS[: job.round] for f, d, n in r}
    for form, name, most in ROUNDS[job.round]:
        dtype = getattr(torch, name)
        if dtype in op.supported_dtypes("cpu") and (form != "backward" or op.supports_autograd):
            had = before.get((form, name), 0)
            for k, case in enumerate(grown(op, dtype, form, most)):
                if k >= had:
                    yield case


# -- one case on a GPU -------------------------------------------------------------------------------------------------


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


def on_gpu(case: Any, lock: str) -> dict[str, Any]:
    """Compiled, compared with eager and float64, and timed beside eager."""
    import torch
    from torch.utils import _pytree as pytree

    from terrazzo.front.capture import capture
    from terrazzo.options import Options
    from terrazzo.run.compiled import compile_program
    from tests.opinfo.harness import _exact, difference

    def leaves(found: Any) -> list[Any]:
        return [x for x in pytree.tree_leaves(found) if isinstance(x, torch.Tensor)]

    with _alone(lock, fcntl.LOCK_SH):
        given = case.tensors("cuda")
        try:
            expected = leaves(case.call(*given))
            torch.cuda.synchronize()
        except Exception as why:
            return {"verdict": "eager fails", "reason": _said(why)}
    if not expected or any(x.layout is not torch.strided for x in expected):
        return {"verdict": "eager fails", "reason": "no dense tensor"}
    if {_place(x) for x in expected} <= {_place(x) for x in given}:
        return {"verdict": "view", "reason": "nothing is computed"}
    begun = time.time()
    try:
        captured = capture(case.call, given)
    except Exception as why:
        return {"verdict": "not captured", "reason": _said(why)}
    done = compile_program(captured.program, captured.bound, Options(cache_dir=Path(f"{lock}.cache")), "cuda:0")
    result: dict[str, Any] = {"compile_s": round(time.time() - begun, 2)}
    with _alone(lock, fcntl.LOCK_SH):
        found = done(given)[: len(expected)]
        torch.cuda.synchronize()
        result["bytes"] = sum(x.numel() * x.element_size() for x in (*given, *found))
        why = difference(expected, found, _exact(case.call, given, {}))
        if why and difference(expected, leaves(case.call(*given)), None):
            why = ""  # eager itself gives one thing or another, as places of equal values
        result |= {"verdict": "wrong" if why else "ok", "reason": why}
        del expected, found
        torch.cuda.empty_cache()
    result |= _told(done)
    with _alone(lock):
        us = {"ours": _time(_graph(lambda: done(given))), "eager": _time(_graph(lambda: case.call(*given)))}
    ours = max(us["ours"], 0.1)  # what takes no time that a clock can tell
    ratio, gbs = round(us["eager"] / ours, 3), round(result["bytes"] / ours / 1e3)
    return result | {"us": us, "ratio": ratio, "gbs": gbs}


def _place(x: Any) -> int:
    return int(x.untyped_storage().data_ptr())


def _told(done: Any) -> dict[str, Any]:
    """The kernels and why they are as they are; what PyTorch ran."""
    chosen = [e for e in done.log.events if e.pass_name == "schedule" and e.fired]
    calls = sorted({f.op for f in done.fallbacks})
    return {"kernels": [(e.subject, f"{e.rule}: {e.reason}"[:160]) for e in chosen], "calls": calls}


def _graph(run: Callable[[], Any]) -> Callable[[], Any]:
    """A call as a CUDA graph, if it can be one."""
    import torch

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
    import torch

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


# -- one case without ----------------------------------------------------------------------------------------------

MEMORY = 4200.0
"""Bytes that a copy moves in a nanosecond on an H200."""


def on_meta(case: Any, lock: str) -> dict[str, Any]:
    """Lowered for an H200, and compiled by NVRTC; nothing runs."""
    from terrazzo.front.capture import capture
    from terrazzo.ir.dialects import kernel as k
    from terrazzo.options import Options
    from terrazzo.pipelines import lowering
    from terrazzo.run.cache import Cache
    from terrazzo.run.cuda import build, tried
    from terrazzo.run.nvrtc import Facts, known

    begun = time.time()
    try:
        captured = capture(case.call, case.tensors("meta"))
    except Exception as why:
        return {"verdict": "not captured", "reason": _said(why)}
    options = Options(target="sm_90a")
    cache = Cache(options.cache_dir, options.cache_limit)
    done = build(lowering(captured.program, options, tried=tried(options)), options, cache, options.target)
    steps, log = done.program.steps, done.lowering.log
    kernels = [s for s in steps if isinstance(s, k.Kernel)]
    facts = [known(source, options.target, cache) or Facts() for _, source in done.sources]
    bad = [f"{s.name}: {p}" for s, x in zip(kernels, facts, strict=True) if (p := x.problem())]
    reasons = {e.subject: f"{e.rule}: {e.reason}" for e in log.events if e.pass_name == "schedule" and e.fired}
    told = [{"name": s.name, "why": reasons.get(s.name, "")[:200], "registers": x.registers, **_cost(s)}
            for s, x in zip(kernels, facts, strict=True)]  # fmt: skip
    return {"verdict": "crash" if bad else "ok", "reason": "; ".join(bad), "compile_s": round(time.time() - begun, 2),
            "kernels": told, "calls": [s.name for s in steps if not isinstance(s, k.Kernel)]}  # fmt: skip


def _cost(kernel: Any) -> dict[str, Any]:
    """What a kernel reads and writes, in buffers and in sectors, how much it executes, and microseconds by both."""
    from terrazzo.targets.cuda.predict import predict

    buffers = dict.fromkeys((*kernel.reads, *kernel.writes))
    size = sum(_bytes(b.type) for b in buffers)
    found = predict(kernel)
    read, write = (found.costs.total(f"global {x}") for x in ("read", "write"))
    issued = sum(warps for warps, _ in found.costs.issues.values())
    return {"blocks": kernel.grid, "warps": kernel.warps, "mb": round(size / 1e6, 1), "issued": issued,
            "sectors_mb": round((read.sectors + write.sectors) * 32 / 1e6, 1), "unknown": len(found.unknown),
            "lines": read.requests + write.requests, "floor_us": round(size / MEMORY / 1e3, 1)}  # fmt: skip


def _bytes(kind: Any) -> int:
    n = 1
    for s in kind.static_shape:
        n *= s
    return n * int(kind.dtype.size)


# -- the pool ------------------------------------------------------------------------------------------------------


def _said(why: BaseException) -> str:
    return f"{type(why).__name__}: {str(why)[:400]}"


def _late(signum: int, frame: Any) -> None:
    raise TimeoutError(f"longer than {LIMIT} s")


def work(todo: Sequence[Job], next_: Any, beat: Any, options: argparse.Namespace) -> None:
    """A process: one job after the other until there is none, or the GPU is lost to it."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _late)
    run = on_meta if options.meta else on_gpu
    while True:
        with next_.get_lock():
            number = next_.value
            next_.value += 1
        if number >= len(todo):
            os._exit(0)
        drawn = cases(todo[number])
        while (case := _drawn(drawn)) is not None:
            beat.value = time.time()
            if time.time() > options.end:
                os._exit(0)
            row = {
                "op": case.op,
                "dtype": case.dtype,
                "form": case.form,
                "told": case.told,
                "round": todo[number].round,
            }
            signal.alarm(LIMIT)
            try:
                row |= run(case, options.lock)
            except TimeoutError as why:
                row |= {"verdict": "late", "reason": str(why)}
            except BaseException as why:
                row |= {"verdict": "crash", "reason": _said(why), "trace": traceback.format_exc()[-1500:]}
            signal.alarm(0)
            _write(options.out, row)
            if not options.meta:
                _still_usable()


def _drawn(found: Iterator[Any]) -> Any:
    """The next case, if it is found soon."""
    signal.alarm(LIMIT // 2)
    try:
        return next(found, None)
    except TimeoutError:
        return None
    finally:
        signal.alarm(0)


def _still_usable() -> None:
    """A kernel that reads beside its memory loses the GPU to the process: another one goes on."""
    import torch

    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:
        os._exit(3)


def _write(path: Path, row: dict[str, Any]) -> None:
    with open(path, "a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        f.write(json.dumps(row) + "\n")


def main() -> int:
    """Run all, print what is wrong or slow. The status says whether anything failed or was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", metavar="NAME")
    parser.add_argument("--meta", action="store_true", help="lower and compile only")
    parser.add_argument("--by-hand", action="store_true", help="only the shapes that models have")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=200, help="no case begins after so many")
    parser.add_argument("--out", type=Path, default=Path("large.jsonl"))
    options = parser.parse_args()
    options.out.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="terrazzo-large-") as folder:  # locks and caches are no results
        options.lock, options.end = f"{folder}/lock", time.time() + options.seconds
        reached, all_ = run_all(options)
    return summary(options.out, reached, all_)


def run_all(options: argparse.Namespace) -> tuple[int, int]:
    """Run the jobs in processes; how many were begun, of how many."""
    todo, context = jobs(options.k, options.by_hand), multiprocessing.get_context("spawn")
    next_ = context.Value("l", 0)
    pool: list[tuple[Any, Any]] = []
    while time.time() < options.end + LIMIT:
        for process, beat in list(pool):
            if process.is_alive() and time.time() - beat.value > 4 * LIMIT:
                process.kill()
                _write(options.out, {"op": "?", "verdict": "late", "reason": "the process had to be ended"})
            if not process.is_alive():
                process.join()
                pool.remove((process, beat))
        while len(pool) < options.jobs and next_.value < len(todo) and time.time() < options.end:
            beat = context.Value("d", time.time() + LIMIT)
            process = context.Process(target=work, args=(todo, next_, beat, options))
            process.start()
            pool.append((process, beat))
        if not pool:
            break
        time.sleep(0.2)
    for process, _ in pool:
        process.kill()
        process.join()
    return min(next_.value, len(todo)), len(todo)


def summary(path: Path, reached: int, all_: int) -> int:
    """What was found, the slowest last."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for row in rows:
        if row["verdict"] in ("wrong", "crash", "late"):
            print(f"{row['verdict']:6} {_named(row)}: {row['reason'][:200]}")
    timed = sorted((r for r in rows if "ratio" in r), key=lambda r: -float(r["ratio"]))
    for row in timed:
        if row["ratio"] < 0.9:
            facts = f"{row['us']} {row['gbs']} GB/s {row['kernels']} {row['calls']}"
            print(f"{row['ratio']:.2f} of eager: {_named(row)}: {facts}"[:400])
    if timed:
        mean = statistics.geometric_mean(max(r["ratio"], 1e-3) for r in timed)
        print(f"{len(timed)} cases timed, {mean:.2f} of eager's speed in the geometric mean, "
              f"{sum(r['ratio'] < 0.9 for r in timed)} below 0.9")  # fmt: skip
    verdicts = {v: sum(r["verdict"] == v for r in rows) for v in sorted({r["verdict"] for r in rows})}
    print(f"{len(rows)} cases of {reached} jobs (of {all_}): {verdicts}")
    return 1 if verdicts.keys() & {"wrong", "crash", "late"} else 0


def _named(row: dict[str, Any]) -> str:
    return " ".join(str(row.get(x, "")) for x in ("op", "dtype", "form", "told"))


if __name__ == "__main__":
    sys.exit(main())
