"""All that was measured on a GPU in one table: a row for each kind of program and type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from terrazzo.bench.gpu_report import mean
from terrazzo.bench.programs import report as programs

HEAD = ("what", "type", "GPU", "cases", "the fastest of", "geometric mean", "least")

KINDS = {
    ("squares", ""): "square products, 512 to 16384",
    ("projections", ""): "projections of decoder models, 1 to 8192 rows",
    ("odd", ""): "products of odd sizes, in any layout",
    ("batched", ""): "batched products",
    ("fp32", ""): "products in float32, as exact as float32",
    ("fp32-frozen", ""): "the same with frozen weights",
    ("fused", ""): "products with what surrounds them",
    ("convolution", ""): "convolutions with bias and ReLU",
    ("gradients", "image"): "gradients of convolutions' images",
    ("gradients", "weights"): "gradients of convolutions' weights",
    ("attention", "forward"): "attention, forward",
    ("attention", "odd"): "attention, heads of 80, 96 and 192",
    ("attention", "backward"): "attention, forward and backward",
    ("attention", "masks"): "attention under masks, with a bias or capped scores",
    ("attention", "decode"): "attention of one token against a cache",
    ("attention", "loss"): "cross-entropy with its projection",
    ("pointwise", ""): "pointwise operations",
    ("reduction", ""): "norms and softmax",
    ("attention", "layers"): "decoder layers, 32 to 8192 tokens",
    ("block", ""): "decoder layers, 32 to 512 tokens",
    ("programs", ""): "model programs and training steps",
}
"""What the groups of suites are, in the order in which they are shown."""

PEERS = {
    "eager": "PyTorch",
    "compile": "torch.compile",
    "cudnn": "cuDNN",
    "flash": "FlashAttention",
    "flex": "FlexAttention",
}


def overview(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A header, and for each kind and type how many times as fast ours is as the fastest peer of each case."""
    return [
        HEAD,
        *(
            row
            for (suite, group), title in KINDS.items()
            for record in records
            if record.get("suite") == suite and "gpu" in record.get("meta", {})
            for row in _rows(title, record["meta"]["gpu"].split()[1], _cases(record, group))
        ),
    ]


def _cases(record: Mapping[str, Any], group: str) -> list[Mapping[str, Any]]:
    """The cases of a group that were measured, and right."""
    cases = record["cases"]
    if record["suite"] == "programs":
        return [c for c in cases if not programs.fails(c)]
    return [c for c in cases if c["us"] and not c["problem"] and group in ("", c.get("group"))]


def _rows(title: str, gpu: str, cases: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for dtype in dict.fromkeys(c["dtype"] for c in cases):
        times = [c["us"] for c in cases if c["dtype"] == dtype]
        named = {name for us in times for name in us}
        peers = ", ".join(told for name, told in PEERS.items() if name in named)
        ratios = [min(t for name, t in us.items() if name != "terrazzo") / us["terrazzo"] for us in times]
        yield title, dtype, gpu, str(len(times)), peers, f"**{mean(ratios):.2f}**", f"{min(ratios):.2f}"
