"""What a call costs of Python: a compiled linear layer is to take no longer than eager's own way to its kernel."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import terrazzo  # noqa: E402
from terrazzo.run import launch as launches  # noqa: E402


def functions_called(call: Callable[[], Any]) -> list[str]:
    """The functions of Python that a call goes through, in order."""
    found: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            found.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def test_a_linear_layer_goes_through_few_functions() -> None:
    """Some 0.3 us each: they are less than half of what eager takes to get to its kernel."""
    layer = torch.nn.Linear(64, 32)
    x = torch.randn(4, 64)
    with torch.no_grad():
        ours = terrazzo.compile(layer, x, options={"target": "cpu"})
        for _ in range(3):
            ours(x)  # what is made once was made
        found = functions_called(lambda: ours(x))
    assert len(found) <= 18, found


def launch(tensors: int, maps: int) -> tuple[launches.Launch, Any, list[Any]]:
    """A prepared launch of a kernel with so many tensors and maps, its addresses, and what the driver is told."""
    told: list[Any] = []

    def run(*args: Any) -> tuple[int]:
        told.append(args)
        return (0,)

    driver = SimpleNamespace(
        CUlaunchConfig=SimpleNamespace, cuLaunchKernelEx=run, CUresult=SimpleNamespace(CUDA_SUCCESS=0)
    )
    machine: Any = SimpleNamespace(driver=driver, overlaps=False)
    step: Any = SimpleNamespace(launch=(132, 256, 1024, 0), label="mm", source="")
    addresses = (ctypes.c_void_p * tensors)()
    made = launches.Launch(machine, step, None, addresses, [(n, None) for n in range(maps)], 1024, False)  # type: ignore[misc]
    return made, addresses, told


def test_a_launch_goes_through_few_functions_and_encodes_only_what_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    monkeypatch.setattr(launches, "encode", lambda tensor_map, address: encoded.append(address) or bytes(128))
    prepared, addresses, told = launch(3, 2)
    addresses[0], addresses[1] = 1024, 2048
    prepared(7)
    assert encoded == [1024, 2048]
    assert len(functions_called(lambda: prepared(7))) <= 6  # with that of the test, and a driver's of this test
    addresses[0] = 4096
    prepared(7)
    addresses[0] = 1024
    prepared(7)
    assert encoded == [1024, 2048, 4096]  # the map of an address that was seen is kept
    assert len(told) == 4 and all(config.hStream == 7 for config, *_ in told)
