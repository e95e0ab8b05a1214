"""Compiled programs against the Loop IR interpreter: random ones, matrix products, gathers, long reductions,
strides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests.fuzz.judge import Judge
from tests.fuzz.programs import tensor_programs
from tests.harness import random_inputs

from terrazzo.errors import UserError
from terrazzo.interp import loop as interp
from terrazzo.interp.torch import from_numpy, to_numpy
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.program import Input, Program
from terrazzo.ir.text import show
from terrazzo.ir.types import DType, Type, f32, f64, i64
from terrazzo.options import Options
from terrazzo.pipelines import lower
from terrazzo.rewrite.rule import Log
from terrazzo.run.compiled import compile_program


def both(program: Program, inputs: dict[str, Any], cache: Path) -> list[tuple[Any, Any]]:
    """(compiled, interpreted) results."""
    options = Options(cache_dir=cache)
    compiled = compile_program(program, {}, options)(
        [laid_out(i.type, from_numpy(inputs[i.name])) for i in program.inputs]
    )
    return list(zip(map(to_numpy, compiled), interp.run(lower(program, options, Log()), inputs), strict=True))


def laid_out(kind: Type, data: torch.Tensor) -> torch.Tensor:
    """The data with the strides of its type."""
    return data if kind.strides is None else torch.empty_strided(data.shape, kind.strides, dtype=data.dtype).copy_(data)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def test_random_programs(cache: Path) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(tensor_programs(opaque=False))
    def check(program: Program) -> None:
        inputs = random_inputs(program.inputs)
        problem = Judge(program, inputs).problem([ours for ours, _ in both(program, inputs, cache)])
        assert not problem, f"{problem}\n{show(program)}"

    check()


def test_an_index_out_of_range_is_an_error(cache: Path) -> None:
    x, ids = Input("x", Type(f32, (4,))), Input("ids", Type(i64, (3,)))
    (i,) = t.coordinates((3,))
    program = Program("tensor", "gather", (x, ids), (t.index_map(x, (3,), (t.loaded(ids, [i], 4),)),))
    compiled = compile_program(program, {}, Options(cache_dir=cache))
    assert compiled([torch.arange(4.0), torch.tensor([3, 0, 1])])[0].tolist() == [3, 0, 1]
    with pytest.raises(UserError, match="out of range"):
        compiled([torch.arange(4.0), torch.tensor([3, 4, 1])])


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (2, 4, 1), (5, 33, 129), (13, 64, 300), (3, 7, 0), (200, 17, 31)])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_products(m: int, n: int, k: int, transposed: bool, cache: Path) -> None:
    x = Input("x", Type(f32, (m, k)))
    y = Input("y", Type(f32, (n, k) if transposed else (k, n)))
    space = (m, n, k)
    i, j, r = t.coordinates(space)
    left, right = t.index_map(x, space, (i, r)), t.index_map(y, space, (j, r) if transposed else (r, j))
    product = t.reduce("sum", t.apply("mul", left, right), [2])
    program = Program("tensor", "mm", (x, y), (t.apply("max", product, t.literal(0.0, f32, (m, n))),))
    ((ours, theirs),) = both(program, random_inputs(program.inputs), cache)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_sums_of_two_products(cache: Path) -> None:
    x, v, w = (Input(name, Type(f32, (m, 50))) for name, m in (("x", 40), ("v", 40), ("w", 30)))
    i, j, r = t.coordinates((40, 30, 50))
    left, other, right = (t.index_map(y, (40, 30, 50), (k, r)) for y, k in ((x, i), (v, i), (w, j)))
    terms = t.apply("add", t.apply("mul", left, right), t.apply("mul", right, other))
    program = Program("tensor", "mm", (x, v, w), (t.reduce("sum", terms, [2]),))
    ((ours, theirs),) = both(program, random_inputs(program.inputs), cache)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("m", ["sum", "max", "prod", "argmax", "logsumexp", "welford"])
def test_long_reductions_do_not_depend_on_the_threads(m: str, cache: Path) -> None:
    shape = (300_001,)
    x = Input("x", Type(f32, shape))
    data = np.random.default_rng(0).standard_normal(shape).astype(np.float32) + 0.1
    if m == "prod":
        data = np.exp(data / 1000).astype(np.float32)
    args: Any = {
        "argmax": (x, t.iota(shape, t.coordinates(shape)[0])),
        "logsumexp": (x, t.literal(1.0, f32, shape)),
        "welford": (x, t.literal(0.0, f32, shape), t.literal(1.0, f32, shape)),
    }.get(m, (x,))
    results = t.reduce(m, args, [0])
    program = Program("tensor", "long", (x,), results if isinstance(results, tuple) else (results,))
    runs = [compile_program(program, {}, Options(cache_dir=cache, threads=n))([torch.from_numpy(data)]) for n in (1, 2)]
    exact = interp.run(lower(program, Options(), Log()), {"x": data}, precise=True)
    for one, two, reference in zip(*runs, exact, strict=True):
        assert torch.equal(one, two)
        np.testing.assert_allclose(one.numpy(), reference, rtol=5e-4)


def test_strided_inputs(cache: Path) -> None:
    x = torch.randn(6, 8)
    strided = Input("x", Type(f32, (8, 6), (1, 8)))
    program = Program("tensor", "strided", (strided,), (t.apply("neg", strided),))
    compiled = compile_program(program, {}, Options(cache_dir=cache))
    assert torch.equal(compiled([x.t()])[0], -x.t())
    with pytest.raises(UserError, match="strides"):
        compiled([x.t().contiguous()])


@pytest.mark.parametrize(("outer", "inner"), [("sin", "atan"), ("cos", "atan"), ("sinh", "atanh"), ("cosh", "atanh")])
@pytest.mark.parametrize("dtype", [f32, f64])
def test_nan_stays_nan(outer: str, inner: str, dtype: DType, cache: Path) -> None:
    """GCC knows what these compositions are, but for NaN."""
    x = Input("x", Type(dtype, (64,)))
    program = Program("tensor", "composed", (x,), (t.apply(outer, t.apply(inner, x)),))
    ((ours, _),) = both(program, {"x": np.full(64, np.nan, dtype.numpy)}, cache)
    assert np.isnan(ours).all()


def test_products_of_gathered_rows_are_blocked(cache: Path) -> None:
    """Rows that are looked up are a first factor like any that is computed: once, then blocked."""
    import terrazzo
    from terrazzo.front.capture import capture
    from terrazzo.pipelines import lowering
    from terrazzo.targets.cpu.emit import emit

    def rows(x: Any, order: Any, w: Any) -> Any:
        return torch.relu(x[order] @ w)

    given = torch.randn(70, 33), torch.randint(-70, 70, (50,)), torch.randn(33, 40)
    found = terrazzo.compile(rows, *given, options={"target": "cpu", "cache_dir": cache})
    torch.testing.assert_close(found(*given), rows(*given))
    lowered = lowering(capture(rows, given).program, Options(target="cpu")).loop
    assert any("tz_rows<" in emit(s)[1] + emit(s)[0] for s in lowered.steps)
    with pytest.raises(Exception, match=r"out of range|out of bounds"):
        found(given[0], torch.full((50,), 70), given[2])
