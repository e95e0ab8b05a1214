"""What looks at its data while it runs: checks of results, and shapes that the data decides.

A trace has no data. A check becomes part of the op whose results it is of, or gives NaN where PyTorch would raise an
error; of an op with one result of unknown shape the others are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from terrazzo.errors import Limitation
from terrazzo.front.unfolded import windows

CHECK = "aten::_linalg_check_errors"


@contextmanager
def checks_inside() -> Iterator[None]:
    """Within this, what PyTorch checks of a factorization is left to the op that makes it (`check_errors`). Newer
    PyTorch has the check as an effect, which no op can take over. A check without a message is no dead code, either, as
    PyTorch knows of those with one.
    """
    import torch

    torch.fx.node.has_side_effect(torch.ops.aten._assert_async.default)
    effect = getattr(getattr(torch._library.simple_registry.singleton.find(CHECK), "effect", None), "register", None)
    if effect is None:  # a PyTorch whose checks are ops like others
        yield
        return
    before = torch._library.simple_registry.singleton.find(CHECK).effect.effect
    effect(None)
    try:
        yield
    finally:
        effect(before)


def check_errors(info: Any, api_name: str, *, is_matrix: bool) -> None:
    """The check of a factorization, in a trace: the op that gave `info` checks it itself."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    found = get_proxy_slot(info, mode.tracer, None, lambda x: x.proxy.node) if mode is not None else None
    op = found.args[0] if found is not None and found.args else None
    names = [a.name for a in getattr(getattr(op, "target", None), "_schema", _NoSchema).arguments]
    if "check_errors" not in names:
        raise Limitation(f"{api_name} checks data that no op of PyTorch checks by itself")
    op.update_kwarg("check_errors", True)  # type: ignore[union-attr]


class _NoSchema:
    arguments = ()


def ctc_loss(op: Any) -> Callable[..., Any]:
    """What CTC's loss gives: losses, and what its gradients want, which is as wide as the longest target."""

    def traced(scores: Any, targets: Any, steps: Any, lengths: Any, *rest: Any, **named: Any) -> Any:
        count, batch = scores.shape[:2]
        wide = None if hasattr(lengths, "shape") else (batch, count, 2 * max(lengths, default=0) + 1)
        return _held(op, (scores, targets, steps, lengths, *rest), named, [(batch,), wide], scores)

    return traced


def ctc_loss_backward(op: Any) -> Callable[..., Any]:
    """The gradient of CTC's loss: as large as the scores."""

    def traced(gradient: Any, scores: Any, *rest: Any, **named: Any) -> Any:
        return _held(op, (gradient, scores, *rest), named, [tuple(scores.shape)], scores)[0]

    return traced


def lstsq(op: Any) -> Callable[..., Any]:
    """What least squares give: the solution. The shape of the others goes by the data and the driver."""
    import torch

    def traced(a: Any, b: Any, *rest: Any, **named: Any) -> Any:
        vector = b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
        columns = () if vector else b.shape[-1:]
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[: -1 if vector else -2])
        return _held(op, (a, b, *rest), named, [(*batch, a.shape[-1], *columns), None, None, None], a)

    return traced


def _held(op: Any, args: Any, kwargs: Any, shapes: list[tuple[int, ...] | None], like: Any) -> Any:
    """A call that the graph of the trace holds as it is, with results of these shapes, None where that is not known."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree
    from torch.utils import _pytree as pytree

    mode = get_proxy_mode()
    if mode is None:
        return NotImplemented
    given, named = pytree.tree_map(mode.tracer.unwrap_proxy, (args, kwargs))
    proxy = mode.tracer.create_proxy("call_function", op, given, named)
    made = tuple(like.new_empty(s or (0,)) for s in shapes)
    track_tensor_tree(made if len(made) > 1 else made[0], proxy, constant=None, tracer=mode.tracer)
    if len(made) > 1:
        proxy.node.meta["val"] = tuple(None if s is None else x for s, x in zip(shapes, made, strict=True))
    return made


@contextmanager
def distributions_unchecked() -> Iterator[None]:
    """Within this, distributions do not check what they are given, as they do not under torch.compile."""
    from torch.distributions import Distribution

    checked = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checked)


def definitions() -> dict[Any, Callable[..., Any]]:
    """What functions of PyTorch that branch on their data are defined by."""
    import torch

    return {
        torch.cov: _cov,
        torch.Tensor.cov: _cov,
        torch.corrcoef: _corrcoef,
        torch.Tensor.corrcoef: _corrcoef,
        torch.istft: _istft,
        torch.Tensor.istft: _istft,
        torch.nn.functional.gaussian_nll_loss: _gaussian_nll_loss,
        torch.nn.functional.ctc_loss: _ctc_loss,
        torch.ctc_loss: _ctc_loss,
        torch.nn.functional.multilabel_margin_loss: multilabel_margin_loss,
        torch.nn.functional.one_hot: one_hot,
        torch.Tensor.unfold: windows,
    }


def one_hot(x: Any, num_classes: int = -1) -> Any:
    """1 at the class, 0 elsewhere, where every class is looked up among all of them, so that it is refused where there
    is none of that number: a trace by PyTorch leaves that check out, or has it apart from what is compiled.
    """
    import torch

    if num_classes < 1 or x.dtype is not torch.int64:
        return torch.nn.functional.one_hot(x, num_classes)
    every = torch.arange(num_classes, device=x.device)
    return (every.index_select(0, x.reshape(-1)).view(*x.shape, 1) == every).to(torch.int64)


def _cov(x: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """Covariances of rows; of weights below 0, which PyTorch refuses, NaN."""
    import torch

    x = x.reshape(1, -1) if x.dim() < 2 else x
    given = [w for w in (fweights, aweights) if w is not None]
    weights = None
    for w in given:
        weights = w if weights is None else weights * w
    total = weights.sum() if weights is not None else x.shape[1]
    mean = (x if weights is None else x * weights).sum(1) / total
    norm = total - correction
    if aweights is not None and correction:
        norm = total - correction * (weights * aweights).sum() / total
    norm = norm.clamp_min(0) if hasattr(norm, "clamp_min") else max(norm, 0)
    for w in given:
        norm = torch.where((w < 0).any(), torch.nan, norm)
    x = x - mean[:, None]
    return ((x @ (x if weights is None else x * weights).T.conj()) / norm).squeeze()


def _corrcoef(x: Any) -> Any:
    c = _cov(x)
    if c.dim() == 0:
        return c / c
    deviation = c.diagonal().real.sqrt()
    found = c / deviation[:, None] / deviation
    return found if found.is_complex() else found.clamp(-1, 1)


def _istft(
    x: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Any:
    """The inverse of a short-time Fourier transform; NaN where no window reaches, for which PyTorch has an error."""
    import torch
    from torch.nn.functional import pad

    hop, wide = hop_length or n_fft // 4, win_length or n_fft
    batched = x.dim() == 3
    frames = (x if batched else x[None]).transpose(1, 2)
    window = frames.real.new_ones(wide) if window is None else window
    window = pad(window, ((n_fft - wide) // 2, n_fft - wide - (n_fft - wide) // 2))
    norm = "ortho" if normalized else None
    one = frames.shape[-1] != n_fft if onesided is None else onesided
    if return_complex:
        pieces = torch.fft.ifft(frames, n_fft, -1, norm)
    else:
        pieces = torch.fft.irfft(frames if one else frames[..., : n_fft // 2 + 1], n_fft, -1, norm)
    count = frames.shape[1]
    whole = n_fft + hop * (count - 1)
    start = n_fft // 2 if center else 0
    end = start + length if length is not None else whole - start
    added = [
        torch.ops.aten.unfold_backward(p, (len(p), whole), 1, n_fft, hop)[:, start:end]
        for p in (pieces * window, window.abs().square().expand(1, count, n_fft))
    ]
    out = added[0] / torch.where(added[1] < 1e-11, torch.nan, added[1])
    out = pad(out, (0, max(end - whole, 0)))
    return out if batched else out[0]


def _gaussian_nll_loss(
    x: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    """As PyTorch has it, with NaN for a variance below 0, which that refuses."""
    import torch

    if not isinstance(var, torch.Tensor):
        var = torch.full_like(x, var)
    if var.shape != x.shape and var.shape == x.shape[:-1]:
        var = var[..., None]
    least = torch.where(var < 0, torch.nan, eps).to(var.dtype)
    var = var + (torch.maximum(var, least) - var).detach()  # gradients go past the bound
    loss = 0.5 * (var.log() + (x - target) ** 2 / var) + (0.5 * math.log(2 * math.pi) if full else 0)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def multilabel_margin_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> Any:
    """As PyTorch has it, whose own decomposition takes what is behind a row's last label (-1) for labels too."""
    import torch
    from torch.nn import _reduction, functional

    if input.shape != target.shape or input.dim() > 2 or not input.numel():  # for which PyTorch has an error
        return functional.multilabel_margin_loss(input, target, size_average, reduce, reduction)
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    x, labels = (t.reshape(-1, t.shape[-1] if t.dim() else 1) for t in (input, target))
    given = (labels == -1).cumsum(1) == 0
    labels = torch.where(given, labels, 0)
    wanted = ((labels[:, :, None] == torch.arange(x.shape[1], device=x.device)) & given[:, :, None]).any(1)
    margins = (1 - x.gather(1, labels)[:, :, None] + x[:, None]).relu()
    loss = torch.where(given[:, :, None] & ~wanted[:, None], margins, 0).sum((1, 2)) / x.shape[1]
    if reduction == "none":
        return loss if input.dim() == 2 else loss[0]
    return loss.mean() if reduction == "mean" else loss.sum()


def _ctc_loss(
    scores: Any,
    targets: Any,
    steps: Any,
    lengths: Any,
    blank: int = 0,
    reduction: Any = "mean",
    zero_infinity: bool = False,
) -> Any:
    """As PyTorch has it, which makes tensors of lengths that are numbers in a way that no trace follows."""
    import torch

    how = {"none": 0, "mean": 1, "sum": 2}.get(reduction, reduction)
    if isinstance(lengths, torch.Tensor):
        return torch.ctc_loss(scores, targets, steps, lengths, blank, how, zero_infinity)
    batched = scores if scores.dim() == 3 else scores[:, None]
    loss, _ = torch.ops.aten._ctc_loss.default(batched, targets, steps, lengths, blank, zero_infinity)
    loss = torch.where(loss == torch.inf, 0, loss) if zero_infinity else loss
    if how == 1:
        long = [torch.full((), max(n, 1), dtype=loss.dtype, device=loss.device) for n in lengths]
        return (loss / torch.stack(long)).mean()
    return loss.sum() if how == 2 else loss if scores.dim() == 3 else loss[0]
