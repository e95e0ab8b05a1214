"""Running single programs of Tensor IR through the CPU target, many of them in one compilation."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terrazzo.interp import loop as interp
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.program import Input, Program
from terrazzo.ir.text import show
from terrazzo.options import Options
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.cost import Rates
from terrazzo.rules.loop.fusion.fuse import fuse
from terrazzo.rules.tensor_to_loop.lift import lift
from terrazzo.run.cache import Cache
from terrazzo.run.compiler import compile_all, processor
from terrazzo.targets.cpu.emit import arguments, emit, prelude

COMPILER = next(filter(shutil.which, ("c++", "g++", "clang++")), None)

NEEDS = {
    "x86-64-v2": "cx16 lahf_lm popcnt ssse3 sse4_1 sse4_2",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
}
"""Levels of x86-64 whose vectors have 16 and 32 bytes, with what each adds, as /proc/cpuinfo calls it. Vectors of 64
bytes are what "native" means on a processor that has them.
"""


def march(name: str) -> Any:
    """A processor to compile for, skipped where this machine is none."""
    levels = list(NEEDS)[: list(NEEDS).index(name) + 1]
    lacking = {*" ".join(NEEDS[level] for level in levels).split()} - {*processor().split()}
    if platform.machine() not in ("x86_64", "AMD64"):
        why = f"this machine is {platform.machine()}"
    else:
        why = f"this processor has no {', '.join(sorted(lacking))}" if lacking else ""
    return pytest.param(f"{COMPILER} -march={name}", id=name, marks=pytest.mark.skipif(bool(why), reason=why))


MARCHES = (pytest.param(COMPILER, id="native"), *map(march, NEEDS))
"""Commands of the compiler, each for another processor. The width of vectors, the blocks of products and whether there
is a fused multiply-add differ, and no result may depend on them.
"""


class OutOfRange(Exception):
    """A kernel reported an index outside its dimension."""


def program(*results: Any) -> l.Program:
    """The fused program of these values of Tensor IR. Its inputs are called by their own names."""
    from terrazzo.ir.node import topological

    inputs = tuple(n for n in topological(results) if isinstance(n, Input))
    return fuse(lift(Program("tensor", "test", inputs, tuple(results))), Log(), Rates())


class Suite:
    """Programs by name, compiled together: one source for all of their kernels."""

    def __init__(self, directory: Path, compiler: str | None = None) -> None:
        self.programs: dict[str, l.Program] = {}
        self.sources: dict[str, list[str]] = {}
        self.functions: dict[l.Kernel, Any] = {}
        self.directory = directory
        self.compiler = compiler

    def add(self, name: str, p: l.Program) -> None:
        """Register a program."""
        self.programs[name] = p

    def build(self, pieces: int = 2) -> None:
        """Compile what was registered, in this many sources, which are compiled in parallel."""
        texts: list[list[str]] = [[] for _ in range(pieces)]
        where: dict[l.Kernel, tuple[int, str]] = {}
        for p in self.programs.values():
            for k in (s for s in p.steps if isinstance(s, l.Kernel)):
                if k not in where:
                    name, source = emit(k)
                    piece, unique = len(where) % pieces, f"{name}_{len(where)}"
                    texts[piece].append(_called(unique, name, source.removeprefix(prelude())))
                    where[k] = piece, unique
        cache = Cache(self.directory, 1 << 30)
        options = Options(cache_dir=self.directory, compiler=self.compiler)
        paths = compile_all([prelude() + "\n".join(t) for t in texts], options, cache)
        libraries = [ctypes.CDLL(str(p)) for p in paths]
        for k, (piece, name) in where.items():
            self.functions[k] = getattr(libraries[piece], name)

    def run(
        self, name: str, inputs: Mapping[str, Any], threads: int = os.cpu_count() or 1, by_zero: bool = False
    ) -> list[Any]:
        """The results of a program, by its kernels, which must note whether they divide whole numbers by zero."""
        p = self.programs[name]
        memory: dict[l.Buffer, Any] = {b: _stored(inputs[b.name], b) for b in p.inputs}
        for step in p.steps:
            assert isinstance(step, l.Kernel)
            for b in step.writes:
                memory.setdefault(b, _stored(np.zeros(b.type.static_shape, b.type.dtype.numpy), b))
            pointers = (ctypes.c_void_p * 64)(*(memory[b].ctypes.data for b in arguments(step)))
            problems = self.functions[step](pointers, threads)
            if problems & 1:
                raise OutOfRange(name)
            assert bool(problems & 2) == by_zero, f"{name}: divided by zero is {bool(problems & 2)}"
        return [memory[b] for b in p.results]

    def check(self, name: str, inputs: Mapping[str, Any], rtol: float = 2e-6, atol: float = 2e-6) -> None:
        """The compiled kernels give what the interpreter gives: integers bit for bit, floats up to rounding."""
        expected = interp.run(self.programs[name], inputs)
        for ours, theirs in zip(self.run(name, inputs), expected, strict=True):
            assert_close(ours, theirs, rtol, atol, name + "\n" + show(self.programs[name]))


def assert_close(ours: Any, theirs: Any, rtol: float, atol: float, message: str) -> None:
    """Equal, or for floats equal up to a tolerance; NaN where NaN is, infinity where infinity is."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, message
    if ours.dtype.kind in "biu":
        np.testing.assert_array_equal(ours, theirs, err_msg=message)
    else:
        wide = ours.astype(np.float64), theirs.astype(np.float64)
        np.testing.assert_allclose(*wide, rtol=rtol, atol=atol, equal_nan=True, err_msg=message)


def _stored(x: Any, b: l.Buffer) -> Any:
    """A copy of `x` that lies in memory as the buffer's type says."""
    x = np.asarray(x).astype(b.type.dtype.numpy)
    strides: Sequence[int] = [int(s) for s in b.type.element_strides]  # type: ignore[arg-type]
    span = 1 + sum((e - 1) * s for e, s in zip(x.shape, strides, strict=True)) if x.size else 0
    memory = np.zeros(span, x.dtype)
    view = np.lib.stride_tricks.as_strided(memory, x.shape, [s * x.itemsize for s in strides])
    view[...] = x
    return view


def _called(name: str, was: str, source: str) -> str:
    """The source of a kernel with its function, and the table of its memory, called otherwise."""
    return source.replace(f"int {was}(", f"int {name}(").replace(f"{was}_spans[]", f"{name}_spans[]")
