"""Python's collector of cycles rests while a program is compiled, and only then."""

import functools
import gc
import importlib
import inspect
import pkgutil
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from terrazzo import collector, rules
from terrazzo.collector import paused, remembered
from terrazzo.front.capture import capture
from terrazzo.hw.gpu import GPUS
from terrazzo.interp import kernel as simulator
from terrazzo.interp.kernel import machine
from terrazzo.ir.text import parse
from terrazzo.options import Options
from terrazzo.pipelines import lowering
from terrazzo.targets.cuda.check import report
from terrazzo.targets.cuda.emit import emit
from tests.kernels.by_hand import FOLDER


def collections(call: Any) -> int:
    """How often cycles are looked for within a call."""
    found: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(phase)

    gc.callbacks.append(note)
    try:
        call()
    finally:
        gc.callbacks.remove(note)
    return len(found)


def test_none_are_looked_for_while_a_program_is_captured_and_lowered() -> None:
    on: list[bool] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        on.append(gc.isenabled())
        return torch.softmax(x @ x, -1)

    program = capture(fn, (torch.empty(64, 64, device="meta"),)).program
    assert on == [False]
    assert collections(lambda: lowering(program, Options(target="sm_90a"))) <= 1  # when it goes on
    assert collections(lambda: [[n] for n in range(100_000)]) > 1
    assert gc.isenabled()


def test_an_error_turns_it_on_again_and_who_turned_it_off_keeps_it_off() -> None:
    with pytest.raises(KeyboardInterrupt), paused():
        assert not gc.isenabled()
        raise KeyboardInterrupt
    assert gc.isenabled()
    gc.disable()
    try:
        with paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


class Graph:
    """What holds itself, and much else."""

    def __init__(self) -> None:
        self.nodes = [[self] for _ in range(50_000)]


def test_what_was_dropped_goes_when_others_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_known", 0)
    seen: list[weakref.ref[Graph]] = []
    for _ in range(40 + len(gc.get_objects()) // 50_000):  # as many objects as there are, whoever made those
        with paused():
            seen.append(weakref.ref(Graph()))
    assert sum(s() is not None for s in seen) < 0.75 * len(seen)


def test_what_others_froze_stays_so() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with paused():
            pass
        assert gc.get_freeze_count() > 0.9 * count  # but for those that are gone
    finally:
        gc.unfreeze()


def test_a_simulated_kernel_leaves_no_memory_to_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[machine.Machine]] = []

    def run(self: machine.Machine, own: Any = machine.Machine.run) -> None:
        seen.append(weakref.ref(self))
        own(self)

    monkeypatch.setattr(machine.Machine, "run", run)
    program = parse((FOLDER / "ring.kernel").read_text())
    gc.disable()
    try:
        simulator.run(program, {b.name: np.zeros(b.type.static_shape) for b in program.inputs})
        assert seen and not any(s() for s in seen)
    finally:
        gc.enable()


def test_all_that_was_found_is_remembered_while_a_program_is_compiled() -> None:
    asked: list[int] = []

    @remembered
    def squared(n: int) -> int:
        asked.append(n)
        return n * n

    many = 4 * collector.FEW
    with paused():
        for _ in range(2):
            assert [squared(n) for n in range(many)] == [n * n for n in range(many)]
        with paused():
            squared(0)
        assert squared(1) == 1
    assert len(asked) == many, "each once, within what is compiled for another one too"
    squared(1)
    assert len(asked) == many + 1, "who compiled so much keeps none of it"
    with paused():
        squared(1)
    squared(1)
    assert len(asked) == many + 1, "and little is kept"
    collector._remembered.remove(squared)


MANY_KERNELS = """@kernel
def larger(x: i16[64]):
    with launch('larger', _grid=1, _warps=2, _resident=1, _reads=[x], y=bool[64]):
        y[lane + warp * 32] = gt(x[lane + warp * 32], i16({}))
    return (y,)
"""


def test_each_of_many_kernels_is_written_and_checked_once() -> None:
    """A training step of a DenseNet has 600: passes that go through all of them found nothing of the pass before."""
    kernels = [parse(MANY_KERNELS.format(n)).steps[0] for n in range(2 * collector.FEW // 3)]
    for fn in (emit, lambda kernel: report(kernel, GPUS["sm_90a"])):
        first = [fn(kernel) for kernel in kernels]
        assert all(fn(kernel) is before for kernel, before in zip(kernels, first, strict=True))


def test_what_is_found_of_a_kernel_is_remembered_however_many_there_are() -> None:
    """Every pass asks the same of all kernels of a program: where the last 1024 were kept, none was found again."""
    kept = {id(found) for found in collector._remembered}
    for info in pkgutil.walk_packages(rules.__path__, f"{rules.__name__}."):
        for name, found in vars(importlib.import_module(info.name)).items():
            if isinstance(found, functools._lru_cache_wrapper) and id(found) not in kept:
                first = next(iter(inspect.signature(found).parameters.values()))
                assert first.annotation not in ("l.Kernel", "Product", "Contraction", "Form", "Moved"), name
