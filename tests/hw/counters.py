"""Predicted wavefronts and sectors beside those that Nsight Compute counts on this machine's GPU, kernel by kernel.

python -m tests.hw.counters RECORD.json      prints a line for every kernel and writes the record; fails where fewer
than 6 agree
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.kernels.programs import CASES

KERNELS = (
    "gelu", "transposed", "strided", "half", "embedding", "sum of the first axis", "sum of the last axis", "argmax",
    "softmax of long rows", "layer norm", "rms norm of prime width", "cumsum", "linear", "matmul",
    "matmul, first transposed", "matmul of bfloat16", "ragged matmul of bfloat16",
    "transposed matmul of bfloat16 in many steps", "bmm of half", "swiglu", "attention", "conv2d",
)  # fmt: skip
SHARED = "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_"
SECTORS = "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_"
METRICS = {
    "shared read": [SHARED + "ld", SHARED + "ldsm"],
    "shared write": [SHARED + "st", SHARED + "ldgsts"],
    "global read": [SECTORS + "ld", SECTORS + "ldgsts"],
    "global write": [SECTORS + "st"],
}


def launch() -> None:
    """Every kernel once."""
    import torch

    import terrazzo

    for name in KERNELS:
        args = arguments(name)
        terrazzo.compile(CASES[name].fn, *args, options={"target": "sm_90a"})(*args)
    torch.cuda.synchronize()


def arguments(name: str) -> tuple[Any, ...]:
    """Those of a case, on the GPU."""
    import torch

    torch.manual_seed(0)
    return tuple(a.cuda() for a in CASES[name].make())


def counted() -> list[tuple[str, dict[str, int]]]:
    """The name of every launched kernel and its counters, in order."""
    metrics = ",".join(f"{m}.sum" for ms in METRICS.values() for m in ms)
    command = [
        "ncu",
        "--clock-control",
        "none",
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        "-k",
        "regex:^k_",
        "--metrics",
        metrics,
    ]
    done = subprocess.run(
        [*command, sys.executable, "-m", "tests.hw.counters", "launch"], capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    rows = [r for r in csv.DictReader(io.StringIO("\n".join(lines))) if r["ID"]]
    value = lambda r, m: int(float(r[f"{m}.sum"].replace(",", "") or 0))  # noqa: E731
    return [
        (r["Kernel Name"].split("(")[0], {kind: sum(value(r, m) for m in ms) for kind, ms in METRICS.items()})
        for r in rows
    ]


def predicted() -> list[tuple[str, str, dict[str, int]]]:
    """(case, name, counts) of every kernel, in order."""
    from terrazzo.front.capture import capture
    from terrazzo.ir.dialects import kernel as k
    from terrazzo.options import Options
    from terrazzo.pipelines import lowering
    from terrazzo.targets.cuda.emit import emit
    from terrazzo.targets.cuda.predict import predict

    found = []
    for name in KERNELS:
        program = lowering(capture(CASES[name].fn, arguments(name), {}).program, Options(target="sm_90a")).at("kernel")
        for kernel in (step for step in program.steps if isinstance(step, k.Kernel)):
            done = predict(kernel)
            assert not done.unknown, f"{name}: its costs depend on data"
            totals = {kind: done.costs.total(kind) for kind in METRICS}
            counts = {kind: c.wavefronts if kind.startswith("shared") else c.sectors for kind, c in totals.items()}
            found.append((name, emit(kernel)[0], counts))
    return found


def main(record: Path) -> int:
    from terrazzo.bench.gpu import measured_on

    cases: list[dict[str, Any]] = []
    for (name, function, ours), (theirs_name, theirs) in zip(predicted(), counted(), strict=True):
        assert function == theirs_name, f"{function} is not {theirs_name}"
        cases.append({"case": name, "kernel": function, "equal": ours == theirs, "predicted": ours, "counted": theirs})
        print(f"{'=' if ours == theirs else '!'} {name} ({function}): {ours} {'' if ours == theirs else theirs}")
    equal = sum(c["equal"] for c in cases)
    print(f"{equal} of {len(cases)} kernels are as predicted")
    meta = {**measured_on(), "counters": METRICS}
    record.write_text(json.dumps({"suite": "counters", "meta": meta, "cases": cases}, indent=1) + "\n")
    return int(equal < 6)


if __name__ == "__main__":
    sys.exit(launch() if sys.argv[1] == "launch" else main(Path(sys.argv[1])))
