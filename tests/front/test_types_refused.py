"""What PyTorch traces and refuses when it runs is refused by what was compiled, in PyTorch's own words."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from terrazzo.front.one_type import refused_on_gpus

INDEX = torch.tensor([1, 0])
REFUSED: tuple[tuple[str, Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]], ...] = (
    ("a product", torch.mm, lambda: (torch.randn(3, 4), torch.randn(4, 5).bfloat16())),
    ("whole numbers", torch.mm, lambda: (torch.randn(3, 4), torch.ones(4, 5, dtype=torch.int64))),
    ("a mask", F.linear, lambda: (torch.randn(3, 4) > 0, torch.randn(5, 4))),
    ("a bias", F.linear, lambda: (torch.randn(3, 4), torch.randn(5, 4), torch.randn(5).half())),
    ("set", lambda x, v: x.index_put((INDEX,), v), lambda: (torch.randn(3), torch.randn(2).bfloat16())),
    ("a power", lambda x: x**-1, lambda: (torch.ones(3, dtype=torch.int64),)),
    ("a vector", torch.mv, lambda: (torch.randn(3, 4), torch.randn(4).bfloat16())),
    ("a base", torch.baddbmm, lambda: (torch.randn(2, 3, 3).bfloat16(), torch.randn(2, 3, 3), torch.randn(2, 3, 3))),
    ("layer norm", lambda x, w: F.layer_norm(x, (4,), w), lambda: (torch.randn(3, 4), torch.randn(4).bfloat16())),
    (
        "its bias",
        lambda x, w: F.layer_norm(x, (4,), w[0], w[1:].half()[0]),
        lambda: (torch.randn(3, 4), torch.ones(2, 4)),
    ),
    ("group norm", lambda x, w: F.group_norm(x, 2, w), lambda: (torch.randn(3, 4), torch.randn(4).bfloat16())),
    ("batch norm", lambda x, w: F.batch_norm(x, w, w), lambda: (torch.randn(3, 4), torch.rand(4).bfloat16())),
    (
        "trained",
        lambda x, w: F.batch_norm(x, None, None, w, w, True),
        lambda: (torch.randn(3, 4), torch.rand(4).half()),
    ),
    ("chances", F.binary_cross_entropy, lambda: (torch.rand(3), torch.rand(3).bfloat16())),
    ("weights", lambda x, w: F.nll_loss(x, INDEX, w), lambda: (torch.randn(2, 3), torch.rand(3).bfloat16())),
    (
        "a grid",
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        lambda: (torch.ones(1, 1, 4, 4), torch.ones(1, 3, 3, 2).bfloat16()),
    ),
    ("crossed", torch.linalg.cross, lambda: (torch.randn(2, 3), torch.randn(2, 3).bfloat16())),
    ("steps", torch.heaviside, lambda: (torch.randn(3), torch.randn(3).bfloat16())),
    ("reduced", lambda x, v: x.index_reduce(0, INDEX, v, "amax"), lambda: (torch.randn(3), torch.randn(2).bfloat16())),
    ("put", lambda x, v: x.put(INDEX, v), lambda: (torch.randn(3), torch.randn(2).bfloat16())),
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_on_processors_have_weights_in_float32_beside_16_bits(dtype: torch.dtype) -> None:
    def norms(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (
            F.layer_norm(x, (4,), w, w),
            F.group_norm(x, 2, w, w),
            F.batch_norm(x, w, w.abs(), w, w),
            F.batch_norm(x, None, None, w, w, training=True),
        )

    given = torch.randn(3, 4).to(dtype), torch.rand(4)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "terrazzo")  # nothing is left to PyTorch
        found = torch.compile(norms, backend="terrazzo", options={"strict": True})(*given)
    for x, y in zip(found, norms(*given), strict=True):
        assert x.dtype is y.dtype is dtype
        torch.testing.assert_close(x, y)


def test_norms_on_gpus_have_weights_of_one_type() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    op = torch.ops.aten.native_layer_norm.default
    with FakeTensorMode():
        for device, weight, refused in (("cpu", 32, False), ("cuda", 32, True), ("cuda", 16, False)):
            x, w = torch.empty(3, 4, dtype=torch.float16, device=device), torch.empty(4, device=device)
            assert refused_on_gpus(op, [x, [4], w if weight == 32 else w.half(), None, 1e-5]) is refused
