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
from terrazzo.bench.gpu_report import counters, markdown, shapes, staircase, suite, where
from terrazzo.bench.harness import busy
from terrazzo.bench.operators import report as operators
from terrazzo.bench.overview import overview
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


def conditions(record: Mapping[str, Any]) -> str:
    """Where and when a record was measured."""
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    commit = f", commit {record['commit']}" if record["commit"] else ""
    load = f", measured on a busy machine (load {record['load']})" if busy(record) else ""
    return f"{record['cpu']}, {record['threads']} threads, {versions}{commit}, {record['date']}{load}"


def records(results: Path) -> list[Any]:
    """All records below a folder, by their paths."""
    return [json.loads(path.read_text()) for path in sorted(results.rglob("*.json"))]


def page(results: Path) -> str:
    """docs/performance.md, of all the records below `results`."""
    found = records(results)
    parts = [HEAD, *OVERVIEW, "", *markdown(overview(found)), ""]
    for record in found:
        if (part := PARTS.get(record.get("suite", ""))) is not None:
            parts += part(record)
            continue
        if "meta" in record:
            parts += counters(record) if "counters" in record["meta"] else suite(record) if "geomean" in record else []
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
    told = f"{conditions(record)}; target {record['target']}, {'loaded' if record['loaded'] else 'not loaded'}."
    return ["## Compile time", "", told, "", *COMPILE, "", *plots, *markdown(compile_rows(record)), ""]


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
    return ["## Peak memory of a call", "", *MEMORY, "", *markdown(memory_rows(record)), ""]


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
        *markdown(library_rows(record)),
        "",
        f"Ops called since a library is faster, in all: **{total}**; it is to fall to zero.",
        "",
    ]


def _programs(record: Mapping[str, Any]) -> list[str]:
    """Model programs: a table of families, and one of all."""
    return [
        f"## {programs.title(record)}",
        "",
        where(record),
        "",
        *programs.WHAT,
        "",
        *markdown(programs.summary(record)),
        "",
        *markdown(programs.rows(record)),
        "",
    ]


def _operators(record: Mapping[str, Any]) -> list[str]:
    """Single operators: a table of sums, and one of what is weak."""
    tables = [x for table in (operators.summary, operators.weak) for x in (*markdown(table(record)), "")]
    return [f"## {operators.title(record)}", "", where(record), "", *operators.WHAT, "", *tables]


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
    return ["## The model's choices", "", *wrap(told, 120), "", *markdown(choice_rows(found)), ""]


LIBRARIES = """By the model of an H200, with `libraries="auto"`, the default; `terrazzo bench libraries` counts anew.
An op is called where its library is faster than our kernels by 1.25 times or more, what it costs that nothing can be
fused into it included; what libraries reach is in `hw/library.py`. `terrazzo explain` names each with both prices.
What is measured on this page is measured with `libraries="never"`. Ops without a kernel are called in any case.
""".splitlines()


OVERVIEW = """## Overview

By kind: how many times as fast ours is as the fastest peer of each case, `libraries="never"` but for model
programs. Where they were measured, and at which commits, is said below with the cases.
""".splitlines()

PARTS = {
    "programs": _programs,
    "operators": _operators,
    "shapes": shapes,
    "staircase": staircase,
    "libraries": _libraries,
    "memory": _memory,
    "compile": _compile,
}
"""What a page says of the records of a suite; of those that are not here, a table of cases."""

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
