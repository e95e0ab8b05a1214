"""Bags of rows of a table (`embedding_bag`), all of one length, on a GPU: rows that are picked and added up, as rules
know them. PyTorch's kernel has a thread for an element of a result, which reads an element of a row after another, and
nothing joins it.
"""

from __future__ import annotations

from typing import Any


def embedding_bag(
    input: Any, weight: Any, offsets: Any = None, max_norm: Any = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Any = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Any:  # fmt: skip
    """Sums or means of weight[input[i, :]], in 32 bits at least, less what is padding; a mean of padding alone is 0.
    The rest is PyTorch's: bags that begin where data says, their maxima, what writes to the table, and gradients: those
    of the rows would be stored, as often as rows are read.
    """
    import torch

    by = per_sample_weights
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (weight, by) if x is not None)
    whole = input.dim() == 2 and offsets is None and input.shape[1] > 0 and max_norm is None
    known = (mode == "mean" and by is None) or (mode == "sum" and (by is None or by.shape == input.shape))
    if trains or not whole or not known:
        return torch.nn.functional.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, by, include_last_offset,
            padding_idx,
        )  # fmt: skip
    wide = torch.promote_types(weight.dtype, torch.float32)
    rows = torch.nn.functional.embedding(input, weight).to(wide)
    if by is not None:
        rows = rows * by.to(wide).unsqueeze(-1)
    if padding_idx is None:
        return (rows.mean(1) if mode == "mean" else rows.sum(1)).to(weight.dtype)
    kept = input != padding_idx % weight.shape[0]
    total = torch.where(kept.unsqueeze(-1), rows, 0).sum(1)
    if mode == "mean":
        total = total / kept.sum(1, keepdim=True).clamp_min(1)
    return total.to(weight.dtype)
