"""What one checkout makes of the corpus: every kernel, as text. Run with that checkout's `src` on the path.

This file stands alone: `make replay` runs it, as it is in the newer of two checkouts, against the older one too. So it
calls only what has been there for long, each thing that may be missing inside `told`, and imports nothing of
`tests.replay`.

    PYTHONPATH=CHECKOUT/src:CHECKOUT python -P worker.py dump --targets sm_80 --out FILE [--part 3/16] [--until TIME]
    PYTHONPATH=CHECKOUT/src:CHECKOUT python -P worker.py time

The second reads names of cases from its standard input, one a line, and answers each with a line of JSON; it needs a
GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

Made = tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], dict[str, Any]]
"""A function, a maker of its positional arguments, its named ones."""


def told(what: Callable[[], Any]) -> Any:
    """What a call gives; None where this checkout cannot say."""
    try:
        return what()
    except Exception:
        return None


def failure(error: BaseException) -> dict[str, str]:
    """An exception as it is recorded: the first line is enough to tell two of them apart."""
    return {"type": type(error).__name__, "message": (str(error).splitlines() or [""])[0]}


# --- the corpus ---


def corpus() -> Iterator[tuple[str, Callable[[], Made]]]:
    """(name, maker) of every case of this checkout: the benchmarks' and the tests'."""
    from terrazzo.bench.gpu import SUITES as gpu_suites

    for suite, cases in gpu_suites.items():
        for case in cases():
            yield f"gpu {suite}: {case.name}, {case.dtype}", lambda case=case: (*case.make()[:2], {})
    from terrazzo.bench.suites import SUITES as cpu_suites

    for suite, cases in cpu_suites.items():
        for case in cases():
            yield f"cpu {suite}: {case.name}", lambda case=case: _sets(*case.make())
    from tests.kernels.programs import CASES

    for name, case in CASES.items():
        yield f"tests: {name}", lambda case=case: (case.fn, case.make, {})


def _sets(fn: Any, sets: list[tuple[Any, ...]], kwargs: dict[str, Any]) -> Made:
    return fn, lambda: sets[0], kwargs


def without_values() -> None:
    """From here on random tensors have no values (memory that nobody touches costs nothing), and none is on a GPU:
    what a function is lowered to depends on shapes and types alone.
    """

    def empty(*size: Any, dtype: Any = None, **_: Any) -> Any:
        return torch.empty(*size, dtype=dtype)

    torch.randn = torch.rand = empty
    torch.randn_like = lambda x, **_: torch.empty_like(x, device="cpu")
    torch.nn.Module.cuda = lambda self, *_: self
    torch.Tensor.cuda = lambda self, *_: self
    for name in ("normal_", "uniform_", "trunc_normal_"):
        setattr(torch.Tensor, name, lambda self, *_, **__: self)


# --- what it is lowered to ---


def dump(targets: list[str], only: str, part: tuple[int, int] = (0, 1), until: float = math.inf) -> dict[str, Any]:
    """Every kernel of the corpus once, and for each case and target which of them it consists of, or how it failed;
    of every so-manyth case from one on, until a time.
    """
    import terrazzo

    without_values()
    kernels: dict[str, dict[str, Any]] = {}
    cases: dict[str, dict[str, Any]] = {}
    first, step = part
    for name, make in [x for x in corpus() if only in x[0]][first::step]:
        if time.time() > until:
            break
        try:
            program = _captured(*make())
        except Exception as error:
            cases.update({f"{name} ({t})": {"kernels": [], "failed": failure(error)} for t in targets})
            continue
        for target in targets:
            cases[f"{name} ({target})"] = _case(program, target, kernels)
    source = str(Path(terrazzo.__file__).parent)
    return {"source": source, "targets": targets, "prelude": told(_prelude) or "", "kernels": kernels, "cases": cases}


def _captured(fn: Any, make: Callable[[], tuple[Any, ...]], kwargs: dict[str, Any]) -> Any:
    from terrazzo.front.capture import capture

    torch.manual_seed(0)
    return capture(fn, make(), kwargs).program


def _case(program: Any, target: str, kernels: dict[str, dict[str, Any]]) -> dict[str, Any]:
    from terrazzo.options import Options
    from terrazzo.pipelines import lowering

    try:
        done = lowering(program, Options(target=target))
        found = [_kernel(done, n, s, target) for n, s in enumerate(done.at("kernel").steps) if hasattr(s, "grid")]
    except Exception as error:
        return {"kernels": [], "failed": failure(error)}
    for key, _, facts in found:
        kernels.setdefault(key, facts)
    return {"kernels": [[name, key] for key, name, _ in found], "failed": None}


def _kernel(done: Any, number: int, kernel: Any, target: str) -> tuple[str, str, dict[str, Any]]:
    """(key, name, record) of a kernel; kernels that are alike up to names have one key."""
    from terrazzo.ir.text import show
    from terrazzo.targets.cuda.emit import emit

    function, source = emit(kernel)
    texts = {
        "cuda": plain(function, source),
        "schedule": told(lambda: str(dict(done.at("tile").schedules)[number])) or "",
        "kernel": told(lambda: show(_alone(done.at("kernel"), kernel))) or "",
    }
    launch = {
        "blocks": told(lambda: kernel.grid),
        "threads": told(lambda: kernel.threads),
        "bytes of shared memory": told(lambda: kernel.shared_bytes),
    }
    expected = {
        "registers declared": told(lambda: _registers(kernel)),
        "us by the model": told(lambda: _expected(done, number, target)),
    }
    key = digest(f"{target} {launch}\n{texts['cuda']}")
    return key, kernel.name, {"key": key, **texts, "facts": {**launch, **expected}}


def plain(function: str, source: str) -> str:
    """CUDA to look at: the function, its parameters and its shared buffers are numbered, comments are gone. What is
    left of names are those of values.
    """
    text = re.sub(r"^//.*\n", "", source, flags=re.MULTILINE)
    head = re.search(re.escape(function) + r"\((.*)\) \{$", text, re.MULTILINE)
    parameters = [re.findall(r"\w+", p)[-1] for p in head[1].split(", ") if p] if head else []
    shared = re.findall(r"\* const (\w+) = reinterpret_cast<[^>]*>\(shared \+", text)
    names = (
        {function: "k"} | {p: f"p{n}" for n, p in enumerate(parameters)} | {s: f"s{n}" for n, s in enumerate(shared)}
    )
    return re.sub(r"\b\w+\b", lambda word: names.get(word[0], word[0]), text)


_DECLARED = re.compile(r"\b(?:int|[a-z]+\d+)\*? (?:const )?(\w+)(?= = |\[|;)")


def digest(text: str) -> str:
    """The same for texts that differ only in what values are called."""
    names = {name: f"${n}" for n, name in enumerate(dict.fromkeys(_DECLARED.findall(text)))}
    return hashlib.sha256(re.sub(r"\b\w+\b", lambda word: names.get(word[0], word[0]), text).encode()).hexdigest()[:16]


def _prelude() -> str:
    from terrazzo.targets.cuda.emit import prelude

    return str(prelude())


def _alone(program: Any, kernel: Any) -> Any:
    """A program of one kernel."""
    reads = tuple(b for b in kernel.params if b not in kernel.writes)
    return type(program)(kernel.name, reads, (kernel,), tuple(kernel.writes))


def _registers(kernel: Any) -> int:
    from terrazzo.ir.verify_kernel import declared

    return int(declared(kernel.body))


def _expected(done: Any, number: int, target: str) -> float:
    from terrazzo.cli.explain import kernel_facts
    from terrazzo.hw.gpu import GPUS
    from terrazzo.rules.loop_to_tile.estimate import estimate
    from terrazzo.targets import target as named

    kernel = done.loop.steps[number]
    facts = kernel_facts(done.loop, kernel, (), named(target).rates)
    return round(float(estimate(kernel, GPUS[target], facts["bytes"], facts["operations"]).time) / 1000, 3)


# --- what it takes ---


def answer() -> None:
    """Time the cases that are named on the standard input, a replay of a graph at a time, until it ends.

    `open NAME` compiles and captures a case, elsewhere in memory than the last time; `go` gives the microseconds per
    call of some replays. Peers take turns. `build NAME` compiles a case for the cache, in which who opens it later
    finds its kernels.
    """
    known = dict(corpus())
    graph, calls, opened = None, 0, 0
    for line in sys.stdin:
        word, _, name = line.strip().partition(" ")
        try:
            if word == "open":
                graph = room = None
                torch.cuda.empty_cache()
                opened += 1
                room = torch.empty(opened % MOVES * MOVE, dtype=torch.uint8, device="cuda")  # what comes lies after it
                graph, calls = _graph(known[name])
                said: dict[str, Any] = {"ok": room is not None}
            elif word == "build":
                _compiled(known[name])
                said = {"ok": True}
            else:
                said = {"us": _replayed(graph, calls)}
        except Exception as error:
            said = {"failed": failure(error)}
        print(json.dumps(said), flush=True)


COLD, MOST_SETS = 2.0, 160
"""Sets of inputs are together so many times larger than the second-level cache, and no more than so many."""
CALLS = 32
"""Calls of a graph, at least."""
MOVE, MOVES = 7 << 20, 16
"""By so many bytes a case lies elsewhere in memory at its next opening, and after how many openings it is back."""


def _compiled(
    make: Callable[[], Made],
) -> tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], tuple[Any, ...], int]:
    """A compiled case, the maker of its inputs, the first of them, and how many no cache holds."""
    import terrazzo

    torch.manual_seed(0)
    fn, inputs, kwargs = make()
    first = inputs()
    compiled = terrazzo.compile(fn, *first, **kwargs)
    return lambda *a: compiled(*a, **kwargs), inputs, first, _wanted(fn, first)


def _graph(make: Callable[[], Made]) -> tuple[Any, int]:
    """A CUDA graph that calls a compiled case with each of its sets of inputs, and how many calls that are."""
    call, inputs, first, wanted = _compiled(make)
    sets = [first, *(inputs() for _ in range(wanted - 1))]
    sets *= -(-CALLS // len(sets))
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad():
        with torch.cuda.stream(side):  # what is done at a first call is not captured
            for args in sets[:3]:
                call(*args)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for args in sets:
                call(*args)
    return graph, len(sets)


def _wanted(fn: Any, args: tuple[Any, ...]) -> int:
    """How many sets of inputs no cache holds; what a module has of its own is read at every call."""
    own = [*fn.parameters(), *fn.buffers()] if isinstance(fn, torch.nn.Module) else []
    size = sum(t.numel() * t.element_size() for t in (*args, *own))
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return min(MOST_SETS, max(2, -(-int(COLD * cache) // max(size, 1))))


HELD = 1 << 20
"""Cycles, at first, for which the GPU is kept busy while the CPU hands over a graph."""


def _replayed(graph: Any, calls: int, times: int = 3) -> float:
    found = []
    held = HELD
    while len(found) < times:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(held)
        begin.record()
        graph.replay()  # takes the CPU up to 0.3 us a kernel, which are not the kernel's
        end.record()
        waited = begin.query()
        end.synchronize()
        if waited and held < HELD << 6:
            held *= 2
        else:
            found.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(found)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("task", choices=("dump", "time"))
    options.add_argument("--targets", default="sm_80,sm_90a")
    options.add_argument("--only", default="")
    options.add_argument("--out", type=Path)
    options.add_argument("--part", default="0/1")
    options.add_argument("--until", type=float, default=math.inf)
    chosen = options.parse_args()
    if chosen.task == "time":
        return answer()
    first, step = map(int, chosen.part.split("/"))
    found = dump(chosen.targets.split(","), chosen.only, (first, step), chosen.until)
    chosen.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
