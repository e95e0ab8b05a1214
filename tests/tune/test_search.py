"""What is measured of a program, and what the chooser makes of it. Times are made up: no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from terrazzo.errors import UserError
from terrazzo.front.capture import capture
from terrazzo.hw.gpu import GPUS
from terrazzo.interp.loop import run
from terrazzo.ir.canonical import canonical
from terrazzo.ir.dialects import loop as l
from terrazzo.ir.dialects import tile
from terrazzo.ir.expr import Var
from terrazzo.ir.text import parse
from terrazzo.ir.types import Type, f32
from terrazzo.options import MODES, Options
from terrazzo.pipelines import Lowering, lowering
from terrazzo.rewrite.rule import Log
from terrazzo.run.cache import Cache
from terrazzo.run.measured import Measured
from terrazzo.run.nvrtc import Tried
from terrazzo.tune import search

GPU = GPUS["sm_90a"]
LINEAR = (
    torch.nn.functional.linear,
    torch.zeros(512, 256, dtype=torch.bfloat16),
    torch.zeros(768, 256, dtype=torch.bfloat16),
)


class Made:
    """A worker that makes up times: by a candidate's number, or what is out with a reason."""

    def __init__(self, us: Callable[[int], float | str]) -> None:
        self.us = us
        self.jobs: list[Sequence[str]] = []

    def measure(self, programs: Sequence[str], seconds: float, source: str = "") -> list[tuple[str, float | None]]:
        self.jobs.append(programs)
        made = [self.us(n) for n in range(len(programs))]
        return [(x, None) if isinstance(x, str) else ("", x) for x in made]


def lowered(fn: Any, *args: Any, cache: Path, measured: Measured | None = None) -> Lowering:
    options = Options(target="sm_90a", libraries="never", fp32="exact", cache_dir=cache)
    known = Tried("sm_90a", Cache(cache, 1 << 30), measured=measured)
    return lowering(capture(fn, args, {}).program, options, tried=known)


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four candidates a kernel, for the sake of time."""
    monkeypatch.setattr(search, "MOST", 4)


def measure(kernel: Any, worker: Any, cache: Path) -> list[Any]:
    options = Options(target="sm_90a", cache_dir=cache)
    return search._measured(kernel, options, GPU, Cache(cache, 1 << 30), worker)


@pytest.mark.usefixtures("four")
def test_the_fastest_is_chosen_from_then_on(tmp_path: Path) -> None:
    before = lowered(*LINEAR, cache=tmp_path)
    ((kernel, count),) = search.kernels(before, Options(), GPU)
    worker = Made(lambda n: 100.0 - n if n < 3 else "it is wrong")
    timings = measure(kernel, worker, tmp_path)
    assert count == 1 and [t.us for t in timings] == [100.0, 99.0, 98.0, None] and timings[3].why == "it is wrong"
    assert all(isinstance(parse(text), tile.Program) for text in worker.jobs[0])
    known = Measured(tmp_path, "a GPU")
    known.keep(kernel, timings)
    after = lowered(*LINEAR, cache=tmp_path, measured=Measured(tmp_path, "a GPU"))
    ((_, was),), ((_, now),) = before.at("tile").schedules, after.at("tile").schedules
    assert str(now).replace("mm", "mmtzz") != str(was) and now != was
    (event,) = [e for e in after.log.events if e.pass_name == "schedule" and e.fired and e.subject == "mm"]
    assert "of those measured on such a GPU it is the fastest" in event.reason


def test_what_is_no_candidate_any_more_is_not_chosen(tmp_path: Path) -> None:
    before = lowered(*LINEAR, cache=tmp_path)
    ((kernel, _),) = search.kernels(before, Options(), GPU)
    known = Measured(tmp_path, "a GPU")
    known.keep(kernel, [search.Timing(0, "a schedule of long ago", 1.0)])
    assert lowered(*LINEAR, cache=tmp_path, measured=known).at("tile") == before.at("tile")


@pytest.mark.usefixtures("four")
def test_a_time_that_beats_the_roofline_is_out(tmp_path: Path) -> None:
    ((kernel, _),) = search.kernels(lowered(*LINEAR, cache=tmp_path), Options(), GPU)
    timings = measure(kernel, Made(lambda n: 0.01 if n else 50.0), tmp_path)
    assert timings[0].us == 50.0 and all(t.us is None and "beat the roofline" in t.why for t in timings[1:])


def test_equal_kernels_are_measured_once_and_the_longest_first(tmp_path: Path) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.wide = nn.Linear(64, 64), nn.ModuleList(nn.Linear(64, 4096) for _ in range(3))

        def forward(self, x: Any) -> Any:
            return [w(self.small(x).relu()).amax(-1) for w in self.wide]

    with torch.device("cpu"):
        done = lowered(Layers().bfloat16(), torch.zeros(512, 64, dtype=torch.bfloat16), cache=tmp_path)
    work = search.kernels(done, Options(), GPU)
    steps = [s for s in done.at("loop").steps if hasattr(s, "stores")]
    assert sum(count for _, count in work) == len(steps) and max(count for _, count in work) == 3
    assert work[0][1] == 3


def test_what_a_kernel_reads_is_made_by_those_that_write_it() -> None:
    """Parts of float32 numbers beside random scales would send the product the slow way, which is made for NaN."""
    rows, columns = torch.zeros(512, 2048), torch.zeros(256, 2048)
    program = capture(torch.nn.functional.linear, (rows, columns), {}).program
    done = lowering(program, Options(target="sm_90a", libraries="never", fp32="split"))
    (product,) = search.sources(done)
    source = search.sources(done)[product]
    x, w = (torch.randn(i.type.static_shape).numpy() for i in source.inputs)
    given = {source.inputs[0].name: x, source.inputs[1].name: w}
    given |= {b.name: made for b, made in zip(source.results, run(source, given), strict=True)}
    assert set(given) == {b.name for b in product.reads}
    (result,) = run(l.Program("alone", product.reads, (product,), product.writes), given)
    expected = x.astype("float64") @ w.astype("float64").T
    assert abs(result - expected).max() < 1e-5 * abs(expected).max()


def test_what_is_written_later_makes_no_input() -> None:
    """As new values of inputs are, which come after the old ones were read."""
    a = Var("a0", 4)
    x, t, z = (l.Buffer(name, Type(f32, (4,))) for name in "xtz")

    def copied(to: l.Buffer, of: l.Buffer) -> l.Kernel:
        return l.Kernel(to.name, (a,), (l.Store(to, (a,), l.apply("exp", l.Load(of, (a,)))),))

    program = l.Program("f", (x,), (copied(t, x), copied(z, t), copied(t, z)), (z, t))
    source = search.sources(Lowering(program, [], Log()))[canonical(program.steps[1]).kernel]  # type: ignore[arg-type]
    assert [s.name for s in source.steps] == ["t"] and source.inputs == (x,)


def test_without_a_gpu_nothing_is_measured_and_the_command_says_so() -> None:
    program = capture(torch.relu, (torch.zeros(4),), {}).program
    assert search.tune(program, Options(tune=5), "cpu") == []
    assert search.tune(program, Options(target="sm_90a"), "cuda:0") == []  # not asked for


def test_the_modes_of_torch_compile_measure() -> None:
    assert MODES["max-autotune"]["tune"] and MODES["max-autotune-no-cudagraphs"]["tune"]
    with pytest.raises(UserError, match="tune: -1 is negative"):
        Options(tune=-1)
