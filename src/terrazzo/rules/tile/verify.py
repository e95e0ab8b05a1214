"""What must hold of a plan: every line fits the kernel, the schedule, the machine and the lines it refers to. Nothing
is missing, nothing is said twice, and all of it fits on a processor.

Plans that rules complete hold by construction, and are looked at all the same. Those that somebody wrote or edited are
used as they stand once they are found to be in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from terrazzo.collector import remembered
from terrazzo.errors import TerrazzoError, UserError, about
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import Node
from terrazzo.ir.places import TextLine
from terrazzo.ir.plan import (
    AXIS,
    STORED,
    Agent,
    Align,
    Combine,
    Convert,
    Frame,
    Jam,
    Keep,
    Limit,
    Line,
    Order,
    Plan,
    Product,
    Reach,
    Rescue,
    Result,
    Ring,
    Stage,
    Stream,
)
from terrazzo.ir.schedule import Schedule
from terrazzo.rewrite.rule import Declined
from terrazzo.rules.tile.agents import beyond
from terrazzo.rules.tile.checks import CHECKS, derived
from terrazzo.rules.tile.draft import Draft, axis_name
from terrazzo.rules.tile.handed import made, summed
from terrazzo.rules.tile.layouts import conversions
from terrazzo.rules.tile.loops import walk
from terrazzo.rules.tile.results import aligned, combination, jammed, kept
from terrazzo.rules.tile.rings import brought, operand_text
from terrazzo.rules.tile.slabs import slab_type
from terrazzo.rules.tile.vectors import points, vectors

THREADS = 1024
"""As many as a block may have."""


@remembered
def verify(kernel: l.Kernel, schedule: Schedule, plan: Plan, gpu: Gpu) -> None:
    """UserError, with the line that is wrong, unless a kernel can be written from the plan."""
    draft = Draft(kernel, schedule, gpu)
    for number, why in itertools.chain(problems(plan, draft), budget(plan, draft)):
        with about(TextLine(plan, number - 1), TextLine(plan, 0)):
            raise wrong(plan, number, why)


def wrong(plan: Plan, number: int, why: str) -> UserError:
    """What is said of a line of a plan."""
    text = str(plan).splitlines()[number - 1].strip()
    error = UserError(f"the plan of {plan.kernel}, line {number}: {why}\n    {text}")
    error.brief = f"the plan of {plan.kernel}: {why}"
    return error


Problem = tuple[int, str]
"""The number of the line that is wrong (of the first, where one is missing), and why."""
HEAD, FIRST = 1, 2
"""The numbers of a plan's head, and of the first line below it."""


def problems(plan: Plan, draft: Draft) -> Iterator[Problem]:
    """What is wrong, whatever the machine has room for. Lines come after those they depend on, so the first problem
    is the one to tell.
    """
    if (plan.kernel, plan.target) != (draft.kernel.name, draft.gpu.arch):
        yield HEAD, f"it is not one of {draft.kernel.name} for {draft.gpu.arch}"
    yield from _said_twice(plan)
    yield from _references(plan, draft)
    for kind, check in CHECKS:
        for line in plan.all(kind):
            if why := _reason(check, line, plan, draft):
                yield plan.lines.index(line) + FIRST, why
        yield from ((HEAD, why) for why in MISSING[kind](plan, draft))
    if why := _reason(lambda _, *both: walk(*both), plan, plan, draft):
        yield HEAD, why


def _reason(check: Callable[..., None], line: Node, plan: Plan, draft: Draft) -> str:
    try:
        check(line, plan, draft)
    except (Declined, TerrazzoError) as why:
        return str(why).splitlines()[0].removeprefix(f"{draft.kernel.name}: ")
    return ""


def _subjects(line: Line) -> list[tuple[str, str]]:
    """What a line is the only one to decide."""
    match line:
        case Order() | Limit() | Jam() | Align():
            return [(line.op, "")]
        case Product():
            return [("the product", site) for site in line.sites]
        case Stream():
            return [("", line.name), ("the stream of", line.operand)]
        case Agent() | Ring():
            return [("", line.name)]
        case Stage():
            return [("", line.name), ("the stage for", line.product)]
        case Convert():
            return [("the conversion of", f"{line.value} to {line.to}")]
        case Frame():
            return [("the frame of", line.product)]
        case Reach():
            return [("the steps along", line.axis)]
        case Rescue():
            return [("the rescue of", line.of)]
        case Combine():
            return [("the combination of", line.site)]
        case Keep():
            return [("keeping", line.what)]
        case Result():
            return [("the result", line.store), *([("", line.slab)] if line.slab else [])]
    raise AssertionError(line)


def _said_twice(plan: Plan) -> Iterator[Problem]:
    seen = set()
    for number, line in enumerate(plan.lines, FIRST):
        for subject in _subjects(line):
            if subject in seen:
                yield number, f"{' '.join(subject).strip()} is decided twice"
            seen.add(subject)


def _references(plan: Plan, draft: Draft) -> Iterator[Problem]:
    """Names of lines stand below these, and axes are the kernel's."""
    axes = {
        axis_name(a) for a in (*draft.kernel.axes, *(a for r in draft.names.values() for a in getattr(r, "axes", ())))
    }
    known: dict[str, str] = {}
    for number, line in enumerate(plan.lines, FIRST):
        for field, to in line.references.items():
            given = getattr(line, field)
            for name in given if isinstance(given, tuple) else [given] if given else []:
                if to == AXIS and name not in axes:
                    yield number, f"there is no axis {name}; there are {', '.join(sorted(axes))}"
                if to != AXIS and known.get(name) != to:
                    yield number, f"there is no {to} {name} above"
        if name := getattr(line, "name", ""):
            known[name] = line.op


def _unsaid(kind: type[Line]) -> Callable[[Plan, Draft], Iterator[str]]:
    """For kinds of lines that every plan has."""

    def missing(plan: Plan, draft: Draft) -> Iterator[str]:
        if not plan.all(kind):
            yield f"it has no line `{kind.op}`"

    return missing


def _unmultiplied(plan: Plan, draft: Draft) -> Iterator[str]:
    done = {name for p in plan.all(Product) for name in p.sites}
    yield from (
        f"nothing says on what {name} runs: a line `product` is missing" for name in draft.products if name not in done
    )


def _unbrought(plan: Plan, draft: Draft) -> Iterator[str]:
    done = {x for s in plan.all(Stream) for x in (s.operand, *s.also)}
    every = [*(x for p in plan.all(Product) for x in brought(draft, p)), *(points(draft, plan) if done else ())]
    terms = dict.fromkeys(map(operand_text, every))
    yield from (f"nothing brings {text}: a line `stream` is missing" for text in terms if text not in done)


def _underived(kind: type[Line]) -> Callable[[Plan, Draft], Iterator[str]]:
    """For kinds of lines that follow from the term."""

    def missing(plan: Plan, draft: Draft) -> Iterator[str]:
        try:
            meant = [line for line in derived(kind, plan, draft) if line not in plan.lines]
        except Declined as why:
            yield str(why)
            return
        yield from (f"nothing says what follows from the term: `{line}` is missing" for line in meant)

    return missing


def _unstaged(plan: Plan, draft: Draft) -> Iterator[str]:
    done = {x.product for x in plan.all(Stage)}
    for p in plan.all(Product):
        if STORED in (p.a, p.b) and p.sites[0] not in done:
            inner = next(summed(draft, p.sites[0]))
            yield f"it is not said where what {inner} sums lies: a line `stage` is missing"


def _uncombined(plan: Plan, draft: Draft) -> Iterator[str]:
    done = {c.site for c in plan.all(Combine)}
    for name in draft.names:
        if name not in done and (meant := combination(draft, name)):
            yield f"nothing says where the partial states of {name} meet: `{meant}` is missing"


def _unkept(plan: Plan, draft: Draft) -> Iterator[str]:
    done = {line.what for line in plan.all(Keep)}
    yield from (
        f"the schedule keeps {name} in registers: a line `keep` is missing" for name in kept(draft) if name not in done
    )


def _unjammed(plan: Plan, draft: Draft) -> Iterator[str]:
    if jammed(draft) and not plan.all(Jam):
        yield "the schedule has points of a thread take steps together: a line `jam` is missing"


def _unaligned(plan: Plan, draft: Draft) -> Iterator[str]:
    if aligned(draft) and not plan.all(Align):
        yield "the schedule has vectors begin where memory is aligned: a line `align` is missing"


def _unstored(plan: Plan, draft: Draft) -> Iterator[str]:
    done = {line.store for line in plan.all(Result)}
    names = dict.fromkeys(s.buffer.name for s in draft.kernel.stores)
    yield from (f"nothing says how {name} leaves: a line `result` is missing" for name in names if name not in done)


def _unconverted(plan: Plan, draft: Draft) -> Iterator[str]:
    try:
        meant = [line for line in conversions(plan, draft) if line not in plan.lines]
    except Declined as why:
        yield str(why)
        return
    yield from (f"nothing brings {x.value} to the layout of {x.to}: `{x}` is missing" for x in meant)


def _nothing(plan: Plan, draft: Draft) -> Iterator[str]:
    return iter(())


def budget(plan: Plan, draft: Draft) -> Iterator[Problem]:
    """What the machine has no room for: threads, registers, slabs in shared memory. Results, partial states and
    barriers come on top, which the kernel says that is written.
    """
    arch, threads, used = draft.gpu.arch, 0, 0
    for agent in plan.all(Agent):
        threads += 32 * agent.warps
        if threads > THREADS:
            yield plan.lines.index(agent) + FIRST, f"{threads} threads in a block, and {arch} has {THREADS}"
    resident = max([1, *(x.resident for x in plan.all(Limit))])
    yield from ((plan.lines.index(a) + FIRST, why) for a, why in beyond(plan.all(Agent), resident, draft.gpu))
    every = [*(x for p in plan.all(Product) for x in brought(draft, p)), *vectors(draft, plan)]
    terms: dict[str, Node] = {operand_text(x): x for x in every}
    slabs: list[tuple[Line, Stream, Node, int]] = [
        (s, s, terms[s.operand], plan.named(s.ring).slots) for s in plan.all(Stream)
    ]
    slabs += [(x, x.stream, made(draft.products[x.product])[0], x.slots) for x in plan.all(Stage)]
    for line, stream, term, slots in slabs:
        kind = slab_type(stream, term.dtype, slots)  # type: ignore[attr-defined]
        used += k.shared_bytes(k.Shared(stream.name, kind))
        if used > draft.gpu.shared:
            yield (
                plan.lines.index(line) + FIRST,
                f"{used} bytes of shared memory with those before it, and {arch} has {draft.gpu.shared}",
            )


MISSING: dict[type[Line], Callable[[Plan, Draft], Iterator[str]]] = {
    Order: _unsaid(Order),
    Agent: _unsaid(Agent),
    Product: _unmultiplied,
    Ring: _nothing,
    Stream: _unbrought,
    Stage: _unstaged,
    Frame: _underived(Frame),
    Reach: _underived(Reach),
    Rescue: _underived(Rescue),
    Combine: _uncombined,
    Keep: _unkept,
    Jam: _unjammed,
    Align: _unaligned,
    Result: _unstored,
    Convert: _unconverted,
    Limit: _nothing,
}
