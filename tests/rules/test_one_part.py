"""Convolutions in float32 of which the digits of TF32 will do: one part in float16 of each factor, scaled."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered

from terrazzo.front.capture import capture
from terrazzo.interp import loop
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.text import parse, show
from terrazzo.ir.types import Type, f32
from terrazzo.ir.verify import verify
from terrazzo.options import Options
from terrazzo.pipelines import stages
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.precision.parts import IN_TF32, into_parts
from terrazzo.rules.loop_to_tile.experience import NONE, Told
from terrazzo.rules.torch_to_tensor import families, in_tf32

RECORD = Path(__file__).parents[2] / "benchmarks/fits/h200-tf32.json"
IN_FLOAT32 = 3e-5
"""Sums of products in TF32 are off by ten times as much, of those in float32 by a hundredth."""
backward = torch.ops.aten.convolution_backward.default


@pytest.fixture(autouse=True)
def small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small convolutions are as large ones, for the sake of time."""
    monkeypatch.setattr(in_tf32, "CHANNELS", 1)
    monkeypatch.setattr(in_tf32, "WORK", {False: 0.0, True: 0.0})


def small(x: Any, w: Any) -> Any:
    return F.conv2d(x, w, padding=1)


def gradients(g: Any, x: Any, w: Any) -> Any:
    return backward(g, x, w, [len(w)], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])[:2]


def upper(fn: Any, args: Any, tf32: bool = True) -> l.Program:
    """What comes before products are in parts."""
    program = capture(fn, args, {}).program
    names = ("torch_to_tensor", "tensor_to_loop", "fuse")
    found: l.Program = stages(program, Options(target="sm_90a", libraries="never", tf32=tf32), Log(), names)[-1][1]
    return found


def in_parts(fn: Any, args: Any, count: int = 3) -> l.Program:
    """A program whose products have one part of each factor, though others had so many."""
    found = into_parts(upper(fn, args), Log(), count, lambda old, new, beaten: (float("_root" in str(new)), ""))
    verify(found, "parts")
    assert parse(show(found)) == found and "tf32_mul" not in show(found)
    return found


def run(fn: Any, args: Any, count: int = 3) -> list[Any]:
    program = in_parts(fn, args, count)
    given = dict(zip((b.name for b in program.inputs), (x.numpy() for x in args), strict=True))
    with np.errstate(all="ignore"):
        return loop.run(program, given)


def rounded(x: Any) -> Any:
    """A number with the digits that TF32 has."""
    return torch.from_numpy(((x.numpy().view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)).double()


def apart(a: Any, b: Any) -> float:
    return float(np.sqrt(((a - b) ** 2).mean() / (b**2).mean()))


def test_what_is_computed_on_its_way_is_stored_and_scaled() -> None:
    """A factor that is no tensor in memory becomes one, where that gains."""

    def grown(x: Any, w: Any) -> Any:
        return F.conv2d(x.exp(), w)

    x, w = torch.randn(3, 6, 5, 4), torch.randn(7, 6, 1, 1) * 1e-3
    first, *_, last = in_parts(grown, (x, w)).steps
    assert isinstance(first, l.Kernel) and first.name == "x_whole"
    assert {b.name for b in last.reads} == {"x_whole_1", "x_whole_root", "w_1", "w_root"}
    assert apart(run(grown, (x, w))[0], grown(x.double(), w.double()).numpy()) < 2.0**-11


def test_only_convolutions_have_them_and_where_the_switch_says_so() -> None:
    x, w = torch.randn(2, 8, 6, 6), torch.randn(8, 8, 3, 3)
    assert "tf32_mul" in show(upper(small, (x, w)))
    assert "tf32_mul" not in show(upper(small, (x, w), tf32=False))
    assert "tf32_mul" not in show(upper(F.linear, (torch.randn(64, 256), torch.randn(64, 256))))
    assert "tf32_mul" not in show(upper(small, (x.bfloat16(), w.bfloat16())))


def test_who_asked_the_library_knows_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a convolution, and of each of its gradients."""
    monkeypatch.setattr(in_tf32, "LEAST", 0.0)
    names = ("torch_to_tensor",)
    given = torch.randn(2, 8, 6, 6), torch.randn(2, 8, 6, 6), torch.randn(8, 8, 3, 3)
    forward, back = capture(small, given[1:]).program, capture(gradients, given).program

    def found(program: Any, tried: Any) -> int:
        options = Options(target="sm_90a", libraries="never", tf32=True)
        return show(stages(program, options, Log(), names, tried)[-1][1]).count("tf32_mul")

    assert [found(forward, x) for x in (NONE, Told((True,)), Told((False,)))] == [1, 1, 0]
    answers = (True, True, False), (True, False, False), (False, True, False), (False,) * 3
    assert [found(back, x) for x in (NONE, *map(Told, answers))] == [2, 2, 1, 1, 0]


def test_what_eager_computes_in_float32_is_as_exact_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was drawn, no convolution counts as one in TF32 that eager had in float32, nor a gradient of it."""
    monkeypatch.undo()
    rough = 0
    for row in json.loads(RECORD.read_text())["rows"]:
        (cin, cout), groups, transposed = row["channels"], row["groups"], row["transposed"]
        taps, stride, dilation, padding = row["taps"], row["stride"], row["dilation"], row["padding"]
        reach = dilation * (taps - 1) + 1
        out = (row["size"] - 1) * stride - 2 * padding + reach
        out = out if transposed else (row["size"] + 2 * padding - reach) // stride + 1
        sides = (cin, cout // groups) if transposed else (cout, cin // groups)
        image, filters, made = (
            SimpleNamespace(type=Type(f32, (a, b, *(n,) * row["dims"])))
            for a, b, n in ((row["batch"], cin, row["size"]), (*sides, taps), (row["batch"], cout, out))
        )
        args = (image, filters, None, [stride], [padding], [dilation], transposed, [0], groups)
        back = (made, image, filters, [cout], *args[3:], [True, True, False])
        for name, given, off in ((families.FORWARD, args, row["errors"][:1]), (families.BACKWARD, back, row["errors"])):
            if in_tf32.is_large(SimpleNamespace(name=name, args=given, writes=[made])):
                rough += 1
                assert min(off) > IN_FLOAT32, row
    assert rough >= 40


@pytest.mark.parametrize("size", (1.0, 1e-30, 1e30))
def test_they_are_as_near_as_tf32(size: float) -> None:
    torch.manual_seed(0)
    x, w, g = size * torch.randn(3, 8, 6, 6), torch.randn(5, 8, 3, 3), torch.randn(3, 5, 6, 6)
    (ours,), exact = run(small, (x, w)), small(x.double(), w.double()).numpy()
    assert apart(ours, exact) <= 1.1 * apart(small(rounded(x), rounded(w)).numpy(), exact)
    for ours, theirs, exact in zip(
        run(gradients, (g, x, w)),
        gradients(*map(rounded, (g, x, w))),
        gradients(g.double(), x.double(), w.double()),
        strict=True,
    ):
        assert apart(ours, exact.numpy()) <= 1.1 * apart(theirs.numpy(), exact.numpy())


def test_an_image_takes_nothing_of_others() -> None:
    torch.manual_seed(1)
    x, w = torch.randn(4, 8, 6, 6), torch.randn(5, 8, 3, 3)
    sizes, filters = torch.tensor([1e20, 1.0, 1e-20, 0.0]), torch.tensor([1e-15, 1.0, 1e15, 1.0, 0.0])
    (ours,) = run(small, (x * sizes[:, None, None, None], w * filters[:, None, None, None]))
    (plain,) = run(small, (x, w))
    for n, size in enumerate(sizes):
        for o, by in enumerate(filters):
            expected = plain[n, o].astype(np.float64) * float(size) * float(by)
            assert np.allclose(ours[n, o], expected, rtol=3e-3, atol=3e-3 * np.abs(expected).max())


def test_what_is_no_ordinary_number_is_what_it_is() -> None:
    torch.manual_seed(2)
    x, w = torch.randn(5, 8, 6, 6), torch.randn(4, 8, 3, 3)
    x[0, 0, 2, 2], x[1, 3, 1, 1], x[2, 1, 0, 5] = float("inf"), float("nan"), -float("inf")
    x[3, 0, 0, 0], x[3, 1, 1, 1] = 1e-38, 3e38
    w[1, :, 1, 1], w[2] = 0.0, 1e-30 * w[2]
    (ours,), expected = run(small, (x, w)), small(x, w).numpy()
    assert np.array_equal(np.isnan(ours), np.isnan(expected))
    assert np.array_equal(np.isinf(ours), np.isinf(expected))
    infinite = np.isinf(expected)
    assert np.array_equal(ours[infinite], expected[infinite])


def test_what_is_not_faster_so_is_multiplied_as_it_is() -> None:
    program = upper(small, (torch.randn(2, 8, 6, 6), torch.randn(8, 8, 3, 3)))
    found = into_parts(program, Log(), 3, lambda old, new, beaten: (0.0, "it is not faster"))
    assert "tf32_mul" in show(program) and show(found) == show(program).replace("tf32_mul", "mul")


@pytest.mark.parametrize("last", (True, False))
def test_boxes_multiply_them(last: bool) -> None:
    """Simulated: one product of float16 on the tensor cores, whichever way the image lies."""
    torch.manual_seed(3)
    form = torch.channels_last if last else torch.contiguous_format
    x, w = torch.randn(2, 64, 16, 16).contiguous(memory_format=form), torch.randn(64, 64, 3, 3)
    found = lowered(small, (x, w), "sm_90a", tf32=True)
    last_kernel = found.kernels[-1]
    assert ".f32.f16" in show(found.lowering.at("tile")) and last_kernel.name == "convolution"
    exact, (ours,) = small(x.double(), w.double()).numpy(), found.simulated()
    assert apart(ours, exact) <= 1.1 * apart(small(rounded(x), rounded(w)).numpy(), exact)


@pytest.mark.parametrize("transposed", (False, True))
def test_rows_of_matrices_are_scaled_where_tf32_is_asked_for(transposed: bool) -> None:
    torch.manual_seed(4)
    sizes = 10.0 ** torch.linspace(-12, 12, 128)
    x, w = torch.randn(128, 192) * sizes[:, None], torch.randn(256, 192)
    w = w.T.contiguous().T if transposed else w
    (ours,), exact = run(F.linear, (x, w), IN_TF32), F.linear(x.double(), w.double()).numpy()
    theirs = F.linear(rounded(x), rounded(w.contiguous())).numpy()
    for row in range(0, 128, 16):
        assert apart(ours[row], exact[row]) <= 1.2 * apart(theirs[row], exact[row])
