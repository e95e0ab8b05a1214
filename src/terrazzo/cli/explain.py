"""`terrazzo explain`: every kernel with what it moves, computes and costs, and why it ends where it ends. Kernels that
are alike, such as those of equal layers, are told once; the most costly come first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from terrazzo.cli.output import as_json, columns, count, duration, say, size
from terrazzo.cli.request import Json, Request, with_request

if TYPE_CHECKING:
    from terrazzo.ir.dialects.loop import Buffer, Call, Kernel, Program
    from terrazzo.rewrite.rule import Event


@with_request
def explain(request: Request, json: Json = False) -> None:
    """List the kernels of a model: what each reads, writes, computes and costs, and why it is a kernel of its own.

    What PyTorch runs comes first, then kernels by their cost; those that differ in names only are told once.

    terrazzo explain -c "torch.nn.RMSNorm(2048)(torch.randn(1, 32, 2048))"
    """
    from terrazzo.cli.lowering import lower, show_events
    from terrazzo.cli.subject import load
    from terrazzo.ir.dialects.loop import Kernel
    from terrazzo.ir.regions import regions
    from terrazzo.rules.loop.memory.frozen import split
    from terrazzo.targets import target

    done = lower(load(request), request)
    chosen = target(request.options.target)
    events = done.log.events
    tiles = done.at("tile")
    schedules, plans = (dict(tiles.schedules), dict(tiles.plans)) if tiles else ({}, {})
    steps = []
    named = regions(done.loop.steps, done.loop.results).calls
    for number, s in enumerate(done.loop.steps):
        steps.append(
            kernel_facts(done.loop, s, events, chosen.rates)
            if isinstance(s, Kernel)
            else region_facts(s)
            if s in named
            else call_facts(s, events, chosen.gpu)
        )
        if isinstance(s, Kernel) and chosen.gpu is not None:
            bound = schedules[number], plans[number]
            steps[-1] |= gpu_facts(s, *bound, steps[-1], events, chosen.gpu) | access_facts(
                done.at("kernel").steps[number]
            )
    if (first := split(done.loop, request.options.frozen)[0]) is not None:
        kept = sum(b.type.span for b in first.results)
        for number, s in enumerate(done.loop.steps):
            steps[number]["once"] = s in first.steps
    groups = alike(done.loop.steps, steps)
    for group in groups:
        for number in group:
            steps[number]["alike"] = group[0]
    if json:
        as_json(steps)
        return
    show_events(events, request.options.verbose)
    for group in sorted(groups, key=lambda group: -_price([steps[n] for n in group])):
        _show(group, steps)
    each = [f for f in steps if not f.get("once")]
    if len(each) < len(steps):
        say(f"{_plural(len(steps) - len(each), 'step')} of frozen inputs alone: computed once, and {size(kept)} kept")
    _totals(each)


def alike(steps: Sequence[Kernel | Call], facts: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The numbers of the steps in groups: those of a group are the same but for names, and so are the reasons."""
    groups: dict[Any, list[int]] = {}
    for number, (step, told) in enumerate(zip(steps, facts, strict=True)):
        groups.setdefault(_nameless(step, told), []).append(number)
    return list(groups.values())


def _nameless(step: Kernel | Call, facts: dict[str, Any]) -> Any:
    """A step and the reasons for it, without numbers and the names of kernels, buffers and axes."""
    from terrazzo.ir.dialects.loop import Buffer, Kernel
    from terrazzo.ir.expr import Var
    from terrazzo.ir.node import substitute

    buffers = tuple(dict.fromkeys((*step.reads, *step.writes)))
    names = {step.name: "k", **{b.name: f"b{n}" for n, b in enumerate(buffers)}}
    reasons = tuple(re.sub(r"_\d+\b|\d[\d.]*", "", reason) for reason in facts["because"])
    schedule = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), facts.get("schedule", ""))
    if not isinstance(step, Kernel):
        return step.name, tuple(b.type for b in buffers), reasons
    new: dict[Any, Any] = {b: Buffer(f"b{n}", b.type) for n, b in enumerate(buffers)}
    new |= {a: Var(f"a{n}", a.extent) for n, a in enumerate(step.axes)}
    return tuple(substitute(s, new) for s in step.stores), schedule, reasons


def _price(steps: Sequence[dict[str, Any]]) -> float:
    """What the steps cost together. What PyTorch runs has no price, and comes before all that has one."""
    return sum(float(f.get("price_ns", "inf")) for f in steps)


def _totals(steps: Sequence[dict[str, Any]]) -> None:
    """A line for each kind of work, the most costly first, and one for all."""
    kernels, calls = ([f for f in steps if f["kind"] == kind] for kind in ("kernel", "call"))
    moved, price = (sum(f[k] for f in kernels) for k in ("bytes", "price_ns"))
    called = _price([f for f in calls if "price_ns" in f])
    kinds = {f["work"]: [other for other in kernels if other["work"] == f["work"]] for f in kernels}
    rows = [
        (work, _plural(len(mine), "kernel"), size(sum(f["bytes"] for f in mine)), duration(_price(mine)),
         f"{_price(mine) / price:.0%}")
        for work, mine in sorted(kinds.items(), key=lambda kind: -_price(kind[1]))
    ]  # fmt: skip
    for line in columns(rows, right=(1, 2, 3, 4)) if len(kernels) > 1 else ():
        say(line)
    counts = f"{_plural(len(kernels), 'kernel')}, {_plural(len(calls), 'call')} of PyTorch"
    of_calls = f", and {duration(called)} in libraries" if called else ""
    say(f"{counts}; {size(moved)} moved, {duration(price)} by the model{of_calls}")


def kernel_facts(program: Program, kernel: Kernel, events: Sequence[Event], rates: Any) -> dict[str, Any]:
    """What there is to say about a kernel. Bytes are those touched; operations count a multiply-add as two."""
    from terrazzo.rules.loop.cost import cost
    from terrazzo.rules.loop_to_tile.estimate import work

    operations, touched = work(kernel)
    return {
        "kind": "kernel",
        "name": kernel.name,
        "source": kernel.source,
        "reads": _typed(b for b in kernel.reads if b not in kernel.writes),
        "writes": _typed(kernel.writes),
        "bytes": sum(count * b.type.dtype.size for b, count in touched.items()),
        "operations": operations,
        "work": kind_of_work(kernel),
        "price_ns": cost(kernel, rates),
        "because": boundary(program, kernel, events),
    }


def kind_of_work(kernel: Kernel) -> str:
    """What a kernel does, by the most that is in it: products, scans, reductions, or only pointwise functions."""
    from terrazzo.ir.contraction import contraction
    from terrazzo.ir.dialects.loop import Reduce, Scan
    from terrazzo.ir.node import topological

    terms = list(topological(kernel.stores))
    if any(isinstance(x, Reduce) and contraction(x) is not None for x in terms):
        return "products"
    if any(isinstance(x, Scan) for x in terms):
        return "scans"
    return "reductions" if any(isinstance(x, Reduce) for x in terms) else "pointwise"


def gpu_facts(
    kernel: Kernel, schedule: Any, plan: Any, facts: dict[str, Any], events: Sequence[Event], gpu: Any
) -> dict[str, Any]:
    """What there is to say about a kernel on a GPU: its schedule, its plan and why, what the model expects, and the
    roofline.
    """
    from terrazzo.rules.loop_to_tile.estimate import estimate
    from terrazzo.rules.tile.draft import Draft
    from terrazzo.rules.tile.reasons import reasons

    expected = estimate(kernel, gpu)
    about = [
        e
        for e in events
        if e.pass_name in ("parts", "schedule", "plan", "derive") and e.subject == kernel.name and e.reason
    ]
    why = [f"{'' if e.fired else 'not '}{e.rule}: {e.reason}" for e in about]
    return {
        "price_ns": expected.time,
        "roofline_ns": expected.least,
        "bound": expected.bound,
        "schedule": str(schedule),
        "plan": str(plan),
        "because": [*facts["because"], *why],
        "reasons": [f"{what}: {reason}" for what, reason in reasons(plan, Draft(kernel, schedule, gpu))],
    }


def access_facts(kernel: Any) -> dict[str, Any]:
    """What the accesses of a GPU's kernel cost where that is known from its text: those that depend on data are left
    out.
    """
    from terrazzo.targets.cuda.predict import predict

    costs = predict(kernel).costs
    memory, shared = ([costs.total(f"{level} {way}") for way in ("read", "write")] for level in ("global", "shared"))
    return {
        "global_bytes": sum(c.bytes for c in memory),
        "global_sectors": sum(c.sectors for c in memory),
        "box_bytes": costs.box_bytes,
        "shared_wavefronts": sum(c.wavefronts for c in shared),
        "shared_conflicts": sum(c.conflicts for c in shared),
    }


def call_facts(call: Call, events: Sequence[Event], gpu: Any = None) -> dict[str, Any]:
    """What there is to say about an op that PyTorch runs, since there is no kernel for it or a library is faster."""
    from terrazzo.rules.torch_to_tensor.library import is_priced, price

    results = {b.name for b in call.writes}
    library = next((e.reason for e in events if e.rule == "library" and e.fired and e.subject in results), "")
    why = next(
        (e.reason for e in events if e.rule == "opaque" and e.subject == f"{call.name} {call.source}".strip()),
        "no rule lowers it",
    )
    return {
        "kind": "call",
        "name": call.name,
        "source": call.source,
        "reads": _typed(call.reads),
        "writes": _typed(call.writes),
        **({"price_ns": price(call, gpu)} if gpu is not None and is_priced(call) else {}),
        "because": [f"called {library}" if library else f"PyTorch runs it: {why}"],
    }


def region_facts(call: Call) -> dict[str, Any]:
    """What there is to say about a call that only says where in the memory of one buffer another one is."""
    return {
        "kind": "region",
        "name": call.name,
        "source": call.source,
        "reads": _typed(call.reads),
        "writes": _typed(call.writes),
        "price_ns": 0.0,
        "because": ["nothing runs: it says where in memory this is"],
    }


def boundary(program: Program, kernel: Kernel, events: Sequence[Event]) -> list[str]:
    """Why what this kernel stores is in memory: it must be, or every fusion that would avoid it was declined."""
    from terrazzo.ir.dialects.loop import Call
    from terrazzo.ir.regions import WHOLE, WINDOW

    reasons = []
    for b in dict.fromkeys(kernel.writes):
        if b in program.results:
            reasons.append(f"{b.name} is a result")
        reasons += [
            f"{b.name} is read by {s.name}, which PyTorch runs"
            for s in program.steps
            if isinstance(s, Call) and b in s.reads and s.name not in (WHOLE, WINDOW)
        ]
    about = {kernel.name, *(b.name for b in kernel.writes)}
    declined = [e for e in events if not e.fired and e.pass_name == "fuse" and about & set(e.subject.split(" with "))]
    latest = {(e.rule, e.subject): e for e in declined}  # prices change as kernels grow; the last ones decided
    return reasons + [f"{e.rule} declined at {e.subject}: {e.reason}" for e in latest.values()]


def _show(group: Sequence[int], steps: Sequence[dict[str, Any]]) -> None:
    facts = steps[group[0]]
    head = [entry.split(": ")[0] for entry in (*facts["reads"], *facts["writes"])]
    split = len(facts["reads"])
    say(f"=== {group[0]}: {', '.join(head[:split])}{' ' if split else ''}-> {', '.join(head[split:])} ===", "bold")
    rows = {"from": facts["source"], "reads": ", ".join(facts["reads"]), "writes": ", ".join(facts["writes"])}
    if facts["kind"] == "kernel":
        rows["moves"] = size(facts["bytes"])
        rows["computes"] = f"{count(facts['operations'])} operations"
        rows["costs"] = f"{duration(facts['price_ns'])} by the model"
        if "roofline_ns" in facts:
            rows["costs"] += f"; at least {duration(facts['roofline_ns'])}, by {facts['bound']}"
            rows["accesses"] = f"{size(facts['global_bytes'])} in {count(facts['global_sectors'])} sectors"
            rows["accesses"] += f", {size(facts['box_bytes'])} by TMA" if facts["box_bytes"] else ""
            if facts["shared_wavefronts"]:
                lost = count(facts["shared_conflicts"]) if facts["shared_conflicts"] else "none"
                rows["accesses"] += f"; shared memory: {count(facts['shared_wavefronts'])} wavefronts"
                rows["accesses"] += f", {lost} of them by bank conflicts"
    elif facts["kind"] == "call":
        rows["runs"] = facts["name"]
        rows["costs"] = f"{duration(facts['price_ns'])} by the model" if "price_ns" in facts else ""
    rows["runs"] = "once: it depends on frozen inputs alone" if facts.get("once") else rows.get("runs", "")
    if len(group) > 1:
        together = f", {duration(_price([steps[n] for n in group]))} together" if "price_ns" in facts else ""
        others = ", ".join(map(str, group[1:12])) + (f" and {len(group) - 12} more" if len(group) > 12 else "")
        rows["alike"] = f"{len(group)} of them{together}: also {others}"
    for name, text in rows.items():
        if text:
            say(f"    {name:<9} {text}")
    for below in ("schedule", "plan"):
        for k, line in enumerate(facts.get(below, "").splitlines()[1:]):
            say(f"    {below if k == 0 else '':<9} {line.removeprefix('    ')}")
    for k, reason in enumerate((*facts["because"], *facts.get("reasons", ()))):
        say(f"    {'because' if k == 0 else '':<9} {reason}")


def _typed(buffers: Iterable[Buffer]) -> list[str]:
    return [f"{b.name}: {b.type}" for b in dict.fromkeys(buffers)]


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
