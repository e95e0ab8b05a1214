"""Softmax between two products: one kernel, forward and backward, under any mask."""
