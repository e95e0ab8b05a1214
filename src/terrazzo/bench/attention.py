"""Attention, forward and backward, under masks, over caches, in layers and losses, beside the kernels PyTorch has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from terrazzo.bench import gpu_suites
from terrazzo.bench.gpu_suites import MODELS, Case, Made
from terrazzo.options import Options

Fn = Callable[..., Any]

SHAPES = (
    # batch, heads, heads of keys, tokens
    (4, 32, 32, 2048),
    (1, 32, 32, 8192),
    (16, 16, 16, 1024),
    (16, 12, 12, 512),
    (1, 32, 8, 16384),
    (2, 40, 8, 4096),
)
HEADS = (64, 128, 256)
ODD = tuple((4, 16, 16, n, d) for d in (80, 96, 192) for n in (1000, 4097))
LENGTHS = (4096, 8192)
"""Tokens of further training steps, whose memory is compared with that of the longest shape."""
DECODE = (
    # batch, heads, heads of keys, keys
    (16, 32, 8, 8192),
    (1, 32, 8, 65536),
    (64, 8, 1, 4096),
)
PAGE = 64
"""Keys of a page."""
MASKED = {"window": (1, 16, 16384), "documents": (1, 32, 8192), "scores": (2, 32, 4096), "bias": (4, 32, 2048)}
"""Batch, heads and tokens of what is masked, or has its scores changed."""
WINDOW = 1024
DOCUMENTS = 8
LAYERS = (32, 128, 512, 2048, 8192)
LONGEST = {"TinyLlama": 2048}
"""The most tokens that a model has positions for, where that is less."""
LOSS = (8192, 4096, 128256)
"""Rows, width and words of a cross-entropy with its projection."""


def attention() -> tuple[Case, ...]:
    """All of it, what is asked for most first."""
    return (*decode(), *masks(), *backward(), *forward(), loss(), *layers())


def forward() -> tuple[Case, ...]:
    """Heads of three sizes, causal and not, in bf16 and then in f16; and odd sizes."""
    both = (False, True)
    usual = [(*s, d) for d in HEADS for s in SHAPES]
    return tuple(
        _attention(*s, causal, dtype, group)
        for group, shapes, dtype in (("forward", usual, "bf16"), ("odd", ODD, "bf16"), ("forward", usual, "f16"))
        for s in shapes
        for causal in both
    )


def backward() -> tuple[Case, ...]:
    """Forward and backward, by `torch.compile`."""
    usual = [(*s, d, causal) for d in (128, 64) for s in SHAPES for causal in (False, True)]
    longer = [(1, 32, 8, n, 128, True) for n in LENGTHS]
    wide = [(*SHAPES[0], 256, causal) for causal in (False, True)]
    return tuple(_attention(*s, "bf16", "backward") for s in (*usual, *longer, *wide))


def _attention(b: int, h: int, kv: int, n: int, d: int, causal: bool, dtype: str, group: str) -> Case:
    from torch.nn import functional as f

    training = group == "backward"

    def attend(q: Any, k: Any, v: Any) -> Any:
        return f.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=h != kv)

    def given() -> tuple[Any, ...]:
        shapes = ((b, h, n, d), (b, kv, n, d), (b, kv, n, d), (b, h, n, d))[: 4 if training else 3]
        return tuple(gpu_suites.normal(s, dtype) for s in shapes)

    def make() -> Made:
        fn = step(attend) if training else attend
        return fn, given, by_heads(fn)

    def peers(_: Fn) -> dict[str, Fn]:
        found = {"eager": attend, "cudnn": _on("CUDNN_ATTENTION", attend), "flash": _on("FLASH_ATTENTION", attend)}
        return {name: step(x) for name, x in found.items()} if training else found

    def ours(options: Options) -> Fn:
        return step(_compiled(attend, options))

    name = f"{group} {b} x {_heads(h, kv)} heads, {n} tokens, {d}{', causal' if causal else ''}"
    moved, work = 4 * b * n * d * (h + kv), 4.0 * b * h * n * n * d * (0.5 if causal else 1)
    if training:  # q, k, v and the gradient of the result are read, three written; two products, and five more
        moved, work = 2 * b * n * d * (3 * h + 4 * kv), 3.5 * work
    return Case(name, dtype, make, moved, work, group=group, peers=peers, ours=ours if training else None)


def decode() -> tuple[Case, ...]:
    """One query against many keys: all of a cache, so many as a tensor says, and those on the pages of a table."""
    return tuple(case for kind in ("whole", "lengths", "pages") for case in (_decode(*s, kind) for s in DECODE))


def _decode(b: int, h: int, kv: int, n: int, kind: str, d: int = 128) -> Case:
    import torch
    from torch.nn import functional as f

    lengths = [n - i * n // (2 * b) for i in range(b)]  # from all of the cache to half of it

    def whole(q: Any, k: Any, v: Any) -> Any:
        return f.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def counted(q: Any, k: Any, v: Any, count: Any) -> Any:
        seen = torch.arange(n, device=q.device) < count
        return f.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)

    def gathered(x: Any, table: Any) -> Any:
        return x[table].flatten(1, 2).transpose(1, 2)

    def paged(q: Any, k: Any, v: Any, count: Any, table: Any) -> Any:
        return counted(q, gathered(k, table), gathered(v, table), count)

    def exactly(q: Any, k: Any, v: Any, count: Any, table: Any) -> Any:
        return by_heads(counted)(q, gathered(k, table), gathered(v, table), count)

    def given() -> tuple[Any, ...]:
        cache = (b * n // PAGE, PAGE, kv, d) if kind == "pages" else (b, kv, n, d)
        q, k, v = (gpu_suites.normal(s, "bf16") for s in ((b, h, 1, d), cache, cache))
        count = torch.tensor(lengths, device=q.device).view(b, 1, 1, 1)
        table = torch.randperm(b * n // PAGE).view(b, -1).to(q.device)
        return (q, k, v, count, table)[: {"whole": 3, "lengths": 4, "pages": 5}[kind]]

    kinds: dict[str, Fn] = {"whole": whole, "lengths": counted, "pages": paged}
    fn = kinds[kind]

    def peers(_: Fn) -> dict[str, Fn]:
        if kind == "whole":
            return {"eager": fn, "cudnn": _on("CUDNN_ATTENTION", fn), "flash": _on("FLASH_ATTENTION", fn)}
        found = _beside_compile(fn)
        if kind == "lengths":
            found["flex"] = _flexible(n, 1, lengths=lengths)
        return found

    told = {"whole": "", "lengths": ", lengths on the device", "pages": f", in pages of {PAGE}"}[kind]
    name = f"decode {b} x {_heads(h, kv)} heads, 1 against {n}{told}"
    keys = b * n if kind == "whole" else sum(lengths)
    make = lambda: (fn, given, exactly if kind == "pages" else by_heads(fn))  # noqa: E731
    return Case(name, "bf16", make, 4 * d * (b * h + kv * keys), group="decode", peers=peers)


def masks() -> tuple[Case, ...]:
    """Masks that places decide, or a tensor does, and scores that are changed; beside FlexAttention."""
    import torch
    from torch.nn import functional as f

    def places(q: Any) -> tuple[Any, Any]:
        at = torch.arange(q.shape[-2], device=q.device)
        return at[:, None], at

    def window(q: Any, k: Any, v: Any) -> Any:
        i, j = places(q)
        return f.scaled_dot_product_attention(q, k, v, attn_mask=(j <= i) & (i - j < WINDOW))

    def documents(q: Any, k: Any, v: Any) -> Any:
        i, j = places(q)
        size = q.shape[-2] // DOCUMENTS
        return f.scaled_dot_product_attention(q, k, v, attn_mask=i // size == j // size)

    def numbered(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return f.scaled_dot_product_attention(q, k, v, attn_mask=ids[:, None] == ids)

    def capped(q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return torch.softmax(30 * torch.tanh(scores / 30), -1) @ v

    def alibi(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        i, j = places(q)
        mask = torch.where(j <= i, slopes * (j - i), -torch.inf).to(q.dtype)
        return f.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def biased(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return f.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    size = MASKED["documents"][-1] // DOCUMENTS
    heads = MASKED["scores"][1]
    slopes = lambda: (2 ** (-8 * (torch.arange(heads) + 1) / heads)).view(1, -1, 1, 1)  # noqa: E731
    ids = lambda: torch.arange(DOCUMENTS).repeat_interleave(size)  # noqa: E731
    bias = lambda: gpu_suites.normal((1, MASKED["bias"][1], *2 * MASKED["bias"][2:]), "bf16")  # noqa: E731

    def cap(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return 30 * torch.tanh(s / 30)

    def sloped(slopes: Any) -> Fn:
        return lambda s, b, h, i, j: s + slopes[0, h, 0, 0] * (j - i)

    def added(bias: Any) -> Fn:
        return lambda s, b, h, i, j: s + bias[0, h, i, j]

    causal = lambda b, h, i, j: j <= i  # noqa: E731
    n = MASKED["window"][-1]
    return (
        _masked(f"a window of {WINDOW}", "window", window, WINDOW / n,
                lambda b, h, i, j: (j <= i) & (i - j < WINDOW)),
        _masked(f"{DOCUMENTS} documents", "documents", documents, 1 / DOCUMENTS,
                lambda b, h, i, j: i // size == j // size),
        _masked(f"{DOCUMENTS} documents by numbers in memory", "documents", numbered, 1 / DOCUMENTS,
                lambda b, h, i, j: i // size == j // size, more=ids),
        _masked("scores are capped", "scores", capped, 1.0, score=lambda: cap),
        _masked("ALiBi, causal", "scores", alibi, 0.5, causal, sloped, slopes),
        _masked("a bias", "bias", biased, 1.0, None, added, bias),
    )  # fmt: skip


def _masked(
    told: str, kind: str, fn: Fn, seen: float, mask: Fn | None = None, score: Fn | None = None, more: Fn | None = None
) -> Case:
    """A case: FlexAttention's mask and change of scores, made of what is given besides q, k and v."""
    (b, h, n), d = MASKED[kind], 128

    def given() -> tuple[Any, ...]:
        q, k, v = (gpu_suites.normal((b, h, n, d), "bf16") for _ in range(3))
        return (q, k, v, more().to(q.device)) if more else (q, k, v)

    def peers(_: Fn) -> dict[str, Fn]:
        return {"eager": fn, "flex": _flexible(n, n, mask, score=score)}

    extra = 2 * h * n * n if kind == "bias" else 0
    make = lambda: (fn, given, by_heads(fn))  # noqa: E731
    name = f"masks {told}, {b} x {h} heads, {n} tokens"
    moved, work = 8 * b * h * n * d + extra, 4.0 * b * h * n * n * d * seen
    return Case(name, "bf16", make, moved, work, group="masks", peers=peers)


def loss() -> Case:
    """Cross-entropy of a projection to many words, beside torch.compile."""
    from torch.nn import functional as f

    rows, width, words = LOSS

    def entropy(x: Any, w: Any, wanted: Any) -> Any:
        return f.cross_entropy(f.linear(x, w).float(), wanted)

    def exact(x: Any, w: Any, wanted: Any) -> Any:
        return f.cross_entropy(f.linear(x.double(), w.double()), wanted)

    def given() -> tuple[Any, ...]:
        import torch

        x, w = gpu_suites.normal((rows, width), "bf16"), gpu_suites.normal((words, width), "bf16") * width**-0.5
        return x, w, torch.randint(0, words, (rows,), device=x.device)

    name = f"loss of {rows} rows of {width}, {words} words"
    moved, work = 2 * width * (rows + words) + 8 * rows, 2.0 * rows * width * words
    make = lambda: (entropy, given, exact)  # noqa: E731
    return Case(name, "bf16", make, moved, work, group="loss", peers=_beside_compile)


def layers() -> tuple[Case, ...]:
    """Decoder layers of three models, beside torch.compile."""
    models = {**MODELS, "Llama-3-8B": "meta-llama/Meta-Llama-3-8B"}
    sizes = [(m, name, n) for m, name in models.items() for n in LAYERS if n <= LONGEST.get(m, n)]
    found = [gpu_suites.layer(m, name, n, "bf16") for m, name, n in sizes]
    return tuple(replace(c, group="layers", peers=_beside_compile) for c in found)


def _beside_compile(fn: Fn) -> dict[str, Fn]:
    import torch

    return {"eager": fn, "compile": torch.compile(fn, dynamic=False)}


def _heads(h: int, kv: int) -> str:
    return str(h) if h == kv else f"{h}/{kv}"


def _on(kernel: str, fn: Fn) -> Fn:
    """`fn` with one of PyTorch's kernels for attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def call(*args: Any) -> Any:
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            return fn(*args)

    return call


def _flexible(n: int, queries: int, mask: Fn | None = None, lengths: Sequence[int] = (), score: Fn | None = None) -> Fn:
    """FlexAttention by torch.compile, the blocks of its mask found once: that of a batch of `lengths`, where these are
    given. `score` is given what is besides q, k and v.
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    @cache
    def compiled(device: Any) -> Fn:
        count = torch.tensor(lengths, device=device)
        seen = (lambda b, h, i, j: j < count[b]) if lengths else mask
        blocks = create_block_mask(seen, len(lengths) or None, None, queries, n, device=device) if seen else None

        def call(q: Any, k: Any, v: Any, *rest: Any) -> Any:
            changed = score(*rest) if score else None
            return flex_attention(q, k, v, score_mod=changed, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1])

        return torch.compile(call, dynamic=False)  # type: ignore[no-any-return]

    return lambda q, *rest: compiled(q.device)(q, *rest)


def step(forward: Fn) -> Fn:
    """A training step: the gradients of all but the last argument, which is the gradient of the result."""

    def gradients(*args: Any) -> tuple[Any, ...]:
        import torch

        *given, gradient = args
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in given]
            return tuple(torch.autograd.grad(forward(*leaves), leaves, gradient))

    return gradients


def _compiled(fn: Fn, options: Options) -> Fn:
    import torch

    given = {"target": options.target, "libraries": options.libraries, "cache_dir": options.cache_dir, "strict": True}
    compiled: Fn = torch.compile(fn, backend="terrazzo", dynamic=False, options=given)
    return compiled


def by_heads(fn: Fn) -> Fn:
    """`fn` of q, k, v and others in float64, a batch and a head of keys at a time: their scores need little room."""

    def exact(*args: Any) -> Any:
        import torch

        batch, heads = args[1].shape[:2]
        rows = []
        for b in range(batch):
            parts = [fn(*(_wide(_part(x, b, h, heads)) for x in args)) for h in range(heads)]
            rows.append([torch.cat(x, 1) for x in zip(*map(_several, parts), strict=True)])
        found = tuple(torch.cat(x) for x in zip(*rows, strict=True))
        return found if isinstance(parts[0], tuple) else found[0]

    return exact


def _several(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _wide(x: Any) -> Any:
    return x.double() if x.is_floating_point() else x


def _part(x: Any, b: int, h: int, heads: int) -> Any:
    """What a batch and a head of keys need of a tensor; of one that has no such axes, all."""
    if x.ndim < 4:
        return x
    if x.shape[0] > 1:
        x = x[b : b + 1]
    share = x.shape[1] // heads
    return x[:, h * share : (h + 1) * share] if share else x
