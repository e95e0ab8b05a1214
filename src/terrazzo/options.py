"""Everything a user may choose, in one frozen record that is passed explicitly.

The environment is read in this file and under `cli/`, nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from terrazzo.errors import UserError

TARGETS = ("auto", "cpu", "interpreter", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_120")

LIBRARIES = ("auto", "never")
PRECISIONS = ("auto", "exact", "split", "tf32", "bf16")

# The modes of torch.compile.
MODES: dict[str, dict[str, object]] = {
    "default": {},
    "reduce-overhead": {"graph": True},
    "max-autotune": {"graph": True, "tune": 120},
    "max-autotune-no-cudagraphs": {"graph": False, "tune": 120},
}


def default_cache_directory(environ: Mapping[str, str]) -> Path:
    """`$TERRAZZO_CACHE_DIR`, else `$XDG_CACHE_HOME/terrazzo`, else `~/.cache/terrazzo`; an empty variable counts as
    unset.
    """
    if own := environ.get("TERRAZZO_CACHE_DIR"):
        return Path(own).expanduser()
    # The XDG specification says that a relative path is to be ignored.
    shared = Path(environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "terrazzo"


@dataclass(frozen=True)
class Options:
    """What to compile for, and how.

    target       one of `TARGETS`; "auto" is where the tensors are.
    graph        on a GPU, launch kernels that follow each other as one CUDA graph: None from the third call on, in
                 their order; True from the first one, branches side by side; False never. What a call takes may lie
                 elsewhere each time, and what it gives is its own: nothing of it is in the memory of a graph.
    libraries    "auto" calls an op of PyTorch where its library is faster than our kernels: on a GPU by the model, on
                 a processor for attention, for gradients of convolutions and some of these, for large products in
                 float32, and for products in bfloat16 where it has instructions for them; "never" runs our kernels for
                 every op that has them.
    schedules    schedules (text of Tile IR) that take the place of chosen ones, by the kernel's name.
    fp32         how products in float32 are computed on a GPU: "exact" on CUDA cores; where that is faster, "split" by
                 six products of bfloat16, or three of float16 where CUDA cores sum what these do not know closely
                 enough, as exactly as float32; "tf32" by one of float16, scaled row by row, or three of bfloat16, as
                 exactly as TF32 at least; "bf16" by one of bfloat16.
                 "auto" obeys torch.set_float32_matmul_precision: "highest" is "split", "high" "tf32", "medium"
                 "bf16".
    tf32         on a GPU, the digits of TF32 will do for the products of a convolution in float32, ours and those of a
                 library. Where programs are compiled to run, PyTorch's switch says it
                 (`torch.backends.cudnn.allow_tf32`).
    freezing     parameters and buffers are constants where no gradients are asked for: what depends on them alone, such
                 as the parts of weights in float32, is computed once and kept, as long as they are. It is computed
                 again when PyTorch counts a change (`tensor._version`) or other memory. Changes that it does not count
                 are not seen: through `.data`, by a fused optimizer, by a replayed CUDA graph, by other libraries.
    frozen       inputs (by their name in the listing) of which the same is true.
    updated      inputs (by their name) that a call changes: the last results are their new values, in this order. They
                 are stored where the inputs lie as soon as nothing needs the old values, and are not given back.
    tune         on a GPU, seconds that may be spent on measuring schedules for kernels of which none were measured yet.
    spills       accept kernels that spill registers to memory; otherwise another schedule is tried first.
    strict       under torch.compile a compiler bug is an error; otherwise it is a warning, and PyTorch runs the graph.
    threads      threads a compiled kernel may use; None takes as many as PyTorch uses.
    cache_dir    where compiled kernels are kept between runs.
    cache_limit  size in bytes above which the kernels unused for longest are dropped.
    compiler     the C++ compiler's command; None looks for one.
    materialize  buffers (by their name in the listing) that are written to memory instead of being fused away.
    fuse         False gives every operation a kernel of its own.
    check        run some blocks of every kernel for a GPU in the simulator, when it is derived.
    verbose      0 is quiet, 1 prints why rules were skipped, 2 also prints a diff per fired rule.
    dump         a directory that receives every stage and the events; None writes nothing.
    """

    target: str = "auto"
    graph: bool | None = None
    libraries: str = "auto"
    schedules: tuple[str, ...] = ()
    fp32: str = "auto"
    tf32: bool = False
    freezing: bool = False
    frozen: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    tune: int = 0
    spills: bool = False
    strict: bool = False
    threads: int | None = None
    cache_dir: Path = field(default_factory=lambda: default_cache_directory(os.environ))
    cache_limit: int = 2 << 30
    compiler: str | None = None
    materialize: tuple[str, ...] = ()
    fuse: bool = True
    check: bool = False
    verbose: int = 0
    dump: Path | None = None

    def __post_init__(self) -> None:
        if self.graph is None and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
            object.__setattr__(self, "graph", False)  # somebody asks which kernel it was
        if self.target not in TARGETS:
            raise UserError(f"there is no target {self.target!r}{_suggestion(self.target, TARGETS)}")
        if self.libraries not in LIBRARIES:
            raise UserError(f"option libraries: it is {' or '.join(LIBRARIES)}, not {self.libraries!r}")
        if self.fp32 not in PRECISIONS:
            raise UserError(f"option fp32: there is no {self.fp32!r}{_suggestion(self.fp32, PRECISIONS)}")
        if self.threads is not None and self.threads < 1:
            raise UserError(f"option threads: {self.threads} is not a number of threads; it must be at least 1")
        for name in ("cache_limit", "tune", "verbose"):
            if getattr(self, name) < 0:
                raise UserError(f"option {name}: {getattr(self, name)} is negative")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> Options:
        """The options of `torch.compile(..., options={...})`; a name or a type we do not know is a `UserError`."""
        converters = {f.name: _CONVERTERS[str(f.type)] for f in fields(cls)}
        for name in mapping:
            if name not in converters:
                raise UserError(f"there is no option {name!r}{_suggestion(name, tuple(converters))}")
        return cls(**{name: converters[name](name, value) for name, value in mapping.items()})

    def bound(self, names: Iterable[str]) -> Options:
        """The same with what `freezing` asks for: inputs that are bound, and only read, are frozen."""
        return replace(self, frozen=(*self.frozen, *names)) if self.freezing else self

    @classmethod
    def from_mode(cls, mode: str) -> Options:
        """The options that a mode of `torch.compile(..., mode="...")` stands for."""
        if mode not in MODES:
            raise UserError(f"there is no mode {mode!r}{_suggestion(mode, tuple(MODES))}")
        return cls.from_mapping(MODES[mode])


def _suggestion(wrong: object, known: tuple[str, ...]) -> str:
    close = get_close_matches(str(wrong), known, n=1)
    return (f"; did you mean {close[0]!r}?" if close else ".") + f" The known ones are {', '.join(known)}."


def _wrong(name: str, value: object, expected: str) -> UserError:
    return UserError(f"option {name}: expected {expected}, got {value!r} of type {type(value).__name__}")


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise _wrong(name, value, "True or False")


def _integer(name: str, value: object) -> int:
    # bool is a subclass of int, but `threads=True` is surely a slip.
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise _wrong(name, value, "a whole number")


def _text(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    raise _wrong(name, value, "a string")


def _path(name: str, value: object) -> Path:
    if isinstance(value, str | Path):
        return Path(value)
    raise _wrong(name, value, "a path")


def _names(name: str, value: object) -> tuple[str, ...]:
    # A string is a sequence of strings too; taking it would pin the buffers "b", "u", "f".
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise _wrong(name, value, "a list of names")


def _optional(convert: Callable[[str, object], Any]) -> Callable[[str, object], Any]:
    return lambda name, value: None if value is None else convert(name, value)


# By the annotation of the field, so that a new option needs no line here.
_CONVERTERS: dict[str, Callable[[str, object], Any]] = {
    "bool": _flag,
    "bool | None": _optional(_flag),
    "int": _integer,
    "int | None": _optional(_integer),
    "str": _text,
    "str | None": _optional(_text),
    "Path": _path,
    "Path | None": _optional(_path),
    "tuple[str, ...]": _names,
}
