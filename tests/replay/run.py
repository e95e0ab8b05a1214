"""`make replay BASE=COMMIT`: what every kernel of the benchmarks and the tests was at a commit, and what it is now.

Both checkouts lower their own corpus, each in a process of its own; the kernels of a case are matched, and
pairs that are alike are shown once. Where there is a GPU, the benchmarks that changed are timed, the two
checkouts in turns. The status is 1 where a case fails that did not, or is more than 3 % slower.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.replay import compare

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")
ROUNDS = 9
"""Times that either side is asked each time a case is opened, in turns."""
AGAIN = 4
"""Times that a case which seems slower is opened again: kernels of less than 10 us differ by 10 % and more from one
opening to the next.
"""


@contextmanager
def checkout(base: str) -> Iterator[Path]:
    """The folder of a commit's files, for a while; a folder is itself."""
    if (Path(base) / "src" / "terrazzo").is_dir():
        yield Path(base).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="terrazzo-replay-") as folder:
        archive = Path(folder) / "files.tar"
        command = ["git", "-C", str(ROOT), "archive", "--output", str(archive), base, "src", "tests"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"BASE={base} is neither a commit nor a folder with src/terrazzo: {done.stderr.strip()}")
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


def worker(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Our `worker.py`, running on the sources of a checkout."""
    path = os.pathsep.join(map(str, (folder / "src", folder)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(WORKER), *arguments]
    return subprocess.Popen(command, env=environment, cwd=folder, text=True, **options)


def dumps(
    folders: Sequence[Path], targets: str, only: str, jobs: int = 1, until: float = math.inf
) -> list[dict[str, Any]]:
    """What each checkout makes of its corpus, all at the same time, in so many processes each."""
    with tempfile.TemporaryDirectory(prefix="terrazzo-replay-") as out:
        tasks = ["--targets", targets, "--only", only, "--until", str(until)]
        running = []
        for n, folder in enumerate(folders):
            for part in range(jobs):
                file = Path(out) / f"{n}.{part}.json"
                process = worker(folder, "dump", *tasks, "--part", f"{part}/{jobs}", "--out", str(file))
                running.append((folder, file, process))
        found: dict[Path, list[dict[str, Any]]] = {folder: [] for folder in folders}
        for folder, file, process in running:
            if process.wait():
                sys.exit(f"{folder}: the corpus cannot be lowered (above is why)")
            found[folder].append(json.loads(file.read_text()))
    for folder, parts in found.items():
        for dump in parts:
            assert Path(dump["source"]).is_relative_to(folder), f"{dump['source']} was lowered with, not {folder}"
    return [whole(found[folder]) for folder in folders]


def whole(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Dumps of parts of a corpus as one."""
    first, *_ = parts
    return first | {what: {k: v for part in parts for k, v in part[what].items()} for what in ("kernels", "cases")}


def reached(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Leaves in both what both came to before the time was over, and says how far they got."""
    names = {*before["cases"], *after["cases"]}
    both = before["cases"].keys() & after["cases"].keys()
    for dump in (before, after):
        dump["cases"] = {name: case for name, case in dump["cases"].items() if name in both}
    return f"The time was over: {len(both)} cases are compared, of {len(names)} or more."


def build(folders: Sequence[Path], cases: Sequence[str], jobs: int) -> None:
    """Compiles the cases in so many processes for each checkout: their kernels lie in the cache then."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    for process in [_asked(worker(f, "time", **pipes), cases[n::jobs]) for f in folders for n in range(jobs)]:
        process.wait()


def _asked(process: subprocess.Popen[str], cases: Sequence[str]) -> subprocess.Popen[str]:
    assert process.stdin
    process.stdin.write("".join(f"build {case}\n" for case in cases))
    process.stdin.close()
    return process


def times(folders: Sequence[Path], cases: Sequence[str], jobs: int = 1) -> dict[str, dict[str, Any]]:
    """Microseconds per call of every case, "before" and "after": medians of rounds that take turns.

    The cases are compiled in so many processes for each checkout before.
    """
    if jobs > 1:
        build(folders, cases, jobs)
    found: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        both = [stack.enter_context(worker(f, "time", **pipes)) for f in folders]
        sides = dict(zip(("before", "after"), both, strict=True))
        for case in cases:
            found[case] = _timed(sides, case)
        for process in both:
            assert process.stdin
            process.stdin.close()
    return found


def _timed(sides: dict[str, Any], case: str) -> dict[str, Any]:
    """What a case takes on both sides, and how many times as long as before in each of its openings."""
    openings: list[dict[str, Any]] = []
    while len(openings) <= (AGAIN if openings and openings[0]["ratio"] > compare.SLOWER else 0):
        openings.append(_opened(sides, case))
        if "failed" in openings[-1]:
            return openings[-1]
    found: dict[str, Any] = {side: statistics.median(x[side] for x in openings) for side in sides}
    return found | {"ratios": [x["ratio"] for x in openings]}


def _opened(sides: dict[str, Any], case: str) -> dict[str, Any]:
    """Medians of rounds that take turns, and that of the ratios of each round, in which both met the same clocks."""
    for process in sides.values():
        _ask(process, f"open {case}")
    said = {side: _answer(process) for side, process in sides.items()}
    if failed := {side: s["failed"] for side, s in said.items() if "failed" in s}:
        return {"failed": "; ".join(f"{side}: {f['type']}: {f['message']}" for side, f in failed.items())}
    rounds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(ROUNDS):
        for side in list(sides)[:: 1 if number % 2 else -1]:
            _ask(sides[side], "go")
            rounds[side].append(_answer(sides[side])["us"])
    ratio = statistics.median(after / before for before, after in zip(*rounds.values(), strict=True))
    return {side: statistics.median(values) for side, values in rounds.items()} | {"ratio": ratio}


def _ask(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        sys.exit("a process that times ended (above is why)")
    found: dict[str, Any] = json.loads(line)
    return found


def gpu() -> str | None:
    """The architecture of this machine's GPU, if we know it."""
    from terrazzo.errors import Limitation
    from terrazzo.run.cuda import architecture, devices

    try:
        return architecture() if devices() else None
    except Limitation:
        return None


def timed_cases(found: compare.Comparison, target: str, everything: bool, dump: dict[str, Any]) -> list[str]:
    """The benchmarks for a GPU that changed (or all), without their target."""
    names = dump["cases"] if everything else found.touched
    suffix = f" ({target})"
    failed = set(found.failures)
    mine = [n for n in names if n.startswith("gpu ") and n.endswith(suffix) and n not in failed]
    return [n.removesuffix(suffix) for n in mine if n not in found.only["after"]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="make replay", description=(__doc__ or "").splitlines()[0])
    options.add_argument("base", help="a commit, or the folder of another checkout")
    options.add_argument("--targets", help="architectures, with commas; sm_80, sm_90a and this GPU's unless given")
    options.add_argument("--only", default="", help="cases whose name contains this")
    options.add_argument("-v", dest="everything", action="store_true", help="whole diffs, Kernel IR too; all times")
    options.add_argument("--json", type=Path, metavar="FILE", help="where the record goes")
    options.add_argument("--time", choices=("changed", "all", "none"), default="changed", help="what a GPU times")
    options.add_argument("--jobs", type=int, default=1, help="processes for each of the two checkouts")
    options.add_argument(
        "--minutes", type=float, default=math.inf, help="for lowering; what is not lowered is left out"
    )
    chosen = options.parse_args(arguments)
    until = time.time() + 60 * chosen.minutes
    here = gpu() if chosen.time != "none" else None
    targets = chosen.targets or ",".join(dict.fromkeys(["sm_80", "sm_90a", *([here] if here else [])]))
    with checkout(chosen.base) as base:
        before, after = dumps((base, ROOT), targets, chosen.only, chosen.jobs, until)
        if time.time() > until:
            print(reached(before, after))
        found = compare.compare(before, after)
        print("\n".join(compare.report(found, chosen.everything)), flush=True)
        cases = timed_cases(found, here, chosen.time == "all", after) if here else []
        took = times((base, ROOT), cases, chosen.jobs) if cases else {}
    if took:
        print("\n".join(["", *compare.timing(took, chosen.everything)]))
    if chosen.json:
        chosen.json.write_text(json.dumps(record(chosen.base, found, took), indent=1) + "\n")
    slower = [case for case, r in compare.ratios(took).items() if r > compare.SLOWER]
    return 1 if found.broken or slower else 0


def record(base: str, found: compare.Comparison, took: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What `--json` writes: no texts but the schedules, and of kernels that are the same only their number."""
    pairs = [p for p in found.pairs if p.kind != "same"]
    kernels = [
        {
            "kind": p.kind,
            "places": p.places,
            "facts": p.facts(),
            **{side: k["schedule"] for side, k in (("before", p.before), ("after", p.after)) if k},
            "diff": p.diff("cuda"),
        }
        for p in pairs
    ]
    return {
        "base": base,
        "counts": {kind: found.count(kind) for kind in ("same", *compare.KINDS)},
        "failures": found.failures,
        "only": found.only,
        "kernels": kernels,
        "times": took,
        "geomean": compare.geomean(list(compare.ratios(took).values())),
    }


if __name__ == "__main__":
    sys.exit(main())
