"""One program, measured in a process of its own: right, how fast beside eager, how large, how long to compile.

`python -m terrazzo.bench.programs.one NAME DTYPE LIBRARIES FOLDER` writes the record to FOLDER/NAME.DTYPE.json.
Processes share FOLDER/gpu: many may use the GPU at once, but who measures times has it alone.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from terrazzo.bench.gpu import COLD, REPLAYS
from terrazzo.bench.harness import Accuracy, accuracy, peak, using
from terrazzo.options import Options
from terrazzo.run.timing import graph_of, in_turns

SECONDS = 1.0
"""About how long the times of a program are measured."""
LEAST = 5
"""Replays that there are in any case."""
MOST_SETS = 32
DRAWS = 8
"""How often eager computes again, at most, to see how far off it is by chance."""
MOVED = 1 / 16
"""The part of the weights and inputs that are off by a rounding then: every sum has some, and few are off."""
REACH = 32
"""Roundings of weights and inputs within which a kink is met: so far off float32 gets after some layers."""
PATIENCE = 20.0
"""Seconds after which no more such steps are tried: float64 is slow on most GPUs."""
OFF = {"f32": 5e-7, "bf16": 4e-3}
"""A loss may be off by this part, where eager's is nearer by chance: by a rounding of bfloat16, or some of float32."""


def measured(name: str, dtype: str, options: Options, room: Path) -> dict[str, Any]:
    """The record of a program. The type "tf32" is float32 whose convolutions PyTorch may compute in TF32, as it does
    unless it is told not to; "f32" is told so.
    """
    import torch

    from terrazzo.bench.programs import programs

    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, dtype == "tf32"
    dtype = "f32" if dtype == "tf32" else dtype
    torch.manual_seed(0)
    with using(room), torch.no_grad():
        module, inputs = programs()[name].made(dtype, "cuda")
        module(*inputs)  # what only a first call does, and the workspaces of libraries
        eager = peak(lambda: module(*inputs))
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    ours = compiled(module, inputs, options)
    seconds = time.perf_counter() - start
    with using(room), torch.no_grad():
        ours(*inputs)
        kept = torch.cuda.memory_allocated() - before
        memory = {"terrazzo": kept + peak(lambda: ours(*inputs)), "eager": eager, "held": before}
        found = judged(tensors(ours(*inputs)), tensors(module(*inputs)), module, inputs, ours, dtype)
        torch.cuda.empty_cache()
        sets = turned(module, inputs)
        calls, captured = prepared({"terrazzo": ours, "eager": module}, sets)
    with using(room, alone=True), torch.no_grad():
        times = in_turns(calls, len(sets), replays(in_turns(calls, len(sets), 2), len(sets)))
    return {
        "us": {which: statistics.median(values) for which, values in times.items()},
        "captured": captured,
        "compile_s": seconds,
        "memory": memory,
        "error": found.ours,
        "error_eager": found.eager,
        "problem": found.problem,
        "whole": hasattr(ours, "captured"),
        "fallbacks": [f.op for part in parts(ours) for f in part.fallbacks],
    }


def compiled(module: Any, inputs: Sequence[Any], options: Options) -> Any:
    """The module, compiled. What branches on its data goes through torch.compile, as is said of it then: its graphs are
    ours, and PyTorch runs what lies between them.
    """
    import torch

    import terrazzo
    from terrazzo.errors import Limitation

    try:
        return terrazzo.compile(module, *inputs, options=options)
    except Limitation:
        given = {"target": options.target, "libraries": options.libraries, "cache_dir": options.cache_dir}
        ours = torch.compile(module, backend="terrazzo", dynamic=False, options=given)
        with torch.no_grad():
            ours(*inputs)
        return ours


def parts(ours: Any) -> list[Any]:
    """The graphs of what was compiled: one, or those that torch.compile made."""
    from terrazzo.run.compiled import Compiled

    if hasattr(ours, "captured"):
        return [ours.compiled]
    return [x for x in gc.get_objects() if type(x) is Compiled]  # of proxies nothing else may be asked


def replays(first: Mapping[str, Sequence[float]], sets: int) -> int:
    """How often calls are replayed that took so many microseconds at first: for about `SECONDS`."""
    together = sum(values[-1] for values in first.values()) * sets / 1e6
    return min(REPLAYS, max(LEAST, int(SECONDS / max(together, 1e-9))))


def tensors(results: Any) -> list[Any]:
    """The tensors among results."""
    import torch
    from torch.utils import _pytree as pytree

    return [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]


def judged(
    ours: Sequence[Any], eager: Sequence[Any], module: Any, inputs: Sequence[Any], compiled: Any, dtype: str
) -> Accuracy:
    """How far results are from float64. One that is further off than eager's may yet be as near as eager's would be
    another time: which side of a kink something lies on, and the gradients behind it, change when sums are rounded
    otherwise. A few in a million numbers are that close to a ReLU's kink, so one computation meets some and another
    none. Where there is a problem, eager computes again with some weights and inputs off by a rounding, and a result is
    compared with the worst of what that gives; then with how far the results jump at kinks within reach. Sums that are
    less exact than eager's gain nothing: but for kinks, what eager is off by is the same each time, and nothing jumps.
    """
    import torch

    right = exact(module, inputs, compiled)
    found = accuracy(ours, eager, right, OFF[dtype])
    others, left = list(eager), found
    for _ in range(DRAWS):
        if not left.problem:
            break
        drawn = tensors(rounded(module, dtype)(*(off(x, dtype) for x in inputs)))
        quads = zip(ours, others, drawn, right, strict=True)
        others = [d if accuracy([o], [e], [r], OFF[dtype]).problem else e for o, e, d, r in quads]
        left = accuracy(ours, others, right, OFF[dtype])
    if left.problem and all(x.dtype != torch.float32 for x in right):
        left = accuracy(ours, others, right, OFF[dtype], jumps(module, inputs, compiled, right, dtype))
    return replace(found, problem=left.problem)


def jumps(module: Any, inputs: Sequence[Any], ours: Any, right: Sequence[Any], dtype: str) -> list[float]:
    """How far results jump where weights and inputs go some roundings one way or the other, all in float64: what two
    such steps in opposite directions give is twice what no step does, but for kinks. Of whole numbers, the part that
    is another.
    """
    import torch

    from terrazzo.bench.programs.registry import DTYPES

    def off_by(x: Any, step: float, seed: int) -> Any:
        if is_exact(x):
            return x
        drawn = torch.rand(x.shape, generator=torch.Generator(x.device).manual_seed(seed), device=x.device)
        return x.double() * (1 + step * (drawn.double() * 2 - 1))

    def stepped(step: float, seed: int) -> list[Any]:
        there = copy.deepcopy(module).double()
        for k, (p, q) in enumerate(zip(there.parameters(), module.parameters(), strict=True)):
            p.copy_(off_by(q, step, seed + k))
        return exact(there, [off_by(x, step, seed - 1 - k) for k, x in enumerate(inputs)], ours)

    def apart(a: Any, b: Any, r: Any) -> float:
        if not (r.is_floating_point() or r.is_complex()):
            return float(((a != r) | (b != r)).double().mean())
        d = (a + b - 2 * r).abs()
        return float(d[torch.isfinite(d)].square().mean().sqrt()) if d.numel() else 0.0

    step, found = REACH * torch.finfo(DTYPES[dtype]).eps / 2, [0.0] * len(right)
    until = time.perf_counter() + PATIENCE
    for draw in range(DRAWS):
        if time.perf_counter() > until:
            break
        both = stepped(step, draw << 20), stepped(-step, draw << 20)
        found = [max(f, apart(a, b, r)) for f, a, b, r in zip(found, *both, right, strict=True)]
    return found


def rounded(module: Any, dtype: str) -> Any:
    """The module, some of its weights replaced by numbers next to them."""
    found = copy.deepcopy(module)
    for p in found.parameters():
        p.copy_(off(p, dtype))
    return found


def off(x: Any, dtype: str) -> Any:
    """A tensor, some of its numbers replaced by those next to them."""
    import torch

    from terrazzo.bench.programs.registry import DTYPES

    if is_exact(x):
        return x
    at = torch.rand_like(x)
    step = (at < MOVED).double() * torch.where(at < MOVED / 2, 0.75, -0.75)
    return (x.double() * (1 + torch.finfo(DTYPES[dtype]).eps * step)).to(x.dtype)


def is_exact(x: Any) -> bool:
    """Whether a tensor has whole numbers only, such as a mask: nothing of it was rounded."""
    return not x.is_floating_point() or bool((x == x.round()).all())


def exact(module: Any, inputs: Sequence[Any], ours: Any) -> list[Any]:
    """The results in float64: of the module, and where that has ops that take none, of the captured program. What is
    for 16 bits only has them in float32.

    What a module converts to float32 is left in float64: else the reference would round as eager does there, and eager
    be nearer to it than it is to what is right. A TransformerEncoderLayer's fast path is no judge either: on a GPU it
    takes the GELU by tanh for the one that was asked for (aten._addmm_activation), in float64 too.
    """
    import torch

    from terrazzo.errors import CallFailed
    from terrazzo.front.capture import capture
    from terrazzo.interp import torch as interpreter

    def of(kind: Any) -> list[Any]:
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            wide = copy.deepcopy(module).to(kind)
            given = [x.to(kind) if x.is_floating_point() else x for x in inputs]
            with widened() if kind is torch.float64 else nullcontext():
                return tensors(wide(*given))
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)

    try:
        return of(torch.float64)
    except RuntimeError:
        if not hasattr(ours, "captured"):
            return of(torch.float32)
        captured = capture(module, inputs)  # each result is a value of its own there
        given = {**captured.bound, **captured.given(inputs, {})}
        try:
            return interpreter.run(captured.program, given, precise=True)[: captured.count]
        except CallFailed:
            return of(torch.float32)


@contextmanager
def widened() -> Iterator[None]:
    """Within it, ops that are given float64 give no float32, nor do numbers of Python's beside whole ones: 0.1 times a
    range, which a GPU may round as no other device does.
    """
    import torch
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    class Widened(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            given = pytree.tree_leaves((args, kwargs))
            if any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in given):
                args, kwargs = pytree.tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs))
            return func(*args, **kwargs)

    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Widened():
            yield
    finally:
        torch.set_default_dtype(usual)


def turned(module: Any, inputs: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The inputs, and as many copies that they and the weights are larger than the second-level cache together."""
    import torch

    size = sum(t.numel() * t.element_size() for t in (*inputs, *module.parameters()))
    wanted = math.ceil(COLD * torch.cuda.get_device_properties(0).L2_cache_size / max(size, 1))
    return [tuple(inputs), *(tuple(t.clone() for t in inputs) for _ in range(min(wanted, MOST_SETS) - 1))]


class Calls:
    """Calls that no graph could capture, replayed one by one."""

    def __init__(self, call: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> None:
        self.call, self.sets = call, sets

    def replay(self) -> None:
        """Each set once."""
        for args in self.sets:
            self.call(*args)


def prepared(calls: dict[str, Callable[..., Any]], sets: Sequence[tuple[Any, ...]]) -> tuple[dict[str, Any], bool]:
    """A CUDA graph of each; where one of them cannot be captured, the calls of both as they are."""
    import torch

    try:
        return {name: graph_of(call, sets) for name, call in calls.items()}, True
    except RuntimeError:
        torch.cuda.synchronize()
        plain = {name: Calls(call, sets) for name, call in calls.items()}
        for one in plain.values():
            one.replay()
        return plain, False


def main(name: str, dtype: str, libraries: str, folder: str) -> None:
    """Measure a program, and write what was found, or what was wrong."""
    room = Path(folder)
    with tempfile.TemporaryDirectory() as cache:  # compile times are those of a first time
        try:
            found = measured(name, dtype, Options(libraries=libraries, cache_dir=Path(cache)), room)
        except Exception as error:  # whatever it is, the others go on
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            where = ", ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames)
            found = {"failed": f"{type(error).__name__}: {error}"[:2000] + f" ({where})"}
        (room / f"{name}.{dtype}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
