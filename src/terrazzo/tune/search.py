"""Candidates of a program's kernels, built, checked against each other, and measured on this machine's GPU."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.errors import Limitation, UserError
from terrazzo.hw.gpu import Gpu
from terrazzo.ir.canonical import canonical, plain, with_buffers
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.text import show
from terrazzo.options import Options
from terrazzo.pipelines import GPU_ONLY, Lowering, lowering, stages
from terrazzo.progress import at, working
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop_to_tile.candidate import Candidate
from terrazzo.rules.loop_to_tile.candidates import candidates
from terrazzo.rules.loop_to_tile.estimate import estimate
from terrazzo.run.cache import Cache
from terrazzo.run.compiled import resolved
from terrazzo.run.cuda import Cuda, emit_all
from terrazzo.run.measured import Timing
from terrazzo.run.nvrtc import compile_each
from terrazzo.run.switched import asked
from terrazzo.targets import target
from terrazzo.tune.process import Worker

MOST = 24
"""Candidates of a kernel that are measured: the first by the model."""
EACH = 1.0
"""Seconds in which all candidates of a kernel are timed, once they are built."""
FAR = 2
"""Kernels one after the other that make what a kernel is measured with, from random numbers."""


@dataclass(frozen=True)
class Tuned:
    """A kernel of a program, how many are like it, and what its candidates took, in the model's order."""

    kernel: l.Kernel
    count: int
    timings: tuple[Timing, ...]

    @property
    def name(self) -> str:
        """What the kernel is called, without the marks of a canonical form."""
        return plain(self.kernel.name)

    @property
    def first(self) -> float:
        """Microseconds of the first candidate that can be built: what runs where nothing is measured."""
        return next((t.us for t in self.timings if t.us is not None), 0.0)

    @property
    def best(self) -> float:
        """Microseconds of the fastest one."""
        return min((t.us for t in self.timings if t.us is not None), default=0.0)


def tune(program: Any, options: Options, device: str, again: bool = False) -> list[Tuned]:
    """Measure the candidates of every kernel of `program` that was not measured before, or of all of them `again`,
    those first that take longest by the model, for about `options.tune` seconds. What was measured is kept after each
    kernel. Nothing is measured on a CPU, or where the option is 0.
    """
    options = replace(resolved(options, device), verbose=0, dump=None, check=False)
    gpu = target(options.target).gpu
    if gpu is None or not options.tune:
        return []
    options = replace(options, fp32=asked()) if options.fp32 == "auto" else options
    machine = Cuda(device, options.target)
    cache = Cache(options.cache_dir, options.cache_limit)
    measured = machine.measured(cache)
    end = time.monotonic() + options.tune
    found = []
    with working("tuning"), Worker(machine.device, options) as worker:
        known = machine.lost(options, cache)
        done = lowering(program, options, tried=known)
        work, made = kernels(done, options, gpu), sources(done)
        for n, (kernel, count) in enumerate(work):
            at(f"tuning {plain(kernel.name)}", n, len(work))
            timings = [] if again else measured.timings(kernel)
            if not timings and time.monotonic() < end:
                timings = _measured(kernel, options, gpu, cache, worker, made.get(kernel))
                measured.keep(kernel, timings)
            found.append(Tuned(kernel, count, tuple(timings)))
    return found


def kernels(done: Lowering, options: Options, gpu: Gpu) -> list[tuple[l.Kernel, int]]:
    """The canonical forms of the kernels that are to have a schedule, how many have each, the longest first by the
    model. Those with a schedule of the user's have theirs.
    """
    theirs = " ".join(options.schedules)
    count = Counter(canonical(s).kernel for s in _steps(done) if f'"{s.name}"' not in theirs)
    return sorted(count.items(), key=lambda item: -item[1] * estimate(item[0], gpu).time)


def sources(done: Lowering) -> dict[l.Kernel, l.Program]:
    """For the canonical form of each kernel that reads what other kernels write, the program that writes it, under the
    names that the form has. Parts of numbers beside random scales are no numbers: a kernel takes its slow way for them.
    """
    writers: dict[l.Buffer, l.Kernel] = {}
    found: dict[l.Kernel, l.Program] = {}
    for step in _steps(done):
        form = canonical(step)
        if form.kernel not in found and (program := _source(step, form.kernel, writers)) is not None:
            found[form.kernel] = program
        writers |= dict.fromkeys(step.writes, step)
    return found


def _source(step: l.Kernel, form: l.Kernel, writers: Mapping[l.Buffer, l.Kernel]) -> l.Program | None:
    """What writes the buffers that `step` reads, called as `form` calls them; None where no kernel does."""
    makers: dict[l.Kernel, None] = {}
    ends: Iterable[l.Kernel] = (step,)
    for _ in range(FAR):
        ends = list(dict.fromkeys(writers[b] for end in ends for b in end.reads if b in writers))
        makers = dict.fromkeys([*ends, *(m for m in makers if m not in ends)])  # those that others read come first
    if not makers:
        return None
    new: dict[Any, Any] = dict(zip(step.reads, form.reads, strict=True))
    steps = [l.Kernel(x.name, x.axes, with_buffers(x, new)) for x in makers]
    written = {b for x in steps for b in x.writes}
    inputs = dict.fromkeys(b for x in steps for b in x.reads if b not in written)
    return l.Program("source", tuple(inputs), tuple(steps), tuple(b for b in form.reads if b in written))


def _steps(done: Lowering) -> list[l.Kernel]:
    """The kernels that get schedules."""
    upper = [p for stage, p, _ in done.stages if stage.dst == "loop"]
    return [s for s in (upper[-1] if upper else done.loop).steps if isinstance(s, l.Kernel)]


def _measured(
    kernel: l.Kernel, options: Options, gpu: Gpu, cache: Cache, worker: Worker, source: l.Program | None = None
) -> list[Timing]:
    """What the candidates of a kernel took, of what `source` writes. One that cannot be built, is wrong, hangs or beats
    the roofline is out.
    """
    ways = list(_ways(kernel, options, gpu))
    entries = [emit_all(derived, gpu.arch) for _, _, derived in ways]
    made = compile_each([s for _, _, sources in entries for s in sources], gpu.arch, cache)
    why = [
        next(filter(None, (made[s].facts.problem(options.spills) for s in sources)), "") for _, _, sources in entries
    ]
    built = [n for n, reason in enumerate(why) if not reason]
    least = 0.95e-3 * estimate(kernel, gpu).least
    us: dict[int, float | None] = {}
    made_by = show(source) if source is not None else ""
    found = worker.measure([show(ways[n][1]) for n in built], EACH, made_by)
    for n, (reason, taken) in zip(built, found, strict=True):
        why[n], us[n] = reason, taken
        if taken is not None and taken < least:
            why[n], us[n] = f"{taken:.1f} us beat the roofline of {least:.1f} us", None
    return [Timing(n, ways[n][0].text, us.get(n), why[n]) for n in range(len(ways))]


def _ways(kernel: l.Kernel, options: Options, gpu: Gpu) -> Iterator[tuple[Candidate, tile.Program, k.Program]]:
    """The first candidates that can be derived, each as a program of its own. The plainest is left out, which is there
    for what nothing else fits.
    """
    seen: set[str] = set()
    for candidate in candidates(kernel, gpu, {}):
        if len(seen) == MOST:
            return
        if candidate.text in seen or candidate.kernels[0][2] == "plain":
            continue
        alone = _alone(kernel, candidate)
        try:
            derived = stages(alone, replace(options, fp32="exact", schedules=()), Log(), GPU_ONLY)[-1][1]
        except (UserError, Limitation):
            continue
        seen.add(candidate.text)
        yield candidate, alone, derived


def _alone(kernel: l.Kernel, candidate: Candidate) -> tile.Program:
    """A candidate as a program that computes what the kernel does."""
    steps: Sequence[l.Kernel] = [x for x, *_ in candidate.kernels]
    written = {b for step in steps for b in step.writes}
    inputs = tuple(b for b in dict.fromkeys(b for step in steps for b in step.reads) if b not in written)
    schedules = tuple((n, chosen) for n, (_, chosen, *_) in enumerate(candidate.kernels))
    return tile.Program(l.Program("candidate", inputs, tuple(steps), kernel.writes), schedules)
