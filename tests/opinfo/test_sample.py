"""A sample of the operator database in the ordinary tests; `make opinfo` runs all of it."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from tests.opinfo.harness import DTYPES, judge, name_of, operators

EVERY = 9
"""One operator in so many, chosen by its name, so that the sample does not move when the database grows."""

SLOW = ("linalg", "grid_sampler", "nn.functional.grid_sample")

SAMPLE = [op for op in operators() if zlib.crc32(name_of(op).encode()) % EVERY == 0 and not op.name.startswith(SLOW)]


@pytest.mark.parametrize("op", SAMPLE, ids=name_of)
def test_operator(op: Any) -> None:
    for dtype in DTYPES:
        if dtype in op.supported_dtypes("cpu"):
            verdict = judge(op, dtype, "loop", 6)
            assert verdict.verdict not in ("wrong", "crash"), verdict


@pytest.mark.parametrize(
    "name", ("add", "softmax", "argmax", "cumsum", "gather", "nn.functional.conv2d", "var", "where", "scatter")
)
def test_compiled_operator(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path))
    op = next(op for op in operators(name) if op.name == name)
    for dtype in DTYPES:
        if dtype in op.supported_dtypes("cpu"):
            verdict = judge(op, dtype, "cpu", 2)
            assert verdict.verdict in ("own", "skipped"), verdict
