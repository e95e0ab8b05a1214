"""What the suites say of their cases is what the cases do."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from terrazzo.bench import article, fp32, gpu, gpu_report, gpu_suites, gradients, products, report  # noqa: E402
from terrazzo.cli.bench import GpuSuite, app  # noqa: E402
from terrazzo.errors import UserError  # noqa: E402
from terrazzo.front.capture import capture  # noqa: E402
from terrazzo.ir.torch_types import to_torch_dtype  # noqa: E402
from terrazzo.ir.types import DTYPES  # noqa: E402
from terrazzo.options import Options  # noqa: E402
from terrazzo.pipelines import lowering  # noqa: E402
from terrazzo.rules.loop.memory.frozen import split  # noqa: E402

PRODUCTS = ("squares", "projections", "odd", "batched", "fused", "staircase")
FLOATS = ("fp32", "fp32-frozen", "fp32-small", "fp32-hard")


@pytest.mark.parametrize("suite", ["pointwise", "reduction", "gemm", "convolution", "article", *PRODUCTS, *FLOATS])
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


def test_gradients_are_of_what_eager_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def shaped(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=to_torch_dtype(DTYPES[dtype]), device="meta")

    monkeypatch.setattr(gradients, "normal", shaped)
    cases = gpu.SUITES["gradients"]()
    assert len({(c.name, c.dtype) for c in cases}) == len(cases)
    for case in cases:
        fn, make, exact = case.make()
        grad, x, w = make()
        read = (grad, w) if case.group == "image" else (grad, x)
        found = fn(grad, x, w)
        assert found.shape == (x.shape if case.group == "image" else w.shape)
        assert case.bytes == sum(t.numel() * t.element_size() for t in (*read, found)), case.name
        assert exact(grad, x, w).dtype == torch.float64


@pytest.mark.parametrize(
    ("way", "least"),
    [("exact", 1000 / 67), ("split", 3 * 1000 / 989), ("auto", 3 * 1000 / 989), ("bf16", 1000 / 989)],
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
    head, row = gpu_report.gpu_rows({"geomean": {"eager": 2.0}, "cases": [case]})
    assert "the article's / eager" not in head
    head, row = gpu_report.gpu_rows({"geomean": {"eager": 2.0}, "cases": [case | {"said": "1.31x"}]})
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
    _, first, second, third = gpu_report.stair_rows({"cases": cases})
    assert first == ("first", "400", "1", "", "0.25x")
    assert second[3:] == ("3.20x", "0.80x")
    assert third[3:] == ("1.04x", "**an error**")


def _measured(monkeypatch: pytest.MonkeyPatch, commit: str = "abc") -> list[str]:
    """Cases that take no GPU; which were measured. The one called `bad` fails."""
    done: list[str] = []

    def one(case: gpu_suites.Case, options: Options, peers: list[str], *_: Path | None) -> dict[str, object]:
        done.append(case.name)
        if case.name == "bad":
            raise RuntimeError("out of memory\n  of the GPU")
        us = {"terrazzo": 1.0, **dict.fromkeys(peers, 2.0)}
        told = {"bytes": 1, "operations": 0.0, "error": 0.0, "error_eager": 0.0}
        return {"case": case.name, "dtype": case.dtype, "us": us, "ok": True, "problem": "", **told}

    cases = [gpu_suites.Case(n, "bf16", lambda: pytest.fail("is not made"), 1) for n in ("a", "b", "bad", "c", "d")]
    monkeypatch.setitem(gpu.SUITES, "squares", lambda: tuple(cases))
    monkeypatch.setattr(gpu, "measured_on", lambda: {"commit": commit, "gpu": "NVIDIA H200"})
    monkeypatch.setattr(gpu, "_case", one)
    return done


def test_a_suite_goes_on_where_it_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = _measured(monkeypatch)
    assert not gpu.measure("squares", Options(), ["eager"], within=-1.0, folder=tmp_path)["cases"]
    assert not [*tmp_path.iterdir()]
    gpu.measure("squares", Options(), ["eager"], only="b", folder=tmp_path)
    assert done == ["b", "bad"]
    record = gpu.measure("squares", Options(), ["eager"], folder=tmp_path)
    assert done == ["b", "bad", "a", "c", "d"]
    assert [c["case"] for c in record["cases"]] == ["a", "b", "bad", "c", "d"]
    assert json.loads((tmp_path / "squares.json").read_text()) == record
    assert record["geomean"] == {"eager": 2.0}
    gpu.measure("squares", Options(), ["eager", "compile"], folder=tmp_path)
    assert len(done) == 9, "another peer is measured beside those that did not fail"
    _measured(monkeypatch, commit="later")
    assert len(gpu.measure("squares", Options(), ["eager"], only="c", folder=tmp_path)["cases"]) == 1


def test_parts_of_a_suite_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = _measured(monkeypatch)
    for number in (1, 2):
        gpu.measure("squares", Options(), ["eager"], part=(number, 2), folder=tmp_path)
    assert done == ["a", "bad", "d", "b", "c"]
    assert len(gpu.parts_of("squares", tmp_path)) == 2
    record = gpu.measure("squares", Options(), ["eager"], folder=tmp_path)
    assert len(done) == 5
    assert [c["case"] for c in record["cases"]] == ["a", "b", "bad", "c", "d"]
    assert [p.name for p in tmp_path.iterdir()] == ["squares.json"]


def test_what_a_case_ended_with_is_in_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _measured(monkeypatch)
    record = gpu.measure("squares", Options(), ["eager"])
    head, *rows = gpu_report.gpu_rows(record)
    assert {len(r) for r in rows} == {len(head)}
    assert rows[2] == ("bad", "bf16", *("" for _ in head[3:]), "RuntimeError: out of memory of the GPU")
    (tmp_path / "results").mkdir()
    meta = {"gpu": "NVIDIA H200", "driver": "", "nvrtc": "", "versions": {}, "commit": "", "date": ""}
    (tmp_path / "results" / "squares.json").write_text(json.dumps({**record, "meta": meta}))
    stairs = {**record, "suite": "staircase", "meta": meta}
    (tmp_path / "results" / "staircase.json").write_text(json.dumps(stairs))
    page = report.page(tmp_path / "results")
    assert page.count("RuntimeError: out of memory of the GPU") == 2
    assert gpu_report.GPU_TITLES["squares"] in page


def test_a_part_is_one_of_so_many() -> None:
    for part in ("0/2", "3/2", "2", "a/b", "1/"):
        found = CliRunner().invoke(app, ["gpu", "--part", part])
        assert isinstance(found.exception, UserError)
        assert "it must be K/N" in str(found.exception)


def test_frozen_weights_are_those_of_the_case() -> None:
    """The inputs that a case names are inputs, and their parts are made once. What reads them in every call sums their
    products where those of parts will not do.
    """
    case = fp32.once()[0]
    fn, _, _ = case.make()
    x = torch.empty(1024, 1024, device="meta")
    options = Options(target="sm_90a", libraries="never", fp32="split", frozen=case.frozen)
    first, rest = split(lowering(capture(fn, (x, x.clone()), {}).program, options).at("kernel"), case.frozen)
    assert [b.name for b in first.inputs] == list(case.frozen) == ["w"]
    assert [s.name for s in rest.steps if any(b.name == "w" for b in s.reads)] == [rest.steps[-1].name]


def test_hard_numbers_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten distributions, of which float32 can hold the products."""
    monkeypatch.setattr(fp32, "HARD", (64, 128, 32))
    monkeypatch.setattr(gpu_suites, "normal", lambda shape, dtype: torch.randn(shape))
    torch.manual_seed(0)
    cases = fp32.hard()
    assert len(cases) == 10
    for case in cases:
        fn, make, exact = case.make()
        x, w = make()
        assert (x.shape, w.shape, x.dtype, w.dtype) == ((64, 128), (32, 128), torch.float32, torch.float32)
        off = (fn(x, w) - exact(x, w)).norm() / (x.double().abs() @ w.double().abs().t()).norm()
        assert 0 <= off < 1e-6, case.name
