"""Tensor IR to Loop IR: every primitive becomes a kernel of its own."""

from terrazzo.rules.tensor_to_loop import lift

RULES = lift.RULES
