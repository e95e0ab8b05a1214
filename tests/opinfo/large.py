"""Every case of the suite of operators, lowered for sm_90a on meta tensors and compiled by NVRTC: no GPU is needed.

    PYTHONPATH=src:. python -m tests.opinfo.large -k softmax --out /tmp/operators --jobs 2

With the bytes that each kernel needs beside the sectors that it touches and the instructions that its warps issue,
which tells foolish schedules. `terrazzo bench gpu --suite operators` runs the same cases on a GPU, and times them.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from terrazzo.bench.operators.fills import Case
from terrazzo.bench.operators.measure import measure
from terrazzo.bench.operators.one import said
from terrazzo.bench.operators.report import fails

MEMORY = 4200.0
"""Bytes that a copy moves in a nanosecond on an H200."""


def on_meta(case: Case, lock: str, libraries: str) -> dict[str, Any]:
    """Lowered for an H200, and compiled by NVRTC; nothing runs."""
    from terrazzo.front.capture import capture
    from terrazzo.ir.dialects import kernel as k
    from terrazzo.options import Options
    from terrazzo.pipelines import lowering
    from terrazzo.run.cache import Cache
    from terrazzo.run.cuda import build, tried
    from terrazzo.run.nvrtc import Facts, known

    begun = time.time()
    try:
        captured = capture(case.call, case.tensors("meta"))
    except Exception as why:
        return {"verdict": "not captured", "reason": said(why)}
    options = Options(target="sm_90a", libraries=libraries)
    cache = Cache(options.cache_dir, options.cache_limit)
    done = build(lowering(captured.program, options, tried=tried(options)), options, cache, options.target)
    steps, log = done.program.steps, done.lowering.log
    kernels = [s for s in steps if isinstance(s, k.Kernel)]
    facts = [known(source, options.target, cache) or Facts() for _, source in done.sources]
    bad = [f"{s.name}: {p}" for s, x in zip(kernels, facts, strict=True) if (p := x.problem())]
    reasons = {e.subject: f"{e.rule}: {e.reason}" for e in log.events if e.pass_name == "schedule" and e.fired}
    told = [{"name": s.name, "why": reasons.get(s.name, "")[:200], "registers": x.registers, **_cost(s)}
            for s, x in zip(kernels, facts, strict=True)]  # fmt: skip
    return {"verdict": "crash" if bad else "ok", "reason": "; ".join(bad), "compile_s": round(time.time() - begun, 2),
            "kernels": told, "calls": [s.name for s in steps if not isinstance(s, k.Kernel)]}  # fmt: skip


def _cost(kernel: Any) -> dict[str, Any]:
    """What a kernel reads and writes, in buffers and in sectors, how much it executes, and microseconds by both."""
    from terrazzo.targets.cuda.predict import predict

    buffers = dict.fromkeys((*kernel.reads, *kernel.writes))
    size = sum(_bytes(b.type) for b in buffers)
    found = predict(kernel)
    read, write = (found.costs.total(f"global {x}") for x in ("read", "write"))
    issued = sum(warps for warps, _ in found.costs.issues.values())
    return {"blocks": kernel.grid, "warps": kernel.warps, "mb": round(size / 1e6, 1), "issued": issued,
            "sectors_mb": round((read.sectors + write.sectors) * 32 / 1e6, 1), "unknown": len(found.unknown),
            "lines": read.requests + write.requests, "floor_us": round(size / MEMORY / 1e3, 1)}  # fmt: skip


def _bytes(kind: Any) -> int:
    return math.prod(kind.static_shape) * int(kind.dtype.size)


def main() -> int:
    """Run all, print what is wrong. The status says whether anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=200, help="no case begins after so many")
    parser.add_argument("--out", type=Path, default=Path("operators"), metavar="DIR")
    o = parser.parse_args()
    record = measure(o.out, {"commit": "", "gpu": "sm_90a"}, "auto", o.k, o.jobs, o.seconds, run=on_meta)
    for case in record["cases"]:
        if why := fails(case):
            print(f"{case['case']} {case['dtype']} {case['form']} {case['told']}: {why[:300]}")
    print(dict(Counter(c["verdict"] for c in record["cases"])))
    return int(any(map(fails, record["cases"])))


if __name__ == "__main__":
    sys.exit(main())
