"""Terrazzo: a compiler that turns PyTorch models into kernels through six small IRs."""

from terrazzo.api import compile  # noqa: A004 - the name users expect
from terrazzo.errors import CompilerBug, Limitation, TerrazzoError, UserError
from terrazzo.front.registered import register
from terrazzo.options import Options

__all__ = ["CompilerBug", "Limitation", "Options", "TerrazzoError", "UserError", "compile"]

register()
