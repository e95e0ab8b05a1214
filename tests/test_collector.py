"""Python's collector of cycles rests while a program is compiled, and only then."""

import gc
from typing import Any

import pytest
import torch

from terrazzo.collector import paused
from terrazzo.front.capture import capture
from terrazzo.options import Options
from terrazzo.pipelines import lowering


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
