"""Model programs: they are made, lowered and right at small sizes; what measures them loses none and repeats none."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import terrazzo  # noqa: E402
from terrazzo import pipelines  # noqa: E402
from terrazzo.bench.harness import accuracy  # noqa: E402
from terrazzo.bench.programs import FAMILIES, measure, one, programs, report  # noqa: E402
from terrazzo.bench.programs.registry import Gradients  # noqa: E402
from terrazzo.front.capture import capture  # noqa: E402
from terrazzo.options import Options  # noqa: E402
from terrazzo.rewrite.rule import Log  # noqa: E402

MODELS = [name for name, p in programs().items() if p.family not in ("operators", "training")]
SMALL = [
    name
    for name, p in programs().items()
    if p.small and p.family not in ("language", "multimodal", "vision", "audio", "series")
]
"""Those that are lowered in tests: transformers' models take several seconds each."""


def test_there_are_programs_of_every_family_a_third_of_them_trained() -> None:
    kinds = Counter(p.family for p in programs().values() if not p.training)
    assert tuple(kinds) == FAMILIES
    assert sum(not programs()[n].training for n in MODELS) >= 120
    assert 3 * sum(programs()[n].training for n in MODELS) >= sum(not programs()[n].training for n in MODELS)


@pytest.mark.parametrize("name", [*random.Random(7).sample(SMALL, 3), "deformable_attention"])  # found wrong once
def test_a_small_program_is_lowered_for_a_gpu(name: str, tmp_path: Path) -> None:
    module, inputs = programs()[name].made(programs()[name].dtypes[-1], "meta", small=True)
    options = Options(target="sm_90a", libraries="never", cache_dir=tmp_path)
    stages = pipelines.stages(capture(module, inputs).program, options, Log())
    assert stages[-1][1].dialect == "kernel"


@pytest.mark.parametrize("name", random.Random(11).sample(SMALL, 3))
def test_a_small_program_is_right_on_a_cpu(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, inputs = programs()[name].made("f32", small=True)
    with torch.no_grad():
        eager = one.tensors(module(*inputs))
        ours = terrazzo.compile(module, *inputs, options=Options(target="cpu", cache_dir=tmp_path))
        found = one.judged(one.tensors(ours(*inputs)), eager, module, inputs, ours, "f32")
    assert found.ok, found.problem


def test_eager_may_be_right_by_chance_about_one_number() -> None:
    exact = torch.ones((), dtype=torch.float64)
    eager, near, far = (torch.tensor(1 + k * 2**-23) for k in (0, 3, 5))
    assert not accuracy([near], [eager], [exact]).ok
    assert accuracy([near], [eager], [exact], one.OFF["f32"]).ok
    assert not accuracy([far], [eager], [exact], one.OFF["f32"]).ok
    many = exact.expand(65)
    assert not accuracy([near.expand(65)], [eager.expand(65)], [many], one.OFF["f32"]).ok


class Kink(torch.nn.Module):
    """The gradient of a ReLU whose argument is 0 but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3, 100), 0.1))

    def forward(self, x: Any) -> Any:
        return ((self.weight @ x) > 0).to(x.dtype) * torch.arange(300.0, device=x.device).view(3, 100)


def test_a_kink_is_no_error() -> None:
    """Where rounding the weights moves a result as much, it may be another; where it does not, it may not."""
    torch.manual_seed(0)
    x = torch.randn(100, 100)
    with torch.no_grad():
        x[-1] = -x[:-1].sum(0)  # so that the weights times x are nearly 0
        module = Kink()
        ours, eager = torch.zeros(3, 100), module(x)
        assert one.judged([ours], [eager], module, (x,), None, "f32").ok
        module.weight.abs_().add_(1)
        positive = x.abs()
        assert not one.judged([ours], [module(positive)], module, (positive,), None, "f32").ok


class Hinges(torch.nn.Module):
    """The gradient of a ReLU's weights, of whose arguments one is as good as 0; and a smooth one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 64))

    def forward(self, x: Any) -> Any:
        y = x @ self.weight.T
        return (y > 0).to(x.dtype).T @ x, torch.tanh(y)


def test_which_side_of_a_kink_is_chance_and_a_smooth_result_is_not() -> None:
    """Each result by itself: draws that meet the kink excuse it, and no result that is off without one."""
    torch.manual_seed(1)
    x = torch.randn(512, 64)
    module = Hinges()
    with torch.no_grad():
        x[0] -= module.weight[0] * ((x[0] @ module.weight[0]) / module.weight[0].square().sum())
        right, exact = one.exact(module, (x,), None)
        eager, other, smooth = right.float(), right.float(), exact.float()
        other[0] += x[0] * (-1 if x[0].double() @ module.weight[0].double() > 0 else 1)  # as on the kink's other side
        assert not accuracy([other], [eager], [right]).ok
        assert one.judged([other, smooth], [eager, smooth], module, (x,), None, "f32").ok
        off = one.judged([other, smooth * (1 + 1e-6)], [eager, smooth], module, (x,), None, "f32")
        assert "result 1" in off.problem and "result 0" not in off.problem


def test_whole_numbers_are_judged_by_how_many_lie_on_the_other_side_of_a_rounding() -> None:
    right = torch.arange(8192)

    def differing(*places: int) -> Any:
        return right.index_add(0, torch.tensor(places, dtype=torch.int64), torch.ones(len(places), dtype=torch.int64))

    assert accuracy([differing(5)], [differing(5)], [right]).ok
    assert accuracy([right], [differing(5)], [right]).ok
    assert accuracy([differing(6, 7)], [differing(5)], [right]).ok
    found = accuracy([differing(6, 7, 8)], [differing(5)], [right])
    assert found.problem == "result 0: 4 of 8192 elements differ, from float64's 3, and 1 of eager's"
    assert not accuracy([differing(5)], [right], [right]).ok
    many = differing(*range(64))  # float64 is no judge of these
    assert not accuracy([differing(*range(63))], [many], [right]).ok
    assert accuracy([many], [many], [right]).ok


class Levels(torch.nn.Module):
    """Whole numbers of what an input is rounded to."""

    def forward(self, x: Any) -> Any:
        return (x * 3).round().to(torch.int32)


def test_which_whole_number_is_chance_where_an_input_lies_between_two() -> None:
    torch.manual_seed(2)
    x = torch.randn(1 << 17).mul(9).round().div(9)
    x[:64] = ((torch.arange(64) + 0.5) / 3).float()
    module = Levels()
    (right,) = one.exact(module, (x,), None)
    other = module(x * (1 + 1e-7))
    assert int((other != right).sum()) in range(1, 65)
    with torch.no_grad():
        eager = right.clone()
        assert not accuracy([other], [eager], [right]).ok
        assert one.judged([other], [eager], module, (x,), None, "f32").ok
        assert not one.judged([right + 1], [eager], module, (x,), None, "f32").ok


class OneHinge(torch.nn.Module):
    """Gradients behind a ReLU one of whose many arguments is so near its kink that few roundings meet it."""

    def forward(self, x: Any) -> Any:
        y = x - 0.5
        return torch.where(y > 0, y, 0), (y > 0).to(x.dtype), torch.tanh(y)


def test_a_kink_within_reach_is_found_in_float64() -> None:
    torch.manual_seed(3)
    module, x = OneHinge(), torch.randn(4096)
    x[7] = 0.5 + 3e-7
    with torch.no_grad():
        right = one.exact(module, (x,), None)
        value, hinge, smooth = one.jumps(module, (x,), None, right, "f32")
        assert hinge == pytest.approx(1 / 64)
        assert value < 1e-7
        assert smooth < 1e-10
        eager = [r.float() for r in right]
        other = eager[1].clone()
        other[7] = 1 - other[7]
        assert one.judged([eager[0], other, eager[2]], eager, module, (x,), None, "f32").ok
        other[8:12] = 1 - other[8:12]  # four more, which no kink explains
        assert not one.judged([eager[0], other, eager[2]], eager, module, (x,), None, "f32").ok
        assert not one.judged([*eager[:2], eager[2] * (1 + 4e-7)], eager, module, (x,), None, "f32").ok


class FastGelu(torch.nn.Module):
    """A module that a fast path computes otherwise, as PyTorch's encoder layers on a GPU."""

    def forward(self, x: Any) -> Any:
        fast = torch.backends.mha.get_fastpath_enabled()
        return torch.nn.functional.gelu(x, approximate="tanh" if fast else "none")


def test_no_fast_path_is_the_judge() -> None:
    x = torch.linspace(-3, 3, 100)
    (found,) = one.exact(FastGelu(), (x,), None)
    assert torch.equal(found, torch.nn.functional.gelu(x.double()))
    assert torch.backends.mha.get_fastpath_enabled()
    assert one.judged([torch.nn.functional.gelu(x)], [FastGelu()(x)], FastGelu(), (x,), None, "f32").ok


class Upcast(torch.nn.Module):
    """What is for 16 bits converts to float32 where it wants to be exact."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64))

    def forward(self, x: Any) -> Any:
        y = torch.softmax(x * self.weight, -1, dtype=torch.float32) - x.to(torch.float32).cumsum(0, dtype=torch.float32)
        return (y.float() * self.weight).sum(-1, dtype=torch.float32).to(x.dtype)


def test_the_judge_rounds_nothing_to_float32() -> None:
    """Not in the gradients either."""
    torch.manual_seed(0)
    module, x = Gradients(Upcast()), torch.randn(32, 64)
    found = one.exact(module, (x,), None)
    weight = module.module.weight.detach().double().requires_grad_()
    y = ((torch.softmax(x.double() * weight, -1) - x.double().cumsum(0)) * weight).sum(-1)
    loss = (y - torch.cos(torch.arange(32, dtype=torch.float64))).square().mean()
    (gradient,) = torch.autograd.grad(loss, [weight])
    torch.testing.assert_close(found, [loss.detach(), gradient], rtol=1e-13, atol=0)


class Ranges(torch.nn.Module):
    """Numbers that only the sizes of its input say."""

    def forward(self, x: Any) -> Any:
        n = x.shape[-1]
        return x * ((torch.arange(n, device=x.device) + 0.5) / n) + torch.full((n,), 0.1, device=x.device)


def test_the_judge_rounds_no_numbers_that_a_module_makes() -> None:
    x = torch.randn(4, 51)
    (found,) = one.exact(Ranges(), (x,), None)
    torch.testing.assert_close(found, x.double() * ((torch.arange(51).double() + 0.5) / 51) + 0.1, rtol=1e-15, atol=0)
    assert torch.get_default_dtype() == torch.float32


class Branching(torch.nn.Module):
    """A module that branches on its data."""

    def forward(self, x: Any) -> Any:
        y = x * x.mode(-1, True).values * 2
        return y.sum(-1) if bool((y > 0).any()) else y


def test_what_branches_on_its_data_goes_through_torch_compile(tmp_path: Path) -> None:
    x = torch.randn(3, 4).abs()
    earlier = one.parts(object())  # of other tests in this process
    ours = one.compiled(Branching(), (x,), Options(target="cpu", cache_dir=tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(ours(x), Branching()(x))
    parts = [p for p in one.parts(ours) if all(p is not q for q in earlier)]
    assert len(parts) == 2
    assert [f.op for p in parts for f in p.fallbacks] == ["aten.mode.default"]
    (found,) = one.exact(Branching(), (x,), ours)
    assert found.dtype == torch.float64


class OneOp(torch.nn.Module):
    """A module with an op that takes no float64."""

    def forward(self, x: Any) -> Any:
        if x.dtype == torch.float64:
            raise RuntimeError("no such type")
        return (x * x).sum(-1)


def test_where_a_module_takes_no_float64_the_captured_program_does(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    ours = terrazzo.compile(OneOp(), x, options=Options(target="interpreter", cache_dir=tmp_path))
    (found,) = one.exact(OneOp(), (x,), ours)
    assert found.dtype == torch.float64
    assert torch.allclose(found, x.double().square().sum(-1), rtol=1e-12)


class Views(torch.nn.Module):
    """Results that share memory, of an op that takes no float64."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if x.dtype is torch.float64:
            raise RuntimeError("not in float64")
        y = x.exp()
        return y, y, y.t()[1], y * 2


def test_a_reference_has_all_results_where_some_share_memory(tmp_path: Path) -> None:
    x = torch.randn(5, 4)
    ours = terrazzo.compile(Views(), x, options=Options(target="interpreter", cache_dir=tmp_path))
    with torch.no_grad():
        found = one.exact(Views(), (x,), ours)
    torch.testing.assert_close([a.float() for a in found], list(Views()(x)))


def good(case: str = "a", us: float = 2.0) -> dict[str, Any]:
    times = {"terrazzo": us, "eager": 3.0}
    size = {"terrazzo": 21, "eager": 20}
    known = {
        "captured": True,
        "whole": True,
        "compile_s": 1.0,
        "error": 1e-7,
        "error_eager": 2e-7,
        "problem": "",
        "fallbacks": ["aten.sort"],
    }
    return {"us": times, "memory": size, **known}


def test_a_record_is_continued_where_it_ends(tmp_path: Path) -> None:
    """A program that failed is kept as such; each is asked for once."""
    path, asked = tmp_path / "programs.json", []

    def found(name: str, dtype: str, libraries: str, room: Path) -> dict[str, Any]:
        asked.append((name, dtype))
        return {"failed": "the process ended with -11: "} if name == "graph_sage_training" else good()

    meta = {"commit": "abc", "gpu": "NVIDIA H200"}
    measure.measure(path, meta, "auto", "graph_sage", ["bf16"], 2, found)
    assert sorted(asked) == [("graph_sage", "bf16"), ("graph_sage_training", "bf16")]
    record = measure.measure(path, meta, "auto", "graph_sage", ["bf16", "f32"], 2, found)
    assert sorted(asked[2:]) == [("graph_sage", "f32"), ("graph_sage_training", "f32")]
    assert json.loads(path.read_text()) == record
    assert [(c["case"], c["dtype"], report.fails(c)) for c in record["cases"]] == [
        ("graph_sage", "bf16", ""),
        ("graph_sage", "f32", ""),
        ("graph_sage_training", "bf16", "the process ended with -11: "),
        ("graph_sage_training", "f32", "the process ended with -11: "),
    ]


def test_what_ends_a_process_is_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = tmp_path / "is no folder"
    room.touch()
    found = measure.in_a_process("graph_sage", "f32", "auto", room)
    assert found["failed"].startswith("the process ended with 1: ")
    assert "is no folder" in found["failed"]
    monkeypatch.setattr(measure, "LIMIT", 0.1)
    assert measure.in_a_process("graph_sage", "f32", "auto", tmp_path) == {"failed": "not through in 0.1 seconds"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be measured")
def test_an_error_in_a_process_is_in_the_record(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "terrazzo.bench.programs.one", "graph_sage", "f32", "auto", str(tmp_path)]
    subprocess.run(command, check=True, cwd=Path(one.__file__).parents[3])  # flags of PyTorch are a process' own
    found = json.loads((tmp_path / "graph_sage.f32.json").read_text())
    assert "CUDA" in found["failed"]


def test_who_measures_has_the_gpu_alone(tmp_path: Path) -> None:
    said: list[str] = []
    shared, wait = threading.Event(), threading.Event()

    def share() -> None:
        with one.using(tmp_path):
            shared.set()
            wait.wait(5)
            said.append("shared")

    def alone() -> None:
        with one.using(tmp_path, alone=True):
            said.append("alone")

    threads = [threading.Thread(target=share), threading.Thread(target=alone)]
    threads[0].start()
    assert shared.wait(5)
    with one.using(tmp_path):  # two share it
        pass
    threads[1].start()
    threads[1].join(0.2)
    assert said == []
    wait.set()
    for thread in threads:
        thread.join(5)
    assert said == ["shared", "alone"]


def test_the_table_says_what_is_slow_large_wrong_or_gone() -> None:
    failed = {"failed": "CompilerBug: a | b\nc"}
    slow, wrong = good(us=6.0), {**good(), "problem": "result 0: error 1 is above 0", "captured": False}
    cases = [
        {"case": name, "family": "vision", "dtype": "bf16", **found}
        for name, found in (("good", good()), ("slow", slow), ("wrong", wrong), ("failed", failed))
    ]
    meta = {
        "gpu": "NVIDIA H200",
        "driver": "CUDA 13.0",
        "nvrtc": "13.0",
        "versions": {},
        "commit": "abc",
        "date": "today",
    }
    record = {"suite": "programs", "meta": {**meta, "libraries": "never", "workers": 2}, "cases": cases}
    rows = report.rows(record)
    assert rows[1][3:] == ("3.0 us", "2.0 us", "1.50x", "0.50", "1.0 s", "1", "1.05")
    assert rows[3][5:7] == ("1.50x *", "**result 0: error 1 is above 0**")
    assert rows[4][6] == "**CompilerBug: a / b c**"
    assert {len(row) for row in rows} == {10}
    assert report.summary(record)[1] == ("vision", "bf16", "4", "2", "0.87x", "1", "0", "2")
    assert report.title(record) == "GPU: model programs, our kernels only"


def test_the_page_has_a_section_of_programs(tmp_path: Path) -> None:
    from terrazzo.bench.report import page

    meta = {
        "gpu": "NVIDIA H200",
        "driver": "CUDA 13.0",
        "nvrtc": "13.0",
        "versions": {},
        "commit": "abc",
        "date": "today",
    }
    cases = [{"case": "a", "family": "vision", "dtype": "bf16", **good()}]
    record = {"suite": "programs", "meta": {**meta, "libraries": "auto", "workers": 2}, "cases": cases}
    (tmp_path / "programs-auto.json").write_text(json.dumps(record))
    text = page(tmp_path)
    assert "## GPU: model programs, libraries allowed" in text
    assert "| a | vision | bf16 | 3.0 us | 2.0 us | 1.50x |" in text


@pytest.mark.gpu
@pytest.mark.parametrize("name", random.Random(5).sample(MODELS, 4))
def test_a_program_is_measured(name: str, tmp_path: Path) -> None:
    found = measure.in_a_process(name, programs()[name].dtypes[-1], "never", tmp_path)
    assert not report.fails(found), found
    assert found["us"]["terrazzo"] > 0
    assert found["memory"]["terrazzo"] > 0


def test_what_transformers_makes_of_no_mask_is_not_traced(tmp_path: Path) -> None:
    """Traced, a Nystromformer masked its landmarks' scores by a square of all tokens, and could not be captured."""
    module, inputs = programs()["nystromformer"].made("f32", "meta", small=True)
    assert capture(module, inputs).program.name
