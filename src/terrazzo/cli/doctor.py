"""`terrazzo doctor`: what this machine has, and what to do about what it lacks."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from terrazzo.cli.output import as_json, columns, say
from terrazzo.cli.request import Json
from terrazzo.errors import TerrazzoError
from terrazzo.run.processors import processors

if TYPE_CHECKING:
    from terrazzo.run.cache import Cache


@dataclass(frozen=True)
class Finding:
    """One line: what was found, or what is lost without it and how to get it in `advice`. `needed` makes its absence a
    failure.
    """

    name: str
    found: str
    advice: str = ""
    needed: bool = False

    @property
    def ok(self) -> bool:
        """What is missing was not found, and nothing else is."""
        return bool(self.found)


def doctor(json: Json = False) -> None:
    """Check this machine: one line for each thing that Terrazzo uses, with what to do where it is missing."""
    findings = list(examine())
    if json:
        as_json([{**asdict(f), "ok": f.ok, "advice": "" if f.ok else f.advice} for f in findings])
    else:
        rows = [(f.name, "ok" if f.ok else "missing", f.found if f.ok else f.advice) for f in findings]
        for finding, line in zip(findings, columns(rows), strict=True):
            say(line, None if finding.ok else "red" if finding.needed else "yellow")
    if any(f.needed and not f.ok for f in findings):
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """Everything worth looking at, from what is needed to what is nice to have."""
    python = platform.python_version() if sys.version_info >= (3, 11) else ""
    yield Finding("python", python, "install Python 3.11 or newer", needed=True)
    yield _package("torch", "`pip install torch`: without it nothing is captured", needed=True)
    yield _package("transformers", "`pip install 'terrazzo[hf]'`: without it no model of Hugging Face is loaded")
    yield from _compiler()
    yield Finding("cores", f"{processors()} usable of {os.cpu_count()}")
    yield from _gpu()


def _package(name: str, advice: str, needed: bool = False) -> Finding:
    try:
        found = version(name) if importlib.util.find_spec(name) is not None else ""
    except PackageNotFoundError:
        found = ""
    return Finding(name, found, advice, needed)


def _compiler() -> Iterator[Finding]:
    from terrazzo.options import Options
    from terrazzo.run.cache import Cache
    from terrazzo.run.compiler import find_compiler

    options = Options()
    cache = Cache(options.cache_dir, options.cache_limit)
    refused = _unusable(cache)
    advice = "`apt install g++` or `pip install ziglang`: without one the interpreter runs, slowly"
    with tempfile.TemporaryDirectory(prefix="terrazzo-") as other:
        try:
            usable = Cache(Path(other), options.cache_limit) if refused else cache
            compiler = find_compiler(os.environ.get("TERRAZZO_COMPILER") or None, usable)
        except TerrazzoError as error:
            compiler, advice = None, str(error)
    yield Finding("compiler", compiler.version if compiler else "", advice)
    if compiler is not None:
        several = "kernels use several threads" if compiler.parallel else ""
        yield Finding("openmp", several, "this compiler has no OpenMP: kernels use one thread")
        vector = "libmvec" if "-lmvec" in compiler.libraries else ""
        yield Finding("vector math", vector, "no libmvec: exp, tanh and the like are computed one at a time")
    yield Finding("cache", "" if refused else str(cache.directory), refused)


def _gpu() -> Iterator[Finding]:
    """The driver, a GPU that PyTorch sees and that kernels can be launched on, and NVRTC."""
    driver = "an NVIDIA driver" if shutil.which("nvidia-smi") else ""
    yield Finding("driver", driver, "no NVIDIA driver: kernels for GPUs are printed, and run on the processor")
    if driver:
        yield _device()
    try:
        from terrazzo.run.nvrtc import nvrtc_version

        yield Finding("nvrtc", nvrtc_version())
    except TerrazzoError as error:
        yield Finding("nvrtc", "", str(error))


def _device() -> Finding:
    from terrazzo.run.cuda import Cuda, architecture, devices

    if not devices():
        return Finding("gpu", "", "PyTorch sees no GPU: install a build of it for CUDA")
    try:
        Cuda("cuda:0", architecture())  # what a launch asks for
        return Finding("gpu", f"{devices()} of {architecture()}")
    except ImportError as error:
        return Finding("gpu", "", f"`pip install 'terrazzo[cuda]'`: kernels are launched with {error.name}")
    except TerrazzoError as error:
        return Finding("gpu", "", str(error))


def _unusable(cache: Cache) -> str:
    """Why nothing can be kept in the cache's directory, or in the one where it will be made."""
    place = next(p for p in (cache.directory, *cache.directory.parents) if p.exists())
    try:
        cache.refuse_shared()
    except TerrazzoError as error:
        return str(error)
    if not place.is_dir():
        return f"{place} is not a directory; set TERRAZZO_CACHE_DIR to one of your own"
    if not os.access(place, os.W_OK):
        return f"{place} cannot be written; set TERRAZZO_CACHE_DIR to a directory of your own"
    full = shutil.disk_usage(place).free <= 1 << 20
    return f"the disk of {place} is full; free some space or set TERRAZZO_CACHE_DIR" if full else ""
