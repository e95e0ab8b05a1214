"""`make fuzz N=2000 SEED=7 KIND=programs`: so many random programs, schedules, texts and functions that write to views,
the same ones for the same seed. Hostile texts go through the commands, in a process with the address sanitizer.

What fails is made as small as it gets, and printed with the command that finds it again.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st

from tests.fuzz import aliases, checks, scores
from tests.fuzz.hostile import hostile, library
from tests.fuzz.plans import arrangements, plans
from tests.fuzz.programs import tensor_programs
from tests.fuzz.schedules import TERMS, schedules, terms
from tests.fuzz.texts import texts
from tests.kernels.programs import TARGETS


@st.composite
def _programs(draw: Any) -> tuple[Any, ...]:
    return draw(tensor_programs()), draw(st.sampled_from(TARGETS)), draw(st.sampled_from((True, True, False)))


@st.composite
def _schedules(draw: Any) -> tuple[Any, ...]:
    found = terms(draw(st.sampled_from(TERMS)), draw(st.sampled_from(TARGETS)))
    hypothesis.assume(found)  # PyTorch's library may be called instead
    term = draw(st.sampled_from(found))
    return term, draw(schedules(term))


KINDS: dict[str, tuple[Any, Callable[..., str]]] = {
    "programs": (_programs(), checks.program),
    "schedules": (_schedules(), checks.schedule),
    "plans": (plans(), checks.plan),
    "arrangements": (arrangements(), checks.arrangement),
    "scores": (st.tuples(scores.cases()), scores.check),
    "texts": (st.tuples(texts()), checks.text),
    "aliases": (st.tuples(aliases.cases()), aliases.under_torch_compile),
    "effects": (st.tuples(aliases.cases(breaks=False, grad=False)), aliases.under_terrazzo_compile),
    "hostile": (st.tuples(hostile()), checks.hostile),
}
SLOW = ("hostile",)
"""Kinds of which nothing is made smaller: all examples are tried, and each bug is shown as it was found first."""


TURNS = 5
"""How often as many are drawn as are wanted, since some are drawn twice."""


def _settings(count: int) -> settings:
    return settings(max_examples=count, database=None, deadline=None, verbosity=Verbosity.quiet, print_blob=False,
                    phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck))  # fmt: skip


class Over(BaseException):
    """The time is over: no failure, which Hypothesis would make smaller."""


def fuzz(kind: str, count: int, seed: int, until: float = math.inf) -> tuple[Counter[str], list[str]]:
    """How many of `count` different examples went how, and what was found: for each bug the smallest text that shows
    it. Nothing is drawn any more once the time is over.
    """
    strategy, check = KINDS[kind]
    outcomes: Counter[str] = Counter()
    found: dict[Any, str] = {}
    done: set[Any] = set()

    def one(example: tuple[Any, ...]) -> None:
        if time.time() > until:
            raise Over
        key = tuple(getattr(x, "results", x) for x in example)
        if key in done or len(done) >= count:  # what is drawn again proves nothing
            return
        try:
            outcomes[check(*example)] += 1
        except checks.Found as why:
            place = _place(why) if kind not in SLOW else re.sub(r"\d+", "#", str(why)[:160])
            if place not in found or len(str(why)) < len(found[place]):
                found[place] = str(why)
            outcomes["found"] += 1
            if kind not in SLOW:
                raise
        done.add(key)

    for turn in range(TURNS):
        if (found and kind not in SLOW) or len(done) >= count:
            break
        run = hypothesis.seed(f"{seed}, {turn}")(_settings(count)(given(strategy)(one)))
        try:
            run()
        except Over:
            break
        except (checks.Found, BaseExceptionGroup):
            if not found:
                raise
    return outcomes, list(found.values())


def fuzz_in(jobs: int, kind: str, count: int, seed: int, until: float = math.inf) -> tuple[Counter[str], list[str]]:
    """The same by so many processes, each with a part of the examples and a seed of its own."""
    if jobs == 1:
        return fuzz(kind, count, seed, until)
    seeds = [seed * jobs + n for n in range(jobs)]
    with ProcessPoolExecutor(jobs) as pool:
        parts = list(pool.map(fuzz, [kind] * jobs, [-(-count // jobs)] * jobs, seeds, [until] * jobs))
    return sum((outcomes for outcomes, _ in parts), Counter()), list(dict.fromkeys(x for _, xs in parts for x in xs))


def _place(why: BaseException) -> tuple[Any, ...]:
    """Where a bug showed itself, by which bugs are told apart."""
    cause = why.__cause__ or why
    at = cause.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return type(cause), at and (at.tb_frame.f_code.co_filename, at.tb_lineno)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("count", type=int, metavar="N", help="examples of each kind")
    parser.add_argument("--seed", type=int, help="any by default")
    parser.add_argument("--kind", choices=KINDS, action="append", help="all by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="of each kind; what is not tried by then is not"
    )
    given = parser.parse_args()
    seed = random.randrange(1 << 32) if given.seed is None else given.seed
    bugs = 0
    for kind in given.kind or KINDS:
        if kind == "hostile" and not library():
            print("hostile texts need a C++ compiler with the address sanitizer")
            continue
        again = f"make fuzz N={given.count} SEED={seed} KIND={kind}"
        again += f' ARGS="--jobs {given.jobs}"' if given.jobs > 1 else ""
        print(again, flush=True)
        start = time.perf_counter()
        outcomes, found = fuzz_in(given.jobs, kind, given.count, seed, time.time() + 60 * given.minutes)
        seconds = time.perf_counter() - start
        total = sum(outcomes.values())
        refused = sum(number for outcome, number in outcomes.items() if outcome.startswith("refused"))
        legal = f"{1 - refused / max(total, 1):.1%} are not refused"
        over = f" of {given.count}, until the time was over," if total < given.count and not bugs else ""
        print(f"  {total}{over} {kind} in {seconds:.0f} s, {total / seconds:.1f} a second; {legal}")
        for outcome, number in outcomes.most_common(12):
            print(f"  {number:7} {outcome}")
        for text in found:
            print(f"\nFOUND {text}\nAgain: {again}\n", flush=True)
        bugs += len(found)
    return int(bugs > 0)


if __name__ == "__main__":
    sys.exit(main())
