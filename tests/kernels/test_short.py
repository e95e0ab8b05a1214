"""Whole numbers that are known to fit into 32 bits are computed in 32 bits, and indices known to be in range have no
test.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import b, lowered, r

from terrazzo.interp.loop import run_kernel
from terrazzo.ir.address import evaluate
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.ranges import range_of
from terrazzo.ir.types import Type, f32, f64, i64
from terrazzo.targets.cuda.emit import emit
from terrazzo.targets.terms import Scope, index

RESIZED: dict[str, Any] = {
    "linear": lambda x: F.interpolate(x, size=(19, 11), mode="bilinear"),
    "nearest": lambda x: F.interpolate(x, size=(19, 11), mode="nearest"),
    "cubic": lambda x: F.interpolate(x, size=(19, 11), mode="bicubic"),
    "corners": lambda x: F.interpolate(x, size=(19, 11), mode="bilinear", align_corners=True),
}


@pytest.mark.parametrize("name", RESIZED)
def test_places_in_an_image_are_short(name: str) -> None:
    x = torch.randn(1, 3, 8, 9)
    found = lowered(RESIZED[name], (x,), "sm_90a")
    for kernel in found.kernels:
        _, text = emit(kernel)
        assert "tz_at" not in text and not re.search(r"const i64|i64>", text), text
    wanted = RESIZED[name](x.double()).numpy()
    np.testing.assert_allclose(found.simulated()[0], wanted, atol=1e-5)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_places_far_outside(mode: str, padding: str) -> None:
    """Who reads nothing outside of an image is as far outside as he likes."""
    grid = r(2, 9, 10, 2) * 3
    grid[0, 0, :4, 0] = torch.tensor([1e30, -1e30, 3e9, -(2.0**31)])
    if padding != "zeros":
        grid = grid.clamp(-50, 50)

    def read(x: Any, g: Any) -> Any:
        return F.grid_sample(x, g, mode=mode, padding_mode=padding, align_corners=False)

    x = r(2, 4, 8, 7)
    found = lowered(read, (x, grid), "sm_90a")
    np.testing.assert_allclose(found.simulated()[0], read(x, grid).numpy(), atol=2e-4)


def test_nothing_is_loaded_outside() -> None:
    """Guards, and no clamped places; without int64."""
    found = lowered(lambda x, g: F.grid_sample(x, g, align_corners=True), (b(2, 8, 8, 8), b(2, 9, 10, 2)), "sm_90a")
    (kernel,) = found.kernels
    _, text = emit(kernel)
    assert "tz_at" not in text and not re.search(r"const i64|i64>", text), text


def test_data_says_where() -> None:
    """What data says is as long as it is, and tested."""
    found = lowered(lambda x, i: x[i], (r(7, 5), torch.tensor([3, 1, 6])), "sm_90a")
    text = "".join(emit(kernel)[1] for kernel in found.kernels)
    assert "tz_at" in text and "i64" in text
    np.testing.assert_array_equal(found.simulated()[0], found.args[0][found.args[1]].numpy())


@dataclass
class Whole:
    """A number of C: in 32 bits it must fit into these, and beside one of 64 bits it has as many."""

    value: int
    bits: int = 32

    def __post_init__(self) -> None:
        assert abs(self.value) < 1 << (self.bits - 1), f"{self.value} has more than {self.bits} bits"

    def with_(self, other: Any, result: Callable[[int, int], int]) -> Whole:
        x = other if isinstance(other, Whole) else Whole(other, 32 if abs(other) < 1 << 31 else 64)
        return Whole(result(self.value, x.value), max(self.bits, x.bits))

    def __add__(self, other: Any) -> Whole:
        return self.with_(other, lambda a, b: a + b)

    def __sub__(self, other: Any) -> Whole:
        return self.with_(other, lambda a, b: a - b)

    def __mul__(self, other: Any) -> Whole:
        return self.with_(other, lambda a, b: a * b)

    def __truediv__(self, other: Any) -> Whole:
        return self.with_(other, lambda a, b: a // b)

    def __mod__(self, other: Any) -> Whole:
        return self.with_(other, lambda a, b: a % b)

    def __neg__(self) -> Whole:
        return Whole(-self.value, self.bits)


@pytest.mark.parametrize("seed", range(60))
def test_indices_are_as_long_as_what_they_come_by(seed: int) -> None:
    """Where buffers are short, indices are of 32 bits, but for sums that have more before a division."""
    rng = np.random.default_rng(seed)
    axes = [Var(f"a{n}", int(rng.integers(2, 1 << rng.integers(2, 20)))) for n in range(3)]

    def linear() -> Any:
        return sum((a * int(rng.integers(-1, 2) * rng.integers(1 << rng.integers(1, 24))) for a in axes), 0)

    x = linear()
    for _ in range(2):
        x = (x + linear()) % int(rng.integers(2, 1 << 20)) * int(rng.integers(1, 2000)) + linear()
        x = x // int(rng.integers(1, 1000))
    text = index(x, Scope({a: a.name for a in axes}, whole="int"))
    text = text.replace("(i64)", "one * ")
    for _ in range(50):
        at = {a.name: int(rng.choice([0, a.extent - 1, rng.integers(a.extent)])) for a in axes}  # type: ignore[call-overload]
        names = {name: Whole(value) for name, value in at.items()}
        helpers = {"tz_fdiv": lambda a, b: a / b, "tz_fmod_index": lambda a, b: a % b, "one": Whole(1, 64)}
        found = eval(text, {**names, **helpers})
        wanted = evaluate(x, {a: at[a.name] for a in axes})
        assert (found.value if isinstance(found, Whole) else found) == wanted


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("most", [float(np.finfo(np.float32).max), -float(np.finfo(np.float32).max)])
def test_ranges_beyond_their_type_are_infinite(most: float) -> None:
    """Masks of scores are the type's least value, and programs multiply by it: NumPy has nothing to warn of."""
    x = l.apply("mul", l.apply("f32", l.Index(Var("a0", 8))), l.Literal(most, f32))
    wide = l.apply("mul", l.apply("f64", l.Index(Var("a0", 8))), l.Literal(most, f64))
    for found in (range_of(x), range_of(l.apply("f32", wide))):
        assert found is not None and math.inf in map(abs, found)


@pytest.mark.parametrize("seed", range(40))
def test_values_are_in_their_ranges(seed: int) -> None:
    """Random terms of an index, which no value leaves."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 400))
    at = Var("a0", n)
    terms: list[Any] = [l.Index(at), l.apply("f32", l.Index(at))]
    for _ in range(12):
        x: Any = terms[rng.integers(len(terms))]
        if x.dtype is i64:
            c = l.Literal(int(rng.integers(-9, 9)), i64)
            name = str(rng.choice(["add", "sub", "mul", "min", "max", "neg", "abs", "f32"]))
        else:
            c = l.Literal(float(np.float32(rng.normal() * 3)), f32)
            name = str(rng.choice(["add", "sub", "mul", "div", "min", "fmax", "floor", "round", "neg", "abs", "i64"]))
        terms.append(
            l.apply(name, x) if name in ("neg", "abs", "f32", "i64", "floor", "round") else l.apply(name, x, c)
        )
    for x in terms:
        found = range_of(x)
        if found is None:
            continue
        kind = l.Buffer("z", Type(x.dtype, (n,)))
        kernel = l.Kernel("z", (at,), (l.Store(kind, (at,), x),))
        memory: dict[l.Buffer, Any] = {kind: np.zeros(n, x.dtype.numpy)}
        run_kernel(kernel, memory)
        values = memory[kind]
        assert found[0] <= values.min() and values.max() <= found[1], (x, found)
