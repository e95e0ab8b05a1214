"""Images that products read turned or cropped: what is stored first computes the same, and what lies in boxes stays."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered
from tests.rules.test_catalog import example

from terrazzo.front.capture import capture
from terrazzo.interp import loop as interpreter
from terrazzo.ir.dialects import kernel as k
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.layout import in_place
from terrazzo.rules.loop.layout.in_place import images_in_place
from terrazzo.rules.loop.layout.lookups import stored_first

BEFORE = example(inspect.getdoc(images_in_place) or "", "images_in_place")[0]
READ = {
    "cropped": lambda x: x[..., 1:-2, 2:-1],
    "cropped at one end": lambda x: x[..., :-3],
    "mirrored": lambda x: x.flip(-1),
    "turned by half": lambda x: x.flip(-1, -2),
    "transposed": lambda x: x.mT,
    "all of it": lambda x: x.mT.flip(-2)[..., 1:, :-1],
}


def fewest(steps: Any) -> float:
    """Prices by which what is stored first is cheaper."""
    return float(1 - len(steps))


def read_so(name: str) -> Any:
    """A convolution of what is read so, with zeros around it."""
    read = READ[name]
    return lambda x, w: F.conv2d(read(x), w, padding=1)


@pytest.mark.parametrize("name", READ)
def test_it_computes_the_same(name: str) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 16, 7, 9), torch.randn(12, 16, 3, 3)
    x[0, 0, 0, 0] = torch.inf  # where it is cropped, nobody multiplies it
    found = lowered(read_so(name), (x, w), "sm_80").lowering
    (before,) = [p for stage, p, _ in found.stages if stage.name == "order"]
    after = images_in_place(before, Log(), fewest)
    assert len(after.steps) == 2
    assert images_in_place(after, Log(), fewest).steps == after.steps  # it is in place
    inputs = {b.name: v.numpy() for b, v in zip(before.inputs, (x, w), strict=True)}
    for one, other in zip(interpreter.run(before, inputs), interpreter.run(after, inputs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x[r0, -r1 - a1 + 19, a0] if r1 + a1 <= 17", "x[r0, a0, r1 + a1 - 1] if r1 + a1 <= 18"),  # padded
        ("if r1 + a1 <= 17 and", "if r1 <= a0 and"),  # it is 0 where no end is
    ],
)
def test_others_stay_as_they_are(old: str, new: str) -> None:
    assert old in BEFORE
    program: Any = parse(BEFORE.replace(old, new))
    assert images_in_place(program, Log(), fewest).steps == program.steps


@pytest.mark.parametrize("name", ["cropped", "mirrored", "transposed"])
def test_it_is_chosen(name: str) -> None:
    """In float32 these left the tensor cores: 584 us by the model, and 76 where nothing is read so."""
    args = [torch.empty(s, device="meta") for s in ((16, 64, 64, 64), (64, 64, 3, 3), (64, 64, 3, 3))]
    of = read_so(name)
    program = capture(lambda x, w, v: of(torch.relu(F.conv2d(x, w, padding=1)), v), tuple(args), {}).program
    found = lowering(program, Options(target="sm_90a", libraries="never"))
    kernels = [s for s in found.at("kernel").steps if isinstance(s, k.Kernel)]
    assert sum(any(isinstance(s, k.MultiplyAsync) for s in k.walk(x.body)) for x in kernels) >= 2
    assert any(e.rule == "images_in_place" and e.fired for e in found.log.events)


@pytest.mark.parametrize("name", ["cropped", "all of it"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_right(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, name: str) -> None:
    def always(program: Any, log: Log, told: Any, find: Any, prices: Any) -> Any:
        return stored_first(program, log, told, find, lambda s, found: (1.0, 0.0))

    monkeypatch.setattr(in_place, "stored_first", always)
    torch.manual_seed(0)
    args = [torch.randn(s).to(dtype) for s in ((2, 64, 11, 12), (32, 64, 3, 3))]
    found = lowered(read_so(name), tuple(args), "sm_90a")
    exact, (ours,) = found.fn(*(x.double() for x in args)).numpy(), found.simulated()
    limit = 2e-7 if dtype == torch.float32 else 2.0**-8
    assert np.sqrt(((ours.astype(np.float64) - exact) ** 2).mean() / (exact**2).mean()) <= limit
