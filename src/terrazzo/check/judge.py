"""Whether a result is beyond rounding, with float64 as the judge.

Three values of one thing are compared: what a program gives before a rewrite and after it, both in the program's own
types, and the exact value, in float64. Rounding may differ, so the new error may be larger than the old one, but not in
kind. Where the rewritten program was computed in float64 as well, that must agree with the exact value far below any
rounding to 32 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from terrazzo.ir.types import DType

SHARP = 1e-5
"""How far two ways of computing in float64 may be apart, relative to the largest value. Constants may be rounded to 32
bits."""
CONDITION = 1e-3
"""The same, relative to the error that 32 or fewer bits make: where values cancel, float64 rounds too."""
NOTHING = 1e-12
"""An absolute error that is none."""
STEPS = 64
"""Units in the last place of the accumulator by which orders of summation may differ."""


def difference(dtype: DType, before: Any, after: Any, exact: Any = None, again: Any = None) -> str:
    """What is wrong with `after`, an array that should be `before`; nothing if that may be rounding.

    `exact` is the value in float64, `again` what the rewritten program gives in float64; without them, the bits must be
    the same.
    """
    if before.shape != after.shape or before.dtype != after.dtype:
        return f"is {after.dtype}{list(after.shape)}, not {before.dtype}{list(before.shape)}"
    different = ~_alike(before, after)
    if not different.any():
        return ""
    if exact is None:
        return f"differs in {different.sum()} of {after.size} elements"
    if again is not None and (problem := _sharp(dtype, before, exact, again)):
        return problem
    if not dtype.is_float:
        wrong = [int((~_alike(x, exact)).sum()) for x in (after, before)]
        return f"differs in {different.sum()} of {after.size} elements" if wrong[0] > 2 * wrong[1] else ""
    a, b, c = (x.astype(np.float64) for x in (after, before, exact))
    ordinary = np.isfinite(b) & np.isfinite(c)
    odd = ~ordinary & different & ~_alike(a, c) | ordinary & ~np.isfinite(a)
    if odd.any():
        return f"has {a[odd][0]} where {b[odd][0]} belongs, in {odd.sum()} of {after.size} elements"
    a, b, c = a[ordinary], b[ordinary], c[ordinary]
    unit = {8: 2.0**-52, 4: 2.0**-23}.get(dtype.size, 2.0**-10 if dtype.name == "f16" else 2.0**-7)
    step = STEPS * min(unit, 2.0**-23)
    slack = (
        4 if dtype.size == 8 else 1
    )  # what is computed in 32 bits by two libraries and then widened has no other allowance
    for norm, more in ((_rms, 4 * slack), (_largest, 8 * slack)):
        mine, theirs, scale = norm(a - c), norm(b - c), norm(c)
        if mine > (allowed := max(more * theirs, unit * scale) + step * scale + NOTHING):
            return f"has an error of {mine:.2e} ({_NAMES[norm]}); rounding explains {allowed:.2e}"
    return ""


def _sharp(dtype: DType, before: Any, exact: Any, again: Any) -> str:
    """What is wrong in float64."""
    alike = _alike(exact, again)
    if alike.all():
        return ""
    if not dtype.is_float:
        return f"differs in {(~alike).sum()} of {again.size} elements"
    finite = np.isfinite(exact) & np.isfinite(again)
    if (odd := ~finite & ~alike).any():
        return f"has {again[odd][0]} where {exact[odd][0]} belongs, in {odd.sum()} of {again.size} elements"
    given = before.astype(np.float64)
    finite &= np.isfinite(given)
    rounding = given[finite] - exact[finite]
    error = np.abs(again[finite] - exact[finite])
    allowed = SHARP * _largest(exact[finite]) + CONDITION * _largest(rounding) + NOTHING
    if error.max(initial=0.0) <= allowed:
        return ""
    wrong = int((error > allowed).sum())
    return (
        f"is off by up to {error.max():.2e} in float64, where rounding explains {allowed:.2e}: "
        f"{wrong} of {again.size} elements"
    )


def _alike(a: Any, b: Any) -> Any:
    """Where elements are equal, or both no number."""
    return (a == b) | ((a != a) & (b != b))


def _rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def _largest(x: Any) -> float:
    return float(np.max(np.abs(x), initial=0.0))


_NAMES = {_rms: "root mean square", _largest: "the largest"}
