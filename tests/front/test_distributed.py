"""Training by several processes: DDP has Dynamo split graphs where gradients are gathered, bucket by bucket."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

BUCKET = 4096
"""Bytes, less than the parameters of a block."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of this process alone."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", BUCKET)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def _around(model: nn.Module) -> Any:
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET / 2**20)


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.usefixtures("alone")
def test_models_are_trained_whose_gradients_are_gathered_in_buckets(outside: bool) -> None:
    """Whether the whole is compiled or what it is around. PyTorch counts what AOTAutograd has compiled of its parts."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    wanted = copy.deepcopy(model)
    compile: Any = lambda f: torch.compile(f, backend="terrazzo")  # noqa: E731
    torch._dynamo.reset()
    compiled = compile(_around(model)) if outside else _around(compile(model))
    for _ in range(3):
        x = torch.randn(8, 32)
        for f in (compiled, wanted):
            f.zero_grad()
            f(x).square().mean().backward()
        for a, b in zip(model.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
    assert torch._dynamo.utils.counters["aot_autograd"]["total"] >= 3  # one for each bucket
