"""Terrazzo: a compiler that turns PyTorch models into kernels through six small IRs."""
