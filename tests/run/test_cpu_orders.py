"""Loops of a processor go the way results lie: over images whose channels lie last, channels are innermost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.run.cpu import COMPILER

import terrazzo
from terrazzo.bench.harness import accuracy
from terrazzo.front.capture import capture
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.expr import Var
from terrazzo.ir.monoid import monoid
from terrazzo.ir.node import topological
from terrazzo.ir.types import Type, f32
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.targets.cpu.emit import emit
from terrazzo.targets.cpu.merged import as_stored, summed_as_stored

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

LAST = (24, 1, 8)
"""Strides of 2 images of 8 channels and 3 points, channels last."""


def kernel(strides: tuple[int, ...] | None, summed: bool = False, windowed: bool = False) -> l.Kernel:
    """Of each element twice itself, or the sum over images of what has its channel and point, or that of its window."""
    axes = tuple(Var(name, extent) for name, extent in zip(("a0", "a1", "a2"), (2, 8, 3), strict=True))
    x, z = (l.Buffer(name, Type(f32, (2, 8, 3), strides)) for name in ("x", "z"))
    value: Any = l.apply("add", l.Load(x, axes), l.Load(x, axes))
    if summed:
        r = Var("r0", 2)
        value = l.Reduce.make(monoid("sum"), (r,), (l.Load(x, (r, axes[1], axes[2])),))
    if windowed:
        r = Var("r0", 2)
        load = l.Load(x, (axes[0], axes[1], axes[2] + r), (2 - axes[2] - r,))
        value = l.Reduce.make(monoid("sum"), (r,), (load,))
    return l.Kernel("z", axes, (l.Store(z, axes, value),))


def test_axes_are_in_the_order_of_what_is_stored() -> None:
    given = kernel(LAST)
    a0, a1, a2 = given.axes
    assert as_stored(given).axes == (a0, a2, a1)
    assert "i0 < 48" in emit(given)[1]  # one run
    assert as_stored(kernel(None)) == kernel(None)
    assert as_stored(kernel(LAST, summed=True)).axes == kernel(LAST, summed=True).axes
    a0, a1, a2 = (windows := kernel(LAST, windowed=True)).axes
    assert as_stored(windows).axes == (a0, a2, a1)
    assert as_stored(kernel(None, windowed=True)).axes == kernel(None, windowed=True).axes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_lies_in_several_orders_is_computed_in_one(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y, c = torch.randn(2, 40, 33, 34, dtype=dtype), torch.randn(2, 40, 33, 34, dtype=dtype), torch.randn(40)
    x = x.contiguous(memory_format=torch.channels_last)

    def fn(x: Any, y: Any, c: Any) -> Any:
        one = torch.relu(x * c[:, None, None])
        return one, (one + y).sum(1), one.transpose(1, 3).contiguous() - 1, one.mean((2, 3))

    options = {"target": "cpu", "cache_dir": tmp_path, "compiler": COMPILER}
    given = (x, y, c.to(dtype))
    ours, eager = terrazzo.compile(fn, *given, options=options)(*given), fn(*given)
    exact = fn(*(t.double() for t in given))
    assert accuracy(list(ours), list(eager), list(exact)).problem == ""


@pytest.mark.parametrize("last", [False, True])
def test_what_is_known_of_a_group_of_channels_is_computed_once(last: bool, tmp_path: Path) -> None:
    """And not for each of its channels, unless these lie side by side: lanes are channels then."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 12, 9, 11), torch.randn(12)
    x = x.contiguous(memory_format=torch.channels_last) if last else x

    def fn(x: Any, w: Any) -> Any:
        return torch.nn.functional.group_norm(x, 4, w, w)

    call = terrazzo.compile(fn, x, w, options={"target": "cpu", "cache_dir": tmp_path, "compiler": COMPILER})
    torch.testing.assert_close(call(x, w), fn(x, w), rtol=1e-5, atol=1e-5)
    text = "".join(source[source.index('extern "C" int k_') :] for _, source in call.compiled.sources)
    assert bool(re.search(r"i\d+ < 4; i\d+\+\+\) {  // free", text)) is not last


def test_windows_of_what_an_op_of_pytorch_made_are_walked_along_its_channels(tmp_path: Path) -> None:
    """What a called convolution gives has its channels last, which nobody knows before it is called."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(32, 32, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2, 1))
    x = torch.randn(2, 32, 18, 18).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        call = terrazzo.compile(model, x, options={"target": "cpu", "cache_dir": tmp_path, "compiler": COMPILER})
        torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-5)
    assert [f.op for f in call.compiled.fallbacks] == ["aten.convolution.default"]
    ((_, source),) = call.compiled.sources
    text = source[source.index('extern "C" int k_') :]
    assert "columns" in text and "lane" in text  # side by side


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_channels_are_summed_along_memory(groups: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Where all channels are one group, that is one run; or else steps along a channel are a loop of lanes, whose
    places nobody divides for.
    """
    torch.manual_seed(0)
    x, w = torch.randn(2, 16, 9, 11, dtype=dtype), torch.randn(16, dtype=dtype)
    x = x.contiguous(memory_format=torch.channels_last)

    def fn(x: Any, w: Any) -> Any:
        return torch.nn.functional.group_norm(x, groups, w, w)

    call = terrazzo.compile(fn, x, w, options={"target": "cpu", "cache_dir": tmp_path, "compiler": COMPILER})
    exact = fn(x.double(), w.double())
    assert accuracy([call(x, w)], [fn(x, w)], [exact]).problem == ""
    text = "".join(source[source.index('extern "C" int k_') :] for _, source in call.compiled.sources)
    assert text and not re.search(r"/ (9|11|99)\b|% (9|11|99)\b", text)


def test_a_border_is_asked_of_once_for_all_channels(tmp_path: Path) -> None:
    """Each of two loops over these has a length that is known. And gradients of what has its channels last lie so."""
    torch.manual_seed(0)
    x = torch.randn(2, 40, 9, 11).contiguous(memory_format=torch.channels_last).requires_grad_()

    def fn(x: Any) -> Any:
        return torch.nn.functional.avg_pool2d(torch.nn.functional.max_pool2d(x, 3, 2, 1), 3, 1, 1)

    call = terrazzo.compile(fn, x.detach(), options={"target": "cpu", "cache_dir": tmp_path, "compiler": COMPILER})
    torch.testing.assert_close(call(x.detach()), fn(x.detach()))
    text = "".join(source[source.index('extern "C" int k_') :] for _, source in call.compiled.sources)
    assert "} else {" in text and "low" not in text

    ours = torch.compile(fn, backend="terrazzo", options={"cache_dir": tmp_path, "compiler": COMPILER})(x)
    (found,) = torch.autograd.grad(ours.square().sum(), x)
    (expected,) = torch.autograd.grad(fn(x).square().sum(), x)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("side", [14, 28])
def test_short_rows_of_an_image_are_summed_as_one_run(side: int) -> None:
    """Rows shorter than vectors lie one behind the other: a group of channels is one run of memory."""
    norm = torch.nn.GroupNorm(32, 96)
    (kernel,) = lowering(capture(norm, [torch.empty(4, 96, side, side)]).program, Options(target="cpu")).loop.steps
    assert isinstance(kernel, l.Kernel)
    reduces = [x for x in topological(summed_as_stored(kernel).stores) if isinstance(x, l.Reduce)]
    assert [[a.extent for a in x.axes] for x in reduces] == [[3, side, side]] * 2
    assert f" < {3 * side * side}; " in emit(kernel)[1] or f"<= {3 * side * side}; " in emit(kernel)[1]


@pytest.mark.parametrize("columns", [500, 1000])
def test_scans_of_what_is_there_by_a_condition_are_read_behind_their_step(columns: int, tmp_path: Path) -> None:
    """The gradient of a product is one of scans of columns, moved by a row: a guard that is the same for all lanes."""
    torch.manual_seed(0)
    x, c = 1 + torch.randn(64, columns) / 100, torch.randn(columns)

    def fn(x: Any, c: Any) -> Any:
        one = torch.ones_like(x[:1])
        moved = torch.cat([one, x[:-1]]).cumprod(0), torch.cat([one, x.flip(0)[:-1]]).cumsum(0).flip(0)
        return *moved, c * moved[0] * moved[1]

    options = {"target": "cpu", "cache_dir": tmp_path, "compiler": COMPILER}
    ours = terrazzo.compile(fn, x, c, options=options)(x, c)
    assert accuracy(list(ours), list(fn(x, c)), list(fn(x.double(), c.double()))).problem == ""
