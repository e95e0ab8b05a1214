"""Torch IR to Tensor IR: each ATen op as a composition of the four primitives."""

from terrazzo.rules.torch_to_tensor import pointwise

RULES = (*pointwise.RULES,)
