"""Large cases are drawn as the rule says, and lowered without a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from terrazzo.bench.operators import drawn, shapes
from terrazzo.bench.operators.fills import Fill
from tests.opinfo import large


def operator(name: str) -> Any:
    return next(op for op in drawn.op_db if drawn.name_of(op) == name)


@pytest.mark.parametrize("name", ("add", "sum", "matmul", "gather", "nn.functional.conv2d", "nn.functional.layer_norm"))
def test_cases_are_large_and_still_calls_of_the_operator(name: str) -> None:
    found = list(drawn.grown(operator(name), torch.float32, "even", 2))
    assert found
    for case in found:
        given = case.tensors("meta")
        out = [x for x in torch.utils._pytree.tree_leaves(case.call(*given)) if isinstance(x, torch.Tensor)]
        assert max(x.numel() for x in (*given, *out)) >= drawn.LARGE


def test_what_belongs_together_grows_together() -> None:
    (case,) = drawn.grown(operator("bmm"), torch.float32, "even", 1)
    a, b = (f.shape for f in case.fills)
    assert a[0] == b[0] and a[2] == b[1]


def test_forms_differ() -> None:
    shape = {
        f: next(drawn.grown(operator("tril"), torch.float32, f, 1)).fills[0].shape for f in ("even", "odd", "rows")
    }
    assert all(s % 2 for s in shape["odd"]) and not any(s % 4 for s in shape["even"])
    assert shape["rows"][0] > shape["even"][0]


def test_places_are_inside() -> None:
    (case,) = drawn.grown(operator("index_select"), torch.float32, "even", 1)
    index = next(f for f in case.fills if f.dtype is torch.int64)
    assert index.high < min(s for f in case.fills if f.dtype is torch.float32 for s in f.shape)


def test_places_that_are_written_are_different() -> None:
    fill = Fill((5, 7), torch.int64, 0, 8, along=1)
    assert all(len(set(row.tolist())) == 7 and max(row) <= 8 for row in fill.make("cpu"))


def test_gradients_are_asked_for() -> None:
    (case,) = drawn.grown(operator("mul"), torch.float32, "backward", 1)
    given = [f.make("meta") for f in case.fills]
    assert [x.shape for x in case.call(*given)] == [given[0].shape, given[1].shape]


def test_shapes_of_models_are_large() -> None:
    sizes = {name: math.prod(next(shapes.by_hand(name)).fills[0].shape) for name in shapes.CASES}
    assert sizes["softmax_4096x4096"] == 1 << 24 and sizes["layer_norm_512x50257"] == 512 * 50257


def test_a_case_is_lowered_without_a_gpu() -> None:
    pytest.importorskip("cuda.bindings")
    (case,) = drawn.grown(operator("exp"), torch.float32, "even", 1)
    row = large.on_meta(case, "", "auto")
    assert row["verdict"] == "ok" and not row["calls"]
    (kernel,) = row["kernels"]
    assert kernel["sectors_mb"] == pytest.approx(kernel["mb"], rel=0.01)
