"""Which ATen ops are taken apart at capture, by PyTorch's own decompositions, and which arrive whole.

Core ATen's table, less the ops we lower ourselves to better terms or with exact semantics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from terrazzo.front import fast_paths, foreach, in_rows, looking, mixed_norms, one_type
from terrazzo.front.derivatives import traced_with

WHOLE = (
    "_softmax", "_log_softmax", "native_layer_norm", "native_group_norm", "_fused_rms_norm", "gelu", "silu", "sigmoid",
    "addmm", "_to_copy", "embedding", "var", "std", "var_mean", "std_mean", "mean", "cumsum", "cumprod", "logsumexp",
    "leaky_relu", "elu", "hardtanh", "clamp_min", "clamp_max", "slice_scatter", "select_scatter",
    "max_pool2d_with_indices", "binary_cross_entropy_with_logits",
    "max_pool3d_with_indices", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "avg_pool1d", "avg_pool2d",
    "grid_sampler_2d", "native_dropout", "linspace", "nll_loss_forward", "nll_loss2d_forward",
    "stack", "_unsafe_view", "split_with_sizes", "split", "unbind", "linalg_vector_norm", "all", "any", "full_like",
    "zeros_like", "ones_like", "embedding_dense_backward", "index_add", "index_copy", "col2im", "max_unpool2d",
    "max_unpool3d", "unfold_backward", "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip


def table() -> dict[Any, Any]:
    """The decompositions, by overload. Newer Dynamo writes addcmul_ with a tensor for its value as an op of Inductor's,
    which is there once it did.
    """
    import torch

    fused = getattr(torch.ops.prims, "fma", None)
    return {**_table(), fused.default: lambda a, b, c: a * b + c} if fused else _table()


@lru_cache(maxsize=1)
def _table() -> dict[Any, Any]:
    import torch
    from torch._decomp import core_aten_decompositions, get_decompositions

    aten = torch.ops.aten
    found = dict(core_aten_decompositions())
    extra = [getattr(aten, n) for n in EXTRA if hasattr(aten, n)]
    found.update(get_decompositions(extra))
    for name in WHOLE:
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            found.pop(getattr(packet, overload), None)
    found.update(foreach.decompositions())
    found[aten._linalg_slogdet.default] = _slogdet
    found[aten._linalg_det.default] = _det
    found[aten.addcdiv.default] = _addcdiv(found[aten.addcdiv.default])
    found[aten._efficientzerotensor.default] = _zeros
    found[aten.fft_fftfreq.default] = _fftfreq
    found[aten.fft_rfftfreq.default] = _rfftfreq
    found[aten._native_multi_head_attention.default] = fast_paths.attention
    found[aten._transformer_encoder_layer_fwd.default] = fast_paths.encoder_layer
    found[aten._linalg_check_errors.default] = looking.check_errors
    found.update({op: looking.ctc_loss(op) for op in (aten._ctc_loss.default, aten._ctc_loss.Tensor)})
    backward = (aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)
    found.update({op: looking.ctc_loss_backward(op) for op in backward})
    found[aten.convolution_backward.default] = _gradients_apart
    found[aten._embedding_bag.default] = _bags
    edges = (aten.replication_pad1d_backward, aten.replication_pad2d_backward, aten.replication_pad3d_backward)
    found.update({packet.default: _to_the_edges for packet in edges})
    found[aten.linalg_lstsq.default] = looking.lstsq(aten.linalg_lstsq.default)
    return one_type.asked(in_rows.laid(mixed_norms.widened(found)))


def _addcdiv(on_a_processor: Callable[..., Any]) -> Callable[..., Any]:
    """x + value * a / b, where `value * a` may overflow or vanish on a processor; on a GPU eager mode divides first, as
    our own rule does.
    """
    return lambda x, *args, **kwargs: on_a_processor(x, *args, **kwargs) if x.device.type == "cpu" else NotImplemented


def _zeros(size: Any, **kwargs: Any) -> Any:
    """The zeros of forward derivatives, which no kernel can read, as others."""
    import torch

    return torch.zeros(size, dtype=kwargs.get("dtype"), device=kwargs.get("device"))


def _fftfreq(n: int, d: float = 1.0, **kwargs: Any) -> Any:
    """The frequencies of a Fourier transform's results: whole numbers from 0 up, the second half less n, scaled."""
    import torch

    k = torch.arange(n, dtype=kwargs.get("dtype") or torch.get_default_dtype(), device=kwargs.get("device"))
    return torch.where(k >= (n + 1) // 2, k - n, k) * (1.0 / (n * d))


def _rfftfreq(n: int, d: float = 1.0, **kwargs: Any) -> Any:
    import torch

    k = torch.arange(n // 2 + 1, dtype=kwargs.get("dtype") or torch.get_default_dtype(), device=kwargs.get("device"))
    return k * (1.0 / (n * d))


def _factors(x: Any) -> Any:
    """The factors of `x`, where it lies otherwise than in rows, and what makes its determinant of them.

    Of rows the ops for determinants factor the transpose, and their gradients go by how `x` lay when they were
    recorded. We give them rows in any case, so what lay otherwise is factored by an op that means `x` itself.
    """
    import torch

    factors, pivots, _ = torch.ops.aten.linalg_lu_factor_ex.default(x)
    swaps = (pivots != torch.arange(1, pivots.shape[-1] + 1, device=x.device)).sum(-1)
    sign = (1 - 2 * (swaps % 2)).to(x.dtype)
    return factors, pivots, factors.diagonal(dim1=-2, dim2=-1), sign


@contextmanager
def resampled_whole(given: Iterable[Any]) -> Iterator[None]:
    """Within this, autograd sees ops that resample images whole: PyTorch would take them apart before, and then
    gradients are scattered, those of one tap after those of the other. Of empty images it does not tell the shapes.
    """
    import torch
    from torch._C import DispatchKey

    if any(isinstance(x, torch.Tensor) and not x.numel() for x in given):
        yield
        return
    kinds = [f"nearest{d}d" for d in (1, 2, 3)] + ["linear1d", "bilinear2d", "trilinear3d", "bicubic2d"]
    names = [f"upsample_{kind}" for kind in kinds] + [f"_upsample_nearest_exact{d}d" for d in (1, 2, 3)]
    packets = [getattr(torch.ops.aten, name) for name in names]
    ops = [getattr(packet, o) for packet in packets for o in ("default", "vec")]
    keys = DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd
    with traced_with({op: dict.fromkeys(keys) for op in ops}):
        yield


def _slogdet(x: Any) -> Any:
    if x.is_contiguous() or x.is_complex():
        return NotImplemented
    factors, pivots, diagonal, sign = _factors(x)
    return sign * diagonal.sign().prod(-1), diagonal.abs().log().sum(-1), factors, pivots


def _det(x: Any) -> Any:
    if x.is_contiguous() or x.is_complex():
        return NotImplemented
    factors, pivots, diagonal, sign = _factors(x)
    return sign * diagonal.prod(-1), factors, pivots


def _to_the_edges(grad: Any, x: Any, pad: Any) -> Any:
    """The gradient of an image whose edges were repeated: what lies beyond an edge is added to it, in 32 bits at least.
    Images that were cropped are left to PyTorch.
    """
    import torch

    if min(pad) < 0:
        return NotImplemented
    out = grad.float() if grad.dtype.itemsize == 2 else grad
    for k, (before, behind) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = x.dim() - 1 - k
        last = x.shape[dim] - 1
        inside = out.narrow(dim, before, last + 1)
        for count, first, at in ((before, 0, 0), (behind, before + last + 1, last)):
            if count:
                beyond = out.narrow(dim, first, count).sum(dim, keepdim=True)
                inside = inside + torch.constant_pad_nd(beyond, (*(0, 0) * k, at, last - at))
        out = inside
    return out.to(grad.dtype)


def _bags(
    w: Any, at: Any, offsets: Any, scaled: Any = False, mode: Any = 0, sparse: Any = False, by: Any = None,
    last: Any = False, padding: Any = -1,
) -> Any:  # fmt: skip
    """Sums of rows in bfloat16, of which the op gives no numbers of bags on a processor, although PyTorch says that it
    does: they are counted. Its gradient takes them.
    """
    import torch

    if w.dtype is not torch.bfloat16 or mode or w.device.type != "cpu":
        return NotImplemented
    out, *_ = torch.ops.aten._embedding_bag_forward_only.default(
        w, at, offsets, scaled, mode, sparse, by, last, padding
    )
    begin = offsets[:-1] if last else offsets
    end = offsets[1:] if last else torch.cat([offsets[1:], offsets.new_full((1,), at.shape[0])])
    places = torch.arange(at.shape[0], dtype=offsets.dtype, device=offsets.device)
    bags = torch.searchsorted(begin, places, right=True, out_int32=offsets.dtype is torch.int32) - 1
    return out, bags, end - begin, begin


def _gradients_apart(grad: Any, x: Any, w: Any, sizes: Any, *args: Any) -> Any:
    """A convolution's gradients, each by an op of its own: one may be a library's, and another a kernel. That of a bias
    is a sum.
    """
    import torch

    *options, mask = args
    of_image, of_weights, of_bias = mask
    if not of_bias and not (of_image and of_weights):
        return NotImplemented
    op = torch.ops.aten.convolution_backward.default
    image = op(grad, x, w, None, *options, [True, False, False])[0] if of_image else None
    weights = op(grad, x, w, None, *options, [False, True, False])[1] if of_weights else None
    bias = grad.sum((0, *range(2, grad.dim()))) if of_bias else None
    return image, weights, bias


EXTRA = (
    "linear", "matmul", "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm",
    "_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional", "_unsafe_index", "norm",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "native_batch_norm_backward", "native_layer_norm_backward",
    "native_group_norm_backward", "threshold_backward", "gelu_backward", "silu_backward", "sigmoid_backward",
    "tanh_backward",
    "_softmax_backward_data", "_log_softmax_backward_data", "nll_loss_backward",
)  # fmt: skip
