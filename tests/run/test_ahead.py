"""CUDA sources are compiled beside what else goes on, and what was compiled is kept whatever happens meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.rules.test_growth import layers, parse

from terrazzo.options import Options
from terrazzo.pipelines import lowering
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
    done = lowering(parse(layers(3)), options, tried=nvrtc.Tried(ARCH, cache, ahead=True))
    nvrtc._pool().submit(lambda: None).result()  # all that began has ended
    begun = list(compiled)
    built = build(done, options, cache, ARCH)
    assert begun and compiled == begun  # nothing was left to be compiled, and nothing was in vain
    assert {source for _, source in built.sources} == set(begun)
    assert len(begun) < len(built.entries)


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
