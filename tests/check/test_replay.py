"""What a checker must not take for wrong: operators of every kind from PyTorch's database, and what it can only find
later.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from terrazzo.check import replay
from terrazzo.check.judge import difference
from terrazzo.check.replay import check
from terrazzo.errors import TerrazzoError
from terrazzo.front.capture import capture
from terrazzo.ir.types import bf16, f32, i64
from terrazzo.options import Options
from tests.opinfo.harness import name_of, operators
from tests.opinfo.test_sample import SAMPLE

ODD = ("fft.rfft", "svd", "empty_like", "nn.functional.multi_head_attention_forward", "nn.functional.dropout", "sort")
"""Calls of PyTorch with one result or several, memory that nobody wrote, one tensor as several inputs, what is
random."""


@pytest.mark.parametrize("op", [*SAMPLE, *(op for op in operators() if op.name in ODD)], ids=name_of)
def test_right_operators_are_not_blamed(op: Any) -> None:
    torch.manual_seed(0)
    for sample in list(
        op.sample_inputs("cpu", torch.float32 if torch.float32 in op.supported_dtypes("cpu") else torch.int64)
    )[:2]:
        args, kwargs = (sample.input, *sample.args), sample.kwargs
        try:
            captured = capture(lambda *a, op=op, **k: op.op(*a, **k), args, kwargs)
        except TerrazzoError:
            continue
        tensors = [x.detach() for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        inputs = {**captured.bound, **dict(zip(captured.inputs, tensors, strict=True))}
        assert check(captured.program, inputs, Options(target="interpreter")).wrong is None


def test_large_products_are_replayed_only_where_they_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put off is found wrong with the rewrite that removes it, and then named itself."""
    from terrazzo.rules.tensor_to_loop import lift
    from tests.check.plants import result_of, swapped

    torch.manual_seed(0)
    x, w = torch.randn(6, 7), torch.randn(7, 8)
    captured = capture(lambda x, w: (x - 1) @ w, (x, w), {})
    inputs = {**captured.bound, **dict(zip(captured.inputs, (x, w), strict=True))}
    monkeypatch.setattr(replay, "LARGE", 200)  # the product has 6 * 7 * 8 elements
    assert check(captured.program, inputs, Options(target="interpreter")).wrong is None
    result_of(lift.elementwise, lambda term: swapped(term, "sub"))(monkeypatch)
    wrong = check(captured.program, inputs, Options(target="interpreter")).wrong
    assert wrong is not None and str(wrong.application) == "tensor_to_loop:elementwise at sub"
    monkeypatch.undo()
    monkeypatch.setattr(replay, "LARGE", 200)
    result_of(
        lift.elementwise, lambda term: type(term)(term.fn, (term.args[0],) * 2) if term.fn.name == "mul" else term
    )(monkeypatch)
    wrong = check(captured.program, inputs, Options(target="interpreter")).wrong
    assert (
        wrong is not None and wrong.rule == "tensor_to_loop:elementwise" and wrong.application.subject.startswith("mm")
    )


def test_the_judge() -> None:
    """Rounding is no error, a lost element or another type is; what is no number stays where it was."""
    rng = np.random.default_rng(0)
    exact = rng.standard_normal(4096)
    for dtype in (f32, bf16):
        rounded = exact.astype(dtype.numpy)
        assert (
            difference(
                dtype,
                rounded,
                np.nextafter(rounded, rounded + 1, dtype=dtype.numpy) if dtype is f32 else rounded,
                exact,
            )
            == ""
        )
        lost = rounded.copy()
        lost[np.argmax(np.abs(exact))] = 0
        assert "has an error of" in difference(dtype, rounded, lost, exact)
        assert "is off by" in difference(dtype, rounded, lost, exact, lost.astype(np.float64))
    special = np.array([1.0, np.nan, np.inf], np.float32)
    assert difference(f32, special, special.copy(), special.astype(np.float64)) == ""
    assert "has 0.0 where nan belongs" in difference(
        f32, special, np.nan_to_num(special, posinf=np.inf), special.astype(np.float64)
    )
    assert difference(f32, special, special.astype(np.float64)) == "is float64[3], not float32[3]"
    numbers = np.arange(5)
    assert difference(i64, numbers, numbers + (numbers == 3), numbers) == "differs in 1 of 5 elements"
