"""Compiling a program for this machine, and calling it."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from operator import is_, methodcaller, or_
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrazzo.collector import paused
from terrazzo.errors import CompilerBug, UserError
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.in_place import pairs, updates
from terrazzo.ir.program import Program
from terrazzo.ir.text import show
from terrazzo.options import Options
from terrazzo.progress import working
from terrazzo.reproduce import failing, reproducible
from terrazzo.rewrite.rule import Event, Log
from terrazzo.rules.loop.memory.frozen import split
from terrazzo.rules.loop_to_tile.experience import Experience
from terrazzo.rules.torch_to_tensor.library import chosen
from terrazzo.run.cache import Cache, digest
from terrazzo.run.compiler import find_compiler
from terrazzo.run.cpu import Cpu
from terrazzo.run.cuda import Cuda, architecture
from terrazzo.run.frame import SINGLY, Frame
from terrazzo.run.interpreted import interpreted
from terrazzo.run.misfit import misfit
from terrazzo.run.nvrtc import abandoned_on_error
from terrazzo.run.once import Once
from terrazzo.run.plan import Fallback, Plan, Step, make, slots_in
from terrazzo.run.switched import Switched, convolutions_in_tf32
from terrazzo.run.tensors import ALIGNED, Expected, alike
from terrazzo.run.updated import Updated
from terrazzo.targets import target

if TYPE_CHECKING:
    from terrazzo.pipelines import Lowering


@dataclass
class Compiled:
    """A program bound to its weights, ready to be called with its varying inputs, in order.

    Calls are re-entrant: each takes a frame (temporaries and prepared arguments) from the pool of its queue of work
    (PyTorch's stream). One that is captured as part of a graph has a frame of its own, whose temporaries lie in the
    memory of that graph, as PyTorch's would: it may be replayed on any stream, and when the program is gone. `once`
    computes what depends on frozen inputs alone, which `plan` takes as further inputs. `program`, `log` and `sources`
    are there when this process compiled the program, and empty when it came from the cache.
    """

    plan: Plan
    machine: Cpu | Cuda
    functions: list[Any]
    bound: dict[int, Any]
    as_graph: bool | None = None
    once: Once | None = None
    program: Any = None
    log: Log = field(default_factory=Log)
    sources: list[tuple[str, str]] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    frames: dict[int, list[Frame]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        made = self.once.results if self.once else ()
        self.varying = [k for k in self.plan.inputs if k not in self.bound and k not in made]
        self.expected = [Expected(self.plan.slots[k], self.machine.device) for k in self.varying]
        self.alike: Callable[..., bool] | None = None  # whether tensors are as those were that were right
        self.branched = self.plan.branches > 1
        self.updated = Updated(self.plan)
        results = self.updated.results
        self.at_once = isinstance(self.machine, Cpu)  # there are no streams and no devices to choose
        self.apart = len({*results} - {*self.plan.inputs}) == len(results)

    def rebound(self, bound: Mapping[str, Any]) -> Compiled:
        """The program with other weights; machine code and log are shared."""
        once = self.once.again() if self.once else None
        return replace(self, bound=_weights(self.plan, self.machine, bound), once=once, frames={})

    @property
    def fallbacks(self) -> list[Fallback]:
        """The ops PyTorch runs, each once."""
        plans = [self.once.compiled.plan, self.plan] if self.once else [self.plan]
        calls = ((s, plan) for plan in plans for s in plan.steps if not s.key)
        return list(dict.fromkeys(Fallback(s.name, s.source, _chosen(s, plan)) for s, plan in calls))

    @property
    def kernels(self) -> list[tuple[str, str]]:
        """(name, C++ source) of the kernels."""
        return self.sources

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """The results for these tensors, of which some may get new values. A tensor of another shape, type, layout or
        device is a UserError that names it.
        """
        return self._call(self._checked(inputs), self._changed(inputs) if self.plan.updated else {})

    def consume(self, inputs: list[Any]) -> list[Any]:
        """The same, and the list is emptied: what only it held goes as soon as the program is through with it."""
        tensors, changed = self._checked(inputs), self._changed(inputs) if self.plan.updated else {}
        inputs.clear()
        return self._call(tensors, changed)

    def _checked(self, inputs: Sequence[Any]) -> dict[int, Any]:
        """The tensors of a call by their slots."""
        if len(inputs) != len(self.varying):
            raise UserError(f"the program takes {len(self.varying)} tensors, got {len(inputs)}")
        tensors = dict(self.bound)
        if self.alike and self.alike(*inputs) and (self.at_once or _aligned(inputs)):
            tensors.update(zip(self.varying, inputs, strict=True))
            return tensors
        found = [expected.check(given) for expected, given in zip(self.expected, inputs, strict=True)]
        if all(map(is_, found, inputs)):
            self.alike = alike(found)
        tensors.update(zip(self.varying, found, strict=True))
        return tensors

    def _changed(self, inputs: Sequence[Any]) -> dict[int, Any]:
        """The tensors that the call changes in place, by their slots, as they were given."""
        given = dict(zip(self.varying, inputs, strict=True)) | self.bound
        return {k: given[k] for k in self.plan.updated}

    def _call(self, tensors: dict[int, Any], changed: Mapping[int, Any]) -> list[Any]:
        if self.at_once and self.once is None and not changed:
            return self._run_all(tensors)
        with self.machine.current():
            if self.once is not None:
                tensors |= self.once(tensors)
            if not changed:
                return self._run_all(tensors)
            for k in self.updated.shared(tensors):
                tensors[k] = Expected(self.plan.slots[k], self.machine.device).holding(tensors[k].detach())
            used = {k: tensors[k] for k in changed}
            results = self._run_all(tensors)
            self.updated.finish(changed, used, tensors)
            return results

    def _run_all(self, tensors: dict[int, Any]) -> list[Any]:
        queue = 0
        if not self.at_once:
            self.machine.before()
            queue = self.machine.queue()
        captured = not self.at_once and self.machine.capturing()
        beside = self.branched and captured
        pool = [] if captured else self.frames.setdefault(queue, [])
        try:
            frame = pool.pop()
        except IndexError:
            frame = self._frame(captured, beside)
        frame.given(tensors)
        try:
            with _no_gradients() if frame.calls else _NOTHING:
                if beside:
                    self._run_beside(frame, tensors)
                else:
                    self._run(frame, tensors, queue)
        finally:
            pool.append(frame)
        if self.apart:
            return list(map(tensors.__getitem__, self.updated.results))
        taken: set[int] = set(self.plan.inputs)  # a result is always a tensor of its own, as it is in eager
        out = []
        for k in self.updated.results:
            out.append(tensors[k].clone() if k in taken else tensors[k])
            taken.add(k)
        return out

    def _frame(self, captured: bool, beside: bool) -> Frame:
        """What a call works in. A graph of ours cannot be made while another is `captured`, which takes the launches
        singly, those of branches `beside` each other.
        """
        single = captured or self.machine.launches_singly or self.as_graph is False
        singly = math.inf if single else 0 if self.as_graph else SINGLY
        branches = beside or (bool(self.as_graph) and not single)
        return Frame(self.plan, self.machine, self.functions, self.bound.keys(), branches, singly)

    def _run(self, frame: Frame, tensors: dict[int, Any], queue: int) -> None:
        for work in frame.begin():
            for made in work.begins:
                tensor = tensors[made.slot] = made.make() if made.onto is None else tensors[made.onto]
                if made.places:
                    begin = tensor.data_ptr()
                    for addresses, position, offset in made.places:
                        addresses[position] = begin + offset
            if work.launch is not None:
                work.launch(queue)
            else:
                frame.calls[work.number](tensors)
            for k in work.ends:
                del tensors[k]

    def _run_beside(self, frame: Frame, tensors: dict[int, Any]) -> None:
        """The same where a graph is captured, with a stream for every branch. Results are there from the start, and
        nothing goes before the end: PyTorch hands memory on as if the current stream were the only one.
        """
        made = {x.slot: x.make() for work in frame.single for x in work.begins}
        tensors.update(made)
        frame.point(made)
        frame.streams.begin()
        for work in frame.single:
            queue = frame.streams.before(work.number)
            if work.launch is not None:
                work.launch(queue, frame.streams.alone(work.number))
            else:
                frame.calls[work.number](tensors)
            frame.streams.after(work.number)
        frame.streams.end()
        for k in {k for work in frame.single for k in work.ends}:
            del tensors[k]


_NOTHING = nullcontext()


def _no_gradients() -> Any:
    """Within this, PyTorch notes nothing for gradients."""
    import torch

    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def _aligned(tensors: Sequence[Any]) -> bool:
    """Whether kernels on a GPU may read all of them as wide as strides allow."""
    return not reduce(or_, map(_address, tensors), 0) % ALIGNED


_address = methodcaller("data_ptr")


def _chosen(step: Step, plan: Plan) -> bool:
    """Whether a call is one of an op that our kernels could compute too."""
    tensors = slots_in(step.args)
    return bool(tensors) and chosen(step.name, plan.slots[tensors[0]].dtype)


@paused()
def compile_program(
    program: Program | l.Program | tile.Program, bound: Mapping[str, Any], options: Options, device: str | None = None
) -> Any:
    """`program` (in any IR) for a machine, bound to its weights: from the cache if it was compiled before.

    The target "auto" is where the tensors are: `device` ("cpu", "cuda:1") says so, or else the bound tensors do. Where
    there is no C++ compiler the interpreter runs, and says so once.
    """
    whole: Any = getattr(program, "loop", program)
    for option in ("frozen", "updated"):
        if strange := sorted({*getattr(options, option)} - {b.name for b in whole.inputs}):
            raise UserError(f"option {option}: {program.name} has no input {strange[0]!r}")
    if why := _not_updated(whole, options.updated):
        raise UserError(f"option updated: {why}")
    where = device or next((str(t.device) for t in bound.values()), "cpu")
    options = resolved(options, where)
    if options.fp32 == "auto" and target(options.target).gpu:
        return Switched(lambda way: compile_program(program, bound, replace(options, fp32=way), device))
    if options.target == "interpreter":
        return interpreted(_lowering(program, options), bound, options.updated)
    cache = Cache(options.cache_dir, options.cache_limit)
    machine: Cpu | Cuda
    if options.target == "cpu":
        compiler = find_compiler(options.compiler, cache)
        if compiler is None:
            _say_once(
                "no C++ compiler was found, so the interpreter runs instead, which is slow; "
                "install one, for example with `apt install g++` or `pip install ziglang`"
            )
            return interpreted(_lowering(program, options), bound, options.updated)
        machine = Cpu(compiler, options.threads)
    else:
        machine = Cuda(where if where.startswith("cuda") else "cuda:0", options.target)
    key = plan_key(program, options, machine.key(cache))
    found = _load(key, cache, machine, program, bound, options)
    if isinstance(found, Compiled):
        return found
    with working("compiling"):
        done = _build(key, cache, machine, program, bound, options)
    if found:
        done.log.add(Event("cache", "plan", program.name, False, f"{found}; it is made again"))
    return done


def resolved(options: Options, device: str) -> Options:
    """The options with a target in place of "auto": that of the device; and for a GPU what PyTorch's switch says of
    convolutions.
    """
    if options.target == "auto":
        import torch

        gpu = device.startswith("cuda")
        options = replace(options, target=architecture(torch.device(device).index or 0) if gpu else "cpu")
    return replace(options, tf32=convolutions_in_tf32()) if target(options.target).gpu else options


def _load(
    key: str, cache: Cache, machine: Cpu | Cuda, program: Any, bound: Mapping[str, Any], options: Options
) -> Compiled | str:
    """The program from the cache, if all of it is there and sound; else what is wrong with it, or nothing."""
    path = cache.get(key, ".plan")
    if path is None or options.verbose or options.dump or options.check:
        return ""
    first = cache.get(key, ".once")
    try:
        plan, once = Plan.from_json(path.read_bytes()), Plan.from_json(first.read_bytes()) if first else None
    except (ValueError, OSError) as error:
        return f"the plan in the cache cannot be read ({error})"
    if [plan.slots[k].name for k in plan.updated] != [*options.updated]:
        return "the plan in the cache changes other inputs"
    if why := misfit(plan, program, once):
        return f"the plan in the cache is of another program: {why}"
    steps = (*once.steps, *plan.steps) if once else plan.steps
    found = {k: cache.get(k, machine.suffix) for k in {s.key for s in steps if s.key}}
    paths = {k: p for k, p in found.items() if p}
    if len(paths) < len(found):
        return "a kernel of the plan in the cache is missing"
    for one in (once, plan) if once else (plan,):
        if why := machine.misfit(one, paths):
            return f"the plan in the cache is of other kernels: {why}"
    return _bind(plan, once, paths, machine, bound, options)


def _build(
    key: str, cache: Cache, machine: Cpu | Cuda, program: Any, bound: Mapping[str, Any], options: Options
) -> Compiled:
    tried: Any = machine.lost(options, cache)
    with abandoned_on_error():
        lowering = _lowering(program, options, tried)
    with (
        reproducible(options),
        failing("code generation", lowering.at("tile") or lowering.at("loop") or lowering.source),
    ):
        built = machine.build(lowering, options, cache, tried)
    if options.dump is not None and built.lowering is not lowering:
        from terrazzo.run import dump

        dump.write(options.dump, built.lowering, options)
    first, rest = split(built.program, options.frozen)
    lowered: Any = built.lowering.at("tile") or built.lowering.at("loop")
    terms = getattr(lowered, "loop", lowered)
    taken = pairs(terms.steps, machine.in_place) if terms else {}
    given = updates(terms, options.updated, products=machine.in_place) if terms else {}
    plan = make(rest, built.entries, machine.processors, taken, options.updated, given, not machine.hands_on)
    once = make(first, built.entries, onto=taken) if first else None
    if once:
        cache.put(key, ".once", once.to_json())
    cache.put(key, ".plan", plan.to_json())
    done = _bind(plan, once, built.paths, machine, bound, options)
    done.program, done.log, done.sources = built.program, built.lowering.log, built.sources
    done.timings = {**built.lowering.seconds, **built.seconds}
    if plan.branches > 1:
        reason = f"kernels of few blocks run side by side: {len(plan.steps)} steps in {plan.branches} branches"
        done.log.add(Event("run", "side_by_side", program.name, True, reason))
    return done


def _bind(
    plan: Plan,
    first: Plan | None,
    paths: dict[str, Path],
    machine: Cpu | Cuda,
    bound: Mapping[str, Any],
    options: Options,
) -> Compiled:
    weights = _weights(plan, machine, bound)
    for one in filter(None, (first, plan)):
        for step in one.steps:
            if not step.key and not _chosen(step, one):
                _report(step.name, step.source)
    once = None
    if first:
        own = copy(machine)  # which notes for each plan by itself what its kernels complain of
        number = {plan.slots[k].name: k for k in plan.inputs}
        sources, results = ([number[first.slots[k].name] for k in x] for x in (first.inputs, first.results))
        once = Once(Compiled(first, own, own.load(first, paths), {}), sources, results)
    return Compiled(plan, machine, machine.load(plan, paths), weights, options.graph, once)


def _weights(plan: Plan, machine: Cpu | Cuda, bound: Mapping[str, Any]) -> dict[int, Any]:
    """The bound tensors by their slots."""
    names = {plan.slots[k].name: k for k in plan.inputs}
    weights: dict[int, Any] = {}
    for name, tensor in bound.items():
        if name not in names:
            raise CompilerBug(f"{name} is bound but the program has no such input")
        weights[names[name]] = Expected(plan.slots[names[name]], machine.device).check(
            tensor.detach().to(machine.device)
        )
    return weights


def _not_updated(program: Any, updated: Sequence[str]) -> str:
    """Why a program does not give these inputs new values as its last results; "" if it does."""
    inputs = {x.name: x for x in program.inputs}
    if len(updated) > len(program.results) or len({*updated}) < len(updated):
        return f"{program.name} has {len(program.results)} results, and {len(updated)} inputs are named"
    for name, new in zip(updated, program.results[len(program.results) - len(updated) :], strict=True):
        old = inputs[name].type
        if (new.type.dtype, new.type.shape) != (old.dtype, old.shape):
            return f"{name} is {old}, and its new value {new.type}"
    over = {old.name for s in getattr(program, "steps", ()) for _, old in dict(getattr(s, "over", ())).items()}
    return f"{min(over - {*updated})} is stored over, and not named" if over - {*updated} else ""


def _lowering(program: Any, options: Options, tried: Experience | None = None) -> Lowering:
    """`program` as far down as its target takes it, dumped where that was asked for. `tried` knows which kernels for a
    GPU could not be built, and which were fast.
    """
    from terrazzo.pipelines import lowering
    from terrazzo.run import dump

    done = lowering(program, options, tried=tried)
    if options.dump is not None:
        dump.write(options.dump, done, options)
    return done


def plan_key(program: Any, options: Options, machine: str) -> str:
    """Names the plan of a program for a machine in the cache."""
    o = options
    choices = (o.fuse, o.materialize, o.target, o.schedules, o.spills, o.libraries, o.fp32, o.tf32, o.frozen, o.updated)
    return digest("plan", show(program), repr(choices), machine, own_version())


@lru_cache(maxsize=1)
def own_version() -> str:
    """A digest of Terrazzo's own sources, and of what is shipped with them: whoever changes a rule must not meet plans
    made by the old one.
    """
    root = Path(__file__).parent.parent
    total = hashlib.sha256()
    for path in sorted(p for kind in ("py", "h", "cuh", "json") for p in root.rglob(f"*.{kind}")):
        total.update(path.read_bytes())
    return total.hexdigest()


_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        warnings.warn(f"terrazzo: {message}", RuntimeWarning, stacklevel=4)


def _report(op: str, source: str) -> None:
    _say_once(f"{op}{f' ({source})' if source else ''} is not compiled; PyTorch runs it")
