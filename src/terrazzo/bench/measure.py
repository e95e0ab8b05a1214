"""One suite, measured: every case compiled, checked on all its inputs, and only then timed beside eager."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

from terrazzo.bench.harness import accuracy, confirmed, surroundings
from terrazzo.bench.suites import SUITES, Case
from terrazzo.errors import UserError
from terrazzo.options import Options


def measure(suite: str, options: Options, seconds: float, threads: int) -> dict[str, Any]:
    """The record of a suite, with `seconds` spent on each case, and `threads` on both sides."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        where = surroundings(threads)
        cases = [_case(case, options, seconds) for case in SUITES[suite]()]
    finally:
        torch.set_num_threads(before)
    speeds = [c["speed"] for c in cases if c["problem"] == ""]
    geomean = math.exp(sum(map(math.log, speeds)) / len(speeds)) if speeds else 0.0
    return {"suite": suite, **where, "geomean": geomean, "cases": cases}


def _case(case: Case, options: Options, seconds: float) -> dict[str, Any]:
    import torch
    from torch.utils import _pytree as pytree

    import terrazzo

    torch.manual_seed(0)
    fn, sets, kwargs = case.make()
    compiled = terrazzo.compile(fn, *sets[0], options=options, **kwargs)
    with torch.no_grad():
        problems, worst = [], None
        for args in sets:
            ours, eager = (pytree.tree_leaves(f(*args, **kwargs)) for f in (compiled, fn))
            found = accuracy(ours, eager, _exact(fn, args, kwargs))
            problems += [found.problem] if found.problem else []
            worst = found if worst is None or found.ours > worst.ours else worst
        times = confirmed({"terrazzo": _turns(compiled, sets, kwargs), "eager": _turns(fn, sets, kwargs)}, seconds)
    assert worst is not None
    return {
        "name": case.name,
        "shapes": [list(a.shape) for a in sets[0]],
        "problem": "; ".join(problems),
        "error": worst.ours,
        "eager_error": worst.eager,
        "fallbacks": [f.op for f in compiled.compiled.fallbacks],
        "speed": times["eager"].median / times["terrazzo"].median,
        **{name: asdict(t) for name, t in times.items()},
    }


def _exact(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The results in float64, by PyTorch."""
    from terrazzo.front.capture import capture
    from terrazzo.interp import torch as interpreter

    captured = capture(fn, args, kwargs)
    results = interpreter.run(captured.program, {**captured.bound, **captured.given(args, kwargs)}, precise=True)
    return results[: captured.count]


def _turns(fn: Callable[..., Any], sets: Sequence[tuple[Any, ...]], kwargs: Mapping[str, Any]) -> Callable[[], object]:
    turns = cycle(sets)
    return lambda: fn(*next(turns), **kwargs)


def save(record: Mapping[str, Any], path: Path) -> None:
    """Write a record; UserError where that is impossible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".writing")
        temporary.write_text(json.dumps(record, indent=1) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
