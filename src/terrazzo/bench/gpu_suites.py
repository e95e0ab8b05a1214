"""What is measured on a GPU. A case makes a function, sets of random normal inputs for it, and the same function in
float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.options import Options

Made = tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], Callable[..., Any]]
"""What is called, a maker of its inputs, and how the exact results come from such inputs."""

ROWS = ((32, 2048), (512, 3584), (4096, 4096), (16384, 2048), (16384, 8192), (2048, 8191))
DTYPES = ("f32", "bf16")
LINEAR = {
    # m, k, n: the two layers of the source that are shown everywhere, its other ones, and squares
    "Linear(3584, 3584) on [512, 3584]": (512, 3584, 3584),
    "Linear(3584, 512) on [32, 3584]": (32, 3584, 512),
    "Linear(3584, 3584) on [32, 3584]": (32, 3584, 3584),
    "Linear(3584, 18944) on [32, 3584]": (32, 3584, 18944),
    "Linear(18944, 3584) on [32, 18944]": (32, 18944, 3584),
    "Linear(3584, 18944) on [512, 3584]": (512, 3584, 18944),
    "Linear(18944, 3584) on [512, 18944]": (512, 18944, 3584),
    "Linear(2048, 5632) on [128, 2048]": (128, 2048, 5632),
    "Linear(5632, 2048) on [128, 5632]": (128, 5632, 2048),
    "1024 cubed": (1024, 1024, 1024),
    "4096 cubed": (4096, 4096, 4096),
}
CONVOLUTION = (
    # images, channels, filters, size, taps, stride, channels last
    (32, 64, 64, 56, 3, 1, True),
    (32, 128, 128, 28, 3, 1, True),
    (32, 256, 256, 14, 3, 1, True),
    (32, 512, 512, 7, 3, 1, True),
    (256, 256, 256, 14, 3, 1, True),
    (32, 256, 64, 56, 1, 1, True),
    (32, 64, 256, 56, 1, 1, True),
    (32, 64, 128, 56, 3, 2, True),
    (32, 128, 128, 28, 3, 1, False),
)
LAYERS = {
    ("TinyLlama", 32): "1.31x",
    ("TinyLlama", 128): "1.18x",
    ("TinyLlama", 512): "0.65x",
    ("Qwen2.5-7B", 32): "1.26x",
    ("Qwen2.5-7B", 128): "1.09x",
    ("Qwen2.5-7B", 512): "0.80x",
}
"""What the article of `bench.article` says of a decoder layer, by model and tokens, in float32."""
MODELS = {"TinyLlama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "Qwen2.5-7B": "Qwen/Qwen2.5-7B"}


@dataclass(frozen=True)
class Case:
    """`bytes` and `operations` are the least any implementation moves and computes in one call, for the roofline.

    `said` is the ratio to eager that somebody else published for it, on another machine. A `schedule` is pinned. What
    depends on the inputs `frozen` alone is computed before anything is timed. Cases of a `group` are summed up
    together. `peers` makes those that one has of its own, in place of what the command names; `ours` is how it is
    compiled, where not by `terrazzo.compile`.
    """

    name: str
    dtype: str
    make: Callable[[], Made]
    bytes: int
    operations: float = 0.0
    said: str = ""
    schedule: str = ""
    frozen: tuple[str, ...] = ()
    group: str = ""
    peers: Callable[[Callable[..., Any]], Mapping[str, Callable[..., Any]]] | None = None
    ours: Callable[[Options], Callable[..., Any]] | None = None


def pointwise() -> tuple[Case, ...]:
    """GELU, and SiLU of one times the other."""
    from torch.nn import functional as f

    def gelu(x: Any) -> Any:
        return f.gelu(x)

    def silu_mul(x: Any, y: Any) -> Any:
        return f.silu(x) * y

    return tuple(
        _rows(name, fn, r, w, dtype, tensors, 0)
        for dtype in DTYPES
        for name, fn, tensors in (("gelu", gelu, 1), ("silu * up", silu_mul, 2))
        for r, w in ROWS
    )


def reduction() -> tuple[Case, ...]:
    """Norms and softmax over rows."""
    import torch
    from torch.nn import functional as f

    def rms_norm(x: Any, w: Any) -> Any:
        return f.rms_norm(x, (x.shape[-1],), w)

    def layer_norm(x: Any, w: Any, b: Any) -> Any:
        return f.layer_norm(x, (x.shape[-1],), w, b)

    def softmax(x: Any) -> Any:
        return torch.softmax(x, -1)

    def residual_norm(x: Any, y: Any, w: Any) -> Any:
        return f.rms_norm(x + y, (x.shape[-1],), w)

    kinds = (
        ("RMS norm", rms_norm, 1, 1),
        ("layer norm", layer_norm, 1, 2),
        ("softmax", softmax, 1, 0),
        ("residual + norm", residual_norm, 2, 1),
    )
    return tuple(_rows(name, fn, r, w, dtype, t, v) for dtype in DTYPES for name, fn, t, v in kinds for r, w in ROWS)


def _rows(name: str, fn: Any, rows: int, width: int, dtype: str, tensors: int, vectors: int) -> Case:
    def make() -> Made:
        shapes = [(rows, width)] * tensors + [(width,)] * vectors
        return fn, lambda: tuple(normal(s, dtype) for s in shapes), lambda *a: fn(*(x.double() for x in a))

    size = 4 if dtype == "f32" else 2
    return Case(f"{name} {rows} x {width}", dtype, make, size * ((tensors + 1) * rows * width + vectors * width))


def gemm() -> tuple[Case, ...]:
    """Linear layers without bias; f32 without tf32."""
    return tuple(_linear(name, *shape, dtype) for dtype in DTYPES for name, shape in LINEAR.items())


def _linear(name: str, m: int, k: int, n: int, dtype: str) -> Case:
    from torch.nn import functional as f

    def make() -> Made:
        return (
            f.linear,
            lambda: (normal((m, k), dtype), normal((n, k), dtype)),
            lambda x, w: f.linear(x.double(), w.double()),
        )

    size = 4 if dtype == "f32" else 2
    return Case(name, dtype, make, size * (m * k + n * k + m * n), 2.0 * m * n * k)


def convolution() -> tuple[Case, ...]:
    """Convolutions of images in bf16, with a bias and ReLU."""
    import torch
    from torch.nn import functional as f

    def case(n: int, c: int, k: int, size: int, taps: int, stride: int, last: bool) -> Case:
        def convolve(x: Any, w: Any, b: Any) -> Any:
            return f.relu(f.conv2d(x, w, b, stride=stride, padding=taps // 2))

        def given() -> tuple[Any, ...]:
            layout = torch.channels_last if last else torch.contiguous_format
            x, w = normal((n, c, size, size), "bf16"), normal((k, c, taps, taps), "bf16")
            return x.to(memory_format=layout), w.to(memory_format=layout), normal((k,), "bf16")

        after = -(-size // stride)
        name = convolution_name(n, c, k, size, taps, stride, last)
        moved = 2 * (n * c * size * size + k * c * taps * taps + k + n * k * after * after)
        work = 2.0 * n * after * after * k * c * taps * taps
        return Case(name, "bf16", lambda: (convolve, given, lambda *a: convolve(*(x.double() for x in a))), moved, work)

    return tuple(case(*shape) for shape in CONVOLUTION)


def convolution_name(n: int, c: int, k: int, size: int, taps: int, stride: int, last: bool) -> str:
    """What a convolution of `n` images is called."""
    name = f"{c} -> {k}, {n} x {size} x {size}, {taps} x {taps}"
    return f"{name}{f', every {stride}' if stride > 1 else ''}{'' if last else ', channels first'}"


def block() -> tuple[Case, ...]:
    """A decoder layer with random weights."""
    found = [(m, n, length, dtype) for dtype in DTYPES for m, n in MODELS.items() for length in (32, 128, 512)]
    return tuple(replace(layer(*x), said=LAYERS[x[0], x[2]] if x[3] == "f32" else "") for x in found)


def layer(model: str, name: str, length: int, dtype: str) -> Case:
    """A decoder layer of a model as a function of its hidden states; `name` is what Hugging Face calls it."""

    def make() -> Made:
        import torch
        from torch.utils import _pytree as pytree

        from terrazzo.front import huggingface

        module, args, kwargs = huggingface.load(name, layer=0, seq_len=length, dtype=dtype, random_weights=True)
        module = module.cuda().eval()
        (hidden, *rest), named = pytree.tree_map_only(torch.Tensor, lambda t: t.cuda(), (args, kwargs))

        class Layer(torch.nn.Module):  # type: ignore[misc]
            """The layer as a function of the hidden states alone."""

            def __init__(self, layer: Any, others: Any) -> None:
                super().__init__()
                self.layer = layer
                leaves, self.tree = pytree.tree_flatten(others)
                self.leaves = [x for x in leaves if not isinstance(x, torch.Tensor)]
                self.places = [isinstance(x, torch.Tensor) for x in leaves]
                for k, x in enumerate(x for x in leaves if isinstance(x, torch.Tensor)):
                    self.register_buffer(f"other{k}", x)

            def forward(self, x: Any) -> Any:
                plain, tensors = iter(self.leaves), iter(self.buffers(recurse=False))
                rest, named = pytree.tree_unflatten([next(tensors if t else plain) for t in self.places], self.tree)
                return self.layer(x, *rest, **named)

        def exact(x: Any) -> Any:
            wide = pytree.tree_map_only(
                torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, (rest, named)
            )
            return Layer(copy.deepcopy(module).double(), wide)(x.double())

        return Layer(module, (rest, named)), lambda: (torch.randn_like(hidden),), exact

    return Case(f"{model} layer, {length} tokens", dtype, make, 0)


def normal(shape: tuple[int, ...], dtype: str) -> Any:
    """Random normal numbers on the GPU."""
    import torch

    from terrazzo.ir.torch_types import to_torch_dtype
    from terrazzo.ir.types import DTYPES as TYPES

    return torch.randn(shape, device="cuda").to(to_torch_dtype(TYPES[dtype]))
