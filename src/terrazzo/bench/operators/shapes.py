"""Single operators at shapes that models have, of the suite: what no rule draws from small samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from terrazzo.bench.operators.fills import Case, Fill

Shape = tuple[int, ...]
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], bool]] = {}
"""What is called, with tensors of these sizes (or places, up to a bound), and whether gradients are asked for too."""
DTYPES = (torch.float32, torch.bfloat16)


def _add(name: str, call: Callable[..., Any], *given: Any, grad: bool = False) -> None:
    CASES[name] = call, given, grad


def places(bound: int, *shape: int) -> Fill:
    """Numbers from 0 to bound - 1."""
    return Fill(shape, torch.int64, 0, bound - 1)


def flags(*shape: int) -> Fill:
    """True or False."""
    return Fill(shape, torch.bool, 0, 1)


def positive(*shape: int) -> tuple[Any, ...]:
    """Sizes of a tensor with values from 0.1 to 1.1."""
    return ("positive", *shape)


ROWS: tuple[Shape, ...] = (
    (4096, 4096),
    (8192, 2048),
    (65536, 256),
    (262144, 64),
    (1024, 16384),
    (512, 50257),
    (128, 131072),
    (32768, 513),
)
for s in ROWS:
    at = "x".join(map(str, s))
    _add(f"softmax_{at}", lambda x: torch.softmax(x, -1), s, grad=True)
    _add(f"log_softmax_{at}", lambda x: torch.log_softmax(x, -1), s, grad=True)
    _add(f"layer_norm_{at}", lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), s, s[1:], s[1:], grad=True)
    _add(f"rms_norm_{at}", lambda x, w: F.rms_norm(x, x.shape[-1:], w), s, s[1:], grad=True)
    _add(f"sum_rows_{at}", lambda x: x.sum(-1), s)
    _add(f"sum_columns_{at}", lambda x: x.sum(0), s)
    _add(f"max_rows_{at}", lambda x: x.max(-1), s, grad=s == ROWS[0])
    _add(f"max_columns_{at}", lambda x: x.max(0), s)
    _add(f"argmax_columns_{at}", lambda x: x.argmax(0), s)
    _add(f"var_columns_{at}", lambda x: x.var(0), s)
    _add(f"softmax_columns_{at}", lambda x: torch.softmax(x, 0), s)
    _add(f"logsumexp_{at}", lambda x: torch.logsumexp(x, -1), s)
    _add(f"transpose_{at}", lambda x: x.t().contiguous(), s)
    _add(f"normalize_{at}", lambda x: F.normalize(x, dim=-1), s, grad=True)

for s in ((4096, 32000), (4096, 50257), (16384, 1000)):
    at = "x".join(map(str, s))
    _add(f"cross_entropy_{at}", F.cross_entropy, s, places(s[1], s[0]), grad=True)
    _add(f"nll_loss_{at}", F.nll_loss, s, places(s[1], s[0]), grad=True)
    _add(
        f"smooth_cross_entropy_{at}",
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
        s,
        places(s[1], s[0]),
        grad=True,
    )
for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss"):
    _add(name, getattr(F, name), (4096, 4096), (4096, 4096), grad=True)
_add(
    "bce_with_logits",
    lambda x, y: F.binary_cross_entropy_with_logits(x, y),
    (4096, 4096),
    positive(4096, 4096),
    grad=True,
)
_add("cosine_similarity", F.cosine_similarity, (32768, 512), (32768, 512), grad=True)
_add("triplet", F.triplet_margin_loss, (32768, 256), (32768, 256), (32768, 256), grad=True)
_add("pairwise_distance", F.pairwise_distance, (32768, 512), (32768, 512), grad=True)

IMAGES: tuple[Shape, ...] = (
    (32, 64, 112, 112),
    (16, 128, 96, 96),
    (64, 256, 56, 56),
    (64, 512, 28, 28),
    (32, 2048, 7, 7),
)
for s in IMAGES:
    at = "x".join(map(str, s))
    c = s[1:2]
    last = Fill(s, torch.float32, -1, 1, True)
    training = lambda x, m, v, w, b: F.batch_norm(x, m.detach(), v.detach(), w, b, True)  # noqa: E731
    _add(f"batch_norm_{at}", training, s, c, positive(*c), c, c, grad=True)
    _add(f"batch_norm_eval_{at}", lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b, False), s, c, positive(*c), c, c)
    _add(f"group_norm_{at}", lambda x, w, b: F.group_norm(x, 32, w, b), s, c, c, grad=True)
    _add(f"group_norm_last_{at}", lambda x, w, b: F.group_norm(x, 32, w, b), last, c, c)
    _add(f"instance_norm_{at}", F.instance_norm, s, grad=True)
    _add(f"to_channels_last_{at}", lambda x: x.contiguous(memory_format=torch.channels_last), s)
    _add(f"to_channels_first_{at}", lambda x: x.contiguous(), last)
    _add(f"mean_image_{at}", lambda x: x.mean((2, 3)), s, grad=True)
    _add(f"mean_image_last_{at}", lambda x: x.mean((2, 3)), last)
    _add(f"sum_channels_{at}", lambda x: x.sum(1), s)
    _add(f"sum_all_but_channels_{at}", lambda x: x.sum((0, 2, 3)), s)
for s in IMAGES[:3]:
    at = "x".join(map(str, s))
    last = Fill(s, torch.float32, -1, 1, True)
    for k, st, p in ((3, 2, 1), (2, 2, 0), (3, 1, 1)):
        _add(f"max_pool_{k}{st}_{at}", lambda x, k=k, st=st, p=p: F.max_pool2d(x, k, st, p), s, grad=True)
        _add(f"avg_pool_{k}{st}_{at}", lambda x, k=k, st=st, p=p: F.avg_pool2d(x, k, st, p), s, grad=True)
    _add(f"max_pool_last_{at}", lambda x: F.max_pool2d(x, 3, 2, 1), last)
    _add(f"adaptive_{at}", lambda x: F.adaptive_avg_pool2d(x, (7, 7)), s, grad=True)
    _add(f"adaptive_max_{at}", lambda x: F.adaptive_max_pool2d(x, (7, 7)), s)
    for mode in ("nearest", "bilinear", "bicubic"):
        _add(f"up_{mode}_{at}", lambda x, m=mode: F.interpolate(x, scale_factor=2, mode=m), s, grad=True)
        _add(f"down_{mode}_{at}", lambda x, m=mode: F.interpolate(x, scale_factor=0.5, mode=m), s)
        _add(
            f"to_224_{mode}_{at}",
            lambda x, m=mode: F.interpolate(x, size=(224, 224), mode=m, antialias=m != "nearest"),
            (16, 32, *s[2:]),
        )
    for mode in ("constant", "reflect", "replicate", "circular"):
        _add(
            f"pad_{mode}_{at}",
            lambda x, m=mode: F.pad(x, (3, 2, 1, 4), mode=m),
            s,
            grad=mode in ("reflect", "constant"),
        )
    _add(
        f"grid_sample_{at}", lambda x, g: F.grid_sample(x, g, align_corners=False), s, (s[0], s[2], s[3], 2), grad=True
    )
    _add(
        f"grid_sample_nearest_{at}",
        lambda x, g: F.grid_sample(x, g, mode="nearest", align_corners=True),
        s,
        (s[0], s[2], s[3], 2),
    )
    _add(f"pixel_shuffle_{at}", lambda x: F.pixel_shuffle(x, 2), s)
    _add(f"pixel_unshuffle_{at}", lambda x: F.pixel_unshuffle(x, 2), s)
    _add(f"channel_shuffle_{at}", lambda x: F.channel_shuffle(x, 8), s)
    _add(f"unfold_{at}", lambda x: F.unfold(x, 3, padding=1), (s[0] // 4, *s[1:]))
    _add(f"roll_{at}", lambda x: x.roll((3, 5), (2, 3)), s)
    _add(f"flip_{at}", lambda x: x.flip(-1), s)
    _add(f"flip_both_{at}", lambda x: x.flip((2, 3)), s)
    _add(f"rot90_{at}", lambda x: torch.rot90(x, 1, (2, 3)), s)
_add("fold", lambda x: F.fold(x, (56, 56), 3, padding=1), (32, 576, 3136))
_add("avg_pool1d", lambda x: F.avg_pool1d(x, 4), (64, 256, 4096), grad=True)
_add("max_pool1d", lambda x: F.max_pool1d(x, 3, 2), (64, 256, 4096), grad=True)
_add("max_pool3d", lambda x: F.max_pool3d(x, 2), (4, 64, 16, 112, 112), grad=True)
_add("avg_pool3d", lambda x: F.avg_pool3d(x, 2), (4, 64, 16, 112, 112))
_add("linear_1d", lambda x: F.interpolate(x, scale_factor=2, mode="linear"), (64, 256, 2048))
_add("trilinear", lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), (4, 32, 16, 56, 56))

CUBE = (64, 512, 1024)
for order in ((0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
    _add(f"permute_{''.join(map(str, order))}", lambda x, p=order: x.permute(p).contiguous(), CUBE)
    _add(f"permute_odd_{''.join(map(str, order))}", lambda x, p=order: x.permute(p).contiguous(), (65, 511, 1021))
FOUR: tuple[Shape, ...] = ((0, 2, 1, 3), (0, 3, 1, 2), (0, 2, 3, 1), (3, 2, 1, 0), (0, 1, 3, 2), (2, 0, 3, 1))
for axes in FOUR:
    _add(f"permute_{''.join(map(str, axes))}", lambda x, p=axes: x.permute(p).contiguous(), (32, 128, 64, 128))
_add("add_transposed", lambda x, y: x + y.t(), (4096, 8192), (8192, 4096))
_add("add_row", lambda x, y: x + y, (8192, 4096), (4096,))
_add("add_column", lambda x, y: x + y, (8192, 4096), (8192, 1))
_add("add_channel", lambda x, y: x * y[None, :, None, None], (64, 256, 56, 56), (256,))
_add("outer_sum", lambda x, y: x[:, None] + y[None], (8192,), (8191,))
_add("cat_rows", lambda x, y, z: torch.cat([x, y, z]), (2048, 4096), (4096, 4096), (1000, 4096))
_add("cat_columns", lambda x, y, z: torch.cat([x, y, z], 1), (8192, 1024), (8192, 2048), (8192, 1000))
_add("cat_channels", lambda x, y: torch.cat([x, y], 1), (32, 64, 112, 112), (32, 32, 112, 112))
_add("cat_many", lambda *x: torch.cat(x, -1), *[(8192, 128)] * 24)
_add("stack_many", lambda *x: torch.stack(x), *[(1024, 1024)] * 16)
_add("stack_last", lambda *x: torch.stack(x, -1), *[(2048, 2048)] * 4)
_add("chunk_glu", lambda x: F.glu(x, -1), (8192, 8192), grad=True)
_add("chunk_glu_channels", lambda x: F.glu(x, 1), (64, 512, 28, 28), grad=True)
_add(
    "rotary",
    lambda x, c, s: x * c + torch.cat([-x[..., 64:], x[..., :64]], -1) * s,
    (8, 32, 2048, 128),
    (2048, 128),
    (2048, 128),
)
_add("repeat", lambda x: x.repeat(4, 2), (2048, 2048))
_add("repeat_interleave", lambda x: x.repeat_interleave(4, 1), (8, 8, 2048, 128))
_add("expand_heads", lambda x: x[:, :, None].expand(-1, -1, 4, -1, -1).reshape(8, 32, 2048, 128), (8, 8, 2048, 128))
_add("tile", lambda x: torch.tile(x, (1, 3)), (4096, 2048))
_add("diff", lambda x: torch.diff(x), (4096, 8192))
_add("tril", torch.tril, (8192, 8192))
_add("triu_batch", lambda x: torch.triu(x, 1), (64, 1024, 1024))
_add("masked_fill", lambda x, m: x.masked_fill(m, -1e4), (64, 1024, 512), flags(64, 1024, 512), grad=True)
_add("where", torch.where, flags(4096, 8192), (4096, 8192), (4096, 8192))
_add("where_row", lambda m, x: torch.where(m, x, 0.0), flags(1, 8192), (4096, 8192))
_add("slice_columns", lambda x: x[:, 7:4003] * 2, (8192, 4096))
_add("every_second", lambda x: x[:, ::2].contiguous(), (8192, 8192))
_add("diagonal", lambda x: x.diagonal(dim1=1, dim2=2).contiguous(), (4096, 128, 128))
_add("kron", torch.kron, (64, 64), (64, 96))
_add("cross", lambda x, y: torch.linalg.cross(x, y), (6000000, 3), (6000000, 3))
_add("einsum_outer", lambda x, y: torch.einsum("bi,bj->bij", x, y), (64, 512), (64, 768))
_add("einsum_trace", lambda x: torch.einsum("bii->b", x), (1024, 256, 256))
_add("einsum_diag", lambda x, y: torch.einsum("bhi,bhi->bh", x, y), (64, 512, 768), (64, 512, 768))

_add("embedding", F.embedding, places(50257, 32, 1024), (50257, 768), grad=True)
_add("embedding_wide", F.embedding, places(32000, 8, 2048), (32000, 4096), grad=True)
_add("index_select", lambda x, i: x.index_select(0, i), (65536, 512), places(65536, 32768))
_add("index_select_columns", lambda x, i: x.index_select(1, i), (8192, 4096), places(4096, 2048))
_add("gather_rows", lambda x, i: x.gather(1, i), (4096, 8192), places(8192, 4096, 4096), grad=True)
_add("gather_columns", lambda x, i: x.gather(0, i), (4096, 8192), places(4096, 4096, 8192))
_add("take_along", lambda x, i: torch.take_along_dim(x, i, 1), (4096, 8192), places(8192, 4096, 1024))
_add("take", torch.take, (1 << 24,), places(1 << 24, 1 << 22))
_add("index_two", lambda x, i, j: x[i, j], (1024, 4096, 16), places(1024, 1 << 19), places(4096, 1 << 19))
_add("index_add", lambda x, i, y: x.index_add(0, i, y), (65536, 512), places(65536, 32768), (32768, 512), grad=True)
_add("index_add_few", lambda x, i, y: x.index_add(0, i, y), (128, 512), places(128, 65536), (65536, 512))
_add(
    "scatter_add",
    lambda x, i, y: x.scatter_add(1, i, y),
    (4096, 4096),
    places(4096, 4096, 4096),
    (4096, 4096),
    grad=True,
)
_add(
    "scatter_reduce",
    lambda x, i, y: x.scatter_reduce(1, i, y, "amax"),
    (4096, 4096),
    places(4096, 4096, 4096),
    (4096, 4096),
)
_add("scatter", lambda x, i: x.scatter(1, i, 1.0), (4096, 4096), places(4096, 4096, 64))
_add("one_hot", lambda i: F.one_hot(i, 1024), places(1024, 16384))
_add("bincount", lambda i: torch.bincount(i, minlength=1024), places(1024, 1 << 24))
_add("bucketize", lambda x, b: torch.bucketize(x, b.sort().values), (1 << 24,), (256,))
_add("searchsorted", lambda b, x: torch.searchsorted(b.sort(-1).values, x), (1024, 1024), (1024, 16384))
_add("histc", lambda x: torch.histc(x, 100, -1, 1), (1 << 24,))

SCANS: tuple[tuple[Shape, int], ...] = (
    ((4096, 4096), 1),
    ((256, 65536), 1),
    ((4096, 4096), 0),
    ((64, 512, 512), 1),
    ((1 << 24,), 0),
)
for s, d in SCANS:
    at = "x".join(map(str, s))
    for scan in (torch.cumsum, torch.cumprod, torch.logcumsumexp, torch.cummax):
        _add(f"{scan.__name__}_{at}_{d}", lambda x, f=scan, d=d: f(x, d), s, grad=scan is torch.cumsum)
for s in ((4096, 4096), (256, 65536)):
    at = "x".join(map(str, s))
    _add(f"sort_{at}", lambda x: x.sort(-1), s)
    _add(f"argsort_{at}", lambda x: x.argsort(-1), s)
    _add(f"topk_{at}", lambda x: x.topk(8, -1), s)
    _add(f"kthvalue_{at}", lambda x: x.kthvalue(7, -1), s)
    _add(f"median_{at}", lambda x: x.median(-1), s)
_add("topk_experts", lambda x: x.topk(2, -1), (262144, 64))
for name in ("sum", "mean", "amax", "prod", "std", "argmax", "norm"):
    _add(f"{name}_all", getattr(torch, name), (1 << 26,))
for counted in (torch.any, torch.all, torch.count_nonzero):
    _add(f"{counted.__name__}_rows", lambda m, f=counted: f(m, dim=-1), flags(8192, 8192))
    _add(f"{counted.__name__}_all", lambda m, f=counted: f(m), flags(8192, 8192))
_add("sum_int8", lambda x: x.sum(-1), Fill((8192, 8192), torch.int8, -5, 5))
_add("sum_bool", lambda x: x.sum(0), flags(8192, 8192))
_add("aminmax", torch.aminmax, (1 << 26,))
_add("sum_middle", lambda x: x.sum(1), (64, 512, 1024), grad=True)
_add("sum_outer_inner", lambda x: x.sum((0, 2)), (64, 512, 1024))
_add("std_mean", lambda x: torch.std_mean(x, (0, 2)), (64, 512, 1024))
_add("norm_1", lambda x: x.norm(p=1, dim=-1), (65536, 512))
_add("vector_norm_3", lambda x: torch.linalg.vector_norm(x, 3), (1 << 25,))
_add("cdist", torch.cdist, (4096, 64), (4096, 64))
_add("cdist_1", lambda x, y: torch.cdist(x, y, p=1), (2048, 64), (2048, 64))
_add("cov", torch.cov, (1024, 16384))
_add("corrcoef", torch.corrcoef, (1024, 16384))
_add("matvec", torch.mv, (8192, 8192), (8192,))
_add("addmv_t", lambda x, y: x.t() @ y, (8192, 8192), (8192,))
_add("dot", torch.dot, (1 << 25,), (1 << 25,))
_add("ger", torch.outer, (8192,), (4096,))

ELEMENTWISE = (
    "gelu",
    "silu",
    "relu",
    "mish",
    "softplus",
    "elu",
    "selu",
    "hardswish",
    "leaky_relu",
    "logsigmoid",
    "tanhshrink",
)
for name in ELEMENTWISE:
    _add(name, getattr(F, name), (4096, 8192), grad=True)
for name in ("erfinv", "digamma", "lgamma", "i0", "tan", "atan", "sinc", "exp2", "log1p", "frac", "round"):
    _add(name, getattr(torch, name), positive(4096, 8192))
_add("pow", torch.pow, positive(4096, 8192), positive(4096, 8192), grad=True)
_add("atan2", torch.atan2, (4096, 8192), (4096, 8192))
_add("remainder", torch.remainder, (4096, 8192), positive(4096, 8192))
_add("lerp", lambda x, y: torch.lerp(x, y, 0.3), (4096, 8192), (4096, 8192))
_add("addcmul", torch.addcmul, (4096, 8192), (4096, 8192), (4096, 8192))
_add("to_float", lambda x: x.float(), (4096, 8192))
_add("to_half", lambda x: x.half(), (4096, 8192))
_add("to_int", lambda x: (x * 100).to(torch.int32), (4096, 8192))
_add("to_bool", lambda x: x > 0, (4096, 8192))
_add("add_mixed", lambda x, y: x + y.float(), (4096, 8192), (4096, 8192))
_add("odd_sizes", lambda x, y: x * y + 1, (16777213,), (16777213,))
_add("misaligned", lambda x: x[1:] - x[:-1], (1 << 25,))
_add("int_arith", lambda x: (x * 3 + 7) % 1000 // 3, places(1 << 20, 1 << 24))
_add("bitwise", lambda x, y: (x & y) ^ (x << 3), places(1 << 20, 1 << 24), places(1 << 20, 1 << 24))
_add("polar", lambda r, a: torch.view_as_real(torch.polar(r.float(), a.float())), positive(1 << 23), (1 << 23,))

# Axes that memory does not run along, of three and four.
SEGMENTS, MIDDLE, FEATURES = (16, 21, 512, 512), (64, 512, 1024), (32, 96, 128, 128)
for name in ("softmax", "log_softmax", "logsumexp", "argmax", "amax", "var"):
    _add(f"{name}_segments", lambda x, f=name: getattr(torch, f)(x, 1), SEGMENTS, grad=name in ("softmax", "amax"))
for name in ("norm", "max", "argmin", "prod", "std", "cumsum", "cummax", "all", "median", "sort"):
    _add(f"{name}_middle", lambda x, f=name: getattr(torch, f)(x, dim=1), MIDDLE, grad=name in ("norm", "max", "std"))
_add("normalize_channels", lambda x: F.normalize(x, dim=1), FEATURES, grad=True)
_add("layer_norm_channels", lambda x, w: F.layer_norm(x.permute(0, 2, 3, 1), (96,), w).permute(0, 3, 1, 2), FEATURES,
     (96,), grad=True)  # fmt: skip
_add("sort_columns", lambda x: x.sort(0), (4096, 4096))
_add("topk_columns", lambda x: x.topk(8, 0), (4096, 4096))
_add("mode", lambda x: torch.mode(x), places(64, 65536, 64))
_add("quantile", lambda x: torch.quantile(x.float(), 0.9, dim=-1), (4096, 1024))
_add("roll_rows", lambda x: x.roll(1, 0), (8192, 4096))
_add("roll_columns", lambda x: x.roll(7, -1), (8192, 4096))
_add("flip_rows", lambda x: x.flip(0), (8192, 4096))
_add("prelu", F.prelu, FEATURES, (96,), grad=True)
_add("local_response", lambda x: F.local_response_norm(x, 5), FEATURES, grad=True)

# Losses of images and sequences, and with weights.
_add("cross_entropy_segments", F.cross_entropy, SEGMENTS, places(21, 16, 512, 512), grad=True)
_add(
    "nll_segments",
    lambda x, w, y: F.nll_loss(x, y, w.detach()),
    SEGMENTS,
    positive(21),
    places(21, 16, 512, 512),
    grad=True,
)
_add("cross_entropy_weights", lambda x, w, y: F.cross_entropy(x, y, w.detach(), label_smoothing=0.1, ignore_index=3),
     (8192, 32000), positive(32000), places(32000, 8192), grad=True)  # fmt: skip
_add("cross_entropy_soft", lambda x, y: F.cross_entropy(x, y.softmax(-1)), (16384, 1000), (16384, 1000), grad=True)
_add("ctc", lambda x, y: F.ctc_loss(x.float().log_softmax(-1), y, (512,) * 32, (64,) * 32), (512, 32, 1024),
     Fill((32, 64), torch.int64, 1, 1023))  # fmt: skip
_add("cosine_embedding", lambda x, y, s: F.cosine_embedding_loss(x, y, s.sign()), (65536, 256), (65536, 256), (65536,),
     grad=True)  # fmt: skip
_add("multi_margin", F.multi_margin_loss, (16384, 1000), places(1000, 16384))

# Places that data picks.
for mode in ("sum", "mean", "max"):
    _add(f"embedding_bag_{mode}", lambda i, w, m=mode: F.embedding_bag(i, w, mode=m), places(100000, 16384, 32),
         (100000, 128), grad=mode != "max")  # fmt: skip
_add("index_put_add", lambda x, i, y: x.index_put((i,), y, accumulate=True), (65536, 256), places(65536, 131072),
     (131072, 256), grad=True)  # fmt: skip
_add("index_put_two", lambda x, i, j, y: x.index_put((i, j), y, accumulate=True), (4096, 4096),
     places(4096, 1 << 20), places(4096, 1 << 20), (1 << 20,))  # fmt: skip
_add("edges", lambda x, i, j: x[i] - x[j], (32768, 64), places(32768, 1 << 19), places(32768, 1 << 19), grad=True)
_add("messages", lambda x, i, y: x.scatter_add(0, i[:, None].expand(-1, 64), y), (32768, 64), places(32768, 1 << 19),
     (1 << 19, 64), grad=True)  # fmt: skip
for mode in ("mean", "amax"):
    _add(f"messages_{mode}", lambda x, i, y, m=mode: x.index_reduce(0, i, y, m), (32768, 64), places(32768, 1 << 18),
         (1 << 18, 64))  # fmt: skip

# Images, the rarer ways.
_add("grid_sample_3d", lambda x, g: F.grid_sample(x, g, align_corners=False), (4, 16, 32, 64, 64), (4, 32, 64, 64, 3),
     grad=True)  # fmt: skip
_add("max_unpool", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), FEATURES)
_add("lp_pool", lambda x: F.lp_pool2d(x, 2, 2), FEATURES, grad=True)
_add("avg_pool3d_grad", lambda x: F.avg_pool3d(x, 2), (4, 64, 16, 112, 112), grad=True)
_add("adaptive_max_grad", lambda x: F.adaptive_max_pool2d(x, (7, 7)), FEATURES, grad=True)
_add("unfold_grad", lambda x: F.unfold(x, 3, padding=1), (16, 64, 96, 96), grad=True)
_add("up_align", lambda x: F.interpolate(x, size=(256, 256), mode="bilinear", align_corners=True), FEATURES, grad=True)
_add("down_antialias", lambda x: F.interpolate(x, size=(80, 80), mode="bilinear", antialias=True), FEATURES, grad=True)
_add("depthwise_7", lambda x, w: F.conv2d(x, w, padding=3, groups=96), FEATURES, (96, 1, 7, 7), grad=True)
_add("depthwise_1d", lambda x, w: F.conv1d(x, w, padding=3, groups=2048), (8, 2048, 4096), (2048, 1, 4), grad=True)

# Small problems, many of them; complex numbers; transforms.
_add("bmm_4", torch.bmm, (1 << 18, 4, 4), (1 << 18, 4, 4), grad=True)
_add("bmm_16", torch.bmm, (1 << 14, 16, 16), (1 << 14, 16, 64), grad=True)
for name, solved in (
    ("inverse", torch.linalg.inv),
    ("determinant", torch.linalg.det),
    ("cholesky", lambda x: torch.linalg.cholesky(x @ x.mT + 0.1 * torch.eye(32, device=x.device))),
    ("solve", lambda x: torch.linalg.solve(x, x.flip(-1))),
):
    _add(name, lambda x, f=solved: f(x.float()), (8192, 32, 32))
_add("cdist_points", torch.cdist, (16, 2048, 3), (16, 2048, 3), grad=True)
_add("rfft", lambda x: torch.view_as_real(torch.fft.rfft(x.float())), (4096, 4096))
_add("fft_filter", lambda x, w: torch.fft.irfft(torch.fft.rfft(x.float()) * torch.fft.rfft(w.float())), (4096, 4096),
     (4096,))  # fmt: skip
_add(
    "complex_product",
    lambda x, y: torch.view_as_real(torch.view_as_complex(x.float()) * torch.view_as_complex(y.float())),
    (4096, 2048, 2),
    (2048, 2),
    grad=True,
)


def by_hand(name: str) -> Iterator[Case]:
    """A case in both types, and its gradients."""
    call, given, grad = CASES[name]
    for dtype in DTYPES:
        fills = tuple(_fill(x, dtype) for x in given)
        told, kind = ", ".join(str(list(f.shape)) for f in fills), str(dtype).removeprefix("torch.")
        yield Case(name, kind, "by hand", told, call, fills)
        if grad:
            yield _gradients(name, kind, told, call, fills)


def _fill(x: Any, dtype: torch.dtype) -> Fill:
    if isinstance(x, Fill):
        return Fill(x.shape, dtype if x.dtype.is_floating_point else x.dtype, x.low, x.high, x.strided)
    if x and x[0] == "positive":
        return Fill(x[1:], dtype, 0.1, 1.1)
    return Fill(x, dtype, -1.0, 1.0)


def _gradients(name: str, dtype: str, told: str, call: Callable[..., Any], fills: Sequence[Fill]) -> Case:
    """Those of all arguments that have one, given those of the first result."""
    wanted = [k for k, f in enumerate(fills) if f.dtype.is_floating_point]
    out = _first(call(*(f.make("meta") for f in fills)))
    count = len(fills)

    def gradients(*given: torch.Tensor) -> Any:
        with torch.enable_grad():
            mine = [x.detach().requires_grad_() if k in wanted else x for k, x in enumerate(given[:count])]
            found = torch.autograd.grad(_first(call(*mine)), [mine[k] for k in wanted], given[count], allow_unused=True)
        return [x for x in found if x is not None]

    more = Fill(tuple(out.shape), out.dtype, 0.5, 1.5)
    return Case(name, dtype, "by hand, backward", told, gradients, (*fills, more))


def _first(found: Any) -> Any:
    return found[0] if isinstance(found, tuple) else found
