"""The record of the operators as tables, for the terminal and for docs/performance.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

LEAST = 0.9
"""No operator is to be slower than this, of eager's speed."""
BAD = ("wrong", "crash", "late")


def fails(case: Mapping[str, Any]) -> str:
    """What is wrong with a case; "" if nothing is."""
    return f"{case['verdict']}: {case['reason']}" if case["verdict"] in BAD else ""


def summary(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A header, and for each form and type how many cases there are and how fast they are together."""
    found: list[tuple[str, ...]] = [("form", "dtype", "cases", "fail", "timed", "speed", f"below {LEAST}", "calls")]
    for form, dtype in sorted({(c["form"], c["dtype"]) for c in record["cases"]}):
        found.append(_summed(form, dtype, [c for c in record["cases"] if (c["form"], c["dtype"]) == (form, dtype)]))
    return [*found, _summed("all", "", record["cases"])]


def _summed(form: str, dtype: str, cases: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    timed = [c for c in cases if c["verdict"] == "ok" and "ratio" in c]
    mean = math.exp(sum(math.log(max(c["ratio"], 1e-3)) for c in timed) / len(timed)) if timed else 0.0
    return (
        form,
        dtype,
        str(len(cases)),
        str(sum(bool(fails(c)) for c in cases)),
        str(len(timed)),
        f"{mean:.2f}x" if timed else "",
        str(sum(c["ratio"] < LEAST for c in timed)),
        str(sum(bool(c["calls"]) for c in timed)),
    )


def weak(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A header, and the cases that are slower than they should be, or wrong, the slowest first."""
    cases = [c for c in record["cases"] if fails(c) or c.get("ratio", 1.0) < LEAST]
    head = ("operator", "dtype", "form", "shapes", "eager", "terrazzo", "speed", "rate", "kernels", "calls")
    return [head, *(_row(c) for c in sorted(cases, key=lambda c: (not fails(c), c.get("ratio", 0.0))))]


def _row(case: Mapping[str, Any]) -> tuple[str, ...]:
    told = " ".join(case["told"].split()).replace("|", "/")[:100]
    named = case["case"], case["dtype"], case["form"], told
    if why := fails(case):
        return *named, "", "", f"**{' '.join(why.split()).replace('|', '/')[:100]}**", "", "", ""
    us = case["us"]
    times = [f"{us[name]:.1f} us" for name in ("eager", "terrazzo")]
    rate = f"{case['bytes'] / us['terrazzo'] / 1e3:.0f} GB/s"
    return *named, *times, f"{case['ratio']:.2f}x", rate, str(case["kernels"]), ", ".join(case["calls"])


def title(record: Mapping[str, Any]) -> str:
    """Of the record's section."""
    never = record["meta"]["libraries"] == "never"
    return f"GPU: single operators, {'our kernels only' if never else 'libraries allowed'}"


WHAT = f"""Single operators of 16 million elements and more: some by hand, at shapes that models have, and every one of
PyTorch's operator database that makes sense there, its small samples grown by a rule (`even`, `odd` sizes, other
`strided` memory, growth along `rows` or `columns` only, `backward`). Each is compared with eager and float64, and timed
beside eager as a CUDA graph, where it can be one, with a cold cache. `terrazzo bench gpu --suite operators` measures
anew. "Calls" are cases in which PyTorch runs an op. Below the sums, what fails or is below {LEAST} of eager's speed.
""".splitlines()
