"""Large cases are drawn as the rule says, and lowered without a GPU."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.opinfo import grow, large, shapes


def operator(name: str) -> Any:
    return next(op for op in grow.op_db if grow.name_of(op) == name)


@pytest.mark.parametrize("name", ("add", "sum", "matmul", "gather", "nn.functional.conv2d", "nn.functional.layer_norm"))
def test_cases_are_large_and_still_calls_of_the_operator(name: str) -> None:
    found = list(grow.grown(operator(name), torch.float32, "even", 2))
    assert found
    for case in found:
        given = case.tensors("meta")
        out = [x for x in torch.utils._pytree.tree_leaves(case.call(*given)) if isinstance(x, torch.Tensor)]
        assert max(x.numel() for x in (*given, *out)) >= grow.LARGE


def test_what_belongs_together_grows_together() -> None:
    (case,) = grow.grown(operator("bmm"), torch.float32, "even", 1)
    a, b = (f.shape for f in case.fills)
    assert a[0] == b[0] and a[2] == b[1]


def test_forms_differ() -> None:
    shape = {f: next(grow.grown(operator("tril"), torch.float32, f, 1)).fills[0].shape for f in ("even", "odd", "rows")}
    assert all(s % 2 for s in shape["odd"]) and not any(s % 4 for s in shape["even"])
    assert shape["rows"][0] > shape["even"][0]


def test_places_are_inside() -> None:
    (case,) = grow.grown(operator("index_select"), torch.float32, "even", 1)
    index = next(f for f in case.fills if f.dtype is torch.int64)
    assert index.high < min(s for f in case.fills if f.dtype is torch.float32 for s in f.shape)


def test_places_that_are_written_are_different() -> None:
    fill = grow.Fill((5, 7), torch.int64, 0, 8, along=1)
    assert all(len(set(row.tolist())) == 7 and max(row) <= 8 for row in fill.make("cpu"))


def test_gradients_are_asked_for() -> None:
    (case,) = grow.grown(operator("mul"), torch.float32, "backward", 1)
    given = [f.make("meta") for f in case.fills]
    assert [x.shape for x in case.call(*given)] == [given[0].shape, given[1].shape]


def test_shapes_of_models_are_large() -> None:
    sizes = {name: math.prod(next(shapes.by_hand(k)).fills[0].shape) for k, name in enumerate(shapes.CASES)}
    assert sizes["softmax_4096x4096"] == 1 << 24 and sizes["layer_norm_512x50257"] == 512 * 50257


def test_a_case_is_lowered_without_a_gpu() -> None:
    pytest.importorskip("cuda.bindings")
    (case,) = grow.grown(operator("exp"), torch.float32, "even", 1)
    row = large.on_meta(case, "")
    assert row["verdict"] == "ok" and not row["calls"]
    (kernel,) = row["kernels"]
    assert kernel["sectors_mb"] == pytest.approx(kernel["mb"], rel=0.01)


def test_a_summary_of_nothing_and_of_what_took_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert large.summary(tmp_path / "none.jsonl", 0, 3) == 0
    row = {"op": "add", "verdict": "ok", "us": {}, "gbs": 0, "kernels": [], "calls": []}
    (tmp_path / "some.jsonl").write_text("".join(json.dumps({**row, "ratio": x}) + "\n" for x in (0.0, 1.0)))
    assert large.summary(tmp_path / "some.jsonl", 2, 3) == 0
    assert "2 cases timed" in capsys.readouterr().out


def test_only_rows_are_left_beside_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out" / "rows.jsonl"
    out.parent.mkdir()
    given: list[str] = []

    def run_all(options: Any) -> tuple[int, int]:
        given.append(options.lock)
        Path(f"{options.lock}.cache").mkdir()
        return 0, 0

    monkeypatch.setattr(large, "run_all", run_all)
    monkeypatch.setattr(sys, "argv", ["large", "--out", str(out)])
    assert large.main() == 0
    assert not list(out.parent.iterdir()) and not Path(given[0]).parent.exists()
