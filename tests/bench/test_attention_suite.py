"""The suite of attention: what its cases compute, how ours is made, and what a record says of groups and peers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from terrazzo.bench import attention, gpu, gpu_report, gpu_suites  # noqa: E402
from terrazzo.ir.torch_types import to_torch_dtype  # noqa: E402
from terrazzo.ir.types import DTYPES  # noqa: E402
from terrazzo.options import Options  # noqa: E402

GROUPS = {"decode": 9, "masks": 6, "backward": 28, "forward": 72, "odd": 12, "loss": 1, "layers": 14}


def test_what_is_asked_for_is_in_the_suite() -> None:
    cases = attention.attention()
    assert Counter(c.group for c in cases) == GROUPS
    assert len({(c.name, c.dtype) for c in cases}) == len(cases)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that a processor computes in no time, on which everything is."""
    sizes: dict[str, Any] = {
        "SHAPES": ((2, 4, 4, 32), (1, 4, 2, 48)),
        "HEADS": (16,),
        "ODD": ((2, 2, 2, 21, 24),),
        "LENGTHS": (16,),
        "DECODE": ((3, 4, 2, 64),),
        "PAGE": 8,
        "MASKED": {"window": (1, 2, 64), "documents": (1, 2, 64), "scores": (2, 4, 32), "bias": (2, 2, 32)},
        "WINDOW": 9,
        "LOSS": (16, 32, 100),
        "LAYERS": (),
    }
    for name, value in sizes.items():
        monkeypatch.setattr(attention, name, value)
    monkeypatch.setattr(gpu_suites, "normal", lambda s, dtype: torch.randn(s).to(to_torch_dtype(DTYPES[dtype])))


def test_every_case_is_what_it_is_compared_with(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager, FlexAttention and the function in float64 compute the same, of as many bytes as are said."""
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    for case in attention.attention():
        fn, make, exact = case.make()
        given = make()
        wide = [x.float() if x.is_floating_point() else x for x in given]
        found, wanted = (gpu._leaves(x) for x in (fn(*wide), exact(*given)))
        assert {x.dtype for x in wanted} == {torch.float64}, case.name
        torch.testing.assert_close(found, [x.float() for x in wanted], rtol=1e-4, atol=1e-4)
        assert case.peers is not None
        for name, peer in case.peers(fn).items():
            if name in ("eager", "flex", "compile"):
                torch.testing.assert_close(gpu._leaves(peer(*wide)), found, rtol=1e-4, atol=1e-4)
        read = sum(t.numel() * t.element_size() for t in given)
        if case.group in ("forward", "odd", "masks", "backward"):
            numbers = sum(t.numel() * t.element_size() for t in given if not t.is_floating_point())
            written = sum(t.numel() * t.element_size() for t in gpu._leaves(fn(*given)))
            slopes = 4 * 4 * ("ALiBi" in case.name)
            assert case.bytes == read - numbers - slopes + written, case.name


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only a GPU has, as a processor has it."""
    monkeypatch.setattr(gpu, "graph_of", lambda call, sets: (call, sets))
    monkeypatch.setattr(gpu, "in_turns", lambda graphs, sets, replays: {n: [1e3, 2e3] for n in graphs})
    monkeypatch.setattr(gpu, "peak", lambda call: call() is not None and 8)
    monkeypatch.setattr(gpu, "_wall", lambda call, sets: 1.0)
    monkeypatch.setattr(gpu, "_roofline", lambda case, us, options: "")
    monkeypatch.setattr(gpu, "_sets", lambda make: [make(), make()])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)


@pytest.mark.parametrize("group", ["decode", "masks", "backward", "loss"])
def test_ours_is_right_beside_peers(group: str, small: None, processor: None, tmp_path: Any) -> None:
    """Of every kind one: compiled as on a GPU, judged by float64; what peers fail with is said."""
    of_group = [c for c in attention.attention() if c.group == group]
    case = of_group[-1 if group == "decode" else 0]
    if group == "masks":
        case = replace(case, peers=lambda fn: {"eager": fn, "flex": lambda q, *_: q()})
    found = gpu._tried(case, Options(target="interpreter"), ["eager"], tmp_path)
    assert found["ok"] and not found["problem"] and not found["fallbacks"], found
    assert {"terrazzo", "eager"} <= {*found["us"]} and found["group"] == group
    failed = {"masks": "flex", "backward": "cudnn"}.get(group)
    assert [*found["without"]] == ([failed] if failed else [])


def test_what_pytorch_runs_instead_is_in_the_record(processor: None, tmp_path: Any) -> None:
    """Each time, though it is only said once to who calls."""

    def sums(x: Any) -> Any:
        return torch.linalg.svdvals(x) + 1

    def ours(options: Options) -> Any:
        return torch.compile(sums, backend="terrazzo", dynamic=False, options={"target": "cpu"})

    def make() -> Any:
        return sums, lambda: (torch.eye(3),), lambda x: sums(x.double())

    case = gpu_suites.Case("values", "f32", make, 1, group="g", peers=lambda fn: {"eager": fn}, ours=ours)
    for _ in range(2):
        assert gpu._tried(case, Options(target="interpreter"), [], tmp_path)["fallbacks"]


def test_groups_are_summed_up_beside_the_best_peer() -> None:
    """By hand: 3 / 2 and 2 / 4 have a geometric mean of 0.87."""
    told = {"dtype": "bf16", "bytes": 1, "operations": 0.0, "error": 0.0, "error_eager": 0.0, "problem": ""}
    memory = {"terrazzo": 3_000_000, "eager": 6_000_000, "cudnn": 2_000_000}
    times = ({"terrazzo": 2.0, "eager": 9.0, "cudnn": 3.0}, {"terrazzo": 4.0, "eager": 2.0})
    cases = [{"case": str(us), "group": "forward", "us": us, "memory": memory, **told} for us in times]
    record = {"suite": "attention", "geomean": {"eager": 1.0, "cudnn": 1.0}, "cases": cases}
    assert gpu_report.group_rows(record)[1] == ("forward", "bf16", "2", "0.87x", "0.50x", "1.50x")
    head, first, second = gpu_report.gpu_rows(record)
    assert len(head) == len(first) == len(second)
    assert dict(zip(head, second, strict=True))["/ cudnn"] == ""
    assert dict(zip(head, first, strict=True))["peak, of the least peer's"] == "3.0 MB, 1.50"
    assert gpu_report.group_rows({"cases": [{**cases[0], "group": ""}]}) == []
