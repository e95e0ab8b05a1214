"""Plans of random schedules, and of pinned arrangements, edited: lines, numbers and words of them are dropped, doubled,
exchanged and changed.
"""

from __future__ import annotations

import re
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from terrazzo.hw.gpu import gpu
from terrazzo.ir.schedule import Schedule
from terrazzo.rules.tile.complete import Refused, complete
from tests.fuzz.schedules import TERMS, Term, schedules, terms
from tests.kernels.programs import TARGETS
from tests.mutants.kernels import ARRANGED, tiled

NUMBER = re.compile(r"(?<![\w.])\d+(?!\w)")
WORD = re.compile(r"\"[^\"]*\"|True|False|(?<=[=( ])[a-z]\w*(?=[,)])")
ARGUMENT = re.compile(r", \w+=(?:\"[^\"]*\"|\([^()]*(?:\([^()]*\)[^()]*)*\)|\w+)")


@st.composite
def plans(draw: Any) -> tuple[Term, Schedule, str]:
    """A term, a schedule of it, and the text of its plan after an edit or two."""

    def one(items: Any) -> Any:
        return draw(st.sampled_from(items))

    found = terms(one(TERMS), one(TARGETS))
    assume(found)  # PyTorch's library may be called instead
    term = one(found)
    schedule = draw(schedules(term))
    plan, _ = complete(term.kernel, schedule, gpu(schedule.target))
    if isinstance(plan, Refused):
        schedule = term.default
        plan, _ = complete(term.kernel, schedule, gpu(schedule.target))
    return term, schedule, _after_edits(str(plan), one)


@st.composite
def arrangements(draw: Any) -> tuple[str, str]:
    """The name of a kernel under a schedule that is pinned, and the text of its plan after an edit or two."""

    def one(items: Any) -> Any:
        return draw(st.sampled_from(items))

    name = one(tuple(ARRANGED))
    ((_, plan),) = tiled(name).plans
    return name, _after_edits(str(plan), one)


def _after_edits(plan: str, one: Any) -> str:
    lines = plan.splitlines()
    for _ in range(one((1, 1, 2))):
        lines = _edited(lines, one)
    return "\n".join(lines) + "\n"


def _edited(lines: list[str], one: Any) -> list[str]:
    """The lines with one thing changed. Numbers and words are exchanged for such as stand in plans."""
    if len(lines) < 2:
        return [*lines, "    pass"]
    at = one(range(1, len(lines)))
    line = lines[at]
    match one(("number",) * 4 + ("word",) * 3 + ("argument", "line", "twice", "order", "more")):
        case "number" if found := list(NUMBER.finditer(line)):
            m = one(found)
            n = int(m[0])
            new = str(one([x for x in (n + 1, n - 1, n * 2, n // 2, 0, 1, 3, 64, 1 << 20) if x >= 0 and x != n]))
            line = line[: m.start()] + new + line[m.end() :]
        case "word" if found := list(WORD.finditer(line)):
            m = one(found)
            others = sorted({x[0] for other in lines[1:] for x in WORD.finditer(other)} - {m[0]})
            line = line[: m.start()] + one(others or ["nothing"]) + line[m.end() :]
        case "argument" if found := list(ARGUMENT.finditer(line)):
            m = one(found)
            line = line[: m.start()] + line[m.end() :]
        case "line":
            return [*lines[:at], *lines[at + 1 :]]
        case "twice":
            return [*lines[: at + 1], line, *lines[at + 1 :]]
        case "order":
            return [*lines[:at], *lines[at + 1 :], line]
        case "more":
            every = sorted({m[0] for other in lines[1:] for m in ARGUMENT.finditer(other)})
            line = line[:-1] + one(every) + ")" if every else line
    return [*lines[:at], line, *lines[at + 1 :]]
