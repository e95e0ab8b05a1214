"""Torch IR to Tensor IR: each ATen op as a composition of the four primitives."""

from terrazzo.rules.torch_to_tensor import (
    activation,
    contraction,
    creation,
    folding,
    indexing,
    logic,
    loss,
    norm,
    pointwise,
    pooling,
    reduction,
    resample,
    scan,
    scatter,
    special,
    view,
)

RULES = (
    *pointwise.RULES,
    *activation.RULES,
    *logic.RULES,
    *creation.RULES,
    *view.RULES,
    *indexing.RULES,
    *scatter.RULES,
    *special.RULES,
    *reduction.RULES,
    *scan.RULES,
    *contraction.RULES,
    *norm.RULES,
    *pooling.RULES,
    *folding.RULES,
    *resample.RULES,
    *loss.RULES,
)
