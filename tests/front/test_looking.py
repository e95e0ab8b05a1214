"""Functions that look at their data are traced whole: factorizations, CTC, covariances, distributions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as f

import terrazzo
from terrazzo.errors import IndexOutOfRange, Limitation
from terrazzo.front import dynamo
from terrazzo.front.capture import capture
from terrazzo.ir.parse import parse
from terrazzo.ir.show import show
from terrazzo.run import compiled

torch.manual_seed(0)
SQUARE = torch.randn(3, 8, 8)
POSITIVE = SQUARE @ SQUARE.mT + 8 * torch.eye(8)
RIGHT = torch.randn(3, 8, 2)
WAVE = torch.randn(2, 256)
SCORES, LABELS = torch.randn(12, 3, 6), torch.randint(1, 6, (3, 4))
STEPS, LENGTHS = torch.tensor([12, 11, 12]), torch.tensor([4, 3, 1])


def _back(x: Tensor) -> Tensor:
    window = torch.hann_window(32)
    return torch.istft(torch.stft(x, 32, return_complex=True, window=window) * 2, 32, window=window, length=256)


def _likely(x: Tensor, mean: Tensor) -> Tensor:
    return torch.distributions.MultivariateNormal(mean, covariance_matrix=x).log_prob(mean + 1)


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "solve": (lambda a, b: torch.linalg.solve(a * 2, b).relu(), (POSITIVE, RIGHT)),
    "inv": (lambda a: torch.linalg.inv(a) + 1, (POSITIVE,)),
    "inverse": (lambda a: a.inverse() + 1, (POSITIVE,)),
    "cholesky": (lambda a: torch.linalg.cholesky(a).diagonal(dim1=-1, dim2=-2).log(), (POSITIVE,)),
    "lu_factor": (lambda a: torch.linalg.lu_factor(a)[0] + 1, (POSITIVE,)),
    "lstsq": (lambda a, b: torch.linalg.lstsq(a[:, :, :5], b).solution + 1, (SQUARE, RIGHT)),
    "lstsq of a vector": (lambda a, b: torch.linalg.lstsq(a, b[..., 0]).solution + 1, (POSITIVE, RIGHT)),
    "ctc": (lambda x: f.ctc_loss(x.log_softmax(-1), LABELS, (12, 11, 12), (4, 3, 1)), (SCORES,)),
    "ctc, summed": (
        lambda x: f.ctc_loss(x.log_softmax(-1), LABELS, (12, 11, 2), (4, 3, 4), 0, "sum", zero_infinity=True),
        (SCORES,),
    ),
    "cov": (lambda a: torch.cov(a[0]), (SQUARE,)),
    "cov, weighted": (lambda a: a[0].cov(aweights=torch.arange(8.0)), (SQUARE,)),
    "corrcoef": (lambda a: torch.corrcoef(a[0]), (SQUARE,)),
    "istft": (_back, (WAVE,)),
    "gaussian_nll_loss": (lambda x, v: f.gaussian_nll_loss(x, x * 0.5, v.exp(), full=True), (RIGHT, RIGHT * 0.3)),
    "distribution": (_likely, (POSITIVE, RIGHT[..., 0])),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_one_program_with_its_gradients(name: str) -> None:
    """As a program that makes its gradients itself; a gradient is what eager mode gives."""
    fn, given = CASES[name]

    def step(*args: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in args]
            out = fn(*leaves)
            return out, *torch.autograd.grad(out.sum(), leaves)

    results = terrazzo.compile(step, *given)(*given)
    for a, b in zip(results, step(*given), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", CASES)
def test_its_text_reads_back(name: str) -> None:
    fn, given = CASES[name]
    text = show(capture(fn, given).program)
    assert show(parse(text)) == text


def test_lengths_that_are_data() -> None:
    """The loss is compiled; what its gradients want is as wide as the longest target, which no program says."""

    def loss(x: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        return f.ctc_loss(x.log_softmax(-1), LABELS, steps, lengths)

    def gradient(x: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(loss(x, steps, lengths), x)[0]

    given = SCORES, STEPS, LENGTHS
    torch.testing.assert_close(terrazzo.compile(loss, *given)(*given), loss(*given))
    with pytest.raises(Limitation, match=r"the shape of result 1 of aten\._ctc_loss\.Tensor depends on the data"):
        terrazzo.compile(gradient, *given)


@pytest.mark.parametrize("name", ["solve", "inv", "cholesky", "lu_factor"])
def test_a_graph_that_is_differentiated_is_compiled_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torch.compile, forward and backward: no graph is left to PyTorch for the check of a factorization."""
    fn, given = CASES[name]
    graphs: list[Any] = []
    before = compiled.compile_program
    monkeypatch.setattr(compiled, "compile_program", lambda *a: graphs.append(before(*a)) or graphs[-1])
    monkeypatch.setattr(dynamo, "_said", set())
    leaves = [[x.clone().requires_grad_() for x in given] for _ in range(2)]
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*PyTorch runs this graph.*")
        torch.compile(fn, backend="terrazzo", fullgraph=True)(*leaves[0]).sum().backward()
    fn(*leaves[1]).sum().backward()
    assert len(graphs) == 2
    for a, b in zip(*leaves, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=2e-4, atol=2e-4)


def test_the_check_is_made() -> None:
    """A singular matrix is an error of the call, as in eager mode; where a program cannot raise one, it gives NaN."""
    inverse = terrazzo.compile(lambda a: torch.linalg.inv(a) + 1, POSITIVE)
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        inverse(torch.zeros_like(POSITIVE))
    likely = terrazzo.compile(lambda x, v: f.gaussian_nll_loss(x, x, v), RIGHT, RIGHT)
    assert likely(RIGHT, -RIGHT.abs()).isnan()


def test_nothing_is_left_changed() -> None:
    """Distributions check their arguments again once the trace is over."""
    torch.distributions.Distribution.set_default_validate_args(True)  # which torch.compile ends for good
    terrazzo.compile(_likely, POSITIVE, RIGHT[..., 0])
    with pytest.raises(ValueError, match="constraint"):
        torch.distributions.Normal(torch.zeros(3), -torch.ones(3))


TARGETS = torch.tensor([[3, 0, -1, 1, 2], [1, -1, 0, 0, 0], [0, 1, 2, 3, 4], [-1, 0, 1, 2, 3], [2, 2, 0, -1, -1]])
MARGINS = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_labels_end_at_the_first_that_is_none(reduction: str, tmp_path: Path) -> None:
    """PyTorch's decomposition, which every trace would take, has a loss for what is behind that too."""
    loss = partial(f.multilabel_margin_loss, reduction=reduction)
    options = {"target": "interpreter", "cache_dir": tmp_path}
    leaves = [MARGINS.clone().requires_grad_() for _ in range(2)]
    torch._dynamo.reset()
    ours = [
        torch.compile(loss, backend="terrazzo", options=options)(leaves[0], TARGETS),
        terrazzo.compile(loss, MARGINS, TARGETS, options=options)(MARGINS, TARGETS),
    ]
    expected = loss(leaves[1], TARGETS)
    for found in ours:
        torch.testing.assert_close(found, expected)
    ours[0].sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
    row = terrazzo.compile(loss, MARGINS[0], TARGETS[0], options=options)
    torch.testing.assert_close(row(MARGINS[0], TARGETS[0]), loss(MARGINS[0], TARGETS[0]))


@pytest.mark.parametrize("target", ["cpu", "interpreter"])
@pytest.mark.parametrize("way", ["capture", "dynamo"])
def test_a_class_that_there_is_not_is_refused(way: str, target: str, tmp_path: Path) -> None:
    """PyTorch's own trace has a row of zeros for it, and no check."""

    def hot(x: Tensor) -> Tensor:
        return f.one_hot(x, 3) * 2

    x, options = torch.tensor([[0, 2], [1, 1]]), {"target": target, "cache_dir": tmp_path}
    torch._dynamo.reset()
    if way == "capture":
        fast = terrazzo.compile(hot, x, options=options)
    else:
        fast = torch.compile(hot, backend="terrazzo", options={**options, "strict": True})
    assert torch.equal(fast(x), hot(x)) and fast(x).dtype is torch.int64
    for wrong in (x + 1, x - 1):
        with pytest.raises(IndexOutOfRange, match="is out of range"):
            fast(wrong)


def test_a_check_without_a_message_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives nothing to anybody, and is no dead code for that."""

    def checked(x: Tensor) -> Tensor:
        torch._assert_async((x > 0).all())
        return x + 1

    x = torch.ones(3)
    with pytest.raises(Limitation, match=r"_assert_async\.default: it checks its data and returns nothing"):
        capture(checked, (x,))
    monkeypatch.setattr(dynamo, "_said", set())
    torch._dynamo.reset()
    fast = torch.compile(checked, backend="terrazzo")
    with pytest.warns(RuntimeWarning, match="_assert_async.default"):
        assert torch.equal(fast(x), x + 1)
    with pytest.raises(RuntimeError):
        fast(-x)
