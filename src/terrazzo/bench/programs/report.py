"""The record of the programs as a table, for the terminal and for docs/performance.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LEAST = 0.9
"""No program is to be slower than this, of eager's speed."""
MEMORY = 1.05
"""Nor is it to take more memory, of eager's."""


def ratio(case: Mapping[str, Any]) -> float:
    """How many times as fast as eager."""
    return float(case["us"]["eager"] / case["us"]["terrazzo"])


def memory(case: Mapping[str, Any]) -> float:
    """Our peak, of eager's: both with what weights and inputs take, where the record has it (`held`)."""
    bytes_ = case["memory"]
    held = bytes_.get("held", 0)
    return float((held + bytes_["terrazzo"]) / max(held + bytes_["eager"], 1))


def fails(case: Mapping[str, Any]) -> str:
    """What is wrong with a case; "" if nothing is."""
    return str(case.get("failed") or case["problem"])


def rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A header, and a row for each program and type."""
    head = (
        "program",
        "family",
        "dtype",
        "eager",
        "terrazzo",
        "speed",
        "error / eager's",
        "compiled",
        "calls",
        "memory",
    )
    return [head, *(_row(c) for c in record["cases"])]


def _row(case: Mapping[str, Any]) -> tuple[str, ...]:
    name = case["case"], case["family"], case["dtype"]
    if "failed" in case:
        return *name, "", "", "", _short(case["failed"]), "", "", ""
    error = case["error"] / case["error_eager"] if case["error_eager"] else 0.0
    return (
        *name,
        f"{case['us']['eager']:.1f} us",
        f"{case['us']['terrazzo']:.1f} us",
        f"{ratio(case):.2f}x{'' if case['captured'] else ' *'}{'' if case['whole'] else ' **'}",
        (case["problem"] and _short(case["problem"])) or f"{error:.2f}",
        f"{case['compile_s']:.1f} s",
        str(len(case["fallbacks"])),
        f"{memory(case):.2f}",
    )


def _short(text: str) -> str:
    """An error in a cell of a table."""
    line = " ".join(text.split()).replace("|", "/")
    return f"**{line[:100]}**"


def summary(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A header, and for each family and type how many there are and how fast they are together."""
    found: list[tuple[str, ...]] = [
        ("family", "dtype", "programs", "fail", "speed", f"below {LEAST}", f"memory above {MEMORY}", "library calls")
    ]
    families = dict.fromkeys(c["family"] for c in record["cases"])
    for dtype in dict.fromkeys(c["dtype"] for c in record["cases"]):
        own = [c for c in record["cases"] if c["dtype"] == dtype]
        by_family = {family: [c for c in own if c["family"] == family] for family in families}
        found += [_summed(family, dtype, cases) for family, cases in by_family.items() if cases]
        found.append(_summed("all", dtype, own))
    return found


def _summed(family: str, dtype: str, cases: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    good = [c for c in cases if not fails(c)]
    return (
        family,
        dtype,
        str(len(cases)),
        str(len(cases) - len(good)),
        f"{_geomean(ratio(c) for c in good):.2f}x" if good else "",
        str(sum(ratio(c) < LEAST for c in good)),
        str(sum(memory(c) > MEMORY for c in good)),
        str(sum(len(c["fallbacks"]) for c in good)),
    )


def _geomean(values: Iterable[float]) -> float:
    logarithms = [math.log(v) for v in values]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else 0.0


def title(record: Mapping[str, Any]) -> str:
    """Of the record's section."""
    never = record["meta"]["libraries"] == "never"
    return f"GPU: model programs, {'our kernels only' if never else 'libraries allowed'}"


WHAT = """Every program is run by PyTorch and by us, forward or (`_training`) with the gradients by all weights, and
compared with float64. `terrazzo bench gpu --suite programs` measures anew. Times are those of CUDA graphs whose inputs
and weights no cache holds, or, with a star, of plain calls where PyTorch's cannot be captured; two stars are programs
that branch on their data, and go through torch.compile in parts. "Compiled" is the first
time, capture included, while other programs were compiled beside. "Calls" are ops that PyTorch runs. "Memory" is our
peak within a call, what is kept between calls included, of eager's peak: weights and inputs are in both, but for
programs measured before 2026-11-22 15:00, which have them in neither. The type tf32 is f32 whose convolutions PyTorch
may compute in TF32, as it does by default; with f32 it may not.
""".splitlines()
