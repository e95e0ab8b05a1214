"""Kernels of a GPU with their arguments in place: launched one by one, or as one CUDA graph."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from terrazzo.errors import UserError
from terrazzo.hw.tma import TensorMap
from terrazzo.run.branches import Place
from terrazzo.run.plan import Step
from terrazzo.run.tensor_map import encode

if TYPE_CHECKING:
    from terrazzo.run.cuda import Cuda

KEPT_MAPS = 64
"""Tensor maps that are kept for one tensor of a launch: it seldom lies at more addresses in turn."""


class Launch:
    """A kernel with its arguments in place, with bytes of shared memory for each block; called with a stream. One that
    is `early` is launched while the one before it still runs, for which it waits itself.
    """

    def __init__(
        self,
        machine: Cuda,
        step: Step,
        function: Any,
        addresses: Any,
        maps: Sequence[tuple[int, TensorMap]],
        shared: int,
        early: bool,
    ) -> None:
        self.machine, self.step, self.function, self.addresses = machine, step, function, addresses
        blocks, threads, _, notes = step.launch
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
        self.early = early
        self.stream, self.configs = 0, (self._config(False), self._config(early))
        self.launch, self.success = machine.driver.cuLaunchKernelEx, machine.driver.CUresult.CUDA_SUCCESS

    def _config(self, overlaps: bool) -> Any:
        """How it is launched: where it `overlaps`, while the kernel before it still runs, for which it waits itself."""
        driver = self.machine.driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.shared
        if overlaps:
            early = driver.CUlaunchAttribute()
            early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [early], 1
        return config

    def ready(self) -> None:
        """Encode the maps of tensors that lie elsewhere than in the last call."""
        for m in self.maps:
            m.encode()

    def __call__(self, stream: int, alone: bool = True) -> None:
        """`alone` says that it waits for nothing but what is on its stream."""
        if self.maps:
            self.ready()
        if stream != self.stream:
            self.configs[0].hStream = self.configs[1].hStream = self.stream = stream
        (status,) = self.launch(self.configs[alone], self.function, self.at, 0)
        if status != self.success:
            raise UserError(
                f"kernel {self.step.label} ({self.step.source}) failed to launch: {status.name}; "
                f"{self.blocks} blocks of {self.threads} threads with {self.shared} bytes of shared memory. "
                "An earlier kernel may be at fault: set CUDA_LAUNCH_BLOCKING=1."
            )


class _Map:
    """A tensor map in memory of the host, 64 bytes aligned, of the tensor at one of the addresses of a launch. The
    driver takes several microseconds to make one, so those of the last few addresses are kept.
    """

    def __init__(self, addresses: Any, position: int, tensor_map: TensorMap) -> None:
        self.addresses, self.position, self.tensor_map = addresses, position, tensor_map
        self.memory = (ctypes.c_char * (128 + 64))()
        self.at = (ctypes.addressof(self.memory) + 63) // 64 * 64
        self.address = 0
        self.made: dict[int, bytes] = {}

    def encode(self) -> None:
        address = self.addresses[self.position] or 0
        if address == self.address:
            return
        if address not in self.made:
            if len(self.made) == KEPT_MAPS:
                del self.made[next(iter(self.made))]
            self.made[address] = encode(self.tensor_map, address)
        ctypes.memmove(self.at, self.made[address], 128)
        self.address = address


class Graph:
    """Launches as one CUDA graph. Arguments that changed are set in its nodes, so nothing is copied. The `addresses` of
    all of them are bytes one behind the other.
    """

    def __init__(
        self, machine: Cuda, launches: Sequence[Launch], places: Sequence[Place], addresses: memoryview
    ) -> None:
        self.machine, self.launches, self.addresses = machine, launches, addresses
        call = machine.call
        graph = call("cuGraphCreate", 0)
        self.nodes: list[Any] = []
        last: dict[int, tuple[int]] = {}
        early: list[tuple[Any, Any]] = []
        for launch, place in zip(launches, places, strict=True):
            launch.ready()
            before = [self.nodes[n] for n in (*last.get(place.branch, ()), *place.after)]
            overlaps = launch.early and not place.after
            waits = [] if overlaps else before
            self.nodes.append(call("cuGraphAddKernelNode", graph, waits, len(waits), self._parameters(launch)))
            early += [(n, self.nodes[-1]) for n in before] if overlaps else []
            last[place.branch] = (len(self.nodes) - 1,)
        if early:
            first, second = map(list, zip(*early, strict=True))
            call("cuGraphAddDependencies", graph, first, second, [self._edge()] * len(early), len(early))
        self.all_known, self.known = bytes(addresses), [bytes(x.addresses) for x in launches]
        self.parameters = [self._parameters(x) for x in launches]
        self.executable = call("cuGraphInstantiate", graph, 0)
        weakref.finalize(self, _destroy, call, self.executable, graph).atexit = False

    def _edge(self) -> Any:
        """That one kernel follows another, which it waits for by itself."""
        driver = self.machine.driver
        edge = driver.CUgraphEdgeData()
        edge.type = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC.value
        edge.from_port = driver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
        return edge

    def _parameters(self, launch: Launch) -> Any:
        p = self.machine.driver.CUDA_KERNEL_NODE_PARAMS()
        p.func = launch.function
        p.gridDimX, p.gridDimY, p.gridDimZ = launch.blocks, 1, 1
        p.blockDimX, p.blockDimY, p.blockDimZ = launch.threads, 1, 1
        p.sharedMemBytes = launch.shared
        p.kernelParams = launch.at
        return p

    def __call__(self, stream: int) -> None:
        if (now := bytes(self.addresses)) != self.all_known:
            self._renew()
            self.all_known = now
        self.machine.call("cuGraphLaunch", self.executable, stream)

    def _renew(self) -> None:
        """Set the arguments of launches that changed."""
        for n, launch in enumerate(self.launches):
            now = bytes(launch.addresses)
            if now != self.known[n]:
                launch.ready()
                changed = (self.executable, self.nodes[n], self.parameters[n])
                self.machine.call("cuGraphExecKernelNodeSetParams", *changed)
                self.known[n] = now


def _destroy(call: Callable[..., Any], executable: Any, graph: Any) -> None:
    """Let go of a graph, which runs to its end where it still runs."""
    call("cuGraphExecDestroy", executable)
    call("cuGraphDestroy", graph)
