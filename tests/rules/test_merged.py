"""Which kernels become one: those that read alike what they share, be it all of a tensor, and not rows and columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.kernels.programs import lowered

from terrazzo.front.capture import capture
from terrazzo.interp import loop
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.node import topological
from terrazzo.ir.sites import product
from terrazzo.options import Options
from terrazzo.pipelines import lower
from terrazzo.rewrite.rule import Log


def kernels(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[list[l.Kernel], Log]:
    log = Log()
    program = capture(fn, tuple(torch.empty(s, device="meta") for s in shapes)).program
    return [s for s in lower(program, Options(target="cpu"), log).steps if isinstance(s, l.Kernel)], log


def gradients(x: Any, w: Any, b: Any, g: Any) -> Any:
    with torch.enable_grad():
        given = [y.detach().requires_grad_() for y in (x, w, b)]
        return torch.autograd.grad(F.layer_norm(given[0], given[0].shape[-1:], given[1], given[2]), given, g)


def test_rows_and_columns_of_a_square_are_read_apart() -> None:
    found, log = kernels(gradients, (2048, 2048), (2048,), (2048,), (2048, 2048))
    told = "memory runs along the rows of one, and across those of the other"
    assert any(e.rule == "merge" and not e.fired and e.reason == told for e in log.events)
    assert sorted(sorted({len(b.type.shape) for b in k.writes}) for k in found) == [[1], [2]]


@pytest.mark.parametrize("fn", (torch.aminmax, torch.var_mean, lambda x: (x.sum(), x.abs().max())))
def test_all_of_a_tensor_is_read_once(fn: Callable[..., Any]) -> None:
    found, _ = kernels(fn, (1 << 22,))
    assert sum(any(b.type.numel == 1 << 22 for b in k.reads) for k in found) == 1


def test_reductions_of_tensors_that_are_not_as_long_stay_apart() -> None:
    found, _ = kernels(lambda x: (x.sum(), x[1:].max()), (1 << 20,))
    assert len(found) == 2


def test_results_are_right() -> None:
    torch.manual_seed(0)
    for fn in (torch.aminmax, torch.var_mean, lambda x: torch.masked.mean(x)):
        found = lowered(fn, (torch.randn(70_001),), "sm_90a")
        for a, b in zip(found.simulated(), loop.run(found.lowering.at("loop"), found.inputs), strict=True):
            assert np.abs(np.asarray(a, np.float64) - b).max() <= 1e-5 * max(np.abs(b).max(), 1)


def test_what_is_one_value_over_and_over_is_not_added_up() -> None:
    (kernel,), _ = kernels(lambda x: torch.masked.mean(x), (1 << 20,))
    (total,) = (x for x in topological(kernel.stores) if isinstance(x, l.Reduce))
    assert any(isinstance(x, l.Load) for x in topological(total.args))


def rows_and_columns(q: Any, k: Any) -> Any:
    return torch.cat((torch.einsum("chw,chv->hwv", q, k), torch.einsum("chw,cgw->hwg", q, k)), -1)


def rows_plus_columns(a: Any, v: Any) -> Any:
    return torch.einsum("hwv,chv->chw", a, v) + torch.einsum("hwg,cgw->chw", a, v)


@pytest.mark.parametrize("fn", (rows_and_columns, rows_plus_columns))
def test_products_of_other_rows_stay_apart(fn: Callable[..., Any]) -> None:
    program = capture(fn, tuple(torch.empty(64, 64, 64, dtype=torch.bfloat16, device="meta") for _ in "ab")).program
    steps = lower(program, Options(target="sm_90a", libraries="never"), Log()).steps
    sums = [s for s in steps if isinstance(s, l.Kernel) and any(isinstance(r, l.Reduce) for r in s.carried)]
    assert len(sums) == 2 and all(map(product, sums))


def mlp(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b))


def stored_too(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """With what a backward program reads."""
    rows = torch.addmm(b, x.reshape(-1, x.shape[-1]), w.t())
    return rows, F.silu(rows.view(*x.shape[:-1], -1))


@pytest.mark.parametrize("fn", (mlp, stored_too))
@pytest.mark.parametrize("rows", ((3152,), (16, 197), (4, 4, 197)), ids=str)
def test_an_activation_is_computed_where_its_product_is_summed(fn: Callable[..., Any], rows: tuple[int, ...]) -> None:
    given = [torch.empty(s, device="meta", dtype=torch.bfloat16) for s in ((*rows, 256), (768, 256), (768,))]
    done = lower(capture(fn, tuple(given)).program, Options(target="sm_90a", libraries="never"), Log())
    assert len(done.steps) == 1


def test_what_is_stored_over_other_axes_is_right() -> None:
    torch.manual_seed(0)
    given = tuple(torch.randn(s).bfloat16() for s in ((2, 3, 32, 64), (64, 64), (64,)))
    found = lowered(stored_too, given, "sm_90a")
    for a, b in zip(found.simulated(), stored_too(*(x.double() for x in given)), strict=True):
        assert np.abs(np.asarray(a, np.float64) - b.numpy()).max() <= 2**-7 * b.abs().max()
