"""Whether a library computes convolutions in TF32: it is asked."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from terrazzo.front.capture import capture
from terrazzo.rules.torch_to_tensor.in_tf32 import Rough
from terrazzo.run import digits
from terrazzo.run.cache import Cache

CPU = torch.device("cpu")
backward = torch.ops.aten.convolution_backward.default
IN_FLOAT32 = 3e-5


def gradient(which: int, g: Any, x: Any, w: Any) -> Any:
    """Of the image or of the weights."""
    mask = [which == 0, which == 1, False]
    return backward(g, x, w, [len(w)], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)[which]


def convolution(fn: Any, *args: Any) -> Any:
    """The op of a program, as a library is asked about it."""
    asked: list[Any] = []
    (op, *_) = capture(fn, args).program.results
    Rough(True, lambda op: asked.append(op) or ())(getattr(op, "x", op))
    return asked[0]


def meta(*shape: int, last: bool = False) -> Any:
    return torch.empty(shape, device="meta", memory_format=torch.channels_last if last else torch.contiguous_format)


def test_numbers_tell() -> None:
    """With all digits no sum of them is whole."""
    x, w, g = meta(2, 8, 64, 64), meta(16, 8, 3, 3), meta(2, 16, 64, 64)
    forward = convolution(lambda x, w: F.conv2d(x, w, padding=1), x, w)
    weights = convolution(partial(gradient, 1), g, x, w)
    assert digits.answered(forward, CPU) == (False,) and digits.answered(weights, CPU) == (False, False, False)


def test_rounded_numbers_tell_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As TF32 has them, all sums are whole. An op is asked with images as they lie in eager mode."""
    monkeypatch.setattr(digits, "JUST_ABOVE_ONE", 1.0)
    last = meta(2, 8, 64, 64, last=True)
    forward = convolution(lambda x, w: F.conv2d(torch.relu(x), w, padding=1), last, meta(16, 8, 3, 3))
    assert forward.children[0].type.element_strides == last.stride()
    assert digits.answered(forward, CPU) == (True,)
    given = meta(2, 16, 64, 64), meta(2, 8, 64, 64), meta(16, 8, 3, 3)
    images, weights = (digits.answered(convolution(partial(gradient, n), *given), CPU) for n in (0, 1))
    assert images == (True, False, False) and weights == (False, True, False)


def test_whoever_draws_next_draws_the_same() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    digits.answered(convolution(lambda x, w: F.conv2d(x, w), meta(2, 8, 64, 64), meta(16, 8, 3, 3)), CPU)
    assert torch.equal(torch.rand(4), wanted)


def test_it_is_asked_once_and_what_it_said_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A damaged answer is no answer; where there is too little memory nobody asks."""
    asked = []
    free = [1 << 40]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 1 << 40))
    monkeypatch.setattr(digits, "answered", lambda op, device: asked.append(op) or (True,))
    op = convolution(lambda x, w: F.conv2d(x, w), meta(2, 8, 64, 64), meta(16, 8, 3, 3))
    cache = Cache(tmp_path, 1 << 30)
    first = digits.CuDNN(0, cache)
    assert [first.rough(op), first.rough(op), digits.CuDNN(0, cache).rough(op)] == [(True,)] * 3 and len(asked) == 1
    other = convolution(lambda x, w: F.conv2d(x, w, stride=2), meta(8, 8, 64, 64), meta(16, 8, 3, 3))
    free[0] = 1 << 10
    assert first.rough(other) == () and len(asked) == 1
    monkeypatch.setattr(Cache, "get", lambda self, key, suffix: SimpleNamespace(read_bytes=lambda: b"no json"))
    free[0] = 1 << 40
    assert digits.CuDNN(0, cache).rough(op) == (True,) and len(asked) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("taps", (1, 3, 7))
@pytest.mark.parametrize("channels", ((3, 64), (16, 128), (64, 64), (256, 48)))
@pytest.mark.parametrize("transposed", (False, True))
def test_it_says_what_it_does(channels: tuple[int, int], taps: int, transposed: bool) -> None:
    """In TF32 it is off by some ten thousandths from what it is with the switch turned."""
    conv = F.conv_transpose2d if transposed else F.conv2d
    x = torch.randn(64, channels[0], 56, 56, device="cuda")
    w = torch.randn(*(channels if transposed else reversed(channels)), taps, taps, device="cuda")
    with torch.backends.cudnn.flags(allow_tf32=True):
        (told,) = digits.answered(convolution(lambda x, w: conv(x, w, stride=2), x, w), x.device)
        rough = conv(x, w, stride=2)
    with torch.backends.cudnn.flags(allow_tf32=False):
        exact = conv(x, w, stride=2).double()
    assert told == (float(((rough - exact).square().mean() / exact.square().mean()).sqrt()) > IN_FLOAT32)
