"""Records of a GPU as tables: for the terminal, and for docs/performance.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any


def markdown(table: Sequence[Sequence[str]]) -> list[str]:
    """A table, of which the first row is the head."""
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return [lines[0], "|---" * len(table[0]) + "|", *lines[1:]]


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
        (*key, str(len(each)), f"{mean(each):.2f}x", f"{min(each):.2f}x", f"{max(each):.2f}x")
        for key, each in found.items()
    ]
    return [("group", "type", "cases", "of the best peer", "least", "most"), *rows] if rows else []


def mean(ratios: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


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
        rows.append((told, str(len(ratios)), f"**{mean(ratios):.2f}x**", f"{ratios[0]:.2f}x", f"{ratios[-1]:.2f}x"))
    return rows


def shapes(record: Mapping[str, Any]) -> list[str]:
    """Groups of shapes that models have."""
    meta = record["meta"]
    told = f"{meta['gpu']}, commit {meta['commit']}, libraries {meta['libraries']}: {meta['what']}."
    return ["## Shapes that models have", "", *wrap(told, 120), "", *markdown(shape_rows(record)), ""]


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


def staircase(record: Mapping[str, Any]) -> list[str]:
    """A product, ingredient by ingredient."""
    return [
        "## One product, ingredient by ingredient",
        "",
        where(record),
        "",
        *STAIRS,
        "",
        *markdown(stair_rows(record)),
        "",
    ]


STAIRS = """8192 cubed in bf16 under pinned schedules (`bench/products.py`): each has what those above it have, and one
thing more. `terrazzo bench gpu --suite staircase` measures anew.
""".splitlines()


def counters(record: Mapping[str, Any]) -> list[str]:
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
        where(record),
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


def where(record: Mapping[str, Any]) -> str:
    """Where and when a record was measured."""
    meta = record["meta"]
    versions = ", ".join(f"{name} {number}" for name, number in meta["versions"].items())
    return (
        f"{meta['gpu']}, {meta['driver']}, NVRTC {meta['nvrtc']}, {versions}, commit {meta['commit']}, {meta['date']}."
    )


def suite(record: Mapping[str, Any]) -> list[str]:
    """The cases of a suite, beside those of its peers."""
    table = gpu_rows(record)
    lines = ["| " + " | ".join(row) + " |" for row in table]
    lines.insert(1, "|---|---|" + "---:|" * (len(table[0]) - 2))
    means = ", ".join(f"**{ratio:.2f}x** of {name}" for name, ratio in record["geomean"].items())
    kinds = dict.fromkeys(c["dtype"] for c in record["cases"] if c["us"])
    groups = [*markdown(sums), ""] if (sums := group_rows(record)) else []
    plots = [] if groups else [line for dtype in kinds for line in _plot(record, dtype)]
    return [
        f"## {GPU_TITLES.get(record['suite'], record['suite'])}",
        "",
        where(record),
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
    "gradients": "GPU: gradients of convolutions",
    "block": "GPU: decoder layers",
    "article": "GPU: the kernels of a decoder layer, one at a time",
    "squares": "GPU: squares in bf16 and f16",
    "projections": "GPU: projections of decoder models in bf16",
    "odd": "GPU: products of odd sizes, stored along either axis",
    "batched": "GPU: batches of squares in bf16",
    "fused": "GPU: products with what surrounds them, in bf16",
}
