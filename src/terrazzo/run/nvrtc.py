"""NVRTC: CUDA sources as cubins, and what ptxas said of each, both kept in the cache."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache as once
from pathlib import Path
from typing import Any, TypeVar

from terrazzo.errors import Limitation, UserError
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.dialects import loop as l
from terrazzo.progress import at
from terrazzo.rules.loop_to_tile.experience import Experience
from terrazzo.run import limit
from terrazzo.run.cache import Cache, digest
from terrazzo.run.digits import CuDNN
from terrazzo.run.measured import Measured
from terrazzo.run.processors import processors

T = TypeVar("T")

_FLAGS = ("--std=c++17", "-default-device", "--minimal")
"""Without textures, surfaces and functions of the CUDA runtime, which no kernel has, what NVRTC reads before a source
is shorter: 22 ms of processor time for an empty kernel, and 28 with them. The cubins are the same.
"""


@dataclass(frozen=True)
class Facts:
    """What is known of a source since it was compiled: 32-bit registers of a thread, bytes it spills, what else is
    wrong, and the lines in which the compiler says so. It may run although it spills, or is slow for another reason.
    """

    registers: int = 0
    spilled: int = 0
    wrong: str = ""
    runs: bool = True
    told: tuple[str, ...] = ()

    def problem(self, spills: bool = False) -> str:
        """Why another schedule is to be tried first; nothing where all is well, or where that it `spills` is
        accepted and it runs.
        """
        if self.runs and (spills or not self.spilled):
            return "" if spills else self.wrong
        return self.wrong or f"it spills {self.spilled} bytes of registers to memory ({self.registers} registers)"

    @staticmethod
    def from_json(data: bytes) -> Facts | None:
        """None for what is not a record of ours."""
        try:
            read = json.loads(data)
            found = Facts(**{**read, "told": tuple(read["told"])})
        except (ValueError, TypeError, KeyError):
            return None
        return found if all(type(v) is type(getattr(Facts(), f)) for f, v in vars(found).items()) else None


@dataclass(frozen=True)
class Made:
    """The cubin of a source, None where there is none, and what is known of it."""

    path: Path | None
    facts: Facts


def cubin_key(source: str, arch: str) -> str:
    """Names what NVRTC makes of a source; everything the result depends on is in it. Comments, which say where in the
    user's program a kernel comes from, are not.
    """
    from terrazzo.targets.cuda.emit import prelude

    bare = re.sub(r"^//.*\n", "", source, flags=re.MULTILINE)
    return digest("cubin", nvrtc_version(), arch, *_FLAGS, prelude(), bare)


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


def compile_each(
    sources: Sequence[str], arch: str, cache: Cache, enough: Callable[[str], object] = lambda source: False
) -> dict[str, Made]:
    """What becomes of each source (without the prelude); those the cache lacks are compiled in parallel. Where one is
    `enough`, nobody waits for the others, which go on. Limitation where NVRTC is missing or does not know the
    architecture.
    """
    with abandoned_on_error():
        begun = {begin(source, arch, cache): source for source in dict.fromkeys(sources)}
        for done, future in enumerate(as_completed(begun)):
            at("compiling kernels with NVRTC", done + 1, len(begun))
            future.result()
            if enough(begun[future]):
                break
        return {source: future.result() for future, source in begun.items() if future.done()}


_begun: dict[tuple[int, str, str, str], Future[Made]] = {}


def _pool() -> ThreadPoolExecutor:
    return _threads(os.getpid())


@once
def _threads(process: int) -> ThreadPoolExecutor:
    """Those of a process: its forked children have none of them."""
    return ThreadPoolExecutor(processors(), "terrazzo-nvrtc")


def begin(source: str, arch: str, cache: Cache) -> Future[Made]:
    """Have a source compiled beside what goes on here, unless the cache has what becomes of it. The thread that did it
    puts it there, so it is kept whatever happens here meanwhile.
    """
    key = os.getpid(), source, arch, str(cache.directory)
    future = _begun.get(key)
    if future is None or future.cancelled():
        future = _begun[key] = _pool().submit(_made, source, arch, cache)
        future.add_done_callback(lambda done: _begun.pop(key, None) if _begun.get(key) is done else None)
    return future


def idle() -> bool:
    """Whether there are processors for which nothing waits to be compiled."""
    return sum(not x.done() for key, x in list(_begun.items()) if key[0] == os.getpid()) < processors()


@contextmanager
def abandoned_on_error() -> Iterator[None]:
    """What did not begin to be compiled never does where this ends in an error, be it Ctrl-C: nobody waits for it."""
    try:
        yield
    except BaseException:
        for future in list(_begun.values()):
            future.cancel()
        raise


def _made(source: str, arch: str, cache: Cache) -> Made:
    facts = known(source, arch, cache)
    path = cache.get(cubin_key(source, arch), ".cubin") if facts and facts.runs else None
    if facts is None or (facts.runs and path is None):
        cubin, facts = _compile(source, arch)
        path = cache.put(cubin_key(source, arch), ".cubin", cubin) if cubin else None
        remember(source, arch, cache, facts)
    return Made(path, facts)


def known(source: str, arch: str, cache: Cache) -> Facts | None:
    """What was learned of a source, in this process or an earlier one."""
    path = cache.get(cubin_key(source, arch), ".json")
    try:
        return Facts.from_json(path.read_bytes()) if path else None
    except OSError:
        return None


def remember(source: str, arch: str, cache: Cache, facts: Facts) -> None:
    """Keep what was learned of a source."""
    cache.put(cubin_key(source, arch), ".json", json.dumps(asdict(facts)).encode())


def _compile(source: str, arch: str) -> tuple[bytes | None, Facts]:
    """The cubin, if there is one, and what was said of it."""
    from cuda.bindings import nvrtc

    from terrazzo.targets.cuda.emit import prelude

    _, program = nvrtc.nvrtcCreateProgram((prelude() + source).encode(), b"kernel.cu", 0, [], [])
    flags = [*_FLAGS, f"--gpu-architecture={arch}", "--ptxas-options=-v"]
    with limit.stopped(program, limit.LIMIT):
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    told = log.decode(errors="replace").strip("\0 \n")
    cubin = None
    if status == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = bytes(size)  # which NVRTC fills
        nvrtc.nvrtcGetCUBIN(program, cubin)
    elif "INVALID_OPTION" in str(status):
        raise Limitation(f"NVRTC {nvrtc_version()} does not compile for {arch}")
    elif "OUT_OF_MEMORY" in str(status):
        raise UserError("NVRTC ran out of memory")
    nvrtc.nvrtcDestroyProgram(program)
    if "CANCELLED" in str(status):
        return None, late()
    return cubin, _facts(told, cubin is not None)


def late() -> Facts:
    """What is known of a source that took too long."""
    return Facts(wrong=f"NVRTC was stopped: it took more than {limit.LIMIT:g} s", runs=False)


def _facts(told: str, runs: bool) -> Facts:
    def most(pattern: str) -> int:
        return max(map(int, re.findall(pattern, told)), default=0)

    wrong = "" if runs else "the CUDA generated for it does not compile"
    # where ptxas adds a fence of its own ("warpgroup.arrive is injected"), nothing waits for it
    wrong = "ptxas serialises its wgmma" if "serialized" in told or "warpgroup.wait is injected" in told else wrong
    lines = [line for line in told.splitlines() if "error" in line.lower() or "spill" in line or "C75" in line]
    registers, spilled = most(r"Used (\d+) registers"), most(r"(\d+) bytes spill stores")
    return Facts(registers, spilled, wrong, runs, tuple(lines[:5]))


def failure(what: str, source: str, arch: str, facts: Facts, cache: Cache) -> str:
    """What a compiler complained about, and the command that shows it again."""
    from terrazzo.targets.cuda.emit import prelude

    saved = cache.put(digest("CUDA that failed", source), ".cu", (prelude() + source).encode())
    again = f"nvcc -cubin -arch={arch} -Xptxas -v {saved}"
    name = next(iter(re.findall(r"void .*?\b(k_\w+)\(", source)), "k_?").removeprefix("k_")
    return "\n".join([f"kernel {name}: {what}:", *facts.told, f"The source is {saved}. To reproduce:", again])


@dataclass(frozen=True)
class Tried(Experience):
    """Called with a kernel for a GPU: why it could not be built or is not to be used, as far as that was ever tried.
    What a driver `refused` to load, by source, is not kept: it may be the driver's trouble. What nobody tried yet
    begins to be compiled `ahead` of the rest, where that is asked for: it will be used.

    `told` has what was last said of each source, `found` what was found once, with what was said for it then.
    """

    arch: str
    cache: Cache
    spills: bool = False
    refused: dict[str, str] = field(default_factory=dict)
    ahead: bool = False
    measured: Measured | None = None
    library: CuDNN | None = None
    told: dict[str, str] = field(default_factory=dict)
    found: dict[Hashable, tuple[Any, dict[k.Kernel, str]]] = field(default_factory=dict)

    def fastest(self, kernel: l.Kernel) -> str:
        return self.measured.fastest(kernel) if self.measured else ""

    def rough(self, op: Any) -> tuple[bool, ...]:
        return self.library.rough(op) if self.library else ()

    def __call__(self, kernel: k.Kernel) -> str:
        why, source = self.lost(kernel), emitted(kernel)
        if self.ahead and not why:
            begin(source, self.arch, self.cache)
        return why

    def lost(self, kernel: k.Kernel) -> str:
        source = emitted(kernel)
        why = self.told[source] = self.of(source)
        return why

    def perhaps(self, kernel: k.Kernel) -> None:
        if self.ahead and idle():
            begin(emitted(kernel), self.arch, self.cache)

    def spilled(self, kernel: k.Kernel) -> float:
        source = emitted(kernel)
        facts = known(source, self.arch, self.cache)
        return facts.spilled if facts and facts.runs and source not in self.refused else math.inf

    def of(self, source: str) -> str:
        """Why a source lost."""
        facts = known(source, self.arch, self.cache)
        return self.refused.get(source) or (facts.problem(self.spills) if facts else "")

    def asking(self) -> Experience:
        return _Asked(self)

    def once(self, what: Hashable, find: Callable[[Experience], T]) -> T:
        found: T = self.asked(what, find)[0]
        return found

    def asked(self, what: Hashable, find: Callable[[Experience], T]) -> tuple[T, dict[k.Kernel, str]]:
        """What `find` finds, and what was said for it."""
        if what in self.found:
            value, told = self.found[what]
            if all(self.lost(kernel) == why for kernel, why in told.items()):
                return value, told
        asking = _Asked(self)
        found = find(asking)
        self.found[what] = found, asking.told
        return found, asking.told


class _Asked(Experience):
    """What somebody knows, and what was said when it was asked."""

    def __init__(self, whom: Tried) -> None:
        self.whom = whom
        self.told: dict[k.Kernel, str] = {}
        self.fastest = whom.fastest  # type: ignore[method-assign]
        self.rough = whom.rough  # type: ignore[method-assign]
        self.perhaps = whom.perhaps  # type: ignore[method-assign]
        self.spilled = whom.spilled  # type: ignore[method-assign]

    def __call__(self, kernel: k.Kernel) -> str:
        why = self.told[kernel] = self.whom(kernel)
        return why

    def lost(self, kernel: k.Kernel) -> str:
        why = self.told[kernel] = self.whom.lost(kernel)
        return why

    def agrees(self, other: Experience) -> bool:
        return all(other.lost(kernel) == why for kernel, why in self.told.items())

    def once(self, what: Hashable, find: Callable[[Experience], T]) -> T:
        found, told = self.whom.asked(what, find)
        self.told |= told
        return found


def emitted(kernel: k.Kernel) -> str:
    """The source of a kernel."""
    from terrazzo.targets.cuda.emit import emit

    return emit(kernel)[1]
