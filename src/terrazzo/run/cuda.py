"""A GPU: kernels are cubins that NVRTC makes, launched on the stream PyTorch uses."""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache as once
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrazzo.errors import CompilerBug, Limitation, UserError
from terrazzo.hw.gpu import GPUS
from terrazzo.hw.tma import TensorMap
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.types import DTYPES
from terrazzo.options import Options
from terrazzo.run.cache import Cache, digest
from terrazzo.run.cpu import Built
from terrazzo.run.plan import Entry, Plan, Slot, Step
from terrazzo.run.tensor_map import encode

if TYPE_CHECKING:
    from terrazzo.pipelines import Lowering

_NOTHING = nullcontext()
LEAST_DRIVER = 12000
"""The oldest driver whose cubins and graphs we use, as CUDA numbers versions."""
STATIC_SHARED = 48 << 10
"""Bytes of shared memory a kernel may have without asking for more."""


def compile_all(sources: Sequence[str], arch: str, cache: Cache, spills: bool = False) -> list[Path]:
    """A cubin for each source (without the prelude), in order; those the cache lacks are compiled in parallel.

    Raises Limitation where NVRTC is missing, and CompilerBug where a source does not compile or spills registers to
    memory.
    """
    keys = [cubin_key(source, arch) for source in sources]
    found = {key: cache.get(key, ".cubin") for key in dict.fromkeys(keys)}
    missing = {key: source for key, source in zip(keys, sources, strict=True) if found[key] is None}
    if missing:
        with ThreadPoolExecutor(os.cpu_count() or 1, "terrazzo-nvrtc") as pool:
            for key, cubin in zip(
                missing, pool.map(lambda s: _compile(s, arch, cache, spills), missing.values()), strict=True
            ):
                found[key] = cache.put(key, ".cubin", cubin)
    return [path for key in keys if (path := found[key]) is not None]


def cubin_key(source: str, arch: str) -> str:
    """Names what NVRTC makes of a source; everything the result depends on is in it."""
    from terrazzo.targets.cuda.emit import prelude

    return digest("cubin", nvrtc_version(), arch, *_FLAGS, prelude(), source)


_FLAGS = ("--std=c++17", "-default-device")


@once
def nvrtc_version() -> str:
    """The version of NVRTC; Limitation where there is none."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as why:  # the package or the library it loads
        raise Limitation(
            f"CUDA kernels are compiled by NVRTC, and it is not here ({why}); `pip install 'terrazzo[cuda]'`"
        ) from None
    return f"{major}.{minor}"


def _compile(source: str, arch: str, cache: Cache, spills: bool) -> bytes:
    from cuda.bindings import nvrtc

    from terrazzo.targets.cuda.emit import prelude

    text = (prelude() + source).encode()
    _, program = nvrtc.nvrtcCreateProgram(text, b"kernel.cu", 0, [], [])
    flags = [*_FLAGS, f"--gpu-architecture={arch}", "--ptxas-options=-v"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    told = log.decode(errors="replace").strip("\0 \n")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        if "INVALID_OPTION" in str(status):
            raise Limitation(f"NVRTC {nvrtc_version()} does not compile for {arch}")
        raise CompilerBug(_failure("generated CUDA does not compile", source, arch, told, cache))
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = bytes(size)  # which NVRTC fills
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", told)]
    if any(spilled) and not spills:
        raise CompilerBug(
            _failure(f"a kernel spills {max(spilled)} bytes of registers to memory", source, arch, told, cache)
        )
    if "C75" in told and not spills:
        raise CompilerBug(_failure("ptxas serialises wgmma in a kernel", source, arch, told, cache))
    return cubin


def _failure(what: str, source: str, arch: str, told: str, cache: Cache) -> str:
    from terrazzo.targets.cuda.emit import prelude

    saved = cache.put(digest("CUDA that failed", source), ".cu", (prelude() + source).encode())
    lines = [x for x in told.splitlines() if "error" in x.lower() or "spill" in x or "C75" in x][:5]
    return "\n".join(
        [f"{what}:", *lines, f"The source is {saved}. To reproduce:", f"nvcc -cubin -arch={arch} -Xptxas -v {saved}"]
    )


def devices() -> int:
    """How many GPUs PyTorch sees."""
    import torch

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def architecture(index: int = 0) -> str:
    """The architecture of a GPU of this machine; Limitation for one that has no record."""
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    names = [f"sm_{major}{minor}a", f"sm_{major}{minor}"]
    if found := next((n for n in names if n in GPUS), None):
        return found
    raise Limitation(
        f"{torch.cuda.get_device_name(index)} is sm_{major}{minor}, and there is no record of it; there are {', '.join(GPUS)}"
    )


class Cuda:
    """A GPU as a place where plans run."""

    suffix = ".cubin"

    def __init__(self, device: str, arch: str) -> None:
        """UserError where PyTorch sees no GPU, where the driver is too old, or where this GPU is of another
        architecture.
        """
        import torch

        if not torch.cuda.is_available():
            raise UserError(
                f"the target {arch} needs a GPU to run, and PyTorch sees none; `terrazzo compile --target {arch}` needs none"
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
        self.flags: Any = None
        self.steps: Sequence[Step] = ()
        self.modules: dict[str, Any] = {}

    def key(self) -> str:
        """What machine code here depends on."""
        return cubin_key("", self.arch)

    def build(self, lowering: Lowering, options: Options, cache: Cache) -> Built:
        """The kernels of a program, compiled where the cache lacks them."""
        start = time.perf_counter()
        program: k.Program = lowering.at("kernel")
        entries, sources, compiled = emit_all(program, self.arch)
        emitted = time.perf_counter()
        paths = compile_all(compiled, self.arch, cache, options.spills)
        seconds = {"emit": emitted - start, "compile": time.perf_counter() - emitted}
        return Built(
            program,
            entries,
            {cubin_key(s, self.arch): p for s, p in zip(compiled, paths, strict=True)},
            sources,
            seconds,
        )

    def misfit(self, plan: Plan, paths: dict[str, Path]) -> str:
        """Why kernels cannot be launched as a plan says; "" if they can. Cubins do not say what memory they use."""
        for step in plan.steps:
            if step.key and len(step.launch) != 4:
                return f"{step.label} has no launch"
            threads, shared = step.launch[1:3] if step.key else (k.WARP, 0)
            if threads not in range(k.WARP, 1025, k.WARP) or shared > GPUS[self.arch].shared:
                return f"{step.label} has more threads or memory than a block"
        return ""

    def load(self, steps: Sequence[Step], paths: dict[str, Path]) -> list[Any]:
        """For every step its function on this GPU; None for calls of PyTorch."""
        import torch

        self.steps = steps
        if any(s.launch and s.launch[3] for s in steps):
            self.flags = torch.zeros(len(steps), dtype=torch.int32, pin_memory=True)
        with torch.cuda.device(self.index):
            torch.cuda.current_stream()  # makes the context
            return [self._function(s, paths) if s.key else None for s in steps]

    def _function(self, step: Step, paths: dict[str, Path]) -> Any:
        if step.key not in self.modules:
            self.modules[step.key] = self.call("cuModuleLoadData", paths[step.key].read_bytes())
        function = self.call("cuModuleGetFunction", self.modules[step.key], step.name.encode())
        if step.launch[2] > STATIC_SHARED:
            attribute = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.call("cuFuncSetAttribute", function, attribute, step.launch[2])
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

        return int(torch.cuda.current_stream(self.index).cuda_stream)

    def prepare(self, step: Step, function: Any, addresses: Any, number: int, slots: Sequence[Slot]) -> Launch:
        """What launches step `number`, given the array that will hold its addresses."""
        maps = []
        for position, box, swizzle in step.maps:
            slot = slots[step.args[position]]
            maps.append((position, TensorMap(DTYPES[slot.dtype], slot.shape, slot.strides, box, swizzle)))
        launch = Launch(self, step, function, addresses, maps)
        if self.flags is not None:
            launch.flag.value = self.flags.data_ptr() + number * self.flags.element_size()
        return launch

    def current(self) -> Any:
        """Within this, PyTorch's current device is this one."""
        import torch

        return _NOTHING if torch.cuda.current_device() == self.index else torch.cuda.device(self.index)

    def before(self) -> None:
        """Tell of an index that was out of range in an earlier call: kernels run on while the program goes on."""
        if self.flags is not None and (found := self.flags.nonzero()).numel():
            step = self.steps[int(found[0])]
            self.flags.zero_()
            raise UserError(
                f"kernel {step.label} ({step.source}), in an earlier call: an index is out of range for its dimension"
            )

    def graph(self, launches: Sequence[Launch]) -> Graph:
        """The launches, one after the other, as one CUDA graph."""
        return Graph(self, launches)


class Launch:
    """A kernel with its arguments in place; called with a stream."""

    def __init__(
        self, machine: Cuda, step: Step, function: Any, addresses: Any, maps: Sequence[tuple[int, TensorMap]]
    ) -> None:
        self.machine, self.step, self.function, self.addresses = machine, step, function, addresses
        blocks, threads, shared, notes = step.launch
        count = len(addresses)
        self.flag = ctypes.c_void_p(0)
        self.maps = [_Map(addresses, position, tensor_map) for position, tensor_map in maps]
        self.pointers = (ctypes.c_void_p * (count + len(self.maps) + notes))()
        base, size = ctypes.addressof(addresses), ctypes.sizeof(ctypes.c_void_p)
        for n in range(count):
            self.pointers[n] = base + n * size
        for n, m in enumerate(self.maps):
            self.pointers[count + n] = m.at
        if notes:
            self.pointers[count + len(self.maps)] = ctypes.addressof(self.flag)
        self.blocks, self.threads, self.shared, self.at = blocks, threads, shared, ctypes.addressof(self.pointers)
        self.launch, self.success = machine.driver.cuLaunchKernel, machine.driver.CUresult.CUDA_SUCCESS

    def ready(self) -> None:
        """Encode the maps of tensors that lie elsewhere than in the last call."""
        for m in self.maps:
            m.encode()

    def __call__(self, stream: int) -> None:
        if self.maps:
            self.ready()
        (status,) = self.launch(self.function, self.blocks, 1, 1, self.threads, 1, 1, self.shared, stream, self.at, 0)
        if status != self.success:
            raise UserError(
                f"kernel {self.step.label} ({self.step.source}) failed to launch: {status.name}; {self.blocks} blocks of {self.threads} "
                f"threads with {self.shared} bytes of shared memory. An earlier kernel may be at fault: set CUDA_LAUNCH_BLOCKING=1."
            )


class _Map:
    """A tensor map in memory of the host, 64 bytes aligned, of the tensor at one of the addresses of a launch."""

    def __init__(self, addresses: Any, position: int, tensor_map: TensorMap) -> None:
        self.addresses, self.position, self.tensor_map = addresses, position, tensor_map
        self.memory = (ctypes.c_char * (128 + 64))()
        self.at = (ctypes.addressof(self.memory) + 63) // 64 * 64
        self.known = 0

    def encode(self) -> None:
        address = self.addresses[self.position] or 0
        if address != self.known:
            ctypes.memmove(self.at, encode(self.tensor_map, address), 128)
            self.known = address


class Graph:
    """Launches as one CUDA graph. Arguments that changed are set in its nodes, so nothing is copied."""

    def __init__(self, machine: Cuda, launches: Sequence[Launch]) -> None:
        self.machine, self.launches = machine, launches
        call = machine.call
        graph = call("cuGraphCreate", 0)
        self.nodes: list[Any] = []
        for launch in launches:
            launch.ready()
            before = self.nodes[-1:]
            self.nodes.append(call("cuGraphAddKernelNode", graph, before, len(before), self._parameters(launch)))
        self.known = [bytes(x.addresses) for x in launches]
        self.executable = call("cuGraphInstantiate", graph, 0)

    def _parameters(self, launch: Launch) -> Any:
        p = self.machine.driver.CUDA_KERNEL_NODE_PARAMS()
        p.func = launch.function
        p.gridDimX, p.gridDimY, p.gridDimZ = launch.blocks, 1, 1
        p.blockDimX, p.blockDimY, p.blockDimZ = launch.threads, 1, 1
        p.sharedMemBytes = launch.shared
        p.kernelParams = launch.at
        return p

    def __call__(self, stream: int) -> None:
        for n, launch in enumerate(self.launches):
            now = bytes(launch.addresses)
            if now != self.known[n]:
                launch.ready()
                self.machine.call(
                    "cuGraphExecKernelNodeSetParams", self.executable, self.nodes[n], self._parameters(launch)
                )
                self.known[n] = now
        self.machine.call("cuGraphLaunch", self.executable, stream)


def emit_all(program: k.Program, arch: str) -> tuple[dict[k.Kernel, Entry], list[tuple[str, str]], list[str]]:
    """For every kernel its entry; (function, source) of each; the sources, each once."""
    from terrazzo.targets.cuda.emit import emit, gathers

    entries: dict[k.Kernel, Entry] = {}
    sources: list[tuple[str, str]] = []
    for kernel in program.steps:
        if isinstance(kernel, k.Kernel):
            name, source = emit(kernel)
            launch = (kernel.grid, kernel.threads, kernel.shared_bytes, int(gathers(kernel)))
            maps = tuple((kernel.params.index(b), box, swizzle) for b, box, swizzle in kernel.maps)
            entries[kernel] = Entry(cubin_key(source, arch), name, kernel.params, launch, maps)
            sources.append((name, source))
    return entries, sources, list(dict.fromkeys(source for _, source in sources))
