"""Products of windows: their rows and columns are several axes, and what is read out of place is written in runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.run.cpu import COMPILER
from torch.nn import functional as F

import terrazzo
from terrazzo.bench.harness import accuracy
from terrazzo.front.capture import capture
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.sites import sites
from terrazzo.ir.types import Type, f32
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.targets.cpu.emit import emit, prelude
from terrazzo.targets.cpu.phases import phases
from terrazzo.targets.cpu.runs import guards

FIRST, LAST = torch.contiguous_format, torch.channels_last
CONVOLUTIONS: dict[str, Any] = {  # (images, channels, height, width), (channels, ...) of the filter, options, layout
    "rows of 7": ((3, 8, 7, 7), (20, 8, 3, 3), {"padding": 1}, FIRST),
    "strides": ((2, 6, 21, 18), (34, 6, 3, 5), {"stride": 2, "padding": 2}, FIRST),
    "dilated, one channel": ((2, 1, 19, 40), (5, 1, 3, 3), {"dilation": 2, "padding": 2}, FIRST),
    "channels last": ((2, 40, 14, 15), (36, 40, 3, 3), {"padding": 1}, LAST),
    "channels last, strides": ((2, 5, 14, 15), (70, 5, 3, 3), {"padding": 1, "stride": 2}, LAST),
    "groups": ((2, 12, 20, 20), (24, 3, 3, 3), {"padding": 1, "groups": 4}, FIRST),
    "each channel": ((2, 9, 20, 50), (9, 1, 5, 5), {"padding": 2, "groups": 9}, FIRST),
    "each channel, strides": (
        (2, 9, 20, 50),
        (9, 1, 3, 3),
        {"padding": 1, "groups": 9, "stride": 2},
        torch.contiguous_format,
    ),
}


def inputs(name: str) -> tuple[Any, ...]:
    shape, filters, given, layout = CONVOLUTIONS[name]
    torch.manual_seed(0)
    x = torch.randn(shape).contiguous(memory_format=layout)
    return x, torch.randn(filters).contiguous(memory_format=layout), torch.randn(filters[0]), given


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_are_as_exact_as_eager(name: str, tmp_path: Path) -> None:
    x, w, bias, given = inputs(name)

    def convolved(x: Any, w: Any, bias: Any) -> Any:
        return torch.relu(F.conv2d(x, w, bias, **given))

    options = {"target": "cpu", "cache_dir": tmp_path, "compiler": COMPILER}
    ours = terrazzo.compile(convolved, x, w, bias, options=options)(x, w, bias)
    exact = convolved(x.double(), w.double(), bias.double())
    assert accuracy([ours], [convolved(x, w, bias)], [exact]).problem == ""


@pytest.mark.parametrize("name", ["rows of 7", "strides", "channels last", "each channel", "each channel, strides"])
def test_no_windows_are_stored_and_no_guard_is_asked_at_each_point(name: str) -> None:
    *given, options = inputs(name)

    def convolved(x: Any, w: Any, bias: Any) -> Any:
        return F.conv2d(x, w, bias, **options)

    (kernel,) = lowering(capture(convolved, given).program, Options(target="cpu", libraries="never")).loop.steps
    assert isinstance(kernel, l.Kernel)
    text = emit(kernel)[1].partition('extern "C" int k_')[2]
    assert " ? " not in text
    assert "left0" not in text
    assert ("tz_rows<" in text) != ("each channel" in name)


@pytest.mark.parametrize(
    ("shape", "filters", "given"),
    [
        ((2, 6, 9, 8), (6, 20, 4, 4), {"stride": 2, "padding": 1}),
        ((2, 6, 9, 8), (6, 4, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
        ((1, 8, 5, 6), (8, 3, 5, 5), {"stride": 3, "padding": 1, "groups": 2}),
        ((1, 3, 8, 8), (3, 5, 3, 3), {"stride": 2, "dilation": 3, "padding": 2, "output_padding": 1}),
    ],
)
def test_transposed_convolutions_add_up_what_their_strides_divide(
    shape: Any, filters: Any, given: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(shape), torch.randn(filters)

    def convolved(x: Any, w: Any) -> Any:
        return F.conv_transpose2d(x, w, **given)

    options = {"target": "cpu", "cache_dir": tmp_path, "compiler": COMPILER}
    ours = terrazzo.compile(convolved, x, w, options=options)(x, w)
    assert accuracy([ours], [convolved(x, w)], [convolved(x.double(), w.double())]).problem == ""
    (kernel,) = lowering(capture(convolved, (x, w)).program, Options(target="cpu", libraries="never")).loop.steps
    assert isinstance(kernel, l.Kernel)
    divided = all(n % given["stride"] == 0 for n in kernel.stores[0].buffer.type.static_shape[2:])
    before, after = (_steps(k) for k in (kernel, phases(kernel)))
    assert after < before if divided else after == before


POOLED: dict[str, Any] = {  # the image, and the windows
    "halves": ((2, 5, 12, 16), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "odd sizes": ((2, 5, 13, 17), {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False}),
    "thirds": ((2, 3, 12, 25), {"kernel_size": 4, "stride": 3}),
    "side by side, and more": ((2, 3, 11, 25), {"kernel_size": (2, 5), "stride": (2, 3)}),
    "far apart": ((1, 3, 20, 22), {"kernel_size": 2, "stride": 5}),
}


@pytest.mark.parametrize("name", POOLED)
def test_gradients_of_means_add_up_what_their_strides_divide(name: str, tmp_path: Path) -> None:
    """Without a question at each step of whether the stride divides it, for all but what is left of an odd size."""
    shape, given = POOLED[name]
    torch.manual_seed(0)
    x = torch.randn(shape)
    grad = torch.randn_like(F.avg_pool2d(x, **given))

    def pooled(x: Any, grad: Any) -> Any:
        return torch.func.vjp(lambda x: F.avg_pool2d(x, **given), x)[1](grad)[0]

    options = Options(target="cpu", cache_dir=tmp_path, compiler=COMPILER)
    call = terrazzo.compile(pooled, x, grad, options=options)
    assert accuracy([call(x, grad)], [pooled(x, grad)], [pooled(x.double(), grad.double())]).problem == ""
    if name == "halves":
        (text,) = [source for _, source in call.compiled.sources if "reduce" in source]
        assert "tz_fmod_index(" in prelude() and "tz_fmod_index(" not in text.removeprefix(prelude())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_where_the_largest_is_is_known_where_windows_are_inside(dtype: torch.dtype, tmp_path: Path) -> None:
    """The condition that chooses an element, or what loses to all, is what its guard asks: where that holds there is
    none of it. Of places in small images there are 32 bits.
    """
    torch.manual_seed(0)
    x = (1000 * torch.randn(2, 3, 9, 40)).round().to(dtype)
    if dtype.is_floating_point:
        x[0, 0, 3, ::7] = float("nan")

    def pooled(x: Any) -> Any:
        return F.max_pool2d(x, 3, 2, 1, return_indices=True)

    options = Options(target="cpu", cache_dir=tmp_path, compiler=COMPILER)
    call = terrazzo.compile(pooled, x, options=options)
    for found, eager in zip(call(x), pooled(x), strict=True):
        assert found.dtype is eager.dtype
        torch.testing.assert_close(found, eager, rtol=0, atol=0, equal_nan=True)
    (text,) = [source.removeprefix(prelude()) for _, source in call.compiled.sources]
    loops = text.split("#pragma omp simd")[1:4]
    assert [" >= " in loop for loop in loops] == [True, False, True]
    assert "std::fill_n(lane" in text and "(i32)2147483647" in text


def _steps(kernel: l.Kernel) -> int:
    """How many products each sum is of."""
    (r,) = sites(kernel).carried.values()
    return math.prod(a.extent for a in r.axes)  # type: ignore[union-attr]


def test_a_guard_that_does_not_hold_from_one_place_to_another_stays() -> None:
    i, r = Var("i", 8), Var("r", 3)
    x = l.Buffer("x", Type(f32, (8,)))

    def asked(*inside: Any) -> Any:
        return guards([l.Load.make(x, (i,), inside)], i)

    assert asked(i + r - 1, 8 - i - r) == (i + r - 1, 8 - i - r)
    assert asked(-(i % 2)) is None
    assert guards([l.Load.make(x, (i,), (i - 1,)), l.Load.make(x, (i,), (6 - i,))], i) is None
    assert guards([l.Load.make(x, (i,), ())], i) is None
