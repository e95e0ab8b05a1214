"""NVIDIA's compute-sanitizer over every kernel of the tests, on this machine's GPU.

python -m tests.kernels.sanitize --out benchmarks/results/h200/sanitizers.json
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
"""Accesses out of bounds; races in shared memory; barriers that not all reach; reads of memory nobody wrote."""


def run_corpus() -> None:
    """Run every kernel once, on the GPU; prints how many there were."""
    from tests.kernels import by_hand
    from tests.kernels.programs import CASES, case
    from tests.kernels.test_on_gpu import on_gpu, target

    programs = [(found.program, found.inputs) for found in (case(name, target()) for name in CASES)]
    if target() == "sm_90a":
        texts = [by_hand.program(name) for name in by_hand.MEANING]
        programs += [(program, by_hand.inputs(program)) for program in texts]
    for program, inputs in programs:
        on_gpu(program, inputs)
    print(f"ran {sum(len(program.steps) for program, _ in programs)} kernels")


def sanitized(tool: str) -> dict[str, Any]:
    """What a tool says of all our kernels (others, PyTorch's, are not looked at): kernels, errors, the first lines of a
    report.
    """
    only = ["--report-api-errors", "no", "--kernel-name", "kernel_substring=k_"]
    only += ["--check-api-memory-access", "no"] if tool == "initcheck" else []  # it does not see what TMA writes
    command = ["compute-sanitizer", "--tool", tool, *only, sys.executable, "-m", "tests.kernels.sanitize"]
    done = subprocess.run([*command, "--corpus"], capture_output=True, text=True)
    told = done.stdout + done.stderr
    errors, ran = re.search(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", told), re.search(r"ran (\d+) kernels", told)
    lines = [line for line in told.splitlines() if line.startswith("=========")] if ran else told.splitlines()[-40:]
    found = {"tool": tool, "kernels": int(ran[1]) if ran else 0, "errors": int(errors[1]) if errors else None}
    return found if errors and ran and errors[1] == "0" else {**found, "report": lines[:40]}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--corpus", action="store_true", help="only run the kernels, which is what a tool looks at")
    options.add_argument("--out", type=Path, help="where the record goes")
    options.add_argument("--tool", choices=TOOLS, action="append")
    chosen = options.parse_args()
    if chosen.corpus:
        return run_corpus()
    from terrazzo.bench.gpu import measured_on

    found = []
    for tool in chosen.tool or TOOLS:
        found.append(sanitized(tool))
        print(json.dumps(found[-1]), flush=True)
    if chosen.out:
        chosen.out.write_text(json.dumps({"meta": measured_on(), "tools": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
