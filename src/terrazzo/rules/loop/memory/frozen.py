"""What depends on frozen inputs alone: it is computed once, and kept from call to call.

The option `frozen` names inputs that are constants (`freezing`: all parameters and buffers that a program only reads).
Of a program, the steps that read nothing else make a program of their own, which runs when the inputs are bound: parts
of a weight in float32, its norm, its copy in another type.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from terrazzo.ir.dialects import loop as l
from terrazzo.rewrite.rule import Event, Log

PASS = "fuse"
RULE = "store_frozen"


def constants(program: Any, frozen: Collection[str]) -> set[l.Buffer]:
    """The frozen inputs of a program (of Loop IR, or of Kernel IR), and what is made of constants alone. What is drawn
    at random is made anew, and a buffer that another step writes too is none.
    """
    found = {b for b in program.inputs if b.name in frozen}
    changing = {b for s in program.steps if getattr(s, "order", 0) for b in s.writes}
    changing.update(b for b in program.inputs if b not in found)
    again = True
    while again:  # what writes a buffer may stand before what shows that it is none
        more = {b for s in program.steps if not changing.isdisjoint((*s.reads, *s.writes)) for b in s.writes}
        again = not more <= changing
        changing |= more
    return found | {b for s in program.steps for b in s.writes if b not in changing}


def split(program: Any, frozen: Collection[str]) -> tuple[Any, Any]:
    """What is computed once, and the rest, which takes its results as further inputs; None and the whole program where
    there is nothing to compute once.
    """
    known = constants(program, frozen) if frozen else set()
    alone = [bool(s.writes) and known.issuperset(s.writes) for s in program.steps]
    once = [s for s, x in zip(program.steps, alone, strict=True) if x]
    rest = [s for s, x in zip(program.steps, alone, strict=True) if not x]
    made = dict.fromkeys(b for s in once for b in s.writes)
    needed = {b for s in rest for b in s.reads} | set(program.results)
    results = tuple(b for b in made if b in needed)
    if not results:
        return None, program
    read = {b for s in once for b in s.reads}
    inputs = tuple(b for b in program.inputs if b in read)
    return (
        replace(program, inputs=inputs, steps=tuple(once), results=results),
        replace(program, inputs=(*program.inputs, *results), steps=tuple(rest)),
    )


def stored_once(program: l.Program, frozen: Collection[str], log: Log) -> tuple[str, ...]:
    """The names of constants that are to be stored, in a program each of whose kernels stores a primitive: the last
    before something that varies, where they take no more memory than what they are made of (int8 weights stay what they
    are), and do more than move it.
    """
    if not frozen:
        return ()
    known = constants(program, frozen)
    makers = {b: s for s in program.steps for b in s.writes if b in known}
    sources: dict[l.Buffer, set[l.Buffer]] = {b: {b} for b in program.inputs if b in known}
    for b, s in makers.items():
        sources[b] = set().union(*(sources[x] for x in s.reads))
    varying = [s for s in program.steps if not known.issuperset(s.writes)]
    todo = list(dict.fromkeys(b for s in varying for b in s.reads if b in makers))
    found: dict[str, None] = {}
    seen = set(todo)
    while todo:
        b = todo.pop(0)
        size = sum(x.type.span for x in sources[b])
        if b.type.span <= size and _computed(makers[b]):
            found[b.name] = None
            why = f"it is computed once: {b.type.span} bytes, made of {size} that are frozen"
            log.add(Event(PASS, RULE, b.name, True, why))
            continue
        new = [x for x in makers[b].reads if x in makers and x not in seen]
        seen.update(new)
        todo += new
    return tuple(found)


def _computed(step: Any) -> bool:
    """Whether a step is a kernel that does more than move what it reads."""
    moves = l.Load | l.Literal | l.Index
    return isinstance(step, l.Kernel) and not all(isinstance(s.value, moves) for s in step.stores)


def varying(steps: Sequence[l.Kernel], known: Collection[l.Buffer]) -> list[l.Kernel]:
    """Steps without those before the last that read constants alone: what stands in each call."""
    made = set(known)
    found: list[l.Kernel] = []
    for s in steps:
        if s is not steps[-1] and made.issuperset(s.reads):
            made.update(s.writes)
        else:
            found.append(s)
    return found
