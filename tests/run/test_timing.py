"""Timing on a GPU: graphs of calls."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch

from terrazzo.run.timing import graph_of


def test_a_graph_keeps_what_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was dropped, graphs wrote to temporaries that were no more, and an illegal access ended the process."""
    for name in ("Stream", "stream", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("Graph", (), {"replay": lambda self: None}))
    calls: list[int] = []

    class Call:
        def __call__(self, x: int) -> None:
            calls.append(x)

    call = Call()
    known, graph = weakref.ref(call), graph_of(call, [(1,), (2,)])
    del call
    gc.collect()
    there = known() is not None
    del graph
    gc.collect()
    gone = known() is None
    assert there and gone and calls == [1, 2, 1, 2]
