"""The mutation test: kernels with one thing wrong must not get through the verifier, the checks and the simulator.

    make mutants [N=1000] [SEED=0]

A mutant is killed where one of them refuses it, or where its result is not the original's. Those that survive are bugs
of the simulator, unless `equivalent.py` says why they are right. Originals must get through under many seeds of the
adverse scheduler.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from typing import Any

import numpy as np

from terrazzo.errors import CompilerBug, Limitation, UserError
from terrazzo.interp import kernel as simulator
from terrazzo.interp.torch import call_numpy
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.verify import verify
from terrazzo.targets.cuda.check import check
from tests.mutants.equivalent import EQUIVALENT, Equivalent
from tests.mutants.kernels import NAMES, Subject, subject
from tests.mutants.operators import Mutant, mutants

SEEDS = (None, 0, 1)
"""The orders a mutant is run in: the fair one, and what a scheduler finds adverse."""
STAGES = ("verifier", "check", "simulator", "result")
"""Who kills mutants, in order."""
GOAL = 0.99
FEW = 12
"""How many mutants of each line of `EQUIVALENT` a sample has. Of most lines these are all there are."""
PART = 20
"""How many mutants a process takes at once."""
DIGITS = {"bfloat16": 8, "float16": 11, "float32": 20, "float64": 48}


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: the stage that killed it ("" for none, "crash" for an error that is none of ours), and
    what it said.
    """

    kernel: str
    number: int
    operator: str
    change: str
    by: str
    told: str
    seconds: float

    @property
    def excuse(self) -> Equivalent | None:
        """Why it is no bug that it survives."""
        return excuse(self.kernel, self.operator, self.change)


def excuse(kernel: str, operator: str, change: str) -> Equivalent | None:
    """The first line of `EQUIVALENT` that speaks of a mutant."""
    return next((e for e in EQUIVALENT if e.covers(kernel, operator, change)), None)


@cache
def excused(name: str) -> tuple[Equivalent | None, ...]:
    """Why each mutant of a program may survive."""
    return tuple(excuse(name, m.operator, m.change) for _, m in every(name))


@cache
def every(name: str) -> tuple[tuple[int, Mutant], ...]:
    """The mutants of a program, each with the number of the kernel that it is of."""
    steps = subject(name).program.steps
    return tuple((n, m) for n, step in enumerate(steps) if isinstance(step, k.Kernel) for m in mutants(step))


@cache
def expected(name: str) -> list[Any]:
    """The results of the original."""
    return run(subject(name), subject(name).program, None)


def run(of: Subject, program: k.Program, seed: int | None) -> list[Any]:
    with np.errstate(all="ignore"):
        return simulator.run(program, of.inputs, call=call_numpy, seed=seed)


def judge(name: str, number: int, until: float = math.inf) -> Verdict | None:
    """What becomes of a mutant; nothing where the time is over."""
    if time.time() > until:
        return None
    start, of, (step, mutant) = time.perf_counter(), subject(name), every(name)[number]
    steps = of.program.steps
    by, told = killed(of, replace(of.program, steps=(*steps[:step], mutant.kernel, *steps[step + 1 :])))
    return Verdict(name, number, mutant.operator, mutant.change, by, told, time.perf_counter() - start)


def killed(of: Subject, program: k.Program) -> tuple[str, str]:
    """Who kills a program, and what he says."""
    by = "verifier"
    try:
        verify(program)
        by = "check"
        check(program, of.gpu)
        for seed in orders(program):
            by = "simulator"
            for ours, theirs in zip(run(of, program, seed), expected(of.name), strict=True):
                if not same(ours, theirs):
                    return "result", "differs"
    except (CompilerBug, UserError, Limitation) as why:
        return by, str(why)
    except Exception as why:  # a hole: the simulator must say what is wrong in its own words
        return "crash", f"{type(why).__name__}: {why}"
    return "", ""


def orders(program: k.Program) -> Iterable[int | None]:
    """The orders a mutant runs in; more of them where roles wait for each other."""
    bodies = [s.body for s in program.steps if isinstance(s, k.Kernel)]
    apart = any(isinstance(s, k.Role) for body in bodies for s in k.walk(body))
    return (*SEEDS, *range(10, 40)) if apart else SEEDS


def same(a: Any, b: Any) -> bool:
    """Whether two arrays are equal but for rounding."""
    if a.dtype.name not in DIGITS:
        return np.array_equal(a, b)
    a, b, digits = a.astype(np.float64), b.astype(np.float64), DIGITS[a.dtype.name]
    finite = np.isfinite(b)
    near = np.abs(a[finite] - b[finite]) <= 2.0**-digits * np.abs(b[finite]).max(initial=0.0)
    return bool(near.all() and np.array_equal(a[~finite], b[~finite], equal_nan=True))


def alarms(name: str, seeds: Sequence[int], until: float = math.inf) -> tuple[int, list[str]]:
    """In how many of these orders an original ran until the time was over, and what was said of it, which is right."""
    found: list[str] = []
    for ran, seed in enumerate(seeds):
        if time.time() > until:
            return ran, found
        try:
            check(subject(name).program, subject(name).gpu)
            if not all(map(same, run(subject(name), subject(name).program, seed), expected(name))):
                found.append(f"{name}, seed {seed}: another result")
        except (CompilerBug, UserError, Limitation) as why:
            found.append(f"{name}, seed {seed}: {why}")
    return len(seeds), found


def sample(names: Iterable[str], count: int, seed: int) -> list[tuple[str, int]]:
    """Some mutants: of all kernels by all operators alike, and some that each line of `EQUIVALENT` speaks of. 0 is
    all.
    """
    shuffle = random.Random(seed)
    cells: dict[tuple[str, str], list[tuple[str, int]]] = {}
    right: dict[Equivalent, list[tuple[str, int]]] = {}
    for name in names:
        for n, ((_, m), why) in enumerate(zip(every(name), excused(name), strict=True)):
            if why is not None:
                right.setdefault(why, []).append((name, n))
            else:
                cells.setdefault((name, m.operator), []).append((name, n))
    for cell in (*cells.values(), *right.values()):
        shuffle.shuffle(cell)
    rows = list(cells.values())
    shuffle.shuffle(rows)
    ordered = [x for layer in zip_longest(*rows) for x in layer if x is not None]
    few = [x for found in right.values() for x in (found[:FEW] if count else found)]
    return few + ordered[: count or None]


def table(title: str, verdicts: Sequence[Verdict], key: str) -> Iterator[str]:
    """How many mutants were killed by whom, for each operator or kernel."""
    heads = ("mutants", *STAGES, "equivalent", "survived")
    width = max(len(getattr(v, key)) for v in verdicts)
    yield f"\n{title:{width}}" + "".join(f"{h:>12}" for h in heads)
    groups: dict[str, list[Verdict]] = {}
    for v in verdicts:
        groups.setdefault(getattr(v, key), []).append(v)
    for name, group in [*sorted(groups.items()), ("all", list(verdicts))]:
        by = Counter(v.by if v.by in STAGES else "equivalent" if v.excuse else "survived" for v in group)
        yield f"{name:{width}}" + "".join(f"{by[h] if h != 'mutants' else len(group):>12}" for h in heads)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The mutation test of kernels.")
    parser.add_argument("--count", type=int, default=1000, help="how many mutants; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="which")
    parser.add_argument("--seeds", type=int, default=50, help="in how many adverse orders the originals run")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf, help="what is not judged by then is left out")
    parser.add_argument("--kernel", help="only those whose name contains one of these, with commas between")
    options = parser.parse_args(arguments)
    names = [name for name in NAMES if any(part in name for part in (options.kernel or "").split(","))]
    chosen = sample(names, options.count, options.seed)
    start, until = time.perf_counter(), time.time() + 60 * options.minutes
    with ProcessPoolExecutor(options.processes) as pool:
        original = [
            pool.submit(alarms, name, range(s, min(s + 10, options.seeds)), until)
            for name in names
            for s in range(0, options.seeds, 10)
        ]
        names_, numbers = zip(*in_parts(chosen, options.seed), strict=True)
        judged = list(pool.map(judge, names_, numbers, [until] * len(chosen), chunksize=PART))
        ran, false = zip(*(found.result() for found in original), strict=True)
    verdicts = [v for v in judged if v is not None]
    if len(verdicts) < len(chosen) or sum(ran) < len(names) * options.seeds:
        print(
            f"Time was over after {options.minutes:g} minutes: {len(verdicts)} of {len(chosen)} mutants were judged, "
            f"and originals ran in {sum(ran)} of {len(names) * options.seeds} orders."
        )
        if not verdicts:
            return 1
    return report(
        verdicts,
        [x for xs in false for x in xs],
        f"{time.perf_counter() - start:.0f} s, seed {options.seed}, {options.seeds} orders for originals",
        stale(verdicts, names),
    )


def in_parts(chosen: Sequence[tuple[str, int]], seed: int) -> list[tuple[str, int]]:
    """Mutants of a kernel next to each other, as a process runs the original once; the parts in any order, so that
    those that are judged before the time is over are of all kernels.
    """
    ordered = sorted(chosen)
    parts = [ordered[n : n + PART] for n in range(0, len(ordered), PART)]
    random.Random(seed).shuffle(parts)
    return [x for part in parts for x in part]


def stale(verdicts: Sequence[Verdict], names: Sequence[str]) -> list[Equivalent]:
    """The lines of `EQUIVALENT` that nothing needs any longer: every mutant they speak of was judged, and killed."""
    there = Counter(why for name in names for why in excused(name))
    judged = Counter(v.excuse for v in verdicts)
    used = {v.excuse for v in verdicts if not v.by}
    return [e for e in EQUIVALENT if {*e.kernels} <= {*names} and judged[e] == there[e] and e not in used]


def report(verdicts: Sequence[Verdict], false: Sequence[str], how: str, stale: Sequence[Equivalent] = ()) -> int:
    """Print what was found; 1 if the goals are not met, or the list of equivalent mutants is wrong."""
    for line in (*table("operator", verdicts, "operator"), *table("kernel", verdicts, "kernel")):
        print(line)
    wrong = [v for v in verdicts if v.by not in STAGES and not v.excuse]
    judged = [v for v in verdicts if not (v.excuse and not v.by)]
    rate = 1 - len(wrong) / max(len(judged), 1)
    for v in wrong:
        print(f"\nsurvived: {v.kernel}: {v.operator}: {v.change}{f': {v.told}' if v.told else ''}")
    for e in stale:
        print(f"\nno longer true: {e}")
    for x in false:
        print(f"\nfalse alarm: {x}")
    slow = max(verdicts, key=lambda v: v.seconds)
    print(
        f"\n{len(judged)} mutants, {rate:.2%} killed (goal {GOAL:.0%}), "
        f"{len(verdicts) - len(judged)} equivalent; {how}."
    )
    print(f"The slowest took {slow.seconds:.1f} s: {slow.kernel}: {slow.operator}")
    return int(rate < GOAL or bool(stale) or bool(false))


if __name__ == "__main__":
    sys.exit(main())
