"""Records as tables: for the terminal, and for docs/performance.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terrazzo.bench.harness import busy

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


def page(results: Path) -> str:
    """docs/performance.md, of all the records below `results`."""
    parts = [HEAD]
    for path in sorted(results.rglob("*.json")):
        record = json.loads(path.read_text())
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
    return "\n".join(parts)


HEAD = """# Performance

This page is generated from `benchmarks/results` by `make docs`; `terrazzo bench cpu` measures anew.

How it is measured: every case is first checked on three sets of random normal inputs against float64, where our error
may be at most twice eager's own. Then both are called in turns, in one process and with the same number of threads, and
the inputs take turns too. A time is the median of a call; eight of ten measurements lie within the spread. Above 1x we are
faster than eager. Where other work on the machine disturbs a measurement it is repeated, and the steadiest one counts.
"""
