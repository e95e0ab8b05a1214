"""Every pipeline, in order, on one screen. Each pass is verified, and kernels for a GPU are checked, always."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, TypeVar

from terrazzo.collector import paused
from terrazzo.errors import CompilerBug, UserError
from terrazzo.hw.gpu import GPUS, Gpu
from terrazzo.interp.kernel.sample import check_blocks
from terrazzo.ir.canonical import canonical, once_per_form, twin
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.dialects.torch import Aten, Get
from terrazzo.ir.parse_plan import parse_pinned
from terrazzo.ir.placeless import placeless
from terrazzo.ir.plan import Plan
from terrazzo.ir.program import Input, Program
from terrazzo.ir.schedule import Schedule
from terrazzo.ir.show import show
from terrazzo.ir.sites import product
from terrazzo.ir.verify import problem, verify
from terrazzo.options import Options
from terrazzo.progress import at
from terrazzo.reproduce import failing, reproducible
from terrazzo.rewrite.rule import Log
from terrazzo.rules import torch_to_tensor
from terrazzo.rules.loop.attention.blocks import blocks_seen
from terrazzo.rules.loop.attention.gradients import gradients
from terrazzo.rules.loop.attention.online import online
from terrazzo.rules.loop.attention.pages import look_up_on_the_way
from terrazzo.rules.loop.attention.rounds import sums_inside
from terrazzo.rules.loop.folding.fold import fold
from terrazzo.rules.loop.fusion.again import products_again
from terrazzo.rules.loop.fusion.beside import chains_beside
from terrazzo.rules.loop.fusion.columns_reduced import columns_reduced
from terrazzo.rules.loop.fusion.fuse import fuse, seen_through
from terrazzo.rules.loop.fusion.joined import products_joined
from terrazzo.rules.loop.fusion.multiplied_once import multiply_once
from terrazzo.rules.loop.fusion.on_the_way import factors_made
from terrazzo.rules.loop.fusion.one_kernel import one_kernel
from terrazzo.rules.loop.fusion.read_in_parts import read_in_parts
from terrazzo.rules.loop.fusion.reduced_already import reduced_already
from terrazzo.rules.loop.fusion.results_after import results_after
from terrazzo.rules.loop.layout.across import turned_after
from terrazzo.rules.loop.layout.channels import channels_last
from terrazzo.rules.loop.layout.convolutions import convolutions
from terrazzo.rules.loop.layout.dimensions import dimensions_of_products
from terrazzo.rules.loop.layout.laid_apart import laid_apart
from terrazzo.rules.loop.layout.layout import store_as_read
from terrazzo.rules.loop.layout.lookups import looked_up_first
from terrazzo.rules.loop.layout.pixels import pixels_together
from terrazzo.rules.loop.layout.placed import along_results, copied_after
from terrazzo.rules.loop.layout.turned import store_turned
from terrazzo.rules.loop.layout.views import pass_views
from terrazzo.rules.loop.memory.beside import read_beside
from terrazzo.rules.loop.memory.combined import combine_sooner
from terrazzo.rules.loop.memory.divided import divide
from terrazzo.rules.loop.memory.frozen import constants, stored_once, varying
from terrazzo.rules.loop.memory.gathered import rows_gathered
from terrazzo.rules.loop.memory.in_windows import in_windows
from terrazzo.rules.loop.memory.lifetimes import in_order, kernels_in_order
from terrazzo.rules.loop.memory.places_read import places_read
from terrazzo.rules.loop.memory.remake import made_again, remake
from terrazzo.rules.loop.memory.renewed import new_values, renew, renewed
from terrazzo.rules.loop.precision.lean_parts import lean_parts
from terrazzo.rules.loop.precision.narrow import narrow
from terrazzo.rules.loop.precision.parts import into_parts, parts_of
from terrazzo.rules.loop.precision.places import round_differences, round_places
from terrazzo.rules.loop.precision.relax import relax
from terrazzo.rules.loop.precision.rounded import rounded_weights
from terrazzo.rules.loop.precision.wide_sums import wide_sums
from terrazzo.rules.loop_to_tile.chains import chains
from terrazzo.rules.loop_to_tile.chains.chain import chain
from terrazzo.rules.loop_to_tile.choose import schedule
from terrazzo.rules.loop_to_tile.copies import copies_in_windows, makers_divided
from terrazzo.rules.loop_to_tile.estimate import expected, expected_below
from terrazzo.rules.loop_to_tile.experience import NONE, Experience, Told
from terrazzo.rules.loop_to_tile.products.precision import gain, no_gain
from terrazzo.rules.loop_to_tile.reductions import reduced
from terrazzo.rules.loop_to_tile.walked.crossed import copying
from terrazzo.rules.tensor_to_loop.lift import lift
from terrazzo.rules.tile.complete import program as complete
from terrazzo.rules.tile_to_kernel.lower import program as derive
from terrazzo.rules.torch_to_tensor.families import is_convolution
from terrazzo.rules.torch_to_tensor.in_tf32 import Rough
from terrazzo.rules.torch_to_tensor.library import Libraries
from terrazzo.rules.torch_to_tensor.loops import parts_stacked, products_together, stacks_whole
from terrazzo.rules.torch_to_tensor.lower import lower as to_tensor
from terrazzo.rules.torch_to_tensor.on_a_processor import on_a_processor
from terrazzo.rules.torch_to_tensor.pairs import complex_as_pairs
from terrazzo.rules.torch_to_tensor.placed import row_by_row
from terrazzo.rules.torch_to_tensor.scatters_summed import scatters_summed
from terrazzo.rules.torch_to_tensor.together import sums_together
from terrazzo.targets import target
from terrazzo.targets.cpu import chained
from terrazzo.targets.cuda.check import check

T = TypeVar("T")
Run = Callable[[Any, Log, Options, Experience], Any]
PARTS = {"auto": 3, "split": 3, "tf32": 2, "bf16": 1}
"""As how many parts in bfloat16 numbers in float32 are multiplied, by `fp32`, which is "auto" where nobody said it."""


def _texts(options: Options) -> Callable[[Any], str] | None:
    return show if options.verbose > 1 else None


def _together(p: Program, log: Log, options: Options) -> Program:
    """Complex numbers as pairs; and what a loop does step by step, at once, where a GPU moves tensors so cheaply."""
    p = complex_as_pairs(p, log)
    goal = target(options.target)
    if not goal.gpu or not options.fuse:
        return p
    sums = sums_together(parts_stacked(scatters_summed(p, log), log), log, goal.rates)
    return stacks_whole(products_together(sums, log, goal.rates), log)


def _tensor(p: Program, log: Log, options: Options, tried: Experience) -> Program:
    """Tensor IR, whose results lie as Torch IR says."""
    plain, strides, given = row_by_row(p)
    together, rough = _together(plain, log, options), Rough(options.tf32, tried.rough)
    ours, called = rough if options.fp32 in PARTS and target(options.target).gpu else None, libraries(options, rough)
    return to_tensor(together, torch_to_tensor.RULES, log, _texts(options), called, ours, strides, given)


def _fused(p: l.Program, log: Log, options: Options) -> l.Program:
    """Kernels fused, but for what is named, and what is computed once."""
    kept, rates = (*options.materialize, *stored_once(p, options.frozen, log)), target(options.target).rates
    renews = partial(renewed, wanted=new_values(p, options.updated))
    fused = reduced_already(fuse(p, log, rates, kept, _texts(options), renews=renews), log, rates)
    return rows_gathered(fused, log, rates, kept)


def _as_read(p: l.Program, log: Log, options: Options) -> l.Program:
    """Buffers as those who read them have them: by the dimensions that products go along, and images channels last,
    where tensor cores read them so; and kernels along what they store.
    """
    boxes = bool((gpu := target(options.target).gpu) and gpu.warpgroups)
    p = narrow(p, log)
    p = store_as_read(dimensions_of_products(pixels_together(p, log) if boxes else p, log, copied=boxes), log)
    return along_results(channels_last(p, log, move_results=boxes) if boxes or not gpu else p, log)


def _gradients(p: l.Program, log: Log, options: Options) -> l.Program:
    """Gradients of softmaxes, found where views are seen through."""
    rates = target(options.target).rates
    views = partial(seen_through, rates=rates, materialize=options.materialize)
    return gradients(p, log, rates, views, options.materialize, 4 in chained_sizes(options))


def chained_sizes(options: Options) -> tuple[int, ...]:
    """Of how many bytes numbers may be that chains multiply: of four, where they multiply parts of float32."""
    gpu = target(options.target).gpu
    return (2, 4) if gpu and "wgmma" in gpu.features and options.fp32 in PARTS else (2,)


def _chained(p: l.Program, log: Log, options: Options, tried: Experience) -> l.Program:
    """Softmaxes, and products that are only multiplied, in the kernels that read them. Other weights are rounded."""
    gpu, sizes = machine(options), chained_sizes(options)
    refused = _refusal(options, tried)

    def price(steps: Sequence[l.Kernel], known: Experience = tried) -> float:
        """What kernels take, those that multiply in float32 as products of parts where these are faster."""
        if 4 not in sizes:
            return expected(steps, gpu)
        alone = l.Program("alone", tuple(b for s in steps for b in s.reads), tuple(steps), steps[-1].writes)
        return expected(in_parts(alone, Log(), options, known).steps, gpu)

    def least(steps: Sequence[l.Kernel]) -> float:
        """What chains take where nothing is against them, in parts or not; of other kernels nothing is said. Infinitely
        long where one has no room anywhere, which is known soon.
        """
        ways = [(s, parts_of(s, PARTS[options.fp32])[-1]) if 4 in sizes else (s,) for s in steps if not product(s)]
        if any(chains.nowhere(way[-1], gpu) for way in ways):
            return math.inf
        return sum(min(expected([x], gpu) for x in way) for way in ways)

    def once(what: Hashable, find: Callable[..., T]) -> T:
        ask = lambda known: find(partial(price, known=known), least, _refusal(options, known))  # noqa: E731
        return tried.once(("again", what), ask)

    placed = turned_after(convolutions(p, log, price), log, price, partial(copying, gpu=gpu))
    softmaxes = online(placed, log, _refusal(options, tried, used=True), sizes, price)
    made = products_again(results_after(softmaxes, log, price), log, once, options.materialize, sizes)
    busy = lambda steps: sum(chains.fastest(s, gpu) or price([s]) for s in steps)  # noqa: E731
    made = look_up_on_the_way(sums_inside(made, log, busy, refused), log, price, refused)
    made = products_joined(chains_beside(made, log, price, refused), log, price, options.materialize)
    made = blocks_seen(read_in_parts(made, log, price, options.materialize), log, price)
    made = columns_reduced(made, log, price, partial(reduced.refusal, gpu=gpu), options.materialize)
    made = store_turned(factors_made(made, log, price, options.materialize), log, price)
    made = copied_after(laid_apart(made, log, price), log, lambda kernel: getattr(chain(kernel), "columns", None))
    return rounded_weights(made, log, target(options.target).rates.matrix)


def _sooner(p: l.Program, log: Log, o: Options) -> l.Program:
    """Repeated products are stored once, and those that wait to be added up combined as soon as they may, before there
    are parts: those of one product's factors wait for no others, and what multiplies several is run in windows as one.
    """
    return combine_sooner(multiply_once(p, log, partial(expected, gpu=machine(o))), log, target(o.target).rates)


def _lean(p: l.Program, log: Log, options: Options) -> l.Program:
    """Less of what waits in memory, in one way after the other. What is computed once is kept whole."""
    rates, by_model = target(options.target).rates, partial(expected, gpu=machine(options))
    combined = combine_sooner(read_beside(p, log, rates, options.materialize), log, rates)
    divided = divide(combined, log, rates)
    combined = divided if divided is combined else combine_sooner(in_order(divided, log, "remake"), log, rates)
    made = remake(combined, log, rates, by_model)
    in_some = made if options.frozen else in_windows(made, log, by_model)
    return made if in_some is made else made_again(in_some, log, rates, by_model)


def _refusal(options: Options, tried: Experience, used: bool = False) -> Callable[[l.Kernel], str]:
    """Why a chain of products is not worth one kernel, or nothing: found once for all that differ in names only. Where
    it multiplies in float32, that is a chain of parts. It is `used` wherever nothing is against it.
    """
    gpu, count = machine(options), PARTS[options.fp32] if 4 in chained_sizes(options) else 0

    def why(kernel: l.Kernel) -> str:
        def found(known: Experience) -> str:
            made = parts_of(kernel, count)[-1] if count else kernel
            return chains.refusal(made, gpu, known if used else known.lost)

        return tried.once(("chain", used, count, kernel), found)

    return once_per_form(why)


def _scheduled(p: l.Program, log: Log, options: Options, tried: Experience) -> tile.Program:
    """Every kernel with a schedule; those that a candidate made of one are steps like others, and what is made for them
    may be made by several, too. What they store that was not stored before, such as patches of images, is there in
    windows where much memory is in use.
    """
    gpu, pins = machine(options), pinned(options)[0]
    given = new_values(p, options.updated)
    done = kernels_in_order(schedule(p, gpu, log, pins, _texts(options), tried), log, SCHEDULE, given)
    if options.fuse and not options.frozen and not pins:
        again = lambda p, log: schedule(p, gpu, log, None, _texts(options), tried)  # noqa: E731
        done = makers_divided(done, log, target(options.target).rates, again)
        done = copies_in_windows(p, done, log, partial(expected, gpu=gpu), again)
        done = kernels_in_order(done, log, SCHEDULE, given)
    return done


@dataclass(frozen=True)
class Pass:
    """One step: what it is called, the IR it takes and gives, one line of why, and how it runs."""

    name: str
    src: str
    dst: str
    why: str
    run: Run


SCHEDULE = "schedule"
PASSES = (
    Pass("torch_to_tensor", "torch", "tensor", "each ATen op becomes a composition of primitives, or an opaque call",
         _tensor),
    Pass("tensor_to_loop", "tensor", "loop", "each primitive becomes a kernel that stores its term",
         lambda p, log, o, tried: lift(p, log=log)),
    Pass("gradients", "loop", "loop", "the gradient of a softmax computes its weights again, and no sums of their rows",
         lambda p, log, o, tried: _gradients(p, log, o) if o.fuse else p),
    Pass("fuse", "loop", "loop", "terms replace the buffers they were stored in, where that pays",
         lambda p, log, o, tried: fold(_fused(p, log, o), log) if o.fuse else p),
    Pass("lookups", "loop", "loop", "what data says where to look up is stored first where products are made of it",
         lambda p, log, o, tried: looked_up_first(p, log, target(o.target).rates) if o.fuse else p),
    Pass("store_as_read", "loop", "loop", "buffers that are only read transposed, reshaped or converted are stored so",
         lambda p, log, o, tried: _as_read(p, log, o)),
    Pass("pass_views", "loop", "loop", "calls of PyTorch are given views of memory where they would be given copies",
         lambda p, log, o, tried: pass_views(p, log)),
    Pass("relax", "loop", "loop", "what is rounded to 16 bits at once is computed no more exactly than that asks for",
         lambda p, log, o, tried: relax(p, log)),
    Pass("places", "loop", "loop", "products that are the same in every kernel are rounded, whatever is added to them",
         lambda p, log, o, tried: round_differences(round_places(p, log), log)),
    Pass("wide_sums", "loop", "loop", "a processor adds up float32 in float64, and rounds once",
         lambda p, log, o, tried: p if target(o.target).gpu else wide_sums(p, log)),
    Pass("order", "loop", "loop", "steps come in the order in which least memory is in use at a time",
         lambda p, log, o, tried: in_order(p, log, "order", target(o.target).gpu is not None)),
    Pass("one_kernel", "loop", "loop", "on a processor two products with what lies between them are one kernel",
         lambda p, log, o, tried: p if target(o.target).gpu or not o.fuse else one_kernel(p, log, chained.refusal)),
    Pass("online", "loop", "loop", "what lies between two products becomes part of the second, where that pays",
         lambda p, log, o, tried: _chained(p, log, o, tried) if o.fuse else p),
    Pass("parts", "loop", "loop", "products in float32 become products of 16-bit parts, where that is faster",
         lambda p, log, o, tried: in_parts(_sooner(p, log, o) if o.fuse else p, log, o, tried)),
    Pass("remake", "loop", "loop", "what waits long is combined with others sooner, or made again where it is needed",
         lambda p, log, o, tried: _lean(p, log, o) if o.fuse else p),
    Pass("windows", "loop", "loop", "kernels that differ in the places where they read are one, which reads windows",
         lambda p, log, o, tried: places_read(p, log, constants(p, o.frozen))),
    Pass("renew", "loop", "loop", "new values of inputs come after the old ones were read, and store what changes only",
         lambda p, log, o, tried: renew(p, o.updated, log, target(o.target).gpu is not None)),
    Pass(SCHEDULE, "loop", "tile",
         "every kernel gets a schedule: the user's, or the best by the model of the machine",
         _scheduled),
    Pass("plan", "tile", "tile", "every schedule is completed: who walks which tiles, brings what, multiplies on what",
         lambda p, log, o, tried: complete(p, machine(o), log, pinned(o)[1], o.verbose > 1)),
    Pass("derive", "tile", "kernel", "what a plan says is written down: places, copies, barriers, for each agent",
         lambda p, log, o, tried: derive(p, machine(o), log, _texts(o))),
)  # fmt: skip

LOWER = tuple(p.name for p in PASSES)
MEMORY = ("order", "remake", "windows")
"""The passes that only lower what is in use at a time."""
GPU_ONLY = ("online", "parts", "remake", SCHEDULE, "plan", "derive")

for _a, _b in pairwise(PASSES):
    assert _a.dst == _b.src, f"pass {_b.name} takes {_b.src} but follows one that gives {_a.dst}"


def dialect(program: Any) -> str:
    """Which IR a program is in."""
    return "loop" if isinstance(program, l.Program) else str(program.dialect)


def machine(options: Options) -> Gpu:
    """The GPU that is compiled for."""
    if (found := target(options.target).gpu) is None:
        raise UserError(f"the target {options.target} is no GPU, so kernels have no schedules")
    return found


def libraries(options: Options, rough: Rough) -> Libraries | None:
    """What decides which ops of PyTorch are called, where any may be; those that are `rough` it computes in TF32."""
    if options.libraries != "auto":
        return None
    in_tf32 = lambda op: any(rough(op)) if is_convolution(op) else options.fp32 in ("tf32", "bf16")  # noqa: E731
    ours = lambda op, enough: _alone(options.target, options.fp32, rough(op), op, enough)  # noqa: E731
    return Libraries(target(options.target).gpu, ours, in_tf32, on_a_processor, rough.layouts)


@lru_cache(maxsize=4096)
def _alone(name: str, fp32: str, rough: tuple[bool, ...], op: Aten, enough: float = 0.0) -> tuple[float, str]:
    """What our kernels for an op by itself take on a target, by the model, in nanoseconds; infinitely long where it is
    called after all. " at most" so long, where that is less than `enough`: there may be better ways to multiply. How
    much memory is in use is for a whole program to say.
    """
    inputs = tuple(dict.fromkeys(x for x in op.children if isinstance(x, Input)))
    several = op.result if isinstance(op.result, tuple) else None
    results = (op,) if several is None else tuple(Get(op, k) for k, kind in enumerate(several) if kind is not None)
    program = Program("torch", "alone", inputs, results, {x: f"result{k}" for k, x in enumerate(results)})
    options, told = Options(target=name, libraries="never", fp32=fp32, tf32=any(rough)), Told(rough)
    upper = tuple(p.name for p in PASSES if p.dst in ("tensor", "loop") and p.name not in MEMORY)
    whole, gpu = stages(program, options, Log(), upper[: upper.index("parts")], told)[-1][1], machine(options)
    if any(isinstance(s, l.Call) for s in whole.steps):
        return math.inf, ""
    some = in_parts(_sooner(whole, Log(), options), Log(), options, NONE, any_way=True)
    if some.steps != whole.steps and (time := expected(some.steps, gpu)) < enough:
        return time, " at most"
    return expected_below(stages(whole, options, Log(), upper[upper.index("parts") :])[-1][1].steps, gpu, enough)


def in_parts(p: l.Program, log: Log, options: Options, tried: Experience, any_way: bool = False) -> l.Program:
    """Products in float32 as the option `fp32` has them: in parts that are made in the way that gains most, or in
    `any_way` that gains.
    """
    if options.fp32 not in PARTS:
        return p
    gpu, judged = machine(options), dict[Any, tuple[float, str]]()
    known = constants(p, options.frozen) if options.frozen else set()

    def gains(old: Sequence[l.Kernel], new: Sequence[l.Kernel], beaten: float) -> tuple[float, str]:
        """What a call gains, or what there is against it, asked once of kernels up to names and places."""
        before, after = (tuple(placeless(x) for x in varying(side, known)) for side in (old, new))
        asked = before, after, beaten
        if asked not in judged:
            judged[asked] = tried.once(("parts", *asked), lambda known: gain(before, after, gpu, known.lost, beaten))
        gained, why = judged[asked]
        return gained, canonical(new[-1]).named(why)

    def made(lean: Collection[l.Kernel], log: Log) -> l.Program:
        return into_parts(p, log, PARTS[options.fp32], gains, partial(no_gain, gpu=gpu), known, lean, any_way)

    return made((), log) if known or any_way else lean_parts(p, log, made, partial(expected, gpu=gpu))


def pinned(options: Options) -> tuple[dict[str, Schedule], dict[str, Plan]]:
    """The schedules the user pinned, by kernel, and the plans of those that have one."""
    found = [pair for text in options.schedules for pair in parse_pinned(text)]
    return {s.kernel: s for s, _ in found}, {plan.kernel: plan for _, plan in found if plan}


def stages(
    program: Any,
    options: Options,
    log: Log,
    names: tuple[str, ...] = LOWER,
    tried: Experience = NONE,
    asked: dict[str, Experience] | None = None,
) -> list[tuple[Pass, Any, float]]:
    """Run the passes `names` that apply from the program's IR on; each with its result and the seconds it took. No
    schedule is chosen of which `tried` says why its kernel could not be built; what each pass `asked` is kept there.
    """
    if why := problem(program):
        raise UserError(f"{program.name} is not valid: {why}")
    if dialect(program) == "kernel":  # the user's own text
        checked(program, target(options.target).gpu or GPUS["sm_90a"], options, UserError)
    names = names if target(options.target).gpu else tuple(n for n in names if n not in GPU_ONLY)
    out: list[tuple[Pass, Any, float]] = []
    for n, p in enumerate(PASSES):
        if p.name in names and p.src == dialect(program):
            at(f"lowering: {p.name}", n, len(PASSES))
            start, known = time.perf_counter(), tried.asking()
            with failing(f"pass {p.name}", program):
                done = p.run(program, log, options, known)
                verify(done, p.name)
            program = done
            if asked is not None:
                asked[p.name] = known
            if p.dst == "kernel":
                checked(program, machine(options), options, CompilerBug)
            out.append((p, program, time.perf_counter() - start))
    return out


def checked(program: k.Program, gpu: Gpu, options: Options, error: type[Exception]) -> None:
    """Raise an error for a kernel that cannot be right, or, where that was asked for, for one of which a sample of
    blocks is wrong.
    """
    check(program, gpu, error)
    kernels = [s for s in program.steps if isinstance(s, k.Kernel)] if options.check else []
    for kernel in dict.fromkeys(map(twin, kernels)):  # each once, whatever its buffers are called
        try:
            check_blocks(kernel)
        except CompilerBug as why:
            raise error(str(why)) from None


@dataclass(frozen=True)
class Lowering:
    """A program on its way down: what it was, every pass with its result and seconds, what happened, and what passes
    asked of kernels that were tried.
    """

    source: Program | l.Program
    stages: list[tuple[Pass, Any, float]]
    log: Log
    asked: dict[str, Experience] = field(default_factory=dict)

    @property
    def loop(self) -> l.Program:
        """Loop IR as it is compiled: the last stage on a CPU, the one with schedules on a GPU."""
        for program in (*(stage[1] for stage in reversed(self.stages)), self.source):
            if isinstance(program, tile.Program):
                return program.loop
            if isinstance(program, l.Program):
                return program
        raise UserError(
            "kernel IR runs on a GPU (--target sm_90a, say), or in the simulator: terrazzo sim, or --interpret"
        )

    def at(self, ir: str) -> Any:
        """The last program that is in this IR, or None."""
        found = [p for p in (self.source, *(stage[1] for stage in self.stages)) if dialect(p) == ir]
        return found[-1] if found else None

    def lifted(self) -> l.Program | None:
        """Loop IR before fusion; None where the input was Loop IR."""
        return next((program for p, program, _ in self.stages if p.name == "tensor_to_loop"), None)

    @property
    def seconds(self) -> dict[str, float]:
        """What each pass took."""
        return {p.name: seconds for p, _, seconds in self.stages}


@paused()
def lowering(program: Any, options: Options, log: Log | None = None, tried: Experience | None = None) -> Lowering:
    """Any program down to fused Loop IR, with all that is between. A CompilerBug says how to see it again."""
    log, asked = log or Log(), dict[str, Experience]()
    with reproducible(options):
        return Lowering(program, stages(program, options, log, tried=tried or NONE, asked=asked), log, asked)


@paused()
def rescheduled(done: Lowering, options: Options, tried: Experience) -> Lowering:
    """The same with schedules chosen anew, now that more kernels are known not to be built. What the log said of the
    old ones is gone. Passes before that, of which none asked for what is said otherwise now, do not run again.
    """
    log, asked = done.log, dict(done.asked)
    again: tuple[str, ...] = GPU_ONLY
    while again[0] != SCHEDULE and (again[0] not in asked or asked[again[0]].agrees(tried)):
        again = again[1:]
    log.forget(again)
    kept = [stage for stage in done.stages if stage[0].name not in again]
    with reproducible(options):
        below = stages(kept[-1][1] if kept else done.source, options, log, again, tried, asked)
        return Lowering(done.source, [*kept, *below], log, asked)


def lower(program: Any, options: Options, log: Log) -> l.Program:
    """Any program down to fused Loop IR."""
    return Lowering(program, stages(program, options, log), log).loop
