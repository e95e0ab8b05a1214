"""This machine's processor: kernels are shared objects that its C++ compiler makes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from terrazzo.errors import DivisionByZero, IndexOutOfRange, about
from terrazzo.ir.dialects import loop as l
from terrazzo.options import Options
from terrazzo.run.cache import Cache
from terrazzo.run.compiler import Compiler, compile_all
from terrazzo.run.plan import Entry, Plan, Step
from terrazzo.run.processors import team

if TYPE_CHECKING:
    from terrazzo.pipelines import Lowering

SUFFIX = ".so"
_NOTHING = nullcontext()


@dataclass(frozen=True)
class Built:
    """The machine code of a program's kernels: entries, the files by key, the sources by function, seconds by phase,
    and the lowering that they come from in the end.
    """

    program: Any
    entries: dict[Any, Entry]
    paths: dict[str, Path]
    sources: list[tuple[str, str]]
    seconds: dict[str, float]
    lowering: Lowering


@dataclass(frozen=True)
class Cpu:
    """The processor as a place where plans run."""

    compiler: Compiler
    threads: int | None  # that a kernel may have; None for as many as PyTorch uses
    device: str = "cpu"
    suffix: str = SUFFIX
    processors: int = 0  # that kernels share: each has all of them
    in_place: ClassVar[bool] = False  # loops of products store sums that are not through
    hands_on: ClassVar[bool] = False  # memory that is free: what is large goes back to the system, page by page
    launches_singly: ClassVar[bool] = True  # a launch is a call

    def key(self, cache: Cache) -> str:
        """What machine code here depends on."""
        return self.compiler.key("")

    def lost(self, options: Options, cache: Cache) -> None:
        """There is one way to run a kernel here, so none is known to have lost."""

    def build(self, lowering: Lowering, options: Options, cache: Cache, tried: None = None) -> Built:
        """The kernels of a program, compiled where the cache lacks them."""
        from terrazzo.targets.cpu.emit import arguments, emit

        start = time.perf_counter()
        kernels = {s: emit(s) for s in lowering.loop.steps if isinstance(s, l.Kernel)}
        emitted = time.perf_counter()
        sources = list(dict.fromkeys(source for _, source in kernels.values()))
        paths = compile_all(sources, options, cache)
        seconds = {"emit": emitted - start, "compile": time.perf_counter() - emitted}
        keys = {source: self.compiler.key(source) for source in sources}
        entries = {k: Entry(keys[source], name, arguments(k)) for k, (name, source) in kernels.items()}
        return Built(
            lowering.loop,
            entries,
            {keys[s]: p for s, p in zip(sources, paths, strict=True)},
            list(kernels.values()),
            seconds,
            lowering,
        )

    def load(self, plan: Plan, paths: dict[str, Path]) -> list[Any]:
        """For every step of a plan its function, which takes an array of addresses; None for calls of PyTorch."""
        return [self._function(s, paths) if s.key else None for s in plan.steps]

    def misfit(self, plan: Plan, paths: dict[str, Path]) -> str:
        """Why the machine code is none for this plan: it would use other memory than it is given; "" if it fits."""
        for step in plan.steps:
            if not step.key:
                continue
            try:
                library = ctypes.CDLL(str(paths[step.key]))
                count = ctypes.c_int64.in_dll(library, f"{step.name}_spans").value
                spans = (ctypes.c_int64 * (count + 1)).in_dll(library, f"{step.name}_spans")[1:]
            except (OSError, ValueError) as why:
                return f"{step.label} cannot be loaded ({why})"
            if [plan.slots[k].bytes for k in step.args] != spans:
                return f"{step.label} uses other memory"
        return ""

    def _function(self, step: Step, paths: dict[str, Path]) -> Any:
        function = getattr(ctypes.CDLL(str(paths[step.key])), step.name)
        function.restype, function.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_int]
        return function

    def capturing(self) -> bool:
        """Work here is done at once."""
        return False

    def settle(self) -> None:
        """Wait for all work: here it is done."""

    def queue(self) -> int:
        """Which of several queues of work a call joins: here there is one."""
        return 0

    def prepare(self, step: Step, function: Any, addresses: Any, number: int, slots: Sequence[Any]) -> Any:
        """What runs a step, given the array that will hold its addresses."""

        threads = self.threads

        def run(_: int) -> None:
            problems = function(addresses, team(threads))
            if problems:
                with about(step.label):
                    _refuse(problems, f"kernel {step.label} ({step.source})")

        return run

    def current(self) -> Any:
        """Within this, work goes here."""
        return _NOTHING

    def before(self) -> None:
        """Called at the start of every call."""

    def graph(self, steps: Any) -> Any:
        """There are no graphs here."""


def _refuse(problems: int, what: str) -> NoReturn:
    """Raise the error that a kernel's bits of problems stand for."""
    if problems & 1:
        raise IndexOutOfRange(f"{what}: an index is out of range for its dimension")
    raise DivisionByZero(f"{what}: a whole number is divided by zero")
