"""Random attention: scores changed point by point, masks of places and of data, heads of any size, in groups, and the
ways programs write it; its gradients, too. What it gives may be twice as far from float64 as eager is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from terrazzo.errors import Limitation
from terrazzo.front.capture import capture
from terrazzo.interp import kernel as simulator
from terrazzo.interp.torch import call_numpy, to_numpy
from terrazzo.ir.dialects import loop as l
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop.attention import blocks
from terrazzo.targets.cuda.emit import emit
from tests.fuzz.checks import Found, _finding, _kind
from tests.kernels.test_training import gradients

CHANGES = (
    "5 * torch.tanh(s / 5)", "30 * torch.tanh(s * (4 / 30))", "s + slope * (j - i)", "s - slope * (i - j).abs()",
    "s + bias", "s + pair", "s + shared", "s + column", "s * gain", "s - row", "s * 0.5", "s * s * 0.1",
    "torch.relu(s)", "torch.sigmoid(s) * 3", "torch.clamp(s, -1, 1)", "torch.where(i % 2 == 0, s, s * 0.25)",
    "s / (1 + (i - j).abs())", "torch.where(j <= i, s, -s)", "s + table[(i - j).clamp(-4, 4) + 4]", "-s.abs()",
)  # fmt: skip
"""What becomes of a score s of a query i and a key j, of head h in batch b."""
PLACES = (
    "j <= i", "j <= i + {keys} - {queries}", "(j <= i) & (i - j < {n})", "(i - j).abs() < {n}", "j < {n}",
    "i // {n} == j // {n}", "i // {n} >= j // {n}", "(i - j) % 3 == 0", "j % 5 < 3", "h % 2 == 0", "j >= i", "i < {n}",
    "(i // {n} - j // {n}).abs() <= 1", "b > 0",
)  # fmt: skip
DATA = (
    "ids == idk", "ids >= idk", "ids != idk", "mixed == mixk", "own == ownk", "valid", "j < count", "j >= count",
    "begin <= j", "j < end", "seen", "i + begin <= j + end", "j < count + i", "ids == idk + h % 2",
)  # fmt: skip
"""Who sees whom; n is a number of the case."""
WAYS = ("sdpa", "added", "filled", "lowest")
"""How a program hides scores: by PyTorch's function, by adding -inf, in their place, or by the lowest number."""
SIZES = (16, 24, 32, 40, 64, 64, 72, 80, 96, 128, 128, 160, 192, 256)
LENGTHS = (1, 3, 16, 40, 64, 100, 128, 130, 160, 200, 256, 264, 264, 300, 300)
WORK = 1 << 23
"""Most products of an example."""


@dataclass(frozen=True)
class Case:
    """An example: its shapes, changes one after the other, a predicate, how it hides, and the machine. Blocks are found
    at any price where `blocked`; gradients of q, k and v are asked for where it is `trained`.
    """

    batch: int
    heads: int
    group: int
    queries: int
    keys: int
    size: int
    width: int
    dtype: str
    changes: tuple[str, ...]
    predicate: str
    way: str
    target: str
    blocked: bool
    trained: bool


@st.composite
def cases(draw: Any) -> Case:
    def one(of: Any) -> Any:
        return draw(st.sampled_from(tuple(of)))

    group, size = one((1, 1, 1, 2, 4)), one(SIZES)
    heads, batch = group * one((1, 1, 2)), one((1, 1, 2))
    queries, keys = one(LENGTHS), one(LENGTHS)
    queries = keys if one((True, True, False)) else queries
    width = size if one((True, True, True, False)) else one(SIZES)
    trained = one((True, False, False, False))
    while batch * heads * queries * keys * (size + width) > (WORK // 4 if trained else WORK):
        batch, heads, group = (1, heads, group) if batch > 1 else (1, max(heads // 2, 1), 1) if heads > 1 else (1, 1, 1)
        if batch * heads == 1:
            queries, keys = max(queries // 2, 1), max(keys // 2, 1)
    parts = [one(one((PLACES, DATA))).format(n=one((1, 7, 20, 64, 100, 128)), keys=keys, queries=queries)
             for _ in range(one((0, 1, 1, 1, 2, 2, 3)))]  # fmt: skip
    predicate = ""
    for part in parts:
        part = f"~({part})" if one((False, False, False, True)) else f"({part})"
        predicate = f"({predicate} {one('&&|')} {part})" if predicate else part
    changes = tuple(one(CHANGES) for _ in range(one((0, 0, 1, 1, 2))))
    way = one(WAYS if not changes else WAYS[1:])
    return Case(batch, heads, group, queries, keys, size, width, one(("bfloat16", "float16")), changes, predicate,
                way, one(("sm_90a", "sm_90a", "sm_80")), one((True, False)), trained)  # fmt: skip


def data(c: Case) -> dict[str, Any]:
    """What the texts of a case name, from memory, of the same numbers for the same case."""
    draw = torch.Generator().manual_seed(7)
    dtype = getattr(torch, c.dtype)

    def number(*shape: int) -> Any:
        return torch.randn(shape, generator=draw).to(dtype)

    def whole(high: int, *shape: int) -> Any:
        return torch.randint(0, high, shape, generator=draw)

    b, h, n, m = c.batch, c.heads, c.queries, c.keys
    ids, idk = (whole(5, x).sort().values for x in (n, m))
    every = {
        "slope": number(h, 1, 1).abs(), "bias": number(h, n, m), "pair": number(b, 1, n, m), "shared": number(n, m),
        "column": number(b, 1, 1, m), "gain": number(h, 1, 1), "row": number(b, 1, n, 1), "table": number(9),
        "ids": ids[:, None], "idk": idk, "mixed": whole(3, n, 1), "mixk": whole(3, m),
        "own": whole(4, b, 1, n, 1).sort(2).values, "ownk": whole(4, b, 1, 1, m).sort(3).values,
        "valid": whole(4, b, 1, 1, m) > 0, "count": whole(m + 1, b, 1, 1, 1), "begin": whole(m, n, 1),
        "end": whole(m, n, 1), "seen": whole(2, n, m) > 0,
    }  # fmt: skip
    every["count"] = every["count"].view(b, 1, 1, 1)
    names = set(re.findall(r"\w+", " ".join((*c.changes, c.predicate))))
    return {name: x for name, x in every.items() if name in names}


def function(c: Case, names: tuple[str, ...]) -> Any:
    """The attention of a case, of q, k, v and what its texts name."""

    def attend(q: Any, k: Any, v: Any, *given: Any) -> Any:
        at = lambda n, *shape: torch.arange(n, device=q.device).view(-1, *shape)  # noqa: E731
        places = {"i": at(c.queries, 1), "j": at(c.keys), "h": at(c.heads, 1, 1), "b": at(c.batch, 1, 1, 1)}
        env = {"torch": torch, **places, **dict(zip(names, given, strict=True))}
        whole = (c.batch, c.heads, c.queries, c.keys)
        seen = eval(c.predicate, env) if c.predicate else None  # texts of this file
        if c.way == "sdpa":
            mask = seen.expand(torch.broadcast_shapes(seen.shape, whole[2:])) if seen is not None else None
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=c.group > 1)
        k, v = (x.repeat_interleave(c.group, 1) if c.group > 1 else x for x in (k, v))
        s = (q @ k.mT) * c.size**-0.5
        for change in c.changes:
            s = eval(change, {**env, "s": s})
        s = s if s.dtype == torch.float64 else s.float()
        if seen is not None and c.way == "added":
            s = s + torch.where(seen, 0.0, -torch.inf).to(s.dtype)
        elif seen is not None:
            low = -torch.inf if c.way == "filled" else torch.finfo(torch.float32).min
            s = s.masked_fill(~seen, low)
        return torch.softmax(s, -1).to(q.dtype) @ v

    return attend


def check(c: Case) -> str:
    """Results are as exact as eager's, and where eager's are no numbers, neither are they."""

    def judged() -> str:
        draw = torch.Generator().manual_seed(5)
        few = c.heads // c.group
        shapes = ((c.heads, c.queries, c.size), (few, c.keys, c.size), (few, c.keys, c.width))
        q, k, v = (torch.randn((c.batch, *s), generator=draw).to(getattr(torch, c.dtype)) for s in shapes)
        given = data(c)
        fn, args = function(c, tuple(given)), (q, k, v, *given.values())
        if c.trained:
            fn = gradients(fn)
            args = (*args, torch.randn((c.batch, c.heads, c.queries, c.width), generator=draw).to(q.dtype))
        exact = [x.numpy() for x in several(fn(*(x.double() if x.is_floating_point() else x for x in args)))]
        eager = [x.double().numpy() for x in several(fn(*args))]
        worth, blocks.WORTH = blocks.WORTH, 0 if c.blocked else blocks.WORTH
        try:
            captured = capture(fn, args, {})
            found = lowering(captured.program, Options(target=c.target, libraries="never"))
            kernels = found.at("kernel")
        except Limitation as why:
            return f"limitation: {_kind(why)}"
        finally:
            blocks.WORTH = worth
        varying = iter(args)
        inputs = {
            x.name: to_numpy(captured.bound[x.name] if x.name in captured.bound else next(varying))
            for x in found.loop.inputs
        }
        ours = [np.asarray(x, np.float64) for x in simulator.run(kernels, inputs, call=call_numpy)]
        whys = [why for x in zip(ours, eager, exact, strict=True) if (why := problem(*x))]
        if whys:
            raise Found("; ".join(whys))
        for s in kernels.steps:
            if not isinstance(s, l.Call):
                emit(s)
        return "right: one kernel" if len(kernels.steps) == 1 else "right"

    return _finding(judged, lambda: f"{c}\n")


def several(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def problem(ours: Any, eager: Any, exact: Any) -> str:
    """What is wrong with a result, or nothing."""
    ordinary = np.isfinite(exact) & np.isfinite(eager)
    if not np.isfinite(ours[ordinary]).all():
        return f"{(~np.isfinite(ours[ordinary])).sum()} results are no numbers"
    if np.isnan(exact).any() and np.isfinite(ours[np.isnan(exact)]).any():
        return "results are numbers where there are none"
    if not ordinary.any():
        return ""
    error, allowed = (float(np.sqrt(np.mean((x - exact)[ordinary] ** 2))) for x in (ours, eager))
    scale = float(np.sqrt(np.mean(exact[ordinary] ** 2)))
    return f"an error of {error:.3g}, where eager's is {allowed:.3g}" if error > 2 * allowed + 1e-3 * scale else ""
