"""The meaning of Loop IR, on numpy: every term at every point of its axes at once.

A term is computed as an array with one dimension per axis it depends on. Large reductions are computed in pieces, so
that the interpreter needs little more memory than the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from terrazzo.errors import CompilerBug, DivisionByZero, UserError, about
from terrazzo.interp import index, monoid
from terrazzo.interp.tensor import Call, numpy_type
from terrazzo.ir.contraction import is_product, summands
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects.scalar import is_cast
from terrazzo.ir.expr import Expr
from terrazzo.ir.monoid import Monoid, numpy_builder
from terrazzo.ir.node import Node
from terrazzo.ir.types import DTYPES, f32, f64

PIECE = 1 << 22
"""How many points of a reduction are computed at once."""


def run(
    program: l.Program,
    inputs: Mapping[str, Any],
    *,
    precise: bool = False,
    call: Call | None = None,
    zero_divides: bool = True,
) -> list[Any]:
    """The results of `program`. With `precise`, every float is computed in float64. Without `zero_divides`, a whole
    number divided by zero is a DivisionByZero, as it is on a CPU.
    """
    memory: dict[l.Buffer, Any] = {}
    for b in program.inputs:
        given = np.asarray(inputs[b.name])
        with about(b):
            if given.shape != b.type.static_shape:
                raise UserError(f"input {b.name} has shape {list(given.shape)}, expected {list(b.type.shape)}")
        memory[b] = given.astype(numpy_type(b.type.dtype, precise))
    for step in program.steps:
        with about(step):
            if isinstance(step, l.Kernel):
                run_kernel(step, memory, precise, zero_divides)
            else:
                run_call(step, memory, precise, call)
    return [memory[b] for b in program.results]


def run_kernel(kernel: l.Kernel, memory: dict[l.Buffer, Any], precise: bool = False, zero_divides: bool = True) -> None:
    """Run one kernel on `memory`, adding the buffers it stores."""
    extents = [_int(a.extent) for a in kernel.axes]
    env = index.grid(kernel.axes, extents)
    done: dict[Node, Any] = {}
    for store in kernel.stores:
        shape, dtype = store.buffer.type.static_shape, numpy_type(store.buffer.type.dtype, precise)
        below = np.zeros(shape, dtype) if store.over is None else memory[store.over].copy()
        out = memory.setdefault(store.buffer, below)
        if 0 in extents:
            continue
        evaluator = _Evaluator(memory, precise, len(extents), zero_divides)
        value = evaluator.value(store.value, env, done)
        axes = frozenset().union(*(e.free for e in store.index if isinstance(e, Expr)))
        where = evaluator.indices(store.index, env, done)
        full = np.broadcast_shapes(*(np.shape(w) for w in where), *(np.shape(env[a]) for a in axes)) if where else ()
        out[tuple(np.broadcast_to(w, full) for w in where)] = np.broadcast_to(_squeeze(value, full), full)


class _Evaluator:
    """Computes terms at all points of `env` at once; `rank` is the number of dimensions in use."""

    def __init__(self, memory: Mapping[l.Buffer, Any], precise: bool, rank: int, zero_divides: bool) -> None:
        self.memory, self.precise, self.rank, self.zero_divides = memory, precise, rank, zero_divides

    def value(self, term: Node, env: Mapping[Expr, Any], done: dict[Node, Any]) -> Any:
        if term not in done:
            done[term] = self._compute(term, env, done)
        return done[term]

    def _compute(self, term: Node, env: Mapping[Expr, Any], done: dict[Node, Any]) -> Any:
        match term:
            case l.Literal():
                return np.asarray(term.value, numpy_type(term.type, self.precise))
            case l.Index():
                return np.asarray(self.indices([term.value], env, done)[0]).astype(np.int64)
            case l.Apply():
                args = [self.value(a, env, done) for a in term.args]
                if is_cast(term.fn) and self.precise and DTYPES[term.fn.name].is_float:
                    return args[0].astype(np.float64)
                if not self.zero_divides and l.may_divide_by_zero(term) and not np.all(args[1]):
                    raise DivisionByZero("a whole number is divided by zero")
                return np.asarray(term.fn.numpy(*args))
            case l.Load():
                return self._load(term, env, done)
            case l.Get():
                return self.value(term.x, env, done)[term.index]
            case l.Reduce():
                return self._reduce(term, env)
            case l.Scan():
                return self._scan(term, env)
        raise CompilerBug(f"the Loop IR interpreter does not know {type(term).__name__}")

    def indices(self, exprs: Sequence[Any], env: Mapping[Expr, Any], done: dict[Node, Any]) -> list[Any]:
        return index.values(exprs, env, lambda term, _: self.value(term, env, done))

    def _load(self, term: l.Load, env: Mapping[Expr, Any], done: dict[Node, Any]) -> Any:
        data = self.memory[term.buffer]
        found = self.indices((*term.index, *term.inside), env, done)
        where, mask = found[: len(term.index)], np.asarray(True)
        for e in found[len(term.index) :]:
            mask = mask & (np.asarray(e) >= 0)
        if not mask.all():
            if data.size == 0:
                return np.zeros((), data.dtype)
            where = [np.where(mask, w, 0) for w in where]
        for w, extent in zip(where, data.shape, strict=True):
            if np.size(w) and (np.min(w) < 0 or np.max(w) >= extent):
                raise CompilerBug(
                    f"load leaves {term.buffer.name}: indices {np.min(w)}..{np.max(w)} into extent {extent}"
                )
        out = data[tuple(where)]
        return out if mask.all() else np.where(mask, out, np.zeros((), data.dtype))

    def _reduce(self, term: l.Reduce, env: Mapping[Expr, Any]) -> Any:
        """Open new dimensions at the end, for as many points at a time as fit."""
        axes, args = l.open_binder(term)
        extents = [_int(a.extent) for a in axes]
        used = [v for v in env if v in term.free]
        outer = int(np.prod([np.size(env[v]) for v in used], dtype=np.int64))
        inner_size = int(np.prod(extents[1:], dtype=np.int64))
        step = max(1, PIECE // max(outer * inner_size, 1))
        dtypes = [a.dtype for a in args]  # type: ignore[attr-defined]
        total: Any = None
        for start in range(0, max(extents[0], 1), step):
            part = self._piece(term, axes, args, dtypes, env, extents, range(start, min(start + step, extents[0])))
            total = part if total is None else term.monoid.combine(numpy_builder, total, part)
        return total if term.monoid.width > 1 else total[0]

    def _piece(
        self,
        term: l.Reduce,
        axes: Any,
        args: Any,
        dtypes: Any,
        env: Mapping[Expr, Any],
        extents: list[int],
        first: range,
    ) -> tuple[Any, ...]:
        n, rank = len(axes), self.rank
        here: dict[Expr, Any] = {v: np.reshape(a, np.shape(a) + (1,) * n) for v, a in env.items()}
        sizes = [len(first), *extents[1:]]
        for d, (v, size) in enumerate(zip(axes, sizes, strict=True)):
            points = np.arange(size) + (first.start if d == 0 else 0)
            here[v] = points.reshape([1] * rank + [-1 if k == d else 1 for k in range(n)])
        inner = _Evaluator(self.memory, self.precise, rank + n, self.zero_divides)
        done: dict[Node, Any] = {}
        factors, scales = _factors(term.monoid, args)
        values = [inner.value(a, here, done) for a in factors or args]
        shape = np.broadcast_shapes(*(np.shape(v) for v in values), (1,) * rank + tuple(sizes))
        full = [np.broadcast_to(v, shape) for v in values]
        along = tuple(range(rank, rank + n))
        if not factors:
            return monoid.reduce(term.monoid, full, along, dtypes)
        sums = [monoid.sum_of_products(a, b, along) for a, b in zip(full[::2], full[1::2], strict=True)]
        with np.errstate(all="ignore"):
            sums = [s if scale == 1 else s * s.dtype.type(scale) for s, scale in zip(sums, scales, strict=True)]
            return (sum(sums[1:], start=sums[0]),)

    def _scan(self, term: l.Scan, env: Mapping[Expr, Any]) -> Any:
        at = term.at
        assert isinstance(at, Expr)
        done: dict[Node, Any] = {}
        values = [np.asarray(self.value(a, env, done)) for a in term.step]
        position = int(np.argmax(np.shape(env[at]))) if np.size(env[at]) > 1 else self.rank - 1
        shape = np.broadcast_shapes(*(v.shape for v in values), np.shape(env[at]))
        dtypes = [a.dtype for a in term.args]  # type: ignore[attr-defined]
        out = monoid.scan(
            term.monoid, [np.ascontiguousarray(np.broadcast_to(v, shape)) for v in values], position, dtypes
        )
        return out if term.monoid.width > 1 else out[0]


def run_call(step: l.Call, memory: dict[l.Buffer, Any], precise: bool, call: Call | None) -> None:
    if call is None:
        raise UserError(f"{step.name} is opaque and this interpreter was given no way to run PyTorch")

    def fill(value: Any) -> Any:
        if isinstance(value, l.Buffer):
            return memory[value]
        if isinstance(value, l.View):
            return _window(value, memory[value.buffer])
        return tuple(fill(v) for v in value) if isinstance(value, tuple) else value

    out = call(step.name, fill(step.args), {k: fill(v) for k, v in step.kwargs}, precise)
    for buffer, value in zip(step.results, out if isinstance(out, (tuple, list)) else (out,), strict=True):
        if buffer is not None:
            memory[buffer] = np.asarray(value)


def _window(view: l.View, array: Any) -> Any:
    """What lies in a window on the memory of a buffer that holds the array."""
    ty = view.buffer.type
    places = np.arange(ty.span // ty.dtype.size)

    def strided(x: Any, shape: Any, strides: Any) -> Any:
        return np.lib.stride_tricks.as_strided(x, shape, [s * x.itemsize for s in strides])

    memory = np.zeros(len(places), array.dtype)
    memory[strided(places, ty.static_shape, ty.element_strides)] = array
    return memory[strided(places[view.offset :], view.shape, view.strides)]


def _factors(m: Monoid, args: Sequence[Any]) -> tuple[list[Any], list[float]]:
    """The factors of sums of products of floats, whose products need not be written out, pair after pair; and what each
    product is scaled by.
    """
    products = list(summands(args[0])) if m.name == "sum" and args[0].dtype in (f32, f64) else []
    if not all(is_product(x) for x, _ in products):
        return [], []
    return [f for x, _ in products for f in x.args], [scale for _, scale in products]  # type: ignore[attr-defined]


def _int(extent: Any) -> int:
    if not isinstance(extent, int):
        raise UserError(f"the interpreter needs a concrete size, not {extent}")
    return extent


def _squeeze(value: Any, full: tuple[int, ...]) -> Any:
    """Drop leading dimensions of extent 1 that the store does not have."""
    value = np.asarray(value)
    while value.ndim > len(full):
        value = value[0]
    return value
