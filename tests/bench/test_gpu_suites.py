"""What the suites say of their cases is what the cases do."""

from __future__ import annotations

from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from terrazzo.bench import article, gpu, gpu_suites, products, report  # noqa: E402
from terrazzo.cli.bench import GpuSuite  # noqa: E402
from terrazzo.front.capture import capture  # noqa: E402
from terrazzo.ir.torch_types import to_torch_dtype  # noqa: E402
from terrazzo.ir.types import DTYPES  # noqa: E402
from terrazzo.options import Options  # noqa: E402
from terrazzo.pipelines import lowering  # noqa: E402

PRODUCTS = ("squares", "projections", "odd", "batched", "fused", "staircase")


@pytest.mark.parametrize("suite", ["pointwise", "reduction", "gemm", "fp32", "convolution", "article", *PRODUCTS])
def test_a_case_moves_the_bytes_it_says(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operand read once, the result written once; the roofline check and the rates rest on it."""

    def shaped(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=to_torch_dtype(DTYPES[dtype]), device="meta")

    monkeypatch.setattr(gpu_suites, "normal", shaped)
    monkeypatch.setattr(article, "normal", shaped)
    cases = gpu.SUITES[suite]()
    assert not [name for name, n in Counter((c.name, c.dtype) for c in cases).items() if n > 1]
    assert suite in [x.value for x in GpuSuite]
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


STAIRS = products.stairs(2048)


@pytest.mark.parametrize(("name", "text"), STAIRS, ids=[name for name, _ in STAIRS])
def test_every_step_of_the_staircase_is_the_schedule_that_runs(name: str, text: str) -> None:
    """Each has what its name says, and the model's choice has nothing pinned."""
    x = torch.empty(2048, 2048, dtype=torch.bfloat16, device="meta")

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, w)

    options = Options(target="sm_90a", libraries="never", schedules=(text,) if text else ())
    done = lowering(capture(product, (x, x.clone()), {}).program, options)
    ((_, schedule),) = done.at("tile").schedules
    assert not text or str(schedule).strip() == text.strip()
    assert len(done.at("kernel").steps) == 1
    words = {"mma.sync": "mma.m16n8k16", "cp.async": 'by="cp.async"', "TMA": 'by="tma"', "wgmma": 'on="wgmma'}
    words |= {"256": "inst.n(256)", "only load": "roles(", "results": "mm = smem", "stay": "persistent(132"}
    words |= {"clusters": "cluster(2)", "CUDA cores": "fma.f32"}
    for said, word in words.items():
        assert said not in name or word in str(schedule), (said, word)


def test_a_staircase_says_what_each_step_gains() -> None:
    cases = [
        {"case": n, "us": {"terrazzo": us, "eager": 100.0}, "operations": 4e8, "problem": problem}
        for n, us, problem in (("first", 400.0, ""), ("second", 125.0, ""), ("third", 120.0, "an error"))
    ]
    _, first, second, third = report.stair_rows({"cases": cases})
    assert first == ("first", "400", "1", "", "0.25x")
    assert second[3:] == ("3.20x", "0.80x")
    assert third[3:] == ("1.04x", "**an error**")
