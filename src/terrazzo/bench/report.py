"""Records as tables: for the terminal, and for docs/performance.md."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from terrazzo.bench.choice import Choice, choices
from terrazzo.bench.compiling import PHASES
from terrazzo.bench.harness import busy
from terrazzo.bench.operators import report as operators
from terrazzo.bench.programs import report as programs

TITLES = {
    "chains": "Chains of pointwise operations, norms and softmax",
    "layer": "A decoder layer of TinyLlama-1.1B, float32",
    "gemm": "Linear layers and batched products, float32",
}


def rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A header and a row per case. Times are medians; the spread is that of our own."""
    head = ("case", "eager", "terrazzo", "spread", "speed", "error / eager's")
    return [head, *(_row(case) for case in record["cases"])]


def _row(case: Mapping[str, Any]) -> tuple[str, ...]:
    ours, eager = case["terrazzo"], case["eager"]
    ratio = case["error"] / case["eager_error"] if case["eager_error"] else 0.0
    return (
        case["name"],
        _time(eager["median"]),
        _time(ours["median"]),
        f"{_time(ours['low'])} to {_time(ours['high'])}",
        f"{case['speed']:.2f}x",
        case["problem"] or f"{ratio:.2f}",
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def gpu_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A header and a row per case of a GPU's record: microseconds, what part of the data sheet's rate that is, and
    ratios.
    """
    peers = list(record["geomean"])
    said = ["the article's / eager"] if any(c.get("said") for c in record["cases"]) else []
    peak = ["peak, of the least peer's"] if any(c.get("group") for c in record["cases"]) else []
    ratios = [f"/ {p}" for p in peers]
    found = [("case", "dtype", "terrazzo", *peers, "rate", *ratios, *said, *peak, "error / eager's")]
    for c in record["cases"]:
        us = c["us"]
        if not us:
            found.append((c["case"], c["dtype"], *("" for _ in range(len(found[0]) - 3)), c["problem"]))
            continue
        rate = (
            f"{c['operations'] / us['terrazzo'] / 1e6:.1f} TFLOP/s"
            if c["operations"]
            else f"{c['bytes'] / us['terrazzo'] / 1e3:.0f} GB/s"
        )
        error = c["error"] / c["error_eager"] if c["error_eager"] else 0.0
        ratios = [f"{us[p] / us['terrazzo']:.2f}x" if p in us else "" for p in peers]
        others = [*([c["said"]] if said else ()), *([_peak(c["memory"])] if peak else ())]
        times = [f"{us[name]:.1f} us" if name in us else "" for name in ("terrazzo", *peers)]
        found.append(
            (
                c["case"],
                c["dtype"],
                *times,
                rate if c["bytes"] else "",
                *ratios,
                *others,
                c["problem"] or f"{error:.2f}",
            )
        )
    return found


def _peak(memory: Mapping[str, int]) -> str:
    """What a call takes at its peak, and what part that is of what the peer takes that needs least."""
    least = min(n for name, n in memory.items() if name != "terrazzo")
    return f"{memory['terrazzo'] / 1e6:.1f} MB, {memory['terrazzo'] / max(least, 1):.2f}"


def group_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """How many times as fast ours is as the best peer, a row for each group of cases and type; none without groups."""
    found: dict[tuple[str, str], list[float]] = {}
    for c in record["cases"]:
        if c.get("group") and c["us"]:
            best = min(t for name, t in c["us"].items() if name != "terrazzo")
            found.setdefault((c["group"], c["dtype"]), []).append(best / c["us"]["terrazzo"])
    rows = [
        (*key, str(len(each)), f"{_mean(each):.2f}x", f"{min(each):.2f}x", f"{max(each):.2f}x")
        for key, each in found.items()
    ]
    return [("group", "type", "cases", "of the best peer", "least", "most"), *rows] if rows else []


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def conditions(record: Mapping[str, Any]) -> str:
    """Where and when a record was measured."""
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    commit = f", commit {record['commit']}" if record["commit"] else ""
    load = f", measured on a busy machine (load {record['load']})" if busy(record) else ""
    return f"{record['cpu']}, {record['threads']} threads, {versions}{commit}, {record['date']}{load}"


def page(results: Path) -> str:
    """docs/performance.md, of all the records below `results`."""
    parts = [HEAD]
    for path in sorted(results.rglob("*.json")):
        record = json.loads(path.read_text())
        if record.get("suite") == "programs":
            parts += _programs(record)
            continue
        if record.get("suite") == "operators":
            parts += _operators(record)
            continue
        if record.get("suite") == "shapes":
            parts += _shapes(record)
            continue
        if record.get("suite") == "staircase":
            parts += _staircase(record)
            continue
        if "meta" in record:
            parts += (
                _counters(record) if "counters" in record["meta"] else _gpu_part(record) if "geomean" in record else []
            )
            continue
        if (part := {"libraries": _libraries, "memory": _memory, "compile": _compile}.get(record["suite"])) is not None:
            parts += part(record)
            continue
        table = rows(record)
        lines = ["| " + " | ".join(row) + " |" for row in table]
        lines.insert(1, "|---|" + "---:|" * (len(table[0]) - 1))
        title = TITLES.get(record["suite"], record["suite"])
        parts += [
            f"## {title}",
            "",
            conditions(record) + ".",
            "",
            *lines,
            "",
            f"Geometric mean: **{record['geomean']:.2f}x** of eager.",
            "",
        ]
    if fits := [x for name in FITS if (x := results.parent / "fits" / f"{name}.json").exists()]:
        parts += _choices(fits)
    return "\n".join(parts)


def library_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A header and a row per model, type and kind of pass."""

    def told(found: Mapping[str, int]) -> str:
        return ", ".join(f"{number} {name.removeprefix('aten.')}" for name, number in found.items()) or "0"

    head = ("model", "type", "pass", "a library is faster", "no kernel")
    return [
        head,
        *(
            (c["model"], c["dtype"], "training" if c["training"] else "forward", told(c["faster"]), told(c["missing"]))
            for c in record["cases"]
        ),
    ]


def memory_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A header and a row per case."""
    head = ("case", "pass", "eager", "terrazzo", "of eager's")
    return [
        head,
        *(
            (
                c["name"],
                "training" if c["training"] else "forward",
                f"{c['eager'] / 1e6:.1f} MB",
                f"{c['terrazzo'] / 1e6:.1f} MB",
                f"{c['terrazzo'] / c['eager']:.2f}",
            )
            for c in record["cases"]
        ),
    ]


def compile_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A header and a row per program: seconds."""
    found: list[tuple[str, ...]] = [("program", *PHASES, "in all", "warm", "kernels", "sources")]
    for c in record["cases"]:
        name = f"{c['family']}, {c['size']}" if c["size"] else c["family"]
        if "failed" in c:
            found.append((name, *("" for _ in PHASES), c["failed"], "", "", ""))
            continue
        parts = [f"{c['seconds'][phase]:.1f}" for phase in PHASES]
        warm = f"{c['warm']['total']:.1f}" if "total" in c["warm"] else c["warm"]["failed"]
        found.append((name, *parts, f"{c['total']:.1f}", warm, str(c["kernels"]), str(c["sources"])))
    return found


def _compile(record: Mapping[str, Any]) -> list[str]:
    """Seconds that programs take to compile, as a table, and a chart for each family that grows."""
    families = dict.fromkeys(c["family"] for c in record["cases"] if c["size"])
    plots = [line for family in families for line in _growth(record, family)]
    where = f"{conditions(record)}; target {record['target']}, {'loaded' if record['loaded'] else 'not loaded'}."
    return ["## Compile time", "", where, "", *COMPILE, "", *plots, *_markdown(compile_rows(record)), ""]


def _growth(record: Mapping[str, Any], family: str) -> list[str]:
    """What compiling takes by the size of a program, beside what capturing it takes."""
    cases = [c for c in record["cases"] if c["family"] == family and "failed" not in c]
    if not cases:
        return []
    series = [
        [round(x, 1) for x in times]
        for times in zip(*((c["total"], c["seconds"]["capture"]) for c in cases), strict=True)
    ]
    return [
        "```mermaid", "xychart-beta", f'  title "{family}: seconds in all (bars), to capture (line)"',
        f"  x-axis [{', '.join(str(c['size']) for c in cases)}]",
        f'  y-axis "seconds" 0 --> {max(series[0]) * 1.05:.1f}', f"  bar {series[0]}", f"  line {series[1]}", "```", "",
    ]  # fmt: skip


COMPILE = """In seconds, cold, each in a process of its own that has imported PyTorch: capturing; finding kernels and
fusing them; choosing schedules; completing them and deriving kernels, checks included; writing CUDA; waiting for NVRTC,
which begins beside the rest; loading, where there is a GPU. Warm is all of a second process, which finds launches and
kernels in the cache (`terrazzo bench compile` measures anew).
""".splitlines()


def _memory(record: Mapping[str, Any]) -> list[str]:
    """The peak memory of calls."""
    return ["## Peak memory of a call", "", *MEMORY, "", *_markdown(memory_rows(record)), ""]


MEMORY = """What a call takes at its peak on a processor, over weights and inputs, by PyTorch's own account of its
allocations (`terrazzo bench memory` measures anew). Ours has the temporaries that are kept between calls in it.
""".splitlines()


def _libraries(record: Mapping[str, Any]) -> list[str]:
    """How many ops of models PyTorch runs."""
    total = sum(sum(c["faster"].values()) for c in record["cases"])
    return [
        "## GPU: ops of PyTorch that are called",
        "",
        *LIBRARIES,
        "",
        *_markdown(library_rows(record)),
        "",
        f"Ops called since a library is faster, in all: **{total}**; it is to fall to zero.",
        "",
    ]


def _programs(record: Mapping[str, Any]) -> list[str]:
    """Model programs: a table of families, and one of all."""
    return [
        f"## {programs.title(record)}",
        "",
        _where(record),
        "",
        *programs.WHAT,
        "",
        *_markdown(programs.summary(record)),
        "",
        *_markdown(programs.rows(record)),
        "",
    ]


def _operators(record: Mapping[str, Any]) -> list[str]:
    """Single operators: a table of sums, and one of what is weak."""
    tables = [x for table in (operators.summary, operators.weak) for x in (*_markdown(table(record)), "")]
    return [f"## {operators.title(record)}", "", _where(record), "", *operators.WHAT, "", *tables]


SHAPES = {
    "proj32": "projections of Qwen2.5-7B in float32, their weights split at every call",
    "fused": "products with what surrounds them, beside the better of eager and torch.compile",
    "att": "attention, beside the best of eager, cuDNN and FlashAttention",
    "backward": "attention forward and backward, beside the same",
    "decode": "attention of one query, beside the same",
    "masks": "attention under masks and with changed scores, beside eager",
    "ce": "cross-entropy with its projection, beside the better of eager and torch.compile",
}


def shape_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """How many times as fast ours is as the best peer, a row for each group of shapes."""
    rows: list[tuple[str, ...]] = [("shapes", "cases", "geometric mean", "least", "most")]
    for group, told in SHAPES.items():
        each = [case["us"] for case in record["cases"] if case["group"] == group]
        ratios = sorted(min(t for name, t in us.items() if name != "terrazzo") / us["terrazzo"] for us in each)
        rows.append((told, str(len(ratios)), f"**{_mean(ratios):.2f}x**", f"{ratios[0]:.2f}x", f"{ratios[-1]:.2f}x"))
    return rows


def _shapes(record: Mapping[str, Any]) -> list[str]:
    meta = record["meta"]
    told = f"{meta['gpu']}, commit {meta['commit']}, libraries {meta['libraries']}: {meta['what']}."
    return ["## Shapes that models have", "", *wrap(told, 120), "", *_markdown(shape_rows(record)), ""]


def stair_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """What each ingredient of a product's schedule gains, in the order in which they come."""
    rows: list[tuple[str, ...]] = [("and then", "µs", "TFLOP/s", "of the step before", "of cuBLAS")]
    before = 0.0
    for case in record["cases"]:
        if not case["us"]:
            rows.append((case["case"], "", "", "", f"**{case['problem']}**"))
            continue
        us = case["us"]["terrazzo"]
        gain = f"{before / us:.2f}x" if before else ""
        told = f"**{case['problem']}**" if case["problem"] else f"{case['us']['eager'] / us:.2f}x"
        rows.append((case["case"], f"{us:.0f}", f"{case['operations'] / us / 1e6:.0f}", gain, told))
        before = us
    return rows


def _staircase(record: Mapping[str, Any]) -> list[str]:
    return [
        "## One product, ingredient by ingredient",
        "",
        _where(record),
        "",
        *STAIRS,
        "",
        *_markdown(stair_rows(record)),
        "",
    ]


STAIRS = """8192 cubed in bf16 under pinned schedules (`bench/products.py`): each has what those above it have, and one
thing more. `terrazzo bench gpu --suite staircase` measures anew.
""".splitlines()


def choice_rows(found: Sequence[Choice]) -> list[tuple[str, ...]]:
    """How far the model's choices are from the fastest schedules that were measured, those first that lose most."""
    head = ("product", "chosen (µs)", "fastest", "of", "lost", "model off by", "cuBLAS", "chosen / cuBLAS")
    lines = [
        (
            f"{' x '.join(map(str, c.shape))}", f"{c.chosen:.1f}", f"{c.best:.1f}", str(c.count),
            f"{100 * (c.lost - 1):.0f} %", f"{100 * c.off:.0f} %", f"{c.cublas:.1f}", f"{c.cublas / c.chosen:.2f}x",
        )
        for c in sorted(found, key=lambda c: -c.lost)
    ]  # fmt: skip
    return [head, *lines]


FITS = ("h200-tiles", "h200-shared")
"""Records of schedules that were measured; of a product, the later one counts."""


def _choices(fits: Sequence[Path]) -> list[str]:
    """The model's choices among schedules that were measured."""
    from terrazzo.hw.gpu import gpu

    found = [*{c.shape: c for path in fits for c in choices(path, gpu("sm_90a"))}.values()]
    lost = math.exp(sum(math.log(c.lost) for c in found) / len(found)) - 1
    off = math.exp(math.sqrt(sum(math.log1p(c.off) ** 2 for c in found) / len(found))) - 1
    told = (
        f"Of {sum(c.count for c in found)} schedules of {len(found)} products of bf16 (rows x steps x columns) that"
        f" were measured on an H200, those that the model has first take {100 * lost:.1f} % longer than the fastest in"
        f" the geometric mean, {100 * max(c.lost - 1 for c in found):.0f} % at most. It is off by {100 * off:.0f} % for"
        " schedules that take at most half as long again as these. It was fitted to the same measurements."
    )
    return ["## The model's choices", "", *wrap(told, 120), "", *_markdown(choice_rows(found)), ""]


def _markdown(table: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return [lines[0], "|---" * len(table[0]) + "|", *lines[1:]]


LIBRARIES = """By the model of an H200, with `libraries="auto"`, the default; `terrazzo bench libraries` counts anew.
An op is called where its library is faster than our kernels by 1.25 times or more, what it costs that nothing can be
fused into it included; what libraries reach is in `hw/library.py`. `terrazzo explain` names each with both prices.
What is measured on this page is measured with `libraries="never"`. Ops without a kernel are called in any case.
""".splitlines()


def _counters(record: Mapping[str, Any]) -> list[str]:
    """What was predicted of kernels beside what the hardware counted."""
    kinds = list(record["meta"]["counters"])
    lines = [f"| kernel | {' | '.join(kinds)} |", "|---|" + "---:|" * len(kinds)]
    for c in record["cases"]:
        pairs = [(c["predicted"][kind], c["counted"][kind]) for kind in kinds]
        said = " | ".join(str(a) if a == b else f"{a}, **{b}** counted" for a, b in pairs)
        lines.append(f"| {c['case']}: {c['kernel']} | {said} |")
    return [
        "## GPU: wavefronts of shared memory and sectors of global memory, predicted",
        "",
        _where(record),
        "",
        *COUNTERS,
        *lines,
        "",
    ]


COUNTERS = """What `targets/cuda/predict.py` says of a kernel's text, which is what the simulator counts; and what
Nsight Compute counts on the GPU, where that differs: NVRTC drops reads of shared memory of which only some threads need
the result, and copies of 16 bytes (`cp.async`) without a condition take more wavefronts where rows are swizzled, padded
or partly off, in an order that is not modelled.

""".splitlines()


def _where(record: Mapping[str, Any]) -> str:
    meta = record["meta"]
    versions = ", ".join(f"{name} {number}" for name, number in meta["versions"].items())
    return (
        f"{meta['gpu']}, {meta['driver']}, NVRTC {meta['nvrtc']}, {versions}, commit {meta['commit']}, {meta['date']}."
    )


def _gpu_part(record: Mapping[str, Any]) -> list[str]:
    table = gpu_rows(record)
    lines = ["| " + " | ".join(row) + " |" for row in table]
    lines.insert(1, "|---|---|" + "---:|" * (len(table[0]) - 2))
    where = _where(record)
    means = ", ".join(f"**{ratio:.2f}x** of {name}" for name, ratio in record["geomean"].items())
    kinds = dict.fromkeys(c["dtype"] for c in record["cases"] if c["us"])
    groups = [*_markdown(sums), ""] if (sums := group_rows(record)) else []
    plots = [] if groups else [line for dtype in kinds for line in _plot(record, dtype)]
    return [
        f"## {GPU_TITLES.get(record['suite'], record['suite'])}",
        "",
        where,
        "",
        *groups,
        *plots,
        *lines,
        "",
        f"Geometric means: {means}.",
        "",
    ]


def _plot(record: Mapping[str, Any], dtype: str) -> list[str]:
    """How many times as fast as every peer, as a chart that renders where Markdown does. A bar per case, a line per
    further peer.
    """
    cases = [c for c in record["cases"] if c["dtype"] == dtype and c["us"]]
    first, *others = list(record["geomean"])
    series = {p: [round(c["us"][p] / c["us"]["terrazzo"], 2) for c in cases] for p in (first, *others)}
    most = max(x for values in series.values() for x in values)
    shown = ", ".join([f"{first} (bars)", *(f"{p} (line)" for p in others)])
    lines = ["```mermaid", "xychart-beta", f'  title "{dtype}: times as fast as {shown}"']
    lines.append(f"  x-axis [{', '.join(str(k + 1) for k in range(len(cases)))}]")
    lines.append(f'  y-axis "in the order of the table" 0 --> {most + 0.1:.1f}')
    lines.append(f"  bar {series[first]}")
    return [*lines, *(f"  line {series[p]}" for p in others), "```", ""]


GPU_TITLES = {
    "pointwise": "GPU: pointwise operations",
    "reduction": "GPU: norms and softmax",
    "gemm": "GPU: linear layers (f32 without tf32)",
    "fp32": "GPU: products in float32 on tensor cores, as exactly (`--fp32 split`)",
    "fp32-frozen": "GPU: the same with frozen weights, which are split once",
    "fp32-small": "GPU: products in float32 of few rows",
    "fp32-hard": "GPU: products of float32 that are hard to compute exactly",
    "attention": "GPU: attention (each case beside the peers that it has times of)",
    "convolution": "GPU: convolutions",
    "block": "GPU: decoder layers",
    "article": "GPU: the kernels of a decoder layer, one at a time",
    "squares": "GPU: squares in bf16 and f16",
    "projections": "GPU: projections of decoder models in bf16",
    "odd": "GPU: products of odd sizes, stored along either axis",
    "batched": "GPU: batches of squares in bf16",
    "fused": "GPU: products with what surrounds them, in bf16",
}

HEAD = """# Performance

This page is generated from `benchmarks/results` by `make docs`; `terrazzo bench cpu` measures anew.

How it is measured: every case is first checked on three sets of random normal inputs against float64, where our error
may be at most twice eager's own. Then both are called in turns, in one process and with the same number of threads,
and the inputs take turns too. A time is the median of a call; eight of ten measurements lie within the spread. Above
1x we are faster than eager. Where other work on the machine disturbs a measurement it is repeated, and the steadiest
one counts.

On a GPU (`terrazzo bench gpu`) every case is checked in the same way; then a CUDA graph of each side calls once with
every one of several sets of inputs, which are together twice as large as the second-level cache, and the graphs are
replayed in turns. A time that beats the data sheet's memory or arithmetic is an error. "The article's" are the ratios
to eager that "A Principled ML Compiler Stack in 5,000 Lines of Python" gives for its compiler, in f32 on an RTX 5090.
"""
