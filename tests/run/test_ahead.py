"""CUDA sources are compiled beside what else goes on, and what was compiled is kept whatever happens meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from tests.rules.test_growth import layers, parse

from terrazzo import pipelines
from terrazzo.ir.dialects import kernel as k
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.rules.loop_to_tile.experience import Experience
from terrazzo.run import nvrtc
from terrazzo.run.cache import Cache
from terrazzo.run.cuda import build

ARCH = "sm_90a"


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", 1 << 30)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ThreadPoolExecutor(1)
    monkeypatch.setattr(nvrtc, "_pool", lambda: pool)


def test_what_is_chosen_begins_to_be_compiled_at_once(monkeypatch: pytest.MonkeyPatch, cache: Cache) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(nvrtc, "_compile", lambda source, arch: (compiled.append(source), (b"cubin", nvrtc.Facts()))[1])
    options = Options(target=ARCH)
    tried = nvrtc.Tried(ARCH, cache, ahead=True)
    done = lowering(parse(layers(3)), options, tried=tried)
    nvrtc._pool().submit(lambda: None).result()  # all that began has ended
    begun = list(compiled)
    built = build(done, options, cache, ARCH, tried=tried)
    assert begun and compiled == begun  # nothing was left to be compiled, and nothing was in vain
    assert {source for _, source in built.sources} == set(begun)
    assert len(begun) < len(built.entries)


def test_a_kernel_that_spills_is_replaced_however_soon_that_is_known(
    monkeypatch: pytest.MonkeyPatch, cache: Cache
) -> None:
    compiled: list[str] = []

    def first_spills(source: str, arch: str) -> tuple[bytes, nvrtc.Facts]:
        compiled.append(source)
        return b"cubin", nvrtc.Facts(255, 8 if len(compiled) == 1 else 0)

    monkeypatch.setattr(nvrtc, "_compile", first_spills)
    options, tried = Options(target=ARCH), nvrtc.Tried(ARCH, cache, ahead=True)
    done = lowering(parse(layers(3)), options, tried=tried)
    nvrtc._pool().submit(lambda: None).result()  # what was chosen first is known to spill before anybody waits for it
    built = build(done, options, cache, ARCH, tried=tried)
    assert compiled[0] not in {source for _, source in built.sources}
    assert any("it lost: it spills 8 bytes" in e.reason for e in built.lowering.log.events)
    before, after = ({p.name: program for p, program, _ in x.stages} for x in (done, built.lowering))
    assert before["remake"] is after["remake"]  # what comes before schedules asked for nothing that is known now
    assert before["schedule"] is not after["schedule"] and [*before] == [*after]


def test_another_kernel_is_chosen_while_others_are_compiled(monkeypatch: pytest.MonkeyPatch, cache: Cache) -> None:
    pool, again, waited = ThreadPoolExecutor(2), threading.Event(), []
    monkeypatch.setattr(nvrtc, "_pool", lambda: pool)
    order: list[str] = []

    def slow(source: str, arch: str) -> tuple[bytes, nvrtc.Facts]:
        order.append(source)
        if source == order[0]:
            return b"cubin", nvrtc.Facts(255, 8)
        if source == order[1]:
            waited.append(again.wait(60))
        return b"cubin", nvrtc.Facts()

    def rescheduled(*given: Any) -> Any:
        again.set()
        return chosen_again(*given)

    chosen_again = pipelines.rescheduled
    monkeypatch.setattr(nvrtc, "_compile", slow)
    monkeypatch.setattr(pipelines, "rescheduled", rescheduled)
    options, tried = Options(target=ARCH), nvrtc.Tried(ARCH, cache)
    build(lowering(parse(layers(3)), options, tried=tried), options, cache, ARCH, tried=tried)
    assert waited == [True]


def test_what_is_only_considered_is_not_compiled_and_found_once(monkeypatch: pytest.MonkeyPatch, cache: Cache) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(nvrtc, "_compile", lambda source, arch: (compiled.append(source), (b"cubin", nvrtc.Facts()))[1])
    program = lowering(parse(layers(1)), Options(target=ARCH)).at("kernel")
    kernel = next(s for s in program.steps if isinstance(s, k.Kernel))
    tried, found = nvrtc.Tried(ARCH, cache, ahead=True), []

    def find(known: Experience) -> str:
        found.append(known.lost(kernel))
        return found[-1]

    assert tried.once("x", find) == tried.once("x", find) == ""
    assert len(found) == 1
    nvrtc.remember(nvrtc.emitted(kernel), ARCH, cache, nvrtc.Facts(255, 8))
    assert "spills 8 bytes" in tried.once("x", find)  # what is known has changed, so it is found again
    assert len(found) == 2
    assert not compiled
    nvrtc.Tried(ARCH, Cache(cache.directory / "other", 1 << 30), ahead=True)(kernel)
    nvrtc._pool().submit(lambda: None).result()
    assert compiled == [nvrtc.emitted(kernel)]


def test_ctrl_c_keeps_what_was_compiled_and_drops_the_rest(monkeypatch: pytest.MonkeyPatch, cache: Cache) -> None:
    started, go = threading.Event(), threading.Event()

    def slow(source: str, arch: str) -> tuple[bytes, nvrtc.Facts]:
        started.set()
        go.wait(60)
        return source.encode(), nvrtc.Facts()

    monkeypatch.setattr(nvrtc, "_compile", slow)
    with pytest.raises(KeyboardInterrupt), nvrtc.abandoned_on_error():
        first, second = (nvrtc.begin(source, ARCH, cache) for source in ("one", "two"))
        started.wait(60)
        raise KeyboardInterrupt
    go.set()
    path = first.result(60).path
    assert path is not None and path.read_bytes() == b"one"
    assert second.cancelled()
    assert nvrtc.compile_each(["one", "two"], ARCH, cache)["two"].path is not None  # and all goes on as before


def test_what_takes_long_is_compiled_first(monkeypatch: pytest.MonkeyPatch, cache: Cache) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(nvrtc, "_compile", lambda source, arch: (compiled.append(source), (b"cubin", nvrtc.Facts()))[1])
    text = """
        @loop
        def f(u: f32[512, 512], x: bf16[512, 512], w: bf16[512, 512]):
            with kernel('first', first=f32[512]):
                for a0 in free(512):
                    for r0 in reduce(512):
                        in0 = u[a0, r0]
                        acc0 <- max(in0)
                    first[a0] = acc0
            with kernel('product', product=bf16[512, 512]):
                for a0 in free(512):
                    for a1 in free(512):
                        for r0 in reduce(512):
                            in0 = x[a0, r0]
                            v0 = f32(in0)
                            in1 = w[a1, r0]
                            v1 = f32(in1)
                            v2 = mul(v0, v1)
                            acc0 <- sum(v2)
                        v3 = bf16(acc0)
                        product[a0, a1] = v3
            return (first, product)
    """
    done = lowering(parse(dedent(text)), Options(target=ARCH), tried=nvrtc.Tried(ARCH, cache, ahead=True))
    nvrtc._pool().submit(lambda: None).result()
    assert ["wgmma" in source for source in compiled] == [True, False]
    assert [s.name for s in done.at("kernel").steps] == ["first", "product"]
