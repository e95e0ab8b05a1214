"""Bags of rows that are all of one length: on a GPU they are picked and added up by a kernel of ours."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from terrazzo.errors import UserError  # noqa: E402
from terrazzo.front.bags import embedding_bag  # noqa: E402
from terrazzo.front.capture import capture  # noqa: E402
from terrazzo.ir.dialects import loop as l  # noqa: E402
from terrazzo.ir.text import show  # noqa: E402
from terrazzo.options import Options  # noqa: E402
from terrazzo.pipelines import lowering  # noqa: E402
from terrazzo.run import compiled  # noqa: E402

CASES: list[dict[str, Any]] = [
    *({"mode": mode, "padding_idx": at} for mode in ("sum", "mean") for at in (None, 3, -2)),
    {"mode": "sum", "weighted": True}, {"mode": "sum", "weighted": True, "padding_idx": 3},
]  # fmt: skip


def given(dtype: Any, weighted: bool) -> tuple[Any, ...]:
    """Places, of which a row is padding alone, a table, which has something at its padding that is no number, and what
    rows are multiplied by.
    """
    torch.manual_seed(0)
    at = torch.randint(20, (6, 5))
    at[1] = 3
    w = torch.randn(20, 8, dtype=dtype)
    return at, w, torch.rand(6, 5, dtype=dtype) if weighted else None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_bags_are_what_pytorch_makes_of_them(options: dict[str, Any], dtype: Any) -> None:
    """In float64 up to the order of sums; in other types no further from that than twice as far as PyTorch's."""
    options = dict(options)
    at, w, by = given(dtype, options.pop("weighted", False))
    if options.get("padding_idx"):
        w[options["padding_idx"]] = torch.nan
    options["per_sample_weights"] = by
    ours, theirs = embedding_bag(at, w, **options), torch.nn.functional.embedding_bag(at, w, **options)
    assert ours.dtype is theirs.dtype and ours.stride() == theirs.stride()
    if dtype is torch.float64:
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
        return
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    exact = torch.nn.functional.embedding_bag(at, w.double(), **wide)
    off = [(x.double() - exact).norm().item() for x in (ours, theirs)]
    assert off[0] <= 2 * off[1] + torch.finfo(dtype).eps / 8 * exact.norm().item()


@pytest.mark.parametrize("weighted", [False, True])
def test_bags_of_one_length_are_one_kernel(weighted: bool) -> None:
    at, w, by = given(torch.bfloat16, weighted)
    rest = (by,) if weighted else ()
    done = lowering(
        capture(lambda at, w, *by: embedding_bag(at, w, mode="sum", per_sample_weights=by[0] if by else None),
                (at, w, *rest)).program,
        Options(target="sm_90a"),
    )  # fmt: skip
    assert [type(s) for s in done.loop.steps] == [l.Kernel]


@pytest.mark.parametrize(
    ("target", "options", "trains", "ours"),
    [
        ("sm_90a", {"mode": "mean"}, False, True),
        ("sm_90a", {"mode": "mean"}, True, False),  # gradients of the rows would be stored
        ("sm_90a", {"mode": "max"}, False, False),
        ("sm_90a", {"mode": "mean", "offsets": torch.tensor([0, 2])}, False, False),
        ("cpu", {"mode": "mean"}, False, False),  # its kernel is as fast as memory there
    ],
)
def test_which_bags_are_taken_apart(
    target: str, options: dict[str, Any], trains: bool, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, w, _ = given(torch.float32, False)
    at = at.reshape(-1) if "offsets" in options else at
    seen: list[str] = []

    def spy(program: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(show(program))
        raise UserError("there is no GPU here")

    monkeypatch.setattr(compiled, "compile_program", spy)
    torch._dynamo.reset()
    fn = torch.compile(
        lambda at, w: torch.nn.functional.embedding_bag(at, w, **options),
        backend="terrazzo", options={"target": target},
    )  # fmt: skip
    with pytest.raises(Exception, match="no GPU"):
        fn(at, w.requires_grad_(trains))
    assert ("embedding_bag" in seen[0]) != ours
