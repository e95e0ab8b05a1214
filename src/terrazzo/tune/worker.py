"""The process that runs candidates: one that hangs or breaks its GPU's context takes nothing else with it.

It says that it is ready, then reads a job a line, JSON: the texts of programs of Tile IR that compute the same, that of
a program of Loop IR that writes inputs of theirs, or "", what they are built for, and the seconds to spend. It answers
with a line for each program, "" or why it is out, and with one of microseconds.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from terrazzo.options import Options

REPLAYS = 7
"""Rounds in turn that are measured at least."""
COLD = 2.0
"""Sets of inputs are together so many times larger than the second-level cache."""
MOST_SETS = 48
BEHIND = 2.0
"""A candidate that takes so many times what another takes is measured no further."""
CLOSE = {2: 1e-2, 4: 1e-5, 8: 1e-12}
"""How far results of two candidates may be apart, as a part of them, by the bytes of a number: they are sums in
different orders, rounded at the end.
"""


def main() -> None:
    """Answer jobs until there are none."""
    import torch

    torch.cuda.init()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        for answer in measured(**json.loads(line)):
            print(json.dumps(answer), flush=True)


def measured(
    programs: Sequence[str], source: str, target: str, device: str, cache_dir: str, cache_limit: int, seconds: float
) -> Iterator[Any]:
    """For every program why it is out, in order; then the microseconds of each, None for those that are out."""
    import torch

    options = Options(
        target=target, fp32="exact", libraries="never", cache_dir=Path(cache_dir), cache_limit=cache_limit
    )
    torch.manual_seed(0)
    sets: list[dict[str, Any]] = []
    reference: list[Any] = []
    graphs: dict[int, Any] = {}
    with torch.cuda.device(device), torch.no_grad():
        for number, text in enumerate(programs):
            try:
                why, graphs[number] = _ready(text, source, options, device, sets, reference)
            except Exception as error:
                why, graphs[number] = f"{type(error).__name__}: {str(error).splitlines()[0]}", None
            if why:
                del graphs[number]
            yield why
        yield _times(graphs, len(sets), seconds, len(programs))


def _ready(
    text: str, source: str, options: Options, device: str, sets: list[dict[str, Any]], reference: list[Any]
) -> Any:
    """Why a program is out, and its graph. The first one makes the inputs, and the results that count as right: it is
    what runs where nothing is measured.
    """
    import torch

    from terrazzo.ir.dialects import tile
    from terrazzo.ir.text import parse
    from terrazzo.run.compiled import compile_program
    from terrazzo.run.timing import graph_of

    program = parse(text)
    assert isinstance(program, tile.Program)
    names = [i.name for i in program.loop.inputs]
    sets += [] if sets else _inputs(program.loop.inputs, source, options, device)
    call = compile_program(program, {}, replace(options, frozen=()), device)
    poison = [torch.full_like(t, math.nan if t.is_floating_point() else 1) for t in reference]
    del poison  # results will lie where this was: what nobody writes is not right by accident
    results = call([sets[0][name] for name in names])
    torch.cuda.synchronize()
    if not reference:
        reference += results
    elif why := _apart(results, reference):
        return why, None
    return "", graph_of(lambda given: call([given[name] for name in names]), [(given,) for given in sets])


def _inputs(inputs: Sequence[Any], source: str, options: Options, device: str) -> list[dict[str, Any]]:
    """Sets of inputs that no cache holds: what `source` writes, and random ones, by name."""
    import torch

    from terrazzo.ir.dialects import loop as l
    from terrazzo.ir.text import parse
    from terrazzo.run.compiled import compile_program

    writer = parse(source) if source else l.Program("nothing", (), (), ())
    assert isinstance(writer, l.Program)
    call = compile_program(writer, {}, options, device) if source else lambda given: given
    written = [b.name for b in writer.results]
    random = {b.name: b.type for b in (*inputs, *writer.inputs) if b.name not in written}
    size = sum(i.type.span for i in inputs)
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    sets = []
    for _ in range(min(MOST_SETS, max(1, math.ceil(COLD * cache / max(size, 1))))):
        given = {name: _random(kind, device) for name, kind in random.items()}
        sets.append(given | dict(zip(written, call([given[i.name] for i in writer.inputs]), strict=True)))
    return sets


def _random(kind: Any, device: str) -> Any:
    """A tensor of a type: normal numbers; integers that are 0 or 1, so indices of whatever they index; truth values."""
    import torch

    from terrazzo.ir.torch_types import to_torch_dtype

    values = torch.randn(max(1, kind.span // kind.dtype.size), device=device)
    flat = (values if kind.dtype.is_float else values > 0).to(to_torch_dtype(kind.dtype))
    return flat.as_strided(kind.static_shape, kind.element_strides)


def _apart(results: Sequence[Any], reference: Sequence[Any]) -> str:
    """How results differ from those that count as right by more than rounding does."""
    import torch

    for got, right in zip(results, reference, strict=True):
        if not right.is_floating_point():
            if not torch.equal(got, right):
                return "its results are others"
            continue
        a, b = got.double(), right.double()
        finite = torch.isfinite(b)
        if not torch.equal(torch.isfinite(a), finite):
            return "it has infinities or NaNs at other places"
        apart = float((a - b)[finite].norm() / b[finite].norm().clamp_min(1e-30))
        if apart > CLOSE[right.element_size()]:
            return f"its results are {apart:.1e} apart"
    return ""


def _times(graphs: dict[int, Any], sets: int, seconds: float, count: int) -> list[float | None]:
    from terrazzo.run.timing import in_turns

    first = {n: min(times) for n, times in in_turns(graphs, sets, 2).items()}
    best = min(first.values(), default=0.0)
    near = {n: graph for n, graph in graphs.items() if first[n] <= BEHIND * best}
    found: dict[int, list[float]] = {n: [] for n in near}
    end = time.monotonic() + seconds
    while near and (time.monotonic() < end or len(next(iter(found.values()))) < REPLAYS):
        for n, times in in_turns(near, sets, 1).items():
            found[n] += times
    us = {**first, **{n: statistics.median(times) for n, times in found.items()}}
    return [us.get(n) for n in range(count)]
