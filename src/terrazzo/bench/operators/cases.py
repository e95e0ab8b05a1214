"""The cases of the suite, in the order in which they are tried: jobs, each an operator in some forms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from terrazzo.bench.operators.drawn import chosen, grown, name_of, plain
from terrazzo.bench.operators.fills import Case
from terrazzo.bench.operators.shapes import CASES, by_hand

ROUNDS = ((("even", "float32", 1), ("even", "bfloat16", 1)), (("even", "float32", 4), ("backward", "float32", 1)),
          (("backward", "bfloat16", 2), ("odd", "bfloat16", 2)), (("strided", "float32", 1), ("rows", "float32", 2)),
          (("columns", "bfloat16", 2), ("even", "int64", 2), ("even", "bfloat16", 4)))  # fmt: skip
"""What is tried first, in what form and type, and how many calls of an operator: later rounds add what earlier ones
had not.
"""
BY_HAND = -1


@dataclass(frozen=True)
class Job:
    """An operator in the forms of a round, or a case by hand."""

    name: str
    round: int


def jobs(only: str = "") -> list[Job]:
    """Those whose name contains `only`: by hand, and then drawn from the database in rounds."""
    operators = {name_of(op): op for op in chosen(only)}
    drawn = [Job(n, r) for r in range(len(ROUNDS)) for n, op in operators.items() if r == 0 or not plain(op)]
    return [*(Job(name, BY_HAND) for name in CASES if only in name), *drawn]


def cases(job: Job) -> Iterator[Case]:
    """The cases of a job, but those that rounds before it had."""
    if job.round == BY_HAND:
        yield from by_hand(job.name)
        return
    op = next(op for op in chosen(job.name) if name_of(op) == job.name)
    before = {(f, d): n for r in ROUNDS[: job.round] for f, d, n in r}
    for form, name, most in ROUNDS[job.round]:
        dtype = getattr(torch, name)
        if dtype in op.supported_dtypes("cpu") and (form != "backward" or op.supports_autograd):
            had = before.get((form, name), 0)
            yield from (case for k, case in enumerate(grown(op, dtype, form, most)) if k >= had)
