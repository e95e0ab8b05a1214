"""Terrazzo: a compiler that turns PyTorch models into kernels through six small IRs."""

from terrazzo.api import compile
from terrazzo.errors import CompilerBug, Limitation, TerrazzoError, UserError
from terrazzo.options import Options

__all__ = ["CompilerBug", "Limitation", "Options", "TerrazzoError", "UserError", "compile"]
