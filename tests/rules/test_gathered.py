"""Rows of which few elements are read are not stored."""

from __future__ import annotations

import numpy as np
import torch
from tests.kernels.programs import lowered

from terrazzo.interp import loop as interpreter
from terrazzo.ir.text import parse
from terrazzo.ir.verify import problem
from terrazzo.rewrite.rule import Log
from terrazzo.rules.loop.memory.gathered import rows_gathered
from terrazzo.rules.loop.memory.lifetimes import in_use
from terrazzo.targets import target


def likelihood(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Logarithms of probabilities of what was said, as losses of preferences have them."""
    found = torch.log_softmax(x.float(), -1).gather(-1, labels[..., None])[..., 0]
    return torch.sigmoid(found.sum(-1))


def test_logarithms_of_softmax_are_not_stored_for_labels() -> None:
    """What is kept of a row is its maximum and a sum."""
    torch.manual_seed(0)
    x, labels = torch.randn(4, 128, 4000).bfloat16(), torch.randint(0, 4000, (4, 128))
    program = lowered(likelihood, (x, labels), "sm_90a").lowering.loop
    assert max(in_use(program.steps, program.results)) < 4 * 128 * 4 * 4


def test_rows_of_which_much_is_read_are_stored() -> None:
    """A row is divided once, where all of it is looked up."""
    torch.manual_seed(0)
    x, labels = torch.randn(64, 4000), torch.randint(0, 4000, (64, 4000))
    program = lowered(lambda x, i: torch.softmax(x, -1).gather(-1, i).exp(), (x, labels), "sm_90a").lowering.loop
    assert max(in_use(program.steps, program.results)) >= 64 * 4000 * 4


BESIDE = """@loop
def f(x: f32[4096, 512], i: i64[4096]):
    with kernel('m', m=f32[4096], y=f32[4096, 512]):
        for a0 in free(4096):
            for r0 in reduce(512):
                acc0 <- max(x[a0, r0])
            m[a0] = acc0
            for a1 in free(512):
                y[a0, a1] = sub(x[a0, a1], acc0)
    with kernel('z', z=f32[4096]):
        for a0 in free(4096):
            z[a0] = y[a0, at(i[a0], 512)]
    with kernel('w', w=f32[4096]):
        for a0 in free(4096):
            w[a0] = neg(m[a0])
    return (z, w)
"""


def test_what_others_read_of_such_rows_keeps_its_name() -> None:
    """It was stored under another one, and its reader left behind."""
    program = parse(BESIDE)
    log = Log()
    found = rows_gathered(program, log, target("sm_90a").rates)
    assert any(e.fired for e in log.events)
    assert not problem(found)
    x, i = np.random.default_rng(0).standard_normal((4096, 512)).astype(np.float32), np.arange(4096) % 512
    before, after = (interpreter.run(p, {"x": x, "i": i}) for p in (program, found))
    assert all(map(np.array_equal, before, after))


def test_what_is_stored_of_rows_besides_keeps_its_name() -> None:
    """Which elements are the largest of their rows, for a gradient, beside the largest themselves."""

    def late(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: ((y @ w.mT).amax(-1).sum(-1) - 1).relu().mean())(x)

    torch.manual_seed(0)
    found = lowered(late, (torch.randn(16, 8, 32), torch.randn(16, 96, 32)), "sm_90a")
    exact = late(*(torch.as_tensor(x).double() for x in found.args))
    assert torch.allclose(torch.as_tensor(found.simulated()[0]).double(), exact, atol=1e-4)
