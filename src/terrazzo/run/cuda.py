"""A GPU: kernels are cubins that NVRTC makes, launched on the stream PyTorch uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrazzo.errors import CompilerBug, IndexOutOfRange, Limitation, UserError
from terrazzo.hw.gpu import GPUS
from terrazzo.hw.tma import TensorMap
from terrazzo.ir.canonical import twin
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.types import DTYPES
from terrazzo.options import Options
from terrazzo.run.branches import Place
from terrazzo.run.cache import Cache
from terrazzo.run.cpu import Built
from terrazzo.run.digits import CuDNN, library
from terrazzo.run.launch import Graph, Launch
from terrazzo.run.measured import Measured
from terrazzo.run.nvrtc import Made, Tried, compile_each, cubin_key, failure, nvrtc_version
from terrazzo.run.plan import Entry, Plan, Slot, Step, whole_strides
from terrazzo.run.room import Launched, even, late

if TYPE_CHECKING:
    from terrazzo.pipelines import Lowering

_NOTHING = nullcontext()
LEAST_DRIVER = 12000
"""The oldest driver whose cubins and graphs we use, as CUDA numbers versions."""
OVERLAPPING_DRIVER = 12030
"""The oldest driver whose graphs have edges between kernels that overlap."""
STATIC_SHARED = 48 << 10
"""Bytes of shared memory a kernel may have without asking for more."""


def devices() -> int:
    """How many GPUs PyTorch sees."""
    import torch

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def measured(cache: Cache, index: int = 0) -> Measured:
    """What was measured on GPUs like one of this machine."""
    import torch

    return Measured(cache.directory, torch.cuda.get_device_name(index))


def tried(options: Options) -> Tried | None:
    """What is known of kernels for the target of the options; None where that is no GPU, or NVRTC is not here."""
    if not options.target.startswith("sm_"):
        return None
    try:
        nvrtc_version()
    except Limitation:
        return None
    cache = Cache(options.cache_dir, options.cache_limit)
    here = devices() and architecture() == options.target
    if not here:
        return Tried(options.target, cache, options.spills)
    return Tried(options.target, cache, options.spills, measured=measured(cache), library=CuDNN(0, cache))


def architecture(index: int = 0) -> str:
    """The architecture of a GPU of this machine; Limitation for one that has no record."""
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    names = [f"sm_{major}{minor}a", f"sm_{major}{minor}"]
    if found := next((n for n in names if n in GPUS), None):
        return found
    raise Limitation(
        f"{torch.cuda.get_device_name(index)} is sm_{major}{minor}, and there is no record of it; "
        f"there are {', '.join(GPUS)}"
    )


_FLAGS: list[Any] = []
"""What kernels note errors in. It stays to the end, as modules do: a graph that captured them may outlive a program."""


class Cuda:
    """A GPU as a place where plans run."""

    suffix = ".cubin"
    hands_on = True
    in_place = True
    launches_singly = False

    def __init__(self, device: str, arch: str) -> None:
        """UserError where PyTorch sees no GPU, where the driver is too old, or where this GPU is of another
        architecture.
        """
        import torch

        if not torch.cuda.is_available():
            raise UserError(
                f"the target {arch} needs a GPU to run, and PyTorch sees none; "
                f"`terrazzo compile --target {arch}` needs none"
            )
        from cuda.bindings import driver

        _, version = driver.cuDriverGetVersion()
        if version < LEAST_DRIVER:
            raise UserError(
                f"the NVIDIA driver is for CUDA {version // 1000}.{version % 1000 // 10}; at least 12.0 is needed"
            )
        self.index = torch.device(device).index or 0
        if architecture(self.index) != arch:
            raise UserError(f"the target is {arch}, and {device} is {architecture(self.index)}")
        self.device, self.arch, self.driver = f"cuda:{self.index}", arch, driver
        self.overlaps = GPUS[arch].number >= 90 and version >= OVERLAPPING_DRIVER
        self.flags: Any = None
        self.raised = memoryview(b"")
        self.unraised = b""
        self.steps: Sequence[Step] = ()
        self.room: Sequence[tuple[int, bool]] = ()
        self.modules: dict[str, Any] = {}
        self.allowed: dict[tuple[str, str], int] = {}

    def key(self, cache: Cache) -> str:
        """What kernels here depend on: the compiler, what was measured, and the library whose digits they have."""
        return cubin_key("", self.arch) + self.measured(cache).state() + str(library())

    def measured(self, cache: Cache) -> Measured:
        """What was measured on GPUs like this one."""
        return measured(cache, self.index)

    def lost(self, options: Options, cache: Cache) -> Tried:
        """What is known of kernels that were tried here."""
        return Tried(self.arch, cache, options.spills, {}, True, self.measured(cache), CuDNN(self.index, cache))

    def build(self, lowering: Lowering, options: Options, cache: Cache, tried: Tried | None = None) -> Built:
        """The kernels of a program, compiled where the cache lacks them, all of which this GPU's driver loads."""
        return build(lowering, options, cache, self.arch, self.refuses, tried or self.lost(options, cache))

    def refuses(self, entry: Entry, path: Path) -> str:
        """Why the driver does not take a kernel; nothing where it does, or where something else is wrong."""
        import torch

        with torch.cuda.device(self.index):
            torch.cuda.mem_get_info()  # makes the context, in this thread too
            try:
                self._function(entry, {entry.key: path})
            except UserError as why:
                if str(why).endswith(_REFUSALS):
                    return str(why)
                raise
        return ""

    def misfit(self, plan: Plan, paths: dict[str, Path]) -> str:
        """Why kernels cannot be launched as a plan says; "" if they can. Cubins do not say what memory they use."""
        for step in plan.steps:
            if step.key and len(step.launch) != 4:
                return f"{step.label} has no launch"
            threads, shared = step.launch[1:3] if step.key else (k.WARP, 0)
            if threads not in range(k.WARP, 1025, k.WARP) or shared > GPUS[self.arch].shared:
                return f"{step.label} has more threads or memory than a block"
        return ""

    def load(self, plan: Plan, paths: dict[str, Path]) -> list[Any]:
        """For every step of a plan its function on this GPU; None for calls of PyTorch."""
        import torch

        self.steps = steps = plan.steps
        if any(s.launch and s.launch[3] for s in steps):
            self.flags = torch.zeros(len(steps), dtype=torch.int32, pin_memory=True)
            _FLAGS.append(self.flags)
            self.raised, self.unraised = memoryview(self.flags.numpy()).cast("B"), bytes(4 * len(steps))
        with torch.cuda.device(self.index):
            torch.cuda.mem_get_info()  # makes the context, in this thread too
            functions = [self._function(s, paths) if s.key else None for s in steps]
            self.room = [self._room(s, plan, f) if f else (0, False) for s, f in zip(steps, functions, strict=True)]
            return functions

    def _room(self, step: Step, plan: Plan, function: Any) -> tuple[int, bool]:
        """Bytes of shared memory for a block of a kernel, and whether it is launched while the one before it runs: so
        that kernels which overlap land evenly.
        """
        import torch

        blocks, threads, shared, _ = step.launch
        if not self.overlaps or blocks > k.EARLY:
            return shared, False
        slots = self.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, threads, shared)
        touched = sum(plan.slots[n].bytes for n in set(step.args))
        kernel = Launched(slots, blocks, shared, touched)
        processors = int(torch.cuda.get_device_properties(self.index).multi_processor_count)
        size = even(kernel, processors, GPUS[self.arch].shared)
        self._allow(step, function, size)
        return size, not late(kernel, processors)

    def _allow(self, step: Step | Entry, function: Any, size: int) -> None:
        """Let blocks of a kernel ask for so many bytes of shared memory. Equal kernels are one function, which is let
        ask for as much as any of them: some touch less, and ask for less.
        """
        if size > self.allowed.get((step.key, step.name), STATIC_SHARED):
            most = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.call("cuFuncSetAttribute", function, most, size)
            self.allowed[step.key, step.name] = size

    def _function(self, step: Step | Entry, paths: dict[str, Path]) -> Any:
        if step.key not in self.modules:
            self.modules[step.key] = self.call("cuModuleLoadData", paths[step.key].read_bytes())
        function = self.call("cuModuleGetFunction", self.modules[step.key], step.name.encode())
        self._allow(step, function, step.launch[2])
        return function

    def call(self, name: str, *args: Any) -> Any:
        """A function of the driver; UserError with its own words where it fails."""
        status, *out = getattr(self.driver, name)(*args)
        if status != self.driver.CUresult.CUDA_SUCCESS:
            raise UserError(f"the CUDA driver refuses {name}: {status.name}")
        return out[0] if out else None

    def queue(self) -> int:
        """PyTorch's current stream."""
        import torch

        return int(torch._C._cuda_getCurrentRawStream(self.index))  # the same as torch.cuda.current_stream, sooner

    def prepare(self, step: Step, function: Any, addresses: Any, number: int, slots: Sequence[Slot]) -> Launch:
        """What launches step `number`, given the array that will hold its addresses."""
        maps = []
        for position, shape, strides, box, swizzle in step.maps:
            slot = slots[step.args[position]]
            maps.append((position, TensorMap(DTYPES[slot.dtype], shape, strides, box, swizzle)))
        launch = Launch(self, step, function, addresses, maps, *self.room[number])
        if self.flags is not None:
            launch.flag.value = self.flags.data_ptr() + number * self.flags.element_size()
        return launch

    def current(self) -> Any:
        """Within this, PyTorch's current device is this one."""
        import torch

        here = torch._C._cuda_getDevice() == self.index  # the same as torch.cuda.current_device, sooner
        return _NOTHING if here else torch.cuda.device(self.index)

    def before(self) -> None:
        """Tell of an index that was out of range in an earlier call: kernels run on while the program goes on."""
        if self.raised != self.unraised:
            step = self.steps[int(self.flags.nonzero()[0])]
            self.flags.zero_()
            raise IndexOutOfRange(
                f"kernel {step.label} ({step.source}), in an earlier call: an index is out of range for its dimension"
            )

    @property
    def processors(self) -> int:
        """How many blocks run at a time at least."""
        return GPUS[self.arch].processors

    def capturing(self) -> bool:
        """Whether PyTorch's current stream is captured as a graph."""
        import torch

        return bool(torch.cuda.is_current_stream_capturing())

    def settle(self) -> None:
        """Wait for all work of this GPU."""
        import torch

        torch.cuda.synchronize(self.index)

    def fork(self) -> Any:
        """A stream beside the current one."""
        import torch

        return torch.cuda.Stream(self.index)

    def stream(self) -> Any:
        """PyTorch's current stream, as it has it."""
        import torch

        return torch.cuda.current_stream(self.index)

    def graph(self, launches: Sequence[Launch], places: Sequence[Place], addresses: memoryview) -> Graph:
        """The launches as one CUDA graph, whose addresses lie one behind the other."""
        return Graph(self, launches, places, addresses)


_REFUSALS = ("INVALID_IMAGE", "INVALID_SOURCE", "INVALID_VALUE", "NO_BINARY_FOR_GPU", "OUT_OF_RESOURCES")
"""What the driver says where the kernel is at fault: with another one it may go on."""


def build(
    lowering: Lowering,
    options: Options,
    cache: Cache,
    arch: str,
    refuses: Callable[[Entry, Path], str] = lambda entry, path: "",
    tried: Tried | None = None,
) -> Built:
    """The kernels of a program whose schedules were chosen by what was known of those `tried` before.

    A kernel that spills, that does not compile or that the driver `refuses` is a candidate that lost: the next one is
    chosen, while others are still compiled, and the log tells. Where all lost, the last runs if it can at all. What the
    user wrote is not replaced: a UserError has the compiler's words. CompilerBug where nothing is left to try.
    """
    from terrazzo.pipelines import rescheduled

    tried = tried or Tried(arch, cache, options.spills)
    seconds = {"emit": 0.0, "compile": 0.0, "again": 0.0}
    known: set[str] = set()
    while True:
        start = time.perf_counter()
        entries, sources, compiled = emit_all(lowering.at("kernel"), arch)
        begun = time.perf_counter()
        known |= {source for source in compiled if tried.told.get(source)}
        made = compile_each(compiled, arch, cache, partial(_fails, tried, known))
        of = dict(zip(entries, (source for _, source in sources), strict=True))
        for kernel, source in of.items() if len(made) == len(compiled) else ():
            if (path := made[source].path) and (why := refuses(entries[kernel], path)):
                tried.refused[source] = why
        ended = time.perf_counter()
        seconds["emit"] += begun - start
        seconds["compile"] += ended - begun
        if not _lost(lowering, options, of, known, made, tried):
            if len(made) == len(compiled):
                break
            continue  # what had lost was built meanwhile by another process, which had more time
        known |= {source for source in made if tried.of(source)}  # who is chosen again is the last there is
        lowering = rescheduled(lowering, options, tried)
        seconds["again"] += time.perf_counter() - ended
    paths = {entries[kernel].key: path for kernel, source in of.items() if (path := made[source].path)}
    return Built(lowering.at("kernel"), entries, paths, sources, seconds, lowering)


def _fails(tried: Tried, known: Container[str], source: str) -> bool:
    """Whether a source lost that was not `known` to when it was chosen."""
    return source not in known and bool(tried.of(source))


def _lost(
    lowering: Lowering,
    options: Options,
    sources: Mapping[k.Kernel, str],
    known: Container[str],
    made: Mapping[str, Made],
    tried: Tried,
) -> bool:
    """Whether a kernel of those `made` lost that was not `known` to; of one that was, the last schedule is taken."""
    from terrazzo.pipelines import dialect, pinned

    theirs = dialect(lowering.source) in ("tile", "kernel")
    lost = False
    for kernel, source in sources.items():
        if source not in made or not (why := tried.of(source)):
            continue
        told = failure(why, source, tried.arch, made[source].facts, tried.cache)
        if theirs or kernel.name in pinned(options)[0]:
            raise UserError(told)
        if source in known and (not made[source].facts.runs or source in tried.refused):
            raise CompilerBug(told)
        lost |= source not in known
    return lost


def emit_all(program: k.Program, arch: str) -> tuple[dict[k.Kernel, Entry], list[tuple[str, str]], list[str]]:
    """For every kernel its entry; (function, source) of each; the sources, each once: kernels that differ in names only
    have one.
    """
    from terrazzo.targets.cuda.emit import emit, gathers

    entries: dict[k.Kernel, Entry] = {}
    sources: list[tuple[str, str]] = []

    @once
    def known(kernel: k.Kernel) -> tuple[str, str, str, int]:
        """The function of a kernel, its source, where the cache has that, and whether it gathers."""
        name, source = emit(kernel)
        return name, source, cubin_key(source, arch), int(gathers(kernel))

    for kernel in program.steps:
        if isinstance(kernel, k.Kernel):
            name, source, key, gathering = known(twin(kernel))
            launch = (kernel.grid, kernel.threads, kernel.shared_bytes, gathering)
            maps = tuple(
                (kernel.params.index(b), x.static_shape, whole_strides(x), box, swizzle)
                for b, x, box, swizzle in kernel.maps
            )
            entries[kernel] = Entry(key, name, kernel.params, launch, maps)
            sources.append((name, source))
    return entries, sources, list(dict.fromkeys(source for _, source in sources))
