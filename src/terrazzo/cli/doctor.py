"""`terrazzo doctor`: what this machine has, and what to do about what it lacks."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import typer

from terrazzo.cli.output import as_json, columns, say
from terrazzo.cli.request import Json
from terrazzo.errors import TerrazzoError


@dataclass(frozen=True)
class Finding:
    """One line: `ok`, or what is lost without it and how to get it in `advice`. `needed` makes its absence a
    failure.
    """

    name: str
    ok: bool
    found: str
    advice: str = ""
    needed: bool = False


def doctor(json: Json = False) -> None:
    """Check this machine: one line for each thing that Terrazzo uses, with what to do where it is missing."""
    findings = list(examine())
    if json:
        as_json([asdict(f) for f in findings])
    else:
        rows = [(f.name, "ok" if f.ok else "missing", f.found if f.ok else f.advice) for f in findings]
        for finding, line in zip(findings, columns(rows), strict=True):
            say(line, None if finding.ok else "red" if finding.needed else "yellow")
    if any(f.needed and not f.ok for f in findings):
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """Everything worth looking at, from what is needed to what is nice to have."""
    yield Finding(
        "python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or newer", needed=True
    )
    yield _package("torch", "`pip install torch`: without it nothing is captured", needed=True)
    yield _package("transformers", "`pip install 'terrazzo[hf]'`: without it no model of Hugging Face is loaded")
    yield from _compiler()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("cores", True, f"{cores} usable of {os.cpu_count()}")
    yield from _gpu()


def _package(name: str, advice: str, needed: bool = False) -> Finding:
    try:
        return Finding(name, importlib.util.find_spec(name) is not None, version(name), advice, needed)
    except PackageNotFoundError:
        return Finding(name, False, "", advice, needed)


def _compiler() -> Iterator[Finding]:
    from terrazzo.options import Options
    from terrazzo.run.cache import Cache
    from terrazzo.run.compiler import find_compiler

    options = Options()
    cache = Cache(options.cache_dir, options.cache_limit)
    advice = "`apt install g++` or `pip install ziglang`: without one the interpreter runs, slowly"
    try:
        compiler = find_compiler(os.environ.get("TERRAZZO_COMPILER") or None, cache)
    except TerrazzoError as error:
        compiler, advice = None, str(error)
    yield Finding("compiler", compiler is not None, compiler.version if compiler else "", advice)
    if compiler is not None:
        yield Finding(
            "openmp",
            compiler.parallel,
            "kernels use several threads",
            "this compiler has no OpenMP: kernels use one thread",
        )
        vector = "-lmvec" in compiler.libraries
        yield Finding("vector math", vector, "libmvec", "no libmvec: exp, tanh and the like are computed one at a time")
    writable, why = _writable(cache)
    yield Finding("cache", writable, str(cache.directory), why)


def _gpu() -> Iterator[Finding]:
    """The driver, a GPU that PyTorch sees and that has a record, and NVRTC."""
    driver = shutil.which("nvidia-smi") is not None
    yield Finding(
        "driver", driver, "an NVIDIA driver", "no NVIDIA driver: kernels for GPUs are printed, and run on the processor"
    )
    if driver:
        from terrazzo.run.cuda import architecture, devices

        try:
            found = f"{devices()} of {architecture()}" if devices() else ""
            yield Finding("gpu", bool(found), found, "PyTorch sees no GPU: install a build of it for CUDA")
        except TerrazzoError as error:
            yield Finding("gpu", False, "", str(error))
    try:
        from terrazzo.run.nvrtc import nvrtc_version

        yield Finding("nvrtc", True, nvrtc_version())
    except TerrazzoError as error:
        yield Finding("nvrtc", False, "", str(error))


def _writable(cache: object) -> tuple[bool, str]:
    """Whether the cache's directory, or where it will be made, takes a file."""
    directory = getattr(cache, "directory", None)
    assert directory is not None
    place = next(p for p in (directory, *directory.parents) if p.exists())
    if not os.access(place, os.W_OK):
        return False, f"{place} cannot be written; set TERRAZZO_CACHE_DIR to a directory of your own"
    free = shutil.disk_usage(place).free
    return free > 1 << 20, f"the disk of {place} is full; free some space or set TERRAZZO_CACHE_DIR"
