"""Timing on a GPU: CUDA graphs of one call for each set of inputs, replayed in turns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

Name = TypeVar("Name", bound=Hashable)


def graph_of(call: Callable[..., Any], sets: Sequence[Sequence[Any]]) -> Any:
    """A CUDA graph that calls once with every set of inputs. It keeps what is called, whose kernels and temporaries it
    uses: these would be gone with the last one who knows it.
    """
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for args in sets[:3]:
            call(*args)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for args in sets:
            call(*args)
    graph.replay()
    torch.cuda.synchronize()
    graph.kept = call
    return graph


def in_turns(graphs: Mapping[Name, Any], sets: int, replays: int) -> dict[Name, list[float]]:
    """Microseconds per call of every graph of so many sets of inputs, replayed in turns."""
    import torch

    found: dict[Name, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for _ in range(replays):
        for name in names:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) * 1e3 / sets)
        names.reverse()
    return found
