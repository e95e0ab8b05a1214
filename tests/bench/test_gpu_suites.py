"""What the suites say of their cases is what the cases do."""

from __future__ import annotations

from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from terrazzo.bench import article, gpu, gpu_suites, report  # noqa: E402
from terrazzo.ir.torch_types import to_torch_dtype  # noqa: E402
from terrazzo.ir.types import DTYPES  # noqa: E402
from terrazzo.options import Options  # noqa: E402


@pytest.mark.parametrize("suite", ["pointwise", "reduction", "gemm", "fp32", "convolution", "article"])
def test_a_case_moves_the_bytes_it_says(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operand read once, the result written once; the roofline check and the rates rest on it."""

    def shaped(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=to_torch_dtype(DTYPES[dtype]), device="meta")

    monkeypatch.setattr(gpu_suites, "normal", shaped)
    monkeypatch.setattr(article, "normal", shaped)
    cases = gpu.SUITES[suite]()
    assert not [name for name, n in Counter((c.name, c.dtype) for c in cases).items() if n > 1]
    for case in cases:
        fn, make, exact = case.make()
        given = make()
        found = fn(*given)
        assert case.bytes == sum(t.numel() * t.element_size() for t in (*given, found)), case.name
        assert exact(*given).shape == found.shape
        assert exact(*given).dtype == torch.float64


@pytest.mark.parametrize(
    ("way", "least"),
    [("exact", 1000 / 67), ("split", 6 * 1000 / 989), ("auto", 6 * 1000 / 989), ("bf16", 1000 / 989)],
)
def test_the_roof_is_that_of_the_way_to_multiply(way: str, least: float) -> None:
    case = gpu_suites.Case("a", "f32", lambda: pytest.fail("is not made"), 0, 1e12)
    options = Options(target="sm_90a", fp32=way)
    assert gpu._roofline(case, {"ours": least * 1e3}, options) == ""
    assert gpu._roofline(case, {"ours": least * 900}, options).startswith("ours beat the roofline")


def test_a_table_shows_what_others_published() -> None:
    case = {
        "case": "a",
        "dtype": "f32",
        "us": {"terrazzo": 1.0, "eager": 2.0},
        "error": 0.0,
        "error_eager": 0.0,
        "problem": "",
    }
    case |= {"bytes": 4000, "operations": 0.0}
    head, row = report.gpu_rows({"geomean": {"eager": 2.0}, "cases": [case]})
    assert "the article's / eager" not in head
    head, row = report.gpu_rows({"geomean": {"eager": 2.0}, "cases": [case | {"said": "1.31x"}]})
    assert dict(zip(head, row, strict=True))["the article's / eager"] == "1.31x"
    assert dict(zip(head, row, strict=True))["/ eager"] == "2.00x"
