"""Is a result right? It may be as far from float64 as the program's own types are, wherever they happen to round.

What is read twice may be computed twice, in two orders of additions: so every value has two versions, which round
differently.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from terrazzo.interp import monoid
from terrazzo.interp.tensor import evaluate, numpy_type
from terrazzo.interp.torch import call_numpy
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.monoid import numpy_builder
from terrazzo.ir.node import Node, topological
from terrazzo.ir.program import Input, Program

KEEPS = ("neg", "abs", "min", "max", "fmin", "fmax", "where", "copysign", "sign", "floor", "ceil", "trunc", "round")
"""Functions and monoids that round nothing."""


class Judge:
    """The results of a Tensor IR program: in float64, in its own types, and in its own types where every rounding goes
    another way.
    """

    def __init__(self, program: Program, inputs: Mapping[str, Any]) -> None:
        self.inputs = {i: np.asarray(inputs[i.name]) for i in program.inputs}
        nodes = topological(program.results, stop=lambda n: isinstance(n, Input))
        self.nodes = [n for n in nodes if isinstance(n, t.Value) and not isinstance(n, t.Read)]
        self.results = program.results
        self.exact, self.plain = self._run(True), self._run(False)
        self.others: list[dict[Node, Any]] = []

    def problem(self, ours: list[Any]) -> str:
        """What is wrong with these results; "" if nothing is."""
        for count in (2, 200):  # few roundings may all go the same way: before anybody is accused, many are looked at
            while len(self.others) < count:
                self.others += self._rounded_otherwise(np.random.default_rng(len(self.others)))
            problems = (self._differs(n, r, x) for n, (r, x) in enumerate(zip(self.results, ours, strict=True)))
            if not (found := "; ".join(filter(None, problems))):
                return ""
        return found

    def _run(self, precise: bool) -> dict[Node, Any]:
        values = self._given(precise)
        for node in self.nodes:
            values[node] = evaluate(node, values, precise, call_numpy)
        return values

    def _given(self, precise: bool) -> dict[Node, Any]:
        return {i: x.astype(numpy_type(i.type.dtype, precise)) for i, x in self.inputs.items()}

    def _rounded_otherwise(self, noise: np.random.Generator) -> tuple[dict[Node, Any], dict[Node, Any]]:
        """Two versions of all values; either reads one version of each operand."""
        versions = self._given(False), self._given(False)
        for node in self.nodes:
            for own in versions:
                seen = ChainMap({c: versions[noise.integers(2)][c] for c in node.children if c in own}, own)
                found = None
                if isinstance(node, t.Reduce):
                    found = self._in_another_order(node, seen, noise)
                elif isinstance(node, t.Scan):
                    found = self._in_parts(node, seen, noise)
                own[node] = self._rounded(
                    node, evaluate(node, seen, False, call_numpy) if found is None else found, noise
                )
        return versions

    def _in_another_order(self, node: t.Reduce, values: Mapping[Node, Any], noise: np.random.Generator) -> Any:
        """A reduction of floats one after the other, in any order; None for what no order changes."""
        given = [values[a] for a in node.args]
        if not node.args[0].type.dtype.is_float or not node.axes or 0 in given[0].shape:  # type: ignore[attr-defined]
            return None
        last = range(given[0].ndim - len(node.axes), given[0].ndim)
        rows = [
            np.moveaxis(x, node.axes, last).reshape(*(e for d, e in enumerate(x.shape) if d not in node.axes), -1)
            for x in given
        ]
        order = (
            np.arange(rows[0].shape[-1])[:: noise.choice((1, -1))]
            if noise.integers(2)
            else noise.permutation(rows[0].shape[-1])
        )
        rows = [x[..., order] for x in rows]
        if node.monoid.ufunc is not None:
            with np.errstate(all="ignore"):
                return node.monoid.ufunc.accumulate(rows[0], axis=-1)[..., -1]
        cut = noise.integers(len(order) + 1)  # parts of any lengths
        dtypes = [a.type.dtype for a in node.args]  # type: ignore[attr-defined]
        left, right = (
            monoid.reduce(node.monoid, [x[..., part] for x in rows], (rows[0].ndim - 1,), dtypes)
            for part in (slice(None, cut), slice(cut, None))
        )
        return node.monoid.combine(numpy_builder, left, right)

    def _in_parts(self, node: t.Scan, values: Mapping[Node, Any], noise: np.random.Generator) -> Any:
        """A scan of floats in parts of some length, each of which goes on from what those before it come to; None for
        what that does not change.
        """
        x, ufunc = values[node.args[0]], node.monoid.ufunc
        if ufunc is None or not _is_float(x.dtype) or not x.shape[node.axis]:
            return None
        rows = np.moveaxis(x, node.axis, -1)
        size = 1 << int(noise.integers(8))
        with np.errstate(all="ignore"):
            parts = [ufunc.accumulate(rows[..., n : n + size], axis=-1) for n in range(0, rows.shape[-1], size)]
            ends = ufunc.accumulate(np.stack([p[..., -1] for p in parts], axis=-1), axis=-1)
            parts[1:] = [ufunc(ends[..., n, None], p) for n, p in enumerate(parts[1:])]
        return np.moveaxis(np.concatenate(parts, axis=-1), -1, node.axis)

    def _rounded(self, node: t.Value, found: Any, noise: np.random.Generator) -> Any:
        """A result with its last place moved either way, where it was rounded at all."""
        if isinstance(found, tuple):
            return tuple(
                self._moved(x, p, e, noise) for x, p, e in zip(found, self.plain[node], self.exact[node], strict=True)
            )
        match node:
            case t.Elementwise() if node.fn.name not in KEEPS:
                return self._moved(found, self.plain[node], self.exact[node], noise)
            case t.Reduce() | t.Scan() if node.monoid.name not in KEEPS:
                return self._moved(found, self.plain[node], self.exact[node], noise)
        return found

    def _moved(self, x: Any, plain: Any, exact: Any, noise: np.random.Generator) -> Any:
        if not _is_float(x.dtype):
            return x
        with np.errstate(all="ignore"):
            rounded = plain != np.rint(plain) if x.dtype == np.float64 else plain.astype(np.float64) != exact
            there = np.where(noise.integers(0, 2, x.shape, dtype=np.int8), np.inf, -np.inf).astype(x.dtype)
            return np.where(rounded & np.isfinite(x), np.nextafter(x, there), x)

    def _differs(self, number: int, node: Node, ours: Any) -> str:
        plain, exact = self.plain[node], self.exact[node]
        if ours.shape != plain.shape or ours.dtype != plain.dtype:
            return f"result {number} is {ours.dtype}{list(ours.shape)}, not {plain.dtype}{list(plain.shape)}"
        theirs = [plain, *(o[node] for o in self.others)]
        if not _is_float(plain.dtype):
            wrong = np.logical_and.reduce([x == plain for x in theirs]) & (ours != plain)
            return _first(number, wrong, ours, plain)
        mine, best = ours.astype(np.float64), exact.astype(np.float64)
        wide = [x.astype(np.float64) for x in theirs]
        settled = np.logical_and.reduce(
            [_class(x) == _class(best) for x in wide]
        )  # not near an overflow, a zero below a root, ...
        finite = np.isfinite(best)
        about = ml_dtypes.finfo(plain.dtype)
        with np.errstate(all="ignore"):
            error = np.maximum.reduce([np.abs(x - best) for x in wide])
            near = np.abs(mine - best) <= 2 * error + 4 * float(about.eps) * np.abs(best) + 4 * float(about.tiny)
        return _first(number, settled & ((_class(mine) != _class(best)) | (finite & ~near)), ours, exact)


def _is_float(dtype: Any) -> bool:
    return dtype.kind == "f" or dtype == ml_dtypes.bfloat16


def _class(x: Any) -> Any:
    """Finite, NaN, or which infinity."""
    return np.where(np.isnan(x), 3, np.where(np.isfinite(x), 0, np.sign(x)))


def _first(number: int, wrong: Any, ours: Any, right: Any) -> str:
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"result {number}{list(at)} is {ours[at]!r}, not {right[at]!r} ({int(wrong.sum())} of {wrong.size} are wrong)"
    )
