"""How far the model's choices are from the best: the schedules of products that were measured, priced as they are now.

The measurements are in benchmarks/fits, which the constants of a machine's record are fitted to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.sites import Product, product
from terrazzo.rules.loop_to_tile.products import products, warpgroups
from terrazzo.rules.loop_to_tile.products.forms import merged
from terrazzo.rules.loop_to_tile.products.traffic import Walk
from terrazzo.rules.loop_to_tile.products.warpgroup_tiles import Tile
from terrazzo.rules.loop_to_tile.walked.threads import ceil

Key = tuple[Any, ...]
"""What a measurement says of a plan."""


@dataclass(frozen=True)
class Choice:
    """A product, the microseconds of the schedule that the model has first among those measured, of the fastest of them
    and of cuBLAS, how many there are, and by how much the model is off for those at most half as slow again as it.
    """

    shape: tuple[int, int, int]
    chosen: float
    best: float
    cublas: float
    count: int
    off: float

    @property
    def lost(self) -> float:
        """How much longer than the fastest the chosen one takes: 1 where no longer."""
        return self.chosen / self.best


def choices(record: Path, gpu: Gpu) -> list[Choice]:
    """One for every product of a record of measured schedules."""
    measured: dict[tuple[int, int, int], list[Mapping[str, Any]]] = {}
    for case in json.loads(record.read_text())["cases"]:
        measured.setdefault((case["m"], case["k"], case["n"]), []).append(case)
    return [_choice(shape, cases, _linear(*shape, gpu), gpu) for shape, cases in measured.items()]


def _choice(shape: tuple[int, int, int], cases: list[Mapping[str, Any]], p: Product, gpu: Gpu) -> Choice:
    times = {g: dict(_times(p, gpu, g)) for g in dict.fromkeys(c.get("together", 0) for c in cases)}
    known = [(mine[_key(c)], c["us"]) for c in cases if _key(c) in (mine := times[c.get("together", 0)])]
    best = min(us for _, us in known)
    near = [math.log(us / time) ** 2 for time, us in known if us <= 1.5 * best]
    off = math.exp(math.sqrt(sum(near) / len(near))) - 1
    return Choice(shape, min(known)[1], best, cases[0]["cublas_us"], len(known), off)


def _key(case: Mapping[str, Any]) -> Key:
    if case["on"] != "wgmma":
        return tuple(case["tile"]), case["pieces"]
    share = case.get("share", 1)
    return tuple(case["tile"]), case["groups"], case["turned"], case["cluster"], case["pieces"], share


def _times(p: Product, gpu: Gpu, together: int) -> Iterator[tuple[Key, float]]:
    """The microseconds that the model gives every plan of a product, so many rows of whose tiles are walked together,
    or, for 0, as many as were when that was no choice.
    """

    def walk(p: Product, tile: Tile, gpu: Gpu) -> Walk:
        rows = ceil(p.m.extent, tile.covered(p.m))
        return Walk(p.m, p.n, together or next(g for g in (8, 4, 2, 1) if rows % g == 0))

    for plan in warpgroups.plans(p, gpu, walk):
        t = plan.tile
        split = "" if t.split is None else "rows" if t.split is t.rows else "columns"
        yield ((t.m, t.n, t.k), t.groups, t.rows is not p.m, split, plan.pieces, t.share), plan.time / 1e3
    for other in products.plans(p, gpu):
        yield ((other.tile.m, other.tile.n, other.tile.k), other.pieces), other.time / 1e3


def _linear(m: int, k: int, n: int, gpu: Gpu) -> Product:
    """The product of a linear layer of bf16, as tiles are chosen for it."""
    import torch

    from terrazzo.front.capture import capture
    from terrazzo.options import Options
    from terrazzo.pipelines import lowering

    given = tuple(torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((m, k), (n, k)))
    done = lowering(capture(torch.nn.functional.linear, given, {}).program, Options(target=gpu.arch, libraries="never"))
    loops = [p for stage, p, _ in done.stages if stage.dst == "loop"][-1]
    (kernel,) = (s for s in loops.steps if isinstance(s, l.Kernel))
    found = product(kernel)
    assert found is not None
    again = product(merged(kernel, found, gpu).kernel)
    assert again is not None
    return again
