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
from terrazzo.run.branches import Place  # noqa: E402
from terrazzo.run.frame import Frame  # noqa: E402


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


def test_a_graph_sets_the_arguments_of_what_moved_and_asks_nobody_where_nothing_did() -> None:
    """The addresses of its launches are compared as one; of those that moved only nodes are told."""
    told: list[tuple[Any, ...]] = []

    def call(name: str, *args: Any) -> Any:
        told.append((name, *args))
        return len(told)

    driver = SimpleNamespace(CUDA_KERNEL_NODE_PARAMS=SimpleNamespace)
    machine: Any = SimpleNamespace(call=call, driver=driver)
    memory = bytearray(8 * 6)
    ready: list[int] = []

    def launch(n: int) -> Any:
        addresses = (ctypes.c_void_p * 2).from_buffer(memory, 16 * n)
        values = dict.fromkeys(("function", "blocks", "threads", "shared", "at"), n)
        return SimpleNamespace(addresses=addresses, early=False, ready=lambda: ready.append(n), **values)

    prepared = [launch(n) for n in range(3)]
    graph = launches.Graph(machine, prepared, [Place()] * 3, memoryview(memory))
    made = graph.nodes
    prepared[1].addresses[1] = 1024
    ready.clear()
    told.clear()
    graph(7)
    assert ready == [1]
    assert told == [
        ("cuGraphExecKernelNodeSetParams", graph.executable, made[1], graph.parameters[1]),
        ("cuGraphLaunch", graph.executable, 7),
    ]
    told.clear()
    assert functions_called(lambda: graph(8))[1:] == ["Graph.__call__", functions_called(lambda: call("", 0))[1]]
    assert ready == [1] and told[0] == ("cuGraphLaunch", graph.executable, 8)


def test_where_inputs_lie_is_written_when_they_lie_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    point = Frame.point

    def noting(self: Frame, tensors: Any) -> None:
        written.append(len(tensors))
        point(self, tensors)

    monkeypatch.setattr(Frame, "point", noting)
    x, y, z = (torch.randn(8, 8) for _ in range(3))
    ours = terrazzo.compile(lambda x, y: torch.relu(x) @ y, x, y, options={"target": "cpu"})
    for given in ((x, y), (x, y), (x, y)):
        torch.testing.assert_close(ours(*given), torch.relu(given[0]) @ given[1])
    assert written == [2]
    x.copy_(z)  # what lies there is read at every call
    torch.testing.assert_close(ours(x, y), torch.relu(z) @ y)
    assert written == [2]
    for given in ((z, y), (y, z), (y, z)):
        torch.testing.assert_close(ours(*given), torch.relu(given[0]) @ given[1])
    assert written == [2, 2, 2]


@pytest.mark.filterwarnings("ignore:terrazzo. aten.sort")
def test_an_op_of_pytorch_is_called_through_few_functions() -> None:
    """One for the op, some for each of its results: what is known of it is asked once."""
    x = torch.randn(16, 32)
    with torch.no_grad():
        ours = terrazzo.compile(lambda x: torch.sort(x.exp(), -1), x, options={"target": "cpu"})
        for _ in range(3):
            ours(x)
        found = functions_called(lambda: ours(x))
    assert [f.op for f in ours.compiled.fallbacks] == ["aten.sort.default"]
    begin, end = found.index("Called.__call__"), found.index("Frame.point")
    assert len(found[begin:end]) <= 16, found[begin:end]
