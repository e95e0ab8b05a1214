"""What every rule and every pass is tested with: random programs, and the demand that meaning and text survive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from terrazzo.interp import loop as loop_interp
from terrazzo.interp import tensor as tensor_interp
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.program import Input, Program
from terrazzo.ir.text import parse, show
from terrazzo.ir.types import DType, Type, bool_, f32, i64

UNARY = ("neg", "abs", "exp", "tanh", "floor")
BINARY = ("add", "sub", "mul", "max", "min")
MONOIDS = ("sum", "max", "min", "prod", "argmax", "argmin", "welford", "logsumexp")


def random_inputs(inputs: Sequence[Any], seed: int = 0) -> dict[str, Any]:
    """Normal floats, bools and 0 or 1 (indices of anything with extent 2), by name.

    Inputs called `whole…` hold small whole numbers, and those called `special…` some infinities and NaN.
    """
    rng = np.random.default_rng(seed)
    out: dict[str, Any] = {}
    for i in inputs:
        shape, dtype = i.type.static_shape, i.type.dtype
        if i.name.startswith("whole"):
            data = rng.integers(0 if dtype.kind in ("bool", "uint") else -4, 5, shape)
        else:
            data = rng.standard_normal(shape) if dtype.is_float else rng.integers(0, 2, shape)
        if i.name.startswith("special") and data.size:
            data.flat[rng.integers(0, data.size, 3)] = (np.nan, np.inf, -np.inf)
        out[i.name] = np.asarray(data).astype(dtype.numpy)
    return out


def run(program: Program | l.Program, inputs: dict[str, Any], **options: Any) -> list[Any]:
    """The results by the interpreter of the program's IR."""
    interp = loop_interp if isinstance(program, l.Program) else tensor_interp
    return interp.run(program, inputs, **options)  # type: ignore[arg-type]


def assert_same_meaning(before: Any, after: Any, seed: int = 0) -> None:
    """Both programs give the same results on random inputs, up to rounding, judged in float64."""
    inputs = random_inputs(before.inputs, seed)
    for a, b in zip(run(before, inputs, precise=True), run(after, inputs, precise=True), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9, err_msg=show(after))


def assert_round_trip(program: Any) -> None:
    """The text of a program reads back as the same program."""
    text = show(program)
    again = parse(text)
    assert show(again) == text
    if isinstance(program, l.Program):
        assert again == program, text
    else:
        assert again.results == program.results and again.inputs == program.inputs, text


@st.composite
def tensor_programs(draw: Any, steps: int = 8, extents: Sequence[int] = (1, 2, 3, 3, 4, 5)) -> Program:
    """A random Tensor IR program: views, arithmetic, reductions, scans, gathers and contractions over small shapes.

    Extents repeat, so that square and equal shapes are common: there a wrong axis changes no type.
    """
    shape = tuple(draw(st.lists(st.sampled_from(extents), min_size=1, max_size=3)))
    inputs = [Input("x", Type(f32, shape)), Input("y", Type(f32, shape)), Input("ids", Type(i64, (3,)))]
    values: list[Any] = list(inputs[:2])
    for _ in range(draw(st.integers(1, steps))):
        x = draw(st.sampled_from(values))
        kind = draw(
            st.sampled_from(("unary", "binary", "select", "view", "view", "reduce", "broadcast", "scan", "gather", "pad", "contract"))
        )
        values.append(_step(draw, kind, x, values, inputs[2]))
    results = tuple(draw(st.lists(st.sampled_from(values), min_size=1, max_size=2))) + (values[-1],)
    return Program("tensor", "random", tuple(inputs), results)


def _step(draw: Any, kind: str, x: Any, values: list[Any], ids: Any) -> Any:
    shape = x.type.shape
    here = t.coordinates(shape)
    same = [v for v in values if v.type.shape == shape]
    if kind == "binary":
        return t.apply(draw(st.sampled_from(BINARY)), x, draw(st.sampled_from(same)))
    if kind == "select":
        other = draw(st.sampled_from(same))
        return t.where(t.apply("lt", x, other), x, t.literal(draw(st.sampled_from((0.0, 1.5, -2.0))), f32, shape))
    if kind == "reduce" and shape:
        axes = sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
        return _reduce(draw(st.sampled_from(MONOIDS)), x, axes, draw(st.booleans()))
    if kind == "broadcast" and len(shape) < 3:
        return t.broadcast(x, (draw(st.sampled_from((2, 3))), *shape))
    if kind == "scan" and shape:
        return t.scan(draw(st.sampled_from(("sum", "max"))), x, draw(st.integers(0, len(shape) - 1)))
    if kind == "gather" and shape and shape[0] >= 2:
        return t.index_map(
            x,
            (3, *shape[1:]),
            (t.loaded(ids, [t.coordinates((3, *shape[1:]))[0]], shape[0]), *t.coordinates((3, *shape[1:]))[1:]),
        )
    if kind == "pad" and shape:
        lo, hi = draw(st.integers(-1, 2)), draw(st.integers(0, 2))
        wider = (max(shape[0] + lo + hi, 0), *shape[1:])
        there = t.coordinates(wider)
        return t.index_map(x, wider, (there[0] - lo, *there[1:]), (there[0] - lo, shape[0] - 1 - (there[0] - lo)))
    if kind == "contract" and len(shape) == 2:
        other = t.permute(x, (1, 0))
        m, k = shape
        i = t.coordinates((m, m, k))
        product = t.apply("mul", t.index_map(x, (m, m, k), (i[0], i[2])), t.index_map(other, (m, m, k), (i[2], i[1])))
        return t.reduce("sum", product, [2])
    if kind == "view" and shape:
        return _view(draw, x, shape, here)
    return t.apply(draw(st.sampled_from(UNARY)), x)


def _reduce(m: str, x: Any, axes: list[int], keepdim: bool) -> Any:
    shape = x.type.shape
    if m in ("argmax", "argmin"):
        values, index = t.reduce(m, (x, t.iota(shape, t.coordinates(shape)[axes[0]])), axes[:1], keepdim)
        return t.apply("add", values, t.cast(index, f32))
    if m == "welford":
        mean, spread, count = t.reduce(m, (x, t.literal(0.0, f32, shape), t.literal(1.0, f32, shape)), axes, keepdim)
        return t.apply("add", mean, t.apply("div", spread, t.apply("max", count, t.literal(1.0, f32, count.type.shape))))
    if m == "logsumexp":
        top, total = t.reduce(m, (x, t.literal(1.0, f32, shape)), axes, keepdim)
        return t.apply("add", top, t.apply("log1p", total))
    return t.reduce(m, x, axes, keepdim)


def _view(draw: Any, x: Any, shape: Any, here: Any) -> Any:
    kind = draw(st.sampled_from(("permute", "flatten", "flip", "slice", "diagonal", "split")))
    if kind == "permute":
        return t.permute(x, draw(st.permutations(range(len(shape)))))
    if kind == "flatten":
        return t.reshape(x, (int(np.prod(shape)),))
    if kind == "flip":
        return t.index_map(x, shape, [e - 1 - i for e, i in zip(shape, here, strict=True)])
    if kind == "slice" and shape[0] >= 2:
        shorter = ((shape[0] + 1) // 2, *shape[1:])
        there = t.coordinates(shorter)
        return t.index_map(x, shorter, (there[0] * 2, *there[1:]))
    if kind == "diagonal" and len(shape) == 2 and shape[0] == shape[1]:
        return t.index_map(x, shape[:1], (t.coordinates(shape[:1])[0],) * 2)
    if kind == "split" and shape[-1] % 2 == 0:
        return t.reshape(x, (*shape[:-1], 2, shape[-1] // 2))
    return x


def random_program_inputs(dtypes: Sequence[DType] = (f32, i64, bool_)) -> list[Input]:
    """One input of each dtype, for rules that need several."""
    return [Input(f"x_{d.name}", Type(d, (3, 3))) for d in dtypes]
