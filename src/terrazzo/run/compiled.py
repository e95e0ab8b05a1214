"""Compiling a program for this machine, and calling it."""

from __future__ import annotations

import ctypes
import hashlib
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrazzo.errors import CompilerBug, UserError
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.program import Program
from terrazzo.ir.text import show
from terrazzo.ir.torch_types import operator, to_torch, to_torch_dtype
from terrazzo.ir.types import DTYPES
from terrazzo.options import Options
from terrazzo.rewrite.rule import Log
from terrazzo.run.cache import Cache, digest
from terrazzo.run.compiler import Compiler, compile_all, find_compiler
from terrazzo.run.plan import Plan, Slot, decode, make, slots_in

if TYPE_CHECKING:
    from terrazzo.pipelines import Lowering


@dataclass(frozen=True)
class Fallback:
    """An op that PyTorch runs for us."""

    op: str
    source: str


@dataclass
class Compiled:
    """A program bound to its weights, ready to be called with its varying inputs, in order.

    Calls are re-entrant: each takes a frame (temporaries and prepared arguments) from a pool. `loop`, `log` and `sources` are there
    when this process compiled the program, and empty when it came from the cache.
    """

    plan: Plan
    functions: list[Any]
    bound: dict[int, Any]
    threads: int
    loop: l.Program | None = None
    log: Log = field(default_factory=Log)
    sources: list[tuple[str, str]] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    frames: list[_Frame] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.varying = [k for k in self.plan.inputs if k not in self.bound]
        self.expected = [_Expected(self.plan.slots[k]) for k in self.varying]

    @property
    def fallbacks(self) -> list[Fallback]:
        """The ops PyTorch runs, each once."""
        return list(dict.fromkeys(Fallback(s.name, s.source) for s in self.plan.steps if not s.key))

    @property
    def kernels(self) -> list[tuple[str, str]]:
        """(name, C++ source) of the kernels."""
        return self.sources

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """The results for these tensors. A tensor of another shape, type, layout or device is a UserError that names it."""
        if len(inputs) != len(self.varying):
            raise UserError(f"the program takes {len(self.varying)} tensors, got {len(inputs)}")
        tensors = dict(self.bound)
        for k, given, expected in zip(self.varying, inputs, self.expected, strict=True):
            tensors[k] = expected.check(given)
        try:
            frame = self.frames.pop()
        except IndexError:
            frame = _Frame(self.plan)
        for k, expected in frame.results:
            tensors[k] = expected.empty()
        frame.point(tensors)
        try:
            self._run(frame, tensors)
        finally:
            self.frames.append(frame)
        taken: set[int] = set(self.plan.inputs)  # a result is always a tensor of its own, as it is in eager
        out = []
        for k in self.plan.results:
            out.append(tensors[k].clone() if k in taken else tensors[k])
            taken.add(k)
        return out

    def _run(self, frame: _Frame, tensors: dict[int, Any]) -> None:
        for step, function, arguments in zip(self.plan.steps, self.functions, frame.arguments, strict=True):
            if function is not None:
                if function(arguments, self.threads):
                    raise UserError(f"kernel {step.label} ({step.source}): an index is out of range for its dimension")
                continue
            # Programs do not say how values are laid out, so an op of PyTorch gets the plainest layout there is.
            mentioned = slots_in([step.args, *step.kwargs.values()])
            views = {k: (tensors[k] if k in tensors else frame.view(k)).contiguous() for k in mentioned}
            args = to_torch(decode(step.args, views))
            kwargs = {name: to_torch(decode(v, views)) for name, v in step.kwargs.items()}
            out = operator(step.name)(*args, **kwargs)
            for k, value in zip(step.results, out if isinstance(out, (tuple, list)) else (out,), strict=True):
                if k is not None and self.plan.slots[k].bytes:  # a result declared empty may be anything
                    (tensors[k] if k in tensors else frame.view(k)).copy_(value)


class _Expected:
    """What a tensor must be."""

    def __init__(self, slot: Slot) -> None:
        import torch

        self.slot, self.dtype = slot, to_torch_dtype(DTYPES[slot.dtype])
        self.layout, self.plain, self.complex = torch.strided, torch.Tensor, self.dtype.is_complex

    def empty(self) -> Any:
        import torch

        return torch.empty_strided(self.slot.shape, self.slot.strides, dtype=self.dtype)

    def check(self, t: Any) -> Any:
        slot = self.slot
        kind = getattr(t, "dtype", None) is self.dtype and t.device.type == "cpu" and t.layout is self.layout
        if kind and t.shape == slot.shape and _strides_fit(t, slot):
            if t.is_neg() or (self.complex and t.is_conj()):  # what lies in its memory is not its value
                return self.empty().copy_(t.detach())
            if type(t) is self.plain or t.data_ptr() or not slot.bytes:
                return t
            raise UserError(f"input {slot.name}: a {type(t).__name__} without memory")
        import torch

        if not isinstance(t, torch.Tensor):
            raise UserError(f"input {slot.name}: expected a tensor, got {type(t).__name__}")
        if tuple(t.shape) != slot.shape:
            raise UserError(f"input {slot.name}: compiled for shape {list(slot.shape)}, got {list(t.shape)}")
        if t.dtype != self.dtype:
            raise UserError(f"input {slot.name}: compiled for {self.dtype}, got {t.dtype}")
        if t.device.type != "cpu":
            raise UserError(f"input {slot.name}: compiled for the CPU, got a tensor on {t.device}")
        if t.layout is not self.layout:
            raise UserError(f"input {slot.name}: compiled for a dense tensor, got one of layout {t.layout}")
        raise UserError(
            f"input {slot.name}: compiled for strides {list(slot.strides)}, got {list(t.stride())}; "
            "call .contiguous() on it, or compile with an example laid out like this"
        )


def _strides_fit(t: Any, slot: Slot) -> bool:
    """Strides matter only along dimensions with more than one element."""
    given = t.stride()
    return (
        given == slot.strides or all(e <= 1 or a == b for e, a, b in zip(slot.shape, given, slot.strides, strict=True)) or 0 in slot.shape
    )


class _Frame:
    """Temporaries and argument arrays of one call at a time."""

    def __init__(self, plan: Plan) -> None:
        import torch

        self.plan = plan
        self.arena = torch.empty(plan.arena + 64, dtype=torch.uint8)
        self.base = (self.arena.data_ptr() + 63) // 64 * 64
        self.results = [(k, _Expected(s)) for k, s in enumerate(plan.slots) if s.kind == "result"]
        self.arguments: list[Any] = []
        self.pointers: dict[int, list[tuple[Any, int]]] = {}
        for step in plan.steps:
            if not step.key:
                self.arguments.append(None)
                continue
            array = (ctypes.c_void_p * len(step.args))()
            for position, k in enumerate(step.args):
                slot = plan.slots[k]
                if slot.kind == "arena":
                    array[position] = self.base + slot.offset
                else:
                    self.pointers.setdefault(k, []).append((array, position))
            self.arguments.append(array)

    def point(self, tensors: Mapping[int, Any]) -> None:
        """Write the addresses of the tensors that are not temporaries."""
        for k, places in self.pointers.items():
            address = tensors[k].data_ptr()
            for array, position in places:
                array[position] = address

    def view(self, k: int) -> Any:
        """A temporary as a tensor."""
        slot = self.plan.slots[k]
        start = self.base - self.arena.data_ptr() + slot.offset
        dtype = to_torch_dtype(DTYPES[slot.dtype])
        return self.arena[start : start + slot.bytes].view(dtype).as_strided(slot.shape, slot.strides)


def compile_program(program: Program | l.Program, bound: Mapping[str, Any], options: Options) -> Any:
    """`program` (in any IR) for this machine, bound to its weights: from the cache if it was compiled before.

    Where there is no compiler the interpreter runs, and says so once.
    """
    if options.target == "interpreter":
        return interpreted(program, bound, options)
    cache = Cache(options.cache_dir, options.cache_limit)
    compiler = find_compiler(options.compiler, cache)
    if compiler is None:
        _say_once(
            "no C++ compiler was found, so the interpreter runs instead, which is slow; "
            "install one, for example with `apt install g++` or `pip install ziglang`"
        )
        return interpreted(program, bound, options)
    key = _plan_key(program, options, compiler)
    return _load(key, cache, program, bound, options) or _build(key, cache, compiler, program, bound, options)


def _load(key: str, cache: Cache, program: Any, bound: Mapping[str, Any], options: Options) -> Compiled | None:
    """The program from the cache, if all of it is there and sound."""
    path = cache.get(key, ".plan")
    if path is None or options.verbose or options.dump:
        return None
    try:
        plan = Plan.from_json(path.read_bytes())
    except (ValueError, OSError):
        return None
    found = {k: cache.get(k, ".so") for k in {s.key for s in plan.steps if s.key}}
    if any(p is None for p in found.values()):
        return None
    return _bind(plan, {k: p for k, p in found.items() if p}, program, bound, options)


def _build(key: str, cache: Cache, compiler: Compiler, program: Any, bound: Mapping[str, Any], options: Options) -> Compiled:
    from terrazzo.targets.cpu.emit import arguments, emit

    lowering = _lowering(program, options)
    loop, timings = lowering.loop, lowering.seconds
    start = time.perf_counter()
    kernels = {s: emit(s) for s in loop.steps if isinstance(s, l.Kernel)}
    timings["emit"] = time.perf_counter() - start
    start = time.perf_counter()
    sources = list(dict.fromkeys(source for _, source in kernels.values()))
    paths = dict(zip(sources, compile_all(sources, options, cache), strict=True))
    timings["compile"] = time.perf_counter() - start
    keys = {source: compiler.key(source) for source in sources}
    plan = make(loop, {k: (keys[source], name, arguments(k)) for k, (name, source) in kernels.items()})
    cache.put(key, ".plan", plan.to_json())
    done = _bind(plan, {keys[s]: p for s, p in paths.items()}, program, bound, options)
    done.loop, done.log, done.timings = loop, lowering.log, timings
    done.sources = [(name, source) for name, source in kernels.values()]
    return done


def _bind(plan: Plan, paths: Mapping[str, Path], program: Any, bound: Mapping[str, Any], options: Options) -> Compiled:
    import torch

    names = {plan.slots[k].name: k for k in plan.inputs}
    weights: dict[int, Any] = {}
    for name, tensor in bound.items():
        if name not in names:
            raise CompilerBug(f"{name} is bound but the program has no such input")
        weights[names[name]] = _Expected(plan.slots[names[name]]).check(tensor.detach())
    functions: list[Any] = []
    for step in plan.steps:
        if not step.key:
            _report(step.name, step.source)
            functions.append(None)
            continue
        function = getattr(ctypes.CDLL(str(paths[step.key])), step.name)
        function.restype, function.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_int]
        functions.append(function)
    return Compiled(plan, functions, weights, options.threads or torch.get_num_threads())


@dataclass
class Interpreted:
    """A program that the Loop IR interpreter runs, with the interface of `Compiled`."""

    loop: l.Program
    bound: dict[str, Any]
    log: Log
    timings: dict[str, float]

    def __post_init__(self) -> None:
        self.expected = [_Expected(_slot(b)) for b in self.loop.inputs if b.name not in self.bound]
        self.kernels: list[tuple[str, str]] = []

    @property
    def fallbacks(self) -> list[Fallback]:
        """The ops PyTorch runs, each once."""
        return list(dict.fromkeys(Fallback(s.name, s.source) for s in self.loop.steps if isinstance(s, l.Call)))

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        from terrazzo.interp import loop as interp
        from terrazzo.interp.torch import call_numpy, from_numpy, to_numpy

        if len(inputs) != len(self.expected):
            raise UserError(f"the program takes {len(self.expected)} tensors, got {len(inputs)}")
        given = {e.slot.name: e.check(t) for e, t in zip(self.expected, inputs, strict=True)}
        arrays = {name: to_numpy(t) for name, t in {**self.bound, **given}.items()}
        out = [from_numpy(r) for r in interp.run(self.loop, arrays, call=call_numpy)]
        return [_Expected(_slot(b)).empty().copy_(value) for b, value in zip(self.loop.results, out, strict=True)]


def interpreted(program: Any, bound: Mapping[str, Any], options: Options) -> Interpreted:
    """`program` for the interpreter."""
    done = _lowering(program, options)
    return Interpreted(done.loop, {k: v.detach() for k, v in bound.items()}, done.log, done.seconds)


def _lowering(program: Any, options: Options) -> Lowering:
    """`program` down to Loop IR, dumped where that was asked for."""
    from terrazzo.pipelines import lowering
    from terrazzo.run import dump

    done = lowering(program, options)
    if options.dump is not None:
        dump.write(options.dump, done, options)
    return done


def _slot(b: l.Buffer) -> Slot:
    strides = tuple(int(s) for s in b.type.element_strides)  # type: ignore[arg-type]
    return Slot(b.name, b.type.dtype.name, b.type.static_shape, strides, "result")


def _plan_key(program: Any, options: Options, compiler: Compiler) -> str:
    choices = repr((options.fuse, options.materialize, options.target))
    return digest("plan", show(program), choices, compiler.key(""), own_version())


@lru_cache(maxsize=1)
def own_version() -> str:
    """A digest of Terrazzo's own sources: whoever changes a rule must not meet plans made by the old one."""
    root = Path(__file__).parent.parent
    total = hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.h")]):
        total.update(path.read_bytes())
    return total.hexdigest()


_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        warnings.warn(f"terrazzo: {message}", RuntimeWarning, stacklevel=4)


def _report(op: str, source: str) -> None:
    _say_once(f"{op}{f' ({source})' if source else ''} is not compiled; PyTorch runs it")
