"""A source that takes NVRTC too long is a candidate that lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.rules.test_growth import layers, parse

from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.run import limit, nvrtc
from terrazzo.run.cache import Cache
from terrazzo.run.cuda import build

ARCH = "sm_90a"


def long(lines: int) -> str:
    """A kernel that takes NVRTC seconds before ptxas begins."""
    body = "\n".join(f"x[{n}] = x[{n * 7919 % lines}] * x[{n * 31 % lines}];" for n in range(lines))
    return f'extern "C" __global__ void k_long(float* x) {{\n{body}\n}}\n'


def test_nvrtc_is_stopped_and_that_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limit, "LIMIT", 0.1)
    cache = Cache(tmp_path / "cache", 1 << 30)
    (made,) = nvrtc.compile_each([long(20000)], ARCH, cache).values()
    assert made.path is None and made.facts.problem(spills=True) == "NVRTC was stopped: it took more than 0.1 s"
    assert nvrtc.known(long(20000), ARCH, cache) == made.facts


def test_the_next_candidate_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled: list[str] = []

    def first_is_late(source: str, arch: str) -> tuple[bytes | None, nvrtc.Facts]:
        compiled.append(source)
        late = len(compiled) == 1
        return None if late else b"cubin", nvrtc.late() if late else nvrtc.Facts()

    pool = ThreadPoolExecutor(1)
    monkeypatch.setattr(nvrtc, "_pool", lambda: pool)
    monkeypatch.setattr(nvrtc, "_compile", first_is_late)
    options, cache = Options(target=ARCH), Cache(tmp_path / "cache", 1 << 30)
    built = build(lowering(parse(layers(1)), options), options, cache, ARCH)
    assert compiled[0] not in {source for _, source in built.sources}
    assert any("it lost: NVRTC was stopped: it took more than 20 s" in e.reason for e in built.lowering.log.events)
