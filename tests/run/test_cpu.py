"""The CPU target computes what the Loop IR interpreter computes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.run import cpu
from tests.run.cpu import COMPILER, MARCHES, Suite, program

from terrazzo.ir.dialects import scalar as sc
from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.program import Input
from terrazzo.ir.types import DTYPES, DType, Type, bool_
from terrazzo.options import Options
from terrazzo.run.cache import Cache
from terrazzo.run.compiler import compile_all
from terrazzo.targets.cpu.emit import prelude
from terrazzo.targets.terms import Scope

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

REAL = tuple(d for d in DTYPES.values() if d.kind != "complex")
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 2.5, 3.0, -3.5, 1e-30, 100.0, -100.0, np.inf, -np.inf, np.nan)


def values_of(d: DType) -> Any:
    """Values of a type where functions have corners: zeros of both signs, extremes, infinities, NaN, and some ordinary
    ones.
    """
    rng = np.random.default_rng(0)
    if d.kind == "bool":
        return np.array([False, True])
    if d.is_float:
        ordinary = rng.standard_normal(30) * np.logspace(-3, 2, 30)
        with np.errstate(over="ignore"):
            return np.array([*SPECIAL, *ordinary]).astype(d.numpy)
    info = np.iinfo(d.numpy)
    some = [0, 1, 2, 3, 5, 7, 8, 31, 63, 64]
    some += (
        [info.max, info.max - 1, info.min, info.min + 1, -1, -2, -3, -7, -8]
        if d.kind == "int"
        else [info.max, info.max - 1]
    )
    return np.concatenate([np.array(some, d.numpy), rng.integers(info.min, info.max, 10, dtype=d.numpy)])


def _arguments(fn: sc.Scalar, d: DType) -> tuple[DType, ...] | None:
    """The types of the arguments of `fn` on elements of type `d`, if it takes them."""
    types = (bool_, d, d) if fn.name == "where" else (d,) * fn.arity
    return types if fn.result(types) is not None else None


def _input(name: str, d: DType, *shape: int, strides: tuple[int, ...] | None = None) -> Input:
    return Input(name, Type(d, shape, strides))


def _functions() -> Iterator[tuple[str, sc.Scalar, tuple[DType, ...]]]:
    for d in REAL:
        for fn in (*sc.SCALARS.values(), *sc.CASTS.values()):
            types = _arguments(fn, d)
            if types is not None:
                yield f"{fn.name}({d.name})", fn, types


FUNCTIONS = {name: (fn, types) for name, fn, types in _functions()}


def _scalar_program(fn: sc.Scalar, types: tuple[DType, ...]) -> tuple[Any, dict[str, Any]]:
    """The function at every pair of values of its type (of all values, where it has one argument)."""
    d = types[-1]
    v = values_of(d)
    n = len(v)
    pairs = [np.repeat(v, n), np.tile(v, n)] if fn.arity > 1 else [np.tile(v, 3)]
    given = dict(zip("xyz", pairs, strict=False))
    if fn.name == "where":
        given = {"x": np.arange(n * n) % 3 == 0, "y": pairs[0], "z": pairs[1]}
    inputs = [Input(name, Type(kind, given[name].shape)) for name, kind in zip(given, types, strict=True)]
    return t.Elementwise(fn, tuple(inputs)), given


@pytest.fixture(scope="module", params=MARCHES)
def scalars(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    suite = Suite(tmp_path_factory.mktemp("scalars"), request.param)
    for name, (fn, types) in FUNCTIONS.items():
        suite.add(name, program(_scalar_program(fn, types)[0]))
    suite.build(4)
    return suite


# Units in the last place by which a C library and numpy may differ; vector forms promise 4.
ULPS = {
    "lgamma": 1024,
    "erfc": 16,
    "erf": 8,
    "pow": 16,
    "exp2": 8,
    "sinh": 8,
    "cosh": 8,
    "tan": 8,
    "approx_div": 2,
    "approx_exp2": 8,
}
ABSOLUTE = {"ndtr": 2.0**-23, "approx_ndtr": 2.0**-18}  # what is promised of the value, not of its last bits
EXACT = {
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "abs",
    "sign",
    "min",
    "max",
    "floor",
    "ceil",
    "trunc",
    "round",
    "sqrt",
    "fmin",
    "fmax",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_scalar_functions(name: str, scalars: Suite) -> None:
    """Every function on every type, at the corners of the type, vectorised."""
    fn, types = FUNCTIONS[name]
    _, given = _scalar_program(fn, types)
    by_zero = fn.name in ("floordiv", "truncdiv", "fmod", "mod") and not types[-1].is_float and 0 in given["y"]
    (ours,) = scalars.run(name, given, by_zero=by_zero)
    theirs = np.asarray(fn.numpy(*given.values())).astype(ours.dtype)
    if not fn.infer(types).is_float:
        known = ~_undefined(fn, types[-1], given)
        np.testing.assert_array_equal(ours[known], theirs[known], err_msg=name)
        return
    bits = {2: np.int16, 4: np.int32, 8: np.int64}[ours.dtype.itemsize]
    nan = np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), nan, err_msg=f"{name}: NaN")
    apart = np.abs(_ordered(ours.view(bits)) - _ordered(theirs.view(bits)))
    allowed = 0 if sc.is_cast(fn) or fn.name in EXACT else ULPS.get(fn.name, 4)
    if fn.name in ABSOLUTE:
        apart[np.abs(ours - theirs) <= ABSOLUTE[fn.name]] = 0
    zeros = (ours == 0) & (theirs == 0)  # 0.0 and -0.0 are far apart: their signs must agree as well
    wrong = (
        ~nan & (apart > allowed)
        if allowed == 0
        else ~nan & ((apart > allowed) & ~zeros | zeros & (np.signbit(ours) != np.signbit(theirs)))
    )
    examples = [
        (*(g[i] for g in given.values()), "gives", ours[i], "not", theirs[i]) for i in np.flatnonzero(wrong)[:5]
    ]
    assert not wrong.any(), f"{name}: {examples}"


def _ordered(bits: Any) -> Any:
    """Integers in the order of the floats they are the bits of."""
    wide = bits.astype(object)
    sign = 2 ** (8 * bits.itemsize - 1)
    return np.where(wide < 0, -(wide + sign), wide)


def _undefined(fn: sc.Scalar, d: DType, given: dict[str, Any]) -> Any:
    """Where neither numpy nor PyTorch promises anything: floats beyond the range of the integer they are converted
    to.
    """
    x = given["x"]
    out = DTYPES.get(fn.name)
    if out is None or not out.is_integer or not d.is_float:
        return np.zeros(x.shape, bool)
    wide = x.astype(np.float64)
    return ~(np.isfinite(wide) & (wide > float(out.lowest) - 1) & (wide < float(out.highest) + 1))


def test_a_processor_that_this_machine_is_not_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu, "processor", lambda: f"an old one\n{cpu.NEEDS['x86-64-v2']}")
    (v2,), (v3,) = cpu.march("x86-64-v2").marks, cpu.march("x86-64-v3").marks
    assert (v2.args, v3.args) == ((False,), (True,)) and "avx2" in v3.kwargs["reason"]
    monkeypatch.setattr(cpu.platform, "machine", lambda: "aarch64")
    (other,) = cpu.march("x86-64-v2").marks
    assert other.args == (True,) and other.kwargs["reason"] == "this machine is aarch64"


SINES = """
extern "C" void sines(const float *x, float *y, long n, int on) {
  for (long i = 0; i < n; i++) y[i] = tz_sine_near(x[i], on);
}
"""


@pytest.mark.parametrize(("on", "exact"), [(0, np.sin), (1, np.cos)])
def test_sines_for_gpus_are_right_to_two_units_in_the_last_place(on: int, exact: Any, tmp_path: Path) -> None:
    """What CUDA kernels compute, at floats of all sizes and near multiples of pi/2."""
    options = Options(target="cpu", cache_dir=tmp_path)
    (library,) = compile_all([prelude() + SINES], options, Cache(tmp_path, options.cache_limit))
    bits = np.arange(0, np.float32(48039).view(np.int32), 4099, np.int32)
    x = np.concatenate([bits.view(np.float32), (np.arange(30_000) * (np.pi / 2)).astype(np.float32)])
    x = np.concatenate([x, -x])
    y = np.empty_like(x)
    pointers = [a.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for a in (x, y)]
    ctypes.CDLL(str(library)).sines(*pointers, ctypes.c_long(len(x)), on)
    true = exact(x.astype(np.float64))
    assert np.all(np.abs(y - true) <= 2 * np.spacing(np.abs(true).astype(np.float32)).astype(np.float64))
    assert np.array_equal(np.signbit(y[x == 0]), np.signbit(exact(x[x == 0])))


PLAIN = """
extern "C" void plain(const float *x, float *y, long n, int which) {
  for (long i = 0; i < n; i++) y[i] = which == 2 ? tz_exp(x[i]) : which ? tz_plain_tanh(x[i]) : tz_exp2(x[i]);
}
"""


@pytest.mark.parametrize(("which", "exact", "units"), [(0, np.exp2, 1), (1, np.tanh, 2), (2, np.exp, 1)])
def test_functions_that_are_ours(which: int, exact: Any, units: int, tmp_path: Path) -> None:
    """At floats of all sizes, those that are no numbers among them."""
    options = Options(target="cpu", cache_dir=tmp_path)
    (library,) = compile_all([prelude() + PLAIN], options, Cache(tmp_path, options.cache_limit))
    bits = np.arange(0, np.float32(200).view(np.int32), 4099, np.int32).view(np.float32)
    ends = np.array([np.inf, 0.0, 3e38, np.nan], np.float32)
    x = np.concatenate([bits, np.linspace(-152, 129, 100_001, dtype=np.float32), ends[:3]])
    x = np.concatenate([x, -x, ends[3:]])
    y = np.empty_like(x)
    pointers = [a.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for a in (x, y)]
    ctypes.CDLL(str(library)).plain(*pointers, ctypes.c_long(len(x)), which)
    with np.errstate(over="ignore", under="ignore"):
        true = exact(x.astype(np.float64))
        rounded = true.astype(np.float32)
    assert np.isnan(y[-1])
    ordinary = np.isfinite(rounded)
    assert np.array_equal(y[np.isinf(rounded)], rounded[np.isinf(rounded)])
    off = np.abs(y[ordinary] - true[ordinary])
    assert np.all(off <= units * np.spacing(np.abs(rounded[ordinary])).astype(np.float64))
    assert np.array_equal(np.signbit(y[:-1]), np.signbit(rounded[:-1]))


def test_no_variable_is_called_like_a_type() -> None:
    """The 64th name of a kernel was that of an index, i64, and what followed was no C++."""
    scope = Scope()
    names = [scope.fresh(prefix) for _ in range(70) for prefix in ("i", "u", "f", "v")]
    assert len(set(names)) == len(names) and not set(names) & set(DTYPES)
    assert [Scope(counter=[n]).fresh("i") for n in (8, 16, 32, 64)] == ["i9", "i17", "i33", "i65"]
