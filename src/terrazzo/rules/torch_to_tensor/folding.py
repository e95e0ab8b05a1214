"""Windows laid over each other again: every place of the result adds up what the windows around it have for it.

A place looks for its windows, and not the windows for their places: the few taps that reach a place are a sum, of which
every term is one load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.ir.dialects import tensor as t
from terrazzo.ir.dialects.torch import Aten
from terrazzo.ir.expr import IntExpr
from terrazzo.rewrite.rule import Rule, need
from terrazzo.rules.torch_to_tensor.common import aten, normalize, result


def _reaching(size: int, step: int, dilation: int) -> int:
    """How many taps of a window may reach a place: where they lie side by side, every step-th."""
    return -(-size // step) if dilation == 1 else size


def _window(
    place: IntExpr, k: IntExpr, size: int, step: int, dilation: int, windows: IntExpr
) -> tuple[IntExpr, IntExpr, list[IntExpr]]:
    """Which window has its k-th tap of those that may reach a place there, and which tap that is; and what must be >= 0
    for it to be one.
    """
    if dilation == 1:
        tap, window = place % step + k * step, place // step - k
        return window, tap, [window, windows - 1 - window, size - 1 - tap]
    beyond = -(-dilation * (size - 1) // step)  # windows, so that nothing negative is divided
    far = place - k * dilation + beyond * step
    window = far // step - beyond
    return window, k, [window, windows - 1 - window, -1 * (far % step)]


def _pair(x: Any) -> tuple[int, int]:
    found = tuple(x) if isinstance(x, Sequence) else (x,)
    return (found[0], found[-1])


@aten("col2im.default")
def col2im(node: Aten, x: Any, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """[.., c·k·k, windows] to [.., c, h, w]: the sum of what the windows have for every pixel."""
    out = result(node)
    need(0 not in x.type.shape and 0 not in out.shape, "it is empty")
    (kh, kw), (dh, dw), (ph, pw), (sh, sw) = map(_pair, (kernel, dilation, padding, stride))
    rows, columns = (
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(out.shape[-2:], (ph, pw), (dh, dw), (kh, kw), (sh, sw), strict=True)
    )
    space = (*out.shape, _reaching(kh, sh, dh), _reaching(kw, sw, dw))
    *lead, channel, h, w, i, j = t.coordinates(space)
    row, up, below = _window(h + ph, i, kh, sh, dh, rows)
    column, left, beside = _window(w + pw, j, kw, sw, dw, columns)
    index = [*lead, (channel * kh + up) * kw + left, row * columns + column]
    taken = t.index_map(t.cast(x, out.dtype.compute), space, index, [*below, *beside])
    return t.cast(t.reduce("sum", taken, [len(space) - 2, len(space) - 1]), out.dtype)


@aten("unfold_backward.default")
def unfold_backward(node: Aten, grad: Any, shape: Sequence[int], dim: int, size: int, step: int) -> Any:
    """The gradient of windows along a dimension: the sum of what they have for every place."""
    out = result(node)
    need(0 not in grad.type.shape and 0 not in out.shape and out.shape, "it is empty")
    d = normalize(dim, len(out.shape))
    space = (*out.shape, _reaching(size, step, 1))
    *here, k = t.coordinates(space)
    window, tap, inside = _window(here[d], k, size, step, 1, grad.type.shape[d])
    index = [*(window if n == d else e for n, e in enumerate(here)), tap]
    taken = t.index_map(t.cast(grad, out.dtype.compute), space, index, inside)
    return t.cast(t.reduce("sum", taken, [len(space) - 1]), out.dtype)


RULES: tuple[Rule, ...] = (col2im, unfold_backward)
