"""The machine's C++ compiler: finding it, and making shared objects of C++ sources.

Nothing is assumed about a compiler that is found. A small probe is built and run with the best set of flags, then with
the next best, and the first that works is what kernels are built with; the answer is kept in the cache.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from terrazzo.errors import CompilerBug, Limitation, UserError
from terrazzo.hw.processor import told
from terrazzo.options import Options
from terrazzo.progress import at
from terrazzo.run.cache import Cache, digest
from terrazzo.run.processors import processors

# No flag here lets the compiler reassociate or drop an infinity or a NaN: results must not depend on it.
_COMMON = (
    "-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC",
    *(f"-fno-builtin-{f}" for f in ("atan", "atanf", "atanh", "atanhf")),  # GCC makes 1 of sin(atan(NaN))
)  # fmt: skip

# From best to plainest: (flags, libraries). -lmvec holds the vector forms of exp, sin … of glibc on x86-64: clang is
# told of them by a flag that GCC refuses, GCC by their declarations. Without an OpenMP runtime (the ziglang wheel has
# none) the simd pragmas still count and kernels run on one thread. Of vectors, compilers take half of what AVX-512 has
# unless they are told: a softmax takes 0.85 of the time with all of it, a hyperbolic tangent half.
_WIDE = ("-march=native", "-mprefer-vector-width=512", "-fopenmp")
_CHOICES = (
    ((*_COMMON, *_WIDE, "-fveclib=libmvec"), ("-lmvec", "-lm")),
    ((*_COMMON, *_WIDE, "-DTZ_VECTOR_MATH"), ("-lmvec", "-lm")),
    ((*_COMMON, *_WIDE), ("-lm",)),
    ((*_COMMON, "-march=native", "-fopenmp"), ("-lm",)),  # no x86
    ((*_COMMON, "-march=native", "-fopenmp-simd"), ("-lm",)),
    ((*_COMMON, "-fopenmp-simd"), ("-lm",)),
)

# A shared object may lack functions (the vector forms that an older glibc has not), and its instructions may be another
# processor's: so the probe is loaded and run, with vectors as wide as those of products, in a process of its own.
_PROBE = """
#include <cmath>
#include <cstdint>
#if defined(__AVX512F__)
typedef float wide __attribute__((vector_size(64), aligned(4)));
#elif defined(__AVX__)
typedef float wide __attribute__((vector_size(32), aligned(4)));
#else
typedef float wide __attribute__((vector_size(16), aligned(4)));
#endif
#ifdef TZ_VECTOR_MATH
extern "C" __attribute__((simd("notinbranch"))) float erff(float) noexcept;
#endif
#ifdef _OPENMP
#include <omp.h>
extern "C" int threads() { return omp_get_max_threads(); }
#endif
extern "C" void probe(float* x, std::int64_t n) {
    #pragma omp parallel for simd
    for (std::int64_t i = 0; i < n; ++i) x[i] = erff(x[i]);
    for (std::int64_t i = 0; i < n; i += sizeof(wide) / 4) *(wide*)(x + i) += *(wide*)(x + i);
}
"""
_RUN = """
import ctypes, math, sys
x = (ctypes.c_float * 64)(*[k / 32 - 1 for k in range(64)])
ctypes.CDLL(sys.argv[1]).probe(x, ctypes.c_int64(64))
sys.exit("it miscalculates" if any(abs(v - 2 * math.erf(k / 32 - 1)) > 1e-5 for k, v in enumerate(x)) else 0)
"""

# Seconds that a compiler has: to say what it is, to build the probe (and this, to run), to build one source of kernels.
_SAYS, _PROBES, _BUILDS = 20.0, 120.0, 600.0

# What a compiler says when the machine, and neither the source nor our flags, is at fault.
_TROUBLE = (
    "No space left on device",
    "Disk quota exceeded",
    "Killed signal",
    "out of memory",
    "Cannot allocate memory",
)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that was seen to work on this machine, and the flags it is used with."""

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...]
    libraries: tuple[str, ...]

    @property
    def parallel(self) -> bool:
        """Whether kernels may use several threads."""
        return "-fopenmp" in self.flags

    def build(self, source: str, output: str) -> tuple[str, ...]:
        """The command that makes the shared object `output` of the file `source`."""
        return (*self.command, *self.flags, source, "-o", output, *self.libraries)

    def key(self, source: str) -> str:
        """Names what this compiler makes of a source here; everything that the result depends on is in it."""
        return digest("shared object", self.version, processor(), *self.build("kernel.cpp", "kernel.so"), source)


def find_compiler(name: str | None, cache: Cache) -> Compiler | None:
    """The compiler called `name`, or else the first of c++, g++, clang++ and the ziglang package that works, or None.

    A `name` may have arguments ("ccache g++", "g++ -march=x86-64-v3"). One that cannot be used is a `UserError`.
    """
    if name is not None:
        try:
            words = shlex.split(name)
        except ValueError as error:  # a quotation that does not end
            raise UserError(f"option compiler: {name!r} cannot be read as a command: {error}") from None
        command = _resolve(words[0], *words[1:]) if words else None
        found = _probe(command, cache) if command else "there is no such command"
        if isinstance(found, str):
            raise UserError(
                f"option compiler: {name!r} is not a C++ compiler that can build a shared object here: {found}"
            )
        return found
    tried = (_probe(command, cache) for command in _candidates())
    return next((found for found in tried if isinstance(found, Compiler)), None)


def compile_all(sources: Sequence[str], options: Options, cache: Cache) -> list[Path]:
    """A shared object for each C++ source, in order; those that the cache lacks are built in parallel.

    Raises `Limitation` when there is no compiler, and `CompilerBug` when a source does not compile.
    """
    compiler = find_compiler(options.compiler, cache)
    if compiler is None:
        raise Limitation(
            "no C++ compiler was found (looked for c++, g++, clang++ and the Python package ziglang), "
            "so the interpreter runs instead, which is slow. "
            "Install one, for example with `apt install g++` or `pip install ziglang`."
        )
    keys = [compiler.key(source) for source in sources]
    built = {key: cache.get(key, ".so") for key in dict.fromkeys(keys)}
    missing = {key: source for key, source in zip(keys, sources, strict=True) if built[key] is None}
    with closing(_build_all(compiler, missing)) as results:
        for n, (key, result) in enumerate(results):
            at("compiling kernels", n, len(missing))
            if result.data is None:
                raise _failure(compiler, missing[key], result, cache)
            built[key] = cache.put(key, ".so", result.data)
    return [path for key in keys if (path := built[key]) is not None]


@functools.cache
def processor() -> str:
    """What machine code here depends on: the name and the features of the processor, and the C library."""
    # x86 says "model name" and "flags", Arm says "CPU part" and "Features".
    known = [told().get(name, "") for name in ("model name", "flags", "CPU implementer", "CPU part", "Features")]
    return "\n".join([platform.machine(), platform.processor(), *known, _library()])


def _library() -> str:
    """The C library and its version, if it is glibc: vector functions came with some versions of it."""
    with suppress(AttributeError, ValueError, OSError):
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    return ""


@dataclass(frozen=True)
class _Result:
    """The shared object, or else what the compiler complained about; `late` where it was stopped at its limit."""

    data: bytes | None
    errors: str
    late: bool = False


@dataclass
class _Builds:
    """The compilers now running, each for `limit` seconds at most. `stop` ends them, and none is started after it."""

    limit: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    running: set[subprocess.Popen[str]] = field(default_factory=set)
    stopped: bool = False

    def build(self, compiler: Compiler, source: str) -> _Result:
        try:
            with tempfile.TemporaryDirectory(prefix="terrazzo-") as directory:
                work = Path(directory)
                (work / "kernel.cpp").write_text(source, encoding="utf-8")
                # Relative names, so that the result does not tell where it was built.
                code, errors = self._run(compiler.build("kernel.cpp", "kernel.so"), work)
                if code is None:
                    return _Result(None, errors, late=True)
                return _Result((work / "kernel.so").read_bytes() if code == 0 else None, errors)
        except OSError as error:  # the disk of the temporary directory is full, most likely
            return _Result(None, str(error))

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            for process in self.running:
                _signal(process, signal.SIGTERM)

    def _run(self, command: Sequence[str], directory: Path) -> tuple[int | None, str]:
        """The exit status, or None for a command that took too long; and what it complained about."""
        with self.lock:
            if self.stopped:
                return 1, "stopped"
            # A group of its own, because the command is a driver whose own children do the work.
            process = subprocess.Popen(
                command,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                process_group=0,
            )
            self.running.add(process)
        try:
            _, errors = process.communicate(timeout=self.limit)
        except subprocess.TimeoutExpired:
            _end(process)
            return None, ""
        except BaseException:  # Ctrl-C
            _end(process)
            raise
        finally:
            with self.lock:
                self.running.discard(process)
        return process.returncode, errors


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _end(process: subprocess.Popen[str]) -> None:
    """End a compiler; on SIGTERM it removes its own temporary files, so that comes first."""
    _signal(process, signal.SIGTERM)
    try:
        process.wait(timeout=2)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGKILL)
        process.wait()


def _build_all(compiler: Compiler, sources: dict[str, str]) -> Generator[tuple[str, _Result], None, None]:
    """Build every source, as many at a time as there are processors; yields each when it is done.

    When the caller gives up, be it on an error or on Ctrl-C, the compilers that still run are ended.
    """
    builds = _Builds(_BUILDS)
    with ThreadPoolExecutor(processors(), "terrazzo-compile") as pool:
        try:
            futures = {pool.submit(builds.build, compiler, source): key for key, source in sources.items()}
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            builds.stop()


def _failure(compiler: Compiler, source: str, result: _Result, cache: Cache) -> Exception:
    lines = result.errors.strip().splitlines() or ["(it said nothing)"]
    told = [line for line in lines if "error" in line.lower()] or lines
    if any(trouble in result.errors for trouble in _TROUBLE):
        return UserError(f"the C++ compiler ran out of disk space or memory: {told[0]}")
    saved = cache.put(digest("source that failed", source), ".cpp", source.encode())
    again = shlex.join(compiler.build(str(saved), "kernel.so"))
    if result.late:
        return UserError(
            f"the C++ compiler {compiler.command[0]} was stopped: one source took it more than {_BUILDS:g} s. "
            f"Name another with --compiler or the option compiler. To see it hang:\n{again}"
        )
    return CompilerBug(
        "\n".join(["generated C++ does not compile:", *told[:5], f"The source is {saved}. To reproduce:", again])
    )


def _candidates() -> Iterator[tuple[str, ...]]:
    for name in ("c++", "g++", "clang++"):
        if command := _resolve(name):
            yield command
    if importlib.util.find_spec("ziglang") is not None:
        yield (sys.executable, "-m", "ziglang", "c++")


def _resolve(program: str, *arguments: str) -> tuple[str, ...] | None:
    path = shutil.which(program)
    return (path, *arguments) if path else None


@functools.cache
def _version(command: tuple[str, ...]) -> tuple[str, str]:
    """The first line of what the command says of itself (name, version, and usually the distribution's build), and
    otherwise why there is none.
    """
    try:
        process = subprocess.Popen(
            [*command, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            process_group=0,
        )
    except OSError as error:
        return "", str(error)
    try:
        told, _ = process.communicate(timeout=_SAYS)
    except subprocess.TimeoutExpired:
        _end(process)
        return "", f"it does not answer `--version` within {_SAYS:g} s"
    except BaseException:  # Ctrl-C
        _end(process)
        raise
    return (told.partition("\n")[0].strip(), "") if process.returncode == 0 else ("", "it does not know `--version`")


def _probe(command: tuple[str, ...], cache: Cache) -> Compiler | str:
    """The compiler with the best flags that work with it, or why it cannot make a shared object."""
    version, problem = _version(command)
    if problem:
        return problem
    choices = [Compiler(command, version, _for(command, flags), libraries) for flags, libraries in _CHOICES]
    key = digest("probe", version, processor(), _PROBE, *command, *(shlex.join(c.flags + c.libraries) for c in choices))
    known = cache.get(key, ".txt")
    names = [str(number) for number in range(len(choices))]
    if known is not None and (text := known.read_text()) in names:
        return choices[names.index(text)]
    for name, choice in zip(names, choices, strict=True):
        result = _Builds(_PROBES).build(choice, _PROBE)
        if result.late:
            return f"ten lines took it more than {_PROBES:g} s"
        if result.data is None:
            said = next(iter(result.errors.strip().splitlines()), "it made no file")
            problem = f"it cannot build ten lines of C++17: {said[:300]}"
        elif not (problem := _runs(result.data)):
            cache.put(key, ".txt", name.encode())
            return choice
    return problem


def _runs(probe: bytes) -> str:
    """Why the probe does not run here, in a process that may end on its first instruction; "" if it does."""
    if not sys.executable:  # an embedded Python, which cannot be started
        return ""
    with tempfile.TemporaryDirectory(prefix="terrazzo-") as directory:
        path = Path(directory) / "probe.so"
        path.write_bytes(probe)
        command = [sys.executable, "-I", "-S", "-c", _RUN, str(path)]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                                  timeout=_PROBES)  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"what it builds cannot be tried here: {error}"
    if done.returncode < 0:
        return f"what it builds does not run on this processor ({signal.strsignal(-done.returncode)})"
    said = next(reversed(done.stderr.strip().splitlines()), "no word why")
    return f"what it builds does not run here: {said[:300]}" if done.returncode else ""


def _for(command: tuple[str, ...], flags: tuple[str, ...]) -> tuple[str, ...]:
    """The flags, without a processor of ours where the command names one."""
    named = any(word.startswith(("-march=", "-mcpu=")) for word in command)
    return tuple(f for f in flags if not (named and f.startswith("-march=")))
