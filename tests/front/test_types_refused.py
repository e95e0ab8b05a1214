"""What PyTorch traces and refuses when it runs is refused by what was compiled, in PyTorch's own words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

INDEX = torch.tensor([1, 0])
REFUSED: tuple[tuple[str, Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]], ...] = (
    ("a product", torch.mm, lambda: (torch.randn(3, 4), torch.randn(4, 5).bfloat16())),
    ("whole numbers", torch.mm, lambda: (torch.randn(3, 4), torch.ones(4, 5, dtype=torch.int64))),
    ("a mask", F.linear, lambda: (torch.randn(3, 4) > 0, torch.randn(5, 4))),
    ("a bias", F.linear, lambda: (torch.randn(3, 4), torch.randn(5, 4), torch.randn(5).half())),
    ("set", lambda x, v: x.index_put((INDEX,), v), lambda: (torch.randn(3), torch.randn(2).bfloat16())),
    ("added", lambda x, v: x.index_add(0, INDEX, v), lambda: (torch.randn(3), torch.randn(2).bfloat16())),
)


@pytest.mark.parametrize(("function", "made"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
@pytest.mark.filterwarnings("ignore:terrazzo")
def test_operands_of_several_types_are_refused_as_eager_refuses_them(
    function: Callable[..., Tensor], made: Callable[[], tuple[Tensor, ...]]
) -> None:
    given = made()
    with pytest.raises(RuntimeError) as expected:
        function(*given)
    with pytest.raises(RuntimeError) as found:
        torch.compile(function, backend="terrazzo")(*given)
    assert str(expected.value).split(",")[0] in str(found.value)
