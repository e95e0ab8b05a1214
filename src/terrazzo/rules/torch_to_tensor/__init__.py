"""Torch IR to Tensor IR: each ATen op as a composition of the four primitives."""

from terrazzo.rules.torch_to_tensor import contraction, creation, indexing, loss, norm, pointwise, pooling, reduction, scan, view

RULES = (
    *pointwise.RULES,
    *creation.RULES,
    *view.RULES,
    *indexing.RULES,
    *reduction.RULES,
    *scan.RULES,
    *contraction.RULES,
    *norm.RULES,
    *pooling.RULES,
    *loss.RULES,
)
