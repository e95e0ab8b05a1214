"""Parts of a concatenation that are looked up: places beyond a part look nothing up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import terrazzo
from terrazzo.options import Options


def pairs(table: Any, ids: Any, off: Any) -> Any:
    """Features that meet, two at a time, as recommenders have them."""
    i, j = torch.triu_indices(5, 5, 1, device=ids.device)
    x = table[ids + off]
    return torch.cat((x[:, i] * 2, x[:, j] * x[:, i]), 1)


def before(x: Any, at: Any) -> Any:
    """Places that are computed of what was loaded: 0 - 1 is none."""
    return torch.cat((x[:3] * 2, x.gather(0, at - 1) * 3, x[:3].exp()))


@pytest.mark.parametrize("target", ["interpreter", "cpu"])
@pytest.mark.parametrize("fn", [pairs, before])
def test_what_lies_beyond_a_part_is_not_looked_up(fn: Any, target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = torch.randn(20, 4), torch.randint(4, (3, 5)), torch.arange(5) * 4
    args = made if fn is pairs else (torch.randn(6), torch.randint(1, 6, (5,)))
    ours = terrazzo.compile(fn, *args, options=Options(target=target, cache_dir=tmp_path))
    torch.testing.assert_close(ours(*args), fn(*args))
